"""What LocalSGD must do while exchanges with a delay are in flight: cases of test_local_sgd.py (see
tests/case_runner.py).

torchrun --standalone --nproc-per-node 3 tests/adapters/local_delay_cases.py [CASE ...]
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.horovod import HANDSHAKE_VARIABLE
from hvd_deepreduce.torch import LocalSGD
from hvd_deepreduce.wire.standalone import ContainerError
from tests.adapters.common import LOSSY
from tests.case_runner import case, run_cases
from tests.damaged import damage, decoding_fails, repair

BUCKETS = {**LOSSY, "scope": "bucket", "bucket_bytes": 3000}
SMALL = {**LOSSY, "scope": "tensor", "min_elements": 100}  # and the biases as they are
LONG = {"every": 6, "fragments": 3, "delay": 4}
"""Three exchanges are in flight, each in another phase."""
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class Job:
    """A model that is trained with AdamW and LocalSGD. With ``waits``, each exchange begins as one without a delay."""

    def __init__(self, config=BUCKETS, waits=False, seed=0, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 4))
        inner = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.optimizer = LocalSGD(inner, self.model, config, process_group=dist.group.WORLD, **options)
        self.updates = self.optimizer._updates
        if waits:
            self.updates.goes_ahead = lambda: False

    def run(self, *steps):
        for step in range(*steps):
            x = torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), x[:, :4].argmax(1)).backward()
            self.optimizer.step()
        return self

    def flat(self):
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def saved(self):
        return copy.deepcopy((self.optimizer.state_dict(), self.model.state_dict()))

    def load(self, saved):
        self.model.load_state_dict(saved[1])
        self.optimizer.load_state_dict(saved[0])
        return self

    def check_same(self):
        self.optimizer.sync()
        everywhere = [torch.empty_like(self.flat()) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, self.flat())
        assert all(torch.equal(one, everywhere[0]) for one in everywhere)

    def phases(self):
        """Of the exchanges in flight."""
        found = [one for one in self.updates.fragments if one.ends is not None]
        return ["voted" if one.proposal else "told" if one.held else "sent" for one in found]


@case
def no_step_waits_for_a_rank_that_is_behind():
    """A rank begins its step when the one before has ended that: nothing that the last rank does in its step can be
    waited for in the same one."""
    store, (rank, size) = dist.distributed_c10d._get_default_store(), (dist.get_rank(), dist.get_world_size())
    for name, config, options in (
        ("buckets", BUCKETS, {"every": 5, "delay": 3}),
        ("in turn", BUCKETS, LONG),
        ("several steps", BUCKETS, {"every": 7, "fragments": 2, "delay": 6}),
        ("at the same time", SMALL, {"every": 6, "fragments": 2, "delay": 3}),
        ("no buckets", "adamw_small", {"every": 4, "delay": 3, "mix": 0.5}),
    ):
        job, twin = Job(config, **options).run(12), Job(config, waits=True, **options).run(12)
        if name == "at the same time":  # all fragments are due together after it
            job.optimizer.sync()
            twin.optimizer.sync()
        begun = job.optimizer.stats()["total"]["steps"]
        for step in range(12, 26):
            turn = (step - 12) * size + rank
            if turn:
                store.wait([f"{name} {turn - 1}"], timedelta(seconds=60))
            job.run(step, step + 1)
            store.set(f"{name} {turn}", "done")
        assert job.optimizer.stats()["total"]["steps"] >= begun + 2
        assert torch.equal(job.flat(), twin.run(12, 26).flat())
        job.check_same()


@case
def parameters_are_those_of_exchanges_that_wait():
    """After each step, bit for bit; also when states are saved, and periods end early."""
    for config, options in (
        (BUCKETS, {"every": 4, "delay": 1}), (BUCKETS, {"every": 4, "delay": 2, "decay": 0.9}), (BUCKETS, LONG),
        (BUCKETS, {"every": 9, "fragments": 3, "delay": 8}),
        (SMALL, {"every": 5, "fragments": 2, "delay": 3, "mix": 0.5, "outer": NESTEROV}),
        ({**LOSSY, "scope": "model"}, {"every": lambda clock: 4 if clock < 8 else 7, "delay": 3, "fragments": 2}),
        ({**BUCKETS, "exchange": "reduce_scatter"}, {"every": 5, "delay": 4}),
        ({**LOSSY, "scope": "bucket", "hierarchical": dist.get_world_size()}, {"every": 3, "delay": 2}),
    ):  # fmt: skip
        job, twin = Job(config, **options), Job(config, waits=True, **options)
        for step in range(19):
            assert torch.equal(job.run(step, step + 1).flat(), twin.run(step, step + 1).flat()), (options, step)
            if step in (5, 10):
                job.saved()
            if step == 13:
                job.check_same()
                twin.check_same()
        job.check_same()
        twin.check_same()
        ours, theirs = (one.optimizer.stats()["total"] for one in (job, twin))
        assert all(ours[key] == theirs[key] for key in ("steps", "dense_bytes")), (ours, theirs)


@case
def a_state_of_each_phase():
    unbroken, seen = Job(**LONG).run(18).flat(), set()
    for clock in range(6, 12):
        job = Job(**LONG).run(clock)
        seen |= set(job.phases())
        saved = job.saved()
        assert set(job.phases()) == {"sent"}
        assert torch.equal(job.run(clock, 18).flat(), unbroken)
        assert torch.equal(Job(seed=7, **LONG).load(saved).run(clock, 18).flat(), unbroken)
    assert seen == {"voted", "told", "sent"}


@case
def a_state_that_one_rank_saves_alone():
    """With fragments it would let exchanges go on in another order. It says so, and the job goes on."""
    for options, alone in ((LONG, False), ({"every": 8, "delay": 4}, True)):
        unbroken, job = Job(**options).run(18).flat(), Job(**options).run(9)
        with pytest.MonkeyPatch().context() as patch:
            patch.setenv(HANDSHAKE_VARIABLE, "1")
            said = r"waited 1 s at state_dict\(\) for ranks? .*call it on every rank after the same"
            with nullcontext() if alone or dist.get_rank() else pytest.raises(TimeoutError, match=said):
                if dist.get_rank() == 0:
                    job.saved()
        assert torch.equal(job.run(9, 18).flat(), unbroken)


@case
def nan_is_heard_of_a_step_later():
    for clock in (6, 8):
        job = Job(every=8, delay=3).run(clock)
        if dist.get_rank() == 1:
            next(job.model.parameters()).detach().fill_(torch.nan)
        job.run(clock, 8)
        anchors = [one.clone() for one in job.updates.anchors]
        for step in range(8, 18):
            job.run(step, step + 1)
            if step == 8 and clock == 6:
                for own, anchor in zip(job.model.parameters(), anchors, strict=True):
                    assert torch.equal(own.detach(), anchor)
                assert job.phases() == []
        job.check_same()
        assert job.flat().isfinite().all()


@case
def fragments_in_flight_recover_from_nan():
    """Those that have become NaN since their exchanges began end with the progress that is made afterwards."""
    options = {"every": 12, "fragments": 2, "delay": 11}
    job = Job(**options).run(12)  # the first fragment's exchange began at 6, and that of the other one begins now
    if dist.get_rank() == 1:
        for one in job.model.parameters():
            one.detach().fill_(torch.nan)
    job.run(12, 24)
    assert job.flat().isfinite().all()
    job.check_same()


def broken(*_, **__):
    raise ValueError("no ink")


@case
def an_error_of_one_rank_is_one_of_all():
    """It is raised on all ranks at one place of their schedules; then all load a state, and go on."""
    for options in (LONG, {"every": 6, "delay": 3}, {"every": 6, "delay": 1}):
        expected = Job(**options).run(24).flat()
        for failing, said in (
            ("update", "an error has left 1 rank"), ("encode", "this step failed on rank 1: 'ValueError: no ink'"),
            ("decode", "an error has left 1 rank"),
        ):  # fmt: skip
            job, mine = Job(**options).run(10), dist.get_rank() == 1
            saved = job.saved()
            with pytest.MonkeyPatch.context() as patch, decoding_fails(mine and failing == "decode"):
                if mine and failing != "decode":
                    patch.setattr(job.updates if failing == "update" else job.updates.engine.pipeline, failing, broken)
                with pytest.raises((ValueError, RuntimeError, MemoryError), match="no ink|no room" if mine else said):
                    job.run(10, 24)
            assert job.phases() == []
            dist.barrier()
            job.load(saved)
            assert torch.equal(job.run(10, 24).flat(), expected), (options, failing)
            job.check_same()
            job.optimizer.close()


@case
def ranks_stay_in_step_after_an_error():
    """Where a rank fails, further exchanges of that call begin, or end: it takes part in them. So all ranks may go on
    after their errors, which come again, and load a state later."""
    mine = dist.get_rank() == 1
    for options, clock, sync in (
        ({"every": 6, "fragments": 2, "delay": 5}, 10, True), ({"every": 3, "fragments": 3, "delay": 2}, 8, False),
        ({"every": 4, "fragments": 2, "delay": 2}, 5, False),
    ):  # fmt: skip
        expected, job = Job(**options).run(clock + 8).flat(), Job(**options).run(clock)
        saved, raised = job.saved(), []
        for step in range(clock, clock + 9):
            with decoding_fails(mine and not raised and (step > clock or sync)):
                try:
                    if step == clock and sync:
                        job.optimizer.sync()
                    job.run(step, step + 1)
                except (MemoryError, MismatchError, RuntimeError) as error:
                    raised.append(error)
        assert isinstance(raised[0], MemoryError) == mine
        assert all("no room" in str(one) or "an error has left 1 rank" in str(one) for one in raised), raised
        with pytest.raises(MismatchError):
            job.optimizer.sync()
        assert torch.equal(job.load(saved).run(clock, clock + 8).flat(), expected), options
        job.check_same()
        job.optimizer.close()


@case
def a_corrupt_container_is_an_error_of_all():
    """They get it at the same place: nothing is in flight afterwards, and a state can be loaded."""
    job, expected = Job(**LONG).run(11), Job(**LONG).run(20).flat()
    saved, pipeline = job.saved(), job.updates.engine.pipeline
    if dist.get_rank() == 1:
        damage(pipeline)
    with pytest.raises(ContainerError, match="rank 1"):
        for step in range(11, 20):
            job.run(step, step + 1)
    assert step == 15 and job.phases() == []
    if dist.get_rank() == 1:
        repair(pipeline)
    assert torch.equal(job.load(saved).run(11, 20).flat(), expected)
    job.check_same()


@case
def a_state_is_not_saved_after_an_error():
    """Of a rank that could not decode, whether the others have heard of it already or not."""
    mine = dist.get_rank() == 1
    for options, clock, heard in ((LONG, 12, True), ({"every": 6, "fragments": 2, "delay": 5}, 14, False)):
        job = Job(**options).run(clock - 1)
        with decoding_fails(mine):
            job.run(clock - 1, clock)
        assert job.phases() == (["sent", "voted"] if heard else ["told"])
        fails = pytest.raises(MemoryError if mine else MismatchError, match="no room|an error has left 1 rank")
        with fails if mine or heard else nullcontext():
            job.saved()
        with pytest.raises(MismatchError if heard else (MemoryError, MismatchError)):
            job.run(clock, clock + 8)
        job.optimizer.close()


@case
def a_layer_that_is_trained_again_while_an_exchange_is_in_flight():
    """It keeps what it has done since then. The exchanges begin after the steps 4, 8 and 12, and end two later."""
    job = Job(every=4, delay=2)
    layer = job.model[2]
    for step in range(14):
        layer.requires_grad_(not 4 <= step < 12)
        job.run(step, step + 1)
    anchor = job.optimizer.state_dict()["local_sgd"]["anchors"]["2.weight"]
    assert (layer.weight - anchor).abs().max() > 1e-3
    job.check_same()


@case
def states_of_another_number_of_ranks_keep_the_mean_of_the_residuals():
    job = Job(every=2).run(6)
    job.optimizer.sync()
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, job.optimizer.state_dict())
    held = [state["local_sgd"]["compression"]["residuals"]["2.weight"] for state in states]
    group = [dist.new_group([rank]) for rank in range(len(states))][dist.get_rank()]
    model = copy.deepcopy(job.model)
    alone = LocalSGD(torch.optim.AdamW(model.parameters(), 0.01), model, BUCKETS, process_group=group, every=2)
    alone.load_state_dict(states, reshard=True)
    kept = alone.state_dict()["local_sgd"]["compression"]["residuals"]["2.weight"]
    assert kept.any()
    torch.testing.assert_close(kept, sum(held) / len(held))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run_cases(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
