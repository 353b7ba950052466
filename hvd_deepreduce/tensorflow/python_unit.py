"""Put and take as Python functions, where those in C++ were not built, and for gradients on a GPU. They are slower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine import Bucket, Engine
from hvd_deepreduce.engine.graph.runtime import FULL, HELD, WANTED, Listener
from hvd_deepreduce.engine.graph.slots import AGAIN
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.tensorflow.graph import without_order


class PythonUnit:
    """As ``Runtime``, but for dense runs.

    Gradients are held until all of them are there. Between put and take is a dequeue, since no function may hold one of
    TensorFlow's threads while it waits.

    Args:
        call: ``Operations._call``.
        listener: told what happens.
    """

    early = False

    def __init__(self, call: Callable[..., list[tf.Tensor]], listener: Listener, engine: Engine) -> None:
        self._call = call
        self._listener = listener
        self._engine = engine
        self._lock = Lock()
        self._waking = Lock()  # held while words are enqueued: the first of a failed run ends it
        self._failure = ""
        self._queues: list[tf.queue.FIFOQueue] = []  # of the slots: get an element when the sum is there
        self._came: set[int] = set()
        self.begin(0, 0)

    def begin(self, run: int, slots: int, force: bool = False) -> bool:
        with self._waking:
            with self._lock:
                if self._came and not force:
                    return False
                failed = force or bool(self._failure)
                self._run, self._slots, self._failure = run, slots, ""
                self._came.clear()
                self._held: dict[int, Floats] = {}
                self._sums: dict[int, tuple[Floats, float]] = {}
            if failed:
                with tf.init_scope(), tf.device("CPU:0"):
                    for queue in self._queues:
                        while queue.size() > 0:  # an error has cancelled its dequeue before the sum was there
                            queue.dequeue()
        return True

    def put(self, gradient: tf.Tensor, number: tf.Tensor, sent: tf.DType, at: int, name: str) -> tf.Tensor:
        with tf.init_scope(), tf.device("CPU:0"):
            self._queues.append(tf.queue.FIFOQueue(1, [tf.uint8], [()]))
        # TensorFlow orders Horovod's conditionals with our operations in them, too, unless each has a resource.
        self._queues[at].size()

        def put(flat: Floats, number: np.int64) -> tuple[Floats]:
            # A copy: TensorFlow frees its own memory after this operation. An exchange's own thread works on the host.
            held = (arrays.to_host(flat) if self._engine.exchange.own_thread else flat).copy()
            with self._lock:
                self._check(int(number))
                if at in self._came:
                    raise RuntimeError(AGAIN)
                self._came.add(at)
                self._held[at] = held
                last = len(self._held) == self._slots
            if last:
                self._listener(HELD, -1, int(number), 0.0, False)
            return (np.ones(1, flat.dtype),)

        inputs = [tf.reshape(gradient, [-1]), number]
        (carrier,) = self._call(put, inputs, [gradient.dtype], "deepreduce_put")
        without_order(carrier.op)
        carrier.set_shape([1])
        return tf.identity(tf.cast(carrier, sent), name)

    def take(self, carrier: tf.Tensor, number: tf.Tensor, like: tf.Tensor, dtype: tf.DType, at: int) -> tf.Tensor:

        def take(_: Any, carrier: Floats, number: np.int64) -> tuple[Floats]:
            with self._lock:
                self._check(int(number))
                total, divisor = self._sums.pop(at)
            return (total * (float(carrier[0]) / divisor),)

        with tf.control_dependencies([carrier]):
            word = self._queues[at].dequeue()
        (flat,) = self._call(take, [word, carrier, number], [dtype], "deepreduce_take")
        without_order(flat.op)
        return tf.reshape(flat, tf.shape(like))

    def sizes(self, slots: int) -> list[int]:
        return [self._held[at].size for at in range(slots)]

    def lay_out(
        self, places: np.ndarray[Any, np.dtype[np.int64]], buckets: Sequence[Bucket], memories: object
    ) -> None:
        self._buckets = [(one, np.flatnonzero(places[0] == number).tolist()) for number, one in enumerate(buckets)]
        for number, (bucket, slots) in enumerate(self._buckets):
            for at, parameter in zip(slots, bucket.members, strict=True):
                bucket.put(parameter, self._held.pop(at))
            self._listener(FULL, number, self._run, 0.0, False)
            self._listener(WANTED, number, self._run, 0.0, False)  # each sum is multiplied by its carrier in ``take``

    def deliver(self, run: int, number: int, divisor: float = 0.0, error: str | None = None) -> None:
        bucket, slots = self._buckets[number]
        with self._waking:
            with self._lock:
                if run != self._run:
                    return
                self._failure = error or self._failure
                for at, part in zip(slots, bucket.parts, strict=True):
                    self._sums[at] = bucket.gradient[slice(*part)].copy(), divisor
                    self._came.discard(at)
            self._wake(slots)

    def fail(self, error: str) -> None:
        with self._waking:
            with self._lock:
                self._failure = error
                came = list(self._came)
                self._came.clear()
            self._wake(came)

    def _wake(self, slots: Sequence[int]) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            word = tf.constant(1, tf.uint8)
            for at in slots:
                tf.raw_ops.QueueEnqueueV2(handle=self._queues[at].queue_ref, components=[word])

    def _check(self, run: int) -> None:
        if self._failure or run != self._run:
            raise RuntimeError(self._failure or AGAIN)
