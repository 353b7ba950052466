"""The engine's collectives over Horovod, on TensorFlow's tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_deepreduce.codec import U8
from hvd_deepreduce.horovod import HINT, HorovodCollectives
from hvd_deepreduce.ops import arrays

# More than there are buckets in flight: if all threads waited, the next bucket could not be sent.
THREADS = 1000


class TensorFlowCollectives(HorovodCollectives):
    """Allgathers of ``horovod.tensorflow``, each on a thread of its own; tensors are on the host."""

    def __init__(self, process_set: object = None) -> None:
        super().__init__(hvd, hvd.global_process_set if process_set is None else process_set)
        self._threads = ThreadPoolExecutor(THREADS, "deepreduce allgather")
        self._functions: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {}

    def start_allgather(self, data: U8, name: str) -> Future[U8]:
        """Starts an allgather on another thread."""
        return self._threads.submit(self._allgather, data, f"deepreduce.{name}")

    def wait_allgather(self, pending: Future[U8]) -> U8:
        """Waits for that thread."""
        return pending.result()

    def allgather(self, data: U8, name: str) -> U8:
        """As ``Collectives.allgather``, on this thread: while a function is traced, or within one of its operations."""
        name = re.sub(r"[^A-Za-z0-9_.]+", "_", f"deepreduce.{name}.{HINT}").strip("_")

        def gather(given: tf.Tensor) -> tf.Tensor:
            return hvd.allgather(given, name, ignore_name_scope=True, process_set=self.process_set)

        # Only in a graph does Horovod's operation have its name. But a graph needs TensorFlow's threads, and while a
        # step runs, all of them may be waiting for this.
        once = tf.function(tf.autograph.experimental.do_not_convert(gather)) if tf.inside_function() else gather
        with tf.init_scope(), tf.device("CPU:0"):
            gathered: U8 = once(tf.constant(data)).numpy()
        return gathered

    def close(self) -> None:
        """Ends the threads that are idle; others after their allgather."""
        self._threads.shutdown(wait=False)
        self._functions.clear()

    def _allgather(self, data: U8, name: str) -> U8:
        function = self._functions.get(name)
        if function is None:

            def gather(given: tf.Tensor) -> tf.Tensor:
                with tf.device("CPU:0"):
                    return hvd.allgather(given, name, process_set=self.process_set)

            # A graph, for the operation's name. TensorFlow has a thread for it: no operation holds one while it waits.
            plain = tf.autograph.experimental.do_not_convert(gather)
            traced = tf.function(plain, input_signature=[tf.TensorSpec([None], tf.uint8)])
            function = self._functions[name] = traced.get_concrete_function()
        with tf.device("CPU:0"):
            gathered: U8 = function(tf.constant(arrays.to_host(data))).numpy()
        return gathered
