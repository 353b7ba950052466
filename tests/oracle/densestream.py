"""The DenseStream representation of the paper, one element at a time."""

from __future__ import annotations

import math
import struct

import numpy as np


def gap(numel: int, value_bytes: float) -> int:
    """The largest number of consecutive zeros in a block: ceil(2 ceil(log2 N / 8) / K)."""
    index_bytes = max(1, math.ceil(math.log2(max(numel, 2)) / 8))
    return math.ceil(2 * index_bytes / value_bytes)


def blocks(kept: dict[int, float], most: int) -> list[tuple[int, list[float]]]:
    """(start, values) of each dense block."""
    found: list[tuple[int, list[float]]] = []
    for index in sorted(kept):
        if found:
            start, values = found[-1]
            zeros = index - (start + len(values))
            if zeros <= most:
                values.extend([0.0] * zeros + [kept[index]])
                continue
        found.append((index, [kept[index]]))
    return found


def plain(kept: dict[int, float], numel: int, most: int, dtype: type) -> bytes:
    """The bytes of a plain stream with raw values."""
    found = blocks(kept, most)
    starts = np.array([start for start, _ in found], "<u4").tobytes()
    lengths = np.array([len(values) for _, values in found], "<u4").tobytes()
    values = np.array([value for _, block in found for value in block], dtype).tobytes()
    count = sum(len(block) for _, block in found)
    header = struct.pack(
        "<BBBBIIIQQQ", 0, {4: 1, 8: 2}[np.dtype(dtype).itemsize], 1, 0, numel, len(found), count,
        len(starts), len(lengths), len(values),
    )  # fmt: skip
    return header + b"".join(part + b"\0" * (-len(part) % 8) for part in (starts, lengths, values))


def largest(part: dict[int, float], most: int) -> dict[int, float]:
    """The ``most`` elements of largest magnitude that are not 0, of equal ones those with the lower index."""
    nonzero = sorted((-abs(value), index) for index, value in part.items() if value)
    return {index: part[index] for _, index in nonzero[:most]}


def allreduce(
    accumulated: list[np.ndarray], kept: list[np.ndarray], bounds: list[int], slices: int, quotas: list[int]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The sum by recursive halving with partial sums that are cut, and the residual of each rank.

    Args:
        accumulated: of each rank, the sum of its gradient and its residual.
        kept: the indices that each rank sends.
        bounds: slice i is from ``bounds[i]`` to ``bounds[i + 1]``; rank r's region has ``slices`` of them.
        quotas: how many elements the sum of each slice may have. A partial sum of several regions may have twice as
            many as they together.
    """
    ranks = len(kept)
    total = np.zeros_like(accumulated[0])
    residuals = [vector.copy() for vector in accumulated]
    for rank, indices in enumerate(kept):
        residuals[rank][indices] = 0
    for slot in range(slices):
        owner_of = {
            index: rank
            for rank in range(ranks)
            for index in range(bounds[rank * slices + slot], bounds[rank * slices + slot + 1])
        }
        holds = [{int(i): accumulated[rank][i] for i in kept[rank] if int(i) in owner_of} for rank in range(ranks)]

        def cut(rank: int, part: dict[int, float], most: int) -> dict[int, float]:
            chosen = largest(part, most) if len([1 for value in part.values() if value]) > most else part
            for index in part.keys() - chosen.keys():
                residuals[rank][index] += part[index]
            return chosen

        def halve(low: int, high: int, slot: int = slot, owner_of=owner_of, holds=holds, cut=cut) -> None:
            if high - low == 1:
                region = cut(low, holds[low], quotas[low * slices + slot])
                for index, value in region.items():
                    total[index] = value
                return
            middle = low + (high - low + 1) // 2
            halves = range(low, middle), range(middle, high)
            sent = {}
            for rank in range(low, high):
                other = halves[rank < middle]
                part = {index: value for index, value in holds[rank].items() if owner_of[index] in other}
                sent[rank] = cut(rank, part, 2 * sum(quotas[owner * slices + slot] for owner in other))
                holds[rank] = {index: value for index, value in holds[rank].items() if owner_of[index] not in other}
            for rank in range(low, high):
                # The odd rank of the left half sends to the last rank of the right half.
                partner = min(rank - low + middle, high - 1) if rank < middle else rank - middle + low
                for index, value in sent[rank].items():
                    holds[partner][index] = holds[partner].get(index, 0) + value
            halve(low, middle)
            halve(middle, high)

        halve(0, ranks)
    return total, residuals
