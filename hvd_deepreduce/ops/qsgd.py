"""TODO qsgd."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import sections
from hvd_deepreduce.ops.bits import pack, unpack
from hvd_deepreduce.ops.deferred import decode_values
from hvd_deepreduce.ops.device import THREADS, array_module, f32, grid, key_words, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, check_size, kernel
from hvd_deepreduce.ops.types import F32, U8, Device

_qsgd_norms = kernel("qsgd_norms", "v", "pUUip")
_qsgd_codes = kernel("qsgd_codes", "v", "pUUuuuuupp")
_qsgd_decode = kernel("qsgd_decode", "I", "ppUUup")


@operation()
def bucket_norms(values: F32, bucket: int, l2: bool) -> F32:
    """The largest magnitude, or the l2 norm, of each bucket."""
    norms = np.empty(-(-values.size // bucket), np.float32)
    _qsgd_norms(address(values), values.size, bucket, l2, address(norms))
    return norms


@bucket_norms.cuda
def _(values: Device, bucket: int, l2: bool) -> Device:
    xp, n = array_module(values), values.size
    bucket = min(bucket, max(n, 1))
    buckets = -(-n // bucket)
    norms = xp.zeros(buckets, f32)
    if l2 and n:
        launch(xp, "quantize/quantize", "l2_norms", grid(xp, buckets, 8), values, u64(n), u64(bucket), norms)
    elif n:
        chunks = buckets * -(-bucket // (16 * THREADS))
        launch(xp, "quantize/quantize", "max_norms", grid(xp, chunks, 1), values, u64(n), u64(bucket), norms.view(u32))
    return norms


@operation()
def quantize(values: F32, norms: F32, bucket: int, levels: int, seed: int, parameter: int, step: int, rank: int) -> U8:
    """Codes 0 .. 2 * levels, rounded with the random numbers of (seed, parameter, step, rank)."""
    codes = np.empty(values.size, np.uint8)
    _qsgd_codes(
        address(values), values.size, bucket, levels, seed, parameter, step, rank, address(norms), address(codes)
    )
    return codes


@quantize.cuda
def _(
    values: Device, norms: Device, bucket: int, levels: int, seed: int, parameter: int, step: int, rank: int
) -> Device:
    xp, n = array_module(values), values.size
    codes = xp.empty(n, np.uint8)
    if n:
        launch(
            xp, "quantize/quantize", "qsgd_codes", grid(xp, n, 4 * THREADS), values, u64(n), u64(min(bucket, n)),
            u32(levels), *key_words(seed, parameter, step, rank), norms, codes,
        )  # fmt: skip
    return codes


@operation()
def norms_and_codes(
    values: F32, bucket: int, levels: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> tuple[F32, U8]:
    """``bucket_norms`` and their ``quantize``."""
    norms = bucket_norms.host(values, bucket, l2)
    return norms, quantize.host(values, norms, bucket, levels, seed, parameter, step, rank)


@norms_and_codes.cuda
def _(
    values: Device, bucket: int, levels: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> tuple[Device, Device]:
    key = (seed, parameter, step, rank)
    if l2 or bucket % 4 or bucket > 8192 or not values.size:
        norms = bucket_norms(values, bucket, l2)
        return norms, quantize(values, norms, bucket, levels, *key)
    xp, n = array_module(values), values.size
    norms, codes = xp.empty(-(-n // bucket), f32), xp.empty(n, np.uint8)
    launch(
        xp, "quantize/quantize", "qsgd_encode", grid(xp, norms.size, 8), values, u64(n), u64(bucket), u32(levels),
        *key_words(*key), norms, codes,
    )  # fmt: skip
    return norms, codes


@operation()
def dequantize(norms: F32, codes: U8, bucket: int, levels: int) -> F32:
    """The values of ``norms_and_codes``.

    On a GPU: waits for the device.
    """
    values = np.empty(codes.size, np.float32)
    check(_qsgd_decode(address(codes), address(norms), codes.size, bucket, levels, address(values)))
    return values


@dequantize.cuda
def _(norms: Device, codes: Device, bucket: int, levels: int) -> Device:
    n = codes.size
    if not 0 < levels < 128 or bucket == 0:
        check(-3)
    bucket = min(bucket, max(n, 1))
    return decode_values("quantize/quantize", "qsgd_decode", codes, n, codes, norms, u64(n), u64(bucket), u32(levels))


@operation(1)
def encode_section(
    header: bytes, values: F32, bucket: int, bits: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> U8:
    """``| header | norms | codes of bits bits each |``."""
    levels = 2 ** (bits - 1) - 1
    norms, codes = norms_and_codes.host(values, bucket, levels, l2, seed, parameter, step, rank)
    return sections.join.host(header, norms, pack.host(codes, bits))


@encode_section.cuda
def _(
    header: bytes, values: Device, bucket: int, bits: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> Device:
    xp, n, key = array_module(values), values.size, (seed, parameter, step, rank)
    if l2 or bucket % 4 or bucket > 8192 or bucket * bits % 32 or len(header) != 8 or not n:
        norms, codes = norms_and_codes(values, bucket, 2 ** (bits - 1) - 1, l2, *key)
        return sections.join(header, norms, pack(codes, bits))
    buckets = -(-n // bucket)
    words = xp.empty(2 + buckets + (n * bits + 31) // 32, u32)
    launch(
        xp, "quantize/quantize", "qsgd_section", grid(xp, buckets, 8), values, u64(n), u64(bucket), u32(bits),
        *key_words(*key), np.frombuffer(header, u64)[0], words,
    )  # fmt: skip
    return sections.remember_start(words.view(np.uint8)[: 8 + 4 * buckets + (n * bits + 7) // 8], header)


@operation()
def decode_section(norms: F32, packed: U8, count: int, bucket: int, bits: int) -> F32:
    """The values of ``encode_section``.

    On a GPU: waits for the device.
    """
    return dequantize.host(norms, unpack.host(packed, count, bits, np.uint8), bucket, 2 ** (bits - 1) - 1)


@decode_section.cuda
def _(norms: Device, packed: Device, count: int, bucket: int, bits: int) -> Device:
    check_size(packed, (count * bits + 7) // 8)  # before an array of that size is allocated
    bucket = min(bucket, max(count, 1))
    arguments = packed, u64(packed.size), norms, u64(count), u64(bucket), u32(bits)
    return decode_values("quantize/quantize", "qsgd_open", packed, count, *arguments)
