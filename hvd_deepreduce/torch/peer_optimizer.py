"""Gradients of peers that come and go, in each step: an optimizer wrapper whose exchanges go through a store.

``engine/peers.py`` does the exchanges, as for ``LocalSGD``. What is exchanged are gradients, the outer step is that of
the wrapped optimizer, and there is no anchor beside the parameters, which are equal on all peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hvd_deepreduce.config import Config
from hvd_deepreduce.config.local_sgd import LocalSettings
from hvd_deepreduce.engine.fragments import Fragment
from hvd_deepreduce.engine.local_options import Options
from hvd_deepreduce.engine.peers import Peers, Quorum
from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch import sharding
from hvd_deepreduce.torch.discovery import look_at_optimizers
from hvd_deepreduce.torch.local_sgd import LocalSGD, Steps, check_store, fsdp_modules, trained
from hvd_deepreduce.torch.rendezvous import ranks_of
from hvd_deepreduce.torch.tensors import TorchTensors, accumulated_in, hashes, outside_inference_mode, own
from hvd_deepreduce.torch.updates import Updates, numbers

LINE = "optimizer = PeerOptimizer(optimizer, model, config, store=SharedStore(folder, peer=0, peers=4))"
INSTEAD = 'write PeerOptimizer(SignMomentum(model.parameters(), lr), model, "sign_momentum", store=store)'
UNUSABLE = "The ranks of this peer have parted: load a checkpoint on all of them, and make a new PeerOptimizer"
CHECKED = 100
"""Exchanges from one comparison of all parameters to the next: it passes over all of them."""


class Gradients(Updates):
    """The exchanges of ``PeerOptimizer``. ``given`` are this step's gradients, before they are exchanged."""

    kind, unusable = "PeerOptimizer", UNUSABLE
    keys = ("compression", "scheduler")
    has_anchors = False
    not_finite = "gradients of step %d: it leaves this step out"

    def __init__(
        self,
        options: Options,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        pairs: Mapping[str, torch.Tensor],
        store: SharedStore | Quorum,
        scheduler: Any,
        mates: sharding.Mates | None,
    ) -> None:
        self.given: list[torch.Tensor] = []
        self._scheduler, self._alike, self.steps = scheduler, mates, Steps(optimizer)
        super().__init__(options, optimizer, names, pairs, None, None, None, store)
        look_at_optimizers(self.engine, self, set(map(id, self.tensors)), INSTEAD)

    def _join(self, peers: Peers[torch.Tensor]) -> None:
        if self._alike is None:
            super()._join(peers)
            return
        self.peers, self._mates = peers, self._alike
        self.leads = self.sends = self._alike.collectives.rank() == 0

    def new_anchors(self) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        return [], self._inner

    def update(self, number: int) -> torch.Tensor:
        return self.given[number].to(accumulated_in(self.tensors[number]))

    def nothing(self, number: int) -> torch.Tensor:
        tensor = self.tensors[number]
        return torch.zeros_like(own(tensor), dtype=accumulated_in(tensor))

    still = nothing  # the gradient stays in the residual

    def digests(self, fragment: Fragment[torch.Tensor]) -> list[int]:
        if fragment.outer_steps % CHECKED:
            return []
        return list(hashes({str(number): own(one) for number, one in enumerate(self.tensors)}).values())

    def outer_step(self, fragment: Fragment[torch.Tensor]) -> None:
        for number, mean in fragment.updates.items():
            tensor = self.tensors[number]
            if isinstance(tensor, DTensor):
                sharding.write(tensor, mean)
            elif tensor.grad is None or tensor.grad.layout != torch.strided:
                tensor.grad = mean.to(tensor.dtype, copy=True).view_as(tensor)
            else:  # DDP may have its own view of it
                tensor.grad.copy_(mean.view_as(tensor))
        before = self.steps.count
        self._inner.step()
        self.steps.known += self.steps.count - before
        if self._scheduler is not None:
            self._scheduler.step()

    def about_outer(self) -> str:
        """With the learning rates of this step."""
        groups = [sorted(numbers(one).items()) for one in self._inner.param_groups]
        return f"{type(self._inner).__name__} {groups}"

    def copy(self, number: int) -> torch.Tensor:
        return self.tensors[number]  # it needs no copy, as it does not follow an anchor

    taken = copy

    def follow(self, number: int, start: torch.Tensor | None, keeps: float) -> None:
        pass

    def renew(self, numbers: Any) -> None:
        pass

    def outer_state(self) -> dict[str, Any]:
        return {"scheduler": None if self._scheduler is None else self._scheduler.state_dict()}

    def restoring(self, state: Mapping[str, Any]) -> Callable[[], None]:
        if (state["scheduler"] is None) is not (self._scheduler is None):
            raise ValueError("the state was saved with a scheduler, or without one, unlike here: make it as there")
        return lambda: None if self._scheduler is None else self._scheduler.load_state_dict(state["scheduler"])


class PeerOptimizer(LocalSGD):
    """Wraps an optimizer: it steps with the mean gradient of all peers that were there in time.

    A peer is a job of its own: a process, the ranks of a DistributedDataParallel model, or those that hold the shards
    of a model (``fully_shard``, tensor parallelism), which PyTorch connects as ever. The peers share only a store. One
    that dies, hangs or is slow does not end the others' jobs: they wait for it as ``SharedStore`` says. It reads what
    it has missed, and takes the same steps in the same order, so parameters stay equal on all peers, bit for bit. Its
    own gradients that came too late stay in its residual, and are sent later; with the memory ``scaled_momentum`` or
    ``dgc`` they are dropped.

    Begin with the same parameters on all peers. Save the model and ``state_dict()`` of each peer, of its rank 0, or of
    all ranks if they hold shards. A peer that comes back loads its last checkpoint, and goes on from there at the speed
    of the store; or another peer's, and keeps what its own residual has.

    Args:
        optimizer: for the mean gradients.
        model: the module; or the DistributedDataParallel model of this peer's ranks.
        config: as for ``LocalSGD``, with the exchange ``allgather`` and mode ``always``.
        store: how the peers exchange: files, or under torchft a ``ManagedQuorum`` (``torch/torchft.py``).
        scheduler: of the learning rate: it steps after each step of the optimizer, also after those that this peer has
            missed, and is saved with it. Do not call its ``step()``.
        **settings: keys of the config, in place of its own.

    Raises:
        TypeError, ValueError: as ``LocalSGD``.
        ConfigError: the config cannot be used.

    Example::
        >>> store = SharedStore("/shared/job7", peer=2, peers=5)
        >>> optimizer = PeerOptimizer(SignMomentum(model.parameters(), 0.008), model, "sign_momentum", store=store)
    """

    _step_supports_amp_scaling = True  # GradScaler would leave steps out, for which the others wait

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        store: SharedStore | Quorum,
        scheduler: Any = None,
        **settings: Any,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, LocalSGD):
            raise TypeError(
                f"the first argument of PeerOptimizer is {type(optimizer).__name__}, but it must be an optimizer. "
                f"Write: {LINE}"
            )
        loaded = Config.load(config, **settings).for_gradients("PeerOptimizer", "PeerOptimizer")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "scheduler is a ReduceLROnPlateau, which needs a loss in each step, and peers have losses of their "
                "own: use a scheduler that goes by the steps"
            )
        options = Options(loaded, 1, None, LocalSettings(every=1, decay=1.0))
        check_store(options, store)
        mates = None
        if isinstance(model, DistributedDataParallel):
            ranks = ranks_of(model.process_group)
            model, mates = model.module, sharding.Mates("PeerOptimizer", ranks, TorchTensors(), UNUSABLE)
        names, pairs = trained(optimizer, model, None, True, "PeerOptimizer", LINE)
        self.inner = optimizer
        self._updates: Gradients = Gradients(options, optimizer, names, pairs, store, scheduler, mates)
        self._sharded = fsdp_modules(model)
        self._steps = self._updates.steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; a ``ManagedQuorum`` looks meanwhile who is there."""
        super().zero_grad(set_to_none)
        if self._updates.peers is not None:
            self._updates.peers.prepare()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Exchanges the gradients, and steps with their mean, which they are afterwards; first the steps that the other
        peers have taken without this one. A peer whose gradients have NaN or infinity takes no step.

        Raises:
            MismatchError: this peer has another release, config, model or other parameters than the others; or it was
                away for too long.
            ContainerError: what a peer has sent cannot be decoded.
            RuntimeError: another rank of this peer has failed; or ``close`` was called.
        """
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self.step)(closure)  # type: ignore[no-untyped-call, no-any-return]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = self._updates
        if self._takes_part("step"):
            self._unscale()  # infinite gradients stay so, and are left out as any
            updates.given = [_gradient(one) for one in updates.tensors]
            try:
                updates.step()
            finally:
                updates.given = []
        return loss

    @outside_inference_mode()
    def sync(self) -> None:
        """Takes the steps that the other peers have taken meanwhile, as before an evaluation. Under torchft there are
        none."""
        updates = self._updates
        if self._takes_part("sync") and updates.peers is not None:
            updates.peers.check()
            with updates.together():
                updates.peers.catch_up(updates.fragments[0])
            self._reshard()


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its gradient, or of this rank's part of it, as the bucket takes its memory; zeros if there is none."""
    if isinstance(tensor, DTensor):
        return sharding.gradient(tensor).clone()
    if tensor.grad is None:
        return torch.zeros_like(tensor)
    dense = tensor.grad.layout == torch.strided
    return tensor.grad.detach().clone() if dense else tensor.grad.detach().to_dense()
