"""The CUDA operations: the functions of ``backend.cpu`` on arrays in a GPU's memory, with the same bytes out.

The kernels are ``kernels/*.cu``, compiled by CuPy when first used, once for each device, and kept in CuPy's cache on
disk. They run on the current stream. Nothing waits for the device but where a size or a decoder's verdict must reach
the host: an operation says so in its docstring.

Arrays are CuPy's, contiguous and one-dimensional. An array of another type brings the module that stands in CuPy's
place as its ``array_module`` (the emulator of the tests). ``threads`` is there for the sake of ``backend.cpu``.

On the host only: ``backend.cpu``'s ``bloom_conflict_sets`` (policy P2 draws one index after the other) and
``index_sizes`` (it looks at a few thousand indices), and the byte compressors deflate and zstd.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hvd_deepreduce.backend.cpu import check

Array = Any  # cupy.ndarray, or the emulator's

KERNELS = Path(__file__).parent.parent / "kernels"
THREADS = 256  # of a block, as in kernels/device.cuh
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

    return text_of(file)


_modules: dict[tuple[int, int, str], Any] = {}
_functions: dict[tuple[int, int, str, str], Any] = {}
_processors: dict[tuple[int, int], int] = {}


def _device(xp: Any) -> int:
    return xp.cuda.runtime.getDevice() if hasattr(xp, "cuda") else 0


def _launch(xp: Any, file: str, kernel: str, blocks: int, *arguments: Any) -> None:
    device = _device(xp)
    function = _functions.get((id(xp), device, file, kernel))
    if function is None:
        module = _modules.get((id(xp), device, file))
        if module is None:
            module = _modules[id(xp), device, file] = xp.RawModule(code=source(f"{file}.cu"), options=OPTIONS)
        function = _functions[id(xp), device, file, kernel] = module.get_function(kernel)
    function((max(1, blocks),), (THREADS,), arguments)


def _blocks(xp: Any, items: int, each: int = THREADS) -> int:
    """Blocks for a kernel that walks over its work: ``each`` items a block, as many blocks as run at once."""
    device = _device(xp)
    if (id(xp), device) not in _processors:
        own = getattr(xp, "processors", None)
        _processors[id(xp), device] = own or 8 * xp.cuda.Device(device).attributes["MultiProcessorCount"]
    return min(-(-items // each), _processors[id(xp), device])


def _status(xp: Any, items: int, each: int = THREADS) -> Array:
    """The words of a scan over tiles of ``each`` items; see kernels/device.cuh."""
    return xp.zeros(-(-items // each) + 1, u64)


def _check(error: Array) -> None:
    """``ValueError`` where a kernel found a section broken; waits for the device."""
    check(int(error.get()[0]))


def _suffix(dtype: Any) -> str:
    return {4: "f32", 8: "f64"}[np.dtype(dtype).itemsize]


def _or_null(array: Array | None) -> Any:
    return NULL if array is None else array


# ---- kernels/select.cu


def finite(x: Array, threads: int = 1) -> bool:
    """Whether no element of ``x`` (float32 or float64) is NaN or infinite. Waits for the device."""
    return not int(nonfinite(x).get()[0])


def nonfinite(x: Array) -> Array:
    """One uint32 on the device: 1 where an element of ``x`` is NaN or infinite, else 0."""
    xp = module_of(x)
    bad = xp.zeros(1, u32)
    if x.size:
        _launch(xp, "select", f"finite_{_suffix(x.dtype)}", _blocks(xp, x.size, 4 * THREADS), x, u64(x.size), bad)
    return bad


def add(dense: Array, gradient: Array, threads: int = 1) -> None:
    """``dense += gradient``."""
    if dense.size:
        xp = module_of(dense)
        blocks = _blocks(xp, dense.size, 4 * THREADS)
        _launch(xp, "select", f"add_{_suffix(dense.dtype)}", blocks, dense, gradient, u64(dense.size))


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
    source = _or_null(gradient)
    _launch(xp, "select", f"topk_sample_{suffix}", 1, dense, source, u64(n), u64(k), state)
    _launch(xp, "select", f"topk_collect_{suffix}", _blocks(xp, n, tile),
            dense, source, u64(n), state, collect_status, candidates, found, u64(room))  # fmt: skip
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
    limit = dense.dtype.type(least)
    if float(limit) < least:
        limit = np.nextafter(limit, dense.dtype.type(np.inf))
    bits = max(1, int(np.abs(limit).view(u32 if dense.itemsize == 4 else u64)))
    tile = 16 * THREADS if dense.itemsize == 4 else 8 * THREADS
    room = min(n, n // 16 + 65536)
    while True:
        indices, values, count = xp.empty(room, u32), xp.empty(room, dense.dtype), xp.zeros(1, u64)
        if n:
            _launch(xp, "select", f"threshold_{suffix}", _blocks(xp, n, tile), dense, _or_null(gradient), u64(n),
                    u64(bits), _status(xp, n, tile), indices, values, u64(room), count)  # fmt: skip
        kept = int(count.get()[0])
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


def settle(dense: Array, indices: Array, values: Array) -> None:
    """``dense[indices] -= values``."""
    if indices.size:
        xp, values = module_of(dense), values.astype(dense.dtype, copy=False)
        kernel = f"settle_{_suffix(dense.dtype)}"
        _launch(xp, "select", kernel, _blocks(xp, indices.size), dense, indices, u64(indices.size), values)


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
                dense, _or_null(gradient), u64(dense.size), u64(block), u32(l2), norms)  # fmt: skip
    return norms


def checksum(data: Array) -> int:
    """The checksum of a container (whole 32-bit words), its own place left out. Waits for the device."""
    xp = module_of(data)
    total = xp.zeros(1, u32)
    words = data.view(u32)
    _launch(xp, "select", "checksum", _blocks(xp, words.size, 4 * THREADS), words, u64(words.size), total)
    return int(total.get()[0])


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


# ---- kernels/bits.cu


def _ones(xp: Any, bits: Array, places: Array) -> Array:
    """Writes the places of the first ones of a bit string; how many there are in all, on the device."""
    found = xp.zeros(1, u64)
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
    """The first ``count`` fields of ``pack``."""
    xp = module_of(section)
    if section.size < (count * width + 7) // 8:  # before an array of that size is allocated
        check(-1)
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
    if section.size < (numel + 7) // 8:
        check(-1)
    indices, error = xp.empty(count, u32), xp.zeros(1, i32)
    found = _ones(xp, section, indices)
    spare = section.size - numel // 8
    _launch(xp, "bits", "check_bitmap", _blocks(xp, max(1, spare)),
            section, u64(section.size), u64(numel), u64(count), found, error)  # fmt: skip
    _check(error)
    return indices
