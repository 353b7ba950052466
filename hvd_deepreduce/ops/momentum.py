"""What a rank makes of its gradient before the residual (pipeline/residuals.py): the velocity of deep gradient
compression, and the mean square of scaled momentum."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import arrays, blocks
from hvd_deepreduce.ops.deferred import residual_guard
from hvd_deepreduce.ops.device import array_module, for_each, grid, launch, suffix
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, kernels_by_dtype
from hvd_deepreduce.ops.types import U32, Device, Floats, u32, u64

_correct = kernels_by_dtype("momentum", "v", "ppUddippi")
_scaled = kernels_by_dtype("scaled_momentum", "v", "pppUddddddppi")
_advance_velocity = kernels_by_dtype("advance_velocity", "v", "pppUddii")
_advance_squares = kernels_by_dtype("advance_squares", "v", "pppUddddddi")
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
def scaled(
    squares: Floats, gradient: Floats, momentum: Floats, beta2: float, step: int, decay: float, eps: float,
    scale: float, threads: int = 1,
) -> tuple[Floats, Floats]:  # fmt: skip
    """The next mean square, and what the residual, which is the momentum, gets in place of the gradient.

    With g = scale * gradient, the next mean square is v = beta2 * max(squares, 0) + (1 - beta2) * g^2. The residual
    gets g / (sqrt(v / (1 - beta2^step)) + eps) - (1 - decay) * momentum. Sums and quotients beyond the largest finite
    number become that number. Elements of which the gradient is not finite are the gradient's in both.

    Args:
        squares, gradient, momentum: float32 or float64 ``[numel]``, of one dtype; unchanged.
        beta2, decay, eps, scale: in that dtype.
        step: from 1 on.
        threads: of the host.

    Returns:
        Both, ``[numel]``.
    """
    following, added = np.empty_like(gradient), np.empty_like(gradient)
    _scaled[gradient.dtype](
        squares, gradient, momentum, gradient.size, *_scaling(beta2, step, decay, eps, scale), following, added, threads
    )
    return following, added


@scaled.cuda
def _(
    squares: Device, gradient: Device, momentum: Device, beta2: float, step: int, decay: float, eps: float,
    scale: float, threads: int = 1,
) -> tuple[Device, Device]:  # fmt: skip
    xp, n, real = array_module(gradient), gradient.size, gradient.dtype.type
    following, added = xp.empty(n, gradient.dtype), xp.empty(n, gradient.dtype)
    for_each(
        xp, "momentum/momentum", f"scaled_momentum_{suffix(gradient.dtype)}", n, squares, gradient, momentum, n,
        *map(real, _scaling(beta2, step, decay, eps, scale)), following, added,
    )  # fmt: skip
    return following, added


def _scaling(beta2: float, step: int, decay: float, eps: float, scale: float) -> tuple[float, ...]:
    """The members of ``Scaling`` in momentum.h."""
    return beta2, 1 - beta2, 1 - beta2**step, 1 - decay, eps, scale


def advance_velocity(
    velocity: Floats, gradient: Floats, residual: Floats, factor: float, scale: float, nesterov: bool, threads: int = 1
) -> None:
    """As ``correct``, on the host and of a finite gradient: the velocity becomes the next one, and what the residual
    gets is added to it, as by ``arrays.add``."""
    _advance_velocity[gradient.dtype](velocity, gradient, residual, gradient.size, factor, scale, nesterov, threads)


def advance_squares(
    squares: Floats, gradient: Floats, momentum: Floats, beta2: float, step: int, decay: float, eps: float,
    scale: float, threads: int = 1,
) -> None:  # fmt: skip
    """As ``scaled``, on the host and of a finite gradient: the squares become the next ones, and what the momentum gets
    is added to it, as by ``arrays.add``."""
    scaling = _scaling(beta2, step, decay, eps, scale)
    _advance_squares[gradient.dtype](squares, gradient, momentum, gradient.size, *scaling, threads)


@operation()
def keep(velocity: Floats, corrected: Floats, sent: U32 | None) -> None:
    """``velocity = corrected``, in place, with zeros for the elements that were sent; for ``None``, all of them. On the
    host, both can be one array.

    On a GPU, within ``deferred.encoding``, ``velocity`` stays as it is if the encoded gradient is not finite.

    Args:
        sent: below ``velocity.size``; this is not checked.
    """
    if sent is None:
        velocity[...] = 0
    elif address(corrected) != address(velocity):
        velocity[...] = corrected
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
