"""What LocalSGD does with PyTorch's parameters; ``engine/local_exchanges.py`` says when."""

from __future__ import annotations

import copy
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine.compiling import Compilation
from hvd_deepreduce.engine.fragments import Fragment
from hvd_deepreduce.engine.local_exchanges import LocalExchanges
from hvd_deepreduce.engine.local_options import Options
from hvd_deepreduce.engine.local_sgd import not_exchanged
from hvd_deepreduce.engine.peers import Peers, Quorum, QuorumPeers, StorePeers
from hvd_deepreduce.engine.state import Reshard
from hvd_deepreduce.engine.tensors import Device
from hvd_deepreduce.exchange.statements import MismatchError
from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.owners import described, of_shard, with_plain_names
from hvd_deepreduce.torch.rendezvous import Rendezvous
from hvd_deepreduce.torch.tensors import (
    TorchTensors,
    accumulated_in,
    as_tensors,
    is_sharded,
    of_each,
    on_host,
    own,
)
from hvd_deepreduce.wire.standalone import ContainerError

if TYPE_CHECKING:
    from hvd_deepreduce.torch.sharding import Mates

T = TypeVar("T")
UNUSABLE = (
    "The replicas have parted: load a checkpoint on all ranks, close() this LocalSGD, and make a new one on all of them"
)
Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

HEARD_SECONDS = 2.0
"""From the end of a vote on one rank to its end on another one, at most."""


class Updates(LocalExchanges[torch.Tensor]):
    """
    Args:
        given: settings.
        inner: the optimizer of this rank's steps.
        names: of all parameters of the model, by id.
        pairs: the trained ones by name.
        outer, process_set, process_group, store: as for ``LocalSGD``.
    """

    unusable = UNUSABLE
    advice = "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step"
    keys: tuple[str, ...] = ("outer", "compression")

    def __init__(
        self,
        given: Options,
        inner: torch.optim.Optimizer,
        names: Mapping[int, str],
        pairs: Mapping[str, torch.Tensor],
        outer: Outer | None,
        process_set: Any,
        process_group: dist.ProcessGroup | None,
        store: SharedStore | Quorum | None,
    ) -> None:
        self.tensors = tensors = list(pairs.values())
        self._mates: Mates | None = None
        self._voted: tuple[Any, torch.Tensor] | None = None  # a step check that this rank has begun after an error
        self._inner, self._names = inner, names
        self._make_outer = outer or self._default_outer
        self._group = process_group
        self._framework = TorchTensors()
        repeated = [""] * len(tensors)
        collectives: Any
        if any(map(is_sharded, tensors)):
            from hvd_deepreduce.torch import sharding

            sharding.refuse_measured(given.config, pairs)
            replica = sharding.ranks(pairs)
            self._mates = sharding.Mates(self.kind, replica, self._framework, self.unusable)
            repeated = [sharding.repetition(one, replica) for one in tensors]
        if store is not None:
            collectives = store
            self.advice = "load the same checkpoint, or make the models with the same seed"
            self._join(QuorumPeers(self, store) if isinstance(store, Quorum) else StorePeers(self, store))
        elif process_group is None:
            collectives = _over_horovod(self._framework, process_set)
        else:
            met = Rendezvous("LocalSGD", process_group).meet(process_group)
            collectives = DistributedCollectives(self._framework, process_group, far=True, met=met)
            self.advice = "broadcast rank 0's parameters (torch.distributed.broadcast) before the first step"
        mine = {name: own(one) for name, one in pairs.items()}
        parameters = described(mine)
        for parameter, one in zip(parameters, repeated, strict=True):
            parameter.repeated = one
        # The first exchange comes after some local steps, and need not wait for it.
        Compilation(given.config, self._framework, [self._framework.device(one) for one in mine.values()], False)
        nbytes = [one.nbytes for one in mine.values()]
        super().__init__(given, collectives, parameters, nbytes, self._framework, [one.numel() for one in tensors])

    def _join(self, peers: Peers[torch.Tensor]) -> None:
        """Exchanges among peers, of which the ranks of this one send each its part."""
        self.peers = peers
        if self._mates is not None:
            collectives, store = self._mates.collectives, peers.store
            self.ranks_of_peer, self.leads = collectives.size(), collectives.rank() == 0
            if isinstance(store, SharedStore):
                store.part = collectives.rank()
                with self.together():
                    store.run = self.told(lambda: secrets.token_hex(8))

    def _default_outer(self, anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
        local = self.local
        nesterov = local.nesterov and local.momentum > 0
        return torch.optim.SGD(anchors, lr=local.lr, momentum=local.momentum, nesterov=nesterov)

    def _outer_of(self, anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
        outer = self._make_outer(anchors)
        if not isinstance(outer, torch.optim.Optimizer):
            raise TypeError(
                f"outer returned {type(outer).__name__}, but it must return an optimizer of the tensors that it is "
                "given, as partial(torch.optim.SGD, lr=1.0) does"
            )
        return outer

    # As LocalState and LocalExchanges say

    def new_anchors(self) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        anchors = [self._kept(own(one).to(accumulated_in(one), copy=True)) for one in self.tensors]
        return anchors, self._outer_of(anchors)

    def _kept(self, anchor: torch.Tensor) -> torch.Tensor:
        """A new anchor, where the settings say."""
        if self.local.anchors == "device" or anchor.device.type == "cpu":
            return anchor
        return anchor.cpu().pin_memory()

    def _near(self, number: int, anchor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An anchor where its parameter is. Nothing waits: a copy from pinned memory is in the stream's order, and the
        next outer step, which alone changes anchors, begins by waiting for means on this stream."""
        return anchor.to(own(self.tensors[number]).device, dtype, non_blocking=True)

    @property
    def mates(self) -> DistributedCollectives | None:
        """Of the ranks that hold parts of this replica; None: this rank holds all."""
        return None if self._mates is None else self._mates.collectives

    def begin(self) -> None:
        if self._mates is not None:
            self._mates.check()
        super().begin()

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            with super().together() if self._mates is None else self._mates.together():
                yield
        except Exception as error:
            self.leave(error)
            raise

    def leave(self, error: Exception) -> None:
        """Tells the ranks of the other replicas of an error that they do not have, in what they wait for."""
        known, collectives = isinstance(error, MismatchError | ContainerError), self.collectives
        if self.awaited == "nothing" or known or not isinstance(collectives, DistributedCollectives):
            return
        if error is collectives.failure:
            return
        self.engine.note_failure(error)
        with suppress(RuntimeError):  # they may have ended
            if self.awaited == "containers":
                collectives.check(error)
            elif self._voted is None:
                voted = collectives.start_vote(self.engine.vote(self.agreed))
                self._voted = voted if self.awaited == "next" else None
        self.awaited = "next"

    def stay(self) -> None:
        if self._mates is not None:
            self._mates.stay()

    def anywhere(self, flag: bool) -> bool:
        return flag if self._mates is None else self._mates.anywhere(flag)

    def told(self, find: Callable[[], T]) -> T:
        return find() if self._mates is None else self._mates.told(find)

    def of_all(self, value: T) -> list[T]:
        return [value] if self._mates is None else self._mates.of_all(value)

    def close(self) -> None:
        super().close()
        if self._mates is not None:
            self._mates.close()

    def device(self, number: int) -> Device:
        return self._framework.device(self.tensors[number])

    def check_parameters(self) -> None:
        known = {id(tensor) for tensor in self.tensors}
        trained = (one for group in self._inner.param_groups for one in group["params"] if one.requires_grad)
        late = [one for one in trained if id(one) not in known]
        if late:
            how = f"parameters were unfrozen (requires_grad), or given to the optimizer, after {self.kind} was made"
            unknown = (self._names.get(id(one), f"of shape {list(one.shape)}") for one in late[:5])
            raise not_exchanged(self.kind, how, unknown)
        pairs = zip(self.parameters, self.tensors, strict=True)
        other = [one.name for one, tensor in pairs if accumulated_in(tensor).itemsize != one.accumulated_in.itemsize]
        if other:
            names = ", ".join(other[:5])
            raise RuntimeError(
                f"parameters were converted to float64, or from it, after {self.kind} was made: {names}. Convert the "
                f"model, and then make the optimizer and {self.kind}"
            )

    def frozen(self) -> list[int]:
        return [
            number
            for number, one in enumerate(self.tensors)
            if not one.requires_grad and one.grad is None  # with a gradient, the optimizer steps it
        ]

    def update(self, number: int) -> torch.Tensor:
        base = self._near(number, (self.bases or self.anchors)[number])
        mine = own(self.tensors[number])
        return base.to(mine.dtype).to(base.dtype) - mine.to(base.dtype)

    def nothing(self, number: int) -> torch.Tensor:
        return torch.zeros_like(own(self.tensors[number]), dtype=self.anchors[number].dtype)

    def finite(self, updates: Iterable[torch.Tensor]) -> bool:
        given = [one for one in updates if one.numel()]
        return not given or math.isfinite(float(torch.nn.utils.get_total_norm(given, math.inf)))

    def check_step(self, vote: Floats, name: str, tally: Callable[[Floats], object]) -> None:
        if self._voted is not None:
            voted, self._voted = self._voted, None
            tally(self.collectives.wait_votes(voted))
            return
        self.collectives.start_step_check(vote, name, tally)
        if self.agreed:
            self.collectives.wait_step_check()
        else:
            self.collectives.await_all(None)

    def goes_ahead(self) -> bool:
        # Under Horovod, ranks may still be missing before they have been compared: the step check is waited for with
        # patience then.
        return self.agreed or isinstance(self.collectives, DistributedCollectives)

    def start_vote(self, vote: Floats, name: str) -> Any:
        voted, self._voted = self._voted, None
        return voted or super().start_vote(vote, name)

    def outer_step(self, fragment: Fragment[torch.Tensor]) -> None:
        for number, mean in fragment.updates.items():
            self.anchors[number].grad = mean.to(self.anchors[number].device)  # from a GPU to the host it waits
        self.outer.step()
        for number in fragment.numbers:
            self.anchors[number].grad = None

    def settle(self) -> None:
        if len(self.fragments) > 1 and self._group is not None and self._in_flight():
            # Collectives are matched by their order. Ranks that went on would let several exchanges alternate.
            Rendezvous("state_dict", self._group, clock=self.clock).meet(self._group)
        super().settle()
        self._framework.settle(self.tensors)

    def copy(self, number: int) -> torch.Tensor:
        return own(self.tensors[number]).clone()

    def taken(self, number: int) -> torch.Tensor:
        mine, anchor = own(self.tensors[number]), self.anchors[number]
        copied: torch.Tensor = anchor.to(mine.device, mine.dtype, copy=True)
        return copied

    def forget(self) -> None:
        self._error = None
        if self._voted is not None and self._heard(self._voted[0]):
            self._voted = None
        super().forget()

    def _heard(self, vote: Any) -> bool:
        """Whether the others have heard a vote that this rank has begun after an error. They may have loaded a state
        since then; the vote can end here a little later than there."""
        end = time.monotonic() + HEARD_SECONDS
        while not vote.is_completed() and time.monotonic() < end:
            time.sleep(0.01)
        return bool(vote.is_completed())

    def load_state_dict(self, state: Any, reshard: Reshard = False, own: Any = None) -> None:
        state, own = of_each(_with_plain_names, state, reshard), _with_plain_names(own)
        if self.peers is None or reshard is not False:
            super().load_state_dict(state, reshard, own)
            return
        state, others = self.peers.adopted(state)
        super().load_state_dict(state)
        if others:  # the progress that the parameters have beyond the anchor is the other peer's
            for fragment in self.fragments:
                self.follow_anchor(fragment)

    @torch.no_grad()
    def follow(self, number: int, start: torch.Tensor | None, keeps: float) -> None:
        mine, anchor = own(self.tensors[number]), self.anchors[number]
        taken = self._near(number, anchor, mine.dtype)
        if start is not None:
            mine.add_(taken - start)
        elif keeps:
            mine.lerp_(taken, 1 - keeps)
        else:
            mine.copy_(taken)
        if self.bases:
            self.bases[number].copy_(anchor)

    @torch.no_grad()
    def take_back(self, number: int, start: torch.Tensor, unsent: torch.Tensor) -> torch.Tensor:
        mine = own(self.tensors[number])
        moved = (start + unsent).to(mine.dtype)
        mine.add_(moved - start)
        return moved

    def unsent(self, number: int, grown: Floats) -> torch.Tensor:
        return self._framework.tensor(grown).view_as(own(self.tensors[number]))

    def renew(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            state = self._inner.state.get(self.tensors[number], {}).values()
            held = (own(one) for one in state if isinstance(one, torch.Tensor) and one.is_floating_point())
            if self.anywhere(not self.finite(held)):
                del self._inner.state[self.tensors[number]]

    def about_outer(self) -> str:
        return f"{type(self.outer).__name__} {numbers(self.outer.defaults)}"

    def values(self, anchor: torch.Tensor) -> Any:
        return anchor.detach().cpu().numpy()

    def saved(self, number: int, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.anchors[number].dtype, copy=True)

    def mean_of(self, number: int, saved: torch.Tensor) -> torch.Tensor:
        return saved.detach().to(own(self.tensors[number]).device, copy=True)

    def copy_of(self, number: int, saved: torch.Tensor) -> torch.Tensor:
        return saved.detach().to(own(self.tensors[number]), copy=True)

    def outer_state(self) -> dict[str, Any]:
        return {"outer": copy.deepcopy(self.outer.state_dict())}

    def pack(self, state: dict[str, Any]) -> dict[str, Any]:
        shard = {} if self._mates is None else {"shard": self._mates.collectives.place()}
        return {"compression": {**as_tensors(state), **shard}}

    def unpack(self, state: Any) -> Any:
        shard = None if self._mates is None else self._mates.collectives.place()
        return on_host(of_shard(state["compression"], shard))

    def restoring(self, state: Mapping[str, Any]) -> Callable[[], None]:
        def on_devices(kept: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
            every = zip(self.parameters, self.tensors, strict=True)
            copies = (kept[parameter.name].detach().to(one.device, copy=True) for parameter, one in every)
            return list(map(self._kept, copies))

        anchors = on_devices(state["anchors"])
        outer = self._outer_of(anchors)
        outer.load_state_dict(state["outer"])
        bases = [] if self._times is None else on_devices(state["bases"] or state["anchors"])

        def restore() -> None:
            self.anchors, self.bases, self.outer = anchors, bases, outer

        return restore


def _with_plain_names(state: Any) -> Any:
    return with_plain_names(state, ("anchors", "bases", "means", "starts", "unsent", "frozen", "resting"))


def numbers(settings: Mapping[str, Any]) -> dict[str, list[float]]:
    """Those of an optimizer's settings; not those that are off, as PyTorch adds some when a state is loaded."""
    found = {}
    for key, one in settings.items():
        given = one.tolist() if isinstance(one, torch.Tensor) else one
        each = list(given) if isinstance(given, tuple | list) else [given]  # betas, for instance
        if all(isinstance(number, int | float) for number in each) and given is not False:
            found[key] = each
    return found


def _over_horovod(framework: TorchTensors, process_set: Any) -> Any:
    """Raises ``ImportError`` without Horovod, and ``RuntimeError`` if it does not know the ranks, as under torchrun."""
    instead = "give LocalSGD process_group=torch.distributed.group.WORLD in a job that was started by torchrun"
    try:
        import horovod.torch as hvd

        from hvd_deepreduce.torch.collectives import TorchCollectives
    except ImportError as error:
        raise ImportError(f"LocalSGD runs on Horovod here, which cannot be imported ({error}): {instead}") from error
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1 and not hvd.is_initialized():
        raise RuntimeError(
            "LocalSGD runs on Horovod here, which was not initialized: call hvd.init() first. Without Horovod, call "
            f"torch.distributed.init_process_group() first, before which group.WORLD is None, and {instead}"
        )
    if ranks > 1 and (not hvd.is_initialized() or hvd.size() == 1):
        raise RuntimeError(
            f"LocalSGD runs on Horovod here, which does not know the {ranks} ranks of torch.distributed: {instead}"
        )
    return TorchCollectives(framework, process_set)
