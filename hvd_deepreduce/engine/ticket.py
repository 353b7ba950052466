"""A gradient, or a bucket of gradients, on its way through the ``Reducer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from hvd_deepreduce.engine.buckets import Bucket
from hvd_deepreduce.engine.parameter import Parameter
from hvd_deepreduce.engine.tensors import Device, G


@dataclass(slots=True)
class Ticket(Generic[G]):
    """A gradient, or a bucket of gradients, between ``start`` and ``finish``.

    Attributes:
        parameters: whose gradients it holds.
        gradient: the tensor that was given; None before ``start`` and after ``finish``.
        device: of ``gradient``.
        bucket: in which it is sent.
        small: whether it has at most ``Tensors.small`` elements.
        coalesced: it has stayed where it is until its bucket was encoded, and the result is a view.
    """

    parameters: Sequence[Parameter]
    gradient: G | None
    device: Device
    bucket: Bucket
    coalesced: bool = False
    small: bool = False


def in_flight(parameter: Parameter) -> RuntimeError:
    """For a gradient that comes before the last one of its parameter was reduced."""
    return RuntimeError(
        f"the gradient of {parameter.name} is still in flight: call optimizer.step() or optimizer.synchronize() before "
        "the next backward(). One hvd.DistributedOptimizer alone may have the parameter; for several backward() in a "
        "step, give it backward_passes_per_step. In an elastic job of which a rank has failed, DeepReduce must be in "
        "the state: TorchState(..., compression=compression)"
    )
