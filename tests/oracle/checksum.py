"""The checksum of a container: the sum of its hashed words, without the word that is the checksum itself."""

import struct

from tests.oracle.philox import WORD, fmix32


def checksum(data: bytes, kept: int = 3) -> int:
    """Zeros fill the last eight bytes; word ``kept`` is left out."""
    data += bytes(-len(data) % 8)
    words = struct.unpack(f"<{len(data) // 4}I", data)
    return sum(fmix32(w ^ i * 0x9E3779B1 % WORD) for i, w in enumerate(words) if i != kept) % WORD
