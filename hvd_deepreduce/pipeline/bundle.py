"""A rank's bundle: the containers of several slices of a vector, one behind the other. And the sum of all ranks'."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, Floats, RngKey
from hvd_deepreduce.ops import arrays, deferred
from hvd_deepreduce.ops.pieces import Pieces
from hvd_deepreduce.pipeline.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire.decoding import decode_parts

_AT_ONCE = nullcontext()


class Slice(NamedTuple):
    """What has a container of its own.

    Attributes:
        pipeline: its encoder and decoder.
        part: (begin, end) of its elements in the vector.
        key: of its parameter, this step and this rank.
    """

    pipeline: Pipeline
    part: tuple[int, int]
    key: RngKey


def encode(
    gradient: Floats | Pieces,
    residual: Floats | None,
    velocity: Floats | None,
    slices: Sequence[Slice],
    ranks: int,
    finite: bool,
    into: Floats | None = None,
) -> U8:
    """The bundle. The arguments are as for ``Pipeline.encode``, of the whole vector; slices whose config has no error
    feedback use no residual. With ``into``, all slices have it."""
    containers = []
    for pipeline, (i, j), key in slices:
        of_slice = gradient.part(i, j) if isinstance(gradient, Pieces) else gradient[i:j]
        kept = residual[i:j] if residual is not None and pipeline.config.error_feedback else None
        moving = velocity[i:j] if velocity is not None and pipeline.config.memory.has_velocity else None
        next_kept = None if into is None else into[i:j]
        containers.append(pipeline.encode(of_slice, kept, key, 2, moving, ranks, finite, None, next_kept))
    return containers[0] if len(containers) == 1 else arrays.concatenate(containers)


def sum_into(out: Floats, gathered: U8, ranks: int, slices: Sequence[Slice], scale: float) -> int:
    """Writes ``scale * (sum over all ranks)`` of each slice to ``out``.

    Args:
        out: float32 or float64, contiguous; elements outside the slices stay as they are.
        gathered: the bundles of all ranks, in rank order, on any device.

    Returns:
        The bytes of this rank's bundle.

    Raises:
        ContainerError: a container cannot be decoded, or is of another tensor, parameter, step or config; names its
            rank. ``out`` is unchanged then.
    """
    on_host = type(out) is np.ndarray and type(gathered) is np.ndarray
    with _AT_ONCE if on_host else deferred.reading(out):
        if not on_host:
            gathered = arrays.move_like(gathered, out)
        own = _sum_fused(out, gathered, ranks, slices, scale)
        if own is not None:
            return own
        expected = [pipeline.expected(end - begin, out.dtype, key) for pipeline, (begin, end), key in slices]
        containers = deferred.run_deferred(gathered, lambda: frame.split(gathered, ranks, expected))
        rank = slices[0].key.rank
        own = sum(frame.size(of[rank], one.shared) for of, one in zip(containers, expected, strict=True))
        # All are decoded before anything is written.
        sums = deferred.run_deferred(
            out,
            lambda: [
                decode_parts(of_all_ranks, one.numel) for one, of_all_ranks in zip(expected, containers, strict=True)
            ],
        )
        for (pipeline, (begin, end), _), decoded in zip(slices, sums, strict=True):
            arrays.sum_into(out[begin:end], decoded, scale, pipeline.threads)
    return own


def _sum_fused(out: Floats, gathered: U8, ranks: int, slices: Sequence[Slice], scale: float) -> int | None:
    """As ``sum_into``, by one native call for all slices; None: there is none for them, or for these containers."""
    pipelines, parts, keys = zip(*slices, strict=True)
    first: Pipeline = pipelines[0]
    fused = first.fused
    if fused is None or not fused.takes(out) or pipelines.count(first) < len(pipelines):
        return None
    return fused.sum_into(out, gathered, ranks, parts, keys, first.shared.digest, scale)
