"""The index codec ``bloom``: its bytes, and the error bounds of the DeepReduce paper."""

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.index.bloom import Bloom, Policy
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import bloom
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.standalone import unpack
from tests.cases import check_support, some_indices
from tests.oracle import bloom as oracle

POLICIES = get_args(Policy)
OF_R = [policy for policy in POLICIES if policy != "p0"]
KEY = RngKey(1, 2, 3)
words = st.integers(0, 2**32 - 1)


def keys(count):
    return [RngKey(5, 7, step) for step in range(count)]


def check(kept, numel, codec, key=KEY):
    """Checks what every encoder and decoder must fulfil. Returns the section and the support."""
    section, support = codec.encode(kept, numel, key)
    decoded = Bloom.decode(section, numel, support.size, key)
    np.testing.assert_array_equal(decoded, support)
    check_support(support, numel, support.size)
    if codec.policy == "p0":
        assert np.isin(kept, support).all()
    else:
        assert support.size == kept.size
    return section, support


@given(st.data(), st.sampled_from(POLICIES), st.floats(1e-9, 0.999), words, words, words)
def test_bytes_and_support_equal_the_oracle(data, policy, fpr, seed, parameter, step):
    numel = data.draw(st.integers(1, 700))
    kept = sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=80)))
    key = RngKey(seed, parameter, step, rank=9)
    section, support = check(np.array(kept, np.uint32), numel, Bloom(fpr=fpr, policy=policy), key)
    expected_section, expected_support = oracle.encode(kept, numel, fpr, policy, key[:3])
    assert section.tobytes() == expected_section and support.tolist() == expected_support


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fpr", [0.05, 0.4])
def test_bytes_and_support_with_many_false_positives(policy, fpr):
    kept = some_indices(9001, 400)
    section, support = check(kept, 9001, Bloom(fpr=fpr, policy=policy))
    expected_section, expected_support = oracle.encode(kept.tolist(), 9001, fpr, policy, KEY[:3])
    assert section.tobytes() == expected_section and support.tolist() == expected_support


def test_more_than_255_indices_in_a_conflict_set():
    kept = some_indices(8000, 90)
    section, support = check(kept, 8000, Bloom(fpr=0.97, policy="p2"))
    assert section.size == 9 and support.tolist() == oracle.encode(kept.tolist(), 8000, 0.97, "p2", KEY[:3])[1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("kept", "numel"),
    [([], 0), ([], 70), ([0], 1), ([69], 70), (range(500), 500), (range(100, 164), 1000), (range(0, 9973, 64), 9973),
     ([0, 2**24], 2**24 + 1)],
)  # fmt: skip
def test_extremes(kept, numel, policy):
    section, support = check(np.array(kept, np.uint32), numel, Bloom(policy=policy))
    if len(kept) in (0, numel):
        assert support.size == len(kept)
    if not len(kept):
        assert section.size == 0


@pytest.mark.parametrize("fpr", [0.5, 0.1, 0.01, 1e-3, 1e-6, 1e-9])
def test_size_follows_remark_2(fpr):
    for count in (8, 368, 5000):
        section, _ = Bloom(fpr=fpr).encode(some_indices(60000, count), 60000, KEY)
        m, k = oracle.remark_2(count, fpr)
        assert section.size <= max(9, math.ceil(m / 8) + 1) and section.size * 8 >= 0.988 * m
        assert abs((section[0] & 31) + 1 - k) <= 0.5


STRUCTURES = {
    "random": lambda numel, seed: some_indices(numel, numel // 100, seed),
    "a column": lambda numel, seed: np.arange(seed % 64, numel, 64 * 2, dtype=np.uint32),
    "runs of 16": lambda numel, seed: np.add.outer(
        16 * some_indices(numel // 16, numel // 1600, seed), np.arange(16)
    ).ravel(),
    "one run": lambda numel, seed: np.arange(numel // 2, numel // 2 + numel // 100),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("fpr", [0.1, 0.01, 0.001])
def test_false_positive_rate(structure, fpr):
    """Lemma 3 of the appendix: the rate is the requested one for every structure. Runs of kept indices cause runs of
    false positives, which increase the spread."""
    numel, rates = 200_000, []
    for key in keys(40):
        kept = STRUCTURES[structure](numel, key.step).astype(np.uint32)
        section, support = Bloom(fpr=fpr).encode(kept, numel, key)
        rates.append((support.size - kept.size) / (numel - kept.size))
    m, k = 8 * (section.size - 1), int(section[0] & 31) + 1
    expected = (1 - math.exp(-k * kept.size / m)) ** k
    assert expected == pytest.approx(fpr, rel=0.05)
    assert np.mean(rates) == pytest.approx(expected, rel=0.02, abs=4 * np.std(rates) / math.sqrt(len(rates)))
    # The spread of n independent answers, or of answers and filled bits in whole blocks of 64.
    independent = math.sqrt(fpr / numel)
    if structure in ("random", "a column"):
        assert np.std(rates) < 2 * independent + 0.03 * fpr
    else:
        assert np.std(rates) < 10 * independent + 0.15 * fpr


@pytest.mark.parametrize("numel", [3000, 36864])
def test_false_positive_rate_of_a_small_filter(numel):
    count, codec = numel // 100, Bloom(fpr=0.01)
    found = [codec.encode(some_indices(numel, count, key.step), numel, key)[1].size for key in keys(300)]
    false = np.array(found) - count
    assert false.mean() == pytest.approx(0.01 * numel * 0.99, rel=0.08)


@pytest.mark.parametrize(("count", "most", "tries"), [(30, 4, 1), (368, 4, 4), (368, 2, 2), (368, 1, 1)])
def test_encoder_uses_the_filter_with_the_fewest_positives_for_small_tensors(count, most, tries):
    fewer = 0
    for key in keys(20):
        kept = some_indices(36864, count, key.step)
        section, support = Bloom(tries=most).encode(kept, 36864, key)
        largest, k = oracle.size_and_hashes(count, 0.001)
        found = []
        for size in range(largest, largest - tries, -1):
            bits = bloom.insert(kept, size, k, *key[:3])
            found.append(bloom.query(bits, k, 36864, *key[:3]).size)
        assert support.size == min(found)
        assert section.size - 1 == largest - found.index(min(found))
        fewer += support.size < found[0]
    assert fewer >= {1: 0, 2: 5, 4: 10}[tries] and (tries > 1 or fewer == 0)


def test_number_of_positives_lemma_6():
    """On average, |P| is between r and r + fpr * (d - r). It decreases to r with the rate."""
    numel, count = 100_000, 1000
    sizes = {}
    for fpr in (0.1, 0.01, 1e-3, 1e-4, 1e-9):
        found = [Bloom(fpr=fpr).encode(some_indices(numel, count, key.step), numel, key)[1].size for key in keys(20)]
        assert min(found) >= count
        # The tolerance: k is an integer, m is a thousandth smaller, and 20 samples have an error (3 sigma).
        bound = math.ceil(count + fpr * (numel - count))
        assert np.mean(found) <= count + (bound - count) * 1.05 + 3 * math.sqrt(bound - count) / math.sqrt(20)
        sizes[fpr] = np.mean(found)
    assert sorted(sizes.values(), reverse=True) == list(sizes.values()) and sizes[1e-9] == count


def lost(gradient, support):
    """The share of ||g||^2 that a receiver does not decode."""
    energy = gradient.astype(np.float64) ** 2
    return 1 - energy[support].sum() / energy.sum()


def test_loss_of_p0_lemma_7():
    """p0 loses nothing of an inherently sparse gradient, and at most (1 - |P| / d) ||g||^2 after top-r."""
    numel, count = 20_000, 200
    rng = np.random.default_rng(0)
    for key in keys(10):
        dense = rng.standard_normal(numel)
        kept = np.sort(np.argsort(-np.abs(dense))[:count]).astype(np.uint32)
        sparse = np.zeros(numel)
        sparse[kept] = dense[kept]
        _, support = Bloom(fpr=0.02).encode(kept, numel, key)
        assert support.size > count
        assert lost(sparse, support) == pytest.approx(0, abs=1e-12)
        assert lost(dense, support) < lost(dense, kept) < 1 - support.size / numel


@pytest.mark.parametrize("policy", ["leftmost", "middle", "rightmost", "p1"])
def test_loss_of_other_policies_lemma_8_and_equation_9(policy):
    """The average loss is (i) (1 - |I1| / r) ||g||^2 for a sparse gradient, and (ii) (1 - r / d) ||g||^2 for a dense
    gradient with random-r."""
    numel, count = 4000, 200
    rng = np.random.default_rng(1)
    sparse_lost, expected, dense_lost = [], [], []
    for key in keys(300):
        kept = some_indices(numel, count, key.step)
        dense = rng.standard_normal(numel)
        sparse = np.zeros(numel)
        sparse[kept] = dense[kept]
        _, support = Bloom(fpr=0.02, policy=policy).encode(kept, numel, key)
        true = np.isin(support, kept).sum()
        assert true < count
        sparse_lost.append(lost(sparse, support))
        expected.append(1 - true / count)
        dense_lost.append(lost(dense, support))
    assert np.mean(sparse_lost) == pytest.approx(np.mean(expected), rel=0.03)
    assert np.mean(dense_lost) == pytest.approx(1 - count / numel, rel=0.002)


def test_p1_drops_all_positives_equally_often():
    numel, count = 2000, 100
    kept = some_indices(numel, count)
    # The false positives depend on the key; the kept indices are always among the positives.
    times, expected = np.zeros(numel), 0.0
    for key in keys(1500):
        found = Bloom(fpr=0.02).encode(kept, numel, key)[1].size
        times[Bloom(fpr=0.02, policy="p1").encode(kept, numel, key)[1]] += 1
        expected += count / found
    share = times[kept] / expected
    assert share.mean() == pytest.approx(1, abs=0.01)
    assert share.min() > 0.93 and share.max() < 1.07


def test_p2_keeps_more_true_positives_than_other_policies():
    numel, count = 50_000, 500
    true = {policy: [] for policy in OF_R}
    for key in keys(10):
        kept = some_indices(numel, count, key.step)
        for policy in OF_R:
            support = check(kept, numel, Bloom(fpr=0.01, policy=policy), key)[1]
            true[policy].append(np.isin(support, kept).mean())
    means = {policy: np.mean(shares) for policy, shares in true.items()}
    assert means["p2"] > 0.7 and all(means["p2"] > means[policy] + 0.2 for policy in OF_R if policy != "p2")


def test_false_positives_depend_on_the_key_but_not_on_the_rank():
    kept = some_indices(30_000, 300)
    found = [Bloom(fpr=0.01).encode(kept, 30_000, key)[1] for key in (KEY, KEY._replace(step=4), KEY._replace(seed=2))]
    false = [set(support.tolist()) - set(kept.tolist()) for support in found]
    assert all(len(one & other) < 20 < len(one) for one, other in zip(false, false[1:], strict=False))
    same = Bloom(fpr=0.01).encode(kept, 30_000, KEY._replace(rank=5))[1]
    np.testing.assert_array_equal(same, found[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_false_positives_carry_their_own_values(policy):
    """But for ``naive``, which assigns the kept values to them."""
    gradient = np.random.default_rng(2).standard_normal(5000).astype(np.float32)
    index = {"name": "bloom", "fpr": 0.02, "policy": policy}
    pipeline = Pipeline(Config.load(index=index, value="raw", error_feedback=policy != "naive"))
    residual, out = None if policy == "naive" else np.zeros_like(gradient), np.empty_like(gradient)
    pipeline.decode([unpack(pipeline.encode(gradient, residual, KEY))], out)
    sent = out != 0
    assert sent.sum() > 50 if policy == "p0" else sent.sum() == 50
    if policy == "naive":
        kept = np.sort(np.argsort(-np.abs(gradient))[:50])
        np.testing.assert_array_equal(out[sent], gradient[kept])
        assert not np.array_equal(np.flatnonzero(sent), kept)
    else:
        np.testing.assert_array_equal(out[sent], gradient[sent])
        np.testing.assert_array_equal(residual, np.where(sent, 0, gradient))


@pytest.mark.parametrize("policy", POLICIES)
def test_longer_sections_and_other_counts_are_refused(policy):
    section, support = Bloom(fpr=0.01, policy=policy).encode(some_indices(3000, 60), 3000, KEY)
    for more in (3, 4, 102):
        with pytest.raises(ValueError, match="bytes long|indices"):
            Bloom.decode(np.append(section, np.zeros(more, np.uint8)), 3000, support.size, KEY)
    with pytest.raises(ValueError, match="are to be taken" if policy == "p0" else "bytes long"):
        Bloom.decode(section, 3000, 3000, KEY)
    for count in (support.size - 1, support.size + 1, 60) if policy == "p0" else ():
        with pytest.raises(ValueError, match="are to be taken"):
            Bloom.decode(section, 3000, count, KEY)


@pytest.mark.parametrize(
    ("section", "count", "message"),
    [([], 1, "9 to"), ([36], 0, "9 to"), ([36] + [0] * 7, 1, "9 to"), ([0xE0] + [255] * 8, 5, "policy"),
     ([0x20] + [255] * 500, 5, "bytes long"), ([0x20] + [0] * 8, 1, "are to be taken"),
     ([0x7F] + [255] * 8, 2, "bytes long"), ([0x61] + [255] * 8, 2, "more ones than 2 elements")],
)  # fmt: skip
def test_sections_that_no_encoder_wrote(section, count, message):
    with pytest.raises(ValueError, match=message):
        Bloom.decode(np.array(section, np.uint8), 1000, count, KEY)
