"""FedAvg with both directions compressed: DeepReduce's Algorithm 2 (appendix), and a server that sends differences.

A round: the server draws m of K clients and encodes its model once; each drawn client decodes it, trains on its own
data, and encodes how far it came; the server subtracts the mean of the m decoded updates. All messages are containers
of the package's pipeline.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train",))

import numpy as np
import numpy.typing as npt
from local_updates import Outer

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import U8, RngKey
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire.decoding import decode_part

Vector = npt.NDArray[np.float32]
Trainer = Callable[[int, int, Vector], Vector]
"""Of a round, a client and the model that it begins with: the model that it ends with."""
Down = Literal["difference", "initial"]
UP, DOWN = 0, 1
SERVER = 2**31 - 1
"""The sender of what goes down, in the keys of random choices."""


class Link:
    """One direction, ``UP`` or ``DOWN``: the codecs, and the keys of its containers. Without error feedback in the
    config, nobody keeps residuals."""

    def __init__(self, config: Config, numel: int, direction: int) -> None:
        self.feedback = config.error_feedback
        self.numel = numel
        self._pipeline, self._seed, self._direction = Pipeline(config), config.seed, direction

    def _key(self, number: int, sender: int) -> RngKey:
        return RngKey(self._seed, self._direction, number, sender)

    def encode(self, vector: Vector, residual: Vector | None, number: int, sender: int) -> U8:
        """The container of round ``number``; with a residual, of the vector and the residual, which keeps the rest."""
        return self._pipeline.encode(vector, residual, self._key(number, sender), version=2)

    def decode(self, data: U8, number: int, sender: int) -> Vector:
        """What a container of that round holds, float32 ``[numel]``; a broken one, or one of another round, is a
        ContainerError."""
        expected = self._pipeline.expected(self.numel, np.dtype(np.float32), self._key(number, sender))
        support, values = decode_part(frame.split(data, 1, [expected])[0][0], self.numel, sender)
        out = np.zeros(self.numel, np.float32)
        out[slice(None) if support is None else support] = values
        return out


def drawn(seed: int, number: int, clients: int, count: int) -> list[int]:
    """The clients of a round, in ascending order."""
    return sorted(np.random.default_rng((seed, number)).choice(clients, count, replace=False).tolist())


class Reader:
    """A client's side of the way down: the model that clients have, x-hat, float32 ``[numel]``.

    ``initial`` (Algorithm 2): a message holds x_t - x_0, and x-hat = x_0 + what it decodes to, whatever came before.
    ``difference``: a message holds x_t - x-hat, and is added to x-hat. What was not sent stays in the difference, which
    is the error feedback; a client must have all messages since the start.
    """

    def __init__(self, start: Vector, link: Link, down: Down) -> None:
        self._start, self._link, self._down = start, link, down
        self.model = start.copy()

    def read(self, data: U8, number: int) -> None:
        """Decodes the message of a round."""
        decoded = self._link.decode(data, number, SERVER)
        self.model = decoded + (self.model if self._down == "difference" else self._start)


class Server:
    """The server's model x, and what it knows of the clients.

    Args:
        start: x_0, which every client has, float32 ``[numel]``.
        down: see ``Reader``. With ``initial`` and error feedback, the server keeps a residual of its messages.
        outer: the step that the mean update makes.
    """

    def __init__(
        self, start: Vector, up: Link, down_link: Link, down: Down, clients: int, outer: Outer | None = None
    ) -> None:
        self.model = start.copy()
        self.reader = Reader(start, down_link, down)
        self._start, self._up, self._link, self._down = start, up, down_link, down
        self._outer = outer or Outer()
        self._residual = np.zeros_like(start) if down == "initial" and down_link.feedback else None
        self._sizes: list[int] = []
        self._seen = np.full(clients, -1)

    def broadcast(self, number: int) -> U8:
        """The message of a round, for all drawn clients."""
        base = self.reader.model if self._down == "difference" else self._start
        data = self._link.encode(self.model - base, self._residual, number, SERVER)
        self.reader.read(data, number)
        self._sizes.append(data.size)
        return data

    def down_bytes(self, number: int, client: int) -> int:
        """Bytes that a client drawn in this round gets. With differences, a client that was not drawn for a while gets
        the messages that it missed, or the whole x-hat in float32 if that takes fewer bytes."""
        if self._down == "initial":
            return self._sizes[number]
        missed = sum(self._sizes[self._seen[client] + 1 : number + 1])
        self._seen[client] = number
        return min(missed, 4 * self.model.size)

    def collect(self, number: int, containers: dict[int, U8]) -> None:
        """Ends a round: x <- outer step with the mean of the clients' updates."""
        total = np.zeros_like(self.model)
        for client in sorted(containers):
            total += self._up.decode(containers[client], number, client)
        self._outer.step(self.model, total / np.float32(len(containers)))


class OneProcess:
    """How messages travel between the server, on rank 0, and the clients of all ranks: here all are in one process."""

    rank, size = 0, 1

    def share(self, data: U8 | None) -> U8:
        """What rank 0 gives, on every rank."""
        return data

    def gather(self, own: dict[int, U8], all_clients: list[int]) -> dict[int, U8]:
        """The containers of all clients, on rank 0 at least."""
        return own


@dataclass
class Round:
    """Figures of a round: bytes of all drawn clients together, and seconds of this rank, of its clients together. Those
    down and up are in the transport, with the wait for other ranks."""

    number: int
    down_bytes: int = 0
    up_bytes: int = 0
    server_encode: float = 0.0
    server_decode: float = 0.0
    client_decode: float = 0.0
    client_train: float = 0.0
    client_encode: float = 0.0
    down_seconds: float = 0.0
    up_seconds: float = 0.0
    facts: dict[str, float] = field(default_factory=dict)


class Clock:
    """Adds the seconds since it was asked last to a field of a round."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def add(self, row: Round, name: str) -> None:
        now = time.perf_counter()
        setattr(row, name, getattr(row, name) + now - self._last)
        self._last = now


def federate(
    start: Vector,
    up: Link,
    down_link: Link,
    down: Down,
    trainer: Trainer,
    *,
    rounds: int,
    clients: int,
    count: int,
    seed: int = 0,
    outer: Outer | None = None,
    transport: OneProcess | None = None,
) -> Iterator[tuple[Round, Server | None]]:
    """Runs the rounds, with ``count`` of the clients drawn in each; gives each round's figures, and on rank 0 the
    server.

    Client k lives on rank k % size. With error feedback, it has a residual from the first round in which it is drawn,
    and a client that is not drawn keeps its residual as it is. A rank reads every message, and so has x-hat for its
    clients; the bytes are those that the clients would get if each were a machine of its own.
    """
    transport = transport or OneProcess()
    server = Server(start, up, down_link, down, clients, outer) if transport.rank == 0 else None
    reader = Reader(start, down_link, down)
    residuals: dict[int, Vector] = {}
    for number in range(rounds):
        row, clock = Round(number), Clock()
        message = None if server is None else server.broadcast(number)
        clock.add(row, "server_encode")
        message = transport.share(message)
        clock.add(row, "down_seconds")
        reader.read(message, number)
        clock.add(row, "client_decode")
        these, own = drawn(seed, number, clients, count), {}
        for client in these:
            if client % transport.size != transport.rank:
                continue
            update = reader.model - trainer(number, client, reader.model.copy())
            clock.add(row, "client_train")
            residual = residuals.setdefault(client, np.zeros_like(start)) if up.feedback else None
            own[client] = up.encode(update, residual, number, client)
            clock.add(row, "client_encode")
        containers = transport.gather(own, these)
        clock.add(row, "up_seconds")
        if server is not None:
            server.collect(number, containers)
            row.down_bytes = sum(server.down_bytes(number, client) for client in these)
            row.up_bytes = sum(container.size for container in containers.values())
            clock.add(row, "server_decode")
        yield row, server
