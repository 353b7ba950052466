"""Finds the optimizer of a job, which Horovod shows neither to a tape nor to a compression."""

from __future__ import annotations

import gc

import tensorflow as tf

from hvd_deepreduce.engine import Engine, adaptive

INSTEAD = (
    "give model.compile the optimizer without hvd.DistributedOptimizer, and model.fit the callback LocalSGD(model, "
    '"adamw_safe"); in a loop of your own, call its step() after each apply_gradients, and its sync() at the end'
)
KINDS = tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer, tf.compat.v1.train.Optimizer


def find(engine: Engine) -> None:
    """Looks at the optimizers of this process, once: if all of them are adaptive, that of these gradients is."""
    if engine.adaptive is not None or not engine.collectives.speaks():
        return
    found = [one for one in gc.get_objects() if issubclass(type(one), KINDS) and not hasattr(one, "inner_optimizer")]
    if found and all(map(adaptive.is_adaptive, found)):
        adaptive.look_at(engine, found[-1], INSTEAD)
