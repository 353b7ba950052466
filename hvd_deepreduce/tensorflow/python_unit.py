"""Put and take as Python functions, where those in C++ were not built, and for gradients on a GPU. They are slower."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine import Engine
from hvd_deepreduce.engine.graph.held import HeldUnit
from hvd_deepreduce.engine.graph.runtime import Listener
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.tensorflow.graph import without_order


class PythonUnit(HeldUnit):
    """The operations. Between put and take is a dequeue, since no function may hold one of TensorFlow's threads while
    it waits.

    Args:
        call: ``Operations._call``.
        listener: told what happens.
    """

    def __init__(self, call: Callable[..., list[tf.Tensor]], listener: Listener, engine: Engine) -> None:
        self._call = call
        self._engine = engine
        self._queues: list[tf.queue.FIFOQueue] = []  # of the slots: get an element when the sum is there
        super().__init__(listener)

    def put(self, gradient: tf.Tensor, number: tf.Tensor, sent: tf.DType, at: int, name: str) -> tf.Tensor:
        with tf.init_scope(), tf.device("CPU:0"):
            self._queues.append(tf.queue.FIFOQueue(1, [tf.uint8], [()]))
        # TensorFlow orders Horovod's conditionals with our operations in them, too, unless each has a resource.
        self._queues[at].size()

        def put(flat: Floats, number: np.int64) -> tuple[Floats]:
            # A copy: TensorFlow frees its own memory after this operation. An exchange's own thread works on the host.
            held = (arrays.to_host(flat) if self._engine.exchange.own_thread else flat).copy()
            self.hold(at, int(number), held)
            return (np.ones(1, flat.dtype),)

        inputs = [tf.reshape(gradient, [-1]), number]
        (carrier,) = self._call(put, inputs, [gradient.dtype], "deepreduce_put")
        without_order(carrier.op)
        carrier.set_shape([1])
        return tf.identity(tf.cast(carrier, sent), name)

    def take(self, carrier: tf.Tensor, number: tf.Tensor, like: tf.Tensor, dtype: tf.DType, at: int) -> tf.Tensor:

        def take(_: Any, carrier: Floats, number: np.int64) -> tuple[Floats]:
            return (self.total(at, int(number), float(carrier[0])),)

        with tf.control_dependencies([carrier]):
            word = self._queues[at].dequeue()
        (flat,) = self._call(take, [word, carrier, number], [dtype], "deepreduce_take")
        without_order(flat.op)
        return tf.reshape(flat, tf.shape(like))

    def _wake(self, slots: Iterable[int]) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            word = tf.constant(1, tf.uint8)
            for at in slots:
                tf.raw_ops.QueueEnqueueV2(handle=self._queues[at].queue_ref, components=[word])

    def _forget_woken(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            for queue in self._queues:
                while queue.size() > 0:  # an error has cancelled its dequeue before the sum was there
                    queue.dequeue()
