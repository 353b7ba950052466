"""Arithmetic on arrays, and index lists, give the same bytes on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import arrays, deferred
from tests import cases
from tests.ops.compare import INDICES, INPUTS, both, same, some_indices


@pytest.mark.parametrize("name", INPUTS)
def test_dense(gpu, name):
    x = INPUTS[name]
    both(gpu, arrays.add, x, np.ascontiguousarray(x[::-1]))
    if x.size:
        at = some_indices(x.size, (x.size + 1) // 2)
        both(gpu, arrays.gather, x, at)
        both(gpu, arrays.subtract_sent, x, at, x[at] * x.dtype.type(0.75))
        both(gpu, arrays.subtract_sent, x, None, x * x.dtype.type(0.75))


@pytest.mark.parametrize("name", INPUTS)
def test_finite(gpu, name):
    x = INPUTS[name]
    both(gpu, deferred.finite, x)
    both(gpu, deferred.check_finite, x)
    for bad in (np.nan, np.inf, -np.inf):
        for at in {0, x.size // 2, x.size - 1} if x.size else ():
            broken = x.copy()
            broken[at] = bad
            both(gpu, deferred.finite, broken)
            both(gpu, deferred.check_finite, broken)


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


@pytest.mark.parametrize("numel", [0, 1, 33, 5003])
def test_index_lists(gpu, numel):
    rng = np.random.default_rng(3)
    order = rng.permutation(numel).astype(np.uint32)
    both(gpu, arrays.scatter, rng.standard_normal(numel), order)
    both(gpu, arrays.scatter, rng.standard_normal(numel).astype(np.float32), order)
    both(gpu, arrays.gather, order, order)
    both(gpu, arrays.offset, order, 2**31)


def test_delete(gpu):
    for name in ("one_of_one", "some", "more_than_a_tile"):
        indices, _ = INDICES[name]
        for count in {0, 1, indices.size // 3, indices.size}:
            places = some_indices(indices.size, count)
            same(gpu.host(arrays.delete(gpu.put(indices), gpu.put(places))), np.delete(indices, places))


def test_arrays_are_made_where_another_one_is(gpu):
    x = cases.random(307)
    there = gpu.put(x)
    allocated = {
        "zeros": arrays.zeros(5, np.float32, there),
        "empty": arrays.empty(5, np.uint32, there),
        "arange": arrays.arange(5, there),
        "move_like": arrays.move_like(x, there),
        "concatenate": arrays.concatenate([there, there]),
        "aligned": arrays.aligned(gpu.bytes(x.view(np.uint8))),
    }
    assert {type(array) for array in allocated.values()} == {type(there)}
    same(gpu.host(allocated["zeros"]), np.zeros(5, np.float32))
    same(gpu.host(allocated["arange"]), np.arange(5, dtype=np.uint32))
    same(arrays.to_host(allocated["move_like"]), x)
    same(arrays.to_host(allocated["concatenate"]), np.concatenate([x, x]))
    same(arrays.to_host(allocated["aligned"]), x.view(np.uint8))
    assert arrays.to_host(x) is x and arrays.move_like(x, x) is x and allocated["empty"].size == 5


@pytest.mark.parametrize("name", INPUTS)
def test_to_float32(gpu, name):
    both(gpu, arrays.to_float32, INPUTS[name])
    both(gpu, arrays.to_float32, INPUTS[name].astype(np.float64) * 1e300)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("numel", [0, 1, 7, 4096, 4097, 70_001, 2_200_000])
def test_a_copy_finds_what_is_not_finite(numel, dtype):
    """Aligned or not, in one run or several, through the cache or around it."""
    for first, threads in ((0, 1), (1, 3)):
        x, out = cases.random(numel + first, dtype)[first:], np.full(numel + 2, 7, dtype)
        addresses = out[1:].ctypes.data, x.ctypes.data
        assert arrays.copy_finite(*addresses, numel, np.dtype(dtype), threads)
        np.testing.assert_array_equal(out[1:-1], x)
        assert out[0] == out[-1] == 7
        for place, poison in ((0, np.nan), (numel - 1, -np.inf), (numel // 2, np.inf)) if numel else ():
            before, x[place] = x[place], poison
            assert not arrays.copy_finite(*addresses, numel, np.dtype(dtype), threads)
            np.testing.assert_array_equal(out[1:-1], x)
            x[place] = before


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_copies_of_many_arrays_find_what_is_not_finite(dtype):
    numels = [3, 0, 70_001, 1, 4096]
    sources = [cases.random(numel, dtype) for numel in numels]
    for poisoned in (None, 0, 2, 3, 4):
        if poisoned is not None:
            sources[poisoned][-1] = np.nan
        outs = [np.full(numel + 2, 7, dtype) for numel in numels]
        to, source = ([one.ctypes.data for one in many] for many in ([out[1:] for out in outs], sources))
        copies = list(zip(to, source, numels, strict=True))
        assert arrays.copy_finite_many(copies, np.dtype(dtype)) == (poisoned is None)
        for x, out in zip(sources, outs, strict=True):
            np.testing.assert_array_equal(out, [7, *x, 7])
            x[...] = np.nan_to_num(x)


def test_scale(gpu):
    for dense in (cases.random(5003), cases.random(40, np.float64), np.float32([-0.0, 0.0, np.inf]), cases.random(0)):
        both(gpu, arrays.scale, dense, 0.3)
        both(gpu, arrays.scale, dense, -1.0)


def test_arrays_are_moved_together(gpu):
    given = [cases.random(5), np.arange(3, dtype=np.uint32), cases.random(4, np.float64), np.empty(0, np.uint32)]
    for like, these in ((given[0], given), (gpu.put(given[0]), given), (gpu.put(given[0]), [])):
        same(gpu.host(arrays.move_all(these, like)), these)
