"""The anchor of one rank, and what PyTorch does in an exchange; ``engine/local_sgd.py`` says when there is one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import Parameter, Snapshot
from hvd_deepreduce.engine.fragments import Fragment
from hvd_deepreduce.engine.local_sgd import Every, LocalExchanges, Times
from hvd_deepreduce.engine.state import Reshard
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.rendezvous import Rendezvous
from hvd_deepreduce.torch.states import as_tensors, on_host
from hvd_deepreduce.torch.tensors import TorchTensors

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class Updates(LocalExchanges[torch.Tensor]):
    """
    Args:
        pairs: parameters by name.
        inner: the optimizer of this rank's steps.
        config: with ``local``.
        outer: makes the optimizer of the anchor; None: that of ``config.local``.
        every, times: as in ``LocalExchanges``.
        process_set: of the ranks that take part; None: all.
        process_group: of ``torch.distributed``; None: the job runs on Horovod.
        check: called before an exchange.

    Attributes:
        tensors: of the model, those that are trained.
        anchors: by parameter; empty before ``begin``. float64 where the parameter is, otherwise float32.
        bases: with ``times``, the anchors that this rank took last.
        outer: the optimizer of the anchor; None before ``begin``.
    """

    advice = "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step"

    def __init__(
        self,
        pairs: dict[str, torch.Tensor],
        inner: torch.optim.Optimizer,
        config: Config,
        outer: Outer | None = None,
        every: Every | None = None,
        times: Times | None = None,
        process_set: Any = None,
        process_group: dist.ProcessGroup | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        parameters = [
            Parameter(name, number, tuple(tensor.shape), str(tensor.dtype))
            for number, (name, tensor) in enumerate(pairs.items())
        ]
        self.tensors = tensors = list(pairs.values())
        self._inner = inner
        self._check_parameters = check
        self._outer_factory = outer or self._default_outer
        framework = TorchTensors()
        self.collectives: Any
        if process_group is None:
            self.collectives = _over_horovod(framework, process_set)
        else:
            Rendezvous("LocalSGD", process_group).meet(process_group)
            self.collectives = DistributedCollectives(framework, process_group)
            self.advice = "broadcast rank 0's parameters (torch.distributed.broadcast) before the first step"
        super().__init__(
            config, self.collectives, parameters, [one.numel() * one.element_size() for one in tensors], framework,
            lambda: [framework.device(one) for one in tensors], every, times,
        )  # fmt: skip
        self.anchors: list[torch.Tensor] = []
        self.bases: list[torch.Tensor] = []
        self.outer: torch.optim.Optimizer | None = None

    def _default_outer(self, anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
        local = self.local
        nesterov = local.nesterov and local.momentum > 0
        return torch.optim.SGD(anchors, lr=local.lr, momentum=local.momentum, nesterov=nesterov)

    def begin(self) -> None:
        """Before the first step: takes the parameters as the anchor. Afterwards, it does nothing."""
        if self.anchors:
            return
        anchors = [one.detach().to(accumulated_in(one), copy=True) for one in self.tensors]
        self.outer = self.outer_of(anchors)
        self.anchors = anchors
        if self._times is not None:
            self.bases = [anchor.clone() for anchor in anchors]

    def outer_of(self, anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
        outer = self._outer_factory(anchors)
        if not isinstance(outer, torch.optim.Optimizer):
            raise TypeError(
                f"outer returned {type(outer).__name__}, but it must return an optimizer of the tensors that it is "
                "given, as partial(torch.optim.SGD, lr=1.0) does"
            )
        return outer

    # What is done in an exchange: as LocalExchanges says

    def check_parameters(self) -> None:
        self._check_parameters()

    def update(self, number: int) -> torch.Tensor:
        base = (self.bases or self.anchors)[number]
        own = self.tensors[number].detach()
        return base.to(own.dtype).to(base.dtype) - own.to(base.dtype)

    def nothing(self, number: int) -> torch.Tensor:
        return torch.zeros_like(self.anchors[number])

    def finite(self, updates: Iterable[torch.Tensor]) -> bool:
        return finite(updates)

    def meet(self, word: Floats, name: str, hear: Callable[[Floats], object]) -> None:
        self.collectives.start_meeting(word, name, hear)
        if self.agreed:
            self.collectives.wait_meeting()
        else:
            self.collectives.await_all(None)

    def start_small(self, updates: Mapping[int, torch.Tensor]) -> dict[int, Any]:
        average = self.collectives.start_average
        return {number: average(one, f"update.{self.parameters[number].name}") for number, one in updates.items()}

    def finish_small(self, started: Mapping[int, Any]) -> dict[int, torch.Tensor]:
        finish = self.collectives.finish_average
        return {number: finish(one).to(self.anchors[number].device) for number, one in started.items()}

    def outer_step(self, fragment: Fragment[torch.Tensor]) -> None:
        assert self.outer is not None
        for number, mean in fragment.updates.items():
            self.anchors[number].grad = mean
        self.outer.step()
        for number in fragment.numbers:
            self.anchors[number].grad = None

    def copy(self, number: int) -> torch.Tensor:
        return self.tensors[number].detach().clone()

    @torch.no_grad()
    def follow(self, number: int, start: torch.Tensor | None, keeps: float) -> None:
        own, anchor = self.tensors[number], self.anchors[number]
        taken = anchor.to(own.dtype)
        if start is not None:
            own.add_(taken - start)
        elif keeps:
            own.lerp_(taken, 1 - keeps)
        else:
            own.copy_(taken)
        if self.bases:
            self.bases[number].copy_(anchor)

    def renew(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            state = self._inner.state.get(self.tensors[number], {})
            if not finite(one for one in state.values() if isinstance(one, torch.Tensor) and one.is_floating_point()):
                self._inner.state.pop(self.tensors[number])

    def anchor_values(self, number: int) -> Floats:
        values: Floats = self.anchors[number].cpu().numpy()
        return values

    def about_outer(self) -> str:
        assert self.outer is not None
        defaults = {key: value for key, value in self.outer.defaults.items() if isinstance(value, int | float)}
        return f"{type(self.outer).__name__} {defaults}"

    # State

    def close(self) -> None:
        """Ends the exchanges, and frees everything but the model."""
        self.engine.close()
        self.anchors, self.bases, self.outer = [], [], None

    def state_dict(self) -> dict[str, Any]:
        """Anchor, outer optimizer, residuals and step counts.

        Raises:
            RuntimeError: an exchange is in flight.
        """
        self.check_idle("state_dict")
        self.begin()
        assert self.outer is not None
        return {
            **self.counts(),
            "anchors": self._by_name(self.anchors),
            "bases": self._by_name(self.bases),
            "outer": copy.deepcopy(self.outer.state_dict()),
            "compression": as_tensors(self.engine.state_dict()),
        }

    def load_state_dict(self, own: Any, states: Sequence[Any], reshard: Reshard = False) -> None:
        """Continues where ``state_dict`` was called.

        Args:
            own: the state whose anchor and step counts are taken.
            states: those of all ranks with ``reshard``, otherwise ``own``.

        Raises:
            RuntimeError: an exchange is in flight.
            ValueError: as ``LocalSGD.load_state_dict``; nothing has changed then.
        """
        self.check_idle("load_state_dict")
        for state in states:
            self._check(state)
        made = self._made(own)
        compression = [on_host(state["compression"]) for state in states]
        self.engine.load_state_dict(compression if reshard else compression[0], reshard=reshard)
        self._restore(own, made)

    def _made(self, own: Mapping[str, Any]) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        """Anchor and outer optimizer of a state; this can fail, and changes nothing."""
        anchors = self._on_devices(own["anchors"])
        outer = self.outer_of(anchors)
        outer.load_state_dict(own["outer"])
        return anchors, outer

    def _restore(self, own: Mapping[str, Any], made: tuple[list[torch.Tensor], torch.optim.Optimizer]) -> None:
        self.anchors, self.outer = made
        if self._times is not None:
            self.bases = self._on_devices(own["bases"] or own["anchors"])
        self.restore_counts(own)

    def rewind(self, own: Mapping[str, Any], snapshot: Snapshot) -> None:
        """Returns to a state of this process, whatever its rank is now. Exchanges in flight are forgotten.

        Args:
            own: what ``state_dict`` returned.
            snapshot: of the engine.
        """
        self.engine.rewind(snapshot)
        self.forget()
        self._restore(own, self._made(own))

    def _by_name(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {p.name: tensor.clone() for p, tensor in zip(self.parameters, tensors, strict=False)}

    def _on_devices(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [
            tensors[parameter.name].detach().to(one.device).clone()
            for parameter, one in zip(self.parameters, self.tensors, strict=True)
        ]

    def _check(self, state: Any) -> None:
        """
        Raises:
            ValueError: this is not what ``state_dict`` returns, for this model and these fragments.
        """
        self.check_counts(state, {"anchors", "bases", "outer", "compression"})
        names = {parameter.name for parameter in self.parameters}
        for kind in ("anchors", "bases") if state["bases"] else ("anchors",):
            if state[kind].keys() != names:
                raise ValueError("the parameters of the state and of the model differ: load the state of this model")
            for parameter, tensor in zip(self.parameters, self.tensors, strict=True):
                given, dtype = state[kind][parameter.name], accumulated_in(tensor)
                if given.shape != tensor.shape or given.dtype != dtype or not finite([given]):
                    raise ValueError(
                        f"the anchor of {parameter.name} is {given.dtype} {list(given.shape)}; it must be {dtype} "
                        f"{list(tensor.shape)}, and finite"
                    )


def _over_horovod(framework: TorchTensors, process_set: Any) -> Any:
    """
    Raises:
        ImportError: there is no Horovod.
        RuntimeError: the job was started by torchrun, and Horovod does not know its ranks.
    """
    instead = "give LocalSGD process_group=torch.distributed.group.WORLD in a job that was started by torchrun"
    try:
        import horovod.torch as hvd

        from hvd_deepreduce.torch.collectives import TorchCollectives
    except ImportError as error:
        raise ImportError(f"LocalSGD runs on Horovod here, which cannot be imported ({error}): {instead}") from error
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and (not hvd.is_initialized() or hvd.size() == 1):
        raise RuntimeError(
            f"LocalSGD runs on Horovod here, which does not know the {ranks} ranks of torch.distributed: {instead}"
        )
    return TorchCollectives(framework, process_set)


def accumulated_in(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which its updates are added up."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def finite(tensors: Iterable[torch.Tensor]) -> bool:
    given = list(tensors)
    return not given or math.isfinite(float(torch.nn.utils.get_total_norm(given, math.inf)))
