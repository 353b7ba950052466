"""What the ranks say of themselves, one line of JSON each, when they compare what must be equal. It may be anything."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.wire.quoting import quoted

Statement = dict[str, Any]
"""One rank's description of itself."""

MAX_STATEMENT = 1 << 24
"""Bytes of one rank's description that are read: about 100,000 parameters."""


class MismatchError(RuntimeError):
    """Ranks of one job differ in release, config or model; the message names the difference and the ranks."""

    # While TensorFlow traces a function, it re-raises with their own type only exceptions that have this constructor.
    __init__ = Exception.__init__


def gather(collectives: Collectives, said: Statement, name: str) -> list[Statement]:
    """What all ranks say, in rank order. Every rank calls it at the same time.

    Args:
        said: by this rank.
        name: of the allgather.

    Raises:
        MismatchError: as ``read``.
    """
    line = bytearray(json.dumps({"rank": collectives.rank(), **said}).encode() + b"\n")
    return read(collectives.allgather(np.frombuffer(line, np.uint8), name).tobytes(), collectives.size())


def read(gathered: bytes, size: int) -> list[Statement]:
    """The ranks' descriptions, from what was gathered, which may be anything. ``compare`` checks their content.

    Args:
        gathered: of each rank a JSON object in one line (the result of ``statement``) and a line's end, in rank order.
        size: the number of ranks.

    Raises:
        MismatchError: a rank did not send one description of at most ``MAX_STATEMENT`` bytes; names the first such
            rank. Every rank reads the same bytes, so every rank gets the same message.
    """
    *lines, rest = gathered.split(b"\n", size)
    read: list[Statement] = []
    for rank, line in enumerate(lines):
        told = _parsed(line, rank)
        # A rank that sent no line, or two, has shifted the lines of those after it. Old releases do not say their rank.
        sender = told.get("rank", rank)
        if sender != rank:
            raise refusal(sender if 0 <= sender < rank else rank, "sent no description of itself, or more than one")
        read.append(told)
    if len(lines) < size:
        _parsed(rest, len(lines))
        raise refusal(len(lines), "sent a description of itself without an end, or none")
    if rest:
        raise refusal(size - 1, f"sent {len(rest)} bytes after its description, or another rank sent two")
    return read


def _parsed(line: bytes, rank: int) -> Statement:
    if len(line) > MAX_STATEMENT:
        raise refusal(rank, f"sent a description of itself of {len(line)} bytes; at most {MAX_STATEMENT} are read")
    try:
        told: Statement = json.loads(line)
    except (ValueError, RecursionError):
        begin = line[:200].decode(errors="replace")
        raise refusal(rank, f"sent no description of itself, but {quoted(begin)}") from None
    if not isinstance(told, dict) or not isinstance(told.get("rank", 0), int):
        raise refusal(rank, f"sent no description of itself, but {quoted(told)}")
    return told


def refusal(rank: int, what: str) -> MismatchError:
    """The error for what a rank sent in a comparison of the ranks. All ranks must raise it."""
    error: MismatchError = MismatchError(
        f"the ranks of this job cannot be compared: rank {rank} {what}. Use the same hvd_deepreduce release on every "
        "rank, and check whether something else sends under its names. No gradient was applied"
    )
    return error
