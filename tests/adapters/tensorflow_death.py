"""A training job in which the last rank dies in the middle of its third step."""

import os
import sys

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_deepreduce.tensorflow import DeepReduce

hvd.init()
compression = DeepReduce(exchange=sys.argv[1])
variables = [tf.Variable(tf.ones([100, 100]), name=f"v{i}") for i in range(2)]


def die(gradient):
    # By now the other gradient has been encoded and sent; this one never will be.
    os._exit(17)


@tf.function
def step(dies):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.sin(variables[0]) + tf.cos(variables[1]))
    gradients = tape.gradient(loss, variables)
    if dies:
        sent = [hvd.allreduce(gradients[0], name="first", compression=compression)]
        with tf.control_dependencies(sent):
            sent.append(tf.numpy_function(die, [gradients[1]], tf.float32))
    else:
        names = zip(gradients, ("first", "second"), strict=True)
        sent = [hvd.allreduce(g, name=name, compression=compression) for g, name in names]
    for variable, gradient in zip(variables, sent, strict=True):
        variable.assign_sub(0.1 * gradient)


for number in range(5):
    step(number == 2 and hvd.rank() == hvd.size() - 1)
    print(f"step {number} done on rank {hvd.rank()}", flush=True)
