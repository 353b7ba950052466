"""The velocity of deep gradient compression: momentum on each rank, before the residual (pipeline/residuals.py)."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import arrays, blocks
from hvd_deepreduce.ops.deferred import residual_guard
from hvd_deepreduce.ops.device import array_module, for_each, grid, launch, suffix
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import kernels_by_dtype
from hvd_deepreduce.ops.types import U32, Device, Floats, u32, u64

_correct = kernels_by_dtype("momentum", "v", "ppUddippi")
_BLOCK = 4096
"""Elements whose squares are summed on the device; the host sums the rest."""


def clip_scale(gradient: Floats, most: float, threads: int = 1) -> float:
    """The factor, at most 1, that makes the l2 norm of the gradient at most ``most``. On a GPU, the host waits."""
    norm = float(arrays.to_host(blocks.norms(gradient, None, _BLOCK, True, threads)).sum()) ** 0.5
    return most / norm if norm > most else 1.0


@operation()
def correct(
    velocity: Floats, gradient: Floats, factor: float, scale: float, nesterov: bool, threads: int = 1
) -> tuple[Floats, Floats]:
    """The next velocity, and what the residual gets in place of the gradient.

    With g = scale * gradient, the next velocity is u = factor * velocity + g, and the residual gets u; with
    ``nesterov``, u = factor * (velocity + g), and it gets u + g. Sums beyond the largest finite number become that
    number. Elements of which the gradient is not finite are the gradient's in both.

    Args:
        velocity, gradient: float32 or float64 ``[numel]``, of one dtype; unchanged.
        factor, scale: in that dtype.
        threads: of the host.

    Returns:
        Both, ``[numel]``; without ``nesterov`` they are one array.
    """
    corrected = np.empty_like(gradient)
    sent = np.empty_like(gradient) if nesterov else corrected
    _correct[gradient.dtype](velocity, gradient, gradient.size, factor, scale, nesterov, corrected, sent, threads)
    return corrected, sent


@correct.cuda
def _(
    velocity: Device, gradient: Device, factor: float, scale: float, nesterov: bool, threads: int = 1
) -> tuple[Device, Device]:
    xp, n, real = array_module(gradient), gradient.size, gradient.dtype.type
    corrected = xp.empty(n, gradient.dtype)
    sent = xp.empty(n, gradient.dtype) if nesterov else corrected
    for_each(
        xp, "momentum/momentum", f"momentum_{suffix(gradient.dtype)}", n, velocity, gradient, n, real(factor),
        real(scale), u32(nesterov), corrected, sent,
    )  # fmt: skip
    return corrected, sent


@operation()
def keep(velocity: Floats, corrected: Floats, sent: U32 | None) -> None:
    """``velocity = corrected``, in place, with zeros for the elements that were sent; for ``None``, all of them.

    On a GPU, within ``deferred.encoding``, ``velocity`` stays as it is if the encoded gradient is not finite.

    Args:
        sent: below ``velocity.size``; this is not checked.
    """
    velocity[...] = 0 if sent is None else corrected
    if sent is not None:
        velocity[sent] = 0


@keep.cuda
def _(velocity: Device, corrected: Device, sent: Device | None) -> None:
    xp, n, guard = array_module(velocity), velocity.size, residual_guard()
    kept, ending = None if sent is None else corrected, suffix(velocity.dtype)
    for_each(xp, "momentum/momentum", f"keep_{ending}", n, velocity, kept, n, guard)
    if sent is not None and sent.size:
        at_once, count = grid(xp, sent.size), u64(sent.size)
        launch(xp, "momentum/momentum", f"clear_{ending}", at_once, velocity, sent, count, guard)
