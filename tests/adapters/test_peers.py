"""LocalSGD and PeerOptimizer through a shared folder, in jobs that nothing connects: one is killed and comes back, one
is slow, one comes late."""

from __future__ import annotations

import copy
import json
import time
from itertools import product

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hvd_deepreduce import ConfigError
from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch import LocalSGD
from hvd_deepreduce.torch.checkpoint import checkpointed
from tests.adapters import forked, peers_job
from tests.adapters.common import LOSSY
from tests.selection import thorough


class Peer(forked.Job):
    """``lines`` are those that it has written."""

    def __init__(self, ranks, folder, peer, *rest):
        super().__init__(peers_job.main, folder / f"log{peer}.{time.monotonic_ns()}", folder, peer, *rest, ranks=ranks)

    @property
    def lines(self):
        text = self.path.read_text() if self.path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("[")]

    def reach(self, exchanges):
        """Waits until it has done so many."""
        end = time.monotonic() + 60
        while not self.lines or self.lines[-1][0] < exchanges:
            assert not self.failed() and time.monotonic() < end, self.path.read_text()
            time.sleep(0.05)
        return self


@pytest.mark.launch
@thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [1, 2])
def test_peers_that_are_killed_slow_or_late_do_not_stop_the_others(ranks, tmp_path):
    of_peers = ((0, 60, 0.05), (1, 12, 0.3), (2, 60, 0.05))
    every = [Peer(ranks, tmp_path, *one) for one in of_peers]
    steady, slow, killed = every
    try:
        killed.reach(4)
        killed.kill()
        steady.reach(8)
        back = Peer(ranks, tmp_path, 2, 20, 0.05, tmp_path / "state2")
        late = Peer(ranks, tmp_path, 3, 10, 0.05, tmp_path / "state0")
        every += [back, late]
        for one in (steady, back, late, slow):
            one.ended()
    finally:
        for one in every:
            one.kill()
    seen = {}
    for one in every:
        for done, anchors, _ in one.lines:
            seen.setdefault(done, set()).add(anchors)
    assert all(len(anchors) == 1 for anchors in seen.values()), "peers have other anchors after the same outer step"
    assert steady.lines[-1][0] >= 30 and back.lines[0][0] >= killed.lines[-1][0]
    files = sorted((tmp_path / "job").glob("0/*/commit"))
    commits = [set(map(int, json.loads(path.read_text())["members"])) for path in files]
    assert any(2 in one for one in commits[8:]) and {1, 3} <= {peer for one in commits for peer in one}
    losses = [loss for *_, loss in steady.lines]
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peers_in_turn(dtype, tmp_path):
    """Each goes on alone; then one begins with the state of another."""
    models, optimizers = [], []
    for peer in range(3):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)).to(dtype))
        store = SharedStore(tmp_path, peer=peer, peers=3, wait=0.0)
        inner = torch.optim.AdamW(models[-1].parameters(), lr=0.01)
        optimizers.append(LocalSGD(inner, models[-1], {**LOSSY, "scope": "model"}, every=2, store=store))

    def train(peer, steps):
        for _ in range(steps):
            optimizers[peer].zero_grad()
            models[peer](torch.randn(8, 9, dtype=dtype)).float().square().mean().backward()
            optimizers[peer].step()
        return optimizers[peer]

    train(0, 4), train(1, 4), train(0, 3)
    state = copy.deepcopy(optimizers[0].state_dict())
    assert any(one.any() for one in state["local_sgd"]["compression"]["residuals"].values())
    optimizers[2].load_state_dict(state)
    for own, anchor in zip(models[2].parameters(), state["local_sgd"]["anchors"].values(), strict=True):
        assert torch.equal(own, anchor.to(dtype)), "its parameters are those of the anchor, and not of the other peer"
    assert not optimizers[2].state_dict()["local_sgd"]["compression"]["residuals"]
    train(2, 2), train(0, 2), train(1, 2)
    assert optimizers[1]._updates.fragments[0].outer_steps == 8
    sent = optimizers[0].stats()["total"]
    assert 0 < sent["bytes_sent"] < sent["dense_bytes"]


@pytest.mark.parametrize(("of", "here"), [(3, 3), (1, 3), (3, 2)])
def test_a_checkpoint_of_another_peer_brings_its_anchor_alone(of, here, tmp_path):
    """Saved within a period: what the other peer has done since then is its own to send."""

    def made(peer, peers, folder):
        torch.manual_seed(0)
        model = torch.nn.Linear(9, 3)
        place = SharedStore(tmp_path / folder, peer=peer, peers=peers, wait=0.0)
        return model, LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, LOSSY, every=2, store=place)

    model, optimizer = made(0, of, "job")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 9)).square().mean().backward()
        optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": checkpointed(optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    anchors = optimizer.state_dict()["local_sgd"]["anchors"]
    for peer in range(here):
        other, wrapped = made(peer, here, f"other{peer}")
        state = {"model": other.state_dict(), "optimizer": checkpointed(wrapped, tmp_path / "saved")}
        dcp.load(state, checkpoint_id=tmp_path / "saved")
        for name, one in other.named_parameters():
            assert torch.equal(one, model.state_dict()[name] if peer == 0 else anchors[name])
        assert bool(wrapped.state_dict()["local_sgd"]["compression"]["residuals"]) is (peer == 0)


def test_two_processes_with_one_peer_number_are_an_error(tmp_path):
    """Once the other one has sent where this one would have."""
    optimizers = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        store = SharedStore(tmp_path, peer=0, peers=2, wait=0.0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizers.append((model, LocalSGD(inner, model, {**LOSSY, "scope": "model"}, every=1, store=store)))

    def train(which):
        model, optimizer = optimizers[which]
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    train(0), train(1), train(1)
    with pytest.raises(MismatchError, match="another process sends as peer 0 now: give each process .* a peer number"):
        train(0)


def test_weights_that_are_loaded_before_the_first_step(tmp_path):
    """After something has read the state, as Accelerate does. The step is in a function that torch.compile traces."""
    flats = []
    for reads, compiled in product((False, True), (False, True)):
        model, store = torch.nn.Linear(4, 4), SharedStore(tmp_path / str(len(flats)), peer=0, peers=1)
        optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, LOSSY, every=2, store=store)
        if reads:
            optimizer.load_state_dict(optimizer.state_dict())
        torch.manual_seed(1)
        model.reset_parameters()
        step = torch.compile(lambda of: of.step(), backend="eager") if compiled else LocalSGD.step
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            step(optimizer)
        optimizer.sync()
        flats.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    assert all(torch.equal(flats[0], one) for one in flats[1:])


def test_settings_that_peers_cannot_have(tmp_path):
    model, store = torch.nn.Linear(4, 4), SharedStore(tmp_path, peer=0, peers=2)

    def made(**options):
        return LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, "adamw_safe", **{"store": store, **options})

    for options, message in (
        ({"every": 4, "delay": 2}, "delay is 2, and with a store it can only be 0"),
        ({"exchange": "reduce_scatter"}, "exchange is 'reduce_scatter', and with a store it can only be 'allgather'"),
        ({"times": lambda rank, clock: True}, "times is"),
    ):
        with pytest.raises(ConfigError, match=message):
            made(**options)
    with pytest.raises(TypeError, match="store is str; it must be a SharedStore"):
        made(store=str(tmp_path))
    with pytest.raises(ValueError, match="give one of them"):
        made(process_set=3)
