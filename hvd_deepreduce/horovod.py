"""What Horovod's collectives have in common in all frameworks."""

from __future__ import annotations

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.engine import Collectives
from hvd_deepreduce.exchange.collectives import NoSubsetsError

_log = logging.getLogger("hvd_deepreduce")

# Horovod shows the name of an operation that stalls.
HINT = "if it stalls: was DeepReduce given the optimizer's process_set?"

# How long a rank waits for the others at its first gradient.
HANDSHAKE_VARIABLE = "HVD_DEEPREDUCE_HANDSHAKE_SECONDS"
HANDSHAKE_SECONDS = 300.0
WARN_SECONDS = 20.0
NOBODY_CAME = (
    "this rank has waited {seconds} s at its first gradient, and not all other ranks of its process set have come. Do "
    "all ranks give compression=DeepReduce(...) to their optimizer or tape? Was DeepReduce given the optimizer's "
    "process_set? In an elastic job, is DeepReduce in the state that hvd.elastic.run gets? Have "
    "all ranks made DeepReduce anew, where one has? If a rank only takes long "
    f"before its first step, set the environment variable {HANDSHAKE_VARIABLE} to a larger limit, or to 0 for none"
)

SAME_STEPS = "Let all ranks take the same steps, and load the state of DeepReduce on every rank or on none"
# By process set, the instance that was enrolled last.
_instances: dict[int, int] = {}


def handshake_seconds() -> float:
    """The limit; 0: none.

    Raises:
        ValueError: the environment variable is not a number, or negative.
    """
    given = os.environ.get(HANDSHAKE_VARIABLE, "")
    try:
        seconds = float(given or HANDSHAKE_SECONDS)
    except ValueError:
        seconds = -1
    if not seconds >= 0:
        raise ValueError(f"{HANDSHAKE_VARIABLE} is {given!r}; it must be a number of seconds, or 0 for no limit")
    return seconds


class Patience:
    """Waits for ranks that may never come.

    Args:
        nobody_came: the message after so many seconds.
        limit: in seconds; 0: none; None: ``handshake_seconds``.
    """

    def __init__(self, nobody_came: Callable[[int], str], limit: float | None = None) -> None:
        self._nobody_came, self._limit = nobody_came, handshake_seconds() if limit is None else limit
        self._began, self._warned = time.monotonic(), False

    def wait(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Waits until ``done()``, or until so many seconds after it was made; None: the limit. Returns ``done()``.

        Raises:
            TimeoutError: at the limit.
        """
        pause = 0.0005
        while not done():
            waited = time.monotonic() - self._began
            if self._limit and waited > self._limit:
                raise TimeoutError(self._nobody_came(round(waited)))
            if waited > WARN_SECONDS and not self._warned:
                self._warned = True
                _log.warning(self._nobody_came(round(waited)))
            if seconds is not None and waited > seconds:
                return False
            time.sleep(pause)
            pause = min(0.05, 1.5 * pause)
        return True


class HorovodCollectives(Collectives):
    """The ranks of a process set; a subclass adds the framework's allgather.

    Args:
        hvd: ``horovod.torch`` or ``horovod.tensorflow``.
        process_set: of the ranks that take part.

    Attributes:
        prefix: of the names of all operations, under which Horovod matches those of different ranks.
        most_bytes: Horovod counts the bytes of an allgather, and where each rank's begin, as C's ``int``.
    """

    most_bytes = 2**31 - 1

    def __init__(self, hvd: Any, process_set: Any) -> None:
        self._hvd = hvd
        self.process_set = process_set
        # That of all ranks is the same number, and is asked for often: hvd.size() answers ten times faster.
        self._ranks = hvd.size if process_set is hvd.global_process_set else process_set.size
        self._rank = process_set.rank
        self.prefix = "deepreduce"

    def enroll(self, instance: int = 0) -> None:
        """As ``Collectives.enroll``. Numbers go by the order of the calls, when the objects are made: all ranks make
        them in the same order. Not all ranks come to the first step of each, as one that joins before."""
        if instance or not self.instance:
            of = self.process_set.process_set_id
            self.instance = instance or _instances.get(of, 0) + 1
            _instances[of] = max(self.instance, _instances.get(of, 0))
            # With the process set's number: this may go over a part of it, where others have numbers of their own.
            self.prefix = f"deepreduce.{of}.{self.instance}"

    def stay(self) -> None:
        """Rank and size never change from now on, and Horovod is not asked again."""
        rank, size = self.rank(), self.size()
        self._rank, self._ranks = lambda: rank, lambda: size

    def rank(self) -> int:
        """This rank's number in the process set."""
        return int(self._rank())

    def speaks(self) -> bool:
        """As ``Collectives.speaks``."""
        return bool(self.process_set.included()) and self.rank() == 0

    def included(self) -> bool:
        """Whether this rank takes part."""
        return bool(self.process_set.included())

    def size(self) -> int:
        """The process set's size."""
        return int(self._ranks())

    def local_size(self) -> int:
        """Number of ranks on this machine."""
        return int(self._hvd.local_size())

    def elastic(self) -> bool:
        """Whether the job was started by ``horovodrun`` with ``--host-discovery-script``."""
        return os.environ.get("HOROVOD_ELASTIC") == "1"

    def mpi_enabled(self) -> bool:
        """Whether Horovod runs on MPI, not on Gloo."""
        return bool(self._hvd.mpi_enabled())

    def node(self) -> str:
        """The host's name: the one that horovodrun has given it, where it says so."""
        return os.environ.get("HOROVOD_HOSTNAME") or super().node()

    def divides(self) -> bool:
        """Whether process sets can be added. All ranks of the job must do so at the same time; in an elastic job they
        would end when ranks come or go."""
        everybody = self.process_set.process_set_id == 0
        return everybody and os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1" and not self.elastic()

    def subsets(self, groups: Sequence[Sequence[int]], new: bool) -> list[Collectives]:
        """As ``Collectives.subsets``: process sets that the job has, or new ones."""
        if self.elastic():
            raise NoSubsetsError("this is an elastic job, whose process sets end when ranks come or go: leave it out")
        everybody = self.process_set.ranks
        wanted = [sorted(everybody[member] for member in group) for group in groups]
        table = self._hvd.mpi_ops._basics._get_process_set_ids_and_ranks()  # Horovod has no public call for it
        known = {tuple(ranks): number for number, ranks in table.items()}
        missing = [ranks for ranks in wanted if tuple(ranks) not in known]
        if missing and not new:
            shown = ", ".join(f"hvd.ProcessSet({ranks})" for ranks in missing)
            raise NoSubsetsError(
                "Horovod has no process sets for its groups of ranks. Let it make them: set the environment variable "
                "HOROVOD_DYNAMIC_PROCESS_SETS=1 on every rank, or call hvd.init(process_sets='dynamic'). Or, for an "
                f"optimizer with a process_set of its own, make them all: hvd.init(process_sets=[{shown}])"
            )
        own: list[HorovodCollectives] = []
        for ranks in wanted:
            if tuple(ranks) in known:
                one = self._hvd.ProcessSet(ranks)
                one.process_set_id = known[tuple(ranks)]
            else:
                one = self._hvd.add_process_set(ranks)
            if self._hvd.rank() in ranks:
                own.append(self._subset(one))
                own[-1].stay()
        return list(own)

    @abstractmethod
    def _subset(self, process_set: Any) -> HorovodCollectives:
        """Collectives of a process set that this rank is in."""

    def allgather(self, data: U8, name: str) -> U8:
        """As ``Collectives.allgather``, under a name that explains a stall."""
        return super().allgather(data, f"{name} ({HINT})")
