"""TODO curve_fit."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import array_module, f32, f64, grid, i32, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import F32, U8, Device

_fit_poly_encode = kernel("fit_poly_encode", "U", "pUuup")
_fit_poly_decode = kernel("fit_poly_decode", "I", "pUUp")
_fit_dexp_encode = kernel("fit_dexp_encode", "U", "pUp")
_fit_dexp_decode = kernel("fit_dexp_decode", "I", "pUUp")


@operation()
def fit_poly_encode(ordered: F32, degree: int, segments: int | None) -> U8:
    """The section drawn in kernels/curve_fit/fit_poly.cpp, of ``sort_values``' first result.

    On a GPU: waits for the device: the size is not known before.
    """
    most = min(segments or 1024, ordered.size // (degree + 1) + 1)
    section = np.empty(4 * (9 + 2 * (degree + 2) * most), np.uint8)
    words = _fit_poly_encode(address(ordered), ordered.size, degree, segments or 0, address(section))
    return section[: 4 * words]


@fit_poly_encode.cuda
def _(ordered: Device, degree: int, segments: int | None) -> Device:
    xp, n = array_module(ordered), ordered.size
    most = min(segments or 1024, n // (degree + 1) + 1)
    section, words = xp.empty(9 + 2 * (degree + 2) * most, u32), counter(xp)
    partial = xp.empty(16 * (n // 256 + 1026), f64)
    launch(
        xp, "curve_fit/fit", "fit_poly_encode", 1, ordered, u64(n), u32(degree), u32(segments or 0), partial, section,
        words,
    )  # fmt: skip
    return section.view(np.uint8)[: 4 * read_counter(words)]


@operation()
def fit_poly_decode(section: U8, count: int) -> F32:
    """The sorted values of ``fit_poly_encode``, as fitted.

    On a GPU: waits for the device.
    """
    values = np.empty(count, np.float32)
    check(_fit_poly_decode(address(section), section.size, count, address(values)))
    return values


@fit_poly_decode.cuda
def _(section: Device, count: int) -> Device:
    xp = array_module(section)
    if section.size % 4 or section.size < 12:
        check(-1)
    values, error = xp.empty(count, f32), xp.zeros(1, i32)
    sides, coefficients = xp.zeros(8, u32), xp.empty(2048, u32)
    launch(xp, "curve_fit/fit", "fit_poly_read", 1, section, u64(section.size), u64(count), sides, coefficients, error)
    launch(
        xp, "curve_fit/fit", "fit_poly_decode", grid(xp, count), section, u64(section.size), u64(count), sides,
        coefficients, error, values,
    )  # fmt: skip
    check_later(error)
    return values


@operation()
def fit_dexp_encode(ordered: F32) -> U8:
    """The section drawn in kernels/curve_fit/fit_dexp.cpp, of ``sort_values``' first result.

    On a GPU: waits for the device: a sign without values has no part in it.
    """
    section = np.empty(4 * 14, np.uint8)
    words = _fit_dexp_encode(address(ordered), ordered.size, address(section))
    return section[: 4 * words]


@fit_dexp_encode.cuda
def _(ordered: Device) -> Device:
    xp, n = array_module(ordered), ordered.size
    section, words = xp.empty(14, u32), counter(xp)
    room = xp.empty(2 * n + 14 * (n // 256 + 1), f64)
    launch(xp, "curve_fit/fit", "fit_dexp_encode", 1, ordered, u64(n), room, section, words)
    return section.view(np.uint8)[: 4 * read_counter(words)]


@operation()
def fit_dexp_decode(section: U8, count: int) -> F32:
    """The sorted values of ``fit_dexp_encode``, as fitted.

    On a GPU: waits for the device.
    """
    values = np.empty(count, np.float32)
    check(_fit_dexp_decode(address(section), section.size, count, address(values)))
    return values


@fit_dexp_decode.cuda
def _(section: Device, count: int) -> Device:
    xp = array_module(section)
    if section.size < 8:
        check(-1)
    values, error = xp.empty(count, f32), xp.zeros(1, i32)
    launch(
        xp, "curve_fit/fit", "fit_dexp_decode", grid(xp, count), section, u64(section.size), u64(count), values, error,
    )  # fmt: skip
    check_later(error)
    return values
