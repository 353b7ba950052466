"""Files and options that a user may give by mistake: each is a sentence and an exit code, never a traceback."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hvd_deepreduce import captured
from hvd_deepreduce.command import output, ranks
from hvd_deepreduce.command.app import app

VECTOR = np.arange(1, 7, dtype=np.float32)


def sentence(*arguments, code=1):
    ended = CliRunner().invoke(app, list(map(str, arguments)))
    assert ended.exit_code == code and isinstance(ended.exception, SystemExit), ended.exception
    return ended.stderr


def rewritten(file, **parts):
    captured.write(file, {("gradient", 0): VECTOR}, ["a", "b"], [2, 4], {"shapes": [[2], [2, 2]]})
    with np.load(file) as arrays:
        np.savez(file, **{**arrays, **parts})


def test_files_that_are_not_what_their_names_say(tmp_path):
    (tmp_path / "empty.pt").touch()
    assert "cannot be read as PyTorch's: EOFError" in sentence("inspect", tmp_path / "empty.pt")
    np.save(tmp_path / "one.npy", VECTOR)
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    assert "and is another: .npy is one array" in sentence("inspect", tmp_path / "one.npz")
    np.savez(tmp_path / "two.npz", VECTOR)
    (tmp_path / "two.npz").rename(tmp_path / "two.npy")
    assert "and is another: .npy is one array" in sentence("inspect", tmp_path / "two.npy")
    np.savez_compressed(tmp_path / "cut.npz", a=np.random.default_rng(0).standard_normal(1000).astype("f"))
    packed = bytearray((tmp_path / "cut.npz").read_bytes())
    packed[200:260] = bytes(60)
    (tmp_path / "cut.npz").write_bytes(packed)
    assert "cannot be read as NumPy's" in sentence("inspect", tmp_path / "cut.npz")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"about": np.array("not JSON")}, "does not say how it was made"),
        ({"about": np.array("[1]")}, "does not say how it was made"),
        ({"about": np.array('{"shapes": [["2"], [2, 2]]}')}, "does not say how it was made"),
        ({"about": np.array('{"shapes": [[2], [2, 3]]}')}, "are not of their sizes"),
        ({"names": np.array(["a", "b", "c"])}, "has 3 names and 2 sizes"),
    ],
)
def test_captured_files_that_were_altered(tmp_path, parts, said):
    rewritten(tmp_path / "file.npz", **parts)
    assert said in sentence("inspect", tmp_path / "file.npz")


@pytest.mark.parametrize("command", [("bench", "--codecs"), ("advise", "--ranks", 4, "--bandwidth", "1G")])
def test_gradients_that_cannot_be_measured(tmp_path, command):
    for value, said in ((np.nan, "is not finite"), (0.0, "has only zeros")):
        np.save(tmp_path / "one.npy", np.full(100, value, np.float32))
        assert said in sentence(command[0], tmp_path / "one.npy", *command[1:])


def test_floats_that_numpy_lacks_and_other_cases_of_a_suffix(tmp_path):
    torch.save(torch.randn(300).to(torch.float8_e4m3fn), tmp_path / "small.PT")
    ended = CliRunner().invoke(app, ["inspect", str(tmp_path / "small.PT"), "--json"])
    assert ended.exit_code == 0 and "numel" in ended.stdout and json.loads(ended.stdout)


def test_a_config_under_which_nothing_is_compressed():
    ended = CliRunner().invoke(app, ["bench", "--numel", "1", "--config", "qsgd", "--runs", "1"])
    assert "so small that they go uncompressed, so no container is made" in ended.stdout


def test_a_dense_step_that_is_shorter_than_its_exchange():
    ended = CliRunner().invoke(
        app, ["advise", "1M", "--ranks", "4", "--bandwidth", "100M", "--dense-step", "1", "--config", "topk_model"]
    )
    assert "A dense step of 1 ms was given, but the exchange alone is predicted to take" in ended.stdout
    assert "give --compute" not in ended.stdout


def test_a_timeline_with_other_things(tmp_path):
    (tmp_path / "one.json").write_text("[1,2]")
    assert "one event is 1" in sentence("timeline", tmp_path / "one.json", "--out", tmp_path / "all.json")


def test_a_single_rank_of_torchrun_measures_no_link(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    assert ranks.of_launcher() is None


def test_a_narrow_terminal_cuts_no_cell(monkeypatch, capsys):
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    output.table(("a long name of a column", "numbers"), [("something", "123,456,789")] * 2)
    output.paragraph("some words " * 9, indent=" " * 25)
    shown = capsys.readouterr().out
    assert "something" in shown and shown.count("123,456,789") == 2 and "…" not in shown
