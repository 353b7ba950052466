"""Length-limited canonical Huffman codes: the coder of symbols, and DeepReduce's code of the bytes of indices."""

from fractions import Fraction

from tests.oracle.bitpack import field, table_of, to_bytes

LONGEST = 12


def lengths(counts: dict[int, int]) -> dict[int, int]:
    """The coin collector's problem (Larmore and Hirschberg 1990). Each symbol has coins of the widths 2^-1 .. 2^-12,
    whose price is its count. The cheapest coins whose widths sum to n - 1 are the code."""
    if len(counts) == 1:
        return dict.fromkeys(counts, 0)
    coins = sorted((count, symbol) for symbol, count in counts.items())
    leaves = [(count, 0, [symbol]) for count, symbol in coins]
    items: list = []
    for _ in range(LONGEST):
        pairs = [(a[0] + b[0], 1, a[2] + b[2]) for a, b in zip(items[::2], items[1::2], strict=False)]
        items = sorted(leaves + pairs, key=lambda item: item[:2])
    chosen = [symbol for item in items[: 2 * len(counts) - 2] for symbol in item[2]]
    return {symbol: chosen.count(symbol) for symbol in counts}


def words(of: dict[int, int]) -> dict[int, list[int]]:
    """The code words, assigned in increasing order, the shorter ones first. The first bit of a word is its highest."""
    out: dict[int, list[int]] = {}
    at = Fraction(0)
    for symbol, length in sorted(of.items(), key=lambda item: (item[1], item[0])):
        out[symbol] = field(int(at * 2**length), length)[::-1]
        at += Fraction(1, 2**length)
    return out


def table(of: dict[int, int]) -> bytes:
    """One nibble per length; 0 and n - 1 for a run of n <= 16 symbols that do not occur; 15 for the only symbol."""
    return table_of({symbol: field(15 if len(of) == 1 else length, 4) for symbol, length in of.items()})


def encode(symbols: list[int]) -> bytes:
    if not symbols:
        return b""
    of = lengths({s: symbols.count(s) for s in set(symbols)})
    word = words(of)
    if len(of) == 1:
        return table(of)
    part = len(symbols) if len(symbols) < 1024 else -(-len(symbols) // 4)
    parts = [symbols[at : at + part] for at in range(0, len(symbols), part)]
    streams = [to_bytes([bit for s in one for bit in word[s]]) for one in parts]
    sizes = b"".join(len(stream).to_bytes(4, "little") for stream in streams[:-1])
    return table(of) + sizes + b"".join(streams)


def encode_indices(indices: list[int], numel: int) -> bytes:
    counts: dict[int, int] = {}
    for index in range(numel):
        for byte in index.to_bytes(4, "little"):
            counts[byte] = counts.get(byte, 0) + 1
    word = words(lengths(counts)) if counts else {}
    return to_bytes([bit for index in indices for byte in index.to_bytes(4, "little") for bit in word[byte]])
