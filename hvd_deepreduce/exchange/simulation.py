"""The exchanges' programs on any number of ranks in one process, with every message and byte counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_deepreduce.codec import U8
from hvd_deepreduce.exchange.channel import EMPTY, Program, R, Wants, attempt


class Network:
    """Carries the messages between ``size`` ranks.

    Attributes:
        messages, sent, received: of each rank; the last two in bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues: dict[tuple[int, int, int], deque[list[U8]]] = {}
        self.messages = np.zeros(size, np.int64)
        self.sent = np.zeros(size, np.int64)
        self.received = np.zeros(size, np.int64)

    def run(self, programs: Callable[[SimulatedTraffic], list[Program]]) -> None:
        """Runs the programs of all ranks to their ends.

        Raises:
            RuntimeError: where a rank waits for a message that nobody sends, or nobody waits for one that was sent.
            ValueError: where a rank has failed.
        """
        traffics = [SimulatedTraffic(self, rank) for rank in range(self.size)]
        # Each entry: a program, its rank, and the message it waits for (None: it has not begun).
        running: list[tuple[Program, int, Wants | None]] = [
            (program, traffic.rank, None) for traffic in traffics for program in programs(traffic)
        ]
        while running:
            waiting: list[tuple[Program, int, Wants | None]] = []
            moved = False
            for program, rank, wants in running:
                parts = None
                if wants is not None:
                    source, tag, count = wants
                    queue = self.queues.get((rank, source, tag))
                    if not queue:
                        waiting.append((program, rank, wants))
                        continue
                    parts = queue.popleft()
                    self.received[rank] += sum(part.size for part in parts)
                    if len(parts) != count:
                        traffics[rank].failure = traffics[rank].failure or ""
                        parts = [EMPTY] * count
                moved = True
                try:
                    waiting.append((program, rank, program.send(parts)))  # type: ignore[arg-type]
                except StopIteration:
                    pass
            if not moved:
                raise RuntimeError(f"{len(waiting)} programs wait for messages that nobody sends")
            running = waiting
        if any(self.queues.values()):
            raise RuntimeError("messages were sent that nobody waits for")
        failures = [f"rank {traffic.rank}: {traffic.failure}" for traffic in traffics if traffic.failure]
        if failures:
            raise ValueError("; ".join(failures))


class SimulatedTraffic:
    """One rank's view of a ``Network``."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank, self.size = network, rank, network.size
        self.failure: str | None = None

    def attempt(self, default: R, work: Callable[..., R], *arguments: Any) -> R:
        return attempt(self, default, work, *arguments)

    def send(self, to: int, tag: int, parts: list[U8]) -> None:
        # Not joined to one message: 1,024 ranks share each other's streams, and every stream is in memory once.
        parts = parts if self.failure is None else []
        self.network.queues.setdefault((to, self.rank, tag), deque()).append(parts)
        self.network.messages[self.rank] += 1
        self.network.sent[self.rank] += sum(part.size for part in parts)
