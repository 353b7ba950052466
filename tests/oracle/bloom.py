"""A Bloom filter of indices and DeepReduce's policies (section 4, algorithm 1, remark 2), element by element.

The hash functions are those of kernels/bloom/bloom.h, said again in plain integers. A filter is a set of bit numbers.
"""

import math

from tests.oracle.philox import WORD, fmix32, philox4x32
from tests.oracle.randomk import indices_of

Key = tuple[int, int, int]
STREAM_POLICY = 4
POLICIES = ["naive", "p0", "p1", "p2", "leftmost", "middle", "rightmost"]


def remark_2(count: int, fpr: float) -> tuple[float, float]:
    """m in bits, and k, both before rounding."""
    return -count * math.log(fpr) / math.log(2) ** 2, -math.log(fpr) / math.log(2)


def size_and_hashes(count: int, fpr: float) -> tuple[int, int]:
    """The number of bytes of the filter without its header, and k."""
    m, k = remark_2(count, fpr)
    return max(8, math.ceil(0.999 * m / 8)), max(1, round(k))


def bits_of(index: int, key: Key, k: int, size: int) -> list[int]:
    """The k bits of one index: h_1 .. h_k."""
    seed, parameter, step = key
    salt, other, _, _ = philox4x32((seed, parameter), (size, step, STREAM_POLICY, 1))
    first = fmix32(index // 64 ^ salt)
    second = fmix32(first ^ other) | 1
    bits = []
    for j in range(k):
        probe = fmix32((first + j * second) % WORD)
        window = 8 * (probe * size // WORD)
        bits.append((window + (index + probe) % 64) % (8 * size))
    return bits


def positives(filled: set[int], numel: int, key: Key, k: int, size: int) -> list[int]:
    return [index for index in range(numel) if filled.issuperset(bits_of(index, key, k, size))]


def algorithm_1(found: list[int], count: int, key: Key, k: int, size: int) -> list[int]:
    sets: dict[int, list[int]] = {}
    for index in found:
        for bit in set(bits_of(index, key, k, size)):
            sets.setdefault(bit, []).append(index)
    order = sorted(sets, key=lambda bit: (min(len(sets[bit]), 255), bit))
    chosen = {sets[bit][0] for bit in order if len(sets[bit]) == 1}
    left = [[index for index in sets[bit] if index not in chosen] for bit in order]
    seed, parameter, step = key
    draws = 0
    while len(chosen) < count:
        for items in left:
            while items and len(chosen) < count:
                word = philox4x32((seed, parameter), (draws // 4, step, STREAM_POLICY, 0))[draws % 4]
                draws += 1
                place = word * len(items) // WORD
                index, last = items[place], items.pop()
                if place < len(items):
                    items[place] = last
                if index not in chosen:
                    chosen.add(index)
                    break
    return sorted(chosen)


def choose(policy: str, found: list[int], count: int, key: Key, k: int, size: int) -> list[int]:
    if policy == "p0":
        return found
    if policy == "p1":
        dropped = set(indices_of(len(found), len(found) - count, *key))
        return [index for place, index in enumerate(found) if place not in dropped]
    if policy == "p2":
        return algorithm_1(found, count, key, k, size)
    start = {"naive": 0, "leftmost": 0, "middle": (len(found) - count) // 2, "rightmost": len(found) - count}[policy]
    return found[start : start + count]


def encode(indices: list[int], numel: int, fpr: float, policy: str, key: Key, most: int = 4) -> tuple[bytes, list[int]]:
    """The section and the support."""
    if not indices:
        return b"", []
    largest, k = size_and_hashes(len(indices), fpr)
    tries = 1 + min(most - 1, largest // 100) if numel <= 65536 else 1
    best: tuple[int, set[int], list[int]] | None = None
    for size in range(largest, largest - tries, -1):
        filled = {bit for index in indices for bit in bits_of(index, key, k, size)}
        found = positives(filled, numel, key, k, size)
        if best is None or len(found) < len(best[2]):
            best = size, filled, found
    assert best is not None
    size, filled, found = best
    section = bytearray([POLICIES.index(policy) * 32 + k - 1]) + bytearray(size)
    for bit in filled:
        section[1 + bit // 8] |= 1 << bit % 8
    return bytes(section), choose(policy, found, len(indices), key, k, size)
