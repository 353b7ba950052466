"""Cases of mpi_cases.py: exchanges through ``ExchangeQueue``, registered here and elsewhere."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.config import Config
from hvd_deepreduce.exchange.mpi import announcement
from hvd_deepreduce.exchange.mpi.queue import ExchangeQueue
from hvd_deepreduce.exchange.settings import AllGather, DenseStreamExchange, SparCML, TopKAllGather
from hvd_deepreduce.exchange.traffic import Traffic
from tests.case_runner import case
from tests.exchange.external import DenseSum

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
NUMEL = 1000


def accumulated(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(NUMEL).astype(np.float32)


def selection(rank: int) -> np.ndarray:
    return np.flatnonzero(np.abs(accumulated(rank)) > 1).astype(np.uint32)


def tensor(rank: int) -> SparseTensor:
    return SparseTensor(NUMEL, selection(rank), accumulated(rank)[selection(rank)])


def expected(ranks) -> np.ndarray:
    return sum(tensor(rank).dense() for rank in ranks)


def check(queue: ExchangeQueue, settings, ranks, me: int) -> Traffic:
    """The sum and the residual of one exchange; returns the bytes sent and received."""
    residual, out = accumulated(RANK), np.full(NUMEL, np.nan, np.float32)
    traffic = queue.submit(settings, lambda: (tensor(RANK), residual), lambda: out, RngKey(1, 2, 3, me)).result(60)
    assert np.allclose(out, expected(ranks), atol=1e-5), settings
    assert not residual[selection(RANK)].any() and residual.any(), settings
    return traffic


@case
def an_exchange_of_another_package() -> None:
    queue = ExchangeQueue()
    for rounds in (1, 3):
        settings = Config.load({"exchange": {"name": "external_dense_sum", "rounds": rounds}}).exchange
        assert isinstance(settings, DenseSum)
        for way in check(queue, settings, range(SIZE), RANK):
            around = (SIZE - 1) * announcement.CARD_BYTES
            assert 0 < way - rounds * 4 * NUMEL - around < 100, "its own bytes, and the queue's meeting and agreement"


@case
def each_exchange_runs_its_own_function() -> None:
    queue = ExchangeQueue()
    settings = (
        DenseStreamExchange(fill=False),
        DenseStreamExchange(coded=False, fill=False),
        TopKAllGather(),
        SparCML(algorithm="split_allgather"),
    )
    sent, received = np.array([check(queue, one, range(SIZE), RANK) for one in settings]).T
    assert sent.all() and len(set(COMM.allreduce(sent).tolist())) == len(sent), sent
    assert COMM.allreduce(sent).tolist() == COMM.allreduce(received).tolist(), "what one sends another receives"


@case
def an_exchange_without_a_function_is_refused() -> None:
    queue = ExchangeQueue()
    residual = accumulated(RANK)
    with pytest.raises(ValueError, match="exchange 'allgather' has no function over MPI"):
        queue.submit(AllGather(), lambda: (tensor(RANK), residual), lambda: residual, RngKey(0, 0, 0))
    assert np.array_equal(residual, accumulated(RANK))
    check(queue, SparCML(), range(SIZE), RANK)  # the queue works on


@case
def some_ranks_of_a_communicator() -> None:
    """Every rank makes a queue for its half of a communicator whose ranks are in reverse order."""
    reverse = COMM.Split(0, -RANK)
    world = [SIZE - 1 - rank for rank in range(SIZE)]
    halves = [list(range(SIZE // 2)), list(range(SIZE // 2, SIZE))]
    mine = next(half for half in halves if reverse.rank in half)
    queue = ExchangeQueue(mine, comm=reverse)
    check(queue, SparCML(), [world[rank] for rank in mine], mine.index(reverse.rank))
    reverse.Free()
    check(queue, DenseSum(), [world[rank] for rank in mine], mine.index(SIZE - 1 - RANK))
    with pytest.raises(TypeError, match="comm is .*intracommunicator"):
        ExchangeQueue(comm=MPI.COMM_NULL)


@case
def two_queues_of_one_communicator() -> None:
    """Their threads reach their sums in a different order on every rank."""
    queues = [ExchangeQueue(comm=COMM), ExchangeQueue(comm=COMM)]
    release = threading.Event()
    outs = [np.zeros(NUMEL, np.float32) for _ in queues]

    def make(number: int) -> tuple[SparseTensor, None]:
        """Queue 0 comes last on even ranks, queue 1 on odd ranks. Queue 1 sums twice the tensors."""
        assert number != RANK % 2 or release.wait(30)
        own = tensor(RANK)
        return SparseTensor(NUMEL, own.indices, (1 + number) * own.values), None

    sums = [
        queue.submit(TopKAllGather(), partial(make, number), lambda out=out: out, RngKey(0, 0, 0, RANK))
        for number, (queue, out) in enumerate(zip(queues, outs, strict=True))
    ]
    threading.Timer(0.2, release.set).start()
    for number, (pending, out) in enumerate(zip(sums, outs, strict=True)):
        pending.result(60)
        assert np.allclose(out, (1 + number) * expected(range(SIZE)), atol=1e-5)
