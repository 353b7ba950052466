"""Memory that the next step needs again: the heap of the C library must keep what is freed, and large messages are kept
here."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from functools import cache

import numpy as np

from hvd_deepreduce.ops.types import U8

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""
_LARGEST_OF_HEAP = 32 << 20
"""Bytes of the largest blocks that glibc may take from its heap, and the most that it chooses by itself."""
_CHOSEN = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"
"""Environment variables by which users choose themselves."""


@cache
def keep_freed() -> None:
    """Lets glibc's heap keep freed memory, once for the process.

    Gradients whose bucket has been encoded are freed together. If they were at the end of the heap, glibc would give
    their memory back, and the next backward pass would fetch it again page by page. For a model of 25 million elements
    that takes as long as all else in a step. The most memory that the process needs does not change. Nothing happens
    under another C library, or where the environment has settings for glibc's heap.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _CHOSEN):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Either one ends glibc's own adjustment of both.
        mallopt(_MMAP_THRESHOLD, _LARGEST_OF_HEAP)
        mallopt(_TRIM_THRESHOLD, -1)


LARGE = 1 << 20
"""Bytes from which on memory is kept."""
_free: dict[int, U8] = {}
"""Blocks that no array has, by id."""


def room(size: int) -> U8:
    """uint8 ``[size]``, not initialized, on the host. A later call of about this size takes large memory again, as soon
    as nothing refers to the array or to a view of it.

    ``keep_freed`` does not do that: what threads other than the first allocate is on heaps of their own, which glibc
    gives back as a whole, and each step fetches it again page by page.
    """
    if size < LARGE:
        return np.empty(size, np.uint8)
    fitting = [block for block in _free.copy().values() if size <= block.size <= size + size // 2]
    block = _free.pop(id(min(fitting, key=len)), None) if fitting else None
    if block is None:
        _free.clear()  # they are of other sizes than what comes now
        block = np.empty(size + size // 8, np.uint8)
    # Views of this array keep it alive. Those of a view of the block would keep the block.
    array: U8 = np.frombuffer(block.data, np.uint8, size)
    weakref.finalize(array, _free.__setitem__, id(block), block).atexit = False
    return array
