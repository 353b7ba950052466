"""Dense vectors without loss: the native calls send the bytes of the composed way, and give its sums and its errors."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.exchange.balance import AllToAll, equal_bounds
from hvd_deepreduce.exchange.reduce_scatter import CheckedSum, DecodedSum, SlicedSum
from hvd_deepreduce.ops import lossless
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire.standalone import ContainerError
from tests import cases
from tests.oracle import lossless as oracle
from tests.support.simulated_collectives import CollectiveNetwork

CONFIG = Config.load("lossless", mode="always")
NATIVE, COMPOSED = Pipeline(CONFIG), Pipeline(CONFIG)
COMPOSED.whole = None


class Recorded(CollectiveNetwork):
    """Keeps what was sent, and changes it before that."""

    def __init__(self, size, change=lambda number, rank, asked: asked):
        super().__init__(size)
        self.messages, self.change = [], change

    def run(self, programs):
        return super().run([self._of(rank, program) for rank, program in enumerate(programs)])

    def _of(self, rank, program):
        answer, number = None, 0
        while True:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                return end.value
            asked = self.change(number, rank, asked)
            self.messages.append((rank, asked.data.tobytes(), getattr(asked, "splits", None)))
            answer, number = (yield asked), number + 1


def sent_and_summed(pipeline, gradients, half, scale, network):
    works = [
        SlicedSum(pipeline, len(gradients), RngKey(3, 1, 7, rank), gradient.copy(), half=half)
        for rank, gradient in enumerate(gradients)
    ]
    totals = network.run([one.steps() for one in works])
    outs = []
    for total in totals:
        outs.append(np.full_like(gradients[0], 9))
        total.write(outs[-1], scale)
    assert all(one.gradient.tobytes() == gradient.tobytes() for one, gradient in zip(works, gradients, strict=True))
    return totals, outs


def both_ways(gradients, half=None, scale=1.0):
    """What was sent and summed, which must be the same bytes."""
    networks = Recorded(len(gradients)), Recorded(len(gradients))
    totals, outs = sent_and_summed(NATIVE, gradients, half, scale, networks[0])
    others, expected = sent_and_summed(COMPOSED, gradients, half, scale, networks[1])
    assert networks[0].messages == networks[1].messages
    assert [out.tobytes() for out in outs] == [out.tobytes() for out in expected]
    assert all(isinstance(one, DecodedSum) for one in others)
    return totals, outs[0], networks[0].messages


def as_half(values, half):
    if half == "float16":
        return values.astype(np.float16).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32) if half else values


@given(
    st.integers(2, 5), st.integers(1, 40_000), st.sampled_from([None, "float16", "bfloat16"]), st.integers(0, 20),
    st.sampled_from([1.0, 0.25, 1 / 3]), st.sampled_from([0.0, 0.4, 1.0]),
)  # fmt: skip
def test_native_calls_send_the_same_bytes(ranks, numel, half, seed, scale, zeros):
    rng = np.random.default_rng(seed)
    gradients = [as_half(cases.heavy(numel, 10 * seed + rank) * np.float32(0.01), half) for rank in range(ranks)]
    for gradient in gradients:
        gradient[rng.random(numel) < zeros] *= np.float32(0.0)  # zeros of both signs
        gradient[rng.integers(0, numel, 3)] = [1e-45, -1e-39, 2.0**-24]
    both_ways([as_half(gradient, half) for gradient in gradients], half, scale)


def test_a_dense_vector_is_summed_natively_in_rank_order():
    gradients = [cases.heavy(70_001, rank) * np.float32(0.01) for rank in range(3)]
    totals, total, messages = both_ways(gradients)
    assert all(isinstance(one, CheckedSum) for one in totals)
    expected = np.zeros_like(total)
    for gradient in gradients:
        expected += gradient
    assert total.tobytes() == expected.tobytes()
    # The section of a container, which ends it, is the oracle's.
    _, data, splits = messages[0]
    assert data[: splits[0]].endswith(oracle.encode(gradients[0][: equal_bounds(70_001, 3)[1]]))


@pytest.mark.parametrize("numel", [128 // 2, 4096 * 4, 130_000])
def test_headers_of_each_size_and_a_first_chunk_unlike_the_others(numel):
    """The bytes of a section are a number of 1, 2, 3 bytes; the first chunk alone does not tell how many."""
    noise = [cases.heavy(numel, rank) for rank in range(2)]
    both_ways(noise)
    for early in (True, False):
        for gradient in noise:
            gradient[np.arange(numel) % (numel // 2) < 4096 if early else np.arange(numel) % (numel // 2) >= 4096] = 0
        both_ways(noise)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_goes_from_codec_to_codec(bad):
    for place in (0, 9000, 19_999):
        gradients = [cases.heavy(20_000, rank) for rank in range(2)]
        gradients[1][place] = bad
        totals, total, _ = both_ways(gradients)
        assert not np.isfinite(total[place]) and np.isfinite(np.delete(total, place)).all()
    largest = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        _, total, _ = both_ways([np.full(9000, largest), np.full(9000, largest)])
    assert np.isinf(total).all()


def test_what_does_not_compress_goes_from_codec_to_codec():
    rng = np.random.default_rng(1)
    patterns = [rng.integers(0, 2**32, 30_000, dtype=np.uint32) for _ in range(2)]
    for one in patterns:
        one[one >> 23 & 255 >= 200] &= 0x807FFFFF
    both_ways([one.view(np.float32) for one in patterns])
    half = [one.copy() for one in patterns]  # the second slice compresses, and the first does not
    for one in half:
        one[15_000:] = 0
    both_ways([one.view(np.float32) for one in half])


def test_a_sum_beyond_16_bits():
    for half, large in (("float16", 60_000.0), ("bfloat16", 3e38)):
        gradients = [as_half(cases.heavy(20_000, rank) * np.float32(0.01), half) for rank in range(2)]
        for gradient in gradients:
            gradient[15_000] = as_half(np.float32([large]), half)[0]
        with np.errstate(over="ignore"):
            both_ways(gradients, half)


def flipped(bit):
    def change(asked):
        data = asked.data.copy()
        data[bit // 8 % data.size] ^= 1 << bit % 8
        return asked._replace(data=data)

    return change


def cut(asked):
    if isinstance(asked, AllToAll):
        return AllToAll(asked.data[:-1], [*asked.splits[:-1], asked.splits[-1] - 1])
    return asked._replace(data=asked.data[:-1])


def longer(asked):
    asked = asked._replace(data=np.append(asked.data, np.uint8(0)))
    return asked._replace(splits=[*asked.splits[:-1], asked.splits[-1] + 1]) if isinstance(asked, AllToAll) else asked


@given(st.integers(0, 2**20), st.integers(0, 1))
def test_a_flipped_bit_is_the_error_of_the_composed_way(bit, number):
    refused(number, flipped(bit))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("change", [cut, longer])
def test_other_damage_is_the_error_of_the_composed_way(number, change):
    refused(number, change)


def refused(number, change):
    """What rank 1 sends in this collective is changed; nothing is written then."""
    gradients = [cases.heavy(9000, rank) for rank in range(3)]
    said = []
    for pipeline in (NATIVE, COMPOSED):
        network = Recorded(3, lambda at, rank, asked: change(asked) if (at, rank) == (number, 1) else asked)
        with pytest.raises(ContainerError) as info:
            sent_and_summed(pipeline, gradients, None, 1.0, network)
        said.append(str(info.value))
    assert said[0] == said[1] and re.search("rank [12]|follow", said[0])


def packed_again(data, section, numel, owner, rank):
    """The container of a section, with the checksum that it must have."""
    work = SlicedSum(NATIVE, 3, RngKey(3, 1, 7, rank), np.zeros(3 * numel, np.float32))
    expected = NATIVE.expected(numel, np.dtype(np.float32), work._keys()[owner])
    container, _ = frame.unpack(data, expected)
    return frame.pack(replace(container, values=section(container.values)), expected.shared)


@pytest.mark.parametrize("number", [0, 1])
def test_a_section_that_no_encoder_wrote_is_refused_whatever_its_checksum(number):
    """A rank of the job with a fault, or worse."""
    numel = 5000

    def infinite(section):
        section = section.copy()
        chunks = 1 + 2 * 2
        assert section[chunks + 1] & 3, "no symbol"
        section[chunks + 2] = 255
        return section

    for section in (infinite, lambda one: one[:-1], lambda one: np.append(one, np.uint8(0)), lambda one: one[:3]):

        def change(at, rank, asked, section=section):
            if (at, rank) != (number, 1):
                return asked
            if not number:
                ends = np.cumsum(asked.splits)
                first = packed_again(asked.data[: ends[0]], section, numel, 0, 1)
                return AllToAll(np.append(first, asked.data[ends[0] :]), [first.size, *asked.splits[1:]])
            return asked._replace(data=packed_again(asked.data, section, numel, 1, 1))

        gradients = [cases.heavy(3 * numel, rank) for rank in range(3)]
        said = []
        for pipeline in (NATIVE, COMPOSED):
            with pytest.raises(ContainerError, match="rank 1") as info:
                sent_and_summed(pipeline, gradients, None, 1.0, Recorded(3, change))
            said.append(str(info.value))
        assert said[0] == said[1]


def test_containers_of_no_elements():
    salts = [5, 6, 7]
    data, sizes = lossless.containers(np.zeros(4097, np.float32), [0, 0, 4097, 4097], salts)
    assert sizes[0] == sizes[2] == 0 and sizes[1] == data.size
    assert lossless.container_bytes(data, 4097, 6) == data.size
    assert lossless.container_bytes(data, 4097, 7) == 0
    assert lossless.container_bytes(data[:0], 0, 6) == 0
    for end in range(min(40, data.size)):
        assert lossless.container_bytes(data[:end].copy(), 4097, 6) == 0
        assert lossless.container_of_sum(data[:end].copy(), [end], 4097, None, 6) is None
    total = lossless.container_of_sum(np.append(data, data), [data.size, data.size], 4097, None, 6)
    assert total.tobytes() == data.tobytes()


def test_the_way_is_only_for_dense_vectors_on_the_host():
    assert Pipeline(Config.load("fast")).whole is None
    assert Pipeline(Config.load(sparsifier="topk", value="lossless")).whole is None
    residual = np.zeros(9000, np.float32)
    config = Config.load(sparsifier="none", value="lossless", exchange="reduce_scatter", scope="bucket")
    works = [
        SlicedSum(Pipeline(config), 2, RngKey(3, 1, 7, rank), cases.heavy(9000, rank), residual, residual)
        for rank in range(2)
    ]
    assert all(isinstance(one, DecodedSum) for one in CollectiveNetwork(2).run([one.steps() for one in works]))
