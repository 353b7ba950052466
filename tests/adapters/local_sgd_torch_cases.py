"""What LocalSGD must do on several ranks with PyTorch: cases of test_local_sgd.py (see tests/case_runner.py).

mpirun -np 2 python tests/adapters/local_sgd_torch_cases.py [CASE ...]
"""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from functools import partial

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from hvd_deepreduce import ConfigError
from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.torch import DeepReduce, LocalSGD
from tests.adapters.local_sgd_cases import DENSE, LOSSY, on
from tests.adapters.torch_job import arrays
from tests.case_runner import case, run_cases

SGD = torch.optim.SGD
OPTIMIZERS = {
    "adam": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "sgd": partial(SGD, lr=1.0),
    "nesterov": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 4))


def loss_of(model, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 20, generator=generator)
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(x.to(dtype)).float(), x[:, :4].argmax(1))


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


class Model:
    def __init__(self, inner, seed=0):
        self.model = network(seed)
        self.optimizer = OPTIMIZERS[inner](self.model.parameters())

    def step(self, step, rank):
        self.optimizer.zero_grad()
        loss_of(self.model, step, rank).backward()
        self.optimizer.step()

    def parts(self):
        return arrays(self.model.parameters())

    def sizes(self):
        return [one.size for one in self.parts()]

    def flat(self):
        return np.concatenate(self.parts())

    def put(self, vector):
        nn.utils.vector_to_parameters(torch.from_numpy(vector.copy()), self.model.parameters())


class Anchor:
    def __init__(self, outer, vector):
        self.vector = nn.Parameter(torch.from_numpy(vector.copy()))
        self.optimizer = OPTIMIZERS[outer]([self.vector])

    def step(self, mean):
        self.vector.grad = torch.from_numpy(mean)
        self.optimizer.step()

    def flat(self):
        return self.vector.detach().numpy().copy()


class Trainer(Model):
    def __init__(self, inner, config, seed=0, outer=None, **options):
        super().__init__(inner, seed)
        options["outer"] = OPTIMIZERS.get(outer, outer)
        self.made = lambda: LocalSGD(OPTIMIZERS[inner](self.model.parameters()), self.model, config, **options)
        self.optimizer = self.local = self.made()

    def train(self, steps, first=0):
        for step in range(first, first + steps):
            self.step(step, hvd.rank())

    def freeze(self, frozen):
        self.model[0].requires_grad_(not frozen)

    def train_frozen(self, step):
        self.optimizer.zero_grad()
        loss_of(self.model, step, hvd.rank()).backward()
        self.freeze(True)
        self.optimizer.step()
        self.freeze(False)

    def poison(self):
        first = next(self.model.parameters())
        for one in (first.data, *self.local.inner.state[first].values()):
            if one.shape == first.shape:
                one.fill_(torch.nan)

    def whole_state(self):
        return copy.deepcopy(self.local.state_dict())

    def state(self):
        return self.whole_state()["local_sgd"]

    def residuals(self):
        return arrays(self.state()["compression"]["residuals"].values())

    def saved(self):
        return copy.deepcopy(self.model.state_dict()), self.whole_state()

    def load(self, saved):
        self.model.load_state_dict(saved[0])
        self.local.load_state_dict(saved[1])

    def load_local(self, state, **options):
        self.local.load_state_dict(state, **options)

    def again(self):
        saved = self.whole_state()
        self.local.close()
        self.optimizer = self.local = self.made()
        self.local.load_state_dict(saved)
        return self


def bad_states(saved, fragments):
    whole, local = saved[1], saved[1]["local_sgd"]
    yield whole | {"local_sgd": {}}, "this is not a state of LocalSGD: it must have anchors"
    without = {name: one for name, one in whole.items() if name != "local_sgd"}
    yield without, "this is not a state of LocalSGD: it has no"
    other = {"due": [1] * (3 - fragments), "began": [0] * (3 - fragments)}
    message = f"the state is of {3 - fragments} fragments, and the settings are of {fragments}"
    yield whole | {"local_sgd": local | other}, message
    another = local["compression"] | {"rank": hvd.rank() + 1}
    yield whole | {"local_sgd": local | {"compression": another}}, "every rank must load the state that it saved"


def with_another_anchor(state):
    state = copy.deepcopy(state)
    state["local_sgd"]["anchors"]["0.weight"] += 1
    return state


adam = partial(torch.optim.Adam, lr=0.01)
OPTIMIZERS["outer adam"] = adam
on.__dict__.update(
    rank=hvd.rank, size=hvd.size, gathered=hvd.allgather_object, model=Model, anchor=Anchor, trainer=Trainer,
    outers=[("sgd", 1.0, LOSSY, {"outer": "sgd"}), ("nesterov", 0.9, {**LOSSY, "value": "sign"}, {"outer": "nesterov"}),
            ("outer adam", 1.0, {**LOSSY, "value": "raw"}, {"outer": adam})],
    differing_outer=lambda: partial(SGD, lr=1.0 + hvd.rank()),
    # The second half of the elements begins in the third parameter.
    name="0.weight", broadcast="values than on rank 0", fragment=[0, 1], mixes=(None, 0.5),
    mixed=lambda now, anchor, mix: torch.from_numpy(now).lerp(torch.from_numpy(anchor), 1 - mix).numpy(),
    bad_states=bad_states, with_another_anchor=with_another_anchor,
)  # fmt: skip


@case
def every_step_with_plain_sgd_is_synchronous_sgd():
    trainer, reference = Trainer("sgd", DENSE, every=1), Model("sgd")
    reference.optimizer = hvd.DistributedOptimizer(reference.optimizer, reference.model.named_parameters())
    trainer.train(5)
    for step in range(5):
        reference.step(step, hvd.rank())
    np.testing.assert_allclose(trainer.flat(), reference.flat(), rtol=0, atol=1e-6)


class Counted(torch.optim.AdamW):
    """Adds up how far its steps go."""

    progress: torch.Tensor | float = 0.0

    def step(self, closure=None):
        before = nn.utils.parameters_to_vector(self.param_groups[0]["params"]).detach().clone()
        super().step(closure)
        self.progress += before - nn.utils.parameters_to_vector(self.param_groups[0]["params"]).detach()


@case
def what_was_sent_and_what_is_kept_is_the_progress():
    OPTIMIZERS["counted"] = partial(Counted, lr=0.01)
    trainer = Trainer("counted", LOSSY, every=3)
    start = trainer.flat()
    trainer.train(12)
    kept = np.concatenate(trainer.residuals())
    assert np.abs(kept).max() > 0.01
    sent = np.mean(hvd.allgather_object(trainer.local.inner.progress.numpy() - kept), 0)
    np.testing.assert_allclose(start - trainer.flat(), sent, rtol=0, atol=1e-6)


@case
def a_schedule_of_learning_rates():
    trainer, plain = Trainer("adam", LOSSY, every=20), Model("adam")
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one.optimizer, 10) for one in (trainer, plain)]
    for step in range(10):
        for one, schedule in zip((trainer, plain), schedules, strict=True):
            one.step(step, hvd.rank())
            schedule.step()
    assert np.array_equal(trainer.flat(), plain.flat())
    assert trainer.local.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"] != 0.01


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
        model = Model("adam")
        model.model.to(dtype)
        inner = OPTIMIZERS["adam"](model.model.parameters())
        model.optimizer = LocalSGD(inner, model.model, config, every=2, fragments=2, delay=1)
        first = loss_of(model.model, 99, 0).item()
        for step in range(40):
            model.step(step, hvd.rank())
        model.optimizer.sync()
        last = loss_of(model.model, 99, 0).item()
        assert len(set(hvd.allgather_object(model.flat().tobytes()))) == 1
        assert last < 0.9 * first, (config, first, last)
        model.optimizer.close()


@case
def other_weights_are_loaded():
    """Without begin(), exchanges would bring the old ones back."""
    trainer = Trainer("adam", LOSSY, every=2, outer="nesterov")
    best = trainer.flat()
    trainer.train(10)
    trainer.put(best)
    trainer.local.begin()
    for group in trainer.local.param_groups:
        group["lr"] = 0.0
    trainer.train(4, 10)
    assert np.array_equal(trainer.flat(), best) and trainer.residuals()[0].size


@case
def it_is_not_copied_and_a_snapshot_serves_twice():
    trainer = Trainer("adam", LOSSY, every=2)
    trainer.train(4)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a LocalSGD cannot be copied or pickled.*use state_dict"):
            copied(trainer.local)
    kept, parameters = trainer.local.snapshot(), trainer.flat()
    ends = []
    for _ in range(2):
        trainer.put(parameters)
        trainer.local.rewind(kept)
        trainer.train(5, 4)
        ends.append(trainer.flat())
    assert np.array_equal(*ends)


@case
def many_votes_are_in_flight():
    """Step checks begin while others are in flight: each has a name of its own."""
    trainer, waits = (Trainer("adam", LOSSY, every=20, fragments=6, delay=18) for _ in range(2))
    waits.local._updates.goes_ahead = lambda: False
    for one in (trainer, waits):
        one.train(45)
    assert np.array_equal(trainer.flat(), waits.flat())


@case
def loss_scaling_skips_a_step_of_one_rank():
    for inner in (OPTIMIZERS["momentum"], partial(torch.optim.AdamW, lr=0.01, fused=True)):
        model = network()
        optimizer = LocalSGD(inner(model.parameters()), model, LOSSY, every=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, hvd.rank())).backward()
            if step == 1 and hvd.rank() == 0:
                next(model.parameters()).grad[0, 0] = torch.inf
            before = flat(model)
            if step == 3:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if step == 0:
                assert (flat(model) - before).abs().max() < 0.2  # the gradients were divided by the scale
        assert len(set(hvd.allgather_object(flat(model).numpy().tobytes()))) == 1
        assert scaler.get_scale() == (8.0 if hvd.rank() == 0 else 16.0)


@case
def an_evaluation_in_inference_mode():
    """What an exchange makes there must go on outside, as the anchors of the first one and the outer momentum."""
    for options in ({"outer": "nesterov"}, {"fragments": 2, "delay": 1}):
        parts = []
        for mode in (nullcontext, torch.inference_mode):
            trainer = Trainer("adam", LOSSY, every=3, **options)
            with mode():
                trainer.optimizer.begin()
            for step in range(2):
                trainer.train(4, 4 * step)
                with mode():
                    trainer.optimizer.sync()
                    state = trainer.optimizer.state_dict()
                saved = copy.deepcopy((trainer.model.state_dict(), state))
                trainer.train(2, 20 + 2 * step)
                trainer.optimizer.sync()
                with mode():
                    trainer.load(saved)
            trainer.train(4, 40)
            trainer.optimizer.sync()
            parts.append(trainer.flat())
        np.testing.assert_array_equal(*parts)


@case
def weights_that_are_loaded_before_the_first_step():
    """Also if something has read the state before, as Accelerate does, or all ranks have evaluated."""
    trained = Trainer("adam", LOSSY, every=3)
    trained.train(6)
    trained.optimizer.sync()
    flats = []
    for between in (lambda one: None, lambda one: one.load_state_dict(one.state_dict()), LocalSGD.sync):
        trainer = Trainer("adam", LOSSY, seed=1, every=3)
        between(trainer.optimizer)
        trainer.model.load_state_dict(trained.model.state_dict())
        trainer.train(4)
        trainer.optimizer.sync()
        flats.append(trainer.flat())
    assert np.abs(flats[0] - trained.flat()).max() < 0.1
    np.testing.assert_array_equal(flats[0], flats[1])
    np.testing.assert_array_equal(flats[0], flats[2])


@case
def a_model_that_is_converted_afterwards():
    trainer = Trainer("adam", LOSSY, every=2)
    trainer.model.double()
    with pytest.raises(RuntimeError, match="converted to float64, or from it, after LocalSGD was made: 0.weight, 0"):
        trainer.train(2)


@case
def a_shorter_period_after_a_load():
    saved = Trainer("adam", LOSSY, every=50)
    saved.train(5)
    trainer = Trainer("adam", LOSSY, every=4)
    trainer.load(saved.saved())
    trainer.train(4, 5)
    assert trainer.state()["began"] == [9]


@case
def what_is_assigned_is_the_wrapped_optimizers():
    trainer = Trainer("adam", LOSSY, every=2)
    wrapper, inner = trainer.optimizer, trainer.optimizer.inner
    wrapper.param_groups = [{**group, "lr": 0.0, "weight_decay": 0.0} for group in wrapper.param_groups]
    before = trainer.flat()
    trainer.train(4)
    np.testing.assert_array_equal(trainer.flat(), before)
    wrapper.state = {}
    assert inner.param_groups is wrapper.param_groups and inner.state is wrapper.state


@case
def a_model_whose_first_parameter_has_another_name_gets_an_error():
    model = network()
    pairs = [(f"module.{name}" if hvd.rank() else name, one) for name, one in model.named_parameters()]
    trainer = Trainer("sgd", LOSSY, every=1)
    trainer.model = model
    trainer.optimizer = LocalSGD(SGD(model.parameters(), lr=0.1), pairs, LOSSY, every=1)
    others = "rank 1" if hvd.size() == 2 else "ranks 1, 2"
    with pytest.raises(MismatchError, match=rf"parameter 0.weight is .* on rank 0, missing on {others}"):
        trainer.train(1)


class Holds(torch.optim.Optimizer):
    """As that of Accelerate's ``prepare``."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


class ScheduleFree(torch.optim.SGD):
    def train(self): ...

    def eval(self): ...


@case
def wrong_uses_get_an_error():
    trainer = Trainer("adam", LOSSY, every=1)
    model, reduced = trainer.model, network()  # Horovod's hooks stay on it

    def inner(other=model):
        return OPTIMIZERS["adam"](other.parameters())

    with pytest.raises(TypeError, match="exchanges gradients: give LocalSGD the optimizer that it wraps"):
        LocalSGD(hvd.DistributedOptimizer(inner(reduced), reduced.named_parameters()), reduced)
    with pytest.raises(TypeError, match=r"LocalSGD was given to hvd.DistributedOptimizer.* takes its place"):
        hvd.DistributedOptimizer(trainer.optimizer, model.named_parameters())
    with pytest.raises(TypeError, match="the first argument of LocalSGD is Sequential"):
        LocalSGD(model, inner())
    with pytest.raises(TypeError, match=r"Holds, which holds an optimizer.*accelerator.prepare\(LocalSGD"):
        LocalSGD(Holds(inner()), model)
    with pytest.raises(TypeError, match=r"ScheduleFree has train\(\) and eval\(\)"):
        LocalSGD(ScheduleFree(model.parameters()), model)
    with pytest.raises(TypeError, match="the second argument of LocalSGD is str"):
        LocalSGD(inner(), "topk_model")
    with pytest.raises(ValueError, match="do not belong to the model"):
        LocalSGD(inner(network()), model)
    with pytest.raises(ConfigError, match="Use LocalSGD in place of"):
        DeepReduce(model, LOSSY, local={"every": 3})
    with pytest.raises(TypeError, match="outer returned int, but it must return an optimizer"):
        Trainer("adam", LOSSY, outer=len).train(1)
    with pytest.raises(TypeError, match="outer is AdamW; it must be a function that makes an optimizer"):
        LocalSGD(inner(), model, LOSSY, outer=inner())
    with pytest.raises(ConfigError, match="local has lr=0.5, and outer is given"):
        LocalSGD(inner(), model, LOSSY, outer=partial(torch.optim.SGD, lr=1.0), local={"lr": 0.5})
    model[0].weight.requires_grad_(False)
    trainer.optimizer = LocalSGD(inner(), model, LOSSY, every=1)
    trainer.train(1)
    model[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"after LocalSGD was made: 0.weight. They are not exchanged"):
        trainer.train(1)
    with pytest.raises(RuntimeError, match="cannot take new parameters"):
        trainer.optimizer.add_param_group({"params": []})
    trainer = Trainer("adam", LOSSY, every=1)
    get_optimizer_state_dict(trainer.model, trainer.optimizer.inner)
    trainer.train(1)
    trainer.optimizer.inner.step()
    for use in (trainer.optimizer.step, trainer.optimizer.sync):
        with pytest.raises(RuntimeError, match="AdamW, which LocalSGD wraps, was stepped 1 times by itself"):
            use()


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    run_cases(hvd.rank(), hvd.size())
