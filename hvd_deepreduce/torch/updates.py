"""What LocalSGD does with PyTorch's parameters; ``engine/local_exchanges.py`` says when."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine.fragments import Fragment
from hvd_deepreduce.engine.local_exchanges import LocalExchanges
from hvd_deepreduce.engine.local_options import Options
from hvd_deepreduce.engine.local_sgd import not_exchanged
from hvd_deepreduce.engine.tensors import Device
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.owners import described
from hvd_deepreduce.torch.rendezvous import Rendezvous
from hvd_deepreduce.torch.tensors import TorchTensors, as_tensors, on_host

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class Updates(LocalExchanges[torch.Tensor]):
    """
    Args:
        given: settings.
        inner: the optimizer of this rank's steps.
        names: of all parameters of the model, by id.
        pairs: the trained ones by name.
        outer, process_set, process_group: as for ``LocalSGD``.
    """

    advice = "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step"
    keys = ("outer", "compression")

    def __init__(
        self,
        given: Options,
        inner: torch.optim.Optimizer,
        names: Mapping[int, str],
        pairs: Mapping[str, torch.Tensor],
        outer: Outer | None,
        process_set: Any,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.tensors = tensors = list(pairs.values())
        self._inner, self._names = inner, names
        self._make_outer = outer or self._default_outer
        self._framework = TorchTensors()
        collectives: Any
        if process_group is None:
            collectives = _over_horovod(self._framework, process_set)
        else:
            Rendezvous("LocalSGD", process_group).meet(process_group)
            collectives = DistributedCollectives(self._framework, process_group)
            self.advice = "broadcast rank 0's parameters (torch.distributed.broadcast) before the first step"
        nbytes = [one.numel() * one.element_size() for one in tensors]
        super().__init__(given, collectives, described(pairs), nbytes, self._framework)

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
        wider = (torch.float64 if one.dtype == torch.float64 else torch.float32 for one in self.tensors)
        anchors = [one.detach().to(dtype, copy=True) for one, dtype in zip(self.tensors, wider, strict=True)]
        return anchors, self._outer_of(anchors)

    def device(self, number: int) -> Device:
        return self._framework.device(self.tensors[number])

    def check_parameters(self) -> None:
        known = {id(tensor) for tensor in self.tensors}
        trained = (one for group in self._inner.param_groups for one in group["params"] if one.requires_grad)
        late = [one for one in trained if id(one) not in known]
        if late:
            how = "parameters were unfrozen (requires_grad), or given to the optimizer, after LocalSGD was made"
            raise not_exchanged(how, (self._names.get(id(one), f"of shape {list(one.shape)}") for one in late[:5]))

    def update(self, number: int) -> torch.Tensor:
        base: torch.Tensor = (self.bases or self.anchors)[number]
        own = self.tensors[number].detach()
        return base.to(own.dtype).to(base.dtype) - own.to(base.dtype)

    def nothing(self, number: int) -> torch.Tensor:
        return torch.zeros_like(self.anchors[number])

    def finite(self, updates: Iterable[torch.Tensor]) -> bool:
        given = list(updates)
        return not given or math.isfinite(float(torch.nn.utils.get_total_norm(given, math.inf)))

    def check_step(self, vote: Floats, name: str, tally: Callable[[Floats], object]) -> None:
        self.collectives.start_step_check(vote, name, tally)
        if self.agreed:
            self.collectives.wait_step_check()
        else:
            self.collectives.await_all(None)

    def outer_step(self, fragment: Fragment[torch.Tensor]) -> None:
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
            state = self._inner.state.get(self.tensors[number], {}).values()
            if not self.finite(one for one in state if isinstance(one, torch.Tensor) and one.is_floating_point()):
                del self._inner.state[self.tensors[number]]

    def about_outer(self) -> str:
        defaults = {key: value for key, value in self.outer.defaults.items() if isinstance(value, int | float)}
        return f"{type(self.outer).__name__} {defaults}"

    def values(self, anchor: torch.Tensor) -> Any:
        return anchor.detach().cpu().numpy()

    def saved(self, anchor: torch.Tensor) -> torch.Tensor:
        return anchor.clone()

    def outer_state(self) -> dict[str, Any]:
        return {"outer": copy.deepcopy(self.outer.state_dict())}

    def pack(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"compression": as_tensors(state)}

    def unpack(self, state: Any) -> Any:
        return on_host(state["compression"])

    def restoring(self, state: Mapping[str, Any]) -> Callable[[], None]:
        def on_devices(kept: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
            every = zip(self.parameters, self.tensors, strict=True)
            return [kept[parameter.name].detach().to(one.device, copy=True) for parameter, one in every]

        anchors = on_devices(state["anchors"])
        outer = self._outer_of(anchors)
        outer.load_state_dict(state["outer"])
        bases = [] if self._times is None else on_devices(state["bases"] or state["anchors"])

        def restore() -> None:
            self.anchors, self.bases, self.outer = anchors, bases, outer

        return restore


def _over_horovod(framework: TorchTensors, process_set: Any) -> Any:
    """Raises ``ImportError`` without Horovod, and ``RuntimeError`` if it does not know the ranks, as under torchrun."""
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
