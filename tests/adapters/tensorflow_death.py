"""A training job in which the last rank dies in the middle of its third step."""

import os
import sys

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_deepreduce.tensorflow import DeepReduce

hvd.init()
compression = DeepReduce(exchange=sys.argv[1])
variables = [tf.Variable(tf.ones([100, 100]), name=f"v{i}") for i in range(2)]


def die(gradient, dies):
    # By now the other gradient has been sent and reduced; this one never will be sent.
    if dies:
        os._exit(17)
    return gradient


@tf.function
def step(dies):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.sin(variables[0]) + tf.cos(variables[1]))
    gradients = tape.gradient(loss, variables)
    sent = [hvd.allreduce(gradients[0], name="first", compression=compression)]
    with tf.control_dependencies(sent):
        last = tf.ensure_shape(tf.numpy_function(die, [gradients[1], dies], tf.float32), gradients[1].shape)
    sent.append(hvd.allreduce(last, name="second", compression=compression))
    for variable, gradient in zip(variables, sent, strict=True):
        variable.assign_sub(0.1 * gradient)


for number in range(5):
    step(tf.constant(number == 2 and hvd.rank() == hvd.size() - 1))
    print(f"step {number} done on rank {hvd.rank()}", flush=True)
