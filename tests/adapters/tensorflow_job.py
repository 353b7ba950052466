"""The job of TensorFlow under Horovod (see common.py)."""

from __future__ import annotations

import copy

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_deepreduce.tensorflow import DeepReduce
from tests import cuda_emulator
from tests.adapters.common import NUMBERS, Job

keras = tf.keras


def network(seed=0):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(50, "tanh"), keras.layers.Dense(30, "tanh"), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((20,)), *layers])


def batch(step, rank=None, size=16):
    x = np.random.default_rng(1000 * step + (hvd.rank() if rank is None else rank)).standard_normal((size, 20))
    return x.astype(np.float32), x[:, :4].argmax(1)


def loss_of(model, x, y):
    scores = tf.cast(model(x, training=True), tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))


class OnDevice(DeepReduce):
    """As if its gradients were on a GPU: the CUDA kernels process them, in the emulator."""

    def __init__(self, config):
        super().__init__(config)
        self._operations.gpu = "CPU:0"
        self._operations.array = cuda_emulator.from_dlpack


def arrays(tensors):
    return [one.numpy().reshape(-1) for one in tensors]


class TensorFlowJob(Job):
    """In eager mode or in a tf.function.

    Args:
        given: in place of a model, the variables' values, by name; ``reduced`` and ``gradients`` then take gradients
            in place of a step's number.
    """

    def __init__(self, config, *, seed=0, given=None, graph=None, device=False, dtype=None, **options):
        number = next(NUMBERS)
        self.graph = number % 5 % 2 > 0 if graph is None else graph
        self.given, self.config = given is not None, config
        if self.given:
            self.variables = [tf.Variable(array, name=name) for name, array in given.items()]
        else:
            self.model = network(seed)
            self.variables = self.model.trainable_variables
        if isinstance(config, dict) and config.get("scope", "tensor") == "tensor":
            config = {"min_elements": 0, **config}
        self.compression = hvd.Compression.none if config is None else (OnDevice if device else DeepReduce)(config)
        if options.get("groups") == "a list":
            options["groups"] = [self.variables[:2], self.variables[3:5]]
        self.last_reduced = []

        def reduce(factor, *data):
            with tf.GradientTape() as tape:
                loss = self.loss(*data)
                loss *= tf.cast(factor, loss.dtype)
            tape = hvd.DistributedGradientTape(tape, compression=self.compression, **options)
            return tape.gradient(loss, self.variables)

        self.reduce = tf.function(reduce) if self.graph else reduce

    def loss(self, *data):
        if self.given:
            sums = [tf.reduce_sum(v * g) for v, g in zip(self.variables, data, strict=True)]
            return tf.add_n([tf.cast(one, tf.float64) for one in sums])
        return loss_of(self.model, *data)

    def data(self, step, rank=None):
        return [tf.constant(one) for one in (step if self.given else batch(step, rank))]

    @property
    def engine(self):
        return self.compression._engine

    def gradients(self, step, rank=None):
        with tf.GradientTape() as tape:
            loss = self.loss(*self.data(step, rank))
        return arrays(tape.gradient(loss, self.variables))

    def reduced(self, step, factor=1.0):
        self.last_reduced = self.reduce(tf.constant(factor), *self.data(step))
        return arrays(map(tf.convert_to_tensor, self.last_reduced))

    def apply(self):
        for variable, gradient in zip(self.variables, self.last_reduced, strict=True):
            variable.assign_sub(0.1 * gradient)

    def values(self):
        return arrays(self.variables)

    def names(self):
        return list(self.compression.state_dict()["steps"])

    def saved(self):
        return [v.numpy() for v in self.variables], copy.deepcopy(self.compression.state_dict())

    def load(self, saved):
        for variable, value in zip(self.variables, saved[0], strict=True):
            variable.assign(value)
        self.compression.load_state_dict(saved[1])

    def resumed(self, saved):
        """Of the same variables, since Keras gives others other names."""
        other = TensorFlowJob(self.config, graph=self.graph)
        other.model, other.variables = self.model, self.variables
        other.load(saved)
        return other
