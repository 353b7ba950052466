"""The engine's collectives over Horovod, on TensorFlow's tensors."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from operator import methodcaller
from threading import Thread
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_deepreduce.codecs.interfaces import U8, Floats
from hvd_deepreduce.horovod import HINT, NOBODY_CAME, WARN_SECONDS, HorovodCollectives, handshake_seconds
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.tensorflow.failures import OF_HOROVOD

# More than there are buckets in flight: if all threads waited, the next bucket could not be sent.
THREADS = 1000

T = TypeVar("T")
_NUMPY = methodcaller("numpy")
_SUM = partial(hvd.allreduce, op=hvd.Sum)
_log = logging.getLogger("hvd_deepreduce")


def await_ranks(operation: Callable[[], T]) -> T:
    """The result of an operation that waits for the other ranks. Ranks that do not come at all are reported.

    Raises:
        TimeoutError: a rank did not come in time (``handshake_seconds``).
    """
    limit, result = handshake_seconds(), Future[T]()

    def run() -> None:
        try:
            result.set_result(operation())
        except Exception as error:
            result.set_exception(error)

    # At the process's end nobody waits for a daemon: Horovod's shutdown ends its operation, but comes later.
    Thread(target=run, name="deepreduce handshake", daemon=True).start()
    began = time.monotonic()
    wait([result], min(WARN_SECONDS, limit or WARN_SECONDS))
    if not result.done() and limit != WARN_SECONDS:
        _log.warning(NOBODY_CAME.format(seconds=round(time.monotonic() - began)))
        wait([result], max(0.0, limit - WARN_SECONDS) if limit else None)
    if not result.done():
        raise TimeoutError(NOBODY_CAME.format(seconds=round(time.monotonic() - began)))
    return result.result()


class TensorFlowCollectives(HorovodCollectives):
    """Allgathers of ``horovod.tensorflow``, each on a thread of its own; tensors are on the host.

    Args:
        process_set: of the ranks that take part; None: all.

    Attributes:
        prefix: of the names of all operations.
    """

    def __init__(self, process_set: object = None) -> None:
        super().__init__(hvd, hvd.global_process_set if process_set is None else process_set)
        self.prefix = "deepreduce"
        self._threads = ThreadPoolExecutor(THREADS, "deepreduce allgather")
        self._functions: dict[str, Callable[..., Any]] = {}
        self._flying: set[Future[Any]] = set()

    def start_allgather(self, data: U8, name: str) -> Future[U8]:
        """Starts an allgather on another thread."""
        return self._submit(hvd.allgather, name, data)

    def wait_allgather(self, pending: Future[U8]) -> U8:
        """Waits for that thread."""
        return pending.result()

    def start_alltoall(self, data: U8, splits: Sequence[int], name: str) -> Future[Any]:
        """Starts an alltoall on another thread."""
        return self._submit(hvd.alltoall, name, data, np.array(splits, np.int32))

    def wait_alltoall(self, pending: Future[Any]) -> tuple[U8, list[int]]:
        """Waits for that thread."""
        received, sizes = pending.result()
        return received, sizes.tolist()

    def _subset(self, process_set: Any) -> HorovodCollectives:
        made = TensorFlowCollectives(process_set)
        made.prefix = self.prefix
        return made

    def start_sum(self, data: Floats, name: str) -> Future[Floats]:
        """As ``Collectives.start_sum``, on another thread."""
        return self._submit(_SUM, name, data)

    def wait_sum(self, pending: Future[Floats]) -> Floats:
        """As ``Collectives.wait_sum``."""
        return pending.result()

    def complete(self) -> None:
        """As ``Collectives.complete``."""
        wait(list(self._flying))

    def _submit(self, operation: Callable[..., Any], name: str, *data: Any) -> Future[Any]:
        future = self._threads.submit(self._run, operation, name, *data)
        self._flying.add(future)
        future.add_done_callback(self._flying.discard)
        return future

    def _gather(self, data: U8, name: str) -> U8:
        """While a function is traced, or within one of its operations.

        Raises:
            TimeoutError: a rank did not come in time.
        """
        gathered: U8 = self._once(hvd.allgather, name, data)
        return gathered

    def sum_votes(self, word: Floats) -> Floats:
        """The sum of all ranks' words; called before the first handshake, also while a function is traced.

        Raises:
            TimeoutError: a rank did not come in time.
        """
        total: Floats = self._once(_SUM, f"step check ({HINT})", word)
        return total

    def _once(self, operation: Callable[..., tf.Tensor], name: str, data: Any) -> Any:
        name = re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip("_")
        # Only in a graph does Horovod's operation have its name. But a graph needs TensorFlow's threads, and while a
        # step runs, all of them may be waiting for this.
        if tf.inside_function():
            return await_ranks(partial(self._run, operation, name, data))
        return await_ranks(lambda: self._operate(operation, name, tf.constant(data)).numpy())

    def _operate(self, operation: Callable[..., Any], name: str, *given: tf.Tensor) -> Any:
        with tf.device("CPU:0"):
            return operation(*given, name=f"{OF_HOROVOD}.{self.prefix}.{name}", process_set=self.process_set)

    def close(self) -> None:
        """Ends the threads that are idle; others after their allgather."""
        self._threads.shutdown(wait=False)
        self._functions.clear()

    def _run(self, operation: Callable[..., Any], name: str, *data: Any) -> Any:
        data = tuple(map(arrays.to_host, data))
        key = f"{self.prefix}.{name}"
        function = self._functions.get(key)
        if function is None:
            # A graph, for the operation's name. TensorFlow has a thread for it: no operation holds one while it waits.
            plain = tf.autograph.experimental.do_not_convert(partial(self._operate, operation, name))
            traced = tf.function(plain, input_signature=[tf.TensorSpec([None], part.dtype) for part in data])
            function = self._functions[key] = traced.get_concrete_function()
        with tf.device("CPU:0"):
            return tf.nest.map_structure(_NUMPY, function(*map(tf.constant, data)))
