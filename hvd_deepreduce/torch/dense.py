"""Dense steps, with ``mode: auto``, that bypass compression."""

from __future__ import annotations

import torch

from hvd_deepreduce.engine import Engine
from hvd_deepreduce.exchange.traffic import Traffic
from hvd_deepreduce.torch.collectives import uncompressed


class DenseBypass:
    """Dense steps that take no time of the engine's, and are counted all the same.

    Attributes:
        left: how many follow.
        begun: whether they have begun, and not ended.
        grad_ready: whether a gradient has come since a step was counted.
    """

    def __init__(self) -> None:
        self.left = self._taken = 0
        self.grad_ready = self.begun = False
        self._wire, self._dense = Traffic(), 0

    def begin(self, engine: Engine, steps: int) -> None:
        """So many steps follow that send as much as the one that is under way."""
        last = engine.stats.last
        self.left, self._taken, self.grad_ready, self.begun = steps, 0, False, True
        self._wire, self._dense = Traffic(last.bytes_sent, last.bytes_received), last.dense_bytes

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What Horovod calls with a gradient."""
        self.grad_ready = True
        return uncompressed(tensor)

    def count(self, engine: Engine) -> None:
        """One of them was taken."""
        self.grad_ready = False
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
