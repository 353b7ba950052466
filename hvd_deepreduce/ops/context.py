"""Indices and codes of values by an adaptive coder, on the host; kernels/context/context.cpp draws the section."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.library import check, kernel
from hvd_deepreduce.ops.types import U8, U32

_bound = kernel("context_bound", "U", "UUu")
_encode = kernel("context_encode", "I", "pUUpup")
_decode = kernel("context_decode", "I", "pUUUupp")


def encode(indices: U32, numel: int, codes: U8 | None = None, bits: int = 0) -> U8:
    """The section of at least one index.

    Args:
        indices: uint32, strictly increasing, below ``numel``; a NumPy array, as all arrays here.
        codes: of the values, uint8, as many as indices; ``None``: there are none.
        bits: of a code, 1 to 8; 0 without codes.

    Raises:
        MemoryError: the host has too little memory.
    """
    out = np.empty(_bound(indices.size, numel, bits), np.uint8)
    size = _encode(indices, indices.size, numel, codes, bits, out)
    if size < 0:
        raise MemoryError(f"not enough memory to encode {indices.size} indices")
    return out[:size].copy()


def decode(section: U8, numel: int, count: int, bits: int = 0) -> tuple[U32, U8]:
    """The ``count`` indices of a section, at least one, and the codes of their values (none, if ``bits`` is 0).

    Raises:
        ValueError: the section is damaged, or holds another number of indices, or one that is not below ``numel``.
    """
    indices, codes = np.empty(count, np.uint32), np.empty(count if bits else 0, np.uint8)
    check(_decode(section, section.size, count, numel, bits, indices, codes))
    return indices, codes
