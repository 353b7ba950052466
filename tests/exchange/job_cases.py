"""Cases of mpi_cases.py: an engine's exchanges, and queues that fail, close and start again."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
from mpi4py import MPI

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.engine import Engine
from hvd_deepreduce.exchange.mpi import queue as queues
from hvd_deepreduce.exchange.mpi import session
from hvd_deepreduce.exchange.mpi.errors import ExchangeError, LostRankError
from hvd_deepreduce.exchange.mpi.queue import ExchangeQueue
from hvd_deepreduce.exchange.settings import DenseStreamExchange, TopKAllGather
from hvd_deepreduce.exchange.traffic import Traffic
from hvd_deepreduce.ops import select
from tests import cuda_emulator
from tests.case_runner import case
from tests.engine import test_one_pass as one_pass
from tests.engine.numpy_adapter import EmulatedTensors, NumpyAdapter, NumpyTensors
from tests.exchange.external import DenseSum
from tests.exchange.faults import BAD, COMM, RANK, SIZE
from tests.exchange.mpi_collectives import MPICollectives

NUMEL = 64
MODEL = {"w": ((40, 5), np.float32), "b": ((7,), np.float32), "v": ((300,), np.float32)}
BUCKETS = {"scope": "bucket", "bucket_bytes": 1024, "exchange": "densestream", "sparsifier": "none"}
ONE_BUCKET = {"scope": "model", "exchange": "densestream", "sparsifier": {"name": "topk", "density": 0.1}}


def key(bucket: int, step: int = 0) -> RngKey:
    return RngKey(0, bucket, step, RANK)


def error_of(future) -> str:
    """The text of the future's error, the same on all ranks."""
    try:
        future.result(20)
    except (ExchangeError, LostRankError) as error:
        text = str(error)
    else:
        text = "no error"
    texts = COMM.allgather(text)
    assert len(set(texts)) == 1, texts
    return text


def submit(queue: ExchangeQueue, bucket: int, step: int = 0, value: float = 1.0, settings=None, make=None):
    row, out = np.full(NUMEL, value, np.float32), np.zeros(NUMEL, np.float32)
    return queue.submit(settings or TopKAllGather(), make or (lambda: (row, None)), lambda: out, key(bucket, step)), out


def assert_works(queue: ExchangeQueue, step: int) -> None:
    pending, out = submit(queue, 0, step, RANK + 1.0)
    pending.result(20)
    assert np.all(out == SIZE * (SIZE + 1) / 2)


@contextlib.contextmanager
def new_queue() -> Iterator[ExchangeQueue]:
    queue = ExchangeQueue(comm=COMM)
    yield queue
    queue.close()


def threads() -> int:
    return sum(thread.name == "deepreduce exchange" for thread in threading.enumerate())


@case
def buckets_of_different_ranks_are_not_added() -> None:
    """After an exception on one rank, its next bucket meets another bucket of the others."""
    with new_queue() as queue:
        assert_works(queue, 0)
        # The bad rank's backward pass ended with an error after bucket 0 of step 1. It goes on with step 2.
        first, _ = submit(queue, 0, 1)
        first.result(20)
        second, out = submit(queue, 0, 2) if RANK == BAD else submit(queue, 1, 1)
        said = error_of(second)
        assert "(bucket 0 of step 2)" in said and "(bucket 1 of step 1)" in said and f"ranks {BAD}: " in said
        assert np.all(out == 0)
        # All later buckets fail at once, with that error, on all ranks.
        began = time.monotonic()
        for bucket in range(2, 5):
            again = error_of(submit(queue, bucket, 1)[0])
            assert "an earlier exchange of this job failed" in again and said in again and "load_state_dict" in again
        assert time.monotonic() - began < 10 and isinstance(queue.failure, ExchangeError)
    with new_queue() as queue:
        assert_works(queue, 3)


@case
def an_error_before_the_exchange_is_an_error_on_all_ranks() -> None:
    """In the function that selects what is sent, in loading the exchange, and in another package's exchange."""

    def broken() -> None:
        raise MemoryError("no room to select")

    class Missing(DenseSum):
        name = "external_missing"
        id = 251
        implementation = "tests.exchange.external:" + ("missing" if RANK == BAD else "dense_sum")

    def failing(*arguments) -> int:
        raise OSError("no such device")

    for settings in (TopKAllGather(), DenseStreamExchange(), DenseSum()):
        with new_queue() as queue:
            make = broken if RANK == BAD else None
            said = error_of(submit(queue, 0, settings=settings, make=make)[0])
            assert said == f"rank {BAD}: MemoryError: no room to select", said
    with new_queue() as queue:  # a stream cannot be used, for instance
        row = np.ones(NUMEL, np.float32)
        within = contextlib.nullcontext if RANK != BAD else broken
        pending = queue.submit(TopKAllGather(), lambda: (row, None), lambda: np.zeros_like(row), key(0), within)
        assert error_of(pending) == f"rank {BAD}: MemoryError: no room to select"
    for settings in (TopKAllGather(), DenseSum()):  # no memory for the sum
        with new_queue() as queue:
            out = broken if RANK == BAD else lambda: np.zeros(NUMEL, np.float32)
            pending = queue.submit(settings, lambda: (np.ones(NUMEL, np.float32), None), out, key(0))
            assert error_of(pending) == f"rank {BAD}: MemoryError: no room to select"
    with new_queue() as queue:
        said = error_of(submit(queue, 0, settings=Missing())[0])
        assert said.startswith(f"rank {BAD}: exchange 'external_missing' has implementation"), said
    with new_queue() as queue:
        with patch.object(DenseSum, "load", lambda self: failing):
            said = error_of(submit(queue, 0, settings=DenseSum())[0])
        assert "rank 0: OSError: no such device; rank 1: OSError" in said
    # Another package's function gets the same comparison before and after it.
    with new_queue() as queue:
        assert "(bucket 0 of" in error_of(submit(queue, int(RANK == BAD), settings=DenseSum())[0])
    with new_queue() as queue:
        own = DenseSum().load()

        def wrong(settings, comm, tensor, out, residual, key) -> int:
            sent = own(settings, comm, tensor, out, residual, key)
            out[1] += RANK == BAD
            return sent

        with patch.object(DenseSum, "load", lambda self: wrong):
            assert "the ranks' sums differ" in error_of(submit(queue, 0, settings=DenseSum())[0])


@case
def a_queue_ends_with_its_thread_and_communicator() -> None:
    before = threads()
    queue = ExchangeQueue(comm=COMM)
    assert_works(queue, 0)
    assert threads() == before + 1
    comm = queue._state.comm
    queue.close()
    queue.close()
    assert threads() == before and comm == MPI.COMM_NULL
    with pytest.raises(RuntimeError, match="this queue of exchanges is closed"):
        submit(queue, 1)
    # Without close(): when nothing refers to it any more.
    queue = ExchangeQueue(comm=COMM)
    assert_works(queue, 0)
    gone, comm = weakref.ref(queue), queue._state.comm
    del queue
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + 5
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == before and comm == MPI.COMM_NULL
    # Many of them: communicators are a limited resource.
    for _ in range(30):
        with new_queue():
            pass
    assert threads() == before


@case
def an_exchange_cannot_be_cancelled() -> None:
    """The other ranks would wait for it."""
    with new_queue() as queue:
        pending, out = submit(queue, 0)
        assert not pending.cancel()
        pending.result(20)
        assert np.all(out == SIZE)
        assert_works(queue, 1)


@case
def a_queue_that_one_rank_closes() -> None:
    """The others learn it, whether they wait in an exchange already or begin one later."""
    for late in (False, True):
        queue = ExchangeQueue(comm=COMM)
        assert_works(queue, 0)
        if RANK == BAD:
            if not late:
                time.sleep(0.3)
            queue.close(seconds=0.2)
            COMM.Barrier() if late else None
        else:
            COMM.Barrier() if late else None
            with pytest.raises((ExchangeError, LostRankError), match="close"):
                submit(queue, 1)[0].result(10)
            queue.close()


@case
def an_exchange_under_way_does_not_hold_close_up() -> None:
    queue = ExchangeQueue(comm=COMM)
    assert_works(queue, 0)
    if RANK != BAD:  # waits for the bad rank, which never comes
        pending, _ = submit(queue, 1)
        later, _ = submit(queue, 2)
        began = time.monotonic()
        queue.close(seconds=0.2)
        assert time.monotonic() - began < 10
        for future in (pending, later):
            with pytest.raises((LostRankError, RuntimeError), match="has closed its exchanges|was closed before"):
                future.result(1)
    COMM.Barrier()
    queue.close(seconds=0.2)
    assert not queue._thread.is_alive()


@case
def two_jobs_in_one_world() -> None:
    """Each sums its own ranks, in its own order; and a job of some ranks of a job, as a process set is."""
    even = COMM.Split(RANK % 2, -RANK)
    gradients = {name: np.full(shape, 1.0 + RANK, dtype) for name, (shape, dtype) in MODEL.items()}
    for comm in (even, COMM.Split(RANK == BAD, RANK), COMM.Split(0, -RANK)):
        adapter = NumpyAdapter(MPICollectives(comm), MODEL, BUCKETS)
        mine = comm.allreduce(1.0 + RANK) / comm.size
        for _ in range(2):
            for name, reduced in adapter.step({n: g.copy() for n, g in gradients.items()}).items():
                assert np.allclose(reduced, mine), (name, reduced[:3], mine)
        adapter.engine.queues.close()


@case
def what_keeps_one_rank_from_exchanging_is_an_error_on_all() -> None:
    collectives = MPICollectives(COMM)

    def refuse(word: str) -> None:
        adapter = NumpyAdapter(collectives, MODEL, ONE_BUCKET)
        try:
            adapter.engine.exchange.prepare(1)
        except RuntimeError as error:
            text = str(error)
        else:
            text = "no error"
        assert set(COMM.allgather(text)) == {text} and word in text, text

    def no_mpi() -> int:
        raise ImportError("libmpi.so is missing")

    with patch.object(queues, "world_rank", no_mpi if RANK == BAD else queues.world_rank):
        refuse(f"exchange 'densestream' cannot start: rank {BAD}: 'ImportError: libmpi.so is missing'")
    with patch.object(queues, "world_rank", lambda: 0):
        refuse("each must have a number of its own")


@case
def gradients_that_stay_where_they_are() -> None:
    """What is sent and kept is what it is where every residual is changed in place, also after an error."""

    def steps(settings: dict[str, object]) -> list[dict[str, bytes]]:
        adapter = NumpyAdapter(MPICollectives(COMM), one_pass.MODEL, {**ONE_BUCKET, **settings})
        found = one_pass.one_by_one(adapter, RANK)
        adapter.engine.stats.measuring = False
        with patch.object(session, "_digest", lambda *_: RANK), pytest.raises(ExchangeError, match="sums differ"):
            one_pass.one_by_one(adapter, RANK)
        found.append(one_pass.kept(adapter.engine))
        adapter.engine.queues.close()
        return found

    for settings in (
        {},
        {"scope": "bucket", "bucket_bytes": 30_000, "exchange": "sparcml"},
        {"selection": "tensor", "exchange": "topk_allgather"},
        {"density_schedule": {"steps": [[2, 0.5], [4, 0.25]]}},
    ):
        with patch.object(select, "topk_into", wraps=select.topk_into) as into:
            elsewhere = steps(settings)
            calls = into.call_count
            with patch.object(Engine, "in_one_pass", lambda *_: False):
                assert steps(settings) == elsewhere
            assert into.call_count == calls > 3


@case
def what_fails_before_a_bucket_is_queued_is_an_error_on_all_ranks() -> None:
    adapter = NumpyAdapter(MPICollectives(COMM), MODEL, ONE_BUCKET)
    gradients = {name: np.ones(shape, dtype) for name, (shape, dtype) in MODEL.items()}
    adapter.step(gradients)

    def no_room(*_: object) -> None:
        raise MemoryError("no room for the residual")

    with patch.object(adapter.engine._memory, "joined", no_room if RANK == BAD else adapter.engine._memory.joined):
        with pytest.raises(ExchangeError, match=f"^rank {BAD}: MemoryError: no room for the residual$"):
            adapter.step(gradients)
    adapter.engine.queues.close()


@case
def a_queue_that_one_rank_does_not_make() -> None:
    """Making it has a time limit."""
    parent = COMM.Dup()
    began = time.monotonic()
    if RANK != BAD:
        with pytest.raises(LostRankError, match="did not all make their queue of exchanges within 0.3 s"):
            ExchangeQueue(comm=parent, seconds=0.3)
        assert time.monotonic() - began < 10
    COMM.Barrier()
    if RANK == BAD:  # MPI's own call ends now on all ranks, but the others have given up
        with pytest.raises(LostRankError):
            ExchangeQueue(comm=parent, seconds=0.3)


@case
def gradients_on_a_gpu_stay_there() -> None:
    """In the emulator: the sums and residuals are those of the host, with NaN on the way and from a checkpoint on."""
    if cuda_emulator.available():
        pytest.skip(cuda_emulator.available())
    exchanges = ("densestream", {"name": "densestream", "value": "qsgd", "density": 0.1}, "sparcml", "topk_allgather")
    for number, exchange in enumerate(exchanges):
        config = {**(BUCKETS if number == 2 else ONE_BUCKET), "exchange": exchange,
                  "selection": "tensor" if number == 1 else "scope"}  # fmt: skip
        tensors = EmulatedTensors()
        adapters = [NumpyAdapter(MPICollectives(COMM), MODEL, config, one) for one in (None, tensors)]
        rng = np.random.default_rng(RANK)
        for step in range(4):
            gradients = {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in MODEL.items()}
            if step == 1 and RANK == BAD:
                gradients["v"][7] = np.nan
            if step == 2:
                del gradients["b"]  # zeros are sent in its place
            copied: list[int] = []

            def counted(array, copied=copied, get=cuda_emulator.EmulatedArray.get) -> np.ndarray:
                if threading.current_thread().name == "deepreduce exchange":
                    copied.append(array.nbytes)
                return get(array)

            with (
                patch.object(cuda_emulator.EmulatedArray, "get", counted),
                patch.object(queues.device, "synchronize", wraps=queues.device.synchronize) as waited,
            ):
                ours, theirs = [adapter.step(gradients) for adapter in adapters]
            # The sum is read on another stream, so nothing is under way when it is given out.
            assert waited.call_count == (1 if number != 2 else 2)
            if step != 1 and number != 2:  # a gradient that is not finite, or of which all is selected, is copied
                assert copied and max(copied) <= 512, "the mailbox of an encode is more than what is selected"
            for name, want in ours.items():
                assert theirs[name].tobytes() == want.tobytes(), (config, step, name)
            states = [adapter.engine.state_dict() for adapter in adapters]
            for name, want in states[0]["residuals"].items():
                assert np.array_equal(states[1]["residuals"][name], want), (config, step, name)
            if step == 2:
                adapters[1].engine.load_state_dict(states[1])
        assert not isinstance(next(iter(adapters[1].engine._memory._residuals.values())), np.ndarray)
        assert tensors.side_streams_of and set(tensors.side_streams_of) == {"deepreduce exchange"}
        for adapter in adapters:
            adapter.engine.queues.close()


@case
def an_exchange_of_another_package_gets_gradients_on_the_host() -> None:
    """Unless it says that it takes arrays on a GPU."""
    if cuda_emulator.available():
        pytest.skip(cuda_emulator.available())
    tensors = EmulatedTensors()
    adapter = NumpyAdapter(MPICollectives(COMM), MODEL, {**ONE_BUCKET, "exchange": "external_dense_sum"}, tensors)
    gradients = {name: np.ones(shape, dtype) for name, (shape, dtype) in MODEL.items()}
    total = sum(np.count_nonzero(reduced) for reduced in adapter.step(gradients).values())
    assert total == 50 and not tensors.side_streams_of  # a tenth of 507
    adapter.engine.queues.close()


@case
def a_gpu_that_fails_after_the_agreement_is_a_lost_rank() -> None:
    """The others count the sum as good if they agree before its notice comes. Their next exchange ends soon."""
    if cuda_emulator.available():
        pytest.skip(cuda_emulator.available())

    def broken(array) -> None:
        raise RuntimeError("the GPU has failed")

    row, out = np.full(NUMEL, RANK + 1.0, np.float32), cuda_emulator.zeros(NUMEL, np.float32)
    with new_queue() as queue:
        with patch.object(queues.device, "synchronize", broken if RANK == BAD else queues.device.synchronize):
            first = queue.submit(TopKAllGather(), lambda: (row, None), lambda: out, key(0))
            if RANK == BAD:
                with pytest.raises(LostRankError, match="the GPU has failed"):
                    first.result(20)
            elif (error := first.exception(20)) is None:
                assert np.all(out.get() == SIZE * (SIZE + 1) / 2)
            else:
                assert isinstance(error, LostRankError) and "the GPU has failed" in str(error)
        began = time.monotonic()
        with pytest.raises(LostRankError):
            submit(queue, 1)[0].result(20)
        assert time.monotonic() - began < 15


@case
def sums_of_another_package_on_a_gpu_are_compared() -> None:
    if cuda_emulator.available():
        pytest.skip(cuda_emulator.available())

    def summed(settings, comm, tensor, out, residual, key) -> Traffic:
        total = np.empty(NUMEL, np.float32)
        comm.Allreduce(tensor, total)
        total[1] += wrong and RANK == BAD
        out[:] = total if isinstance(out, np.ndarray) else cuda_emulator.asarray(total)
        return Traffic(total.nbytes, total.nbytes)

    row = np.ones(NUMEL, np.float32)
    for wrong in (False, True):
        for on_gpu in (range(SIZE), [BAD]):  # all ranks' sums, or those of one rank
            out = cuda_emulator.zeros(NUMEL, np.float32) if RANK in on_gpu else np.zeros(NUMEL, np.float32)
            with new_queue() as queue, patch.object(DenseSum, "load", lambda self: summed):
                pending = queue.submit(DenseSum(), lambda: (row, None), lambda out=out: out, key(0))
                if wrong:
                    assert "the ranks' sums differ" in error_of(pending)
                else:
                    pending.result(20)


@case
def a_job_goes_on_after_an_error() -> None:
    """Every rank loads a state; residuals and step counts stay as they were, and sums are right again."""
    _goes_on_after_an_error(NumpyTensors())
    if not cuda_emulator.available():
        _goes_on_after_an_error(EmulatedTensors())


def _goes_on_after_an_error(tensors: NumpyTensors) -> None:
    adapter = NumpyAdapter(MPICollectives(COMM), MODEL, ONE_BUCKET, tensors)
    engine = adapter.engine
    rng = np.random.default_rng(RANK)

    def gradients() -> dict[str, np.ndarray]:
        return {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in MODEL.items()}

    def residuals() -> np.ndarray:
        return np.concatenate([residual.ravel() for residual in engine.state_dict()["residuals"].values()])

    adapter.step(gradients())
    before = residuals()
    given = gradients()

    def no_room(*_: object) -> None:
        raise MemoryError("no room to merge")

    with patch.object(Stream, "from_pieces", no_room if RANK == BAD else Stream.from_pieces):
        with pytest.raises(ExchangeError, match=f"rank {BAD}: MemoryError: no room to merge"):
            adapter.step({name: gradient.copy() for name, gradient in given.items()})
    # The step's gradient is in the residual, of which nothing was sent.
    after = residuals()
    flat = np.concatenate([given[name].ravel() for name in engine.state_dict()["residuals"]])
    assert np.allclose(after, before + flat, atol=1e-6)
    # Without a restart, nothing is exchanged.
    with pytest.raises((RuntimeError, ExchangeError), match="still in flight|an earlier exchange"):
        adapter.step(gradients())
    COMM.Barrier()
    engine.load_state_dict(engine.state_dict())
    assert np.array_equal(residuals(), after)
    zero = {name: np.zeros(shape, dtype) for name, (shape, dtype) in MODEL.items()}
    reduced = adapter.step(zero)
    flat = np.concatenate([reduced[name].ravel() for name in engine.state_dict()["residuals"]]) * SIZE
    sent = COMM.allreduce(after.astype(np.float64)) - COMM.allreduce(residuals().astype(np.float64))
    assert np.allclose(flat, sent, atol=1e-5) and np.count_nonzero(flat) >= 50
    engine.queues.close()
