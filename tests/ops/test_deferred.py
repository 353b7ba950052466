"""The host waits for the GPU once where it can, and finds the same errors; and arrays of other libraries."""

import numpy as np
import pytest

from hvd_deepreduce.ops import arrays, deferred, rice
from hvd_deepreduce.ops.device import WithoutStream
from hvd_deepreduce.ops.library import NonFiniteError
from tests import cases
from tests.ops.compare import INDICES, same


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


@pytest.mark.parametrize("feedback", [True, False])
def test_encoding(gpu, feedback):
    """Sizes and finiteness are read together; without a residual, finiteness is read first."""
    gradient, (indices, numel) = cases.random(5003), INDICES["some"]
    residual = cases.random(5003, seed=2) if feedback else None
    with deferred.encoding(gradient, residual):
        want = rice.encode(indices, numel)
    on_gpu, there = gpu.put(gradient), None if residual is None else gpu.put(residual)
    at = gpu.put(indices)
    waits = getattr(gpu.module, "waits", 0)
    with deferred.encoding(on_gpu, there):
        if there is not None:
            arrays.add(there, on_gpu)
        got = rice.encode(at, numel)
    waits = getattr(gpu.module, "waits", 0) - waits
    same(gpu.host(got), want)
    if residual is not None:
        same(gpu.host(there), residual + gradient)
    if hasattr(gpu.module, "waits"):
        assert waits == (1 if feedback else 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("feedback", [True, False])
def test_encoding_a_gradient_that_is_not_finite(gpu, feedback, bad):
    """Both raise, and the residual stays as it was."""
    gradient, residual = cases.random(5003), cases.random(5003, seed=2)
    gradient[4000] = bad
    with pytest.raises(NonFiniteError), deferred.encoding(gradient, residual if feedback else None):
        raise AssertionError("the host checks the gradient before the context begins")
    there = gpu.put(residual)
    with pytest.raises(NonFiniteError), deferred.encoding(gpu.put(gradient), there if feedback else None):
        arrays.add(there, gpu.put(gradient))
    if feedback:
        same(gpu.host(there), residual)


class RefusesStreams:
    """As TensorFlow's tensors, whose ``__dlpack__`` takes no stream."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, *, stream=None):
        if stream is not None:
            raise RuntimeError("a stream was given")
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_a_library_that_refuses_streams_is_not_told_one():
    array = np.arange(5, dtype=np.float32)
    wrapped = WithoutStream(RefusesStreams(array))
    wrapped.__dlpack__(stream=7, max_version=(1, 0))
    found = np.from_dlpack(wrapped)
    assert found.ctypes.data == array.ctypes.data and found.tolist() == array.tolist()
