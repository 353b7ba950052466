"""DenseStream's blocks in an exchange: each operation does in one call what ``ops.densestream`` does in several.

kernels/densestream/exchange.cpp has the host's. ``ops.densestream`` says what a stream is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref, c_uint64

import numpy as np

from hvd_deepreduce.ops import arrays, densestream, hash, rice, sections
from hvd_deepreduce.ops.device import clearing_at_once
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel, kernels_by_dtype
from hvd_deepreduce.ops.types import U8, U32, U64, Device, Floats, Parts

_pieces = kernels_by_dtype("stream_pieces", "U", "pppUuppp*")
_pack_bound = kernel("stream_pack_bound", "U", "UUUU")
_pack = kernel("stream_pack", "U", "ppUuUUpUppp")
_unpack = kernel("stream_unpack", "I", "pUpUUUUUpp")
_sum = kernels_by_dtype("stream_sum", "U", "pUUUdp")


def encode_pieces(indices: U32, values: Floats, pieces: U64, gap: int) -> tuple[U32, U32, Floats]:
    """The stream of some pieces of sparse elements: starts, lengths and values. On the host only.

    Args:
        indices, values: as for ``densestream.encode``.
        pieces: uint64 ``[p, 2]``: where each piece begins and ends in them. A piece ends its last block.
        gap: a block ends where more than so many zeros follow.
    """
    count = int((pieces[:, 1] - pieces[:, 0]).sum())
    starts, lengths = np.empty(count + 16, np.uint32), np.empty(count + 16, np.uint32)
    copied = gap > 0 or len(pieces) != 1
    out = np.empty(count * (1 + gap) + gap, values.dtype) if copied else values[int(pieces[0, 0]) : int(pieces[0, 1])]
    covered = c_uint64()
    blocks = _pieces[values.dtype](
        indices, values, pieces, len(pieces), gap, starts, lengths, out if copied else None, byref(covered)
    )
    return starts[:blocks], lengths[:blocks], out[: covered.value]


@operation(1)
def pack_coded(
    header: Callable[[int, int], bytes], starts: U32, lengths: U32, values: U8, covered: int, begin: int, end: int,
    room: int = 0,
) -> U8:  # fmt: skip
    """The bytes of a header, of the rice sections of ``densestream.gaps`` and of the values, each padded with zeros to
    a multiple of 8 bytes.

    On a GPU, the host waits for the device to learn the sizes of the sections.

    Args:
        header: called with the sizes of the two sections: 40 bytes.
        starts, lengths: of at least one block, inside [begin, end).
        values: the bytes of the values.
        covered: the number of elements of all blocks.
        room: as for ``sections.join``.
    """
    blocks, size = starts.size, values.size
    out = np.empty(room + 40 + _pack_bound(blocks, end - begin, covered, size), np.uint8)
    scratch, sizes = np.empty(2 * blocks, np.uint32), np.empty(2, np.uint64)
    used = _pack(
        starts, lengths, blocks, begin, end - begin, covered, values, size, scratch, out[room + 40 :], sizes
    )
    out.data[room : room + 40] = header(*sizes.tolist())
    return out[room : room + 40 + used]


@pack_coded.cuda
def _(
    header: Callable[[int, int], bytes], starts: Device, lengths: Device, values: Device, covered: int, begin: int,
    end: int, room: int = 0,
) -> Device:  # fmt: skip
    skips, ends = densestream.gaps(starts, lengths, begin)
    a, b = rice.encode_many([skips, ends], [end - begin, covered])
    return sections.join(header(a.size, b.size), a, b, values, pad=8, room=room)


@operation()
def unpack_coded(a: U8, b: U8, blocks: int, begin: int, end: int, count: int) -> tuple[U32, U32]:
    """The starts and lengths of at least one block from their rice sections. Trusts nothing in these.

    On a GPU, the host waits for the result of the checks, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the sections for so many blocks inside [begin, end) that cover
            ``count`` elements.
    """
    starts, lengths = np.empty(blocks, np.uint32), np.empty(blocks, np.uint32)
    error = _unpack(a, a.size, b, b.size, blocks, begin, end, count, starts, lengths)
    if error > 0:
        raise densestream.broken_blocks(begin, end, count)
    check(error)
    return starts, lengths


@unpack_coded.cuda
def _(a: Device, b: Device, blocks: int, begin: int, end: int, count: int) -> tuple[Device, Device]:
    starts, lengths = rice.decode(a, end - begin, blocks), rice.decode(b, count, blocks)
    densestream.blocks_of_gaps(starts, lengths, begin)
    densestream.check_blocks(starts, lengths, begin, end, count)
    return starts, lengths


def sum_to_dense(streams: Sequence[tuple[U32, U32, Floats]], begin: int, scale: float, out: Floats) -> int:
    """``out`` = ``scale`` * the sum of streams, added in their order: the elements ``begin`` to
    ``begin + out.size - 1``. On the host only.

    Args:
        streams: (starts, lengths, values) of the dtype of ``out``; all blocks must be within the elements of ``out``.

    Returns:
        The hash of ``out`` (``ops.hash``), taken as it is written.
    """
    rows = [(address(starts), address(lengths), address(values), starts.size) for starts, lengths, values in streams]
    table = np.array(rows, np.uint64)
    return int(_sum[out.dtype](table, len(rows), begin, begin + out.size, scale, out))


def sums_to_device(layers: Sequence[tuple[U32, U32, Floats]], parts: Parts, scale: float, out: Device) -> list[int]:
    """``out`` = ``scale`` * the sum of streams on the host, added in their order, for ``out`` on a GPU. It is what
    ``sum_to_dense`` writes part by part. The streams are copied there; the host waits for the hashes.

    Args:
        layers: (starts, lengths, values) of the dtype of ``out``, whose blocks are within ``out``.
        parts: (begin, end) of the parts of ``out`` to hash.

    Returns:
        The hash of each part.
    """
    there = arrays.move_all([array for layer in layers for array in layer], out)
    with clearing_at_once():
        for number in range(len(layers)):
            starts, lengths, values = there[3 * number : 3 * number + 3]
            if number:
                densestream.add_to(starts, lengths, values, out)
            else:
                densestream.to_dense(starts, lengths, values, 0, out)
        if not layers:
            out.fill(0)
        if scale != 1:
            arrays.scale(out, scale)
        return hash.hash_parts(out, parts)
