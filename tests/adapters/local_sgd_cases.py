"""What LocalSGD must do on several ranks in both frameworks: cases of test_local_sgd.py (see tests/case_runner.py).

Every rank repeats the training of all ranks by itself and compares. The programs local_sgd_torch_cases.py and
local_sgd_tensorflow_cases.py fill in ``on``.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "train"))
from simulated_ranks import SimulatedRanks  # noqa: E402

from hvd_deepreduce import Config, ConfigError  # noqa: E402
from hvd_deepreduce.engine import MismatchError  # noqa: E402
from tests.case_runner import case  # noqa: E402
from tests.damaged import decoding_fails  # noqa: E402

DENSE = {"sparsifier": "none", "value": "raw", "scope": "model"}
LOSSY = {"sparsifier": {"name": "topk", "density": 0.1}, "value": {"name": "qsgd", "bits": 4}, "scope": "model"}

on = SimpleNamespace()
"""The framework of this program:

- ``rank()``, ``size()``, and ``gathered(object)``, the objects of all ranks;
- ``model(inner, seed=0)``: a model with its own optimizer, named ``adam``, ``momentum`` or ``sgd``. It has
  ``step(step, rank)``, with a rank's data; ``flat()``, ``put(vector)``, and ``poison()``, which writes NaN;
- ``anchor(outer, vector)``: with ``flat()``, and ``step(mean)``, a step of the outer optimizer of this name;
- ``trainer(inner, config, seed=0, outer=None, **options)``: a model whose ``local`` is a LocalSGD. It has, beside,
  ``train(steps, first=0)``; ``train_frozen(step)``, in which a layer is frozen just while LocalSGD counts the step;
  ``state()`` and ``saved()`` of LocalSGD and of all, and ``load(saved)``;
- ``outers``: of each case of lossy updates, the outer optimizer, the decay, the config, and arguments of LocalSGD;
- ``name``: of the first parameter, as errors have it; ``fragment``: the parameters of the first of two fragments;
- ``mixes``: what is tried; ``bad_states(state)``: states that cannot be loaded, and what is said of each.
"""


def check_same(trainer):
    assert len(set(on.gathered(trainer.flat().tobytes()))) == 1, "the ranks' parameters differ"


class ByHand:
    """All ranks of a job of local updates, as the papers state it, on vectors."""

    def __init__(self, inner, outer, config, decay=1.0):
        self.models = [on.model(inner) for _ in range(on.size())]
        self.anchor = on.anchor(outer, self.models[0].flat())
        # A bucket begins with the last parameter, but its members are in the model's order.
        self.ranks = SimulatedRanks(Config.load(config), on.size(), self.models[0].sizes())
        self.decay = decay

    def step(self, step):
        for rank, model in enumerate(self.models):
            model.step(step, rank)

    def mean(self, bases=None, present=None):
        """Of the updates, from the anchor or from ``bases``, of the ranks that are ``present``."""
        bases, there = bases or [self.anchor.flat()] * on.size(), present or [True] * on.size()
        updates = [
            base - model.flat() if takes_part else None
            for base, model, takes_part in zip(bases, self.models, there, strict=True)
        ]
        return self.ranks.mean(updates, self.decay)

    def synchronize(self):
        self.anchor.step(self.mean())
        for model in self.models:
            model.put(self.anchor.flat())

    def own(self):
        return self.models[on.rank()].flat()


@case
def plain_averaging_is_the_average_of_local_runs():
    for every in (1, 3):
        trainer, by_hand = on.trainer("momentum", DENSE, every=every), ByHand("momentum", "sgd", DENSE)
        trainer.train(6)
        for step in range(6):
            by_hand.step(step)
            if step % every == every - 1:
                mean = np.mean([one.flat() for one in by_hand.models], 0)
                for one in by_hand.models:
                    one.put(mean)
        np.testing.assert_allclose(trainer.flat(), by_hand.own(), rtol=0, atol=1e-6)
        check_same(trainer)


@case
def lossy_updates_equal_the_same_by_hand():
    for outer, decay, config, options in on.outers:
        trainer, heard = on.trainer("adam", config, every=3, decay=decay, **options), []
        by_hand = ByHand("adam", outer, config, decay)
        trainer.local.add_callback(heard.append)
        trainer.train(8)
        for step in range(8):
            by_hand.step(step)
            if step % 3 == 2:
                by_hand.synchronize()
        assert np.array_equal(trainer.flat(), by_hand.own()) and len(set(on.gathered(by_hand.own().tobytes()))) > 1
        by_hand.synchronize()
        for _ in range(2):  # nothing was done since: nothing is exchanged
            before = trainer.local.stats()["total"]
            trainer.local.sync()
            assert np.array_equal(trainer.flat(), by_hand.anchor.flat())
            check_same(trainer)
        total = trainer.local.stats()["total"]
        assert total["steps"] == 3 and 0 < total["bytes_sent"] < total["dense_bytes"]
        assert [one["total"]["steps"] for one in heard] == [1, 2, 3] and heard[-1]["total"] == before
        assert 0 < total["bytes_sent"] - before["bytes_sent"] < 300, "a step check"
        sizes = 4 * trainer.flat().size
        assert total["dense_bytes"] == pytest.approx(8 * 2 * (on.size() - 1) / on.size() * sizes, abs=50)


@case
def fragments_are_exchanged_in_turn_with_a_schedule():
    trainer = on.trainer("adam", DENSE, every=lambda clock: 2 if clock < 2 else 4, fragments=2, outer="adam")
    count = len(trainer.sizes())
    first, second = on.fragment, [number for number in range(count) if number not in on.fragment]
    parts = {1: first, 2: second, 3: first, 6: second, 7: first}
    for step in range(7):
        trainer.train(1, step)
        every = on.gathered([one.tobytes() for one in trainer.parts()])
        equal = [number for number in range(count) if len({of_rank[number] for of_rank in every}) == 1]
        assert equal == parts.get(step + 1, []), (step, equal)
    trainer.local.sync()
    check_same(trainer)
    assert trainer.state()["outer_steps"] == [3, 3]
    bad = on.trainer("adam", LOSSY, every=lambda clock: 2 if clock == 0 else 0)
    with pytest.raises(ValueError, match=r"every\(2\) returned 0; it must be an integer, at least 1"):
        bad.train(2)


@case
def a_delay_keeps_the_progress_made_meanwhile():
    for mix in on.mixes:
        trainer = on.trainer("adam", LOSSY, every=4, delay=2, mix=mix, outer="nesterov")
        by_hand, mean, starts, unsent = ByHand("adam", "nesterov", LOSSY), None, [], []
        for step in range(10):
            trainer.train(1, step)
            by_hand.step(step)
            if step + 1 in (6, 10):
                by_hand.anchor.step(mean)
                for one, start in zip(by_hand.models, starts, strict=True):
                    now, anchor = one.flat(), by_hand.anchor.flat()
                    one.put(now + (anchor - start) if mix is None else on.mixed(now, anchor, mix))
            if step + 1 in (5, 9) and mix is None:  # what was not sent waits in the residuals alone
                moved = [start + one for start, one in zip(starts, unsent, strict=True)]
                for model, start, now in zip(by_hand.models, starts, moved, strict=True):
                    model.put(model.flat() + (now - start))
                starts = moved
            if step + 1 in (4, 8):
                starts = [one.flat() for one in by_hand.models]
                before = [one.copy() for one in by_hand.ranks.residuals]
                mean = by_hand.mean()
                unsent = [now - then for now, then in zip(by_hand.ranks.residuals, before, strict=True)]
            if step + 1 == 5:  # while an exchange is in flight, from a saved state
                state = trainer.state()
                assert state["ends"] == [6] and state["means"].keys() == state["anchors"].keys()
                assert not state["unsent"]
                trainer = trainer.again()
            assert np.array_equal(trainer.flat(), by_hand.own()), step
        trainer.local.sync()
        check_same(trainer)


@case
def what_is_frozen_later_keeps_its_values():
    """Its residual, too, until it is trained again, and also in a resumed job."""
    for options in ({"every": 2}, {"every": 2, "mix": 0.5, "delay": 1}, {"every": 4, "delay": 2, "fragments": 2}):
        trainer = on.trainer("adam", LOSSY, outer="nesterov", **options)
        trainer.train(5)
        trainer.freeze(True)  # within a period: all take what they have done until now
        trainer.train(8, 5)
        trainer.local.sync()
        check_same(trainer)
        frozen, trained = trainer.parts()[0], trainer.parts()[2]
        kept = trainer.residuals()
        trainer.train(7, 13)
        trainer.freeze(False)  # LocalSGD is made for all that will ever be trained
        trainer = trainer.again()
        trainer.freeze(True)
        trainer.train(6, 20)
        trainer.local.sync()
        check_same(trainer)
        assert np.array_equal(trainer.parts()[0], frozen) and not np.array_equal(trainer.parts()[2], trained), options
        now = trainer.residuals()
        assert np.array_equal(now[0], kept[0]) and kept[0].any() and not np.array_equal(now[2], kept[2]), options
        trainer.freeze(False)
        trainer.train(4, 26)
        trainer.local.sync()
        check_same(trainer)
        assert not np.array_equal(trainer.parts()[0], frozen)
    trainer = on.trainer("adam", LOSSY, every=2)
    trainer.train(2)
    trainer.freeze(on.rank() == 0)
    with pytest.raises(MismatchError, match="frozen is '0[^']*' on rank 0, missing on ranks? 1.*freeze the same"):
        trainer.train(2, 2)


@case
def what_is_trained_is_exchanged_though_it_is_frozen_when_the_step_is_counted():
    """As a discriminator, which is trainable for its own steps only."""
    for options in ({"every": 1}, {"every": 3}, {"every": 4, "delay": 2}, {"every": 3, "delay": 1, "mix": 0.5}):
        trainer, frozen = (on.trainer("adam", LOSSY, **options) for _ in range(2))
        trainer.train(9)
        trainer.local.sync()
        for step in range(9):
            frozen.train_frozen(step)
        frozen.local.sync()
        check_same(frozen)
        np.testing.assert_array_equal(frozen.flat(), trainer.flat())


@case
def asynchronous_exchanges_equal_the_same_by_hand():
    """Each rank decides by itself when it takes part; the last one does so only because of the bound."""
    decided = [np.random.default_rng(rank).random(12) < 0.3 for rank in range(on.size() - 1)] + [np.zeros(12, bool)]
    own, asked = iter(decided[on.rank()]), []

    def times(rank, clock):
        asked.append((rank, clock))
        return next(own)

    trainer = on.trainer("adam", LOSSY, times=times, every=4, outer="nesterov")
    by_hand = ByHand("adam", "nesterov", LOSSY)
    taken = [by_hand.anchor.flat() for _ in by_hand.models]
    last, together = [0] * on.size(), 0
    for step in range(12):
        if step == 6:  # in the middle, from a saved state
            trainer = trainer.again()
        trainer.train(1, step)
        by_hand.step(step)
        present = [bool(decided[rank][step]) or step + 1 - last[rank] >= 4 for rank in range(on.size())]
        last = [step + 1 if there else before for there, before in zip(present, last, strict=True)]
        together += any(present)
        if any(present):
            by_hand.anchor.step(by_hand.mean(taken, present))
            for rank in np.flatnonzero(present):
                by_hand.models[rank].put(by_hand.anchor.flat())
                taken[rank] = by_hand.anchor.flat()
        assert np.array_equal(trainer.flat(), by_hand.own()), step
    assert asked == [(on.rank(), clock) for clock in range(1, 13)]
    assert together < 12 and trainer.state()["outer_steps"] == [together]
    trainer.local.sync()
    check_same(trainer)


@case
def an_error_while_decoding_on_one_rank():
    """The others apply the exchange, and the next one is an error on all ranks, until a state is loaded."""
    behind = on.rank() == 1
    trainer = on.trainer("momentum", LOSSY, every=1)
    trainer.train(1)
    saved = trainer.saved()
    with pytest.raises(MemoryError, match="no room") if behind else nullcontext(), decoding_fails(behind):
        trainer.train(1, 1)
    for step in (2, 3):
        with pytest.raises(MismatchError, match="an error has left 1 rank behind: other ranks may have applied"):
            trainer.train(1, step)
    trainer.load(saved)
    trainer.train(2, 1)
    check_same(trainer)


@case
def a_rank_with_nan_discards_the_period_on_all_ranks():
    trainer = on.trainer("adam", LOSSY, every=2)
    trainer.train(2)
    before, kept = trainer.flat(), trainer.residuals()
    trainer.train(1, 2)
    if on.rank() == on.size() - 1:
        trainer.poison()
    trainer.train(1, 3)
    assert np.array_equal(trainer.flat(), before)
    assert all(np.array_equal(*pair) for pair in zip(trainer.residuals(), kept, strict=True))
    trainer.train(4, 4)
    assert np.isfinite(trainer.flat()).all() and not np.array_equal(trainer.flat(), before)
    check_same(trainer)


@case
def fragments_recover_from_nan_together():
    """What has become NaN in one fragment must not spread to those that have returned to their anchors."""
    for delay, mix in ((0, None), (2, None), (2, 0.5)):
        trainer = on.trainer("adam", LOSSY, every=3, fragments=2, delay=delay, mix=mix)
        trainer.train(4)
        if on.rank() == on.size() - 1:
            trainer.poison()
        trainer.train(4, 4)
        before = trainer.flat()
        assert np.isfinite(before).all()
        trainer.train(3, 8)
        assert np.isfinite(trainer.flat()).all() and not np.array_equal(trainer.flat(), before)
        trainer.local.sync()
        check_same(trainer)


@case
def a_resumed_run_equals_an_unbroken_one():
    for fragments in (1, 2):
        options = {"every": 4, "decay": 0.9, "outer": "nesterov", "fragments": fragments}
        unbroken, halves, resumed = (on.trainer("adam", LOSSY, seed=seed, **options) for seed in (0, 0, 7))
        unbroken.train(11)
        halves.train(6)  # in the middle of a period
        saved, before = halves.saved(), resumed.state()
        for state, message in on.bad_states(saved, fragments):
            with pytest.raises(ValueError, match=message):
                resumed.load_local(state)
        assert resumed.state()["clock"] == before["clock"] == 0
        resumed.load(saved)
        resumed.train(5, 6)
        assert np.array_equal(resumed.flat(), unbroken.flat())
        resumed.local.sync()
        resumed.load_local(iter(on.gathered(resumed.whole_state())), reshard=True)
        resumed.train(3, 11)
        resumed.local.sync()
        check_same(resumed)


@case
def ranks_that_differ_get_an_error():
    for options, message in (
        ({"seed": on.rank()}, f"on rank 1, the parameter {on.name} has other .*{on.broadcast}"),
        ({"outer": on.differing_outer()}, "on rank 1, the outer optimizer has other settings"),
        ({"decay": 1 - 0.1 * on.rank()}, "local"),
    ):
        trainer = on.trainer("sgd", LOSSY, every=1, **options)
        with pytest.raises(MismatchError, match=message):
            trainer.train(1)


@case
def ranks_that_part_get_an_error():
    rank, last = on.rank(), on.size() - 1
    others = "rank 0" if last == 1 else "ranks 0, 1"
    # Periods that part, found at the exchange where they begin.
    periods = {0: np.int64(1), 1: 3}
    trainer = on.trainer("sgd", LOSSY, every=lambda clock: periods.get(clock, 3 + (rank == last)))
    trainer.train(3)
    assert trainer.state()["due"] == [4]
    with pytest.raises(MismatchError, match=f"next_exchange is 7 on {others}, 8 on rank {last}. LocalSGD's"):
        trainer.train(1, 3)
    # A rank that has ended its loop.
    trainer = on.trainer("sgd", LOSSY, every=3, fragments=2, delay=1)
    with pytest.raises(MismatchError, match=f"clock is 6 on {others}, 5 on rank {last}; call is step on "):
        trainer.train(9 if rank < last else 5)
        trainer.local.sync()
    # States that one rank loads in a running job: of another anchor, and of another exchange.
    trainer = on.trainer("sgd", LOSSY, every=1)
    trainer.train(2)
    early = trainer.whole_state()
    trainer.train(1, 2)
    late = trainer.whole_state()
    if rank == last:
        trainer.load_local(on.with_another_anchor(late))
    with pytest.raises(MismatchError, match=f"on rank {last}, the parameter {on.name} has other values"):
        trainer.train(1, 3)
    if rank == last:
        trainer.load_local(early)
    with pytest.raises(MismatchError, match=f"the step count of|clock is 5 on {others}, 3 on rank {last}"):
        trainer.train(1, 3)
    trainer.load_local(late)
    trainer.train(2, 3)
    trainer.local.sync()
    check_same(trainer)


@case
def options_that_cannot_be():
    def never(rank, clock):
        return False

    for error, options, message in (
        (ValueError, {"times": never, "fragments": 2}, "times is given beside fragments or delay"),
        (TypeError, {"times": 3}, "times is int, but it must be a function"),
        (ConfigError, {"every": 0}, "local.every is 0"),
        (ConfigError, {"every": 2, "delay": 2}, "delay must be less than every"),
    ):
        with pytest.raises(error, match=message):
            on.trainer("sgd", LOSSY, **options)
    trainer = on.trainer("sgd", LOSSY, every=1)
    trainer.local.close()
    with pytest.raises(RuntimeError, match="was closed"):
        trainer.train(1)
