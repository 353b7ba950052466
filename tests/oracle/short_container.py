"""The bytes of a container of version 2, field by field, from docs/container.md."""

import struct
import zlib
from typing import NamedTuple

from tests.oracle.bitpack import width_of
from tests.oracle.checksum import checksum

ORDERED, ORDER, SPARSE, UNCOMPRESSED = 15, 16, 32, 64


class Implied(NamedTuple):
    """What sender and receiver know, in the order in which the checksum covers it."""

    digest: int
    seed: int
    parameter: int
    step: int
    numel: int
    dtype: int
    """1 float32, 2 float64."""


def varint(number: int) -> bytes:
    groups = [number % 128]
    while number := number // 128:
        groups.append(number % 128)
    return bytes([*(group + 128 for group in groups[:-1]), groups[-1]])


def sizes_of_order(count: int) -> int:
    return (count * width_of(count) + 7) // 8


def write(form: int, numbers: list[int], sections: list[bytes], implied: Implied) -> bytes:
    """The numbers are those that the form announces: count, index bytes, value bytes."""
    return repaired(bytes(4) + bytes([form]) + b"".join(map(varint, numbers)) + b"".join(sections), implied)


def repaired(data: bytes, implied: Implied) -> bytes:
    """The bytes with the checksum that makes them a whole container."""
    known = zlib.crc32(struct.pack("<6I", *implied))
    return struct.pack("<I", (checksum(data, 0) + known) % 2**32) + data[4:]


def read(data: bytes, implied: Implied) -> dict:
    """The fields and sections of one whole container."""
    found = {"checksum": struct.unpack_from("<I", data)[0], "form": data[4], "count": implied.numel}
    at = 5

    def number() -> int:
        nonlocal at
        value, shift = 0, 1
        while True:
            byte = data[at]
            at += 1
            value += byte % 128 * shift
            shift *= 128
            if byte < 128:
                return value

    form = found["form"]
    if form & SPARSE:
        found["count"] = number()
    index_bytes = number() if form & 15 else 0
    value_bytes = implied.numel * 4 * implied.dtype if form & UNCOMPRESSED else number()
    order_bytes = sizes_of_order(found["count"]) if form & ORDER else 0
    for name, size in (("indices", index_bytes), ("values", value_bytes), ("order", order_bytes)):
        found[name] = data[at : at + size]
        at += size
    assert at == len(data)
    return found
