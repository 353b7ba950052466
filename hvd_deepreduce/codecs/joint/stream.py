"""``Stream``: DenseStream's representation of a sparse vector as dense blocks.

Li, Chao, Liao, Lv, "DenseStream: a novel data representation for gradient sparsification in distributed synchronous
SGD algorithms", section III.A. A block is a start index, a length, and the values of all elements from its first to its
last kept element. Short runs of zeros inside a block are stored, because a new block would cost more::

    vector   0 x x x 0 0 0 x 0 x 0 0 0 x 0 0 x 0 0 0 x x
    blocks     [---]       [---]       [-----]       [-]
    starts     1           7           13            20
    lengths    3           3           4             2
    values     x x x       x 0 x       x 0 0 x       x x

This is the paper's figure 2, with gap = 2. The values are one array, block after block.
``gap`` is the largest number of consecutive zeros that a block may contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U32, Floats
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.ops import arrays, densestream, stream_exchange
from hvd_deepreduce.ops.types import U64

CODED_BLOCK_BITS = 10
"""About what a coded block of one element costs at a density of 1%, without its value: the Rice codes of its start
and its length."""


def plain_gap(numel: int, value_bits: int) -> int:
    """The gap of plain blocks: ceil(2 ceil(log2 N / 8) / K), DenseStream section III.A.

    Args:
        numel: N, the number of elements of the vector.
        value_bits: the bits of one value; K is their number of bytes.
    """
    index_bytes = max(1, -(-(numel - 1).bit_length() // 8))
    return -(-2 * index_bytes * 8 // value_bits)


def coded_gap(value_bits: int) -> int:
    """The gap of coded blocks: the number of zeros that cost no more than one more block."""
    return CODED_BLOCK_BITS // value_bits


@dataclass(frozen=True)
class Stream:
    """A sparse vector as dense blocks.

    Attributes:
        numel: the number of elements of the vector, zeros included.
        starts: uint32 ``[blocks]``: the index of each block's first element. Blocks are sorted and do not overlap.
        lengths: uint32 ``[blocks]``: the number of elements of each block, at least 1.
        values: float32 or float64 ``[sum(lengths)]``: the blocks' elements, block after block, with the zeros inside.
    """

    numel: int
    starts: U32
    lengths: U32
    values: Floats

    @classmethod
    def from_sparse(cls, tensor: SparseTensor, gap: int) -> Stream:
        """The blocks of a sparse tensor; more than ``gap`` consecutive zeros end a block."""
        indices, values = np.ascontiguousarray(tensor.indices), np.ascontiguousarray(tensor.values)
        return cls.from_indices(tensor.numel, indices, values, gap)

    @classmethod
    def from_indices(cls, numel: int, indices: U32, values: Floats, gap: int) -> Stream:
        """As ``from_sparse``, for contiguous ``indices`` that are known to be sorted and unique, and their values."""
        return cls(numel, *densestream.encode(indices, values, gap))

    @classmethod
    def from_pieces(cls, tensor: SparseTensor, pieces: U64, gap: int) -> Stream:
        """As ``from_sparse``, for the elements ``pieces[p, 0]`` to ``pieces[p, 1]`` of the tensor's, uint64 ``[p, 2]``,
        whose indices and values are contiguous. A piece ends its last block."""
        return cls(tensor.numel, *stream_exchange.encode_pieces(tensor.indices, tensor.values, pieces, gap))

    @classmethod
    def from_dense(cls, dense: Floats) -> Stream:
        """All elements of a vector ``[numel]`` as one block."""
        blocks = min(dense.size, 1)
        starts, lengths = (arrays.move_like(np.full(blocks, value, np.uint32), dense) for value in (0, dense.size))
        return cls(dense.size, starts, lengths, dense)

    @classmethod
    def empty(cls, numel: int, dtype: np.dtype[Any]) -> Stream:
        """A vector of zeros: no block."""
        return cls(numel, np.empty(0, np.uint32), np.empty(0, np.uint32), np.empty(0, dtype))

    @classmethod
    def from_pairs(cls, tensor: SparseTensor) -> Stream:
        """The key-value form: every kept element is a block of its own."""
        ones = np.ones(tensor.indices.size, np.uint32)
        return cls(tensor.numel, np.ascontiguousarray(tensor.indices), ones, np.ascontiguousarray(tensor.values))

    def merge(self, other: Stream, gap: int) -> Stream:
        """The sum of two streams of the same vector, both made with this ``gap``.

        Blocks with at most ``gap`` elements between them become one. The result has exactly the blocks of the union of
        the two supports, because all gaps inside a block are short already, and a block begins and ends with an element
        of its support."""
        if not other.starts.size:
            return self
        if not self.starts.size:
            return other
        ours, theirs = (self.starts, self.lengths, self.values), (other.starts, other.lengths, other.values)
        return Stream(self.numel, *densestream.merge(ours, theirs, gap))

    def split(self, cuts: np.ndarray[Any, np.dtype[np.uint64]]) -> list[Stream]:
        """The parts of the vector between the ``cuts``: ``cuts.size + 1`` streams, whose values are views.

        Args:
            cuts: uint64, sorted: the index of the first element of every part but the first.
        """
        starts, lengths, block_at, value_at = densestream.split(self.starts, self.lengths, cuts)
        b, v = block_at.tolist(), value_at.tolist()
        return [
            Stream(self.numel, starts[b[p] : b[p + 1]], lengths[b[p] : b[p + 1]], self.values[v[p] : v[p + 1]])
            for p in range(cuts.size + 1)
        ]

    @staticmethod
    def concatenate(parts: list[Stream]) -> Stream:
        """One stream from streams of the same vector; all blocks of a part precede those of the next part."""
        if len(parts) == 1:
            return parts[0]
        return Stream(
            parts[0].numel,
            np.concatenate([part.starts for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.values for part in parts]),
        )

    def indices(self) -> U32:
        """uint32 ``[values.size]``: the index of each element of ``values``."""
        if self.values.size == self.starts.size:
            return self.starts
        indices: U32 = densestream.indices(self.starts, self.lengths, self.values.size)
        return indices

    def to_sparse(self) -> SparseTensor:
        """The nonzero elements."""
        return SparseTensor(self.numel, *densestream.nonzero(self.starts, self.lengths, self.values))

    def write_dense(self, begin: int, out: Floats) -> None:
        """Writes the elements ``begin`` to ``begin + out.size``, zeros included, to ``out``.

        Every block must be within this range."""
        densestream.to_dense(self.starts, self.lengths, self.values, begin, out)


def covered_indices(indices: U32, gap: int) -> U32:
    """The indices of all elements inside the blocks of ``indices``, the zeros between them included.

    A plain stream of the covered elements has the same blocks, and therefore the same size, as a stream of ``indices``
    alone. With ``fill``, the values that the residual has there are sent in place of zeros.

    Args:
        indices: uint32, sorted and unique.
    """
    covered: U32 = densestream.cover(indices, gap)[2]
    return covered
