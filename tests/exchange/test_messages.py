"""The bytes of messages: whatever changes is found, without MPI."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.joint.stream_format import CODED, PAIRS, PLAIN, pack, value_codec
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.mpi import messages
from hvd_deepreduce.exchange.mpi.messages import Label
from hvd_deepreduce.exchange.mpi.transport import describe
from hvd_deepreduce.ops.hash import hash64

LABEL = Label(7, 5, 3)


def section(indices: list[int], numel: int = 100, form: int = PLAIN) -> np.ndarray:
    values = np.arange(1, len(indices) + 1, dtype=np.float32)
    return pack(Stream.from_sparse(SparseTensor(numel, np.array(indices, np.uint32), values), 0), form)


def unpacked(message: np.ndarray, label: Label = LABEL, count: int = 2):
    return messages.unpack(message, label, 2, 65, count)


def test_a_message_and_its_sections():
    sections = [section([1, 2, 9]), section([])]
    message = messages.pack(LABEL, 2, 65, sections)
    assert message.size % 8 == 0 and not messages.is_stale(message, LABEL)
    assert [one.tobytes() for one in unpacked(message)] == [one.tobytes() for one in sections]
    assert unpacked(messages.pack(LABEL, 2, 65, [])) is None


def test_a_message_in_flight_does_not_change_while_it_is_packed_for_another_rank(monkeypatch):
    one = section([1, 2, 9])
    message = messages.pack(LABEL, 2, 65, [one])
    sent, looks = message.tobytes(), []
    monkeypatch.setattr(messages, "hash64", lambda data: looks.append(message.tobytes()) or hash64(data))
    assert messages.pack(LABEL, 2, 65, [one]).ctypes.data == message.ctypes.data
    assert looks == [sent] and message.tobytes() == sent


def test_every_flipped_bit_is_found():
    message = messages.pack(LABEL, 2, 65, [section([1, 2, 9]), section([0])])
    for bit in range(8 * message.size):
        broken = message.copy()
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="cannot read a message of rank 2: its bytes changed on the way"):
            unpacked(broken)
        assert not messages.is_stale(broken, LABEL)


def test_every_cut_and_extension_is_found():
    message = messages.pack(LABEL, 2, 65, [section([1, 2, 9]), section([0])])
    for size in [*range(message.size), message.size + 1, message.size + 8]:
        with pytest.raises(ValueError, match="cannot read a message of rank 2: it"):
            unpacked(np.resize(message, size))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (messages.pack(Label(8, 5, 3), 2, 65, [section([1])] * 2), "belongs to exchange 8 .* and this is exchange 7"),
        (messages.pack(Label(6, 5, 3), 2, 65, [section([1])] * 2), "belongs to exchange 6"),
        (messages.pack(Label(7, 4, 3), 2, 65, [section([1])] * 2), r"\(bucket 3 of step 4\), and"),
        (messages.pack(Label(7, 5, 1), 2, 65, [section([1])] * 2), r"\(bucket 1 of step 5\), and"),
        (messages.pack(LABEL, 1, 65, [section([1])] * 2), "rank 1 and tag 65, and it came"),
        (messages.pack(LABEL, 2, 64, [section([1])] * 2), "rank 2 and tag 64, and it came"),
        (messages.pack(LABEL, 2, 65, [section([1])]), "it is truncated"),
        (messages.pack(LABEL, 2, 65, [section([1])] * 3), "bytes after its 2 streams"),
        (np.empty(0, np.uint8), "it has 0 bytes; a multiple of 8, and at least 40, is required"),
    ],
)
def test_another_message_than_the_expected_one(message, words):
    with pytest.raises(ValueError, match=f"cannot read a message of rank 2: .*{words}"):
        unpacked(message)


def test_only_earlier_messages_are_stale():
    for sequence, stale in ((6, True), (7, False), (8, False)):
        assert messages.is_stale(messages.pack(Label(sequence, 5, 3), 2, 65, []), LABEL) == stale
    assert not messages.is_stale(np.zeros(39, np.uint8), LABEL)


@given(st.data(), st.integers(1, 3000), st.sampled_from([np.float32, np.float64]))
def test_no_message_is_larger_than_the_largest(data, numel, dtype):
    """Of any support, form and value codec."""
    step = data.draw(st.integers(1, 5))
    indices = np.arange(data.draw(st.integers(0, numel - 1)), numel, step, dtype=np.uint32)
    if data.draw(st.booleans()):
        indices = np.delete(indices, np.s_[:: data.draw(st.integers(2, 9))])
    tensor = SparseTensor(numel, indices, np.random.default_rng(0).standard_normal(indices.size).astype(dtype))
    for coded in (False, True):
        for value in ("raw", "float16", "qsgd"):
            codec = DenseStream(coded=coded, value=value)
            stream = Stream.from_sparse(tensor, codec.gap(numel, tensor.values.dtype))
            packed = pack(stream, CODED if coded else PLAIN, value_codec(value, 8), RngKey(0, 0, 0))
            assert messages.pack(LABEL, 2, 65, [packed]).size <= messages.largest(1, numel)
    assert messages.pack(LABEL, 2, 65, [pack(Stream.from_pairs(tensor), PAIRS)]).size <= messages.largest(1, numel)


def test_an_error_as_a_sentence():
    assert describe(ValueError("it is 3; 2 is allowed")) == "it is 3; 2 is allowed"
    assert [describe(error) for error in (ValueError(), MemoryError(), KeyError("x"), OSError("no disk"))] == [
        "ValueError", "MemoryError", "KeyError: 'x'", "OSError: no disk",
    ]  # fmt: skip


def oracle(data: bytes, seed: int) -> int:
    """kernels/hash/hash.cpp in Python."""
    mask, step = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(h: int) -> int:
        h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & mask
        h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & mask
        return h ^ h >> 33

    padded = data + bytes(-len(data) % 64)
    sums = [0] * 8
    for at in range(0, len(padded), 8):
        stripe, lane = divmod(at // 8, 8)
        word = int.from_bytes(padded[at : at + 8], "little")
        mixed = word ^ (mix(step * (lane + 1) & mask) + step * stripe & mask)
        sums[lane] = sums[lane] + word + (mixed & 0xFFFFFFFF) * (mixed >> 32) & mask
    found = mix(seed + step & mask) ^ len(data)
    for lane in range(8):
        found = mix(found * step + sums[lane] & mask)
    return found


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1), st.integers(0, 7))
def test_the_hash_equals_the_oracle(data, seed, shift):
    """At any address."""
    memory = np.zeros(len(data) + shift, np.uint8)
    memory[shift:] = np.frombuffer(data, np.uint8)
    assert hash64(memory[shift:], seed) == oracle(data, seed)


def test_the_hash_depends_on_order_and_size():
    words = np.zeros(1000, np.uint64)
    seen = {hash64(words[:size]) for size in range(1000)}
    for at in range(1000):
        words[at] = 1
        seen.add(hash64(words))
        words[at] = 0
    assert len(seen) == 2000
