"""TensorFlow with DistributedGradientTape.

    TF_USE_LEGACY_KERAS=1 mpirun -np 2 python examples/tensorflow_tape.py

Horovod needs Keras 2: the package tf_keras, and the environment variable TF_USE_LEGACY_KERAS=1.
"""

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_deepreduce.tensorflow import DeepReduce

hvd.init()
tf.random.set_seed(hvd.rank())  # every rank has its own samples
inputs = tf.random.normal((512, 64))
targets = tf.sin(tf.reduce_sum(inputs, 1, keepdims=True))
model = tf.keras.Sequential([tf.keras.layers.Dense(256, "relu", input_shape=(64,)), tf.keras.layers.Dense(1)])
variables = model.trainable_variables
hvd.broadcast_variables(variables, root_rank=0)
optimizer = tf.keras.optimizers.SGD(0.05)
compression = DeepReduce("recommended")


@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(inputs) - targets) ** 2)
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss


losses = [float(hvd.allreduce(step())) for _ in range(100)]
if hvd.rank() == 0:
    total = compression.stats()["total"]
    share = total["bytes_sent"] / total["dense_bytes"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
