"""SKCompress's delta-binary code (sections 5.1 and 5.2): encodes in all eight ways and takes the smallest result."""

from tests.oracle import huffman
from tests.oracle.bitpack import field, to_bytes


def ways(keys: list[int]) -> list[bytes]:
    deltas = [key - previous for previous, key in zip([0, *keys], keys, strict=False)]
    out = []
    for coded in (False, True):
        for log2_m in (1, 2, 3, 4):
            step = 32 // 2**log2_m
            prefixes = [max(1, -(-delta.bit_length() // step)) - 1 for delta in deltas]
            head = bytes([log2_m + 16 * coded])
            word = {prefix: field(prefix, log2_m) for prefix in prefixes}
            if coded:
                of = huffman.lengths({prefix: prefixes.count(prefix) for prefix in set(prefixes)})
                word = huffman.words(of)
                head += huffman.table(of)
            body = [bit for d, p in zip(deltas, prefixes, strict=True) for bit in field(d, step * (p + 1))]
            out.append(head + to_bytes([bit for prefix in prefixes for bit in word[prefix]]) + to_bytes(body))
    return out


def encode(keys: list[int]) -> bytes:
    return min(ways(keys), key=len) if keys else b""
