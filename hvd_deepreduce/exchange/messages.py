"""What peers send each other, and the collectives that show a peer's engine what they have sent.

A message is::

    magic "DRP1" | crc32 of the rest | size of the description | description (JSON) | parts, one behind the other
    4 bytes      | 4 bytes           | 4 bytes
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.wire.quoting import quoted
from hvd_deepreduce.wire.standalone import ContainerError

_HEADER = struct.Struct("<4sII")
_MAGIC = b"DRP1"
MAX_TEXT = 1 << 20
"""Bytes of a description, at most."""
RUN = re.compile("[0-9a-f]{0,32}")


class Message(NamedTuple):
    """What a peer sends in an exchange.

    Attributes:
        said: what must be equal on all peers, by a name that an error shows.
        parts: bytes, by the names of the buckets.
        run: names the process that sends it, in hexadecimal digits, where the peer's other ranks send messages too.
    """

    said: Mapping[str, str]
    parts: Mapping[str, bytes]
    run: str = ""

    def apart(self, said: Mapping[str, str]) -> list[str]:
        """The names of what it says otherwise than ``said``."""
        return [name for name, one in said.items() if self.said.get(name) != one]

    def pack(self) -> bytes:
        sizes = [[name, len(part)] for name, part in self.parts.items()]
        text = json.dumps({"said": dict(self.said), "parts": sizes, "run": self.run}).encode()
        rest = struct.pack("<I", len(text)) + text + b"".join(self.parts.values())
        return _MAGIC + struct.pack("<I", zlib.crc32(rest)) + rest

    @staticmethod
    def unpack(data: bytes) -> Message:
        """
        Raises:
            ValueError: this is no message.
        """
        try:
            magic, checksum, size = _HEADER.unpack_from(data)
            if magic != _MAGIC or zlib.crc32(data[8:]) != checksum or size > MAX_TEXT:
                raise ValueError("its checksum or size is wrong")
            told = json.loads(data[_HEADER.size : _HEADER.size + size])
            said, sizes, run = told["said"], told["parts"], told["run"]
            if not all(isinstance(one, str) for one in [*said, *said.values(), *(name for name, _ in sizes)]):
                raise ValueError("its description has something else than texts")
            if not RUN.fullmatch(run):
                raise ValueError("its run is no hexadecimal number")
            parts, at = {}, _HEADER.size + size
            for name, length in sizes:
                if type(length) is not int or not 0 <= length <= len(data) - at:
                    raise ValueError("a part is longer than the message")
                parts[name] = data[at : at + length]
                at += length
            if at != len(data) or len(parts) != len(sizes):
                raise ValueError("its parts do not fill it")
        except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is no message of a peer: {quoted(str(error))}") from None
        return Message(said, parts, run)


class PeerCollectives(Collectives):
    """The engine's collectives of one peer: what it starts is for its next message, and what it waits for is taken from
    messages that the peers have exchanged.

    Args:
        peer: the number of this peer, 0 to ``peers - 1``.
        peers: the largest number of peers.

    Raises:
        ValueError: an argument is outside its range.
    """

    ordered = counts = True

    def __init__(self, peer: int, peers: int) -> None:
        if not 0 <= peer < peers:
            raise ValueError(f"peer is {peer} and peers is {peers}; peer must be a number from 0 to peers - 1")
        self.peer, self.peers = peer, peers
        self._sending: dict[str, bytes] = {}
        self._shown: Mapping[str, list[bytes]] = {}

    def rank(self) -> int:
        return self.peer

    def size(self) -> int:
        return self.peers

    def local_size(self) -> int:
        return 1

    def mpi_enabled(self) -> bool:
        return False

    def included(self) -> bool:
        return True

    def start_allgather(self, data: U8, name: str) -> str:
        """What this peer sends in the next message, as its part of this name."""
        self._sending[name] = arrays.to_host(data).tobytes()
        return name

    def wait_allgather(self, pending: str) -> U8:
        return np.frombuffer(bytearray(b"".join(self._shown[pending])), np.uint8)

    def taken(self) -> dict[str, bytes]:
        """The parts that were started since the last call."""
        parts, self._sending = self._sending, {}
        return parts

    def show(
        self, messages: Mapping[int, Mapping[str, bytes]], nothing: Callable[[str], bytes], names: Iterable[str]
    ) -> None:
        """Lets ``wait_allgather`` return these parts, by peer.

        Args:
            nothing: gives the part of this name of a peer that sends nothing.
            names: of the parts.
        """
        self._shown, absent = {}, len(messages) < self.peers
        for name in names:
            lacking = [peer for peer, parts in messages.items() if name not in parts]
            if lacking:
                raise ContainerError(f"the message of peer {lacking[0]} lacks the part {name}")
            empty = nothing(name) if absent else b""
            self._shown[name] = [
                messages[peer][name] if peer in messages else empty for peer in range(self.peers)
            ]


def largest_group(there: Mapping[int, Message | str]) -> tuple[dict[int, Message], dict[int, str]]:
    """Of these messages, or what is wrong with them: those that count, which are the most that say the same, and why
    the others do not. All peers that see the same messages decide alike."""
    groups: dict[str, list[int]] = {}
    for peer in sorted(there):
        message = there[peer]
        if isinstance(message, Message):
            groups.setdefault(json.dumps(message.said, sort_keys=True), []).append(peer)
    chosen = max(groups.values(), key=len, default=[])
    members = {peer: one for peer, one in there.items() if peer in chosen and isinstance(one, Message)}
    refused: dict[int, str] = {}
    for peer in there.keys() - members.keys():
        message = there[peer]
        if isinstance(message, Message):
            apart = message.apart(members[chosen[0]].said)
            message = f"its {' and '.join(apart)} is not that of peer {chosen[0]}"
        refused[peer] = message
    return members, refused
