"""An elastic job of test_elastic.py: a third rank joins, and leaves later, or is killed. Three models, one with each
scope, a fourth that is trained with LocalSGD, and two more whose DeepReduces are not in the state."""

import faulthandler
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import horovod.tensorflow.keras as hvd
import tensorflow as tf

from hvd_deepreduce.tensorflow import DeepReduce, LocalSGD
from hvd_deepreduce.tensorflow.elastic import KerasState
from tests.adapters.elastic import THREE, TWO, digest, note, set_hosts
from tests.adapters.scopes import SCOPES

FOLDER, killed = Path(sys.argv[1]), sys.argv[2] == "killed"
ALL = [{"min_elements": 0}, *SCOPES[:2], {"min_elements": 100, "mode": "auto"}, SCOPES[1]]

faulthandler.dump_traceback_later(240, exit=True)
hvd.init()
tf.random.set_seed(os.getpid())  # ranks begin with different weights, until the state is synchronized
parts = [tf.keras.Sequential([tf.keras.layers.Dense(60, "tanh"), tf.keras.layers.Dense(5)]) for _ in ALL]
data = tf.keras.Input((40,))
alone = tf.keras.Sequential([tf.keras.Input((40,)), tf.keras.layers.Dense(5)])
model = tf.keras.Model(data, [part(data) for part in [*parts, alone]])
optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
optimizer.build(model.trainable_variables)
compressions = [DeepReduce(scope) for scope in ALL]
kept = compressions[:3]
local = LocalSGD(alone, SCOPES[0], every=2)
state = KerasState(model, optimizer, compression=[*kept, local], step=0, phase="two")


@tf.function
def take(x):
    with tf.GradientTape(persistent=True) as tape:
        losses = [tf.reduce_mean(tf.square(part(x))) for part in parts]
    found = []
    for part, loss, compression in zip(parts, losses, compressions, strict=True):
        reduced = hvd_tape(tape, compression).gradient(loss, part.trainable_variables)
        found += zip(reduced, part.trainable_variables, strict=True)
    optimizer.apply_gradients(found)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(alone(x)))
    for variable, gradient in zip(alone.variables, tape.gradient(loss, alone.variables), strict=True):
        variable.assign_sub(0.1 * gradient)


def hvd_tape(tape, compression):
    import horovod.tensorflow as hvd

    return hvd.DistributedGradientTape(tape, compression=compression)


def facts():
    states = [one.state_dict() for one in compressions]
    weights = b"".join(variable.numpy().tobytes() for variable in model.variables + optimizer.variables())
    return {
        "step": state.step, "steps": [sorted(set(one["steps"].values())) for one in states],
        "residuals": [digest(one) for one in states], "weights": hashlib.sha256(weights).hexdigest()[:16],
        "densities": [one.config.sparsifier.density for one in compressions],
        "local": [local.state_dict()["clock"], digest(local.state_dict())],
    }  # fmt: skip


@hvd.elastic.run
def train(state):
    note(FOLDER, event="enters", rank=hvd.rank(), size=hvd.size(), **facts())
    for _ in range(10_000):
        tf.random.set_seed(1000 * state.step + hvd.rank())
        if killed and state.phase == "three" and hvd.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        take(tf.random.normal([8, 40]))
        local.step()
        state.step += 1
        if state.phase == "two" and state.step == 2:
            for one in kept:
                one.set_config(sparsifier={"name": "topk", "density": 0.05})
            if hvd.rank() == 0:
                set_hosts(FOLDER, THREE)
        if state.phase == "two" and hvd.size() == 3:
            state.phase = "three"
            if hvd.rank() == 0 and not killed:
                set_hosts(FOLDER, TWO)
        if state.phase == "three" and hvd.size() == 2:
            state.phase, state.last = "two again", state.step + 2
        if state.phase == "two again" and state.step == state.last:
            break
        if state.phase != "two again":
            time.sleep(0.05)  # until the launcher has noticed
        local.sync()
        note(FOLDER, event="commits", rank=hvd.rank(), size=hvd.size(), **facts())
        state.commit()
    local.sync()
    note(FOLDER, event="ends", rank=hvd.rank(), size=hvd.size(), **facts())


train(state)
