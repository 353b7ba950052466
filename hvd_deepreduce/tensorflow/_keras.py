"""Refuses Keras 3 when it is imported. Horovod would fail later, with errors that do not name the cause."""

import tensorflow as tf

try:
    version = str(getattr(tf.keras, "__version__", "2.x"))  # tf_keras has none here
except ImportError:
    version = "not installed"
if not version.startswith("2."):
    raise ImportError(
        f"hvd_deepreduce.tensorflow needs Keras 2, because Horovod 0.28 does not work with Keras 3 variables. The "
        f"version of tf.keras is: {version}. Install the package tf_keras, and set the environment variable "
        "TF_USE_LEGACY_KERAS=1 before TensorFlow is imported"
    )
