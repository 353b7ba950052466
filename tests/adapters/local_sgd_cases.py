"""What LocalSGD must do on several ranks: the cases of test_local_sgd.py (see tests/case_runner.py).

    mpirun -np 2 python tests/adapters/local_sgd_cases.py [CASE ...]

Every rank repeats the training of all ranks by itself and compares.
"""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "train"))
from simulated_ranks import SimulatedRanks  # noqa: E402

from hvd_deepreduce import Config, ConfigError
from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.torch import DeepReduce, LocalSGD
from tests.case_runner import case, run_cases
from tests.damaged import decoding_fails

DENSE = {"sparsifier": "none", "value": "raw", "scope": "model"}
LOSSY = {"sparsifier": {"name": "topk", "density": 0.1}, "value": {"name": "qsgd", "bits": 4}, "scope": "model"}
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 4))


def loss_of(model, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 20, generator=generator)
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(x.to(dtype)).float(), x[:, :4].argmax(1))


def local_step(model, optimizer, step, rank):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        local_step(model, optimizer, step, hvd.rank())


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def put(model, vector):
    nn.utils.vector_to_parameters(vector.clone(), model.parameters())


def same_everywhere(model):
    every = hvd.allgather(flat(model)[None])
    return bool((every == every[0]).all())


class ByHand:
    """All ranks of a job of local updates, as the papers state it, on vectors."""

    def __init__(self, inner, outer, config, decay=1.0):
        self.models = [network() for _ in range(hvd.size())]
        self.inner = [inner(model.parameters()) for model in self.models]
        self.anchor = nn.Parameter(flat(self.models[0]).clone())
        self.outer = outer([self.anchor])
        sizes = [parameter.numel() for parameter in self.models[0].parameters()]
        # A bucket begins with the last parameter, but its members are in the model's order.
        self.ranks = SimulatedRanks(Config.load(config), hvd.size(), sizes)
        self.decay = decay

    def step(self, step):
        for rank, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
            local_step(model, inner, step, rank)

    def updates(self):
        return [(self.anchor.detach() - flat(model)).numpy() for model in self.models]

    def outer_step(self, mean):
        self.anchor.grad = torch.from_numpy(mean)
        self.outer.step()

    def synchronize(self):
        self.outer_step(self.ranks.mean(self.updates(), self.decay))
        for model in self.models:
            put(model, self.anchor.detach())


@case
def an_error_while_decoding_on_one_rank():
    """The others apply the exchange, and the next one is an error on all ranks, until a state is loaded."""
    behind = hvd.rank() == 1
    model = network()
    optimizer = LocalSGD(MOMENTUM(model.parameters()), model, LOSSY, every=1)
    train(model, optimizer, 1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(MemoryError, match="no room") if behind else nullcontext(), decoding_fails(behind):
        train(model, optimizer, 1, 1)
    for step in (2, 3):
        with pytest.raises(MismatchError, match="an error has left 1 rank behind: its last step was applied"):
            train(model, optimizer, 1, step)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, 2, 1)
    assert torch.equal(flat(model), hvd.broadcast(flat(model), 0))


@case
def plain_averaging_is_the_average_of_local_runs():
    for every in (1, 3):
        model, by_hand = network(), ByHand(MOMENTUM, partial(torch.optim.SGD, lr=1.0), DENSE)
        optimizer = LocalSGD(MOMENTUM(model.parameters()), model, DENSE, every=every)
        train(model, optimizer, 6)
        for step in range(6):
            by_hand.step(step)
            if step % every == every - 1:
                mean = torch.stack([flat(one) for one in by_hand.models]).mean(0)
                for one in by_hand.models:
                    put(one, mean)
        torch.testing.assert_close(flat(model), flat(by_hand.models[0]), rtol=0, atol=1e-7)
        assert same_everywhere(model)


@case
def every_step_with_plain_sgd_is_synchronous_sgd():
    model, reference = network(), network()
    sgd = partial(torch.optim.SGD, lr=0.1)
    train(model, LocalSGD(sgd(model.parameters()), model, DENSE, every=1), 5)
    optimizer = hvd.DistributedOptimizer(sgd(reference.parameters()), reference.named_parameters())
    train(reference, optimizer, 5)
    torch.testing.assert_close(flat(model), flat(reference), rtol=0, atol=1e-7)


@case
def lossy_updates_equal_the_same_by_hand():
    for outer, decay, config in (
        (partial(torch.optim.SGD, lr=1.0), 1.0, LOSSY),
        (NESTEROV, 0.9, {**LOSSY, "value": "sign"}),
        (partial(torch.optim.Adam, lr=0.01), 1.0, {**LOSSY, "value": "raw"}),
    ):
        model, by_hand = network(), ByHand(ADAMW, outer, config, decay)
        optimizer = LocalSGD(ADAMW(model.parameters()), model, config, every=4, outer=outer, decay=decay)
        train(model, optimizer, 11)
        for step in range(11):
            by_hand.step(step)
            if step % 4 == 3:
                by_hand.synchronize()
        assert torch.equal(flat(model), flat(by_hand.models[hvd.rank()]))
        assert not same_everywhere(model)
        optimizer.sync()
        by_hand.synchronize()
        assert torch.equal(flat(model), by_hand.anchor) and same_everywhere(model)
        optimizer.sync()  # nothing was done since: nothing is exchanged
        assert torch.equal(flat(model), by_hand.anchor)
        total = optimizer.stats()["total"]
        assert total["steps"] == 3 and 0 < total["bytes_sent"] < total["dense_bytes"]
        sizes = 4 * flat(model).numel()
        assert total["dense_bytes"] == pytest.approx(11 * 2 * (hvd.size() - 1) / hvd.size() * sizes, abs=50)


class Counted(torch.optim.AdamW):
    """Adds up how far its steps go."""

    progress: torch.Tensor | float = 0.0

    def step(self, closure=None):
        before = nn.utils.parameters_to_vector(self.param_groups[0]["params"]).detach().clone()
        super().step(closure)
        self.progress += before - nn.utils.parameters_to_vector(self.param_groups[0]["params"]).detach()


@case
def what_was_sent_and_what_is_kept_is_the_progress():
    model = network()
    start = flat(model).clone()
    inner = Counted(model.parameters(), lr=0.01)
    optimizer = LocalSGD(inner, model, LOSSY, every=3)
    train(model, optimizer, 12)
    residuals = optimizer.state_dict()["local_sgd"]["compression"]["residuals"]
    kept = torch.cat([residual for residual in residuals.values()])
    sent = hvd.allreduce(inner.progress - kept, name="sent", op=hvd.Average)
    assert kept.abs().max() > 0.01
    torch.testing.assert_close(start - flat(model), sent, rtol=0, atol=1e-6)


@case
def a_schedule_of_periods_and_of_learning_rates():
    model, by_hand = network(), ByHand(ADAMW, NESTEROV, LOSSY)
    optimizer = LocalSGD(
        ADAMW(model.parameters()), model, LOSSY, every=lambda clock: 1 if clock < 2 else 4, outer=NESTEROV
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(inner, 10) for inner in by_hand.inner]
    for step in range(10):
        train(model, optimizer, 1, step)
        schedule.step()
        by_hand.step(step)
        for one in schedules:
            one.step()
        if step + 1 in (1, 2, 6, 10):
            by_hand.synchronize()
        assert torch.equal(flat(model), flat(by_hand.models[hvd.rank()])), step
    assert optimizer.param_groups[0]["lr"] == by_hand.inner[0].param_groups[0]["lr"] != 0.01
    bad = LocalSGD(ADAMW(model.parameters()), model, LOSSY, every=lambda clock: 2 if clock == 0 else 0)
    train(model, bad, 1)
    with pytest.raises(ValueError, match=r"every\(2\) returned 0; it must be an integer, at least 1"):
        train(model, bad, 1, 1)


@case
def fragments_are_exchanged_in_turn():
    model = network()
    optimizer = LocalSGD(ADAMW(model.parameters()), model, DENSE, every=4, fragments=2)
    # The second half of the elements begins in the third parameter.
    parts = {2: [0, 1], 4: [2, 3, 4, 5]}
    for step in range(8):
        train(model, optimizer, 1, step)
        every = [hvd.allgather(one.detach().reshape(1, -1)) for one in model.parameters()]
        equal = {number for number, of_ranks in enumerate(every) if (of_ranks == of_ranks[0]).all()}
        assert equal == set(parts.get(step % 4 + 1, [])), (step, equal)
    optimizer.sync()
    assert same_everywhere(model)


@case
def a_delay_keeps_the_progress_made_meanwhile():
    for mix in (None, 0.5):
        model, by_hand = network(), ByHand(ADAMW, NESTEROV, LOSSY)
        optimizer = LocalSGD(ADAMW(model.parameters()), model, LOSSY, every=4, delay=2, mix=mix, outer=NESTEROV)
        pending: tuple[np.ndarray, list[torch.Tensor]] | None = None
        for step in range(10):
            train(model, optimizer, 1, step)
            by_hand.step(step)
            if step + 1 in (6, 10):
                assert pending is not None
                by_hand.outer_step(pending[0])
                for one, start in zip(by_hand.models, pending[1], strict=True):
                    now = flat(one)
                    after = (
                        now + (by_hand.anchor.detach() - start) if mix is None else now.lerp(by_hand.anchor, 1 - mix)
                    )
                    put(one, after.detach())
            if step + 1 in (4, 8):
                starts = [flat(one).clone() for one in by_hand.models]
                pending = by_hand.ranks.mean(by_hand.updates()), starts
            if step + 1 == 5:
                with pytest.raises(RuntimeError, match="while an exchange is in flight .delay is 2.: call sync"):
                    optimizer.state_dict()
            assert torch.equal(flat(model), flat(by_hand.models[hvd.rank()])), step
        optimizer.sync()
        assert same_everywhere(model)


@case
def asynchronous_exchanges_equal_the_same_by_hand():
    """Each rank decides by itself when it takes part; the last one does so only because of the bound."""
    decided = [np.random.default_rng(rank).random(12) < 0.3 for rank in range(hvd.size() - 1)] + [np.zeros(12, bool)]
    own = iter(decided[hvd.rank()])
    asked = []

    def times(rank, clock):
        asked.append((rank, clock))
        return next(own)

    model, by_hand = network(), ByHand(ADAMW, NESTEROV, LOSSY)
    optimizer = LocalSGD(ADAMW(model.parameters()), model, LOSSY, times=times, every=4, outer=NESTEROV)
    taken = [by_hand.anchor.detach().clone() for _ in by_hand.models]
    last, together = [0] * hvd.size(), 0
    for step in range(12):
        if step == 6:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.close()
            optimizer = LocalSGD(ADAMW(model.parameters()), model, LOSSY, times=times, every=4, outer=NESTEROV)
            optimizer.load_state_dict(saved)
        train(model, optimizer, 1, step)
        by_hand.step(step)
        present = [bool(decided[rank][step]) or step + 1 - last[rank] >= 4 for rank in range(hvd.size())]
        last = [step + 1 if there else before for there, before in zip(present, last, strict=True)]
        together += any(present)
        if any(present):
            updates = [
                (base - flat(one)).numpy() if there else None
                for base, one, there in zip(taken, by_hand.models, present, strict=True)
            ]
            by_hand.outer_step(by_hand.ranks.mean(updates))
            for rank in np.flatnonzero(present):
                put(by_hand.models[rank], by_hand.anchor.detach())
                taken[rank] = by_hand.anchor.detach().clone()
        assert torch.equal(flat(model), flat(by_hand.models[hvd.rank()])), step
    assert asked == [(hvd.rank(), clock) for clock in range(1, 13)]
    assert together < 12 and optimizer.state_dict()["local_sgd"]["outer_steps"] == [together]
    optimizer.sync()
    assert same_everywhere(model)
    with pytest.raises(ValueError, match="times is given beside fragments or delay"):
        LocalSGD(ADAMW(model.parameters()), model, LOSSY, times=times, fragments=2)
    with pytest.raises(TypeError, match="times is int, but it must be a function"):
        LocalSGD(ADAMW(model.parameters()), model, LOSSY, times=3)


@case
def other_scopes_exchanges_and_dtypes():
    densestream = {"sparsifier": {"name": "topk", "density": 0.2}, "exchange": "densestream"}
    for dtype, config in (
        (torch.float32, {**LOSSY, "scope": "tensor"}),
        (torch.float32, {**LOSSY, "scope": "bucket", "bucket_bytes": 3000}),
        (torch.float32, {**LOSSY, "scope": "tensor", "min_elements": 100}),
        (torch.bfloat16, LOSSY),
        (torch.float64, LOSSY),
        *([(torch.float32, densestream)] if hvd.mpi_enabled() else []),
    ):
        model = network().to(dtype)
        optimizer = LocalSGD(ADAMW(model.parameters()), model, config, every=2, fragments=2, delay=1)
        first = loss_of(model, 99, 0).item()
        train(model, optimizer, 40)
        optimizer.sync()
        last = loss_of(model, 99, 0).item()
        assert same_everywhere(model.float()) and last < 0.9 * first, (config, first, last)
        optimizer.close()


@case
def a_rank_with_nan_discards_the_period_on_all_ranks():
    model = network()
    optimizer = LocalSGD(ADAMW(model.parameters()), model, LOSSY, every=2)
    train(model, optimizer, 2)
    before, kept = flat(model).clone(), copy.deepcopy(optimizer.state_dict()["local_sgd"]["compression"]["residuals"])
    train(model, optimizer, 1, 2)
    if hvd.rank() == hvd.size() - 1:
        next(model.parameters()).grad.fill_(torch.nan)
        optimizer.inner.step()
    train(model, optimizer, 1, 3)
    assert torch.equal(flat(model), before)
    now = optimizer.state_dict()["local_sgd"]["compression"]["residuals"]
    assert all(torch.equal(residual, kept[name]) for name, residual in now.items())
    train(model, optimizer, 4, 4)
    assert torch.isfinite(flat(model)).all() and same_everywhere(model) and not torch.equal(flat(model), before)


@case
def loss_scaling_skips_a_step_of_one_rank():
    for inner in (MOMENTUM, partial(torch.optim.AdamW, lr=0.01, fused=True)):
        model = network()
        optimizer = LocalSGD(inner(model.parameters()), model, LOSSY, every=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, hvd.rank())).backward()
            if step == 1 and hvd.rank() == 0:
                next(model.parameters()).grad[0, 0] = torch.inf
            before = flat(model).clone()
            if step == 3:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if step == 0:
                assert (flat(model) - before).abs().max() < 0.2  # the gradients were divided by the scale
        assert same_everywhere(model) and scaler.get_scale() == (8.0 if hvd.rank() == 0 else 16.0)


@case
def a_resumed_run_equals_an_unbroken_one():
    def wrapped(model, **options):
        return LocalSGD(ADAMW(model.parameters()), model, LOSSY, every=4, outer=NESTEROV, decay=0.9, **options)

    unbroken, halves = network(), network()
    train(unbroken, wrapped(unbroken), 11)
    first = wrapped(halves)
    train(halves, first, 6)  # in the middle of a period
    saved = copy.deepcopy((halves.state_dict(), first.state_dict()))
    resumed = network(7)
    resumed.load_state_dict(saved[0])
    optimizer = wrapped(resumed)
    without = {key: value for key, value in saved[1].items() if key != "local_sgd"}
    for state, message in {
        "empty": (saved[1] | {"local_sgd": {}}, "this is not a state of LocalSGD: it must have anchors"),
        "plain": (without, "this is not a state of LocalSGD: it has no"),
        "fragments": (
            saved[1] | {"local_sgd": saved[1]["local_sgd"] | {"due": [1, 2], "began": [0, 0]}},
            "the state is of 2 fragments, and the settings are of 1",
        ),
        "rank": (
            saved[1] | {"local_sgd": saved[1]["local_sgd"] | {
                "compression": saved[1]["local_sgd"]["compression"] | {"rank": hvd.rank() + 1}}},
            "every rank must load the state that it saved",
        ),
    }.values():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
    assert not optimizer.state
    optimizer.load_state_dict(saved[1])
    train(resumed, optimizer, 5, 6)
    assert torch.equal(flat(resumed), flat(unbroken))
    states = hvd.allgather_object(optimizer.state_dict())
    optimizer.load_state_dict(states, reshard=True)
    optimizer.sync()
    assert same_everywhere(resumed)


@case
def ranks_that_differ_get_an_error():
    model = network(seed=hvd.rank())
    optimizer = LocalSGD(ADAMW(model.parameters()), model, LOSSY, every=1)
    with pytest.raises(MismatchError, match=r"on rank 1, the parameter 0.weight has other values than on rank 0"):
        train(model, optimizer, 1)
    model = network()
    optimizer = LocalSGD(
        ADAMW(model.parameters()), model, LOSSY, every=1, outer=partial(torch.optim.SGD, lr=1 + hvd.rank())
    )
    with pytest.raises(MismatchError, match="on rank 1, the outer optimizer has other settings"):
        train(model, optimizer, 1)
    optimizer = LocalSGD(ADAMW(model.parameters()), model, LOSSY, every=1, decay=1 - 0.1 * hvd.rank())
    with pytest.raises(MismatchError, match="local"):
        train(model, optimizer, 1)


@case
def ranks_that_part_get_an_error():
    rank, last = hvd.rank(), hvd.size() - 1
    others = "rank 0" if last == 1 else "ranks 0, 1"

    def made(**options):
        model = network()
        return model, LocalSGD(ADAMW(model.parameters()), model, LOSSY, **options)

    # Periods that part, found at the exchange where they begin.
    model, optimizer = made(every=lambda clock: np.int64(1 if clock == 0 else 3 + (rank == last and clock > 1)))
    train(model, optimizer, 3)
    assert optimizer.state_dict()["local_sgd"]["due"] == [4]
    with pytest.raises(MismatchError, match=f"next_exchange is 7 on {others}, 8 on rank {last}. LocalSGD's"):
        train(model, optimizer, 1, 3)
    # A rank that has ended its loop.
    model, optimizer = made(every=3, fragments=2, delay=1)
    with pytest.raises(MismatchError, match=f"clock is 6 on {others}, 5 on rank {last}; call is step on "):
        train(model, optimizer, 9 if rank < last else 5)
        optimizer.sync()
    # States that one rank loads in a running job: of another anchor, and of another exchange.
    model, optimizer = made(every=1)
    train(model, optimizer, 2)
    early = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 1, 2)
    late = copy.deepcopy(optimizer.state_dict())
    changed = copy.deepcopy(late)
    changed["local_sgd"]["anchors"]["0.weight"] += 1
    if rank == last:
        optimizer.load_state_dict(changed)
    with pytest.raises(MismatchError, match=f"on rank {last}, the parameter 0.weight has other values"):
        train(model, optimizer, 1, 3)
    if rank == last:
        optimizer.load_state_dict(early)
    with pytest.raises(MismatchError, match=f"the step count of|clock is 5 on {others}, 3 on rank {last}"):
        train(model, optimizer, 1, 3)
    optimizer.load_state_dict(late)
    train(model, optimizer, 2, 3)
    optimizer.sync()
    assert same_everywhere(model)


@case
def a_model_whose_first_parameter_has_another_name_gets_an_error():
    model = network()
    pairs = [(f"module.{name}" if hvd.rank() else name, one) for name, one in model.named_parameters()]
    optimizer = LocalSGD(ADAMW(model.parameters()), pairs, LOSSY, every=1)
    others = "rank 1" if hvd.size() == 2 else "ranks 1, 2"
    with pytest.raises(MismatchError, match=rf"parameter 0.weight is .* on rank 0, missing on {others}"):
        train(model, optimizer, 1)


@case
def wrong_uses_get_an_error():
    model = network()
    reduced = network()  # Horovod's hooks stay on it
    inner = ADAMW(reduced.parameters())
    with pytest.raises(TypeError, match="exchanges gradients: give LocalSGD the optimizer that it wraps"):
        LocalSGD(hvd.DistributedOptimizer(inner, reduced.named_parameters()), reduced)
    with pytest.raises(TypeError, match="the first argument of LocalSGD is Sequential"):
        LocalSGD(model, ADAMW(model.parameters()))
    with pytest.raises(TypeError, match="the second argument of LocalSGD is str"):
        LocalSGD(ADAMW(model.parameters()), "topk_model")
    with pytest.raises(ValueError, match="do not belong to the model"):
        LocalSGD(ADAMW(network().parameters()), model)
    with pytest.raises(ConfigError, match="Use LocalSGD in place of"):
        DeepReduce(model, LOSSY, local={"every": 3})
    with pytest.raises(ConfigError, match=r"local.every is 0"):
        LocalSGD(ADAMW(model.parameters()), model, LOSSY, every=0)
    with pytest.raises(ConfigError, match="delay must be less than every"):
        LocalSGD(ADAMW(model.parameters()), model, LOSSY, every=2, delay=2)
    with pytest.raises(TypeError, match="outer returned int, but it must return an optimizer"):
        train(model, LocalSGD(ADAMW(model.parameters()), model, LOSSY, outer=len), 1)
    model[0].weight.requires_grad_(False)
    optimizer = LocalSGD(ADAMW(model.parameters()), model, LOSSY, every=1)
    train(model, optimizer, 1)
    model[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"after LocalSGD was made: 0.weight. They are not exchanged"):
        train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="cannot take new parameters"):
        optimizer.add_param_group({"params": []})
    optimizer.close()
    with pytest.raises(RuntimeError, match="was closed"):
        optimizer.step()


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    run_cases(hvd.rank(), hvd.size())
