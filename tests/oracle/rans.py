"""Interleaved static rANS with 12-bit shares, and the code of gaps that uses it."""

from itertools import pairwise

from tests.oracle.bitpack import field, table_of, to_bytes
from tests.oracle.rice import gaps


def precision(count: int) -> int:
    return min(12, max(5, count.bit_length()))


def shares(symbols: list[int]) -> dict[int, int]:
    """The shares of 2^p, rounded to nearest. Until they sum to 2^p, the largest (the first if several) changes by 1."""
    total = 2 ** precision(len(symbols))
    out = {}
    for s in sorted(set(symbols)):
        out[s] = max(1, (symbols.count(s) * total + len(symbols) // 2) // len(symbols))
    while sum(out.values()) != total:
        largest = max(out, key=lambda s: (out[s], -s))
        out[largest] += 1 if sum(out.values()) < total else -1
    return out


def table(of: dict[int, int]) -> bytes:
    lengths = {symbol: share.bit_length() for symbol, share in of.items()}
    return table_of({s: field(n, 4) + field(of[s] - 2 ** (n - 1), n - 1) for s, n in lengths.items()})


def encode(symbols: list[int]) -> bytes:
    if not symbols:
        return b""
    sent = shares(symbols)
    share = {s: f * 2 ** (12 - precision(len(symbols))) for s, f in sent.items()}
    lanes = 1 if len(symbols) < 2048 else 4 if len(symbols) < 32768 else 32
    if len(symbols) < 65536:
        return table(sent) + part(symbols, share, lanes)
    parts = len(symbols) // 32768
    begins = [len(symbols) * j // parts // 32 * 32 for j in range(parts)] + [len(symbols)]
    coded = [part(symbols[i:j], share, lanes) for i, j in pairwise(begins)]
    sizes = b"".join(((len(one) - 4 * lanes) // 2).to_bytes(4, "little") for one in coded[:-1])
    return bytes([15]) + table(sent) + sizes + b"".join(coded)


def part(symbols: list[int], share: dict[int, int], lanes: int) -> bytes:
    start = {s: sum(f for other, f in share.items() if other < s) for s in share}
    states = [2**16] * lanes
    words: list[int] = []
    for i in range(len(symbols) - 1, -1, -1):
        s, x = symbols[i], states[i % lanes]
        if x >= share[s] * 2**20:
            words.append(x % 2**16)
            x //= 2**16
        states[i % lanes] = x // share[s] * 4096 + x % share[s] + start[s]
    out = b"".join(x.to_bytes(4, "little") for x in states)
    return out + b"".join(word.to_bytes(2, "little") for word in reversed(words))


def encode_indices(indices: list[int]) -> bytes:
    t = 1 if len(indices) < 512 else 2 if len(indices) < 8192 else 3
    tokens, lows = [], []
    for gap in gaps(indices):
        e = max(0, gap.bit_length() - 1 - t)
        tokens.append(gap if gap < 2**t else (e + 1) * 2**t + (gap >> e) - 2**t)
        lows += field(gap % 2**e, e)
    return encode(tokens) + to_bytes(lows)
