"""The device that the CUDA tests run on: the emulator, with the threads in two random orders; or, with
HVD_DEEPREDUCE_GPU=1, a GPU through CuPy. The second order is thorough."""

import os
from typing import Any

import numpy as np
import pytest

from tests import cuda_emulator, selection

ON_GPU = os.environ.get("HVD_DEEPREDUCE_GPU") == "1"
SANITIZED = os.environ.get("HVD_DEEPREDUCE_SANITIZED") == "1"


class Gpu:
    """Where arrays are put, and how they come back."""

    def __init__(self, order: int) -> None:
        self.order = order
        if ON_GPU:
            import cupy

            if SANITIZED:  # each array in an allocation of its own, which compute-sanitizer knows
                cupy.cuda.set_allocator(None)
            self.module: Any = cupy
        else:
            self.module = cuda_emulator

    def put(self, array: np.ndarray) -> Any:
        return self.module.asarray(array)

    def host(self, result: Any) -> Any:
        if isinstance(result, tuple | list):
            return type(result)(self.host(part) for part in result)
        array = result.get() if hasattr(result, "get") else result
        if ON_GPU and isinstance(array, np.ndarray) and array.dtype.kind == "f":
            array[np.isnan(array)] = np.nan  # which of all NaN a sum with one is, each processor decides
        return array

    def bytes(self, array: np.ndarray) -> Any:
        """A section as it stands in a container: at no particular address."""
        return self.put(np.concatenate([np.zeros(3, np.uint8), array]))[3:]


@pytest.fixture(params=["on the GPU"] if ON_GPU else selection.first([1, 2]))
def gpu(request: pytest.FixtureRequest) -> Any:
    if ON_GPU:
        yield Gpu(0)
        return
    reason = cuda_emulator.available()
    if reason:
        pytest.skip(reason)
    before = cuda_emulator.order, cuda_emulator.processors
    cuda_emulator.order, cuda_emulator.processors = request.param, 2 + request.param
    yield Gpu(request.param)
    cuda_emulator.order, cuda_emulator.processors = before


@pytest.fixture(params=[1, 6, 512, 6000, 2**31])
def bucket_size(request: pytest.FixtureRequest) -> int:
    """Values in a bucket: fewer and more than a warp or a block takes at once, and more than there are."""
    size: int = request.param
    return size
