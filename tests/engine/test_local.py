"""Local updates on NumPy arrays: the schedule of the exchanges, and what all adapters have in common."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_deepreduce.engine import MismatchError, Parameter, step_check
from hvd_deepreduce.engine.local_exchanges import LocalExchanges
from hvd_deepreduce.engine.local_options import options
from tests.engine.numpy_adapter import NumpyTensors, run_ranks

ALL = {"sparsifier": {"name": "topk", "density": 1.0}, "index": "bitmap", "value": "raw", "scope": "model"}
SMALL = {**ALL, "scope": "tensor", "min_elements": 9}


class NumpyUpdates(LocalExchanges):
    """Plain averaging. ``own`` and ``anchors`` are vectors of the given sizes."""

    advice = "begin with the same parameters"
    keys = ()
    ahead = False

    def __init__(self, collectives, sizes, config=ALL, schedule=None, times=None, start=0.0, **local):
        parameters = [Parameter(f"p{number}", number, (size,), "float32") for number, size in enumerate(sizes)]
        self.own = [np.full(size, start, np.float32) for size in sizes]
        self.exchanged = []
        self.renewed = []
        given = options(config, {}, times=times, every=schedule or local.pop("every", None), **local)
        super().__init__(given, collectives, parameters, [4 * size for size in sizes], NumpyTensors())
        self.begin()

    def new_anchors(self):
        return [one.copy() for one in self.own], None

    def outer_state(self):
        return {}

    def restoring(self, state):
        def restore():
            self.anchors = [state["anchors"][parameter.name].copy() for parameter in self.parameters]

        return restore

    def update(self, number):
        return self.anchors[number] - self.own[number]

    def nothing(self, number):
        return np.zeros_like(self.anchors[number])

    def finite(self, updates):
        return all(np.isfinite(one).all() for one in updates)

    def goes_ahead(self):
        return self.ahead

    def check_step(self, vote, name, tally):
        assert vote.size == step_check.WORDS
        tally(self.collectives.wait_votes(self.start_vote(vote, name)))

    def outer_step(self, fragment):
        self.exchanged.append((self.clock, list(fragment.numbers)))
        for number, mean in fragment.updates.items():
            self.anchors[number] -= mean

    def copy(self, number):
        return self.own[number].copy()

    def follow(self, number, start, keeps):
        anchor = self.anchors[number]
        self.own[number] = anchor.copy() if start is None else self.own[number] + anchor - start

    def take_back(self, number, start, unsent):
        self.own[number] = self.own[number] + unsent
        return start + unsent

    def mean_of(self, number, saved):
        return saved.copy()

    copy_of = mean_of

    def renew(self, numbers):
        self.renewed += numbers

    def values(self, anchor):
        return anchor.copy()

    def about_outer(self):
        return "plain"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 8))
def test_fragments_are_neighbours_of_about_equal_size(sizes, count):
    (updates,) = run_ranks(1, lambda collectives: NumpyUpdates(collectives, sizes, fragments=count))
    parts = [fragment.numbers for fragment in updates.fragments]
    assert sum(parts, []) == list(range(len(sizes))) and len(parts) == min(count, len(sizes)) and all(parts)
    elements = [sum(sizes[number] for number in part) for part in parts]
    assert max(elements) <= sum(sizes) / len(parts) + 2 * max(sizes)


@pytest.mark.parametrize(
    ("schedule", "local", "expected"),
    [
        (None, {"every": 3}, [(3, [0, 1]), (6, [0, 1])]),
        (None, {"every": 4, "fragments": 2}, [(2, [0]), (4, [1]), (6, [0])]),
        (None, {"every": 4, "delay": 1}, [(5, [0, 1])]),
        (lambda clock: 1 + clock, {}, [(1, [0, 1]), (3, [0, 1])]),
    ],
)
def test_when_exchanges_end(schedule, local, expected):
    def work(collectives):
        updates = NumpyUpdates(collectives, [5, 5], schedule=schedule, **local)
        for step in range(6):
            for one in updates.own:
                one += 1 + collectives.rank() + step
            updates.step()
        seen = list(updates.exchanged)
        updates.sync()
        return seen, updates.own, updates.engine.stats.total.dense_bytes

    (seen, own, dense), (_, other, _) = run_ranks(2, work)
    assert seen == expected
    # What a rank adds does not depend on its parameters: the mean is that of all progress, whenever it was exchanged.
    for one, two in zip(own, other, strict=True):
        assert np.array_equal(one, two) and np.allclose(one, sum(1.5 + step for step in range(6)))
    assert dense == 6 * 40


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 8), st.sets(st.integers(1, 20), max_size=2),
    st.sets(st.integers(1, 20), max_size=3), st.booleans(),
)
def test_phases_change_no_number(every, fragments, delay, syncs, saves, grows):
    """Of exchanges that begin, and end, at any time; the oracle waits for the votes at once."""
    every = max(every, delay + 1, fragments)
    period = {"schedule": lambda clock: every + clock % 3} if grows else {"every": every}
    local = {"fragments": fragments, "delay": delay, "decay": 0.5}
    config = {**SMALL, "sparsifier": {"name": "topk", "density": 0.4}, "local": {"every": every, **local}}

    def work(collectives, ahead):
        updates = NumpyUpdates(collectives, [15, 3, 14, 16], config, **period)
        updates.ahead, seen = ahead, []
        rng = np.random.default_rng(collectives.rank())
        for clock in range(1, 22):
            for one in updates.own:
                one += rng.standard_normal(one.size).astype(np.float32)
            updates.step()
            seen.append(np.concatenate(updates.own))
            if clock in saves:
                updates.state_dict()
            if clock in syncs:
                updates.sync()
        total = updates.engine.stats.total
        return np.stack(seen), updates.exchanged, total.steps

    jobs = (run_ranks(3, lambda collectives, ahead=ahead: work(collectives, ahead)) for ahead in (True, False))
    for (seen, *counted), (expected, *of_oracle) in zip(*jobs, strict=True):
        assert np.array_equal(seen, expected) and counted == of_oracle


def test_ranks_that_part_with_exchanges_in_flight():
    def work(collectives):
        last = collectives.rank() == 2
        updates = NumpyUpdates(collectives, [4, 4], every=4, fragments=2, delay=3)
        updates.ahead = True
        with pytest.raises(MismatchError, match="clock is 6 on ranks 0, 1, 5 on rank 2; call is step on") as error:
            for _ in range(5 if last else 12):
                updates.step()
            updates.sync()
        assert all(one.ends is None for one in updates.fragments)
        return str(error.value)

    assert len(set(run_ranks(3, work))) == 1


def test_several_steps_at_once_and_ranks_that_stay_away():
    def work(collectives):
        updates = NumpyUpdates(collectives, [4], times=lambda rank, clock: rank == 0 or clock % 2 == 0)
        seen = []
        for _ in range(2):
            updates.own[0] += 1 + collectives.rank()
            updates.step()
            seen.append((updates.own[0][0], updates.anchors[0][0]))
        at_once = NumpyUpdates(collectives, [4], schedule=lambda clock: 3)
        at_once.step(4)
        return seen, at_once.exchanged, at_once.fragments[0].due

    first, second = run_ranks(2, work)
    # Rank 1 is not there at first: only the anchor changes on it.
    assert first[0][0] == (0.5, 0.5) and second[0][0] == (2.0, 0.5)
    assert first[1] == second[1] == [(4, [0])] and first[2] == 7


def test_nan_on_one_rank_discards_the_period_on_all():
    def work(collectives):
        updates = NumpyUpdates(collectives, [5, 5], SMALL, schedule=lambda _: 2)
        for step in range(4):
            for one in updates.own:
                one += 1 + collectives.rank()
            if step == 3 and collectives.rank() == 1:
                updates.own[1][2] = np.nan
            updates.step()
        return updates.own, updates.renewed

    for own, renewed in run_ranks(2, work):
        assert all(np.array_equal(one, np.full(5, 3.0)) for one in own) and renewed == [0, 1]


def test_ranks_that_begin_with_other_parameters_get_an_error():
    def work(collectives):
        updates = NumpyUpdates(collectives, [5, 5], schedule=lambda _: 1, start=float(collectives.rank()))
        with pytest.raises(MismatchError, match="on rank 1, the parameter p0 has other values.*begin with the same"):
            updates.step()

    run_ranks(2, work)


@pytest.mark.parametrize("steps", [[4, 5], [8, 8]])
def test_sync_finds_ranks_that_part_also_after_an_exchange(steps):
    """A rank that has nothing to exchange says so: the other one would wait for it."""

    def work(collectives):
        updates = NumpyUpdates(collectives, [4], every=4)
        for _ in range(steps[collectives.rank()]):
            updates.step()
        said = ""
        try:
            updates.sync()
        except MismatchError as error:
            said = str(error)
        return said, len(updates.exchanged), updates.engine.stats.total.steps

    one, other = run_ranks(2, work)
    if steps[0] == steps[1]:
        assert one == other == ("", 2, 2)
    else:
        assert one[0] == other[0] and "clock is 4 on rank 0, 5 on rank 1" in one[0]


def test_fragments_are_spread_again_after_a_sync():
    def work(collectives):
        updates = NumpyUpdates(collectives, [4, 4], every=8, fragments=2)
        for step in range(1, 20):
            updates.step()
            if step == 7:
                updates.sync()
        return updates.exchanged

    for seen in run_ranks(2, work):
        assert seen == [(4, [0]), (7, [0]), (7, [1]), (11, [0]), (15, [1]), (19, [0])]


def test_a_new_anchor_has_no_residual():
    def work(collectives):
        updates = NumpyUpdates(collectives, [40], {**ALL, "sparsifier": {"name": "topk", "density": 0.1}}, every=1)
        updates.own[0] += np.arange(40) * (1 + collectives.rank())
        updates.step()
        before = updates.engine.residual_of("p0").copy()
        for one in updates.own:
            one[:] = 7
        updates.begin_anew()
        updates.step()
        return before.any(), updates.own[0]

    for kept, own in run_ranks(2, work):
        assert kept and (own == 7).all()


@pytest.mark.parametrize(
    ("every", "steps", "said"),
    [
        (lambda rank, clock: 4 if rank == 2 else 3, [5, 5, 5], "clock is 3 on ranks 0, 1, 4 on rank 2; next_"),
        # While all are at one exchange; the next one will differ.
        (lambda rank, clock: 4 if rank and clock else 3, [5, 5, 5], "next_exchange is 6 on rank 0, 7 on ranks 1, 2. "),
        (lambda rank, clock: 3, [5, 5, 4], "clock is 6 on ranks 0, 1, 4 on rank 2; call is step on"),
    ],
)
@pytest.mark.parametrize("fragments", [1, 2])
def test_ranks_that_part_get_an_error(every, steps, said, fragments):
    def work(collectives):
        rank = collectives.rank()
        updates = NumpyUpdates(collectives, [4, 4], schedule=lambda clock: every(rank, clock), fragments=fragments)
        with pytest.raises(MismatchError, match="not at the same place") as error:
            for _ in range(steps[rank]):
                updates.step()
            updates.sync() if rank == 2 else updates.step()
        return str(error.value), [one.due for one in updates.fragments], len(updates.exchanged)

    (first, due, count), *others = run_ranks(3, work)
    assert all((text, number) == (first, count) for text, _, number in others)
    assert fragments == 2 or said in first
    assert fragments == 2 or due[0] == 3 * (count + 1)  # the exchange that failed is still due


def test_a_load_in_a_running_job_compares_the_anchors():
    def work(collectives):
        updates = NumpyUpdates(collectives, [4], schedule=lambda clock: 1)
        updates.step()
        updates.restore_counts(updates.counts())  # on all ranks, the same
        updates.step()
        if collectives.rank() == 1:
            updates.anchors[0] += 1
            updates.restore_counts(updates.counts())
        with pytest.raises(MismatchError, match="on rank 1, the parameter p0 has other values"):
            updates.step()
        if collectives.rank() == 1:
            updates.anchors[0] -= 1
        updates.step()
        if collectives.rank() == 1:  # an exchange earlier
            updates.fragments[0].outer_steps -= 1
        with pytest.raises(MismatchError, match="outer_steps is 3 on rank 0, 2 on rank 1"):
            updates.step()

    run_ranks(2, work)


def test_each_rank_decides_when_it_takes_part():
    """Qsparse-local-SGD, Algorithm 2: no rank knows when another one takes part, and no gap is above the bound."""

    def work(collectives):
        rank = collectives.rank()
        rng, came, asked = np.random.default_rng(rank), [], []

        def times(whose, clock):
            asked.append((whose, clock))
            return rng.random() < 0.15

        updates = NumpyUpdates(collectives, [4], times=times, schedule=lambda clock: 5)
        follow = updates.follow
        updates.follow = lambda *arguments: came.append(updates.clock) or follow(*arguments)
        for _ in range(40):
            updates.own[0] += rank + 1
            updates.step()
        assert asked == [(rank, clock) for clock in range(1, 41)]
        return came, updates.exchanged, updates.anchors[0][0], updates.engine.stats.to_dict()

    ranks = run_ranks(3, work)
    together = sorted({clock for came, *_ in ranks for clock in came})
    for came, exchanged, anchor, stats in ranks:
        assert max(np.diff([0, *came])) == 5 and 5 <= len(came) < len(together) < 40
        assert [clock for clock, _ in exchanged] == together
        assert anchor == ranks[0][2] and stats["total"]["steps"] == len(together)
        assert stats["total"]["bytes_sent"] > 40 * 8 * step_check.WORDS  # a step check a step


def test_states_that_are_refused():
    (updates,) = run_ranks(1, lambda collectives: NumpyUpdates(collectives, [5], schedule=lambda _: 1))
    good = updates.counts() | {"anchors": {}}
    updates.check_counts(good, {"anchors"})
    for state, message in (
        (None, "must have anchors, began, clock, due, ends, outer_steps"),
        ({"clock": 0}, "must have anchors, began, clock, due, ends, outer_steps"),
        (good | {"clock": True}, "must be integers"),
        (good | {"outer_steps": [1.0]}, "must be integers"),
        (good | {"began": [-1]}, "must be integers"),
        (good | {"due": 3}, "must be integers"),
        (good | {"due": [1, 2]}, "the state is of 2 fragments, and the settings are of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            updates.check_counts(state, {"anchors"})


@pytest.mark.parametrize("mix", [None, 0.5])
def test_a_state_in_flight_that_lacks_a_part_is_refused(mix):
    def work(collectives):
        updates = NumpyUpdates(collectives, [5, 4], every=4, fragments=2, delay=2, mix=mix)
        for _ in range(3):
            updates.own[0] += 1 + collectives.rank()
            updates.step()
        state = updates.state_dict()
        other = NumpyUpdates(collectives, [5, 4], every=4, fragments=2, delay=2, mix=mix)
        for part in ("means", "starts"):
            for bad in ({}, {"p1": np.zeros(4, np.float32)}, {"p0": np.full(5, np.nan, np.float32)}):
                if bad or part == "means" or mix is None:
                    with pytest.raises(ValueError, match="of the state"):
                        other.load_state_dict({**state, part: bad})
        for bad in (3, {"p1": np.zeros(4, np.float32)}, {"p0": np.full(5, np.nan, np.float32)}):
            with pytest.raises(ValueError, match="the unsent progress of.* the state"):
                other.load_state_dict({**state, "unsent": bad})
        for bad in ({"frozen": 3}, {"frozen": {"p0": -1}}, {"frozen": {"p7": 1}}, {"resting": ["p7"]}, {"resting": {}}):
            with pytest.raises(ValueError, match="the state has frozen"):
                other.load_state_dict({**state, **bad})
        other.own = [one.copy() for one in updates.own]
        other.load_state_dict(state)
        other.settle()
        for one in (updates, other):
            one.step()
        return np.concatenate(updates.own), np.concatenate(other.own)

    for own, loaded in run_ranks(2, work):
        assert np.array_equal(own, loaded)


def test_updates_are_summed_in_slices():
    """What a rank loses as the owner of a slice waits in its residual, also of a rank that stays away."""
    config = {
        "sparsifier": {"name": "topk", "density": 0.25}, "scope": "model",
        "exchange": {"name": "reduce_scatter", "density": 0.125},
    }  # fmt: skip

    def present(rank, clock):
        return rank != 1 or clock % 2 == 0

    def work(collectives):
        updates = NumpyUpdates(collectives, [40, 24], config, times=present)
        came = np.zeros(64)
        for step in range(4):
            rng = np.random.default_rng([step, collectives.rank()])
            for own in updates.own:
                own += rng.standard_normal(own.size).astype(np.float32)
            if present(collectives.rank(), step + 1):
                came += np.concatenate([updates.update(number) for number in range(2)])
            updates.step()
        residuals = updates.engine.state_dict()["residuals"]
        return came, np.concatenate([residuals["p0"], residuals["p1"]]), np.concatenate(updates.anchors)

    ranks = run_ranks(3, work)
    assert all(np.array_equal(anchor, ranks[0][2]) for _, _, anchor in ranks)
    came, kept = (np.sum([rank[part] for rank in ranks], 0) for part in (0, 1))
    np.testing.assert_allclose(kept - 3 * ranks[0][2], came, atol=1e-4)
