"""What the CUDA implementations of the entropy coders share: kernels/entropy/."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_deepreduce.ops.deferred import counter
from hvd_deepreduce.ops.device import cleared, for_each, launch
from hvd_deepreduce.ops.types import Device, u32, u64

LONGEST = 12
"""The most bits of a code word, as in kernels/huffman/huffman.h."""
CHUNK_BITS = 2048
"""Bits of a chunk, as in kernels/entropy/chunks.cuh."""


def code_table(xp: Any) -> Device:
    """A table for a decoder of code words, of zeros: uint16 ``[2^LONGEST]``."""
    return cleared(xp, 1 << LONGEST, np.uint16)


def count_chunks(section: Device) -> int:
    """The number of chunks of a section that is read in parallel."""
    return -(-8 * int(section.size) // CHUNK_BITS)


def join_chunks(xp: Any, exits: Device, entries: int, chunks: int) -> tuple[Device, Device]:
    """Finds where each chunk begins; kernels/entropy/chunks.cuh explains it.

    Args:
        xp: the array module.
        exits: uint64 ``[chunks * entries]``, written by ``walk_all``.
        entries: of a chunk.
        chunks: the number of chunks.

    Returns:
        starts: for ``walk_again``, uint64 ``[chunks]``.
        words: the number of words of the string, uint64 ``[1]``.
    """
    starts, words = cleared(xp, chunks, u64), counter(xp)
    launch(xp, "entropy/entropy", "join_chunks", 1, exits, u32(entries), chunks, starts, words)
    return starts, words


def histogram(xp: Any, symbols: Device) -> Device:
    """How often each symbol occurs: uint64 ``[256]``."""
    counts = cleared(xp, 256, u64)
    for_each(xp, "entropy/entropy", "histogram", symbols.size, symbols, symbols.size, counts)
    return counts
