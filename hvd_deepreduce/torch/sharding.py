"""Models whose parameters are sharded by ``fully_shard``: which shards a rank trains, and what they are on it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

LINES = (
    'mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard")); fully_shard(module, '
    'mesh=mesh["shard"]) for each module and for the model; compress_replicas(model, mesh["replicate"], '
    '"topk_rice_qsgd")'
)


def trained(model: torch.nn.Module) -> dict[str, DTensor]:
    """The sharded parameters that need gradients, by name; without empty shards."""
    every = model.named_parameters()
    return {name: one for name, one in every if one.requires_grad and isinstance(one, DTensor) and size(one)}


def units(model: torch.nn.Module, shards: Mapping[str, DTensor], whole: bool) -> list[list[DTensor]]:
    """The trained parameters that go together, in the model's order: of each FSDP module those that are in no FSDP
    module inside it, or of the ``whole`` model. Apart from them are those that several ranks of a replica hold whole,
    as under tensor parallelism: they stay equal if what is selected from them does not depend on others.
    """
    order = {name: at for at, (name, one) in enumerate(model.named_modules()) if isinstance(one, FSDPModule)}
    found: dict[tuple[int, bool], list[DTensor]] = {}
    for name, one in shards.items():
        owner = "" if whole else name.rpartition(".")[0]
        while owner not in order:
            owner = owner.rpartition(".")[0]
        found.setdefault((order[owner], is_repeated(one)), []).append(one)
    return [found[key] for key in sorted(found)]


def is_repeated(tensor: DTensor) -> bool:
    """Whether several ranks hold the same part of a tensor."""
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(placement.is_replicate() and ranks > 1 for placement, ranks in sizes)


def check_replicas(model: torch.nn.Module, shards: Mapping[str, DTensor], group: dist.ProcessGroup) -> None:
    """Raises an error if the model, with these trained shards, cannot be used, or the group is not that of its
    replicas."""
    plain = [name for name, one in model.named_parameters() if one.requires_grad and not isinstance(one, DTensor)]
    if plain:
        raise ValueError(
            f"fully_shard was told to ignore {', '.join(plain[:5])}, which neither it nor compress_replicas would "
            "reduce: shard or freeze them"
        )
    if not shards:
        raise ValueError("this rank has no shard of a parameter that needs gradients: there is nothing to exchange")
    if any(one.to_local().is_meta for one in shards.values()):
        raise ValueError("the model has no values yet (device meta): call compress_replicas after to_empty and init")
    for module in model.modules():
        parts = module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ()
        if any(part._is_hsdp for part in parts):
            raise TypeError(
                "fully_shard was given a mesh of two dimensions, so FSDP itself sums gradients over the replicas, "
                f"uncompressed. Give it the dimension of the shards alone. Write: {LINES}"
            )
    replicas, own = set(dist.get_process_group_ranks(group)), dist.get_rank()
    for name, one in shards.items():
        others = replicas & set(ranks({name: one})) - {own}
        if others:
            raise ValueError(
                f"ranks {sorted(others)} hold other shards of {name}, and are in the mesh of the replicas: give "
                f"compress_replicas the other dimension of the mesh. Write: {LINES}"
            )


def ranks(tensors: Mapping[str, DTensor]) -> list[int]:
    """Those that hold parts of these tensors: of one replica."""
    return sorted({rank for one in tensors.values() for rank in one.device_mesh.mesh.flatten().tolist()})


def size(tensor: DTensor) -> int:
    """Elements of this rank's shard."""
    return tensor.to_local().numel()


def local(tensors: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
    """This rank's shards, which share the tensors' memory."""
    return {name: one.to_local() for name, one in tensors.items()}


def gradient(tensor: DTensor) -> torch.Tensor:
    """The shard's gradient; zeros if there is none."""
    grad = tensor.grad
    return torch.zeros_like(tensor.to_local()) if grad is None else grad.to_local()  # type: ignore[attr-defined]


def write(tensor: DTensor, flat: torch.Tensor) -> None:
    """Makes this flat vector the shard's gradient."""
    own = gradient(tensor)
    own.copy_(flat.view(own.shape))
    if tensor.grad is None:
        tensor.grad = DTensor.from_local(
            own, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
