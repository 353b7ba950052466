"""The checksum of a container: the sum of its hashed words, without word 3, which is the checksum itself."""

import struct

from tests.oracle.philox import WORD, fmix32


def checksum(data: bytes) -> int:
    words = struct.unpack(f"<{len(data) // 4}I", data)
    return sum(fmix32(w ^ i * 0x9E3779B1 % WORD) for i, w in enumerate(words) if i != 3) % WORD
