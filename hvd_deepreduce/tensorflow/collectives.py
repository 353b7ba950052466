"""The engine's collectives over Horovod, on TensorFlow's tensors."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Thread
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_deepreduce.codecs.interfaces import U8, Floats
from hvd_deepreduce.horovod import HINT, NOBODY_CAME, WARN_SECONDS, HorovodCollectives, handshake_seconds
from hvd_deepreduce.ops import arrays

# More than there are buckets in flight: if all threads waited, the next bucket could not be sent.
THREADS = 1000

_log = logging.getLogger("hvd_deepreduce")


def await_ranks(operation: Callable[[], None]) -> None:
    """Runs an operation that waits for the other ranks. Ranks that do not come at all are reported.

    Raises:
        TimeoutError: a rank did not come in time (``handshake_seconds``).
    """
    limit, failures = handshake_seconds(), []

    def run() -> None:
        try:
            operation()
        except Exception as error:
            failures.append(error)

    # At the process's end nobody waits for a daemon: Horovod's shutdown ends its operation, but comes later.
    thread = Thread(target=run, name="deepreduce handshake", daemon=True)
    thread.start()
    began = time.monotonic()
    thread.join(min(WARN_SECONDS, limit or WARN_SECONDS))
    if thread.is_alive() and limit != WARN_SECONDS:
        _log.warning(NOBODY_CAME.format(seconds=round(time.monotonic() - began)))
        thread.join(max(0.0, limit - WARN_SECONDS) if limit else None)
    if thread.is_alive():
        raise TimeoutError(NOBODY_CAME.format(seconds=round(time.monotonic() - began)))
    if failures:
        raise failures[0]


def _alltoall(given: list[tf.Tensor], name: str, process_set: Any) -> list[tf.Tensor]:
    return list(hvd.alltoall(given[0], given[1], name=name, process_set=process_set))


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
        self._functions: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {}
        self._flying: set[Future[Any]] = set()

    def start_allgather(self, data: U8, name: str) -> Future[U8]:
        """Starts an allgather on another thread."""
        return self._submit(hvd.allgather, data, name)

    def wait_allgather(self, pending: Future[U8]) -> U8:
        """Waits for that thread."""
        return pending.result()

    def start_alltoall(self, data: U8, splits: Sequence[int], name: str) -> Future[list[Any]]:
        """Starts an alltoall on another thread."""
        return self._submit(_alltoall, [data, np.array(splits, np.int32)], name)

    def wait_alltoall(self, pending: Future[list[Any]]) -> tuple[U8, list[int]]:
        """Waits for that thread."""
        received, sizes = pending.result()
        return received, sizes.tolist()

    def _subset(self, process_set: Any) -> HorovodCollectives:
        made = TensorFlowCollectives(process_set)
        made.prefix = self.prefix
        return made

    def sum(self, values: Floats, name: str) -> Floats:
        """An allreduce, outside of a graph: adds up all ranks' values ``[n]``."""
        total: Floats = self._run(partial(hvd.allreduce, op=hvd.Sum), values, name)
        return total

    def start_sum(self, data: Floats, name: str) -> Future[Floats]:
        """As ``Collectives.start_sum``, on another thread."""
        return self._submit(partial(hvd.allreduce, op=hvd.Sum), data, name)

    def wait_sum(self, pending: Future[Floats]) -> Floats:
        """As ``Collectives.wait_sum``."""
        return pending.result()

    def complete(self) -> None:
        """As ``Collectives.complete``."""
        wait(list(self._flying))

    def _submit(self, operation: Callable[..., Any], data: Any, name: str) -> Future[Any]:
        future = self._threads.submit(self._run, operation, data, name)
        self._flying.add(future)
        future.add_done_callback(self._flying.discard)
        return future

    def _gather(self, data: U8, name: str) -> U8:
        """While a function is traced, or within one of its operations.

        Raises:
            TimeoutError: a rank did not come in time.
        """
        gathered: U8 = self._once(hvd.allgather, data, name)
        return gathered

    def meet(self, word: Floats) -> Floats:
        """The sum of all ranks' words; called before the first handshake, also while a function is traced.

        Raises:
            TimeoutError: a rank did not come in time.
        """
        total: Floats = self._once(partial(hvd.allreduce, op=hvd.Sum), word, f"meeting ({HINT})")
        return total

    def _once(self, operation: Callable[..., tf.Tensor], data: Any, name: str) -> Any:
        name = re.sub(r"[^A-Za-z0-9_.]+", "_", f"{self.prefix}.{name}").strip("_")

        def plain(given: tf.Tensor) -> tf.Tensor:
            return operation(given, name=name, ignore_name_scope=True, process_set=self.process_set)

        # Only in a graph does Horovod's operation have its name. But a graph needs TensorFlow's threads, and while a
        # step runs, all of them may be waiting for this.
        in_graph = tf.inside_function()
        results: list[Any] = []

        def run() -> None:
            with tf.init_scope(), tf.device("CPU:0"):
                given, once = tf.constant(data), plain
                if in_graph:  # a concrete function: TensorFlow would warn of a new function at each call
                    traced = tf.function(tf.autograph.experimental.do_not_convert(plain))
                    once = traced.get_concrete_function(tf.TensorSpec.from_tensor(given))
                results.append(once(given).numpy())

        await_ranks(run)
        return results[0]

    def close(self) -> None:
        """Ends the threads that are idle; others after their allgather."""
        self._threads.shutdown(wait=False)
        self._functions.clear()

    def _run(self, operation: Callable[..., tf.Tensor], data: Any, name: str) -> Any:
        name = f"{self.prefix}.{name}"
        parts = data if isinstance(data, list) else [data]
        function = self._functions.get(name)
        if function is None:

            def run(*given: tf.Tensor) -> tf.Tensor:
                with tf.device("CPU:0"):
                    return operation(
                        list(given) if isinstance(data, list) else given[0], name=name, process_set=self.process_set
                    )

            # A graph, for the operation's name. TensorFlow has a thread for it: no operation holds one while it waits.
            plain = tf.autograph.experimental.do_not_convert(run)
            traced = tf.function(plain, input_signature=[tf.TensorSpec([None], part.dtype) for part in parts])
            function = self._functions[name] = traced.get_concrete_function()
        with tf.device("CPU:0"):
            results = function(*map(tf.constant, map(arrays.to_host, parts)))
        return [one.numpy() for one in results] if isinstance(data, list) else results.numpy()
