"""From libFuzzer's bytes to inputs: most are valid inputs with a few changes, which libFuzzer alone would not find."""

from __future__ import annotations

import random
from collections.abc import Sequence

INTERESTING = [0, 1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 1023, 1024, 2047, 2048, 32767, 32768, 65535, 65536,
               2**24, 2**31 - 1, 2**31, 2**32 - 1]  # fmt: skip
"""For fields of 32 bits."""
HEADER = 64
"""Bytes at the start in which fields of 32 bits are set."""


ADDS = 128
"""From this ``value`` on, a field is not set: ``value - 192`` is added to it."""
EDGES = [*(INTERESTING.index(value) for value in (0, 1, 2**31, 2**32 - 1)), *(192 + by for by in (-8, -4, -1, 1, 4))]


def edges(right: Sequence[bytes], most: int) -> list[bytes]:
    """libFuzzer's bytes for valid inputs in which one field at the start is a little different, or at the edge of its
    range; for small inputs, and ``most`` of them, chosen at random."""
    found = [
        b"\1" + number.to_bytes(2, "little") + (place | 2 << 22).to_bytes(3, "little") + bytes([value])
        for number, one in enumerate(right)
        if len(one) <= 1024
        for place in range(0, min(len(one), HEADER), 4)
        for value in EDGES
    ]
    return random.Random(1).sample(found, min(most, len(found)))


def changed(data: bytes, right: Sequence[bytes], most: int = 65536) -> bytes:
    """The input that libFuzzer's bytes describe.

    If the first byte is even, the input is the bytes after it. If it is odd, the next two choose one of the valid
    inputs in ``right``, and each four bytes after that are a change of it::

        | place, 22 bits | kind, 2 bits | value |

    The kinds: 0 sets a byte; 1 flips its bit ``value % 8``; 2 changes a field of 32 bits at the start, or cuts off all
    from the place on if ``value`` is 255; 3 repeats the ``value`` bytes before the place, or takes them away if
    ``value`` is odd.
    """
    if len(data) < 3 or not data[0] & 1 or not right:
        return data[1:]
    out = bytearray(right[int.from_bytes(data[1:3], "little") % len(right)])
    for at in range(3, len(data) - 3, 4):
        word = int.from_bytes(data[at : at + 3], "little")
        kind, value = word >> 22, data[at + 3]
        where = (word & 0x3FFFFF) % (len(out) + 1)
        if kind < 2:
            if where < len(out):
                out[where] = value if kind == 0 else out[where] ^ 1 << value % 8
        elif kind == 2 and value == 255:
            del out[where:]
        elif kind == 2:
            where = where % HEADER // 4 * 4
            if where + 4 <= len(out):
                field = int.from_bytes(out[where : where + 4], "little") + value - 192
                if value < ADDS:
                    field = INTERESTING[value % len(INTERESTING)]
                out[where : where + 4] = (field % 2**32).to_bytes(4, "little")
        elif value & 1:
            del out[max(0, where - value) : where]
        elif len(out) < most:
            out[where:where] = out[max(0, where - value) : where]
    return bytes(out)
