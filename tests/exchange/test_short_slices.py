"""Short forms of slices' containers: what they stand for, their bytes for ever, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_deepreduce import Config, ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint import short_stream
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.joint.stream_format import CODED, pack, packed_size, unpack, value_codec
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.short_slices import MEAN, ShortSlices
from hvd_deepreduce.pipeline import Pipeline

KEY = RngKey(1, 2, 3, 4)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
VALUES = ["qsgd", "raw", "half", {"name": "half", "dtype": "float16"}, {"name": "qsgd", "bits": 4, "bucket_size": 8}]


def container(value, numel, indices, dtype=F32, index="rice", whole=None):
    config = Config.load(
        sparsifier="topk", index=index, value=value, exchange={"name": "reduce_scatter", "density": 0.01}
    )
    pipeline = Pipeline(config)
    # The digest is of the config's fields, of which a later release may have more.
    pipeline.shared = pipeline.composed.shared = replace(pipeline.shared, digest=7)
    vector = np.zeros(numel, dtype)
    values = ((np.arange(indices.size) + 1) * 0.5 * (-1.0) ** np.arange(indices.size)).astype(dtype)
    packed, _ = pipeline.encode_selected(vector, None, indices, values, KEY)
    short = ShortSlices.of(config, whole or 64 * numel, 8, 0, dtype.itemsize)
    return packed, short, pipeline.expected(numel, dtype, KEY)


@given(
    value=st.sampled_from(VALUES), numel=st.integers(1, 5000), seed=st.integers(0, 99),
    share=st.sampled_from([0, 0.01, 0.1, 1.0]), double=st.booleans(), index=st.sampled_from(["rice", "delta", "auto"]),
)  # fmt: skip
@settings(deadline=None)
def test_a_short_form_stands_for_its_container(value, numel, seed, share, double, index):
    indices = np.flatnonzero(np.random.default_rng(seed).random(numel) < share).astype(np.uint32)
    packed, short, expected = container(value, numel, indices, F64 if double else F32, index, whole=numel)
    data = short.shorten(packed, expected)
    found, end = short.lengthen(b"before" + data + b"behind", 6, expected, 1)
    assert found == packed.tobytes() and end == 6 + len(data)
    assert len(data) <= packed.size + 3
    if index == "rice" and (0 < indices.size <= 250 or share == 1.0 < numel < 4000):
        assert data[0] and len(data) <= packed.size - 3


def test_their_bytes():
    """Golden: written once, to be read for ever."""
    for value, numel, indices, expected in (
        ("qsgd", 100, [3, 4, 50, 99], "05690e0504030d130100000040ce8f1b00"),
        ("qsgd", 10, list(range(10)), "ff76c70000a0404599d4e4cdac197800"),
        ("raw", 10, [], "0103ef"),
    ):
        packed, short, tensor = container(value, numel, np.array(indices, np.uint32))
        assert short.shorten(packed, tensor).hex() == expected
    assert short.as_it_is(b"text") == b"\0\4text"


def test_what_is_broken_is_refused():
    packed, short, expected = container("qsgd", 100, np.array([3, 4, 50, 99], np.uint32))
    data = short.shorten(packed, expected)
    for cut in range(len(data)):
        with pytest.raises(ContainerError, match="the container of rank 1 cannot be read"):
            short.lengthen(data[:cut], 0, expected, 1)
    altered = packed.copy()
    altered[-1] ^= 4
    assert short.shorten(altered, expected) == short.as_it_is(altered.tobytes())
    with pytest.raises(ContainerError, match="begins with 254, which no short form does"):
        short.lengthen(b"\xfe" + bytes(50), 0, expected, 1)
    with pytest.raises(ContainerError, match="at most 4096 are sent whole"):
        short.lengthen(b"\xff" + bytes(50), 0, expected._replace(numel=10**9), 1)
    other = expected._replace(key=RngKey(1, 2, 4, 4))
    with pytest.raises(ContainerError, match="its checksum is not that of a container of this tensor at step 4"):
        short.lengthen(data, 0, other, 1)


@pytest.mark.parametrize("value", ["qsgd", "raw", {"name": "qsgd", "bits": 4, "bucket_size": 8}], ids=str)
def test_up_to_three_flipped_bits_are_found(value):
    """For certain, and not with the probability of a checksum: in each of many containers."""
    rng = np.random.default_rng(0)
    for count in range(40):
        indices = np.sort(rng.choice(200, count, replace=False)).astype(np.uint32)
        packed, short, expected = container(value, 200, indices)
        data = short.shorten(packed, expected)
        number = int.from_bytes(data, "little")
        for bit in range(8 * len(data)):
            others = [1 << int(other) for other in rng.integers(0, 8 * len(data), 2)]
            for flips in (0, others[0], others[0] ^ others[1]):
                broken = (number ^ 1 << bit ^ flips).to_bytes(len(data), "little")
                if broken == data:
                    continue
                try:
                    found, end = short.lengthen(broken, 0, expected, 1)
                except ContainerError:
                    continue
                # Where the first byte is another, it may stand for bytes, which have a checksum of their own.
                assert end != len(data) or broken[0] == 0, "altered bytes passed"


@pytest.mark.parametrize("rest", [b"", b"\0", b"\0\0", b"\0\1", b"\0\x80", b"\0\x80\0", b"\0" + 9 * b"\xff", b"\1"])
def test_what_stands_for_nothing_is_taken_as_bytes(rest):
    """What follows the last container is an error that a rank tells, or bytes to refuse; none of them are dropped."""
    assert ShortSlices.taken_as_it_is(b"before" + rest, 6) == rest
    assert ShortSlices.taken_as_it_is(b"before" + ShortSlices.as_it_is(rest + b"text"), 6) == rest + b"text"


def test_which_exchanges_have_short_forms():
    def of(ranks=8, numel=1000, **given):
        config = Config.load({"exchange": {"name": "reduce_scatter", "density": 0.1}, **given})
        return ShortSlices.of(config, numel, ranks, 0, 4)

    assert of() and of(numel=80 * MEAN) and not of(numel=90 * MEAN) and not of(ranks=1)
    assert not of(joint="skcompress") and not of(value={"name": "qsgd", "entropy": "rans"}) and not of(value="sign")
    assert of(sparsifier="nonzero") and not of(sparsifier="nonzero", exchange="reduce_scatter")


@given(
    value=st.sampled_from(["raw", "float16", "bfloat16", "qsgd"]), seed=st.integers(0, 99), double=st.booleans(),
    count=st.integers(0, 300), numel=st.integers(300, 5000), bits=st.integers(2, 8),
)  # fmt: skip
@settings(deadline=None)
def test_a_short_stream_stands_for_its_section(value, seed, double, count, numel, bits):
    rng, dtype = np.random.default_rng(seed), F64 if double else F32
    indices = np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)
    tensor = SparseTensor(numel, indices, rng.standard_normal(count).astype(dtype))
    section = pack(Stream.from_sparse(tensor, 0), CODED, value_codec(value, bits), KEY)
    short = short_stream.shorten(section)
    assert packed_size(short) == short.size and short.size % 8 == 0
    assert short_stream.lengthen(short, numel, dtype).tobytes() == section.tobytes()
    if 0 < count <= 25:
        assert short.size <= section.size - 24
        with pytest.raises(ValueError, match="form 3, which only an exchange may send"):
            unpack(short, numel, dtype)  # as a container's reader does
    for cut in range(0, short.size - 1, 8):
        with pytest.raises(ValueError, match="truncated|announces|it has"):
            unpack(short_stream.lengthen(short[:cut], numel, dtype), numel, dtype)
