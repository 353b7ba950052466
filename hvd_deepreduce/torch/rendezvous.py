"""Waits, for a limited time, for the ranks of ``torch.distributed`` that do not come to where all must meet.

``torch.distributed`` makes process groups when all of their ranks ask for them, and waits half an hour for one that
does not. Here, a rank first writes into the job's store that it is there, and with whom it will exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.horovod import HANDSHAKE_VARIABLE, Patience
from hvd_deepreduce.wire.quoting import quoted

Group = dist.ProcessGroup | Sequence[int] | None
PROBE_SECONDS = 5.0
"""After so long, a rank with the hook looks whether the ranks that are missing reduce a gradient without it."""
NOBODY_CAME = "this rank has waited {seconds} s at {where} for {missing} of its process group. {advice}"
ADVICE = {
    "hook": (
        "Register the hook on every rank, before the same iteration: model.register_comm_hook(state, deepreduce_hook). "
        "If a rank only takes long before its first backward(), give DeepReduceState a larger timeout, or without one "
        f"set the environment variable {HANDSHAKE_VARIABLE} to a larger limit, or to 0 for none"
    ),
    "compress_replicas": (
        "Call compress_replicas on every rank, at the same place of the program. If a rank only takes long to come "
        f"there, give it a larger timeout, or set the environment variable {HANDSHAKE_VARIABLE} to a larger limit, or "
        "to 0 for none"
    ),
    "PeerOptimizer": (
        "Make PeerOptimizer on every rank of a peer, at the same place of the program. If a rank only takes long to "
        f"come there, set the environment variable {HANDSHAKE_VARIABLE} to a larger limit, or to 0 for none"
    ),
    "LocalSGD": (
        "Make LocalSGD on every rank of its process_group, at the same place of the program. If a rank only takes long "
        f"to come there, set the environment variable {HANDSHAKE_VARIABLE} to a larger limit, or to 0 for none"
    ),
    "state_dict": (
        "With fragments and a delay, state_dict() waits for the exchanges that are in flight, which all ranks must do "
        "in one order: call it on every rank after the same local step, or call sync() on every rank before. Nothing "
        "has changed"
    ),
}


class Rendezvous:
    """Ranks that begin to exchange together, or that call ``state_dict`` together.

    Args:
        kind: of what all of them make or call: a key of ``ADVICE``.
        around: a process group, or ranks, all of which must come; None: all.
        limit: the longest time to wait, in seconds; 0: for ever; None: ``handshake_seconds``.
        clock: at which they meet; ranks with other clocks are not there.
    """

    def __init__(self, kind: str, around: Group, limit: float | None = None, clock: int = 0) -> None:
        self._kind, self._around = kind, around
        self._ranks = ranks_of(around)
        self._wait = Patience(self._nobody_came, limit).wait
        group = None if isinstance(around, Sequence) else around or dist.group.WORLD
        # Models that train in threads begin in any order, each in a group of its own.
        name = name_of(group) if group else ""
        self._store = meeting_place(f"{kind} {self._ranks} {name} {clock}")
        self._compared: Counter[str] = Counter()  # how often groups of these ranks were

    def meet(self, partners: Group, gradient: torch.Tensor | None = None) -> Rendezvous:
        """Returns itself, once all ranks have come.

        Args:
            partners: the group of those that this rank will exchange with; the same on all of them.
            gradient: of the shape, dtype and device of what a rank without the hook would reduce in the group
                ``around`` now; unchanged.

        Raises:
            TimeoutError: ranks did not come in time.
            MismatchError: they reduce a gradient without the hook; or the ranks' partners differ. On all ranks that
                have come.
        """
        store = self._store
        store.set(f"rank {dist.get_rank()}", _text(ranks_of(partners)))

        def decided() -> bool:
            return bool(store.check(["decision"]))

        if store.add("ranks", 1) == len(self._ranks):
            store.compare_set("decision", "", "all are here")
        elif gradient is not None and not self._wait(decided, PROBE_SECONDS):
            store.compare_set("decision", "", "probe")
        self._wait(decided)
        if gradient is not None and store.get("decision") == b"probe":
            self._probe(gradient)
        self._compare_partners()
        return self

    def check_groups(self, ranks: Sequence[int], names: str) -> None:
        """Compares the names of groups that these ranks have just made, all of them.

        Raises:
            MismatchError: the groups are not the same on all of them; on all.
        """
        which = f"groups of {_text(ranks)}"
        self._compared[which] += 1
        keys = [f"{which} {self._compared[which]} on {rank}" for rank in (*ranks, dist.get_rank())]
        self._store.set(keys.pop(), names)
        self._wait(lambda: bool(self._store.check(keys)))  # multi_get would keep threads from the store until then
        if len(set(self._store.multi_get(keys))) > 1:
            raise MismatchError(
                "two models began to exchange at the same time, in threads, and on another rank in the other order, so "
                "that each would exchange with the other one. Let one begin after the other, in the same order on "
                "every rank: a LocalSGD as it is made, a DistributedDataParallel in its first backward(). No gradient "
                "was applied"
            )

    def _probe(self, gradient: torch.Tensor) -> None:
        """Reduces what a rank without the hook takes for gradients: it adds its own, and gets NaN."""
        probe = torch.full_like(gradient, float("nan"))
        probe[0] = 1
        assert not isinstance(self._around, Sequence)
        work = dist.all_reduce(probe, group=self._around, async_op=True)
        self._wait(work.is_completed)
        failure: Exception | None = None
        try:
            work.wait()
        except RuntimeError as error:  # as of a hook that reduces another number of bytes
            failure = error
        missing = self._missing()
        if failure is not None and not missing:
            raise failure
        if failure is not None or float(probe[0]) != len(self._ranks):
            raise MismatchError(
                f"{named(missing)} of this model's process group reduced gradients without DeepReduce's hook, or with "
                f"another hook{'' if failure is None else ', or ended'}, while other ranks have it. Register it on "
                "every rank, before the same iteration: model.register_comm_hook(state, deepreduce_hook)"
            ) from failure

    def _compare_partners(self) -> None:
        """Raises ``MismatchError``, on all ranks, if one is to exchange with ranks that are to exchange with others."""
        said: dict[str, list[int]] = {}
        texts = self._store.multi_get([f"rank {rank}" for rank in self._ranks])
        for rank, text in zip(self._ranks, texts, strict=True):
            said.setdefault(text.decode(errors="replace"), []).append(rank)
        if any(text != _text(ranks) for text, ranks in said.items()):
            shown = ", ".join(f"{quoted(text)} on {named(ranks)}" for text, ranks in list(said.items())[:4])
            raise MismatchError(
                f"the ranks were given different process groups: process_group has the ranks {shown}. Give every rank "
                "of a process group that group. No gradient was applied"
            )

    def _nobody_came(self, seconds: int) -> str:
        where = "state_dict()" if self._kind == "state_dict" else "its first exchange"
        advice = ADVICE[self._kind]
        return NOBODY_CAME.format(seconds=seconds, where=where, missing=named(self._missing()), advice=advice)

    def _missing(self) -> list[int]:
        with suppress(RuntimeError):  # the store may have ended
            return [rank for rank in self._ranks if not self._store.check([f"rank {rank}"])]
        return []


def name_of(group: Any) -> str:
    """A process group's name, of which PyTorch has no public call."""
    return str(dist.distributed_c10d._world.pg_names.get(group, ""))


def meeting_place(what: str) -> Any:
    """The part of the job's store that ranks share which have called this, with the same text, equally often."""
    store = dist.distributed_c10d._get_default_store()  # PyTorch has no public call for it
    which = blake2b(what.encode(), digest_size=8).hexdigest()
    store = dist.PrefixStore(f"hvd_deepreduce/{which}", store)  # type: ignore[attr-defined]
    # The store counts how often this rank has come: a process that is started again goes on counting.
    number = store.add(f"rank {dist.get_rank()}", 1)
    return dist.PrefixStore(str(number), store)  # type: ignore[attr-defined]


def ranks_of(group: Group) -> list[int]:
    """The ranks of a group, in their order.

    Raises:
        TypeError: it is one of torchft, whose ranks change.
    """
    if isinstance(group, Sequence):
        return sorted(group)
    if any(kind.__module__.partition(".")[0] == "torchft" for kind in type(group).__mro__):
        raise TypeError(
            f"the process group is torchft's {type(group).__name__}, whose ranks come and go. With the bare model, "
            "write PeerOptimizer(optimizer, model, config, store=ManagedQuorum(manager, process_group, peer=..., "
            "peers=...)), or LocalSGD with this store; ManagedQuorum is in hvd_deepreduce.torch.torchft"
        )
    return sorted(dist.get_process_group_ranks(group))


def _text(ranks: Sequence[int]) -> str:
    return " ".join(map(str, sorted(ranks)))


def named(ranks: Sequence[int]) -> str:
    """Ranks in a message."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" if ranks else "other ranks"
