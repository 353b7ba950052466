"""Local updates for Keras and TensorFlow: as ``hvd_deepreduce.torch.LocalSGD``, which states the method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_deepreduce.config import Config, ConfigError
from hvd_deepreduce.engine.local_options import Every, Times, options
from hvd_deepreduce.engine.local_sgd import LocalSGDBase
from hvd_deepreduce.tensorflow.checkpoint import Restorable
from hvd_deepreduce.tensorflow.updates import ARRAYS, Updates

LINE = 'model.fit(..., callbacks=[LocalSGD(model, "adamw_safe")])'


class LocalSGD(LocalSGDBase, tf.keras.callbacks.Callback, Restorable):  # type: ignore[misc]
    """Each rank trains by itself, and every few steps the ranks exchange their updates, compressed.

    The optimizer is a plain one, not an ``hvd.DistributedOptimizer``: gradients are not exchanged. With ``model.fit``,
    LocalSGD is a callback: it counts the batches, and calls ``sync`` before an evaluation and at the end of training.
    In a loop of your own, call ``step()`` after each ``optimizer.apply_gradients``, outside of ``tf.function``, and
    ``sync()`` before an evaluation and at the end. All ranks take the same number of steps, and evaluate at the same
    times.

    Variables must be equal on all ranks before LocalSGD is made: ``hvd.broadcast_variables(model.variables,
    root_rank=0)``. If they are changed afterwards, other than by training, call ``begin()``.

    Updates are encoded on the host. ``LocalSGDBase`` states what the papers leave open. Variables of a rank's optimizer
    that are not finite, where a period is discarded, become zero.

    It can be added to a ``tf.train.Checkpoint``, or given to ``SaveState``. Ranks differ, in the model too: each rank
    must write its own checkpoint of everything.

    Args:
        model: a Keras model that has its variables, or the variables that are trained.
        outer: a Keras optimizer of its own, for the anchor, such as ``tf.keras.optimizers.SGD(0.7, momentum=0.9,
            nesterov=True)``. Its gradients are means of updates, and its ``iterations`` count exchanges.
        optimizer: that of this rank's steps, in a loop of your own: its variables are examined when a period is
            discarded. None: the model's.
        config, every, decay, fragments, delay, mix, times, process_set, settings: as in ``LocalSGDBase``.

    Raises:
        TypeError: an argument is not what it should be.
        ValueError: there are no variables, or one is not of a floating-point dtype; or ``times`` is given with
            fragments or a delay.
        ConfigError: the config cannot be used.
    """

    arrays = ARRAYS

    def __init__(
        self,
        model: tf.keras.Model | Iterable[tf.Variable],
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        every: Every | None = None,
        outer: Any = None,
        decay: float | None = None,
        fragments: int | None = None,
        delay: int | None = None,
        mix: float | None = None,
        times: Times | None = None,
        optimizer: Any = None,
        process_set: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._supports_tf_logs = True  # else Keras would wait for the metrics of each batch
        self._module = model if isinstance(model, tf.Module) else None
        self._optimizer = optimizer
        variables = _trained(model)
        self._refuse_distributed()
        kinds = (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer)
        if outer is not None and (not isinstance(outer, kinds) or outer is self._own_optimizer()):
            raise TypeError(
                f"outer is {type(outer).__name__}, but it must be a Keras optimizer of its own, as "
                "tf.keras.optimizers.SGD(1.0) is"
            )
        given = options(
            config, settings, every=every, times=times, decay=decay, fragments=fragments, delay=delay, mix=mix,
            own_outer=outer is not None,
        )  # fmt: skip
        if given.config.local and given.config.local.anchors == "host":
            raise ConfigError("local.anchors is 'host', which LocalSGD has on PyTorch only: set it to 'device'")
        self._updates: Updates = Updates(
            variables, given, outer, lambda: self._trains, self._own_optimizer, process_set
        )
        self._first = 0
        self._begins = True  # whether the next batch is the first one of a fit

    @property
    def _trains(self) -> Any:
        """The model, if there is one."""
        return self._module if self.model is None else self.model

    def _own_optimizer(self) -> Any:
        return getattr(self._trains, "optimizer", None) if self._optimizer is None else self._optimizer

    def _refuse_distributed(self) -> None:
        optimizer = self._own_optimizer()
        if hasattr(getattr(optimizer, "inner_optimizer", optimizer), "_allreduce_grads"):
            raise TypeError(
                "the model's optimizer is an hvd.DistributedOptimizer, which exchanges gradients: give the model the "
                f"optimizer that it wraps. Write: {LINE}"
            )

    def step(self, steps: int = 1) -> None:
        """After a local step, or several: exchanges that are due begin or end.

        Raises:
            MismatchError: the ranks do not agree, did not begin (or go on, after a load) with the same anchor, or do
                not come to the same exchange; raised on all ranks. Nothing was exchanged then.
            RuntimeError: within a ``tf.function``; the model trains other variables than when LocalSGD was made; a rank
                has joined; or ``close`` was called.
            ContainerError: a container cannot be decoded; names its rank. Raised on all ranks; the variables are then
                those before the exchange.
        """
        if self._takes_part("step"):
            self._updates.step(steps)

    def _takes_part(self, call: str) -> bool:
        takes_part = super()._takes_part(call)
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"LocalSGD.{call} was called within a tf.function, which runs it only while it is traced: call it "
                "after the function"
            )
        return takes_part

    # Keras calls these

    def on_train_begin(self, logs: Any = None) -> None:
        self._refuse_distributed()
        self._updates.check_parameters()
        self._begins = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._begins:
            self._begins = False
            if not self._updates.begun or self._updates.loaded():  # by other callbacks, say
                self.begin()
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step(batch - self._first + 1)  # several with steps_per_execution

    def on_test_begin(self, logs: Any = None) -> None:
        self.sync()

    def on_train_end(self, logs: Any = None) -> None:
        if self._takes_part("sync"):
            # With use_ema Keras has just written this rank's own averages into the variables.
            optimizer = self._own_optimizer()
            averages = getattr(getattr(optimizer, "inner_optimizer", optimizer), "use_ema", False)
            self._updates.sync(anyway=bool(averages))


def _trained(model: Any) -> list[tf.Variable]:
    """The variables that are trained."""
    given = getattr(model, "trainable_variables", model)
    if isinstance(given, str | Path | Mapping | Config) or not isinstance(given, Iterable):
        raise TypeError(
            f"the first argument of LocalSGD is {type(model).__name__}, but it must be the model, or its variables. "
            f"Write: {LINE}"
        )
    variables = list(given)
    for one in variables:
        if not isinstance(one, tf.Variable) or not one.dtype.is_floating:
            shown = f"{one.name}, {one.dtype.name}" if isinstance(one, tf.Variable) else type(one).__name__
            raise TypeError(f"LocalSGD exchanges floating-point variables, and was given {shown}")
    if not variables:
        raise ValueError(
            "the model has no variables that are trained: there is nothing to exchange. A model gets its variables "
            "when it is built, model.build(input_shape)"
        )
    return variables
