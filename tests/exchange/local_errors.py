"""Cases of mpi_cases.py: what goes wrong on one rank alone, and what must not depend on time or order."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import threading
import time
import zlib
from unittest.mock import patch

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.balance import Histogram
from hvd_deepreduce.exchange.mpi import (
    announcement,
    densestream,
    private_comm,
    schedules,
    session,
    sparcml,
)
from hvd_deepreduce.exchange.mpi.errors import ExchangeError, LostRankError
from hvd_deepreduce.exchange.mpi.mpi_transport import MPITransport
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from hvd_deepreduce.ops import arrays, hash, stream_exchange
from tests import cuda_emulator
from tests.case_runner import case
from tests.exchange.faults import BAD, COMM, MODULES, RANK, SIZE, mine, refused, with_cards


def raises(error: BaseException):
    def work(*_: object, **__: object) -> None:
        raise error

    return work


def refused_promptly(*words: str, call) -> None:
    began = time.monotonic()
    refused(*words, call=call)
    assert time.monotonic() - began < 15


@case
def any_error_in_a_program_is_an_error_on_all_ranks() -> None:
    """Wherever it occurs between the meeting and the agreement, and whatever its type."""
    regions = (densestream, "kept_in_cells"), (Histogram, "bounds"), (Stream, "merge")
    places = [
        (Stream, "from_pieces"), (densestream, "pack"), (densestream, "unpack"),
        (SumBuffer, "write_region"), (SumBuffer, "result"), (session, "_digest"), (session, "_settlement"),
    ]  # fmt: skip
    if SIZE > densestream.DIRECT_RANKS:
        places += regions
    if SIZE > 3:  # else the bad rank is alone after one round
        places.append((Stream, "split"))
    errors = (MemoryError(), KeyError("gone"), ZeroDivisionError("by zero"))
    for number, (owner, name) in enumerate(places):
        error = errors[number % len(errors)]
        word = type(error).__name__

        def call(residual, owner=owner, name=name, error=error):
            before = densestream.SLICE_ELEMENTS
            densestream.SLICE_ELEMENTS = 40
            try:
                if RANK == BAD:
                    with patch.object(owner, name, raises(error)):
                        densestream.allreduce(COMM, mine(), dense=True, residual=residual, timeout=20)
                else:
                    densestream.allreduce(COMM, mine(), dense=True, residual=residual, timeout=20)
            finally:
                densestream.SLICE_ELEMENTS = before

        refused_promptly(f"rank {BAD}: {word}", call=call)
        if (owner, name) not in ((Stream, "from_pieces"), (Stream, "split"), *regions):
            with with_cards():
                refused_promptly(f"rank {BAD}: {word}", call=call)
    for algorithm in ("split_allgather", "recursive_doubling"):
        for owner, name in ((Stream, "from_pairs"), (Stream, "split"), (Stream, "merge"), (sparcml, "pack")):
            if (algorithm, name) == ("recursive_doubling", "split"):
                continue  # it does not split

            def call(residual, owner=owner, name=name, algorithm=algorithm):
                error = raises(MemoryError())
                with patch.object(owner, name, error if RANK == BAD else getattr(owner, name)):
                    sparcml.allreduce(COMM, mine(), residual=residual, algorithm=algorithm, timeout=20)

            merges = algorithm == "split_allgather" or BAD < 1 << SIZE.bit_length() - 1
            if name != "merge" or merges:  # in recursive doubling, a rank without a partner only hands in
                refused_promptly(f"rank {BAD}: MemoryError", call=call)


@case
def an_error_leaves_a_residual_on_a_gpu_unchanged() -> None:
    """Wherever it occurs, on the rank that has it and on the others; in the emulator."""
    if cuda_emulator.available():
        pytest.skip(cuda_emulator.available())
    places = [(stream_exchange, "sums_to_device"), (session, "_settlement"), (arrays, "move_all"),
              (hash, "hash_parts"), (densestream, "pack")]  # fmt: skip
    for owner, name in places:
        def call(residual, owner=owner, name=name):
            there, out = cuda_emulator.asarray(residual), cuda_emulator.zeros(1000, np.float32)
            error = raises(MemoryError())
            try:
                with patch.object(owner, name, error if RANK == BAD else getattr(owner, name)):
                    densestream.allreduce(
                        COMM, mine(), out=out, residual=there, fill=True, codec=DenseStream(value="qsgd"), timeout=20
                    )
            finally:
                residual[:] = there.get()  # ``refused`` looks at it

        for way in (contextlib.nullcontext(), with_cards()):
            with way:
                refused_promptly(f"rank {BAD}: MemoryError", call=call)

    def damaged(dense, parts, hash_parts=hash.hash_parts):
        if RANK == BAD:
            dense.memory[600] += 1
        return hash_parts(dense, parts)

    def differ(residual):
        there, out = cuda_emulator.asarray(residual), cuda_emulator.zeros(1000, np.float32)
        with patch.object(hash, "hash_parts", damaged):
            try:
                densestream.allreduce(COMM, mine(), out=out, residual=there, timeout=20)
            finally:
                residual[:] = there.get()

    refused_promptly("the ranks' sums differ", call=differ)


@case
def wrong_arguments_on_one_rank() -> None:
    """Found before anything is sent; the other ranks do not wait."""
    vector = np.zeros(1000, np.float32)
    strided = SparseTensor(1000, np.arange(0, 200, dtype=np.uint32)[::2], np.ones(200, np.float32)[::2])
    read_only = np.zeros(1000, np.float32)
    read_only.flags.writeable = False
    cases = {
        "fill is True and residual is None": {"fill": RANK == BAD},
        "read-only": {"out": read_only if RANK == BAD else vector},
        "could not convert string to float": {"scale": "much" if RANK == BAD else 1},
        "codec is 'plain'": {"codec": "plain" if RANK == BAD else DenseStream(coded=False)},
        "invalid literal": {"key": RngKey("x", 0, 0) if RANK == BAD else RngKey(0, 0, 0)},
        "density is 'much'": {"density": "much" if RANK == BAD else 0.5},
        "density is array": {"density": np.array(0.5) if RANK == BAD else 0.5},
        "timeout is 0": {"timeout": 0 if RANK == BAD else 20},
        "timeout is '20'": {"timeout": "20" if RANK == BAD else 20},
        "patience is nan": {"patience": math.nan if RANK == BAD else 20},
    }
    for word, arguments in cases.items():
        given = {"timeout": 20, **arguments}
        refused_promptly(f"rank {BAD}: ", word, call=lambda r, a=given: densestream.allreduce(COMM, mine(), **a))
    refused_promptly(
        f"rank {BAD}: algorithm is 'ring'",
        call=lambda r: sparcml.allreduce(COMM, mine(), algorithm="ring" if RANK == BAD else "auto", timeout=20),
    )
    for module in MODULES.values():
        for out in (vector, vector[:]):
            shared = {"out": out if RANK == BAD else np.zeros(1000, np.float32), "residual": vector}
            refused_promptly(
                "out and residual share memory",
                call=lambda r, f=module.allreduce, a=shared: f(COMM, mine(), timeout=20, **a),
            )
        # Strided parts are no error, with and without fill; nor are parts that share memory with out or residual.
        for more in [{}] + [{"fill": True}] * (module is densestream):
            residual = np.ones(1000, np.float32)
            total = module.allreduce(COMM, strided, dense=True, residual=residual, timeout=20, **more)
            assert np.array_equal(total[strided.indices], np.full(100, SIZE)) and not residual[strided.indices].any()
        out = np.ones(1000, np.float32)
        view = SparseTensor(1000, np.arange(500, 1000, dtype=np.uint32), out[:500])
        total = module.allreduce(COMM, view, out=out, timeout=20)
        assert np.array_equal(total, [0] * 500 + [SIZE] * 500)


@case
def what_must_be_equal_is_compared() -> None:
    for module in MODULES.values():
        cases = [
            ("scale 0.5", "scale 1,", {"scale": 0.5 if RANK == BAD else 1.0}),
            ("a dense sum", "a sparse sum", {"dense": RANK == BAD}),
            ("bucket 7 of step 0", "bucket 8 of step 0", {"key": RngKey(0, 7 + (RANK == BAD), 0)}),
            ("bucket 7 of step 3", "bucket 7 of step 4", {"key": RngKey(0, 7, 3 + (RANK == BAD))}),
            ("seed 1", "seed 2", {"key": RngKey(1 + (RANK == BAD), 0, 0)}),
        ]
        for one, other, arguments in cases:
            refused_promptly(
                one, other, f"ranks {BAD}: ",
                call=lambda r, f=module.allreduce, a=arguments: f(COMM, mine(), timeout=20, **a),
            )  # fmt: skip


@case
def sums_do_not_depend_on_the_order_of_arrival() -> None:
    """Slices overtake each other on the way; every call rounds at random, with the same numbers."""
    rng = np.random.default_rng(RANK)
    start = MPITransport._start_receives
    codec, key = DenseStream(value="qsgd", bits=4), RngKey(1, 2, 3)
    before = densestream.SLICE_ELEMENTS
    densestream.SLICE_ELEMENTS = 100
    tensor = SparseTensor(20000, np.arange(0, 20000, 5, dtype=np.uint32), rng.standard_normal(4000).astype(np.float32))
    seen = set()

    def some(self: MPITransport, waiting: dict) -> bool:
        """Only some of the messages have come so far."""
        late = {slot: waiting.pop(slot) for slot in list(waiting) if random.random() < 0.7}
        started = start(self, waiting)
        waiting.update(late)
        return started

    for call in range(8):
        random.seed(100 * call + RANK)
        residual = np.linspace(-1, 1, 20000, dtype=np.float32)
        with patch.object(MPITransport, "_start_receives", some):
            total = densestream.allreduce(
                COMM, tensor, dense=True, residual=residual, codec=codec, key=key, timeout=20
            )  # fmt: skip
        seen.add((zlib.crc32(total.tobytes()), zlib.crc32(residual.tobytes())))
    densestream.SLICE_ELEMENTS = before
    assert len(seen) == 1, f"8 equal calls gave {len(seen)} results"


@case
def infinities_do_not_spoil_the_residual() -> None:
    for module in MODULES.values():
        for more in [{}] + [{"codec": DenseStream(value=v)} for v in ("qsgd", "float16")] * (module is densestream):
            before = np.random.default_rng(RANK).standard_normal(1000).astype(np.float32)
            if RANK == BAD:
                before[[3, 700]] = np.inf, np.nan
            residual = before.copy()
            total = module.allreduce(COMM, residual.copy(), dense=True, residual=residual, timeout=20, **more)
            assert np.isinf(total[3]) and np.isnan(total[700])
            finite = np.isfinite(before)
            assert np.isfinite(residual[finite]).all(), more
            assert np.array_equal(residual[~finite], before[~finite], equal_nan=True)
            whole, left = COMM.allreduce(before.astype(np.float64)), COMM.allreduce(residual.astype(np.float64))
            everywhere = np.isfinite(whole)
            assert np.abs((total + left)[everywhere] - whole[everywhere]).max() < 1e-4 * SIZE, more


@case
def nan_has_the_same_bits_on_all_ranks() -> None:
    """Where several ranks have NaN, with different bits."""
    numel = 2000
    for module in MODULES.values():
        row = np.full(numel, 0x7FC00000 + RANK + 1, np.uint32)
        row[: numel // 2] |= 0x80000000 * (RANK % 2)
        algorithms = ("split_allgather", "recursive_doubling") if module is sparcml else (None,)
        for algorithm in algorithms:
            more = {"algorithm": algorithm} if algorithm else {}
            total = module.allreduce(COMM, row.view(np.float32), dense=True, timeout=20, **more)
            assert np.isnan(total).all() and len(set(COMM.allgather(zlib.crc32(total.tobytes())))) == 1


@case
def a_straggler_is_waited_for() -> None:
    """Longer than the limit for a message, because it has not come yet. The others say that they wait."""
    said = []
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.2"
    try:
        with patch.object(private_comm.log, "warning", lambda text, *words: said.append(text % words)):
            if RANK == BAD:
                time.sleep(1)
            total = densestream.allreduce(COMM, np.ones(100, np.float32), dense=True, timeout=0.3)
    finally:
        del os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"]
    assert np.all(total == SIZE)
    if RANK != BAD:
        assert 2 <= len(said) <= 5 and f"rank {RANK} has waited" in said[0], said


@case
def an_interrupted_rank_tells_the_others() -> None:
    """Ctrl-C on one rank, in the meeting and between messages. What MPI may still write to is kept."""
    for midway in (False, True):
        comm = COMM.Dup()
        densestream.allreduce(comm, mine(), timeout=20)
        kept = len(private_comm.KEPT)
        came = threading.Event()
        run = MPITransport.run

        def waits(self, programs, midway=midway, came=came, run=run):
            """The others let the bad rank wait, until it has left."""
            if midway and RANK != BAD:
                COMM.Barrier()
            run(self, programs)

        if not midway and RANK != BAD:
            COMM.Barrier()
        error: BaseException | None = None
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        try:
            if RANK == BAD:
                timer.start()
            with patch.object(MPITransport, "run", waits):
                densestream.allreduce(comm, mine(), timeout=20)
        except (KeyboardInterrupt, LostRankError) as caught:
            error = caught
        if RANK == BAD:
            assert isinstance(error, KeyboardInterrupt), error
            assert len(private_comm.KEPT) > kept
            COMM.Barrier()
        else:
            assert isinstance(error, LostRankError) and f"rank {BAD} left the exchange: KeyboardInterrupt" in str(error)
        try:
            densestream.allreduce(comm, mine(), timeout=20)
        except LostRankError as again:
            assert f"aborted (rank {BAD} left the exchange" in str(again)
        else:
            raise AssertionError("the communicator was used again")
    refused("seed 1", "seed 0", call=lambda r: densestream.allreduce(COMM, mine(), key=RngKey(RANK == 0, 0, 0)))


@case
def an_unexpected_error_outside_the_programs_computations() -> None:
    """In the meeting, or in a schedule: that rank cannot go on as the others expect, so it leaves; they learn it."""
    user = schedules if SIZE <= densestream.DIRECT_RANKS else densestream  # the module whose own name is looked up
    for owner, name in ((user, "halving_rounds"), (announcement, "pack"), (announcement, "read")):
        comm = COMM.Dup()
        densestream.allreduce(comm, mine(), timeout=20)
        COMM.Barrier()  # all have ended it before a rank leaves
        began = time.monotonic()
        broken = raises(RuntimeError("no schedule")) if RANK == BAD else getattr(owner, name)
        with patch.object(owner, name, broken):
            try:
                densestream.allreduce(comm, mine(), timeout=20)
            except LostRankError as error:
                text = str(error)
        assert time.monotonic() - began < 15
        texts = set(COMM.allgather(text))
        assert texts == {f"a rank is lost: rank {BAD} left the exchange: RuntimeError: no schedule"}, texts
        try:
            densestream.allreduce(comm, mine(), timeout=20)
        except ExchangeError:
            raise AssertionError("the communicator was used again") from None
        except LostRankError:
            pass
