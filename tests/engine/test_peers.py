"""Local updates among peers that come and go, on NumPy arrays. With a wait of 0 s, a peer alone goes on alone."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.engine.peers import StorePeers
from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.wire.standalone import ContainerError
from tests.engine.test_local import ALL, NumpyUpdates

TOP = {"sparsifier": {"name": "topk", "density": 0.25}, "value": {"name": "qsgd", "bits": 4}, "scope": "model"}
IN_TENSORS = {**TOP, "scope": "tensor", "min_elements": 9}


class Peer(NumpyUpdates):
    """A peer with parameters of 40 and 8 elements. ``done`` is all progress that it has made."""

    def __init__(self, folder, peer, config=TOP, peers=3, keep=100, **local):
        store = SharedStore(folder, peer=peer, peers=peers, wait=0.0, keep=keep)
        super().__init__(store, [40, 8], config, **{"every": 1, **local})
        self.peers = StorePeers(self, store)
        self.rng, self.done = np.random.default_rng(peer), np.zeros(48)

    def outer_step(self, fragment):
        super().outer_step(fragment)
        self.anchors = [one.copy() for one in self.anchors]

    def taken(self, number):
        return self.anchors[number].copy()

    def train(self):
        moves = [self.rng.standard_normal(one.size).astype(np.float32) for one in self.own]
        for one, move in zip(self.own, moves, strict=True):
            one += move
        self.done += np.concatenate(moves)
        self.step()

    def kept(self):
        """Progress that no anchor has: of the parameters beyond the anchor, and in the residuals."""
        residuals = self.engine.state_dict()["residuals"]
        held = [residuals.get(p.name, np.zeros(p.numel)) for p in self.parameters]
        return np.concatenate([a - b for a, b in zip(self.own, self.anchors, strict=True)]) - np.concatenate(held)

    def anchor(self):
        return np.concatenate(self.anchors)


def conserved(peers):
    """All progress is in the anchor or kept, once every message has been alone in its exchange."""
    for one in peers:
        for fragment in one.fragments:
            one.peers.catch_up(fragment)
        assert np.array_equal(one.anchor(), peers[0].anchor())
    total, kept = sum(one.done for one in peers), sum(one.kept() for one in peers)
    np.testing.assert_allclose(peers[0].anchor() + kept, total, atol=1e-4)


@pytest.mark.parametrize("config", [ALL, TOP, IN_TENSORS])
@pytest.mark.parametrize("fragments", [{}, {"every": 2, "fragments": 2}])
def test_progress_is_conserved_whoever_comes(tmp_path, config, fragments):
    peers = [Peer(tmp_path, peer, config, **fragments) for peer in range(3)]
    for turn in np.random.default_rng(5).integers(0, 3, 24):
        peers[turn].train()
    conserved(peers)
    assert sum(one.outer_steps for one in peers[0].fragments) == 24


def test_an_update_that_comes_too_late_is_not_lost(tmp_path):
    """Peer 1 goes on while peer 0 has encoded and not sent."""
    peers = [Peer(tmp_path, peer) for peer in range(3)]
    for _ in range(3):
        peers[0].train()
    send = peers[0].peers.store.send

    def late(place, message):
        peers[1].train()
        return send(place, message)

    peers[0].peers.store.send = late
    for _ in range(4):
        peers[0].train()
    conserved(peers)
    peers[0].peers.store.send = send
    peers[0].train()
    conserved(peers)
    assert np.abs(peers[0].own[0] - peers[0].anchors[0]).max() == 0, "the last exchange took all"


def test_a_restart_from_an_older_state_does_not_send_its_progress_twice(tmp_path):
    """Peer 0 is killed after messages that its last state does not know, one of them not decided."""
    peers = [Peer(tmp_path, peer) for peer in range(2)]
    for _ in range(3):
        peers[0].train(), peers[1].train()
    state, own = peers[0].state_dict(), [one.copy() for one in peers[0].own]
    peers[0].train()

    def dies(*_):
        raise KeyboardInterrupt

    peers[0].peers.store.agree = dies
    before = peers[0].kept()
    with pytest.raises(KeyboardInterrupt):
        peers[0].train()
    moved = peers[0].done - before
    assert np.isfinite(moved).all()
    peers[1].train()  # it decides: the message of the killed process counts
    again = Peer(tmp_path, 0)
    again.own = [one.copy() for one in own]
    again.load_state_dict(state)
    again.peers.catch_up(again.fragments[0])
    assert np.array_equal(again.anchor(), peers[1].anchor())
    assert np.abs(again.kept()).max() == 0, "all that the state had may have been sent"
    again.train()
    peers[1].train()
    peers[1].peers.catch_up(peers[1].fragments[0]), again.peers.catch_up(again.fragments[0])
    assert np.array_equal(again.anchor(), peers[1].anchor())


def test_an_error_while_a_peer_waits_leaves_its_update_in_its_parameters_alone(tmp_path):
    peers = [Peer(tmp_path, peer) for peer in range(2)]
    for _ in range(3):
        peers[0].train(), peers[1].train()
    send = peers[0].peers.store.send

    def fails(place, message):
        raise OSError("the disk is full")

    peers[0].peers.store.send = fails
    with pytest.raises(OSError, match="disk is full"):
        peers[0].train()
    peers[0].peers.store.send = send
    conserved(peers)
    peers[0].train()
    conserved(peers)


def test_a_peer_that_is_refused_can_come_again(tmp_path):
    first, other = Peer(tmp_path, 0), Peer(tmp_path, 2, {**TOP, "seed": 9})

    def dies(*_):
        raise KeyboardInterrupt

    other.peers.store.agree = dies
    with pytest.raises(KeyboardInterrupt):  # it has sent, and nobody has decided
        other.train()
    first.train()
    with pytest.raises(MismatchError, match="go on without peer 2: 'its config is not that of peer 0'"):
        other.peers.store.decided("0/00000000", mine=True)
    with pytest.raises(MismatchError, match="this peer, 2, has another config than peer 0"):
        other.train()
    mended = Peer(tmp_path, 2)
    mended.train()
    conserved([first, mended])


def test_the_mean_is_that_of_the_members(tmp_path):
    peers = [Peer(tmp_path, peer, ALL) for peer in range(3)]
    peers[0].train()  # alone
    conserved(peers)
    before = peers[0].anchor()
    told = peers[1].peers.store

    def dies(*_):
        raise KeyboardInterrupt

    decide, told.agree = told.agree, dies
    with pytest.raises(KeyboardInterrupt):  # it has sent
        peers[1].train()
    told.agree = decide
    peers[2].train()
    moved = peers[2].anchor() - before
    np.testing.assert_allclose(moved, (peers[1].done + peers[2].done) / 2, atol=1e-5)


def test_a_peer_that_was_away_for_too_long_is_told(tmp_path):
    first, away = Peer(tmp_path, 0, keep=2), Peer(tmp_path, 1)
    for _ in range(6):
        first.train()
    with pytest.raises(MismatchError, match="5 exchanges ahead of peer 1, and have deleted the files"):
        away.train()


def test_a_peer_with_nan_goes_back_to_the_anchor_alone(tmp_path):
    peers = [Peer(tmp_path, peer) for peer in range(3)]
    peers[0].train()
    peers[1].own[0][3] = np.nan
    peers[1].train()
    assert np.array_equal(np.concatenate(peers[1].own), peers[0].anchor()) and peers[1].renewed == [0, 1]
    assert peers[0].fragments[0].outer_steps == 1
    peers[1].train()
    assert peers[1].fragments[0].outer_steps == 2


@pytest.mark.parametrize("change", [-4, 4, 160, -32])
def test_parts_of_another_length_are_an_error(change, tmp_path):
    """Of what is sent as it is: the small tensor."""
    peers = [Peer(tmp_path, peer, IN_TENSORS) for peer in range(2)]
    send = peers[1].peers.store.send

    def altered(place, message):
        parts = {
            name: (part[:change] if change < 0 else part + bytes(change)) if len(part) == 32 else part
            for name, part in message.parts.items()
        }
        assert parts != message.parts
        return send(place, message._replace(parts=parts))

    peers[1].peers.store.send = altered
    for peer in (1, 0):
        with pytest.raises(ContainerError, match=f"message of peer 1 has {32 + change} bytes of .*, which has 32"):
            peers[peer].train()
    assert not peers[0].anchor().any()
