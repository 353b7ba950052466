"""A rank's bundle: the containers of several slices of a vector, one behind the other. And the sum of all ranks'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvd_deepreduce.codecs.interfaces import U8, Floats, RngKey
from hvd_deepreduce.config.error_feedback import DGC
from hvd_deepreduce.ops import arrays, deferred
from hvd_deepreduce.pipeline.fused import Fused
from hvd_deepreduce.pipeline.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire.decoding import decode_parts


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
    gradient: Floats,
    residual: Floats | None,
    velocity: Floats | None,
    slices: Sequence[Slice],
    ranks: int,
    finite: bool,
    feeds_back: Callable[[Pipeline], bool],
) -> U8:
    """The bundle. The arguments are as for ``Pipeline.encode``, of the whole vector.

    Args:
        feeds_back: whether a pipeline's slices have a residual.
    """
    containers = [
        pipeline.encode(
            gradient[i:j],
            residual[i:j] if residual is not None and feeds_back(pipeline) else None,
            key,
            2,
            velocity[i:j] if velocity is not None and isinstance(pipeline.config.memory, DGC) else None,
            ranks,
            finite,
        )
        for pipeline, (i, j), key in slices
    ]
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
    with deferred.reading(out):
        gathered = arrays.move_like(gathered, out)
        fused = _fused(out, slices)
        if fused is not None:
            parts, keys = [one.part for one in slices], [one.key for one in slices]
            own = fused.sum_into(out, gathered, ranks, parts, keys, slices[0].pipeline.shared.digest, scale)
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


def _fused(like: Floats, slices: Sequence[Slice]) -> Fused | None:
    """What decodes all slices at once, where there is such."""
    fused = slices[0].pipeline.fused
    if fused is None or not fused.takes(like) or any(one.pipeline.fused is not fused for one in slices):
        return None
    return fused
