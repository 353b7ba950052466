"""Sections and containers: the same bytes on the host and on a GPU, and what the host knows without waiting."""

import numpy as np
import pytest

from hvd_deepreduce.ops import arrays, deferred, sections
from tests import cases
from tests.ops.compare import both
from tests.oracle import short_container as oracle


def test_join(gpu):
    """Headers, arrays at any address, padding and the checksum."""
    rng = np.random.default_rng(2)
    for sizes in ((0, 0, 0), (3,), (1, 7, 9), (8, 16, 24), (2048, 5, 0, 4097), (0, 1)):
        parts = [rng.integers(0, 256, size).astype(np.uint8) for size in sizes]
        for header in (b"", b"x", b"four", bytes(range(64))):
            for pad in (1, 8):
                both(gpu, sections.join, header, *parts, pad=pad)
            section = both(gpu, sections.join, header.ljust(64), *parts, pad=8, checked=True)
            sections.check_container(gpu.put(section))
            for at in (0, 13, 40, section.size - 1):
                altered = section.copy()
                altered[at] ^= 1
                with pytest.raises(ValueError, match="altered"):
                    sections.check_container(altered)
                with pytest.raises(ValueError, match="altered"):
                    sections.check_container(arrays.aligned(gpu.bytes(altered)))
    both(gpu, sections.join, b"12345678", cases.random(33), pad=8)


def test_join_of_a_short_container(gpu):
    """Any number of bytes, the checksum in front, and something added to it."""
    rng = np.random.default_rng(3)
    for sizes in ((0, 0, 0), (1,), (2, 1), (3,), (1, 7, 9), (2048, 5, 4097)):
        parts = [rng.integers(0, 256, size).astype(np.uint8) for size in sizes]
        for header in (bytes(5), bytes(4) + b"\x21\x03", bytes(4) + bytes(range(20))):
            keyed = {"at": 0, "salt": 0xFEDCBA98}
            section = both(gpu, sections.join, header, *parts, checked=True, **keyed)
            assert section.size == len(header) + sum(sizes)
            sections.check_container(section, **keyed)
            for offset in (0, 3):
                room = gpu.bytes(np.concatenate([np.zeros(offset, np.uint8), section]))[offset:]
                sections.check_container(room, **keyed)
                with pytest.raises(ValueError, match="altered"):
                    sections.check_container(room, at=0, salt=1)
            for at in (0, 4, section.size - 1):
                altered = section.copy()
                altered[at] ^= 1
                for data in (altered, gpu.bytes(altered)):
                    with pytest.raises(ValueError, match="altered"):
                        sections.check_container(data, **keyed)


FORMS = [
    (32 + 1, [5, 70, 90], 0), (64, [], 0), (16, [3], 100), (32 + 16 + 2, [130, 9, 200], 130), (32 + 15, [1, 1, 1], 0),
    (0, [300], 0), (32 + 1, [0, 0, 0], 0),
]  # fmt: skip
"""Form, numbers, and the values that have an order, of containers of 100 float32."""


def short_containers():
    """Containers of version 2, and (begin, end) of what is read of each."""
    rng, data, ends = np.random.default_rng(5), b"", []
    for form, numbers, ordered in FORMS:
        header = bytes(rng.integers(0, 256, 4).astype(np.uint8)) + bytes([form]) + b"".join(map(oracle.varint, numbers))
        sizes = [numbers[-2] if form & 15 else 0, 400 if form == 64 else numbers[-1], oracle.sizes_of_order(ordered)]
        begin = len(data)
        data += header + bytes(rng.integers(0, 256, sum(sizes)).astype(np.uint8))
        places = np.cumsum([begin + len(header), *sizes]).tolist()
        ends.append([(begin, begin + 64), *zip(places, places[1:], strict=False)])
    return np.frombuffer(data, np.uint8), ends


@pytest.mark.parametrize("cut", [0, 1, 3, 100, 700])
def test_prefetch_short_headers(gpu, cut):
    data, ends = short_containers()
    data = data[: data.size - cut].copy()
    there = gpu.put(data)
    sections.prefetch_short_headers(data, len(FORMS), [100], 4)  # nothing to do on the host
    with deferred.reading(there):
        sections.prefetch_short_headers(there, 2, [100, 100, 100, 100], 4)
        waits = getattr(gpu.module, "waits", 0)
        for places in ends:
            whole = places[-1][1] <= data.size
            for number, (begin, end) in enumerate(places):
                if begin < data.size and (whole or not number):
                    want = data[begin : min(end, begin + 64)].tobytes()
                    assert sections.peek(there[begin : min(end, data.size)], 64) == want
        assert getattr(gpu.module, "waits", 0) == waits  # the host knew them all
        for at in (1, 8):
            part = arrays.aligned(there[at : at + 20])
            assert sections.peek(part, 20) == data[at : at + 20].tobytes()


def test_prefetch_many_short_headers(gpu):
    """More containers than the kernel finds at a time; numbers of 1 to 9 bytes."""
    one, ends = short_containers()
    cut = ends[1][0][0]
    long = [bytes([9, 9, 9, 9, 32 + 1]) + b"".join(map(oracle.varint, (1 << bits, 3, 5))) + bytes(range(8))
            for bits in (6, 7, 20, 34, 41, 48, 55, 56, 62)]  # fmt: skip
    parts = [one[:cut].tobytes(), *long] * 7
    data = np.frombuffer(b"".join(parts), np.uint8)
    there, at = gpu.put(data), 0
    with deferred.reading(there):
        sections.prefetch_short_headers(there, 1, [100] * len(parts), 4)
        for part in parts:
            assert sections.known_start(there[at : at + len(part)]) == data[at : at + 64].tobytes()
            at += len(part)
            assert sections.known_start(there[at - 5 : at]) == (part[-5:] if part in long else b"")


def test_peek(gpu):
    part = sections.join(b"head", np.random.default_rng(2).integers(0, 256, 100).astype(np.uint8))
    assert sections.peek(part, 4) == sections.peek(gpu.bytes(part), 4) == b"head"
    assert sections.peek(part[:3], 4) == sections.peek(gpu.bytes(part[:3]), 4) == b"hea"
    values = gpu.put(cases.random(33))
    with deferred.reading(values):  # a checksum that the device has written is read from there
        assert sections.peek(sections.join(bytes(64), values, checked=True), 64)[12:16] != bytes(4)


@pytest.mark.parametrize("ends", [(), (8, 16), (9,), (15, 17, 24), (1, 11, 18, 31)])
def test_check_padding(gpu, ends):
    data = np.full(32, 255, np.uint8)
    for end in ends:
        data[end : -(-end // 8) * 8] = 0
    zeros = np.flatnonzero(data == 0)
    sections.check_padding(data, ends)
    sections.check_padding(gpu.put(data), ends)
    for at in zeros:
        other = data.copy()
        other[at] = 128
        for array in (other, gpu.put(other)):
            with pytest.raises(ValueError, match="a byte between its sections is not zero"):
                sections.check_padding(array, ends)
