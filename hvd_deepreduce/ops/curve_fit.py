"""Curves through sorted values: piecewise polynomials and two exponentials (value/fit_poly.py, value/fit_dexp.py).

The values are sorted from the largest down, as ``sort.by_value`` returns them. kernels/curve_fit/fit_poly.h and
fit_dexp.h draw the sections.
"""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import check_later, counter, generic_kernel, read_counter
from hvd_deepreduce.ops.device import THREADS, allocate, array_module, cleared, for_each, grid, launch
from hvd_deepreduce.ops.dispatch import generic, operation
from hvd_deepreduce.ops.library import check, kernel
from hvd_deepreduce.ops.types import F32, U8, Device, f32, f64, i32, u32, u64

_POLY, _DEXP = "curve_fit/fit_poly", "curve_fit/fit_dexp"
_SIDE_PLAN_WORDS = 2 + 2 * 1025
"""The size of SidePlan in kernels/curve_fit/fit_poly.cu, in words of 4 bytes."""
_ROUNDS, _LONG = 7, 8192
"""The most splits that the whole device looks for, and the least values that are worth it."""
_fit_poly_bound = kernel("fit_poly_bound", "U", "Uuu")
_fit_poly_scratch = kernel("fit_poly_scratch", "U", "U")
_fit_poly_encode = kernel("fit_poly_encode", "U", "pUuup")
_fit_poly_decode = kernel("fit_poly_decode", "I", "pUUp")
_fit_dexp_bound = kernel("fit_dexp_bound", "U", "")
_fit_dexp_scratch = kernel("fit_dexp_scratch", "U", "U")
_fit_dexp_encode = kernel("fit_dexp_encode", "U", "pUp")
_fit_dexp_decode = generic_kernel(_DEXP, "fit_dexp_decode", "I", "pUUp")


@operation()
def fit_poly_encode(ordered: F32, degree: int, segments: int | None) -> U8:
    """The section of piecewise polynomials through sorted values.

    On a GPU, the host waits for the device to learn the size of the section.

    Args:
        ordered: float32 ``[n]``, finite, sorted from the largest down.
        degree: of the polynomials, 0 to 15.
        segments: the most of a sign, 1 to 1024; ``None`` for the heuristic of lemma 1.
    """
    section = np.empty(4 * _fit_poly_bound(ordered.size, degree, segments or 0), np.uint8)
    words = _fit_poly_encode(ordered, ordered.size, degree, segments or 0, section)
    return section[: 4 * words]


@fit_poly_encode.cuda
def _(ordered: Device, degree: int, segments: int | None) -> Device:
    xp, n = array_module(ordered), ordered.size
    section, words = xp.empty(_fit_poly_bound(n, degree, segments or 0), u32), counter(xp)
    partial, plans = xp.empty(_fit_poly_scratch(n), f64), xp.empty(2 * _SIDE_PLAN_WORDS, u32)
    # The first splits, of the longest segments, are worth a launch of many blocks each. The heuristic seldom wants more
    # than one.
    rounds = min((segments or 2) - 1, _ROUNDS) if n >= _LONG else 0
    blocks = min(grid(xp, n, 8 * THREADS), THREADS)  # of each sign
    farthest = xp.empty(max(1, rounds) * 8 * blocks, u64)
    common = ordered, u64(n), u32(degree)
    for number in range(rounds):
        launch(xp, _POLY, "fit_poly_split", 2 * blocks, *common, u32(segments or 0), u32(number), farthest)
    launch(xp, _POLY, "fit_poly_plan", 2, *common, u32(segments or 0), farthest, u32(blocks), u32(rounds), plans)
    for_each(xp, _POLY, "fit_poly_project", n, *common, plans, partial, tile=THREADS // 8 * 256)
    for_each(xp, _POLY, "fit_poly_coefficients", section.size, *common, plans, partial, section, words)
    return section.view(np.uint8)[: 4 * read_counter(words)]


@operation()
def fit_poly_decode(section: U8, count: int) -> F32:
    """The ``count`` fitted values of ``fit_poly_encode``, float32.

    On a GPU, the host waits for the check of the section, unless checks are deferred.

    Raises:
        ValueError: the encoder cannot have written the section for ``count`` values.
    """
    values = np.empty(count, np.float32)
    check(_fit_poly_decode(section, section.size, count, values))
    return values


@fit_poly_decode.cuda
def _(section: Device, count: int) -> Device:
    xp = array_module(section)
    if section.size % 4 or section.size < 12:
        check(-1)
    values, error = xp.empty(count, f32), cleared(xp, 1, i32)
    # Two structs Side, and the coefficients of up to 1024 segments of each: see fit_poly_read.
    sides, coefficients = cleared(xp, 2 * 4, u32), xp.empty(2 * 1024, u32)
    size = u64(section.size)
    launch(xp, _POLY, "fit_poly_read", 1, section, size, count, sides, coefficients, error)
    launch(xp, _POLY, "fit_poly_decode", grid(xp, count), section, size, count, sides, coefficients, error, values)
    check_later(error)
    return values


@operation()
def fit_dexp_encode(ordered: F32) -> U8:
    """The section of two exponentials through sorted values, 8 to 56 bytes.

    On a GPU, the host waits for the device to learn the size of the section: a sign without values takes no bytes.

    Args:
        ordered: float32 ``[n]``, finite, sorted from the largest down.
    """
    section = np.empty(4 * _fit_dexp_bound(), np.uint8)
    words = _fit_dexp_encode(ordered, ordered.size, section)
    return section[: 4 * words]


@fit_dexp_encode.cuda
def _(ordered: Device) -> Device:
    xp, n = array_module(ordered), ordered.size
    section, words = xp.empty(_fit_dexp_bound(), u32), counter(xp)
    signs, memory = xp.empty(2, u64), xp.empty(_fit_dexp_scratch(n), f64)
    # A block takes eight of the curve's blocks of 256 values, of one sign.
    blocks = 2 * grid(xp, n, 8 * 256)
    launch(xp, _DEXP, "fit_dexp_sums", blocks, ordered, n, signs, memory, section)
    for name in ("fit_dexp_first", "fit_dexp_second", "fit_dexp_products", "fit_dexp_solve"):
        launch(xp, _DEXP, name, blocks, ordered, n, signs, memory)
    launch(xp, _DEXP, "fit_dexp_write", 1, ordered, n, signs, memory, section, words)
    return section.view(np.uint8)[: 4 * read_counter(words)]


@generic
def fit_dexp_decode(section: U8, count: int) -> F32:
    """The ``count`` fitted values of ``fit_dexp_encode``, float32.

    On a GPU, the host waits for the check of the section, unless checks are deferred.

    Raises:
        ValueError: the encoder cannot have written the section for ``count`` values.
    """
    if section.size < 8:
        check(-1)
    values = allocate(section, count, np.float32)
    _fit_dexp_decode(count, section, section.size, count, values)
    return values
