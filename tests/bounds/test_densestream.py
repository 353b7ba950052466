"""The equations of DenseStream: a step (1, 2), a vector's bytes (3), and the allreduce's messages and words (4 to 6).

Li, Chao, Liao, Lv, "DenseStream", sections II and III. docs/papers.md has a table of the results.
"""

from math import log2

import numpy as np
import pytest
from hypothesis import given

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream_format import HEADER
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.costs import Supports
from hvd_deepreduce.exchange.mpi import densestream
from hvd_deepreduce.exchange.mpi.densestream import ALLGATHER, SCATTER_REDUCE
from hvd_deepreduce.exchange.mpi.transport import message_tag
from tests.exchange.test_costs import STRIDE, tensors_of
from tests.exchange.test_simulation import simulate
from tests.joint.test_densestream import F32, tensors
from tests.support.simulated_mpi import Network

KEY = RngKey(0, 0, 0)
PLAIN = DenseStream(coded=False)


def test_a_step_of_all_ranks_equations_1_and_2():
    """The ranks' gradients are means over m samples (equation 1, whose sum from 0 to m has a sample too many), and are
    added: P times the gradient of a batch of P m samples."""
    rng, ranks, batch = np.random.default_rng(0), 4, 8
    x, y, w = rng.standard_normal((ranks, batch, 10)), rng.standard_normal((ranks, batch)), rng.standard_normal(10)
    gradients = [(x[rank].T @ (x[rank] @ w - y[rank]) / batch).astype(np.float32) for rank in range(ranks)]
    every = np.arange(10, dtype=np.uint32)
    _, sums = simulate("plain", [SparseTensor(10, every, one) for one in gradients])
    of_all = x.reshape(-1, 10).T @ (x.reshape(-1, 10) @ w - y.reshape(-1)) / (ranks * batch)
    for total in sums:
        np.testing.assert_allclose(total, ranks * of_all, rtol=1e-5)


def bytes_of_blocks(indices, numel, number_bytes, dtype=F32):
    """Of the codec's blocks, if a start and a length take so many bytes each."""
    section, _ = PLAIN.encode(indices, np.ones(indices.size, dtype), numel, KEY)
    _, _, _, _, blocks, values, *sizes = HEADER.unpack_from(section.data)
    assert sum(sizes) == 8 * blocks + dtype.itemsize * values
    return 2 * number_bytes * blocks + dtype.itemsize * values


@given(tensors())
def test_bytes_of_blocks_equation_3(tensor):
    """With 4 bytes for a start and for a length, as in section IV.A, it holds once its two sides are exchanged."""
    value_bytes, kept = tensor.values.dtype.itemsize, tensor.indices.size
    one_block, only_blocks = 8 + value_bytes * kept, (8 + value_bytes) * kept
    found = bytes_of_blocks(tensor.indices, tensor.numel, 4, tensor.values.dtype)
    assert found == 0 if kept == 0 else one_block <= found <= only_blocks


def test_both_sides_of_equation_3_are_reached():
    """The printed lower bound is the larger side: a single block is below it, and scattered elements are above the
    printed upper one."""
    kept, numel = 100, 24_000_000
    assert bytes_of_blocks(np.arange(kept, dtype=np.uint32), numel, 4) == 8 + 4 * kept < (8 + 4) * kept
    assert bytes_of_blocks(np.arange(kept, dtype=np.uint32) * 4, numel, 4) == (8 + 4) * kept > 8 + 4 * kept


def test_rounded_up_zeros_exceed_equation_3_where_numbers_have_three_bytes():
    """Up to ceil(2 ceil(log2 N / 8) / K) zeros: of 2^17 to 2^24 elements, two zeros for a block of 6 bytes."""
    assert bytes_of_blocks(np.array([0, 3], np.uint32), 2**20, 3) == 22 > 2 * (2 * 3 + 4)


class Counting(Network):
    """Attributes: messages and words that each rank received, by the phase."""

    def __init__(self, size):
        super().__init__(size)
        self.of = {phase: np.zeros((2, size), np.int64) for phase in (SCATTER_REDUCE, ALLGATHER)}

    def _take(self, transport, receive):
        sections = super()._take(transport, receive)
        if sections is not None:
            phase = next(phase for phase in self.of if receive.tag == message_tag(phase, 0))
            self.of[phase][:, transport.rank] += 1, sum(HEADER.unpack_from(one.data)[5] for one in sections)
        return sections


def counted(ranks, kept, overlap):
    """Messages and words of the scatter-reduce and of the allgather, for the rank that gets most. Of the supports
    "apart", each rank's is the region of another one."""
    if overlap == "apart":
        ones = np.ones(kept, np.float32)
        given = [SparseTensor(STRIDE * kept * ranks, (STRIDE * (at * kept + np.arange(kept))).astype(np.uint32), ones)
                 for at in range(ranks)[::-1]]  # fmt: skip
    else:
        given = tensors_of(ranks, Supports(ranks * kept, kept, overlap))
    network, bounds = Counting(ranks), densestream.balanced_split(given, ranks)[0]

    def programs(transport):
        plan = densestream.Plan(PLAIN, given[0].numel, F32, bounds, 1, KEY, None)
        return densestream.programs(transport, given[transport.rank], plan, None)

    network.run(programs)
    return [tuple(one.max(1).tolist()) for one in network.of.values()]


@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
def test_messages_and_words_equations_4_to_6(ranks):
    """The lower bounds, and equation 5's upper one, are reached. Equation 4's upper one, P k / 2 words a round, is for
    two ranks only: a rank gets k / 2 a round if each partition has k / P of its elements, as the paper supposes, and k
    if the ranks keep different parts of the vector."""
    rounds, k = log2(ranks), 64 * ranks
    share, near = (ranks - 1) / ranks * k, {"abs": 3 * ranks}
    words = {
        "all": (share, share),
        "none": (rounds / 2 * k, (ranks - 1) * k),
        "apart": (rounds * k, (ranks - 1) * k),
    }
    for overlap, expected in words.items():
        found = counted(ranks, k, overlap)
        assert [messages for messages, _ in found] == [rounds, rounds]
        (_, scattered), (_, gathered) = found
        assert (scattered, gathered) == (pytest.approx(expected[0], **near), pytest.approx(expected[1], **near))
        assert share - 3 * ranks <= scattered <= rounds / 2 * ranks * k + 3 * ranks
        assert 2 * share - 6 * ranks <= scattered + gathered <= ((rounds / 2 + 1) * ranks - 1) * k + 6 * ranks
    (_, scattered), (_, gathered) = counted(ranks, k, "random")
    assert words["all"][0] < scattered < words["none"][0] + 3 * ranks + 0.1 * k and share < gathered < (ranks - 1) * k
