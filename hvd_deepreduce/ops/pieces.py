"""A vector in several pieces of the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_deepreduce.ops import arrays
from hvd_deepreduce.ops.library import address
from hvd_deepreduce.ops.types import U64, Floats


class Pieces:
    """Arrays, one behind the other in a vector. They are given by their addresses, which a framework knows without
    making arrays of its tensors.

    Args:
        addresses: of each array, which is contiguous.
        sizes: their numbers of elements.
        dtype: of all, float32 or float64.
        kept: keeps the arrays' memory alive.

    Attributes:
        table: uint64 ``[2, arrays]``, the addresses, and where each array ends in the vector.
        size: elements of the vector.
    """

    __slots__ = ("dtype", "kept", "size", "table")

    def __init__(
        self, addresses: Sequence[int], sizes: Sequence[int], dtype: np.dtype[Any], kept: object = None
    ) -> None:
        self.table = np.array((addresses, np.cumsum(sizes)), np.uint64)
        self.size: int = int(self.table[1, -1])
        self.dtype, self.kept = dtype, kept

    def part(self, begin: int, end: int) -> Pieces:
        """The elements [begin, end) of the vector."""
        if end - begin == self.size:
            return self
        if begin == end:
            return Pieces([0], [0], self.dtype)
        addresses, ends = self.table.astype(np.int64)
        first, last = (int(np.searchsorted(ends, at, "right")) for at in (begin, end - 1))
        begins = np.append(0, ends)[first : last + 1]
        skipped = np.maximum(begin - begins, 0)
        sizes = np.minimum(ends[first : last + 1], end) - begins - skipped
        where = addresses[first : last + 1] + skipped * self.dtype.itemsize
        return Pieces(where.tolist(), sizes.tolist(), self.dtype, self.kept)

    def joined(self) -> Floats:
        """A copy in one array."""
        vector: Floats = np.empty(self.size, self.dtype)
        self.copy_to(vector)
        return vector

    def copy_to(self, vector: Floats) -> bool:
        """Copies them into this one, which is contiguous and as large. Returns whether they are finite."""
        to, begin, copies = address(vector), 0, []
        for source, end in self.table.T.tolist():
            copies.append((to + begin * self.dtype.itemsize, source, end - begin))
            begin = end
        return arrays.copy_finite_many(copies, self.dtype)


def table_of(vector: Floats | Pieces) -> U64:
    """As ``Pieces.table``; a contiguous array is one piece."""
    return vector.table if isinstance(vector, Pieces) else np.array(((address(vector),), (vector.size,)), np.uint64)
