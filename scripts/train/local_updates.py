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

    R counts all workers, those too that are absent, which send empty containers. In ``begin`` and ``end``, local steps
    may come between the two lines. What a worker does in these is kept, and belongs to its next Delta. What it has not
    sent leaves its model in ``take_back``, and not at the end only.

    Args:
        job: exchanges the updates; its residuals are the memories m.
        start: the model, float32 ``[numel]``.
        decay: of the memories.
        outer: the master's step.
        local: where the workers' models are, float32 ``[R, numel]``; None: in an array of their own.

    Attributes:
        master: the master's model, float32 ``[numel]``.
        anchors: the master's model as each worker last read it, float32 ``[R, numel]``.
        local: the models that the workers train, float32 ``[R, numel]``; change them in place.
        in_flight: the mean update, and the workers' models when it was begun; None: there is none.
        unsent: what they have not sent of their progress since the last exchange, until it is taken back.
    """

    def __init__(
        self, job: Ranks, start: Vector, decay: float = 1.0, outer: Outer | None = None, local: Vector | None = None
    ) -> None:
        self.job, self.decay, self.outer = job, decay, outer or Outer()
        self.master = start.copy()
        self.anchors = np.tile(start, (len(job.residuals), 1))
        self.local = np.empty_like(self.anchors) if local is None else local
        self.local[:] = self.anchors
        self.in_flight: tuple[Vector, Vector] | None = None
        self.unsent: Vector | None = None

    def synchronise(self, present: Sequence[int] | None = None) -> Vector:
        """One synchronisation of the workers that are present (``None``: all); returns the mean update."""
        here = list(range(len(self.local)) if present is None else present)
        mean = self._mean(here)
        self.outer.step(self.master, mean)
        self.anchors[here] = self.local[here] = self.master
        return mean

    def begin(self) -> None:
        """Exchanges the updates of all workers as they are now."""
        kept = np.float32(self.decay) * np.array(self.job.residuals)
        self.in_flight = self._mean(range(len(self.local))), self.local.copy()
        self.unsent = np.array(self.job.residuals) - kept if kept.size else None  # of dense vectors nothing is kept

    def take_back(self) -> None:
        """A step later, or more: what the workers have not sent leaves their models."""
        if self.in_flight is not None and self.unsent is not None:
            self.local += self.unsent
            self.in_flight = self.in_flight[0], self.in_flight[1] + self.unsent
        self.unsent = None

    def end(self) -> None:
        """All workers take what ``begin`` exchanged."""
        assert self.in_flight is not None
        mean, starts = self.in_flight
        self.outer.step(self.master, mean)
        self.anchors[:] = self.master
        self.local[:] = self.master + (self.local - starts)
        self.in_flight = self.unsent = None

    def _mean(self, here: Sequence[int]) -> Vector:
        progress: list[Vector | None] = [None] * len(self.local)
        for worker in here:
            progress[worker] = self.anchors[worker] - self.local[worker]
        return self.job.mean(progress, self.decay)


class InTurn:
    """Fragments of a model that are exchanged in turn, each every ``every`` local steps, and applied ``delay`` steps
    later: the schedule of the package's ``LocalSGD``.

    Args:
        fragments: of a model, in its order.

    Attributes:
        exchanged: elements, so far.
    """

    def __init__(self, fragments: Sequence[LocalUpdates], every: int, delay: int = 0) -> None:
        self.fragments, self.every, self.delay, self.exchanged = fragments, every, delay, 0
        count = len(fragments)
        self._due = [every - every * (count - 1 - place) // count for place in range(count)]
        self._clock = 0

    def step(self, last: bool = False) -> None:
        """After each local step of all workers. After the last one, what is in flight is applied, and what the workers
        have done since an exchange began is exchanged."""
        self._clock += 1
        for place, fragment in enumerate(self.fragments):
            due, begun = self._clock == self._due[place], self._due[place] - self.every
            if self._clock == begun + max(1, self.delay // 3):
                fragment.take_back()
            if fragment.in_flight and (last or self._clock == begun + self.delay):
                fragment.end()
            if due or last:
                self.exchanged += fragment.master.size
                self._due[place] += self.every
                if self.delay and not last:
                    fragment.begin()
                else:
                    fragment.synchronise()


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
