"""What the adapters that compress gradients have in common: settings, statistics and state."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.engine import Engine
from hvd_deepreduce.engine.parameter import plain
from hvd_deepreduce.engine.rank_state import ElasticState, Snapshot
from hvd_deepreduce.engine.reporting import Reporting
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.engine.stats import Report, Stats

C = TypeVar("C", bound="GradientCompression")

EARLY = (
    "state_dict was called between backward() and step(), or after an error there: a job that continues from it loses "
    "what this step has sent, which is neither in the model nor in the residuals. Call it after step(); after an "
    "error, go on from an earlier checkpoint"
)
_warn_once = lru_cache(logging.getLogger("hvd_deepreduce").warning)


class GradientCompression(Reporting):
    """A subclass makes the engine, and adds what it keeps beside it."""

    _engine: Engine

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._engine.config

    def set_config(self, config: str | Path | Mapping[str, Any] | Config | None = None, /, **settings: Any) -> None:
        """Changes the settings from the next step on; on all ranks, between the same two steps.

        Args:
            config: the new config; None: the one in force, with ``settings`` in place of its own.

        Raises:
            RuntimeError: gradients are in flight; or an exchange over MPI in a job without MPI; or ``close`` was
                called.
            ConfigError: the config cannot be used; the old one stays in force.
            ValueError: a setting that is fixed now, as the adapter's documentation says.
        """
        self._engine.check_open()
        self._change(Config.load(self.config if config is None else config, **settings))

    @abstractmethod
    def _change(self, new: Config) -> None:
        """As ``set_config``."""

    def stats(self) -> Report:
        """``{"total": ..., "last_step": ...}`` with this rank's ``hvd_deepreduce.engine.stats.Counters``;
        ``print`` shows a table."""
        return self._engine.report()

    def _counted(self) -> Stats:
        return self._engine.stats

    def residual(self, name: str) -> Floats | None:
        """A copy of this rank's residual of a parameter, ``[numel]``, as a NumPy array; None: nothing is kept of it.

        A gradient in flight may be changing it: call it between two steps.
        """
        self._settle()
        return self._engine.residual_of(plain(name))

    def _settle(self) -> None:
        """Waits for what was enqueued on GPUs, on whatever stream: residuals are read on another one."""

    def _check_early(self) -> None:
        """Warns, for ``state_dict``, if gradients are in flight."""
        if self._engine.in_flight:
            _warn_once(EARLY)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and step counts. Ranks differ: each saves and loads its own."""

    def load_state_dict(self, state: State, *, reshard: Reshard = False) -> None:
        """Continues where ``state_dict`` was called; also before the first step.

        Args:
            state: what ``state_dict`` returned on this rank. With ``reshard``, an iterable of what it returned on each
                rank, in any order; it may be a generator, as only one of them is needed in memory at a time.
            reshard: load the states of any number of ranks. True or "sum" preserves the residuals' sum over all ranks,
                "mean" their mean.

        Raises:
            ValueError: a state of another rank, another number of ranks, another model or a memory that keeps something
                else, with a residual that is not finite, or not a state at all; nothing has changed then.
        """
        self._load(state, reshard)

    @abstractmethod
    def _load(self, state: State, reshard: Reshard) -> None:
        """As ``load_state_dict``."""

    @abstractmethod
    def close(self) -> None:
        """Ends its threads and exchanges, and frees the residuals.

        Every rank calls it after the same step, before ``hvd.shutdown()``. It can be called more than once. Afterwards
        ``config`` and ``stats()`` can be read; everything else raises ``RuntimeError``. Save the state before.
        """

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Compression(GradientCompression):
    """Under Horovod, whose jobs may be elastic."""

    def snapshot(self) -> Snapshot:
        """Settings, residuals and step counts of this process, for ``rewind``."""
        self._settle()
        return self._engine.snapshot()

    @abstractmethod
    def rewind(self, snapshot: Snapshot) -> None:
        """Returns to a snapshot of this process, whatever its rank is now. Steps under way are forgotten."""

    def elastic_state(self) -> ElasticState:
        """What the other ranks of an elastic job take from rank 0."""
        return self._engine.elastic_state()

    @abstractmethod
    def sync_from_root(self, told: ElasticState) -> None:
        """Takes settings and step counts from rank 0 of an elastic job; keeps the residuals if the step is the same."""
