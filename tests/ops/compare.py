"""How the tests of this folder compare an operation's two implementations, and the inputs that they share."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests import cases
from tests.cases import some_indices

KEY = (7, 3, 11)
"""(seed, parameter, step)."""

INPUTS = {
    **cases.inputs(),
    "five_thousand": cases.random(5003),
    "few_values": np.random.default_rng(3).choice([0.0, 1.0, -1.0, 0.5], 2500).astype(np.float32),
    "ties": np.tile(np.float32([0.25, -2.0, 2.0, 0.0]), 1200),
    "float64_long": cases.random(4099, np.float64),
}
"""Dense arrays of float32 and float64 by name."""
VALUES = {name: x for name, x in INPUTS.items() if x.dtype == np.float32}
"""Those of float32."""


def same(got: Any, want: Any) -> None:
    """Both are equal, arrays in dtype, shape and bytes."""
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


def both(gpu: Any, operation: Any, *arguments: Any, **settings: Any) -> Any:
    """Runs an operation on the host and on the GPU and compares the results, and the arrays that it changes.

    Returns the host's result, or None if both raise ValueError.
    """
    on_host, on_gpu = [], []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            on_host.append(argument.copy())
            on_gpu.append(gpu.bytes(argument) if argument.dtype == np.uint8 else gpu.put(argument))
        else:
            on_host.append(argument)
            on_gpu.append(argument)
    try:
        want = operation(*on_host, **settings)
    except ValueError:
        with pytest.raises(ValueError):
            operation(*on_gpu, **settings)
        return None
    got = operation(*on_gpu, **settings)
    same(gpu.host(got), want)
    for host_array, gpu_array in zip(on_host, on_gpu, strict=True):
        if isinstance(host_array, np.ndarray):
            same(gpu.host(gpu_array), host_array)
    return want


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
"""(indices, numel) by name."""


def broken(section: np.ndarray, count: int = 12) -> Iterator[np.ndarray]:
    """The section cut, extended, with bits flipped, and with another first byte."""
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
