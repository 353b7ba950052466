"""A rank that fails takes part in all collectives, and tells the others its error in place of its bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.ops import sections
from hvd_deepreduce.wire.standalone import ContainerError

_ERROR = struct.Struct("<IBI")
ERROR_HEADER = _ERROR.size
"""Bytes before the text of an error that is told."""
_ERROR_FORM = 255
"""In place of a container's form, which it cannot be."""
_MAX_TEXT = 4096
LEFT_BEHIND = "could not take the sum that other nodes have taken"


class LeftBehindError(ContainerError):
    """Of all ranks of a node of which one has failed, where those of other nodes have not."""


class FailureDeferring:
    """A rank's program that takes part in all collectives after an error of its own, so that nobody waits for it.

    Attributes:
        failures: the first error, which all ranks are told.
    """

    failures: list[Exception]

    def _attempt(self, otherwise: Any, work: Callable[..., Any], *arguments: Any) -> Any:
        """``work(*arguments)``; if it fails, ``otherwise``, and the others are told."""
        try:
            return work(*arguments)
        except Exception as error:
            self._fail(error)
            return otherwise

    def _fail(self, error: Exception) -> None:
        if not self.failures:
            self.failures.append(error)

    def _raise_failure(self) -> None:
        if self.failures:
            raise self.failures[0]


def told(error: Exception, rank: int) -> U8:
    """A rank's error, in place of what it would have sent, for ``error_in``."""
    text = str(error)
    if not isinstance(error, ContainerError):
        text = f"rank {rank} could not take part in the sum: {type(error).__name__}: {text}"
    data = text.encode(errors="backslashreplace")[:_MAX_TEXT]
    return np.frombuffer(bytearray(_ERROR.pack(zlib.crc32(data), _ERROR_FORM, len(data)) + data), np.uint8)


def error_in(message: U8) -> ContainerError | None:
    """What ``told`` has written at the begin of ``message``; None: something else is there."""
    data = sections.peek(message, _ERROR.size + _MAX_TEXT)
    if len(data) < _ERROR.size:
        return None
    checksum, form, size = _ERROR.unpack_from(data)
    text = data[_ERROR.size : _ERROR.size + size]
    if form != _ERROR_FORM or len(text) != size or zlib.crc32(text) != checksum:
        return None
    said = text.decode(errors="replace")
    return LeftBehindError(said) if LEFT_BEHIND in said else ContainerError(said)
