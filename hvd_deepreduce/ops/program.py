"""Launches on a GPU that are recorded once, and then made again for other arrays of the same sizes.

In Python a launch takes about 8 us, a view of an array 1 us and an allocation 10 us, so that the host is slower than
the GPU for a bucket of some million elements. A ``Program`` takes the place of CuPy while operations run once: it notes
their launches, and where their arrays are in one piece of memory. ``Program.run`` then makes all launches in one native
call (kernels/programs/programs.cpp), which waits for the result without Python's lock.

Whatever needs the host in between cannot be recorded, as the size of an array that the device must tell.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from ctypes import c_uint64
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops import device
from hvd_deepreduce.ops.library import address, kernel
from hvd_deepreduce.ops.types import Device

_run = kernel("program_run", "i", "pppUpUpUp*")
_LAUNCH = np.dtype([("function", "u8"), ("blocks", "u4"), ("threads", "u4"), ("first", "u4"), ("arguments", "u4")])
_PATCH = np.dtype([("word", "u4"), ("base", "u4")])
_ALIGNED = 256
"""Bytes: arrays begin at multiples of it, as allocations do."""
_RESULT_BYTES = 512
"""The most bytes of a program's result."""


class NotRecordableError(AttributeError):
    """An operation needs more of an array or of CuPy than a program can record."""


class Scalar:
    """A number that a kernel is given and that differs from run to run.

    Args:
        number: of the scalar, from 0 on.
        dtype: of the kernel's parameter.
    """

    def __init__(self, number: int, dtype: Any) -> None:
        self.number, self.dtype = number, np.dtype(dtype)


class Placeholder:
    """An array, ``[size]``, that has no memory yet, for operations that are being recorded.

    Args:
        program: of which it is.
        buffer: the number of the memory that it is in.
        begin: its first byte there.
    """

    def __init__(self, program: Program, buffer: int, begin: int, size: int, dtype: Any) -> None:
        self.array_module, self.buffer, self.begin = program, buffer, begin
        self.size, self.dtype, self.shape = size, np.dtype(dtype), (size,)
        self.itemsize = self.dtype.itemsize
        self.nbytes = size * self.itemsize
        self.data = SimpleNamespace(ptr=(buffer + 1 << 48) + begin)  # tells arrays apart, and is as aligned as they are

    def __getattr__(self, name: str) -> Any:
        raise NotRecordableError(f"an array of a program has no {name}")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: slice) -> Placeholder:
        begin, end, _ = at.indices(self.size)
        size = max(0, end - begin)
        return Placeholder(self.array_module, self.buffer, self.begin + begin * self.itemsize, size, self.dtype)

    def view(self, dtype: Any) -> Placeholder:
        return Placeholder(
            self.array_module, self.buffer, self.begin, self.nbytes // np.dtype(dtype).itemsize, dtype
        )

    def astype(self, dtype: Any, copy: bool = True) -> Placeholder:
        if copy or np.dtype(dtype) != self.dtype:
            raise NotRecordableError("a conversion is no launch of ours")
        return self


class _Buffer:
    """Memory of a program.

    Attributes:
        kind: ``zeros`` and ``scratch`` last for a run, and ``given`` is copied from the host; an ``output`` is the
            caller's; an ``input`` is an array of the caller.
    """

    def __init__(self, kind: str, nbytes: int) -> None:
        self.kind, self.nbytes, self.at = kind, nbytes, 0


class Program:
    """Takes CuPy's place while operations are recorded, and then makes their launches.

    Record by operations of arrays of ``input``, ``empty`` and ``zeros``; then call ``end`` once, and ``run`` for each
    set of arrays, on any thread and any stream.

    Args:
        xp: CuPy, or the module that takes its place.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._scalars: list[Scalar] = []
        self.processors = device.blocks_at_once(xp)
        self._buffers: list[_Buffer] = []
        self._outputs: list[int] = []
        self._launches: list[tuple[str, str, int, tuple[Any, ...]]] = []
        self._ready: dict[int, tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = {}
        self._result: Placeholder | None = None

    def __getattr__(self, name: str) -> Any:
        raise NotRecordableError(f"a program has no {name}")

    def _buffer(self, kind: str, size: int, dtype: Any) -> Placeholder:
        self._buffers.append(_Buffer(kind, size * np.dtype(dtype).itemsize))
        return Placeholder(self, len(self._buffers) - 1, 0, size, dtype)

    def input(self, size: int, dtype: Any) -> Placeholder:
        """An array that ``run`` gets; they come in the order of these calls."""
        return self._buffer("input", size, dtype)

    def scalar(self, dtype: Any) -> Scalar:
        """A number of at most 8 bytes that ``run`` gets; they come in the order of these calls."""
        self._scalars.append(Scalar(len(self._scalars), dtype))
        return self._scalars[-1]

    def empty(self, size: int, dtype: Any) -> Placeholder:
        return self._buffer("scratch", size, dtype)

    def zeros(self, size: int, dtype: Any) -> Placeholder:
        return self._buffer("zeros", size, dtype)

    def given(self, size: int, dtype: Any) -> Placeholder:
        """A NumPy array that ``run`` gets, on the device; at most one."""
        return self._buffer("given", size, dtype)

    def output(self, array: Placeholder) -> None:
        """The memory of an array of ``empty`` outlives the run, which returns it; in the order of these calls."""
        self._buffers[array.buffer].kind = "output"
        self._outputs.append(array.buffer)

    def record(self, file: str, kernel: str, blocks: int, arguments: tuple[Any, ...]) -> None:
        """As ``device.launch``."""
        self._launches.append((file, kernel, max(1, blocks), arguments))

    def end(self, result: Placeholder) -> None:
        """Ends recording.

        Args:
            result: the array of ``zeros``, of at most 512 bytes, that ``run`` returns to the host.
        """
        assert result.nbytes <= _RESULT_BYTES and self._buffers[result.buffer].kind == "zeros"
        self._result = result
        at = 0
        for kind in ("zeros", "given", "scratch"):
            for buffer in self._buffers:
                if buffer.kind == kind:
                    buffer.at, at = at, at + -(-buffer.nbytes // _ALIGNED) * _ALIGNED
            if kind == "zeros":
                self._zeros = at
        self._nbytes = at
        self._given_at = next((one.at for one in self._buffers if one.kind == "given"), 0)

    def run(
        self, inputs: Sequence[Device], scalars: Sequence[float] = (), given: NDArray[Any] | None = None
    ) -> tuple[NDArray[Any], list[Device]]:
        """Makes the launches on the current stream, and waits for the device.

        Args:
            inputs: as in ``input``.
            scalars: as in ``scalar``.
            given: as in ``given``.

        Returns:
            The result, and the outputs, uint8.

        Raises:
            RuntimeError: the driver has refused a launch or a copy.
        """
        outputs = [self._xp.empty(self._buffers[number].nbytes, np.uint8) for number in self._outputs]
        numbers = [one.dtype.type(number) for one, number in zip(self._scalars, scalars, strict=True)]
        run = self._run_natively if hasattr(self._xp, "cuda") else self._launch_all
        return run(inputs, numbers, given, outputs), outputs

    def _launch_all(
        self, inputs: Sequence[Device], numbers: Sequence[Any], given: NDArray[Any] | None, outputs: list[Device]
    ) -> NDArray[Any]:
        """One by one, each array in an allocation of its own."""
        xp, given_arrays, of_outputs = self._xp, iter(inputs), dict(zip(self._outputs, outputs, strict=True))
        memory = []
        for number, buffer in enumerate(self._buffers):
            if buffer.kind == "output":
                memory.append(of_outputs[number])
            elif buffer.kind == "input":
                memory.append(next(given_arrays).view(np.uint8))
            elif buffer.kind == "given":
                memory.append(xp.asarray(given).view(np.uint8))
            else:
                memory.append((xp.zeros if buffer.kind == "zeros" else xp.empty)(buffer.nbytes, np.uint8))

        def passed(argument: Any) -> Any:
            if isinstance(argument, Placeholder):
                begin = argument.begin
                return memory[argument.buffer][begin : begin + argument.nbytes].view(argument.dtype)
            return numbers[argument.number] if isinstance(argument, Scalar) else argument

        for file, name, blocks, arguments in self._launches:
            device.launch(xp, file, name, blocks, *map(passed, arguments))
        assert self._result is not None
        found: NDArray[Any] = passed(self._result).get()
        return found

    def _run_natively(
        self, inputs: Sequence[Device], numbers: Sequence[Any], given: NDArray[Any] | None, outputs: list[Device]
    ) -> NDArray[Any]:
        xp, result = self._xp, self._result
        number = xp.cuda.runtime.getDevice()
        ready = self._ready.get(number)
        if ready is None:
            ready = self._ready[number] = self._compiled()
        launches, words, patches = ready
        slab, host = xp.empty(self._nbytes, np.uint8), _host_memory(xp)
        addresses = [slab.data.ptr, *[array.data.ptr for array in (*inputs, *outputs)]]
        bases = np.array(addresses + list(map(_word, numbers)), np.uint64)
        assert result is not None
        run = np.array(
            [
                xp.cuda.get_current_stream().ptr, self._zeros, 0 if given is None else address(given),
                0 if given is None else given.nbytes, self._given_at, host.address, result.nbytes,
                self._buffers[result.buffer].at + result.begin,
            ],
            np.uint64,
        )  # fmt: skip
        done = c_uint64()
        failed = _run(
            _driver(), run, launches, launches.size, words, words.size, patches, patches.size, bases, ctypes.byref(done)
        )
        if failed:
            where = self._launches[done.value][1] if done.value < len(self._launches) else "the copy of the result"
            raise RuntimeError(f"CUDA's driver has returned the error {failed} for {where} of a recorded program")
        found: NDArray[Any] = host.array[: result.nbytes].view(result.dtype).copy()
        return found

    def _compiled(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The launches, the words of their arguments, and what is added to these, for the current device."""
        launches = np.zeros(len(self._launches), _LAUNCH)
        words: list[int] = []
        patches: list[tuple[int, int]] = []
        # bases: | the program's memory | inputs | outputs | scalars |
        callers = [i for i, one in enumerate(self._buffers) if one.kind == "input"] + self._outputs
        base_of = {buffer: 1 + place for place, buffer in enumerate(callers)}
        for row, (file, name, blocks, arguments) in zip(launches, self._launches, strict=True):
            function = device.function_of(self._xp, file, name)
            row["function"], row["blocks"], row["threads"] = function.ptr, blocks, device.THREADS
            row["first"], row["arguments"] = len(words), len(arguments)
            for argument in map(device.passed, arguments):
                if isinstance(argument, Placeholder):
                    at = 0 if argument.buffer in base_of else self._buffers[argument.buffer].at
                    patches.append((len(words), base_of.get(argument.buffer, 0)))
                    words.append(at + argument.begin)
                elif isinstance(argument, Scalar):
                    patches.append((len(words), 1 + len(callers) + argument.number))
                    words.append(0)
                else:
                    words.append(_word(argument))
        return launches, np.array(words, np.uint64), np.array(patches, _PATCH)


def _word(number: Any) -> int:
    """The bits of a NumPy number, as the lowest of 64."""
    return int.from_bytes(number.tobytes(), "little")


class _HostMemory:
    """Memory of the host that the device copies to, of one thread."""

    def __init__(self, xp: Any) -> None:
        self._pinned = xp.cuda.alloc_pinned_memory(_RESULT_BYTES)
        self.array = np.frombuffer(self._pinned, np.uint8, _RESULT_BYTES)
        self.address = address(self.array)


_of_thread = threading.local()


def _host_memory(xp: Any) -> _HostMemory:
    memory: _HostMemory | None = getattr(_of_thread, "memory", None)
    if memory is None:
        memory = _of_thread.memory = _HostMemory(xp)
    return memory


@lru_cache(maxsize=1)
def _driver() -> NDArray[Any]:
    """The addresses of the driver's functions, as kernels/programs/programs.cpp has them."""
    driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    names = "cuLaunchKernel", "cuMemsetD8Async", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"
    return np.array([ctypes.cast(getattr(driver, name), ctypes.c_void_p).value for name in names], np.uint64)
