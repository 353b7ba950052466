"""The command ``advise``: what it reads, what it prints, and what it measures under launchers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from hvd_deepreduce import Config, captured, speeds
from hvd_deepreduce.command.advise import sizes_of, vectors_of
from hvd_deepreduce.command.app import app
from tests.ranks import launch

SMALL = ["advise", "200K", "--ranks", "4", "--config", "topk_rice_qsgd", "--config", "adamw_small"]


def run(*arguments, code=0):
    found = CliRunner().invoke(app, [str(one) for one in arguments])
    assert found.exit_code == code, found.output
    return found.output


def advice(*arguments):
    return json.loads(run(*arguments, "--json"))


def test_sizes_of_models():
    assert sizes_of("1000") == [1000]
    assert sizes_of("0.5M") == [166_667, 166_667, 166_666]
    assert sizes_of("64,4K,1m") == [64, 4000, 1_000_000]


def test_what_configs_select_from(tmp_path):
    file, one, two = tmp_path / "x.npz", np.ones(7, np.float32), np.full(7, 2, np.float32)
    captured.write(file, {("gradient", 0): one, ("accumulator", 0): two}, ["a", "b"], [3, 4], {})
    sizes, vectors = vectors_of(file)
    assert sizes == [3, 4]
    assert np.array_equal(vectors(Config.load("topk_model"))[0], two)
    assert np.array_equal(vectors(Config.load("qsgd"))[0], one)
    np.save(tmp_path / "y.npy", one)
    sizes, vectors = vectors_of(tmp_path / "y.npy")
    assert sizes == [7] and np.array_equal(vectors(Config.load("qsgd"))[0], one)


def test_a_slow_link_is_for_compression():
    found = advice(*SMALL, "--bandwidth", "10M", "--compute", "5")
    ways = {one["name"]: one for one in found["predictions"]}
    assert list(ways) == ["no exchange", "dense", "fp16", "topk_rice_qsgd", "adamw_small"]
    assert found["best"] == "topk_rice_qsgd" and ways["dense"]["seconds"] > 0.5
    assert ways["no exchange"]["seconds"] == 0.005 and ways["dense"]["received"] == pytest.approx(1.2e6)
    assert ways["adamw_small"]["updates"] and ways["adamw_small"]["every"] == 4
    assert found["job"]["numel"] == 200_000 and found["link"]["bits_per_second"] == 1e7


def test_dense_is_best_where_it_is(monkeypatch):
    monkeypatch.setattr(speeds, "stack", lambda: 0.0)  # it may be slower than the conversion to 16 bits
    said = run(*SMALL, "--bandwidth", "1000G", "--latency", "0", "--compute", "5", "--cores", "2", "--threads", "1")
    assert "Use dense gradients: compression does not pay here." in said and "times as long" in said
    assert "a core that its computing leaves free" in said and "Overlap:" in said and "a ring allreduce" in said
    assert "25 us of a core for each of 1 tensors" in said


def test_computing_is_found_from_a_dense_step():
    found = advice(*SMALL, "--bandwidth", "100M", "--dense-step", "250")
    dense = next(one for one in found["predictions"] if one["name"] == "dense")
    assert dense["seconds"] == pytest.approx(0.25) and 0.1 < found["job"]["compute"] < 0.25


def test_without_computing_the_advice_says_so():
    assert "give --compute" in run(*SMALL, "--bandwidth", "1G")


def test_captured_gradients_are_encoded(tmp_path):
    """Large elements that are neighbours take fewer bytes than generated ones."""
    file, vector = tmp_path / "x.npz", np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    vector[1000:] *= 1e-6
    some = {("gradient", 0): vector, ("accumulator", 0): vector}
    captured.write(file, some, ["a", "b"], [20_000, 30_000], {})
    arguments = ["--ranks", "4", "--bandwidth", "1G", "--config", "smallest", "--config", "qsgd"]
    real, generated = (
        {one["name"]: one["received"] for one in advice("advise", model, *arguments)["predictions"]}
        for model in (file, "20000,30000")
    )
    assert real["smallest"] < 0.95 * generated["smallest"] and real["dense"] == generated["dense"]
    assert "no such" in run("advise", tmp_path / "y.npz", *arguments, code=1).lower()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["0"], "MODEL is '0'; it must be a positive number"),
        (["big"], "MODEL is 'big'"),
        (["5,0.1"], "a tensor has 1 element or more"),
        (["1M"], "give --ranks and --bandwidth, or --measure"),
        (["1M", "--ranks", "4", "--bandwidth", "fast"], "--bandwidth is 'fast'"),
        (["1M", "--ranks", "4", "--per-host", "3", "--bandwidth", "1G"], "equally many ranks"),
        (["1M", "--measure"], "--measure needs the ranks of a job"),
    ],
)
def test_wrong_usage_is_a_sentence(arguments, said):
    assert said in run("advise", *arguments, code=2)


def test_an_unknown_preset_is_a_sentence():
    said = run("advise", "1M", "--ranks", "4", "--bandwidth", "1G", "--config", "topk_rice", code=1)
    assert "topk_rice" in said and "topk_rice_qsgd" in said


def test_speeds_are_those_of_whole_models():
    """Twice the model takes about twice the bytes, also where only a part of it is measured."""
    config = Config.load("topk_model")
    once, twice = (speeds.codec(config, sizes, speeds.gradients(sizes)) for sizes in ([100_000], [100_000, 100_000]))
    assert twice.size == pytest.approx(2 * once.size, rel=0.05) and (once.kept, twice.kept) == (1000, 2000)
    assert min(once.encode, once.decode_each + once.decode) > 0
    assert speeds.shortened([300, 100], 40) == [30, 10] and speeds.shortened([30, 10], 40) == [30, 10]
    assert 1e-12 < speeds.stack() < 1e-6


PROGRAM = """
import sys
from hvd_deepreduce.command.app import main
main()
"""


@pytest.mark.launch
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_the_link_is_measured(launcher, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = ["advise", "200K", "--measure", "--config", "topk_rice_qsgd", "--cores", "0.5", "--json"]
    said = launch(launcher, 2, tmp_path / "program.py", *arguments, seconds=120).stdout
    found = json.loads(said[said.index("{\n") : said.rindex("}\n") + 1])
    assert found["job"]["ranks"] == found["job"]["per_host"] == 2 and found["job"]["sharing"] == 2
    assert 1e7 < found["link"]["bits_per_second"] < 1e13 and 0 < found["link"]["latency"] < 1
    assert found["link"]["cpu"] > 0 and (found["link"]["cpu_half"] is not None) == (launcher == "torchrun")
    assert [one["name"] for one in found["predictions"]] == ["no exchange", "dense", "fp16", "topk_rice_qsgd"]
