"""The codec of docs/extending.md, as another package would bring it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_deepreduce.engine.agreement import MismatchError, compare

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(POINTS,) = re.findall(r"```ini\n\[options.entry_points\]\n(.*?)```", PAGE, re.DOTALL)


def install(folder: Path, code: str = CODE, version: str = "1.2") -> None:
    """What pip leaves of a package with one module."""
    (folder / "my_codec.py").write_text(code)
    metadata = folder / f"my_codec-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: my-codec\nVersion: {version}\n")
    group, point = POINTS.strip().splitlines()
    (metadata / "entry_points.txt").write_text(f"[{group.removesuffix(' =')}]\n{point.strip()}\n")


def run(folder: Path, program: str) -> str:
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True,
        timeout=100, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_example_is_short():
    assert len(CODE.splitlines()) < 60


PROGRAM = """
import numpy as np
from hvd_deepreduce import Config, ConfigError, ContainerError
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.pipeline import Pipeline

config = Config.load(value={"name": "int8", "headroom": 1.5}, sparsifier={"name": "topk", "density": 0.1})
assert config.packages() == {"my-codec": "1.2"}, config.packages()
assert Config.load().packages() == {}
assert Config.load(config.to_dict()) == config
pipeline, rng = Pipeline(config), np.random.default_rng(0)
for dtype in (np.float32, np.float64):
    for scale in (0, 1e-45, 1, 1e38):
        gradient = (rng.standard_normal(2000) * scale).clip(-3e38, 3e38).astype(dtype)
        residual, out = np.zeros_like(gradient), np.empty_like(gradient)
        packed = pipeline.encode(gradient, residual, RngKey(1, 2, 3))
        pipeline.decode(wire.split(packed, 1), out)
        assert np.isfinite(out).all() and np.abs(residual + out - gradient).max() <= 1e-6 * scale
        assert (np.abs(out) > 0).sum() <= 200
        assert np.linalg.norm(residual) <= np.linalg.norm(gradient)
section = wire.unpack(packed).values
for broken in (section[:-1], np.append(section, section[:1]), np.full_like(section, 255)):
    try:
        type(config.value).decode(broken, 200, None, np.dtype(np.float32), None)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError("a broken section was decoded")
try:
    Config.load(value={"name": "int8", "headroom": 3})
except ConfigError as error:
    print(error)
"""


def test_a_config_names_the_codec_of_an_installed_package(tmp_path):
    install(tmp_path)
    output = run(tmp_path, PROGRAM)
    assert "200 values take 208 bytes, and the section has 207" in output
    assert "value.headroom is 3, which is not allowed" in output


def test_a_receiver_knows_it_without_a_config(tmp_path):
    """The registry loads the packages when it meets an unknown number."""
    install(tmp_path)
    run(
        tmp_path,
        "from hvd_deepreduce.config import plugins\nfrom hvd_deepreduce.codecs.interfaces import value_codecs\n"
        "assert 192 not in value_codecs.by_id\nassert value_codecs.find(192, plugins.load).name == 'int8'",
    )


def test_a_package_that_fails_to_import_is_named(tmp_path):
    install(tmp_path, "raise OSError('no licence')")
    output = run(
        tmp_path,
        "from hvd_deepreduce import Config, ConfigError\n"
        "try:\n    Config.load(value='int8')\nexcept ConfigError as error:\n    print(error)",
    )
    assert "the package my-codec are not available: importing my_codec raised OSError: no licence" in output
    assert "value is 'int8'; it must be a name" in output


def test_ranks_compare_the_package(tmp_path):
    """One rank with another version, and one without the package's codec in its config."""
    statement = (
        "import json\nfrom hvd_deepreduce import Config\nfrom hvd_deepreduce.engine.agreement import statement\n"
        "print(json.dumps(statement('1', Config.load(value={}), [])))"
    )
    said = []
    for rank, (value, version) in enumerate([("int8", "1.2"), ("int8", "1.3"), ("int8", "1.2"), ("raw", "1.2")]):
        folder = tmp_path / str(rank)
        folder.mkdir()
        install(folder, version=version)
        said.append(json.loads(run(folder, statement.format(repr(value)))))
    compare([said[0], said[2]])
    with pytest.raises(MismatchError, match="package my-codec is 1.2 on rank 0, 1.3 on rank 1. Use the same"):
        compare(said[:2])
    with pytest.raises(MismatchError, match="package my-codec is 1.2 on rank 0, missing on rank 1; config.value is"):
        compare([said[0], said[3]])


@pytest.mark.parametrize("line, wrong, sentence", [
    ("id = 192", "id = 12", "has an id outside its range: it must be 192 to 254"),
    ('name = "int8"', 'name = "raw"', "has the name or the id of 'raw'"),
])  # fmt: skip
def test_a_codec_that_cannot_be_registered_says_why(tmp_path, line, wrong, sentence):
    assert line in CODE
    install(tmp_path, CODE.replace(line, wrong))
    assert sentence in run(tmp_path, "from hvd_deepreduce.config import plugins\nplugins.load()")
