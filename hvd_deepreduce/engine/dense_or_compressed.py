"""Whether a step's gradients are compressed, or go through the framework's own reduction, by the job's own times.

Compression pays on slow links, and costs time on fast ones; which of the two holds depends on the model, the machine
and the link. With ``mode: auto`` a job tries both, in turns, and goes on with what was faster::

    steps   0 .. 4            5 .. 8     9 .. 12      13 .. 16    ...   29       30 .. 2029     2030 .. 2033   ...
            compressed        dense      compressed   dense             ranks    what was       dense          ...
            (to warm up)                                                agree    faster         (a new trial)

The ranks must decide the same, so each says its own medians in the step check of the step after a trial, as whole
microseconds: sums of integers are the same on all ranks, in whatever order they were added. No other step of the trial
needs a message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

WARM_UP = 5
"""Steps before the first trial."""
BLOCK = 4
"""Neighbouring steps of a trial that are all dense, or all compressed. The first of them does not count, as it pays for
the change."""
BLOCKS = 6
"""Blocks of a trial, dense and compressed in turns."""
AGAIN = 2000
"""Steps between two trials."""


@dataclass
class Choice:
    """One rank's part in the decision. Every rank calls ``begin_step`` at the same steps.

    Attributes:
        dense: whether the step that is under way is dense.
        dense_ms, compressed_ms: medians of the last trial's steps, means over the ranks.
        trials: how many have ended.
        flushed: names of the parameters whose residuals were sent since the last compressed step.
    """

    dense: bool = False
    dense_ms: float = 0.0
    compressed_ms: float = 0.0
    trials: int = 0
    flushed: set[str] = field(default_factory=set)
    _faster_dense: bool = False
    _step: int = -WARM_UP - 1
    _began: float = 0.0
    _times: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def begin_step(self, now: float | None = None) -> None:
        """A step begins, and the one before it ends.

        Args:
            now: seconds of a clock; None: those of ``perf_counter``.
        """
        now = perf_counter() if now is None else now
        if 0 <= self._step < BLOCK * BLOCKS and self._step % BLOCK:
            self._times[self.dense].append(now - self._began)
        self._step, self._began = self._step + 1, now
        if self._step >= BLOCK * BLOCKS + AGAIN:
            self._step = 0
            self._times = {True: [], False: []}
        if self._step < 0 or self.agreeing:
            self.dense = False
        elif self._step < BLOCK * BLOCKS:
            self.dense = self._step // BLOCK % 2 == 0
        else:
            self.dense = self._faster_dense
        if not self.dense:
            self.flushed.clear()

    @property
    def decided(self) -> bool:
        """Whether a trial has ended; before, steps are compressed but for the dense blocks."""
        return self.trials > 0

    @property
    def compresses(self) -> bool:
        """Whether the last trial has found that compressed steps take less time."""
        return self.decided and not self._faster_dense

    @property
    def agreeing(self) -> bool:
        """Whether this step ends a trial: the ranks say in its step check what they have measured."""
        return self._step == BLOCK * BLOCKS

    def certain(self) -> int:
        """How many steps after this one will be dense, whatever happens."""
        end = BLOCK * BLOCKS + AGAIN - 1
        return end - self._step if self.decided and self.dense and self._step > BLOCK * BLOCKS else 0

    def skip(self, steps: int) -> None:
        """So many of these steps have been taken without ``begin_step``."""
        self._step += steps

    def vote(self) -> tuple[int, int]:
        """This rank's medians of a dense and of a compressed step, in microseconds; zeros unless a trial ends."""
        if not self.agreeing:
            return 0, 0
        dense, compressed = (max(1, round(1e6 * median(self._times[kind]))) for kind in (True, False))
        return dense, compressed

    def tally(self, dense: int, compressed: int, ranks: int) -> bool:
        """Decides, by the sums of all ranks' words, in a step that ends a trial. Returns whether it did.

        Of two equal times the dense step wins, which loses nothing.
        """
        if not self.agreeing or not dense:
            return False
        self._faster_dense = dense <= compressed
        self.dense_ms, self.compressed_ms = 1e-3 * dense / ranks, 1e-3 * compressed / ranks
        self.trials += 1
        return True

    def sentence(self) -> str:
        """What was decided, and why."""
        if not self.decided:
            return "mode is auto, and the first trial has not ended: dense and compressed steps are still compared."
        kind = "dense" if self._faster_dense else "compressed"
        return (
            f"mode is auto: gradients are {kind}, since a dense step took {self.dense_ms:.2f} ms and a compressed one "
            f"{self.compressed_ms:.2f} ms (medians of trial {self.trials}, means over the ranks; the next trial is "
            f"{AGAIN} steps after it)."
        )
