"""Encodes and decodes that are recorded, and made by one native call: kernels/programs/programs.cpp."""

import ctypes
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import device, program
from hvd_deepreduce.ops.program import NotRecordableError, Program
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.pipeline.bundle import Slice
from tests import cases, cuda_emulator
from tests.ops.conftest import ON_GPU

KEY = RngKey(3, 4, 5, 1)
CONFIGS = {
    "recommended": {},
    "rice, float64": {"index": "rice", "value": "raw"},
    "signs of scaled momentum": {"memory": "scaled_momentum", "value": {"name": "sign", "magnitude": "one"}},
    "signs": {"value": {"name": "sign", "bucket_size": 50}},
    "DGC": {"memory": "dgc"},
    "no residual": {"error_feedback": False},
}


class Steps:
    """Encodes and sums of one config, on the host or on a GPU."""

    def __init__(self, put, name, numel):
        config = Config.load(sparsifier={"name": "topk", "density": 0.1}, **CONFIGS[name])
        self.pipeline, self.put = Pipeline(config), put
        self.dtype = np.float64 if name.endswith("float64") else np.float32
        zeros = lambda: put(np.zeros(numel, self.dtype))  # noqa: E731
        self.residual = zeros() if self.pipeline.config.error_feedback else None
        self.velocity = zeros() if self.pipeline.config.has_velocity else None

    def step(self, gradient, key):
        return self.pipeline.encode(
            self.put(gradient.astype(self.dtype)), self.residual, key, 2, velocity=self.velocity, ranks=2
        )


def compare(gpu, name, numel=5003, count=None):
    """Some steps on the host and on the GPU: containers, residuals, velocities and sums."""
    ours, theirs = Steps(np.array, name, numel), Steps(gpu.put, name, numel)
    gradients = [cases.random(numel, seed=seed) for seed in range(3)]
    gradients.insert(2, np.full(numel, np.nan, np.float32))
    gradients.append(np.where(np.arange(numel) % 50 == 0, gradients[0], 0))  # fewer nonzeros, if no residual has more
    for step, gradient in enumerate(gradients):
        key = KEY._replace(step=step)
        waits = cuda_emulator.waits
        want, got = ours.step(gradient, key), theirs.step(gradient, key)
        if count is not None:
            count.append(cuda_emulator.waits - waits)
        assert gpu.host(got).tobytes() == want.tobytes()
        for of_host, of_gpu in ((ours.residual, theirs.residual), (ours.velocity, theirs.velocity)):
            assert of_host is None or gpu.host(of_gpu).tobytes() == of_host.tobytes()
        slices, out = [Slice(ours.pipeline, (0, numel), key)], np.zeros(numel, ours.dtype)
        data, sums = np.concatenate([want, want]), gpu.put(out)
        own = bundle.sum_into(out, data, 2, slices, 0.5)
        assert bundle.sum_into(sums, gpu.bytes(data), 2, slices, 0.5) == own
        np.testing.assert_array_equal(gpu.host(sums), out)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_bytes_are_the_cpu_s(gpu, name):
    waits = []
    compare(gpu, name, count=waits)
    assert ON_GPU or waits[0] == 1


def test_few_nonzeros(gpu):
    """The recorded encode sees it after the residual has the gradient; then the parameter is counted first."""
    steps, numel = Steps(gpu.put, "recommended", 300), 300
    host = Steps(np.array, "recommended", numel)
    gradient = np.zeros(numel, np.float32)
    gradient[[7, 100]] = 3, -4
    for step in range(3):
        key = KEY._replace(step=step)
        assert gpu.host(steps.step(gradient, key)).tobytes() == host.step(gradient, key).tobytes()
        assert gpu.host(steps.residual).tobytes() == host.residual.tobytes()


def test_a_codec_that_needs_the_host_goes_the_composed_way(gpu):
    config = Config.load(sparsifier={"name": "topk", "density": 0.1}, value={"name": "qsgd", "entropy": "huffman"})
    gradient = cases.random(4000)
    want = Pipeline(config).encode(gradient, np.zeros_like(gradient), KEY, 2)
    got = Pipeline(config).encode(gpu.put(gradient), gpu.put(np.zeros_like(gradient)), KEY, 2)
    assert gpu.host(got).tobytes() == want.tobytes()


class Driver:
    """CUDA's driver on the emulated device: what the native call gets the addresses of."""

    def __init__(self):
        self.functions, self.launched = [], []
        self.fails_at = None
        u64, uint, pointer = ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p
        kinds = [
            ctypes.CFUNCTYPE(ctypes.c_int, u64, *[uint] * 7, u64, pointer, pointer),
            ctypes.CFUNCTYPE(ctypes.c_int, u64, ctypes.c_uint8, ctypes.c_size_t, u64),
            ctypes.CFUNCTYPE(ctypes.c_int, u64, pointer, ctypes.c_size_t, u64),
            ctypes.CFUNCTYPE(ctypes.c_int, pointer, u64, ctypes.c_size_t, u64),
            ctypes.CFUNCTYPE(ctypes.c_int, u64),
        ]
        self.calls = [kind(call) for kind, call in zip(
            kinds, (self.launch, self.set, self.copy, self.copy, lambda stream: 0 if stream == 77 else 1), strict=True
        )]  # fmt: skip
        self.addresses = np.array([ctypes.cast(call, ctypes.c_void_p).value for call in self.calls], np.uint64)

    def launch(self, number, blocks, y, z, threads, ty, tz, shared, stream, arguments, extra):
        function = self.functions[number]
        if self.fails_at == function.name:
            return 700
        assert (y, z, ty, tz, shared, stream, extra) == (1, 1, 1, 1, 0, 77, None) and threads == device.THREADS
        with cuda_emulator.one_at_a_time:
            cuda_emulator.runtime().emulated_reset(0)
            for array in self.alive:  # what the driver knows: allocations
                cuda_emulator.runtime().emulated_array(array.data.ptr, array.nbytes, True)
            function.launch(ctypes.c_void_p(arguments), (ctypes.c_uint * 2)(blocks, threads))
            assert not cuda_emulator.runtime().emulated_failure()
        self.launched.append(function.name)
        return 0

    @staticmethod
    def set(to, value, size, stream):
        ctypes.memset(to, value, size)
        return 0

    @staticmethod
    def copy(to, source, size, stream):
        ctypes.memmove(to, source, size)
        return 0

    def function_of(self, xp, file, name):
        function = device.function_of(cuda_emulator, file, name)
        self.functions.append(function)
        return SimpleNamespace(ptr=len(self.functions) - 1)


@pytest.fixture
def driver(monkeypatch):
    """A module in CuPy's place whose programs make the native call."""
    if ON_GPU or cuda_emulator.available():
        pytest.skip("a GPU has the driver itself; and the emulator must run here")
    found, cupy = Driver(), ModuleType("cupy")
    found.alive = []

    def empty(size, dtype):
        found.alive.append(cuda_emulator.empty(size, dtype))
        return found.alive[-1]

    cupy.empty, cupy.processors = empty, 3
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 0),
        get_current_stream=lambda: SimpleNamespace(ptr=77),
        alloc_pinned_memory=lambda size: np.zeros(size, np.uint8).data,
    )
    monkeypatch.setattr(program, "_driver", lambda: found.addresses)
    monkeypatch.setattr(program, "_of_thread", SimpleNamespace())
    original = device.function_of
    monkeypatch.setattr(
        program.device, "function_of",
        lambda xp, file, name: found.function_of(xp, file, name) if xp is cupy else original(xp, file, name),
    )  # fmt: skip
    found.cupy = cupy
    return found


def put_on(driver):
    class Array(cuda_emulator.EmulatedArray):
        array_module = driver.cupy

    def put(array):
        there = Array(cuda_emulator.asarray(array).memory)
        driver.alive.append(there)
        return there

    return put


@pytest.mark.parametrize("name", ["recommended", "signs", "rice, float64"])
def test_the_native_call_makes_the_launches(driver, name):
    put, numel = put_on(driver), 5003
    ours, theirs = Steps(np.array, name, numel), Steps(put, name, numel)
    for step in range(3):
        key, gradient = KEY._replace(step=step), cases.random(numel, seed=step)
        want, got = ours.step(gradient, key), theirs.step(gradient, key)
        assert got.memory.tobytes() == want.tobytes()
        assert theirs.residual.memory.tobytes() == ours.residual.tobytes()
        launched = len(driver.launched)
        if ours.dtype == np.float32:
            slices, out = [Slice(ours.pipeline, (0, numel), key)], np.zeros(numel, np.float32)
            data, sums = np.concatenate([want, want, want]), put(out)
            own = bundle.sum_into(out, data, 3, slices, 1 / 3)
            assert bundle.sum_into(sums, put(data), 3, slices, 1 / 3) == own
            assert sums.memory.tobytes() == out.tobytes() and len(driver.launched) > launched


def test_a_refused_launch_is_an_error_that_names_it(driver):
    put = put_on(driver)
    steps, driver.fails_at = Steps(put, "recommended", 500), "topk_take_f32"
    with pytest.raises(RuntimeError, match="error 700 for topk_take_f32"):
        steps.step(cases.random(500), KEY)


def test_what_cannot_be_recorded():
    program = Program(cuda_emulator)
    array = program.empty(10, np.float32)
    for use in (lambda: array.get(), lambda: array.astype(np.float64), lambda: program.asarray(np.zeros(3))):
        with pytest.raises(NotRecordableError):
            use()
