"""Encodes on a GPU that are recorded once, and then made by one native call each; the bytes are the composed way's.

It serves top-k with an index codec that measures on the device (``LosslessIndexCodec.measured``) and any value codec
whose section has the same size for all values. Everything else goes the composed way, from codec to codec.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, LosslessIndexCodec, RngKey, Sparsifier, ValueCodec
from hvd_deepreduce.codecs.sparsify.topk import TopK, kept_of
from hvd_deepreduce.config.settings import Config
from hvd_deepreduce.ops import arrays, deferred, sections, select
from hvd_deepreduce.ops.device import array_module
from hvd_deepreduce.ops.program import NotRecordableError, Placeholder, Program
from hvd_deepreduce.ops.sections import varint
from hvd_deepreduce.ops.types import u32
from hvd_deepreduce.wire import frame

MOST = 2**31
"""Elements, of which top-k on a GPU takes fewer."""


class _Encode(NamedTuple):
    """A recorded encode.

    Attributes:
        start, end: the numbers of the header before and after the index section's bytes.
        value_bytes: of the value section.
    """

    program: Program
    start: bytes
    end: bytes
    value_bytes: int


class Recorded:
    """The recorded encodes of one config. Make it with ``of``.

    Args:
        values: the value codec, without and with error feedback.
        leaves_whole: as ``Memory.leaves_whole``.
        form: of the containers' headers.
    """

    def __init__(
        self, index: LosslessIndexCodec, values: tuple[ValueCodec, ValueCodec], leaves_whole: bool, form: int
    ) -> None:
        self._index, self._values, self._leaves_whole, self._form = index, values, leaves_whole, form
        self._of = lru_cache(1000)(self._record)  # a density may change in each step

    @classmethod
    def of(cls, config: Config, shared: frame.Shared) -> Recorded | None:
        """None: the config has other codecs."""
        index, value = config.index, config.value
        if not isinstance(index, LosslessIndexCodec) or index.measured is None or value is None or value.sorts:
            return None
        form = frame.SPARSE | 1 + shared.indices.index(index.id)
        return cls(index, (value, value.under_feedback()), config.memory.leaves_whole, form)

    def encode(
        self, gradient: Floats, residual: Floats | None, key: RngKey, salt: int, finite: bool, sparsifier: Sparsifier
    ) -> tuple[U8, U32] | None:
        """The container of version 2 of a gradient on a GPU, and its support. The gradient is added to the residual,
        and what is sent is subtracted from that. The host waits once.

        Args:
            gradient, residual, key, finite: as for ``Pipeline.encode``.
            salt: of the checksum.
            sparsifier: selects.

        Returns:
            None: the composed way must encode it; nothing has changed.

        Raises:
            NonFiniteError: the gradient has NaN or infinity. Nothing has changed.
            FewerNonzerosError: as ``deferred.encoding``.
        """
        if type(sparsifier) is not TopK or sparsifier.density_of != "elements" or not 0 < gradient.size < MOST:
            return None
        kept = kept_of(sparsifier.density, gradient.size)
        encode = self._of(array_module(gradient), gradient.size, gradient.dtype, residual is not None, kept, finite)
        if encode is None:
            return None
        program, start, end, value_bytes = encode
        inputs = (gradient,) if residual is None else (gradient, residual)
        words = [word & 0xFFFFFFFF for word in (*key, salt)]
        mailbox, (container, support) = program.run(inputs, words)
        (bits,) = deferred.opened(mailbox)
        index_bytes = (bits + 7) // 8
        size = 4 + len(start) + len(varint(index_bytes)) + len(end) + index_bytes + value_bytes
        return container[:size], support.view(u32)

    def _record(
        self, xp: Any, numel: int, dtype: np.dtype[Any], feedback: bool, kept: int, finite: bool
    ) -> _Encode | None:
        try:
            return self._recorded(Program(xp), numel, dtype, feedback, kept, finite)
        except (NotRecordableError, TypeError):  # a codec that needs the host in between, or the key as numbers
            return None

    def _recorded(
        self, program: Program, numel: int, dtype: np.dtype[Any], feedback: bool, kept: int, finite: bool
    ) -> _Encode:
        """As ``Composed.encode``."""
        gradient: Any = program.input(numel, dtype)
        residual: Any = program.input(numel, dtype) if feedback else None
        key: Any = RngKey(*(program.scalar(u32) for _ in RngKey._fields))  # type: ignore[arg-type]
        dense, added = (residual, gradient) if feedback else (gradient, None)
        with deferred.recording(gradient, finite, feedback) as encoding:
            support, values = select.topk(dense, added, kept)
            deferred.end_selection()
            room, bits = self._index.measured(support, numel)
            value = self._values[feedback]
            section, _ = value.encode(values, support, key)
            if residual is not None:
                sent = values
                if not self._leaves_whole:
                    sent = value.decode(section, values.size, support, dtype, key)
                arrays.subtract_sent(residual, support, sent)
            start, end = bytes([self._form]) + varint(kept), varint(section.size)
            container = sections.measured_container(start, end, room, bits, section, program.scalar(u32))
            mailbox = encoding.mailbox
        outputs: list[Placeholder] = [container, support]  # type: ignore[list-item]
        for output in outputs:
            program.output(output)
        program.end(mailbox)
        return _Encode(program, start, end, section.size)
