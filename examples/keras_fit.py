"""Keras with model.fit.

    TF_USE_LEGACY_KERAS=1 mpirun -np 2 python examples/keras_fit.py

Horovod needs Keras 2: the package tf_keras, and the environment variable TF_USE_LEGACY_KERAS=1.
"""

import horovod.tensorflow.keras as hvd
import tensorflow as tf

from hvd_deepreduce.tensorflow import DeepReduce
from hvd_deepreduce.tensorflow.callbacks import LogStats

hvd.init()
tf.random.set_seed(hvd.rank())  # every rank has its own samples
inputs = tf.random.normal((512, 64))
targets = tf.sin(tf.reduce_sum(inputs, 1, keepdims=True))
model = tf.keras.Sequential([tf.keras.layers.Dense(256, "relu", input_shape=(64,)), tf.keras.layers.Dense(1)])
compression = DeepReduce("recommended")
model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05), compression=compression), "mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), LogStats(compression)]
history = model.fit(inputs, targets, batch_size=64, epochs=12, callbacks=callbacks, verbose=0).history
if hvd.rank() == 0:
    losses, share = history["loss"], 1 / history["deepreduce/total/compression_ratio"][-1]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
