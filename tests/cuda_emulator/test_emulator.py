"""Tests of the emulator: it fulfils the guarantees of CUDA, and detects kernels that violate its rules."""

import threading

import numpy as np
import pytest

from tests import cuda_emulator
from tests.cuda_emulator import EmulationError, RawModule, asarray, streams

CODE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
#define KERNEL extern "C" __global__ void

KERNEL reverse(u32* x, u32 barrier) {
    __shared__ u32 copy[64];
    copy[threadIdx.x] = x[threadIdx.x];
    if (barrier) __syncthreads();
    x[threadIdx.x] = copy[63 - threadIdx.x];
}
KERNEL reverse_warp(u32* x, u32 barrier) {
    __shared__ u32 copy[64];
    copy[threadIdx.x] = x[threadIdx.x];
    if (barrier) __syncwarp();
    x[threadIdx.x] = copy[threadIdx.x ^ 31];
}
KERNEL across_warps(u32* x) {
    __shared__ u32 copy[64];
    copy[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    x[threadIdx.x] = copy[threadIdx.x ^ 32];
}
KERNEL one_word(u32* x, u32 atomically) {
    if (atomically) atomicAdd(x, 1u);
    else x[0] = 1;
}
KERNEL publish(u32* x) {
    if (blockIdx.x == 0 && threadIdx.x == 0) x[1] = 5;
    if (blockIdx.x == 1 && threadIdx.x == 0) x[0] = x[1];
}
KERNEL half_waits(u32* x) {
    if (threadIdx.x < 32) __syncthreads();
    x[threadIdx.x] = 1;
}
KERNEL different_operations(u32* x) {
    if (threadIdx.x % 2) x[threadIdx.x] = __ballot_sync(0xFFFFFFFFu, 1);
    else x[threadIdx.x] = __shfl_sync(0xFFFFFFFFu, threadIdx.x, 0);
}
KERNEL reads_at(const u32* x, u32 at, u32* out) { out[threadIdx.x + 64 * blockIdx.x] = x[at]; }
KERNEL writes_at(u32* x, u32 at) { if (threadIdx.x == 0) x[at] = 1; }
KERNEL unaligned(unsigned char* x, u64* out) { out[threadIdx.x] = *(const u32*)(x + 1); }
KERNEL uninitialized(u32* out) {
    __shared__ u32 x[64];
    if (out[threadIdx.x] == 999) x[threadIdx.x] = 1;  // without a possible write the compiler would remove x
    out[threadIdx.x] = x[threadIdx.x];
}
KERNEL order_of(u32* out, u32* next) { out[blockIdx.x * 64 + threadIdx.x] = atomicAdd(next, 1u); }
KERNEL warp_operations(u32* out) {
    const u32 t = threadIdx.x, all = 0xFFFFFFFFu;
    out[t] = __shfl_sync(all, t, 5);
    out[64 + t] = __shfl_up_sync(all, t, 3);
    out[128 + t] = __shfl_down_sync(all, t, 3);
    out[192 + t] = __shfl_xor_sync(all, t, 7);
    out[256 + t] = __ballot_sync(all, t % 3 == 0);
    out[320 + t] = __match_any_sync(all, t % 5);
    out[384 + t] = (u32)(__any_sync(all, t == 40) * 2 + __all_sync(all, t < 32));
    out[448 + t] = (u32)__syncthreads_or(t == 63);
    out[512 + t] = (u32)__shfl_sync(all, (u64)t << 32 | t, 9);
}
KERNEL several_atomics(u32* x, u64* y) {
    atomicMax(x, threadIdx.x);
    atomicMin(x + 1, threadIdx.x);
    atomicOr(x + 2, 1u << (threadIdx.x % 32));
    if (atomicCAS(x + 3, 0u, threadIdx.x + 1) == 0) atomicExch(x + 4, threadIdx.x + 1);
    atomicAdd(y, (u64)threadIdx.x << 30);
}
KERNEL bits(u32* out) {
    out[threadIdx.x] = (u32)(__popc(threadIdx.x) | __clz((int)threadIdx.x) << 8 | __ffs((int)threadIdx.x) << 16);
}
"""

pytestmark = pytest.mark.emulator
if cuda_emulator.available():
    pytest.skip(cuda_emulator.available(), allow_module_level=True)


@pytest.fixture(scope="module")
def module():
    return RawModule(CODE)


@pytest.fixture(params=[0, 1, 2])
def run(module, request):
    before = cuda_emulator.order
    cuda_emulator.order = request.param
    yield lambda name, *args, grid=1: module.get_function(name)((grid,), (64,), args)
    cuda_emulator.order = before


def numbers(count=64):
    return asarray(np.arange(count, dtype=np.uint32))


def test_barriers_order_accesses(run):
    x = numbers()
    run("reverse", x, np.uint32(1))
    assert (x.memory == np.arange(64)[::-1]).all()
    x = numbers()
    run("reverse_warp", x, np.uint32(1))
    assert (x.memory == np.arange(64) ^ 31).all()


@pytest.mark.parametrize("name, args", [
    ("reverse", [np.uint32(0)]), ("reverse_warp", [np.uint32(0)]), ("across_warps", []), ("one_word", [np.uint32(0)]),
])  # fmt: skip
def test_races_are_detected(run, name, args):
    with pytest.raises(EmulationError, match="race"):
        run(name, numbers(), *args)


def test_races_between_blocks_are_detected(run):
    with pytest.raises(EmulationError, match="race in global"):
        run("publish", numbers(), grid=2)


def test_atomics_do_not_race(run):
    x = numbers()
    run("one_word", x, np.uint32(1), grid=3)
    assert x.memory[0] == 192
    x, y = asarray(np.array([0, 99, 0, 0, 0], np.uint32)), asarray(np.zeros(1, np.uint64))
    run("several_atomics", x, y)
    x, y = x.get(), y.get()
    assert x[0] == 63 and x[1] == 0 and x[2] == 2**32 - 1 and x[3] == x[4] and y[0] == 2016 << 30


def test_deadlocks_are_detected(run):
    with pytest.raises(EmulationError, match="for ever"):
        run("half_waits", numbers())
    with pytest.raises(EmulationError, match="different operations"):
        run("different_operations", numbers())


def test_accesses_outside_arrays_are_detected(run):
    x, out = numbers(200), numbers(64)
    run("reads_at", x[:7], np.uint32(6), out)
    assert (out.memory == 6).all()
    for name, args in (("reads_at", (x[:7], np.uint32(7), out)), ("reads_at", (x[3:], np.uint32(2**32 - 1), out)),
                       ("writes_at", (x[:7], np.uint32(7)))):  # fmt: skip
        with pytest.raises(EmulationError, match="outside"):
            run(name, *args)
    with pytest.raises(EmulationError, match="outside"):
        run("reads_at", x, np.uint32(0), out, grid=2)
    with pytest.raises(EmulationError, match="aligned"):
        run("unaligned", x.view(np.uint8), asarray(np.zeros(64, np.uint64)))


def test_shared_memory_is_uninitialized(run):
    x = numbers()
    run("uninitialized", x)
    assert (x.memory == 0xA5A5A5A5).all()


def test_order_of_threads(run):
    out, following = numbers(256), asarray(np.zeros(1, np.uint32))
    run("order_of", out, following, grid=4)
    assert (np.sort(out.memory) == np.arange(256)).all()
    assert (out.memory == np.arange(256)).all() == (cuda_emulator.order == 0)


def test_warp_operations(run):
    out, t = numbers(576), np.arange(64)
    run("warp_operations", out)
    got = out.get().reshape(9, 64)
    lane, warp = t % 32, t // 32
    assert (got[0] == warp * 32 + 5).all() and (got[8] == warp * 32 + 9).all()
    assert (got[1] == np.where(lane < 3, t, t - 3)).all()
    assert (got[2] == np.where(lane > 28, t, t + 3)).all()
    assert (got[3] == t ^ 7).all()
    for row, key in ((4, (t % 3 == 0)), (5, t % 5)):
        for i in t:
            members = (warp == warp[i]) & (key if row == 4 else key == key[i])
            assert got[row, i] == (1 << lane[members]).sum()
    assert (got[6] == np.where(warp == 1, 2, 1)).all() and (got[7] == 1).all()


def test_bit_operations(run):
    out = numbers()
    run("bits", out)
    out = out.get()
    for i in range(64):
        lowest = (i & -i).bit_length()
        assert out[i] == (bin(i).count("1") | (32 - i.bit_length()) << 8 | lowest << 16)


def test_arguments_must_match_the_parameters(run):
    x = numbers()
    for args in ((x,), (x, 1), (x, np.uint64(1)), (np.uint64(8), np.uint32(1)), (np.arange(64), np.uint32(1))):
        with pytest.raises(EmulationError):
            run("reverse", *args)


def test_arrays_refuse_host_operations():
    """Code that mixes arrays of the host and the device fails, as with CuPy."""
    x = numbers()
    for wrong in (lambda: np.add(x, 1), lambda: np.zeros(64) + x, lambda: np.concatenate([x, x]), lambda: np.asarray(x),
                  lambda: x[3], lambda: x[::2], lambda: x.__setitem__(slice(0, 3), numbers(2))):  # fmt: skip
        with pytest.raises(TypeError):
            wrong()
    x[2:4] = numbers(2)
    assert x.get()[:5].tolist() == [0, 1, 0, 1, 4]


def test_arrays_have_no_operators():
    """Each would be a kernel of CuPy's, or, as ``x *= 2`` where there is ``x * 2`` alone, another array."""

    def multiplied():
        y = numbers()
        y *= 2

    x = numbers()
    for wrong in (lambda: x * 2, lambda: x - x, lambda: -x, lambda: x == x, lambda: x != 0, lambda: bool(x),  # noqa: PLR0124
                  lambda: abs(x), lambda: x.sum(), lambda: x.any(), multiplied):  # fmt: skip
        with pytest.raises((TypeError, AttributeError)):
            wrong()


@pytest.fixture
def two():
    with streams.checking():
        yield streams.Stream("A"), streams.Stream("B")


@pytest.mark.parametrize("use", [
    lambda run, x: run("writes_at", x, np.uint32(3)), lambda run, x: run("reads_at", x, np.uint32(3), numbers()),
    lambda run, x: x.get(), lambda run, x: x.copy(), lambda run, x: x.astype(np.uint64), lambda run, x: x[2:4].fill(0),
    lambda run, x: cuda_emulator.concatenate([numbers(), x]), lambda run, x: x.__setitem__(slice(0, 64), numbers()),
    lambda run, x: numbers().__setitem__(slice(0, 64), x),
])  # fmt: skip
@pytest.mark.parametrize("wait", [
    lambda a, b: b.wait_event(a.record_event()), lambda a, b: b.wait_stream(a), lambda a, b: a.synchronize(),
    lambda a, b: a.record_event().synchronize(),
])  # fmt: skip
def test_operations_of_two_streams_must_be_ordered(run, two, use, wait):
    a, b = two
    with a:
        x = numbers()
        before = a.record_event()
        run("writes_at", x, np.uint32(3))
    b.wait_event(before)
    b.wait_event(streams.Event())  # that was not recorded
    message = "on stream B .* memory that stream A has written by writes_at: it waits for no event"
    with b, pytest.raises(EmulationError, match=message):
        use(run, x)
    wait(a, b)
    with b:
        use(run, x)
    a.wait_stream(b)


def test_reads_need_no_order_among_them(run, two):
    a, b = two
    x = numbers()
    for one in (streams.NULL, a, b):
        with one:
            streams.current().wait_stream(streams.NULL)  # where it was written
            run("reads_at", x, np.uint32(3), numbers())
    a.wait_stream(streams.NULL)
    with a, pytest.raises(EmulationError, match="writes memory that stream B has read by reads_at"):
        run("writes_at", x, np.uint32(3))
    a.wait_stream(b)
    with a:
        run("writes_at", x, np.uint32(3))
    streams.NULL.wait_stream(a)


def test_two_streams_may_use_different_parts(run, two):
    a, b = two
    x = numbers()
    for stream in two:
        stream.wait_stream(streams.NULL)
    for stream, part in ((a, x[:32]), (b, x[32:])):
        with stream:
            run("writes_at", part, np.uint32(3))
    with a, pytest.raises(EmulationError, match="memory that stream B has written"):
        x.copy()
    a.wait_stream(b)
    with a:
        assert x.get()[[3, 35]].tolist() == [1, 1]


def test_what_is_ordered_is_so_over_other_streams(run, two):
    a, b = two
    third = streams.Stream("C")
    with a:
        x = numbers()
    b.wait_stream(a)
    third.wait_stream(b)
    with third:
        run("writes_at", x, np.uint32(3))
    assert third.follows(a.record_event()) and not a.follows(third.record_event())
    third.synchronize()
    with a:  # since the host has waited
        run("writes_at", x, np.uint32(3))
    assert not a.follows(third.record_event())


def test_each_thread_has_a_current_stream(two):
    a, _ = two
    seen = []
    with a:
        thread = threading.Thread(target=lambda: seen.append(streams.current()))
        thread.start()
        thread.join()
        assert [*seen, streams.current()] == [streams.NULL, a]
    assert streams.current() is streams.NULL


def test_memory_must_not_be_freed_too_early(run):
    def use(before_the_end):
        with streams.checking():
            a, b = streams.Stream("A"), streams.Stream("B")
            with a:
                x = numbers()
            b.wait_stream(a)
            with b:
                run("writes_at", x, np.uint32(3))
            before_the_end(a, b, x)
            del x

    with pytest.raises(EmulationError, match="memory of stream A was freed while stream B uses it by writes_at"):
        use(lambda a, b, x: None)
    use(lambda a, b, x: a.wait_stream(b))
    use(lambda a, b, x: b.synchronize())
    use(lambda a, b, x: streams.record(x.data.ptr, b))


def test_streams_are_refused_where_nothing_is_checked():
    with pytest.raises(EmulationError, match="outside of streams.checking"):
        streams.Stream("A")
    with streams.checking(), pytest.raises(EmulationError, match="twice"), streams.checking():
        pass
