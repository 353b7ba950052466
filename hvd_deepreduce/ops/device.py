"""CUDA: compiles kernels with NVRTC at first use, keeps them on disk (cubins.py), and launches them.

Launches go to the current stream, and nothing here waits for the device. An array of another type than CuPy's names,
as its ``array_module``, the module that takes CuPy's place (the tests' emulator).
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.needs import INSTALL
from hvd_deepreduce.ops import cubins
from hvd_deepreduce.ops.types import Device, u32, u64
from hvd_deepreduce.resources import folder

KERNELS = folder("kernels")
THREADS = 256
"""Threads of a block, as in kernels/common/device.cuh."""
SCAN_TILE = 4 * THREADS
"""Elements of a tile of ``each_place`` there, which has no more than ``scan_status`` has words for."""
# The same as the CPU kernels: no fused multiply-add, no flushed denormals, exact divisions and roots.
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
NULL = np.uint64(0)
_PASSED: dict[type, Callable[[Any], Any]] = {int: u64, bool: u32, type(None): lambda _: NULL}


def array_module(array: Device) -> Any:
    """CuPy, or the module that takes its place for this array; NumPy for its own. ``None`` stands for CuPy."""
    return np if isinstance(array, np.ndarray) else getattr(array, "array_module", None) or _cupy()


def allocate(like: Device, count: int, dtype: Any) -> NDArray[Any]:
    """``count`` elements that are not initialized, where ``like`` is."""
    room: NDArray[Any] = array_module(like).empty(count, dtype)
    return room


@lru_cache(maxsize=1)
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"gradients on a GPU need CuPy: run {INSTALL['cupy']}"
        ) from error
    if int(cupy.__version__.partition(".")[0]) < 14:  # takes no stream of another library
        raise ImportError(f"gradients on a GPU need CuPy 14, and this is {cupy.__version__}: run {INSTALL['cupy']}")
    return cupy


@lru_cache
def source(file: str) -> str:
    """The text of a file below ``kernels/`` with its own includes inserted.

    CuPy's cache looks at this text only, so a change of an included file must change it.
    """
    seen: set[str] = set()

    def text_of(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (KERNELS / name).read_text().replace("#pragma once\n", "")  # as here, and NVRTC has no file names
        return re.sub(r'^#include "(.*)"$', lambda match: text_of(match[1]), text, flags=re.MULTILINE)

    return text_of(file)


class _Stream:
    """The stream of another library, by CUDA's stream protocol."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@lru_cache(maxsize=1)
def _allocator(allocate: Callable[[int, int], int], free: Callable[[int, int], None]) -> Any:
    return _cupy().cuda.PythonFunctionAllocator(allocate, free)


@contextmanager
def on_stream(
    device: int, pointer: int, allocate: Callable[[int, int], int], free: Callable[[int, int], None]
) -> Iterator[None]:
    """Within the context, operations run on this device, on this stream and in the memory of another library.

    The library's pool keeps what it has once had, so that CuPy's own pool would find too little beside it.

    Args:
        allocate: the address of so many bytes on a device, for use on the library's current stream.
        free: takes the address and the device.
    """
    cupy = _cupy()
    memory = _allocator(allocate, free).malloc
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(_Stream(pointer)), cupy.cuda.using_allocator(memory):
        yield


def current_stream() -> int:
    """The address of the stream that operations of this thread run on."""
    return int(_cupy().cuda.get_current_stream().ptr)


def from_dlpack(array: Any) -> Device:
    """CuPy's array of the same memory, ordered after the other library's stream."""
    return _cupy().from_dlpack(array)


class WithoutStream:
    """An array for ``from_dlpack``, of a library that refuses to be told a stream, as TensorFlow does. What it has
    enqueued must be done."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **_: Any) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self._array.__dlpack_device__()
        return int(kind), int(number)


def on_device_of(array: Device) -> AbstractContextManager[Any]:
    """Within the context, operations run on the GPU of the array."""
    device: AbstractContextManager[Any] = getattr(array, "device", nullcontext())
    return device


def synchronize(array: Device) -> None:
    """Waits for everything that was launched on the current stream of the array's GPU."""
    with on_device_of(array):
        xp = array_module(array)
        if hasattr(xp, "cuda"):
            xp.cuda.get_current_stream().synchronize()


_modules: dict[tuple[int, int, str], Any] = {}
_functions: dict[tuple[int, int, str, str], Any] = {}
_locks: dict[str, threading.Lock] = {}
"""Of files that are being compiled: a second thread waits for the first."""
_processors: dict[int, int] = {}


def _device(xp: Any) -> int:
    return xp.cuda.runtime.getDevice() if hasattr(xp, "cuda") else 0


def _module(xp: Any, file: str) -> Any:
    """The compiled kernels of ``kernels/<file>.cu``.

    ``RawModule(code=...)`` is not used: it appends -ftz=true to the options, which would flush denormals. Nor is
    ``RawModule(path=...)``: the driver would read the file again, after its digest was checked.
    """
    text = source(f"{file}.cu")
    if not hasattr(xp, "cuda"):
        return xp.RawModule(code=text)
    made_of = file, text, OPTIONS, xp.cuda.Device().compute_capability, xp.cuda.nvrtc.getVersion()
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()
    kept = cubins.read(key)
    if kept is not None:
        try:
            return _loaded(xp, kept)
        except RuntimeError:  # the driver's error: compiled for another one, perhaps
            pass
    compiled, _ = xp.cuda.compiler.compile_using_nvrtc(text, OPTIONS, None, f"{Path(file).name}.cu")
    module = _loaded(xp, compiled)
    cubins.write(key, compiled)
    return module


def _loaded(xp: Any, cubin: bytes) -> Any:
    module = xp.cuda.function.Module()
    module.load(cubin)
    return module


def launch(xp: Any, file: str, kernel: str, blocks: int, *arguments: Any) -> None:
    """Launches a kernel of ``kernels/<file>.cu`` with ``blocks`` blocks (at least one) of ``THREADS`` threads.

    Args:
        arguments: arrays, and numbers of NumPy's types. An int is passed as uint64, a bool as uint32, and ``None`` as a
            null pointer.
    """
    if type(xp) is not ModuleType:  # a ``Program``
        xp.record(file, kernel, blocks, arguments)
        return
    function_of(xp, file, kernel)((max(1, blocks),), (THREADS,), tuple(map(passed, arguments)))


def passed(argument: Any) -> Any:
    """An argument of ``launch`` as a kernel gets it."""
    of = _PASSED.get(type(argument))
    return argument if of is None else of(argument)


def function_of(xp: Any, file: str, kernel: str) -> Any:
    """The kernel on the current device, compiled at first use."""
    device = _device(xp)
    function = _functions.get((id(xp), device, file, kernel))
    if function is None:
        with _locks.setdefault(file, threading.Lock()):
            module = _modules.get((id(xp), device, file))
            if module is None:
                module = _modules[id(xp), device, file] = _module(xp, file)
        function = _functions[id(xp), device, file, kernel] = module.get_function(kernel)
    return function


def for_each(xp: Any, file: str, kernel: str, items: int, *arguments: Any, tile: int = THREADS) -> None:
    """``launch`` of a grid-stride kernel for so many items, ``tile`` a block; nothing if there are none."""
    if items:
        launch(xp, file, kernel, grid(xp, items, tile), *arguments)


def grid(xp: Any, items: int, each: int = THREADS) -> int:
    """The number of blocks for a grid-stride kernel: ``each`` items a block, at most as many blocks as run at once."""
    return min(-(-items // each), blocks_at_once(xp))


def blocks_at_once(xp: Any) -> int:
    """As many blocks as run at once on the first device that was used: a kernel takes any number."""
    at_once = getattr(xp, "processors", 0) or _processors.get(id(xp), 0)
    if not at_once:
        at_once = _processors[id(xp)] = 8 * xp.cuda.Device().attributes["MultiProcessorCount"]
    return int(at_once)


def scan_status(xp: Any, items: int, each: int = THREADS) -> Device:
    """The status words of a look-back scan over tiles of ``each`` items; see kernels/common/device.cuh."""
    return cleared(xp, -(-items // each) + 1, np.uint64)


class _Chunk(threading.local):
    """Zeros of which ``cleared`` hands out parts on this thread.

    Attributes:
        open: within ``clearing_at_once``.
        memory: uint64; None: nothing was asked for yet.
        device: of the memory.
        used: words that were handed out.
    """

    open = False
    memory: Device | None = None
    device = used = 0


_chunk = _Chunk()
_CHUNK_WORDS = 32768
"""A quarter of a megabyte, which a GPU clears in the time of a launch."""
_ALIGNED = 32
"""Words: parts begin at multiples of 256 bytes, as allocations do."""


@contextmanager
def clearing_at_once() -> Iterator[None]:
    """Within the context, ``cleared`` takes small arrays from one that was cleared, in place of a launch for each."""
    if _chunk.open:
        yield
        return
    _chunk.open = True
    try:
        yield
    finally:
        _chunk.open, _chunk.memory = False, None


def cleared(xp: Any, count: int, dtype: Any) -> Device:
    """``count`` zeros for kernels to work on. No part is handed out twice, so a result may be among them; it keeps all
    of its chunk alive."""
    words = -(-count * np.dtype(dtype).itemsize // 8)
    if not _chunk.open or words > _CHUNK_WORDS // 4 or type(xp) is not ModuleType:
        return xp.zeros(count, dtype)
    device = _device(xp)
    if _chunk.memory is None or _chunk.device != device or _chunk.used + words > _CHUNK_WORDS:
        _chunk.memory, _chunk.device, _chunk.used = xp.zeros(_CHUNK_WORDS, np.uint64), device, 0
    begin = _chunk.used
    _chunk.used += -(-words // _ALIGNED) * _ALIGNED
    return _chunk.memory[begin : begin + words].view(dtype)[:count]


def read_flags(flags: list[Device]) -> list[int]:
    """The numbers of arrays int32 ``[1]``, of which there is at least one. Waits for the device once."""
    chunk, used = _chunk.memory, 8 * _chunk.used
    if chunk is not None:
        places = [flag.data.ptr - chunk.data.ptr for flag in flags]
        if 0 <= min(places) and max(places) < used:  # one copy of what lies between them takes the place of many
            first = min(places) // 4
            numbers = chunk.view(np.int32)[first : max(places) // 4 + 1].get()
            return [int(numbers[at // 4 - first]) for at in places]
    return [int(number) for number in array_module(flags[0]).concatenate(flags).get()]


def suffix(dtype: Any) -> str:
    """``f32`` or ``f64``, the end of a kernel's name."""
    return {4: "f32", 8: "f64"}[np.dtype(dtype).itemsize]


def key_words(*key: Any) -> tuple[Any, ...]:
    """The parts of a random key as 32-bit words; a program's are numbers of a run."""
    return tuple(np.uint32(word & 0xFFFFFFFF) if isinstance(word, int | np.integer) else word for word in key)
