"""Programs, and the transport that carries their messages. Needs no MPI.

A *program* is a generator: one rank's part of the allreduce of one slice of the vector. It sends with
``transport.send``, which does not wait, and it yields a ``Receive`` where it needs a message::

    program                                        transport (MPI, or a simulated network)
    transport.send(to, tag, sections)     ------>  starts to send a message
    yield Receive(source, tag, n, size)   ------>  suspends the program until that message is complete
                                          <------  resumes it with the message's n sections

A rank runs one program per slice at the same time, and the transport resumes whichever has its message. So one slice is
merged while others travel::

    slice 0   pack | send ~~~~~~~ receive | merge | pack | send ~~~~~~~
    slice 1          pack | send ~~~~~~~~~~~~~~~ receive | merge | pack | send ~~~
    slice 2                 pack | send ~~~~~~~~~~~~~~~~~~~~~~~~ receive | merge | ...

A message consists of a header and *sections*, of which each is one packed stream (``messages``).

A rank on which an error occurs goes on with the same sends and receives, with messages without sections, so that no
other rank waits for it. At the end of the allreduce the ranks agree whether one has failed. So whatever a program
computes, it computes in ``transport.attempt``; only the sends and receives themselves are outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8

MAX_SLICES = 64
"""The largest number of slices, and so of programs per rank."""
DEFAULT_TIMEOUT = 600.0
"""Seconds without any message after which a rank counts as lost, once all ranks have met."""
EMPTY = np.empty(0, np.uint8)
"""A section that could not be made or received, because a rank has failed."""


class Receive(NamedTuple):
    """What a program yields: the message that it waits for.

    Attributes:
        source: the sending rank.
        tag: of the message; see ``message_tag``.
        sections: the number of sections that the message must have.
        elements: the most elements of the vector that the sections may cover, added up.
    """

    source: int
    tag: int
    sections: int
    elements: int


Program = Generator[Receive, list[U8], None]
Result = TypeVar("Result")
Default = TypeVar("Default")
Arguments = ParamSpec("Arguments")


def message_tag(phase: int, slot: int) -> int:
    """The tag of a message of the program number ``slot``. Two messages from one rank to another that can be under way
    at the same time, from the same program, must differ in ``phase``."""
    return phase * MAX_SLICES + slot


def describe(error: BaseException) -> str:
    """An error as a sentence for other ranks. The package's own errors are sentences; others need their type."""
    if isinstance(error, ValueError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Transport(ABC):
    """One rank's connection to the others, for one allreduce.

    Attributes:
        rank: this rank's number.
        size: the number of ranks.
        failure: the first error on this rank, as a sentence. None: no error so far; "": another rank has failed, and
            reports the error itself.
        error: the exception behind ``failure``, if there is one.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.failure: str | None = None
        self.error: Exception | None = None

    @abstractmethod
    def send(self, to: int, tag: int, sections: list[U8]) -> None:
        """Starts to send a message of these sections to the rank ``to``; without them if this rank has failed."""

    def attempt(
        self,
        default: Default,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result | Default:
        """``work(...)``, or ``default`` if this rank has failed. An exception of ``work`` is kept in ``failure``
        instead of being raised, and the program goes on."""
        if self.failure is None:
            try:
                return work(*arguments, **keywords)
            except Exception as error:
                self.failure, self.error = describe(error), error
        return default
