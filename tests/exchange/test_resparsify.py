"""DenseStream with a density, on simulated ranks: the oracle's sums and residuals, its bounds, and nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.mpi import densestream
from hvd_deepreduce.exchange.mpi.densestream import SLACK, Plan
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from hvd_deepreduce.ops.densestream import add_to
from tests.oracle import densestream as oracle
from tests.oracle.reduce_scatter import quotas_of
from tests.selection import first
from tests.support.simulated_mpi import Network


def summed(rows, kept, bounds, slices, most, codec):
    """The sum, the same bytes on all ranks; the residuals; and the network."""
    ranks, numel, dtype = len(rows), rows[0].size, rows[0].dtype
    buffers = [SumBuffer(numel, dtype, True, None) for _ in rows]
    errors: list[list[Stream]] = [[] for _ in rows]

    def programs(transport):
        rank = transport.rank
        plan = Plan(codec, numel, dtype, bounds, slices, RngKey(1, 2, 3, rank), errors[rank], most)
        own = SparseTensor(numel, kept[rank], rows[rank][kept[rank]])
        return densestream.programs(transport, own, plan, buffers[rank])

    network = Network(ranks)
    network.run(programs)
    assert len({buffer.out.tobytes() for buffer in buffers}) == 1
    residuals = [row.copy() for row in rows]
    for residual, indices, streams in zip(residuals, kept, errors, strict=True):
        residual[indices] = 0
        for stream in streams:
            add_to(stream.starts, stream.lengths, stream.values, residual)
    return buffers[0].out, residuals, network


def drawn(numel, ranks, seed, dtype, share):
    rng = np.random.default_rng([seed, numel, ranks])
    rows = [rng.integers(-50, 50, numel).astype(dtype) for _ in range(ranks)]
    kept = [np.flatnonzero((row != 0) & (rng.random(numel) < share)).astype(np.uint32) for row in rows]
    return rows, kept


@given(
    numel=st.integers(1, 90), ranks=st.integers(1, 9), slices=st.integers(1, 3), seed=st.integers(0, 99),
    share=st.sampled_from([0.1, 0.5, 1.0]), most=st.integers(1, 60), coded=st.booleans(), double=st.booleans(),
)  # fmt: skip
@example(numel=3, ranks=9, slices=3, seed=0, share=1.0, most=1, coded=True, double=False)
@settings(deadline=None)
def test_sums_and_residuals_are_those_of_the_oracle(numel, ranks, slices, seed, share, most, coded, double):
    rows, kept = drawn(numel, ranks, seed, np.float64 if double else np.float32, share)
    tensors = [SparseTensor(numel, indices, row[indices]) for row, indices in zip(rows, kept, strict=True)]
    bounds, _ = densestream.balanced_split(tensors, ranks * slices)
    codec = DenseStream(coded=coded or slices > 1)  # plain blocks have zeros, and real slices more elements than those
    total, residuals, _ = summed(rows, kept, bounds, slices, most, codec)
    quotas = quotas_of(bounds, most)
    expected, left = oracle.allreduce(rows, kept, bounds, slices, quotas)
    np.testing.assert_array_equal(total, expected)
    np.testing.assert_array_equal(residuals, left)
    assert np.count_nonzero(total) <= sum(quotas)


@pytest.mark.parametrize("value", ["raw", "float16", "qsgd"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sent_and_residuals_are_the_gradients_with_any_codec(value, ranks):
    rng = np.random.default_rng(ranks)
    rows = [rng.standard_normal(5000).astype(np.float32) for _ in range(ranks)]
    kept = [np.flatnonzero(np.abs(row) > 1.5).astype(np.uint32) for row in rows]
    bounds = [5000 * part // (2 * ranks) for part in range(2 * ranks + 1)]
    total, residuals, _ = summed(rows, kept, bounds, 2, 100, DenseStream(value=value))
    assert 90 < np.count_nonzero(total) <= 100
    error = np.sum(rows, 0, np.float64) - np.sum(residuals, 0, np.float64) - total
    assert np.abs(error).max() < 2e-5


def test_a_stream_that_is_not_finite_is_not_cut():
    rows = [np.ones(100, np.float32) for _ in range(4)]
    rows[2][7] = np.nan
    kept = [np.arange(100, dtype=np.uint32)] * 4
    total, _, _ = summed(rows, kept, [0, 25, 50, 75, 100], 1, 8, DenseStream())
    assert np.isnan(total[7]) and np.count_nonzero(total[:25]) == 25 and np.count_nonzero(total[25:]) == 6


@pytest.mark.parametrize("ranks", first([2, 4, 8, 32, 128], 4))
@pytest.mark.parametrize("support", ["spread", "front", "ends", "alike"])
def test_no_rank_receives_more_elements_than_the_bound(ranks, support):
    """In elements, for plain blocks of one element (12 bytes): SLACK (1/2 + 1/4 + ...) + 1 times those of the sum."""
    numel, count, rng = 1 << 16, 1 << 10, np.random.default_rng(ranks)
    places = {
        "spread": lambda rank: 0, "front": lambda rank: 0, "ends": lambda rank: rank % 2 * (numel - 8 * count),
        "alike": lambda rank: 0,
    }  # fmt: skip
    rows = [rng.standard_normal(numel).astype(np.float32) for _ in range(ranks)]
    chosen = 8 * np.sort(rng.choice(numel // 8, count, replace=False))
    kept = [
        {"spread": 8 * np.sort(rng.choice(numel // 8, count, replace=False)), "alike": chosen}.get(
            support, places[support](rank) + 8 * np.arange(count)
        ).astype(np.uint32)
        for rank in range(ranks)
    ]
    tensors = [SparseTensor(numel, indices, row[indices]) for row, indices in zip(rows, kept, strict=True)]
    bounds, _ = densestream.balanced_split(tensors, ranks)
    _, _, network = summed(rows, kept, bounds, 1, count, DenseStream(coded=False))
    headers = 40 * (ranks + 2 * ranks.bit_length()) + 40 * 2 * ranks.bit_length() + 8 * 2 * ranks
    assert network.received.max() <= 12 * (SLACK + 1) * count + 12 * ranks + headers
