"""A training job in which rank 1 has no DeepReduce."""

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_deepreduce.tensorflow import DeepReduce

hvd.init()
variable = tf.Variable(tf.ones([100, 100]))
compression = hvd.Compression.none if hvd.rank() == 1 else DeepReduce()
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(tf.sin(variable))
hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])
print(f"step done on rank {hvd.rank()}", flush=True)
