"""Blocks of consecutive elements: their norms, their indices, and which have an index.

A tensor of ``numel`` elements has ``ceil(numel / block)`` blocks of ``block`` elements. The last block ends with the
tensor.
"""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.bitmap import encode, find_ones
from hvd_deepreduce.ops.deferred import read_counter, residual_guard
from hvd_deepreduce.ops.device import array_module, for_each, suffix
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import kernels_by_dtype
from hvd_deepreduce.ops.types import U32, Device, Floats, f64, u32

_norms = kernels_by_dtype("block_norms", "v", "ppUUipi")


@operation()
def norms(dense: Floats, gradient: Floats | None, block: int, l2: bool, threads: int = 1) -> Floats:
    """Adds the gradient to ``dense`` in place, as ``arrays.add``, and returns the norm of each block.

    Args:
        dense: ``[numel]``.
        gradient: ``[numel]`` of the same dtype, or ``None``.
        block: elements of a block, at least 1.
        l2: True for sums of squares (the l2 norms squared), False for sums of magnitudes.
        threads: of the host.

    Returns:
        float64 ``[ceil(numel / block)]``, finite: larger sums become the largest float64.
    """
    sums = np.empty(-(-dense.size // block), np.float64)
    _norms[dense.dtype](dense, gradient, dense.size, block, l2, sums, threads)
    return sums


@norms.cuda
def _(dense: Device, gradient: Device | None, block: int, l2: bool, threads: int = 1) -> Device:
    xp = array_module(dense)
    sums = xp.empty(-(-dense.size // block), f64)
    for_each(
        xp, "blocks/blocks", f"block_norms_{suffix(dense.dtype)}", sums.size, dense, gradient, dense.size,
        residual_guard(), block, u32(l2), sums, tile=8,
    )  # fmt: skip
    return sums


@operation()
def indices(blocks: U32, block: int, numel: int) -> U32:
    """The indices of all elements of the given blocks.

    On a GPU, if the tensor's last block is shorter, the host waits for the device to learn whether it is a given one.

    Args:
        blocks: numbers of blocks, strictly increasing and below ``ceil(numel / block)``; this is not checked.
        block: elements of a block.
        numel: elements of the tensor.
    """
    # In 64 bits, since the last block may end beyond 2^32.
    of_blocks = np.add.outer(blocks.astype(np.int64) * block, np.arange(min(block, numel))).ravel()
    return of_blocks[: np.searchsorted(of_blocks, numel)].astype(np.uint32)


@indices.cuda
def _(blocks: Device, block: int, numel: int) -> Device:
    xp, count, block = array_module(blocks), blocks.size, min(block, max(numel, 1))
    size = count * block
    if count and numel % block:
        size += min(0, numel - (int(blocks[count - 1 :].get()[0]) + 1) * block)
    of_blocks = xp.empty(size, u32)
    for_each(xp, "blocks/blocks", "block_indices", size, blocks, block, size, of_blocks)
    return of_blocks


@operation()
def numbers(indices: U32, block: int, total: int) -> U32:
    """The numbers of the blocks that have an index, strictly increasing.

    On a GPU, the host waits for their count.

    Args:
        indices: strictly increasing; this is not checked.
        block: elements of a block.
        total: blocks of the tensor.
    """
    of_each = indices // u32(block)
    return of_each[np.flatnonzero(np.diff(of_each, prepend=np.int64(-1)))]


@numbers.cuda
def _(indices: Device, block: int, total: int) -> Device:
    xp = array_module(indices)
    of_each, places = xp.empty(indices.size, u32), xp.empty(min(indices.size, total), u32)
    for_each(xp, "blocks/blocks", "block_numbers", indices.size, indices, indices.size, block, of_each)
    return places[: read_counter(find_ones(xp, encode(of_each, total), places))]
