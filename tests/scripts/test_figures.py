"""The scripts behind the figures: what they capture, what they time, and what they count."""

from __future__ import annotations

import json
from functools import partial

import bench_inputs
import capture_gradients
import captured
import numpy as np
import pytest
import torch
from bench_net import bits_per_second, table
from simulate_scale import Captured, Skewed, Uniform, simulate
from step_times import Difference, interleaved
from torch import nn

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.pipeline import Pipeline
from tests.ranks import ROOT, launch


def tiny(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 5, stride=4), nn.ReLU(), nn.Flatten(),
        nn.Linear(72, classes),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def tiny_network(monkeypatch):
    monkeypatch.setitem(capture_gradients.NETWORKS, "tiny", tiny)


def capture(tmp_path, **settings):
    path = captured.path("tiny", 0.01, settings.get("selection", "scope"), tmp_path)
    given = {"density": 0.01, "steps": 40, "ranks": 3, "lr": 0.05, "threads": 1, **settings}
    capture_gradients.capture("tiny", path, **given)
    return path


@pytest.mark.parametrize("selection", ["scope", "tensor"])
def test_accumulators_are_what_a_job_with_the_compressor_in_force_selects_from(tmp_path, selection):
    first = capture(tmp_path / "none", selection=selection, steps=0)
    path = capture(tmp_path, selection=selection, steps=1)
    facts = captured.about(path)
    assert (facts["steps"], facts["ranks"], facts["density"], facts["selection"]) == (1, 3, 0.01, selection)
    names, sizes = captured.parameters(path)
    assert sum(sizes) == facts["numel"] and len(names) == 6
    ends = np.cumsum(sizes) if selection == "tensor" else [sum(sizes)]
    for rank in range(3):
        before = captured.read(first, "gradient", rank)
        assert np.array_equal(before, captured.read(first, "accumulator", rank))
        residual = captured.read(path, "accumulator", rank) - captured.read(path, "gradient", rank)
        # The residual is the first gradient, less the largest 1% of it (of the whole, or of each parameter).
        for begin, end in zip([0, *ends], ends, strict=False):
            own, left = np.abs(before[begin:end]), residual[begin:end]
            sent = np.flatnonzero(np.abs(left - before[begin:end]) > 1e-5 * own.max())
            kept = max(1, (end - begin) // 100)
            assert 0 < sent.size <= kept
            assert own[sent].min() >= 0.999 * np.sort(own)[-kept]
    assert captured.rank_count(path) == 3
    with pytest.raises(ValueError, match=r"has no accumulator_3; it has accumulator_0, gradient_0, accumulator_1"):
        captured.read(path, "accumulator", 3)
    assert "accumulators (residual + gradient) of tiny" in captured.describe(path, "accumulator")


def test_the_updates_that_are_applied_are_those_that_are_sent(tmp_path, monkeypatch):
    """Each step applies the mean of the containers, 1% of the elements of each rank, not the gradients."""
    applied = []
    original = torch.optim.SGD.step

    def step(self, *arguments):
        flat = torch.cat([p.grad.reshape(-1) for group in self.param_groups for p in group["params"]])
        applied.append(int(flat.count_nonzero()) / flat.numel())
        return original(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    capture(tmp_path, steps=5)
    assert len(applied) == 5 and all(0 < density <= 0.031 for density in applied)


def test_without_error_feedback_there_is_no_accumulator(tmp_path):
    path = capture(tmp_path, steps=2, config="dr_bf_naive")
    with pytest.raises(ValueError, match="has no accumulator_0"):
        captured.read(path, "accumulator", 0)
    assert captured.read(path, "gradient", 0).any()
    with pytest.raises(ValueError, match="only allgather, reduce_scatter, and densestream with a density"):
        capture(tmp_path, config="densestream_model")


def test_the_inputs_are_compared(tmp_path, monkeypatch):
    """A file that is not there is captured; each input has a row at each density."""
    monkeypatch.setattr(bench_inputs, "NETWORK", "tiny")
    short = partial(capture_gradients.capture, steps=3, threads=1)
    monkeypatch.setattr(bench_inputs, "capture", short)
    monkeypatch.setattr(captured, "path", lambda network, density, selection="scope": tmp_path / f"{density}.npz")
    head, *rows = bench_inputs.rows((0.01, 0.05))
    assert [row[1] for row in rows] == list(bench_inputs.INPUTS.values()) * 2
    assert {len(row) for row in rows} == {len(head)}
    unions = {(row[0], row[1]): float(row[-1]) for row in rows}
    assert all(1 <= union <= bench_inputs.RANKS for union in unions.values())
    assert unions["1.0%", "random positions"] == pytest.approx((1 - 0.99**4) / 0.01, rel=0.03)
    assert captured.rank_count(tmp_path / "0.05.npz") == bench_inputs.RANKS


def test_a_hundred_steps_are_the_default():
    assert capture_gradients.STEPS >= 100 and capture_gradients.RANKS > 1
    assert Config.load(capture_gradients.CONFIG).error_feedback


def test_interleaved_steps():
    calls, waits = [], []

    def slowest(times):
        waits.append(times.size)
        return times

    steps = {name: lambda name=name: calls.append(name) for name in ("dense", "compressed")}
    found = interleaved(steps, 4, slowest, warm=2, prepare=lambda name: calls.append(f"before {name}"))
    ran = [name for name in calls if not name.startswith("before")]
    pairs = [tuple(ran[at : at + 2]) for at in range(0, len(ran), 2)]
    assert len(pairs) == 6 and {frozenset(pair) for pair in pairs} == {frozenset(steps)}
    assert pairs[:-1] == [pair[::-1] for pair in pairs[1:]]
    assert calls[:2] == [f"before {calls[1]}", calls[1]]
    assert {name: len(times) for name, times in found.items()} == {"dense": 4, "compressed": 4}
    assert waits == [1] * 12 + [4] * 2


def found(extra, dense=0.05, sent=100_000, all_dense=2_100_000):
    base = np.linspace(0.9, 1.1, len(extra)) * dense
    return {"dense": base.tolist(), "compressed": (base + extra).tolist(), "dense_bytes": all_dense,
            "bytes_sent": sent}  # fmt: skip


def test_compression_pays_below_the_speed_at_which_the_whole_difference_is_sent():
    """A step that is 1.77 times as long: the seconds of encoding and decoding alone gave 3.9 Gbit/s."""
    difference = Difference.of(found(np.array([0.036, 0.038, 0.0385, 0.039, 0.041])))
    assert difference.pays_below()[1] == pytest.approx(8 * 2e6 / 0.0385)
    low, middle, high = difference.pays_below()
    assert low < middle < high < 0.5e9
    said = difference.sentences()
    assert "(1.77x)" in said and "compression does not pay" in said and "below about 0.42 Gbit/s per rank" in said
    assert "quartiles +38.0 to +39.0" in said and "sends 2 MB less" in said


def test_a_difference_within_its_spread_is_called_so():
    difference = Difference.of(found(np.array([-0.01, -0.005, 0.0, 0.004, 0.01])))
    assert difference.pays_below()[1:] == (float("inf"), float("inf"))
    assert (
        "Within their spread" in difference.sentences() and "below 4 Gbit/s per rank at least" in difference.sentences()
    )
    assert "Compression pays here" in Difference.of(found(np.full(5, -0.01))).sentences()
    assert (
        "pays on no link: a rank sends 2 MB more" in Difference.of(found(np.full(5, 0.01), sent=4_100_000)).sentences()
    )


@pytest.mark.launch
def test_steps_are_timed_under_a_launcher(tmp_path):
    out = tmp_path / "times.json"
    launch("mpirun", 2, ROOT / "scripts" / "train" / "step_times.py", "--pairs", "2", "--out", str(out))
    read = json.loads(out.read_text())
    assert len(read["dense"]) == len(read["compressed"]) == 2 and min(read["dense"] + read["compressed"]) > 0
    assert 0 < read["bytes_sent"] < 0.02 * read["dense_bytes"]
    assert "pairs of interleaved steps" in Difference.of(read).sentences()


def test_the_simulated_inputs(tmp_path):
    uniform, skewed = Uniform(20_000), Skewed(20_000)
    for given in (uniform, skewed):
        one, again, other = given.kept(0, 0.01), given.kept(0, 0.01), given.kept(1, 0.01)
        assert np.array_equal(one.indices, again.indices) and one.indices.size == 200
        assert not np.array_equal(one.indices, other.indices)
    shared = [
        np.intersect1d(given.kept(0, 0.01).indices, given.kept(1, 0.01).indices).size for given in (uniform, skewed)
    ]
    assert shared[0] < 10 < 25 < shared[1], shared  # 2 expected of the uniform ones
    path = capture(tmp_path)
    given = Captured(path)
    accumulator = captured.read(path, "accumulator", 2)
    assert given.most_ranks == 3 and given.numel == accumulator.size
    kept = given.kept(2, 0.01)
    assert np.array_equal(kept.values, accumulator[kept.indices])


def test_everything_that_a_call_sends_is_counted():
    tensors = [Uniform(20_000).kept(rank, 0.05) for rank in range(4)]
    rows = {name: simulate(name, tensors) for name in ("dense", "allgather", "TopkA", "TopkDA split", "DSA")}
    # Two rounds of recursive halving and two of doubling. The allgather of the cards takes 2 messages, and the sums of
    # the boundaries, which only DSA has, and of the agreement 2 x 2 each.
    assert rows["DSA"]["messages"] == 4 + 10 and rows["DSA"]["small"] == 10
    assert rows["TopkA"]["messages"] == 2 + 6 and rows["TopkDA split"]["messages"] == 5 + 6
    assert rows["dense"] == {"messages": 6, "small": 0, "received": 1.5 * 80_000}
    settings = Config.load("topk_model", sparsifier="nonzero", index="rice")
    container = Pipeline(settings).encode(tensors[0].dense(), None, RngKey(0, 0, 0)).size
    assert rows["allgather"]["received"] == 3 * container


def test_the_emulated_network_states_its_baseline():
    rows = [
        {"name": "dense (Horovod)", "seconds": 2.4, "all": [2.3, 2.4, 2.5], "bytes_in": 150_000_000, "busy": 4.8},
        {"name": "DSA 1%", "seconds": 0.3, "all": [0.3], "bytes_in": 6_000_000, "busy": 0.5},
        {"name": "adapter: dense", "seconds": 2.6, "all": [2.6], "bytes_in": 150_000_000, "busy": 5.0},
        {"name": "adapter: topk_model 1%", "seconds": 1.3, "all": [1.3], "bytes_in": 3_000_000, "busy": 2.5},
    ]
    read = {"hosts": 4, "rate": "1gbit", "cores": 2, "load": 1.0,
            "results": [{"elements": 25_000_000, "input": "vectors", "rows": rows}]}  # fmt: skip
    said = table(read)
    assert "take 1.200 s on the wire alone, and it takes longer, 2.00 times as long" in said
    page = (ROOT / "docs" / "results" / "benchmarks.md").read_text()  # says once what is common to the tables
    assert "Horovod is shut down" in page and "baseline is `dense`" in page and "Input: vectors." in said
    assert "| DSA 1% | 0.300 (0.300 to 0.300) | 8.0x | 0.500 | 0.048 | 4.0x | 6.0 |" in said
    assert "| adapter: topk_model 1% | 1.300 (1.300 to 1.300) | 2.0x | 2.500 | 0.024 | 0.9x | 3.0 |" in said
    beside = table({**read, "rate": "memory"})
    assert "share its memory" in beside and "wire" not in beside
    assert "| adapter: topk_model 1% | 1.300 (1.300 to 1.300) | 2.0x | 2.500 |\n" in beside + "\n"
    assert [bits_per_second(rate) for rate in ("1gbit", "100mbit", "2.5gbit")] == [1e9, 1e8, 2.5e9]
