"""What deflate and zstd share: the values' bytes, in order or by significance, and back.

The compressors run on the host; the kept elements of a tensor on a GPU are copied there.
"""

from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, Floats
from hvd_deepreduce.ops import arrays, deferred


def to_bytes(values: Floats, shuffle: bool) -> U8:
    """The values' little-endian bytes; with ``shuffle``, the first byte of each value, then the second of each, and so
    on.

    On a GPU, the host waits for the device.
    """
    data = np.ascontiguousarray(arrays.to_host(values)).view(np.uint8)
    return np.ascontiguousarray(data.reshape(values.size, values.itemsize).T).reshape(-1) if shuffle else data


def section_of(compressed: bytes, shuffle: bool, like: Floats) -> U8:
    """The section ``| shuffled u8, 0 or 1 | compressed bytes |``, on the device of ``like``."""
    section: U8 = arrays.move_like(np.frombuffer(bytes([shuffle]) + compressed, np.uint8), like)
    return section


def open_section(section: U8) -> tuple[bool, bytes]:
    """Whether the bytes are shuffled, and the compressed bytes. On a GPU, the host waits for the device.

    Raises:
        ValueError: the section's first byte is missing, or is neither 0 nor 1.
    """
    data = arrays.to_host(section)
    if data.size == 0 or data[0] > 1:
        raise ValueError("the first byte of a section of compressed bytes must be 0 (not shuffled) or 1 (shuffled)")
    return bool(data[0]), data[1:].tobytes()


def from_bytes(data: bytes, count: int, dtype: np.dtype[Any], shuffle: bool, like: U8) -> Floats:
    """The values of ``to_bytes``, on the device of ``like``.

    Raises:
        ValueError: the number of bytes is wrong, or a value is not finite.
    """
    if len(data) != count * dtype.itemsize:
        raise ValueError(f"{count} {dtype} values are {count * dtype.itemsize} bytes; these unpack to {len(data)}")
    raw = np.frombuffer(data, np.uint8)
    if shuffle:
        raw = np.ascontiguousarray(raw.reshape(dtype.itemsize, count).T).reshape(-1)
    values: Floats = raw.view(dtype)
    deferred.check_finite(values)
    values = arrays.move_like(values, like)
    return values
