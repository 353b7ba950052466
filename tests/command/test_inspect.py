"""The subcommand inspect, and the statistics that it prints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.tools import gradient_file, gradients, statistics
from hvd_deepreduce.tools.measuring import entropy_bits
from tests.command.test_command import run

GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("*.hvdr"))


def container(**settings):
    gradient = gradients.generated(10_000, 0)
    return Pipeline(Config.load("topk_rice_qsgd", **settings)).encode(gradient, None, RngKey(7, 8, 9))


def test_a_container_is_shown_by_part(tmp_path):
    packed = container()
    (tmp_path / "one").write_bytes(packed.tobytes())
    (found,) = json.loads(run("inspect", tmp_path / "one", "--json"))["containers"]
    assert (found["numel"], found["count"], found["bytes"]) == (10_000, 100, packed.size)
    assert (found["sparsifier"], found["index"], found["value"]) == ("topk", "rice_blocks", "qsgd")
    assert (found["seed"], found["parameter"], found["step"]) == (7, 8, 9)
    parts = {part["part"]: part["bytes"] for part in found["parts"]}
    assert sum(parts.values()) == packed.size and parts["header"] + parts["checksum"] == 64
    assert all(part["bits_an_element"] == 8 * part["bytes"] / 100 for part in found["parts"])
    text = run("inspect", tmp_path / "one")
    assert "100 of 10,000 elements (1.0000%)" in text and "container 1 of 1" in text


def test_containers_behind_each_other_are_shown(tmp_path):
    (tmp_path / "two").write_bytes(container().tobytes() + container(joint="skcompress").tobytes())
    first, second = json.loads(run("inspect", tmp_path / "two", "--json"))["containers"]
    assert first["index"] == "rice_blocks" and second["joint"] == "skcompress"


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_every_golden_container_is_shown(file):
    (found,) = json.loads(run("inspect", file, "--json"))["containers"]
    assert sum(part["bytes"] for part in found["parts"]) == file.stat().st_size == found["bytes"]


def test_a_broken_container_is_a_sentence(tmp_path):
    packed = container()
    for number, (data, sentence) in enumerate((
        (packed[:-8], "its header announces"),
        (packed[:30], "it has 30 bytes, and its header alone has 64"),
        (np.concatenate([packed[:100], packed[100:] ^ np.uint8(1)]), "its checksum does not match"),
        (np.concatenate([packed, packed[:-8]]), "the container of rank 1 cannot be read"),
        (np.frombuffer(b"something else", np.uint8), "is not a container that stands alone"),
        (np.empty(0, np.uint8), "is not a container that stands alone"),
    )):  # fmt: skip
        file = tmp_path / str(number)
        file.write_bytes(data.tobytes())
        said = run("inspect", file, code=1)
        assert sentence in said and "Traceback" not in said, said
    assert "missing cannot be read or written: No such file" in run("inspect", tmp_path / "missing", code=1)


def test_a_gradient_is_described(tmp_path):
    vector = np.zeros(1000, np.float32)
    vector[:10] = 3
    vector[10] = -4
    np.save(tmp_path / "one.npy", vector.reshape(10, 100))
    found = json.loads(run("inspect", tmp_path / "one.npy", "--density", 0.005, "--json"))
    assert (found["numel"], found["zeros"], found["nan"], found["shapes"]) == (1000, 989, 0, {"one": [10, 100]})
    assert found["norm"] == pytest.approx(np.sqrt(106)) and found["largest"] == 4
    assert found["energy"] == pytest.approx({"0.001": 16 / 106, "0.01": 97 / 106, "0.1": 1})
    assert found["kurtosis"] == pytest.approx((10 * 81 + 256) / 1000 / (106 / 1000) ** 2)
    (support,) = found["supports"]
    assert support["count"] == 5 and support["index_codecs"]["raw"]["bits_an_index"] == 32
    text = run("inspect", tmp_path / "one.npy", "--density", 0.005, "--density", 0.01)
    assert "one parameter, [10, 100]" in text and text.count("index codec") == 2 and "dispersion of the rows'" in text


def test_gradients_that_have_no_support(tmp_path):
    for values, sentence in (([1, np.nan, np.inf], "it is not finite"), ([0, 0, 0], "all elements are zeros")):
        np.save(tmp_path / "one.npy", np.array(values, np.float32))
        assert sentence in run("inspect", tmp_path / "one.npy")


def test_files_of_every_kind_are_read(tmp_path):
    a, b = np.arange(6, dtype=np.float64).reshape(2, 3), np.ones(4, np.float64)
    np.savez(tmp_path / "one.npz", a=a, b=b)
    torch.save({"a": torch.from_numpy(a), "b": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "one.pt")
    torch.save([torch.from_numpy(a), torch.from_numpy(b)], tmp_path / "two.pt")
    for name, names in (("one.npz", ["a", "b"]), ("one.pt", ["a", "b"]), ("two.pt", ["0", "1"])):
        found = gradients.load(tmp_path / name)
        assert found.names == names and found.shapes == [(2, 3), (4,)] and found.sizes == [6, 4]
        assert found.vector.dtype == np.float32 and found.vector.tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 1, 1]


def test_captured_files_are_read(tmp_path):
    vectors = {("gradient", 2): np.ones(6, np.float32), ("accumulator", 2): np.full(6, 2, np.float32)}
    gradient_file.write(tmp_path / "one.npz", vectors, ["a", "b"], [4, 2], {"shapes": [[2, 2], [2]], "step": 5})
    assert not list(tmp_path.glob("*part*"))
    found = gradients.load(tmp_path / "one.npz")
    assert found.shapes == [(2, 2), (2,)] and found.vector.tolist() == [2] * 6 and found.about == {"step": 5}
    assert gradients.load(tmp_path / "one.npz", "gradient").vector.tolist() == [1] * 6
    assert "has no gradient_0; it has accumulator_2, gradient_2" in run("inspect", tmp_path / "one.npz", "--rank", 0,
                                                                        "--kind", "gradient", code=1)  # fmt: skip


def test_files_that_hold_no_gradient_are_sentences(tmp_path):
    (tmp_path / "text.npy").write_text("text")
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "text.pt").write_text("text")
    np.save(tmp_path / "whole.npy", np.arange(3))
    np.save(tmp_path / "none.npy", np.empty(0, np.float32))
    torch.save({"a": 1}, tmp_path / "number.pt")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    np.save(tmp_path / "one.npy", np.ones(3, np.float32))
    for name, sentence in (
        ("text.npy", "cannot be read as NumPy's"), ("text.npz", "cannot be read as NumPy's"),
        ("text.pt", "cannot be read as PyTorch's: it is something else"), ("whole.npy", "whole has the dtype int64"),
        ("module.pt", "save a tensor, or a list or dict of tensors"),
        ("none.npy", "holds no elements"), ("number.pt", "it holds other things"),
    ):  # fmt: skip
        assert sentence in run("inspect", tmp_path / name, code=1)
    assert "has no kinds and no ranks" in run("inspect", tmp_path / "one.npy", "--rank", 0, code=1)
    assert "must be above 0" in run("inspect", tmp_path / "one.npy", "--density", 0, code=2)
    assert "choose from accumulator" in run("inspect", tmp_path / "one.npy", "--kind", "x", code=2)


def test_a_random_support_looks_random():
    rng = np.random.default_rng(0)
    shapes = [(200, 500), (300, 300), (10_000,)]
    sizes = [100_000, 90_000, 10_000]
    indices = np.sort(rng.choice(200_000, 4000, replace=False)).astype(np.uint32)
    gaps = statistics.of_gaps(indices, 200_000)
    for name in ("neighbours", "median", "variation", "entropy"):
        assert gaps[name] == pytest.approx(gaps[f"random_{name}"], rel=0.15)
    bits = statistics.of_support(indices, sizes, shapes)
    assert bits["whole"] == pytest.approx(entropy_bits(200_000, 4000) / 4000)
    assert all(bits[name] == pytest.approx(bits["whole"], rel=0.02) for name in ("tensors", "rows", "columns"))
    assert all(0.8 < bits[f"{name}_dispersion"] < 1.2 for name in ("row", "column"))


def test_a_support_in_few_rows_is_found():
    rng = np.random.default_rng(0)
    places = np.concatenate([row * 500 + rng.choice(500, 250, replace=False) for row in (3, 70, 150)])
    bits = statistics.of_support(np.sort(places).astype(np.uint32), [100_000], [(200, 500)])
    assert bits["row_dispersion"] > 50 and bits["rows"] < 0.5 * bits["whole"]
    assert bits["column_dispersion"] < 1.5 and bits["columns"] > 0.9 * bits["whole"]


def test_entropy_of_a_support():
    from math import comb, log2

    assert entropy_bits(20, 6) == pytest.approx(log2(comb(20, 6)))
    assert entropy_bits(5, 0) == entropy_bits(5, 5) == 0
