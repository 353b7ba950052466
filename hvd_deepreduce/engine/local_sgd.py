"""What the classes LocalSGD of all frameworks have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.local_exchanges import LocalExchanges
from hvd_deepreduce.engine.reporting import Reporting
from hvd_deepreduce.engine.stats import Report, Stats


class LocalSGDBase(Reporting):
    """Settings, counters, and the end of a period."""

    _updates: LocalExchanges[Any]

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._updates.engine.config

    def stats(self) -> Report:
        """As ``DeepReduce.stats``. A step is an exchange; ``dense_bytes`` are those of a dense reduction in each local
        step."""
        return self._updates.engine.stats.to_dict()

    def _counted(self) -> Stats:
        return self._updates.engine.stats

    def sync(self) -> None:
        """Ends all exchanges in flight, and exchanges what has been done since then. Every rank calls it after the same
        step.

        All ranks have the same parameters afterwards. A fragment that was exchanged after the last step, without a
        delay, is not exchanged again.

        Raises:
            MismatchError, RuntimeError, ContainerError: as ``step``.
        """
        if self._takes_part("sync"):
            self._updates.sync()

    def _takes_part(self, call: str) -> bool:
        """Whether this rank does what ``call`` is for."""
        self._updates.engine.check_open()
        self._updates.begin()
        return bool(self._updates.collectives.included())

    def snapshot(self) -> Any:
        """Settings and state of this process, for ``rewind``.

        Raises:
            RuntimeError: an exchange is in flight.
        """
        return self._updates.snapshot()

    def rewind(self, snapshot: Any) -> None:
        """Returns to a snapshot of this process, whatever its rank is now. Exchanges in flight are forgotten."""
        self._updates.rewind(snapshot)

    def elastic_state(self) -> Any:
        """What the other ranks of an elastic job take from rank 0: everything but the residuals."""
        return self._updates.elastic_state()

    def sync_from_root(self, told: Any) -> None:
        """Takes anchor, outer optimizer, settings and step counts from rank 0 of an elastic job. The residuals are kept
        if the step is the same."""
        self._updates.sync_from_root(told)

    def close(self) -> None:
        """Ends its threads and exchanges, and frees anchor and residuals. The model and its optimizer remain as they
        are. Every rank calls it after the same step."""
        self._updates.close()


def not_exchanged(how: str, names: Iterable[str]) -> RuntimeError:
    """The error for parameters that are trained and that LocalSGD does not know.

    Args:
        how: they came.
    """
    return RuntimeError(
        f"{how}: {', '.join(names)}. They are not exchanged, so the ranks' parameters would differ. Make LocalSGD "
        "while all parameters that will ever be trained are trainable, and freeze them afterwards; or call sync(), and "
        "make it again"
    )
