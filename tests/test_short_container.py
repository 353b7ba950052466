"""Version 2 of the container: what a job sends, and what its receivers refuse."""

import dataclasses
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame as short
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from hvd_deepreduce.wire.standalone import ContainerError
from tests import cases
from tests.oracle import short_container as oracle
from tests.oracle.checksum import checksum
from tests.selection import examples
from tests.test_container import CONFIGS, GRADIENT, NUMEL, array, change_bytes, valid

KEY = RngKey(11, 12, 2**32 + 13, 2)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
RAW = 1
FORMS = {
    **CONFIGS,
    "ordered": cases.config("topk", "raw", "fit_poly"),
    "dense order": cases.config("none", "raw", "fit_poly"),
    "shared": cases.config("randomk", "rice", "sign"),
    "auto": Config.load(index="auto", value="sign"),
}


def implied(pipeline, numel=NUMEL, dtype=F32, key=KEY):
    return oracle.Implied(
        pipeline.shared.digest, key.seed, key.parameter, key.step % 2**32, numel, 2 if dtype == F64 else 1
    )


def encoded(pipeline, gradient=GRADIENT, key=KEY):
    return pipeline.encode(gradient, None, key, version=2).tobytes()


def read(pipeline, data, numel=NUMEL, dtype=F32, key=KEY):
    """What a receiver does with the bytes of rank 3; each section gets memory of its own, for `make sanitize`."""
    container, size = short.unpack(array(data), pipeline.expected(numel, dtype, key), 3)
    assert size <= len(data)
    parts = {part: getattr(container, part).copy() for part in ("indices", "values", "order")}
    return container, *decode_part(dataclasses.replace(container, **parts), numel, 3)


def must_refuse(pipeline, data, message="", **known):
    with pytest.raises(ContainerError, match=f"rank 3 cannot be read: .*{message}"):
        read(pipeline, data, **known)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_says_the_same_as_version_1(name, dtype):
    """The sections are those of version 1, the header is the specified one, and a receiver finds out all the rest."""
    pipeline = Pipeline(FORMS[name])
    gradient = GRADIENT.astype(dtype)
    long = wire.unpack(pipeline.encode(gradient, None, KEY))
    data = encoded(pipeline, gradient)
    back, _, _ = read(pipeline, data, dtype=dtype)
    for part in ("indices", "values", "order"):
        assert getattr(back, part).tobytes() == getattr(long, part).tobytes()
    assert {**vars(back), "indices": 0, "values": 0, "order": 0} == {
        **vars(long),
        "indices": 0,
        "values": 0,
        "order": 0,
    }
    known = implied(pipeline, dtype=dtype)
    fields = oracle.read(data, known)
    choices = [] if pipeline.config.index is None else [codec.id for codec in pipeline.config.index.choices]
    uncompressed = not (long.sparsifier or long.joint or long.order.size) and long.value == RAW
    form, numbers = 0, []
    if uncompressed:
        form = 64
    else:
        if long.sparsifier:
            form, numbers = 32, [long.count]
        if long.index:
            form += 15 if long.ordered else choices.index(long.index) + 1
            numbers.append(long.indices.size)
        form += 16 * bool(long.order.size)
        numbers.append(long.values.size)
    sections = [getattr(long, part).tobytes() for part in ("indices", "values", "order")]
    assert data == oracle.write(form, numbers, sections, known)
    assert fields["form"] == form and fields["count"] == long.count
    assert [fields[part] for part in ("indices", "values", "order")] == sections
    size = sum(map(len, sections))
    assert len(data) - size == 5 + sum(len(oracle.varint(number)) for number in numbers) <= 14


def test_headers_are_short():
    """8 to 13 bytes up to millions of elements, and 5 for what goes uncompressed."""
    pipeline = Pipeline(Config.load("signtopk"))
    for numel, most in ((64, 8), (2000, 8), (36_864, 10), (2_359_296, 13)):
        data = encoded(pipeline, cases.random(numel))
        fields = oracle.read(data, implied(pipeline, numel))
        assert len(data) - len(fields["indices"]) - len(fields["values"]) <= most
    assert len(encoded(pipeline, np.float32([np.nan, 1]))) == 5 + 8


@pytest.mark.parametrize("name", ["index rice", "ordered", "raw keys, value fit_dexp", "dense order", "joint three_lc"])
def test_every_flipped_bit_and_every_cut_is_found(name):
    pipeline = Pipeline(FORMS[name])
    sample = encoded(pipeline)
    for at in range(len(sample)):
        for bit in range(8):
            data = bytearray(sample)
            data[at] ^= 1 << bit
            must_refuse(pipeline, bytes(data))
        must_refuse(pipeline, sample[:at])


OTHERS = {
    "seed": KEY._replace(seed=12), "parameter": KEY._replace(parameter=13), "step": KEY._replace(step=12),
    "both": KEY._replace(parameter=13, step=2**32 + 12), "swapped": RngKey(12, 11, 13),
}  # fmt: skip


@pytest.mark.parametrize("which", OTHERS)
@pytest.mark.parametrize("name", ["index rice", "value raw", "joint densestream", "sparsifier randomk"])
def test_another_parameter_step_or_seed(which, name):
    pipeline = Pipeline(FORMS[name])
    for gradient in (GRADIENT, np.full(NUMEL, np.nan, np.float32)):
        foreign = encoded(pipeline, gradient, OTHERS[which])
        must_refuse(pipeline, foreign, "tensor at step 4294967309 with this rank's config: .* another tensor")
    read(pipeline, encoded(pipeline, key=KEY._replace(step=13)))  # 32 bits of the step count, as ever


def test_another_config_dtype_or_size():
    pipeline = Pipeline(FORMS["index rice"])
    for other in (Config.load(seed=5), Config.load(density=0.02), Config.load(sparsifier="none", joint="three_lc")):
        must_refuse(pipeline, encoded(Pipeline(other)), "is of another tensor, step or config|cannot give|announces")
    must_refuse(pipeline, encoded(pipeline, GRADIENT.astype(F64)), "another tensor, step or config")
    must_refuse(pipeline, encoded(pipeline, np.append(GRADIENT, 1)), "another tensor, step or config", numel=NUMEL)
    must_refuse(pipeline, pipeline.encode(GRADIENT, None, KEY).tobytes())  # version 1
    nan = np.full(NUMEL, np.nan, F64)
    must_refuse(pipeline, encoded(pipeline, nan), "another tensor, step or config")
    must_refuse(pipeline, encoded(pipeline, nan[1:]), "another tensor, step or config|announces", dtype=F64)


@pytest.mark.parametrize(
    ("name", "form", "numbers", "message"),
    [
        ("index rice", 32 + 2, [3, 3, 12], "the form 34, which this job's config cannot give"),
        ("index rice", 1, [3, 12], "the form 1, which"),
        ("index rice", 15, [3, 12], "the form 15, which"),
        ("index rice", 32 + 15 + 16, [3, 3, 12], "the form 63, which"),
        ("index rice", 128, [3, 3, 12], "the form 128, which"),
        ("index rice", 64 + 1, [3, 3], "the form 65, which"),
        ("index rice", 32 + 14, [3, 3, 12], "the form 46, which"),
        ("index rice", 32 + 1, [201, 3, 12], "support has 201 elements, and its tensor only 200"),
        ("index rice", 32 + 1, [3, 2**63 - 1, 12], "announces 9223372036854775835 bytes, and it has"),
        ("index rice", 32 + 1, [3, 3, 2**40], "announces 10995.* bytes, and it has"),
        ("index rice", 32 + 1, [3, 2**63, 12], "a number that does not end"),
        ("index rice", 32, [3, 20], "the form 32, which"),
        ("index rice", 32 + 1 + 16, [3, 3, 12], "the form 49, which"),
        ("value fit_poly", 32 + 1 + 16, [1, 3, 4], "an order of 1 values, which takes no bytes"),
        ("value fit_poly", 32 + 1 + 16, [0, 3, 4], "an order of 0 values, which takes no bytes"),
        ("joint three_lc", 32 + 1, [3, 3, 12], "the form 33, which"),
        ("joint three_lc", 16, [3], "the form 16, which"),
        ("joint three_lc", 32 + 15, [3, 3, 12], "the form 47, which"),
        ("raw keys, value fit_poly", 15, [12, 12], "the form 15, which"),
        ("raw keys, value fit_poly", 32 + 15 + 16, [3, 12, 12], "the form 63, which"),
    ],
)
def test_a_wrong_header_with_a_right_checksum(name, form, numbers, message):
    pipeline = Pipeline(FORMS[name])
    data = oracle.write(form, numbers, [bytes(20)], implied(pipeline))
    must_refuse(pipeline, data, message)


@pytest.mark.parametrize("number", [b"\x83\0", b"\x80\x80\0", b"\x80" * 12, b"\xff" * 9 + b"\1", b""])
def test_numbers_that_are_not_written_so(number):
    pipeline = Pipeline(FORMS["index rice"])
    for tail in (bytes(40), b""):
        data = oracle.repaired(bytes(4) + bytes([33]) + number + tail, implied(pipeline))
        if number or not tail:
            must_refuse(pipeline, data, "a number that does not end, or that has more bytes than it needs")


@given(st.integers(0, 2**63 - 1), st.binary(max_size=5))
def test_numbers(number, tail):
    data = short.varint(number)
    assert data == oracle.varint(number) and len(data) <= short.NUMBER_BYTES
    assert short.read_varint(b"x" + data + tail, 1) == (number, 1 + len(data))
    with pytest.raises(ValueError, match="does not end"):
        short.read_varint(data[:-1], 0)


def test_split():
    """The containers may stand anywhere in memory; sections get addresses that kernels can read words from."""
    pipeline = Pipeline(FORMS["index rice"])
    gradients = [cases.random(NUMEL), np.zeros(NUMEL, np.float32), np.full(NUMEL, np.inf, np.float32)]
    parts = [encoded(pipeline, gradient) for gradient in gradients]
    whole = b"".join(parts)
    for offset in range(9):
        room = np.empty(len(whole) + offset, np.uint8)
        room[offset:] = array(whole)
        found = pipeline.unpack(room[offset:], 3, NUMEL, F32, KEY)
        for rank, container in enumerate(found):
            support, values = decode_part(container, NUMEL, rank)
            assert values.size == container.count and (support is None) == (rank == 2)
            assert not any(
                section.__array_interface__["data"][0] % 8
                for section in (container.indices, container.values, container.order)
                if section.size
            )
    with pytest.raises(ContainerError, match="3 bytes follow"):
        pipeline.unpack(array(whole + bytes(3)), 3, NUMEL, F32, KEY)
    for cut, rank in ((whole[:-1], 2), (parts[0], 1), (parts[0] + parts[1][:4], 1), (b"", 0)):
        with pytest.raises(ContainerError, match=f"rank {rank} cannot be read"):
            pipeline.unpack(array(cut), 3, NUMEL, F32, KEY)


def test_tensors_without_elements_and_of_one():
    for numel in (0, 1):
        for name in ("index rice", "value raw", "dense order", "joint skcompress"):
            pipeline = Pipeline(FORMS[name])
            gradient = cases.random(numel)
            out = np.full(numel, 7, np.float32)
            containers = pipeline.unpack(array(encoded(pipeline, gradient)), 1, numel, F32, KEY)
            pipeline.decode(containers, out)
            want = np.full(numel, 7, np.float32)
            pipeline.decode([wire.unpack(pipeline.encode(gradient, None, KEY))], want)
            assert out.tobytes() == want.tobytes()


@pytest.mark.parametrize("name", FORMS)
def test_mutations_with_a_repaired_checksum(name):
    """Any bytes: an error that names the rank, or a valid result."""
    pipeline = Pipeline(FORMS[name])
    original, known = encoded(pipeline), implied(pipeline)
    for attempt in range(80):
        rng, mutated = random.Random(f"{name} {attempt}"), bytearray(original)
        change_bytes(mutated, 4, rng)
        for cut in (len(mutated), rng.randint(5, len(mutated))):
            try:
                container, support, values = read(pipeline, oracle.repaired(bytes(mutated[:cut]), known))
            except ContainerError as error:
                assert "the container of rank 3 cannot be read: " in str(error), attempt
                continue
            valid(container, support, values)


@settings(max_examples=examples(200))
@given(st.binary(max_size=200))
def test_foreign_bytes(data):
    pipeline = Pipeline(FORMS["index rice"])
    must_refuse(pipeline, data)


def test_the_checksum_of_every_size():
    for size in range(5, 40):
        data = np.arange(size, dtype=np.uint8)
        assert short.sections.checksum(data, 0) == checksum(data.tobytes(), 0)


def test_an_index_codec_with_too_many_choices():
    class Many(type(Config.load(index="auto").index)):
        @property
        def choices(self):
            return 15 * super().choices[:1]

    config = Config.load().model_copy(update={"index": Many()})
    with pytest.raises(
        ValueError, match=re.escape("the index codec 'auto' has 15 choices, and a container can name 14")
    ):
        Pipeline(config)
