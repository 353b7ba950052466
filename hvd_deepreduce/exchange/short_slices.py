"""The containers of slices of few elements, without what their receivers know: ``exchange: reduce_scatter``.

On many ranks a slice has some ten kept elements, which take some 20 bytes, and version 2 of the container 22 more:
its header, and the begin of the value section, which the config determines. Such a slice travels shortened, and is
lengthened before it is read, so that everything else sees a container of version 2. docs/container.md specifies the
bytes::

    | h u8 | check u16 | index bytes u8 | index section | rest of the value section |     1 <= h <= 253, h - 1 elements
    | 255  | check u16 | rest of the value section |                                     all elements of the slice
    | 0    | size      | what has no short form: a container, or an error |              size is a varint

``check`` is a CRC of 16 bits of all other bytes and of what is left out. It finds every change of up to three bits, and
takes as few bytes as it does because on many ranks two more for each slice would be a tenth of a message. Slices of no
element end after it.
"""

from __future__ import annotations

from binascii import crc_hqx
from dataclasses import dataclass

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, IndexCodec, RngKey, ValueCodec
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.config import Config
from hvd_deepreduce.exchange.settings import ReduceScatter
from hvd_deepreduce.ops import sections
from hvd_deepreduce.ops.sections import NUMBER_BYTES, read_varint, varint
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire.frame import FIXED, SPARSE, Expected
from hvd_deepreduce.wire.standalone import refusal

MEAN = 64
"""The most elements of a slice of mean length for which an exchange uses short forms. They save about a fifth then."""
LONG, FULL = 0, 255
MOST_KEPT, MOST_FULL, MOST_INDEX = 252, 4096, 255
"""The most elements of a short form, of a slice that is sent whole, and bytes of an index section."""
_FORM = SPARSE | 1
"""The form of the containers that have a short one: the config's first index codec, no order."""
_CHECK = 2
_KEY = RngKey(0, 0, 0)


@dataclass(frozen=True)
class ShortSlices:
    """Shortens and lengthens the containers of one exchange; on the host.

    Args:
        index, value: of the config.
        itemsize: of the vector's elements.
    """

    index: IndexCodec
    value: ValueCodec
    itemsize: int

    @staticmethod
    def of(config: Config, numel: int, ranks: int, step: int, itemsize: int) -> ShortSlices | None:
        """For a vector's exchange; None: it has no short forms. Equal on all ranks."""
        exchange, sparsifier, index, value = config.exchange, config.sparsifier_at(step), config.index, config.value
        density = exchange.density if isinstance(exchange, ReduceScatter) else None
        density = getattr(sparsifier, "density", None) if density is None else density
        if ranks == 1 or density is None or index is None or value is None or config.joint or value.sorts:
            return None
        if value.layout(1, itemsize) is None or kept_of(density, numel) > MEAN * ranks:
            return None
        return ShortSlices(index, value, itemsize)

    def shorten(self, message: U8, expected: Expected) -> bytes:
        """The short form of a container of version 2 of this slice, or of what is sent in place."""
        data, numel = message.tobytes(), expected.numel
        long = self.as_it_is(data)
        if len(data) <= FIXED.size or data[FIXED.size - 1] != _FORM:
            return long
        if data[:4] != _checksum(data, expected):
            return long  # as it is, so that its receiver refuses it too
        count, at = read_varint(data, FIXED.size)
        index_bytes, at = read_varint(data, at)
        _, at = read_varint(data, at)
        index, values = data[at : at + index_bytes], data[at + index_bytes :]
        layout = self.value.layout(count, self.itemsize)
        if layout is None or len(values) != layout[1] or not values.startswith(layout[0]):
            return long
        rest = values[len(layout[0]) :]
        if count == numel and index == self._all(numel):
            return _checked(FULL, rest, expected)
        if count > MOST_KEPT or index_bytes > MOST_INDEX:
            return long
        return _checked(count + 1, (bytes([index_bytes]) + index if count else b"") + rest, expected)

    @staticmethod
    def as_it_is(data: bytes) -> bytes:
        """What stands for bytes that have no short form."""
        return bytes([LONG]) + varint(len(data)) + data

    @staticmethod
    def taken_as_it_is(data: bytes, at: int) -> bytes:
        """All from ``at`` on; without what ``as_it_is`` has put before it. Empty only if nothing is there."""
        try:
            size, begin = read_varint(data, at + 1)
        except ValueError:
            return data[at:]
        whole = data[at] == LONG and size and begin + size == len(data)
        return data[begin:] if whole else data[at:]

    def lengthen(self, data: bytes, at: int, expected: Expected, rank: int) -> tuple[bytes, int]:
        """What ``shorten`` was given, from its short form at ``at``, and where that ends. Trusts nothing in it: what is
        returned is still to be read.

        Raises:
            ContainerError: the bytes end too early, have no such form or were altered; names the rank.
        """
        try:
            return self._lengthened(data, at, expected)
        except ValueError as error:
            raise refusal(rank, error) from None

    def _lengthened(self, data: bytes, at: int, expected: Expected) -> tuple[bytes, int]:
        if at >= len(data):
            raise ValueError("it has no bytes")
        form, at = data[at], at + 1
        if form == LONG:
            size, at = read_varint(data[: at + NUMBER_BYTES], at)
            return _taken(data, at, size)
        if form > MOST_KEPT + 1 and form != FULL:
            raise ValueError(f"it begins with {form}, which no short form does")
        check, begin = _taken(data, at, _CHECK)
        at = begin
        if form == FULL:
            if expected.numel > MOST_FULL:
                raise ValueError(f"its slice has {expected.numel} elements, and at most {MOST_FULL} are sent whole")
            count, index = expected.numel, self._all(expected.numel)
        else:
            count, index = form - 1, b""
            if count:
                told, at = _taken(data, at, 1)
                index, at = _taken(data, at, told[0])
        layout = self.value.layout(count, self.itemsize)
        assert layout is not None
        rest, at = _taken(data, at, layout[1] - len(layout[0]))
        if _check(form, data[begin:at], expected) != check:
            raise ValueError(frame.not_of(expected.key))
        header = FIXED.pack(0, _FORM) + b"".join(map(varint, (count, len(index), layout[1])))
        long = header + index + layout[0] + rest
        return _checksum(long, expected) + long[4:], at

    def _all(self, numel: int) -> bytes:
        """The index section of all elements of a slice; empty if it has none that all ranks make alike."""
        if numel > MOST_FULL or len(self.index.choices) > 1:
            return b""
        section, _ = self.index.encode(np.arange(numel, dtype=np.uint32), numel, _KEY)
        return section.tobytes()


def _salt(expected: Expected) -> int:
    return frame.salt(expected.shared.digest, expected.numel, expected.dtype, expected.key)


def _checksum(container: bytes, expected: Expected) -> bytes:
    """The checksum that a container of version 2 must begin with."""
    of_bytes = sections.checksum(np.frombuffer(bytearray(container), np.uint8), 0)
    return (of_bytes + _salt(expected) & 0xFFFFFFFF).to_bytes(4, "little")


def _check(form: int, rest: bytes, expected: Expected) -> bytes:
    salt = _salt(expected)
    return crc_hqx(bytes([form]) + rest, (salt ^ salt >> 16) & 0xFFFF).to_bytes(_CHECK, "little")


def _checked(form: int, rest: bytes, expected: Expected) -> bytes:
    return bytes([form]) + _check(form, rest, expected) + rest


def _taken(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise ValueError(f"it is truncated: {size} bytes are announced, and {len(data) - at} follow")
    return data[at : at + size], at + size
