"""Programs, and the transport that carries their messages. Needs no MPI.

A *program* is a generator: one rank's part of the allreduce of one slice of the vector. It sends with
``transport.send``, which does not wait, and it yields a ``Receive`` where it needs a message::

    program                                        transport (MPI, or a simulated network)
    transport.send(to, tag, sections)     ------>  starts to send a message
    yield Receive(source, tag, n)         ------>  suspends the program until that message is complete
                                          <------  resumes it with the message's n sections

A rank runs one program per slice at the same time, and the transport resumes whichever has its message. So one slice is
merged while others travel::

    slice 0   pack | send ~~~~~~~ receive | merge | pack | send ~~~~~~~
    slice 1          pack | send ~~~~~~~~~~~~~~~ receive | merge | pack | send ~~~
    slice 2                 pack | send ~~~~~~~~~~~~~~~~~~~~~~~~ receive | merge | ...

A message consists of *sections*, one directly after the other; each is one packed stream (``joint.stream_format``).

A rank on which an error occurs goes on with the same sends and receives, with empty messages, so that no other rank
waits for it. At the end of the allreduce the ranks agree whether one has failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np

from hvd_deepreduce.codec import U8
from hvd_deepreduce.joint.stream_format import packed_size

MAX_SLICES = 64
"""The largest number of slices, and so of programs per rank."""
DEFAULT_TIMEOUT = 600.0
"""Seconds without any message after which a rank counts as lost."""
EMPTY = np.empty(0, np.uint8)
"""A message without bytes: its sender has failed."""


class Receive(NamedTuple):
    """What a program yields: the message that it waits for.

    Attributes:
        source: the sending rank.
        tag: of the message; see ``message_tag``.
        sections: the number of sections that the message must have.
    """

    source: int
    tag: int
    sections: int


Program = Generator[Receive, list[U8], None]
Result = TypeVar("Result")
Default = TypeVar("Default")
Arguments = ParamSpec("Arguments")


def message_tag(phase: int, slot: int) -> int:
    """The tag of a message of the program number ``slot``. Two messages from one rank to another that can be under way
    at the same time, from the same program, must differ in ``phase``."""
    return phase * MAX_SLICES + slot


def split_message(message: U8, count: int, sender: int) -> list[U8]:
    """The sections of a message, as views.

    Raises:
        ValueError: the message is not exactly ``count`` sections.
    """
    sections = []
    try:
        for _ in range(count):
            size = packed_size(message)
            sections.append(message[:size])
            message = message[size:]
        if message.size:
            raise ValueError(f"it has {message.size} bytes after its {count} streams, where none are allowed")
    except ValueError as error:
        raise ValueError(f"cannot read a message of rank {sender}: {error}") from None
    return sections


class Transport(ABC):
    """One rank's connection to the others, for one allreduce.

    Attributes:
        rank: this rank's number.
        size: the number of ranks.
        failure: the first error on this rank, as a sentence. None: no error so far; "": another rank has failed, and
            reports the error itself.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.failure: str | None = None

    @abstractmethod
    def send(self, to: int, tag: int, sections: list[U8]) -> None:
        """Starts to send a message of these sections to the rank ``to``; an empty message if this rank has failed."""

    def attempt(
        self,
        default: Default,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result | Default:
        """``work(...)``, or ``default`` if this rank has failed. A ``ValueError`` or ``MemoryError`` of ``work`` is
        kept in ``failure`` instead of being raised, and the program goes on."""
        if self.failure is None:
            try:
                return work(*arguments, **keywords)
            except (ValueError, MemoryError) as error:
                self.failure = str(error) or type(error).__name__
        return default
