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


def rice(gaps: list[int], b: int) -> bytes:
    """A Rice section with the layout of kernels/rice/rice.cpp."""
    lows = "".join(f"{gap % 2**b:0{b}b}"[::-1] if b else "" for gap in gaps)
    highs = "".join("0" * (gap >> b) + "1" for gap in gaps)

    def whole(bits: str) -> bytes:
        bits += "0" * (-len(bits) % 8)
        return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))

    return bytes([b]) + whole(lows) + whole(highs)
