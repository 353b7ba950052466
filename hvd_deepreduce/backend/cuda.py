"""The CUDA operations: the functions of ``backend.cpu`` on arrays in a GPU's memory, with the same bytes out.

The kernels are ``kernels/*.cu``, compiled by NVRTC when first used and kept in the folder of CuPy's own. They run on
the current stream. Nothing waits for the device but where a size or a decoder's verdict must reach the host: an
operation says so in its docstring. ``encoding`` and ``together`` make one wait out of many.

Arrays are CuPy's, contiguous and one-dimensional. An array of another type brings the module that stands in CuPy's
place as its ``array_module`` (the emulator of the tests). ``threads`` is there for the sake of ``backend.cpu``.

On the host only, after a copy of the kept elements: ``bloom_conflict_sets`` (policy P2 draws one index after the other)
and ``index_sizes`` (it looks at a few thousand indices); and, elsewhere, the byte compressors deflate and zstd.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hvd_deepreduce.backend import cpu
from hvd_deepreduce.backend.cpu import NotFinite, R, check, exactly
from hvd_deepreduce.resources import folder

Array = Any  # cupy.ndarray, or the emulator's

KERNELS = folder("kernels")
THREADS = 256  # of a block, as in kernels/common/device.cuh
# As the CPU kernels are compiled: no a * b + c in one rounding, denormals kept, divisions and roots exact.
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
NULL = np.uint64(0)

u32, u64, i32, f32, f64 = np.uint32, np.uint64, np.int32, np.float32, np.float64


def module_of(array: Array) -> Any:
    """CuPy, or what stands in its place for this array; ``None``: CuPy."""
    return getattr(type(array), "array_module", None) or _cupy()


@lru_cache(maxsize=1)
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "gradients on a GPU need CuPy: install hvd-deepreduce[cuda12] or hvd-deepreduce[cuda13]"
        ) from error
    return cupy


@lru_cache
def source(file: str) -> str:
    """A kernel file with its own includes written in: CuPy's cache looks at this text, and not at included files."""
    seen: set[str] = set()

    def text_of(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (KERNELS / name).read_text()
        return re.sub(r'^#include "(.*)"$', lambda match: text_of(match[1]), text, flags=re.MULTILINE)

    return text_of(next(KERNELS.glob(f"*/{file}")).relative_to(KERNELS).as_posix())


class _Stream:
    """Another library's stream, by CUDA's stream protocol."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@contextmanager
def on_stream(device: int, pointer: int) -> Iterator[None]:
    """Inside, operations run on this device, on the stream of another library."""
    cupy = _cupy()
    with cupy.cuda.Device(device), cupy.cuda.Stream.from_external(_Stream(pointer)):
        yield


def from_dlpack(array: Any) -> Array:
    """CuPy's array of the same memory; in order with the other library's stream."""
    return _cupy().from_dlpack(array)


def on_device_of(array: Array) -> AbstractContextManager[Any]:
    """Inside, operations run on the GPU of the array."""
    device: AbstractContextManager[Any] = getattr(array, "device", nullcontext())
    return device


def finish(array: Array) -> None:
    """Waits until all is done that was launched on the GPU of the array."""
    with on_device_of(array):
        xp = module_of(array)
        if hasattr(xp, "cuda"):
            xp.cuda.get_current_stream().synchronize()


_modules: dict[tuple[int, int, str], Any] = {}
_functions: dict[tuple[int, int, str, str], Any] = {}
_processors: dict[int, int] = {}


def _device(xp: Any) -> int:
    return xp.cuda.runtime.getDevice() if hasattr(xp, "cuda") else 0


def _module(xp: Any, file: str) -> Any:
    """The compiled kernels of a file. Not by ``RawModule(code=...)``: it puts -ftz=true behind our options, and
    denormals would be lost."""
    text = source(f"{file}.cu")
    if not hasattr(xp, "cuda"):
        return xp.RawModule(code=text)
    made_of = text, OPTIONS, xp.cuda.Device().compute_capability, xp.cuda.nvrtc.getVersion()
    folder = Path(os.environ.get("CUPY_CACHE_DIR", Path.home() / ".cupy" / "kernel_cache"))
    binary = folder / f"hvd_deepreduce-{file}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.cubin"
    if not binary.exists():
        compiled, _ = xp.cuda.compiler.compile_using_nvrtc(text, OPTIONS, None, f"{file}.cu")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as own:
            own.write(compiled)
        os.replace(own.name, binary)  # whole at once: other ranks look for it
    return xp.RawModule(path=str(binary))


def _launch(xp: Any, file: str, kernel: str, blocks: int, *arguments: Any) -> None:
    device = _device(xp)
    function = _functions.get((id(xp), device, file, kernel))
    if function is None:
        module = _modules.get((id(xp), device, file))
        if module is None:
            module = _modules[id(xp), device, file] = _module(xp, file)
        function = _functions[id(xp), device, file, kernel] = module.get_function(kernel)
    function((max(1, blocks),), (THREADS,), arguments)


def _blocks(xp: Any, items: int, each: int = THREADS) -> int:
    """Blocks for a kernel that walks over its work: ``each`` items a block, as many blocks as run at once."""
    at_once = getattr(xp, "processors", 0)
    if not at_once:
        device = _device(xp)
        at_once = _processors.get(device, 0)
        if not at_once:
            at_once = _processors[device] = 8 * xp.cuda.Device(device).attributes["MultiProcessorCount"]
    return min(-(-items // each), at_once)


def _status(xp: Any, items: int, each: int = THREADS) -> Array:
    """The words of a scan over tiles of ``each`` items; see kernels/common/device.cuh."""
    return xp.zeros(-(-items // each) + 1, u64)


class _Encoding:
    """The encoding of one gradient: whether it is finite is asked when the host waits for a size anyway.

    The mailbox is a row of numbers on the device that go to the host together: | the gradient's verdict | sizes ... |.
    """

    SIZES = 63

    def __init__(self, xp: Any, gradient: Array) -> None:
        self.gradient, self.mailbox = gradient, xp.zeros(1 + self.SIZES, u64)
        self.verdict = self.mailbox[:1].view(i32)[:1]
        self.looked = self.asked = False
        self.slots: dict[int, int] = {}

    def counter(self) -> Array | None:
        """The next number of the mailbox, 0 as yet; None where it is full."""
        at = len(self.slots) + 1
        if at > self.SIZES:
            return None
        slot = self.mailbox[at : at + 1]
        self.slots[slot.data.ptr] = at
        return slot

    def look(self, fused: bool = False) -> Array:
        """The verdict, which is being found from here on; ``fused``: by the caller."""
        if not self.looked and not fused and self.gradient.size:
            _look(self.gradient, self.verdict)
        self.looked = True
        return self.verdict

    def ask(self, slot: Array | None = None) -> int:
        """The number in a slot. Waits for the device.

        Raises:
            NotFinite: the gradient is not finite.
        """
        self.look()
        numbers = self.mailbox.get()
        self.asked = True
        if numbers[0]:
            raise NotFinite
        return 0 if slot is None else int(numbers[self.slots[slot.data.ptr]])


class _Thread(threading.local):
    """What this thread is about."""

    encoding: _Encoding | None = None
    verdicts: list[Array] | None = None
    """Of decoders that have not been asked yet; None: they are asked at once."""
    heads: dict[int, tuple[Array, bytes]] | None = None
    """First bytes of sections, by address, that the host knows; the sections are kept, so that no other takes their
    place."""


_thread = _Thread()


@contextmanager
def encoding(gradient: Array, residual: Array | None, threads: int = 1) -> Iterator[None]:
    """Around the encoding of a gradient, on its GPU. Waits for the device once, together with the first size that is
    asked for; without a residual, a second time.

    Raises:
        NotFinite: it has NaN or infinity; the residual is as it was.
    """
    before = _thread.encoding, _thread.heads
    with on_device_of(gradient):
        _thread.encoding, _thread.heads = _Encoding(module_of(gradient), gradient), {}
        try:
            if residual is None:
                _thread.encoding.ask()  # codecs are about to see the gradient itself
            yield
            if not _thread.encoding.asked:
                _thread.encoding.ask()
        finally:
            _thread.encoding, _thread.heads = before


@contextmanager
def reading(data: Array) -> Iterator[None]:
    """Around the decoding of an allgather's result, on the GPU of ``data``: what ``read_heads`` brings to the host is
    remembered."""
    before, _thread.heads = _thread.heads, {}
    try:
        with on_device_of(data):
            yield
    finally:
        _thread.heads = before


def together(work: Callable[[], R]) -> R:
    """``work()``, which decodes several containers; its decoders are asked for their verdicts at the end, and the host
    waits once. Where one complains, ``work`` is done again with an answer from each, for the error that comes first."""
    try:
        with one_verdict():
            return work()
    except ValueError:
        return work()


@contextmanager
def one_verdict() -> Iterator[None]:
    """Decoders inside do not wait for the device: their ``ValueError`` comes at the end of the block, which waits once.
    Until then their results may be anything, and must not be used as indices."""
    pending: list[Array] = []
    before, _thread.verdicts = _thread.verdicts, pending
    try:
        yield
    finally:
        _thread.verdicts = before
    if pending:
        for error in module_of(pending[0]).concatenate(pending).get().tolist():
            check(error)


def _check(error: Array) -> None:
    """``ValueError`` where a kernel found a section broken; waits for the device, or leaves that to ``one_verdict``."""
    if _thread.encoding is not None:
        return  # the section was made just now
    if _thread.verdicts is None:
        check(int(error.get()[0]))
    else:
        _thread.verdicts.append(error)


def _counter(xp: Any) -> Array:
    """A uint64 of 0 on the device, for ``_number``."""
    slot = None if _thread.encoding is None else _thread.encoding.counter()
    return xp.zeros(1, u64) if slot is None else slot


def _number(counter: Array) -> int:
    """What a kernel has written to a ``_counter``. Waits for the device."""
    if _thread.encoding is not None and counter.data.ptr in _thread.encoding.slots:
        return _thread.encoding.ask(counter)
    return int(counter.get()[0])


def _guard() -> Any:
    """Where kernels find out whether they may change the residual."""
    return NULL if _thread.encoding is None else _thread.encoding.look()


def _suffix(dtype: Any) -> str:
    return {4: "f32", 8: "f64"}[np.dtype(dtype).itemsize]


def _or_null(array: Array | None) -> Any:
    return NULL if array is None else array


# ---- kernels/select/select.cu


def finite(x: Array, threads: int = 1) -> bool:
    """Whether no element of ``x`` (float32 or float64) is NaN or infinite. Waits for the device."""
    bad = module_of(x).zeros(1, i32)
    if x.size:
        _look(x, bad)
    return not int(bad.get()[0])


def check_finite(values: Array) -> None:
    """``ValueError`` where a value is NaN or infinite. Waits for the device."""
    bad = module_of(values).zeros(1, i32)
    if values.size:
        _look(values, bad)
        _check(bad)


def _look(x: Array, bad: Array) -> None:
    xp = module_of(x)
    _launch(xp, "select", f"finite_{_suffix(x.dtype)}", _blocks(xp, x.size, 4 * THREADS), x, u64(x.size), bad)


def add(dense: Array, gradient: Array, threads: int = 1) -> None:
    """``dense += gradient``."""
    if dense.size:
        xp = module_of(dense)
        blocks = _blocks(xp, dense.size, 4 * THREADS)
        _launch(xp, "select", f"add_{_suffix(dense.dtype)}", blocks, dense, gradient, u64(dense.size), _guard())


def topk(dense: Array, gradient: Array | None, k: int, threads: int = 1) -> tuple[Array, Array]:
    """``dense += gradient``, then its k largest magnitudes: sorted indices and values. Ties: the lower index."""
    xp, n, suffix = module_of(dense), dense.size, _suffix(dense.dtype)
    if n >= 2**31:
        raise ValueError(f"top-k on a GPU takes fewer than 2^31 elements, and this tensor has {n}: split it")
    indices, values = xp.empty(k, u32), xp.empty(k, dense.dtype)
    if k == 0:
        if gradient is not None:
            add(dense, gradient)
        return indices, values
    room = min(n, 2 * k + n // 256 + 65536)
    candidates, found = xp.empty(room, u32), xp.empty(room, dense.dtype)
    passes = 3 if dense.itemsize == 4 else 6
    tile = 16 * THREADS if dense.itemsize == 4 else 8 * THREADS
    # One piece of zeros for all: | state [2] | counts [passes * 2048 u32] | status of collect | status of take |
    collect_tiles, take_tiles = -(-n // tile) + 1, -(-n // (4 * THREADS)) + 1
    scratch = xp.zeros(2 + passes * 1024 + collect_tiles + take_tiles, u64)
    state, counts = scratch[:2], scratch[2 : 2 + passes * 1024].view(u32)
    collect_status, take_status = scratch[2 + passes * 1024 : -take_tiles], scratch[-take_tiles:]
    source, now = _or_null(gradient), _thread.encoding
    # The first block takes the sample; where the gradient has not been looked at, the others do that.
    looks = now is not None and not now.looked and gradient is not None and gradient.size == now.gradient.size
    blocks, bad = (1 + _blocks(xp, n, 4 * THREADS), now.look(fused=True)) if now and looks else (1, NULL)
    _launch(xp, "select", f"topk_sample_{suffix}", blocks, dense, source, u64(n), u64(k), state, bad)
    _launch(xp, "select", f"topk_collect_{suffix}", _blocks(xp, n, tile),
            dense, source, u64(n), _guard(), state, collect_status, candidates, found, u64(room))  # fmt: skip
    for number in range(passes):
        _launch(xp, "select", f"topk_count_{suffix}", _blocks(xp, room),
                dense, u64(n), u64(k), candidates, found, u64(room), state, u32(number), counts)  # fmt: skip
    _launch(xp, "select", f"topk_take_{suffix}", _blocks(xp, room, 4 * THREADS),
            dense, u64(n), u64(k), candidates, found, u64(room), state, counts, u32(passes), take_status,
            indices, values)  # fmt: skip
    return indices, values


def threshold(dense: Array, gradient: Array | None, least: float, threads: int = 1) -> tuple[Array, Array]:
    """``dense += gradient``, then every element with ``|x| >= least`` and ``x != 0``: sorted indices and values. Waits
    for the device: their number is not known before."""
    xp, n, suffix = module_of(dense), dense.size, _suffix(dense.dtype)
    with np.errstate(over="ignore"):
        limit = dense.dtype.type(least)
    if float(limit) < least:
        limit = np.nextafter(limit, dense.dtype.type(np.inf))
    bits = max(1, int(np.abs(limit).view(u32 if dense.itemsize == 4 else u64)))
    tile = 16 * THREADS if dense.itemsize == 4 else 8 * THREADS
    room = min(n, n // 16 + 65536)
    while True:
        indices, values, count = xp.empty(room, u32), xp.empty(room, dense.dtype), _counter(xp)
        if n:
            _launch(xp, "select", f"threshold_{suffix}", _blocks(xp, n, tile), dense, _or_null(gradient), u64(n),
                    _guard(), u64(bits), _status(xp, n, tile), indices, values, u64(room), count)  # fmt: skip
        kept = _number(count)
        if kept <= room:
            return indices[:kept], values[:kept]
        room, gradient = kept, None  # the gradient is in already


def gather(dense: Array, indices: Array) -> Array:
    """``dense[indices]``."""
    xp = module_of(dense)
    values = xp.empty(indices.size, dense.dtype)
    if indices.size:
        kernel = f"gather_{_suffix(dense.dtype)}"
        _launch(xp, "select", kernel, _blocks(xp, indices.size), dense, indices, u64(indices.size), values)
    return values


def scatter(values: Array, places: Array) -> Array:
    """``out`` with ``out[places] = values``; the places are a permutation."""
    xp = module_of(values)
    out = xp.empty(values.size, values.dtype)
    if values.size:
        kernel = f"scatter_{_suffix(values.dtype)}"
        _launch(xp, "select", kernel, _blocks(xp, values.size), values, places, u64(values.size), out)
    return out


def settle(dense: Array, indices: Array | None, values: Array) -> None:
    """``dense[indices] -= values``; None: all of it."""
    if values.size:
        xp, values = module_of(dense), values.astype(dense.dtype, copy=False)
        _launch(xp, "select", f"settle_{_suffix(dense.dtype)}", _blocks(xp, values.size),
                dense, _or_null(indices), u64(values.size), values, _guard())  # fmt: skip


def sum_into(out: Array, parts: list[tuple[Array | None, Array]], scale: float, threads: int = 1) -> None:
    """``out = scale * sum of parts``, in their order; a part is (indices, values), or (None, dense values)."""
    xp = module_of(out)
    if not out.size:
        return
    # A part without elements adds nothing; its array may have no address, which would mean a dense part.
    kept = [(i, v.astype(out.dtype, copy=False)) for i, v in parts if v.size]
    for begin in range(0, max(1, len(kept)), 8):
        some = kept[begin : begin + 8]
        arguments = [argument for i, v in some for argument in (_or_null(i), v, u64(v.size))]
        arguments += [NULL, NULL, u64(0)] * (8 - len(some))
        last = begin + 8 >= len(kept)
        _launch(xp, "select", f"sum_{_suffix(out.dtype)}", -(-out.size // 2048),
                out, u64(out.size), out.dtype.type(scale if last else 1.0), u32(begin > 0), u32(len(some)),
                *arguments)  # fmt: skip


def block_norms(dense: Array, gradient: Array | None, block: int, l2: bool, threads: int = 1) -> Array:
    """``dense += gradient``, then a float64 a block: its sum of squares, or of magnitudes."""
    xp = module_of(dense)
    norms = xp.empty(-(-dense.size // block), f64)
    if dense.size:
        _launch(xp, "select", f"block_norms_{_suffix(dense.dtype)}", _blocks(xp, norms.size, 8),
                dense, _or_null(gradient), u64(dense.size), _guard(), u64(block), u32(l2), norms)  # fmt: skip
    return norms


def of_blocks(blocks: Array, block: int, numel: int) -> Array:
    """The indices of all elements of sorted blocks; the last block of a tensor ends with it. Waits for the device: is
    that block among them?"""
    xp, count, block = module_of(blocks), blocks.size, min(block, max(numel, 1))
    size = count * block
    if count and numel % block:
        size += min(0, numel - (int(blocks[count - 1 :].get()[0]) + 1) * block)
    indices = xp.empty(size, u32)
    if size:
        _launch(xp, "bits", "of_blocks", _blocks(xp, size), blocks, u64(block), u64(size), indices)
    return indices


def random_indices(numel: int, count: int, seed: int, parameter: int, step: int, like: Array | None = None) -> Array:
    """``count`` distinct sorted indices below ``numel``, the same wherever the key is the same; an array of the device
    of ``like``."""
    xp = module_of(like)
    bitmap, indices = xp.zeros(-(-numel // 32), u32), xp.empty(count, u32)
    if count:
        key = (u32(seed), u32(parameter), u32(step & 0xFFFFFFFF))
        _launch(xp, "select", "random_bits", _blocks(xp, count), u64(numel), u64(count), *key, bitmap)
        _ones(xp, bitmap.view(np.uint8), indices)
    return indices


# ---- kernels/bits/bits.cu


def _ones(xp: Any, bits: Array, places: Array) -> Array:
    """Writes the places of the first ones of a bit string; how many there are in all, on the device."""
    found = _counter(xp)
    if bits.size:
        each = 8 * THREADS
        _launch(xp, "bits", "ones", _blocks(xp, bits.size, each),
                bits, u64(bits.size), _status(xp, bits.size, each), places, u64(places.size), found)  # fmt: skip
    return found


def pack(values: Array, width: int) -> Array:
    """Fields of ``width`` bits, one behind the other; ``values`` are uint8 (width <= 8) or uint32 (width <= 32)."""
    xp = module_of(values)
    words = xp.empty((values.size * width + 31) // 32, u32)
    if words.size:
        kernel = f"pack{8 * values.itemsize}"
        _launch(xp, "bits", kernel, _blocks(xp, words.size), values, u64(values.size), u32(width), words)
    return words.view(np.uint8)[: (values.size * width + 7) // 8]


def unpack(section: Array, count: int, width: int, dtype: type[np.unsignedinteger[Any]]) -> Array:
    """The ``count`` fields of ``pack``."""
    xp = module_of(section)
    exactly(section, (count * width + 7) // 8)  # before an array of that size is allocated
    values = xp.empty(count, dtype)
    if width > 8 * values.itemsize:
        check(-1)
    if count:
        kernel = f"unpack{8 * values.itemsize}"
        _launch(xp, "bits", kernel, _blocks(xp, count),
                section, u64(section.size), u64(count), u32(width), values)  # fmt: skip
    return values


def check_indices(indices: Array, numel: int) -> None:
    """``ValueError`` where the indices are not strictly increasing or not below ``numel``. Waits for the device."""
    xp = module_of(indices)
    error = xp.zeros(1, i32)
    if indices.size:
        _launch(xp, "bits", "check_indices", _blocks(xp, indices.size), indices, u64(indices.size), u64(numel), error)
        _check(error)


def bitmap_encode(indices: Array, numel: int) -> Array:
    """``numel`` bits, set at the indices."""
    xp = module_of(indices)
    words = xp.zeros(-(-numel // 32), u32)
    if indices.size:
        _launch(xp, "bits", "bitmap_encode", _blocks(xp, indices.size), indices, u64(indices.size), words)
    return words.view(np.uint8)[: (numel + 7) // 8]


def bitmap_decode(section: Array, numel: int, count: int) -> Array:
    """The indices of ``bitmap_encode``. Waits for the device."""
    xp = module_of(section)
    exactly(section, (numel + 7) // 8)
    indices, error = xp.empty(count, u32), xp.zeros(1, i32)
    found = _ones(xp, section, indices)
    spare = section.size - numel // 8
    _launch(xp, "bits", "check_bitmap", _blocks(xp, max(1, spare)),
            section, u64(section.size), u64(numel), u64(count), found, error)  # fmt: skip
    _check(error)
    return indices


def moved(indices: Array, by: int) -> Array:
    """``indices + by``."""
    xp = module_of(indices)
    out = xp.empty(indices.size, u32)
    if indices.size:
        _launch(xp, "bits", "moved", _blocks(xp, indices.size), indices, u64(indices.size), u32(by), out)
    return out


def check_order(order: Array) -> None:
    """``ValueError`` where it is not a permutation. Waits for the device: the order is about to be used."""
    xp = module_of(order)
    error, seen = xp.zeros(1, i32), xp.zeros(-(-order.size // 32), u32)
    if order.size:
        _launch(xp, "bits", "check_order", _blocks(xp, order.size), order, u64(order.size), seen, error)
        check(int(error.get()[0]))


# ---- kernels/container/container.cu

HEAD = 64
"""How much of a container and of each of its sections ``read_heads`` brings to the host."""


def _known(section: Array, start: bytes) -> Array:
    """The section; the host knows how it starts."""
    if _thread.heads is not None and section.size:
        _thread.heads[section.data.ptr] = section, start
    return section


def head(section: Array, size: int) -> bytes:
    """The first bytes of a section, for the host. Waits for the device where they are not known."""
    _, start = (_thread.heads or {}).get(section.data.ptr, (None, b""))
    if len(start) < min(size, section.size):
        start = section[:size].get().tobytes()
    return start[: min(size, section.size)]


def read_heads(data: Array, ranks: int) -> None:
    """Before the heads of the containers in ``data`` are asked for: within ``reading``, they come to the host together.
    Waits for the device."""
    if _thread.heads is None or not data.size:
        return
    xp = module_of(data)
    heads = xp.empty(4 * HEAD * ranks, np.uint8)
    _launch(xp, "container", "container_heads", 1, data, u64(data.size), u32(ranks), heads)
    at = 0
    for starts in heads.get().reshape(ranks, 4, HEAD):
        # As far as they go: a container that is refused is the last.
        for size, start in zip((HEAD, *starts[0, 40:].view(u64).tolist()), starts, strict=True):
            if at + size > data.size:
                return
            _known(data[at : at + size], start.tobytes()[:size])
            at += -(-size // 8) * 8


def check_container(data: Array) -> None:
    """``ValueError`` where a container's checksum is not the one in its header. Waits for the device."""
    xp, words = module_of(data), data.view(u32)
    scratch, error = xp.zeros(2, u32), xp.zeros(1, i32)
    blocks = _blocks(xp, words.size, 4 * THREADS)
    _launch(xp, "container", "check_container", blocks, words, u64(words.size), scratch, error)
    _check(error)


def joined(header: bytes, *arrays: Array, pad: int = 1, checked: bool = False) -> Array:
    """Up to 64 bytes and up to four arrays, one behind the other, each filled with zeros to a multiple of ``pad``;
    ``checked``: with the checksum of a container."""
    xp = module_of(next(array for array in arrays if not isinstance(array, np.ndarray)))
    total = -(-len(header) // pad) * pad
    pieces = []
    for array in arrays:
        if array.nbytes:
            pieces += [array.view(np.uint8), u64(total), u64(array.nbytes)]
            total += -(-array.nbytes // pad) * pad
    pieces += [NULL, u64(0), u64(0)] * (4 - len(pieces) // 3)
    words = -(-total // 8)
    out = (xp.zeros if checked else xp.empty)(words, u64)
    if words:
        start = np.frombuffer(header.ljust(64, b"\0"), u64)
        _launch(xp, "container", "join", _blocks(xp, words), *start, *pieces, u64(words), u32(checked), out)
    section = out.view(np.uint8)[:total]
    return section if checked else _known(section, header)  # the host has not seen the checksum


# ---- Without a kernel of ours.


def host(array: Array) -> Any:
    """The array on the host. Waits for the device."""
    return array if isinstance(array, np.ndarray) else array.get()


def put(array: Any, like: Array) -> Array:
    """A host's array where ``like`` is."""
    return module_of(like).asarray(array) if isinstance(array, np.ndarray) else array


def zeros(count: int, dtype: Any, like: Array) -> Array:
    """``count`` zeros."""
    return module_of(like).zeros(count, dtype)


def empty(count: int, dtype: Any, like: Array) -> Array:
    """``count`` elements of any value."""
    return module_of(like).empty(count, dtype)


def arange(count: int, like: Array) -> Array:
    """0 to ``count - 1``."""
    return module_of(like).arange(count, dtype=u32)


def concatenate(arrays: list[Array]) -> Array:
    """One array behind the other."""
    return module_of(arrays[0]).concatenate(arrays)


def aligned(data: Array) -> Array:
    """The bytes, at an address that whole words can be read from."""
    return joined(b"", data) if data.data.ptr % 8 else data


# ---- kernels/rice/rice.cu


def rice_encode(indices: Array, numel: int) -> Array:
    """The section drawn in kernels/rice/rice.cpp. Waits for the device: the size is not known before."""
    xp, count = module_of(indices), indices.size
    b = 0
    while b < 31 and (2 << b) <= 0.6931471805599453 * numel / count:
        b += 1
    # With this b, from which the device walks downhill, the highs are at most (numel - count) >> b zeros.
    most = 2 + (count * b + 7) // 8 + ((max(0, numel - count) >> b) + count + 7) // 8
    status = _status(xp, count)
    # | sums [32] | status | words of the section |
    scratch, bits = xp.zeros(32 + status.size + -(-most // 8) + 1, u64), _counter(xp)
    sums, status, words = scratch[:32], scratch[32 : 32 + status.size], scratch[32 + status.size :].view(u32)
    _launch(xp, "rice", "rice_sums", _blocks(xp, count, THREADS), indices, u64(count), sums)
    _launch(xp, "rice", "rice_write", _blocks(xp, count),
            indices, u64(count), u64(numel), sums, status, words, bits)  # fmt: skip
    return words.view(np.uint8)[: (_number(bits) + 7) // 8]


def rice_decode(section: Array, numel: int, count: int) -> Array:
    """The indices of ``rice_encode``. Waits for the device."""
    xp = module_of(section)
    if section.size == 0 or section.size * 8 < count:
        check(-1)
    highs, indices = xp.empty(count, u32), xp.empty(count, u32)
    each = 8 * THREADS
    tiles = -(-section.size // each) + 1
    # One piece of zeros: | found | end | error | status of the highs | status of the join |
    scratch = xp.zeros(3 + tiles + -(-count // THREADS) + 1, u64)
    found, end, error = scratch[:1], scratch[1:2], scratch[2:3].view(i32)[:1]
    _launch(xp, "rice", "rice_highs", _blocks(xp, section.size, each),
            section, u64(section.size), u64(count), scratch[3 : 3 + tiles], highs, found)  # fmt: skip
    _launch(xp, "rice", "rice_join", _blocks(xp, count),
            section, u64(section.size), u64(count), u64(numel), highs, found, scratch[3 + tiles :], end, indices,
            error)  # fmt: skip
    _check(error)
    return indices


def _low_bits(count: int, numel: int) -> int:
    return min(range(32), key=lambda low: count * low + ((numel - 1) >> low))


def elias_fano_encode(indices: Array, numel: int) -> Array:
    """The section drawn in kernels/elias_fano/elias_fano.cpp. Waits for the device: the last index says how long it is."""
    xp, count = module_of(indices), indices.size
    if count == 0:
        return xp.empty(0, np.uint8)
    low, last = _low_bits(count, numel), int(indices[count - 1 :].get()[0])
    size = (count * low + 7) // 8 + ((last >> low) + count + 7) // 8
    words = xp.zeros(-(-size // 4), u32)
    _launch(xp, "rice", "elias_fano_write", _blocks(xp, count), indices, u64(count), u32(low), words)
    return words.view(np.uint8)[:size]


def elias_fano_decode(section: Array, numel: int, count: int) -> Array:
    """The indices of ``elias_fano_encode``. Waits for the device."""
    xp = module_of(section)
    if section.size * 8 < count:
        check(-1)
    indices = xp.empty(count, u32)
    if count == 0:
        check(-3 if section.size else 0)
        return indices
    low = _low_bits(count, numel)
    at = (count * low + 7) // 8
    if section.size < at:
        check(-1)
    highs, found, error = xp.empty(count, u32), _counter(xp), xp.zeros(1, i32)
    rest, each = section[at:], 8 * THREADS
    if rest.size:
        _launch(xp, "rice", "elias_fano_highs", _blocks(xp, rest.size, each),
                rest, u64(rest.size), u64(count), _status(xp, rest.size, each), highs, found)  # fmt: skip
    _launch(xp, "rice", "elias_fano_join", _blocks(xp, count),
            section, u64(section.size), u64(at), u64(count), u64(numel), u32(low), highs, found, indices,
            error)  # fmt: skip
    _check(error)
    return indices


# ---- kernels/quantize/quantize.cu


def _key(*key: int) -> tuple[np.uint32, ...]:
    return tuple(u32(word & 0xFFFFFFFF) for word in key)


def qsgd_norms(values: Array, bucket: int, l2: bool) -> Array:
    """The largest magnitude, or the l2 norm, of each bucket."""
    xp, n = module_of(values), values.size
    bucket = min(bucket, max(n, 1))
    buckets = -(-n // bucket)
    norms = xp.zeros(buckets, f32)
    if l2 and n:
        _launch(xp, "quantize", "l2_norms", _blocks(xp, buckets, 8), values, u64(n), u64(bucket), norms)
    elif n:
        chunks = buckets * -(-bucket // (16 * THREADS))
        _launch(xp, "quantize", "max_norms", _blocks(xp, chunks, 1), values, u64(n), u64(bucket), norms.view(u32))
    return norms


def qsgd_codes(
    values: Array, norms: Array, bucket: int, levels: int, seed: int, parameter: int, step: int, rank: int
) -> Array:
    """Codes 0 .. 2 * levels, rounded with the random numbers of (seed, parameter, step, rank)."""
    xp, n = module_of(values), values.size
    codes = xp.empty(n, np.uint8)
    if n:
        _launch(xp, "quantize", "qsgd_codes", _blocks(xp, n, 4 * THREADS), values, u64(n), u64(min(bucket, n)),
                u32(levels), *_key(seed, parameter, step, rank), norms, codes)  # fmt: skip
    return codes


def qsgd_encode(
    values: Array, bucket: int, levels: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> tuple[Array, Array]:
    """``qsgd_norms`` and their ``qsgd_codes``; in one launch for largest magnitudes and the usual buckets."""
    key = (seed, parameter, step, rank)
    if l2 or bucket % 4 or bucket > 8192 or not values.size:
        norms = qsgd_norms(values, bucket, l2)
        return norms, qsgd_codes(values, norms, bucket, levels, *key)
    xp, n = module_of(values), values.size
    norms, codes = xp.empty(-(-n // bucket), f32), xp.empty(n, np.uint8)
    _launch(xp, "quantize", "qsgd_encode", _blocks(xp, norms.size, 8),
            values, u64(n), u64(bucket), u32(levels), *_key(*key), norms, codes)  # fmt: skip
    return norms, codes


def qsgd_section(
    header: bytes, values: Array, bucket: int, bits: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> Array:
    """``| header | norms | codes of bits bits each |``; in one launch where codes of a bucket fill whole words."""
    xp, n, key = module_of(values), values.size, (seed, parameter, step, rank)
    if l2 or bucket % 4 or bucket > 8192 or bucket * bits % 32 or len(header) != 8 or not n:
        norms, codes = qsgd_encode(values, bucket, 2 ** (bits - 1) - 1, l2, *key)
        return joined(header, norms, pack(codes, bits))
    buckets = -(-n // bucket)
    words = xp.empty(2 + buckets + (n * bits + 31) // 32, u32)
    _launch(xp, "quantize", "qsgd_section", _blocks(xp, buckets, 8), values, u64(n), u64(bucket), u32(bits),
            *_key(*key), np.frombuffer(header, u64)[0], words)  # fmt: skip
    return _known(words.view(np.uint8)[: 8 + 4 * buckets + (n * bits + 7) // 8], header)


def qsgd_open(norms: Array, packed: Array, count: int, bucket: int, bits: int) -> Array:
    """The values of ``qsgd_section``. Waits for the device."""
    exactly(packed, (count * bits + 7) // 8)  # before an array of that size is allocated
    bucket = min(bucket, max(count, 1))
    return _decoded("qsgd_open", packed, count, packed, u64(packed.size), norms, u64(count), u64(bucket), u32(bits))


def _decoded(kernel: str, like: Array, count: int, *arguments: Any) -> Array:
    """``count`` float32 of a kernel of quantize.cu that ends with (values, error). Waits for the device."""
    xp = module_of(like)
    values, error = xp.empty(count, f32), xp.zeros(1, i32)
    _launch(xp, "quantize", kernel, _blocks(xp, count), *arguments, values, error)
    _check(error)
    return values


def qsgd_decode(norms: Array, codes: Array, bucket: int, levels: int) -> Array:
    """The values of ``qsgd_encode``. Waits for the device."""
    n = codes.size
    if not 0 < levels < 128 or bucket == 0:
        check(-3)
    return _decoded("qsgd_decode", codes, n, codes, norms, u64(n), u64(min(bucket, max(n, 1))), u32(levels))


def bucket_sums(values: Array, bucket: int, squares: bool) -> Array:
    """The sum of magnitudes, or of squares, of each bucket, in the order that kernels/quantize/quantize.cpp says."""
    xp, count, each = module_of(values), values.size, min(bucket, max(values.size, 1))
    if count == 0:
        return xp.empty(0, f64)
    terms, kernel = values, "fold_squares" if squares else "fold_magnitudes"
    while True:
        whole = (count - 1) // each
        total = whole * -(-each // 1024) + -(-(count - whole * each) // 1024)
        sums = xp.empty(total, f64)
        _launch(xp, "quantize", kernel, _blocks(xp, total, 8), terms, u64(count), u64(each), sums)
        if each <= 1024:
            return sums
        terms, kernel, count, each = sums, "fold_sums", total, -(-each // 1024)


def bucket_means(values: Array, bucket: int) -> Array:
    """The mean magnitude of each bucket."""
    xp, sums = module_of(values), bucket_sums(values, bucket, False)
    means = xp.empty(sums.size, f32)
    if sums.size:
        _launch(xp, "quantize", "bucket_means", _blocks(xp, sums.size),
                sums, u64(sums.size), u64(values.size), u64(bucket), means)  # fmt: skip
    return means


def clip_scales(scales: Array, values: Array, bucket: int, clip: float) -> Array:
    """Each bucket's scale, but at most ``clip`` standard deviations of its values from 0."""
    xp, squares = module_of(values), bucket_sums(values, bucket, True)
    clipped = xp.empty(scales.size, f32)
    if scales.size:
        _launch(xp, "quantize", "clip_scales", _blocks(xp, scales.size),
                scales, squares, u64(scales.size), u64(values.size), u64(bucket), f64(clip), clipped)  # fmt: skip
    return clipped


def uniform_encode(
    values: Array, bucket: int, dtype: type[np.unsignedinteger[Any]], seed: int, parameter: int, step: int, rank: int
) -> tuple[Array, Array]:
    """Each bucket's least and largest value, and codes between them that use all of ``dtype`` (uint8 or uint16)."""
    xp, n = module_of(values), values.size
    bucket = min(bucket, max(n, 1))
    buckets = -(-n // bucket)
    extremes, ranges, codes = xp.zeros(2 * buckets, u32), xp.empty(2 * buckets, f32), xp.empty(n, dtype)
    if n:
        chunks = buckets * -(-bucket // (16 * THREADS))
        _launch(xp, "quantize", "uniform_extremes", _blocks(xp, chunks, 1), values, u64(n), u64(bucket), extremes)
        _launch(xp, "quantize", f"uniform_encode{8 * codes.itemsize}", _blocks(xp, n, 4 * THREADS),
                values, u64(n), u64(bucket), *_key(seed, parameter, step, rank), extremes, ranges, codes)  # fmt: skip
    return ranges, codes


def uniform_decode(ranges: Array, codes: Array, bucket: int) -> Array:
    """The values of ``uniform_encode``. Waits for the device."""
    n, kernel = codes.size, f"uniform_decode{8 * codes.itemsize}"
    return _decoded(kernel, codes, n, codes, ranges, u64(n), u64(min(bucket, max(n, 1))))


def signs(values: Array) -> Array:
    """One bit a value, set where it is below zero."""
    xp, n = module_of(values), values.size
    words = xp.empty(-(-n // 32), u32)
    if n:
        _launch(xp, "quantize", "signs", _blocks(xp, n), values, u64(n), words)
    return words.view(np.uint8)[: (n + 7) // 8]


def sign_decode(signs: Array, scales: Array, count: int, bucket: int) -> Array:
    """Each bucket's scale with the signs of ``signs``. Waits for the device."""
    if bucket == 0:
        check(-3)
    return _decoded("sign_decode", signs, count, signs, scales, u64(count), u64(min(bucket, max(count, 1))))


def natural_exponents(values: Array, seed: int, parameter: int, step: int, rank: int) -> Array:
    """The float32 exponent field of the power of two that each magnitude is rounded to."""
    xp, n = module_of(values), values.size
    exponents = xp.empty(n, np.uint8)
    if n:
        _launch(xp, "quantize", "natural_exponents", _blocks(xp, n, 4 * THREADS),
                values, u64(n), *_key(seed, parameter, step, rank), exponents)  # fmt: skip
    return exponents


def natural_decode(signs: Array, exponents: Array) -> Array:
    """Powers of two with the signs of ``signs``. Waits for the device."""
    return _decoded("natural_decode", exponents, exponents.size, signs, exponents, u64(exponents.size))


def trits_pack(digits: Array) -> Array:
    """Digits 0, 1, 2, five to a byte, as drawn in kernels/three_lc/three_lc.cpp."""
    xp = module_of(digits)
    out = xp.empty(-(-digits.size // 5), np.uint8)
    if out.size:
        _launch(xp, "quantize", "trits_pack", _blocks(xp, out.size), digits, u64(digits.size), out)
    return out


def trits_unpack(section: Array, count: int) -> Array:
    """The ``count`` digits of ``trits_pack``. Waits for the device."""
    xp = module_of(section)
    if section.size != -(-count // 5):  # before an array of that size is allocated
        check(-1)
    digits, error = xp.empty(count, np.uint8), xp.zeros(1, i32)
    if count:
        _launch(xp, "quantize", "trits_unpack", _blocks(xp, section.size), section, u64(count), digits, error)
        _check(error)
    return digits


def three_lc_pack(values: Array, m: float) -> Array:
    """``trits_pack`` of round(value / m) + 1."""
    xp = module_of(values)
    out = xp.empty(-(-values.size // 5), np.uint8)
    if out.size:
        _launch(xp, "quantize", "three_lc_pack", _blocks(xp, out.size), values, u64(values.size), f32(m), out)
    return out


def three_lc_unpack(section: Array, count: int, m: float) -> Array:
    """-m, 0 or m for each digit; ``section`` has ceil(count / 5) bytes. Waits for the device."""
    if not 0 <= m <= np.finfo(f32).max:
        check(-3)
    return _decoded("three_lc_unpack", section, count, section, u64(count), f32(m))


def zero_runs_encode(packed: Array) -> Array:
    """Packed digits, their runs of zeros in a byte each. Waits for the device: the size is not known before."""
    xp, n = module_of(packed), packed.size
    out = xp.empty(n, np.uint8)
    if n == 0:
        return out
    found, size = _counter(xp), _counter(xp)
    others, rank = xp.empty(n, u32), xp.empty(n, u32)
    _launch(xp, "quantize", "zero_runs_find", _blocks(xp, n),
            packed, u64(n), _status(xp, n), found, others, rank)  # fmt: skip
    _launch(xp, "quantize", "zero_runs_write", _blocks(xp, n),
            packed, u64(n), found, others, rank, _status(xp, n), size, out)  # fmt: skip
    return out[: _number(size)]


def zero_runs_decode(section: Array, count: int) -> Array:
    """The ``count`` bytes of ``zero_runs_encode``. Waits for the device."""
    xp, n = module_of(section), section.size
    if n * 14 < count:  # before an array of that size is allocated
        check(-1)
    out, size = xp.empty(count, np.uint8), _counter(xp)
    if n:
        _launch(xp, "quantize", "zero_runs_decode", _blocks(xp, n),
                section, u64(n), u64(count), _status(xp, n), size, out)  # fmt: skip
    made = _number(size)
    if made != count:
        check(-1 if made < count else -3)
    return out


def to_float32(values: Array) -> Array:
    """The values in float32, those beyond its range at its ends; the same array where they are float32 already."""
    if values.dtype == f32:
        return values
    xp, n = module_of(values), values.size
    narrow = xp.empty(n, f32)
    if n:
        _launch(xp, "quantize", "narrow", _blocks(xp, n), values, u64(n), narrow)
    return narrow


def half_encode(values: Array, bfloat16: bool) -> Array:
    """The section of value/half.py, of float32 or float64 values."""
    xp, n = module_of(values), values.size
    section = xp.empty(n + 1, np.uint16)
    _launch(xp, "quantize", "half_encode", _blocks(xp, n + 1), to_float32(values), u64(n), u32(bfloat16), section)
    return section.view(np.uint8)


def half_decode(section: Array, count: int) -> Array:
    """The ``count`` values of ``half_encode``; ``section`` has 2 * (count + 1) bytes. Waits for the device."""
    if section.size != 2 * (count + 1):
        check(-1)
    return _decoded("half_decode", section, count, section.view(np.uint16), u64(count))


# ---- kernels/bloom/bloom.cu


def bloom_insert(indices: Array, size: int, hashes: int, seed: int, parameter: int, step: int) -> Array:
    """A Bloom filter of ``size`` bytes (8 to 2^29 - 1) that holds the indices."""
    xp, count = module_of(indices), indices.size
    words = xp.zeros(-(-size // 4), u32)
    if count:
        _launch(xp, "bloom", "bloom_insert", _blocks(xp, count * hashes),
                indices, u64(count), u32(hashes), *_key(seed, parameter, step), u32(size), words)  # fmt: skip
    return words.view(np.uint8)[:size]


def bloom_query(bits: Array, hashes: int, numel: int, seed: int, parameter: int, step: int) -> Array:
    """The positives: the indices below ``numel`` that the filter holds, falsely or not. Waits for the device: their
    number is not known before."""
    xp, size = module_of(bits), bits.size
    words, positives, found = xp.empty((size + 15) // 4, u32), xp.empty(-(-numel // 64), u64), _counter(xp)
    if numel:
        _launch(xp, "bloom", "bloom_wrap", _blocks(xp, words.size), bits, u32(size), words)
        _launch(xp, "bloom", "bloom_query", _blocks(xp, positives.size),
                words, u32(size), u32(hashes), *_key(seed, parameter, step), u64(numel), positives, found)  # fmt: skip
    indices = xp.empty(_number(found), u32)
    if indices.size:
        _ones(xp, positives.view(np.uint8), indices)
    return indices


def bloom_conflict_sets(
    positives: Array, count: int, size: int, hashes: int, seed: int, parameter: int, step: int
) -> Array:
    """Policy P2's ``count`` out of all the positives of a filter of ``size`` bytes. Runs on the host: every draw hangs
    on the ones before it."""
    chosen = cpu.bloom_conflict_sets(positives.get(), count, size, hashes, seed, parameter, step)
    return module_of(positives).asarray(chosen)


def index_sizes(indices: Array, numel: int) -> list[int]:
    """Bytes of the rice, rle, delta, elias_fano and rans sections of one index or more; estimates beyond 8192. Runs on
    the host, which looks at no more than 8192 indices."""
    return cpu.index_sizes(indices.get(), numel)


def without(indices: Array, places: Array) -> Array:
    """``numpy.delete(indices, places)`` for distinct places: what policy P1 keeps."""
    xp, count = module_of(indices), indices.size
    out = xp.empty(count - places.size, u32)
    if count:
        dropped = bitmap_encode(places, 32 * -(-count // 32)).view(u32)
        _launch(xp, "bloom", "keep_others", _blocks(xp, count),
                indices, u64(count), dropped, _status(xp, count), _counter(xp), out, u64(out.size))  # fmt: skip
    return out


# ---- kernels/densestream/densestream.cu

MOST = 2**31 - 1


def _few(count: int) -> None:
    if count > MOST:
        raise ValueError(f"a stream on a GPU covers fewer than 2^31 elements, and this one up to {count}: split it")


def stream_encode(indices: Array, values: Array, gap: int) -> tuple[Array, Array, Array]:
    """Dense blocks of sorted indices: starts, lengths, and the values with the zeros inside blocks written out. Waits
    for the device: their sizes are not known before."""
    xp, count = module_of(indices), indices.size
    if count == 0:
        return xp.empty(0, u32), xp.empty(0, u32), xp.empty(0, values.dtype)
    totals, end = xp.zeros(2, u64), _counter(xp)
    _launch(xp, "densestream", "stream_count", _blocks(xp, count), indices, u64(count), u32(gap), totals)
    blocks, covered = (int(total) for total in totals.get())
    _few(covered)
    starts, lengths, firsts = (xp.empty(blocks, u32) for _ in range(3))
    out = xp.zeros(covered, values.dtype)
    _launch(xp, "densestream", f"stream_write_{_suffix(values.dtype)}", _blocks(xp, count),
            indices, values, u64(count), u32(gap), _status(xp, count), end, starts, firsts, out)  # fmt: skip
    _launch(xp, "densestream", "stream_lengths", _blocks(xp, blocks), firsts, end, lengths)
    return starts, lengths, out


def stream_check(starts: Array, lengths: Array, begin: int, end: int, count: int) -> None:
    """``ValueError`` where blocks are empty, overlap, are out of order, leave [begin, end) or do not hold ``count``.
    Waits for the device."""
    if _thread.encoding is not None:
        return  # the stream was made just now
    xp, blocks = module_of(starts), starts.size
    error, total = xp.zeros(1, i32), _counter(xp)
    if blocks:
        _launch(xp, "densestream", "stream_check", _blocks(xp, blocks),
                starts, lengths, u64(blocks), u64(begin), u64(end), error, total)  # fmt: skip
    if _number(total) != count or _number(error):
        raise ValueError(
            f"its blocks are empty, overlap, are out of order, leave the elements {begin} to {end} or do not hold "
            f"{count} values"
        )


def _firsts(xp: Any, lengths: Array) -> Array:
    """The place of each block's first value."""
    firsts = xp.empty(lengths.size, u32)
    if lengths.size:
        _launch(xp, "densestream", "stream_firsts", _blocks(xp, lengths.size),
                lengths, u64(lengths.size), _status(xp, lengths.size), _counter(xp), firsts)  # fmt: skip
    return firsts


def stream_indices(starts: Array, lengths: Array, count: int) -> Array:
    """The indices of the ``count`` elements that blocks cover."""
    xp = module_of(starts)
    indices = xp.empty(count, u32)
    if count:
        _launch(xp, "densestream", "stream_indices", _blocks(xp, count),
                starts, _firsts(xp, lengths), u64(starts.size), u64(count), indices)  # fmt: skip
    return indices


def stream_nonzero(starts: Array, lengths: Array, values: Array) -> tuple[Array, Array]:
    """The indices and values of the covered elements that are not zero. Waits for the device: their number is not known
    before."""
    xp, count = module_of(starts), values.size
    indices, out, found = xp.empty(count, u32), xp.empty(count, values.dtype), _counter(xp)
    if count:
        _launch(xp, "densestream", f"stream_nonzero_{_suffix(values.dtype)}", _blocks(xp, count),
                starts, _firsts(xp, lengths), u64(starts.size), values, u64(count), _status(xp, count), found,
                indices, out)  # fmt: skip
    kept = _number(found)
    return indices[:kept], out[:kept]


def _scatter(starts: Array, lengths: Array, values: Array, begin: int, adds: bool, dense: Array) -> None:
    xp = module_of(starts)
    if values.size:
        _launch(xp, "densestream", f"stream_scatter_{_suffix(values.dtype)}", _blocks(xp, values.size),
                starts, _firsts(xp, lengths), u64(starts.size), values, u64(values.size), u64(begin), u32(adds),
                dense)  # fmt: skip


def stream_dense(starts: Array, lengths: Array, values: Array, begin: int, out: Array) -> None:
    """``out`` = the elements from ``begin`` on, as many as it holds; no block may leave them."""
    out.fill(0)
    _scatter(starts, lengths, values, begin, False, out)


def stream_add(starts: Array, lengths: Array, values: Array, dense: Array) -> None:
    """``dense += the blocks``."""
    _scatter(starts, lengths, values, 0, True, dense)


def stream_merge(
    a: tuple[Array, Array, Array], b: tuple[Array, Array, Array], gap: int
) -> tuple[Array, Array, Array]:
    """The sum of two streams (starts, lengths, values). Waits for the device: its sizes are not known before."""
    xp, file = module_of(a[0]), "densestream"
    na, nb = a[0].size, b[0].size
    blocks, most = na + nb, a[2].size + b[2].size + gap * (na + nb)
    _few(most)
    starts, lengths, firsts, order, opened = (xp.empty(blocks, u32) for _ in range(5))
    out, end = xp.zeros(most, a[2].dtype), _counter(xp)
    if blocks:
        grid, of_a, of_b = _blocks(xp, blocks), (a[0], a[1], u64(na)), (b[0], b[1], u64(nb))
        _launch(xp, file, "stream_order", grid, a[0], u64(na), b[0], u64(nb), order)
        _launch(xp, file, "stream_join", grid, *of_a, *of_b, u32(gap), order, _status(xp, blocks), end, starts, firsts,
                opened)  # fmt: skip
        _launch(xp, file, "stream_lengths", grid, firsts, end, lengths)
        place = f"stream_place_{_suffix(out.dtype)}"
        for own, places, other in ((a, opened[:na], (a[0], a[1], u64(0))), (b, opened[na:], of_a)):
            if own[2].size:
                _launch(xp, file, place, _blocks(xp, own[2].size), own[0], _firsts(xp, own[1]), u64(own[0].size),
                        own[2], u64(own[2].size), places, starts, firsts, *other, out)  # fmt: skip
    made = _number(end)
    return starts[: made >> 31], lengths[: made >> 31], out[: made & MOST]


def stream_split(starts: Array, lengths: Array, cuts: Any) -> tuple[Array, Array, Array, Array]:
    """New starts and lengths of the cut blocks, and where each of the ``cuts.size + 1`` pieces has its blocks and its
    values: piece p those from ``at[p]`` to ``at[p + 1]``. ``cuts`` may stand on the host."""
    xp, blocks, count = module_of(starts), starts.size, cuts.size
    own = xp.asarray(cuts)
    out_starts, out_lengths = xp.zeros(blocks + count, u32), xp.zeros(blocks + count, u32)
    places, made, firsts, total = xp.empty(blocks, u32), _counter(xp), xp.empty(blocks, u32), _counter(xp)
    block_at, value_at = xp.zeros(count + 2, u64), xp.zeros(count + 2, u64)
    if blocks:
        _launch(xp, "densestream", "stream_firsts", _blocks(xp, blocks),
                lengths, u64(blocks), _status(xp, blocks), total, firsts)  # fmt: skip
        _launch(xp, "densestream", "stream_split", _blocks(xp, blocks), starts, lengths, u64(blocks), own, u64(count),
                _status(xp, blocks), made, places, out_starts, out_lengths)  # fmt: skip
        _launch(xp, "densestream", "stream_pieces", _blocks(xp, count + 2), starts, lengths, firsts, u64(blocks), total,
                own, u64(count), made, places, block_at, value_at)  # fmt: skip
    return out_starts, out_lengths, block_at, value_at


def stream_gaps(starts: Array, lengths: Array, begin: int) -> tuple[Array, Array]:
    """Starts and lengths as the two rows of increasing numbers that are rice-coded."""
    xp, blocks = module_of(starts), starts.size
    skips, ends = xp.empty(blocks, u32), xp.empty(blocks, u32)
    if blocks:
        _launch(xp, "densestream", "stream_gaps", _blocks(xp, blocks),
                starts, lengths, _firsts(xp, lengths), u64(blocks), u32(begin), skips, ends)  # fmt: skip
    return skips, ends


def stream_blocks(skips: Array, ends: Array, begin: int) -> None:
    """``stream_gaps`` undone in place: the first array becomes the starts, the second the lengths. Waits for the
    device."""
    xp, blocks = module_of(skips), skips.size
    starts, lengths, error = xp.empty(blocks, u32), xp.empty(blocks, u32), xp.zeros(1, i32)
    if blocks:
        _launch(xp, "densestream", "stream_blocks", _blocks(xp, blocks),
                skips, ends, u64(blocks), u32(begin), starts, lengths, error)  # fmt: skip
        skips[:], ends[:] = starts, lengths
        _check(error)


# ---- kernels/sort/sort.cu


def _sorted(xp: Any, words: Array, low: int, high: int) -> Array:
    """The words, stably sorted by their bits from ``low`` up to ``high``; ``words`` is lost."""
    tiles, count = -(-words.size // (8 * THREADS)), words.size
    spare, counts = xp.empty(count, u64), xp.empty(256 * tiles, u32)
    for shift in range(low, high, 8):
        _launch(xp, "sort", "radix_count", tiles, words, u64(count), u32(shift), counts)
        _launch(xp, "sort", "scan_counts", _blocks(xp, counts.size),
                counts, u64(counts.size), _status(xp, counts.size), _counter(xp))  # fmt: skip
        _launch(xp, "sort", "radix_move", tiles, words, u64(count), u32(shift), counts, spare)
        words, spare = spare, words
    return words


def _ordered(array: Array, pair: str, unpair: str) -> tuple[Array, Array]:
    """The elements in the order of the words that ``pair`` makes of them, and where each stood."""
    xp, n = module_of(array), array.size
    ordered, places, pairs = xp.empty(n, array.dtype), xp.empty(n, u32), xp.empty(n, u64)
    if n:
        _launch(xp, "sort", pair, _blocks(xp, n), array, u64(n), pairs)
        pairs = _sorted(xp, pairs, 32, 64)
        _launch(xp, "sort", unpair, _blocks(xp, n), pairs, u64(n), ordered, places)
    return ordered, places


def sort_values(values: Array) -> tuple[Array, Array]:
    """The values from the largest down, and where each stood; equal values (0 and -0 are) in the order they had."""
    return _ordered(values, "value_pairs", "value_unpair")


def sort_indices(indices: Array) -> tuple[Array, Array]:
    """The indices in order, and where each stood."""
    return _ordered(indices, "index_pairs", "index_unpair")


def sketch_merge(keys: Array, values: Array, numel: int) -> tuple[Array, Array]:
    """The pairs sorted by key; the keys must differ and be below ``numel``. Waits for the device."""
    xp, n = module_of(keys), keys.size
    sorted_keys, sorted_values = xp.empty(n, u32), xp.empty(n, f32)
    pairs, error = xp.empty(n, u64), xp.zeros(1, i32)
    if n:
        _launch(xp, "sort", "key_pairs", _blocks(xp, n), keys, values, u64(n), pairs)
        pairs = _sorted(xp, pairs, 32, 64)
        _launch(xp, "sort", "key_unpair", _blocks(xp, n),
                pairs, u64(n), u64(numel), sorted_keys, sorted_values, error)  # fmt: skip
        _check(error)
    return sorted_keys, sorted_values


# ---- kernels/sketch/sketch.cu


def quantile_encode(values: Array, buckets: int, middle: bool) -> tuple[Array, Array, int]:
    """The means of up to ``buckets`` quantile buckets, each value's bucket, and how many buckets are of negative
    values; ordered as drawn in kernels/sketch/quantile.cpp. At least one value. Waits for the device, twice: the signs
    share the buckets by their numbers."""
    xp, n, file = module_of(values), values.size, "sketch"
    words, bounds = xp.empty(n, u64), xp.empty(2, u64)
    magnitudes, codes = xp.empty(n, u32), xp.empty(n, u32)
    bounds.fill(n)
    _launch(xp, file, "quantile_words", _blocks(xp, n), values, u64(n), words)
    words = _sorted(xp, words, 0, 32)
    _launch(xp, file, "quantile_bounds", _blocks(xp, n), words, u64(n), magnitudes, bounds)
    above_at, below_at = (int(bound) for bound in bounds.get())
    above_at = min(above_at, below_at)
    positives, negatives, zero = below_at - above_at, n - below_at, int(above_at > 0)
    # As kernels/sketch/quantile.cpp shares the buckets out.
    if zero and buckets == 2 and positives and negatives:
        above_at, positives, zero = 0, below_at, 0
    others = positives + negatives
    shared = min(buckets - zero, others)
    for_negative = (2 * shared * negatives + others) // (2 * others) if others else 0
    if positives and for_negative == shared:
        for_negative -= 1
    if negatives and for_negative == 0:
        for_negative = 1
    signs = ((magnitudes[below_at:], negatives, for_negative, 0),
             (magnitudes[above_at:below_at], positives, shared - for_negative, zero))  # fmt: skip
    found, splits, means = xp.zeros(2, u64), [], xp.zeros(buckets, f32)
    for number, (ours, size, most, skip) in enumerate(signs):
        table = xp.zeros(2 * most + skip + 1, u32)
        splits.append(table)
        if size and most:
            _launch(xp, file, "find_splits", _blocks(xp, most), ours, u64(size), u32(most), _status(xp, most),
                    found[number:], table[skip:])  # fmt: skip
    _launch(xp, file, "quantile_codes", _blocks(xp, n), values, u64(n), *splits, found, u32(zero), codes)
    for number, (ours, size, most, skip) in enumerate(signs):
        if size and most:
            behind = u32(1 + zero if number else 0)
            _launch(xp, file, "quantile_means", _blocks(xp, most, 8), ours, u64(size), splits[number][skip:],
                    found[number:], u32(middle), u32(1 - number), found, behind, means)  # fmt: skip
    n_below, n_above = (int(count) for count in found.get())
    return means[: n_below + zero + n_above], codes, n_below


def quantile_decode(means: Array, codes: Array) -> Array:
    """``means[codes]``. Waits for the device."""
    xp, n = module_of(codes), codes.size
    values, error = xp.empty(n, f32), xp.zeros(1, i32)
    if means.size == 0:
        check(-3)
    if n:
        _launch(xp, "sketch", "quantile_decode", _blocks(xp, n),
                codes, u64(n), means, u32(means.size), values, error)  # fmt: skip
        _check(error)
    return values


def sketch_group(indices: Array, codes: Array, group_of: Array, first: Array) -> tuple[Array, Array, Array]:
    """How many elements each group has; then keys and numbers (0 for a group's first bucket), group behind group, in
    their old order within each."""
    xp, n = module_of(indices), indices.size
    counts, keys, numbers = xp.zeros(first.size, u32), xp.empty(n, u32), xp.empty(n, np.uint8)
    words = xp.empty(n, u64)
    if n:
        _launch(xp, "sketch", "group_words", _blocks(xp, n), codes, u64(n), group_of, words, counts)
        words = _sorted(xp, words, 32, 41 if first.size > 256 else 40)
        _launch(xp, "sketch", "group_take", _blocks(xp, n), words, u64(n), indices, codes, first, keys, numbers)
    return counts, keys, numbers


def sketch_insert(
    keys: Array, numbers: Array, rows: int, columns: int, width: int, seed: int, parameter: int, step: int
) -> Array:
    """The bins, row behind row, of a MinMaxSketch of numbers below ``width``."""
    xp, n = module_of(keys), keys.size
    depths, bins = xp.zeros(rows * columns, u32), xp.empty(rows * columns, np.uint8)
    if n:
        _launch(xp, "sketch", "sketch_insert", rows * _blocks(xp, n), keys, numbers, u64(n), u32(rows), u32(columns),
                u32(width), *_key(seed, parameter, step), depths)  # fmt: skip
    _launch(xp, "sketch", "sketch_bins", _blocks(xp, bins.size), depths, u64(bins.size), u32(width), bins)
    return bins


def sketch_query(
    keys: Array, bins: Array, means: Array, rows: int, columns: int, seed: int, parameter: int, step: int
) -> Array:
    """The means of the numbers that the ``rows * columns`` bins hold for the keys, each what was inserted or less.
    Waits for the device."""
    xp, n = module_of(keys), keys.size
    if not 0 < rows <= 8 or columns == 0:
        check(-3)
    values, error = xp.empty(n, f32), xp.zeros(1, i32)
    _launch(xp, "sketch", "sketch_query", _blocks(xp, max(n, rows * columns)), keys, u64(n), u32(rows), u32(columns),
            u32(means.size), *_key(seed, parameter, step), bins, means, values, error)  # fmt: skip
    _check(error)
    return values


def flagged_encode(keys: Array) -> Array:
    """The section of keys drawn at the end of kernels/sketch/sketch.cpp. Waits for the device: the size is not known
    before."""
    xp, n = module_of(keys), keys.size
    out, end = xp.empty((n + 3) // 4 + 4 * n, np.uint8), _counter(xp)
    if n:
        _launch(xp, "sketch", "flagged_encode", _blocks(xp, n), keys, u64(n), _status(xp, n), end, out)
    return out[: _number(end)]


def flagged_decode(section: Array, numel: int, count: int) -> Array:
    """The keys of ``flagged_encode``. Waits for the device."""
    xp = module_of(section)
    if section.size < (count + 3) // 4 + count:
        check(-1)
    gaps, keys, error = xp.empty(count, u32), xp.empty(count, u32), xp.zeros(1, i32)
    if count == 0:
        check(-1 if section.size else 0)
        return keys
    _launch(xp, "sketch", "flagged_gaps", _blocks(xp, count), section, u64(section.size), u64(count),
            _status(xp, count), _counter(xp), gaps, error)  # fmt: skip
    _launch(xp, "sketch", "keys_of_gaps", _blocks(xp, count), gaps, u64(count), u64(numel), _status(xp, count),
            _counter(xp), keys, error)  # fmt: skip
    _check(error)
    return keys


# ---- kernels/curve_fit/fit.cu


def fit_poly_encode(ordered: Array, degree: int, segments: int | None) -> Array:
    """The section drawn in kernels/curve_fit/fit_poly.cpp, of ``sort_values``' first result. Waits for the device: the size
    is not known before."""
    xp, n = module_of(ordered), ordered.size
    most = min(segments or 1024, n // (degree + 1) + 1)
    section, words = xp.empty(9 + 2 * (degree + 2) * most, u32), _counter(xp)
    partial = xp.empty(16 * (n // 256 + 1026), f64)
    _launch(xp, "fit", "fit_poly_encode", 1, ordered, u64(n), u32(degree), u32(segments or 0), partial, section, words)
    return section.view(np.uint8)[: 4 * _number(words)]


def fit_poly_decode(section: Array, count: int) -> Array:
    """The sorted values of ``fit_poly_encode``, as fitted. Waits for the device."""
    xp = module_of(section)
    if section.size % 4 or section.size < 12:
        check(-1)
    values, error = xp.empty(count, f32), xp.zeros(1, i32)
    sides, coefficients = xp.zeros(8, u32), xp.empty(2048, u32)
    _launch(xp, "fit", "fit_poly_read", 1, section, u64(section.size), u64(count), sides, coefficients, error)
    _launch(xp, "fit", "fit_poly_decode", _blocks(xp, count),
            section, u64(section.size), u64(count), sides, coefficients, error, values)  # fmt: skip
    _check(error)
    return values


def fit_dexp_encode(ordered: Array) -> Array:
    """The section drawn in kernels/curve_fit/fit_dexp.cpp, of ``sort_values``' first result. Waits for the device: a sign
    without values has no part in it."""
    xp, n = module_of(ordered), ordered.size
    section, words = xp.empty(14, u32), _counter(xp)
    room = xp.empty(2 * n + 14 * (n // 256 + 1), f64)
    _launch(xp, "fit", "fit_dexp_encode", 1, ordered, u64(n), room, section, words)
    return section.view(np.uint8)[: 4 * _number(words)]


def fit_dexp_decode(section: Array, count: int) -> Array:
    """The sorted values of ``fit_dexp_encode``, as fitted. Waits for the device."""
    xp = module_of(section)
    if section.size < 8:
        check(-1)
    values, error = xp.empty(count, f32), xp.zeros(1, i32)
    _launch(xp, "fit", "fit_dexp_decode", _blocks(xp, count), section, u64(section.size), u64(count), values, error)
    _check(error)
    return values


# ---- kernels/entropy/codes.cu and rans.cu


def _chunks(section: Array) -> int:
    return -(-8 * section.size // 2048)


def _join(xp: Any, exits: Array, entries: int, chunks: int) -> tuple[Array, Array]:
    """Where each chunk of a bit string begins, and how many words the string has; see kernels/entropy/entropy.cuh."""
    starts, words = xp.zeros(chunks, u64), _counter(xp)
    _launch(xp, "codes", "walk_join", 1, exits, u32(entries), u64(chunks), starts, words)
    return starts, words


def rle_encode(indices: Array, numel: int) -> Array:
    """The section drawn in kernels/rle/rle.cpp. Waits for the device: the size is not known before."""
    xp, n, file = module_of(indices), indices.size, "codes"
    if n == 0:
        return xp.empty(0, np.uint8)
    begins, runs, lengths, end = xp.empty(n, u32), _counter(xp), xp.zeros(68, u64), _counter(xp)
    words = xp.zeros(2 * n + 2, u32)  # a pair of runs takes no more than two fields of 32 bits
    _launch(xp, file, "rle_runs", _blocks(xp, n), indices, u64(n), _status(xp, n), runs, begins)
    _launch(xp, file, "rle_count", _blocks(xp, n), indices, u64(n), begins, runs, lengths)
    _launch(xp, file, "rle_write", _blocks(xp, n), indices, u64(n), u32((numel - 1).bit_length()), begins, runs,
            lengths, _status(xp, n), words, end)  # fmt: skip
    return words.view(np.uint8)[: (_number(end) + 7) // 8]


def rle_decode(section: Array, numel: int, count: int) -> Array:
    """The indices of ``rle_encode``. Waits for the device."""
    xp, file, size = module_of(section), "codes", section.size
    indices, error = xp.empty(count, u32), xp.zeros(1, i32)
    if count == 0:
        check(-3 if size else 0)
        return indices
    if size < 3:
        check(-1)
    escape, chunks = u32((numel - 1).bit_length()), _chunks(section)
    exits = xp.zeros(chunks * 128, u64)
    _launch(xp, file, "rle_walk", _blocks(xp, exits.size), section, u64(size), escape, u64(chunks), exits)
    starts, _ = _join(xp, exits, 128, chunks)
    # Pairs of runs: no more than elements, and none without two bits.
    room = min(count, 4 * size)
    zeros, ones, ends, places = xp.zeros(room, u64), xp.zeros(room, u64), xp.zeros(room, u64), xp.empty(room, u64)
    firsts, pairs, end = xp.empty(room, u32), _counter(xp), _counter(xp)
    _launch(xp, file, "rle_read", _blocks(xp, chunks), section, u64(size), escape, u64(chunks), starts, u64(room),
            zeros, ones, ends)  # fmt: skip
    _launch(xp, file, "rle_places", _blocks(xp, room), ones, u64(room), _status(xp, room), end, places)
    _launch(xp, file, "rle_firsts", _blocks(xp, room), section, u64(size), zeros, ones, ends, places, u64(room),
            u64(count), u64(numel), _status(xp, room), end, firsts, pairs, error)  # fmt: skip
    _launch(xp, file, "rle_fill", _blocks(xp, count), places, firsts, pairs, u64(count), indices, error)
    _check(error)
    return indices


def _histogram(xp: Any, symbols: Array) -> Array:
    counts = xp.zeros(256, u64)
    _launch(xp, "codes", "histogram", _blocks(xp, symbols.size), symbols, u64(symbols.size), counts)
    return counts


def huffman_encode(symbols: Array) -> Array:
    """The section of symbols drawn in kernels/huffman/huffman.cpp. Waits for the device: the size is not known before."""
    xp, n, file = module_of(symbols), symbols.size, "codes"
    if n == 0:
        return xp.empty(0, np.uint8)
    words, out = xp.empty(256, u32), xp.zeros((128 + 12 + (n * 12 + 7) // 8 + 64) // 4, u32)
    bits, single, sums, unused, end = (xp.zeros(size, dtype) for size, dtype in
                                       ((1, u64), (1, u32), (4, u64), (1, u64), (1, u64)))  # fmt: skip
    _launch(xp, file, "huffman_plan", 1, _histogram(xp, symbols), u64(n), words, out, bits, single)
    _launch(xp, file, "huffman_sizes", _blocks(xp, n), symbols, u64(n), words, sums)
    _launch(xp, file, "huffman_write", _blocks(xp, n), symbols, u64(n), words, sums, bits, single, _status(xp, n),
            unused, out, end)  # fmt: skip
    return out.view(np.uint8)[: (_number(end) + 7) // 8]


def huffman_decode(section: Array, count: int) -> Array:
    """The symbols of ``huffman_encode``. Waits for the device."""
    xp, file, size = module_of(section), "codes", section.size
    symbols, error = xp.empty(count, np.uint8), xp.zeros(1, i32)
    if count == 0:
        check(-3 if size else 0)
        return symbols
    table, streams, chunks = xp.zeros(4096, np.uint16), xp.zeros(10, u64), max(1, _chunks(section))
    _launch(xp, file, "huffman_read", 1, section, u64(size), u64(count), table, streams, error)
    for number in range(4 if count >= 1024 else 1):
        exits = xp.zeros(chunks * 12, u64)
        _launch(xp, file, "huffman_walk", _blocks(xp, exits.size),
                section, streams, u32(number), table, u64(chunks), exits)  # fmt: skip
        starts, words = _join(xp, exits, 12, chunks)
        _launch(xp, file, "huffman_take", _blocks(xp, chunks),
                section, streams, u32(number), table, u64(chunks), starts, words, u64(count), symbols,
                error)  # fmt: skip
    _check(error)
    return symbols


def huffman_indices_encode(indices: Array, numel: int) -> Array:
    """The section of indices drawn in kernels/huffman/huffman.cpp. Waits for the device: the size is not known before."""
    xp, n, file = module_of(indices), indices.size, "codes"
    words, table, end = xp.empty(256, u32), xp.zeros(4096, np.uint16), _counter(xp)
    out = xp.zeros((6 * n + 11) // 4, u32)
    if n:
        _launch(xp, file, "byte_code", 1, u64(numel), words, table)
        _launch(xp, file, "huffman_indices_write", _blocks(xp, n), indices, u64(n), words, _status(xp, n), end, out)
    return out.view(np.uint8)[: (_number(end) + 7) // 8]


def huffman_indices_decode(section: Array, numel: int, count: int) -> Array:
    """The indices of ``huffman_indices_encode``. Waits for the device."""
    xp, file, size = module_of(section), "codes", section.size
    if count == 0 or numel == 1:  # the only index there is takes no bits
        check(-3 if size else -2 if count > 1 else 0)
        return xp.zeros(count, u32)
    if 8 * size < count:
        check(-1)
    words, table, chunks = xp.empty(256, u32), xp.zeros(4096, np.uint16), _chunks(section)
    octets, error, exits = xp.empty(4 * count, np.uint8), xp.zeros(1, i32), xp.empty(chunks * 48, u64)
    _launch(xp, file, "byte_code", 1, u64(numel), words, table)
    _launch(xp, file, "huffman_indices_walk", _blocks(xp, exits.size),
            section, u64(size), table, u64(chunks), exits)  # fmt: skip
    starts, total = _join(xp, exits, 48, chunks)
    _launch(xp, file, "huffman_indices_take", _blocks(xp, chunks),
            section, u64(size), table, u64(chunks), starts, total, u64(count), octets, error)  # fmt: skip
    _check(error)
    indices = octets.view(u32)
    check_indices(indices, numel)
    return indices


def _rans_bound(count: int) -> int:
    return 2 * count + 4 * (1 if count < 2048 else 4 if count < 32768 else 32) + 640


def rans_encode(symbols: Array) -> Array:
    """The section of symbols drawn in kernels/rans/rans.cpp. Waits for the device: the size is not known before."""
    xp, n = module_of(symbols), symbols.size
    if n == 0:
        return xp.empty(0, np.uint8)
    out, begin, shares = xp.empty(_rans_bound(n), np.uint8), _counter(xp), xp.zeros(160, u32)
    _launch(xp, "rans", "rans_encode", 1,
            symbols, u64(n), _histogram(xp, symbols), shares, out, u64(out.size), begin)  # fmt: skip
    return out[_number(begin) :]


def _rans_decode(xp: Any, section: Array, count: int) -> tuple[Array, Array, Array]:
    symbols, used, error = xp.empty(count, np.uint8), _counter(xp), xp.zeros(1, i32)
    _launch(xp, "rans", "rans_decode", 1, section, u64(section.size), u64(count), symbols, used, error)
    return symbols, used, error


def rans_decode(section: Array, count: int) -> Array:
    """The symbols of ``rans_encode``. Waits for the device."""
    xp = module_of(section)
    if count == 0:
        check(-3 if section.size else 0)
        return xp.empty(0, np.uint8)
    symbols, used, error = _rans_decode(xp, section, count)
    if _number(error) == 0 and _number(used) != section.size:
        check(-3)
    _check(error)
    return symbols


def rans_indices_encode(indices: Array) -> Array:
    """The section drawn in kernels/rans/rans.cpp. Waits for the device: the size is not known before."""
    xp, n = module_of(indices), indices.size
    if n == 0:
        return xp.empty(0, np.uint8)
    tokens, lows, end = xp.empty(n, np.uint8), xp.zeros(n + 1, u32), _counter(xp)
    _launch(xp, "rans", "rans_tokens", _blocks(xp, n), indices, u64(n), _status(xp, n), end, tokens, lows)
    coded = rans_encode(tokens)
    return xp.concatenate([coded, lows.view(np.uint8)[: (_number(end) + 7) // 8]])


def rans_indices_decode(section: Array, numel: int, count: int) -> Array:
    """The indices of ``rans_indices_encode``. Waits for the device."""
    xp = module_of(section)
    gaps, indices, end = xp.empty(count, u32), xp.empty(count, u32), _counter(xp)
    if count == 0:
        check(-3 if section.size else 0)
        return indices
    tokens, used, unread = _rans_decode(xp, section, count)
    error = xp.zeros(1, i32)
    _launch(xp, "rans", "rans_gaps", _blocks(xp, count), section, u64(section.size), u64(count), tokens, used, unread,
            _status(xp, count), end, gaps, error)  # fmt: skip
    _check(unread)
    _check(error)
    _launch(xp, "sketch", "keys_of_gaps", _blocks(xp, count),
            gaps, u64(count), u64(numel), _status(xp, count), end, indices, error)  # fmt: skip
    _check(error)
    return indices


def delta_encode(keys: Array) -> Array:
    """The section of sorted unique keys drawn in kernels/delta/delta.cpp. Waits for the device: the size is not known
    before."""
    xp, n, file = module_of(keys), keys.size, "codes"
    if n == 0:
        return xp.empty(0, np.uint8)
    out, plan, lengths = xp.zeros((5 * n + 163) // 4, u32), xp.zeros(20, u64), xp.zeros(33, u64)
    _launch(xp, file, "delta_count", _blocks(xp, n), keys, u64(n), lengths)
    _launch(xp, file, "delta_plan", 1, lengths, u64(n), plan, out)
    for part in ("delta_prefixes", "delta_deltas"):
        _launch(xp, file, part, _blocks(xp, n), keys, u64(n), plan, _status(xp, n), _counter(xp), out)
    return out.view(np.uint8)[: int(plan[2:3].get()[0]) // 8]


def delta_decode(section: Array, numel: int, count: int) -> Array:
    """The keys of ``delta_encode``, all below ``numel``. Waits for the device."""
    xp, file, size = module_of(section), "codes", section.size
    if size * 4 < count:  # a key takes two bits or more
        check(-1)
    keys, error = xp.empty(count, u32), xp.zeros(1, i32)
    if count == 0:
        check(-3 if size else 0)
        return keys
    table, read, at, end = xp.zeros(4096, np.uint16), xp.zeros(3, u64), _counter(xp), _counter(xp)
    chunks = _chunks(section)
    exits, bits, deltas = xp.zeros(chunks * 12, u64), xp.empty(count, np.uint8), xp.zeros(count, u32)
    _launch(xp, file, "delta_read", 1, section, u64(size), table, read, error)
    _launch(xp, file, "delta_walk", _blocks(xp, exits.size), section, u64(size), read, table, u64(chunks), exits)
    starts, _ = _join(xp, exits, 12, chunks)
    _launch(xp, file, "delta_lengths", _blocks(xp, chunks), section, u64(size), read, table, u64(chunks), starts,
            u64(count), bits, at)  # fmt: skip
    _launch(xp, file, "delta_values", _blocks(xp, count), section, u64(size), bits, at, u64(count),
            _status(xp, count), end, deltas, error)  # fmt: skip
    _launch(xp, file, "delta_keys", _blocks(xp, count), deltas, u64(count), u64(numel), _status(xp, count), end, keys,
            error)  # fmt: skip
    _check(error)
    return keys


# ---- Grouped sketches, out of the operations above. Every group is coded by itself: hundreds of small launches, and a
# wait for each size. Jiang et al. hold the sketch unfit for GPUs (SKCompress, section 7); it is here so that no copy of
# the dense gradient is needed.

SKETCH = struct.Struct("<BxxxIIIHH")  # joint/minmax_sketch.py: rows, columns in 65536ths, buckets, negative, groups


def _sketch_firsts(header: bytes) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The first bucket of each group, and the number of buckets."""
    _, _, buckets, negative, below, above = SKETCH.unpack(header)
    firsts = [group * negative // below for group in range(below)]
    firsts += [negative + group * (buckets - negative) // above for group in range(above)]
    return np.array([*firsts, buckets], u32)


def _sketch_columns(header: bytes, count: int) -> int:
    return min(max(count * SKETCH.unpack(header)[1] // 65536, 1), 2**32 - 1)


def sketch_encode(
    header: bytes, means: Array, indices: Array, codes: Array, coded: bool, seed: int, parameter: int, step: int
) -> Array:
    """The section drawn in joint/minmax_sketch.py, of one element or more; ``coded`` as SKCompress has it. Waits for
    the device, for each group."""
    xp, firsts, rows = module_of(indices), _sketch_firsts(header), header[0]
    widths = np.diff(firsts)
    group_of = np.repeat(np.arange(widths.size, dtype=u32), widths)
    counts, keys, numbers = sketch_group(indices, codes, xp.asarray(group_of), xp.asarray(firsts[:-1].copy()))
    sizes, parts, begin = np.zeros((widths.size, 3), u32), [], 0
    for group, count in enumerate(counts.get().tolist()):
        if not count:
            continue
        own, width, end = keys[begin : begin + count], int(widths[group]), begin + count
        bins = sketch_insert(
            own, numbers[begin:end], rows, _sketch_columns(header, count), width, seed, parameter, step
        )
        of_keys = delta_encode(own) if coded else flagged_encode(own)
        of_bins = huffman_encode(bins) if coded else pack(bins, (width - 1).bit_length())
        if max(of_keys.size, of_bins.size) >> 32:
            raise ValueError(f"a group of {count} elements takes 2^32 bytes or more: use more groups")
        sizes[group] = count, of_keys.size, of_bins.size
        parts += [of_keys, of_bins]
        begin = end
    tables = joined(header, means, xp.asarray(sizes.reshape(-1)))
    return _known(xp.concatenate([tables, *parts]), header)


def sketch_decode(
    section: Array, numel: int, count: int, coded: bool, seed: int, parameter: int, step: int
) -> tuple[Array, Array]:
    """Sorted keys and their values out of a section with a checked header, whose tables lie within it. Waits for the
    device, for each group."""
    xp = module_of(section)
    header = head(section, SKETCH.size)
    rows, _, buckets, negative, below, above = SKETCH.unpack(header)
    tables = SKETCH.size + 4 * buckets
    at = tables + 12 * (below + above)
    on_host = section[SKETCH.size : at].get()
    means, sizes = on_host[: 4 * buckets].view(f32), on_host[4 * buckets :].view(u32).reshape(-1, 3).astype(np.int64)
    magnitudes = np.where(np.arange(buckets) < negative, -means, means)
    falls = magnitudes[1:] < magnitudes[:-1]
    falls[negative - 1 : negative] = False
    if not np.isfinite(means).all() or falls.any() or (magnitudes < 0).any() or (magnitudes[:negative] == 0).any():
        check(-4)
    if sizes[:, 0].sum() != count or at + sizes[:, 1:].sum() != section.size:
        check(-5)
    firsts, on_device = _sketch_firsts(header).tolist(), xp.asarray(means.copy())
    keys, values = [], []
    for group, (of_group, key_bytes, bin_bytes) in enumerate(sizes.tolist()):
        if of_group == 0:
            check(-5 if key_bytes or bin_bytes else 0)
            continue
        low, high = firsts[group], firsts[group + 1]
        columns, bins_at = _sketch_columns(header, of_group), at + key_bytes
        of_keys, of_bins = section[at:bins_at], section[bins_at : bins_at + bin_bytes]
        own = delta_decode(of_keys, numel, of_group) if coded else flagged_decode(of_keys, numel, of_group)
        bins = (huffman_decode(of_bins, rows * columns) if coded
                else unpack(of_bins, rows * columns, (high - low - 1).bit_length(), np.uint8))  # fmt: skip
        keys.append(own)
        values.append(sketch_query(own, bins, on_device[low:high], rows, columns, seed, parameter, step))
        at = bins_at + bin_bytes
    return sketch_merge(xp.concatenate(keys), xp.concatenate(values), numel)
