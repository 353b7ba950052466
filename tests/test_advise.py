"""The command ``advise``: what it reads, what it prints, and what it measures under launchers."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from hvd_deepreduce import Config
from hvd_deepreduce.exchange.costs import Link
from hvd_deepreduce.tools import gradient_file, quantities
from hvd_deepreduce.tools.advise import command, prediction, speeds
from hvd_deepreduce.tools.advise.command import sizes_of, vectors_of
from hvd_deepreduce.tools.advise.report import Advice
from tests.command.test_command import run
from tests.ranks import launch
from tests.selection import thorough

SMALL = ["advise", "200K", "--ranks", "4", "--config", "topk_rice_qsgd", "--config", "adamw_small"]


def advice(*arguments):
    return json.loads(run(*arguments, "--json"))


def test_sizes_of_models():
    assert sizes_of("1000") == [1000]
    assert sizes_of("0.5M") == [166_667, 166_667, 166_666]
    assert sizes_of("64,4K,1m") == [64, 4000, 1_000_000]
    assert [sum(sizes_of(one)) for one in ("7B", "1.5b", "125 M", "10_000")] == [7e9, 1.5e9, 125e6, 10_000]


@pytest.mark.parametrize(
    "texts, rate",
    [
        (["1G", "1Gbit", "1Gb/s", "1 Gbit/s", "1gbps", "1g", "1000M", "1GBit/s", "1e3 mbits/s", "1Gbit/sec"], 1e9),
        (["1GB/s", "1 GBps", "1Gbyte/s", "8G", "1000MBytes/s"], 8e9),
        (["1Gib/s"], 2**30), (["100mbit"], 1e8), (["5bit/s"], 5),
    ],
)  # fmt: skip
def test_rates_as_people_write_them(texts, rate):
    assert [quantities.bits_per_second(one, "--bandwidth") for one in texts] == [pytest.approx(rate)] * len(texts)


def test_what_configs_select_from(tmp_path):
    file, one, two = tmp_path / "x.npz", np.ones(7, np.float32), np.full(7, 2, np.float32)
    gradient_file.write(file, {("gradient", 0): one, ("accumulator", 0): two}, ["a", "b"], [3, 4], {})
    sizes, vectors = vectors_of(file, 1 << 27)
    assert sizes == [3, 4]
    assert np.array_equal(vectors(Config.load("topk_model"))[0], two)
    assert np.array_equal(vectors(Config.load("qsgd"))[0], one)
    np.save(tmp_path / "y.npy", one)
    sizes, vectors = vectors_of(tmp_path / "y.npy", 1 << 27)
    assert sizes == [7] and np.array_equal(vectors(Config.load("qsgd"))[0], one)


def test_a_slow_link_is_for_compression():
    found = advice(*SMALL, "--bandwidth", "10M", "--compute", "5", "--optimizer", "sgd")
    ways = {one["name"]: one for one in found["predictions"]}
    assert list(ways) == ["no exchange", "dense", "fp16", "topk_rice_qsgd", "adamw_small"]
    assert ways["dense"]["seconds"] > 0.5
    assert ways["no exchange"]["seconds"] == 0.005 and ways["dense"]["received"] == pytest.approx(1.2e6)
    assert ways["adamw_small"]["updates"] and ways["adamw_small"]["every"] == 4
    assert found["job"]["numel"] == 200_000 and found["link"]["bits_per_second"] == 1e7


def test_updates_are_priced_by_the_local_step():
    """Bytes and time of an exchange are divided by the 4 steps from one to the next."""
    arguments = ["advise", "200K", "--ranks", "4", "--bandwidth", "1M", "--compute", "5", "--optimizer", "adamw"]
    found = advice(*arguments, "--config", "adamw_safe")
    ways = {one["name"]: one for one in found["predictions"]}
    assert found["best"] == "adamw_safe" and ways["adamw_safe"]["every"] == 4
    # An exchange receives 3 containers of 9,000 elements, of about 8 bits.
    assert ways["adamw_safe"]["received"] == pytest.approx(3 * 9000 / 4, rel=0.4)
    link = 8 * ways["adamw_safe"]["received"] / 1e6
    assert link < ways["adamw_safe"]["seconds"] - 0.005 < 1.3 * link


README = ["advise", "25.6M", "--ranks", "4", "--bandwidth", "1G", "--compute", "100"]


@pytest.fixture(scope="module")
def readme():
    """What the README's command says in a pipe, its JSON. Codecs are timed on a shorter vector than usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speeds.shortened, "__defaults__", (1 << 20,))
        return advice(*README)


def test_the_readme_s_command_recommends_what_is_safe(readme):
    assert readme["best"] is None and "--optimizer sgd" in readme["advice"][0]
    assert readme["best_with"]["sgd"] in ("recommended", "fast", "small", "reduce_scatter")
    assert readme["best_with"]["adam"] == "adamw_safe"
    assert {"smallest", "diloco", "adamw_safe"} < {one["name"] for one in readme["predictions"]}


@pytest.mark.parametrize("columns", [80, 120, None])
def test_nothing_is_cut(columns, monkeypatch, capsys, readme):
    """On terminals of 80 and 120 columns, and in a pipe; with times of a large model."""
    rows = [prediction.Prediction(**one) for one in readme["predictions"]]
    rows = [replace(one, seconds=100 * one.seconds, link=400 * one.link) for one in rows]
    link = Link(**readme["link"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    command.show(Advice(prediction.Job([25_600_000], 4), link, rows), False)
    shown = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert "…" not in shown and all(len(re.findall(rf"\b{one.name}\b", shown)) for one in rows)
    assert not [line for line in shown.splitlines() if columns and len(line) > columns]
    assert ("──" in shown) == (columns is not None)


def test_the_optimizer_is_asked_for_on_a_terminal(monkeypatch, capsys):
    answers = iter(["admw", "adamw"])
    monkeypatch.setattr("builtins.input", lambda text: next(answers))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert command.asked_for() == "adamw"
    assert "did you mean 'adamw'" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("builtins.input", lambda text: "")
    assert command.asked_for() is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    monkeypatch.setattr("builtins.input", None)
    assert command.asked_for() is None


def test_dense_is_best_where_it_is(monkeypatch):
    monkeypatch.setattr(speeds, "stack", lambda: 0.0)  # it may be slower than the conversion to 16 bits
    link, cores = ["--bandwidth", "1000G", "--latency", "0"], ["--cores", "2", "--threads", "1"]
    said = run(*SMALL, "--optimizer", "sgd", *link, "--compute", "5", *cores)
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
    gradient_file.write(file, some, ["a", "b"], [20_000, 30_000], {})
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
        (["1M", "--ranks", "1", "--bandwidth", "1G"], "--ranks is 1; it must be 2 or more"),
        (["1M", "--ranks", "4", "--per-host", "8", "--bandwidth", "1G"], "cannot have more ranks than the job"),
        (["1M", "--ranks", "4", "--bandwidth", "0"], "--bandwidth is '0'; it must be a positive rate"),
        (["1M", "--ranks", "4", "--bandwidth", "1"], "1 what? 1G is 1 Gbit/s"),
        (["1M", "--ranks", "4", "--bandwidth", "1GB"], "may mean bits or bytes: write 1Gbit/s or, for bytes, 1GB/s"),
        (["1M", "--ranks", "4", "--bandwidth", "10GBPS"], "may mean bits or bytes"),
        (["1M", "--ranks", "4", "--bandwidth", "1e9G"], "no link is so fast"),
        (["1M", "--ranks", "4", "--bandwidth", "1G", "--compute", "inf"], "--compute is inf; it must be finite"),
        (["1M", "--ranks", "4", "--bandwidth", "1G", "--compute", "1", "--dense-step", "2"], "are both given"),
        (["1M", "--ranks", "4", "--bandwidth", "1G", "--optimizer", "admw"], "did you mean 'adamw'"),
        (["x.npz,1M", "--ranks", "4", "--bandwidth", "1G"], "MODEL is 'x.npz'"),
    ],
)
def test_wrong_usage_is_a_sentence_before_anything_is_measured(arguments, said, monkeypatch):
    monkeypatch.setattr(speeds, "stack", None)
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
    # A bucket selects by itself, and of a long capture each tensor counts.
    in_buckets = Config.load("topk_model", scope="bucket", bucket_bytes=4_000)
    large = np.random.default_rng(0).standard_normal(1000, np.float32)
    vector = np.concatenate([np.full(3000, 1e-3, np.float32), large])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speeds.shortened, "__defaults__", (2000,))
        bucketed = speeds.codec(in_buckets, [1500, 1500, 1000], [vector])
        assert bucketed.kept == 2 * (12 + 7) and bucketed.size > speeds.codec(config, [1500, 1500, 1000], [vector]).size
        reversed_ = speeds.codec(config, [1000, 3000], [vector[::-1].copy()])
        assert reversed_.size == pytest.approx(speeds.codec(config, [3000, 1000], [vector]).size, rel=0.2)
    scheduled = Config.load("topk_model", density_schedule=[[1000, 0.5]])
    assert speeds.codec(scheduled, [4000], [vector]).size == speeds.codec(config, [4000], [vector]).size
    assert speeds.shortened([300, 100], 40) == [30, 10] and speeds.shortened([30, 10], 40) == [30, 10]
    assert 1e-12 < speeds.stack() < 1e-6


PROGRAM = """
import sys
from hvd_deepreduce.tools.app import main
main()
"""


@pytest.mark.launch
@thorough
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_the_link_is_measured(launcher, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = ["advise", "200K", "--measure", "--config", "topk_rice_qsgd", "--cores", "0.5", "--json"]
    arguments += ["--optimizer", "adamw"]
    said = launch(launcher, 2, tmp_path / "program.py", *arguments, seconds=120).stdout
    found = json.loads(said[said.index("{\n") : said.rindex("}\n") + 1])
    assert found["job"]["ranks"] == found["job"]["per_host"] == 2 and found["job"]["sharing"] == 2
    assert 1e7 < found["link"]["bits_per_second"] < 1e13 and 0 < found["link"]["latency"] < 1
    assert found["link"]["cpu"] > 0 and (found["link"]["cpu_half"] is not None) == (launcher == "torchrun")
    assert [one["name"] for one in found["predictions"]] == ["no exchange", "dense", "fp16", "topk_rice_qsgd"]
    assert found["best"] in ("dense", "fp16")


def test_votes_are_for_no_other_optimizer():
    arguments = ["advise", "200K", "--ranks", "4", "--bandwidth", "1M", "--compute", "5", "--optimizer", "sgd"]
    found = advice(*arguments, "--config", "sign_momentum")
    ways = {one["name"]: one["seconds"] for one in found["predictions"]}
    assert ways["sign_momentum"] < ways["fp16"] / 10 and found["best"] == "fp16"
    assert "sign_momentum" in found["advice"][0] and "it is for the optimizer SignMomentum" in found["advice"][0]
    said = advice(*arguments[:-1], "adamw", "--config", "sign_momentum")["advice"][0]
    assert "If the optimizer SignMomentum can take this one's place" in said and "with preset sign_momentum" in said
    assert "lost nothing on a GPT in 2,000 steps" in said and "it is for the optimizer" not in said
