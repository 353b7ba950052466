"""What LocalSGD must do on several ranks with TensorFlow: cases of test_local_sgd.py (see tests/case_runner.py).

mpirun -np 2 python tests/adapters/local_sgd_tensorflow_cases.py [CASE ...]
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from hvd_deepreduce import ConfigError
from hvd_deepreduce.engine.state import from_bytes, to_bytes
from hvd_deepreduce.tensorflow import DeepReduce, LocalSGD, SaveState
from hvd_deepreduce.tensorflow.updates import ARRAYS
from tests.adapters.local_sgd_cases import DENSE, LOSSY, check_same, on
from tests.case_runner import case, run_cases

keras = tf.keras
SGD = keras.optimizers.SGD
OPTIMIZERS = {
    "adam": partial(keras.optimizers.Adam, 0.01),
    "momentum": partial(SGD, 0.1, momentum=0.9),
    "sgd": partial(SGD, 1.0),
    "nesterov": partial(SGD, 0.7, momentum=0.9, nesterov=True),
    "heavy": partial(SGD, 1.0, momentum=0.5),
    "legacy": partial(keras.optimizers.legacy.SGD, 0.5, momentum=0.9),
}


def network(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((20,)), keras.layers.Dense(30, "tanh"), keras.layers.Dense(4)])


def batch(step, rank):
    x = np.random.default_rng(1000 * step + rank).standard_normal((16, 20), np.float32)
    return x, x[:, :4].argmax(1)


def flat(variables):
    return np.concatenate([variable.numpy().reshape(-1) for variable in variables])


def put(variables, vector):
    ends = np.cumsum([int(np.prod(one.shape)) for one in variables])
    for one, part in zip(variables, np.split(vector, ends[:-1]), strict=True):
        one.assign(part.reshape(one.shape))


class Model:
    def __init__(self, inner, seed=0):
        self.model, self.optimizer = network(seed), OPTIMIZERS[inner]()
        self.variables = self.model.trainable_variables

    def step(self, step, rank):
        x, y = batch(step, rank)
        with tf.GradientTape() as tape:
            scores = tf.cast(self.model(x), tf.float32)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
        trained = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))

    def apply(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def parts(self):
        return [one.numpy() for one in self.variables]

    def sizes(self):
        return [one.size for one in self.parts()]

    def flat(self):
        return flat(self.variables)

    def put(self, vector):
        put(self.variables, vector)


class Anchor(Model):
    def __init__(self, outer, vector):
        super().__init__(outer)
        self.put(vector)

    def step(self, mean):
        put(means := [tf.Variable(one) for one in self.variables], mean)
        self.apply(map(tf.identity, means))


class Trainer(Model):
    def __init__(self, inner, config, seed=0, outer=None, **options):
        super().__init__(inner, seed)
        self.made = lambda: LocalSGD(
            self.model, config, optimizer=self.optimizer, outer=OPTIMIZERS[outer]() if outer in OPTIMIZERS else outer,
            **options,
        )  # fmt: skip
        self.local = self.made()

    def train(self, steps, first=0):
        for step in range(first, first + steps):
            self.step(step, hvd.rank())
            self.local.step()

    def freeze(self, frozen):
        self.model.layers[0].trainable = not frozen

    def train_frozen(self, step):
        self.step(step, hvd.rank())
        self.freeze(True)
        self.local.step()
        self.freeze(False)

    def poison(self):
        self.apply([tf.fill(one.shape, np.nan) for one in self.variables])

    def state(self):
        return self.local.state_dict()

    whole_state = state

    def residuals(self):
        return list(self.state()["residuals"].values())

    def saved(self):
        path = f"{tempfile.mkdtemp()}/saved"
        whole = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, local=self.local)
        return whole.write(path), from_bytes(self.local.serialize())

    def load(self, saved):
        self.optimizer.build(self.variables)
        whole = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, local=self.local)
        whole.read(saved[0]).assert_consumed()

    def load_local(self, state, **options):
        if isinstance(state, bytes):
            self.local.deserialize(state)
        else:
            self.local.load_state_dict(state, **options)

    def again(self):
        saved = self.local.serialize()
        self.local.close()
        self.local = self.made()
        self.local.deserialize(saved)
        return self


def bad_states(saved, fragments):
    state = saved[1]

    def with_anchor(name, array):
        return state | {"anchors": state["anchors"] | {name: array}}

    without = {key: value for key, value in state.items() if key != "anchors"}
    message = f"the state is of {3 - fragments} fragments, and the settings are of {fragments}"
    return [
        (without, "this is not a state of LocalSGD: it must have anchors"),
        (state | {"due": [1] * (3 - fragments)}, message),
        (state | {"clock": -1}, "the step counts of the state must be integers, 0 or more"),
        (state | {"rank": hvd.rank() + 1}, "every rank must load the state that it saved"),
        (state | {"outer": {}}, "the outer optimizer's variable of the state is of another model"),
        (state | {"outer_rate": "1"}, "the learning rate of the outer optimizer is '?1'?; it must be a number"),
        (with_anchor("0", np.zeros(3)), "the anchor 0 of the state is float64 .3.; it must be float32 .600."),
        (with_anchor("3", np.full(4, np.nan, "f4")), "the anchor 3 of the state contains NaN"),
        (to_bytes(state, ARRAYS)[:-30], "this is not a state of DeepReduce"),
    ]


on.__dict__.update(
    rank=hvd.rank, size=hvd.size, gathered=hvd.allgather_object, model=Model, anchor=Anchor, trainer=Trainer,
    outers=[("sgd", 1.0, LOSSY, {}), ("adam", 1.0, {**LOSSY, "value": "raw"}, {"outer": "adam"}),
            ("heavy", 0.9, {**LOSSY, "value": "sign"}, {"local": {"momentum": 0.5, "nesterov": False}}),
            ("legacy", 1.0, LOSSY, {"outer": "legacy"})],
    differing_outer=lambda: SGD(1.0 + hvd.rank()),
    # The first weight matrix has more than half of the elements.
    name="dense.*/kernel", broadcast="hvd.broadcast_", fragment=[0], mixes=(None, 0.25),
    mixed=lambda now, anchor, mix: now + np.float32(1 - mix) * (anchor - now), bad_states=bad_states,
    with_another_anchor=lambda state: state | {"anchors": {name: one + 1 for name, one in state["anchors"].items()}},
)  # fmt: skip


@case
def all_variables_are_averaged_together():
    trainer = Trainer("sgd", DENSE, every=1)
    trainer.train(1)
    functions = trainer.local._updates.collectives._functions
    assert [name.split(".")[-2] for name in functions if "step_check" not in name] == ["bucket"]


@case
def each_fragment_has_the_first_step_of_adam():
    """It goes as far as the learning rate."""
    trainer = Trainer("momentum", DENSE, every=2, fragments=2, outer="adam")
    for number in (0, 2):
        start = network().weights[number].numpy().reshape(-1)
        trainer.train(1, number)
        moved = trainer.state()["anchors"][str(number)] - start
        assert np.median(np.abs(moved)) == pytest.approx(0.01, rel=0.01)


@case
def parameters_that_were_broadcast_late():
    trainer = Trainer("momentum", LOSSY, seed=hvd.rank(), every=1)
    hvd.broadcast_variables(trainer.model.variables, root_rank=0)
    trainer.local.begin()
    trainer.train(1)
    check_same(trainer)


@case
def what_cannot_be_done_while_an_exchange_is_in_flight_or_with_states():
    trainer = Trainer("sgd", LOSSY, every=4, delay=2)
    trainer.train(5)
    with pytest.raises(RuntimeError, match="while an exchange is in flight .delay is 2.: call sync"):
        trainer.local.begin()
    trainer.local.sync()
    states = hvd.allgather_object(trainer.state())
    for given, message in ((states[0], "with reshard, the states of all ranks"), ([states[0]] * 2, "once")):
        with pytest.raises(ValueError, match=message):
            trainer.local.load_state_dict(given, reshard=True)


@case
def the_rate_of_the_outer_optimizer_is_in_a_state():
    fast, slow = (Trainer("adam", LOSSY, every=2, outer=SGD(rate, momentum=0.9)) for rate in (0.1, 0.1))
    fast.local._updates.outer.learning_rate = 0.7
    fast.train(4)
    slow.load(fast.saved())
    for trainer in (fast, slow):
        trainer.train(2, 4)
    assert np.array_equal(fast.flat(), slow.flat())


def same_everywhere(model):
    return len(set(hvd.allgather_object(flat(model.trainable_variables).tobytes()))) == 1


class Seen(keras.callbacks.Callback):
    """Notes whether the ranks' parameters are the same at an evaluation."""

    def __init__(self):
        super().__init__()
        self.same = []

    def on_test_begin(self, logs=None):
        self.same.append(same_everywhere(self.model))


class Loads(keras.callbacks.Callback):
    """Changes the variables at the beginning, after the callbacks before it, as BackupAndRestore does."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def on_train_begin(self, logs=None):
        self.model.set_weights(self.weights)


@case
def a_callback_of_fit_exchanges_as_a_loop_does():
    expected = Trainer("momentum", LOSSY, every=4)
    for epoch in range(2):
        expected.train(6, 6 * epoch)
        expected.local.sync()
    batches = [batch(step, hvd.rank()) for step in range(12)]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for at_once in (1, 2):
        model = network(1)
        model.compile(OPTIMIZERS["momentum"](), loss, steps_per_execution=at_once)
        local, seen = LocalSGD(model, LOSSY, every=4), Seen()
        for epoch in range(2):
            part = slice(96 * epoch, 96 * epoch + 96)
            last = {"validation_data": (x[:16], y[:16])} if epoch and at_once == 1 else {}
            late = [] if epoch else [Loads(network().get_weights())]
            model.fit(x[part], y[part], 16, shuffle=False, verbose=0, callbacks=[local, seen, *late], **last)
            assert same_everywhere(model)
        # A graph rounds otherwise than single operations, so that other elements are sent sometimes.
        np.testing.assert_allclose(flat(model.trainable_variables), expected.flat(), rtol=0, atol=0.02)
        assert seen.same == [True] * (at_once == 1) and local.stats()["total"]["steps"] == 4
        assert local.state_dict()["clock"] == 12
        best = network().get_weights()
        model.set_weights(best)  # as EarlyStopping(restore_best_weights=True) does at the end of fit
        model.compile(SGD(0.0), loss)
        model.fit(x[:64], y[:64], 16, shuffle=False, verbose=0, callbacks=[local])
        assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), best, strict=True))
    model.compile(hvd.DistributedOptimizer(SGD(0.1)), loss)
    with pytest.raises(TypeError, match="the model's optimizer is an hvd.DistributedOptimizer, which exchanges"):
        model.fit(x, y, verbose=0, callbacks=[local])
    other = network()
    other.compile(OPTIMIZERS["momentum"](), loss)
    with pytest.raises(RuntimeError, match="are of another model: dense"):
        other.fit(x, y, verbose=0, callbacks=[local])


@case
def other_scopes_exchanges_and_dtypes():
    densestream = {"sparsifier": {"name": "topk", "density": 0.2}, "exchange": "densestream"}
    target = np.random.default_rng(0).standard_normal(40)
    for dtype, config in (
        (tf.float32, {**LOSSY, "scope": "tensor"}),
        (tf.float32, {**LOSSY, "scope": "tensor", "min_elements": 10}),
        (tf.float32, {**LOSSY, "scope": "bucket", "bucket_bytes": 1024}),
        (tf.bfloat16, LOSSY),
        (tf.float64, LOSSY),
        ("mixed", DENSE),
        *([(tf.float32, densestream)] if hvd.mpi_enabled() else []),
    ):
        # In scope tensor two of them, as of a generator and its critic, with exchanges in flight at the same time.
        pairs = []
        for _ in range(2 if config.get("scope") == "tensor" else 1):
            kinds = (tf.float32, tf.float64, tf.float32) if dtype == "mixed" else [dtype] * 3
            made = zip(((4, 10), (5,), ()), kinds, strict=True)
            variables = [tf.Variable(tf.zeros(shape, kind)) for shape, kind in made]
            fragments = 1 if dtype == "mixed" else 2
            pairs.append((variables, LocalSGD(variables, config, every=2, fragments=fragments, delay=1)))
        for step in range(24):
            for variables, local in pairs:
                noise = np.random.default_rng(100 * step + hvd.rank()).standard_normal(40) * 0.1
                for one, aim in ((variables[0], (target + noise).reshape(4, 10)), (variables[2], 1 + hvd.rank())):
                    one.assign_sub(tf.cast(0.2, one.dtype) * (one - tf.cast(aim, one.dtype)))
                local.step()
        for variables, local in pairs:
            local.sync()
            every = hvd.allgather(tf.constant(flat([tf.cast(one, tf.float64) for one in variables])[None])).numpy()
            assert (every == every[0]).all()
            far = np.abs(every[0][:40] - target).max()
            mean = 1 + (hvd.size() - 1) / 2
            assert far < 0.6 and abs(every[0][-1] - mean) < 0.3 and not every[0][40:45].any(), (dtype, config, far)
            local.close()


@case
def averages_that_keras_writes_at_the_end():
    """With use_ema each rank's own, also where the last step was an exchange."""
    x, y = batch(0, hvd.rank())
    for every in (3, 4):
        model = network()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), loss)
        local = LocalSGD(model, LOSSY, every=every)
        model.fit(x, y, 4, 3, verbose=0, callbacks=[local])
        assert local.state_dict()["clock"] == 12 and same_everywhere(model)


@case
def keras_saves_and_restores_its_state():
    x, y = batch(0, hvd.rank())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None))
    clocks = []
    for epochs, reshard in ((1, False), (2, False), (3, True)):
        model = network()
        model.compile(OPTIMIZERS["momentum"](), loss)
        if epochs > 1:
            model.load_weights(folder / f"{hvd.rank()}.weights.h5")
        local = LocalSGD(model, LOSSY, every=3)
        save = SaveState(local, folder, delete=epochs == 3, reshard=reshard)
        model.fit(x, y, 4, epochs, initial_epoch=epochs - 1, verbose=0, callbacks=[local, save])
        model.save_weights(folder / f"{hvd.rank()}.weights.h5")
        clocks.append(local.state_dict()["clock"])
        hvd.allgather_object(0)  # all files are there
    assert clocks == [4, 8, 12] and same_everywhere(model)


@case
def wrong_uses_get_an_error():
    model = network()
    with pytest.raises(TypeError, match="the first argument of LocalSGD is str"):
        LocalSGD("topk_model")
    with pytest.raises(TypeError, match="floating-point variables, and was given .*int32"):
        LocalSGD([tf.Variable([1, 2])])
    with pytest.raises(ValueError, match=r"has no variables that are trained.*model.build\(input_shape\)"):
        LocalSGD([])
    with pytest.raises(ValueError, match="have not yet been created"):
        LocalSGD(keras.Sequential([keras.layers.Dense(3)]))
    with pytest.raises(TypeError, match="outer is type, but it must be a Keras optimizer of its own"):
        LocalSGD(model, LOSSY, outer=keras.optimizers.SGD)
    trainer = Trainer("sgd", LOSSY, every=1)
    optimizer = trainer.optimizer
    with pytest.raises(TypeError, match="outer is SGD, but it must be a Keras optimizer of its own"):
        LocalSGD(model, LOSSY, outer=optimizer, optimizer=optimizer)
    with pytest.raises(ConfigError, match="Use LocalSGD in place of"):
        DeepReduce(LOSSY, local={"every": 3})
    model.layers[0].trainable = False
    local = LocalSGD(model, LOSSY, every=1)
    model.layers[0].trainable = True
    with pytest.raises(RuntimeError, match=r"after LocalSGD was made, or are of another model: dense.*/kernel"):
        local.step()
    local = LocalSGD(model, LOSSY, every=1)
    with pytest.raises(RuntimeError, match=r"LocalSGD.step was called within a tf.function"):
        tf.function(local.step)()
    with pytest.raises(TypeError, match="a LocalSGD cannot be copied or pickled.*use state_dict"):
        local.__reduce__()


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    run_cases(hvd.rank(), hvd.size())
