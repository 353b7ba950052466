"""What the PyTorch adapter must do on several ranks: the cases of test_torch.py (see tests/case_runner.py).

mpirun -np 2 python tests/adapters/torch_cases.py [CASE ...]
"""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import time
from contextlib import nullcontext

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn

from hvd_deepreduce import Config, ConfigError, ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.engine import MismatchError, cores, dense_or_compressed
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.tools import gradient_file
from hvd_deepreduce.torch import Capture, DeepReduce, LocalSGD, tensors
from hvd_deepreduce.wire import standalone as wire
from tests import cuda_emulator
from tests.adapters import calls, containers, dgc_job, timelines
from tests.adapters.optimizer_warnings import heard
from tests.adapters.reports import Heard
from tests.adapters.scopes import SCOPES, TWO_LEVELS, WITHOUT_MPI, ranks_of_node
from tests.adapters.tcp import Meter
from tests.case_runner import case, run_cases
from tests.damaged import damage, decoding_fails, repair

LOSSLESS = {"sparsifier": {"name": "topk", "density": 1.0}, "value": "raw", "index": "bitmap", "min_elements": 0}
LOSSY = {"sparsifier": {"name": "topk", "density": 0.05}, "min_elements": 0}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 4))


def batch(step, rank=None):
    generator = torch.Generator().manual_seed(1000 * step + (hvd.rank() if rank is None else rank))
    x = torch.randn(16, 20, generator=generator)
    return x, x[:, :4].argmax(1)


def loss_of(model, step, rank=None):
    x, y = batch(step, rank)
    first = next(model.parameters())
    return nn.functional.cross_entropy(model(x.to(first)).float(), y.to(first.device))


def train(model, compression, steps=3, first=0, passes=1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, backward_passes_per_step=passes,
        **options,
    )  # fmt: skip
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for part in range(passes):
            loss_of(model, passes * step + part).backward()
        optimizer.step()
    return optimizer


def one_step(optimizer, model, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def flat(model):
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def ring(tensors):
    """Bytes that a rank sends where Horovod allreduces these tensors, float32, without compression."""
    return sum(traffic.allreduce(4 * tensor.numel(), hvd.size()).sent for tensor in tensors)


def same_everywhere(model, process_set=hvd.global_process_set):
    """All parameters bitwise equal on all ranks."""
    words = torch.cat([p.detach().contiguous().view(-1).view(torch.uint8) for p in model.parameters()])
    gathered = hvd.allgather(words, "same_everywhere", process_set=process_set).view(process_set.size(), -1)
    assert (gathered == gathered[0]).all(), "the ranks' parameters differ"


def raises_everywhere(error, match, function):
    """Every rank gets the error, with the sentence."""
    with pytest.raises(error, match=match):
        function()


OPTIONS = {
    "average": {},
    "sum": {"op": hvd.Sum},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2},
    "passes": {"passes": 2},
    "sparse_as_dense": {"sparse_as_dense": True},
}


@case
def lossless_equals_dense_with_every_option():
    for name, options in OPTIONS.items():
        dense, ours = network(), network()
        train(dense, hvd.Compression.none, **options)
        train(ours, DeepReduce(ours, LOSSLESS), **options)
        assert torch.allclose(flat(dense), flat(ours), rtol=1e-4, atol=1e-6), name
        same_everywhere(ours)


@case
def lossless_equals_dense_with_a_list_of_groups():
    dense, ours = network(), network()
    for model, compression in ((dense, hvd.Compression.none), (ours, DeepReduce(ours, LOSSLESS))):
        parameters = list(model.parameters())
        train(model, compression, groups=[parameters[:2], parameters[3:5]])
    assert torch.allclose(flat(dense), flat(ours), rtol=1e-4, atol=1e-6)
    same_everywhere(ours)


@case
def a_step_takes_few_python_calls():
    """What does not change from step to step is made once, for gradients that are copied alone, and together."""
    for width in (200, 30):
        counts = {}
        for layers in (1, 11):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            with DeepReduce(model) as compression:
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
                )

                def step(number, model=model, optimizer=optimizer, width=width):
                    optimizer.zero_grad()
                    generator = torch.Generator().manual_seed(number * hvd.size() + hvd.rank())
                    model(torch.randn(8, width, generator=generator)).square().mean().backward()
                    optimizer.step()

                seen = calls.of_a_step(step)
                counts[layers] = len(seen)
                assert compression.stats()["last_step"]["bytes_sent"] > 0
            assert layers > 1 or len(seen) <= 120, seen
        assert counts[11] - counts[1] <= 10 * 12, counts


@case
def lossy_equals_the_pipeline_run_by_hand():
    """Each rank repeats all ranks' encoding and decoding from their gradients, which all can compute."""
    model = network()
    compression = DeepReduce(model, LOSSY)
    by_hand = network()
    momentum = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    pipeline = Pipeline(Config.load(LOSSY))
    residuals = [[np.zeros(p.numel(), np.float32) for p in by_hand.parameters()] for _ in range(hvd.size())]
    for step in range(4):
        train_gradients = []
        for rank in range(hvd.size()):
            by_hand.zero_grad()
            loss_of(by_hand, step, rank).backward()
            train_gradients.append([p.grad.reshape(-1).numpy().copy() for p in by_hand.parameters()])
        for number, p in enumerate(by_hand.parameters()):
            containers = [
                wire.unpack(
                    pipeline.encode(train_gradients[r][number], residuals[r][number], RngKey(0, number, step, r))
                )
                for r in range(hvd.size())
            ]
            pipeline.decode(containers, p.grad.view(-1).numpy(), 1 / hvd.size())
        momentum.step()
    train(model, compression, steps=4)
    assert torch.equal(flat(model), flat(by_hand))
    for number, (name, _) in enumerate(model.named_parameters()):
        kept = compression.state_dict()["residuals"][name].numpy()
        assert np.array_equal(kept, residuals[hvd.rank()][number])
    same_everywhere(model)


def possible(scope):
    """Whether this launcher can run the scope's exchange."""
    return Config.load(scope).exchange.name in WITHOUT_MPI or hvd.mpi_enabled()


@case
def larger_scopes_and_other_exchanges_equal_dense():
    options = [{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 2}, {"passes": 2}]
    for number, scope in enumerate(filter(possible, SCOPES)):
        option = options[number % len(options)]
        dense = network()
        train(dense, hvd.Compression.none, **option)
        for feedback in (True, False):
            ours = network()
            compression = DeepReduce(ours, Config.load(LOSSLESS, **scope), error_feedback=feedback)
            train(ours, compression, **option)
            assert torch.allclose(flat(dense), flat(ours), rtol=1e-4, atol=1e-6), scope
            same_everywhere(ours)
            assert compression.stats()["total"]["bytes_sent"] > 0
            assert bool(compression.state_dict()["residuals"]) == feedback


@case
def the_exchange_is_chosen_again_under_another_config():
    slow, far = {"latency": 0, "bandwidth": 1e-4}, {"latency": 1e4, "bandwidth": 1}
    sums = ("densestream", "reduce_scatter") if hvd.mpi_enabled() else ("reduce_scatter",)
    model = network()
    compression = DeepReduce(model, scope="model", density=0.3, value="raw")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
    )
    for link, chosen in ((None, ()), (slow, sums), (far, ("allgather",)), ({}, ("",))):
        if link is not None:
            compression.set_config(scope="model", exchange={"name": "auto", "density": 0.01, **link})
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        said = compression.stats().said
        assert (said == "") == (link is None) and ("(given)" in said) == bool(link), said
        assert link is None or said.startswith(tuple(f"exchange is auto: {one}" for one in chosen)), said
        same_everywhere(model)


@case
def larger_scopes_keep_what_they_do_not_send():
    """What all ranks sent and what they keep is what came; and a resumed run equals an unbroken one."""
    for scope in filter(possible, SCOPES):
        model = network()
        compression = DeepReduce(model, LOSSY, **scope)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression, op=hvd.Sum
        )
        came, sent = torch.zeros(flat(model).numel()), torch.zeros(flat(model).numel())
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            # The gradients of a fresh backward pass, which nothing has reduced.
            twin = network()
            twin.load_state_dict(model.state_dict())
            loss_of(twin, step).backward()
            came += torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
            optimizer.step()
            sent += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        kept = torch.cat([compression.state_dict()["residuals"][name] for name, _ in model.named_parameters()])
        everything = hvd.allreduce(came - kept, op=hvd.Sum, name="everything")
        assert torch.allclose(sent, everything, rtol=1e-3, atol=1e-5), scope
        assert 0 < compression.stats()["total"]["bytes_sent"] < compression.stats()["total"]["dense_bytes"]
        saved = copy.deepcopy((model.state_dict(), compression.state_dict()))
        finals = []
        for again in (False, True):
            if again:
                model = network(seed=5)
                model.load_state_dict(saved[0])
                compression = DeepReduce(model, LOSSY, **scope)
                compression.load_state_dict(saved[1])
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression, op=hvd.Sum
                )
            for step in (4, 5):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            finals.append(flat(model))
        assert torch.equal(*finals), scope
        same_everywhere(model)


def in_two_levels(model, config, steps, first=0, state=None, rank_of_nan=None):
    """What came on this rank, what all ranks got in sum, and the compression."""
    compression = DeepReduce(model, config)
    if state is not None:
        compression.load_state_dict(state)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression, op=hvd.Sum
    )
    came, sent = torch.zeros(flat(model).numel()), torch.zeros(flat(model).numel())
    for step in range(first, first + steps):
        twin = network()
        twin.load_state_dict(model.state_dict())
        loss_of(twin, step).backward()
        came += torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
        optimizer.zero_grad()
        (loss_of(model, step) * (float("nan") if hvd.rank() == rank_of_nan else 1)).backward()
        optimizer.synchronize()
        sent += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        with optimizer.skip_synchronize():
            optimizer.step()
    return came, sent, compression


@case
def two_levels_need_process_sets():
    """Before the case that makes them."""
    before = os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS")
    uneven = hvd.size() - 1 or 2
    wrong = [(uneven, "ranks cannot be divided into nodes of")] if uneven > 1 else []
    if hvd.size() == 4:
        wrong.append((2, r"Horovod has no process sets .*OROVOD_DYNAMIC_PROCESS_SETS=1 .*hvd.ProcessSet\(\[0, 1\]\)"))
    for local, match in wrong:
        model = network()
        with DeepReduce(model, LOSSY, hierarchical=local) as compression:
            with pytest.raises(RuntimeError, match=f"hierarchical is {local}, and .*{match}"):
                train(model, compression)
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = before


@case
def two_levels():
    """All ranks apply the same; what they sent and what they keep is what came; a resumed run equals an unbroken one;
    a NaN reaches all ranks; and between nodes goes what one rank would send."""
    local = ranks_of_node(hvd.size())
    for scope in TWO_LEVELS:
        dense, ours = network(), network()
        train(dense, hvd.Compression.none, passes=2)
        lossless = Config.load(LOSSLESS, **{**scope, "exchange": "allgather"}, hierarchical=local)
        train(ours, DeepReduce(ours, lossless), passes=2)
        assert torch.allclose(flat(dense), flat(ours), rtol=1e-4, atol=1e-6), scope
        config = Config.load(LOSSY, **scope, hierarchical=local)
        model = network()
        came, sent, compression = in_two_levels(model, config, 4)
        same_everywhere(model)
        state = compression.state_dict()
        zeros = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
        kept = torch.cat([state["residuals"].get(name, zeros[name]) for name in zeros])
        everything = hvd.allreduce(came - kept, op=hvd.Sum, name="everything")
        assert torch.allclose(sent, everything, rtol=1e-3, atol=1e-5), scope
        assert bool(kept.any()) == (hvd.size() == 4)
        assert int((kept != 0).sum()) < 0.6 * kept.numel()
        stats = compression.stats()["last_step"]
        between = stats["bytes_sent"] - stats["inside_bytes_sent"]
        assert stats["inside_bytes_sent"] == stats["inside_bytes_received"] > 0 and between < 0.3 * stats["dense_bytes"]
        half, rest = network(), network(seed=5)
        _, _, compression = in_two_levels(half, config, 2)
        rest.load_state_dict(half.state_dict())
        _, _, compression = in_two_levels(rest, config, 2, first=2, state=compression.state_dict())
        assert torch.equal(flat(rest), flat(model)), scope
        broken = network()
        _, sent, compression = in_two_levels(broken, config, 1, rank_of_nan=hvd.size() - 1)
        assert not torch.isfinite(sent).any()
        assert all(one.isfinite().all() for one in compression.state_dict()["residuals"].values())


@case
def larger_scopes_with_unused_parameters_nan_and_changes():
    for scope in filter(possible, SCOPES):
        model = network()
        model.append(nn.Linear(4, 4))
        extra = nn.Linear(9, 9)
        model.register_module("unused", extra)
        model.forward = lambda x, m=model: m[4](m[3](m[2](m[1](m[0](x))))) if hvd.rank() else m[:6](x)
        compression = DeepReduce(model, LOSSY, **scope)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
        )
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            (loss * float("nan") if step == 1 and hvd.rank() == 1 else loss).backward()
            optimizer.synchronize()
            finite = all(torch.isfinite(p.grad).all() for p in model.parameters())
            assert finite == (step != 1), scope
            with optimizer.skip_synchronize():
                if finite:
                    optimizer.step()
        same_everywhere(model)
        assert torch.isfinite(flat(model)).all()
        compression.set_config(scope="tensor", exchange="allgather", index="rice", value="qsgd", min_elements=0)
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        optimizer.step()
        same_everywhere(model)


def named(model, prefix):
    return [(f"{prefix}.{name}", p) for name, p in model.named_parameters()]


def wrapped(model, pairs, compression):
    optimizer = torch.optim.SGD([p for _, p in pairs], lr=0.1)
    return hvd.DistributedOptimizer(optimizer, named_parameters=pairs, compression=compression)


@case
def larger_scopes_with_parameters_frozen_and_unfrozen_on_the_way():
    for scope in filter(possible, (SCOPES[0], SCOPES[1], SCOPES[3])):
        finals = []
        for make in (lambda _: hvd.Compression.none, lambda m, s=scope: DeepReduce(m, LOSSLESS, **s)):
            model = network()
            compression = make(model)
            model[2].requires_grad_(False)
            # DeepReduce was made before these were frozen and without those below; Horovod reduces the ones it has.
            pairs = [(name, p) for name, p in model.named_parameters() if name[0] != "2"]
            optimizers = [wrapped(model, pairs, compression)]
            for step in range(6):
                if step == 1:
                    model[0].requires_grad_(False)
                if step == 2 and isinstance(compression, DeepReduce):
                    compression.set_config(seed=1)
                if step == 4:
                    model[2].requires_grad_(True)
                    pairs = [(name, p) for name, p in model.named_parameters() if name[0] == "2"]
                    optimizers.append(wrapped(model, pairs, compression))
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss_of(model, step).backward()
                for optimizer in optimizers:
                    optimizer.step()
            same_everywhere(model)
            finals.append(flat(model))
        assert torch.allclose(*finals, rtol=1e-4, atol=1e-6), scope


@case
def a_parameter_that_is_unfrozen_after_the_optimizer_was_made():
    """Horovod would not reduce it, and the ranks would train different models."""
    model = network()
    model[2].requires_grad_(False)
    compression = DeepReduce(model, LOSSY)
    optimizer = train(model, compression, steps=1)
    model[2].requires_grad_(True)
    before = flat(model)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    raises_everywhere(RuntimeError, r"was made: 2.weight, 2.bias\. Horovod does not reduce", optimizer.step)
    assert torch.equal(before, flat(model))
    # What the error says to do: make them while all are trainable, and freeze them afterwards. Or make them again.
    del optimizer, compression
    optimizer = train(model, DeepReduce(model, LOSSY), steps=1)
    for trainable in (False, True):
        model[2].requires_grad_(trainable)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        optimizer.step()
    same_everywhere(model)


@case
def larger_scopes_of_two_models_in_flight_at_a_time():
    for scope in filter(possible, (SCOPES[0], SCOPES[1], SCOPES[3], SCOPES[5])):
        finals = []
        for dense in (True, False):
            models = [network(), network(seed=3)]
            all_pairs = [named(model, prefix) for model, prefix in zip(models, "ab", strict=True)]
            optimizers = [
                # Names in common: it is Horovod's that must differ.
                wrapped(model, pairs, hvd.Compression.none if dense else DeepReduce(model, LOSSLESS, **scope))
                for model, pairs in zip(models, all_pairs, strict=True)
            ]
            for step in range(5):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                sum(loss_of(model, step) for model in models).backward()
                for optimizer in optimizers:
                    optimizer.step()
            for model in models:
                same_everywhere(model)
            finals.append(torch.cat([flat(model) for model in models]))
        assert torch.allclose(*finals, rtol=1e-4, atol=1e-6), scope


@case
def a_bucket_that_two_optimizers_tear_apart():
    model = network()
    compression = DeepReduce(model, LOSSLESS, scope="model")
    pairs = list(model.named_parameters())
    last, others = wrapped(model, pairs[-2:], compression), wrapped(model, pairs[:-2], compression)
    loss_of(model, 0).backward()
    last.step()
    x, y = batch(1)
    head = nn.functional.cross_entropy(model[4](model[:4](x).detach()), y)
    raises_everywhere(RuntimeError, "let every optimizer step before the next backward", head.backward)
    others.step()


@case
def gradients_become_views_of_their_bucket():
    found = []
    for set_to_none in (True, False):
        model = network()
        compression = DeepReduce(model, {"sparsifier": LOSSY["sparsifier"], "scope": "model"})
        optimizer = wrapped(model, list(model.named_parameters()), compression)
        for step in range(4):
            model.zero_grad(set_to_none)
            loss_of(model, step).backward()
            optimizer.step()
            ends = np.cumsum([4 * one.numel() for one in model.parameters()])
            begins = [one.grad.data_ptr() for one in model.parameters()]
            assert begins[1:] == [begins[0] + end for end in ends[:-1].tolist()]
        found.append(flat(model))
        compression.close()
    assert torch.equal(*found)
    same_everywhere(model)


@case
def buckets_are_encoded_on_a_thread_while_the_backward_pass_goes_on():
    settings, found = {"sparsifier": LOSSY["sparsifier"], "scope": "bucket", "bucket_bytes": 4000}, []
    monkeypatch = pytest.MonkeyPatch()
    for count in (1, torch.get_num_threads() + 1):
        monkeypatch.setattr(cores, "of_rank", lambda local_size, count=count: count)
        model = network()
        with DeepReduce(model, settings) as compression:
            train(model, compression, 4)
            assert (compression._reducer._encoder is None) == (count == 1)
        same_everywhere(model)
        found.append(flat(model))
    monkeypatch.undo()
    assert torch.equal(*found)


@case
def a_step_of_one_optimizer_leaves_the_gradients_of_another():
    model = network()
    pairs = list(model.named_parameters())
    compression = DeepReduce(model, {"sparsifier": LOSSY["sparsifier"], "scope": "model"})
    first, second = wrapped(model, pairs[:4], compression), wrapped(model, pairs[4:], compression)

    def run(optimizer, step):
        optimizer.zero_grad()
        inputs = [tensor for _, tensor in (pairs[:4] if optimizer is first else pairs[4:])]
        loss_of(model, step).backward(inputs=inputs)
        optimizer.step()

    run(first, 0)
    run(second, 1)  # whose bucket holds zeros for the parameters of the first
    kept = [tensor.grad.clone() for _, tensor in pairs[4:]]
    run(first, 2)
    assert all(torch.equal(tensor.grad, one) for (_, tensor), one in zip(pairs[4:], kept, strict=True))
    same_everywhere(model)


@case
def a_job_that_chooses_sends_all_of_its_gradients():
    for scope, dtype in (("tensor", torch.float32), ("bucket", torch.float32), ("model", torch.float16)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dense_or_compressed, "BLOCK", 3)
            patch.setattr(dense_or_compressed, "BLOCKS", 4)
            patch.setattr(dense_or_compressed, "AGAIN", 8)
            if scope == "bucket":  # a dense step seems to be faster
                patch.setattr(dense_or_compressed.Choice, "word", lambda self: (7, 8) if self.agreeing else (0, 0))
            model = network().to(dtype)
            compression = DeepReduce(model, {"sparsifier": LOSSY["sparsifier"], "scope": scope, "mode": "auto"})
            optimizer = wrapped(model, list(model.named_parameters()), compression)
            given = [torch.zeros(one.shape) for one in model.parameters()]
            taken = [torch.zeros(one.shape) for one in model.parameters()]
            sent, whole = [], []
            for step in range(dense_or_compressed.WARM_UP + 27):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(100 * step + hvd.rank())
                for parameter, total in zip(model.parameters(), given, strict=True):
                    parameter.grad = None
                    gradient = torch.randn(parameter.shape, generator=generator).to(dtype)
                    total += gradient.float()
                    (parameter * gradient).sum().backward()
                optimizer.synchronize()
                for parameter, total in zip(model.parameters(), taken, strict=True):
                    total += parameter.grad.float()
                with optimizer.skip_synchronize():
                    optimizer.step()
                sent.append(compression.stats()["last_step"]["bytes_sent"])
                whole.append(sent[-1] >= compression.stats()["last_step"]["dense_bytes"])
            residuals = compression.state_dict()["residuals"]
            for (name, _), own, total in zip(model.named_parameters(), given, taken, strict=True):
                kept = residuals[name].reshape(own.shape).float() if name in residuals else torch.zeros(own.shape)
                expected = hvd.allreduce(own - kept, name=f"chosen.{name}", op=hvd.Average)
                tolerance = 1e-5 if dtype == torch.float32 else 0.05
                torch.testing.assert_close(total, expected, rtol=0, atol=tolerance)
            trial = [number // 3 % 2 == 0 for number in range(12)]
            warm_up = dense_or_compressed.WARM_UP
            begun, ended, again = (whole[warm_up:][part] for part in (slice(13), slice(13, 20), slice(20, 27)))
            assert not any(whole[:warm_up]) and begun == [*trial, False]
            assert len(set(ended)) == 1 and again == trial[:7], (ended, again)
            assert ended[0] or scope != "bucket"
            assert compression.stats()["total"]["steps"] == dense_or_compressed.WARM_UP + 27
            same = hvd.allgather_object(compression.stats().said)
            assert len(set(same)) == 1 and ("gradients are dense" in same[0]) == ended[0]
            compression.close()


@case
def containers_in_equal_buckets():
    """Compared with those under DDP, by test_ddp.py."""
    return containers.of_equal_buckets(containers.by_horovod)


@case
def exchanges_over_mpi_say_so_under_gloo():
    if hvd.mpi_enabled():
        return
    model = network()
    compression = DeepReduce(model, exchange="densestream")
    with pytest.raises(RuntimeError, match="was started with Gloo: start it with horovodrun --mpi or mpirun"):
        first_backward(model, compression)()


@case
def several_param_groups_frozen_and_unused_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.unused = nn.Linear(20, 40), nn.Linear(40, 4), nn.Linear(7, 9)
            self.frozen = nn.Linear(20, 20)
            for p in self.frozen.parameters():
                p.requires_grad_(False)
            self.sometimes = nn.Linear(20, 40)

        def forward(self, x, use):
            h = torch.tanh(self.a(self.frozen(x)))
            return self.b(h + self.sometimes(x) if use else h)

    finals = []
    for make in (lambda m: hvd.Compression.none, lambda m: DeepReduce(m, LOSSLESS)):
        model = Net()
        frozen = model.frozen.weight.clone()
        optimizer = torch.optim.SGD(
            [{"params": [*model.a.parameters(), *model.frozen.parameters()], "lr": 0.1},
             {"params": [*model.b.parameters(), *model.unused.parameters(), *model.sometimes.parameters()]}],
            lr=0.05,
        )  # fmt: skip
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=make(model)
        )
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(step)
            # Only rank 0 uses this layer: the others must send their part of its gradient all the same.
            nn.functional.cross_entropy(model(x, hvd.rank() == 0), y).backward()
            optimizer.step()
        same_everywhere(model)
        assert torch.equal(model.frozen.weight, frozen)
        finals.append(flat(model))
    assert torch.allclose(*finals, rtol=1e-4, atol=1e-6)


@case
def hooks_in_another_order_on_another_rank():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.layers = nn.ModuleList(nn.Linear(20, 4) for _ in range(6))

        def forward(self, x, turn):
            order = list(range(6))
            order = order[turn:] + order[:turn]
            return sum(self.layers[i](x) for i in (order if turn % 2 else reversed(order)))

    model = Net()
    compression = DeepReduce(model, LOSSY)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
    )
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(step)
        nn.functional.cross_entropy(model(x, hvd.rank() + step), y).backward()
        optimizer.step()
    same_everywhere(model)


class Tables(nn.Module):
    """Two embeddings of one shape: their gradients look alike."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Embedding(50, 8, sparse=True), nn.Embedding(50, 8, sparse=True)
        self.out = nn.Linear(8, 4)

    def forward(self, i, j):
        return self.out(self.one(i).mean(1) - self.two(j).mean(1))


def train_tables(compression, model, steps=range(4), optimizer=None, **options):
    optimizer = optimizer or hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), compression, **options
    )
    for step in steps:
        optimizer.zero_grad()
        for number in range(options.get("backward_passes_per_step", 1)):
            generator = torch.Generator().manual_seed(10 * step + hvd.rank() + 100 * number)
            i, j = torch.randint(0, 50, (2, 16, 3), generator=generator)
            nn.functional.cross_entropy(model(i, j), i[:, 0] % 4).backward()
        optimizer.step()
    same_everywhere(model)
    return flat(model)


@case
def sparse_gradients_as_dense_and_as_they_are():
    dense = train_tables(hvd.Compression.none, Tables(), sparse_as_dense=True)
    model = Tables()
    compression = DeepReduce(model, sparsifier="nonzero", value="raw", min_elements=0)
    assert torch.allclose(dense, train_tables(compression, model, sparse_as_dense=True), rtol=1e-4, atol=1e-6)
    stats = compression.stats()["total"]
    # Each container is sent to every other rank.
    assert stats["bytes_sent"] < (hvd.size() - 1) * 4 * 4 * flat(model).numel()
    assert set(compression.state_dict()["residuals"]) == {name for name, _ in model.named_parameters()}
    # Without sparse_as_dense they stay sparse, and Horovod gathers carriers. In buckets there are the others.
    tensor, bucket = {"min_elements": 0}, {"scope": "bucket", "bucket_bytes": 1024}
    for options, settings in (
        ({}, tensor),
        ({"op": hvd.Sum}, bucket),
        ({"backward_passes_per_step": 2}, tensor),
        ({"sparse_as_dense": True}, bucket),
    ):
        dense = train_tables(hvd.Compression.none, Tables(), **options)
        model = Tables()
        compression = DeepReduce(model, sparsifier="nonzero", value="raw", **settings)
        assert torch.allclose(dense, train_tables(compression, model, **options), rtol=1e-4, atol=1e-6)
        assert set(compression.state_dict()["residuals"]) == {name for name, _ in model.named_parameters()}
        assert compression.state_dict()["steps"] == {name: 4 for name, _ in model.named_parameters()}


@case
def sparse_gradients_are_compressed():
    """Fewer bytes than Horovod's own, with feedback, and a job that is resumed goes on as it would have."""
    some = {"sparsifier": {"name": "topk", "density": 0.3, "density_of": "nonzeros"}}
    tensors_are_compressed({**some, "min_elements": 0})
    tensors_are_compressed({**some, "scope": "bucket"})
    # Where no module tells which gradients are sparse, the first ones go as they are.
    model = Tables()
    with DeepReduce(model.named_parameters(), some) as compression:
        optimizer = wrapped(model, list(model.named_parameters()), compression)
        train_tables(compression, model, range(1), optimizer)
        first = compression.stats()["last_step"]["bytes_sent"]
        train_tables(compression, model, range(1, 2), optimizer)
        assert compression.stats()["last_step"]["bytes_sent"] < first / 2


def tensors_are_compressed(some):
    model = Tables()
    with DeepReduce(model, some) as compression:
        optimizer = wrapped(model, list(model.named_parameters()), compression)
        train_tables(compression, model, range(4), optimizer)
        sent, state = compression.stats()["total"]["bytes_sent"], compression.state_dict()
        assert state["residuals"]["one.weight"].count_nonzero() > 100
        middle = [parameter.detach().clone() for parameter in model.parameters()]
        final = train_tables(compression, model, range(4, 8), optimizer)
        assert compression.state_dict()["steps"]["one.weight"] == 8
    again = Tables()
    for parameter, value in zip(again.parameters(), middle, strict=True):
        parameter.data.copy_(value)
    with DeepReduce(again, some) as compression:
        compression.load_state_dict(state)
        optimizer = wrapped(again, list(again.named_parameters()), compression)
        assert torch.equal(train_tables(compression, again, range(4, 8), optimizer), final)
    model = Tables()
    with DeepReduce(model, sparsifier="block_topk", min_elements=0) as compression:  # cannot select from them
        train_tables(compression, model)
        assert set(compression.state_dict()["residuals"]) == {"out.weight", "out.bias"}
        assert sent < compression.stats()["total"]["bytes_sent"] / 2


@case
def momentum_of_dgc_equals_the_oracle_and_resumes():
    for scope in dgc_job.SCOPES:

        def job(values, scope=scope):
            pairs = [(f"{scope}.{at}", nn.Parameter(torch.tensor(value))) for at, value in enumerate(values)]
            compression = DeepReduce(pairs, dgc_job.config(scope))
            return pairs, compression, hvd.DistributedOptimizer(
                torch.optim.SGD([p for _, p in pairs], lr=1.0), named_parameters=pairs, compression=compression
            )  # fmt: skip

        def step(number, pairs, optimizer):
            optimizer.zero_grad()
            given = dgc_job.gradients(number, hvd.rank())
            sum((p * torch.tensor(g)).sum() for (_, p), g in zip(pairs, given, strict=True)).backward()
            optimizer.step()
            return torch.cat([p.detach() for _, p in pairs]).numpy()

        pairs, compression, optimizer = job([np.zeros(size) for size in dgc_job.SIZES])
        expected = np.zeros(sum(dgc_job.SIZES))
        for number, mean in enumerate(dgc_job.means(scope, hvd.size())):
            if number == 3:
                saved = compression.state_dict(), [p.detach().numpy().copy() for _, p in pairs]
            last, expected = step(number, pairs, optimizer), expected - mean
            np.testing.assert_allclose(last, expected, rtol=1e-9, atol=1e-12)
            same_everywhere(nn.ParameterList(p for _, p in pairs))
        compression.close()
        pairs, compression, optimizer = job(saved[1])
        compression.load_state_dict(saved[0])
        for number in range(3, dgc_job.STEPS):
            again = step(number, pairs, optimizer)
        assert np.array_equal(again, last), scope
        compression.close()


@case
def a_process_set():
    some = PROCESS_SET
    if not some.included():
        return
    finals = []
    for make in (lambda m: hvd.Compression.none, lambda m: DeepReduce(m, LOSSLESS, process_set=some)):
        model = network()
        train(model, make(model), process_set=some)
        same_everywhere(model, some)
        finals.append(flat(model))
    assert torch.allclose(*finals, rtol=1e-4, atol=1e-6)


@case
def synchronize_clip_and_step():
    model = network()
    compression = DeepReduce(model, LOSSY)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
    )
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert norm > 0
        with optimizer.skip_synchronize():
            optimizer.step()
    same_everywhere(model)
    stats = compression.stats()
    assert stats["total"]["steps"] == 3 and stats["last_step"]["steps"] == 1
    assert stats["total"]["dense_bytes"] == 3 * stats["last_step"]["dense_bytes"] == 3 * ring(model.parameters())


class Lookups(nn.Module):
    """Rows of an embedding, whose gradient Horovod sends sparse."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.out = nn.Embedding(5_000, 40, sparse=True), nn.Linear(40, 4)

    def forward(self, x):
        rows = (x.abs() * 1e4).long().reshape(-1) % 5_000
        return self.out(self.table(rows)).reshape(*x.shape, 4).mean(1)


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 10_000), nn.Linear(10_000, 4))


def check_bytes(what, stats, measured, idle):
    # A rank may pass on what it got, in place of its own: it is the ranks' sums that are equal.
    numbers = [stats["bytes_sent"], stats["bytes_received"], *measured, idle]
    total = hvd.allreduce(torch.tensor(numbers, dtype=torch.float64), op=hvd.Sum, name="check_bytes")
    sent, received, *measured, idle = total.tolist()
    for counted, real in zip((sent, received), measured, strict=True):
        assert 0.995 * counted < real < 1.04 * counted + 2 * idle, (what, sent, received, measured, idle)


@case
def stats_are_the_bytes_on_the_wire():
    """Of each exchange, of what is not compressed, of sparse gradients, and of the comparison of the ranks."""
    raw = {"sparsifier": {"name": "topk", "density": 0.1}, "value": "raw", "index": "raw"}
    over_mpi = {"sparsifier": {"name": "topk", "density": 0.1}, "scope": "model", "index": None, "value": None}
    settings = [raw, {**raw, "min_elements": 10**7}]
    settings += [{**over_mpi, "exchange": name} for name in ("densestream", "sparcml", "topk_allgather")]
    slices = {"sparsifier": raw["sparsifier"], "value": "raw", "index": "raw", "scope": "model"}
    settings += [{**slices, "exchange": {"name": "reduce_scatter", "density": top}} for top in (None, 0.1)]
    settings.append({**slices, "hierarchical": 2})
    for number, config in enumerate([*settings, LOSSY]):
        model = Lookups() if config is LOSSY else wide()
        pairs = named(model, f"wire{number}")
        with DeepReduce(pairs, config) as compression:
            hvd.barrier()
            meter = Meter()
            optimizer = wrapped(model, pairs, compression)
            for step in range(2):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(10 * step + hvd.rank())
                model(torch.randn(100, 20, generator=generator)).square().sum().backward()
                optimizer.step()
            hvd.barrier()
            check_bytes(config, compression.stats()["total"], *meter.read())
            stats = compression.stats()["total"]
            assert stats["steps"] == 2 and stats["dense_bytes"] == 2 * ring(model.parameters())
            del optimizer


@case
def callbacks_and_measured_residuals():
    """In scope tensor, in a bucket, and by slices. An error in a callback leaves the step whole."""
    slices = {"scope": "model", "exchange": {"name": "reduce_scatter", "density": None}}
    for number, scope in enumerate(({"min_elements": 0}, {"scope": "bucket"}, slices)):
        model, twin = network(), network()
        pairs = named(model, f"heard{number}")
        with DeepReduce(pairs, {"sparsifier": LOSSY["sparsifier"], **scope}) as compression:
            heard, optimizer = Heard(compression), wrapped(model, pairs, compression)
            for step in range(5):
                twin.load_state_dict(model.state_dict())
                twin.zero_grad()
                loss_of(twin, step).backward()
                before = {name: compression.residual(name) for name, _ in pairs}
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            same_everywhere(model)
            heard.check(before, {name: p.grad.numpy() for (name, _), p in zip(pairs, twin.parameters(), strict=True)})
            assert "residual / gradient: median" in str(compression.stats())
            for wrong in (0, 1.5, True):
                with pytest.raises(ValueError, match="it must be a number of steps"):
                    compression.add_callback(print, every=wrong)
            with pytest.raises(TypeError, match="must be a function"):
                compression.add_callback(None)
            del optimizer


@case
def the_timeline_has_the_spans_of_each_bucket():
    def trained():
        model = network()
        with DeepReduce(model, LOSSY, scope="bucket", bucket_bytes=4000) as compression:
            train(model, compression)

    timelines.check(hvd.rank(), trained, times=3)


@case
def every_dtype_and_layout():
    for dtype, tolerance in ((torch.float16, 3e-2), (torch.bfloat16, 2e-1), (torch.float64, 1e-9)):
        dense = network().to(dtype)
        # Horovod itself reduces no bfloat16.
        train(dense, hvd.Compression.fp16 if dtype == torch.bfloat16 else hvd.Compression.none)
        for min_elements in (0, 100, 10**6):
            ours = network().to(dtype)
            train(ours, DeepReduce(ours, LOSSLESS, min_elements=min_elements))
            assert ours[0].weight.dtype == dtype
            assert torch.allclose(flat(dense), flat(ours), rtol=tolerance, atol=tolerance), dtype
            same_everywhere(ours)
    torch.manual_seed(4)
    dense = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 1), nn.Unflatten(1, (1, 1, 1)))
    # Horovod itself reduces no channels_last gradients.
    last = [copy.deepcopy(dense).to(memory_format=torch.channels_last) for _ in range(2)]
    compressions = [DeepReduce(last[0], LOSSLESS), DeepReduce(last[1], LOSSLESS, min_elements=10**6)]
    for model, compression in zip([dense, *last], [hvd.Compression.none, *compressions], strict=True):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
        )
        for step in range(3):
            torch.manual_seed(10 * step + hvd.rank())
            optimizer.zero_grad()
            x = torch.randn(4, 3, 8, 8)
            if model is not dense:
                x = x.to(memory_format=torch.channels_last)
            (model(x) ** 2).mean().backward()
            assert model[0].weight.grad.is_contiguous() == (model is dense)
            optimizer.step()
    for ours in last:
        assert torch.allclose(flat(dense), flat(ours), rtol=1e-4, atol=1e-6)
        same_everywhere(ours)


@case
def a_gradient_that_is_not_contiguous():
    for shape, strides in (((6, 5), (1, 6)), ((4, 3, 2), (1, 8, 4))):
        weight = nn.Parameter(torch.zeros(shape))
        compression = DeepReduce([("weight", weight)], LOSSLESS)
        gradient = torch.empty_strided(shape, strides)
        gradient.copy_(torch.arange(gradient.numel()).reshape(shape) + hvd.rank())
        expected = gradient.clone() + (hvd.size() - 1) / 2 - hvd.rank()
        weight.grad = gradient
        carrier, context = compression.compress(weight.grad)
        assert carrier.numel() == 1
        result = compression.decompress(hvd.allreduce(carrier, name="carrier"), context)
        assert torch.equal(result, expected) and result is weight.grad


class OnDevice(DeepReduce):
    """As if its gradients were on a GPU: the CUDA kernels process them, in the emulator."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self._tensors.array = lambda flat: cuda_emulator.from_dlpack(flat) if flat.is_floating_point() else flat.numpy()


@case
def gradients_on_a_device_equal_those_on_the_host():
    """Parameters and residuals, bit for bit, with NaN on the way and through a checkpoint."""
    if cuda_emulator.available():
        pytest.skip(cuda_emulator.available())
    over_mpi = [Config.load(LOSSY, scope="bucket", bucket_bytes=5000, exchange={"name": "densestream", "density": 0.1})]
    for settings in (
        LOSSY,
        {**LOSSY, "value": "fit_poly", "index": {"name": "bloom", "policy": "p1"}},
        Config.load(LOSSY, scope="bucket", bucket_bytes=5000, selection="tensor"),
        Config.load(LOSSY, scope="model"),
        *(over_mpi if hvd.mpi_enabled() else ()),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            models, states = [], []
            for kind in (DeepReduce, OnDevice):
                model = network().to(dtype)
                compression = kind(model, settings)
                optimizer = train(model, compression, steps=2, op=hvd.Sum)
                kept = copy.deepcopy(model.state_dict())
                for step in range(2, 5):
                    optimizer.zero_grad()
                    (loss_of(model, step) * (float("nan") if (step, hvd.rank()) == (2, 0) else 1)).backward()
                    optimizer.step()
                    if step == 2:
                        assert not flat(model).isfinite().any()
                        model.load_state_dict(kept)
                        optimizer.state.clear()
                        compression.load_state_dict(copy.deepcopy(compression.state_dict()))
                same_everywhere(model)
                models.append(flat(model))
                states.append(compression.state_dict()["residuals"])
            assert models[0].isfinite().all() and torch.equal(*models)
            assert all(torch.equal(residual, states[1][name]) for name, residual in states[0].items())


@case
def a_model_on_a_gpu():
    """All but the emulator: CuPy, the streams, and what Horovod takes. Ranks may share the GPU."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    if hvd.nccl_built() and hvd.local_size() > torch.cuda.device_count():
        pytest.skip(f"NCCL allows one rank a GPU: {hvd.local_size()} ranks share {torch.cuda.device_count()}")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    for dtype, settings in ((torch.float32, {"min_elements": 0}), (torch.float32, {"min_elements": 100}),
                            (torch.bfloat16, {"min_elements": 100}), (torch.float32, {"scope": "bucket"}),
                            (torch.float32, {"scope": "model", "exchange": "densestream"})):  # fmt: skip
        dense, ours, lossy = (network().to("cuda", dtype) for _ in range(3))
        if dtype == torch.float32:
            train(dense, hvd.Compression.none)
            train(ours, DeepReduce(ours, LOSSLESS, **settings))
            assert torch.allclose(flat(dense), flat(ours), rtol=1e-4, atol=1e-6)
        compression = DeepReduce(lossy, LOSSY, **settings)
        train(lossy, compression)
        same_everywhere(lossy)
        assert flat(lossy).isfinite().all() and compression.stats()["total"]["bytes_sent"] > 0


@case
def integer_and_tiny_and_zero_gradients():
    weight = nn.Parameter(torch.zeros(1))
    compression = DeepReduce([("weight", weight)], min_elements=0)
    counts = torch.arange(5)
    given, context = compression.compress(counts)
    assert given is counts and context is None and compression.decompress(given, context) is counts
    for value in (0.0, -3.5):
        weight.grad = torch.full((1,), value)
        carrier, context = compression.compress(weight.grad)
        result = compression.decompress(hvd.allreduce(carrier, name="carrier"), context)
        assert result.tolist() == [value]


@case
def nan_and_infinity_reach_every_rank():
    for poison in (float("nan"), float("inf")):
        model = network()
        compression = DeepReduce(model, LOSSY)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
        )
        loss_of(model, 0).backward()
        optimizer.step()
        before = compression.state_dict()["residuals"]
        weights = flat(model)
        optimizer.zero_grad()
        loss = loss_of(model, 1)
        (loss * poison if hvd.rank() == 1 else loss).backward()
        optimizer.synchronize()
        assert not all(torch.isfinite(p.grad).all() for p in model.parameters())
        assert torch.equal(flat(model), weights)
        if hvd.rank() == 1:
            after = compression.state_dict()["residuals"]
            assert all(torch.equal(before[name], after[name]) for name in before)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        optimizer.step()
        assert torch.isfinite(flat(model)).all()
        same_everywhere(model)


@case
def loss_scaling_skips_the_same_steps_everywhere():
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), DeepReduce(model, LOSSY)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    for step in range(12):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step) * 100).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    scales = hvd.allgather(torch.tensor([scaler.get_scale()]), name="scales")
    assert (scales == scales[0]).all() and scales[0] < 2.0**127
    assert torch.isfinite(flat(model)).all()
    same_everywhere(model)


@case
def a_resumed_run_equals_an_unbroken_one():
    unbroken = network()
    train(unbroken, DeepReduce(unbroken, LOSSY), steps=3)
    halves = network()
    compression = DeepReduce(halves, LOSSY)
    first = train(halves, compression, steps=2)
    saved = copy.deepcopy((halves.state_dict(), compression.state_dict(), first.state_dict()))
    resumed = network(seed=9)
    resumed.load_state_dict(saved[0])
    again = DeepReduce(resumed, LOSSY)
    again.load_state_dict(saved[1])
    optimizer = torch.optim.SGD(resumed.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, resumed.named_parameters(), again)
    optimizer.load_state_dict(saved[2])
    optimizer.zero_grad()
    loss_of(resumed, 2).backward()
    optimizer.step()
    assert torch.equal(flat(unbroken), flat(resumed))
    with pytest.raises(ValueError, match="every rank must load the state that it saved"):
        again.load_state_dict({**saved[1], "rank": hvd.rank() + 1})
    with pytest.raises(ValueError, match=r"parameter other, but the model does not"):
        again.load_state_dict({**saved[1], "steps": {"other": 3}})
    with pytest.raises(ValueError, match="residual of 0.bias has 7 elements"):
        again.load_state_dict({**saved[1], "residuals": {"0.bias": torch.zeros(7)}})
    with pytest.raises(ValueError, match="it has no residuals, size"):
        again.load_state_dict({"rank": 0, "steps": {}})
    kept = again.state_dict()
    bias = saved[1]["residuals"]["0.bias"]
    for message, residual in {
        "the residual of 0.bias contains NaN or infinity": torch.where(bias == bias[0], torch.nan, bias),
        "0.bias is a tensor torch.bfloat16 on cpu that cannot be read": bias.bfloat16(),
        "0.bias is a tensor torch.float32 on meta that cannot be read": bias.to("meta"),
        "0.bias is a tensor torch.float32 on cpu that cannot be read": bias.to_sparse(),
        "the residual of 0.bias is float64; it must be float32": bias.double(),
        "the residual of 0.bias is a list; it must be": bias.tolist(),
    }.items():
        with pytest.raises(ValueError, match=message):
            again.load_state_dict({**saved[1], "residuals": {**saved[1]["residuals"], "0.bias": residual}})
    for message, state in {
        "is a dict, but this is a NoneType": None,
        "residuals of the state are a list": {**saved[1], "residuals": [bias]},
        "a parameter 7, but the model does not": {**saved[1], "residuals": {7: bias}},
    }.items():
        with pytest.raises(ValueError, match=message):
            again.load_state_dict(state)
    assert again.state_dict()["steps"] == kept["steps"] == dict.fromkeys(kept["residuals"], 3)
    now = again.state_dict()["residuals"]
    assert all(torch.equal(residual, now[name]) for name, residual in kept["residuals"].items())
    again.load_state_dict({**saved[1], "residuals": {"0.bias": nn.Parameter(bias)}})


@case
def states_of_all_ranks_are_loaded():
    model = network()
    compression = DeepReduce(model, LOSSY)
    train(model, compression, steps=2)
    kept = compression.state_dict()
    states = hvd.allgather_object(kept)
    compression.load_state_dict(reversed(states), reshard=True)
    again = compression.state_dict()
    assert again["steps"] == kept["steps"] and len(again["residuals"]) == 6
    assert all(torch.equal(residual, kept["residuals"][name]) for name, residual in again["residuals"].items())
    with pytest.raises(ValueError, match="states are missing, of the ranks"):
        compression.load_state_dict(iter(states[1:]), reshard=True)
    with pytest.raises(ValueError, match="give the states of all of them: load_state_dict"):
        compression.load_state_dict({**kept, "size": 99})


@case
def the_config_changes_between_steps():
    model = network()
    compression = DeepReduce(model, LOSSY)
    optimizer = train(model, compression)
    sparse = compression.stats()["last_step"]["bytes_sent"]
    compression.set_config(sparsifier={"name": "topk", "density": 0.5})
    optimizer.zero_grad()
    loss_of(model, 7).backward()
    with pytest.raises(RuntimeError, match="between backward"):
        compression.set_config(density=0.1)
    optimizer.step()
    assert compression.stats()["last_step"]["bytes_sent"] > 2 * sparse
    assert compression.config.min_elements == 0
    same_everywhere(model)


@case
def settings_of_single_tensors():
    """Biases are sent exactly, and the other tensors are not, where tensors are encoded one by one."""
    overrides = {"*.bias": {"density": 1.0, "value": "raw"}, "0.*": {"error_feedback": False}}
    dense = network()
    train(dense, hvd.Compression.none, steps=1)
    exact = dict(dense.named_parameters())
    for scope in ({"scope": "tensor"}, {"scope": "model", "selection": "tensor"}):
        model = network()
        compression = DeepReduce(model, LOSSY, overrides=overrides, **scope)
        train(model, compression, steps=1)
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter, exact[name], rtol=1e-5, atol=1e-7) == name.endswith("bias"), name
        residuals = compression.state_dict()["residuals"]
        kept = {name for name, residual in residuals.items() if residual.any()}
        assert kept == {"2.weight", "4.weight"}
        same_everywhere(model)
        with pytest.raises(ConfigError, match="the pattern 'decoder.*' of overrides matches none of the 6 parameters"):
            compression.set_config(overrides={"decoder.*": {}})
    with pytest.raises(ConfigError, match="the pattern 'decoder.*' of overrides matches none of the 6 parameters"):
        DeepReduce(model, overrides={"decoder.*": {}})


@case
def a_config_changed_on_one_rank_only():
    model = network()
    compression = DeepReduce(model, LOSSY)
    optimizer = train(model, compression)
    weights = flat(model)
    if hvd.rank() == 1:
        compression.set_config(sparsifier={"name": "topk", "density": 0.25})
    optimizer.zero_grad()
    loss_of(model, 7).backward()
    raises_everywhere(MismatchError, r"config.sparsifier is .*0.05.* on ranks? 0.*0.25.* on rank 1", optimizer.step)
    assert torch.equal(flat(model), weights)


@case
def a_config_changed_on_one_rank_only_in_any_scope():
    """Ranks that wait for different containers would wait for ever. No gradient is applied, and no residual sent."""
    density = {"sparsifier": {"name": "topk", "density": 0.25}}
    tensor = {"scope": "tensor", "min_elements": 0}
    changes = [(tensor, {"scope": "model"}), ({"scope": "model"}, tensor)]
    changes += [(scope, density) for scope in filter(possible, SCOPES[1:4])]
    changes += [(SCOPES[0], scope) for scope in filter(possible, (SCOPES[1], SCOPES[3]))]
    for number, (before, after) in enumerate(changes):
        model = network()
        pairs = named(model, f"changed{number}")
        compression = DeepReduce(pairs, LOSSY, **before)
        optimizer = wrapped(model, pairs, compression)

        def step(number, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()

        step(0)
        weights = flat(model)
        if hvd.rank() == 1:
            compression.set_config(**after)
        raises_everywhere(MismatchError, r"config\.\w+ is .* on ranks? 0.* on rank 1", lambda: step(1))
        assert torch.equal(flat(model), weights)


def first_backward(model, compression):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)

    def backward():
        assert optimizer is not None  # it keeps Horovod's hooks alive, which the collector would take otherwise
        loss_of(model, 0).backward()

    return backward


@case
def configs_differ():
    model = network()
    odd = hvd.rank() == hvd.size() - 1
    config = {**LOSSY, "value": {"name": "qsgd", "bits": 4 if odd else 7}}
    raises_everywhere(
        MismatchError, rf'config.value is .*"bits": 7.* on rank.* 0.*"bits": 4.* on rank {hvd.size() - 1}',
        first_backward(model, DeepReduce(model, config)),
    )  # fmt: skip


@case
def models_differ():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 31 if hvd.rank() == 1 else 30), nn.Tanh())
    model.append(nn.Linear(model[0].out_features, 4))
    if hvd.rank() == 1:
        model.append(nn.Linear(4, 4))
    # The ranks probe different parameters. None stays in flight: hvd.join() in a later case would wait for it.
    pairs = named(model, "differ")
    optimizer = wrapped(model, pairs, DeepReduce(pairs, LOSSY))
    raises_everywhere(
        MismatchError,
        r"differ.0.weight is torch.float32 \[30, 20\] on .*\[31, 20\] on rank 1.*differ.3.weight is missing on",
        lambda: loss_of(model, 0).backward(),
    )
    del optimizer


@case
def models_whose_parameters_have_other_names_or_another_order():
    for kind in ("names", "order", "first"):
        model = network()
        pairs = named(model, "other")
        if hvd.rank() == 1:
            changed = {"names": named(model, "other.module"), "order": pairs[::-1], "first": pairs[1:]}
            pairs = changed[kind]
        compression = DeepReduce(pairs, LOSSY)
        optimizer = wrapped(model, pairs, compression)
        ordered = kind == "order"
        match = r"order of the parameters.*0.weight.* on rank.* 0.*4.bias.* on rank 1" if ordered else "missing on"
        raises_everywhere(MismatchError, match, lambda: loss_of(model, 0).backward())  # noqa: B023
        compression.close()
        del optimizer, compression
        gc.collect()


@case
def local_updates_of_one_model_and_gradients_of_another_with_equal_names():
    models = [network(), network(seed=3)]
    local = LocalSGD(torch.optim.SGD(models[0].parameters(), lr=0.1), models[0], LOSSY, every=1, delay=0)
    optimizer = wrapped(models[1], named(models[1], "beside"), DeepReduce(models[1], LOSSY))
    for step in range(3):
        loss_of(models[1], step).backward()  # in flight
        loss_of(models[0], step).backward()
        local.step()
        optimizer.step()
        local.zero_grad()
        optimizer.zero_grad()
    for model in models:
        same_everywhere(model)


@case
def a_corrupt_container():
    model = network()
    compression = DeepReduce(model, LOSSY)
    optimizer = train(model, compression, steps=1)
    if hvd.rank() == 1:
        damage(compression._engine.pipeline)
    optimizer.zero_grad()
    loss_of(model, 7).backward()
    raises_everywhere(ContainerError, "the container of rank 1 cannot be read: its checksum", optimizer.step)


@case
def parameters_that_differ_at_the_first_step():
    """Nobody has broadcast them."""
    model = network(seed=hvd.rank())
    begun = flat(model).clone()
    with pytest.raises(MismatchError, match=r"0\.weight has other values on ranks? 1.* than on rank 0.*broadcast_p"):
        train(model, DeepReduce(model, LOSSY), steps=1)
    assert torch.equal(begun, flat(model))


@case
def a_state_that_one_rank_loads_in_a_running_job():
    """Its step is another one: nobody may add up gradients of different steps."""
    model = network()
    compression = DeepReduce(model, LOSSY)
    optimizer = train(model, compression, steps=1)
    state = compression.state_dict()
    one_step(optimizer, model, 1)
    if hvd.rank() == 1:
        compression.load_state_dict(state)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    raises_everywhere(MismatchError, "not at the same place: step is 2 on ranks? 0.*, 1 on rank 1", optimizer.step)


@case
def deleted_and_made_again():
    """As the error of an unfrozen parameter says: Horovod's hooks keep what was deleted alive in a cycle."""
    model = network()
    model[0].requires_grad_(False)
    for _ in range(2):
        compression = DeepReduce(model, LOSSY)
        optimizer = train(model, compression, steps=1)
        del optimizer, compression
        model[0].requires_grad_(True)
    same_everywhere(model)


@case
def an_error_while_decoding_on_one_rank():
    """The others apply the step, and the next one is an error on all ranks."""
    behind = hvd.rank() == 1
    config = {"sparsifier": LOSSY["sparsifier"]}
    for settings in (LOSSY, {**config, "scope": "bucket"}, {**config, "scope": "bucket", "exchange": "reduce_scatter"}):
        model = network()
        compression = DeepReduce(model, settings)
        optimizer = train(model, compression, steps=1)
        saved = copy.deepcopy((model.state_dict(), compression.state_dict(), optimizer.state_dict()))
        before = flat(model)
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        with pytest.raises(MemoryError, match="no room") if behind else nullcontext(), decoding_fails(behind):
            optimizer.step()
        assert torch.equal(before, flat(model)) == behind
        before = flat(model)
        match = "an error has left 1 rank behind: its last step was applied"
        for step in (2, 3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            raises_everywhere(MismatchError, match, optimizer.step)
        assert torch.equal(before, flat(model)) and compression._engine.failed == behind
        compression.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[2])
        for step in (4, 5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        same_everywhere(model)


@case
def a_stranger_and_a_changed_model():
    model = network()
    stranger = nn.Linear(20, 20)
    compression = DeepReduce(model, LOSSY)
    with pytest.raises(ValueError, match=r"float32 \[20, 20\] does not belong to any parameter of the model"):
        compression.compress(torch.ones_like(stranger.weight))
    model[0] = nn.Linear(20, 50)
    model.append(nn.Linear(4, 4))
    model[0].weight.grad = torch.zeros(50, 20)
    with pytest.raises(ValueError, match=r"changed after DeepReduce was created: 5.weight, 5.bias, 0.weight, 0.bias"):
        compression.compress(model[0].weight.grad)
    model = network()
    compression = DeepReduce(model, LOSSY)
    model.double()  # the memory that was laid out for its gradients has another size
    with pytest.raises(ValueError, match=r"is torch.float64 .* was torch.float32 .*: convert or resize the model f"):
        first_backward(model, compression)()
    model = network()
    compression = DeepReduce(model, LOSSY)
    train(model.half(), compression)
    same_everywhere(model)
    raises_everywhere(TypeError, "is str, but it must be the model", lambda: DeepReduce("topk_rice_qsgd"))
    raises_everywhere(TypeError, "is NoneType, but it must be the model", DeepReduce)
    model = network()
    raises_everywhere(TypeError, "the class DeepReduce; it must be an instance", first_backward(model, DeepReduce))


@case
def an_optimizer_that_loses_under_the_config_is_told_once():
    def texts_of(make, config):
        model = network()
        optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), DeepReduce(model, config))
        with heard() as texts:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
        return texts

    def unnamed(parameters):
        """Of another library: known by its settings alone."""
        return torch.optim.SGD([{"params": list(parameters), "betas": (0.9, 0.99)}], lr=0.1)

    for make, name in ((torch.optim.AdamW, "AdamW"), (torch.optim.Adafactor, "Adafactor"), (unnamed, "SGD")):
        texts = texts_of(lambda model, make=make: make(model.parameters()), LOSSY)
        assert len(texts) == (hvd.rank() == 0), texts
        assert all(f"the optimizer is {name}, and" in one for one in texts)
        assert all('LocalSGD(optimizer, model, "adamw_safe") in place of' in one for one in texts)
    assert not texts_of(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), LOSSY)
    for config in (LOSSLESS, "natural", {**LOSSY, "mode": "auto"}):
        assert not texts_of(lambda model: torch.optim.AdamW(model.parameters()), config), config


@case
def adasum():
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), DeepReduce(model, LOSSY), op=hvd.Adasum
    )
    raises_everywhere(ValueError, "Adasum cannot be computed on compressed gradients", loss_of(model, 0).backward)
    del optimizer  # it kept Horovod's hooks alive


@case
def a_rank_that_joins_early():
    """Horovod would break down if an allgather were started now; or if a rank joined while it has operations in flight
    that a late rank, in the middle of its backward pass, has not started."""
    for number, scope in enumerate([{}, *filter(possible, SCOPES[:4])]):
        for steps in (0, 1):  # before the handshake, and after
            model = network()
            pairs = named(model, f"joined{number}.{steps}")
            compression = DeepReduce(pairs, LOSSY, **scope)
            optimizer = wrapped(model, pairs, compression)
            joins = hvd.rank() == hvd.size() - 1
            for step in range(steps if joins else steps + 1):
                optimizer.zero_grad()
                if step == steps and hvd.rank() == 1:
                    model[2].weight.register_hook(lambda _: time.sleep(0.3))
                    collectives = compression._engine.collectives
                    start = collectives._start_probe
                    collectives._start_probe = lambda name, start=start: time.sleep(0.3) or start(name)
                if step < steps:
                    loss_of(model, step).backward()
                    optimizer.step()
                else:
                    with pytest.raises(RuntimeError, match=r"1 rank has called hvd.join\(\) .* same number of steps"):
                        loss_of(model, step).backward()
                        optimizer.step()
            hvd.join()


@case
def ranks_that_join_after_a_corrupt_container():
    """As soon as they have the error, while a late rank is in the middle of its backward pass: its gradients still
    arrive, and it ends with the same error."""
    scopes = [{"min_elements": 100, "bucket_bytes": 4000}, SCOPES[1]]
    for number, scope in enumerate(scopes):
        model = network()
        pairs = named(model, f"corrupt{number}")
        compression = DeepReduce(pairs, LOSSY, **scope)
        optimizer = wrapped(model, pairs, compression)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if hvd.rank() == 1:
            damage(compression._engine.pipeline)
        if hvd.rank() == hvd.size() - 1:
            model[0].weight.register_hook(lambda _: time.sleep(0.3))
        loss_of(model, 1).backward()
        raises_everywhere(ContainerError, "the container of rank 1 cannot be read: its checksum", optimizer.step)
        if hvd.rank() == 1:
            repair(compression._engine.pipeline)
            time.sleep(0.1 * (hvd.size() > 2))  # with two ranks here, Horovod counts the first one twice
        hvd.join()
        compression.close()


@case
def a_state_that_is_loaded_between_backward_and_step():
    """Gradients in flight are forgotten, and no rank waits for them: not even for what the meeting holds back."""
    for number, scope in enumerate([{}, SCOPES[1]]):
        model = network()
        pairs = named(model, f"forgotten{number}")
        compression = DeepReduce(pairs, LOSSY, **scope)
        optimizer = wrapped(model, pairs, compression)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = compression.state_dict()
        late = model[2].weight.register_hook(lambda _: time.sleep(0.2 * (hvd.rank() == 1)))
        loss_of(model, 1).backward()
        late.remove()
        compression.load_state_dict(saved)
        hvd.allreduce(torch.ones(1), name="loaded")  # Horovod takes a name again when it is in flight on no rank
        optimizer.load_state_dict(optimizer.state_dict())
        for step in (2, 3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        same_everywhere(model)


@case
def a_rank_without_deepreduce():
    """Horovod finds the difference in the parameter of the probe. The case leaves nothing in flight: one parameter."""
    model = nn.Linear(20, 4, bias=False)
    pairs = named(model, "mixed")
    dense = hvd.rank() == 1
    compression = DeepReduce(pairs)  # that is made on all ranks, so that those of later cases have equal numbers
    optimizer = wrapped(model, pairs, hvd.Compression.none if dense else compression)
    error, message = (hvd.HorovodInternalError, "ismatched") if dense else (MismatchError, "without DeepReduce, and")
    with pytest.raises(error, match=message):
        model(torch.ones(1, 20)).sum().backward()
        optimizer.step()


@case
def a_capture_is_what_a_rank_selects_from():
    for settings in (LOSSY, {"sparsifier": LOSSY["sparsifier"], "scope": "bucket"}):
        model, folder = network(), tempfile.mkdtemp()
        compression = DeepReduce(model, settings)
        capture = Capture(model, f"{folder}/of.npz", [3, 4], compression=compression, all_ranks=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=compression
        )
        for step in range(5):
            before = compression.state_dict()["residuals"]
            own = torch.autograd.grad(loss_of(model, step), list(model.parameters()))
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            if step == 3:
                path = f"{folder}/of_rank{hvd.rank()}_step4.npz"
                gradient, total = (gradient_file.read(path, kind, hvd.rank()) for kind in ("gradient", "accumulator"))
                assert np.array_equal(gradient, torch.cat([one.reshape(-1) for one in own]).numpy())
                names = gradient_file.parameters(path)[0]
                assert names == [name for name, _ in model.named_parameters()]
                zeros = [torch.zeros(parameter.numel()) for parameter in model.parameters()]
                residual = np.concatenate([before.get(name, zero) for name, zero in zip(names, zeros, strict=True)])
                assert residual.any() and np.array_equal(total, gradient + residual)
        assert [file.name for file in capture.files] == [f"of_rank{hvd.rank()}_step{step}.npz" for step in (3, 4)]
        compression.close()


@case
def containers_and_sums_of_given_gradients():
    """Returned, to be compared with those of the other framework."""
    return containers.of_each_config(containers.by_torch)


if __name__ == "__main__":
    # Horovod wants the set before it is started, and no set of all ranks.
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["HOROVOD_SIZE"])
    PROCESS_SET = hvd.ProcessSet([0, ranks - 1] if ranks > 2 else [0])
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # for two levels
    hvd.init(process_sets=[PROCESS_SET])
    # Small gradients are copied into their bucket together. The cases' models are small: so that both ways of copying
    # are tried, rank 0 has the limit that jobs have, rank 1 copies each gradient by itself, and others do both.
    tensors.SMALL = {0: tensors.SMALL, 1: 0}.get(hvd.rank(), 200)
    run_cases(hvd.rank(), hvd.size())
