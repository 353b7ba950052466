"""The value codec ``qsgd``."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hvd_deepreduce.codecs.value.qsgd import QSGD
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.standalone import unpack
from tests.oracle import qsgd as oracle
from tests.value.quantizers import AWKWARD, KEY, check_broken, mean_of_draws, normals, round_trip, vectors

ENTROPIES = ["none", "huffman", "rans"]


@given(vectors, st.integers(2, 8), st.sampled_from([1, 2, 7, 64, 512]), st.sampled_from(["max", "l2"]))
def test_bytes_are_the_oracles(values, bits, bucket, norm):
    section, decoded = round_trip(QSGD(bits=bits, bucket_size=bucket, norm=norm), values)
    assert section.tobytes() == oracle.encode(values, bits, bucket, norm == "l2", KEY)
    np.testing.assert_allclose(decoded, oracle.decode(section.tobytes(), values.size), rtol=3e-7, atol=1e-44)


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_bytes_of_many_values_equal_the_oracle(norm):
    values = normals(5003)
    section, _ = round_trip(QSGD(bits=7, bucket_size=700, norm=norm), values)
    assert section.tobytes() == oracle.encode(values, 7, 700, norm == "l2", KEY)


@pytest.mark.parametrize("entropy", ENTROPIES)
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_values(values, norm, entropy):
    _, decoded = round_trip(QSGD(norm=norm, entropy=entropy), values)
    limit = np.finfo(np.float32).max
    x = np.clip(values, -limit, limit).astype(np.float32)
    for at in range(0, x.size, 512):
        bucket = x[at : at + 512].astype(np.float64)
        scale = np.abs(bucket).max() if norm == "max" else min(np.sqrt(np.sum(bucket**2)), limit)
        assert (np.abs(decoded[at : at + 512] - bucket) <= scale / 63 * 1.00001 + 1.5e-45).all()


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 4, 7])
def test_unbiased_with_the_variance_of_lemma_3_1(bits, norm):
    values = normals(800, seed=9)
    draws, m, s = 2000, 100, 2 ** (bits - 1) - 1
    mean, variance = mean_of_draws(QSGD(bits=bits, bucket_size=m, norm=norm), values, draws)
    for at in range(0, values.size, m):
        x = values[at : at + m].astype(np.float64)
        scale = np.abs(x).max() if norm == "max" else np.linalg.norm(x)
        level = np.floor(np.abs(x) / scale * s)
        expected = (np.abs(x) / scale * s - level) * (level + 1 - np.abs(x) / scale * s) * (scale / s) ** 2
        assert (np.abs(mean[at : at + m] - x) <= 5 * np.sqrt(expected / draws) + scale / s * 2e-3).all()
        assert variance[at : at + m].sum() <= min(m / s**2, np.sqrt(m) / s) * np.sum(x**2)
        assert abs(variance[at : at + m].sum() / expected.sum() - 1) < 0.1


@pytest.mark.parametrize("bits", [2, 5, 8])
@pytest.mark.parametrize("entropy", [1, 2])
def test_entropy_coders_do_not_change_the_values(bits, entropy):
    values = normals(30_000)
    plain, expected = round_trip(QSGD(bits=bits), values)
    coded, decoded = round_trip(QSGD(bits=bits, entropy=ENTROPIES[entropy]), values)
    assert np.array_equal(decoded, expected)
    assert coded[1] == entropy and plain[1] == 0
    # The lower bound is the entropy. A Huffman code exceeds it by at most 0.086 plus the largest share (Gallager 1978).
    at = 8 + 4 * -(-values.size // 512)
    assert np.array_equal(coded[2:at], plain[2:at])
    fields = np.unpackbits(plain[at:], bitorder="little")[: bits * values.size].reshape(-1, bits)
    shares = np.bincount(fields @ (1 << np.arange(bits))) / values.size
    least = -np.sum(shares[shares > 0] * np.log2(shares[shares > 0])) * values.size / 8
    most = least + (0.086 + shares.max()) * values.size / 8 if entropy == 1 else 1.01 * least
    assert least < coded.size - at < most + (600 if entropy == 2 else 200)


@pytest.mark.parametrize("entropy", ["huffman", "rans"])
def test_entropy_coder_is_not_used_if_it_saves_nothing(entropy):
    values = np.random.default_rng(0).uniform(-1, 1, 20_000).astype(np.float32)  # all levels are equally frequent
    assert round_trip(QSGD(entropy=entropy), values)[0].tobytes() == round_trip(QSGD(), values)[0].tobytes()
    few = normals(3)
    assert round_trip(QSGD(entropy=entropy), few)[0].tobytes() == round_trip(QSGD(), few)[0].tobytes()


@pytest.mark.parametrize("entropy", ["huffman", "rans"])
def test_a_sparse_gradient_takes_at_most_0_15_of_its_dense_bytes(entropy):
    """60% nonzero, 7 bits, indices included. Heavy tails reach it with the default bucket size, others with a larger
    one."""
    random = np.random.default_rng(0)
    kept = random.random(500_000) < 0.6
    gradients = {"normal": random.standard_normal(kept.size), "Laplace": random.laplace(size=kept.size)}
    for bucket, names in ((512, ["Laplace"]), (4096, ["normal", "Laplace"])):
        value = {"name": "qsgd", "bits": 7, "bucket_size": bucket, "entropy": entropy}
        pipeline = Pipeline(Config.load(sparsifier="nonzero", index="bitmap", value=value))
        for name in names:
            gradient = np.where(kept, gradients[name], 0).astype(np.float32)
            container = pipeline.encode(gradient, None, KEY)
            assert container.nbytes <= 0.15 * gradient.nbytes
            out = np.empty_like(gradient)
            pipeline.decode([unpack(container)], out)
            assert np.linalg.norm(out - gradient) < 0.05 * np.linalg.norm(gradient)


DIGEST = """
import hashlib
from hvd_deepreduce.codecs.value.qsgd import QSGD
from tests.value.quantizers import KEY, normals
print(hashlib.sha256(QSGD().encode(normals(10_001), None, KEY)[0]).hexdigest())
"""


@pytest.mark.parametrize("level", ["portable", "avx2"])
def test_vector_levels_write_the_same_bytes(level):
    environment = {**os.environ, "HVD_DEEPREDUCE_VECTOR": level, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == hashlib.sha256(QSGD().encode(normals(10_001), None, KEY)[0]).hexdigest()


@pytest.mark.parametrize("entropy", ENTROPIES)
def test_broken_sections(entropy):
    assert check_broken(QSGD(bucket_size=64, entropy=entropy), normals(3000)) > 30


def test_settings_are_checked():
    for wrong in ({"bits": 1}, {"bits": 9}, {"bucket_size": 0}, {"norm": "l1"}, {"entropy": "elias"}):
        with pytest.raises(ValidationError):
            QSGD(**wrong)
