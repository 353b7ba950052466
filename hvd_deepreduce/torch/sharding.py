"""Models whose parameters are sharded by ``fully_shard`` or tensor parallelism: which shards a rank trains, what they
are on it, and the ranks that hold the others."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves

from hvd_deepreduce.config import Config, ConfigError
from hvd_deepreduce.engine.parameter import plain
from hvd_deepreduce.exchange.settings import AutoExchange
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.owners import by_plain_name
from hvd_deepreduce.torch.rendezvous import Rendezvous, ranks_of
from hvd_deepreduce.torch.tensors import TorchTensors, own

_log = logging.getLogger(__name__)
T = TypeVar("T")
MESH = (
    'mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard")); fully_shard(module, '
    'mesh=mesh["shard"]) for each module and for the model; '
)
LINES = {
    "compress_replicas": f'{MESH}compress_replicas(model, mesh["replicate"], "recommended")',
    "LocalSGD": (
        f'{MESH}optimizer = LocalSGD(torch.optim.AdamW(model.parameters(), lr), model, "adamw_safe", '
        'process_group=mesh["replicate"].get_group())'
    ),
    "PeerOptimizer": (
        "fully_shard(module) for each module and for the model; optimizer = PeerOptimizer(optimizer, model, "
        '"sign_momentum", store=SharedStore(folder, peer=0, peers=4))'
    ),
}
"""What to write."""


def trained(model: torch.nn.Module) -> dict[str, DTensor]:
    """The sharded parameters that need gradients, by name, also those of which this rank has no elements."""
    every = by_plain_name(model.named_parameters())
    return {name: one for name, one in every.items() if one.requires_grad and isinstance(one, DTensor)}


def units(model: torch.nn.Module, shards: Mapping[str, DTensor], whole: bool) -> list[list[DTensor]]:
    """The trained parameters that go together, in the model's order: of each FSDP module those that are in no FSDP
    module inside it, or of the ``whole`` model. Apart from them are those that several ranks of a replica hold whole,
    as under tensor parallelism: they stay equal if what is selected from them does not depend on others.
    """
    replica = ranks(shards)
    modules = enumerate(model.named_modules())
    order = {plain(f"{name}.")[:-1]: at for at, (name, one) in modules if isinstance(one, FSDPModule)}
    found: dict[tuple[int, str], list[DTensor]] = {}
    for name, one in shards.items():
        owner = "" if whole else name.rpartition(".")[0]
        while owner not in order:
            owner = owner.rpartition(".")[0]
        found.setdefault((order[owner], repetition(one, replica)), []).append(one)
    return [found[key] for key in sorted(found)]


def repetition(tensor: torch.Tensor, replica: Sequence[int]) -> str:
    """The same text for tensors of which the same ranks of a replica hold the same part: what they are sharded over.
    Empty if no two ranks hold the same part.

    Args:
        replica: its ranks.
    """
    if not isinstance(tensor, DTensor):
        return "nothing"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    over = [at for at, placement in enumerate(tensor.placements) if not placement.is_replicate() and mesh.size(at) > 1]
    if prod(mesh.size(at) for at in over) >= len(replica):
        return ""
    return ", ".join(names[at] for at in over) or "nothing"


def refuse_measured(config: Config, shards: Mapping[str, torch.Tensor]) -> None:
    """Raises ``ConfigError`` if ranks that hold the same parameter whole would choose by times that each has measured:
    the parameter would not stay equal on them."""
    exchange = config.exchange
    if config.mode == "auto":
        setting = "mode is 'auto'"
    elif isinstance(exchange, AutoExchange) and None in (exchange.bandwidth, exchange.latency):
        setting = "exchange is 'auto'"
    else:
        return
    replica = ranks(shards)
    if whole := [name for name, one in shards.items() if repetition(one, replica)]:
        raise ConfigError(
            f"{setting}, which goes by measured times, and several ranks of a replica hold {', '.join(whole[:3])} "
            "whole, as under tensor parallelism: they could choose differently, and it would differ on them. Set "
            "mode to 'always', and exchange to 'allgather' or 'reduce_scatter'"
        )


def replicas_of(mesh: object) -> dist.ProcessGroup:
    """The process group that ``compress_replicas`` was given, or of its mesh.

    Raises:
        TypeError: it is neither.
        ValueError: the mesh has several dimensions.
    """
    line = f"Write: {LINES['compress_replicas']}"
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"the mesh of compress_replicas is {mesh!r}; it must be a DeviceMesh of one dimension, or a process group. "
            f"{line}"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"the mesh of compress_replicas has {mesh.ndim} dimensions, {mesh.mesh_dim_names}: give it that of the "
            f'replicas, as mesh["replicate"]. {line}'
        )
    return mesh.get_group()


def check_replicas(
    model: object, shards: Mapping[str, DTensor], group: dist.ProcessGroup | None, call: str = "compress_replicas"
) -> None:
    """Raises an error if the model, with these trained shards, cannot be used, or the group is not that of its
    replicas.

    Args:
        group: None: the replicas are in other jobs.
        call: which the user has called: a key of ``LINES``.
    """
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    sharded = [one for one in modules[:1] if any(isinstance(each, FSDPModule) for each in modules)]
    every = (pair for one in sharded for pair in one.named_parameters())
    plain = [name for name, one in every if one.requires_grad and not isinstance(one, DTensor)]
    if plain:
        raise ValueError(
            f"fully_shard was not applied to {', '.join(plain[:5])}, or told to ignore them, so that neither it nor "
            f"{call} would reduce their gradients within a replica: shard or freeze them"
        )
    if not shards:
        raise ValueError("the model has no sharded parameter that needs gradients: there is nothing to exchange")
    if odd := [name for name, one in shards.items() if not one.is_floating_point()]:
        raise TypeError(
            f"parameter {odd[0]} is {shards[odd[0]].dtype}, and {call} exchanges floating-point parameters: make it a "
            "real one with torch.view_as_real, or freeze it"
        )
    if any(one.to_local().is_meta for one in shards.values()):
        raise ValueError(f"the model has no values yet (device meta): call {call} after to_empty and init")
    for module in modules:
        if isinstance(module, FSDPModule) and any(part._is_hsdp for part in _param_groups(module)):
            raise TypeError(
                "fully_shard was given a mesh of two dimensions, so FSDP itself sums gradients over the replicas, "
                f"uncompressed. Give it the dimension of the shards alone. Write: {LINES[call]}"
            )
    replicas, own = set(ranks_of(group) if group else ()), dist.get_rank()
    of_model = len(ranks(shards))
    if len(replicas) == 1 and dist.get_world_size() > of_model:
        _log.warning(
            "the mesh or process group of %s has this rank alone, and the job has %d ranks, of which %d hold this "
            "model: no replicas will exchange anything. If the others train it too, give %s the other dimension of "
            "the mesh. Write: %s", call, dist.get_world_size(), of_model, call, LINES[call],
        )  # fmt: skip
    for name, one in shards.items():
        others = replicas & set(ranks({name: one})) - {own}
        if others:
            raise ValueError(
                f"ranks {sorted(others)} hold other shards of {name}, and are in the mesh of the replicas: give {call} "
                f"the other dimension of the mesh. Write: {LINES[call]}"
            )


def _param_groups(module: FSDPModule) -> list[Any]:
    """FSDP's own, of a module: one in PyTorch 2.11, several in 2.13. There is no public call for them."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def ranks(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Those that hold parts of these tensors: of one replica."""
    meshes = {one.device_mesh for one in tensors.values() if isinstance(one, DTensor)}
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})


def size(tensor: torch.Tensor) -> int:
    """Elements of this rank's shard."""
    return own(tensor).numel()


def local(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's shards."""
    return {name: own(one) for name, one in tensors.items()}


def when_backward_begins(model: torch.nn.Module, call: Callable[[torch.Tensor], None]) -> Any:
    """Calls at the beginning of each backward pass from the model's results. Returns what removes it."""

    def watch(*given: Any) -> None:
        for one in tree_leaves(given[-1]):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(call)  # type: ignore[no-untyped-call]

    return model.register_forward_hook(watch)


def gradient(tensor: DTensor) -> torch.Tensor:
    """The shard's gradient; zeros if there is none."""
    grad = tensor.grad
    return torch.zeros_like(tensor.to_local()) if grad is None else grad.to_local()  # type: ignore[attr-defined]


def write(tensor: DTensor, flat: torch.Tensor) -> None:
    """Makes this flat vector the shard's gradient."""
    own = gradient(tensor)
    own.copy_(flat.view(own.shape))
    if tensor.grad is None:
        tensor.grad = sharded_as(tensor, own)


def sharded_as(tensor: DTensor, part: torch.Tensor) -> DTensor:
    """A tensor that is sharded as this one, with this rank's part. The part stays where it is, as those of
    ``CPUOffloadPolicy`` do: ``DTensor.from_local`` would move it to the mesh's device."""
    meta = TensorMeta(tensor.shape, tensor.stride(), part.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


class Mates:
    """The ranks that hold parts of one replica: an error of one becomes an error of all, and of all later calls, since
    their exchanges with other replicas may have gone on.

    Args:
        kind: what all of them make: a key of ``rendezvous.ADVICE``.
        members: the ranks.
        advice: what to do after an error.

    Attributes:
        collectives: of the members.
    """

    def __init__(self, kind: str, members: Sequence[int], tensors: TorchTensors, advice: str) -> None:
        met = Rendezvous(kind, members).meet(members)
        self.collectives = DistributedCollectives(tensors, None, None, members, met=met)
        self._failure: Exception | None = None
        self._advice = advice

    def anywhere(self, flag: bool) -> bool:
        """Whether any of them says so; within ``together``."""
        with self._hearing():
            return self.collectives.check(None, flag)

    def told(self, find: Callable[[], T]) -> T:
        """What the first of them finds, in JSON's types, on all of them; within ``together``."""
        every: list[Any] = self.of_all(find() if self.collectives.rank() == 0 else None)
        return every[0]  # type: ignore[no-any-return]

    def of_all(self, value: T) -> list[T]:
        """What each of them has, in JSON's types; within ``together``."""
        line = np.frombuffer(bytearray(f"{json.dumps(value)}\n".encode()), np.uint8)
        with self._hearing():
            lines = self.collectives.wait_allgather(self.collectives.start_allgather(line, "")).tobytes().splitlines()
        return list(map(json.loads, lines))

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Around a collective of the members: an error of another one is kept."""
        try:
            yield
        except RuntimeError as told:
            self._failure = told
            raise

    def check(self) -> None:
        """Raises ``RuntimeError`` after an error."""
        if self._failure is not None:
            raise RuntimeError(f"an exchange has failed: {self._failure}. {self._advice}")

    def stay(self) -> None:
        """The last error is one that all of them have, and raise later: they go on until then."""
        self._failure = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raises what another rank has raised, as ``RuntimeError``."""
        try:
            yield
        except Exception as error:
            if self._failure is None:
                self._failure = error
                with suppress(RuntimeError):
                    self.collectives.check(error)
            raise
        self.anywhere(False)

    def close(self) -> None:
        self.collectives.close()
