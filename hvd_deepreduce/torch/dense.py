"""Gradients that are sent dense, with ``mode: auto``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvd_deepreduce.engine import Engine, Parameter
from hvd_deepreduce.exchange.traffic import Traffic
from hvd_deepreduce.torch.tensors import TorchTensors


def flush(engine: Engine, tensors: TorchTensors, parameter: Parameter, gradient: torch.Tensor) -> None:
    """Adds the parameter's residual to a gradient that is sent dense (``Engine.to_flush``)."""
    with tensors.stream(tensors.device(gradient)):
        total = engine.flush(parameter, tensors.flat(gradient))
        if total is not None:
            before = gradient.clone()
            tensors.write(gradient, total)
            if bool(torch.isfinite(gradient).all()):
                engine.flushed(parameter, total, tensors.flat(gradient))
            else:  # too large for a small dtype
                gradient.copy_(before)


class Rest:
    """Dense steps that pass by compression, and are counted all the same.

    Args:
        as_it_is: returns what Horovod takes of a gradient, and the gradient where that is a copy.

    Attributes:
        left: how many follow.
        begun: whether the dense steps have begun, and not ended.
    """

    def __init__(self, as_it_is: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        self.left = self._taken = 0
        self._as_it_is = as_it_is
        self._came = self.begun = False
        self._wire, self._dense = Traffic(), 0

    def begin(self, engine: Engine, steps: int) -> None:
        """So many steps follow that send as much as the one that is under way."""
        last = engine.stats.last
        self.left, self._taken, self._came, self.begun = steps, 0, False, True
        self._wire, self._dense = Traffic(last.bytes_sent, last.bytes_received), last.dense_bytes

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What Horovod calls with a gradient."""
        self._came = True
        return self._as_it_is(tensor)

    def count(self, engine: Engine) -> None:
        """One of them was taken, if gradients have come. PyTorch calls its hook twice where an optimizer calls another
        one's step."""
        if not self._came:
            return
        self._came = False
        engine.stats.begin_step()
        engine.stats.add(wire=self._wire, dense=self._dense)
        engine.stats.end_step()
        self.left -= 1
        self._taken += 1

    def end(self, engine: Engine) -> None:
        """No more follow."""
        if engine.choice is not None:
            engine.choice.skip(self._taken)
        self.left, self.begun = 0, False


def as_it_came(tensor: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """The reduced gradient of ``as_it_is``."""
    return tensor if given is None else given.copy_(tensor)
