"""What deflate and zstd share: the values' bytes, in order or by significance, and back.

The compressors run on the host; the kept elements of a tensor on a GPU are copied there.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, ValueCodec
from hvd_deepreduce.ops import arrays, deferred


class BytesCodec(ValueCodec, ABC):
    """A lossless compressor of the values' little-endian bytes. With ``shuffle``, the first bytes of all values come
    first, then the second ones, and so on. On a GPU, the host waits for the device.

    Section: ``| shuffled u8, 0 or 1 | compressed bytes |``.
    """

    level: int
    shuffle: bool = Field(True, strict=True)

    @abstractmethod
    def compressed(self, runs: U8) -> bytes:
        """The compressed bytes of uint8 ``[runs, bytes]``: runs of bytes of one significance, or one run of all."""

    @staticmethod
    @abstractmethod
    def unpacked(data: bytes, size: int) -> bytes:
        """The inverse of ``compressed``, for ``size`` bytes. Raises ``ValueError``."""

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        runs = np.ascontiguousarray(arrays.to_host(values)).view(np.uint8)[None]
        if self.shuffle:
            runs = np.ascontiguousarray(runs.reshape(values.size, values.itemsize).T)
        section = bytes([self.shuffle]) + self.compressed(runs)
        return arrays.move_like(np.frombuffer(section, np.uint8), values), None

    @classmethod
    def decode(cls, section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        data, size = arrays.to_host(section), count * dtype.itemsize
        if data.size == 0 or data[0] > 1:
            raise ValueError("the first byte of a section of compressed bytes must be 0 (not shuffled) or 1 (shuffled)")
        unpacked = cls.unpacked(data[1:].tobytes(), size)
        if len(unpacked) != size:
            raise ValueError(f"{count} {dtype} values are {size} bytes; these unpack to {len(unpacked)}")
        raw = np.frombuffer(unpacked, np.uint8)
        if data[0]:
            raw = np.ascontiguousarray(raw.reshape(dtype.itemsize, count).T).reshape(-1)
        values: Floats = raw.view(dtype)
        deferred.check_finite(values)
        return arrays.move_like(values, section)
