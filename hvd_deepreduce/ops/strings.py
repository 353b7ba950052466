"""TODO strings."""

from __future__ import annotations

from typing import Any

from hvd_deepreduce.ops.deferred import counter
from hvd_deepreduce.ops.device import grid, launch, u32, u64
from hvd_deepreduce.ops.types import Device


def count_chunks(section: Device) -> int:
    """How many chunks of 2048 bits a section has."""
    return -(-8 * int(section.size) // 2048)


def join_chunks(xp: Any, exits: Device, entries: int, chunks: int) -> tuple[Device, Device]:
    """Where each chunk of a bit string begins, and how many words the string has; see kernels/entropy/entropy.cuh."""
    starts, words = xp.zeros(chunks, u64), counter(xp)
    launch(xp, "entropy/codes", "walk_join", 1, exits, u32(entries), u64(chunks), starts, words)
    return starts, words


def histogram(xp: Any, symbols: Device) -> Device:
    """How often each of the 256 symbols occurs, uint64 ``[256]``."""
    counts = xp.zeros(256, u64)
    launch(xp, "entropy/codes", "histogram", grid(xp, symbols.size), symbols, u64(symbols.size), counts)
    return counts
