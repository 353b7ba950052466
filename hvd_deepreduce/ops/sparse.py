"""Sparse vectors on the host: their sum, their elements, and accumulation at their indices; kernels/sparse/sparse.cpp.

Nothing here makes or reads a dense vector but ``accumulate_at``, which touches one at a gradient's indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_deepreduce.ops.library import address, kernels_by_dtype
from hvd_deepreduce.ops.types import U32, Floats

_accumulate_at = kernels_by_dtype("accumulate_at", "v", "ppUp")
_sparse_sum = kernels_by_dtype("sparse_sum", "U", "pppidpp")


def accumulate_at(dense: Floats, indices: U32, values: Floats) -> Floats:
    """``dense[indices] += values``, in place, limited to finite numbers as ``arrays.add``; returns the sums.

    Args:
        dense: float32 or float64 ``[numel]``.
        indices: distinct, below numel; this is not checked.
        values: of the dtype of ``dense``; unchanged.
    """
    sums = values.copy()
    _accumulate_at[dense.dtype](dense, indices, indices.size, sums)
    return sums


def at(indices: U32, values: Floats, wanted: U32) -> Floats:
    """The elements at ``wanted`` of the sparse vector of ``values`` at ``indices``, which are strictly increasing."""
    if not indices.size:
        return np.zeros(wanted.size, values.dtype)
    places = np.minimum(np.searchsorted(indices, wanted), indices.size - 1)
    found: Floats = np.where(indices[places] == wanted, values[places], values.dtype.type(0))
    return found


def total(parts: Sequence[tuple[U32, Floats]], dtype: np.dtype[Any], scale: float = 1.0) -> tuple[U32, Floats]:
    """``scale`` * the sum of sparse vectors: the union of their supports, zeros of the sum included, and its values.

    Each value is added up in the order of the parts, from 0, and scaled, so it is the one of ``arrays.sum_into``.

    Args:
        parts: (indices, values); the indices are strictly increasing, which is not checked. The values are cast.
        dtype: of the sum, float32 or float64.
        scale: in ``dtype``.
    """
    cast = [(indices, np.ascontiguousarray(values, dtype)) for indices, values in parts]
    all_indices, all_values, counts = (
        np.array(numbers, np.uint64)
        for numbers in (
            [address(indices) for indices, _ in cast],
            [address(values) for _, values in cast],
            [values.size for _, values in cast],
        )
    )
    room = int(counts.sum())
    indices, values = np.empty(room, np.uint32), np.empty(room, dtype)
    size = _sparse_sum[np.dtype(dtype)](all_indices, all_values, counts, len(cast), scale, indices, values)
    return indices[:size], values[:size]
