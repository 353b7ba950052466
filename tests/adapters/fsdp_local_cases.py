"""What LocalSGD must do with sharded models: cases of test_fsdp.py (see tests/case_runner.py).

torchrun --standalone --nproc-per-node 4 tests/adapters/fsdp_local_cases.py [CASE ...]
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch import LocalSGD, PeerOptimizer, SignMomentum
from hvd_deepreduce.torch.checkpoint import checkpointed
from hvd_deepreduce.torch.fsdp import compress_replicas
from tests.adapters.common import LOSSLESS, LOSSY
from tests.adapters.optimizer_warnings import heard
from tests.adapters.sharded import Network, Sharded, close, flat, full_sums, loss_of, shared_folder
from tests.case_runner import case, run_cases
from tests.damaged import decoding_fails

IN_MODEL = {**LOSSY, "scope": "model", "value": "qsgd"}
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-3)  # a smaller one enlarges rounding errors
SGD = partial(torch.optim.SGD, lr=0.1)


class Job(Sharded):
    """With LocalSGD over its replicas."""

    def __init__(self, config, replicas=2, make=SGD, model=None, shard=None, **options):
        super().__init__(replicas, model, shard)
        self.group = self.mesh["replicate"].get_group()
        inner = make(self.model.parameters())
        self.optimizer = LocalSGD(inner, self.model, config, process_group=self.group, **options)

    def run(self, *steps):
        super().run(*steps)
        return self

    def ended(self, *steps):
        """Trains, and ends the period."""
        self.run(*steps).optimizer.sync()
        return self

    def residuals(self):
        return residuals_of(self.optimizer)


def residuals_of(optimizer):
    found = optimizer.state_dict()["local_sgd"]["compression"]["residuals"]
    return {name: one.clone() for name, one in found.items()}


def unsharded(config, steps, replicas=2, make=SGD, **options):
    """The whole model on each rank: this replica's ranks do the same, with the batches of all of them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shards = size // replicas
    mine = range(rank // shards * shards, (rank // shards + 1) * shards)
    groups = [dist.new_group(range(shard, size, shards)) for shard in range(shards)]
    model = Network()
    optimizer = LocalSGD(make(model.parameters()), model, config, process_group=groups[rank % shards], **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, mine).backward()
        optimizer.step()
    optimizer.sync()
    return flat(model)


@case
def sharded_training_is_that_of_whole_models():
    """Averages, and a threshold, which selects by single elements, so that shards and buckets do not matter."""
    threshold = {"sparsifier": {"name": "threshold", "threshold": 0.004}, "value": "raw", "scope": "model"}
    plain = {**LOSSLESS, "scope": "model"}
    for config, replicas, options in (
        (plain, 2, {"every": 3, "make": ADAMW}),
        (plain, 4, {"every": 2}),
        (plain, 1, {"every": 2}),
        (threshold, 2, {"every": 2, "decay": 0.9}),
        (threshold, 2, {"every": 4, "fragments": 3, "delay": 1}),
        (threshold, 2, {"every": 4, "fragments": 2, "delay": 2, "mix": 0.5}),
        (plain, 2, {"every": 2, "outer": partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)}),
        ({**threshold, "exchange": "reduce_scatter"}, 2, {"every": 2}),
    ):
        expected = unsharded(config, 7, replicas, **options)
        job = Job(config, replicas, **options).ended(7)
        close(job, expected)
        assert replicas == 1 or job.optimizer.stats()["total"]["steps"]


@case
def lossy_updates_and_residuals_on_shards():
    for config, options in (
        (IN_MODEL, {"every": 3, "fragments": 3}), ({**IN_MODEL, "scope": "tensor"}, {"every": 1, "make": ADAMW}),
        ("adamw_safe", {"make": ADAMW}), ("streaming_diloco", {"every": 4, "delay": 1, "make": ADAMW}),
    ):  # fmt: skip
        job = Job(config, **options).ended(9)
        job.check_same()
        held = job.residuals()
        sizes = {name: one.to_local().shape for name, one in job.model.named_parameters()}
        assert all(one.shape in (sizes[name], (sizes[name].numel(),)) for name, one in held.items())
    assert sum(not size.numel() for size in sizes.values()) == dist.get_rank() % 2, "a shard is empty on one rank alone"


@case
def what_is_computed_after_a_sync_is_the_same_on_all_replicas():
    """FSDP keeps what the root has gathered for an evaluation."""
    job = Job(IN_MODEL, every=50).run(3)
    with torch.no_grad():
        before = loss_of(job.model, 9, [0])
        job.optimizer.sync()
        after = loss_of(job.model, 9, [0])
    losses = [None] * dist.get_world_size()
    dist.all_gather_object(losses, after.item())
    assert len(set(losses)) == 1 and after != before


@case
def what_fsdp_offers():
    config, expected = {**LOSSLESS, "scope": "model"}, None
    expected = unsharded(config, 5, every=2)
    for shard, tolerance in (
        ({"reshard_after_forward": False}, 1e-5),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}, 5e-2),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 1e-5),
    ):
        close(Job(config, shard=shard, every=2).ended(5), expected, tolerance)
    job = Job(IN_MODEL, model=Network().to(torch.bfloat16), every=2).ended(5)
    job.check_same()
    assert {one.dtype for one in job.residuals().values()} == {torch.float32}
    job = Job(IN_MODEL, every=1)
    job.optimizer.zero_grad()
    job.backward(0)
    norm = nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
    assert float(norm.full_tensor()) > 0.1
    job.optimizer.step()
    job.check_same()


@case
def muon_on_shards():
    matrices = [name for name, one in Network().named_parameters() if one.ndim == 2 and name != "symbols.weight"]

    class Both(torch.optim.Optimizer):
        """Muon for the matrices of the blocks, AdamW for the rest."""

        def __init__(self, model):
            named = dict(model.named_parameters())
            self.parts = [
                torch.optim.Muon([named[name] for name in matrices], lr=0.02),
                ADAMW([one for name, one in named.items() if name not in matrices]),
            ]
            super().__init__(list(named.values()), {})

        def step(self, closure=None):
            for part in self.parts:
                part.step()

    def made(model, group):
        return LocalSGD(Both(model), model, IN_MODEL, every=2, process_group=group)

    job = Sharded()
    job.optimizer = made(job.model, job.mesh["replicate"].get_group())
    before = job.whole()
    job.run(4)
    job.optimizer.sync()
    job.check_same()
    assert not torch.equal(before, job.whole())


class Parallel:
    """Tensor parallelism inside a replica, with FSDP of one shard around it or without."""

    def __init__(self, config, fsdp, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 99))
        self.mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
        parallelize_module(self.model, self.mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        if fsdp:
            fully_shard(self.model, mesh=self.mesh["shard"])
        group = self.mesh["replicate"].get_group()
        inner = torch.optim.SGD(self.model.parameters(), 0.01)
        self.optimizer = LocalSGD(inner, self.model, config, process_group=group, **options)

    def run(self, steps):
        for step in range(steps):
            torch.manual_seed(10 * step + self.mesh["replicate"].get_local_rank())
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 16)).square().sum().backward()
            self.optimizer.step()
        self.optimizer.sync()
        return self


@case
def tensor_parallelism_within_a_replica():
    """What its ranks hold whole stays equal on them."""
    for fsdp in (True, False):
        for config, options in (
            (IN_MODEL, {"every": 2, "fragments": 2}),
            ({**IN_MODEL, "scope": "bucket", "bucket_bytes": 2000}, {"every": 1}),
            ({**IN_MODEL, "scope": "tensor"}, {"every": 1}),
        ):
            job = Parallel(config, fsdp, **options).run(5)
            everything, names = [None] * 4, dict(job.model.named_parameters())
            own = {name: (one.to_local() if hasattr(one, "to_local") else one).tolist() for name, one in names.items()}
            dist.all_gather_object(everything, own)
            for name in names:
                values = [held[name] for held in everything]
                assert values[0] == values[2] and values[1] == values[3], name
                assert (values[0] == values[1]) == (name in ("0.weight", "0.bias", "3.bias")), name


@case
def a_resumed_run_equals_an_unbroken_one():
    for config, options in (
        (IN_MODEL, {"every": 3, "fragments": 2, "make": ADAMW}),
        (IN_MODEL, {"every": 4, "fragments": 2, "delay": 2, "make": ADAMW}),
        ("streaming_diloco", {"every": 4, "delay": 1, "make": ADAMW}),
        ({**LOSSY, "scope": "bucket"}, {"every": 2, "outer": partial(torch.optim.SGD, lr=0.7, momentum=0.9)}),
    ):
        job = Job(config, **options).run(4)
        saved, shards = copy.deepcopy(job.optimizer.state_dict()), job.shards()
        final = job.ended(4, 9).shards()
        again = Job(config, model=Network(seed=3), **options)
        for own, kept in zip(again.model.parameters(), shards, strict=True):
            own.to_local().detach().copy_(kept)
        again.optimizer.load_state_dict(saved)
        assert all(map(torch.equal, again.ended(4, 9).shards(), final))
        again.check_same()


@case
def a_distributed_checkpoint_resumes_bit_equal_and_on_other_meshes():
    """Within a period, and while exchanges are in flight."""
    for config, options in (
        (IN_MODEL, {"every": 4, "fragments": 2, "delay": 2, "make": ADAMW}),
        (IN_MODEL, {"every": 3, "make": ADAMW, "outer": partial(torch.optim.SGD, lr=0.7, momentum=0.9)}),
        (IN_MODEL, {"every": 5, "times": lambda rank, clock: (clock + rank) % 3 == 0}),
    ):
        folder, job = shared_folder(), Job(config, **options).run(4)
        dcp.save({"optimizer": checkpointed(job.optimizer)}, checkpoint_id=folder)
        sums, whole = full_sums(job, job.residuals()), job.whole()
        anchors = [one.clone() for one in job.optimizer._updates.anchors]
        dist.broadcast(whole, 0)  # of replica 0
        final = job.ended(4, 9).shards()
        again = Job(config, model=Network(seed=3), **options)
        dcp.load({"optimizer": checkpointed(again.optimizer, folder)}, checkpoint_id=folder)
        assert all(map(torch.equal, anchors, again.optimizer._updates.anchors))
        assert all(map(torch.equal, again.ended(4, 9).shards(), final))
        again.check_same()
        for replicas in (1, 4):
            other = Job(config, replicas, model=Network(seed=3), **options)
            with heard("hvd_deepreduce") as texts:
                dcp.load({"optimizer": checkpointed(other.optimizer, folder)}, checkpoint_id=folder)
            assert any("were saved within a period" in text for text in texts) is (replicas == 1), options
            for one, expected in zip(full_sums(other, other.residuals()), sums, strict=True):
                torch.testing.assert_close(one, replicas / 2 * expected, rtol=1e-5, atol=1e-6)  # the mean stays
            assert replicas == 4 or torch.equal(other.whole(), whole)
            other.ended(4, 9).check_same()


@case
def several_states_in_one_checkpoint():
    """As of two models."""
    folder, jobs = shared_folder(), [Job(IN_MODEL, every=2, model=Network(seed=seed)).run(3) for seed in range(2)]
    dcp.save({name: checkpointed(job.optimizer) for name, job in zip("gd", jobs, strict=True)}, checkpoint_id=folder)
    for name, job in zip("gd", jobs, strict=True):
        again = Job(IN_MODEL, every=2, model=Network(seed=3))
        dcp.load({name: checkpointed(again.optimizer, folder, name=name)}, checkpoint_id=folder)
        assert all(map(torch.equal, again.shards(), job.shards()))
        assert all(map(torch.equal, full_sums(again, again.residuals()), full_sums(job, job.residuals())))


@case
def states_of_another_shard_are_refused():
    """Those of earlier versions do not say of which one they are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 4), mesh=mesh["shard"])
    optimizer = LocalSGD(SGD(model.parameters()), model, IN_MODEL, every=2, process_group=mesh["replicate"].get_group())
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 8), 1.0 + step + dist.get_rank())).sum().backward()
        optimizer.step()
    kept, states, rank = residuals_of(optimizer), [None] * 4, dist.get_rank()
    dist.all_gather_object(states, optimizer.state_dict())
    for given, reshard in ((states[rank ^ 1], False), ([states[rank], states[rank ^ 3]], True)):
        with pytest.raises(ValueError, match=rf"is of shard \[{1 - rank % 2}, 2\] of the model, and this rank"):
            optimizer.load_state_dict(given, reshard=reshard)
    assert all(torch.equal(one, kept[name]) for name, one in residuals_of(optimizer).items())
    del states[rank]["local_sgd"]["compression"]["shard"]
    optimizer.load_state_dict(states[rank])


@case
def states_do_not_depend_on_what_wraps_the_modules():
    """Earlier versions had the wrappers in names."""
    options = {"every": 4, "fragments": 2, "delay": 2, "make": ADAMW}
    job, folder, model = Job(IN_MODEL, **options).run(4), shared_folder(), Network(seed=3)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    dcp.save({"optimizer": checkpointed(job.optimizer)}, checkpoint_id=folder)
    state, shards = copy.deepcopy(job.optimizer.state_dict()), job.shards()
    local = state["local_sgd"]
    for values, keys in ((local, ("anchors", "means", "starts")), (local["compression"], ("steps", "residuals"))):
        for key in keys:
            assert values[key]
            values[key] = {f"_orig_mod.{name}": one for name, one in values[key].items()}
    final, again = job.ended(4, 9).shards(), Job(IN_MODEL, model=model, **options)
    dcp.load({"optimizer": checkpointed(again.optimizer, folder)}, checkpoint_id=folder)
    assert all(map(torch.equal, again.ended(4, 9).shards(), final))
    again = Job(IN_MODEL, **options)
    for one, kept in zip(again.model.parameters(), shards, strict=True):
        one.to_local().detach().copy_(kept)
    again.optimizer.load_state_dict(state)
    assert all(map(torch.equal, again.ended(4, 9).shards(), final))


@case
def checkpoints_that_cannot_be_loaded():
    folder, job = shared_folder(), Job(IN_MODEL, every=2).run(2)
    dcp.save({"model": job.model.state_dict()}, checkpoint_id=folder)
    with pytest.raises(Exception, match="this checkpoint has no state of compress_replicas or LocalSGD"):
        dcp.load({"optimizer": checkpointed(job.optimizer, folder)}, checkpoint_id=folder)
    state = {"one": checkpointed(job.optimizer), "other": checkpointed(job.optimizer)}
    dcp.save(state, checkpoint_id=(folder := shared_folder()))
    for name, match in (
        (None, "has several states of .*, with the names one, other: give that .*, as checkpointed.*name='one'"),
        ("third", "has no state 'third' of .*: the name must be one of one, other"),
    ):
        with pytest.raises(Exception, match=match):
            dcp.load({"one": checkpointed(job.optimizer, folder, name=name)}, checkpoint_id=folder)
    replica, folder = job.mesh["replicate"].get_local_rank(), shared_folder()
    if replica == 0:
        state = {"one": checkpointed(job.optimizer)}
        dcp.save(state, checkpoint_id=folder, process_group=job.mesh["shard"].get_group())
    dist.barrier()
    with pytest.raises(ValueError, match=r"of 1 of 2 replicas, with the numbers \[0\]") if replica else nullcontext():
        checkpointed(job.optimizer, folder).state_dict()
    dcp.save({"one": checkpointed(job.optimizer)}, checkpoint_id=(folder := shared_folder()))
    with pytest.raises(Exception, match="to load, give the checkpoint to checkpointed"):
        dcp.load({"one": checkpointed(job.optimizer)}, checkpoint_id=folder)
    model = Network()
    model.more = nn.Parameter(torch.ones(3))
    more = Job(IN_MODEL, every=2, model=model)
    with pytest.raises(Exception, match="the model has a parameter more, but the checkpoint does not"):
        dcp.load({"one": checkpointed(more.optimizer, folder)}, checkpoint_id=folder)
    with pytest.raises(TypeError, match="checkpointed was given SGD; it takes what compress_replicas has returned"):
        checkpointed(job.optimizer.inner)


@case
def a_shard_with_nan_discards_the_period_on_all_ranks():
    job = Job(IN_MODEL, every=3, make=ADAMW).run(3)
    before, bad = job.shards(), dist.get_rank() == 2
    job.step(3)
    if bad:
        with torch.no_grad():
            next(one for one in job.model.parameters()).to_local().fill_(torch.nan)
    job.optimizer.sync()
    assert all(map(torch.equal, before, job.shards()))
    job.run(4, 8).check_same if bad else job.run(4, 8)
    job.optimizer.sync()
    job.check_same()
    assert all(one.isfinite().all() for one in job.shards())


@case
def ranks_of_a_replica_take_part_together():
    """Each rank has its own times. A replica takes part if one of its ranks wants to."""
    job = Job(IN_MODEL, every=4, times=lambda rank, clock: (clock + dist.get_rank()) % 5 == 0)
    for step in range(12):
        job.step(step)
        anchors = [one.clone() for one in job.optimizer._updates.anchors]
        everything = [None] * 2
        dist.all_gather_object(everything, [one.tolist() for one in anchors], group=job.group)
        assert everything[0] == everything[1]
    job.optimizer.sync()
    job.check_same()


@case
def an_error_on_one_rank_is_an_error_on_all():
    """Before a rank has voted, while it encodes, and while it decodes, when the other replica has its mean."""

    def broken(*_, **__):
        raise ValueError("no ink")

    for failing, said in (
        ("vote", "no ink|an error has left 1 rank"),
        ("encode", "no ink"),
        ("decode", "no room|an error has left 1 rank"),
    ):
        job, mine = Job(IN_MODEL, every=2, make=ADAMW).run(3), dist.get_rank() == 3
        if mine and failing == "vote":
            job.optimizer._updates.update = broken
        if mine and failing == "encode":
            job.optimizer._updates.engine.pipeline.encode = broken
        behind = failing != "decode" or dist.get_rank() >= 2
        with pytest.raises((RuntimeError, ValueError, MemoryError), match=said) if behind else nullcontext():
            with decoding_fails(mine and failing == "decode"):
                job.step(3)
        if not behind:
            job.step(4)
            with pytest.raises(MismatchError, match="an error has left 1 rank"):
                job.step(5)
        with pytest.raises(RuntimeError, match="an exchange has failed: .* load a checkpoint on all ranks"):
            job.optimizer.sync()
        job.optimizer.close()


@case
def an_error_with_exchanges_in_flight():
    """All ranks raise it after the same step, where all of them have heard of it."""

    def broken(*_, **__):
        raise ValueError("no ink")

    for failing in ("update", "encode", "decode"):
        job, mine = Job(IN_MODEL, every=4, fragments=2, delay=3, make=ADAMW).run(6), dist.get_rank() == 3
        with pytest.MonkeyPatch.context() as patch, decoding_fails(mine and failing == "decode"):
            if mine and failing != "decode":
                updates = job.optimizer._updates
                patch.setattr(updates if failing == "update" else updates.engine.pipeline, failing, broken)
            with pytest.raises((RuntimeError, ValueError, MemoryError), match="no ink|no room|an error has left"):
                for step in range(6, 16):
                    job.step(step)
        everywhere = [None] * 4
        dist.all_gather_object(everywhere, step)
        assert len(set(everywhere)) == 1 and step < 10, everywhere
        with pytest.raises(RuntimeError, match="an exchange has failed: .* load a checkpoint on all ranks"):
            job.optimizer.sync()
        job.optimizer.close()


@case
def replicas_that_do_not_begin_alike():
    seed = dist.get_rank() // 2
    job = Job(IN_MODEL, every=1, model=Network(seed=seed))
    with pytest.raises(MismatchError, match="has other values than on rank 0"):
        job.step(0)


@case
def what_cannot_work_is_an_error():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = mesh["replicate"].get_group()
    sharded = fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])

    def made(model, group, given=None):
        return LocalSGD(SGD(model.parameters()), given or model, LOSSY, process_group=group)

    for given in (None, sharded.named_parameters()):
        with pytest.raises(TypeError, match="weight is sharded, and LocalSGD exchanges.*Write: mesh = .*process_gr"):
            made(sharded, None, given)
    with pytest.raises(ValueError, match="ranks .* hold other shards of weight, .*: give LocalSGD the other dimension"):
        made(sharded, dist.group.WORLD)
    native = fully_shard(nn.Linear(8, 8), mesh=mesh)
    with pytest.raises(TypeError, match="FSDP itself sums gradients over the replicas.*LocalSGD"):
        made(native, replicas)
    part = nn.Linear(8, 8)
    ignored = fully_shard(nn.Sequential(part, nn.Linear(8, 8)), mesh=mesh["shard"], ignored_params={part.weight})
    blocks = nn.Sequential(fully_shard(nn.Linear(8, 8), mesh=mesh["shard"]), nn.Linear(8, 8))  # and not the root
    for given, name in ((ignored, "0.weight"), (blocks, "1.weight, 1.bias")):
        with pytest.raises(ValueError, match=f"was not applied to {name}, or told to ignore them, so that neith"):
            made(given, replicas)
    reduced = compress_replicas(sharded, mesh["replicate"])
    with pytest.raises(ValueError, match="in each step already: close.. what it has returned, .* before LocalSGD"):
        made(sharded, replicas)
    reduced.close()
    made(sharded, replicas).close()


class Peer(Sharded):
    """A replica that reaches the others through a store alone: shards under LocalSGD or PeerOptimizer; or DDP."""

    def __init__(self, kind, folder):
        super().__init__()
        self.replica = dist.get_rank() // 2
        if kind == "ddp":
            group = self.mesh["shard"].get_group()
            self.model = DistributedDataParallel(Network(), process_group=group)
            self.shards = lambda: [one.detach().clone() for one in self.model.parameters()]
        self.store = SharedStore(folder, peer=self.replica, peers=2, wait=20.0)
        if kind == "local":
            self.optimizer = LocalSGD(ADAMW(self.model.parameters()), self.model, IN_MODEL, every=2, store=self.store)
            self.shards = lambda: [one.clone() for one in self.optimizer._updates.anchors]
        else:
            inner = SignMomentum(self.model.parameters(), 0.01)
            self.optimizer = PeerOptimizer(inner, self.model, "sign_momentum", store=self.store)

    def residuals(self):
        return residuals_of(self.optimizer)

    def caught_up(self):
        updates = self.optimizer._updates
        with updates.together():
            updates.peers.catch_up(updates.fragments[0])
        return updates.fragments[0].outer_steps


@case
def a_peer_whose_ranks_part_gets_an_error_alone():
    """Its last rank has other values, or loads a state from before: the other peer goes on."""
    for kind in ("local", "gradients"):
        parted, last = Peer(kind, shared_folder()), dist.get_rank() == 3
        for one in parted.model.parameters() if last else ():
            one.data.to_local().add_(1.0)
        late = Peer(kind, shared_folder()).run(4)
        state = copy.deepcopy(late.optimizer.state_dict())
        late.run(4, 6)
        if last:
            late.optimizer.load_state_dict(state)
        for job, steps, said in ((parted, (6,), "go on without peer 1"), (late, (6, 10), "not at the same exchange")):
            job.store.wait = 1.0
            fails = job.replica == 1
            with pytest.raises((MismatchError, RuntimeError), match=said) if fails else nullcontext():
                job.run(*steps)
            assert fails or job.caught_up() == steps[-1] // (2 if kind == "local" else 1)
            job.optimizer.close()


@case
def peers_of_several_ranks():
    """They exchange; one goes on alone, and the other one comes back; a rank that fails ends its own peer alone.

    The last case: as PyTorch names groups by how many a rank has, jobs that were made by some of the ranks alone leave
    them without common names for groups.
    """

    def broken(*_, **__):
        raise ValueError("no ink")

    for kind in ("local", "gradients", "ddp"):
        folder = shared_folder()
        job = Peer(kind, folder).run(6)
        job.check_same()
        done, saved, group = job.caught_up(), f"{folder}/saved{job.replica}", job.mesh["shard"].get_group()
        assert done == (3 if kind == "local" else 6)
        kept = job.residuals()
        state = {"model": job.model.state_dict(), "optimizer": checkpointed(job.optimizer)}
        dcp.save(state, checkpoint_id=saved, process_group=group)
        if job.replica == 0:
            job.store.wait = 0.0
            job.run(6, 10)
        dist.barrier()
        assert job.caught_up() == done + (2 if kind == "local" else 4)
        job.check_same()
        if job.replica == 1:
            job.optimizer.close()
            job, other = Peer(kind, folder), Peer(kind, folder)
            for one, of in ((job, 1), (other, 0)):
                where = f"{folder}/saved{of}"
                state = {"model": one.model.state_dict(), "optimizer": checkpointed(one.optimizer, where)}
                dcp.load(state, checkpoint_id=where, process_group=group)
                one.model.load_state_dict(state["model"])
            again = job.residuals()
            assert again.keys() == kept.keys() and all(torch.equal(again[name], kept[name]) for name in kept)
            assert kept and not other.residuals()
            other.optimizer.close()
            job.caught_up()
        job.check_same()
        if dist.get_rank() == 3:
            job.optimizer._updates.engine.pipeline.encode = broken
        failing = job.replica == 1
        with pytest.raises((RuntimeError, ValueError), match="no ink") if failing else nullcontext():
            job.run(10, 14)
        with pytest.raises(RuntimeError, match="make a new|load a checkpoint") if failing else nullcontext():
            job.run(14, 16)
        assert failing or job.caught_up() == (8 if kind == "local" else 16)
        job.optimizer.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_cases(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
