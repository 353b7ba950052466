import dataclasses
import random
import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.ops import bits, sections
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from hvd_deepreduce.wire.standalone import Container, ContainerError
from tests import cases
from tests.oracle import bitpack, checksum
from tests.oracle import container as oracle
from tests.selection import examples

KEY = RngKey(11, 12, 13)
NUMEL = 200
GRADIENT = cases.random(NUMEL)

CONFIGS = {name: config for name, config in cases.CONFIGS.items() if not name.startswith("randomk")}


def encoded(name, gradient=GRADIENT):
    return Pipeline(CONFIGS[name]).encode(gradient, None, KEY).tobytes()


def array(data):
    return np.frombuffer(data, np.uint8)


def read(data, numel=NUMEL, rank=3):
    """What a receiver does with the bytes of rank 3. Each section gets memory of its own: `make sanitize` sees there
    what reads past it."""
    container = wire.unpack(array(data), rank, numel)
    parts = {part: getattr(container, part).copy() for part in ("indices", "values", "order")}
    return container, *decode_part(dataclasses.replace(container, **parts), numel, rank)


def must_refuse(data, message="", numel=NUMEL):
    with pytest.raises(ContainerError, match=f"rank 3 cannot be read: .*{message}"):
        read(data, numel)


SAMPLE = encoded("index rice")


def test_layout_is_the_specified_one():
    sections = [b"index", b"values section", b"o"]
    container = Container(
        1, 2, 3, np.dtype(np.float64), 1000, 7, RngKey(0xA, 0xB, 0xC), 0xDDDDDDDD, *map(array, sections), joint=True
    )
    header = {
        "magic": b"HVDR", "version": 1, "sparsifier": 1, "index": 2, "value": 3, "dtype": 2, "flags": 1, "reserved": 0,
        "checksum": 0, "numel": 1000, "count": 7, "seed": 0xA, "parameter": 0xB, "step": 0xC, "digest": 0xDDDDDDDD,
        "index_bytes": 5, "value_bytes": 14, "order_bytes": 1,
    }  # fmt: skip
    data = wire.pack(container)
    assert data.tobytes() == oracle.write(header, sections) and container.nbytes == data.size == 64 + 8 + 16 + 8
    back = wire.unpack(data, 0, 1000)
    assert [section.tobytes() for section in (back.indices, back.values, back.order)] == sections
    for name in ("sparsifier", "index", "value", "dtype", "numel", "count", "digest", "joint"):
        assert getattr(back, name) == getattr(container, name)
    assert back.key == RngKey(0xA, 0xB, 0xC)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=40))
def test_checksum_equals_the_oracle(words):
    data = np.array(words, "<u4").view(np.uint8)
    assert sections.checksum(data) == checksum.checksum(data.tobytes())


def test_any_step_fits():
    container = Container(0, 0, 1, np.dtype(np.float32), 0, 0, RngKey(1, 2, 2**32 + 5), 0, *[array(b"")] * 3)
    assert wire.unpack(wire.pack(container)).key.step == 5


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_is_found(bit):
    for at in range(len(SAMPLE)):
        data = bytearray(SAMPLE)
        data[at] ^= 1 << bit
        must_refuse(bytes(data))


def test_every_cut_is_found():
    for size in range(len(SAMPLE)):
        must_refuse(SAMPLE[:size], "bytes")


def test_two_swapped_words_are_found():
    words = np.frombuffer(SAMPLE, np.uint32)
    for at in range(16, words.size - 1):
        swapped = words.copy()
        swapped[[at, at + 1]] = swapped[[at + 1, at]]
        if not np.array_equal(swapped, words):
            must_refuse(swapped.tobytes(), "checksum")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magic": b"PK\3\4"}, re.escape("begins with b'PK")),
        ({"version": 2}, "version 2.*reads 1"),
        ({"version": 0}, "version 0"),
        ({"index_bytes": 2**64 - 1}, "its header announces .* bytes"),
        ({"value_bytes": 2**63}, "its header announces .* bytes"),
        ({"order_bytes": 2**64 - 8, "index_bytes": 2**64 - 8}, "its header announces .* bytes"),
        ({"value_bytes": 2**32}, "its header announces .* bytes"),
        ({"dtype": 0}, "dtype 0"),
        ({"dtype": 3}, "dtype 3"),
        ({"flags": 3}, "flags 3"),
        ({"flags": 4}, "flags 4"),
        ({"flags": 2}, "in the order of the values must be raw or packed"),
        ({"flags": 2, "index": 2, "sparsifier": 0}, "in the order of the values must be raw or|must hold all 200"),
        ({"reserved": 1}, "reserved 1"),
        ({"numel": NUMEL + 1}, "201 elements, and this one has 200"),
        ({"count": NUMEL + 1}, "support has 201 elements, and its tensor only 200"),
        ({"count": 2**32 - 1}, "support has 4294967295 elements, and its tensor only 200"),
        ({"count": 0}, ""),
        ({"index": 254}, "index codec 254 is unknown"),
        ({"value": 254}, "value codec 254 is unknown"),
        ({"value": 0}, "value codec 0 is unknown"),
        ({"value": 254, "flags": 1}, "joint codec 254 is unknown"),
        ({"index": 0, "sparsifier": 254}, "sparsifier codec 254 is unknown"),
        ({"index": 0}, "must have an index section"),
        ({"index": 0, "sparsifier": 0}, "must hold all 200 elements"),
    ],
)
def test_a_wrong_header_with_a_right_checksum(fields, message):
    must_refuse(oracle.changed(SAMPLE, **fields), message)


@pytest.mark.parametrize(
    ("name", "part"), [("dense value raw", "indices"), ("joint skcompress", "indices"), ("joint skcompress", "order")]
)
def test_a_section_that_the_header_does_not_use(name, part):
    container = wire.unpack(array(encoded(name)), 3)
    more = dataclasses.replace(container, **{part: np.zeros(8, np.uint8)})
    with pytest.raises(ContainerError, match="rank 3 .* it has an .* section of 8 bytes that its header does not"):
        decode_part(more, NUMEL, 3)


def test_the_tensor_is_another_one():
    with pytest.raises(ContainerError, match="rank 3 .* 200 elements, and this one has 10"):
        wire.unpack(array(SAMPLE), 3, 10)
    with pytest.raises(ContainerError, match="rank 3 .* 200 elements, and this one has 10"):
        decode_part(wire.unpack(array(SAMPLE)), 10, 3)
    with pytest.raises(ContainerError, match="^the container cannot be read"):
        wire.unpack(array(SAMPLE[:70]))
    with pytest.raises(ContainerError, match="^the container cannot be read"):
        decode_part(wire.unpack(array(SAMPLE)), 10)


def test_more_elements_than_the_header_can_say():
    container = Container(0, 0, 1, np.dtype(np.float32), 2**32, 0, KEY, 0, *[array(b"")] * 3)
    with pytest.raises(ContainerError, match="4294967296 elements, .* split"):
        wire.pack(container)


def test_split():
    parts = [encoded(name) for name in ("index rice", "value raw", "sparsifier none")]
    whole = b"".join(parts)
    for offset in range(9):  # the bytes may stand anywhere in memory
        room = np.empty(len(whole) + offset, np.uint8)
        room[offset:] = array(whole)
        found = wire.split(room[offset:], 3, NUMEL)
        assert [container.nbytes for container in found] == [len(part) for part in parts]
        for rank, container in enumerate(found):
            support, values = decode_part(container, NUMEL, rank)
            assert values.size == container.count and (support is None) == (rank == 2)
    with pytest.raises(ContainerError, match="8 bytes follow"):
        wire.split(array(whole + bytes(8)), 3, NUMEL)
    with pytest.raises(ContainerError, match="rank 2 cannot be read"):
        wire.split(array(whole[:-1]), 3, NUMEL)
    with pytest.raises(ContainerError, match="rank 1 cannot be read: it begins with"):
        wire.split(array(parts[0] + bytes(64)), 2, NUMEL)
    assert wire.split(array(b""), 0) == []


def valid(container, support, values):
    """What a decoder may give for bytes that it accepts."""
    assert values.size == container.count and values.dtype in (np.float32, np.float64)
    if support is None:
        assert container.count == NUMEL
    else:
        assert support.dtype == np.uint32 and support.size == container.count
        assert np.all(support < NUMEL) and np.all(support[1:] > support[:-1])


def change_bytes(data, first, rng):
    """Up to four bytes behind the first ones, often to a value at an end of a range."""
    for _ in range(rng.randint(0, 4)):
        data[rng.randrange(first, len(data))] = rng.choice([0, 1, 127, 128, 255, *[rng.randrange(256)] * 5])


@pytest.mark.parametrize("name", CONFIGS)
def test_mutations_with_a_repaired_checksum(name):
    """Any bytes of the sections and any count: an error that names the rank, or a valid result."""
    original = encoded(name)
    header = oracle.read(original)
    for attempt in range(80):
        rng, mutated, fields = random.Random(f"{name} {attempt}"), bytearray(original), {}
        if rng.random() < 0.5:
            fields["count"] = rng.choice([0, 1, NUMEL, *[rng.randint(0, NUMEL)] * 3])
        for part in ("index", "value", "order"):
            if rng.random() < 0.25:
                # Fewer bytes than there are, or some of the padding or of the next section.
                size = header[f"{part}_bytes"]
                fields[f"{part}_bytes"] = size + rng.randint(-min(size, 8), -(-size // 8) * 8 - size)
        change_bytes(mutated, 64 if len(mutated) > 64 else 9, rng)
        repaired = oracle.changed(bytes(mutated), **fields)
        try:
            container, support, values = read(repaired)
        except ContainerError as error:
            assert "the container of rank 3 cannot be read: " in str(error), attempt
        else:
            valid(container, support, values)


@settings(max_examples=examples(200))
@given(st.binary(max_size=200))
def test_foreign_bytes(data):
    must_refuse(data)
    must_refuse(oracle.repaired(b"HVDR\1" + data[:11].ljust(11, b"\0") + data[11:].ljust(120, b"\0")))


def ordered(name, indices, numel=9):
    """Indices in the order of the values 5, 6, 7."""
    values, none = np.array([5, 6, 7], np.float32).view(np.uint8), array(b"")
    section = struct.pack("<3I", *indices) if name == "raw" else bitpack.pack(indices, bitpack.width_of(numel))
    number = {"raw": 1, "packed": 2}[name]
    return Container(1, number, 1, np.dtype(np.float32), numel, 3, KEY, 0, array(section), values, none, ordered=True)


@pytest.mark.parametrize("name", ["raw", "packed"])
def test_indices_in_the_order_of_the_values(name):
    container = ordered(name, [8, 0, 5])
    data = wire.pack(container)
    assert oracle.read(data.tobytes())["flags"] == 2 and wire.unpack(data).ordered
    support, values = decode_part(wire.unpack(data), 9, 0)
    assert support.tolist() == [0, 5, 8] and values.tolist() == [6, 7, 5]


@pytest.mark.parametrize("indices", [[8, 8, 5], [0, 0, 0], [9, 1, 2], [15, 1, 2]])
@pytest.mark.parametrize("name", ["raw", "packed"])
def test_indices_in_the_order_of_the_values_that_are_no_support(name, indices):
    with pytest.raises(ContainerError, match="rank 0 .* out of order or not below"):
        decode_part(ordered(name, indices), 9, 0)


@pytest.mark.parametrize("name", ["raw", "packed"])
def test_other_numbers_of_indices_than_of_values(name):
    container = ordered(name, [8, 0, 5])
    for section in (container.indices[:-1], np.append(container.indices, np.uint8(0))):
        with pytest.raises(ContainerError, match="rank 0 .* it must have"):
            decode_part(dataclasses.replace(container, indices=section), 9, 0)


@pytest.mark.parametrize("order", [[0, 0, 1], [2, 1, 2], [3, 0, 1]])
def test_an_order_that_is_no_permutation(order):
    values, none = np.arange(3, dtype=np.float32).view(np.uint8), array(b"")
    container = Container(0, 0, 1, np.dtype(np.float32), 3, 3, KEY, 0, none, values, bits.pack(np.uint32(order), 2))
    with pytest.raises(ContainerError, match="rank 0 .* not a permutation"):
        decode_part(container, 3, 0)


def test_an_order_puts_values_back():
    values, none = np.array([5, 6, 7], np.float32).view(np.uint8), array(b"")
    container = Container(0, 0, 1, np.dtype(np.float32), 3, 3, KEY, 0, none, values, bits.pack(np.uint32([2, 0, 1]), 2))
    assert decode_part(container, 3, 0)[1].tolist() == [6, 7, 5]
