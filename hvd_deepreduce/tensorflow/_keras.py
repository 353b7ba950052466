"""Refuses Keras 3 where it is imported: what Horovod makes of it later tells nobody anything."""

import tensorflow as tf

try:
    version = str(getattr(tf.keras, "__version__", "2.x"))  # tf_keras has none here
except ImportError:
    version = "not installed"
if not version.startswith("2."):
    raise ImportError(
        f"hvd_deepreduce.tensorflow needs Keras 2 (here: {version}), as Horovod 0.28 does: it cannot work with Keras 3 "
        "variables. Install the package tf_keras, and set the environment variable TF_USE_LEGACY_KERAS=1 before "
        "TensorFlow is imported"
    )
