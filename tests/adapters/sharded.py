"""A small network that is sharded by FSDP, for the cases of several adapters."""

from __future__ import annotations

import tempfile
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector

WIDTH, DEPTH = 33, 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.second(self.first(self.norm(x)).tanh())


class Network(nn.Module):
    """Embedding and head share their weight; a bias of one element is on one shard alone."""

    def __init__(self, width=WIDTH, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.symbols = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.symbols.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens, used=range(DEPTH)):
        x = self.symbols(tokens)
        for number in used:
            x = self.blocks[number](x)
        return self.head(x) * self.scale


def loss_of(model, step, ranks, **how):
    """The mean over the batches of ranks."""
    tokens = [torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(100 * step + rank)) for rank in ranks]
    given = torch.cat(tokens)
    return nn.functional.cross_entropy(model(given[:, :-1], **how).flatten(0, 1).float(), given[:, 1:].flatten())


def flat(model):
    return parameters_to_vector(model.parameters()).detach()


def dense(steps, norm=None):
    """What one process gets with the batches of all ranks."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, range(dist.get_world_size())).backward()
        if norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
    return flat(model)


def check_same(shards, group):
    """The replicas' shards are bitwise equal."""
    own = [one.contiguous().view(torch.uint8).numpy().tobytes() for one in shards]
    everything = [None] * dist.get_world_size(group)
    dist.all_gather_object(everything, own, group=group)
    assert all(one == own for one in everything), "the replicas differ"


@cache
def mesh_of(replicas, shards):
    """The same for all jobs: every group has threads of Gloo that wake a hundred times a second, and takes long to
    make."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


class Sharded:
    """A sharded model in replicas."""

    optimizer: torch.optim.Optimizer

    def __init__(self, replicas=2, model=None, shard=None, wrap=None):
        size = dist.get_world_size()
        self.mesh = mesh_of(replicas, size // replicas)
        self.model = Network() if model is None else model
        for number, block in enumerate(self.model.blocks):
            self.model.blocks[number] = block = wrap(block) if wrap else block
            fully_shard(block, mesh=self.mesh["shard"], **(shard or {}))
        fully_shard(self.model, mesh=self.mesh["shard"], **(shard or {}))

    def backward(self, step, **how):
        loss_of(self.model, step, [dist.get_rank()], **how).backward()

    def step(self, step, **how):
        self.optimizer.zero_grad()
        self.backward(step, **how)
        self.optimizer.step()

    def run(self, *steps):
        for step in range(*steps):
            self.step(step)
        return self

    def whole(self):
        """The parameters, as on one rank."""
        return torch.cat([one.detach().full_tensor().flatten() for one in self.model.parameters()])

    def shards(self):
        return [one.detach().to_local().clone() for one in self.model.parameters()]

    def check_same(self):
        check_same(self.shards(), self.mesh["replicate"].get_group())


def full_sums(job, kept):
    """The sum over the replicas of what each of them keeps of its parameters, in the whole parameters' shapes. ``kept``
    has this rank's part of some of them."""
    sums = []
    for name, one in job.model.named_parameters():
        mine = one.detach().to_local()
        part = kept.get(name, torch.zeros(mine.shape)).view(mine.shape).clone()
        dist.all_reduce(part, group=job.mesh["replicate"].get_group())
        spread = DTensor.from_local(part, one.device_mesh, one.placements, shape=one.shape, stride=one.stride())
        sums.append(spread.full_tensor())
    return sums


def shared_folder():
    """A new folder, the same on all ranks."""
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    return told[0]


def close(job, expected, tolerance=1e-5):
    torch.testing.assert_close(job.whole(), expected, rtol=tolerance, atol=tolerance)
    job.check_same()
