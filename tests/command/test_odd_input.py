"""Files and options that a user may give by mistake: each is a sentence and an exit code, never a traceback."""

import json
import re
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hvd_deepreduce.codecs.interfaces import RngKey, value_codecs
from hvd_deepreduce.engine.timeline import START
from hvd_deepreduce.tools import gradient_file, output, ranks
from hvd_deepreduce.tools.app import app
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.standalone import Container
from tests.command.test_command import run

F32 = np.dtype(np.float32)
VECTOR = np.arange(1, 7, dtype=np.float32)
sentence = partial(run, code=1)


def rewritten(file, **parts):
    gradient_file.write(file, {("gradient", 0): VECTOR}, ["a", "b"], [2, 4], {"shapes": [[2], [2, 2]]})
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


def header(shape, descr="<f4"):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text.encode()


def member(file, name, data):
    """Replaces a member of an ``.npz`` by these bytes."""
    with zipfile.ZipFile(file) as old:
        kept = {one: old.read(one) for one in old.namelist() if one != f"{name}.npy"}
    with zipfile.ZipFile(file, "w") as new:
        for one, content in {**kept, f"{name}.npy": data}.items():
            new.writestr(one, content)


GOLDEN = Path(__file__).parent.parent / "golden"
OBJECTS = np.array([{}], dtype=object)


def hostile_files(folder):
    """Name of each, and what is said of it. Most are some hundred bytes, and announce what no memory holds."""
    rewritten(folder / "deep.npz", about=np.array("[" * 100_000))
    yield "deep.npz", "does not say how it was made"
    for name in ("names", "sizes", "about", "gradient_0"):
        rewritten(folder / f"{name}_objects.npz", **{name: OBJECTS})
        yield f"{name}_objects.npz", f"'{name}' cannot be read, so it was cut or altered: it holds Python objects"
    for name, shape, descr in (("names", "1099511627776,", "<U9"), ("gradient_0", "1152921504606846976,", "<f4")):
        rewritten(folder / f"{name}_large.npz")
        member(folder / f"{name}_large.npz", name, header(shape, descr))
        yield f"{name}_large.npz", f"'{name}' cannot be read, so it was cut or altered: it announces"
    rewritten(folder / "numbers.npz", names=np.array([1, 2]))
    yield "numbers.npz", "names or sizes of parameters that are something else"
    rewritten(folder / "negative.npz", sizes=np.array([-2, 8]))
    yield "negative.npz", "names or sizes of parameters that are something else"
    rewritten(folder / "rank.npz", **{"gradient_" + "9" * 5000: VECTOR, "names": np.array(["a"] * 2)})
    yield "rank.npz", None
    gradient_file.write(folder / "nothing.npz", {("gradient", 0): VECTOR[:0]}, [], [], {})
    yield "nothing.npz", "holds no elements"
    (folder / "large.npy").write_bytes(header("17179869184,") + bytes(16))
    yield "large.npy", "it announces 68,719,476,736 bytes"
    np.savez(folder / "plain.npz", a=VECTOR)
    member(folder / "plain.npz", "a", header("17179869184,"))
    yield "plain.npz", "it announces 68,719,476,736 bytes"
    np.savez(folder / "text.npz", a=VECTOR)
    member(folder / "text.npz", "a", b"text")
    yield "text.npz", "cannot be read as NumPy's"
    for name, tensor, said in (
        ("expanded", torch.zeros(1).expand(2**34), "announces 17,179,869,184 elements"),
        ("sparse", torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2**36,)), "announces 68,719,476,736"),
        ("meta", torch.zeros(3, device="meta"), "holds a tensor 'meta' that is no array (torch.float32, meta)"),
        ("quantized", torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), "'quantized' that is no array"),
        ("nested", torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "PyTorch's|no array"),
    ):
        torch.save(tensor, folder / f"{name}.pt")
        yield f"{name}.pt", said
    key = RngKey(0, 0, 0)
    section = np.frombuffer(np.uint32(1).tobytes() + np.float32(0.5).tobytes(), np.uint8)
    none = np.empty(0, np.uint8)
    quantile = value_codecs.by_name["quantile"].id
    one = wire.pack(Container(0, 0, quantile, F32, 10**9, 10**9, key, 0, none, section, none))
    assert one.size == 72
    (folder / "large.hvdr").write_bytes(one.tobytes())
    yield "large.hvdr", "announces 1,000,000,000 elements, and at most 134,217,728 are read: if you trust it"


@pytest.mark.filterwarnings("ignore")
def test_hostile_files_are_a_sentence_at_once(tmp_path):
    for name, said in hostile_files(tmp_path):
        ended = CliRunner().invoke(app, ["inspect", str(tmp_path / name)])
        assert ended.exception is None or isinstance(ended.exception, SystemExit), (name, ended.exception)
        assert ended.exit_code == (said is not None), (name, ended.output)
        assert said is None or re.search(said if "|" in said else re.escape(said), ended.stderr), (name, ended.stderr)
        assert len(ended.stderr) < 1000 and "\x1b" not in ended.output
    (tmp_path / "few.hvdr").write_bytes((GOLDEN / "dense-fit_poly.hvdr").read_bytes())
    assert "raise --most-elements" in sentence("inspect", tmp_path / "few.hvdr", "--most-elements", 5)


def test_configs_that_stand_for_more_than_a_config_holds(tmp_path):
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{at}: &a{at} [{', '.join(10 * [f'*a{at - 1}'])}]\n" for at in range(1, 12)
    )
    for text, said in (
        (laughs, "holds more than 100,000 values"), ("a: &a [*a]", "holds more than 100,000 values"),
        ("[" * 5000, "is not YAML"), ("seed: " + "9" * 5000, "is not YAML"), ("seed: 2020-99-99", "is not YAML"),
        ("seed: 0x" + "f" * 5000, "an integer of more than 64 bits"), ("- " + "x" * 9000, "of the form 'key: value'"),
    ):  # fmt: skip
        (tmp_path / "config.yaml").write_text(text)
        found = sentence("configs", tmp_path / "config.yaml")
        assert said in found and len(found) < 2000


def test_timelines_that_are_altered(tmp_path):
    good = {"args": {START: 5}}
    for events, said in (
        ([{"args": 5}], f"has no {START}"), ([{"args": {START: "x"}}], "has the time x"),
        ([good, {"ts": [1]}], "has the time [1]"), ([good, {"ts": 10**400}], "has the time an integer"),
        ([["x" * 1000]], "one event is"), ([good, {"ts": float("nan")}], "has the time NaN"),
    ):  # fmt: skip
        (tmp_path / "t.json").write_text(json.dumps(events))
        assert said in sentence("timeline", tmp_path / "t.json", "--out", tmp_path / "all.json")
    (tmp_path / "t.json").write_text("[" + "[" * 100_000)
    assert "nested too deep" in sentence("timeline", tmp_path / "t.json", "--out", tmp_path / "all.json")


@pytest.mark.parametrize("command", [("bench", "--codecs"), ("advise", "--ranks", 4, "--bandwidth", "1G")])
def test_gradients_that_cannot_be_measured(tmp_path, command):
    for value, said in ((np.nan, "is not finite"), (0.0, "has only zeros")):
        np.save(tmp_path / "one.npy", np.full(100, value, np.float32))
        assert said in sentence(command[0], tmp_path / "one.npy", *command[1:])


def test_floats_that_numpy_lacks_and_other_cases_of_a_suffix(tmp_path):
    torch.save(torch.randn(300).to(torch.float8_e4m3fn), tmp_path / "small.PT")
    found = json.loads(run("inspect", tmp_path / "small.PT", "--json"))
    assert found["numel"] == 300 and found["dtype"] == "float8_e4m3fn"


def test_a_config_under_which_nothing_is_compressed():
    said = run("bench", "--numel", 1, "--config", "qsgd", "--runs", 1)
    assert "so small that they go uncompressed, so no container is made" in said


def test_a_dense_step_that_is_shorter_than_its_exchange():
    said = run("advise", "1M", "--ranks", 4, "--bandwidth", "100M", "--dense-step", 1, "--config", "topk_model")
    assert "Nothing is recommended: a dense step of 1 ms was given, but its exchange alone is predicted" in said
    assert "give --compute" not in said and "Use " not in said


def test_a_timeline_with_other_things(tmp_path):
    (tmp_path / "one.json").write_text("[1,2]")
    assert "one event is 1" in sentence("timeline", tmp_path / "one.json", "--out", tmp_path / "all.json")
    before = json.dumps([{"args": {START: 5}}, {"ts": 1, "name": "a"}])
    (tmp_path / "one.json").write_text(before)
    said = run("timeline", tmp_path / "one.json", "--out", tmp_path / "." / "one.json", code=2)
    assert "which is one of the timelines" in said and (tmp_path / "one.json").read_text() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("bench", "one.npy", "--numel", 55), "--numel is of a generated gradient"),
        (("bench", "--rank", 3), "choose a vector of a file, and there is none"),
        (("bench", "--all", "--config", "fast"), "--all and --config are both given"),
        (("inspect", "one.hvdr", "--density", 0.5), "are for gradients, whose files end in"),
    ],
)
def test_options_without_effect(options, said):
    assert said in run(*options, code=2)


def test_a_picture_of_nothing(tmp_path):
    said = sentence("bench", "--config", "densestream_model", "--picture", tmp_path / "one.png")
    assert "so there is no picture" in said


@pytest.mark.parametrize("scale", [1e-25, 1e36])
def test_what_is_left_of_tiny_and_huge_gradients(tmp_path, scale):
    vector = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    np.save(tmp_path / "one.npy", vector * np.float32(scale))
    found = json.loads(run("bench", tmp_path / "one.npy", "--config", "topk_model", "--runs", 1, "--json"))
    kept = np.sort(vector**2)[-1000:].sum() / (vector**2).sum()
    assert found["configs"][0]["relative_error"] == pytest.approx(np.sqrt(1 - kept), rel=1e-3)


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
    # Words wrap, and names do not: where the longest ones do not fit, it is one line a row.
    for width, drawn in ((44, True), (20, False)):
        monkeypatch.setenv("COLUMNS", str(width))
        output.table(("preset", "what it is"), [("adamw_safe", "signs of updates that are local")] * 2, left=2)
        shown = capsys.readouterr().out
        assert ("──" in shown) == drawn and shown.count("adamw_safe") == 2 and "…" not in shown
