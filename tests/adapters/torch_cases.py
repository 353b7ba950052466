"""What the PyTorch adapter must do on several ranks: the cases of test_torch.py (see tests/case_runner.py).

mpirun -np 2 python tests/adapters/torch_cases.py [CASE ...]
"""

from __future__ import annotations

import copy
import gc
import os
import time

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn

from hvd_deepreduce import ConfigError, ContainerError
from hvd_deepreduce.engine import MismatchError, cores, dense_or_compressed
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.torch import DeepReduce, LocalSGD, horovod, tensors
from tests.adapters.common import on
from tests.adapters.compilations import noted
from tests.adapters.optimizer_warnings import heard
from tests.adapters.scopes import SCOPES, TWO_LEVELS
from tests.adapters.tcp import Meter
from tests.adapters.torch_horovod_job import HorovodJob, named
from tests.adapters.torch_job import Given, batch, flat, loss_of, network
from tests.case_runner import case, run_cases
from tests.damaged import damage, repair

LOSSLESS = {"sparsifier": {"name": "topk", "density": 1.0}, "value": "raw", "index": "bitmap", "min_elements": 0}
LOSSY = {"sparsifier": {"name": "topk", "density": 0.05}, "min_elements": 0}
TOPK = {"sparsifier": LOSSY["sparsifier"]}


def wrapped(model, compression, pairs=None, **options):
    """Plain SGD under Horovod."""
    pairs = list(model.named_parameters()) if pairs is None else pairs
    optimizer = torch.optim.SGD([p for _, p in pairs], lr=0.1)
    return hvd.DistributedOptimizer(optimizer, pairs, compression, **options)


def train(model, optimizer, *steps, loss=loss_of):
    for step in range(*steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def trained(model, compression, steps=3, **options):
    """The optimizer after so many steps."""
    optimizer = wrapped(model, compression, **options)
    train(model, optimizer, steps)
    return optimizer


def ring(tensors):
    """Bytes that a rank sends where Horovod allreduces these tensors, float32, without compression."""
    return sum(traffic.allreduce(4 * tensor.numel(), hvd.size()).sent for tensor in tensors)


def same_everywhere(model, process_set=hvd.global_process_set):
    """All parameters bitwise equal on all ranks."""
    words = torch.cat([p.detach().contiguous().view(-1).view(torch.uint8) for p in model.parameters()])
    gathered = hvd.allgather(words, "same_everywhere", process_set=process_set).view(process_set.size(), -1)
    assert (gathered == gathered[0]).all(), "the ranks' parameters differ"


def same_and_close(models):
    """A dense model, and one that was trained with a lossless DeepReduce."""
    dense, ours = models
    same_everywhere(ours)
    assert torch.allclose(flat(dense), flat(ours), rtol=1e-4, atol=1e-6)


TENSOR = {"scope": "tensor", "min_elements": 0}
DENSITY = {"sparsifier": {"name": "topk", "density": 0.25}}
on.use(
    job=HorovodJob, rank=hvd.rank, size=hvd.size, gathered=hvd.allgather_object, over_mpi=hvd.mpi_enabled,
    given=lambda arrays, config, **more: HorovodJob(config, model=Given(arrays), **more),
    scopes=[TENSOR, *SCOPES], levels=TWO_LEVELS, dtypes=(torch.float32, torch.bfloat16),
    options=[{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 2}, {"passes": 2},
             {"sparse_as_dense": True}],
    changes=[(TENSOR, {"scope": "model"}), ({"scope": "model"}, TENSOR), (TENSOR, DENSITY),
             *((scope, DENSITY) for scope in SCOPES[1:4]), *((SCOPES[0], SCOPES[at]) for at in (1, 3))],
    choosing=[(TENSOR, torch.float32), ({"scope": "bucket"}, torch.float32), ({"scope": "model"}, torch.float16)],
    few_calls=[(200, 120, 12), (30, 120, 12)], in_one={}, small_buckets={"bucket_bytes": 4000}, spans=3,
    advice='LocalSGD(optimizer, model, "adamw_safe") in place of',
)  # fmt: skip


@case
def lossless_equals_dense_with_a_list_of_groups():
    models = network(), network()
    for model, compression in zip(models, (hvd.Compression.none, DeepReduce(models[1], LOSSLESS)), strict=True):
        parameters = list(model.parameters())
        trained(model, compression, groups=[parameters[:2], parameters[3:5]])
    same_and_close(models)


@case
def the_exchange_is_chosen_again_under_another_config():
    slow, far = {"latency": 0, "bandwidth": 1e-4}, {"latency": 1e4, "bandwidth": 1}
    sums = ("densestream", "reduce_scatter") if hvd.mpi_enabled() else ("reduce_scatter",)
    job = HorovodJob({"scope": "model", "sparsifier": {"name": "topk", "density": 0.3}, "value": "raw"})
    for link, chosen in ((None, ()), (slow, sums), (far, ("allgather",)), ({}, ("",))):
        if link is not None:
            job.compression.set_config(scope="model", exchange={"name": "auto", "density": 0.01, **link})
        job.run(2)
        said = job.compression.stats().said
        assert (said == "") == (link is None) and ("(given)" in said) == bool(link), said
        assert link is None or said.startswith(tuple(f"exchange is auto: {one}" for one in chosen)), said
        job.check_same()


@case
def dense_steps_are_counted_alike_where_gradients_are_missing():
    """With ``mode: auto``: Horovod sends the gradients of layers that a rank has not used when it synchronizes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, steps in {"BLOCK": 3, "BLOCKS": 2, "AGAIN": 8}.items():
            patch.setattr(dense_or_compressed, name, steps)
        patch.setattr(dense_or_compressed.Choice, "vote", lambda self: (7, 8) if self.agreeing else (0, 0))
        model = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        with DeepReduce(model, {**LOSSY, "scope": "model", "mode": "auto"}) as compression:
            optimizer = wrapped(model, compression)
            steps = dense_or_compressed.WARM_UP + 30
            for step in range(steps):
                optimizer.zero_grad()
                x = batch(step)[0]
                model[0].requires_grad_(step % 7 < 3)  # it is frozen, too, when the dense steps end
                for layer in model[: 2 if hvd.rank() and step % 2 else 3]:
                    x = layer(x)
                x.square().mean().backward()
                if step % 5:
                    optimizer.step()
                else:
                    optimizer.synchronize()
                    with optimizer.skip_synchronize():
                        optimizer.step()
                counted = compression.stats()["total"]["steps"]
                assert counted == step + 1, (counted, step)
            assert "(medians of trial 2," in compression.stats().said
            same_everywhere(model)


@case
def two_levels_need_process_sets():
    """Before the case that makes them."""
    before = os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS")
    uneven = hvd.size() - 1 or 2
    wrong = [(uneven, "ranks cannot be divided into nodes of")] if uneven > 1 else []
    if hvd.size() == 4:
        wrong.append((2, r"Horovod has no process sets .*OROVOD_DYNAMIC_PROCESS_SETS=1 .*hvd.ProcessSet\(\[0, 1\]\)"))
    for local, match in wrong:
        job = HorovodJob({**LOSSY, "scope": "model", "hierarchical": local})
        with pytest.raises(RuntimeError, match=f"hierarchical is {local}, and .*{match}"):
            job.step(0)
        job.close()
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = before


@case
def scopes_with_unused_parameters_nan_and_changes():
    for scope in on.possible():
        model = network()
        model.append(nn.Linear(4, 4))
        model.register_module("unused", nn.Linear(9, 9))
        model.forward = lambda x, m=model: m[4](m[3](m[2](m[1](m[0](x))))) if hvd.rank() else m[:6](x)
        job = HorovodJob({**LOSSY, **scope}, model=model)
        for step in range(3):
            finite = np.isfinite(np.concatenate(job.reduced(step, np.nan if (step, hvd.rank()) == (1, 1) else 1.0)))
            assert finite.all() == (step != 1), scope
            if step != 1:
                job.apply()
        job.check_same()
        assert np.isfinite(job.flat()).all()
        job.compression.set_config(scope="tensor", exchange="allgather", index="rice", value="qsgd", min_elements=0)
        job.step(3)
        job.check_same()


def stepped(optimizers, loss):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


@case
def scopes_with_parameters_frozen_and_unfrozen_on_the_way():
    for scope in on.possible([SCOPES[0], SCOPES[1], SCOPES[3]]):
        models = network(), network()
        for model in models:
            compression = hvd.Compression.none if model is models[0] else DeepReduce(model, LOSSLESS, **scope)
            model[2].requires_grad_(False)
            # DeepReduce was made before these were frozen and without those below; Horovod reduces the ones it has.
            pairs = list(model.named_parameters())
            optimizers = [wrapped(model, compression, pairs[:2] + pairs[4:])]
            for step in range(6):
                if step == 1:
                    model[0].requires_grad_(False)
                if step == 2 and model is models[1]:
                    compression.set_config(seed=1)
                if step == 4:
                    model[2].requires_grad_(True)
                    optimizers.append(wrapped(model, compression, pairs[2:4]))
                stepped(optimizers, loss_of(model, step))
        same_and_close(models)


@case
def what_is_frozen_neither_moves_nor_loses_what_is_kept_of_it():
    for settings in (*on.possible(), {"scope": "model", "memory": "dgc"}):
        model = network()
        compression = DeepReduce(model, LOSSY, **settings)
        optimizer = trained(model, compression)

        def kept(model=model, compression=compression):
            held = compression.state_dict()["residuals"]
            return [model[0].weight, *(held[name] for name in sorted(held) if name.endswith("0.weight"))]

        before = [one.detach().clone() for one in kept()]
        assert len(before) == 2 + ("memory" in settings), settings
        model[0].requires_grad_(False)
        train(model, optimizer, 3, 6)
        assert all(map(torch.equal, kept(), before)), settings
        model[0].requires_grad_(True)
        train(model, optimizer, 6, 7)
        assert not all(map(torch.equal, kept(), before)), settings
        same_everywhere(model)


@case
def a_parameter_that_is_unfrozen_after_the_optimizer_was_made():
    """Horovod would not reduce it, and the ranks would train different models."""
    model = network()
    model[2].requires_grad_(False)
    optimizer = trained(model, DeepReduce(model, LOSSY), 1)
    model[2].requires_grad_(True)
    before = flat(model)
    with pytest.raises(RuntimeError, match=r"was made: 2.weight, 2.bias\. Horovod does not reduce"):
        train(model, optimizer, 1, 2)
    assert torch.equal(before, flat(model))
    # What the error says to do: make them while all are trainable, and freeze them afterwards. Or make them again.
    del optimizer
    optimizer = trained(model, DeepReduce(model, LOSSY), 1)
    for trainable in (False, True):
        model[2].requires_grad_(trainable)
        train(model, optimizer, 2, 3)
    same_everywhere(model)


@case
def scopes_of_two_models_in_flight_at_a_time():
    for scope in on.possible([SCOPES[0], SCOPES[1], SCOPES[3], SCOPES[5]]):
        # Their tensors have names in common: it is Horovod's that must differ.
        dense, ours = ([HorovodJob(config, seed=seed) for seed in (0, 3)] for config in (None, {**LOSSLESS, **scope}))
        for jobs in (dense, ours):
            for step in range(5):
                stepped([job.optimizer for job in jobs], sum(loss_of(job.model, step) for job in jobs))
        for pair in zip(dense, ours, strict=True):
            same_and_close([job.model for job in pair])


@case
def a_bucket_that_two_optimizers_tear_apart():
    model = network()
    compression, pairs = DeepReduce(model, LOSSLESS, scope="model"), list(model.named_parameters())
    last, others = wrapped(model, compression, pairs[-2:]), wrapped(model, compression, pairs[:-2])
    loss_of(model, 0).backward()
    last.step()
    x, y = batch(1)
    head = nn.functional.cross_entropy(model[4](model[:4](x).detach()), y)
    with pytest.raises(RuntimeError, match="let every optimizer step before the next backward"):
        head.backward()
    others.step()


@case
def gradients_become_views_of_their_bucket():
    found = []
    for set_to_none in (True, False):
        model = network()
        with DeepReduce(model, TOPK, scope="model") as compression:
            optimizer = wrapped(model, compression)
            for step in range(4):
                model.zero_grad(set_to_none)
                loss_of(model, step).backward()
                optimizer.step()
                ends = np.cumsum([4 * one.numel() for one in model.parameters()])
                begins = [one.grad.data_ptr() for one in model.parameters()]
                assert begins[1:] == [begins[0] + end for end in ends[:-1].tolist()]
            found.append(flat(model))
    assert torch.equal(*found)
    same_everywhere(model)


@case
def buckets_are_encoded_on_a_thread_while_the_backward_pass_goes_on():
    found = []
    for count in (1, torch.get_num_threads() + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cores, "of_rank", lambda local_size, count=count: count)
            job = HorovodJob({**TOPK, "scope": "bucket", "bucket_bytes": 4000}).run(4)
            assert (job.compression._reducer._encoder is None) == (count == 1)
        job.check_same()
        job.close()
        found.append(job.flat())
    assert np.array_equal(*found)


@case
def a_step_of_one_optimizer_leaves_the_gradients_of_another():
    model = network()
    pairs, compression = list(model.named_parameters()), DeepReduce(model, TOPK, scope="model")
    parts = [(wrapped(model, compression, part), [one for _, one in part]) for part in (pairs[:4], pairs[4:])]

    def run(part, step):
        optimizer, inputs = parts[part]
        optimizer.zero_grad()
        loss_of(model, step).backward(inputs=inputs)
        optimizer.step()

    run(0, 0)
    unsent = compression.residual("0.weight")
    run(1, 1)  # whose bucket holds zeros for the parameters of the first
    assert np.array_equal(compression.residual("0.weight"), unsent) and unsent.any()
    kept = [one.grad.clone() for one in parts[1][1]]
    run(0, 2)
    assert all(torch.equal(one.grad, before) for one, before in zip(parts[1][1], kept, strict=True))
    same_everywhere(model)


@case
def an_optimizer_of_a_part_of_the_model():
    """The density counts the whole model: the user is told, where no optimizer trains the rest."""
    for parts, told in (((2, None),), True), (((0, 2), (2, None)), False):
        model = network()
        pairs, compression = list(model.named_parameters()), DeepReduce(model, TOPK)
        optimizers = [wrapped(model, compression, pairs[slice(*part)]) for part in parts]
        with heard("hvd_deepreduce") as lines:
            for step in range(2):
                loss_of(model, step).backward()
                for optimizer in optimizers:
                    optimizer.step()
        told = ["do not train all parameters that need gradients: 0.weight, 0.bias."] if told and not hvd.rank() else []
        assert len(lines) == len(told) and all(text in line for text, line in zip(told, lines, strict=True)), lines


@case
def exchanges_over_mpi_say_so_under_gloo():
    if not hvd.mpi_enabled():
        with pytest.raises(RuntimeError, match="was started with Gloo: start it with horovodrun --mpi or mpirun"):
            HorovodJob({"exchange": "densestream", "scope": "model"}).step(0)


@case
def several_param_groups_frozen_and_unused_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.unused = nn.Linear(20, 40), nn.Linear(40, 4), nn.Linear(7, 9)
            self.frozen = nn.Linear(20, 20).requires_grad_(False)
            self.sometimes = nn.Linear(20, 40)

        def forward(self, x, use):
            h = torch.tanh(self.a(self.frozen(x)))
            return self.b(h + self.sometimes(x) if use else h)

    models = Net(), Net()
    frozen = models[0].frozen.weight.clone()
    for model in models:
        optimizer = torch.optim.SGD(
            [{"params": [*model.a.parameters(), *model.frozen.parameters()], "lr": 0.1},
             {"params": [*model.b.parameters(), *model.unused.parameters(), *model.sometimes.parameters()]}],
            lr=0.05,
        )  # fmt: skip
        compression = DeepReduce(model, LOSSLESS) if model is models[1] else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
        for step in range(3):
            x, y = batch(step)
            # Only rank 0 uses this layer: the others must send their part of its gradient all the same.
            stepped([optimizer], nn.functional.cross_entropy(model(x, hvd.rank() == 0), y))
        assert torch.equal(model.frozen.weight, frozen)
    same_and_close(models)


@case
def hooks_in_another_order_on_another_rank():
    torch.manual_seed(2)
    layers = nn.ModuleList(nn.Linear(20, 4) for _ in range(6))
    optimizer = wrapped(layers, DeepReduce(layers, LOSSY))
    for step in range(5):
        turn = hvd.rank() + step
        order = [*range(6)][turn:] + [*range(6)][:turn]
        x, y = batch(step)
        scores = sum(layers[i](x) for i in (order if turn % 2 else reversed(order)))
        stepped([optimizer], nn.functional.cross_entropy(scores, y))
    same_everywhere(layers)


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
    # Without sparse_as_dense they stay sparse, and Horovod gathers carriers. In buckets there are the others.
    tensor, bucket = {"min_elements": 0}, {"scope": "bucket", "bucket_bytes": 1024}
    for options, settings in (
        ({"sparse_as_dense": True}, tensor),
        ({}, tensor),
        ({"op": hvd.Sum}, bucket),
        ({"backward_passes_per_step": 2}, tensor),
        ({"sparse_as_dense": True}, bucket),
    ):
        dense = train_tables(hvd.Compression.none, Tables(), **options)
        model = Tables()
        compression = DeepReduce(model, sparsifier="nonzero", value="raw", **settings)
        assert torch.allclose(dense, train_tables(compression, model, **options), rtol=1e-4, atol=1e-6)
        if options.get("sparse_as_dense") and settings is tensor:  # each container is sent to every other rank
            assert compression.stats()["total"]["bytes_sent"] < (hvd.size() - 1) * 4 * 4 * dense.numel()
        assert compression.state_dict()["steps"] == {name: 4 for name, _ in model.named_parameters()}
        assert compression.state_dict()["residuals"].keys() == compression.state_dict()["steps"].keys()


@case
def sparse_gradients_have_no_momentum():
    model, said = Tables(), "weight has a sparse gradient, and memory is 'dgc'.*sparse_as_dense"
    compression = DeepReduce(model, {**LOSSY, "memory": "dgc"})
    pairs = [(f"without momentum {name}", one) for name, one in model.named_parameters()]
    with pytest.raises(ValueError, match=said):
        train_tables(compression, model, optimizer=wrapped(model, compression, pairs))


@case
def what_waits_is_sent_with_gradients_that_are_too_small_from_now_on():
    job = HorovodJob({**LOSSY, "scope": "bucket"}).run(3)
    waiting = job.compression.state_dict()["residuals"]
    job.compression.set_config(scope="tensor", min_elements=10**6)
    plain = HorovodJob(None)
    plain.model.load_state_dict(job.model.state_dict())
    for step, sums in ((3, 1), (4, 0)):
        for (name, _), own, expected in zip(
            job.model.named_parameters(), job.reduced(step), plain.reduced(step), strict=True
        ):
            mean = sum(hvd.allgather_object(waiting[name].numpy())) / hvd.size()
            np.testing.assert_allclose(own, expected + sums * mean, rtol=1e-3, atol=1e-5)
    assert not job.compression.state_dict()["residuals"]


@case
def sparse_gradients_are_compressed():
    """Fewer bytes than Horovod's own, with feedback, and a job that is resumed goes on as it would have."""
    some = {"sparsifier": {"name": "topk", "density": 0.3, "density_of": "nonzeros"}}
    for settings in (
        {**some, "min_elements": 0}, {**some, "scope": "bucket"}, {**some, "exchange": "reduce_scatter"},
    ):  # fmt: skip
        model = Tables()
        with DeepReduce(model, settings) as compression:
            optimizer = wrapped(model, compression)
            train_tables(compression, model, range(4), optimizer)
            sent, state = compression.stats()["total"]["bytes_sent"], compression.state_dict()
            assert state["residuals"]["one.weight"].count_nonzero() > 100
            middle = copy.deepcopy(model.state_dict())
            final = train_tables(compression, model, range(4, 8), optimizer)
            assert compression.state_dict()["steps"]["one.weight"] == 8
            # What waits goes with the next ones, if they are sent as they are from now on.
            waiting = compression.state_dict()["residuals"]["one.weight"]
            total = sum(hvd.allgather_object(waiting)) / hvd.size()
            compression.set_config(sparsifier="none")
            for mean in (total, torch.zeros_like(total)):
                optimizer.zero_grad()
                (0 * model(*torch.zeros(2, 4, 3, dtype=torch.int64)).sum()).backward()
                optimizer.step()
                torch.testing.assert_close(model.one.weight.grad.to_dense().flatten(), mean, rtol=1e-5, atol=1e-7)
        again = Tables()
        again.load_state_dict(middle)
        with DeepReduce(again, settings) as compression:
            compression.load_state_dict(state)
            optimizer = wrapped(again, compression)
            assert torch.equal(train_tables(compression, again, range(4, 8), optimizer), final)
        model = Tables()
        with DeepReduce(model, sparsifier="block_topk", min_elements=0) as compression:  # cannot select from them
            train_tables(compression, model)
            assert set(compression.state_dict()["residuals"]) == {"out.weight", "out.bias"}
            assert sent < compression.stats()["total"]["bytes_sent"] / 2
    # Where no module tells which gradients are sparse, the first ones go as they are.
    model = Tables()
    with DeepReduce(model.named_parameters(), some) as compression:
        optimizer = wrapped(model, compression)
        train_tables(compression, model, range(1), optimizer)
        first = compression.stats()["last_step"]["bytes_sent"]
        train_tables(compression, model, range(1, 2), optimizer)
        assert compression.stats()["last_step"]["bytes_sent"] < first / 2


@case
def a_process_set():
    some = PROCESS_SET
    if not some.included():
        return
    models = network(), network()
    trained(models[0], hvd.Compression.none, process_set=some)
    trained(models[1], DeepReduce(models[1], LOSSLESS, process_set=some), process_set=some)
    same_everywhere(models[1], some)
    assert torch.allclose(*map(flat, models), rtol=1e-4, atol=1e-6)


@case
def synchronize_clip_and_step():
    job = HorovodJob(LOSSY)
    for step in range(3):
        job.reduced(step)
        assert nn.utils.clip_grad_norm_(job.model.parameters(), 0.01) > 0
        job.apply()
    job.check_same()
    stats = job.compression.stats()
    assert stats["total"]["steps"] == 3 and stats["last_step"]["steps"] == 1
    assert stats["total"]["dense_bytes"] == 3 * stats["last_step"]["dense_bytes"] == 3 * ring(job.model.parameters())


class Lookups(nn.Module):
    """Rows of an embedding, whose gradient Horovod sends sparse."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.out = nn.Embedding(5_000, 40, sparse=True), nn.Linear(40, 4)

    def forward(self, x):
        rows = (x.abs() * 1e4).long().reshape(-1) % 5_000
        return self.out(self.table(rows)).reshape(*x.shape, 4).mean(1)


@case
def stats_are_the_bytes_on_the_wire():
    """Of each exchange, of what is not compressed, of sparse gradients, and of the comparison of the ranks."""
    topk = {"sparsifier": {"name": "topk", "density": 0.1}}
    raw = {**topk, "value": "raw", "index": "raw"}
    settings = [raw, {**raw, "min_elements": 10**7}]
    settings += [
        {**topk, "scope": "model", "index": None, "value": None, "exchange": name}
        for name in ("densestream", "sparcml", "topk_allgather")
    ]
    slices = {**raw, "scope": "model"}
    settings += [{**slices, "exchange": {"name": "reduce_scatter", "density": top}} for top in (None, 0.1)]
    for config in (*settings, {**slices, "hierarchical": 2}, LOSSY):
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Linear(20, 10_000), nn.Linear(10_000, 4))
        job = HorovodJob(config, model=Lookups() if config is LOSSY else wide)
        hvd.barrier()
        meter = Meter()
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            x = torch.randn(100, 20, generator=generator)
            stepped([job.optimizer], job.model(x).square().sum())
        hvd.barrier()
        stats, (measured, idle) = job.compression.stats()["total"], meter.read()
        # A rank may pass on what it got, in place of its own: it is the ranks' sums that are equal.
        numbers = [stats["bytes_sent"], stats["bytes_received"], *measured, idle]
        sent, received, *measured, idle = np.sum(hvd.allgather_object(numbers), 0)
        for counted, real in zip((sent, received), measured, strict=True):
            assert 0.995 * counted < real < 1.04 * counted + 2 * idle, (config, sent, received, measured, idle)
        assert stats["steps"] == 2 and stats["dense_bytes"] == 2 * ring(job.model.parameters())
        job.close()


@case
def every_dtype_and_layout():
    for dtype, tolerance in ((torch.float16, 3e-2), (torch.bfloat16, 2e-1), (torch.float64, 1e-9)):
        dense = network().to(dtype)
        # Horovod itself reduces no bfloat16.
        trained(dense, hvd.Compression.fp16 if dtype == torch.bfloat16 else hvd.Compression.none)
        for min_elements in (0, 100, 10**6):
            ours = network().to(dtype)
            trained(ours, DeepReduce(ours, LOSSLESS, min_elements=min_elements))
            assert ours[0].weight.dtype == dtype
            assert torch.allclose(flat(dense), flat(ours), rtol=tolerance, atol=tolerance), dtype
            same_everywhere(ours)
    torch.manual_seed(4)
    dense = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 1), nn.Unflatten(1, (1, 1, 1)))
    # Horovod itself reduces no channels_last gradients.
    last = [copy.deepcopy(dense).to(memory_format=torch.channels_last) for _ in range(2)]
    compressions = [DeepReduce(last[0], LOSSLESS), DeepReduce(last[1], LOSSLESS, min_elements=10**6)]
    for model, compression in zip([dense, *last], [hvd.Compression.none, *compressions], strict=True):
        optimizer = wrapped(model, compression)
        for step in range(3):
            torch.manual_seed(10 * step + hvd.rank())
            x = torch.randn(4, 3, 8, 8)
            if model is not dense:
                x = x.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            assert model[0].weight.grad.is_contiguous() == (model is dense)
            optimizer.step()
    for ours in last:
        same_and_close((dense, ours))


def by_hand(compression, gradient):
    """Horovod's calls for one gradient."""
    carrier, context = compression.compress(gradient)
    assert carrier.numel() == 1
    return compression.decompress(hvd.allreduce(carrier, name="carrier"), context)


@case
def kernels_are_compiled_from_the_construction_to_the_first_step():
    model = network()
    with noted(horovod) as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors.TorchTensors, "device", lambda self, tensor: "gpu")
        compression = DeepReduce(model, LOSSY)
        assert calls == [(["gpu"] * 6, hvd.rank() == 0)]
        patch.undo()
        trained(model, compression, 2)
    assert calls[1:] == ["waited"]


@case
def a_gradient_that_is_not_contiguous():
    for shape, strides in (((6, 5), (1, 6)), ((4, 3, 2), (1, 8, 4))):
        weight = nn.Parameter(torch.zeros(shape))
        compression = DeepReduce([("weight", weight)], LOSSLESS)
        weight.grad = torch.empty_strided(shape, strides)
        weight.grad.copy_(torch.arange(weight.numel()).reshape(shape) + hvd.rank())
        expected = weight.grad.clone() + (hvd.size() - 1) / 2 - hvd.rank()
        result = by_hand(compression, weight.grad)
        assert torch.equal(result, expected) and result is weight.grad


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
            trained(dense, hvd.Compression.none)
            trained(ours, DeepReduce(ours, LOSSLESS, **settings))
            assert torch.allclose(flat(dense), flat(ours), rtol=1e-4, atol=1e-6)
        compression = DeepReduce(lossy, LOSSY, **settings)
        trained(lossy, compression)
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
        assert by_hand(compression, weight.grad).tolist() == [value]


@case
def loss_scaling_skips_the_same_steps_everywhere():
    job = HorovodJob(LOSSY)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    for step in range(12):
        job.reduced(step, 100 * scaler.scale(torch.ones(())))
        scaler.unscale_(job.optimizer)
        with job.optimizer.skip_synchronize():
            scaler.step(job.optimizer)
        scaler.update()
    scales = hvd.allgather_object(scaler.get_scale())
    assert len(set(scales)) == 1 and scales[0] < 2.0**127
    assert np.isfinite(job.flat()).all()
    job.check_same()


@case
def a_state_that_cannot_be_loaded_changes_nothing():
    """tests/engine/test_state.py has more of them; these are of PyTorch."""
    job = HorovodJob(LOSSY).run(3)
    kept = copy.deepcopy(job.compression.state_dict())
    bias = kept["residuals"]["0.bias"]

    def with_bias(residual):
        return {**kept, "residuals": {**kept["residuals"], "0.bias": residual}}

    for message, state in {
        "every rank must load the state that it saved": {**kept, "rank": hvd.rank() + 1},
        "the residual of 0.bias contains NaN or infinity": with_bias(torch.where(bias == bias[0], torch.nan, bias)),
        "0.bias is a tensor torch.bfloat16 on cpu that cannot be read": with_bias(bias.bfloat16()),
        "0.bias is a tensor torch.float32 on meta that cannot be read": with_bias(bias.to("meta")),
        "0.bias is a tensor torch.float32 on cpu that cannot be read": with_bias(bias.to_sparse()),
        "the residual of 0.bias is float64; it must be float32": with_bias(bias.double()),
        "the residual of 0.bias is a list; it must be": with_bias(bias.tolist()),
        "is a dict, but this is a NoneType": None,
    }.items():
        with pytest.raises(ValueError, match=message):
            job.compression.load_state_dict(state)
    now = job.compression.state_dict()
    assert now["steps"] == kept["steps"] == dict.fromkeys(kept["residuals"], 3)
    assert all(torch.equal(residual, now["residuals"][name]) for name, residual in kept["residuals"].items())
    job.compression.load_state_dict({**kept, "residuals": {"0.bias": nn.Parameter(bias)}})


@case
def states_of_all_ranks_are_loaded():
    job = HorovodJob(LOSSY).run(2)
    kept, before = job.compression.state_dict(), copy.deepcopy(job.residuals())
    states = hvd.allgather_object(kept)
    job.compression.load_state_dict(reversed(states), reshard=True)
    again = job.compression.state_dict()
    assert again["steps"] == kept["steps"] and len(again["residuals"]) == 6
    assert all(np.array_equal(*pair) for pair in zip(before, job.residuals(), strict=True))
    with pytest.raises(ValueError, match="states are missing, of the ranks"):
        job.compression.load_state_dict(iter(states[1:]), reshard=True)
    with pytest.raises(ValueError, match="give the states of all of them: load_state_dict"):
        job.compression.load_state_dict({**kept, "size": 99})


@case
def a_config_cannot_change_within_a_step():
    job = HorovodJob(LOSSY)
    job.backward(0)
    with pytest.raises(RuntimeError, match="between backward"):
        job.compression.set_config(density=0.1)
    job.optimizer.step()


@case
def settings_of_single_tensors():
    """Biases are sent exactly, and the other tensors are not, where tensors are encoded one by one."""
    overrides = {"*.bias": {"density": 1.0, "value": "raw"}, "0.*": {"error_feedback": False}}
    nothing = "the pattern 'decoder.*' of overrides matches none of the 6 parameters"
    exact = HorovodJob(None).run(1)
    for scope in ({"scope": "tensor"}, {"scope": "model", "selection": "tensor"}):
        job = HorovodJob({**LOSSY, **scope, "overrides": overrides}).run(1)
        for name, value, right, residual in zip(
            job.names(), job.values(), exact.values(), job.residuals(), strict=True
        ):
            assert np.allclose(value, right, rtol=1e-5, atol=1e-7) == name.endswith("bias"), name
            assert residual.any() == (name in ("2.weight", "4.weight")), name
        job.check_same()
        with pytest.raises(ConfigError, match=nothing):
            job.compression.set_config(overrides={"decoder.*": {}})
    with pytest.raises(ConfigError, match=nothing):
        DeepReduce(job.model, overrides={"decoder.*": {}})


@case
def models_differ():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 31 if hvd.rank() == 1 else 30), nn.Tanh())
    model.append(nn.Linear(model[0].out_features, 4))
    if hvd.rank() == 1:
        model.append(nn.Linear(4, 4))
    # The ranks probe different parameters. None stays in flight: hvd.join() in a later case would wait for it.
    with pytest.raises(
        MismatchError, match=r"0.weight is torch.float32 \[30, 20\] on .*\[31, 20\] on rank 1.*3.weight is missing on"
    ):
        HorovodJob(LOSSY, model=model).step(0)


@case
def models_whose_parameters_have_other_names_or_another_order():
    for kind, match in (
        ("names", "missing on"),
        ("order", r"order of the parameters.*0.weight.* on rank.* 0.*4.bias.* on rank 1"),
        ("first", "missing on"),
    ):
        model = network()
        pairs = named(model, "other")
        if hvd.rank() == 1:
            changed = {"names": named(model, "other.module"), "order": pairs[::-1], "first": pairs[1:]}
            pairs = changed[kind]
        compression = DeepReduce(pairs, LOSSY)
        optimizer = wrapped(model, compression, pairs)
        with pytest.raises(MismatchError, match=match):
            train(model, optimizer, 1)
        compression.close()
        del optimizer, compression
        gc.collect()


@case
def local_updates_of_one_model_and_gradients_of_another_with_equal_names():
    model, job = network(), HorovodJob(LOSSY, seed=3)
    local = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, LOSSY, every=1, delay=0)
    for step in range(3):
        job.backward(step)  # in flight
        train(model, local, step, step + 1)
        job.optimizer.step()
    same_everywhere(model)
    job.check_same()


@case
def parameters_that_differ_at_the_first_step():
    """Nobody has broadcast them."""
    job = HorovodJob(LOSSY, seed=hvd.rank())
    begun = job.flat()
    with pytest.raises(MismatchError, match=r"0\.weight has other values on ranks? 1.* than on rank 0.*broadcast_p"):
        job.step(0)
    assert np.array_equal(begun, job.flat())


@case
def a_state_that_one_rank_loads_in_a_running_job():
    """Its step is another one: nobody may add up gradients of different steps."""
    job = HorovodJob(LOSSY).run(1)
    state = job.compression.state_dict()
    job.step(1)
    if hvd.rank() == 1:
        job.compression.load_state_dict(state)
    with pytest.raises(MismatchError, match="not at the same place: step is 2 on ranks? 0.*, 1 on rank 1"):
        job.step(2)


@case
def deleted_and_made_again():
    """As the error of an unfrozen parameter says: Horovod's hooks keep what was deleted alive in a cycle."""
    model = network()
    model[0].requires_grad_(False)
    for _ in range(2):
        compression = DeepReduce(model, LOSSY)
        optimizer = trained(model, compression, 1)
        del optimizer, compression
        model[0].requires_grad_(True)
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
        trained(model, compression)
    model = network()
    compression = DeepReduce(model, LOSSY)
    trained(model.half(), compression)
    same_everywhere(model)
    model = network()
    with pytest.raises(TypeError, match="the class DeepReduce; it must be an instance"):
        trained(model, DeepReduce)


@case
def adasum():
    with pytest.raises(ValueError, match="Adasum cannot be computed on compressed gradients"):
        HorovodJob(LOSSY, op=hvd.Adasum).backward(0)


LATE = 0.3
"""Seconds."""


def lags(job):
    """This rank is late, in the middle of its backward pass."""
    job.model[2].weight.register_hook(lambda _: time.sleep(LATE))


@case
def a_rank_that_joins_early():
    """Horovod would break down if an allgather were started now; or if a rank joined while it has operations in flight
    that a late rank, in the middle of its backward pass, has not started."""
    for scope in on.possible([{}, *SCOPES[:4]]):
        for steps in (0, 1):  # before the handshake, and after
            job = HorovodJob({**LOSSY, **scope}).run(steps)
            if hvd.rank() < hvd.size() - 1:
                if hvd.rank() == 1:
                    lags(job)
                    start = job.engine.collectives._start_probe
                    job.engine.collectives._start_probe = lambda name, start=start: time.sleep(LATE) or start(name)
                with pytest.raises(RuntimeError, match=r"1 rank has called hvd.join\(\) .* same number of steps"):
                    job.step(steps)
            hvd.join()


@case
def ranks_that_join_after_a_corrupt_container():
    """As soon as they have the error, while a late rank is in the middle of its backward pass: its gradients still
    arrive, and it ends with the same error."""
    for scope in ({"min_elements": 100, "bucket_bytes": 4000}, SCOPES[1]):
        job = HorovodJob({**LOSSY, **scope}).run(1)
        if hvd.rank() == 1:
            damage(job.engine.pipeline)
        if hvd.rank() == hvd.size() - 1:
            lags(job)
        with pytest.raises(ContainerError, match="the container of rank 1 cannot be read: its checksum"):
            job.step(1)
        if hvd.rank() == 1:
            repair(job.engine.pipeline)
            time.sleep(0.1 * (hvd.size() > 2))  # with two ranks here, Horovod counts the first one twice
        hvd.join()
        job.close()


@case
def a_state_that_is_loaded_between_backward_and_step():
    """Gradients in flight are forgotten, and no rank waits for them: not even for what the step check holds back."""
    for scope in ({}, SCOPES[1]):
        job = HorovodJob({**LOSSY, **scope}).run(1)
        saved = job.compression.state_dict()
        late = job.model[2].weight.register_hook(lambda _: time.sleep(0.2 * (hvd.rank() == 1)))
        job.backward(1)
        late.remove()
        job.compression.load_state_dict(saved)
        # Horovod takes a name again when it is in flight on no rank: all of a cycle end before the next one begins.
        for name in ("loaded", "settled"):
            hvd.allreduce(torch.ones(1), name=name)
        job.optimizer.load_state_dict(job.optimizer.state_dict())
        job.run(2, 4)
        job.check_same()


@case
def a_state_that_is_saved_between_backward_and_step():
    """It waits for the buckets that a thread of their own encodes, and says what will be missing."""
    with pytest.MonkeyPatch.context() as patch, heard("hvd_deepreduce") as lines:
        patch.setattr(cores, "of_rank", lambda local_size: 64)
        job = HorovodJob({**LOSSY, **SCOPES[1]}).run(1)
        start = job.engine.start

        def slow(bucket):
            time.sleep(0.2)
            start(bucket)

        job.engine.start = slow
        job.backward(1)
        early = job.compression.state_dict()["residuals"]
        assert [line for line in lines if "between backward() and step()" in line]
        job.optimizer.step()
        late = job.compression.state_dict()["residuals"]
        assert early.keys() == late.keys() and all(torch.equal(early[name], late[name]) for name in late)
        job.check_same()


@case
def a_rank_without_deepreduce():
    """Horovod finds the difference in the parameter of the probe. The case leaves nothing in flight: one parameter."""
    model = nn.Linear(20, 4, bias=False)
    pairs = named(model, "mixed")
    dense = hvd.rank() == 1
    compression = DeepReduce(pairs)  # that is made on all ranks, so that those of later cases have equal numbers
    optimizer = wrapped(model, hvd.Compression.none if dense else compression, pairs)
    error, message = (hvd.HorovodInternalError, "ismatched") if dense else (MismatchError, "without DeepReduce, and")
    with pytest.raises(error, match=message):
        stepped([optimizer], model(torch.ones(1, 20)).sum())


if __name__ == "__main__":
    from tests.adapters import all_cases, horovod_cases, pytorch_cases  # noqa: F401 (their cases, after those above)

    # Horovod wants the set before it is started, and no set of all ranks.
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["HOROVOD_SIZE"])
    PROCESS_SET = hvd.ProcessSet([0, ranks - 1] if ranks > 2 else [0])
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # for two levels
    hvd.init(process_sets=[PROCESS_SET])
    # Small gradients are copied into their bucket together. The cases' models are small: so that both ways of copying
    # are tried, rank 0 has the limit that jobs have, rank 1 copies each gradient by itself, and others do both.
    tensors.SMALL = {0: tensors.SMALL, 1: 0}.get(hvd.rank(), 200)
    run_cases(hvd.rank(), hvd.size())
