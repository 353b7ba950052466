"""The engine's collectives over ``torch.distributed``; needs no Horovod."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from hvd_deepreduce.codecs.interfaces import U8, Floats
from hvd_deepreduce.engine import Collectives
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.collectives import Held
from hvd_deepreduce.exchange.traffic import Traffic
from hvd_deepreduce.ops import heap
from hvd_deepreduce.torch.rendezvous import Rendezvous, meeting_place, name_of, named
from hvd_deepreduce.torch.tensors import TorchTensors, keep_for_stream

MAX_CHARACTERS = 1000
"""Of an error that all ranks get."""
_HEADER = 16
"""Bytes that a rank tells another one before an exchange."""
_TEXT = 30
"""Words of 8 bytes for an error that is told at once, beside its length."""

_making = threading.Lock()
"""PyTorch names groups by their number, which threads would share."""


@dataclass
class _Exchange:
    """``splits`` bytes of ``sent`` are for each rank: all of it for each of them if it is ``for_all``. Its buffers must
    live until ``work`` has ended, which is None while it is held. ``heard`` bytes come from each rank."""

    sent: torch.Tensor
    splits: list[int]
    for_all: bool = False
    heard: list[int] = field(default_factory=list)
    received: Any = None
    work: Any = None


@dataclass
class _Sum:
    """``data`` becomes the sum when ``work`` has ended, which is None while it is held."""

    data: Floats
    work: Any = None


class DistributedCollectives(Collectives):
    """Collectives in process groups of their own, so that they may run beside those of DDP, of SyncBatchNorm and of the
    user: ``torch.distributed`` matches the collectives of a group by their order.

    All bytes go through ``all_to_all_single``, which takes tensors of unequal size: nothing is padded, and every rank
    sends its bytes once to each other rank. Their sizes go ahead, on the host. A rank that has failed says so there, so
    that all ranks get its error, and none waits for it.

    Every rank makes it at the same time (``Rendezvous`` waits for them), and calls everything here in the same order.
    One thread at a time may start exchanges, while another one waits for those that were started.

    Args:
        group: the ranks that take part; None: all.
        timeout: of each collective; None: that of the group.
        members: of the group's ranks, those that take part; None: all.
        several: whether several exchanges are in flight. On Gloo, bytes have connections of their own then: the sizes
            of the next exchange would wait behind the bytes of the one before, and so would all that this rank does.
        met: where these ranks have met; None: it is not checked that threads make their groups in one order.
        far: whether ranks may be far apart: a step check's votes go straight to each rank, which takes half of a round
            trip. The allreduce of Gloo is a ring: it takes ``size() - 1`` round trips.

    Raises:
        RuntimeError: ``torch.distributed`` was not initialized, or not all ranks have come.

    Attributes:
        exchanges: how many exchanges of bytes were started.
        failure: the last error that ranks have told.
    """

    ordered = True
    _keeps = False  # of all instances: whether groups of some ranks were made in this process

    def __init__(
        self,
        tensors: TorchTensors,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        members: Sequence[int] | None = None,
        several: bool = False,
        far: bool = False,
        met: Rendezvous | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed was not initialized: call torch.distributed.init_process_group() first, in a job "
                "that was started by torchrun"
            )
        self._tensors, self._group, self._far = tensors, group, far
        self._timeout = timeout = timeout or _timeout_of(group)
        ranks = dist.get_process_group_ranks(group)
        if members is not None:
            ranks = [ranks[member] for member in members]
        # A subgroup is never destroyed: PyTorch would use its store keys again, and the next subgroup would hang. Nor
        # is any group after one, since its name is their number.
        of_some = len(ranks) < dist.get_world_size()
        DistributedCollectives._keeps = DistributedCollectives._keeps or of_some
        new_group = partial(dist.new_group, ranks, timeout=timeout, use_local_synchronization=of_some)
        on_devices = "nccl" in dist.get_backend_config(group)
        with _making:
            if of_some:
                _level(ranks)
            self._host = new_group(backend="gloo")
            self._bulk = new_group(backend="gloo") if several and not on_devices else self._host
            self._devices = new_group(backend="nccl") if on_devices else self._bulk
        self._met = met
        if met is not None:
            met.check_groups(ranks, " ".join(map(name_of, (self._host, self._bulk, self._devices))))
        self.exchanges = 0
        self.failure: RuntimeError | None = None
        self._held: list[_Exchange | _Sum] | None = None
        self._rank, self._size = dist.get_rank(self._host), dist.get_world_size(self._host)
        # As numbers, and not by all_gather_object: what other ranks send must never be unpickled.
        name = torch.tensor([crc32(socket.gethostname().encode())])
        names = [torch.empty_like(name) for _ in range(self._size)]
        dist.all_gather(names, name, group=self._host)
        self._local_size = names.count(name)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def place(self) -> list[int]:
        """This rank's number among them, and how many they are."""
        return [self._rank, self._size]

    def local_size(self) -> int:
        return self._local_size

    def subsets(self, groups: Sequence[Sequence[int]], new: bool) -> list[Collectives]:
        own = (group for group in groups if self._rank in group)
        make = partial(DistributedCollectives, self._tensors, self._group, self._timeout, met=self._met)
        return [make(members=group) for group in own]

    def mpi_enabled(self) -> bool:
        return False  # mpi4py does not know these ranks

    # Exchanges of bytes

    def start_allgather(self, data: U8, name: str) -> _Exchange:
        return self._start(_Exchange(self._tensors.tensor(data), [data.size] * self._size, True))

    def wait_allgather(self, pending: _Exchange) -> U8:
        return self.wait_alltoall(pending)[0]

    def start_alltoall(self, data: U8, splits: Sequence[int], name: str) -> _Exchange:
        """Waits until all ranks have told their sizes, outside of ``hold``. The name is not used: the order counts.

        Raises:
            RuntimeError: a rank has failed (``check``), or died.
        """
        return self._start(_Exchange(self._tensors.tensor(data), list(splits)))

    def hold(self, most: int) -> Held:
        return _Together(self, most)

    def _start(self, exchange: _Exchange) -> _Exchange:
        if self._held is not None:
            self._held.append(exchange)
        else:
            self._launch(exchange, self._ahead(exchange.splits))
        return exchange

    def wait_alltoall(self, pending: _Exchange) -> tuple[U8, list[int]]:
        pending.work.wait()  # on a GPU, the current stream waits
        if pending.received.is_cuda:  # the buffers were allocated on the stream that has started the exchange
            keep_for_stream(pending.sent)
            keep_for_stream(pending.received)
        array: U8 = self._tensors.array(pending.received)
        return array, pending.heard

    def check(self, error: Exception | None, flag: bool = False) -> bool:
        """All ranks go on, or get the error of those that have one; so a rank with an error may call it in place of its
        next exchange.

        Returns:
            Whether any rank has set its flag.

        Raises:
            RuntimeError: on all ranks.
        """
        return any(self._ahead([int(flag)] * self._size, error))

    def _ahead(self, splits: Sequence[int], error: Exception | None = None) -> list[int]:
        """Tells each rank how many bytes follow for it. Returns how many come from each."""
        self.exchanges += 1
        text = f"{type(error).__name__}: {error}"[:MAX_CHARACTERS].encode(errors="backslashreplace") if error else b""
        said = torch.tensor([[len(text), split] for split in splits])
        heard = torch.empty_like(said)
        dist.all_to_all_single(heard, said, group=self._host)
        if self.stats is not None:
            self.stats.add(wire=traffic.allgather(_HEADER, _HEADER * self._size, self._size))
        failures, sizes = heard.T.tolist()
        if any(failures):
            own = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0).byte()
            said_so = _Exchange(own, [len(own)] * self._size, True)
            self._launch(said_so, failures)
            self.failure = _failure(self.wait_allgather(said_so).tobytes(), failures)
            raise self.failure from error
        return list(map(int, sizes))

    def _launch(self, one: _Exchange, heard: list[int]) -> None:
        one.heard = heard
        group = self._devices if one.sent.is_cuda else self._bulk
        if one.sent.is_cuda and group is self._bulk:
            one.sent = one.sent.cpu()
        size = sum(heard)
        if not one.sent.is_cuda and max(size, self._size * len(one.sent)) >= heap.LARGE:
            if one.for_all:
                copies = torch.from_numpy(heap.room(self._size * len(one.sent)))
                one.sent = copies.view(self._size, len(one.sent)).copy_(one.sent).view(-1)
            one.received = torch.from_numpy(heap.room(size))
        else:
            if one.for_all:
                one.sent = one.sent.repeat(self._size)
            one.received = one.sent.new_empty(size)
        one.work = dist.all_to_all_single(one.received, one.sent, heard, one.splits, group=group, async_op=True)

    # Sums

    def allreduce(self, tensor: torch.Tensor) -> Any:
        """Starts to replace a tensor, on any device, by its sum over all ranks; ``wait`` of the result ends it."""
        return dist.all_reduce(tensor, group=self._devices if tensor.is_cuda else self._bulk, async_op=True)

    def set_by_any(self, flags: torch.Tensor) -> list[bool]:
        """Which of these flags, bool ``[n]`` on any device, any rank has set."""
        numbers = flags.cpu().to(torch.uint8)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._host)
        if self.stats is not None:
            self.stats.add(wire=traffic.allreduce(numbers.numel(), self._size))
        return list(map(bool, numbers.tolist()))

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest of all ranks' numbers, at each place."""
        told = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._host)
        return list(map(int, told.tolist()))

    def start_sum(self, data: Floats, name: str) -> _Sum:
        """As ``Collectives.start_sum``, in place; the order counts, and not the name."""
        one = _Sum(data)
        if self._held is not None:
            self._held.append(one)
        else:
            one.work = self.allreduce(self._tensors.tensor(data))
        return one

    def wait_sum(self, pending: _Sum) -> Floats:
        """As ``Collectives.wait_sum``."""
        pending.work.wait()
        return pending.data

    # Meetings

    def start_step_check(self, vote: Floats, name: str, tally: Callable[[Floats], object]) -> None:
        """Waits for the step check, and calls ``tally`` with the sum of all ranks' votes."""
        tally(self.wait_votes(self.start_vote(vote)))

    def start_vote(self, vote: Floats, name: str = "") -> tuple[Any, torch.Tensor]:
        """Starts a step check with this rank's vote, for ``wait_votes``; the order counts, and not the name."""
        told = torch.from_numpy(vote)[None]
        if not self._far:
            return dist.all_reduce(told, group=self._host, async_op=True), told
        told = told.repeat(self._size, 1)
        heard = torch.empty_like(told)
        return dist.all_to_all_single(heard, told, group=self._host, async_op=True), heard

    def traffic_of_vote(self, size: int) -> Traffic:
        if self._far:
            return traffic.allgather(size, size * self._size, self._size)
        return traffic.allreduce(size, self._size)

    def wait_votes(self, spoken: tuple[Any, torch.Tensor]) -> Floats:
        """The sum of all ranks' votes."""
        spoken[0].wait()
        total: Floats = spoken[1].sum(0).numpy()
        return total

    def await_all(self, dense_name: str | None) -> None:
        """``start_step_check`` has waited already."""

    def included(self) -> bool:
        """Whether this rank takes part; others cannot make these collectives."""
        return True

    def close(self) -> None:
        """Ends the groups. Every rank calls it; it can be called more than once."""
        groups = {self._host, self._bulk, self._devices} - {None}
        self._host = self._bulk = self._devices = None
        if dist.is_initialized() and not self._keeps:  # else they end with all others
            for group in groups:
                with suppress(ValueError):  # they have ended with others, before the ones that are there now
                    dist.destroy_process_group(group)


def _level(ranks: Sequence[int]) -> None:
    """Makes these ranks, which all call it, have equally many process groups.

    PyTorch names a group that its own ranks make alone by how many groups each of them has. If these differ, as where
    the job has made a group of some of them, the ranks would wait for each other for ever: those that have fewer make
    groups of their own.
    """
    store, own = meeting_place(f"groups of {ranks}"), dist.get_rank()
    names = dist.distributed_c10d._world.pg_names  # PyTorch has no public call for it
    store.set(str(own), str(len(names)))
    most = max(map(int, store.multi_get(list(map(str, ranks)))))
    while len(names) < most:
        dist.new_group([own], backend="gloo", use_local_synchronization=True)


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """A group's time limit, of which PyTorch has no public call; None: it is not known."""
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            backend: Any = (group or dist.group.WORLD)._get_backend(torch.device(device))  # type: ignore[union-attr]
            found: timedelta = backend.options._timeout
            return found
    return None


class _Together(Held):
    """``DistributedCollectives.hold``: one message has the sizes of all exchanges, or an error.

    It has a fixed size, so that a rank that fails before it has started all exchanges can say so in it, and need not be
    there when the others hear of it.
    """

    def __init__(self, collectives: DistributedCollectives, most: int) -> None:
        self._collectives, self._most = collectives, most
        self._started: list[_Exchange | _Sum] = []
        self._error: Exception | None = None
        self._heard = torch.empty(0)
        self._work: Any = None

    def __enter__(self) -> None:
        self._collectives._held = self._started

    def __exit__(self, *raised: object) -> None:
        self._collectives._held = None

    @property
    def _exchanges(self) -> list[_Exchange]:
        return [one for one in self._started if isinstance(one, _Exchange)]

    def tell(self, error: Exception | None = None) -> None:
        collectives, self._error = self._collectives, error
        size = collectives.size()
        said = torch.zeros(size, 1 + _TEXT + self._most, dtype=torch.int64)
        if error is not None:
            text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")[: 8 * _TEXT]
            said[:, 0] = len(text)
            said[:, 1 : 1 + _TEXT] = torch.frombuffer(bytearray(text.ljust(8 * _TEXT)), dtype=torch.int64)
        else:
            for place, one in enumerate(self._exchanges, 1 + _TEXT):
                said[:, place] = torch.tensor(one.splits)
        self._heard = torch.empty_like(said)
        self._work = dist.all_to_all_single(self._heard, said, group=collectives._host, async_op=True)
        collectives.exchanges += 1
        if collectives.stats is not None:
            collectives.stats.add(wire=traffic.allgather(said[0].nbytes, said.nbytes, size))

    def launch(self) -> None:
        self._work.wait()
        collectives, failures = self._collectives, self._heard[:, 0].tolist()
        if any(failures):
            rows = self._heard[:, 1 : 1 + _TEXT].contiguous().numpy()
            texts = b"".join(row.tobytes()[:size] for row, size in zip(rows, failures, strict=True))
            collectives.failure = _failure(texts, failures)
            raise collectives.failure from self._error
        sizes = iter(self._heard[:, 1 + _TEXT :].T.tolist())
        for one in self._started:
            if isinstance(one, _Exchange):
                collectives._launch(one, next(sizes))
            else:
                one.work = collectives.allreduce(collectives._tensors.tensor(one.data))


def _failure(texts: bytes, sizes: Sequence[int]) -> RuntimeError:
    """The error for all ranks, from what those that have failed say."""
    ranks_of: dict[str, list[int]] = {}
    for rank, size in enumerate(sizes):
        text, texts = texts[:size].decode(errors="replace"), texts[size:]
        if text:
            ranks_of.setdefault(text, []).append(rank)
    said = "; ".join(f"{named(ranks)}: {text!r}" for text, ranks in ranks_of.items())
    return RuntimeError(f"this step failed on {said}. No gradient of it was applied on any rank")
