"""The heap of the C library, which must keep what is freed for the next step."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

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
