"""Every operation gives the same bytes on the host and on a GPU, for awkward inputs; see conftest.py for the GPU."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

from hvd_deepreduce import container, ops, pipeline
from hvd_deepreduce.ops import (
    arrays,
    bitmap,
    bits,
    bloom,
    deferred,
    delta,
    device,
    elias_fano,
    huffman,
    index_sizes,
    rans,
    rice,
    rle,
    sections,
    select,
    sketch,
    sort,
)
from hvd_deepreduce.ops.dispatch import OPERATIONS
from tests import cases

INPUTS = {
    **cases.inputs(),
    "five_thousand": cases.random(5003),
    "few_values": np.random.default_rng(3).choice([0.0, 1.0, -1.0, 0.5], 2500).astype(np.float32),
    "ties": np.tile(np.float32([0.25, -2.0, 2.0, 0.0]), 1200),
    "float64_long": cases.random(4099, np.float64),
}
VALUES = {name: x for name, x in INPUTS.items() if x.dtype == np.float32}
KEY = (7, 3, 11)


def same(got, want):
    if isinstance(want, tuple | list):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
        return
    if isinstance(want, np.ndarray):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert got.tobytes() == want.tobytes()
        return
    assert got == want


def both(gpu, operation, *arguments, **settings):
    """The operation on the host and on the GPU, with equal results. Arrays that it changes are compared too."""
    ours, theirs = [], []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            ours.append(argument.copy())
            theirs.append(gpu.bytes(argument) if argument.dtype == np.uint8 else gpu.put(argument))
        else:
            ours.append(argument)
            theirs.append(argument)
    try:
        want = operation(*ours, **settings)
    except ValueError:
        with pytest.raises(ValueError):
            operation(*theirs, **settings)
        return None
    got = operation(*theirs, **settings)
    same(gpu.host(got), want)
    for our, their in zip(ours, theirs, strict=True):
        if isinstance(our, np.ndarray):
            same(gpu.host(their), our)
    return want


def some_indices(numel, count, seed=1):
    return np.sort(np.random.default_rng(seed).choice(numel, count, replace=False)).astype(np.uint32)


INDICES = {
    "one_of_one": (np.uint32([0]), 1),
    "last": (np.uint32([4096]), 4097),
    "all": (np.arange(777, dtype=np.uint32), 777),
    "some": (some_indices(36_864, 368), 36_864),
    "dense": (some_indices(3000, 1900), 3000),
    "runs": (np.concatenate([np.arange(a, a + 40, dtype=np.uint32) for a in range(7, 9000, 301)]), 10_000),
    "far": (np.uint32([5, 2**31, 2**32 - 2]), 2**32 - 1),
    "ends": (np.uint32([0, 2**20]), 2**20 + 1),
    "more_than_a_tile": (some_indices(50_021, 2100), 50_021),
}


@pytest.mark.parametrize("name", INPUTS)
def test_topk(gpu, name):
    x = INPUTS[name]
    y = np.random.default_rng(5).permutation(x) * x.dtype.type(0.5)
    for k in {0, min(1, x.size), x.size // 10, x.size}:
        both(gpu, select.topk, x, None, k)
        both(gpu, select.topk, x, y, k)


def test_topk_where_the_sample_misleads(gpu):
    """All of the large ones where the sample does not look, and more ties than there is room for."""
    x = np.zeros(300_000, np.float32)
    x[:40] = 3.0
    both(gpu, select.topk, x, None, 60)
    x[:] = -0.5
    both(gpu, select.topk, x, x, 1000)


def test_topk_of_unaligned_views(gpu):
    x = cases.random(5000)
    want = select.topk(x[3:].copy(), None, 77)
    same(gpu.host(select.topk(gpu.put(x)[3:], None, 77)), want)


@pytest.mark.parametrize("name", INPUTS)
def test_threshold_and_nonzero(gpu, name):
    x = INPUTS[name]
    for least in (0.0, 0.5, 1e-40, 1e300):
        both(gpu, select.threshold, x, None, least)
        both(gpu, select.threshold, x, np.ascontiguousarray(-x[::-1]), least)


def test_threshold_keeps_more_than_there_is_room_for(gpu):
    both(gpu, select.threshold, cases.random(140_000), cases.random(140_000, seed=2), 0.01)


@pytest.mark.parametrize("name", INPUTS)
def test_dense(gpu, name):
    x = INPUTS[name]
    both(gpu, arrays.add, x, np.ascontiguousarray(x[::-1]))
    both(gpu, deferred.finite, x)
    both(gpu, deferred.check_finite, x)
    for bad in (np.nan, np.inf, -np.inf):
        for at in {0, x.size // 2, x.size - 1} if x.size else ():
            broken = x.copy()
            broken[at] = bad
            both(gpu, deferred.finite, broken)
            both(gpu, deferred.check_finite, broken)
    for block in (1, 7, 64, 1000):
        for l2 in (True, False):
            both(gpu, select.block_norms, x, None, block, l2)
            both(gpu, select.block_norms, x, x, block, l2)
    if x.size:
        at = some_indices(x.size, (x.size + 1) // 2)
        both(gpu, arrays.gather, x, at)
        both(gpu, arrays.subtract_sent, x, at, x[at] * x.dtype.type(0.75))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("parts", [0, 1, 4, 11])
def test_sum(gpu, dtype, parts):
    for numel in (1, 2048, 5003):
        given = []
        for p in range(parts):
            count = [0, numel, max(1, numel // 20)][p % 3]
            at = some_indices(numel, count, p)
            given.append((at, cases.random(count, dtype, p)))
        given.append((None, cases.random(numel, dtype, 99)))
        for scale in (1.0, 0.25):
            want, got = np.empty(numel, dtype), gpu.put(np.empty(numel, dtype))
            arrays.sum_into(want, given, scale)
            arrays.sum_into(got, [(None if i is None else gpu.put(i), gpu.put(v)) for i, v in given], scale)
            same(gpu.host(got), want)


def test_sum_of_nothing(gpu):
    got = gpu.put(np.ones(5000, np.float32))
    arrays.sum_into(got, [], 3.0)
    assert not gpu.host(got).any()


def test_joined(gpu):
    """Headers, arrays of any address, padding and the checksum; and what the host remembers of it."""
    random = np.random.default_rng(2)
    for sizes in ((0, 0, 0), (3,), (1, 7, 9), (8, 16, 24), (2048, 5, 0, 4097), (0, 1)):
        arrays = [random.integers(0, 256, size).astype(np.uint8) for size in sizes]
        for header in (b"", b"x", b"four", bytes(range(64))):
            for pad in (1, 8):
                both(gpu, sections.join, header, *arrays, pad=pad)
            section = both(gpu, sections.join, header.ljust(64), *arrays, pad=8, checked=True)
            sections.check_container(gpu.put(section))
            for at in (0, 13, 40, section.size - 1):
                broken = section.copy()
                broken[at] ^= 1
                with pytest.raises(ValueError, match="altered"):
                    sections.check_container(arrays.aligned(gpu.bytes(broken)))
    values = cases.random(33)
    both(gpu, sections.join, b"12345678", values, pad=8)
    part = sections.join(b"head", random.integers(0, 256, 100).astype(np.uint8))
    assert sections.peek(gpu.bytes(part), 4) == b"head" and sections.peek(gpu.bytes(part[:3]), 4) == b"hea"
    with deferred.reading(gpu.put(values)):  # the host has not seen the checksum
        assert sections.peek(sections.join(bytes(64), gpu.put(values), checked=True), 64)[12:16] != bytes(4)


def test_orders(gpu):
    """Permutations, and what only looks like one."""
    random = np.random.default_rng(3)
    for numel in (0, 1, 33, 5003):
        order = random.permutation(numel).astype(np.uint32)
        both(gpu, bits.check_order, order)
        both(gpu, arrays.scatter, random.standard_normal(numel), order)
        both(gpu, arrays.scatter, random.standard_normal(numel).astype(np.float32), order)
        both(gpu, arrays.gather, order, order)
        both(gpu, sort.by_index, order + np.uint32(7))
        both(gpu, arrays.offset, order, 2**31)
        if numel:
            for at, value in ((0, numel), (numel - 1, 2**32 - 1), (0, order[-1])):
                wrong = order.copy()
                wrong[at] = value
                both(gpu, bits.check_order, wrong)
            both(gpu, sort.by_index, wrong)
    both(gpu, sort.by_index, random.integers(0, 50, 3000).astype(np.uint32))


@pytest.mark.parametrize("numel, block", [(10, 64), (100, 7), (98, 7), (2**32 - 1, 2**31), (5000, 1)])
def test_blocks(gpu, numel, block):
    blocks = -(-numel // block)
    for kept in {(0,), (blocks - 1,), (0, blocks - 1) if blocks > 1 else (0,)} if block < 2**20 else ():
        both(gpu, select.block_indices, np.array(kept, np.uint32), block, numel)


@pytest.mark.parametrize("numel, count", [(1, 1), (2, 1), (307, 0), (307, 30), (307, 307), (100_003, 999)])
def test_random_indices(gpu, numel, count):
    want = select.random_indices(numel, count, *KEY, None)
    same(gpu.host(select.random_indices(numel, count, *KEY, gpu.put(np.zeros(1)))), want)


@pytest.mark.parametrize("width", [0, 1, 2, 3, 5, 7, 8, 13, 25, 31, 32])
def test_pack(gpu, width):
    for count in (0, 1, 7, 1000):
        fields = np.random.default_rng(count).integers(0, 2**width, count).astype(np.uint32)
        section = both(gpu, bits.pack, fields, width)
        both(gpu, bits.unpack, section, count, width, np.uint32)
        if width <= 8:
            both(gpu, bits.pack, fields.astype(np.uint8), width)
            both(gpu, bits.unpack, section, count, width, np.uint8)
        both(gpu, bits.unpack, section[:-1], count, width, np.uint32)


def broken(section, count=12):
    """The section cut, extended and with bits flipped."""
    yield section[: section.size // 2]
    yield section[:-1]
    yield np.append(section, np.uint8(0))
    yield np.append(section, np.uint8(1))
    rng = np.random.default_rng(section.size)
    for _ in range(count if section.size else 0):
        other = section.copy()
        other[rng.integers(section.size)] ^= 1 << rng.integers(8)
        yield other
    if section.size:
        for first in (0, 17, 255):
            other = section.copy()
            other[0] = first
            yield other


CODES = {
    "bitmap": (bitmap.encode, bitmap.decode),
    "rice": (rice.encode, rice.decode),
    "elias_fano": (elias_fano.encode, elias_fano.decode),
    "flagged": (sketch.flagged_encode, sketch.flagged_decode),
    "rle": (rle.encode, rle.decode),
    "huffman": (huffman.encode_indices, huffman.decode_indices),
    "rans": (rans.encode_indices, rans.decode_indices),
    "delta": (delta.encode, delta.decode),
}
TAKES_NUMEL = {"bitmap", "rice", "elias_fano", "rle", "huffman"}


def encoded(gpu, code, indices, numel):
    return both(gpu, CODES[code][0], indices, *([numel] if code in TAKES_NUMEL else []))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", INDICES)
def test_index_codes(gpu, code, name):
    indices, numel = INDICES[name]
    if code == "bitmap" and numel > 2**24:
        return
    section = encoded(gpu, code, indices, numel)
    same(both(gpu, CODES[code][1], section, numel, indices.size), indices)
    for other in broken(section):
        both(gpu, CODES[code][1], other, numel, indices.size)
    both(gpu, CODES[code][1], section, numel, indices.size + 1)
    both(gpu, CODES[code][1], section, max(1, int(indices[-1])), indices.size)


def test_codes_of_no_indices(gpu):
    nothing = np.empty(0, np.uint32)
    for code in set(CODES) - {"rice"}:
        section = encoded(gpu, code, nothing, 100)
        both(gpu, CODES[code][1], section, 100, 0)
        both(gpu, CODES[code][1], np.zeros(2, np.uint8), 100, 0)


def test_check_indices(gpu):
    for indices in ([], [0], [3, 4, 9], [3, 3], [4, 3], [9, 10]):
        both(gpu, bits.check_indices, np.array(indices, np.uint32), 10)


@pytest.mark.parametrize("name", sorted(set(INDICES) - {"far"}))
@pytest.mark.parametrize("hashes, bits", [(1, 3), (10, 15), (30, 44)])
def test_bloom(gpu, name, hashes, bits):
    indices, numel = INDICES[name]
    if numel > 2**19:
        numel, indices = 2**14, indices[:1]
    bits = both(gpu, bloom.insert, indices, max(8, indices.size * bits // 8), hashes, *KEY)
    both(gpu, bloom.query, bits, hashes, numel, *KEY)
    both(gpu, bloom.query, np.full(9, 255, np.uint8), hashes, 1003, *KEY)


def test_without(gpu):
    for name in ("one_of_one", "some", "more_than_a_tile"):
        indices, _ = INDICES[name]
        for count in {0, 1, indices.size // 3, indices.size}:
            places = some_indices(indices.size, count)
            same(gpu.host(arrays.delete(gpu.put(indices), gpu.put(places))), np.delete(indices, places))


@pytest.mark.parametrize("name", VALUES)
def test_sort(gpu, name):
    both(gpu, sort.by_value, VALUES[name])


def streams_of_symbols():
    rng = np.random.default_rng(11)
    for count in (1, 2, 300, 1023, 1024, 1030, 2048, 33_000):
        yield rng.integers(0, 256, count).astype(np.uint8)
        yield np.minimum(rng.geometric(0.3, count), 255).astype(np.uint8)
        yield np.full(count, 201, np.uint8)
    yield np.repeat(np.arange(30, dtype=np.uint8), [min(2**k, 4000) for k in range(30)])  # lengths beyond twelve bits
    yield np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("coder", [huffman, rans], ids=["huffman", "rans"])
def test_symbols(gpu, coder):
    for symbols in streams_of_symbols():
        section = both(gpu, coder.encode, symbols)
        same(both(gpu, coder.decode, section, symbols.size), symbols)
        if symbols.size in (300, 1030, 2048):
            for other in broken(section):
                both(gpu, coder.decode, other, symbols.size)
            both(gpu, coder.decode, section, symbols.size + 1)
    both(gpu, coder.encode, np.empty(0, np.uint8))
    both(gpu, coder.decode, np.empty(0, np.uint8), 0)
    both(gpu, coder.decode, np.zeros(3, np.uint8), 0)


def test_arrays_are_made_where_another_one_is(gpu):
    x = cases.random(307)
    there = gpu.put(x)
    made = {
        "zeros": arrays.zeros(5, np.float32, there),
        "empty": arrays.empty(5, np.uint32, there),
        "arange": arrays.arange(5, there),
        "move_like": arrays.move_like(x, there),
        "concatenate": arrays.concatenate([there, there]),
        "aligned": arrays.aligned(gpu.bytes(x.view(np.uint8))),
    }
    assert {type(array) for array in made.values()} == {type(there)}
    same(gpu.host(made["zeros"]), np.zeros(5, np.float32))
    same(gpu.host(made["arange"]), np.arange(5, dtype=np.uint32))
    same(arrays.to_host(made["move_like"]), x)
    same(arrays.to_host(made["concatenate"]), np.concatenate([x, x]))
    same(arrays.to_host(made["aligned"]), x.view(np.uint8))
    assert arrays.to_host(x) is x and arrays.move_like(x, x) is x and made["empty"].size == 5


@pytest.mark.parametrize("name", INPUTS)
def test_to_float32(gpu, name):
    both(gpu, arrays.to_float32, INPUTS[name])
    both(gpu, arrays.to_float32, INPUTS[name].astype(np.float64) * 1e300)


def test_every_operation_has_both_implementations_and_a_test():
    """All operations that exist, found by importing all modules of ``ops``."""
    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")
    tested = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tested += "".join(Path(module.__file__).read_text() for module in (container, pipeline))
    tested += " ".join(f"{coder}.{name}" for coder in ("huffman", "rans") for name in ("encode", "decode"))
    assert len(OPERATIONS) > 80
    for name, operation in OPERATIONS.items():
        assert operation.device is not None, f"{name} has no implementation for arrays on a GPU"
        host, device = (list(inspect.signature(f).parameters) for f in (operation.host, operation.device))
        assert host == device, name
        assert operation.__doc__, f"{name} has no docstring"
        assert re.search(rf"\b{re.escape(name)}\b", tested), f"{name} has no test in tests/ops"


def test_deferred_checks(gpu):
    indices, numel = INDICES["some"]
    section = rice.encode(indices, numel)
    with deferred.deferred_checks():
        got = [rice.decode(gpu.bytes(section), numel, indices.size) for _ in range(3)]
    for result in got:
        same(gpu.host(result), indices)
    reached = False
    with pytest.raises(ValueError), deferred.deferred_checks():
        rice.decode(gpu.bytes(section), numel, indices.size)
        rice.decode(gpu.bytes(section[:-1]), numel, indices.size)
        reached = True
    assert reached
    with pytest.raises(ValueError):
        rice.decode(gpu.bytes(section[:-1]), numel, indices.size)


def test_host_only(gpu):
    indices, numel = INDICES["some"]
    bits = bloom.insert(indices, 400, 8, *KEY)
    positives = bloom.query(bits, 8, numel, *KEY)
    both(gpu, bloom.conflict_sets, positives, indices.size, 400, 8, *KEY)
    both(gpu, index_sizes.index_sizes, indices, numel)


@pytest.mark.parametrize("number", [0, 3, 4])
def test_a_missing_barrier_is_found(gpu, number, monkeypatch):
    """Without one of the barriers of the scan that most codecs share, the emulator objects. (The other three of the six
    keep a function's shared memory from its next call, and here each has another barrier in between.)"""
    if not hasattr(gpu.module, "EmulationError"):
        pytest.skip("only the emulator knows that threads race")
    text, barrier = device.source("bits/bits.cu"), "    __syncthreads();\n"
    scans = text[text.index("T block_scan") : text.index("// ---- Bit strings")]
    assert scans.count(barrier) == 6
    parts = scans.split(barrier)
    fewer = barrier.join(parts[: number + 1]) + barrier.join(["", *parts[number + 1 :]])[len(barrier) :]
    assert fewer.count(barrier) == 5
    monkeypatch.setattr(device, "source", lambda _: text.replace(scans, fewer))
    monkeypatch.setattr(device, "_modules", {})
    monkeypatch.setattr(device, "_functions", {})
    indices = some_indices(90_000, 4000)
    section = gpu.put(bitmap.encode(indices, 90_000))
    with pytest.raises(gpu.module.EmulationError, match="race"):
        bitmap.decode(section, 90_000, indices.size)


@pytest.mark.parametrize("right, wrong", [
    ("lane_number() <= last ? word & SUM", "lane_number() == last ? word & SUM"),
    ("while (__any_sync(WHOLE_WARP, word < AGGREGATE))", "while (false)"),
])  # fmt: skip
def test_the_look_back_is_needed(gpu, right, wrong, monkeypatch):
    """Blocks that run at once do wait for each other, and find sums that are not prefixes yet."""
    if not hasattr(gpu.module, "EmulationError"):
        pytest.skip("a wrong kernel may do anything on a GPU")
    text = device.source("bits/bits.cu")
    assert right in text
    monkeypatch.setattr(device, "source", lambda _: text.replace(right, wrong))
    monkeypatch.setattr(device, "_modules", {})
    monkeypatch.setattr(device, "_functions", {})
    monkeypatch.setattr(gpu.module, "processors", 4)
    indices = some_indices(600_000, 40_000)
    with pytest.raises((AssertionError, ValueError, gpu.module.EmulationError)):
        section = gpu.put(bitmap.encode(indices, 600_000))
        same(gpu.host(bitmap.decode(section, 600_000, indices.size)), indices)
