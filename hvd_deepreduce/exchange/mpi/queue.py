"""The exchanges of a training job that go over mpi4py: on a thread of their own, one after the other."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue
from typing import Any

from mpi4py import MPI

from hvd_deepreduce.codecs.interfaces import Floats, RngKey
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.mpi.errors import ExchangeError, LostRankError
from hvd_deepreduce.exchange.mpi.private_comm import PrivateComm, check_intracomm
from hvd_deepreduce.exchange.mpi.session import Session, meet_to_close, traffic_since
from hvd_deepreduce.exchange.settings import ExchangeSettings
from hvd_deepreduce.exchange.traffic import NOTHING, Traffic
from hvd_deepreduce.ops import device
from hvd_deepreduce.ops.dispatch import on_host

Tensor = SparseTensor | Floats
CREATE_SECONDS = 120.0
"""The longest time that making the communicator may take, once all ranks do so."""
CLOSE_SECONDS = 5.0
"""How long ``close`` waits for an exchange that is under way, and for the other ranks to close too."""


@dataclass(frozen=True)
class _Task:
    """One sum; the arguments of ``ExchangeQueue.submit``."""

    settings: ExchangeSettings
    make: Callable[[], tuple[Tensor, Floats | None]]
    out: Callable[[], Floats]
    key: RngKey
    within: Callable[[], AbstractContextManager[Any]]
    future: Future[Traffic]


@dataclass
class _QueueState:
    """What a queue and its thread share. The thread does not keep the queue itself alive.

    Attributes:
        comm: of the ranks that take part.
        private: its duplicate for sessions.
        tasks: what is to be done; None ends the thread.
        failure: the first error of an exchange; no later one is started.
        closed: whether no exchange may be submitted.
        lock: held while an exchange is submitted, or the queue closed.
    """

    comm: MPI.Intracomm
    private: PrivateComm
    tasks: SimpleQueue[_Task | None] = field(default_factory=SimpleQueue)
    failure: ExchangeError | LostRankError | None = None
    closed: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)


_serving: dict[threading.Thread, _QueueState] = {}
"""The threads of all queues that have not ended, closed or not."""


class ExchangeQueue:
    """Sums tensors over the ranks, in the order of ``submit``, which must be the same on every rank.

    The queue has a communicator of its own, because the threads of two queues reach their sums in a different order on
    every rank, and because the program may use ``comm`` itself. Making a queue is collective over its ranks.

    After an error no later exchange is started: all ranks refuse them at once, with the first error. To go on, every
    rank closes the queue and makes a new one.

    Args:
        ranks: the ranks of ``comm`` that take part; None: all. Only these make the queue.
        comm: an mpi4py intracommunicator; None: ``MPI.COMM_WORLD``.
        tag: tells queues apart that threads of one rank make at the same time; the same on all ranks, 0 to 32767.
        seconds: the longest time to wait for the other ranks to make it.

    Raises:
        RuntimeError: MPI was started without MPI_THREAD_MULTIPLE.
        TypeError: ``comm`` is not an intracommunicator.
        LostRankError: not all ranks made the queue in time.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        comm: MPI.Intracomm | None = None,
        *,
        tag: int = 0,
        seconds: float = CREATE_SECONDS,
    ) -> None:
        check_threads()
        _close_before_mpi()
        parent = MPI.COMM_WORLD if comm is None else comm
        check_intracomm(parent)
        made = _create(parent, list(range(parent.size)) if ranks is None else list(ranks), tag, seconds)
        # Made now and by this thread: the threads of two queues would make theirs in a different order on every rank.
        self._state = _QueueState(made, PrivateComm.of(made, seconds))
        self._thread = threading.Thread(target=_serve, args=(self._state,), name="deepreduce exchange", daemon=True)
        _serving[self._thread] = self._state
        self._thread.start()
        weakref.finalize(self, _end, self._state).atexit = False  # close_all does more

    @property
    def failure(self) -> ExchangeError | LostRankError | None:
        """The error after which no exchange is started any more, or None."""
        return self._state.failure

    def submit(
        self,
        settings: ExchangeSettings,
        make: Callable[[], tuple[Tensor, Floats | None]],
        out: Callable[[], Floats],
        key: RngKey,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Future[Traffic]:
        """Queues one dense sum.

        Args:
            settings: which exchange, and its settings. Its function is called on the queue's thread.
            make: returns this rank's tensor, and the residual to subtract what was sent from, or None. Called on the
                queue's thread.
            out: returns the array which gets the sum, float32 or float64 ``[numel]``; called after ``make``. It is not
                to be used before the future is done. On a GPU only if the settings have ``on_gpu``; all work on it and
                on the residual is over then.
            key: which sum this is (seed, bucket and step, the same on all ranks), and the randomness for rounding.
            within: makes the context in which ``make`` and the exchange run, such as a stream of a GPU.

        Returns:
            What this rank sent and received, or an error: an ``ExchangeError`` or a ``LostRankError``, on all ranks. It
            cannot be cancelled.

        Raises:
            ValueError: the exchange has no function over MPI.
            RuntimeError: the queue is closed.
        """
        if settings.implementation is None:
            settings.load()  # raises; anything else that is wrong with it becomes an error on all ranks
        task = _Task(settings, make, out, key, within, Future())
        task.future.set_running_or_notify_cancel()  # the other ranks count on it: it cannot be cancelled
        with self._state.lock:
            if self._state.closed:
                raise RuntimeError("this queue of exchanges is closed: make a new one, on all ranks")
            self._state.tasks.put(task)
        return task.future

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Ends the thread, and frees the communicator if all ranks close their queues. Can be called more than once.

        Exchanges that have not begun end with an error. If other ranks begin another one, they get an ``ExchangeError``
        or a ``LostRankError`` that names this rank.

        Args:
            seconds: how long to wait for the exchange that is under way, and for the other ranks.
        """
        if not self._state.closed:
            _close([(self._thread, self._state)], seconds)


def check_threads() -> None:
    """``RuntimeError`` unless several threads may call MPI at the same time."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "MPI was started without MPI_THREAD_MULTIPLE, which an exchange over MPI needs because its thread and "
            "Horovod's call MPI at the same time: use an MPI that supports it, or exchange 'allgather'"
        )


def world_rank() -> int:
    """This process's rank in MPI's world, which may hold the ranks of several jobs.

    Raises:
        RuntimeError: MPI was started without MPI_THREAD_MULTIPLE.
    """
    check_threads()
    return int(MPI.COMM_WORLD.rank)


def _close(serving: Sequence[tuple[threading.Thread, _QueueState]], seconds: float) -> None:
    """Ends these queues, and waits for their threads at most about so many seconds in all."""
    for _, state in serving:
        _end(state)
    threads = [thread for thread, _ in serving if thread is not threading.current_thread()]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for _, state in serving:
        state.private.stop = f"rank {state.private.rank} has closed its exchanges"
    for thread in threads:
        thread.join(1.0)


@atexit.register
def close_all() -> None:
    """Closes all queues of this process. Runs when it ends, and before MPI does."""
    _close(list(_serving.items()), CLOSE_SECONDS)


@cache
def _close_before_mpi() -> None:
    """Lets ``MPI_Finalize`` wait until the queues are closed: it deletes the attributes of ``MPI_COMM_SELF`` first.
    Where Horovod started MPI, its thread ends MPI as soon as one rank shuts Horovod down. The other ranks may be at
    their last calls then."""
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: close_all()), None)


def _create(parent: MPI.Intracomm, ranks: list[int], tag: int, seconds: float) -> MPI.Intracomm:
    """A communicator of these ranks of ``parent``, in this order. MPI has no such call that does not block."""
    made: list[MPI.Intracomm | Exception] = []

    def create() -> None:
        try:
            made.append(parent.Create_group(parent.group.Incl(ranks), tag))
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=create, name="deepreduce communicator", daemon=True)
    thread.start()
    thread.join(seconds)
    if not made:
        raise LostRankError(
            f"a rank is lost: the ranks {', '.join(map(str, ranks))} did not all make their queue of exchanges within "
            f"{seconds:g} s"
        )
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _end(state: _QueueState) -> None:
    """Lets the thread end after the exchange that is under way."""
    with state.lock:
        state.closed = True
        state.tasks.put(None)


def _serve(state: _QueueState) -> None:
    """The queue's thread."""
    try:
        _run_tasks(state)
    finally:
        _serving.pop(threading.current_thread(), None)


def _run_tasks(state: _QueueState) -> None:
    while (task := state.tasks.get()) is not None:
        try:
            with ExitStack() as stack:
                sent = _sum(state, task, stack)
        except BaseException as error:
            if state.failure is None:  # without the error's traceback, which refers to the exchange's arrays
                kind = LostRankError if isinstance(error, LostRankError) else ExchangeError
                state.failure = kind(str(error))
            task.future.set_exception(error)
        else:
            task.future.set_result(sent)
        del task  # it holds arrays
    if state.private.lost is None and not MPI.Is_finalized():
        try:
            meet_to_close(state.private, CLOSE_SECONDS)
        except (ExchangeError, LostRankError) as error:
            state.private.abandon(error)
        else:
            state.comm.Free()


def _sum(state: _QueueState, task: _Task, stack: ExitStack) -> Traffic:
    """One exchange. It enters ``task.within()`` in the stack, which the caller leaves. What was launched on a GPU has
    ended then: whoever waits for the sum has another stream, and after an error the arrays are given back."""
    if state.closed:
        raise RuntimeError("this queue of exchanges was closed before this exchange began")
    if state.failure is not None:
        raise type(state.failure)(
            f"an earlier exchange of this job failed, so this one was not begun. The first error: {state.failure}. To "
            "go on, call load_state_dict on every rank, or start the job again from a checkpoint"
        )
    try:
        sent = _exchange(state, task, stack)
    except BaseException:
        with suppress(Exception):
            _wait_for(task.out())
        raise
    try:
        _wait_for(task.out())
    except Exception as error:
        # The other ranks have agreed on this sum, and would wait for this rank in the next exchange.
        raise state.private.abandon(error) from error
    return sent


def _wait_for(out: Any) -> None:
    if not on_host(out):
        device.synchronize(out)


def _exchange(state: _QueueState, task: _Task, stack: ExitStack) -> Traffic:
    what = f"exchange {task.settings!r}"
    try:
        function = task.settings.load()
        stack.enter_context(task.within())
        tensor, residual = task.make()
        out = task.out()
    except Exception as error:
        with Session(state.comm, None, what, key=task.key, failure=error):
            raise AssertionError from error  # entering raises on all ranks
    if task.settings.in_session:
        return function(task.settings, state.comm, tensor, out, residual, task.key)
    before = traffic_since(state.comm)
    with Session(state.comm, tensor, what, out=out, key=task.key) as session:

        def run() -> Traffic:
            return Traffic(*function(task.settings, state.comm, tensor, out, residual, task.key))

        own = session.transport.attempt(NOTHING, run)
        session.agree(lambda: out)
        around = traffic_since(state.comm, before)
        return Traffic(own.sent + around.sent, own.received + around.received)
