"""Gradients that a framework gives as rows of a matrix, as of an embedding, and containers among integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_deepreduce.codecs.interfaces import U8, Floats
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.wire.standalone import refusal

Integers = npt.NDArray[np.signedinteger[Any]]


def flattened(rows: Integers, values: Floats, numel: int) -> SparseTensor:
    """All elements of the rows, in the flattened matrix. Rows that are there several times are added up.

    Args:
        rows: numbers of rows, ``[n]``, in any order.
        values: float32 or float64 ``[n, block]``.
        numel: elements of the matrix, a multiple of ``block``, which is not 0.

    Raises:
        ValueError: a row is not in the matrix.
    """
    block = values.shape[1]
    if rows.size and not (0 <= int(rows.min()) and int(rows.max()) < numel // block):
        raise ValueError(
            f"a sparse gradient has the rows {int(rows.min())} to {int(rows.max())}, and its parameter has "
            f"{numel // block} rows: look up rows that exist"
        )
    if (rows[1:] <= rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        rows, values = rows[order], values[order]
        first = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
        rows, values = rows[first], np.add.reduceat(values, first, axis=0)
    indices = rows.astype(np.int64)[:, None] * block + np.arange(block)
    return SparseTensor(numel, indices.reshape(-1).astype(np.uint32), np.ascontiguousarray(values).reshape(-1))


def in_rows(total: SparseTensor, block: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """The rows, of ``block`` elements, in which a flattened matrix has elements: sorted numbers, and ``[n, block]``."""
    elements, places = np.divmod(total.indices.astype(np.int64), block)
    rows, at = np.unique(elements, return_inverse=True)
    values = np.zeros((rows.size, block), total.values.dtype)
    values[at.reshape(-1), places] = total.values
    return rows, values


def as_integers(packed: U8, dtype: np.dtype[Any]) -> Integers:
    """A container as int32 or int64 ``[n]``: the number of its bytes, then the bytes, filled up with zeros."""
    out = np.zeros(1 + -(-packed.size // dtype.itemsize), dtype)
    out[0] = packed.size
    out[1:].view(np.uint8)[: packed.size] = packed
    return out


def from_integers(gathered: Integers, ranks: int) -> U8:
    """The containers of all ranks, without gaps, of what ``as_integers`` returned on each.

    Raises:
        ContainerError: there are not as many bytes as the numbers say; names the rank.
    """
    parts, begin = [], 0
    for rank in range(ranks):
        if begin >= gathered.size:
            raise refusal(rank, "nothing of it came: use one release and one config on all ranks")
        count = int(gathered[begin])
        end = begin + 1 - (-count // gathered.itemsize)
        if count < 0 or end > gathered.size:
            raise refusal(rank, f"it should have {count} bytes, and {gathered[begin + 1:].nbytes} came: it was altered")
        parts.append(gathered[begin + 1 : end].view(np.uint8)[:count])
        begin = end
    if begin != gathered.size:
        raise refusal(ranks - 1, f"{gathered[begin:].nbytes} bytes follow it: it was altered")
    return np.concatenate(parts)
