"""Compressed gradients between the replicas of a sharded model: HSDP with PyTorch's ``fully_shard`` (FSDP2).

FSDP reduces and scatters gradients among the ranks of a shard group. Each rank then holds the sum for its shard, and
exchanges it with the ranks of the other replicas that hold the same shard. Error feedback lives on the shard. The
gradients of an FSDP module's own parameters are a bucket (``bucket_driver.py``), which is taken when the last of them
has come, while the backward pass goes on. When it is over, the means are in the parameters' ``grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.compression import GradientCompression
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.torch.bucket_driver import Buckets, Made, Where, for_buckets
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.owners import described
from hvd_deepreduce.torch.rendezvous import Rendezvous
from hvd_deepreduce.torch.tensors import TorchTensors, hashes

LINES = (
    'mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard")); fully_shard(module, '
    'mesh=mesh["shard"]) for each module and for the model; compress_replicas(model, mesh["replicate"], '
    '"topk_rice_qsgd")'
)
INSTEAD = (
    'write compress_replicas(model, mesh["replicate"], "sign_momentum") and the optimizer '
    "hvd_deepreduce.torch.SignMomentum (docs/using.md)"
)
WHERE = Where("compress_replicas", "each module that fully_shard was applied to makes a bucket", "shard other modules")


@dataclass(frozen=True)
class _Bucket:
    """As DDP's ``GradBucket``: the gradients of an FSDP module's own parameters, one after the other.

    Attributes:
        number: in the order of the backward pass.
        tensors: the sharded parameters.
        vector: their gradients; their means, when the step is over.
        last: whether it is the step's last one.
    """

    number: int
    tensors: list[torch.Tensor]
    vector: torch.Tensor
    last: bool

    def index(self) -> int:
        return self.number

    def parameters(self) -> list[torch.Tensor]:
        return self.tensors

    def buffer(self) -> torch.Tensor:
        return self.vector

    def is_last(self) -> bool:
        return self.last


class Replicas(GradientCompression):
    """What :func:`compress_replicas` returns: settings, statistics, and this rank's state.

    Its methods are those of every adapter. ``close`` ends the exchanges; the model then trains each replica by itself.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        group: dist.ProcessGroup,
        config: Config,
        timeout: timedelta | None,
        find_unused: bool,
    ) -> None:
        self._find_unused = find_unused
        self._tensors = TorchTensors()
        owned = _owned(model)
        trained = {name: one for names in owned for name, one in names.items()}
        _check(model, trained, group)
        # The order of the backward pass.
        self._units: list[list[torch.Tensor]] = [list(names.values()) for names in reversed(owned)]
        self._whole = config.scope == "model"
        if self._whole:
            self._units = [[one for unit in self._units for one in unit]]
        self._unit_of = {id(one): number for number, unit in enumerate(self._units) for one in unit}
        local = {name: one.to_local() for name, one in trained.items()}
        limit = None if timeout is None else timeout.total_seconds()
        Rendezvous("compress_replicas", group, limit).meet(group)
        made = Made(trained, described(local), find_unused, lambda: hashes(_local(trained)), INSTEAD)
        collectives = DistributedCollectives(self._tensors, group, timeout)
        self._buckets = Buckets(self._usable(config), collectives, self._tensors, 0, lambda: made, None)
        self._engine = self._buckets.engine
        self._state = _root_state(model)
        self._come: set[int] = set()  # ids of the parameters whose gradients have come
        self._begun: list[tuple[_Bucket, torch.futures.Future[torch.Tensor]]] = []
        this = weakref.ref(self)

        def note(tensor: torch.Tensor) -> None:
            known = this()
            if known is not None:
                known._gradient_came(tensor)

        def compare(module: torch.nn.Module, _: object) -> None:
            known = this()
            if known is not None and torch.is_grad_enabled():
                known._check_parameters(module)

        self._handles: list[Any] = [model.register_forward_pre_hook(compare, prepend=True)]
        for one in trained.values():
            self._handles.append(one.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]

    def state_dict(self) -> dict[str, Any]:
        return self._buckets.state_dict()

    def _load(self, state: State, reshard: Reshard) -> None:
        self._buckets.load(state, reshard)

    def _change(self, new: Config) -> None:
        if (new.scope == "model") is not self._whole:
            raise ValueError(f"scope is {new.scope!r}, and a change to or from 'model' needs a new compress_replicas")
        self._buckets.set_config(self._usable(new))

    def _usable(self, config: Config) -> Config:
        """With scope ``model``, all parameters are in one bucket."""
        return for_buckets(Config.load(config, scope="bucket") if self._whole else config, 0, WHERE)

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._buckets.close()
        self._units, self._unit_of = [], {}

    # A backward pass

    def _check_parameters(self, model: torch.nn.Module) -> None:
        """Raises ``RuntimeError`` if a parameter was replaced, whose gradients would not come here."""
        self._engine.check_open()
        now = {id(one) for one in model.parameters() if isinstance(one, DTensor) and one.requires_grad}
        if not now <= self._unit_of.keys() | {id(one) for one in model.parameters() if not _size(one)}:
            raise RuntimeError(
                "parameters of the model were replaced, or began to need gradients, after compress_replicas, so that "
                "the replicas would no longer exchange their gradients: load states with assign=True, convert and "
                "unfreeze before compress_replicas, or close() its result and call it again, on all ranks"
            )

    def _gradient_came(self, tensor: torch.Tensor) -> None:
        """FSDP has added a gradient to a shard's."""
        if not self._state._state_ctx.is_last_backward:
            return  # the shard accumulates
        if not self._come:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._come.add(id(tensor))
        while len(self._begun) < len(self._units) - 1:  # the last one is begun by ``_end``
            unit = self._units[len(self._begun)]
            if not all(id(one) in self._come for one in unit):
                return
            self._begin(unit)

    def _begin(self, unit: list[torch.Tensor], failure: Exception | None = None) -> None:
        number = len(self._begun)
        parts = [_gradient(one).flatten() for one in unit]
        dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        bucket = _Bucket(number, unit, torch.cat(parts).to(dtype), number + 1 == len(self._units))
        self._begun.append((bucket, self._buckets.take(bucket, failure)))

    def _end(self) -> None:
        """The backward pass is over, and FSDP has ended its own part: waits for the means, and writes them."""
        try:
            while len(self._begun) < len(self._units):
                unit = self._units[len(self._begun)]
                missing = [one for one in unit if id(one) not in self._come]
                failure = None if self._find_unused or not missing else self._unused(missing)
                self._begin(unit, failure)
            for bucket, future in self._begun:
                future.wait()  # on a GPU, the current stream does
                sizes = [_size(one) for one in bucket.tensors]
                for tensor, mean in zip(bucket.tensors, torch.split(bucket.vector, sizes), strict=True):
                    own = _gradient(tensor)
                    own.copy_(mean.view(own.shape))
                    if tensor.grad is None:
                        tensor.grad = _like(tensor, own)
        finally:
            self._begun.clear()
            self._come.clear()

    def _unused(self, missing: Iterable[torch.Tensor]) -> RuntimeError:
        names = [self._buckets.parameter_of(one).name for one in missing]
        return RuntimeError(
            f"no gradient has come of {', '.join(names[:5])}, since this backward pass did not use them: freeze them "
            "(requires_grad_(False)) before compress_replicas, or give it find_unused_parameters=True, with which "
            "they get gradients of zero"
        )


def compress_replicas(
    model: torch.nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    timeout: timedelta | None = None,
    find_unused_parameters: bool = False,
    **settings: Any,
) -> Replicas:
    """Averages the gradients of a model that ``fully_shard`` has sharded over its replicas, compressed.

    Call it once, after ``fully_shard``, on all ranks at the same time, with equal parameters on all replicas. The means
    are in the parameters' ``grad`` when ``backward()`` returns. With ``model.set_is_last_backward(False)``, or
    ``set_requires_gradient_sync(False)``, a backward pass only accumulates.

    Args:
        model: to which ``fully_shard`` was applied, on the mesh of one replica's ranks.
        mesh: of one dimension, or a process group: the ranks that hold the same shard.
        config: as for ``DeepReduceState``. In scope ``bucket``, a bucket has the gradients of an FSDP module's own
            parameters, and is exchanged during the backward pass; in scope ``model``, all at its end.
        timeout: of each exchange; None: PyTorch's default.
        find_unused_parameters: whether a backward pass may use a part of the parameters, another one on each replica.
            The others get gradients of zero.
        **settings: keys of the config, in place of its own.

    Returns:
        What has ``stats()``, ``state_dict()``, ``set_config()`` and ``close()``. Keep it as long as you train.

    Raises:
        TypeError: the model is not sharded, or by native HSDP (a mesh of two dimensions), which reduces over replicas.
        ValueError: the mesh is not that of replicas.
        ConfigError: the config cannot be used.
        MismatchError: in ``backward()``: the ranks differ in release, config, model, parameters or step; on all ranks.
        ContainerError: in ``backward()``: a container cannot be decoded; on all ranks.
        RuntimeError: in ``backward()``: a rank has failed, on all others too; or a parameter was not used.

    Example::
        >>> mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
        >>> for block in [*model.blocks, model]:
        ...     fully_shard(block, mesh=mesh["shard"])
        >>> replicas = compress_replicas(model, mesh["replicate"], "topk_rice_qsgd")
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"the first argument of compress_replicas is {type(model).__name__}, to which fully_shard was not applied. "
            f"Write: {LINES}"
        )
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh of compress_replicas has {mesh.ndim} dimensions, {mesh.mesh_dim_names}: give it the one "
                f'of the replicas, as mesh["replicate"]. Write: {LINES}'
            )
        mesh = mesh.get_group()
    return Replicas(model, mesh, Config.load(config, **settings), timeout, find_unused_parameters)


def _owned(model: torch.nn.Module) -> list[dict[str, DTensor]]:
    """The trained parameters of each FSDP module that are in no FSDP module inside it, in the model's order; without
    empty shards."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    owned: dict[str, dict[str, DTensor]] = {name: {} for name in modules}
    for name, one in model.named_parameters():
        owner = name.rpartition(".")[0]
        while owner not in modules:
            owner = owner.rpartition(".")[0]
        if one.requires_grad and isinstance(one, DTensor) and _size(one):
            owned[owner][name] = one
    return [names for names in owned.values() if names]


def _check(model: torch.nn.Module, trained: Mapping[str, DTensor], group: dist.ProcessGroup) -> None:
    """Raises an error if the model cannot be used, or the group is not that of its replicas."""
    if not trained:
        raise ValueError("the model has no sharded parameter that needs gradients: there is nothing to exchange")
    if any(one.to_local().is_meta for one in trained.values()):
        raise ValueError("the model has no values yet (device meta): call compress_replicas after to_empty and init")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for part in module._get_fsdp_state()._fsdp_param_groups:
                if part._is_hsdp:
                    raise TypeError(
                        "fully_shard was given a mesh of two dimensions, so FSDP itself sums gradients over the "
                        f"replicas, uncompressed. Give it the dimension of the shards alone. Write: {LINES}"
                    )
    ranks, own = set(dist.get_process_group_ranks(group)), dist.get_rank()
    for name, one in trained.items():
        others = ranks & set(one.device_mesh.mesh.flatten().tolist()) - {own}
        if others:
            raise ValueError(
                f"ranks {sorted(others)} hold other shards of {name}, and are in the mesh of the replicas: give "
                f"compress_replicas the other dimension of the mesh. Write: {LINES}"
            )


def _root_state(model: Any) -> Any:
    """FSDP's state of the model, which knows whether a backward pass is the last one; it has no public name."""
    return model._get_fsdp_state()


def _size(tensor: torch.Tensor) -> int:
    return tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()


def _local(tensors: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
    return {name: one.to_local() for name, one in tensors.items()}


def _gradient(tensor: Any) -> torch.Tensor:
    """The shard's gradient; zeros if there is none."""
    grad = tensor.grad
    return torch.zeros_like(tensor.to_local()) if grad is None else grad.to_local()


def _like(tensor: Any, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
