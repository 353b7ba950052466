"""Sections and containers: the same bytes on the host and on a GPU, and what the host knows without waiting."""

import numpy as np
import pytest

from hvd_deepreduce.ops import arrays, deferred, sections
from tests import cases
from tests.ops.compare import both


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


def test_peek(gpu):
    part = sections.join(b"head", np.random.default_rng(2).integers(0, 256, 100).astype(np.uint8))
    assert sections.peek(part, 4) == sections.peek(gpu.bytes(part), 4) == b"head"
    assert sections.peek(part[:3], 4) == sections.peek(gpu.bytes(part[:3]), 4) == b"hea"
    values = gpu.put(cases.random(33))
    with deferred.reading(values):  # a checksum that the device has written is read from there
        assert sections.peek(sections.join(bytes(64), values, checked=True), 64)[12:16] != bytes(4)


def containers():
    """Two containers in a row, as far as ``prefetch_headers`` reads them: headers with the sizes of three sections."""
    rng, parts = np.random.default_rng(4), []
    for sizes in ((5, 200, 0), (64, 0, 9)):
        header = bytes(rng.integers(0, 256, sections.SIZES_AT).astype(np.uint8)) + np.uint64(sizes).tobytes()
        parts.append(sections.join(header, *[rng.integers(0, 256, size).astype(np.uint8) for size in sizes], pad=8))
    return parts


def pieces(parts):
    """Where ``peek`` looks: (first byte, size) of each container's header and of its sections that are not empty."""
    begin = 0
    for part in parts:
        for size in (64, *part[sections.SIZES_AT : 64].view(np.uint64).tolist()):
            if size:
                yield begin, size
            begin += -(-size // 8) * 8


def test_prefetch_headers(gpu):
    parts = containers()
    data = np.concatenate(parts)
    there = gpu.put(data)
    sections.prefetch_headers(data, 2)  # nothing to do on the host
    with deferred.reading(there):
        sections.prefetch_headers(there, 2)
        waits = getattr(gpu.module, "waits", 0)
        for begin, size in pieces(parts):
            want = data[begin : begin + min(size, 64)].tobytes()
            assert sections.peek(data[begin : begin + size], 64) == want
            assert sections.peek(there[begin : begin + size], 64) == want
        assert getattr(gpu.module, "waits", 0) == waits  # the host knew them all


@pytest.mark.parametrize("size", [0, 8, 63, 64, 100, 336, 400])
def test_prefetch_headers_of_cut_containers(gpu, size):
    """What is there is still peeked at, and what is not has no bytes."""
    parts = containers()
    data = np.concatenate(parts)[:size]
    there = gpu.put(data)
    with deferred.reading(there):
        sections.prefetch_headers(there, 2)
        for begin, length in pieces(parts):
            want = sections.peek(data[begin : begin + length], 64)
            assert sections.peek(there[begin : begin + length], 64) == want


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
