"""Cases of mpi_cases.py: messages that change, are repeated, cut or lengthened on the way, at one rank's sends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.exchange.mpi import announcement, densestream, messages, mpi_transport, private_comm, topk_allgather
from hvd_deepreduce.exchange.mpi.errors import LostRankError
from hvd_deepreduce.exchange.mpi.messages import HEADER, Label
from hvd_deepreduce.exchange.mpi.private_comm import PrivateComm
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from hvd_deepreduce.exchange.mpi.transport import MAX_SLICES
from hvd_deepreduce.ops.hash import hash64
from tests.case_runner import case
from tests.exchange.faults import BAD, COMM, MODULES, RANK, SIZE, mine, refused, with_cards

Change = Callable[[np.ndarray, int], list[np.ndarray]]
"""What is sent in place of a message with this tag."""


class FaultySends:
    """The bad rank's communicator, whose sends go through a ``Change``."""

    def __init__(self, comm: MPI.Intracomm, change: Change) -> None:
        self.comm, self.change = comm, change

    def __getattr__(self, name: str) -> object:
        return getattr(self.comm, name)

    def Isend(self, spec: list, to: int, tag: int) -> MPI.Request:  # noqa: N802  (mpi4py's name)
        if tag == private_comm.NOTICE_TAG:
            return self.comm.Isend(spec, to, tag)
        changed = self.change(spec[0], (tag - 1) % mpi_transport.TAGS)
        sent = [(message, self.comm.Isend([message, MPI.BYTE], to, tag)) for message in changed]
        private_comm.KEPT.append(sent)
        return sent[0][1]


@contextlib.contextmanager
def faulty(change: Change, comm: MPI.Intracomm = COMM) -> Iterator[None]:
    """Within the context, the bad rank's messages change on the way."""
    private = PrivateComm.of(comm)
    before = private.comm
    if RANK == BAD:
        private.comm = FaultySends(before, change)
    try:
        yield
    finally:
        private.comm = before


def refused_with(change: Change, *words: str, modules=None) -> None:
    for module in modules or MODULES.values():

        def call(residual, module=module):
            with faulty(change):
                module.allreduce(COMM, mine(), residual=residual, timeout=20)

        refused(f"rank {BAD}", *words, call=call)


def lost_with(change: Change, words: str) -> None:
    """All ranks give the communicator up at once, with an error that holds the words."""
    comm = COMM.Dup()
    began = time.monotonic()
    try:
        with faulty(change, comm):
            densestream.allreduce(comm, mine(), timeout=20)
    except LostRankError as error:
        text = str(error)
    else:
        text = "no error"
    assert all(words in one for one in COMM.allgather(text)), text
    assert time.monotonic() - began < 15


def with_bit_flipped(message: np.ndarray, bit: int) -> np.ndarray:
    message = message.copy()
    if message.size:
        message[bit // 8 % message.size] ^= 1 << bit % 8
    return message


@case
def one_flipped_bit() -> None:
    """In each field of the header, and in the streams."""
    for bit in (1, 70, 130, 200, 230, 260, 300, 8 * HEADER.size + 3, 8 * HEADER.size + 400, -1):
        refused_with(lambda message, tag, bit=bit: [with_bit_flipped(message, bit)], "its bytes changed on the way")
    # In the allgather alone, where some ranks have the right sum already.
    refused_with(
        lambda message, tag: [with_bit_flipped(message, -1) if tag >= MAX_SLICES else message],
        "its bytes changed on the way",
        modules=(densestream,),
    )


@case
def sizes_that_no_rank_sends() -> None:
    for by in (-8, -3, 3, 8, 1000):
        refused_with(lambda message, tag, by=by: [np.resize(message, message.size + by)])
    refused_with(lambda message, tag: [message[:0]], "it has 0 bytes; a multiple of 8, and at least 40, is required")


@case
def a_message_longer_than_any() -> None:
    """It is not received: no rank allocates what another announces. All ranks get the same error."""
    for size in (30_000 * SIZE, 3_000_000 * SIZE):  # MPI sends it at once, or asks first
        lost_with(
            lambda message, tag, size=size: [np.zeros(size, np.uint8)],
            f"cannot read a message of rank {BAD}: it has {size} bytes; at most",
        )


@case
def a_message_of_another_exchange() -> None:
    """Undamaged, and from the right rank."""

    def with_label(**fields: int) -> Change:
        def change(message: np.ndarray, tag: int) -> list[np.ndarray]:
            _, _, sequence, step, bucket, sender, its_tag = HEADER.unpack_from(message.data)
            label = Label(sequence + fields.get("sequence", 0), step + fields.get("step", 0), fields.get("bucket", 0))
            sections = [message[HEADER.size :]] if message.size > HEADER.size else []
            its_tag += fields.get("tag", 0)
            return [messages.pack(label, (sender + fields.get("sender", 0)) % SIZE, its_tag, sections)]

        return change

    refused_with(with_label(sequence=1), "it belongs to exchange")
    refused_with(with_label(step=3), "of step 3), and this is exchange")
    refused_with(with_label(bucket=5), "(bucket 5 of step 0)")
    refused_with(with_label(tag=1), "its header says")
    refused_with(with_label(sender=1), "its header says")


@case
def a_message_that_comes_twice() -> None:
    """Its copy is not taken for a message of a later exchange, even if that has the same tags."""
    for module, PrivateComm.of(COMM).tags in product(MODULES.values(), (2**31, mpi_transport.TAGS + 1)):
        row = np.arange(1.0, 1001.0, dtype=np.float32)
        with faulty(lambda message, tag: [message, message.copy()]):
            total = module.allreduce(COMM, row * (RANK + 1), dense=True, timeout=20)
        factor = SIZE * (SIZE + 1) / 2
        assert np.allclose(total, factor * row)
        for again in range(3):
            total = module.allreduce(COMM, row[::-1] * (RANK + 1 + again), dense=True, timeout=20)
            assert np.allclose(total, (factor + SIZE * again) * row[::-1]), (module, again)


@case
def a_failure_without_a_reason() -> None:
    """A rank's messages say that it has failed, and it does not know of it."""

    def change(message: np.ndarray, tag: int) -> list[np.ndarray]:
        return [messages.pack(Label(PrivateComm.of(COMM).sequence, 0, 0), RANK, tag, [])]

    def call(residual: np.ndarray) -> None:
        with faulty(change):
            topk_allgather.allreduce(COMM, mine(), residual=residual, timeout=20)

    refused("a rank sent that it had failed, and no rank gives a reason", call=call)


@case
def sums_that_differ() -> None:
    """One rank's memory changes after the last message: no message is damaged, and no rank sees an error."""
    write = SumBuffer.write_region

    def changed(self: SumBuffer, streams: list[Stream], *arguments: int) -> None:
        if RANK == BAD and streams[0].values.size:
            values = streams[0].values.copy()
            values[-1:].view(np.uint32)[0] ^= 1
            streams = [Stream(self.numel, streams[0].starts, streams[0].lengths, values), *streams[1:]]
        write(self, streams, *arguments)

    for cards, module, dense in product((True, False), MODULES.values(), (True, False)):

        def call(residual, module=module, dense=dense):
            with patch.object(SumBuffer, "write_region", changed):
                module.allreduce(COMM, mine(), dense=dense, residual=residual, timeout=20)

        with with_cards() if cards else contextlib.nullcontext():
            refused("the ranks' sums differ", f"; ranks {BAD}: hash", call=call)


@case
def damaged_cards() -> None:
    """A tensor on a rank's card changes after it was packed, or is none."""
    pack = announcement.pack

    def broken(change: Callable[[np.ndarray], None]) -> Callable[..., np.ndarray]:
        def packed(*arguments: object) -> np.ndarray:
            card = pack(*arguments)
            if RANK == BAD:
                change(card)
            return card

        return packed

    def flip(card: np.ndarray, at: int) -> None:
        card[at] ^= 4

    def cut(card: np.ndarray) -> None:
        """Of another length than its hash says, and longer than a card."""
        card[16:24].view(np.uint64)[0] = 1 << 40

    def noise(card: np.ndarray) -> None:
        size = int(card[16:24].view(np.uint64)[0])
        section = card[announcement.HEADER.size : announcement.HEADER.size + size]
        section[:] = np.random.default_rng(3).integers(0, 256, size)
        card[24:32].view(np.uint64)[0] = hash64(section)

    changes = [(partial(flip, at=at), "its bytes changed on the way") for at in (24, announcement.HEADER.size, 900)]
    for change, words in [*changes, (cut, "its bytes changed on the way"), (noise, "cannot read the stream")]:

        def call(residual, change=change):
            with patch.object(announcement, "pack", broken(change)):
                densestream.allreduce(COMM, mine(), residual=residual, timeout=20)

        with with_cards():
            refused(f"of rank {BAD}", words, call=call)


@case
def messages_in_chunks() -> None:
    """As messages beyond 2^30 bytes travel."""
    before = mpi_transport.CHUNK
    for mpi_transport.CHUNK in (64, 1000):
        for module in MODULES.values():
            rng = np.random.default_rng(RANK)
            # Sizes around the chunk's, and exact multiples of it.
            for numel in (1, 3, 118, 119, 120, 600):
                row = rng.standard_normal(numel)
                total = module.allreduce(COMM, row, dense=True, timeout=20)
                assert np.allclose(total, COMM.allreduce(row)), (module, numel)
        refused_with(lambda message, tag: [with_bit_flipped(message, 0)], "its bytes changed on the way")
    # Parts that are cut or missing: nobody can say how many are to come.
    for change in (lambda part, tag: [part[:50]], lambda part, tag: [np.resize(part, 70)], lambda part, tag: [~part]):
        lost_with(change, f"cannot read a message of rank {BAD}: its header announces ")
    mpi_transport.CHUNK = before
