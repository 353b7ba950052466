"""Replicas under torchft: one is killed, the others go on, and it comes back with their state."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn
from torchft.coordination import LighthouseServer

from hvd_deepreduce.config import ConfigError
from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.exchange.messages import Message
from hvd_deepreduce.torch import LocalSGD, PeerOptimizer
from hvd_deepreduce.torch.rendezvous import ranks_of
from hvd_deepreduce.torch.torchft import ManagedQuorum
from tests.adapters import forked, torchft_job
from tests.selection import thorough


class Replicas:
    """Of a job, each of ``ranks`` ranks."""

    def __init__(self, ranks, folder):
        self.lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=2000
        )
        self.address = f"http://localhost:{self.lighthouse.address().rpartition(':')[2]}"
        self.ranks, self.folder, self.running = ranks, folder, []

    def start(self, peer):
        one = forked.Job(
            torchft_job.main, self.folder / f"output{peer}", self.folder, peer, ranks=self.ranks,
            TORCHFT_LIGHTHOUSE=self.address,
        )  # fmt: skip
        self.running.append(one)
        return one

    def lines(self, peer="*"):
        found = []
        for path in sorted(self.folder.glob(f"log{peer}.*")):
            text = path.read_text()
            found += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return found

    def wait(self, what, peer="*"):
        """Until a line of a replica is so."""
        end = time.monotonic() + 90
        while not any(map(what, self.lines(peer))):
            assert time.monotonic() < end, [path.read_text()[-2000:] for path in self.folder.glob("output*")]
            time.sleep(0.1)


@pytest.mark.launch
@thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replica_dies_and_comes_back(ranks, tmp_path):
    job = Replicas(ranks, tmp_path)
    try:
        *_, third = (job.start(peer) for peer in range(3))
        job.wait(lambda line: line["exchanges"] >= 4 and line["there"] == 3, 2)
        third.kill()
        died = max(line["exchanges"] for line in job.lines(2))
        job.wait(lambda line: line["exchanges"] >= died + 4 and line["there"] == 2, 0)
        alone = max(line["exchanges"] for line in job.lines(0))
        job.start(2)
        job.wait(lambda line: line["exchanges"] > alone and line["there"] == 3, 2)
        last = max(line["step"] for line in job.lines()) + 4
        (tmp_path / "end").write_text(str(last))
        for one in job.running:
            if one is not third:
                one.ended()
    finally:
        for one in job.running:
            one.kill()
        job.lighthouse.shutdown()
    seen, ended = {}, 0
    for line in job.lines():
        ended += line["step"] == last
        if line["exchanges"]:  # before, each has parameters of its own
            seen.setdefault((line["exchanges"], line["rank"]), set()).add(line["shared"])
    assert all(len(shared) == 1 for shared in seen.values()), "replicas differ after the same exchange"
    assert ended >= 3 * ranks and len(seen) >= ranks * (alone + 4)
    losses = [line["loss"] for line in job.lines(0)]
    assert sum(losses[-5:]) < sum(losses[:5])


class Group:
    """As a process group of torchft that has two ranks, of which the other one sends ``other``."""

    def __init__(self, other):
        self.other = other

    def size(self):
        return 2

    def allgather(self, found, given, options):
        if given[0].dtype == torch.int64:
            found[0][0].copy_(given[0])
            told = self.other[2] if len(self.other) > 2 else len(self.other[1])
            found[0][1].copy_(torch.tensor([self.other[0], told]))
        else:
            found[0][0].copy_(given[0])
            data = torch.tensor(list(self.other[1]), dtype=torch.uint8)
            found[0][1][: data.numel()] = data
        return self

    def wait(self):
        return True


class Manager:
    """As one of torchft: every quorum has both ranks; a step counts unless there was an error."""

    def __init__(self):
        self.error, self.commits, self.there, self.commits_at_all = None, [], True, True

    def start_quorum(self):
        self.error = None

    def wait_quorum(self):
        pass

    def errored(self):
        return self.error

    def report_error(self, error):
        self.error = error

    def is_participating(self):
        return self.there

    def should_commit(self):
        self.commits.append(self.error is None and self.commits_at_all)
        return self.commits[-1]


def quorum_of(other, peer=0):
    return ManagedQuorum(Manager(), Group(other), peer=peer, peers=2)


OF_EIGHT = Message({"number of peers": "8"}, {}).pack()
OTHERS = [(1, b"no message"), (1, b""), (7, b"x"), (1, b"", 1 << 40), (1, b"", -1), (5, OF_EIGHT)]


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("other", OTHERS, ids=range(len(OTHERS)))
def test_what_another_replica_sends_is_not_trusted(other, commits):
    """It does not count. If the step does not count here, the gradient stays in the residual."""
    torch.manual_seed(0)
    model, store = nn.Linear(6, 3), quorum_of(other)
    store.manager.commits_at_all = commits
    config = {"sparsifier": {"name": "topk", "density": 0.5}, "value": "raw", "scope": "model"}
    optimizer = PeerOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, config, store=store)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer.zero_grad()
    model(torch.ones(2, 6)).square().sum().backward()
    gradient = nn.utils.parameters_to_vector(one.grad for one in model.parameters()).clone()
    optimizer.step()
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    held = optimizer.state_dict()["local_sgd"]["compression"]["residuals"]
    held = torch.cat([held[f"{name}"].reshape(-1) for name, _ in model.named_parameters()])
    (committed,) = store.manager.commits
    assert committed is commits
    torch.testing.assert_close((before - after) / 0.1 + held, gradient, rtol=1e-5, atol=1e-6)
    assert torch.equal(before, after) is not committed


def test_two_replicas_with_one_number():
    model, store = nn.Linear(6, 3), quorum_of((0, b""))
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), 0.1), model, "adamw_safe", every=1, store=store)
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(MismatchError, match="go on without peer 0: 'two replicas have this number'"):
        optimizer.step()
    assert store.manager.commits == [False] and not store._begun, "the other ranks of this replica are told"


def test_fragments_are_refused():
    """A state that a replica takes has all of them."""
    model = nn.Linear(6, 3)
    with pytest.raises(ConfigError, match="fragments is 2, and under torchft it can only be 1"):
        LocalSGD(
            torch.optim.SGD(model.parameters(), 0.1), model, "adamw_safe", every=2, fragments=2,
            store=quorum_of((1, b"")),
        )  # fmt: skip


def test_what_others_have_counted_and_this_replica_has_taken_back_is_not_sent_again():
    """``should_commit`` may differ. The other replica's state has this one's gradient then."""
    model, store = nn.Linear(6, 3), quorum_of((1, b""))
    config = {"sparsifier": {"name": "topk", "density": 0.5}, "value": "raw", "scope": "model"}

    def optimizer_of(model, store):
        return PeerOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, config, store=store)

    here, there = optimizer_of(model, store), optimizer_of(nn.Linear(6, 3), quorum_of((0, b""), peer=1))
    for commits, healed, kept in ((False, 0, True), (False, 1, False)):
        here.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        store.manager.commits_at_all = commits
        here.step()
        assert here.state_dict()["local_sgd"]["compression"]["residuals"]
        state = there.state_dict()
        state["local_sgd"]["outer_steps"] = [healed]
        here.load_state_dict(state)
        held = here.state_dict()["local_sgd"]["compression"]["residuals"]
        assert bool(held) is kept


def test_where_its_process_groups_do_not_fit_the_error_says_what_does():
    managed = type("ManagedProcessGroup", (), {"__module__": "torchft.process_group"})()
    with pytest.raises(TypeError, match="torchft's ManagedProcessGroup, whose ranks come and go.*ManagedQuorum"):
        ranks_of(managed)
