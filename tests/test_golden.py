"""Containers written once, that must decode to the same for ever (tests/golden/make.py)."""

import subprocess
import sys

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import index_codecs, joint_codecs, sparsifiers, value_codecs
from tests.golden import make

FILES = sorted(make.FOLDER.glob("*.hvdr"))
GOLDEN = make.golden()
GOLDEN_2 = make.golden_2()
# Their bytes are a library's, and may change with its version; what they decode to may not.
LIBRARY_CODED = {"value-deflate", "value-zstd"}
# What earlier releases wrote in another form: a zero that top-k selected, and the keys of a dense tensor.
OUTDATED = {"sparsifier-topk_capped", "dense-keys-sketchml", "dense-keys-skcompress"}
REWRITTEN = LIBRARY_CODED | OUTDATED


def bits(x):
    return x.view(np.uint8).tolist()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_decodes_to_the_same(file):
    expected = np.load(file.with_suffix(".npy"))
    assert file.stat().st_size <= 4096
    assert bits(make.decode(np.fromfile(file, np.uint8), expected.dtype)) == bits(expected)


@pytest.mark.parametrize("file", [file for file in FILES if file.stem not in REWRITTEN], ids=lambda file: file.stem)
def test_encodes_to_the_same(file):
    data, now = np.fromfile(file, np.uint8), make.encode(*GOLDEN[file.stem])
    # The digest is of the config's fields, of which a later release may have more; it and its checksum stand apart.
    for part in (data, now):
        part[12:16] = part[36:40] = 0
    assert data.tobytes() == now.tobytes()


@pytest.mark.parametrize("name", sorted(OUTDATED))
def test_the_form_of_today_decodes_to_the_same(name):
    expected = np.load(make.FOLDER / f"{name}.npy")
    data = make.encode(*GOLDEN[name])
    assert data.size < (make.FOLDER / f"{name}.hvdr").stat().st_size
    assert bits(make.decode(data, expected.dtype)) == bits(expected)


@pytest.mark.parametrize("registry", [sparsifiers, index_codecs, value_codecs, joint_codecs], ids=lambda r: r.kind)
def test_every_codec_has_one(registry):
    there = {file.stem for file in FILES}
    missing = [name for name in sorted(registry.by_name) if f"{registry.kind}-{name}" not in there]
    assert not missing, f"no golden container of {missing}: run tests/golden/make.py"


def test_every_variant_has_one_and_every_file_is_known():
    assert {file.stem for file in FILES} == set(GOLDEN)
    assert {file.stem for file in make.FOLDER.glob("*.hvdr2")} == set(GOLDEN_2)
    arrays = {file.stem for file in make.FOLDER.glob("*.npy")}
    assert arrays == set(GOLDEN) | {f"{name}-2" for name in GOLDEN_2}


@pytest.mark.parametrize("name", GOLDEN_2)
def test_version_2(name):
    config, x = GOLDEN_2[name]
    data = np.fromfile(make.FOLDER / f"{name}.hvdr2", np.uint8)
    expected = np.load(make.FOLDER / f"{name}-2.npy")
    assert bits(make.decode_2(data, config, x)) == bits(expected)
    assert make.encode_2(config, x).tobytes() == data.tobytes()
    assert bits(expected) == bits(make.decode(make.encode(config, x), x.dtype))


def test_make_does_not_write_a_file_again():
    file = make.FOLDER / "index-rice.hvdr"
    before = file.stat().st_mtime_ns
    for arguments in (["index-rice.hvdr"], ["--replace"], ["no-such-name"]):
        done = subprocess.run([sys.executable, make.__file__, *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and "error" in done.stderr
    assert file.stat().st_mtime_ns == before
