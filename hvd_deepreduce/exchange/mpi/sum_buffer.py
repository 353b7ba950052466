"""Where an allreduce collects its result, region by region. Needs no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.ops import stream_exchange
from hvd_deepreduce.ops.dispatch import on_host


class SumBuffer:
    """Collects the regions of a sum: in a dense array, or as streams that become one sparse tensor.

    Args:
        numel, dtype: of the vector.
        dense: whether the result is a dense array.
        out: the dense array to write to, ``dtype`` ``[numel]``; None: a new one. One on a GPU is written by ``result``:
            the streams are added up there, and nothing else is copied.
        scale: a factor for all values.

    Attributes:
        hashes: of the regions of a dense result (``ops.hash``), taken as they were written, by their first element.
            They do not depend on where ``out`` is, but for the bits of a NaN that is a sum.
    """

    def __init__(self, numel: int, dtype: np.dtype[Any], dense: bool, out: Floats | None, scale: float = 1.0) -> None:
        self.scale = scale
        self.numel, self.dtype = numel, dtype
        self.out = np.empty(numel, dtype) if dense and out is None else out
        self.regions: list[tuple[int, Stream]] = []
        self._waiting: list[tuple[int, int, list[Stream]]] = []  # (begin, end, streams) for a GPU
        self.hashes: dict[int, int] = {}

    def write_region(self, streams: Sequence[Stream], begin: int, end: int, gap: int = 0) -> None:
        """Writes the elements ``begin`` to ``end``: the sum of these streams, added in their order. To be called once
        for each region of the vector.

        Args:
            gap: of the streams, if there are several."""
        if self.out is not None:
            if begin < end and not on_host(self.out):
                self._waiting.append((begin, end, list(streams)))
            elif begin < end:
                parts = [(stream.starts, stream.lengths, stream.values) for stream in streams]
                self.hashes[begin] = stream_exchange.sum_to_dense(parts, begin, self.scale, self.out[begin:end])
            return
        stream = streams[0]
        for other in streams[1:]:
            stream = stream.merge(other, gap)
        if self.scale != 1:
            stream = Stream(self.numel, stream.starts, stream.lengths, stream.values * self.dtype.type(self.scale))
        if stream.starts.size:
            self.regions.append((begin, stream))

    def result(self) -> SparseTensor | Floats:
        """The sum: the dense array, or the elements that are not zero."""
        if self.out is not None:
            if self._waiting:
                self._write()
            return self.out
        if not self.regions:
            return SparseTensor(self.numel, np.empty(0, np.uint32), np.empty(0, self.dtype))
        return Stream.concatenate([stream for _, stream in sorted(self.regions, key=lambda part: part[0])]).to_sparse()

    def _write(self) -> None:
        """Writes all regions to a GPU at once: first the first streams of all, then the second ones are added."""
        self._waiting.sort(key=lambda region: region[0])
        layers = []
        for number in range(max(len(streams) for _, _, streams in self._waiting)):
            layer = Stream.concatenate([of[number] for _, _, of in self._waiting if number < len(of)])
            layers.append((layer.starts, layer.lengths, layer.values))
        parts = [(begin, end) for begin, end, _ in self._waiting]
        hashes = stream_exchange.sums_to_device(layers, parts, self.scale, self.out)
        self.hashes.update(zip([begin for begin, _ in parts], hashes, strict=True))
        self._waiting.clear()
