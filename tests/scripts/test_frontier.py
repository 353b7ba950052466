"""The frontier of loss against bytes: the methods, the table, and short runs."""

from __future__ import annotations

import json

import pytest
from frontier import JOBS, Method, load, picture, rows, signs, table, train

from hvd_deepreduce import Config
from hvd_deepreduce.config import presets
from tests.ranks import ROOT

GPT, LSTM = JOBS["gpt"], JOBS["lstm"]


def test_the_learning_rate_grows_with_the_root_of_the_workers_where_updates_want_it():
    assert GPT.rate(Method("", longer=True), 4) == 2 * GPT.rate(Method("", "dense"), 4) == 2 * GPT.rates[4]
    assert GPT.rate(GPT.methods["adamw_safe"], 2) == pytest.approx(2**0.5 * GPT.rate(GPT.methods["dense"], 2))
    assert LSTM.rate(Method(""), 2) == LSTM.rate(Method(""), 8)


def test_a_step_without_compression_is_that_of_dense(monkeypatch):
    monkeypatch.setattr(LSTM, "clip", 1e9)  # so that clipping before or after the mean is the same
    for name, method in {
        "dense": Method("", "dense"), "averaged": Method(""), "gradients": Method("", "gradients")
    }.items():  # fmt: skip
        monkeypatch.setitem(LSTM.methods, name, method)
    runs = [train("lstm", name, 2, 3, 0) for name in ("dense", "averaged", "gradients")]
    assert all(run["share"] == 1 for run in runs)
    assert [run["loss"] for run in runs[1:]] == pytest.approx(2 * [runs[0]["loss"]], abs=1e-5)


@pytest.mark.parametrize("name", JOBS)
def test_a_run_is_repeatable_and_counts_its_bytes(name, tmp_path, monkeypatch):
    """It is read again while its settings are the same."""

    def sets(every: int) -> None:
        monkeypatch.setitem(JOBS[name].methods, "short", Method("short", config=signs(0.1), every=every, momentum=0.4))

    sets(2)
    first, again = (train(name, "short", 2, 3, 0) for _ in range(2))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert 0 < first["share"] < 0.03
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(first) + "\n")
    assert load(JOBS[name], path) == [first]
    sets(3)
    assert load(JOBS[name], path) == [], "a run with other settings counts no more"


@pytest.mark.parametrize("name", JOBS)
def test_the_runs_of_the_documents_have_the_settings_of_today(name):
    path = ROOT / "docs" / "results" / "figures" / f"{JOBS[name].section}_frontier.jsonl"
    assert len(load(JOBS[name], path)) == len(path.read_text().splitlines())


def test_gaps_are_between_runs_of_the_same_seed(tmp_path):
    facts = {"workers": 2, "steps": 10, "share": 1.0}
    runs = [{**facts, "name": "dense", "seed": seed, "loss": value} for seed, value in enumerate((1.0, 2.0))]
    runs += [{**facts, "name": "plain", "seed": seed, "loss": value} for seed, value in enumerate((1.5, 2.1, 9.0))]
    words = {"dense": "all", "plain": "some"}
    dense, plain = found = rows([*runs, {**runs[0], "steps": 11}], words, 10)
    assert (dense["gap"], plain["seeds"]) == (0, 3)
    assert plain["gap"] == pytest.approx(0.3) and plain["most"] == 0.5
    assert table(found, words).splitlines()[3] == "| 2 | some | 100.00% | 4.2000 | +0.300 (+0.100 to +0.500) | 3 |"
    picture(found, words, 0.03, "title", tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000


PRESETS = [name for name, method in LSTM.methods.items() if method.sends == "updates" and name in presets.names()]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_local_sgd_is_the_method_of_its_name(name):
    method, preset = LSTM.methods[name], Config.load(name)
    assert preset.local is not None
    assert (preset.local.every, preset.local.momentum, preset.local.decay, preset.local.lr) == (
        method.every, method.momentum, method.decay, 1.0,
    )  # fmt: skip
    assert Config.load(method.config, local=None) == Config.load(preset, local=None)


def test_sgd_small_is_among_the_methods():
    assert "sgd_small" in PRESETS
