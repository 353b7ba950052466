"""The soak finds what it looks for; and a few of its episodes, under real launchers."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_deepreduce import Config
from tests.soak import run
from tests.soak.episodes import RANKS, WAYS, episode, judge, segments_file

ONE = 0
SEEDS = range(2000)


def test_a_seed_names_an_episode():
    assert [episode(seed) for seed in range(50)] == [episode(seed) for seed in range(50)]
    assert {(one.way, one.fault) for one in map(episode, SEEDS)} == {
        (way, fault) for way, (_, faults) in WAYS.items() for fault in faults
    }


def test_every_config_can_be_used_and_every_change_is_one():
    for one in map(episode, SEEDS[:500]):
        config = Config.load(dict(one.config))
        if one.way[1] != "mpi4py":
            assert Config.load(config, **one.changed) != config
        assert len({np.prod(shape) for shape in one.shapes}) == len(one.shapes)
        assert 0 < one.at < one.steps - 2


def finished(folder, change=0.0, **of_rank_1):
    """Records of ranks that finished: each got a gradient of 1 and kept half of it."""
    for rank in range(RANKS):
        segment = np.array([np.ones(10), np.full(10, 0.5), np.full(10, 0.5 * RANKS)])
        segment[1, 3] += change
        np.save(segments_file(folder, ONE, rank), segment[None])
    record = {"end": "finished", "error": "", "digest": "a", "steps": 10}
    return {rank: {**record, **(of_rank_1 if rank == 1 else {})} for rank in range(RANKS)}


def test_equal_ranks_are_equal(tmp_path):
    assert judge(episode(ONE), tmp_path, finished(tmp_path), None) == ("equal", "")


def test_different_sums_are_a_failure(tmp_path):
    outcome, why = judge(episode(ONE), tmp_path, finished(tmp_path, digest="b"), None)
    assert outcome == "failed" and "differ" in why


@pytest.mark.parametrize("change", [0.01, np.nan])
def test_a_gradient_that_got_lost_is_a_failure(tmp_path, change):
    outcome, why = judge(episode(ONE), tmp_path, finished(tmp_path, change), None)
    assert outcome == "failed" and "sent + residuals differ" in why


def test_errors_must_be_the_same(tmp_path):
    errors = {rank: {"end": "error", "error": "ExchangeError: rank 1: why", "steps": 3} for rank in range(RANKS)}
    assert judge(episode(ONE), tmp_path, errors, 1)[0] == "same error"
    errors[2]["error"] = "ExchangeError: something else"
    outcome, why = judge(episode(ONE), tmp_path, errors, 1)
    assert outcome == "failed" and "something else" in why


def test_a_rank_that_waits_is_a_failure(tmp_path):
    errors = {0: {"end": "error", "error": "MemoryError: why", "steps": 3}}
    outcome, why = judge(episode(ONE), tmp_path, errors, None)
    assert outcome == "failed" and "rank 1: did not end it" in why


@pytest.mark.parametrize(
    ("status", "others", "outcome"),
    [
        (1, {}, "job ended"),
        (None, {}, "failed"),
        (0, {}, "failed"),
        (1, {2: {"end": "finished", "steps": 9}}, "failed"),
    ],
)
def test_a_rank_that_left_must_end_the_job(tmp_path, status, others, outcome):
    left = {1: {"end": "left", "error": "UserError: why", "steps": 3}, **others}
    assert judge(episode(ONE), tmp_path, left, status)[0] == outcome


def test_the_table_counts_every_episode():
    figures = run.Figures()
    for seed, outcome in enumerate(("equal", "equal", "same error", "failed")):
        figures.add(episode(seed), outcome, "why", 10)
    assert figures.steps == 40 and not figures.good and len(figures.failures) == 1
    assert figures.table().endswith("| all | 2 | 1 | 0 | 1 |")


def test_inputs_are_counted():
    assert run.inputs_of("index-rice: ok, 12345 runs\n") == 12345
    assert run.inputs_of("joint-densestream: FAILED, 7 runs\n") == 7
    assert run.inputs_of("fuzz: 26 of 26 targets ok, 15 s each\n") == 0


def seed_of(way: tuple[str, str], fault: str, **wanted: object) -> int:
    """The first short episode of this kind."""
    return next(
        one.seed for one in map(episode, range(100_000))
        if (one.way, one.fault) == (way, fault) and one.steps < 15 and one.seconds < 0.6
        and all(getattr(one, name) == value for name, value in wanted.items())
    )  # fmt: skip


TORCH, MPI = ("mpirun", "torch"), ("mpirun", "mpi4py")


@pytest.mark.launch
@pytest.mark.parametrize(
    "seeds",
    [
        [seed_of(TORCH, "nan"), seed_of(TORCH, "restored"), seed_of(TORCH, "stopped"), seed_of(TORCH, "killed")],
        [seed_of(MPI, "none"), seed_of(MPI, "config"), seed_of(MPI, "nan"), seed_of(MPI, "killed")],
    ],
    ids=["torch", "mpi4py"],
)
def test_episodes(seeds):
    figures = run.Figures()
    run.run_episodes(seeds, figures)
    assert figures.good, figures.failures
    assert sum(figures.outcomes.values()) == len(seeds) and figures.outcomes["killed", "job ended"] == 1
    assert figures.launches == 1
