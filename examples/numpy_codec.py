"""Encodes and decodes a NumPy array.

    python examples/numpy_codec.py

It needs no framework, no Horovod and no MPI.
"""

import numpy as np

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import standalone

pipeline = Pipeline(Config.load("recommended"))
gradient = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
residual = np.zeros_like(gradient)  # what was not sent yet; the next encode adds it to its gradient

data = pipeline.encode(gradient, residual, RngKey(seed=0, parameter=0, step=0))  # uint8: the container

decoded = np.empty_like(gradient)
pipeline.decode([standalone.unpack(data)], decoded)  # the sum of all containers in the list

np.testing.assert_allclose(decoded + residual, gradient, rtol=0, atol=1e-6)
share = data.size / gradient.nbytes
print(f"sent {np.count_nonzero(decoded)} elements in {data.size} bytes, {share:.2%} of the dense bytes")
