"""Top-k and threshold selection, in one pass with the accumulation of the gradient; kernels/select/."""

from __future__ import annotations

from ctypes import byref, c_uint64

import numpy as np

from hvd_deepreduce.ops import arrays, deferred
from hvd_deepreduce.ops.deferred import counter, read_counter, residual_guard
from hvd_deepreduce.ops.device import NULL, THREADS, array_module, cleared, for_each, grid, launch, scan_status, suffix
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import NOT_FINITE, NonFiniteError, address, kernel, kernels_by_dtype
from hvd_deepreduce.ops.pieces import Pieces, table_of
from hvd_deepreduce.ops.types import F32, U32, Device, Floats, u32, u64

_topk = kernels_by_dtype("topk", "I", "ppUUppi")
_topk_into = kernel("topk_into", "I", "pPPPUUUippi")
_topk_of_chunks = kernels_by_dtype("topk_of_chunks", "I", "ppUUUUppi")
_threshold = kernels_by_dtype("threshold", "P", "ppUdi*")
_threshold_bits = kernels_by_dtype("threshold_bits", "U", "d")
_copy_selection = kernels_by_dtype("copy_selection", "v", "Ppp")

_BINS = 2048
"""Values of a digit of eleven bits, as in kernels/select/select.cu."""

_SAMPLES = 32 * THREADS
"""The most samples of top-k, as in kernels/select/select.cu."""

_LEAD = 3
"""The most elements between the 16 bytes in which an array begins, and its first element."""


def _tile(dense: Device) -> int:
    """Elements of a tile: four rows of vectors of 16 bytes, as in kernels/select/select.cu."""
    return 4 * THREADS * (16 // int(dense.itemsize))


@operation()
def topk(dense: Floats, gradient: Floats | None, k: int, threads: int = 1) -> tuple[U32, Floats]:
    """Adds the gradient to ``dense`` in place, as ``arrays.add``, and selects the k elements of largest magnitude.

    Of elements of equal magnitude, those of lower index are selected. Zeros are not: if there are fewer than k other
    elements, these are selected.

    On a GPU, the host waits for the device to learn whether there are fewer. Within ``deferred.encoding`` it does not,
    unless that is ``exact``: the first zeros fill up to k elements, and the next wait after the selection raises
    ``FewerNonzerosError``.

    Args:
        dense: ``[numel]``, finite. On a GPU, numel is below 2^31.
        gradient: ``[numel]`` of the same dtype, or ``None``.
        k: at most numel.
        threads: of the host.

    Returns:
        indices: uint32 ``[min(k, nonzero elements)]``, sorted.
        values: ``dense[indices]``.

    Raises:
        MemoryError: the host has too little memory for the candidates. A part of the gradient may have been added.
        ValueError: the array is on a GPU and has 2^31 elements or more.
    """
    indices, values = np.empty(k, np.uint32), np.empty(k, dense.dtype)
    count = _topk[dense.dtype](dense, gradient, dense.size, k, indices, values, threads)
    if count < 0:
        raise MemoryError(f"not enough memory for the candidates of top-k of {dense.size} elements")
    return indices[:count], values[:count]


@topk.cuda
def _(dense: Device, gradient: Device | None, k: int, threads: int = 1) -> tuple[Device, Device]:
    xp, n, ending, file = array_module(dense), dense.size, suffix(dense.dtype), "select/select"
    if n >= 2**31:
        raise ValueError(f"a tensor has {n} elements, and top-k on a GPU takes fewer than 2^31: split the tensor")
    indices, values = xp.empty(k, u32), xp.empty(k, dense.dtype)
    if k == 0:
        if gradient is not None:
            arrays.add(dense, gradient)
        return indices, values
    room = min(n, 2 * k + n // 256 + 65536)
    candidates, candidate_values = xp.empty(room, u32), xp.empty(room, dense.dtype)
    passes = 3 if dense.itemsize == 4 else 6
    tile = _tile(dense)
    # One array of zeros, for one launch: | state [2] | counts u32 [passes, 2048] | status of collect | status of take |
    count_words = passes * _BINS // 2
    collect_tiles, take_tiles = -(-(n + _LEAD) // tile) + 1, -(-n // (4 * THREADS)) + 1
    scratch = cleared(xp, 2 + count_words + collect_tiles + take_tiles, u64)
    state, counts = scratch[:2], scratch[2 : 2 + count_words].view(u32)
    collect_status, take_status = scratch[2 + count_words : -take_tiles], scratch[-take_tiles:]
    encoding = deferred.state.encoding
    # If nothing has checked yet that the gradient is finite, more blocks of the sampling kernel do.
    samplers = max(1, -(-min(n // 8, _SAMPLES) // THREADS))
    blocks, bad = samplers, NULL
    if encoding and not encoding.checked and gradient is not None and gradient.size == encoding.gradient.size:
        blocks, bad = samplers + grid(xp, n, 4 * THREADS), encoding.check_finite(fused=True)
    launch(
        xp, file, f"topk_sample_{ending}", blocks, dense, gradient, n, k, u32(samplers), candidates, state, bad
    )  # fmt: skip
    for_each(
        xp, file, f"topk_collect_{ending}", n, dense, gradient, n, residual_guard(), state, collect_status, candidates,
        candidate_values, room, tile=tile,
    )  # fmt: skip
    for number in range(passes):
        for_each(
            xp, file, f"topk_count_{ending}", room, dense, n, k, candidates, candidate_values, room, state, u32(number),
            counts, tile=4 * THREADS,
        )  # fmt: skip
    zeros = counter(xp) if encoding is None or encoding.exact else encoding.zeros
    for_each(
        xp, file, f"topk_take_{ending}", room, dense, n, k, candidates, candidate_values, room, state, counts,
        u32(passes), take_status, indices, values, zeros, tile=4 * THREADS,
    )  # fmt: skip
    if encoding is not None and not encoding.exact:
        encoding.assumed = True
    elif read_counter(zeros):
        return threshold(dense, None, 0.0)
    return indices, values


@operation()
def topk_of_chunks(
    dense: Floats, gradient: Floats | None, chunk: int, k: int, last: int, threads: int = 1
) -> tuple[U32, Floats]:
    """As ``topk``, of each chunk of consecutive elements by itself.

    Args:
        dense, gradient: as in ``topk``; any number of elements.
        chunk: elements of a chunk, at least 1; on a GPU, below 2^31. The last chunk ends with the tensor.
        k: at most ``chunk`` and at least 1, of each chunk but the last.
        last: of the last chunk, at most its size and at least 1.
        threads: of the host.

    Returns, Raises:
        As ``topk``.
    """
    most = _most_of_chunks(dense.size, chunk, k, last)
    indices, values = np.empty(most, np.uint32), np.empty(most, dense.dtype)
    if dense.size == 0:
        return indices, values
    count = _topk_of_chunks[dense.dtype](
        dense, gradient, dense.size, min(chunk, dense.size), k, last, indices,
        values, threads,
    )  # fmt: skip
    if count < 0:
        raise MemoryError(f"not enough memory for the candidates of top-k of chunks of {chunk} elements")
    return indices[:count], values[:count]


@topk_of_chunks.cuda
def _(
    dense: Device, gradient: Device | None, chunk: int, k: int, last: int, threads: int = 1
) -> tuple[Device, Device]:
    xp, n, encoding = array_module(dense), dense.size, deferred.state.encoding
    most = _most_of_chunks(n, chunk, k, last)
    indices, values = xp.empty(most, u32), xp.empty(most, dense.dtype)
    if n == 0:
        return indices, values
    if min(chunk, n) >= 2**31:
        raise ValueError(f"a chunk has {min(chunk, n)} elements, and on a GPU one takes fewer than 2^31: lower chunk")
    zeros = counter(xp) if encoding is None or encoding.exact else encoding.zeros
    for_each(
        xp, "select/select", f"topk_of_chunks_{suffix(dense.dtype)}", n, dense, gradient, n, residual_guard(), chunk, k,
        last, indices, values, zeros, tile=chunk,
    )  # fmt: skip
    if encoding is not None and not encoding.exact:
        encoding.assumed = True
    elif read_counter(zeros):
        places, values = threshold(values, None, 0.0)
        indices = arrays.gather(indices, places)
    return indices, values


def topk_into(
    dense: F32, gradient: F32 | Pieces, into: F32, k: int, finite: bool, threads: int = 1
) -> tuple[U32, F32]:
    """As ``topk``, on the host, but ``dense + gradient`` is written elsewhere, and checked in the same pass.

    Args:
        dense: float32 ``[numel]``, finite; it does not change.
        gradient: as large; it does not change.
        into: float32 ``[numel]``, memory apart from both.
        finite: whether the gradient is known to be finite.

    Returns:
        indices, values: of ``into``, as for ``topk``.

    Raises:
        NonFiniteError: the gradient has NaN or infinity. ``into`` may have changed.
        MemoryError: as ``topk``.
    """
    indices, values, table = np.empty(k, np.uint32), np.empty(k, np.float32), table_of(gradient)
    where, pieces = address(table), table.shape[1]
    count = _topk_into(
        dense, address(into), where, where + 8 * pieces, pieces, dense.size, k, finite, indices, values, threads
    )
    if count == NOT_FINITE:
        raise NonFiniteError
    if count < 0:
        raise MemoryError(f"not enough memory for the candidates of top-k of {dense.size} elements")
    return indices[:count], values[:count]


def _most_of_chunks(numel: int, chunk: int, k: int, last: int) -> int:
    """How many elements of all chunks are selected if there are enough that are not zero."""
    return (-(-numel // chunk) - 1) * k + last if numel else 0


@operation()
def threshold(dense: Floats, gradient: Floats | None, least: float, threads: int = 1) -> tuple[U32, Floats]:
    """Adds the gradient to ``dense`` in place, as ``arrays.add``, and selects all elements with ``|x| >= least`` but
    zeros.

    On a GPU, the host waits for the device to learn how many there are.

    Args:
        dense: ``[numel]``, finite.
        gradient: ``[numel]`` of the same dtype, or ``None``.
        least: the magnitude, at least 0.
        threads: of the host.

    Returns:
        indices: uint32, sorted.
        values: ``dense[indices]``.

    Raises:
        MemoryError: the host has too little memory for the result. A part of the gradient may have been added.
    """
    count = c_uint64()
    selection = _threshold[dense.dtype](dense, gradient, dense.size, least, threads, byref(count))
    if not selection:
        raise MemoryError(f"not enough memory for the elements of {dense.size} that reach the threshold {least}")
    indices, values = np.empty(count.value, np.uint32), np.empty(count.value, dense.dtype)
    _copy_selection[dense.dtype](selection, indices, values)
    return indices, values


@threshold.cuda
def _(dense: Device, gradient: Device | None, least: float, threads: int = 1) -> tuple[Device, Device]:
    xp, n, tile = array_module(dense), dense.size, _tile(dense)
    bits = u64(_threshold_bits[np.dtype(dense.dtype)](least))
    room = min(n, n // 16 + 65536)
    while True:
        indices, values, count = xp.empty(room, u32), xp.empty(room, dense.dtype), counter(xp)
        for_each(
            xp, "select/select", f"threshold_{suffix(dense.dtype)}", n, dense, gradient, n, residual_guard(), bits,
            scan_status(xp, n + _LEAD, tile), indices, values, room, count, tile=tile,
        )  # fmt: skip
        selected = read_counter(count)
        if selected <= room:
            return indices[:selected], values[:selected]
        room, gradient = selected, None  # the gradient has been added


def topk_of(indices: U32, values: Floats, k: int, threads: int = 1) -> tuple[U32, Floats]:
    """``topk`` of the values of a sparse vector, and their indices; ``k`` may exceed their number."""
    places, selected = topk(values, None, min(k, values.size), threads)
    return arrays.gather(indices, places), selected


def threshold_of(indices: U32, values: Floats, least: float, threads: int = 1) -> tuple[U32, Floats]:
    """``threshold`` of the values of a sparse vector, and their indices."""
    places, selected = threshold(values, None, least, threads)
    return arrays.gather(indices, places), selected
