"""The sizes of the index codecs' sections, from which ``index.auto`` chooses; kernels/index_sizes/index_sizes.cpp."""

from __future__ import annotations

from ctypes import c_uint64

from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import kernel
from hvd_deepreduce.ops.types import U32, Device

_index_sizes = kernel("index_sizes", "v", "pUU*")


@operation()
def estimate(indices: U32, numel: int) -> list[int]:
    """Bytes of the rice, rle, delta, rice_blocks, elias_fano and rans sections of at least one index.

    Up to 8192 indices all but rans's are exact; beyond, all but elias_fano's are estimated from 8192 indices.

    On a GPU, the indices are copied to the host, which computes the sizes.

    Args:
        indices: strictly increasing, below ``numel``.
        numel: elements of the tensor.
    """
    sizes = (c_uint64 * 6)()
    _index_sizes(indices, indices.size, numel, sizes)
    return list(sizes)


@estimate.cuda
def _(indices: Device, numel: int) -> list[int]:
    return estimate.host(indices.get(), numel)
