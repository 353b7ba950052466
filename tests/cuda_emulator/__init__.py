"""An emulated CUDA device: the unchanged .cu files, compiled with g++ for the host, and the part of CuPy that is used.

``hvd_deepreduce.ops`` gets arrays of the type ``EmulatedArray``. Their ``array_module`` is this module, so the package
calls ``empty``, ``zeros`` and ``RawModule`` here in place of CuPy's. ``runtime.cpp`` runs the kernels and describes
what it checks. ``order`` is the seed of the order of the threads in the following launches; 0 is the natural order.
``streams.py`` has streams and events. An operation that is not here is an error, in place of a wrong result.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tests.cuda_emulator import streams
from tests.cuda_emulator.streams import EmulationError, Place

HERE = Path(__file__).parent
BUILD = HERE.parent.parent / "build" / "cuda_emulator"
COMPILE = ["g++", "-std=c++17", "-O1", "-g1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-fno-gnu-unique"]
# The compiler inserts a call for each memory access, and different calls for volatile accesses.
SEE_MEMORY = ["-fsanitize=thread", "--param=tsan-distinguish-volatile=1", "--param=tsan-instrument-func-entry-exit=0"]
QUIET = ["-Wall", "-Wno-unused-function", "-Wno-unused-variable", "-Wno-unknown-pragmas", "-Wno-attributes"]

processors = 1
"""The number of blocks in a grid whose kernel loops over its work. It is small, so that the loop is tested."""

order = 0
launches = 0
"""The number of kernel launches so far."""
waits = 0
"""The number of copies to the host so far."""

traffic: list[Traffic] | None = None
"""Where launches are counted, within ``counting``."""

one_at_a_time = Lock()
"""Only one kernel runs at a time, because there is one emulated machine, and frameworks use several threads."""


def _refused(operator: str) -> Callable[..., Any]:
    def refuse(*_: object) -> Any:
        raise TypeError(
            f"{operator} was called of an array on the device: CuPy would compile a kernel, and launch it wherever the "
            "current stream is. Use an operation of hvd_deepreduce.ops"
        )

    return refuse


class EmulatedArray:
    """An array in the memory of the emulated device, which is host memory.

    It has only those members of ``cupy.ndarray`` that the package uses; Python's operators are not among them. As with
    CuPy's arrays, NumPy's functions refuse it.
    """

    array_module = sys.modules[__name__]
    __array_ufunc__ = None
    __eq__, __ne__, __bool__ = _refused("=="), _refused("!="), _refused("bool()")  # which Python has for every object
    __hash__ = object.__hash__

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.size, self.dtype, self.itemsize = memory.size, memory.dtype, memory.itemsize
        self.nbytes, self.shape = memory.nbytes, memory.shape
        self.flags = SimpleNamespace(c_contiguous=memory.flags.c_contiguous)
        self.data = SimpleNamespace(ptr=memory.__array_interface__["data"][0])

    def get(self) -> np.ndarray:
        """A copy on the host. Counts as a wait for the device."""
        global waits
        waits += 1
        if streams.active():
            _enqueue("a copy to the host", reads=[self])
            streams.current().synchronize()
        return self.memory.copy()

    def copy(self) -> EmulatedArray:
        """A new array with the same elements."""
        _enqueue("a copy", reads=[self])
        return asarray(self.memory)

    def view(self, dtype: Any) -> EmulatedArray:
        """The same memory with another dtype."""
        return EmulatedArray(self.memory.view(dtype))

    def astype(self, dtype: Any, copy: bool = True) -> EmulatedArray:
        """The elements converted to ``dtype``."""
        if not copy and dtype == self.dtype:
            return self
        _enqueue("astype", reads=[self])
        return asarray(self.memory.astype(dtype))

    def fill(self, value: Any) -> None:
        """Sets every element to ``value``."""
        _enqueue("fill", writes=[self])
        self.memory.fill(value)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("an array on the device was used as a NumPy array: copy it to the host with get()")

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, at: Any) -> EmulatedArray:
        if not isinstance(at, slice) or at.step is not None:
            raise TypeError(f"an array on the device was read at {at!r}: only slices without a step are allowed")
        return EmulatedArray(self.memory[at])

    def __setitem__(self, at: Any, value: EmulatedArray) -> None:
        if not isinstance(at, slice) or at.step is not None or value.shape != self.memory[at].shape:
            raise TypeError(
                f"an array on the device was assigned {type(value).__name__} at {at!r}: only a slice without a step "
                "and an array of the same shape are allowed"
            )
        _enqueue("an assignment", [value], [self[at]])
        self.memory[at] = value.memory

    def __dlpack__(self, **how: Any) -> Any:
        return self.memory.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.memory.__dlpack_device__()
        return device


def empty(size: int, dtype: Any) -> EmulatedArray:
    """Uninitialized memory. It begins at a multiple of 256 bytes, as CUDA's allocations do."""
    nbytes = size * np.dtype(dtype).itemsize
    room = np.full(nbytes + 256, 0xC3, np.uint8)
    address = room.__array_interface__["data"][0]
    begin = -address % 256
    if streams.active():
        streams.allocated(room, address, room.nbytes, streams.current())
    return EmulatedArray(room[begin : begin + nbytes].view(dtype))


def _enqueue(what: str, reads: Sequence[EmulatedArray] = (), writes: Sequence[EmulatedArray] = ()) -> None:
    """As ``streams.operation``."""
    if streams.active():
        streams.operation(what, map(_place, reads), map(_place, writes))


def _place(array: EmulatedArray) -> Place:
    """Where the elements are, in memory that ``streams`` knows."""
    if array.nbytes and not streams.known(array.data.ptr):
        whole = array.memory
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        streams.allocated(whole, whole.__array_interface__["data"][0], whole.nbytes, None)
    return array.data.ptr, array.nbytes


def asarray(array: np.ndarray) -> EmulatedArray:
    """A copy on the device."""
    copy = empty(array.size, array.dtype)
    _enqueue("a copy from the host", writes=[copy])
    copy.memory[:] = array.reshape(-1)
    return copy


def from_dlpack(array: Any) -> EmulatedArray:
    """An array on the same memory."""
    return EmulatedArray(np.from_dlpack(array))


def zeros(size: int, dtype: Any) -> EmulatedArray:
    """An array of zeros."""
    array = empty(size, dtype)
    _enqueue("zeros", writes=[array])
    array.memory.fill(0)
    return array


def arange(size: int, dtype: Any) -> EmulatedArray:
    """The numbers 0 to ``size - 1``."""
    return asarray(np.arange(size, dtype=dtype))


def concatenate(arrays: list[EmulatedArray]) -> EmulatedArray:
    """The elements of all arrays, in order."""
    _enqueue("concatenate", reads=arrays)
    return asarray(np.concatenate([array.memory for array in arrays]))


def available() -> str:
    """Why the emulator cannot run on this machine; empty if it can."""
    if os.uname().machine != "x86_64":
        return "the emulator needs x86-64, because it switches stacks in assembly"
    return "" if shutil.which("g++") else "the emulator needs g++"


def _build(name: str, code: str, flags: list[str], finish: Callable[[str], str] = str) -> Path:
    """The shared library of a C++ source. It is compiled again if the source or the emulator has changed.

    Processes that need the same library at the same time wait for the first of them, which compiles it.

    Args:
        name: the beginning of the library's name.
        code: the source.
        flags: of the compiler; the last one is the linker's.
        finish: gives the text to compile. It runs only if the library does not exist.
    """
    parts = [code, Path(__file__).read_text(), (HERE / "cuda.h").read_text(), *flags]
    library = BUILD / f"{name}-{hashlib.sha256(''.join(parts).encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    BUILD.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            source, compiled, made = (library.with_suffix(f".made.{ending}") for ending in ("cpp", "o", "so"))
            source.write_text(finish(code))
            subprocess.run([*COMPILE, *flags[:-1], "-c", str(source), "-o", str(compiled)], check=True)
            subprocess.run(["g++", "-shared", str(compiled), "-o", str(made), flags[-1]], check=True)
            compiled.unlink()
            source.unlink()
            made.replace(library)
    return library


_runtime: ctypes.CDLL | None = None


def runtime() -> ctypes.CDLL:
    """The library of runtime.cpp. The libraries of the kernels find its functions by name."""
    global _runtime
    if _runtime is None:
        library = _build("runtime", (HERE / "runtime.cpp").read_text(), ["-O3", "-fvisibility=default", "-lm"])
        _runtime = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        _runtime.emulated_failure.restype = ctypes.c_char_p
        _runtime.emulated_traffic.argtypes = [ctypes.c_void_p]
        _runtime.emulated_array.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    return _runtime


class Traffic(NamedTuple):
    """What a launch did, counted while ``counting`` is set.

    Attributes:
        read, written: bytes of the different sectors of 32 bytes that it touched: what must at least move between the
            memory and the GPU's cache.
        steps: of its longest thread: loads, shuffles and barriers.
    """

    kernel: str
    blocks: int
    read: int
    written: int
    steps: int


@contextmanager
def counting() -> Iterator[list[Traffic]]:
    """Within the context, the traffic of each launch is appended to the list."""
    global traffic
    before, traffic = traffic, []
    runtime().emulated_counting(1)
    try:
        yield traffic
    finally:
        traffic = before
        runtime().emulated_counting(traffic is not None)


class RawModule:
    """Replaces ``cupy.RawModule`` for one source text."""

    def __init__(self, code: str) -> None:
        with one_at_a_time:
            runtime()
            library = _build("kernels", code, [*QUIET, *SEE_MEMORY, "-lm"], self._with_launches)
            self.library = ctypes.CDLL(str(library))

    @staticmethod
    def _with_launches(code: str) -> str:
        """The source with a function for each kernel that launches it."""
        # Find the names of the kernels after preprocessing, because macros define some of them.
        preprocess = ["g++", "-E", "-P", "-x", "c++", "-"]
        plain = subprocess.run(preprocess, input=code, capture_output=True, text=True, check=True).stdout
        kernels = re.findall(r'extern "C" __global__ void(?: __launch_bounds__\(\w+\))? (\w+) ?\(', plain)
        return f'#include "{HERE}/cuda.h"\n{code}\n' + "".join(f"EMULATED_KERNEL({kernel})\n" for kernel in kernels)

    def get_function(self, name: str) -> EmulatedFunction:
        """The kernel with this name."""
        return EmulatedFunction(self.library, name)


class EmulatedFunction:
    """Replaces ``cupy.RawKernel``: call it with a grid, a block and the arguments."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        types = getattr(library, f"{name}_types")
        types.restype = ctypes.c_char_p
        self.name = name
        self.types = types().decode()
        self.launch = getattr(library, f"{name}_launch")

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
        if len(args) != len(self.types):
            raise EmulationError(f"{self.name} has {len(self.types)} parameters and was given {len(args)} arguments")
        if not 0 < grid[0] < 2**31:
            raise EmulationError(f"{self.name} was launched with a grid of {grid[0]} blocks; 1 to 2^31 - 1 are allowed")
        with one_at_a_time:
            self._run(grid, block, args)

    def _run(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
        global launches
        machine = runtime()
        machine.emulated_reset(order)
        values = []
        for at, (argument, letter) in enumerate(zip(args, self.types, strict=True)):
            if isinstance(argument, EmulatedArray):
                if letter not in "CP" or not argument.memory.flags.c_contiguous:
                    raise EmulationError(
                        f"argument {at} of {self.name} is an array: its parameter must be a pointer, and the array "
                        "must be contiguous"
                    )
                pointer = argument.data.ptr
                if argument.nbytes:
                    machine.emulated_array(pointer, argument.nbytes, argument.memory.flags.writeable)
                values.append(np.array(pointer, np.uint64))
            elif letter in "CP" and isinstance(argument, np.uint64) and argument == 0:
                values.append(np.array(0, np.uint64))
            elif letter not in "CP" and isinstance(argument, np.generic) and argument.dtype == np.dtype(letter):
                values.append(np.array(argument))
            else:
                raise EmulationError(f"argument {at} of {self.name} is {argument!r}; its parameter has type {letter}")
        arrays = [(one, letter) for one, letter in zip(args, self.types, strict=True) if isinstance(one, EmulatedArray)]
        _enqueue(self.name, *([one for one, letter in arrays if letter == kind] for kind in "CP"))
        pointers = (ctypes.c_void_p * len(values))(*[value.ctypes.data for value in values])
        self.launch(pointers, (ctypes.c_uint * 2)(grid[0], block[0]))
        launches += 1
        failure = machine.emulated_failure().decode()
        if failure:
            raise EmulationError(f"{self.name}, {failure}")
        if traffic is not None:
            found = np.zeros(3, np.uint64)
            machine.emulated_traffic(found.ctypes.data)
            traffic.append(Traffic(self.name, grid[0], *found.tolist()))
