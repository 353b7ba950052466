"""What the classes LocalSGD of all frameworks have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.local_exchanges import LocalExchanges
from hvd_deepreduce.engine.reporting import Reporting
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.engine.stats import Report, Stats


class LocalSGDBase(Reporting):
    """Settings, counters, state, and the end of a period.

    It needs memory for three more copies of the model: the anchor, the residual, and the outer momentum if there is
    one.

    What the papers leave open:

    - The state of this rank's optimizer, such as momentum, belongs to its rank and continues over exchanges.
    - What is not trained, such as the statistics of batch normalization, is not exchanged, as under Horovod.
    - What is frozen later, on all ranks at the same step, is in the next exchange with what was done before. From then
      on it is the anchor, which does not move, and its residual and outer momentum wait until it is trained again. With
      ``times``, or through a store, it goes on to be exchanged; so it does while it has gradients, since an optimizer
      steps whatever has them.
    - A step that a loss scale skips counts as a local step, so that the ranks stay in step.
    - If a rank has NaN or infinity in its parameters when an exchange begins, all ranks discard what they have done
      since the last one and continue from the anchor; residuals stay. State of that rank's optimizer that is not finite
      starts anew.
    - ``sync()`` ends a period early; the next one then has its full length.

    Args that all frameworks have:
        config: a preset's name, the path of a YAML file, a dict, a ``Config``, or None for the default, which is
            for gradients under SGD. Its key ``local`` has the defaults of the arguments below.
        every: local steps between two exchanges of a parameter; or a function of the local steps so far (of the clock,
            from 0) that returns how many steps the period has that begins there, on all ranks the same.
        decay, fragments, delay, mix: as in ``LocalSettings``, in place of the config's.
        times: for asynchronous exchanges (Qsparse-local-SGD, Algorithm 2): ``times(rank, clock)`` says whether this
            rank, with the number ``rank``, sends its update and takes the anchor after its step number ``clock``,
            counted from 1. Each rank decides for itself, in any way, and says so in a small allreduce after each local
            step. The others send nothing then, and only follow the anchor. One fragment, no delay. With ``every``, a
            rank that has not taken part for so many steps does so (the paper's bound H of the gap); without it,
            ``times`` alone decides.
        process_set: of the ranks that take part; None: all.
        **settings: keys of the config, in place of its own.
    """

    _updates: LocalExchanges[Any]

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._updates.engine.config

    def stats(self) -> Report:
        """As ``DeepReduce.stats``. A step is an exchange; ``dense_bytes`` are those of a dense reduction in each local
        step."""
        return self._updates.engine.report()

    def _counted(self) -> Stats:
        return self._updates.engine.stats

    def begin(self) -> None:
        """Takes the parameters as the anchor, after something other than training has changed them on all ranks, as a
        load of other weights. Without it, the next exchange returns to the old ones. Residuals are dropped. Every rank
        calls it after the same step.

        Raises:
            RuntimeError: an exchange is in flight; exchanges go through a store; or ``close`` was called.
        """
        updates = self._updates
        updates.engine.check_open()
        if updates.peers is not None:
            raise RuntimeError(
                "begin() is for ranks that exchange together. Peers begin with other weights in a store of a new place"
            )
        updates.check_idle("begin")
        updates.begin_anew()

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

    def state_dict(self) -> dict[str, Any]:
        """This rank's anchor, outer optimizer, residuals and step counts, and its exchanges in flight (``delay``), for
        whose means it waits: all ranks call it after the same step then. Ranks differ: each saves and loads its own,
        and its model and optimizer beside it.

        Raises:
            ContainerError: as ``step``.
            RuntimeError: an exchange has failed, so that there is no state to go on from; or ``close`` was called.
            TimeoutError: with ``fragments`` and a ``delay``, under ``torch.distributed``, another rank does not call it
                after this step.
        """
        return self._updates.state_dict()

    def load_state_dict(self, state: State, *, reshard: Reshard = False) -> None:
        """Continues where ``state_dict`` was called. Model and optimizer must be loaded too.

        Args:
            state: what ``state_dict`` returned on this rank. With ``reshard``, an iterable of what it returned on each
                rank, in any order; call ``sync()`` on all ranks before such states are saved.
            reshard: load the states of any number of ranks. True or "mean" preserves the residuals' mean over all
                ranks, which is what the anchor has still to get; "sum" their sum.

        Raises:
            RuntimeError: an exchange is in flight; or ``close`` was called.
            ValueError: a state of another rank, another number of ranks, another model, other fragments or another
                outer optimizer; or not a state of LocalSGD. Nothing has changed then.
        """
        self._updates.engine.check_open()
        self._updates.load_state_dict(state, reshard)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, because its residuals belong to their rank: use "
            "state_dict()"
        )

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


def not_exchanged(kind: str, how: str, names: Iterable[str]) -> RuntimeError:
    """The error for parameters that are trained and that an instance of the class ``kind`` does not know.

    Args:
        how: they came.
    """
    return RuntimeError(
        f"{how}: {', '.join(names)}. They are not exchanged, so the ranks' parameters would differ. Make {kind} "
        "while all parameters that will ever be trained are trainable, and freeze them afterwards; or call sync() and "
        "close() before they are added or unfrozen, and make it again. Now load a checkpoint on all ranks, and make it "
        "again"
    )
