"""TODO index_sizes."""

from __future__ import annotations

from ctypes import c_uint64

from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, kernel
from hvd_deepreduce.ops.types import U32, Device

_index_sizes = kernel("index_sizes", "v", "pUU*")


@operation()
def index_sizes(indices: U32, numel: int) -> list[int]:
    """Bytes of the rice, rle, delta, elias_fano and rans sections of one index or more; estimates beyond 8192.

    On a GPU: runs on the host, which looks at no more than 8192 indices.
    """
    sizes = (c_uint64 * 5)()
    _index_sizes(address(indices), indices.size, numel, sizes)
    return list(sizes)


@index_sizes.cuda
def _(indices: Device, numel: int) -> list[int]:
    return index_sizes.host(indices.get(), numel)
