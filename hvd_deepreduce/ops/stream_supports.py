"""The indices that the blocks of several packed DenseStreams cover, on a GPU, for the sum of many ranks' containers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_deepreduce.ops import rice
from hvd_deepreduce.ops.deferred import check_later
from hvd_deepreduce.ops.densestream import NOWHERE
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, grid, launch, suffix
from hvd_deepreduce.ops.sections import Job
from hvd_deepreduce.ops.types import Device, i32, u32, u64

_FILE = "densestream/densestream"


class Section(NamedTuple):
    """What the host knows of a packed stream (``joint.stream_format``) of at least one block, and of a whole vector.

    Attributes:
        a, b, values: its parts: where each begins in the section, and its bytes.
        coded: whether a and b are coded.
        raw: whether the values are, so that they may be read before they are decoded.
        blocks, elements: their numbers.
    """

    a: tuple[int, int]
    b: tuple[int, int]
    values: tuple[int, int]
    coded: bool
    raw: bool
    blocks: int
    elements: int


def supports(
    data: Device, places: Sequence[int], streams: Sequence[Section], numel: int, dtype: np.dtype[Any]
) -> list[Device]:
    """On a GPU: the indices of the elements that the blocks of several streams cover, uint32 ``[count]`` each, in one
    set of launches. Checks the blocks, the zeros between the parts, and that raw values are finite; the check may be
    deferred.

    Args:
        data: uint8; all streams are in it, at multiples of 8 bytes.
        places: where their sections begin.
        streams: all coded, or none.
        numel, dtype: of the vectors.

    Raises:
        ValueError: an encoder cannot have written a section.
    """
    xp, coded = array_module(data), streams[0].coded
    table, words, row, first = [], 1, 0, 0  # the first word has the error
    jobs = []
    for at, one in zip(places, streams, strict=True):
        (a, b, values), ends = ([at + begin for begin, _ in one[:3]], [at + begin + size for begin, size in one[:3]])
        values = values if one.raw else NOWHERE
        table.append((a, b, one.blocks, numel, one.elements, values, row, first, words, *ends))
        jobs += [Job(a, one.a[1], numel, one.blocks), Job(b, one.b[1], one.elements, one.blocks)]
        row, first, words = row + 2 * one.blocks, first + one.elements, words + 2 + -(-one.blocks // THREADS)
    there, scratch = xp.asarray(np.array(table, u64).reshape(-1)), cleared(xp, words, u64)
    error, indices = scratch[:1].view(i32)[:1], xp.empty(first, u32)
    if coded:
        rows = rice.decode_all(data, jobs)
    else:
        rows = xp.empty(row, u32)
        each = grid(xp, max(one.blocks for one in streams))
        launch(xp, _FILE, "stream_rows", each * len(streams), data, there, each, scratch, rows, error)
    each = grid(xp, max(one.elements for one in streams))
    launch(xp, _FILE, f"stream_supports_{suffix(dtype)}", each * len(streams), data, there, each, rows, indices, error)
    check_later(error)
    return [indices[entry[7] : entry[7] + one.elements] for entry, one in zip(table, streams, strict=True)]
