"""DenseStream as a joint codec: indices and values as dense blocks (``stream``), packed by ``stream_format``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, JointCodec, RngKey, joint_codecs
from hvd_deepreduce.codecs.joint.stream import Stream, coded_gap, plain_gap
from hvd_deepreduce.codecs.joint.stream_format import (
    CODED,
    PLAIN,
    ValueName,
    pack,
    packed_values,
    unpack,
    unpack_supports,
    value_codec,
)
from hvd_deepreduce.ops import deferred, densestream


@joint_codecs.register
class DenseStream(JointCodec):
    """Neighbouring elements form a block with one start and one length.

    Source: Li, Chao, Liao, Lv, "DenseStream: a novel data representation for gradient sparsification in distributed
    synchronous SGD algorithms", section III.A. Lossless with ``value: raw``. The support is every element that a block
    covers, zeros included. Section: one packed stream (``stream_format``).

    Plain blocks cost 64 bits each and 32 bits (float64: 64) per element inside, zeros included. A block may contain up
    to ceil(2 ceil(log2 N / 8) / K) consecutive zeros of K bytes each. Where every block has one element this is 96 bits
    per kept element, 1.5 times the key-value format; for long blocks it approaches half of the key-value format.

    Coded blocks (ours) have Rice codes for the distances between blocks and for the lengths, about 9 bits per block at
    a density of 1%. A block contains only as many consecutive zeros as cost no more than another block.

    Attributes:
        coded: Rice code for starts and lengths (ours); off: the paper's plain blocks.
        value: how values are encoded: ``raw``, ``float16``, ``bfloat16`` or ``qsgd``.
        bits: bits per value with ``qsgd``, 2 to 8.
    """

    name = "densestream"
    id = 4
    coded: bool = True
    value: ValueName = "raw"
    bits: int = Field(8, ge=2, le=8)

    def unused_settings(self) -> Iterator[tuple[str, str, str]]:
        if self.value != "qsgd":
            yield "bits", "value", f"value is {self.value!r}, and only 'qsgd' has a number of bits"

    def gap(self, numel: int, dtype: np.dtype[Any]) -> int:
        """The largest number of consecutive zeros in a block, for a vector ``[numel]`` of ``dtype``."""
        bits = self.value_bits(dtype)
        return coded_gap(bits) if self.coded else plain_gap(numel, bits)

    def value_bits(self, dtype: np.dtype[Any]) -> int:
        """The bits of one value of a vector of ``dtype``, without the norms of ``qsgd``."""
        return {"raw": 8 * dtype.itemsize, "qsgd": self.bits}.get(self.value, 16)

    @property
    def form(self) -> int:
        """The form that ``stream_format.pack`` writes."""
        return CODED if self.coded else PLAIN

    def encode(self, indices: U32 | None, values: Floats, numel: int, key: RngKey) -> tuple[U8, U32 | None]:
        if indices is None:
            return self._pack(Stream.from_dense(values), key), None
        stream = Stream.from_indices(numel, indices, values, self.gap(numel, values.dtype))
        return self._pack(stream, key), stream.indices()

    def encode_from(
        self, at: Callable[[U32], Floats], indices: U32 | None, values: Floats, numel: int, key: RngKey
    ) -> tuple[U8, U32 | None]:
        """``encode``; the true values of all elements inside the blocks are sent, which costs what zeros do."""
        if indices is None:
            return self.encode(None, values, numel, key)
        starts, lengths, support = densestream.cover(indices, self.gap(numel, values.dtype))
        stream = Stream(numel, starts, lengths, values if support is indices else at(support))
        return self._pack(stream, key), support

    def _pack(self, stream: Stream, key: RngKey) -> U8:
        return pack(stream, self.form, value_codec(self.value, self.bits), key, finite=True)

    @staticmethod
    def decode(
        section: U8, numel: int, count: int, dense: bool, dtype: np.dtype[Any], key: RngKey
    ) -> tuple[U32 | None, Floats]:
        stream = unpack(section, numel, dtype, key)
        if stream.values.size != count:
            raise ValueError(f"its blocks hold {stream.values.size} elements, and its container announces {count}")
        deferred.check_finite(stream.values)
        return None if dense else stream.indices(), stream.values

    @classmethod
    def decode_own(cls, section: U8, numel: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        return packed_values(section, dtype)

    @classmethod
    def decode_many(
        cls, sections: Sequence[U8], numel: int, counts: Sequence[int], dtype: np.dtype[Any], key: RngKey
    ) -> list[tuple[U32 | None, Floats]]:
        decoded = unpack_supports(sections, numel, counts, dtype, key)
        return super().decode_many(sections, numel, counts, dtype, key) if decoded is None else decoded
