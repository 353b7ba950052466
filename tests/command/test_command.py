"""The command's frame, and the subcommands configs, bench and doctor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hvd_deepreduce
from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import presets
from hvd_deepreduce.needs import INSTALL
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.tools import bench, doctor, gradients, measuring, output, probes
from hvd_deepreduce.tools.app import app
from tests import cuda_emulator

SUBCOMMANDS = ("advise", "bench", "capture", "configs", "doctor", "inspect", "timeline")
ROOT = Path(__file__).parent.parent.parent


def run(*arguments, code=0):
    """What the command prints on standard output; on standard error where it is to fail, without a traceback."""
    ended = CliRunner().invoke(app, list(map(str, arguments)))
    assert ended.exit_code == code, (ended.output, ended.stderr, ended.exception)
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    return ended.stdout if code == 0 else ended.stderr


def test_python_m():
    ended = subprocess.run(
        [sys.executable, "-m", "hvd_deepreduce", "configs", "topk_rice_qsgd", "--json"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert json.loads(ended.stdout)["settings"] == Config.load("topk_rice_qsgd").to_dict()
    ended = subprocess.run(
        [sys.executable, "-m", "hvd_deepreduce", "configs", "no_such"], capture_output=True, text=True, cwd=ROOT
    )
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.startswith("hvd-deepreduce: no preset is named 'no_such'") and "Traceback" not in ended.stderr


def test_the_frame_loads_no_framework():
    code = (
        "import sys, hvd_deepreduce.tools.app;"
        "print(sorted({'torch', 'tensorflow', 'horovod', 'cupy', 'mpi4py', 'matplotlib'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.strip() == "[]"


def test_help_names_every_subcommand_and_the_exit_codes():
    text = run("--help")
    assert all(name in text for name in SUBCOMMANDS) and "Exit codes: 0: all is well." in text
    for name in SUBCOMMANDS:
        text = run(name, "--help")
        assert "Examples:" in text and f"hvd-deepreduce {name}" in text
    assert run("--version").strip() == hvd_deepreduce.__version__
    run(code=2)
    run("no_such", code=2)


def test_plain_output_has_one_line_for_each_row():
    lines = run("configs").splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(presets.files(every=False))
    assert not any(character in "".join(lines) for character in "─│\x1b")


def test_a_table_on_a_terminal_is_drawn(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output.table(("name", "number"), [("[bold]one", 1)])
    drawn = capsys.readouterr().out
    assert "─" in drawn and "[bold]one" in drawn


def test_json_has_no_numbers_that_json_lacks(capsys):
    output.print_json({"a": np.float32("nan"), "b": [np.int64(3), float("inf")], "c": Path("x"), "d": np.array([1.5])})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [3, None], "c": "x", "d": [1.5]}


def test_configs_lists_what_each_preset_sends():
    found = {one["name"]: one for one in json.loads(run("configs", "--all", "--json"))}
    assert list(found) == list(presets.files())
    recommended = found["recommended"]
    assert recommended["aliases"] == ["topk_rice_qsgd"] and not found["zipml"]["aliases"]
    assert (recommended["selects"], recommended["encodes"]) == ("topk 0.01", "rice_blocks + qsgd")
    assert found["densestream_model"]["encodes"] == "exchange densestream"
    assert found["zipml"]["encodes"] == "uniform"


@pytest.mark.parametrize("name", ["topk_rice_qsgd", "adamw_safe", "three_lc", "dgc", "densestream_model"])
def test_configs_explains(name):
    text = run("configs", name)
    assert presets.find(name).read_text().splitlines()[0].lstrip("# ") in text
    assert ("Bytes: not measured" if name == "densestream_model" else "Bytes: ") in text
    assert "From: " in text and "Settings:" in text
    found = json.loads(run("configs", name, "--json"))
    assert Config.load(found["settings"]) == Config.load(name)
    if name == "dgc":  # the density after its warm-up
        assert found["bytes_an_element"] < 0.01


def test_configs_checks_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("sparsifier: {name: topk, density: 0.02}\n")
    assert "a valid config" in run("configs", file) and "density: 0.02" in run("configs", file)
    for text, sentence in (
        ("sparsifier: {name: topk, density: 2}", "sparsifier.density is 2, which is not allowed"),
        ("no_such: 1", "no_such is not a key of a config"),
        ("sparsifier: none\nindex: rice", "sends all elements, so that there are no indices"),
        ("scope: model\nbucket_bytes: 5000", "bucket_bytes is 5000 and has no effect"),
        ("", "is empty"),
    ):
        file.write_text(text)
        assert sentence in run("configs", file, code=1)
    assert "cannot be read" in run("configs", tmp_path / "missing.yaml", code=1)


def test_bench_measures_configs_as_a_job_sends_them(tmp_path):
    vector = gradients.generated(20_000, 0)
    np.save(tmp_path / "one.npy", vector)
    given = ["bench", tmp_path / "one.npy", "--runs", 1, "--json"]
    found = json.loads(run(*given, "--config", "topk_model", "--config", "qsgd", "--config", "densestream_model"))
    top, dense = found["configs"]
    residual = np.zeros_like(vector)
    packed = Pipeline(Config.load("topk_model")).encode(vector, residual, RngKey(0, 0, 0), 2)
    assert top["bytes"] == packed.size and top["share_of_dense"] == packed.size / 80_000
    assert top["relative_error"] == pytest.approx(np.linalg.norm(residual) / np.linalg.norm(vector), rel=1e-4)
    assert dense["error_feedback"] is False and dense["bytes"] > top["bytes"]
    assert all(one[f"{key}_seconds"] > 0 for one in (top, dense) for key in ("encode", "decode", "copy"))
    assert list(found["left_out"]) == ["densestream_model"]


def test_bench_of_all_presets_and_codecs():
    found = json.loads(run("bench", "--numel", 3000, "--all", "--codecs", "--runs", 1, "--density", 0.1, "--json"))
    assert {one["name"] for one in found["configs"]} | set(found["left_out"]) == set(presets.files())
    assert {(one["kind"], one["name"]) for one in found["codecs"]} == {
        (kind, name) for kind, name, _ in measuring.all_codecs()
    }
    raw = next(one for one in found["codecs"] if (one["kind"], one["name"]) == ("value", "raw"))
    assert (raw["count"], raw["bits_an_element"], raw["relative_error"]) == (300, 32, 0)


def test_scopes_divide_a_model():
    """In scope tensor a tiny parameter goes uncompressed, and the others have containers of their own."""
    sizes, names = [3000, 5, 2000], ["a", "b", "c"]
    vector = gradients.generated(sum(sizes), 0)
    for scope, expected in (("model", [(0, 5005)]), ("tensor", [(0, 3000), (3005, 5005)]), ("bucket", None)):
        settings = {"bucket_bytes": 9000} if scope == "bucket" else {}
        whole = measuring.WholeConfig(Config.load(scope=scope, **settings), names, sizes, vector)
        parts = [one.part for one in whole._slices]
        assert parts == ([(3000, 5005), (0, 3000)] if expected is None else expected)
        assert 0 < whole.error < 1
        whole.reset()
        first = whole.encode()
        whole.reset()
        assert np.array_equal(first, whole.encode())


def test_bench_draws(tmp_path):
    file = tmp_path / "picture.png"
    text = run("bench", "--numel", 2000, "--config", "topk_model", "--codecs", "--runs", 1, "--picture", file)
    assert file.read_bytes().startswith(b"\x89PNG") and "topk_model" in text and "Codecs on the largest 1.00%" in text


def test_bench_says_what_is_wrong(tmp_path, monkeypatch):
    assert "must be above 0" in run("bench", "--density", 2, code=2)
    assert "choose from accumulator, gradient" in run("bench", "--kind", "other", code=2)
    assert "no preset is named 'other'" in run("bench", "--config", "other", code=1)
    assert "of zipml has none" in run("bench", "--config", "zipml", "--density", 0.1, code=1)
    assert "must end in .png" in run("bench", "--picture", tmp_path / "picture.txt", code=2)
    assert "there is no such file" in run("bench", tmp_path / "missing.npy", code=1)
    np.save(tmp_path / "nan.npy", np.array([1, np.nan], np.float32))
    assert "is not finite" in run("bench", tmp_path / "nan.npy", code=1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--picture needs matplotlib" in run("bench", "--picture", tmp_path / "picture.png", code=1)


def test_times_are_medians_of_turns_without_the_first():
    called = []
    measuring.timed(lambda: called.append("a"), lambda: called.append("b"), runs=2, before=lambda: called.append("-"))
    assert called == ["-", "a", "-", "b"] * 3


FOUND = {
    "kernels": {"level": 1, "bytes": 2008, "elements": 100_000},
    "torch": {"version": "2.13.0", "cuda": None, "gpus": [], "backends": ["gloo"]},
    "tensorflow": {"version": "2.21.0", "keras": "2.x", "operations": ["2.21.0"], "gpus": []},
    "horovod.torch": {"built": ["gloo", "mpi"], "size": 1},
    "horovod.tensorflow": {"built": ["gloo", "mpi"], "size": 1},
    "mpi4py": {"version": "4.1.2", "library": "Open MPI v4.1.8", "threads": True},
    "cupy": {"version": "14.2.0", "gpus": ["NVIDIA H100"], "runtime": 12090, "bytes": 2008, "elements": 100_000},
}


def examined(monkeypatch, absent=(), code=0, **changes):
    """The doctor's lines by name, where the probes find this."""
    found = {**FOUND, **{key.replace("__", "."): one for key, one in changes.items()}}
    monkeypatch.setattr(doctor, "_installed", lambda name: name not in absent)
    monkeypatch.setattr(doctor, "probe", found.get)
    ended = CliRunner().invoke(app, ["doctor", "--json"])
    assert ended.exit_code == code
    told = json.loads(ended.stdout)
    assert told["works"] == (code == 0)
    return {line["name"]: line for line in told["components"]}


def test_doctor_finds_nothing_wrong(monkeypatch):
    lines = examined(monkeypatch)
    assert {name: line["state"] for name, line in lines.items() if name in FOUND} == dict.fromkeys(FOUND, "ok")
    assert lines["kernels"]["found"].startswith("AVX2") and "NVIDIA H100" in lines["cupy"]["found"]
    assert hvd_deepreduce.__version__ in lines["system"]["found"]


@pytest.mark.parametrize(("name", "found", "state", "advice"), [
    ("tensorflow", {**FOUND["tensorflow"], "keras": "3.15.1"}, "note", "TF_USE_LEGACY_KERAS=1"),
    ("tensorflow", {**FOUND["tensorflow"], "operations": ["2.20.0"]}, "note", "were not built for TensorFlow 2.21.0"),
    ("horovod.torch", {"built": ["gloo"], "size": 1}, "note", "without MPI"),
    ("horovod.torch", {"built": [], "size": 1}, "fails", "no way to communicate"),
    ("mpi4py", {**FOUND["mpi4py"], "threads": False}, "note", "MPI_THREAD_MULTIPLE"),
    ("mpi4py", {**FOUND["mpi4py"], "library": "Open MPI v5.0.6"}, "note", "use mpirun"),
    ("cupy", {"version": "14.2.0", "gpus": [], "why": "no driver"}, "note", "no driver"),
    ("kernels", "its process was ended by SIGILL", "fails", "SIGILL"),
    ("torch", "ImportError: libcudart.so.13", "fails", "libcudart.so.13. To fix it, install torch again"),
])  # fmt: skip
def test_doctor_says_what_will_not_work(monkeypatch, name, found, state, advice):
    lines = examined(monkeypatch, code=int(state == "fails"), **{name.replace(".", "__"): found})
    assert lines[name]["state"] == state and advice in lines[name]["advice"]
    others = [line for other, line in lines.items() if other in FOUND and other != name]
    assert all(line["state"] == "ok" for line in others)


def test_doctor_says_what_to_do_once(monkeypatch):
    old = f"ImportError: gradients on a GPU need CuPy 14, and this is 13.6.0: run {INSTALL['cupy']}"
    assert examined(monkeypatch, code=1, cupy=old)["cupy"]["advice"] == f"it does not work: {old}"


def test_doctor_where_little_is_installed(monkeypatch):
    lines = examined(
        monkeypatch, absent=("torch", "tensorflow", "horovod.torch", "horovod.tensorflow", "cupy", "mpi4py")
    )
    assert lines["torch"]["state"] == "absent" and INSTALL["torch"] in lines["torch"]["advice"]
    lines = examined(monkeypatch, absent=("cupy",), torch={**FOUND["torch"], "cuda": "12.8", "gpus": ["NVIDIA H100"]})
    assert INSTALL["cupy"] in lines["torch"]["advice"]


def test_a_probe_that_ends_badly_is_told(monkeypatch, tmp_path):
    assert doctor.probe("no_such") == "KeyError: 'no_such'"
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    assert "did not end" in doctor.probe("kernels")
    monkeypatch.setattr(doctor, "SECONDS", 60.0)
    program = tmp_path / "python"
    for body, said in (("kill -SEGV $$", "SIGSEGV"), ("echo other", "it ended with 'other'"), ("exit 3", "nothing")):
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setattr(doctor.sys, "executable", str(program))
        found = doctor.probe("kernels")
        assert isinstance(found, str) and said in found


def test_the_kernels_are_probed_in_a_process_of_their_own():
    found = doctor.probe("kernels")
    assert found["elements"] == probes.NUMEL and 0 < found["bytes"] < probes.NUMEL // 25


def test_a_round_trip_finds_a_device_that_computes_something_else(monkeypatch):
    with pytest.raises(RuntimeError, match="do not add up"):
        probes.round_trip(lambda array: array * 2)
    encode = bundle.encode
    with monkeypatch.context() as patch:  # as a job's containers are made
        patch.setattr(bundle, "encode", lambda gradient, *rest: encode(gradient * 2, *rest))
        with pytest.raises(RuntimeError, match="do not add up"):
            probes.round_trip(np.copy)
    monkeypatch.setattr(probes, "PRESET", "topk_raw")
    assert probes.round_trip(np.copy)["elements"] == probes.NUMEL


def test_the_default_configs_are_presets():
    assert set(bench.CONFIGS) <= set(presets.names())


def test_the_page_names_what_there_is():
    """Each line of docs/command.md that calls the command has a subcommand and options that exist."""
    lines = (ROOT / "docs" / "command.md").read_text("utf-8").splitlines()
    calls = [line.split()[1:] for line in lines if line.startswith("    hvd-deepreduce ")]
    assert {call[0] for call in calls} == set(SUBCOMMANDS)
    for name, *arguments in calls:
        text = run(name, "--help")
        for option in (one for one in arguments if one.startswith("--")):
            assert option in text, f"hvd-deepreduce {name} has no {option}"


@pytest.mark.emulator
def test_a_round_trip_on_a_device(monkeypatch):
    if missing := cuda_emulator.available():
        pytest.skip(missing)
    monkeypatch.setattr(probes, "NUMEL", 3000)
    assert probes.round_trip(cuda_emulator.asarray)["elements"] == 3000
