"""Ranks come and go: step counts that are agreed on, and the states that an elastic job saves and synchronizes."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.engine.agreement import agreed_steps
from tests.engine.numpy_adapter import NumpyAdapter, run_ranks
from tests.engine.test_step import LOSSY, every_scope, gradients_of

MODEL = {"a": ((20, 30), "f4"), "b": ((300,), "f4")}


def told(*steps):
    return [{"order": ["a", "b"], "steps": list(one)} for one in steps]


def test_a_new_rank_takes_the_steps_of_the_others():
    assert agreed_steps(told((0, 0), (5, 6), (0, 0), (5, 6)), elastic=True) == [5, 6]
    assert agreed_steps(told((0, 0), (0, 0)), elastic=True) == [0, 0]
    assert agreed_steps(told((5, 6), (5, 6)), elastic=False) == [5, 6]
    assert agreed_steps([{}, {}], elastic=False) == []


@pytest.mark.parametrize(
    ("steps", "elastic", "message"),
    [
        (told((0, 0), (5, 6)), False, "the step count of a is 0 on rank 0, 5 on rank 1. Load the state of DeepReduce"),
        (told((0, 0), (5, 6), (5, 7)), True, "the step count of b is 6 on rank 1, 7 on rank 2. .*docs/elastic.md"),
        (
            [*told((5, 5)), {"order": ["a", "b"], "steps": [5, True]}],
            False,
            "rank 1 sent .* in place of its step",
        ),
        ([*told((5, 5)), {"order": ["a", "b"], "steps": []}], False, "rank 1 sent .* in place of its step"),
    ],
)
def test_steps_that_differ(steps, elastic, message):
    with pytest.raises(MismatchError, match=message):
        agreed_steps(steps, elastic)


def step(adapter, number):
    return adapter.step(gradients_of(number, adapter.engine.collectives.rank(), MODEL))


def same(state, other):
    assert state["steps"] == other["steps"] and state["residuals"].keys() == other["residuals"].keys()
    assert all(np.array_equal(state["residuals"][name], other["residuals"][name]) for name in state["residuals"])


@every_scope
def test_after_a_failure_residuals_match_the_restored_step(scope):
    """The second step is broken off. Repeated, it gives what it gives in a run without a failure."""

    def work(collectives, fails):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope})
        step(adapter, 0)
        engine, saved = adapter.engine, adapter.engine.snapshot()
        if fails:
            engine.set_config(seed=9)
            adapter.start("b", gradients_of(1, collectives.rank(), MODEL)["b"].copy())
            assert engine.in_flight
            engine.rewind(saved)
            assert not engine.in_flight and engine.config.seed == 0
            same(engine.state_dict(), saved.state)
        return [step(adapter, number) for number in (1, 2)], engine.state_dict()

    for fails, plain in zip(*(run_ranks(1, lambda c, f=f: work(c, f)) for f in (True, False)), strict=True):
        same(fails[1], plain[1])
        assert all(np.array_equal(a[name], b[name]) for a, b in zip(fails[0], plain[0], strict=True) for name in MODEL)


def test_what_the_others_take_from_rank_0(caplog):
    def adapter_at(collectives, steps, **settings):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **settings})
        for number in range(steps):
            step(adapter, number)
        return adapter.engine

    def work(collectives):
        first = adapter_at(collectives, 2, seed=5)
        for steps, kept, warned in ((2, True, False), (0, False, False), (1, False, True)):
            engine = adapter_at(collectives, steps)
            caplog.clear()
            with caplog.at_level(logging.WARNING, "hvd_deepreduce"):
                config, followed = engine.state_from_root(first.elastic_state())
            assert followed["steps"] == {"a": 2, "b": 2} and bool(followed["residuals"]) == kept
            assert ("rank 0 is at another step than rank 0" in caplog.text) == warned
            assert config.seed == 5 and config.threads == engine.config.threads
        assert first.elastic_state().config["seed"] == 5 and "threads" not in first.elastic_state().config

    run_ranks(1, work)
