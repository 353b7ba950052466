"""Workers in one process that take local steps and exchange compressed updates: Qsparse-local-SGD, and outer momentum.

Basu, Data, Karakus, Diggavi, "Qsparse-local-SGD", NeurIPS 2019: Algorithm 1, in which all workers synchronise at once,
and the asynchronous operation of section 4, in which each has its own times. With an outer learning rate and momentum,
the mean update is a gradient of a second optimizer, as in DiLoCo (2023).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from simulated_ranks import Ranks

Vector = npt.NDArray[np.float32]


class Outer:
    """The step that a mean update makes: SGD with Nesterov momentum, as PyTorch defines it.

    Args:
        lr: 1 with ``momentum`` 0: plain averaging.
    """

    def __init__(self, lr: float = 1.0, momentum: float = 0.0) -> None:
        self.lr, self.momentum = np.float32(lr), np.float32(momentum)
        self._velocity: Vector | None = None

    def step(self, model: Vector, update: Vector) -> None:
        """Subtracts the step from ``model``, in place."""
        if self.momentum:
            if self._velocity is None:
                self._velocity = np.zeros_like(model)
            self._velocity *= self.momentum
            self._velocity += update
            update = update + self.momentum * self._velocity
        model -= self.lr * update


class LocalUpdates:
    """The master's model, and each worker's.

    A synchronisation of worker r, with the compressor C of the job::

        Delta = anchor - local;  m <- decay * m + Delta;  g = C(m);  m <- m - g
        master <- outer step with (sum of g) / R;  anchor <- master;  local <- master

    R counts all workers, those too that are absent, which send empty containers.

    Args:
        job: exchanges the updates; its residuals are the memories m.
        start: the model, float32 ``[numel]``.
        decay: of the memories.
        outer: the master's step.

    Attributes:
        master: the master's model, float32 ``[numel]``.
        anchors: the master's model as each worker last read it, float32 ``[R, numel]``.
        local: the models that the workers train, float32 ``[R, numel]``; change them in place.
    """

    def __init__(self, job: Ranks, start: Vector, decay: float = 1.0, outer: Outer | None = None) -> None:
        self.job, self.decay, self.outer = job, decay, outer or Outer()
        self.master = start.copy()
        self.anchors = np.tile(start, (len(job.residuals), 1))
        self.local = self.anchors.copy()

    def synchronise(self, present: Sequence[int] | None = None) -> Vector:
        """One synchronisation of the workers that are present (``None``: all); returns the mean update."""
        here = list(range(len(self.local)) if present is None else present)
        progress: list[Vector | None] = [None] * len(self.local)
        for worker in here:
            progress[worker] = self.anchors[worker] - self.local[worker]
        mean = self.job.mean(progress, self.decay)
        self.outer.step(self.master, mean)
        self.anchors[here] = self.local[here] = self.master
        return mean


def own_times(workers: int, steps: int, most: int, seed: int) -> npt.NDArray[np.bool_]:
    """Which worker synchronises after which step, at times of its own: ``[steps, workers]``.

    The gap between two of a worker's times is uniform in 1 .. ``most``, and all synchronise after the last step.
    """
    rng = np.random.default_rng(seed)
    times = np.zeros((steps, workers), np.bool_)
    for worker in range(workers):
        ends = np.cumsum(rng.integers(1, most + 1, steps)) - 1
        times[ends[ends < steps], worker] = True
    times[-1] = True
    return times
