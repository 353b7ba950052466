"""What gradients between the replicas of a sharded model must do: the cases of test_fsdp.py (see tests/case_runner.py).

torchrun --standalone --nproc-per-node 4 tests/adapters/fsdp_cases.py [CASE ...]
"""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from hvd_deepreduce import ConfigError
from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.engine.dense_or_compressed import WARM_UP
from hvd_deepreduce.torch import SignMomentum, ddp, fsdp, sharding
from hvd_deepreduce.torch.capture import Capture
from hvd_deepreduce.torch.checkpoint import checkpointed
from hvd_deepreduce.torch.fsdp import compress_replicas
from tests.adapters.common import LOSSLESS, LOSSY
from tests.adapters.compilations import noted
from tests.adapters.sharded import DEPTH, Network, Sharded, close, dense, flat, full_sums, loss_of, shared_folder
from tests.adapters.tcp import check_stats
from tests.case_runner import case, run_cases
from tests.damaged import decoding_fails

IN_BUCKETS = {**LOSSLESS, "scope": "bucket"}


class Job(Sharded):
    """With the exchange of its replicas' gradients."""

    def __init__(self, config, replicas=2, model=None, shard=None, make=torch.optim.SGD, lr=0.1, wrap=None, **options):
        super().__init__(replicas, model, shard, wrap)
        self.replicas = compress_replicas(self.model, self.mesh["replicate"], config, **options)
        self.optimizer = make(self.model.parameters(), lr)

    def residuals(self):
        return {name: one.clone() for name, one in self.replicas.state_dict()["residuals"].items()}


@case
def all_elements_on_every_mesh_are_dense_training():
    for replicas, config in (
        (1, IN_BUCKETS), (4, IN_BUCKETS), (2, {**LOSSLESS, "scope": "tensor"}), (2, {**LOSSLESS, "scope": "model"}),
        (2, {**IN_BUCKETS, "exchange": "reduce_scatter"}), (2, {**IN_BUCKETS, "exchange": "auto"}),
    ):  # fmt: skip
        close(Job(config, replicas).run(3), dense(range(3)))


@case
def kernels_are_compiled_from_the_construction_to_the_first_bucket():
    with noted(fsdp) as calls:
        job = Job(LOSSY)
        assert [one for one, *_ in calls] == [[None] * len(calls[0][0])] and calls[0][1] == (dist.get_rank() == 0)
        job.backward(0)
    assert calls[1] == "waited"


@case
def clipping_by_the_norm_of_all_shards():
    job = Job(IN_BUCKETS)
    for step in range(3):
        job.optimizer.zero_grad()
        job.backward(step)
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
        job.optimizer.step()
    close(job, dense(range(3), norm=0.1))


@case
def a_threshold_selects_what_ddp_selects():
    """DDP with as many ranks as there are replicas, each with the batches of a whole replica; a threshold selects by
    single elements, so that shards and buckets do not matter."""
    config = {"sparsifier": {"name": "threshold", "threshold": 0.004}, "value": "raw", "scope": "bucket"}
    job = Job(config).run(8)
    mine, model = job.mesh["shard"], Network()
    ranks = dist.get_process_group_ranks(mine.get_group())
    called = DDP(model, process_group=job.mesh["replicate"].get_group())
    called.register_comm_hook(ddp.DeepReduceState(config), ddp.deepreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(called, step, ranks).backward()
        optimizer.step()
    expected = flat(model)
    assert not torch.allclose(expected, dense(range(8)), atol=1e-3), "the threshold holds nothing back"
    apart = (job.whole() - expected).abs()
    assert (apart > 1e-5).sum() <= 2, "an element within the rounding of a sum at the threshold"
    assert apart.max() <= 0.1 * 0.004, "which waits for a step at one of them"
    job.check_same()


@case
def the_losses_of_a_gpt_are_those_of_ddp():
    """GPT-2, 2 replicas of 2 shards, beside DDP of 2 ranks with the replicas' batches; and the bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {"sparsifier": {"name": "threshold", "threshold": 0.15}, "value": "raw", "scope": "bucket"}
    still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    size = GPT2Config(vocab_size=97, n_positions=32, n_embd=128, n_layer=2, n_head=2, **still)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def made():
        torch.manual_seed(0)
        return GPT2LMHeadModel(size)

    def losses(model, ranks):
        optimizer, found = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
        for step in range(20):
            parts = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
            # Runs of a letter and its successors, which can be learned.
            given = torch.cat([torch.randint(97, (4, 1), generator=one) for one in parts]) + torch.arange(33)
            optimizer.zero_grad()
            loss = model(given[:, :-1] % 97, labels=given[:, :-1] % 97).loss
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found)

    model = made()
    for block in [*model.transformer.h, model]:
        fully_shard(block, mesh=mesh["shard"])
    replicas = compress_replicas(model, mesh["replicate"], config)
    mine = losses(model, [dist.get_rank()])
    dist.all_reduce(mine, group=mesh["shard"].get_group())
    called = DDP(made(), process_group=mesh["replicate"].get_group())
    called.register_comm_hook(ddp.DeepReduceState(config), ddp.deepreduce_hook)
    expected = losses(called, dist.get_process_group_ranks(mesh["shard"].get_group()))
    torch.testing.assert_close(mine / 2, expected, rtol=1e-4, atol=1e-4)
    assert expected[-1] < expected[0] - 0.5
    total = replicas.stats()["total"]
    assert total["bytes_sent"] < 0.005 * total["dense_bytes"], total
    replicas.close()


def watched(job):
    """Of each bucket that is taken from now on: its number, its parameters' names, and a copy of the gradients."""
    take, seen = job.replicas._buckets.take, []
    names = {id(one): name for name, one in job.model.named_parameters()}

    def watching(bucket, failure=None):
        seen.append((bucket.number, [names[id(one)] for one in bucket.tensors], bucket.vector.clone()))
        return take(bucket, failure)

    job.replicas._buckets.take = watching
    return seen


@case
def what_is_sent_and_what_stays_is_the_gradient():
    """Sums over the replicas: gradients and residuals before are means and residuals after."""
    for exchange in ("allgather", "reduce_scatter"):
        job = Job({**LOSSY, "scope": "bucket", "exchange": exchange}).run(3)
        before, seen = job.residuals(), watched(job)
        job.optimizer.zero_grad()
        job.backward(3)
        after, parameters = job.residuals(), dict(job.model.named_parameters())
        assert [number for number, *_ in seen] == list(range(DEPTH + 1))
        assert [name.partition(".")[0] for _, names, _ in seen for name in names][-1] in ("symbols", "scale")
        for _, names, vector in seen:
            sizes = [parameters[name].to_local().numel() for name in names]
            for name, given in zip(names, torch.split(vector, sizes), strict=True):
                mean = parameters[name].grad.to_local().flatten()
                total = before[name].flatten() + given - after[name].flatten()
                dist.all_reduce(total, group=job.mesh["replicate"].get_group())
                torch.testing.assert_close(total, 2 * mean, rtol=1e-4, atol=1e-6)
        assert any(one.any() for one in after.values())


@case
def accumulated_gradients_are_sent_once():
    """By FSDP's ways to accumulate: on the shards, or before they are reduced."""
    expected = Network()
    optimizer = torch.optim.SGD(expected.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(3):
            loss_of(expected, 3 * step + part, range(dist.get_world_size())).backward()
        optimizer.step()
    for way in ("set_is_last_backward", "set_requires_gradient_sync"):
        job = Job(IN_BUCKETS)
        for step in range(2):
            job.optimizer.zero_grad()
            for part in range(3):
                getattr(job.model, way)(part == 2)
                job.backward(3 * step + part)
            job.optimizer.step()
        assert job.replicas.stats()["total"]["steps"] == 2
        close(job, flat(expected))
    twice = Job(IN_BUCKETS)  # both are sent
    twice.backward(0)
    twice.backward(1)
    once = Job(IN_BUCKETS)
    once.model.set_is_last_backward(False)
    once.backward(0)
    once.model.set_is_last_backward(True)
    once.backward(1)
    for one, other in zip(twice.model.parameters(), once.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local(), other.grad.to_local(), rtol=1e-5, atol=1e-6)


@case
def what_fsdp_offers():
    expected = dense(range(3))
    bf16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for shard, wrap, tolerance in (
        ({"reshard_after_forward": False}, None, 1e-5),
        ({}, checkpoint_wrapper, 1e-5),
        (bf16, None, 2e-2),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}, None, 2e-2),
        ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, None, 2e-3),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, None, 1e-5),
    ):
        close(Job(IN_BUCKETS, shard=shard, wrap=wrap).run(3), expected, tolerance)
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.bfloat16, 5e-2)):
        job = Job(IN_BUCKETS, model=Network().to(dtype)).run(3)
        torch.testing.assert_close(job.whole().float(), expected, rtol=tolerance, atol=tolerance)
        width = {8: torch.float64}.get(dtype.itemsize, torch.float32)
        assert {one.dtype for one in job.residuals().values()} == {width}
        job.check_same()


@case
def checkpointed_parts_with_a_backward_pass_of_their_own():
    """A step of each is one, whose momentum is applied once; without the parts that no rank uses, too."""
    made = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    config = {**LOSSY, "scope": "bucket", "memory": "dgc"}
    for options, how in (({}, {}), ({"find_unused_parameters": True}, {"used": [0, 2]})):
        runs = []
        for wrap in (None, made):
            job = Job(config, wrap=wrap, **options)
            for step in range(4):
                job.step(step, **how)
            assert job.replicas.stats()["total"]["steps"] == 4
            runs.append(job.whole())
        torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-6)


@case
def gradients_of_other_tensors_exchange_nothing():
    job = Job(LOSSY)
    x = torch.ones(1, requires_grad=True)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    torch.autograd.grad((job.model(tokens) * x).sum(), x)
    assert job.replicas.stats()["total"]["steps"] == 0
    job.run(2).check_same()
    assert job.replicas.stats()["total"]["steps"] == 2


@case
def a_model_that_is_dropped_is_freed():
    job = Job(LOSSY).run(1)
    known = weakref.ref(job.replicas)
    del job
    gc.collect()
    assert known() is None


@case
def tensor_parallelism_within_a_replica():
    """What its ranks hold whole stays equal on them, and is in buckets of its own."""
    for scope in ("bucket", "model"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 99))
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
        parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
        replicas = compress_replicas(model, mesh["replicate"], {**LOSSY, "scope": scope, "value": "qsgd"})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(5):
            torch.manual_seed(10 * step + mesh["replicate"].get_local_rank())
            optimizer.zero_grad()
            model(torch.randn(4, 16)).square().sum().backward()
            optimizer.step()
        everything = [None] * 4
        own = {name: one.detach().to_local().tolist() for name, one in model.named_parameters()}
        dist.all_gather_object(everything, own)
        for name in own:
            values = [held[name] for held in everything]
            assert values[0] == values[2] and values[1] == values[3], name
            assert (values[0] == values[1]) == (name in ("0.weight", "0.bias", "3.bias")), name
        replicas.close()


@case
def frozen_modules_are_left_alone():
    model = Network()
    model.blocks[1].requires_grad_(False)
    job = Job(IN_BUCKETS, model=model)
    before = job.model.blocks[1].first.weight.full_tensor().clone()
    job.run(3)
    assert torch.equal(job.model.blocks[1].first.weight.full_tensor(), before)
    assert not any(name.startswith("blocks.1") for name in job.residuals())
    job.check_same()
    job = Job({**LOSSY, "scope": "bucket"}, make=torch.optim.AdamW, lr=0.003).run(3)

    def kept():
        held = [one for name, one in sorted(job.residuals().items()) if name.startswith("blocks.1")]
        return [*held, *(one.to_local() for one in job.model.blocks[1].parameters())]

    job.model.blocks[1].requires_grad_(False)
    before = [one.clone() for one in kept()]
    job.run(3, 6).check_same()
    assert len(before) == 2 * len(list(job.model.blocks[1].parameters())) and all(map(torch.equal, kept(), before))
    job.model.blocks[1].requires_grad_(True)
    job.run(6, 8).check_same()
    assert not all(map(torch.equal, kept(), before))
    job.model.blocks[1].requires_grad_(job.mesh["replicate"].get_local_rank() == 0)
    with pytest.raises(RuntimeError, match="frozen parameters"):
        job.step(8)


@case
def modules_that_a_replica_does_not_use():
    job = Job(IN_BUCKETS)
    with pytest.raises(RuntimeError, match="no gradient has come of blocks.1.*find_unused_parameters=True"):
        job.step(0, used=(0, 2))
    # Each replica uses other ones, all ranks of it the same.
    job = Job(IN_BUCKETS, find_unused_parameters=True)
    own = job.mesh["replicate"].get_local_rank()
    for step in range(3):
        job.step(step, used=(0, 2) if own else (0, 1))
    job.check_same()
    ranks = range(dist.get_world_size())
    reference = Network()
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        halves = [(loss_of(reference, step, part, used=used) / 2) for part, used in
                  ((ranks[:2], (0, 1)), (ranks[2:], (0, 2)))]  # fmt: skip
        sum(halves).backward()
        optimizer.step()
    close(job, flat(reference))
    before = job.residuals()
    job.step(9, used=(0,))
    grads = [one.grad for one in job.model.blocks[2].parameters()]
    assert all(not one.to_local().any() for one in grads) and before.keys() == job.residuals().keys()
    # In dense steps, of which the first sends residuals, zeros have the right mean.
    job = Job({**LOSSY, "scope": "bucket", "mode": "auto"}).run(WARM_UP)
    for step in range(WARM_UP, WARM_UP + 3):
        job.step(step, used=(0, 2) if own else range(DEPTH))
    job.check_same()


@case
def gradients_of_an_earlier_step_are_not_this_ones():
    """Where each optimizer clears its own gradients only, those of the unused block stay."""
    job = Job({**LOSSY, "scope": "bucket"}, find_unused_parameters=True)
    for step in range(6):
        used, unused = (1, 2) if step % 2 else (2, 1)
        before = job.residuals()
        stale = {id(one) for one in job.model.blocks[unused].parameters()}
        for one in job.model.parameters():
            if id(one) not in stale:
                one.grad = None
        job.backward(step, used=(0, used))
        for name, now in job.residuals().items():
            if step > 1 and name.startswith("blocks."):
                assert torch.equal(now, before[name]) is name.startswith(f"blocks.{unused}."), (step, name)
        job.optimizer.step()
        job.check_same()


@case
def modules_that_are_frozen_while_gradients_accumulate_are_averaged():
    for options in ({}, {"find_unused_parameters": True}):
        job = Job({**LOSSY, "scope": "bucket"}, **options)
        job.optimizer.zero_grad()
        job.model.set_is_last_backward(False)
        job.backward(0)
        job.model.set_is_last_backward(True)
        job.model.blocks[1].requires_grad_(False)
        job.backward(1)
        assert all(one.grad is not None for one in job.model.blocks[1].parameters())
        job.optimizer.step()
        job.check_same()


@case
def a_resumed_run_equals_an_unbroken_one():
    for config in ({**LOSSY, "scope": "bucket"}, {**LOSSY, "scope": "model", "value": "qsgd"}, "sign_momentum"):
        make = {"make": SignMomentum, "lr": 0.003} if config == "sign_momentum" else {}
        job = Job(config, **make).run(3)
        saved = job.replicas.state_dict()
        saved = {**saved, "residuals": {name: one.clone() for name, one in saved["residuals"].items()}}
        shards = job.shards()
        final = job.run(3, 6).shards()
        again = Job(config, model=Network(seed=3), **make)
        for own, kept in zip(again.model.parameters(), shards, strict=True):
            own.to_local().detach().copy_(kept)
        again.replicas.load_state_dict(saved)
        assert all(map(torch.equal, again.run(3, 6).shards(), final))
        again.check_same()
        for name, one in job.residuals().items():
            assert torch.equal(again.residuals()[name], one)


@case
def a_distributed_checkpoint_resumes_bit_equal_and_on_other_meshes():
    for config in ({**LOSSY, "scope": "bucket", "value": "qsgd"}, "sign_momentum"):
        make = {"make": SignMomentum, "lr": 0.003} if config == "sign_momentum" else {}
        folder, job = shared_folder(), Job(config, **make).run(3)
        state = {"model": job.model.state_dict(), "compression": checkpointed(job.replicas)}
        dcp.save(state, checkpoint_id=folder)
        sums = full_sums(job, job.residuals())
        final = job.run(3, 6).shards()
        for replicas in (2, 1, 4):
            again = Job(config, replicas, model=Network(seed=3), **make)
            loaded = {"model": again.model.state_dict(), "compression": checkpointed(again.replicas, folder)}
            dcp.load(loaded, checkpoint_id=folder)
            again.model.load_state_dict(loaded["model"])
            for one, expected in zip(full_sums(again, again.residuals()), sums, strict=True):
                torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)
            again.run(3, 6).check_same()
            assert replicas != 2 or all(map(torch.equal, again.shards(), final))
    other = Job({**LOSSY, "scope": "bucket"})
    with pytest.raises(ValueError, match="saved with memory 'scaled_momentum', and this job has 'residual'"):
        dcp.load({"compression": checkpointed(other.replicas, folder)}, checkpoint_id=folder)
    other.run(1).check_same()


@case
def states_of_another_number_of_replicas():
    """With the same shards: the sum of the residuals is preserved."""
    job = Job({**LOSSY, "scope": "bucket"}).run(3)
    states = [None] * 2
    group = job.mesh["replicate"].get_group()
    dist.all_gather_object(states, job.replicas.state_dict(), group=group)
    many = [{**one, "rank": rank, "size": 4} for rank, one in enumerate([*states, *states])]
    job.replicas.load_state_dict(iter(many), reshard=True)
    for name, one in job.residuals().items():
        total = one.clone()
        dist.all_reduce(total, group=group)
        expected = 2 * sum(state["residuals"][name] for state in states)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
    job.run(3, 5).check_same()


@case
def states_of_another_shard_are_refused():
    """Shards of one shape; also if another replica's state is of that shard. Nothing has changed then."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 4), mesh=mesh["shard"])
    replicas = compress_replicas(model, mesh["replicate"], {**LOSSY, "scope": "bucket"})
    model(torch.full((1, 8), 1.0 + dist.get_rank())).sum().backward()
    rank, states = dist.get_rank(), [None] * 4
    dist.all_gather_object(states, replicas.state_dict())
    own = [states[rank % 2], states[rank % 2 + 2]]
    message = rf"is of shard \[{1 - rank % 2}, 2\] of the model, and this rank holds shard \[{rank % 2}, 2\]"
    with pytest.raises(ValueError, match=message):
        replicas.load_state_dict(states[rank ^ 1])
    for wrong in ([own[0], states[3 - rank % 2]], [states[1 - rank % 2], own[1]]):
        with pytest.raises(ValueError, match=message):
            replicas.load_state_dict(iter(wrong), reshard=True)
    for name, one in replicas.state_dict()["residuals"].items():
        assert torch.equal(one, states[rank]["residuals"][name])
    replicas.load_state_dict(iter(own), reshard=True)
    replicas.load_state_dict({key: one for key, one in states[rank].items() if key != "shard"})  # an earlier version's
    replicas.close()


@case
def states_do_not_depend_on_what_wraps_the_modules():
    """The model's own do not either. Earlier versions had the wrappers in names."""
    config, wrapped, folder = {**LOSSY, "scope": "bucket"}, "_checkpoint_wrapped_module", shared_folder()
    job, again = Job(config).run(2), Job(config, wrap=checkpoint_wrapper)
    assert job.model.state_dict().keys() == again.model.state_dict().keys()
    state, kept = job.replicas.state_dict(), job.residuals()
    dcp.save({"compression": checkpointed(job.replicas)}, checkpoint_id=folder)
    assert any(wrapped in name for name, _ in again.model.named_parameters())
    assert sharding.units(again.model, sharding.trained(again.model), whole=False)[1:] == [
        [one for one in block.parameters() if one.requires_grad] for block in again.model.blocks
    ], "each block is one unit"

    def before(name):
        first, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        return f"{first}.{number}.{wrapped}.{rest}" if rest else name

    renamed = {key: {before(name): one for name, one in state[key].items()} for key in ("steps", "residuals")}
    earlier = {**state, **renamed}
    assert state["steps"].keys() != earlier["steps"].keys()
    for load in (
        lambda: again.replicas.load_state_dict(state),
        lambda: again.replicas.load_state_dict(earlier),
        lambda: dcp.load({"compression": checkpointed(again.replicas, folder)}, checkpoint_id=folder),
    ):
        again.replicas.load_state_dict({**state, "residuals": {}})
        load()
        found = again.residuals()
        for name, one in kept.items():  # a checkpoint leaves zeros out
            assert torch.equal(found.get(name, torch.zeros_like(one)), one)
        assert found.keys() <= kept.keys()
    again.run(2, 4)


@case
def a_part_stays_where_it_is():
    """As on the host, under a mesh of GPUs."""
    like = next(Sharded().model.parameters())
    for device in ("cpu", "meta"):
        part = torch.zeros_like(sharding.own(like), device=device)
        made = sharding.sharded_as(like, part)
        assert made.to_local().device.type == device and made.to_local().data_ptr() == part.data_ptr()
        assert (made.shape, made.stride(), made.placements) == (like.shape, like.stride(), like.placements)
        assert not made.requires_grad


@case
def the_exchange_runs_during_the_backward_pass():
    job, came = Job(IN_BUCKETS), []
    job.step(0)
    take = job.replicas._buckets.take

    def watching(bucket, failure=None):
        if bucket.last and bucket.number:
            came.append(first[0].wait() is not None)  # it ends without this bucket
        future = take(bucket, failure)
        first.append(future)
        return future

    job.replicas._buckets.take = watching
    for step in range(1, 3):
        first = []
        job.step(step)
        assert len(first) == DEPTH + 1
    assert came == [True, True]


@case
def what_fails_on_one_rank_is_an_error_on_its_replicas():
    job = Job({**LOSSY, "scope": "bucket"}).run(2)
    before, failing = job.shards(), dist.get_rank() == 3

    def broken(*_, **__):
        raise ValueError("no ink")

    if failing:
        job.replicas._engine.pipeline.encode = broken
    # In its exchange it is rank 1. The other ranks of its exchange have the other shards' ranks told.
    with pytest.raises(RuntimeError, match="this step failed on rank 1: .*no ink"):
        job.step(2)
    assert all(map(torch.equal, before, job.shards()))
    with pytest.raises(RuntimeError, match="Load a checkpoint on all ranks, close.. what compress_replicas has ret"):
        job.step(3)


@case
def an_error_while_decoding_on_one_rank():
    """The other replica applies the step. The next one is an error on all ranks of it."""
    job = Job({**LOSSY, "scope": "bucket"}).run(2)
    before, behind = job.shards(), dist.get_rank() >= 2
    with pytest.raises((MemoryError, RuntimeError), match="no room") if behind else nullcontext():
        with decoding_fails(dist.get_rank() == 3):
            job.step(2)
    assert all(map(torch.equal, before, job.shards())) == behind
    with pytest.raises((MemoryError, RuntimeError), match="no room" if behind else "an error has left 1 rank.* behind"):
        job.step(3)


@case
def what_cannot_work_is_an_error():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain = nn.Linear(8, 8)
    with pytest.raises(TypeError, match="Linear, to which fully_shard was not applied. Write: mesh = init_device_mesh"):
        compress_replicas(plain, mesh["replicate"])
    native = fully_shard(nn.Linear(8, 8), mesh=mesh)
    with pytest.raises(TypeError, match="a mesh of two dimensions, so FSDP itself sums gradients over the replicas"):
        compress_replicas(native, mesh["replicate"])
    model = fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])
    with pytest.raises(ValueError, match="hold other shards of weight, and are in the mesh of the replicas"):
        compress_replicas(model, mesh["shard"])
    with pytest.raises(ValueError, match="has 2 dimensions"):
        compress_replicas(model, mesh)
    with pytest.raises(TypeError, match="the mesh of compress_replicas is 'replicate'; it must be a DeviceMesh"):
        compress_replicas(model, "replicate")
    with torch.device("meta"):
        empty = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="no values yet .device meta"):
        compress_replicas(fully_shard(empty, mesh=mesh["shard"]), mesh["replicate"])
    frozen = fully_shard(nn.Linear(8, 8).requires_grad_(False), mesh=mesh["shard"])
    with pytest.raises(ValueError, match="nothing to exchange"):
        compress_replicas(frozen, mesh["replicate"])
    pairs = fully_shard(nn.Linear(8, 8).to(torch.complex64), mesh=mesh["shard"])
    with pytest.raises(TypeError, match="weight is torch.complex64, and compress_replicas exchanges floating-point"):
        compress_replicas(pairs, mesh["replicate"])
    with pytest.raises(TypeError, match="parameter weight is sharded, and a capture has whole gradients"):
        Capture(model, "unused.npz", (0,))
    for config, match in (
        ("adamw_safe", "compress_replicas exchanges gradients"),
        ({**LOSSY, "scope": "bucket", "exchange": "topk_allgather"}, "compress_replicas has 'allgather'"),
        ({**IN_BUCKETS, "bucket_bytes": 9999}, "each module that fully_shard was applied to makes a bucket"),
    ):
        with pytest.raises(ConfigError, match=match):
            compress_replicas(model, mesh["replicate"], config)
    job = Job({**LOSSY, "scope": "bucket"})
    for one in job.model.parameters():
        one.register_post_accumulate_grad_hook(lambda _: job.optimizer.step())
    with pytest.raises(RuntimeError, match="SGD steps within the backward pass, before the replicas have exchanged"):
        job.backward(0)
    job.replicas.close()
    job = Job({**LOSSY, "scope": "bucket"})
    with pytest.raises(ValueError, match="needs a new compress_replicas"):
        job.replicas.set_config(scope="model")
    job.replicas.set_config(density=0.5)
    whole = Job({**LOSSY, "scope": "model"})
    whole.replicas.set_config(density=0.5)
    assert whole.replicas.config.scope == "model" and whole.replicas.config.sparsifier.density == 0.5
    whole.replicas.close()
    job.run(1)
    with pytest.raises(ValueError, match="of this model in each step already: close.. what it has returned"):
        compress_replicas(job.model, job.mesh["replicate"])
    job.model.load_state_dict({name: one.detach().clone() for name, one in job.model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="parameters of the model were replaced"):
        job.step(1)
    job.replicas.close()
    alone = Job({**LOSSY, "scope": "bucket"}, replicas=4)
    alone.replicas.close()
    with TestCase().assertLogs("hvd_deepreduce", "WARNING") as logs:
        compress_replicas(alone.model, alone.mesh["shard"]).close()
    assert "has this rank alone, and the job has 4 ranks, of which 1 hold this model" in logs.output[0]


@case
def replicas_that_do_not_begin_alike():
    job = Job({**LOSSY, "scope": "bucket"}, model=Network(seed=dist.get_rank() // 2))
    before = job.shards()
    with pytest.raises(MismatchError, match="broadcast the parameters of one replica to the others"):
        job.step(0)
    assert all(map(torch.equal, before, job.shards()))
    job = Job({**LOSSY, "scope": "bucket", "seed": dist.get_rank() // 2})
    with pytest.raises(MismatchError, match="seed"):
        job.step(0)


@case
def each_replica_trains_by_itself_after_close():
    job = Job({**LOSSY, "scope": "bucket"}).run(2)
    job.replicas.close()
    job.replicas.close()
    job.run(2, 4)
    with pytest.raises(RuntimeError, match="close"):
        job.replicas.state_dict()
    assert job.replicas.stats()["total"]["steps"] == 2


@case
def modes_and_optimizers():
    job = Job({**LOSSY, "scope": "bucket", "mode": "auto"}).run(12)
    job.check_same()
    assert job.replicas.stats().said
    Job("sign_momentum", make=SignMomentum, lr=0.003).run(4).check_same()
    with pytest.raises(ValueError, match="use hvd_deepreduce.torch.SignMomentum"):
        Job("sign_momentum", make=torch.optim.AdamW, lr=0.003).run(1)
    Job({**LOSSY, "scope": "bucket"}, make=torch.optim.AdamW, lr=0.003).run(4).check_same()


@case
def gradients_that_come_again_after_their_exchange_has_begun():
    """A block that is used twice has a backward pass of its own for each use, if checkpointing makes one."""
    made = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    expected = Network()
    loss_of(expected, 0, range(dist.get_world_size()), used=[0, 1, 1, 2]).backward()
    whole = Job(LOSSLESS | {"scope": "model"}, wrap=made)
    whole.backward(0, used=[0, 1, 1, 2])
    for one, right in zip(whole.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), right.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="come again in one backward pass.*Checkpoint them with use_reentrant=False"):
        Job(IN_BUCKETS, wrap=made).backward(0, used=[0, 1, 1, 2])


@case
def gradients_that_wait_for_the_last_backward_pass_are_not_applied():
    job = Job(IN_BUCKETS).run(1)
    before = job.shards()
    job.optimizer.zero_grad()
    job.model.set_is_last_backward(False)
    job.backward(1)
    with pytest.raises(RuntimeError, match="SGD steps after a backward pass with set_is_last_backward.False., whose"):
        job.optimizer.step()
    job.optimizer.zero_grad()
    job.optimizer.step()  # they were dropped
    assert all(map(torch.equal, before, job.shards()))
    job.model.set_is_last_backward(True)
    job.run(1, 3).check_same()


@case
def parameters_that_nobody_would_reduce():
    """Plain ones that begin to need gradients; and sharded ones, where the model itself is not called."""
    model = Network()
    model.gain = nn.Parameter(torch.ones(1), requires_grad=False)
    job = Job(IN_BUCKETS, model=model, shard={"ignored_params": {model.gain}}).run(1)
    model.gain.requires_grad_(True)
    with pytest.raises(RuntimeError, match="began to need gradients, after compress_replicas"):
        job.step(1)
    model = Network()
    model.blocks[1].norm.requires_grad_(False)
    model.loss = partial(loss_of, model.forward)
    job = Job(IN_BUCKETS, model=model)
    register_fsdp_forward_method(job.model, "loss")
    job.model.loss(0, [dist.get_rank()]).backward()
    model.blocks[1].norm.requires_grad_(True)
    with pytest.raises(RuntimeError, match="began to need gradients, after compress_replicas"):
        job.model.loss(1, [dist.get_rank()]).backward()


@case
def an_error_before_a_bucket_begins_is_one_of_all_ranks():
    """The other ranks are in its exchange already, and hear of it there."""
    for exchange in ("allgather", "reduce_scatter"):
        job = Job({**IN_BUCKETS, "exchange": exchange}, replicas=4).run(1)
        before = job.shards()
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 2:
                patch.setattr(sharding, "gradient", broken)
            with pytest.raises((MemoryError, RuntimeError), match="no room for a vector"):
                job.step(1)
        assert all(map(torch.equal, before, job.shards()))


def broken(_):
    raise MemoryError("no room for a vector")


@case
def a_backward_pass_that_has_failed():
    job = Job(IN_BUCKETS).run(1)

    def fails(*_):
        raise ValueError("found by the job itself")

    hook = job.model.blocks[0].register_full_backward_hook(fails)
    with pytest.raises(ValueError, match="found by the job itself"):
        job.step(1)
    hook.remove()
    with pytest.raises(RuntimeError, match="the last backward pass has failed on this rank, .* start the processes"):
        job.step(1)


@case
def replicas_that_freeze_other_parameters():
    """As many, of equal shapes."""
    for options in ({}, {"find_unused_parameters": True}):
        job = Job({**LOSSY, "scope": "bucket"}, **options).run(1)
        norm, replica = job.model.blocks[0].norm, job.mesh["replicate"].get_local_rank()
        (norm.bias if replica else norm.weight).requires_grad_(False)
        with pytest.raises(MismatchError, match="'frozen parameters' is 'blocks.0.norm.weight"):
            job.step(1)


@case
def hooks_of_the_job_see_the_gradient_before_it_is_exchanged():
    job = Job(IN_BUCKETS)
    for one in job.model.parameters():
        one.register_post_accumulate_grad_hook(lambda one: one.grad.mul_(0))
    job.backward(0)
    assert not any(one.grad.to_local().any() for one in job.model.parameters())


@case
def ranks_that_have_more_process_groups_than_others():
    dist.new_group([0])
    Job({**LOSSY, "scope": "bucket"}).run(2).check_same()


class Uneven(nn.Module):
    """Over two shards and two tensor ranks, one of the four holds nothing of ``head``, which has three rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.norm, self.up, self.down = (
            nn.Linear(64, 3), nn.LayerNorm(64), nn.Linear(64, 16), nn.Linear(16, 9)
        )  # fmt: skip

    def forward(self, x):
        y = self.norm(x)
        return self.down(self.up(y).tanh()).square().mean() + self.head(y).square().mean()


@case
def what_the_ranks_of_a_replica_hold_whole_stays_equal_beside_shards_without_elements():
    """The codec draws random numbers. One replica compresses, too, where there is a momentum."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    plan = {"head": ColwiseParallel(output_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for config in ({"scope": "bucket", "selection": "tensor"}, {"scope": "tensor"}):
        model = fully_shard(parallelize_module(Uneven(), mesh["tensor"], plan), mesh=mesh["shard"])
        config = {"sparsifier": {"name": "topk", "density": 0.5}, "value": "qsgd", "memory": "dgc", **config}
        replicas = compress_replicas(model, mesh["replicate"], config)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(4, 64)).backward()
            optimizer.step()
        every = [None] * 4
        dist.all_gather_object(every, [one.detach().to_local().tolist() for one in model.norm.parameters()])
        assert every[0] == every[1] and every[2] == every[3]
        for setting in ({"mode": "auto"}, {"exchange": "auto", "scope": "bucket"}):
            with pytest.raises(ConfigError, match="goes by measured times, and several ranks .* hold norm.weight"):
                replicas.set_config(setting)
        replicas.close()


@case
def a_rank_without_a_shard_is_an_error_on_all_ranks():
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    with pytest.raises((ValueError, RuntimeError), match="no element of a parameter that needs gradients"):
        compress_replicas(fully_shard(nn.Linear(8, 2), mesh=mesh["shard"]), mesh["replicate"])


@case
def stats_are_the_bytes_on_the_wire():
    """Of replicas of one rank, FSDP itself sends nothing. Gloo adds headers to each exchange."""
    headers = 6 * (DEPTH + 1) * 3 * 500 * (dist.get_world_size() - 1)
    job = Job({**LOSSY, "scope": "bucket"}, dist.get_world_size(), model=Network(width=400)).run(3)
    dist.barrier()
    check_stats(job.replicas, lambda: job.run(3, 9), headers, 5)


@case
def a_rank_that_does_not_come():
    """The last case: ranks that have met less often do not meet the others again in their process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])
    dist.barrier()
    if dist.get_rank() != 3:
        missing = 2 if dist.get_rank() == 0 else 3  # rank 2 waits for rank 3, and does not come to rank 0
        with pytest.raises(TimeoutError, match=f"has waited 8 s at its first exchange for rank {missing} of its"):
            compress_replicas(model, mesh["replicate"], timeout=timedelta(seconds=8))
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_cases(dist.get_rank(), dist.get_world_size())
    assert "horovod" not in sys.modules
    dist.barrier()
    dist.destroy_process_group()
