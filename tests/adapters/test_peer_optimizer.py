"""PeerOptimizer: several peers in one process, each with a store of its own in the same folder."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn

from hvd_deepreduce import ConfigError
from hvd_deepreduce.exchange import store
from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch import LocalSGD, PeerOptimizer, SignMomentum
from hvd_deepreduce.torch.torchft import ManagedQuorum

TOP = {"sparsifier": {"name": "topk", "density": 0.1}, "value": {"name": "qsgd", "bits": 4}, "scope": "model"}
ALL = {"sparsifier": "none", "value": "raw"}


class Peer:
    """A job with a scheduler, which trains on its own data. With ``wait=0`` it goes on alone."""

    def __init__(self, folder, peer, inner, config, peers=2, wait=0.0):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 3))
        optimizer = inner(self.model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        self.store = SharedStore(folder, peer=peer, peers=peers, wait=wait)
        self.optimizer = PeerOptimizer(optimizer, self.model, config, store=self.store, scheduler=scheduler)
        self.peer, self.trained = peer, 0

    def gradients(self):
        seed = 100 * self.peer + self.trained
        self.trained += 1
        x = torch.randn(8, 9, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), x[:, :3].argmax(1)).backward()

    def train(self, steps=1):
        for _ in range(steps):
            self.gradients()
            self.optimizer.step()
        return self

    def flat(self):
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def states(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, states):
        self.model.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1])
        return self

    def residuals(self):
        return copy.deepcopy(self.optimizer.state_dict()["local_sgd"]["compression"]["residuals"])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def signs(parameters):
    return SignMomentum(parameters, 0.01)


EACH = pytest.mark.parametrize(("inner", "config"), [(sgd, TOP), (adamw, ALL), (signs, "sign_momentum")])


@EACH
def test_peers_take_the_same_steps_and_one_that_comes_back_goes_on(inner, config, tmp_path):
    first, other = (Peer(tmp_path, peer, inner, config) for peer in range(2))
    for _ in range(3):
        first.train(2), other.train()
    first.optimizer.sync()
    assert torch.equal(first.flat(), other.flat())
    saved = other.states()
    other.train(2), first.train(5)
    back = Peer(tmp_path, 1, inner, config).load(saved)
    back.optimizer.sync()
    assert torch.equal(back.flat(), first.flat())
    assert back.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"], "the scheduler is behind"
    back.train(), first.train()
    back.optimizer.sync()
    assert torch.equal(back.flat(), first.flat())


def test_the_step_is_that_of_the_mean_gradient(tmp_path):
    """Both wait for each other: the second one's message is there when the first one looks."""
    first, other = (Peer(tmp_path, peer, adamw, ALL) for peer in range(2))
    agree, start = first.store.agree, first.flat()

    def after_the_other(*arguments):
        other.store.agree = lambda *same: agree(*same)
        other.train()
        return agree(*arguments)

    first.store.agree = after_the_other
    first.train()
    model = copy.deepcopy(first.model)
    nn.utils.vector_to_parameters(start, model.parameters())
    plain, one, two = adamw(model.parameters()), Peer(tmp_path / "1", 0, sgd, ALL), Peer(tmp_path / "2", 1, sgd, ALL)
    one.gradients(), two.gradients()
    for parameter, a, b in zip(model.parameters(), one.model.parameters(), two.model.parameters(), strict=True):
        parameter.grad = (a.grad + b.grad) / 2
    plain.step()
    assert torch.equal(first.flat(), other.flat())
    torch.testing.assert_close(first.flat(), nn.utils.parameters_to_vector(model.parameters()).detach())


@pytest.mark.parametrize(("inner", "config", "kept"), [(sgd, TOP, True), (signs, "sign_momentum", False)])
def test_a_gradient_that_comes_too_late(inner, config, kept, tmp_path):
    """The other peer decides the exchange after this one has encoded: its gradient stays in its residual, or, with a
    memory that has a velocity, is as if it had never been."""
    first, other = (Peer(tmp_path, peer, inner, config) for peer in range(2))
    first.train(3), other.optimizer.sync()
    before, send = first.residuals(), first.store.send

    def late(place, message):
        other.train()
        return send(place, message)

    first.store.send = late
    first.gradients()
    given = {name: one.grad.clone() for name, one in first.model.named_parameters()}
    first.optimizer.step()
    assert torch.equal(first.flat(), other.flat()) and first.optimizer._updates.fragments[0].outer_steps == 4
    for name, now in first.residuals().items():
        was = torch.as_tensor(before[name])
        expected = was.reshape(-1) + given[name].reshape(-1) if kept else was.reshape(-1)
        torch.testing.assert_close(torch.as_tensor(now).reshape(-1), expected, rtol=1e-5, atol=1e-6)


def test_gradients_that_are_not_finite_leave_a_step_out(tmp_path, caplog):
    first, other = (Peer(tmp_path, peer, sgd, TOP) for peer in range(2))
    first.train(2)
    start, kept = first.flat(), first.residuals()
    first.gradients()
    first.model[0].weight.grad[0, 0] = float("nan")
    with caplog.at_level(logging.WARNING):
        first.optimizer.step()
    assert "peer 0 has NaN or infinity in its gradients of step 3: it leaves this step out" in caplog.text
    assert torch.equal(first.flat(), start)
    for name, now in first.residuals().items():
        assert torch.equal(torch.as_tensor(now), torch.as_tensor(kept[name]))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    first.model[0].weight.grad[0, 0] = float("inf")
    scaler.step(first.optimizer), scaler.update()
    assert torch.equal(first.flat(), start) and scaler.get_scale() == 2.0
    first.train()
    other.optimizer.sync()
    assert torch.equal(first.flat(), other.flat())


def test_another_learning_rate_is_refused(tmp_path):
    """The peers would part."""
    first = Peer(tmp_path, 0, sgd, TOP)
    other = Peer(tmp_path, 1, lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9), TOP)
    first.train()
    with pytest.raises(RuntimeError, match="this peer, 1, has another outer optimizer than peer 0"):
        other.train()


def test_what_cannot_be_used_is_refused(tmp_path):
    model, store = nn.Linear(4, 4), SharedStore(tmp_path, peer=0, peers=2)
    inner = torch.optim.SGD(model.parameters(), 0.1)

    def made(optimizer=inner, trained=model, config="topk_rice_qsgd", **settings):
        return PeerOptimizer(optimizer, trained, config, **{"store": store, **settings})

    local = LocalSGD(inner, model, "adamw_safe", store=store)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(inner)
    for arguments, error, message in (
        ({"optimizer": model}, TypeError, "first argument of PeerOptimizer is Linear.*Write: opt.* = PeerO"),
        ({"optimizer": local}, TypeError, "first argument of PeerOptimizer is LocalSGD"),
        ({"optimizer": sgd(nn.Linear(4, 4).parameters())}, ValueError, "the model that PeerOptimizer was given"),
        ({"trained": 3}, TypeError, "the second argument of PeerOptimizer.*Write: optimizer = PeerOptimizer"),
        ({"store": "folder"}, TypeError, "store is str; it must be a SharedStore"),
        ({"mode": "auto"}, ConfigError, "mode is 'auto', and with a store it can only be 'always'"),
        ({"exchange": "reduce_scatter"}, ConfigError, "with a store it can only be 'allgather'"),
        ({"densities": 0.1}, ConfigError, "densities"),
        ({"config": "adamw_safe"}, ConfigError, "PeerOptimizer exchanges gradients"),
        ({"scheduler": plateau}, TypeError, "ReduceLROnPlateau, which needs a loss"),
        ({"store": ManagedQuorum(None, None, peer=0, peers=2), "exchange": "reduce_scatter"}, ConfigError, "only be"),
    ):
        with pytest.raises(error, match=message):
            made(**arguments)
    optimizer = made()
    with pytest.raises(RuntimeError, match="PeerOptimizer cannot take new parameters"):
        optimizer.add_param_group({"params": [torch.zeros(3)]})
    with pytest.raises(ValueError, match="this is not a state of PeerOptimizer"):
        optimizer.load_state_dict(local.state_dict())
    with pytest.raises(ValueError, match="this is not a state of PeerOptimizer: it has no 'local_sgd'"):
        optimizer.load_state_dict(inner.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 3)
    with pytest.raises(ValueError, match="saved with a scheduler, or without one"):
        made(scheduler=scheduler).load_state_dict(optimizer.state_dict())
    inner.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(RuntimeError, match="given to the optimizer, after PeerOptimizer was made"):
        optimizer.step()


@pytest.mark.parametrize("aliased", [False, True])
def test_gradients_keep_their_memory_and_are_this_peers_own(aliased, tmp_path):
    """DDP may have views of them; and a user may keep them from step to step, as with ``set_to_none=False``."""
    model, other = nn.Linear(150, 150, bias=False), nn.Linear(150, 150, bias=False)
    other.load_state_dict(model.state_dict())
    made = []
    for peer, one in enumerate((model, other)):
        store = SharedStore(tmp_path, peer=peer, peers=2, wait=0.0)
        made.append(PeerOptimizer(torch.optim.SGD(one.parameters(), 1.0), one, ALL, store=store))
    start = model.weight.detach().clone()
    model.weight.grad = torch.full_like(model.weight, 1.0)
    memory = model.weight.grad.data_ptr()
    made[0].step()
    assert model.weight.grad.data_ptr() == memory
    other.weight.grad = torch.full_like(model.weight, 5.0)
    made[1].step()  # the first peer misses this one
    if aliased:
        model.weight.grad.zero_()
        model.weight.grad += 1.0
    else:
        model.weight.grad = torch.full_like(model.weight, 1.0)
    made[0].step()
    made[1].sync()
    torch.testing.assert_close(start - model.weight, torch.full_like(start, 1.0 + 5.0 + 1.0))
    assert torch.equal(model.weight, other.weight)


def test_after_a_step_that_failed_halfway_a_state_must_be_loaded(tmp_path):
    first, other = (Peer(tmp_path, peer, sgd, TOP) for peer in range(2))
    first.train(2), other.optimizer.sync()
    saved, scheduler = first.states(), first.optimizer._updates._scheduler
    step, scheduler.step = scheduler.step, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        first.train()
    scheduler.step = step
    for call in (first.optimizer.sync, first.train):
        with pytest.raises(RuntimeError, match="a step of peer 0 has failed, .* load a state"):
            call()
    first.load(saved).train()
    other.optimizer.sync()
    assert torch.equal(first.flat(), other.flat()) and other.optimizer._updates.fragments[0].outer_steps == 4

    def interrupted():
        raise KeyboardInterrupt

    scheduler.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        first.train()
    with pytest.raises(RuntimeError, match="a step of peer 0 has failed, .* before the next step or state"):
        first.states()


@pytest.mark.parametrize("local", [False, True])
def test_messages_that_cannot_be_read_after_they_count(local, tmp_path, monkeypatch, caplog):
    """They are read again; if that fails for long, nothing goes on from a step that was not taken."""
    monkeypatch.setattr(store, "AGAIN", (0.0, 0.0))
    torch.manual_seed(0)
    model = nn.Linear(9, 3)
    place = SharedStore(tmp_path, peer=0, peers=2, wait=0.0)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"config": TOP, "store": place}
    optimizer = LocalSGD(inner, model, every=1, **settings) if local else PeerOptimizer(inner, model, **settings)
    get, left = place.store.get, [0]

    def failing(name):
        if left[0] and name.endswith("/0") and place.store.names(name[:-2]).count("commit"):
            left[0] -= 1
            raise OSError(116, "Stale file handle")
        return get(name)

    place.store.get = failing
    start, total = nn.utils.parameters_to_vector(model.parameters()).detach().clone(), torch.zeros(30)
    for step in range(6):
        left[0] = 2 if step == 3 else 0
        optimizer.zero_grad()
        model(torch.randn(8, 9)).square().mean().backward()
        total += nn.utils.parameters_to_vector([one.grad for one in model.parameters()])
        optimizer.step()
    kept = optimizer.state_dict()["local_sgd"]["compression"]["residuals"]
    now = nn.utils.parameters_to_vector(model.parameters()).detach()
    waiting = torch.cat([torch.as_tensor(kept[name]).reshape(-1) for name in ("weight", "bias")])
    torch.testing.assert_close(start - now + waiting, total, rtol=1e-5, atol=1e-6)
    assert caplog.text.count("it is tried again") == 2
    left[0] = 100
    with pytest.raises(OSError, match="Stale"):
        optimizer.step()
    left[0] = 0
    with pytest.raises(RuntimeError, match="a step of peer 0 has failed"):
        optimizer.step()


def test_a_step_beside_the_exchanges_is_an_error(tmp_path):
    peer = Peer(tmp_path, 0, sgd, ALL).train(2)
    peer.optimizer.inner.step()
    with pytest.raises(RuntimeError, match="SGD, which PeerOptimizer wraps, was stepped 1 times by itself"):
        peer.train()


def test_who_takes_part_and_what_it_costs(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hvd_deepreduce")
    alone = Peer(tmp_path, 0, sgd, ALL, peers=8).train(3)
    assert "peer 0 is alone in its first exchange, and there may be 8 peers" in caplog.text
    sizes = 4 * alone.flat().numel()
    assert [alone.optimizer.stats()["total"][key] for key in ("bytes_sent", "bytes_received")] == [3 * sizes, 0]
    other = Peer(tmp_path, 1, sgd, ALL, peers=8)
    other.optimizer.sync()
    assert "peer 1 has taken 3 exchanges that were recorded, from number 0 on. In 0 of them" in caplog.text
    other.train(2)
    assert [other.optimizer.stats()["total"][key] for key in ("bytes_sent", "bytes_received")] == [2 * sizes, 3 * sizes]
    caplog.clear()
    back = Peer(tmp_path, 0, sgd, ALL, peers=8)
    back.optimizer.sync()
    assert "peer 0 has taken 5 exchanges that were recorded, from number 0 on. In 3 of them" in caplog.text
    assert torch.equal(back.flat(), other.flat())


def test_scaled_gradients(tmp_path):
    """Of GradScaler: they are those without it."""
    plain, scaled = (Peer(tmp_path / name, 0, sgd, ALL, peers=1) for name in ("plain", "scaled"))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(3):
        plain.train()
        scaled.gradients()
        scale = float(scaler.scale(torch.ones(())))
        for one in scaled.model.parameters():
            one.grad *= scale
        scaler.step(scaled.optimizer)
        scaler.update()
    torch.testing.assert_close(plain.flat(), scaled.flat())


def test_settings_of_an_optimizer_that_are_tuples_or_tensors_are_compared(tmp_path):
    first = Peer(tmp_path, 0, adamw, ALL)
    first.train()
    for settings in ({"lr": 0.01, "betas": (0.9, 0.9)}, {"lr": torch.tensor(0.02)}):
        other = Peer(tmp_path, 1, partial(torch.optim.AdamW, **settings), ALL)
        with pytest.raises(RuntimeError, match="another outer optimizer"):
            other.train()


def test_a_codec_that_makes_something_of_zeros_is_refused(tmp_path):
    """A peer that is away would vote."""
    votes = {"name": "sign", "magnitude": "one"}
    one = Peer(tmp_path, 0, sgd, {"sparsifier": "none", "value": votes, "error_feedback": False})
    with pytest.raises(ConfigError, match="this config sends zeros as other values"):
        one.train()
