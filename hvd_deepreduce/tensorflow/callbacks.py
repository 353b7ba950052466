"""``LogStats``, which logs what compression saves; and Horovod's callbacks for ``model.fit``, for Keras 2.

    callbacks = [MetricAverageCallback(), LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=3)]

With ``TF_USE_LEGACY_KERAS=1``, those of ``horovod.tensorflow.keras.callbacks`` fail with an ``AttributeError``: they
take the backend of the package ``keras``, which is Keras 3 then. These are the same callbacks with the backend of
``tf.keras``. They work with and without DeepReduce. ``BroadcastGlobalVariablesCallback`` and ``BestModelCheckpoint`` of
Horovod work as they are.
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf
from horovod.tensorflow.keras import callbacks as stock

from hvd_deepreduce.engine.reporting import Reporting

_log = logging.getLogger("hvd_deepreduce")


class LogStats(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Adds ``stats().as_dict()`` to the logs of each batch and epoch, for the callbacks after it (``TensorBoard``,
    ``CSVLogger``) and for the history that ``fit`` returns.

    Args:
        compression: a ``DeepReduce`` or ``LocalSGD``.
        prefix: of the names, as in ``Report.as_dict``.
    """

    def __init__(self, compression: Reporting, prefix: str = "deepreduce") -> None:
        super().__init__()
        self._compression, self._prefix = compression, prefix

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if logs is not None:
            logs.update(self._compression.stats().as_dict(self._prefix))

    on_epoch_end = on_train_batch_end


class _Keras2:
    """The backend of ``tf.keras``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backend = tf.keras.backend


class MetricAverageCallback(_Keras2, stock.MetricAverageCallback):  # type: ignore[misc]
    """Averages the metrics over the ranks at the end of each epoch; before callbacks that use them."""


class _RateCallback(_Keras2):
    """Momentum correction multiplies the momentum of a batch. The optimizers of Keras 2.11 and later have a number in
    place of a variable there, which is fixed once the training function is traced. Those in
    ``tf.keras.optimizers.legacy`` have a variable."""

    model: Any
    momentum_correction: bool

    def on_train_begin(self, logs: Any = None) -> None:
        momentum = getattr(self.model.optimizer, "momentum", 0.0)
        if self.momentum_correction and not isinstance(momentum, tf.Variable):
            self.momentum_correction = False
            if momentum:
                _log.warning(
                    "%s does not correct the momentum, because this optimizer's is a constant: use one of "
                    "tf.keras.optimizers.legacy, or set momentum_correction=False", type(self).__name__
                )  # fmt: skip
        super().on_train_begin(logs)  # type: ignore[misc]


class LearningRateScheduleCallback(_RateCallback, stock.LearningRateScheduleCallback):  # type: ignore[misc]
    """Multiplies the learning rate between two epochs; the arguments are those of Horovod's."""


class LearningRateWarmupCallback(_RateCallback, stock.LearningRateWarmupCallback):  # type: ignore[misc]
    """Raises the learning rate from ``initial_lr / hvd.size()`` to ``initial_lr``; the arguments are Horovod's."""
