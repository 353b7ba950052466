"""What the PyTorch adapters must do with gradients on a GPU. scripts/dev/test_gpu.sh runs these cases, on one rank with
NCCL and on two with Gloo, which share the GPU (see tests/case_runner.py):

    torchrun --standalone --nproc-per-node 2 tests/adapters/gpu_cases.py [CASE ...]

The gradients are given, so that those on the GPU and those on the host are equal to the bit; so is then what becomes of
them. Without a GPU, all of it is on the host.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from hvd_deepreduce.torch import ddp
from hvd_deepreduce.torch.fsdp import compress_replicas
from hvd_deepreduce.torch.local_sgd import LocalSGD
from tests.adapters.common import LOSSLESS, LOSSY
from tests.adapters.torch_job import Given, arrays, flat, loss_of, network
from tests.case_runner import case, run_cases

GPU = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
HOST = torch.device("cpu")
SHAPES = ((300, 200), (7,), (120_000,), (50, 60), (1,), (90, 1000))
CAP = 0.25
"""Megabytes of a bucket: the parameters fill four."""
ALWAYS = {"memory": "scaled_momentum", "value": "sign", "scope": "bucket"}
"""A config that is at work on one rank too, since it has a momentum."""
THIN = {"name": "reduce_scatter", "density": 0.02}
FROZEN = 3
"""The parameter that is frozen from the third step on, where one is."""


def configs():
    yield ALWAYS
    yield {**ALWAYS, "exchange": "reduce_scatter"}
    if dist.get_world_size() > 1:
        yield {**LOSSY, "scope": "bucket"}
        yield {**LOSSY, "scope": "bucket", "index": "rans", "value": {"name": "qsgd", "entropy": "rans"}}
        yield {**LOSSY, "scope": "bucket", "selection": "tensor", "exchange": THIN}
        yield {**LOSSY, "index": {"name": "bloom", "policy": "p2"}, "value": "fit_poly", "scope": "bucket"}


def given(device):
    return Given({f"p{number}": np.zeros(shape, np.float32) for number, shape in enumerate(SHAPES)}).to(device)


def gradients_of(step, device):
    random = np.random.default_rng([step, dist.get_rank()])
    made = [random.standard_normal(shape, np.float32) * random.exponential() for shape in SHAPES]
    return [torch.from_numpy(one).to(device) for one in made]


def with_ddp(config, device, steps=4, within=nullcontext, beside=lambda: None):
    """The means of each step and the last residuals, as bytes. ``beside`` runs between forward and backward pass."""
    with within():
        model = given(device)
        called = DDP(model, bucket_cap_mb=CAP)
        state = ddp.DeepReduceState(config)
        called.register_comm_hook(state, ddp.deepreduce_hook)
        found = []
        for step in range(steps):
            model.zero_grad()
            loss = called(gradients_of(step, device))
            beside()
            loss.backward()
            beside()
            found += [one.tobytes() for one in arrays([p.grad.cpu() for p in model.parameters()])]
        assert state.stats()["total"]["bytes_sent"] > 0 or dist.get_world_size() == 1
        kept = state.state_dict()["residuals"]
        state.close()
    return found, {name: one.numpy().tobytes() for name, one in kept.items()}


def compare(made, config, **how):
    on_host, on_gpu = made(config, HOST), made(config, GPU, **how)
    for step_of, (ours, theirs) in enumerate(zip(on_gpu[0], on_host[0], strict=True)):
        assert ours == theirs, f"{config}: gradient {step_of} differs"
    assert on_gpu[1] == on_host[1] and on_gpu[1], f"{config}: the residuals differ"


@case
def means_and_residuals_of_ddp_are_those_on_the_host():
    for config in configs():
        compare(with_ddp, config)


def side_stream():
    return torch.cuda.stream(torch.cuda.Stream(GPU)) if GPU.type == "cuda" else nullcontext()


@case
def training_on_a_side_stream():
    for config in configs():
        compare(with_ddp, config, within=side_stream)


@case
def little_memory_that_others_write_to():
    """Memory that PyTorch's allocator gives away while another stream reads it would be overwritten."""
    if GPU.type == "cuda":
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(GPU).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(GPU) + (256 << 20)) / whole, GPU)

    def beside():
        for size in (1000, 60_000, 90_000, 120_000, 270_000, 5_000_000):
            for _ in range(3):
                torch.full((size,), float("nan"), device=GPU)
                torch.full((size,), 255, dtype=torch.uint8, device=GPU)

    try:
        for config in configs():
            compare(with_ddp, config, beside=beside)
    finally:
        if GPU.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, GPU)


def freeze(model):
    parameter = list(model.parameters())[FROZEN]
    parameter.requires_grad_(False)
    parameter.grad = None


def with_fsdp(config, device, steps=4, freezing=False):
    """Each rank is a replica, of one shard."""
    model = given(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    replicas = compress_replicas(model, mesh["replicate"], config)
    found = []
    for step in range(steps):
        model.zero_grad()
        if freezing and step == 2:
            freeze(model)
        model(gradients_of(step, device)).backward()
        means = [p.grad.to_local().cpu() for p in model.parameters() if p.requires_grad]
        found += [one.tobytes() for one in arrays(means)]
    kept = {name: one.numpy().tobytes() for name, one in replicas.state_dict()["residuals"].items()}
    replicas.close()
    return found, kept


@case
def means_and_residuals_of_fsdp_are_those_on_the_host():
    for config in configs():
        compare(with_fsdp, config)


@case
def local_updates_on_a_gpu():
    if dist.get_world_size() == 1:
        pytest.skip("one rank exchanges no updates")
    for config in ({"anchors": "device"}, {"anchors": "host"}, {"every": 4, "fragments": 2, "delay": 3}):
        models = []
        for device, settings in ((HOST, LOSSLESS), (GPU, LOSSLESS), (GPU, LOSSY)):
            model = network().to(device)
            sgd = torch.optim.SGD(model.parameters(), 0.1)
            optimizer = LocalSGD(sgd, model, settings, process_group=dist.group.WORLD, **{"every": 2, **config})
            for step in range(8):
                optimizer.zero_grad()
                loss_of(model, step, dist.get_rank()).backward()
                optimizer.step()
            optimizer.sync()
            models.append(flat(model).cpu())
            optimizer.close()
        assert torch.allclose(models[0], models[1], rtol=1e-4, atol=1e-6), config
        assert models[2].isfinite().all() and not torch.equal(models[1], models[2])
        for one in models:
            everything = [torch.empty_like(one) for _ in range(dist.get_world_size())]
            dist.all_gather(everything, one)
            assert all(torch.equal(one, other) for other in everything), "the ranks' parameters differ"


@case
def mixed_precision_and_batch_norm():
    """The collectives of SyncBatchNorm run beside those of the buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 4)).to(GPU)
    if GPU.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    called = DDP(model, bucket_cap_mb=0.004)
    state = ddp.DeepReduceState(ALWAYS)
    called.register_comm_hook(state, ddp.deepreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler(GPU.type, init_scale=2.0**10)
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast(GPU.type, torch.float16 if GPU.type == "cuda" else torch.bfloat16):
            loss = loss_of(called, step, dist.get_rank())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert flat(model).isfinite().all()
    state.close()


def with_horovod(config, device, nccl=False, steps=4, within=nullcontext, freezing=False):
    """Horovod's calls for each gradient, over a stand-in of Horovod (tests/adapters/horovod_stand_in.py). From the
    second step on its optimizer is known. Of a parameter without a gradient, Horovod sends zeros."""
    from hvd_deepreduce.torch.horovod import DeepReduce
    from tests.adapters import horovod_stand_in as hvd

    hvd.nccl = nccl
    with within():
        model = given(device)
        compression, found = DeepReduce(model, config), []
        handles = [None] * len(SHAPES)

        def reduce(number, parameter):
            sent, context = compression.compress(parameter.grad)
            handles[number] = hvd.allreduce_async_(sent, name=f"gradient.{number}", op=hvd.Average), context

        for number, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(partial(reduce, number))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.op, optimizer._requires_update = hvd.Average, set(model.parameters())
        for step in range(steps):
            if step:
                compression._optimizers.check(optimizer)
            model.zero_grad()
            if freezing and step == 2:
                freeze(model)
            model(gradients_of(step, device)).backward()
            for number, parameter in enumerate(model.parameters()):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                    reduce(number, parameter)
            means = [compression.decompress(hvd.synchronize(handle), context) for handle, context in handles]
            found += [one.tobytes() for one in arrays(one.cpu() for one in means)]
        kept = compression.state_dict()["residuals"]
        compression.close()
    return found, {name: np.asarray(one).tobytes() for name, one in kept.items()}


@case
def horovod_s_calls_give_what_they_give_on_the_host():
    from tests.adapters import horovod_stand_in

    horovod_stand_in.install()
    if dist.get_world_size() == 1:
        pytest.skip("one rank exchanges nothing")
    for config in ({**LOSSY, "min_elements": 100}, {**LOSSY, "scope": "bucket", "bucket_bytes": 300_000}, ALWAYS,
                   {**LOSSY, "scope": "model", "exchange": "reduce_scatter"}, {"scope": "bucket"}):  # fmt: skip
        for nccl in (False, True):
            compare(with_horovod, config, nccl=nccl)
            compare(with_horovod, config, nccl=nccl, within=side_stream)


@case
def what_is_frozen_later_keeps_what_it_has_on_the_host():
    from tests.adapters import horovod_stand_in

    horovod_stand_in.install()
    for config in configs():
        compare(partial(with_fsdp, freezing=True), config)
    if dist.get_world_size() > 1:
        for config in ({**LOSSY, "min_elements": 100}, {**LOSSY, "scope": "bucket", "bucket_bytes": 300_000}, ALWAYS,
                       {**LOSSY, "memory": "dgc", "scope": "model"}):  # fmt: skip
            freezing = partial(with_horovod, freezing=True)
            compare(freezing, config)
            compare(freezing, config, nccl=True, within=side_stream)


if __name__ == "__main__":
    alone = int(os.environ["WORLD_SIZE"]) == 1
    if GPU.type == "cuda":
        torch.cuda.set_device(GPU)
    dist.init_process_group("cpu:gloo,cuda:nccl" if alone and GPU.type == "cuda" else "gloo")
    run_cases(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
