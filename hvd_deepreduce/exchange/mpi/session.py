"""One allreduce over MPI, from the ranks' first message to their agreement that it succeeded."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from numbers import Real
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.codecs.interfaces import U8, Floats, RngKey
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.sparse_tensor import DTYPE_IDS, SparseTensor
from hvd_deepreduce.exchange.mpi import announcement
from hvd_deepreduce.exchange.mpi.announcement import Card
from hvd_deepreduce.exchange.mpi.errors import ExchangeError, LostRankError
from hvd_deepreduce.exchange.mpi.messages import Label
from hvd_deepreduce.exchange.mpi.mpi_transport import MPITransport
from hvd_deepreduce.exchange.mpi.private_comm import PrivateComm, stall_limit
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from hvd_deepreduce.exchange.mpi.transport import DEFAULT_TIMEOUT, Program, describe
from hvd_deepreduce.exchange.traffic import NOTHING, Traffic
from hvd_deepreduce.ops import arrays, deferred, densestream
from hvd_deepreduce.ops.dispatch import on_host
from hvd_deepreduce.ops.hash import hash64, hash_parts
from hvd_deepreduce.ops.types import U64

MAX_TEXT = 400
"""Bytes of a rank's error that the other ranks see."""
CLOSING = "it closes its exchanges (close(), or the end of its program)"
"""What a rank says of itself at its last meeting."""
NO_TENSOR = SparseTensor(0, np.empty(0, np.uint32), np.empty(0, np.float32))
SCALE = struct.Struct("<d")
Result = TypeVar("Result")


def traffic_since(comm: MPI.Intracomm, before: Traffic = NOTHING) -> Traffic:
    """The bytes of this rank in all sessions over this communicator, less ``before``: meetings, messages, ends."""
    sent, received = PrivateComm.of(comm).traffic
    return Traffic(sent - before.sent, received - before.received)


class Session:
    """One allreduce, as a context manager, entered by all ranks of a communicator::

        with Session(comm, tensor, description, ...) as session:      validation, meeting
            programs = [...]                                          may use session.sum and session.cards
            result = session.run(programs, session.sum_buffer.result) messages, agreement, settlement

    - *Validation*: everything that can be wrong with this rank's arguments is found before it sends anything.
    - *Meeting*: one small MPI allgather of the ranks' cards (``opening``) shows what the ranks bring, and whether a
      rank's validation failed. Tensors that fit travel on the cards. A rank waits in it for the others as long as they
      take.
    - *Messages*: the programs run over an ``MPITransport``.
    - *Agreement*: one small MPI allreduce tells all ranks whether any of them has failed, and whether all have the same
      result, by its hash.
    - *Settlement*: what was sent is subtracted from the residual. It allocates nothing, so it does not fail.

    Args:
        comm: an intracommunicator. The session uses a duplicate of it (``PrivateComm``).
        tensor: this rank's sparse tensor, or a dense vector, of which the nonzero elements are taken.
        description: the algorithm and all settings that must be equal on all ranks, as a text.
        dense: whether the sum is a dense array, even if there is no ``out``.
        out: the array to write the dense sum to, ``[numel]``, on the host or on a GPU; or None.
        scale: a factor for the sum.
        residual: the array that what was sent is subtracted from, ``[numel]``, on the host or on a GPU; or None.
        key: says which sum this is: its seed, parameter and step are the same on all ranks.
        timeout: seconds without any message after which a rank counts as lost, once all ranks have met.
        patience: seconds to wait for the other ranks in the meeting; None: as ``private_comm.stall_limit`` says.
        prepare: returns the tensor that is sent instead of the validated one; it may raise.
        pack: returns the section of the tensor that is sent, for this rank's card, or None if that is too large for
            one; it may raise. Without it there are no sections on the cards.
        failure: an error that this rank has met already, in place of a tensor: all ranks raise it.

    Attributes:
        tensor: what this rank sends.
        transport: for the programs.
        sum_buffer: for the programs' results.
        max_kept: the largest number of kept elements on any rank.
        cards: those of all ranks if there is a section on each, so that nothing else need be sent; otherwise None.

    Raises:
        ExchangeError: on entry, on all ranks: what the ranks bring differs, or an argument of a rank is invalid.
        LostRankError: on entry: a rank has left, or an earlier session was aborted.
        TypeError: ``comm`` is not an intracommunicator.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        tensor: SparseTensor | Floats | None,
        description: str,
        *,
        dense: bool = False,
        out: Floats | None = None,
        scale: float = 1.0,
        residual: Floats | None = None,
        key: RngKey,
        timeout: float = DEFAULT_TIMEOUT,
        patience: float | None = None,
        prepare: Callable[[SparseTensor], SparseTensor] | None = None,
        pack: Callable[[SparseTensor], U8 | None] | None = None,
        failure: Exception | None = None,
    ) -> None:
        for name, value in (("timeout", timeout), ("patience", patience)):
            if value is not None and not (isinstance(value, Real) and value > 0):
                failure = failure or ValueError(f"{name} is {value!r}; it must be a number of seconds above 0")
                timeout, patience = DEFAULT_TIMEOUT, None
        self.patience = stall_limit() if patience is None else patience
        self.comm = PrivateComm.of(comm, self.patience)
        self.timeout, self.residual = timeout, residual
        self.dense = dense or out is not None
        self.error: Exception | None = failure
        self.scale, self.key = 1.0, RngKey(0, 0, 0)
        self.tensor, self.sum_buffer = NO_TENSOR, SumBuffer(0, NO_TENSOR.values.dtype, False, None)
        self.section: U8 | None = None
        try:
            self.description = description.encode()
            if failure is None:
                self.scale = float(scale)
                self.key = RngKey(*(int(number) & 0xFFFFFFFF for number in key))
                own = _validated(tensor, out, residual)
                self.tensor = own if prepare is None else prepare(own)
                self.sum_buffer = SumBuffer(own.numel, own.values.dtype, self.dense, out, self.scale)
                self.section = None if pack is None else pack(self.tensor)
        except Exception as error:
            self.error = error
        except BaseException as error:
            raise self.comm.abandon(error) from None

    def __enter__(self) -> Session:
        self.comm.lock.acquire()
        try:
            self.comm.check_usable()
            self.comm.sequence += 1
            label = Label(self.comm.sequence, self.key.step, self.key.parameter)
            self.transport = MPITransport(self.comm, label, self.timeout)
            self._meet()
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Ends the session. An error that the other ranks do not know of becomes one that they do."""
        try:
            if error is not None and not isinstance(error, ExchangeError | LostRankError):
                lost = self.comm.abandon(error)
                if lost is not error:
                    raise lost from error
        finally:
            self.comm.lock.release()

    def _meet(self) -> None:
        """Compares what the ranks bring."""
        tensor, key = self.tensor, self.key
        same = (
            self.comm.sequence, key.seed, key.step, key.parameter, tensor.numel, DTYPE_IDS[tensor.values.dtype],
            int.from_bytes(SCALE.pack(self.scale), "little"), self.dense, _hash_of(self.description),
        )  # fmt: skip

        def say() -> str:
            return (
                f"{self.description.decode()}, {tensor.numel} elements of {tensor.values.dtype}, scale "
                f"{self.scale:g}, a {'dense' if self.dense else 'sparse'} sum, {self.transport.label}, seed {key.seed}"
            )

        cards = meet(self.comm, self.patience, self.error, same, tensor.indices.size, say, self.section)
        self.max_kept = max(card.kept for card in cards)
        self.cards = cards if all(card.section is not None for card in cards) else None

    def sum(self, values: U64) -> U64:
        """The sum over all ranks of a few numbers, uint64 ``[n]``, the same ``n`` on all ranks."""
        return self.comm.allreduce(values, MPI.SUM, self.timeout)

    def run(
        self,
        programs: list[Program],
        result: Callable[[], SparseTensor | Floats],
        errors: Sequence[Stream] | None = None,
    ) -> SparseTensor | Floats:
        """Runs the programs, and returns ``result()`` once all ranks have succeeded and have the same.

        Args:
            errors: rounding errors of what this rank has sent, which are added to the residual; the programs may extend
                the sequence.

        Raises:
            ExchangeError: on all ranks: a program or ``result`` failed on at least one, or the results differ.
            LostRankError: no message came within the timeout, a rank has left, or MPI reports an error.
        """
        if programs:
            self.transport.run(programs)
        return self.agree(result, errors or ())

    def agree(self, result: Callable[[], Result], errors: Sequence[Stream] = ()) -> Result:
        """The second half of ``run``."""
        transport = self.transport
        total = transport.attempt(None, result)
        digest = transport.attempt(0, _digest, total, self.sum_buffer.hashes)
        settle = transport.attempt(None, _settlement, self.residual, self.tensor, errors)
        _agree(self.comm, transport.failure, transport.error, digest, self.timeout)
        assert total is not None and settle is not None
        settle()
        return total


def meet(
    comm: PrivateComm,
    patience: float | None,
    error: Exception | None,
    same: tuple[int, ...],
    kept: int,
    say: Callable[[], str],
    section: U8 | None = None,
) -> list[Card]:
    """The meeting of all ranks: one small allgather, or for many ranks one small allreduce.

    Args:
        error: of this rank's validation.
        same: ``announcement.NUMBERS`` numbers that must be the same on all ranks.
        kept: the number of elements that this rank keeps.
        say: returns what this rank brings, as a text.
        section: this rank's packed tensor, if it may travel on the card.

    Returns:
        The cards of all ranks, or those of ``announcement.read_numbers``.

    Raises:
        ExchangeError: on all ranks: a rank has an error, or the numbers differ.
        LostRankError: not all ranks came within the patience, or a rank has left.
    """
    failed = error is not None
    if comm.size > announcement.MOST_CARDS:
        cards = announcement.read_numbers(comm.allreduce(announcement.numbers(failed, kept, same), MPI.MAX, patience))
    else:
        own = announcement.pack(failed, kept, same, None if failed else section)
        cards = [announcement.read(card) for card in comm.allgather(own, patience)]
    if any(card.failed for card in cards):
        _raise_for_all(comm, describe(error) if error else "", error, DEFAULT_TIMEOUT)
    if any(card.same != cards[0].same for card in cards):
        sides = "; ranks ".join(_sides(_gather_texts(comm, say(), DEFAULT_TIMEOUT)))
        raise ExchangeError(f"the ranks' tensors or settings differ, and must be the same; ranks {sides}")
    return cards


def meet_to_close(comm: PrivateComm, limit: float) -> None:
    """The last meeting over a communicator. Afterwards no message is under way, so it can be freed.

    Raises:
        ExchangeError: another rank brings an exchange, and gets the same error.
        LostRankError: not all ranks came within the limit, or a rank has left.
    """
    comm.check_usable()
    comm.sequence += 1
    comm.closing = True
    meet(comm, limit, None, (comm.sequence, 0, 0, 0, 0, 0, 0, 0, _hash_of(CLOSING.encode())), 0, lambda: CLOSING)


def _agree(comm: PrivateComm, failure: str | None, error: Exception | None, digest: int, timeout: float) -> None:
    """Raises ``ExchangeError`` on all ranks if one has failed (``Transport.failure``), or if the digests differ."""
    own = np.array([failure is not None, digest, digest ^ 0xFFFFFFFFFFFFFFFF], np.uint64)
    largest = comm.allreduce(own, MPI.MAX, timeout)
    if largest[0]:
        _raise_for_all(comm, failure or "", error, timeout)
    if largest[1] != ~largest[2]:
        sides = "; ranks ".join(_sides(_gather_texts(comm, f"hash {digest:016x}", timeout)))
        raise ExchangeError(
            f"the ranks' sums differ: ranks {sides}. A rank's memory or program is at fault: no message was damaged"
        )


def _raise_for_all(comm: PrivateComm, text: str, cause: Exception | None, timeout: float) -> None:
    texts = _gather_texts(comm, text, timeout)
    said = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    raise ExchangeError("; ".join(said) or "a rank sent that it had failed, and no rank gives a reason") from cause


def _sides(texts: list[str]) -> list[str]:
    """What the ranks say, with the ranks that say the same together."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return [f"{', '.join(map(str, ranks))}: {text}" for text, ranks in groups.items()]


def _gather_texts(comm: PrivateComm, text: str, timeout: float) -> list[str]:
    """Every rank's text, cut at ``MAX_TEXT`` bytes."""
    own = np.frombuffer(text.encode(errors="replace")[:MAX_TEXT].ljust(MAX_TEXT, b"\0"), np.uint8).copy()
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in comm.allgather(own, timeout)]


@lru_cache(64)
def _hash_of(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def _digest(total: Any, hashes: dict[int, int]) -> int:
    """The hash of a sum; 0 if there is none.

    Args:
        total: a ``SparseTensor``, a dense array on any device, or None.
        hashes: of its regions, if they were taken as it was written.
    """
    if hashes:
        return hash64(np.array(sorted(hashes.items()), np.uint64))
    if isinstance(total, SparseTensor):
        return hash64(total.values, hash64(total.indices, total.numel))
    return 0 if total is None else hash_parts(total, [(0, total.size)])[0]


def _settlement(residual: Floats | None, tensor: SparseTensor, errors: Sequence[Stream]) -> Callable[[], None]:
    """A function that settles the residual, and allocates nothing. An element that was sent as NaN or infinity stays
    what it is in the residual: infinity minus infinity is NaN."""
    if residual is None:
        return lambda: None
    indices, values = tensor.indices, tensor.values
    if not deferred.finite(values):
        finite = np.isfinite(values)
        indices, values = indices[finite], values[finite]
    if not on_host(residual):
        # All is brought there now, since memory may be short. x + e and x - -e are the same bits.
        parts = [indices, values, *(part for error in errors for part in (error.indices(), -error.values))]
        there = arrays.move_all(parts, residual)

        def settle_there() -> None:
            for taken, sent in zip(there[::2], there[1::2], strict=True):
                arrays.subtract_sent(residual, taken, sent)

        return settle_there

    def settle() -> None:
        arrays.subtract_sent(residual, indices, values)
        for error in errors:
            densestream.add_to(error.starts, error.lengths, error.values, residual)

    return settle


def _validated(tensor: object, out: Any, residual: Any) -> SparseTensor:
    """The tensor as a ``SparseTensor`` of contiguous arrays, once all three arguments are found to fit together."""
    if isinstance(tensor, np.ndarray):
        if tensor.ndim != 1 or tensor.dtype not in DTYPE_IDS:
            raise ValueError(
                f"tensor is {tensor.dtype}{list(tensor.shape)}; a dense vector must be float32 or float64 [N]"
            )
        tensor = Stream.from_dense(np.ascontiguousarray(tensor)).to_sparse()
    if not isinstance(tensor, SparseTensor):
        raise TypeError(f"tensor is a {type(tensor).__name__}; a SparseTensor or a NumPy array is required")
    indices, values = np.ascontiguousarray(tensor.indices), np.ascontiguousarray(tensor.values)
    written: list[Any] = []
    for name, array in (("out", out), ("residual", residual)):
        if array is None:
            continue
        if not _is_array(array):
            raise TypeError(
                f"{name} is a {type(array).__name__}; a NumPy array, an array on a GPU or None is required"
            )
        if array.dtype != values.dtype or array.shape != (tensor.numel,) or not array.flags.c_contiguous:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}; a contiguous {values.dtype}[{tensor.numel}] is required"
            )
        if on_host(array):
            if not array.flags.writeable:
                raise ValueError(f"{name} is read-only; a writeable array is required")
            # What is sent must not change while the sum is written.
            indices, values = (part.copy() if np.may_share_memory(part, array) else part for part in (indices, values))
        written.append(array)
    if len(written) == 2 and _may_share(*written):
        raise ValueError("out and residual share memory; the sum would overwrite the residual: pass two arrays")
    unchanged = indices is tensor.indices and values is tensor.values
    return tensor if unchanged else SparseTensor(tensor.numel, indices, values)


def _is_array(value: Any) -> bool:
    """Whether it is an array of NumPy, or of a library for GPUs."""
    return isinstance(value, np.ndarray) or (hasattr(value, "dtype") and hasattr(getattr(value, "data", None), "ptr"))


def _may_share(one: Any, other: Any) -> bool:
    """Whether two contiguous arrays overlap in memory."""
    if on_host(one) and on_host(other):
        return np.may_share_memory(one, other)
    if on_host(one) or on_host(other):
        return False
    first, second = one.data.ptr, other.data.ptr
    return bool(first < second + other.nbytes and second < first + one.nbytes)
