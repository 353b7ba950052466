"""What the DDP communication hook must do on several ranks: the cases of test_ddp.py (see tests/case_runner.py).

torchrun --standalone --nproc-per-node 2 tests/adapters/ddp_cases.py [CASE ...]
"""

from __future__ import annotations

import copy
import gc
import re
import sys
import tempfile
import threading
import weakref
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from hvd_deepreduce import ConfigError, ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.engine import MismatchError, dense_or_compressed
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.tools import gradient_file
from hvd_deepreduce.torch import Capture, ddp, rendezvous
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.local_sgd import LocalSGD
from hvd_deepreduce.torch.tensors import TorchTensors
from hvd_deepreduce.wire import standalone as wire
from tests.adapters import calls, containers, timelines
from tests.adapters.optimizer_warnings import heard
from tests.adapters.reports import Heard
from tests.adapters.scopes import TWO_LEVELS, ranks_of_node
from tests.adapters.tcp import Meter
from tests.case_runner import case, run_cases
from tests.damaged import decoding_fails, last_bit_changed

LOSSLESS = {"sparsifier": {"name": "topk", "density": 1.0}, "value": "raw", "index": "bitmap", "scope": "bucket"}
LOSSY = {"sparsifier": {"name": "topk", "density": 0.05}, "scope": "bucket"}
CAP = 0.004
"""Megabytes of a bucket: the model's parameters fill three."""


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 4))


def loss_of(model, step, rank=None):
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    x = torch.randn(16, 20, generator=generator)
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), x[:, :4].argmax(1))


def hooked(config, *, model=None, wrap=lambda hook: hook, seen=None, group=None, given=None, start_iter=0, **options):
    """A DDP model with the hook, and its state.

    Args:
        seen: a list for each bucket's parameters, gradients, and future.
        group: of the model.
        given: the group that the state is given.
    """
    model = DDP(network() if model is None else model, bucket_cap_mb=CAP, process_group=group, **options)
    state = ddp.DeepReduceState(config, given, start_iter=start_iter)
    hook = wrap(ddp.deepreduce_hook)

    def watching(state, bucket):
        before = bucket.buffer().clone()
        future = hook(state, bucket)
        if seen is not None:
            seen.append((bucket.index(), bucket.parameters(), before, future))
        return future

    model.register_comm_hook(state, watching)
    return model, state


def train(model, steps=4, first=0, loss=loss_of):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def flat(model):
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def gathered(given, group=None):
    """The objects of all ranks."""
    everything = [None] * dist.get_world_size(group)
    dist.all_gather_object(everything, given, group=group)
    return everything


def same_everywhere(model, group=None):
    """All parameters bitwise equal on all ranks."""
    own = [p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters()]
    assert len(set(map(str, gathered(own, group)))) == 1, "the ranks' parameters differ"


def average(tensor):
    return torch.stack(gathered(tensor)).mean(0)


@case
def lossless_equals_ddp_and_the_first_iterations_are_ddp():
    plain = DDP(network(), bucket_cap_mb=CAP)
    plain.register_comm_hook(None, default_hooks.allreduce_hook)
    train(plain)
    model, state = hooked(LOSSLESS)
    train(model)
    assert torch.allclose(flat(plain), flat(model), rtol=1e-4, atol=1e-6)
    same_everywhere(model)
    later, state = hooked(LOSSY, start_iter=4)
    train(later)
    assert torch.equal(flat(plain), flat(later)) and not state.state_dict()["residuals"]
    total = state.stats()["total"]
    assert total["steps"] == 4 and total["bytes_sent"] >= total["dense_bytes"] > 0
    train(later, first=4)
    same_everywhere(later)
    assert state.state_dict()["residuals"] and state.state_dict()["iteration"] == 8


@case
def means_and_residuals_are_those_of_the_pipeline_by_hand():
    """Each rank repeats all ranks' encoding from their gradients, in the buckets that DDP made, which it divides
    differently after the first step. What was sent and what is kept is what came."""
    for config in (
        LOSSY,
        {**LOSSY, "selection": "tensor", "value": {"name": "qsgd", "bits": 4}},
        {**LOSSY, "scope": "tensor"},
    ):
        seen = []
        model, state = hooked(config, seen=seen)
        names = {id(p): (number, name) for number, (name, p) in enumerate(model.module.named_parameters())}
        ranks = range(dist.get_world_size())
        pipeline = Pipeline(state.config)
        assert state.config.scope == "bucket"
        residuals = [
            {name: np.zeros(p.numel(), np.float32) for name, p in model.module.named_parameters()} for _ in ranks
        ]
        divisions = set()
        came = {name: np.zeros_like(one) for name, one in residuals[0].items()}
        sent = copy.deepcopy(came)
        for step in range(4):
            train(model, 1, step)
            divisions.add(str([[names[id(p)] for p in parameters] for _, parameters, _, _ in seen]))
            for number, parameters, before, future in seen:
                members = [names[id(p)] for p in parameters]
                sizes = [p.numel() for p in parameters]
                gradients = [one.numpy() for one in gathered(before)]
                mean = np.zeros(before.numel(), np.float32)
                whole = state.config.selection == "scope"
                begin = 0
                for at, size in [(None, before.numel())] if whole else list(enumerate(sizes)):
                    inside = members if whole else members[at : at + 1]
                    key = number if whole else members[at][0]
                    packed = []
                    for rank in ranks:
                        kept = np.concatenate([residuals[rank][name] for _, name in inside])
                        packed.append(
                            wire.unpack(
                                pipeline.encode(gradients[rank][begin : begin + size], kept, RngKey(0, key, step, rank))
                            )
                        )
                        ends = np.cumsum([residuals[rank][name].size for _, name in inside])
                        for (_, name), part in zip(inside, np.split(kept, ends[:-1]), strict=True):
                            residuals[rank][name] = part
                    pipeline.decode(packed, mean[begin : begin + size], 1 / len(ranks))
                    begin += size
                assert np.array_equal(future.value().numpy(), mean), (config, step, number)
                ends = np.cumsum(sizes)[:-1]
                own = gradients[dist.get_rank()]
                for (_, name), came_now, sent_now in zip(
                    members, np.split(own, ends), np.split(mean, ends), strict=True
                ):
                    came[name] += came_now
                    sent[name] += sent_now
            seen.clear()
        assert len(divisions) > 1, "DDP did not divide the model again"
        kept = state.state_dict()["residuals"]
        for name, own in residuals[dist.get_rank()].items():
            assert np.array_equal(kept[name].numpy(), own), name
            expected = np.mean(gathered(came[name] - kept[name].numpy()), 0)
            np.testing.assert_allclose(sent[name], expected, rtol=1e-3, atol=1e-5)
        same_everywhere(model)
        state.close()


def trained_and_added_up(model, seen):
    """Trains for four steps. Returns what was applied, and this rank's gradients, added up for each parameter."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    taken, given = ({name: 0 for name in names.values()} for _ in range(2))
    for step in range(4):
        train(model, 1, step)
        for _, parameters, before, future in seen:
            at = 0
            for parameter in parameters:
                part = slice(at, at + parameter.numel())
                given[names[id(parameter)]] += before[part].double()
                taken[names[id(parameter)]] += future.value()[part].double()
                at += parameter.numel()
        seen.clear()
    return taken, given


@case
def a_step_takes_few_python_calls():
    """What does not change from step to step is made once."""
    for layers, limit in ((1, 100), (11, 220)):
        torch.manual_seed(0)
        layer = partial(nn.Linear, 300, 300, bias=False)
        model, state = DDP(nn.Sequential(*(layer() for _ in range(layers)))), ddp.DeepReduceState()
        model.register_comm_hook(state, ddp.deepreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
            model(torch.randn(8, 300, generator=generator)).square().mean().backward()
            optimizer.step()

        seen = calls.of_a_step(step)
        assert state.stats()["last_step"]["bytes_sent"] > 0 and len(seen) <= limit, seen
        state.close()


@case
def the_timeline_has_the_spans_of_each_bucket():
    def trained():
        model, state = hooked(LOSSY)
        train(model, 3)
        state.close()

    timelines.check(dist.get_rank(), trained)


@case
def callbacks_and_measured_residuals():
    """Asked for before the model is known. DDP makes its buckets anew after the first iteration."""
    seen = []
    model, state = hooked(LOSSY, seen=seen)
    heard, names = Heard(state), {id(p): name for name, p in model.module.named_parameters()}
    for step in range(5):
        before, seen[:] = {name: state.residual(name) for name in names.values()}, []
        train(model, 1, step)
    same_everywhere(model)
    own = {}
    for _, tensors, gradients, _ in seen:
        parts = torch.split(gradients, [tensor.numel() for tensor in tensors])
        own.update((names[id(tensor)], part.numpy()) for tensor, part in zip(tensors, parts, strict=True))
    heard.check(before, own)


@case
def sums_of_slices_lose_nothing():
    """With ``reduce_scatter``: all ranks apply the same, and what was applied and is kept is what came."""
    slices = {"scope": "bucket", "exchange": "reduce_scatter"}
    plain = DDP(network(), bucket_cap_mb=CAP)
    train(plain)
    model, _ = hooked({**LOSSLESS, **slices})
    train(model)
    assert torch.allclose(flat(plain), flat(model), rtol=1e-4, atol=1e-6)
    for exchange in ("reduce_scatter", {"name": "reduce_scatter", "density": 0.02}, {"name": "auto", "density": 0.02}):
        seen = []
        model, state = hooked({**LOSSY, **slices, "exchange": exchange}, seen=seen)
        taken, given = trained_and_added_up(model, seen)
        same_everywhere(model)
        kept = state.state_dict()["residuals"]
        for name, total in taken.items():
            expected = average(given[name] - kept[name].double().reshape(-1))
            assert torch.allclose(total, expected, rtol=1e-4, atol=1e-5), name
        model, state = hooked({**LOSSY, **slices, "exchange": exchange}, model=network())
        (loss_of(model, 0) * (float("nan") if dist.get_rank() == 1 else 1.0)).backward()
        assert not any(parameter.grad.isfinite().all() for parameter in model.parameters())


@case
def an_exchange_is_chosen_while_there_are_several_buckets():
    """The choice says by which thread buckets are finished, so it is made before the first of them is taken."""
    exchange = {"name": "auto", "density": 0.0005, "latency": 0, "bandwidth": 0.001}
    for options in ({}, {"find_unused_parameters": True}):
        model, state = hooked(LOSSY, **options)
        train(model, 3)  # DDP has divided its buckets again
        state.set_config(exchange=exchange)
        train(model, 3, 3)
        same_everywhere(model)
        assert state._buckets.engine.exchange.several, state.stats().said


@case
def two_levels():
    """All ranks apply the same; what they sent and what they keep is what came, though DDP divides its buckets again; a
    resumed run, and a NaN."""
    local = ranks_of_node(dist.get_world_size())
    plain = DDP(network(), bucket_cap_mb=CAP)
    train(plain)
    for scope in TWO_LEVELS:
        scope = {**scope, "scope": "bucket", "hierarchical": local}
        scope.pop("bucket_bytes", None)
        model, _ = hooked({**LOSSLESS, **scope, "exchange": "allgather"})
        train(model)
        assert torch.allclose(flat(plain), flat(model), rtol=1e-4, atol=1e-6)
        seen = []
        model, state = hooked({**LOSSY, **scope}, seen=seen)
        taken, given = trained_and_added_up(model, seen)
        same_everywhere(model)
        kept = state.state_dict()["residuals"]
        for name, total in taken.items():
            own = kept[name].double().reshape(-1) if name in kept else 0.0
            assert torch.allclose(total, average(given[name] - own), rtol=1e-4, atol=1e-5), name
        stats = state.stats()["last_step"]
        between = stats["bytes_sent"] - stats["inside_bytes_sent"]
        assert stats["inside_bytes_sent"] > 0 and between < 0.4 * stats["dense_bytes"], stats
        again, resumed = hooked({**LOSSY, **scope}, model=copy.deepcopy(model.module))
        resumed.load_state_dict(state.state_dict())
        train(again, 2, 4)
        same_everywhere(again)
        (loss_of(model, 0) * (float("nan") if dist.get_rank() == 1 else 1.0)).backward()
        assert not any(parameter.grad.isfinite().all() for parameter in model.parameters())
        assert all(one.isfinite().all() for one in state.state_dict()["residuals"].values())
    model, state = hooked({**LOSSY, "hierarchical": local + 1})
    with pytest.raises(RuntimeError, match=f"ranks cannot be divided into nodes of {local + 1}"):
        train(model, 1)


@case
def what_fails_on_one_rank_of_two_levels_is_an_error_on_all():
    def failing(*arguments, **_):
        raise ValueError("no ink in \udcff")  # a file's name may hold a byte that is no text

    last = dist.get_world_size() - 1
    for where in ("encode", "memory", "hook"):
        model, state = hooked({**LOSSY, "hierarchical": ranks_of_node(dist.get_world_size())})
        train(model, 2)
        before = flat(model)
        if dist.get_rank() == last:
            engine = state._buckets.engine
            if where == "encode":
                engine.pipeline.encode = failing
            elif where == "memory":
                engine._memory.slice = failing
            else:
                reducer = state._buckets._reducer
                reducer.start_bucket = partial(
                    lambda start, some, number, vector: (failing if number == 1 else start)(some, number, vector),
                    reducer.start_bucket,
                )
        if where == "encode" and dist.get_world_size() != 4:  # on one node nothing is encoded
            train(model, 1, 2)
            continue
        with pytest.raises(ContainerError, match=f"rank {last} could not take part in the sum: ValueError: no ink"):
            train(model, 1, 2)
        assert torch.equal(before, flat(model))


@case
def containers_in_equal_buckets():
    """Compared with those under Horovod, by test_ddp.py."""
    return containers.of_equal_buckets(containers.by_ddp)


@case
def the_exchange_runs_during_the_backward_pass():
    ended = []

    def waiting(hook):
        def wrapped(state, bucket):
            if bucket.is_last() and bucket.index():
                earlier[0].wait()  # it ends without this bucket
                ended.append(earlier[0].done())
            future = hook(state, bucket)
            earlier.append(future)
            return future

        return wrapped

    model, state = hooked(LOSSY, wrap=waiting)
    for step in range(3):
        earlier = []
        train(model, 1, step)
    assert len(ended) >= 2 and all(ended)  # DDP begins with one bucket
    same_everywhere(model)


class Branches(nn.Module):
    """Of its layers, a step uses those that it is told."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))

    def forward(self, x, used):
        for number in used:
            x = x + self.layers[number](x).tanh()
        return x


@case
def unused_parameters_keep_their_residuals():
    """DDP drops what comes for parameters that no rank has used: nothing may be lost with it."""
    last = dist.get_world_size() - 1
    everything = [0, 1, 2, 3]
    uses = [[everything] * 2, [[0, 1], [0, 2]], [[0], [0]], [[1, 3], [1, 3]], [[2], [0]], [everything] * 2]
    for config in (LOSSY, {**LOSSY, "selection": "tensor"}):
        model, state = hooked(config, model=Branches(), find_unused_parameters=True)
        came = [torch.zeros(p.numel()) for p in model.parameters()]
        sent = copy.deepcopy(came)
        for step, use in enumerate(uses):
            used = use[dist.get_rank() == last]
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
            twin = Branches()
            twin.load_state_dict(model.module.state_dict())
            for one in (model, twin):
                one.zero_grad()
                one(x, used).square().mean().backward()
            for total, p in zip(came, twin.parameters(), strict=True):
                total += 0 if p.grad is None else p.grad.reshape(-1)
            with torch.no_grad():
                for total, p in zip(sent, model.parameters(), strict=True):
                    if p.grad is not None:
                        total += p.grad.reshape(-1)
                        p -= 0.1 * p.grad
            anywhere = set(use[0]) | set(use[1])
            assert [p.grad is not None for p in model.parameters()] == [at // 2 in anywhere for at in range(8)], step
            same_everywhere(model)
        kept = state.state_dict()["residuals"]
        for (name, _), own, total in zip(model.module.named_parameters(), came, sent, strict=True):
            torch.testing.assert_close(total, average(own - kept[name]), rtol=1e-3, atol=1e-6)
        steps = state.state_dict()["steps"]
        assert len(set(map(str, gathered(steps)))) == 1


@case
def nan_on_one_rank_and_empty_selections():
    model, state = hooked(LOSSY)
    train(model, 2)
    before = {name: one.clone() for name, one in state.state_dict()["residuals"].items()}
    loss = loss_of(model, 2)
    model.zero_grad()
    (loss * float("nan") if dist.get_rank() == 0 else loss).backward()
    assert all(not torch.isfinite(p.grad).any() for p in model.parameters())
    if dist.get_rank() == 0:  # where the gradient was not finite
        assert all(torch.equal(one, before[name]) for name, one in state.state_dict()["residuals"].items())
    train(model, 2, 3)
    same_everywhere(model)
    assert torch.isfinite(flat(model)).all()

    none, state = hooked({"sparsifier": {"name": "threshold", "threshold": 1e9}, "scope": "bucket"})
    start = flat(none)
    train(none, 3, loss=lambda model, step: loss_of(model, step) * (0 if dist.get_rank() else 1))
    assert torch.equal(start, flat(none))
    assert any(one.any() for one in state.state_dict()["residuals"].values()) == (dist.get_rank() == 0)


@case
def accumulated_gradients_are_sent_once():
    finals = []
    for make in (lambda: DDP(network(), bucket_cap_mb=CAP), lambda: hooked(LOSSLESS)[0]):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(3):
                with model.no_sync() if part < 2 else nullcontext():
                    loss_of(model, 3 * step + part).backward()
            optimizer.step()
        finals.append(flat(model))
    assert torch.allclose(*finals, rtol=1e-4, atol=1e-6)
    same_everywhere(model)


def bf16_wrapper(hook):
    """DDP refuses the wrapper on CPUs by the name of its function."""
    wrapped = default_hooks.bf16_compress_wrapper(hook)
    return lambda state, bucket: wrapped(state, bucket)


OPTIONS = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
]


@case
def options_of_ddp_and_other_dtypes():
    for number, (dtype, wrap, tolerance) in enumerate(
        [
            (torch.float32, default_hooks.fp16_compress_wrapper, 3e-3),
            (torch.float64, default_hooks.fp16_compress_wrapper, 3e-3),
            (torch.float32, bf16_wrapper, 3e-2),
            (torch.bfloat16, lambda hook: hook, 5e-2),
            (torch.float64, lambda hook: hook, 1e-9),
        ]
    ):
        plain = DDP(network().to(dtype), bucket_cap_mb=CAP)
        train(plain)
        for options in OPTIONS if number == 0 else [OPTIONS[number % 3]]:
            model, state = hooked(LOSSLESS, model=network().to(dtype), wrap=wrap, **options)
            train(model)
            torch.testing.assert_close(flat(model), flat(plain), rtol=tolerance, atol=tolerance)
            same_everywhere(model)
            expected = torch.float64 if dtype == torch.float64 else torch.float32
            assert {one.dtype for one in state.state_dict()["residuals"].values()} == {expected}
        mixed, _ = hooked(LOSSY, model=network().to(dtype), wrap=wrap)
        train(mixed)
        same_everywhere(mixed)


@case
def mixed_precision_with_a_scaler():
    """A scaled loss that overflows on one rank makes all ranks skip the step and lower the scale."""
    model, state = hooked(LOSSY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step)
        huge = 1e38 if step == 2 and dist.get_rank() == 1 else 1
        before = flat(model)
        scaler.scale(loss * huge).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert torch.equal(before, flat(model)) == (step == 2)
        same_everywhere(model)
    assert scales == [1024, 2048, 1024, 1024, 2048]


@case
def a_resumed_run_equals_an_unbroken_one():
    """With ``selection: tensor``, whatever DDP's division into buckets is. Top-k of whole buckets, and the rounding of
    dense sums, depend on that division, which DDP changes after the first iteration of a model."""
    for selection, start_iter, broken in (("tensor", 0, 3), ("tensor", 2, 3), ("scope", 0, 3), ("scope", 4, 3)):
        model, state = hooked({**LOSSY, "selection": selection}, start_iter=start_iter)
        assert state.state_dict() == {}
        train(model, broken)
        saved = copy.deepcopy((model.module.state_dict(), state.state_dict()))
        finals = []
        for again in (False, True):
            if again and selection == "tensor":
                state.close()
                model, state = hooked({**LOSSY, "selection": selection}, model=network(5), start_iter=start_iter)
            if again:
                model.module.load_state_dict(saved[0])
                state.load_state_dict(saved[1])
                assert state.state_dict()["iteration"] == broken
            train(model, 3, broken)
            finals.append((flat(model), state.state_dict()["residuals"]))
            same_everywhere(model)
        assert torch.equal(finals[0][0], finals[1][0])
        assert all(torch.equal(one, finals[1][1][name]) for name, one in finals[0][1].items())
        assert state.state_dict()["iteration"] == broken + 3


@case
def states_of_another_number_of_ranks():
    model, state = hooked(LOSSY)
    train(model)
    states = gathered(state.state_dict())
    many = [{**one, "rank": rank, "size": 2 * len(states)} for rank, one in enumerate([*states, *states])]
    state.load_state_dict(iter(many), reshard=True)
    for name, own in state.state_dict()["residuals"].items():
        expected = 2 * sum(one["residuals"][name] for one in states)
        torch.testing.assert_close(sum(gathered(own)), expected, rtol=1e-5, atol=1e-6)
    again, later = hooked(LOSSY)
    later.load_state_dict(iter(many), reshard="mean")
    assert later.state_dict() == {}
    train(again, 1)
    same_everywhere(again)
    assert later.state_dict()["iteration"] == 5


@case
def states_that_are_wrong_on_one_rank():
    model, state = hooked(LOSSY)
    train(model, 1)
    good = state.state_dict()
    with pytest.raises(ValueError, match="it has no rank|not a state of DeepReduceState"):
        state.load_state_dict({"iteration": 3})
    bad = {**good, "residuals": {**good["residuals"], "4.bias": torch.zeros(7)}}
    model, state = hooked(LOSSY)
    state.load_state_dict(bad if dist.get_rank() == 1 else good)
    with pytest.raises(RuntimeError, match=r"this step failed on rank 1: 'ValueError: .*4\.bias"):
        train(model, 1)
    model, state = hooked(LOSSY)
    if dist.get_rank():
        state.load_state_dict(good)
    with pytest.raises(MismatchError, match="at iteration 0, compressed from iteration 0 on.* at iteration 1"):
        train(model, 1)


@case
def ranks_that_differ():
    rank = dist.get_rank()
    for config, start_iter, match in (
        ({**LOSSY, "seed": rank}, 0, "config.seed is 0 on rank 0, 1 on rank 1"),
        (LOSSY, rank, "compressed from iteration 0 on, .* on rank 0, .*compressed from iteration 1 on, .* on rank 1"),
    ):
        model, _ = hooked(config, start_iter=start_iter)
        before = flat(model)
        with pytest.raises(MismatchError, match=match):
            train(model, 1)
        assert torch.equal(before, flat(model))
    for change in ({"value": "half"}, {"mode": "auto"}):
        model, state = hooked(LOSSY)
        train(model, 2)
        if rank == 1:
            state.set_config(**change)
        with pytest.raises(MismatchError, match=f"config.{next(iter(change))} is"):
            train(model, 1, 2)
    # On all ranks, it is a new config.
    model, state = hooked(LOSSY)
    train(model, 2)
    state.set_config(value="half", selection="tensor")
    train(model, 2, 2)
    same_everywhere(model)
    assert state.config.value.name == "half"


def patched(state, replacement):
    """Replaces the encoder of the last rank; its first argument is the true one."""
    if dist.get_rank() == dist.get_world_size() - 1:
        pipeline = state._buckets.engine.pipeline
        encode = pipeline.encode
        pipeline.encode = lambda *arguments: replacement(encode, *arguments)


@case
def what_fails_on_one_rank_is_an_error_on_all():
    def failing(encode, *arguments):
        raise ValueError("no ink in \udcff")

    last = dist.get_world_size() - 1
    for replacement, error, match in (
        (last_bit_changed, ContainerError, f"the container of rank {last} cannot be read: its checksum"),
        (failing, RuntimeError, f"this step failed on rank {last}: 'ValueError: no ink in .*udcff'. No gradient of"),
    ):
        model, state = hooked(LOSSY)
        train(model, 2)
        before = flat(model)
        patched(state, replacement)
        with pytest.raises(error, match=match):
            train(model, 1, 2)
        assert torch.equal(before, flat(model))
        # A new DDP model goes on from a checkpoint.
        inner = network()
        inner.load_state_dict(model.module.state_dict())
        model, state = hooked(LOSSY, model=inner)
        train(model, 2)
        same_everywhere(model)
    # Before the ranks have told which parameters are used.
    model, state = hooked(LOSSY, find_unused_parameters=True)
    train(model, 2)
    before = flat(model)
    if dist.get_rank() == last:
        state._buckets._divided.clear()
        state._buckets._parameter = failing
    with pytest.raises(RuntimeError, match=f"this step failed on rank {last}: 'ValueError: no ink in .*udcff'"):
        train(model, 1, 2)
    assert torch.equal(before, flat(model))


@case
def an_error_while_decoding_on_one_rank():
    """The others apply the step. The next one is an error on all ranks, without a wait."""
    size = dist.get_world_size()
    ways = [({}, 1), ({"exchange": "reduce_scatter"}, 1)] + [({"hierarchical": 2}, 2)] * (size == 4)
    for settings, ranks in ways:  # with two levels, a node applies the step or not
        behind = dist.get_rank() >= size - ranks
        model, state = hooked({**LOSSY, **settings})
        train(model, 2)
        before = flat(model)
        text = "no room|could not take the sum that other nodes have taken"
        with pytest.raises((MemoryError, ContainerError), match=text) if behind else nullcontext():
            with decoding_fails(dist.get_rank() == size - 1):
                train(model, 1, 2)
        assert torch.equal(before, flat(model)) == behind
        match = "INTERNAL ASSERT" if behind else f"an error has left {ranks} rank.* behind: its last step was applied"
        with pytest.raises(RuntimeError, match=match):
            train(model, 1, 3)
        assert state._buckets.engine.failed == behind
        inner = network()
        inner.load_state_dict(gathered(model.module.state_dict())[0])
        model, state = hooked(LOSSY, model=inner)
        train(model, 2)
        same_everywhere(model)


@case
def settings_that_cannot_work_with_ddp():
    for settings, match in (
        ({"scope": "model"}, "scope is 'model', and DDP gives its gradients in buckets"),
        ({"scope": "bucket", "bucket_bytes": 5000}, "bucket_bytes is 5000 and has no effect, since DDP"),
        ({"scope": "tensor", "min_elements": 5}, "min_elements is 5 and has no effect, since DDP"),
        ({"exchange": "densestream", "scope": "bucket"}, "has 'allgather', 'reduce_scatter' and 'auto' only"),
        ("adamw_small", r"Use LocalSGD, .*process_group=torch.distributed.group.WORLD\)"),
    ):
        with pytest.raises(ConfigError, match=match):
            ddp.DeepReduceState(settings)
    with pytest.raises(ConfigError, match="start_iter is 3 and memory is 'dgc'"):
        ddp.DeepReduceState("dgc", start_iter=3)
    model, state = hooked({**LOSSY, "selection": "tensor", "overrides": {"nowhere": {"value": "raw"}}})
    with pytest.raises(RuntimeError, match="this step failed on ranks 0, 1.*: .*nowhere"):
        train(model, 1)
    model, state = hooked({**LOSSY, "selection": "tensor", "overrides": {"*.bias": {"sparsifier": "none"}}})
    train(model, 2)
    kept = state.state_dict()["residuals"]
    assert not any(one.any() for name, one in kept.items() if name.endswith("bias") and one.abs().max() > 0.1)
    same_everywhere(model)


@case
def a_job_that_chooses_sends_all_of_its_gradients():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_or_compressed, "BLOCK", 3)
        patch.setattr(dense_or_compressed, "BLOCKS", 4)
        seen = []
        model, state = hooked({**LOSSY, "mode": "auto"}, seen=seen)
        names = {id(p): name for name, p in model.module.named_parameters()}
        came = {name: torch.zeros(p.numel()) for name, p in model.module.named_parameters()}
        sent = copy.deepcopy(came)
        whole = []
        for step in range(dense_or_compressed.WARM_UP + 18):
            train(model, 1, step)
            for _, parameters, before, future in seen:
                sizes = [p.numel() for p in parameters]
                for p, own, mean in zip(parameters, before.split(sizes), future.value().split(sizes), strict=True):
                    came[names[id(p)]] += own
                    sent[names[id(p)]] += mean
            seen.clear()
            last = state.stats()["last_step"]
            whole.append(last["bytes_sent"] >= last["dense_bytes"])
        kept = state.state_dict()["residuals"]
        for name in came:
            torch.testing.assert_close(sent[name], average(came[name] - kept[name]), rtol=0, atol=1e-5)
        trial = [number // 3 % 2 == 0 for number in range(12)]
        warm_up = dense_or_compressed.WARM_UP
        assert not any(whole[:warm_up]) and whole[warm_up:][:13] == [*trial, False]
        said = gathered(state.stats().said)
        assert len(set(said)) == 1 and ("gradients are dense" in said[0]) == whole[-1]
        same_everywhere(model)


@case
def groups_of_some_ranks():
    members = list(range(max(1, dist.get_world_size() - 1)))
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    for given in (group, None):  # closed, and made again
        model, state = hooked(LOSSY, group=group, given=given)
        train(model)
        same_everywhere(model, group)
        assert state.state_dict()["size"] == len(members)
        state.close()
    state.close()
    with pytest.raises(RuntimeError, match="was closed"):
        train(model, 1)


@case
def ranks_that_do_not_come_with_the_hook():
    """One reduces its gradients without it, one does not come at all, one was given another process group."""
    last = dist.get_world_size() - 1
    here = dist.get_rank() != last
    for comes, seconds, error, match in (
        (True, 100, MismatchError, f"{last} of this model's process group reduced gradients without"),
        (False, 1, TimeoutError, f"waited . s at its first exchange for ranks? .*{last} of its process group"),
    ):
        model = DDP(network(), bucket_cap_mb=CAP, process_group=dist.new_group())  # it is out of step afterwards
        if here:
            state = ddp.DeepReduceState(LOSSY, timeout=timedelta(seconds=seconds))
            model.register_comm_hook(state, ddp.deepreduce_hook)
            before = flat(model)
            with pytest.MonkeyPatch.context() as patch, pytest.raises(error, match=match):
                patch.setattr(rendezvous, "PROBE_SECONDS", 0.1)
                train(model, 1)
            assert torch.equal(before, flat(model))
        elif comes:
            loss_of(model, 0).backward()
            assert any(parameter.grad.isnan().any() for parameter in model.parameters())
        dist.barrier()
        if not here:
            rendezvous.Rendezvous("hook", None).meet(None)  # it has come as often as the others now
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_DEEPREDUCE_HANDSHAKE_SECONDS", "0.5")
        if here:
            with pytest.raises(TimeoutError, match=f"{last} of its process group. Make LocalSGD on every rank"):
                rendezvous.Rendezvous("LocalSGD", None).meet(None)
    dist.barrier()
    if not here:
        rendezvous.Rendezvous("LocalSGD", None).meet(None)
    alone = dist.new_group([0])
    model, _ = hooked(LOSSY, given=alone if dist.get_rank() == 0 else None)
    with pytest.raises(MismatchError, match="process_group has the ranks 0 on rank 0, '0 1.*' on rank"):
        train(model, 1)


@case
def hooks_that_are_registered_wrongly():
    for state in (None, "topk_rice_qsgd", ddp.DeepReduceState):
        model = DDP(network(), bucket_cap_mb=CAP)
        model.register_comm_hook(state, ddp.deepreduce_hook)
        with pytest.raises(TypeError, match=r"must be an instance of DeepReduceState. Write: model.register_comm_hook"):
            train(model, 1)
    inner = DDP(network(), bucket_cap_mb=CAP)
    for outer in (False, True):
        model = DDP(inner, bucket_cap_mb=CAP)
        (model if outer else inner).register_comm_hook(ddp.DeepReduceState(LOSSY), ddp.deepreduce_hook)
        with pytest.raises(RuntimeError, match="a DistributedDataParallel model is inside another one"):
            train(model, 1)
        inner = DDP(network(), bucket_cap_mb=CAP)
    model, state = hooked(LOSSY)
    train(model, 1)
    other = DDP(network(), bucket_cap_mb=CAP)
    other.register_comm_hook(state, ddp.deepreduce_hook)
    with pytest.raises(RuntimeError, match="make a DeepReduceState for each model"):
        train(other, 1)


@case
def a_model_that_was_wrapped_and_trained_before():
    """The hook comes after some steps; and the same layers get another DDP model while the first one is in memory."""
    first = DDP(network(), bucket_cap_mb=CAP)
    train(first, 2)
    state = ddp.DeepReduceState(LOSSY)
    first.register_comm_hook(state, ddp.deepreduce_hook)
    train(first, 2, 2)
    second, later = hooked(LOSSY, model=first.module)
    train(second, 2, 4)
    same_everywhere(second)
    assert state.stats()["total"]["steps"] == later.stats()["total"]["steps"] == 2
    assert set(later.state_dict()["residuals"]) == {name for name, _ in first.module.named_parameters()}


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(20, 30)
        self.weight = nn.Parameter(torch.randn(30, 4, dtype=torch.complex64) / 5)

    def forward(self, x):
        return (self.layer(x.real).to(torch.complex64) @ self.weight).abs()


@case
def complex_parameters_are_pairs():
    plain = DDP(Complex(), bucket_cap_mb=CAP)
    train(plain)
    model, _ = hooked(LOSSLESS, model=Complex())
    train(model)
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
    model, state = hooked(LOSSY, model=Complex())
    train(model)
    assert all(len(set(map(str, gathered(parameter.tolist())))) == 1 for parameter in model.parameters())
    assert state.residual("weight").shape == (240,)


@case
def one_rank_keeps_its_gradients():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    plain = DDP(network(), bucket_cap_mb=CAP, process_group=group)
    train(plain)
    model, state = hooked(LOSSY, group=group)
    train(model)
    assert torch.equal(flat(plain), flat(model))
    total = state.stats()["total"]
    assert total["steps"] == 4 and total["bytes_sent"] == 0 and not state.state_dict()["residuals"]


class Talking(nn.Module):
    """Averages what comes back over all ranks, as SyncBatchNorm does on GPUs."""

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(self.average)
        return x

    def average(self, gradient):
        mean = gradient.clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


@case
def two_models_and_layers_with_collectives_of_their_own():
    def talking():
        layers = network()
        return nn.Sequential(*(part for layer in layers for part in (layer, Talking())), nn.BatchNorm1d(4))

    models = [hooked(LOSSY, model=talking())[0], hooked(LOSSY)[0]]
    for step in range(4):
        for model in models:
            train(model, 1, step)
    for model in models:
        same_everywhere(model)


@case
def uneven_inputs_by_join():
    model, state = hooked(LOSSY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    same_everywhere(model)
    assert set(gathered(state.state_dict()["iteration"])) == {1 + 2 * dist.get_world_size()}


@case
def nothing_is_left_of_a_model_that_is_gone():
    before = set(threading.enumerate())
    model, state = hooked(LOSSY)
    train(model, 2)
    threads = [one for one in threading.enumerate() if one not in before and one.name.startswith("deepreduce")]
    assert len(threads) == 2
    gone = [weakref.ref(one) for one in (state, model, model.module)]
    del model, state
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    for one in threads:
        one.join(5)
        assert not one.is_alive()


@case
def local_updates_without_horovod():
    """LocalSGD on a process group: plain averaging, compressed updates in fragments with a delay, and a resumed run."""
    world = dist.group.WORLD
    rank, ranks = dist.get_rank(), range(dist.get_world_size())

    def step(model, optimizer, number, rank=rank):
        optimizer.zero_grad()
        loss_of(model, number, rank).backward()
        optimizer.step()

    averaged = {"sparsifier": "none", "value": "raw", "local": {"every": 2}, "scope": "model"}
    model, twins = network(), [network() for _ in ranks]
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, averaged, process_group=world)
    by_hand = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins]
    for number in range(4):
        step(model, optimizer, number)
        for other, (twin, one) in enumerate(zip(twins, by_hand, strict=True)):
            step(twin, one, number, other)
        if number % 2:
            with torch.no_grad():
                for same in zip(*(twin.parameters() for twin in twins), strict=True):
                    mean = torch.stack(list(same)).mean(0)
                    for p in same:
                        p.copy_(mean)
    torch.testing.assert_close(flat(model), flat(twins[0]), rtol=1e-5, atol=1e-6)
    same_everywhere(model)
    optimizer.close()

    def made(model, **settings):
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        return LocalSGD(inner, model, "adamw_safe", process_group=world, **settings)

    for settings in ({}, {"fragments": 2, "delay": 1, "every": 3, "scope": "bucket"}):
        model = network()
        optimizer, heard = made(model, **settings), []
        optimizer.add_callback(heard.append)
        optimizer.measure_residuals(every=1)
        for number in range(6):
            step(model, optimizer, number)
        optimizer.sync()
        same_everywhere(model)
        assert [one["total"]["steps"] for one in heard] == list(range(1, len(heard) + 1)) and heard
        assert heard[-1] == optimizer.stats() and "0.weight" in heard[-1].residual_ratio, heard[-1].residual_ratio
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        finals = []
        for again in (False, True):
            if again:
                optimizer.close()
                model = network(3)
                model.load_state_dict(saved[0])
                optimizer = made(model, **settings)
                optimizer.load_state_dict(saved[1])
            for number in range(6, 12):
                step(model, optimizer, number)
            optimizer.sync()
            finals.append(flat(model))
        assert torch.equal(*finals)
        assert 0 < optimizer.stats()["total"]["bytes_sent"] < optimizer.stats()["total"]["dense_bytes"]
        optimizer.close()
    model = network(seed=rank)
    optimizer = made(model, every=1)
    with pytest.raises(MismatchError, match="broadcast rank 0's parameters"):
        step(model, optimizer, 0)
    with pytest.raises(ValueError, match="give one of them"):
        LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, process_group=world, process_set=3)


@case
def local_updates_of_what_exchanges_by_itself():
    """LocalSGD refuses models and optimizers of torch.distributed that exchange gradients or parameters themselves."""
    world = dist.group.WORLD

    def made(model, given=None, optimizer=torch.optim.SGD, **options):
        inner = optimizer(model.parameters(), lr=0.1)
        return LocalSGD(inner, model if given is None else given, LOSSY, process_group=world, **options)

    wrapped = DDP(network())
    bare = f"{re.escape('remove the DistributedDataParallel wrapper: model = model.module')}$"
    sharded = fully_shard(network(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for arguments, message in (
        ((wrapped,), f"the model is a DistributedDataParallel model, which reduces all gradients.* {bare}"),
        ((torch.nn.Sequential(torch.nn.Linear(9, 9), wrapped),), f"the model contains 1, a Distributed.* {bare}"),
        ((sharded,), "the model is sharded by FSDP, and LocalSGD needs whole parameters on every rank"),
        ((sharded, sharded.named_parameters()), "the parameter .*weight is sharded .FSDP., and"),
        ((network(), None, partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)), "ZeroRedundancyOpt"),
    ):
        with pytest.raises(TypeError, match=message):
            made(*arguments)
    # Given by names, it is seen when it reduces; one that nobody calls is no mistake.
    for called in (wrapped, wrapped.module):
        optimizer = made(wrapped, wrapped.named_parameters(), every=1)

        def steps(called=called, optimizer=optimizer):
            for number in range(3):
                optimizer.zero_grad()
                loss_of(called, number, dist.get_rank()).backward()
                optimizer.step()

        if called is wrapped:
            with pytest.raises(TypeError, match=f"a DistributedDataParallel model trains the parameters.* {bare}"):
                steps()
        else:
            steps()
            same_everywhere(called)
        optimizer.close()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ImportError, match="process_group=torch.distributed.gr"):
        patch.setitem(sys.modules, "horovod", None)
        LocalSGD(torch.optim.SGD(wrapped.module.parameters(), lr=0.1), wrapped.module, LOSSY)


@case
def local_updates_that_part():
    """Without Horovod, too, all ranks get the error at once."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def train(model, optimizer, steps):
        for number in range(steps):
            optimizer.zero_grad()
            loss_of(model, number, rank).backward()
            optimizer.step()

    for options, steps, message in (
        ({"every": lambda clock: 3 + (clock == 3 and rank == last)}, (9, 9), f"is 6 on rank.*, 7 on rank {last}"),
        ({"every": 3, "fragments": 2, "delay": 1}, (9, 5), f"clock is 6 on rank.*, 5 on rank {last}; call is step on"),
        ({"times": lambda rank, clock: rank == 0 and clock % 3 == 0}, (9, 5), f"clock is 6 on .*, 5 on rank {last}"),
    ):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LocalSGD(inner, model, LOSSY, process_group=dist.group.WORLD, **options)
        with pytest.raises(MismatchError, match=message):
            train(model, optimizer, steps[rank == last])
            optimizer.sync()
        optimizer.close()


@case
def bytes_to_each_rank():
    """start_alltoall, with parts of unequal size, and with none."""
    collectives = DistributedCollectives(TorchTensors())
    rank, size = collectives.rank(), collectives.size()
    assert (rank, size, collectives.local_size()) == (dist.get_rank(), dist.get_world_size(), dist.get_world_size())
    pending = []
    for round_ in range(3):
        splits = [(rank + 2 * to) * round_ for to in range(size)]
        data = np.concatenate([np.full(split, 16 * rank + to, np.uint8) for to, split in enumerate(splits)])
        pending.append(collectives.start_alltoall(data, splits, f"round {round_}"))
    for round_, one in enumerate(pending):
        data, counts = collectives.wait_alltoall(one)
        assert counts == [(sender + 2 * rank) * round_ for sender in range(size)]
        assert data.tolist() == [16 * sender + rank for sender, count in enumerate(counts) for _ in range(count)]
    own = np.arange(rank + 1, dtype=np.uint8)
    assert collectives.allgather(own, "").tolist() == [one for sender in range(size) for one in range(sender + 1)]
    collectives.close()
    collectives.close()


@case
def a_capture_is_what_a_rank_selects_from():
    folder, rank = tempfile.mkdtemp(), dist.get_rank()
    model, state = hooked(LOSSY)
    capture = Capture(model, f"{folder}/of.npz", [3], compression=state, all_ranks=True)
    train(model, 2)
    before, module = state.state_dict()["residuals"], model.module
    own = torch.autograd.grad(loss_of(module, 2), list(module.parameters()))
    train(model, 2, 2)
    path = f"{folder}/of_rank{rank}.npz"
    assert [str(file) for file in capture.files] == [path]
    gradient, total = (gradient_file.read(path, kind, rank) for kind in ("gradient", "accumulator"))
    assert np.allclose(gradient, torch.cat([one.reshape(-1) for one in own]).numpy(), rtol=1e-5, atol=1e-7)
    residual = np.concatenate([before[name] for name, _ in module.named_parameters()])
    assert residual.any() and np.array_equal(total, gradient + residual)
    state.close()


@case
def an_optimizer_that_loses_under_the_config_is_told_once():
    for make, config, told in (
        (torch.optim.AdamW, LOSSY, True), (torch.optim.SGD, LOSSY, False), (torch.optim.AdamW, LOSSLESS, False)
    ):  # fmt: skip
        model, state = hooked(config)
        optimizers = [make(part.parameters(), lr=0.01) for part in (model.module[0], model.module[2:])]
        with heard() as texts:
            for step in range(2):
                loss_of(model, step).backward()
                for optimizer in optimizers:
                    optimizer.step()
        assert len(texts) == (told and dist.get_rank() == 0), texts
        assert all("is AdamW, and" in one and "process_group=torch.distributed.group.WORLD" in one for one in texts)
        state.close()


@case
def stats_are_the_bytes_on_the_wire():
    # Gloo adds headers to each of the 42 exchanges, about 200 bytes for each other rank, more if ranks are late. The
    # gradients are large enough for these to be a small part.
    headers = 42 * 500 * (dist.get_world_size() - 1)
    model, state = hooked(LOSSY, model=nn.Sequential(nn.Linear(20, 40_000), nn.Tanh(), nn.Linear(40_000, 4)))
    model.require_forward_param_sync = False
    train(model, 3)
    dist.barrier()
    meter = Meter()
    before = state.stats()["total"]
    for step in range(3, 9):
        train(model, 1, step)
    counted, _ = meter.read()
    after = state.stats()["total"]
    for real, key in zip(counted, ("bytes_sent", "bytes_received"), strict=True):
        said = after[key] - before[key]
        assert said > 20 * headers
        assert said <= real < 1.01 * said + headers, (said, real)
    assert after["steps"] - before["steps"] == 6


if __name__ == "__main__":
    assert "horovod" not in sys.modules
    dist.init_process_group("gloo")
    run_cases(dist.get_rank(), dist.get_world_size())
    assert "horovod" not in sys.modules
    dist.barrier()
    dist.destroy_process_group()
