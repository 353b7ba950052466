"""What is special to block_topk, chunk_topk, sampled_topk, threshold and topk_capped. test_oracles.py has what all
sparsifiers must do."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.block_topk import BlockTopK
from hvd_deepreduce.codecs.sparsify.chunk_topk import ChunkTopK
from hvd_deepreduce.codecs.sparsify.sampled_topk import SampledTopK
from hvd_deepreduce.codecs.sparsify.threshold import Threshold
from hvd_deepreduce.codecs.sparsify.topk_capped import TopKCapped
from hvd_deepreduce.ops import blocks
from tests import cases
from tests.oracle import block_topk
from tests.sparsify.test_oracles import check


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_norms_equal_the_oracle_to_the_bit(norm, dtype):
    dense, gradient = cases.random(4099, dtype) * dtype(1e3), cases.random(4099, dtype, 1)
    for block in (1, 3, 8, 9, 16, 61, 256):
        found = blocks.norms(dense.copy(), gradient, block, norm == "l2")
        assert found.tolist() == block_topk.norms(dense + gradient, block, norm == "l2")


def test_selects_the_blocks_of_largest_norm():
    dense = np.zeros(1000, np.float32)
    dense[70], dense[320:384], dense[990:] = 5, 1, 3
    # Blocks 15, 5 and 1 have sums of squares 10 * 9 > 64 * 1 > 25, and sums of magnitudes 64 * 1 > 10 * 3 > 5.
    for norm, best in (("l2", [15]), ("l1", [5]), ("l2", [5, 15]), ("l1", [5, 15]), ("l2", [1, 5, 15])):
        codec = BlockTopK(density=len(best) / 16, norm=norm)
        indices, values = codec.select(dense, None, RngKey(1, 2, 3), 1)
        assert indices.tolist() == [i for b in best for i in range(64 * b, min(64 * b + 64, 1000))]
        np.testing.assert_array_equal(values, dense[indices])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("chunk", [100, 4096])
def test_chunks_of_very_different_scales(dtype, chunk):
    """The magnitude to begin with comes from the chunk before, which says nothing here."""
    rng = np.random.default_rng(chunk)
    sizes = 10.0 ** rng.uniform(-30, 30, 9)
    dense = np.concatenate([rng.standard_normal(chunk) * size for size in [*sizes, 0.0, 1e-40, 1.0]]).astype(dtype)
    dense = np.append(dense, dtype(2))
    for density in (0.015625, 0.5, 1.0):
        check(ChunkTopK(density=density, chunk=chunk), dense)
        check(ChunkTopK(density=density, chunk=chunk), dense, dense[::-1].copy())


def test_the_defaults_keep_64_of_4096_and_a_share_of_the_last_chunk():
    dense = cases.random(3 * 4096 + 130)
    assert np.bincount(check(ChunkTopK(), dense) // 4096).tolist() == [64, 64, 64, 2]
    assert check(ChunkTopK(), dense[: 4096 + 3]).size == 65


def test_number_of_elements_is_close_to_the_density():
    """With 64 sampled elements above the threshold, the relative spread is 1/8. ``excess`` bounds the number."""
    numel, wanted = 200_000, 2000
    dense = cases.random(numel)
    sizes = [SampledTopK().select(dense, None, RngKey(0, 1, step), 1)[0].size for step in range(60)]
    assert np.mean(sizes) == pytest.approx(wanted, rel=0.06) and np.std(sizes) < wanted / 6
    assert max(sizes) <= 1.3 * wanted and len(set(sizes)) > 50
    larger = [SampledTopK(sample=0.1).select(dense, None, RngKey(0, 1, step), 1)[0].size for step in range(20)]
    assert np.std(larger) < wanted / 12


def test_excess_is_reduced_by_exact_topk():
    """If too many elements are selected, exact top-k reduces them to the wanted number; ties go to the lower index."""
    dense = np.zeros(50_000, np.float32)
    dense[:3000] = np.arange(1, 3001)
    strict, loose = ({}, {})
    for step in range(12):
        for excess, sizes in ((1, strict), (1.3, loose)):
            indices = SampledTopK(density=0.02, excess=excess).select(dense.copy(), None, RngKey(0, 0, step), 1)[0]
            sizes[step] = indices.size
            assert indices.tolist() == list(range(3000 - indices.size, 3000))
    assert max(strict.values()) == 1000 < max(loose.values()) <= 1300
    assert all(strict[step] == min(loose[step], 1000) for step in strict)
    assert check(SampledTopK(density=0.02), np.ones(50_000, np.float32)).tolist() == list(range(1000))


def test_zeros_are_never_sent():
    dense = np.zeros(50_000, np.float32)
    dense[::20] = 1e-45
    assert check(SampledTopK(density=0.2, sample=0.01), dense).tolist() == list(range(0, 50_000, 20))


@pytest.mark.parametrize("least", [0.1, float(np.float32(0.1)), np.nextafter(0.1, 1), 1e-50, 1e39])
def test_threshold_is_not_rounded_to_float32(least):
    dense = np.array([0.1, np.nextafter(np.float32(0.1), np.float32(1)), 1e-45, 3.4e38, 0, -0.0], np.float32)
    check(Threshold(threshold=least), np.concatenate([dense, -dense]))


def test_elements_of_resnet_50_equal_the_paper():
    """A cap of 1000 keeps 99,400 elements per step (Qsparse-local-SGD, section 5)."""
    sizes = [64 * 3 * 49, *[64] * 2, 2048 * 1000, 1000]
    entered = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        channels = 64 << stage
        for block in range(count):
            sizes += [entered * channels, channels * channels * 9, channels * channels * 4]
            sizes += [channels] * 4 + [channels * 4] * 2
            if block == 0:
                sizes += [entered * channels * 4, *[channels * 4] * 2]
            entered = channels * 4
    assert sum(sizes) == 25_557_032
    codec = TopKCapped()
    kept = [codec.select(np.ones(size, np.float32), None, RngKey(1, 2, 3), 1)[0].size for size in sizes]
    assert codec.cap == 1000 and sum(kept) == 99_400
