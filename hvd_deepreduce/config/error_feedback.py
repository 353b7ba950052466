"""What a rank keeps of the gradients that it has not sent: the settings, and their registry."""

from __future__ import annotations

from pydantic import Field

from hvd_deepreduce.codecs.interfaces import Codec, Registry

memories = Registry("memory")


class Feedback(Codec):
    """The base of the settings of error feedback."""


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
    momentum: float = Field(0.9, gt=0, lt=1)
    nesterov: bool = Field(False, strict=True)
    clip: float | None = Field(None, gt=0, allow_inf_nan=False)
