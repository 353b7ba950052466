"""The value codec ``qsgd``. test_oracles.py compares its bytes with the oracle's."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.value.qsgd import QSGD
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.standalone import unpack
from tests.value.quantizers import KEY, mean_of_draws, normals, round_trip

ENTROPIES = ["none", "huffman", "rans"]


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
