"""Which parameters of a sharded model share buckets, on a mesh of three dimensions within a replica."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hvd_deepreduce.torch.sharding import repetition


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("shard", "tensor", "context"))
    dist.destroy_process_group()


def test_parts_of_the_same_ranks_have_the_same_text(mesh):
    def text(mesh, *placements):
        return repetition(distribute_tensor(torch.ones(8, 8, 8), mesh, placements), range(8))

    assert text(mesh, Shard(0), Shard(1), Shard(2)) == "" == text(mesh, Shard(2), Shard(0), Shard(0))
    over_two = [(Shard(0), Shard(1), Replicate()), (Shard(0), Replicate(), Shard(1)), (Replicate(), Shard(0), Shard(1))]
    texts = [text(mesh, *one) for one in over_two]
    assert "" not in texts and len(set(texts)) == 3
    assert text(mesh["shard", "tensor"], Shard(1), Shard(1)) == texts[0]
    assert text(mesh["shard"], Shard(0)) == text(mesh, Shard(0), Replicate(), Replicate()) not in ("", *texts)
    assert repetition(torch.ones(8), range(8)) == text(mesh, *[Replicate()] * 3) != ""


def test_a_dimension_of_one_rank_does_not_count(mesh):
    flat = init_device_mesh("cpu", (8, 1), mesh_dim_names=("shard", "tensor"))
    assert repetition(distribute_tensor(torch.ones(8), flat, [Shard(0), Replicate()]), range(8)) == ""
