"""What the DDP communication hook must do on several ranks: the cases of test_ddp.py (see tests/case_runner.py).

torchrun --standalone --nproc-per-node 2 tests/adapters/ddp_cases.py [CASE ...]
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import threading
import time
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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from hvd_deepreduce import Config, ConfigError, ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.engine import MismatchError, compression, dense_or_compressed
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.torch import SignMomentum, ddp, rendezvous
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.local_sgd import LocalSGD
from hvd_deepreduce.torch.tensors import TorchTensors
from hvd_deepreduce.wire import standalone as wire
from tests import cuda_emulator
from tests.adapters.common import LOSSLESS, LOSSY, check_close, on
from tests.adapters.compilations import noted
from tests.adapters.driven_buckets import compare_with_host
from tests.adapters.optimizer_warnings import heard
from tests.adapters.scopes import TWO_LEVELS, ranks_of_node
from tests.adapters.tcp import check_stats
from tests.adapters.torch_job import Given, TorchJob, batch, flat, loss_of, network
from tests.case_runner import case, run_cases
from tests.damaged import decoding_fails

CAP = 0.004
"""Megabytes of a bucket: the model's parameters fill three."""


class DDPJob(TorchJob):
    """A DDP model with the hook.

    Args:
        config: None: of DDP alone. Its scope is ``bucket`` where it says none.
        wrap: makes another hook of the hook.
        group: of the model.
        given: the group that the state is given.
        make: makes optimizers, of two parts of the model.

    Attributes:
        seen: of the last step, each bucket's number, parameters, gradients, and future.
    """

    def __init__(
        self, config, *, seed=0, model=None, dtype=None, wrap=lambda hook: hook, group=None, given=None,
        start_iter=0, make=None, cap=CAP, **options,
    ):  # fmt: skip
        self.model = (network(seed) if model is None else model).to(dtype)
        self.called = DDP(self.model, bucket_cap_mb=cap, process_group=group, **options)
        self.compression, self.seen, hook = None, (seen := []), wrap(ddp.deepreduce_hook)
        if config is not None:
            config = {"scope": "bucket", **config} if isinstance(config, dict) and config else config or None
            self.compression = ddp.DeepReduceState(config, given, start_iter=start_iter)

            def watching(state, bucket):
                before = bucket.buffer().clone()
                future = hook(state, bucket)
                seen.append((bucket.index(), bucket.parameters(), before, future))
                return future

            self.called.register_comm_hook(self.compression, watching)
        parts = [self.model[0], self.model[2:]] if make and isinstance(self.model, nn.Sequential) else [self.model]
        self.optimizers = [(make or torch.optim.SGD)(part.parameters(), lr=0.1) for part in parts]
        self.optimizer = self.optimizers[0]

    @property
    def engine(self):
        return self.compression._buckets.engine

    def reduced(self, step, factor=1.0):
        self.seen.clear()
        self.called.zero_grad()
        self.backward(step, factor)
        return self.gradient_arrays()

    def apply(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def resumed(self, saved):
        """The same job: DDP would divide the model of another one otherwise in its first step."""
        self.load(saved)
        return self


@case
def kernels_are_compiled_from_the_first_forward_pass_to_the_first_bucket():
    with noted(ddp) as calls:
        job = DDPJob(LOSSY)
        job.called(batch(0)[0])
        assert calls == [([], dist.get_rank() == 0)]
        job.run(2)
        assert calls[1:] == ["waited"]
    with noted(ddp) as calls:  # who needs no kernels yet does not wait
        DDPJob(LOSSY, start_iter=1).run(2)
        assert len(calls) == 1


def gathered(given, group=None):
    """The objects of all ranks."""
    everything = [None] * dist.get_world_size(group)
    dist.all_gather_object(everything, given, group=group)
    return everything


def same_everywhere(model, group=None):
    """All parameters bitwise equal on all ranks."""
    own = [p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters()]
    assert len(set(map(str, gathered(own, group)))) == 1, "the ranks' parameters differ"


SLICES = {"scope": "bucket", "exchange": "reduce_scatter"}
THIN = {"scope": "bucket", "exchange": {"name": "reduce_scatter", "density": 0.02}}
on.use(
    job=DDPJob, rank=dist.get_rank, size=dist.get_world_size, gathered=gathered, over_mpi=lambda: False, ends=True,
    scopes=[{"scope": "bucket"}, {"selection": "tensor"}, {"scope": "tensor"}, SLICES, THIN,
            {**THIN, "exchange": {"name": "auto", "density": 0.02}}],
    levels=[{key: value for key, value in {**scope, "scope": "bucket"}.items() if key != "bucket_bytes"}
            for scope in TWO_LEVELS],
    given=lambda arrays, config, **more: DDPJob(
        config, model=Given(arrays), cap=25, find_unused_parameters=True, **more
    ),
    options=[{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    changes=[({}, {"value": "half"}), ({}, {"mode": "auto"}), ({"value": "half"}, {"seed": 3})],
    choosing=[({"selection": "tensor"}, torch.float32), ({"scope": "bucket"}, torch.float32)],
    few_calls=[(300, 115, 12)], in_one={"cap": 25}, small_buckets={}, spans=None,
    advice="process_group=torch.distributed.group.WORLD",
)  # fmt: skip


@case
def the_first_iterations_are_ddp():
    plain = DDPJob(None)
    plain.called.register_comm_hook(None, default_hooks.allreduce_hook)
    later = DDPJob(LOSSY, start_iter=4).run(4)
    assert np.array_equal(plain.run(4).flat(), later.flat()) and not later.compression.state_dict()["residuals"]
    total = later.compression.stats()["total"]
    assert total["steps"] == 4 and total["bytes_sent"] >= total["dense_bytes"] > 0
    later.run(4, 8)
    later.check_same()
    assert later.compression.state_dict()["residuals"] and later.compression.state_dict()["iteration"] == 8
    trial = dense_or_compressed.WARM_UP + dense_or_compressed.BLOCK * dense_or_compressed.BLOCKS
    chosen = DDPJob({**LOSSY, "mode": "auto"}, start_iter=20).run(20 + trial)
    assert "medians of trial" not in chosen.compression.stats().said
    assert "medians of trial 1," in chosen.run(20 + trial, 22 + trial).compression.stats().said


@case
def means_and_residuals_are_those_of_the_pipeline_by_hand():
    """Each rank repeats all ranks' encoding from their gradients, in the buckets that DDP made, which it divides
    differently after the first step."""
    for config in (
        LOSSY,
        {**LOSSY, "selection": "tensor", "value": {"name": "qsgd", "bits": 4}},
        {**LOSSY, "scope": "tensor"},
    ):
        job = DDPJob(config)
        state, ranks = job.compression, range(dist.get_world_size())
        pipeline = Pipeline(state.config)
        assert state.config.scope == "bucket"
        numbers = {id(p): number for number, p in enumerate(job.model.parameters())}
        kept = [[np.zeros(p.numel(), np.float32) for p in job.model.parameters()] for _ in ranks]
        divisions = set()
        for step in range(4):
            job.step(step)
            divisions.add(str([[numbers[id(p)] for p in parameters] for _, parameters, _, _ in job.seen]))
            for bucket, parameters, before, future in job.seen:
                members = [numbers[id(p)] for p in parameters]
                gradients = [one.numpy() for one in gathered(before)]
                mean, begin = np.zeros(before.numel(), np.float32), 0
                # A container holds the whole bucket, or a tensor.
                for inside in [members] if state.config.selection == "scope" else [[one] for one in members]:
                    key = bucket if inside is members else inside[0]
                    ends = np.cumsum([kept[0][one].size for one in inside])
                    part, packed = slice(begin, begin + ends[-1]), []
                    for rank in ranks:
                        residual = np.concatenate([kept[rank][one] for one in inside])
                        encoded = pipeline.encode(gradients[rank][part], residual, RngKey(0, key, step, rank))
                        packed.append(wire.unpack(encoded))
                        for one, now in zip(inside, np.split(residual, ends[:-1]), strict=True):
                            kept[rank][one] = now
                    pipeline.decode(packed, mean[part], 1 / len(ranks))
                    begin = part.stop
                assert np.array_equal(future.value().numpy(), mean), (config, step, bucket)
        assert len(divisions) > 1, "DDP did not divide the model again"
        assert all(np.array_equal(*pair) for pair in zip(job.residuals(), kept[dist.get_rank()], strict=True))
        job.check_same()
        job.close()


@case
def an_exchange_is_chosen_while_there_are_several_buckets():
    """The choice says by which thread buckets are finished, so it is made before the first of them is taken."""
    for options in ({}, {"find_unused_parameters": True}):
        job = DDPJob({**LOSSY, "sparsifier": {"name": "topk", "density": 0.5}}, **options)
        job.run(3)  # DDP has divided its buckets again
        job.compression.set_config(exchange={"name": "auto", "density": 0.0005, "latency": 0, "bandwidth": 0.001})
        job.run(3, 6)
        job.check_same()
        assert job.engine.exchange.several, job.compression.stats().said


@case
def an_uneven_division_into_nodes():
    local = ranks_of_node(dist.get_world_size()) + 1
    with pytest.raises(RuntimeError, match=f"ranks cannot be divided into nodes of {local}"):
        DDPJob({**LOSSY, "hierarchical": local}).step(0)


def failing(*_, **__):
    raise ValueError("no ink in \udcff")  # a file's name may hold a byte that is no text


@case
def what_fails_on_one_rank_is_an_error_on_all():
    last, local = dist.get_world_size() - 1, ranks_of_node(dist.get_world_size())
    levels = [("memory", local), ("hook", local)]
    if dist.get_world_size() == 4:  # on one node nothing is encoded
        levels.append(("encode", local))
    for where, hierarchical in [("encode", False), *levels]:
        job = DDPJob({**LOSSY, "hierarchical": hierarchical}).run(2)
        before = job.flat()
        if dist.get_rank() == last:
            if where == "encode":
                job.engine.pipeline.encode = failing
            elif where == "memory":
                job.engine._memory.slice = failing
            else:
                reducer = job.compression._buckets._reducer
                reducer.start_bucket = partial(
                    lambda start, some, number, vector: (failing if number == 1 else start)(some, number, vector),
                    reducer.start_bucket,
                )
        error, match = RuntimeError, f"this step failed on rank {last}: 'ValueError: no ink in .*udcff'. No gradient of"
        if hierarchical:
            error, match = ContainerError, f"rank {last} could not take part in the sum: ValueError: no ink"
        with pytest.raises(error, match=match):
            job.step(2)
        assert np.array_equal(before, job.flat())
        # A new DDP model goes on from a checkpoint.
        DDPJob(LOSSY, model=copy.deepcopy(job.model)).run(2).check_same()


@case
def an_error_while_decoding_on_one_rank():
    """The others apply the step. The next one is an error on all ranks, without a wait."""
    size = dist.get_world_size()
    ways = [({}, 1), ({"exchange": "reduce_scatter"}, 1)] + [({"hierarchical": 2}, 2)] * (size == 4)
    for settings, ranks in ways:  # with two levels, a node applies the step or not
        behind = dist.get_rank() >= size - ranks
        job = DDPJob({**LOSSY, **settings}).run(2)
        before = job.flat()
        text = "no room|could not take the sum that other nodes have taken"
        with pytest.raises((MemoryError, ContainerError), match=text) if behind else nullcontext():
            with decoding_fails(dist.get_rank() == size - 1):
                job.step(2)
        assert np.array_equal(before, job.flat()) == behind
        compression._warn_once.cache_clear()
        with heard("hvd_deepreduce") as texts:
            job.compression.state_dict()
        assert texts == [compression.EARLY] * behind
        match = "INTERNAL ASSERT" if behind else f"an error has left {ranks} rank.* behind: other ranks may"
        with pytest.raises(RuntimeError, match=match):
            job.step(3)
        assert job.engine.failed == behind
        inner = network()
        inner.load_state_dict(gathered(job.model.state_dict())[0])
        DDPJob(LOSSY, model=inner).run(2).check_same()


@case
def empty_selections():
    job = DDPJob({"sparsifier": {"name": "threshold", "threshold": 1e9}})
    start = job.flat()
    for step in range(3):
        job.step(step, 0.0 if dist.get_rank() else 1.0)
    assert np.array_equal(start, job.flat())
    assert any(one.any() for one in job.residuals()) == (dist.get_rank() == 0)


@case
def ranks_that_start_at_different_iterations():
    job = DDPJob(LOSSY, start_iter=dist.get_rank())
    before = job.flat()
    match = "compressed from iteration 0 on, .* on rank 0, .*compressed from iteration 1 on, .* on rank 1"
    with pytest.raises(MismatchError, match=match):
        job.step(0)
    assert np.array_equal(before, job.flat())


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
        job = DDPJob(config, model=Branches(), find_unused_parameters=True)
        parameters = list(job.model.parameters())
        came, sent = ([torch.zeros(p.numel()) for p in parameters] for _ in range(2))
        for step, use in enumerate(uses):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
            losses = [one(x, use[dist.get_rank() == last]).square().mean() for one in (job.model, job.called)]
            for total, own in zip(came, torch.autograd.grad(losses[0], parameters, allow_unused=True), strict=True):
                total += 0 if own is None else own.reshape(-1)
            job.called.zero_grad()
            losses[1].backward()
            anywhere = set(use[0]) | set(use[1])
            assert [p.grad is not None for p in parameters] == [at // 2 in anywhere for at in range(8)], step
            for total, p in zip(sent, parameters, strict=True):
                total += 0 if p.grad is None else p.grad.reshape(-1)
            job.apply()
            job.check_same()
        for own, kept, total in zip(came, job.residuals(), sent, strict=True):
            expected = np.mean(gathered(own.numpy() - kept), 0)
            np.testing.assert_allclose(total.numpy(), expected, rtol=1e-3, atol=1e-6)
        assert len(set(map(str, gathered(job.compression.state_dict()["steps"])))) == 1


@case
def gradients_of_an_earlier_step_are_not_this_ones():
    """Where each optimizer clears its own gradients only, DDP puts those of the unused head into the bucket."""
    for options in ({}, {"gradient_as_bucket_view": True}, {"start_iter": 3}):
        job = DDPJob(LOSSY, model=Branches(), find_unused_parameters=True, **options)
        one, other = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in list(job.model.layers)[:2])
        kept = None
        for step in range(8):
            used = step % 2
            (other if used else one).zero_grad()
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            if step == 6:  # passes that are accumulated count, and a gradient that comes in them only
                with job.called.no_sync():
                    job.called(x, [1]).square().mean().backward()
            job.called(x, [used]).square().mean().backward()
            now = [residual.copy() for residual in job.residuals()]
            alike = [np.array_equal(was, is_now) for was, is_now in zip(kept or now, now, strict=True)]
            if kept is not None and kept[2].any():
                assert alike[2 - 2 * used] is (step != 6), step
                assert not alike[2 * used], step
            kept = now
            (other if used else one).step()
            job.check_same()


def in_threads(*calls, gap):
    """Begins each call in a thread of its own, ``gap`` seconds after the last one. Returns their results or errors."""
    results = [None] * len(calls)

    def call(at):
        time.sleep(at * gap)
        try:
            results[at] = calls[at]()
        except Exception as error:
            results[at] = error

    threads = [threading.Thread(target=call, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@case
def models_in_threads():
    """Each has a group of its own. They begin in one order on every rank, or all ranks get an error."""
    groups = [dist.new_group() for _ in range(2)]
    jobs = [DDPJob(LOSSY, seed=seed, group=group) for seed, group in enumerate(groups)]
    for job, trained in zip(jobs, in_threads(*(partial(job.run, 3) for job in jobs), gap=2), strict=True):
        assert trained is job, trained
    for seed, job in enumerate(jobs):
        job.check_same()
        np.testing.assert_array_equal(job.flat(), DDPJob(LOSSY, seed=seed).run(3).flat())
    met = [rendezvous.Rendezvous("hook", group).meet(group) for group in groups]
    pairs = zip(groups, met, strict=True)
    made = [partial(DistributedCollectives, TorchTensors(), group, met=one) for group, one in pairs]
    for error in in_threads(*(made[::-1] if dist.get_rank() else made), gap=1):
        assert isinstance(error, MismatchError) and "in threads" in str(error), error


@case
def layers_that_are_trained_later_are_averaged():
    """A layer that needed gradients as DDP was made may be frozen in the first steps."""
    job = DDPJob(LOSSY, model=Branches(), find_unused_parameters=True)
    for step in range(4):
        job.model.layers[1].requires_grad_(step >= 2)
        job.called.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        job.called(x, range(4)).square().mean().backward()
        job.apply()
        job.check_same()
    assert all(residual.any() for residual in job.residuals())


@case
def layers_that_are_frozen_before_the_backward_pass_are_averaged():
    """Their gradients come nevertheless, since the forward pass has used them."""
    for options in ({}, {"start_iter": 9}, {"find_unused_parameters": True}):
        job = DDPJob(LOSSY, model=Branches(), **options)
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
        with job.called.no_sync():
            job.called(x, range(4)).square().mean().backward()
        loss = job.called(x, range(4)).square().mean()
        job.model.layers[1].requires_grad_(False)
        loss.backward()
        job.apply()
        job.check_same()


@case
def parameters_that_are_unused_in_a_dense_step_keep_their_residuals():
    """In the first dense step of mode auto, all other residuals are sent."""
    job = DDPJob({**LOSSY, "mode": "auto"}, model=Branches(), find_unused_parameters=True)

    def step(use):
        job.called.zero_grad()
        job.called(torch.ones(8, 20), use).square().mean().backward()
        return [float(np.abs(one).sum()) for one in job.residuals()]

    kept = [step([0, 1, 2, 3]) for _ in range(dense_or_compressed.WARM_UP)][-1]
    assert not job.engine.choice.dense and all(kept)
    for use, waiting in (([0, 1], {2, 3}), ([0], {2, 3}), ([0, 2], {3})):
        now = step(use)
        assert job.engine.choice.dense
        assert {at // 2 for at, one in enumerate(now) if one} == waiting
        assert all(one in (0, before) for one, before in zip(now, kept, strict=True))


@case
def residuals_are_saved_in_the_order_of_elements():
    """DDP's buckets have the order of memory, which another one of the model may not have."""

    def made(layout):
        torch.manual_seed(0)
        layers = nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)
        model = nn.Sequential(*layers).to(memory_format=layout)
        config = {"sparsifier": {"name": "topk", "density": 0.3}, "value": "raw", "selection": "tensor"}
        return DDPJob(config, model=model, cap=25)

    def step(job, number):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        job.called.zero_grad()
        job.called(torch.randn(8, 4, 8, 8, generator=generator)).square().mean().backward()
        job.apply()

    plain, last = made(torch.contiguous_format), made(torch.channels_last)
    step(plain, 0), step(last, 0)
    saved = last.compression.state_dict()
    for name, expected in plain.compression.state_dict()["residuals"].items():
        assert expected.any() and not expected.all()
        torch.testing.assert_close(saved["residuals"][name], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(last.compression.residual(name), saved["residuals"][name])
    for many in (False, True):
        last.compression.load_state_dict(gathered(saved) if many else saved, reshard=many)
        for name, expected in saved["residuals"].items():
            assert torch.equal(last.compression.state_dict()["residuals"][name], expected), (name, many)


@case
def copies_have_the_settings_and_no_state():
    """As AveragedModel makes one, of a model with the hook."""
    job = DDPJob(LOSSY, start_iter=1).run(2)
    job.called._comm_hooks[:] = [(ddp.deepreduce_hook, job.compression)]
    averaged = torch.optim.swa_utils.AveragedModel(job.called)
    (_, copied), = averaged.module._comm_hooks
    for one in (copied, pickle.loads(pickle.dumps(job.compression))):
        assert one.config == job.compression.config and one.start_iter == 1 and one.state_dict() == {}


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

    job = DDPJob(LOSSY, wrap=waiting)
    for step in range(3):
        earlier = []
        job.step(step)
    assert len(ended) >= 2 and all(ended)  # DDP begins with one bucket
    job.check_same()


@case
def accumulated_gradients_are_sent_once():
    jobs = DDPJob(None), DDPJob(LOSSLESS)
    for job in jobs:
        for step in range(3):
            job.optimizer.zero_grad()
            for part in range(3):
                with job.called.no_sync() if part < 2 else nullcontext():
                    loss_of(job.called, 3 * step + part).backward()
            job.apply()
    check_close(*jobs)


def bf16_wrapper(hook):
    """DDP refuses the wrapper on CPUs by the name of its function."""
    wrapped = default_hooks.bf16_compress_wrapper(hook)
    return lambda state, bucket: wrapped(state, bucket)


@case
def wrappers_and_other_dtypes():
    for dtype, wrap, tolerance in (
        (torch.float32, default_hooks.fp16_compress_wrapper, 3e-3),
        (torch.float64, default_hooks.fp16_compress_wrapper, 3e-3),
        (torch.float32, bf16_wrapper, 3e-2),
        (torch.bfloat16, lambda hook: hook, 5e-2),
        (torch.float64, lambda hook: hook, 1e-9),
    ):
        plain = DDPJob(None, dtype=dtype).run(4)
        for options in on.options[1:] if wrap is default_hooks.fp16_compress_wrapper else on.options[:1]:
            job = DDPJob(LOSSLESS, dtype=dtype, wrap=wrap, **options).run(4)
            check_close(plain, job, tolerance)
            expected = torch.float64 if dtype == torch.float64 else torch.float32
            assert {one.dtype for one in job.compression.state_dict()["residuals"].values()} == {expected}
        DDPJob(LOSSY, dtype=dtype, wrap=wrap).run(4).check_same()


@case
def lossless_sums_are_dense_ones_in_rank_order():
    """Bit for bit. Those of 16 bits are rounded to these, as a sum and as a mean."""
    ranks = dist.get_world_size()
    exchange = {"name": "reduce_scatter", "round_sum": True}
    config = {"sparsifier": "none", "value": "lossless", "error_feedback": False, "exchange": exchange}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # The gradients of float16 are too small for it without a factor.
        job, factor = DDPJob(config, dtype=dtype), 256.0 if dtype == torch.float16 else 1.0
        for step in range(3):
            job.reduced(step, factor)
            for _, _, before, future in job.seen:
                of_all = [torch.empty_like(before) for _ in range(ranks)]
                dist.all_gather(of_all, before)
                dense = torch.zeros(before.numel())
                for one in of_all:
                    dense += one.float()
                mean = (dense.to(dtype).float() * (1 / ranks)).to(dtype)
                assert future.value().view(torch.uint8).equal(mean.view(torch.uint8)), dtype
            job.apply()
        job.check_same()


@case
def mixed_precision_with_a_scaler():
    """A scaled loss that overflows on one rank makes all ranks skip the step and lower the scale."""
    job, scales = DDPJob(LOSSY), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(5):
        before = job.flat()
        with torch.autocast("cpu", torch.bfloat16):
            job.reduced(step, scaler.scale(torch.tensor(1e38 if (step, dist.get_rank()) == (2, 1) else 1.0)))
        scaler.step(job.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert np.array_equal(before, job.flat()) == (step == 2)
        job.check_same()
    assert scales == [1024, 2048, 1024, 1024, 2048]


@case
def a_resumed_run_equals_an_unbroken_one():
    """With ``selection: tensor``, whatever DDP's division into buckets is. Top-k of whole buckets, and the rounding of
    dense sums, depend on that division, which DDP changes after the first iteration of a model."""
    for selection, start_iter in (("tensor", 0), ("tensor", 2), ("scope", 4)):
        job = DDPJob({**LOSSY, "selection": selection}, start_iter=start_iter)
        begin = job.saved()
        assert job.compression.state_dict() == {}
        saved = job.run(3).saved()
        finals = [[job.run(3, 6).flat(), *job.residuals()]]
        if selection == "tensor":
            job.close()
            job = DDPJob({**LOSSY, "selection": selection}, seed=5, start_iter=start_iter)
        job.load(saved)
        assert job.compression.state_dict()["iteration"] == 3
        finals.append([job.run(3, 6).flat(), *job.residuals()])
        job.check_same()
        assert all(np.array_equal(*pair) for pair in zip(*finals, strict=True))
        assert job.compression.state_dict()["iteration"] == 6
        job.load(begin)
        assert job.compression.state_dict()["iteration"] == 0 and not job.compression.state_dict()["residuals"]
        if selection == "tensor":
            for own, expected in zip(job.run(3).saved()[0], saved[0], strict=True):
                torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


@case
def states_of_another_number_of_ranks():
    state = DDPJob(LOSSY).run(4).compression
    states = gathered(state.state_dict())
    many = [{**one, "rank": rank, "size": 2 * len(states)} for rank, one in enumerate([*states, *states])]
    with pytest.raises(ValueError, match="the states are of different iterations"):
        state.load_state_dict([*many[:-1], {**many[-1], "iteration": 3}], reshard=True)
    state.load_state_dict(iter(many), reshard=True)
    for name, own in state.state_dict()["residuals"].items():
        expected = 2 * sum(one["residuals"][name] for one in states)
        torch.testing.assert_close(sum(gathered(own)), expected, rtol=1e-5, atol=1e-6)
    later = DDPJob(LOSSY)
    later.compression.load_state_dict(iter(many), reshard="mean")
    with pytest.raises(RuntimeError, match="the first iteration will divide them among these: save a state after it"):
        later.compression.state_dict()
    later.run(1).check_same()
    assert later.compression.state_dict()["iteration"] == 5


@case
def states_that_are_wrong_on_one_rank():
    state = DDPJob(LOSSY).run(1).compression
    good = state.state_dict()
    with pytest.raises(ValueError, match="it has no rank|not a state of DeepReduceState"):
        state.load_state_dict({"iteration": 3})
    bad = {**good, "residuals": {**good["residuals"], "4.bias": torch.zeros(7)}}
    job = DDPJob(LOSSY)
    job.compression.load_state_dict(bad if dist.get_rank() == 1 else good)
    with pytest.raises(RuntimeError, match=r"this step failed on rank 1: 'ValueError: .*4\.bias"):
        job.step(0)
    job = DDPJob(LOSSY)
    if dist.get_rank():
        job.compression.load_state_dict(good)
    said = "at iteration 0, compressed from iteration 0 on.* at iteration 1.* load a state on all ranks or on none"
    with pytest.raises(MismatchError, match=said):
        job.step(0)


@case
def a_rank_that_fails_before_unused_parameters_are_known_stops_all():
    def failing(tensor):
        raise ValueError("no ink")

    last = dist.get_world_size() - 1
    job = DDPJob(LOSSY, find_unused_parameters=True).run(2)
    before = job.flat()
    if dist.get_rank() == last:
        job.compression._buckets._divided.clear()
        job.compression._buckets.parameter_of = failing
    with pytest.raises(RuntimeError, match=f"this step failed on rank {last}: 'ValueError: no ink'"):
        job.step(2)
    assert np.array_equal(before, job.flat())


@case
def settings_that_cannot_work_with_ddp():
    for settings, match in (
        ({"scope": "model"}, "scope is .model., and DDP makes the buckets"),
        ({"scope": "bucket", "bucket_bytes": 5000}, "bucket_bytes is 5000 and has no effect, since DDP"),
        ({"scope": "tensor", "min_elements": 5}, "min_elements is 5 and has no effect, since small gradients"),
        ({"exchange": "densestream", "scope": "bucket"}, "has 'allgather', 'reduce_scatter' and 'auto' only"),
        ("adamw_small", r"Use LocalSGD, .*process_group=torch.distributed.group.WORLD\)"),
    ):
        with pytest.raises(ConfigError, match=match):
            ddp.DeepReduceState(settings)
    with pytest.raises(ConfigError, match="start_iter is 3 and memory is 'dgc'"):
        ddp.DeepReduceState("dgc", start_iter=3)
    for options, match in (
        ({"timeout": 60}, "timeout is 60, but it must be a datetime.timedelta"),
        ({"process_group": 100}, "process_group is 100, but it must be a process group"),
        ({"start_iter": "5"}, "start_iter is '5', but it must be a number"),
    ):
        with pytest.raises(TypeError, match=match):
            ddp.DeepReduceState(LOSSY, **options)
    job = DDPJob(LOSSY).run(1)
    job.compression.set_config(memory="dgc")
    job.run(1, 2)
    for group in job.optimizer.param_groups:
        group["momentum"] = 0.9
    with pytest.raises(ValueError, match="memory is 'dgc', which applies momentum on each rank, and the optimizer has"):
        job.step(2)
    with pytest.raises(RuntimeError, match="this step failed on ranks 0, 1.*: .*nowhere"):
        DDPJob({**LOSSY, "selection": "tensor", "overrides": {"nowhere": {"value": "raw"}}}).step(0)
    job = DDPJob({**LOSSY, "selection": "tensor", "overrides": {"*.bias": {"sparsifier": "none"}}}).run(2)
    for name, kept in zip(job.names(), job.residuals(), strict=True):
        assert not name.endswith("bias") or not kept.any() or np.abs(kept).max() <= 0.1
    job.check_same()


@case
def groups_of_some_ranks():
    members = list(range(max(1, dist.get_world_size() - 1)))
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    for given in (group, None):  # closed, and made again
        job = DDPJob(LOSSY, group=group, given=given).run(4)
        same_everywhere(job.model, group)
        assert job.compression.state_dict()["size"] == len(members)
        job.close()
    job.close()
    with pytest.raises(RuntimeError, match="was closed"):
        job.step(0)
    job = DDPJob(LOSSY, group=group)
    job.close()  # before its first iteration
    with pytest.raises(RuntimeError, match="was closed"):
        job.step(0)


@case
def ranks_that_do_not_come_with_the_hook():
    """One reduces its gradients without it, one does not come at all, one was given another process group."""
    last = dist.get_world_size() - 1
    here = dist.get_rank() != last
    for comes, seconds, error, match in (
        (True, 100, MismatchError, f"{last} of this model's process group reduced gradients without"),
        (False, 1, TimeoutError, f"waited . s at its first exchange for ranks? .*{last} of its process group"),
    ):
        job = DDPJob(None, group=dist.new_group())  # it is out of step afterwards
        if here:
            state = ddp.DeepReduceState(LOSSY, timeout=timedelta(seconds=seconds))
            job.called.register_comm_hook(state, ddp.deepreduce_hook)
            before = job.flat()
            with pytest.MonkeyPatch.context() as patch, pytest.raises(error, match=match):
                patch.setattr(rendezvous, "PROBE_SECONDS", 0.1)
                job.step(0)
            assert np.array_equal(before, job.flat())
        elif comes:
            assert np.isnan(np.concatenate(job.reduced(0))).any()
        dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_DEEPREDUCE_HANDSHAKE_SECONDS", "0.5")
        if here:
            with pytest.raises(TimeoutError, match=f"{last} of its process group. Make LocalSGD on every rank"):
                rendezvous.Rendezvous("LocalSGD", None).meet(None)
    dist.barrier()
    if not here:
        rendezvous.Rendezvous("LocalSGD", None).meet(None)
    alone = dist.new_group([0])
    with pytest.raises(MismatchError, match="process_group has the ranks 0 on rank 0, '0 1.*' on rank"):
        DDPJob(LOSSY, given=alone if dist.get_rank() == 0 else None).step(0)


@case
def hooks_that_are_registered_wrongly():
    def plain(model=None):
        return DDPJob(None, model=model)

    def register(job, state):
        job.called.register_comm_hook(state, ddp.deepreduce_hook)

    for state in (None, "topk_rice_qsgd", ddp.DeepReduceState):
        register(job := plain(), state)
        with pytest.raises(TypeError, match=r"must be an instance of DeepReduceState. Write: model.register_comm_hook"):
            job.step(0)
    for hook_of_outer in (False, True):
        inner = plain()
        outer = plain(inner.called)
        register(outer if hook_of_outer else inner, ddp.DeepReduceState(LOSSY))
        with pytest.raises(RuntimeError, match="a DistributedDataParallel model is inside another one"):
            outer.step(0)
    register(other := plain(), DDPJob(LOSSY).run(1).compression)
    with pytest.raises(RuntimeError, match="make a DeepReduceState for each model"):
        other.step(0)


@case
def a_model_that_was_wrapped_and_trained_before():
    """The hook comes after some steps; and the same layers get another DDP model while the first one is in memory."""
    first = DDPJob(None).run(2)
    state = ddp.DeepReduceState(LOSSY)
    first.called.register_comm_hook(state, ddp.deepreduce_hook)
    first.run(2, 4)
    second = DDPJob(LOSSY, model=first.model).run(4, 6)
    second.check_same()
    assert state.stats()["total"]["steps"] == second.compression.stats()["total"]["steps"] == 2
    assert set(second.compression.state_dict()["residuals"]) == set(first.names())


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
    plain = DDPJob(None, model=Complex()).run(4)
    ours = DDPJob(LOSSLESS, model=Complex()).run(4)
    for own, expected in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
    job = DDPJob(LOSSY, model=Complex()).run(4)
    assert all(len(set(map(str, gathered(parameter.tolist())))) == 1 for parameter in job.model.parameters())
    assert job.compression.residual("weight").shape == (240,)
    votes, make = Config.load("sign_momentum", scope="bucket"), partial(SignMomentum, weight_decay=0)
    job = DDPJob(votes, model=Complex(), make=make)
    before = job.model.weight.detach().clone()
    job.step(0)
    moved = torch.view_as_real(job.model.weight.detach() - before).abs()  # 0.1 along each axis, where votes came
    assert set(moved.div(0.1).round(decimals=3).flatten().tolist()) == {0.0, 1.0}
    job.check_same()


@case
def one_rank_keeps_its_gradients():
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    plain, job = (DDPJob(config, group=group).run(4) for config in (None, LOSSY))
    assert np.array_equal(plain.flat(), job.flat())
    total = job.compression.stats()["total"]
    assert total["steps"] == 4 and total["bytes_sent"] == 0 and not job.compression.state_dict()["residuals"]


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
    talking = nn.Sequential(*(part for layer in network() for part in (layer, Talking())), nn.BatchNorm1d(4))
    jobs = [DDPJob(LOSSY, model=talking), DDPJob(LOSSY)]
    for step in range(4):
        for job in jobs:
            job.step(step)
    for job in jobs:
        job.check_same()


@case
def uneven_inputs_by_join():
    job = DDPJob(LOSSY)
    with Join([job.called]):
        job.run(3 + 2 * dist.get_rank())
    job.check_same()
    assert set(gathered(job.compression.state_dict()["iteration"])) == {1 + 2 * dist.get_world_size()}


@case
def nothing_is_left_of_a_model_that_is_gone():
    before = set(threading.enumerate())
    job = DDPJob(LOSSY).run(2)
    threads = [one for one in threading.enumerate() if one not in before and one.name.startswith("deepreduce")]
    assert len(threads) == 2
    gone = [weakref.ref(one) for one in (job.compression, job.called, job.model)]
    del job
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    for one in threads:
        one.join(5)
        assert not one.is_alive()


def local_sgd(model, config, optimizer=torch.optim.SGD, lr=0.1, **options):
    return LocalSGD(optimizer(model.parameters(), lr=lr), model, config, process_group=dist.group.WORLD, **options)


def local_steps(model, optimizer, *steps, rank=None):
    for step in range(*steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


@case
def local_updates_without_horovod():
    """LocalSGD on a process group: plain averaging, compressed updates in fragments with a delay, and a resumed run."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    model, twins = network(), [network() for _ in ranks]
    optimizer = local_sgd(model, {"sparsifier": "none", "value": "raw", "local": {"every": 2}, "scope": "model"})
    local_steps(model, optimizer, 4)
    for begin in (0, 2):
        for other, twin in enumerate(twins):
            local_steps(twin, torch.optim.SGD(twin.parameters(), lr=0.1), begin, begin + 2, rank=other)
        mean = torch.stack([flat(twin) for twin in twins]).mean(0).float()
        for twin in twins:
            nn.utils.vector_to_parameters(mean.clone(), twin.parameters())
    torch.testing.assert_close(flat(model), flat(twins[0]), rtol=1e-5, atol=1e-6)
    same_everywhere(model)
    optimizer.close()

    def made(model, **settings):
        return local_sgd(model, "adamw_safe", torch.optim.AdamW, 0.01, **settings)

    for settings in ({}, {"fragments": 2, "delay": 1, "every": 3, "scope": "bucket"}):
        model = network()
        optimizer, heard = made(model, **settings), []
        optimizer.add_callback(heard.append)
        optimizer.measure_residuals(every=1)
        local_steps(model, optimizer, 6)
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
            local_steps(model, optimizer, 6, 12)
            optimizer.sync()
            finals.append(flat(model))
        assert torch.equal(*finals)
        assert 0 < optimizer.stats()["total"]["bytes_sent"] < optimizer.stats()["total"]["dense_bytes"]
        optimizer.close()
    model = network(seed=rank)
    with pytest.raises(MismatchError, match="broadcast rank 0's parameters"):
        local_steps(model, made(model, every=1), 1)
    with pytest.raises(ValueError, match="give one of them"):
        local_sgd(model, None, process_set=3)


FAILED = "an exchange of updates has failed"


@case
def an_error_of_one_rank_in_local_updates_is_one_of_all():
    """Before it votes, and while it encodes; the others do not wait for it."""

    def broken(*_, **__):
        raise ValueError("no ink")

    for exchange in ("allgather", "reduce_scatter"):
        for failing, said in (("vote", "an error has left 1 rank"), ("encode", "rank 1.*: .*no ink")):
            model, mine = network(), dist.get_rank() == 1
            optimizer = local_sgd(model, {**LOSSY, "scope": "bucket", "exchange": exchange, "local": {"every": 2}})
            local_steps(model, optimizer, 3)
            updates = optimizer._updates
            where = (updates, "update") if failing == "vote" else (updates.engine.pipeline, "encode")
            with pytest.MonkeyPatch.context() as patch:
                if mine:
                    patch.setattr(*where, broken)
                with pytest.raises((RuntimeError, ValueError), match="no ink" if mine else said):
                    local_steps(model, optimizer, 3, 4)
            with nullcontext() if failing == "vote" else pytest.raises(RuntimeError, match=FAILED):
                optimizer.state_dict()  # a part of the updates is in no residual
            with pytest.raises(RuntimeError, match=f"an error has left|{FAILED}"):
                local_steps(model, optimizer, 4, 6)
            optimizer.close()
    # While it decodes: the others hear it in their next step check. Then all load a state.
    model, mine = network(), dist.get_rank() == 1
    optimizer = local_sgd(model, {**LOSSY, "scope": "bucket", "local": {"every": 2}})
    local_steps(model, optimizer, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(MemoryError) if mine else nullcontext(), decoding_fails(mine):
        local_steps(model, optimizer, 4, 6)
    with pytest.raises(RuntimeError, match=FAILED) if mine else nullcontext():
        optimizer.state_dict()
    if not mine:
        with pytest.raises(MismatchError, match="an error has left 1 rank behind"):
            local_steps(model, optimizer, 6, 8)
    dist.barrier()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    local_steps(model, optimizer, 4, 8)
    same_everywhere(model)
    optimizer.close()


@case
def local_updates_of_what_exchanges_by_itself():
    """LocalSGD refuses models and optimizers of torch.distributed that exchange gradients or parameters themselves."""

    def made(model, given=None, optimizer=torch.optim.SGD, **options):
        inner = optimizer(model.parameters(), lr=0.1)
        return LocalSGD(inner, given or model, LOSSY, process_group=dist.group.WORLD, **options)

    wrapped = DDP(network())
    joined = network()
    next(joined.parameters())._is_flat_param = True  # FullyShardedDataParallel itself needs a GPU
    bare = f"{re.escape('remove the DistributedDataParallel wrapper: model = model.module')}$"
    for arguments, message in (
        ((wrapped,), f"the model is a DistributedDataParallel model, which reduces all gradients.* {bare}"),
        ((torch.nn.Sequential(torch.nn.Linear(9, 9), wrapped),), f"the model contains 1, a Distributed.* {bare}"),
        ((joined,), "the parameter .*weight is sharded by FullyShardedDataParallel.*: use fully_shard in its place"),
        ((network(), None, partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)), "ZeroRedundancyOpt"),
    ):
        with pytest.raises(TypeError, match=message):
            made(*arguments)
    # Given by names, it is seen when it reduces; one that nobody calls is no mistake.
    optimizer = made(wrapped, wrapped.named_parameters(), every=1)
    with pytest.raises(TypeError, match=f"a DistributedDataParallel model trains the parameters.* {bare}"):
        local_steps(wrapped, optimizer, 3)
    optimizer.close()
    optimizer = made(wrapped, wrapped.named_parameters(), every=1)
    local_steps(wrapped.module, optimizer, 3)
    same_everywhere(wrapped.module)
    optimizer.close()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ImportError, match="process_group=torch.distributed.gr"):
        patch.setitem(sys.modules, "horovod", None)
        LocalSGD(torch.optim.SGD(wrapped.module.parameters(), lr=0.1), wrapped.module, LOSSY)


@case
def local_updates_that_part():
    """Without Horovod, too, all ranks get the error at once."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for options, steps, message in (
        ({"every": lambda clock: 3 + (clock == 3 and rank == last)}, (9, 9), f"is 6 on rank.*, 7 on rank {last}"),
        ({"every": 3, "fragments": 2, "delay": 1}, (9, 5), f"clock is 6 on rank.*, 5 on rank {last}; call is step on"),
        ({"times": lambda rank, clock: rank == 0 and clock % 3 == 0}, (9, 5), f"clock is 6 on .*, 5 on rank {last}"),
    ):
        model = network()
        optimizer = local_sgd(model, LOSSY, **options)
        with pytest.raises(MismatchError, match=message):
            local_steps(model, optimizer, steps[rank == last])
            optimizer.sync()
        optimizer.close()


@case
def buckets_on_an_emulated_gpu():
    """Means and residuals are those on the host, and nothing is out of order on the streams."""
    if cuda_emulator.available():
        pytest.skip(cuda_emulator.available())
    nodes = {"hierarchical": ranks_of_node(dist.get_world_size())}
    for config in ({"scope": "bucket"}, {"selection": "tensor"}, SLICES, THIN, nodes, {**SLICES, **nodes}):
        compare_with_host({**LOSSY, "scope": "bucket", **config})
    compare_with_host({**LOSSY, **SLICES}, find_unused=True)


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
def stats_are_the_bytes_on_the_wire():
    # Gloo adds headers to each of the 42 exchanges, about 200 bytes for each other rank, more if ranks are late. The
    # gradients are large enough for these to be a small part.
    headers = 42 * 500 * (dist.get_world_size() - 1)
    job = DDPJob(LOSSY, model=nn.Sequential(nn.Linear(20, 40_000), nn.Tanh(), nn.Linear(40_000, 4)))
    job.called.require_forward_param_sync = False
    job.run(3)
    dist.barrier()
    check_stats(job.compression, lambda: job.run(3, 9), headers, 20)


if __name__ == "__main__":
    from tests.adapters import all_cases, pytorch_cases  # noqa: F401 (their cases, after those above)

    assert "horovod" not in sys.modules
    dist.init_process_group("gloo")
    run_cases(dist.get_rank(), dist.get_world_size())
    assert "horovod" not in sys.modules
    dist.barrier()
    dist.destroy_process_group()
