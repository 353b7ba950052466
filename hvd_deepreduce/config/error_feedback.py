"""What a rank keeps of the gradients that it has not sent: the settings, and their registry."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hvd_deepreduce.codecs.interfaces import Codec, Registry

memories = Registry("memory")


class Feedback(Codec):
    """The base of the settings of error feedback."""

    has_velocity: ClassVar[bool] = False
    """Whether each parameter has, beside its residual, another vector of its size, which is named its velocity."""
    leaves_whole: ClassVar[bool] = False
    """Whether elements that are sent are 0 in the residual afterwards, whatever the receivers decode. Otherwise what
    they decode is subtracted."""


@memories.register
class Residual(Feedback):
    """What was not sent is added to the next gradient (Stich, Cordonnier, Jaggi, 2018).

    The residual gets the gradient, and what the receivers will decode is subtracted from it.
    """

    name = "residual"
    id = 1


@memories.register
class DGC(Feedback):
    """Deep gradient compression: momentum on each rank, before the residual; the optimizer must have none.

    Lin, Han, Mao, Wang, Dally, "Deep gradient compression: reducing the communication bandwidth for distributed
    training", ICLR 2018, sections 3.1 and 3.2, algorithm 4. For each element, with its gradient g, velocity u and
    residual v::

        u = momentum * u + g;    v = v + u                  (with nesterov: u = momentum * (u + g);  v = v + u + g)
        if v is sent:  v = v - what the receivers decode;  u = 0

    So the sum of what is sent of an element is what an optimizer with momentum would have applied (momentum
    correction), and the velocity of an element that is sent starts again, since it is older than the parameter
    (momentum factor masking). Take the optimizer's momentum from it and give it here: with ``momentum`` in both it is
    applied twice. The velocity takes as much memory as the residual, and is saved with it. So that every tensor has
    momentum, small ones are compressed too; a gradient that Horovod reduces itself, such as a sparse one, has none.

    With ``clip``, a gradient g of R ranks whose l2 norm is above ``clip / sqrt(R)`` is scaled to it first (local
    gradient clipping). The norm is that of what a container holds: of the tensor, or with a larger scope of the scope's
    vector.

    Attributes:
        momentum: the share of the velocity that the next step keeps, above 0 and below 1.
        nesterov: Nesterov's momentum.
        clip: the largest norm of the sum of all ranks' gradients, if they are independent, above 0. None: no clipping.
    """

    name = "dgc"
    id = 2
    has_velocity = True
    momentum: float = Field(0.9, gt=0, lt=1)
    nesterov: bool = Field(False, strict=True)
    clip: float | None = Field(None, gt=0, allow_inf_nan=False)


@memories.register
class ScaledMomentum(Feedback):
    """Momentum of gradients that each rank scales as Adam does, for the optimizer ``SignMomentum``.

    A method of this package, found by experiment. For each element, with its gradient g in step t = 1, 2, ... of its
    parameter, its mean square v and its momentum m::

        v = beta2 * v + (1 - beta2) * g^2;    u = g / (sqrt(v / (1 - beta2^t)) + eps);    m = decay * m + u
        if it is sent:  m = 0

    The sparsifier selects from m. What is sent leaves m whole, so that with the value codec ``sign`` and its
    ``magnitude: one`` each rank has one vote on the direction of an element, and the optimizer steps by the sign of the
    sum (``hvd_deepreduce.torch.SignMomentum``). v and m take as much memory as under ``dgc``, and are saved as the
    velocity and the residual. Small tensors are compressed too. Of the exchanges, ``allgather`` and
    ``reduce_scatter`` without a density have this memory, since the others select from sums, which are no rank's
    momentum. Under ``reduce_scatter`` what the second encoding loses is lost: of votes the count, which the optimizer
    does not need.

    Attributes:
        decay: the share of the momentum that the next step keeps, from 0, and below 1.
        beta2: the share of the mean square that the next step keeps, from 0, and below 1.
        eps: is added to the root, 1e-30 to 1.
        clip: a gradient whose l2 norm is above it is scaled to it first, above 0. The norm is that of what a container
            holds, as under ``dgc``, on each rank by itself. None: no clipping.
    """

    name = "scaled_momentum"
    id = 3
    has_velocity = True
    leaves_whole = True
    decay: float = Field(0.95, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    eps: float = Field(1e-8, ge=1e-30, le=1)
    clip: float | None = Field(None, gt=0, allow_inf_nan=False)
