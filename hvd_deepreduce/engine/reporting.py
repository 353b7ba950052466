"""What users ask for about the steps, alike in all classes of the adapters that compress."""

from __future__ import annotations

from abc import abstractmethod

from hvd_deepreduce.engine.stats import Callback, Report, Stats


class Reporting:
    """Statistics, callbacks, and which residuals are measured."""

    @abstractmethod
    def stats(self) -> Report:
        """What was counted."""

    @abstractmethod
    def _counted(self) -> Stats: ...

    def add_callback(self, function: Callback, every: int = 1) -> None:
        """Calls ``function(report)`` after every ``every``-th step, with what ``stats()`` counts.

        The gradients of the step have been reduced then; of ``LocalSGD``, an exchange has ended. The function must not
        exchange anything with other ranks: they may be elsewhere, and the adapter may hold a lock. If it raises an
        exception, this is logged, the job goes on, and the function is not called again: to end a job, set a flag that
        the training loop reads.

        Raises:
            TypeError: ``function`` cannot be called.
            ValueError: ``every`` is not an integer of 1 or more.
        """
        if not callable(function):
            raise TypeError(f"the callback is {function!r}, but it must be a function of the report of a step")
        self._counted().wishes.callbacks.append((function, _steps(every, 1)))

    def measure_residuals(self, every: int = 100) -> None:
        """Measures the residuals in the next step and then in each ``every``-th one: ``stats().residual_ratio`` has the
        result, by parameter. It costs reading gradient and residual once more in such a step; 0 turns it off.

        Raises:
            ValueError: ``every`` is not an integer of 0 or more.
        """
        self._counted().wishes.measure(_steps(every, 0))


def _steps(every: object, least: int) -> int:
    if not isinstance(every, int) or isinstance(every, bool) or every < least:
        raise ValueError(f"every is {every!r}, but it must be a number of steps: an integer, at least {least}")
    return every
