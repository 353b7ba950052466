"""Runs the exchanges' programs for any number of ranks in one process, and counts every message and byte. Needs no MPI.

network = Network(ranks)
network.run(lambda transport: topk_allgather.program(...))
network.received.max()          # bytes that the busiest rank received
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.exchange.mpi import messages
from hvd_deepreduce.exchange.mpi.transport import EMPTY, Program, Receive, Transport


class Network:
    """Carries the messages between ``size`` ranks.

    Attributes:
        size: the number of ranks.
        messages: int64 ``[size]``: messages that each rank sent.
        sent, received: int64 ``[size]``: bytes of each rank, with the messages' headers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues: dict[tuple[int, int, int], deque[list[U8]]] = {}  # by (receiver, sender, tag)
        self.messages = np.zeros(size, np.int64)
        self.sent = np.zeros(size, np.int64)
        self.received = np.zeros(size, np.int64)

    def run(self, programs: Callable[[SimulatedTransport], list[Program]]) -> None:
        """Runs the programs of all ranks to their ends.

        Args:
            programs: returns the programs of one rank; called once for each.

        Raises:
            RuntimeError: a program waits for a message that no rank sends, or a message was sent that no program waits
                for.
            ValueError: an error occurred on a rank.
        """
        transports = [SimulatedTransport(self, rank) for rank in range(self.size)]
        # (program, its rank, the message that it waits for; None: not started)
        running: list[tuple[Program, int, Receive | None]] = [
            (program, transport.rank, None) for transport in transports for program in programs(transport)
        ]
        while running:
            waiting: list[tuple[Program, int, Receive | None]] = []
            progress = False
            for program, rank, receive in running:
                try:
                    if receive is None:
                        waiting.append((program, rank, next(program)))
                    elif (sections := self._take(transports[rank], receive)) is not None:
                        waiting.append((program, rank, program.send(sections)))
                    else:
                        waiting.append((program, rank, receive))
                        continue
                except StopIteration:
                    pass
                progress = True
            if not progress:
                raise RuntimeError(f"{len(waiting)} programs wait for messages that no rank sends")
            running = waiting
        if any(self.queues.values()):
            raise RuntimeError("messages were sent that no program waits for")
        failures = [f"rank {transport.rank}: {transport.failure}" for transport in transports if transport.failure]
        if failures:
            raise ValueError("; ".join(failures))

    def _take(self, transport: SimulatedTransport, receive: Receive) -> list[U8] | None:
        """The sections of the next message that fits, or None if there is none yet."""
        queue = self.queues.get((transport.rank, receive.source, receive.tag))
        if not queue:
            return None
        sections = queue.popleft()
        self.received[transport.rank] += _message_bytes(sections)
        if len(sections) != receive.sections:
            transport.failure = transport.failure or ""
            return [EMPTY] * receive.sections
        return sections


class SimulatedTransport(Transport):
    """One rank's connection to a ``Network``."""

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__(rank, network.size)
        self.network = network

    def send(self, to: int, tag: int, sections: list[U8]) -> None:
        # Sections are not copied into one message: 1,024 ranks share each other's, and each is in memory once.
        sections = sections if self.failure is None else []
        self.network.queues.setdefault((to, self.rank, tag), deque()).append(sections)
        self.network.messages[self.rank] += 1
        self.network.sent[self.rank] += _message_bytes(sections)


def _message_bytes(sections: list[U8]) -> int:
    """The size of the message that ``messages.pack`` would make."""
    return messages.HEADER.size + sum(section.size for section in sections)
