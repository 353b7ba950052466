"""QSGD: values as codes of a bucket's norm, stochastically rounded (codecs/value/qsgd.py).

A bucket is a run of ``bucket_size`` consecutive values with one norm. A value's code is s + sign * level, 0 .. 2 s,
with s = ``levels`` levels of each sign. The random numbers depend on (seed, parameter, step, rank) and the value's
place.
"""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import groups, sections
from hvd_deepreduce.ops.bits import pack, packed_bytes, unpack
from hvd_deepreduce.ops.deferred import decode_values, generic_kernel
from hvd_deepreduce.ops.device import THREADS, allocate, array_module, for_each, key_words
from hvd_deepreduce.ops.dispatch import generic, operation
from hvd_deepreduce.ops.groups import bucket_count, capped
from hvd_deepreduce.ops.library import check, check_size, kernel
from hvd_deepreduce.ops.types import F32, U8, Device, f32, u32, u64

levels_of = kernel("qsgd_levels", "u", "u")
"""s, the number of levels of each sign for codes of so many bits, 2 to 8: 2^(bits - 1) - 1."""
_FILE = "qsgd/qsgd"
_qsgd_quantize = generic_kernel(_FILE, "qsgd_quantize", "v", "pUUuuuuupp", 4 * THREADS)
_qsgd_fit_norms = generic_kernel(_FILE, "qsgd_fit_norms", "v", "ppUUupp", 8)
_qsgd_dequantize = generic_kernel(_FILE, "qsgd_dequantize", "I", "ppUUup")


def _one_launch(bucket_size: int) -> bool:
    """Whether a warp can quantize a bucket right after it has found its largest magnitude: its lanes take four values
    at a time, and larger buckets leave too few warps."""
    return bucket_size % 4 == 0 and bucket_size <= 8192


@generic
def quantize(
    values: F32, norms: F32, bucket_size: int, levels: int, seed: int, parameter: int, step: int, rank: int
) -> U8:
    """The codes of values. A value beyond its bucket's norm gets the largest level of its sign.

    Args:
        values: float32 ``[n]``, finite.
        norms: float32, one for each bucket.
        levels: 1 to 127.

    Returns:
        uint8 ``[n]``.
    """
    n = values.size
    codes = allocate(values, n, np.uint8)
    _qsgd_quantize(n, values, n, capped(bucket_size, n), levels, seed, parameter, step, rank, norms, codes)
    return codes


@operation()
def norms_and_codes(
    values: F32, bucket_size: int, levels: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> tuple[F32, U8]:
    """The norms of the buckets (``groups.norms``) and the codes of the values (``quantize``)."""
    norms = groups.norms.host(values, bucket_size, l2)
    return norms, quantize(values, norms, bucket_size, levels, seed, parameter, step, rank)


@norms_and_codes.cuda
def _(
    values: Device, bucket_size: int, levels: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> tuple[Device, Device]:
    xp, n, key = array_module(values), values.size, (seed, parameter, step, rank)
    if l2 or not n or not _one_launch(bucket_size):
        norms = groups.norms(values, bucket_size, l2)
        return norms, quantize(values, norms, bucket_size, levels, *key)
    norms, codes = xp.empty(bucket_count(n, bucket_size), f32), xp.empty(n, np.uint8)
    for_each(
        xp, _FILE, "qsgd_norms_and_codes", norms.size, values, n, bucket_size, u32(levels), *key_words(*key),
        norms, codes, tile=8,
    )  # fmt: skip
    return norms, codes


@generic
def fit_norms(values: F32, codes: U8, norms: F32, bucket_size: int, levels: int) -> F32:
    """For each bucket, the norm with which the decoded codes have the least squared distance to the values.

    The distance is then at most the l2 norm of the values, whatever the codes are.

    Args:
        values: float32 ``[n]``, finite.
        codes: uint8 ``[n]``, of ``quantize``.
        norms: float32, one for each bucket; kept where all codes stand for 0.
        levels: of ``quantize``.
    """
    n = values.size
    fitted = allocate(values, norms.size, np.float32)
    _qsgd_fit_norms(norms.size, values, codes, n, capped(bucket_size, n), levels, norms, fitted)
    return fitted


@generic
def dequantize(norms: F32, codes: U8, bucket_size: int, levels: int) -> F32:
    """The values of codes: float32 ``[n]``.

    On a GPU, the host waits for the check of the codes, unless checks are deferred.

    Args:
        norms: float32, one for each bucket.
        codes: uint8 ``[n]``.

    Raises:
        ValueError: a code is above 2 * levels, a norm is negative or not finite, or ``levels`` is not 1 to 127.
    """
    if not 0 < levels < 128 or bucket_size == 0:
        check(-3)
    n = codes.size
    values = allocate(codes, n, np.float32)
    _qsgd_dequantize(n, codes, norms, n, capped(bucket_size, n), levels, values)
    return values


@operation(1)
def encode_section(
    header: bytes, values: F32, bucket_size: int, bits: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> U8:
    """A section without an entropy coder: ``| header | norms float32 | codes, bits bits each |``.

    Args:
        header: up to 64 bytes.
        values: float32, finite.
        bits: of a code, 2 to 8.
        l2: as in ``groups.norms``.
    """
    norms, codes = norms_and_codes.host(values, bucket_size, levels_of(bits), l2, seed, parameter, step, rank)
    return sections.join.host(header, norms, pack.host(codes, bits))


@encode_section.cuda
def _(
    header: bytes, values: Device, bucket_size: int, bits: int, l2: bool, seed: int, parameter: int, step: int,
    rank: int,
) -> Device:  # fmt: skip
    xp, n, key = array_module(values), values.size, (seed, parameter, step, rank)
    if l2 or not n or not _one_launch(bucket_size) or bucket_size * bits % 32 or len(header) != 8:
        norms, codes = norms_and_codes(values, bucket_size, levels_of(bits), l2, *key)
        return sections.join(header, norms, pack(codes, bits))
    buckets = bucket_count(n, bucket_size)
    words = xp.empty(2 + buckets + (n * bits + 31) // 32, u32)
    for_each(
        xp, _FILE, "qsgd_encode_section", buckets, values, n, bucket_size, u32(bits), *key_words(*key),
        np.frombuffer(header, u64)[0], words, tile=8,
    )  # fmt: skip
    return sections.remember_start(words.view(np.uint8)[: 8 + 4 * buckets + packed_bytes(n, bits)], header)


@operation()
def decode_section(norms: F32, packed: U8, count: int, bucket_size: int, bits: int) -> F32:
    """The ``count`` values of ``encode_section``, from its norms and its packed codes.

    On a GPU, the host waits for the check of the codes, unless checks are deferred.

    Raises:
        ValueError: the codes do not take ``packed.size`` bytes, or as in ``dequantize``.
    """
    return dequantize(norms, unpack.host(packed, count, bits, np.uint8), bucket_size, levels_of(bits))


@decode_section.cuda
def _(norms: Device, packed: Device, count: int, bucket_size: int, bits: int) -> Device:
    check_size(packed, packed_bytes(count, bits))  # before an array of that size is allocated
    arguments = packed, u64(packed.size), norms, u64(count), u64(capped(bucket_size, count)), u32(bits)
    return decode_values(_FILE, "qsgd_decode_section", packed, count, *arguments)
