"""What decoding a container takes at most, as docs/container.md says, and that no encoder exceeds it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd_deepreduce.codecs.index.bloom import POLICIES, Bloom
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.skcompress import SKCompress
from hvd_deepreduce.codecs.joint.sketchml import SketchML
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import bloom
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import standalone as wire
from tests import cases, decode_costs
from tests.selection import thorough

KEY = RngKey(3, 1, 4)
ROOT = Path(__file__).parent.parent
PER_ELEMENT, PER_BYTE, FIXED = 32, 8, 4 << 20
"""Bytes, in docs/container.md."""
SECONDS_PER_ELEMENT = 1e-6


@thorough
def test_memory_and_time() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.decode_costs"], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 60
    refused = {name for name, (*_, error) in found.items() if error}
    assert all("p2, " in name for name in refused), refused  # the other containers are valid
    for name, (size, memory, seconds, _) in found.items():
        bound = PER_ELEMENT * decode_costs.NUMEL + PER_BYTE * size + FIXED
        assert memory <= bound, f"{name}: {memory} bytes for {decode_costs.NUMEL} elements, and {bound} are allowed"
        assert seconds <= SECONDS_PER_ELEMENT * (decode_costs.NUMEL + size), f"{name}: {seconds} s"


def test_the_document_says_so() -> None:
    text = " ".join((ROOT / "docs/container.md").read_text().split())
    assert f"{PER_ELEMENT} bytes for each element of the tensor, {PER_BYTE} for each byte of the container" in text


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fpr", [0.999, 0.7, 0.36, 0.34, 0.17, 0.09, 1e-3, 1e-9])
def test_no_bloom_filter_is_refused(policy: str, fpr: float) -> None:
    codec = Bloom(policy=policy, fpr=fpr)
    for numel, density in ((1, 1.0), (64, 0.02), (64, 1.0), (3000, 0.01), (3000, 0.5), (3000, 1.0), (70_000, 0.3)):
        count = max(1, int(density * numel))
        rng = np.random.default_rng(numel)
        spread = np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)
        for indices in (spread, np.arange(count, dtype=np.uint32) + np.uint32((numel - count) // 2)):
            section, support = codec.encode(indices, numel, KEY)
            assert np.array_equal(Bloom.decode(section, numel, support.size, KEY), support)


def test_conflict_sets_that_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer falls back to p1, and the reader refuses p2."""
    indices, numel = np.arange(0, 5000, 50, dtype=np.uint32), 5000
    codec = Bloom(policy="p2", fpr=0.3)
    section, _ = codec.encode(indices, numel, KEY)
    assert section[0] >> 5 == POLICIES.index("p2")
    monkeypatch.setattr(bloom, "most_members", lambda numel: 10)
    with pytest.raises(ValueError, match="have more than 10 members"):
        Bloom.decode(section, numel, indices.size, KEY)
    other, support = codec.encode(indices, numel, KEY)
    assert other[0] >> 5 == POLICIES.index("p1") and np.array_equal(other[1:], section[1:])
    assert np.array_equal(Bloom.decode(other, numel, indices.size, KEY), support)


@pytest.mark.parametrize("codec", [SKCompress, SketchML])
@pytest.mark.parametrize("settings", [{}, {"rows": 8, "columns": 4.0, "groups": 1}, {"buckets": 2, "columns": 0.001}])
@pytest.mark.parametrize("kind", ["random", "constant", "two values"])
def test_no_sketch_is_refused(codec: type, settings: dict, kind: str) -> None:
    """Bins that are all equal take no bytes for each."""
    x = cases.random(3000)
    x = {"random": x, "constant": np.ones_like(x), "two values": np.sign(x)}[kind]
    config = Config.load(sparsifier={"name": "topk", "density": 0.5}, joint=codec(**settings))
    pipeline, out, residual = Pipeline(config), np.empty_like(x), np.zeros_like(x)
    pipeline.decode([wire.unpack(pipeline.encode(x, residual, KEY))], out, 1.0, KEY)
    np.testing.assert_allclose(out + residual, x, atol=1e-6)
    if kind == "constant":
        assert np.all(out[out != 0] == 1)
