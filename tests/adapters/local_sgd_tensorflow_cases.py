"""What LocalSGD must do on TensorFlow: cases of test_local_sgd.py (see tests/case_runner.py).

    mpirun -np 2 python tests/adapters/local_sgd_tensorflow_cases.py [CASE ...]

Every rank repeats the training of all ranks by itself and compares.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "train"))
from simulated_ranks import SimulatedRanks  # noqa: E402

from hvd_deepreduce import Config, ConfigError
from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.engine.state import from_bytes, to_bytes
from hvd_deepreduce.tensorflow import DeepReduce, LocalSGD, SaveState
from hvd_deepreduce.tensorflow.updates import ARRAYS
from tests.case_runner import case, run_cases

DENSE = {"sparsifier": "none", "value": "raw", "scope": "model"}
LOSSY = {"sparsifier": {"name": "topk", "density": 0.1}, "value": {"name": "qsgd", "bits": 4}, "scope": "model"}
keras = tf.keras
ADAM = partial(keras.optimizers.Adam, 0.01)
MOMENTUM = partial(keras.optimizers.SGD, 0.1, momentum=0.9)
NESTEROV = partial(keras.optimizers.SGD, 0.7, momentum=0.9, nesterov=True)


def network(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((20,)), keras.layers.Dense(30, "tanh"), keras.layers.Dense(4)])


def batch(step, rank):
    x = np.random.default_rng(1000 * step + rank).standard_normal((16, 20), np.float32)
    return x, x[:, :4].argmax(1)


def local_step(model, optimizer, step, rank):
    x, y = batch(step, rank)
    with tf.GradientTape() as tape:
        scores = tf.cast(model(x), tf.float32)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return float(loss)


def train(model, optimizer, local, steps, first=0):
    for step in range(first, first + steps):
        local_step(model, optimizer, step, hvd.rank())
        local.step()


def flat(variables):
    variables = getattr(variables, "trainable_variables", variables)
    return np.concatenate([variable.numpy().reshape(-1) for variable in variables])


def put(variables, vector):
    """Writes a vector into variables, or makes tensors of their shapes of it."""
    ends = np.cumsum([int(np.prod(one.shape)) for one in variables])
    parts = [part.reshape(one.shape) for part, one in zip(np.split(vector, ends[:-1]), variables, strict=True)]
    for one, part in zip(variables, parts, strict=True):
        one.assign(part)
    return parts


def same_everywhere(model):
    every = hvd.allgather(tf.constant(flat(model)[None])).numpy()
    return bool((every == every[0]).all())


class ByHand:
    """All ranks of a job of local updates, as the papers state it, on vectors."""

    def __init__(self, inner, outer, config, decay=1.0):
        self.models = [network() for _ in range(hvd.size())]
        self.inner = [inner() for _ in self.models]
        self.anchor = [tf.Variable(one) for one in self.models[0].trainable_variables]
        self.outer = outer()
        sizes = [int(np.prod(one.shape)) for one in self.anchor]
        self.ranks = SimulatedRanks(Config.load(config), hvd.size(), sizes)
        self.decay = decay

    def step(self, step):
        for rank, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
            local_step(model, inner, step, rank)

    def updates(self):
        return [flat(self.anchor) - flat(model) for model in self.models]

    def outer_step(self, mean):
        means = [tf.Variable(one) for one in self.anchor]
        put(means, mean)
        self.outer.apply_gradients(zip(map(tf.identity, means), self.anchor, strict=True))

    def synchronize(self):
        self.outer_step(self.ranks.mean(self.updates(), self.decay))
        for model in self.models:
            put(model.trainable_variables, flat(self.anchor))

    def own(self):
        return flat(self.models[hvd.rank()])


@case
def plain_averaging_is_the_average_of_local_runs():
    for every in (1, 3):
        model, optimizer, by_hand = network(), MOMENTUM(), ByHand(MOMENTUM, keras.optimizers.SGD, DENSE)
        local = LocalSGD(model, DENSE, every=every)
        train(model, optimizer, local, 6)
        # All variables together.
        assert [name.split(".")[-2] for name in local._updates.collectives._functions if "meeting" not in name] == [
            "bucket"
        ]
        for step in range(6):
            by_hand.step(step)
            if step % every == every - 1:
                mean = np.mean([flat(one) for one in by_hand.models], 0)
                for one in by_hand.models:
                    put(one.trainable_variables, mean)
        np.testing.assert_allclose(flat(model), by_hand.own(), rtol=0, atol=1e-6)
        assert same_everywhere(model)


@case
def lossy_updates_equal_the_same_by_hand():
    heavy = partial(keras.optimizers.SGD, 1.0, momentum=0.5)
    legacy = partial(keras.optimizers.legacy.SGD, 0.5, momentum=0.9)
    for outer, decay, config, given in (
        (partial(keras.optimizers.SGD, 1.0), 1.0, LOSSY, None),
        (heavy, 0.9, {**LOSSY, "value": "sign"}, {"momentum": 0.5, "nesterov": False}),
        (ADAM, 1.0, {**LOSSY, "value": "raw"}, ADAM),
        (legacy, 1.0, LOSSY, legacy),
    ):
        model, optimizer, by_hand = network(), ADAM(), ByHand(ADAM, outer, config, decay)
        options = {"local": given} if isinstance(given, dict) else {"outer": given and given()}
        local, heard = LocalSGD(model, config, every=3, decay=decay, **options), []
        local.add_callback(heard.append)
        train(model, optimizer, local, 5)
        for step in range(5):
            by_hand.step(step)
            if step == 2:
                by_hand.synchronize()
        assert np.array_equal(flat(model), by_hand.own()) and not same_everywhere(model)
        local.sync()
        by_hand.synchronize()
        assert np.array_equal(flat(model), flat(by_hand.anchor)) and same_everywhere(model)
        local.sync()  # nothing was done since: nothing is exchanged
        assert np.array_equal(flat(model), flat(by_hand.anchor))
        total = local.stats()["total"]
        assert total["steps"] == 2 and 0 < total["bytes_sent"] and local.config.local.every == 3
        assert [one["total"]["steps"] for one in heard] == [1, 2] and heard[-1]["total"] == total
        assert total["dense_bytes"] == pytest.approx(5 * 8 * (hvd.size() - 1) / hvd.size() * flat(model).size, abs=50)


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
    expected, optimizer = network(), MOMENTUM()
    local = LocalSGD(expected, LOSSY, every=4, optimizer=optimizer)
    for epoch in range(2):
        train(expected, optimizer, local, 6, 6 * epoch)
        local.sync()
    batches = [batch(step, hvd.rank()) for step in range(12)]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for at_once in (1, 2):
        model = network(1)
        model.compile(MOMENTUM(), loss, steps_per_execution=at_once)
        local, seen = LocalSGD(model, LOSSY, every=4), Seen()
        for epoch in range(2):
            part = slice(96 * epoch, 96 * epoch + 96)
            last = {"validation_data": (x[:16], y[:16])} if epoch and at_once == 1 else {}
            late = [] if epoch else [Loads(network().get_weights())]
            model.fit(x[part], y[part], 16, shuffle=False, verbose=0, callbacks=[local, seen, *late], **last)
            assert same_everywhere(model)
        # A graph rounds otherwise than single operations, so that other elements are sent sometimes.
        np.testing.assert_allclose(flat(model), flat(expected), rtol=0, atol=0.02)
        assert seen.same == [True] * (at_once == 1) and local.stats()["total"]["steps"] == 4
        assert local.state_dict()["clock"] == 12
    model.compile(hvd_keras_optimizer(), loss)
    with pytest.raises(TypeError, match="the model's optimizer is an hvd.DistributedOptimizer, which exchanges"):
        model.fit(x, y, verbose=0, callbacks=[local])
    other = network()
    other.compile(MOMENTUM(), loss)
    with pytest.raises(RuntimeError, match="are of another model: dense"):
        other.fit(x, y, verbose=0, callbacks=[local])


def hvd_keras_optimizer():
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


@case
def fragments_are_exchanged_in_turn_with_a_schedule():
    model, optimizer = network(), ADAM()
    outer = keras.optimizers.Adam(0.01)
    local = LocalSGD(model, DENSE, every=lambda clock: 2 if clock < 2 else 4, fragments=2, outer=outer)
    # The first weight matrix has more than half of the elements.
    parts = {1: [0], 2: [1, 2, 3], 3: [0], 6: [1, 2, 3], 7: [0]}
    for step in range(7):
        train(model, optimizer, local, 1, step)
        every = [hvd.allgather(tf.reshape(one, [1, -1])).numpy() for one in model.trainable_variables]
        equal = [number for number, of_ranks in enumerate(every) if (of_ranks == of_ranks[0]).all()]
        assert equal == parts.get(step + 1, []), (step, equal)
        if step < 2:  # the first step of Adam, in each fragment, goes as far as its learning rate
            number = 2 * step
            start = flat(network().trainable_variables[number : number + 1])
            moved = local.state_dict()["anchors"][str(number)] - start
            assert np.median(np.abs(moved)) == pytest.approx(0.01, rel=0.01)
    local.sync()
    assert same_everywhere(model) and local.state_dict()["outer_steps"] == [3, 3]
    bad = LocalSGD(model, DENSE, every=lambda clock: 2 if clock == 0 else 0)
    train(model, optimizer, bad, 1)
    with pytest.raises(ValueError, match=r"every\(2\) returned 0; it must be an integer, at least 1"):
        train(model, optimizer, bad, 1)


@case
def a_delay_keeps_the_progress_made_meanwhile():
    for mix in (None, 0.25):
        model, optimizer, by_hand = network(), ADAM(), ByHand(ADAM, NESTEROV, LOSSY)
        local = LocalSGD(model, LOSSY, every=4, delay=2, mix=mix, outer=NESTEROV())
        pending = None
        for step in range(10):
            train(model, optimizer, local, 1, step)
            by_hand.step(step)
            if step + 1 in (6, 10):
                by_hand.outer_step(pending[0])
                for one, start in zip(by_hand.models, pending[1], strict=True):
                    now, anchor = flat(one), flat(by_hand.anchor)
                    far = anchor - start if mix is None else np.float32(1 - mix) * (anchor - now)
                    put(one.trainable_variables, now + far)
            if step + 1 in (4, 8):
                pending = by_hand.ranks.mean(by_hand.updates()), [flat(one) for one in by_hand.models]
            if step + 1 == 5:
                for call in (local.state_dict, local.begin):
                    with pytest.raises(RuntimeError, match="while an exchange is in flight .delay is 2.: call sync"):
                        call()
            assert np.array_equal(flat(model), by_hand.own()), step
        local.sync()
        assert same_everywhere(model)


@case
def asynchronous_exchanges_equal_the_same_by_hand():
    """Each rank decides by itself when it takes part; the last one does so only because of the bound."""
    decided = [np.random.default_rng(rank).random(7) < 0.3 for rank in range(hvd.size() - 1)] + [np.zeros(7, bool)]
    own = iter(decided[hvd.rank()])
    asked = []

    def times(rank, clock):
        asked.append((rank, clock))
        return next(own)

    model, optimizer, by_hand = network(), ADAM(), ByHand(ADAM, NESTEROV, LOSSY)
    local = LocalSGD(model, LOSSY, times=times, every=4, outer=NESTEROV())
    taken = [flat(by_hand.anchor) for _ in by_hand.models]
    last = [0] * hvd.size()
    for step in range(7):
        if step == 5:  # in the middle, from a saved state
            saved = local.serialize()
            local.close()
            local = LocalSGD(model, LOSSY, times=times, every=4, outer=NESTEROV())
            local.deserialize(saved)
        train(model, optimizer, local, 1, step)
        by_hand.step(step)
        present = [bool(decided[rank][step]) or step + 1 - last[rank] >= 4 for rank in range(hvd.size())]
        last = [step + 1 if there else before for there, before in zip(present, last, strict=True)]
        if any(present):
            updates = [
                base - flat(one) if there else None
                for base, one, there in zip(taken, by_hand.models, present, strict=True)
            ]
            by_hand.outer_step(by_hand.ranks.mean(updates))
            for rank in np.flatnonzero(present):
                put(by_hand.models[rank].trainable_variables, flat(by_hand.anchor))
                taken[rank] = flat(by_hand.anchor)
        assert np.array_equal(flat(model), by_hand.own()), step
    assert asked == [(hvd.rank(), clock) for clock in range(1, 8)]
    local.sync()
    assert same_everywhere(model)
    with pytest.raises(ValueError, match="times is given beside fragments or delay"):
        LocalSGD(model, LOSSY, times=times, fragments=2)


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
def a_rank_with_nan_discards_the_period_on_all_ranks():
    model, optimizer = network(), ADAM()
    local = LocalSGD(model, LOSSY, every=2, optimizer=optimizer)
    train(model, optimizer, local, 2)
    before, kept = flat(model), local.state_dict()["residuals"]
    train(model, optimizer, local, 1, 2)
    if hvd.rank() == hvd.size() - 1:
        shapes = [one.shape for one in model.trainable_variables]
        optimizer.apply_gradients(zip([tf.fill(s, np.nan) for s in shapes], model.trainable_variables, strict=True))
    train(model, optimizer, local, 1, 3)
    assert np.array_equal(flat(model), before)
    now = local.state_dict()["residuals"]
    assert now.keys() == kept.keys() and all(np.array_equal(residual, kept[name]) for name, residual in now.items())
    train(model, optimizer, local, 4, 4)
    assert np.isfinite(flat(model)).all() and same_everywhere(model) and not np.array_equal(flat(model), before)


@case
def a_resumed_run_equals_an_unbroken_one():
    options = {"every": 4, "decay": 0.9, "fragments": 2}
    unbroken, optimizer = network(), ADAM()
    train(unbroken, optimizer, LocalSGD(unbroken, LOSSY, outer=NESTEROV(), **options), 11)

    halves, optimizer = network(), ADAM()
    first = LocalSGD(halves, LOSSY, outer=NESTEROV(), **options)
    train(halves, optimizer, first, 6)  # in the middle of a period
    first._updates.outer.learning_rate = 0.7  # a state has it
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(model=halves, optimizer=optimizer, local=first).write(f"{folder}/saved")
        resumed, optimizer = network(7), ADAM()
        optimizer.build(resumed.trainable_variables)
        local = LocalSGD(resumed, LOSSY, outer=keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), **options)
        saved = from_bytes(first.serialize())

        def with_anchor(name, array):
            return saved | {"anchors": saved["anchors"] | {name: array}}

        without = {key: value for key, value in saved.items() if key != "anchors"}
        for state, message in (
            (without, "this is not a state of LocalSGD: it must have anchors"),
            (saved | {"due": [1]}, "the state is of 1 fragments, and the settings are of 2"),
            (saved | {"clock": -1}, "the step counts of the state must be integers, 0 or more"),
            (saved | {"rank": hvd.rank() + 1}, "every rank must load the state that it saved"),
            (saved | {"outer": {}}, "the outer optimizer's variable of the state is of another model"),
            (saved | {"outer_rate": "1"}, "the learning rate of the outer optimizer is '?1'?; it must be a number"),
            (with_anchor("0", np.zeros(3)), "the anchor 0 of the state is float64 .3.; it must be float32 .600."),
            (with_anchor("3", np.full(4, np.nan, "f4")), "the anchor 3 of the state contains NaN"),
        ):
            with pytest.raises(ValueError, match=message):
                local.load_state_dict(state)
        with pytest.raises(ValueError, match="this is not a state of DeepReduce"):
            local.deserialize(to_bytes(saved, ARRAYS)[:-30])
        unchanged = local.state_dict()
        assert unchanged["clock"] == 0 and np.array_equal(unchanged["anchors"]["0"], flat(resumed.weights[:1]))
        tf.train.Checkpoint(model=resumed, optimizer=optimizer, local=local).read(path).assert_consumed()
    train(resumed, optimizer, local, 5, 6)
    assert np.array_equal(flat(resumed), flat(unbroken))
    local.sync()
    states = hvd.allgather_object(local.state_dict())
    local.load_state_dict(iter(states), reshard=True)
    for given, message in ((states[0], "with reshard, the states of all ranks"), ([states[0]] * 2, "once")):
        with pytest.raises(ValueError, match=message):
            local.load_state_dict(given, reshard=True)
    train(resumed, optimizer, local, 3, 11)
    local.sync()
    assert same_everywhere(resumed)


@case
def keras_saves_and_restores_its_state():
    x, y = batch(0, hvd.rank())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None))
    clocks = []
    for epochs, reshard in ((1, False), (2, False), (3, True)):
        model = network()
        model.compile(MOMENTUM(), loss)
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
def ranks_that_differ_get_an_error():
    optimizer = keras.optimizers.SGD(0.1)
    model = network(seed=hvd.rank())
    local = LocalSGD(model, LOSSY, every=1)
    with pytest.raises(MismatchError, match=r"on rank 1, the parameter dense.*/kernel has other .*hvd.broadcast_"):
        train(model, optimizer, local, 1)
    hvd.broadcast_variables(model.variables, root_rank=0)
    local.begin()
    optimizer = keras.optimizers.SGD(0.1)
    train(model, optimizer, local, 1)
    assert same_everywhere(model)
    for options, message in (
        ({"outer": keras.optimizers.SGD(1.0 + hvd.rank())}, "on rank 1, the outer optimizer has other settings"),
        ({"decay": 1 - 0.1 * hvd.rank()}, "local"),
    ):
        with pytest.raises(MismatchError, match=message):
            train(model, optimizer, LocalSGD(model, LOSSY, every=1, **options), 1)


@case
def ranks_that_part_get_an_error():
    rank, last = hvd.rank(), hvd.size() - 1

    def made(**options):
        model = network()
        return model, keras.optimizers.SGD(0.1), LocalSGD(model, LOSSY, **options)

    # Periods that part, found at the exchange where they begin.
    trained = made(every=lambda clock: 3 + (rank == last and clock > 0))
    with pytest.raises(MismatchError, match=f"next_exchange is 6 on rank 0, 7 on rank {last}. LocalSGD's"):
        train(*trained, 3)
    # A rank that has ended its loop.
    trained = made(every=3, fragments=2, delay=1)
    with pytest.raises(MismatchError, match=f"clock is 6 on rank 0, 5 on rank {last}; call is step on rank 0, sync"):
        train(*trained, 9 if rank < last else 5)
        trained[2].sync()
    # States that one rank loads in a running job: of another anchor, and of another exchange.
    trained = made(every=1)
    local = trained[2]
    train(*trained, 2)
    early = local.state_dict()
    train(*trained, 1, 2)
    late = local.state_dict()
    if rank == last:
        local.load_state_dict(late | {"anchors": {name: one + 1 for name, one in late["anchors"].items()}})
    with pytest.raises(MismatchError, match=f"on rank {last}, the parameter dense.*/kernel has other values"):
        train(*trained, 1, 3)
    if rank == last:
        local.load_state_dict(early)
    with pytest.raises(MismatchError, match=f"the step count of|clock is 5 on rank 0, 3 on rank {last}"):
        train(*trained, 1, 3)
    local.load_state_dict(late)
    train(*trained, 2, 3)
    local.sync()
    assert same_everywhere(trained[0])


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
    optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(TypeError, match="outer is SGD, but it must be a Keras optimizer of its own"):
        LocalSGD(model, LOSSY, outer=optimizer, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"delay must be less than every"):
        LocalSGD(model, LOSSY, every=2, delay=2)
    with pytest.raises(ConfigError, match="Use LocalSGD in place of"):
        DeepReduce(LOSSY, local={"every": 3})
    model.layers[0].trainable = False
    local = LocalSGD(model, LOSSY, every=1)
    model.layers[0].trainable = True
    with pytest.raises(RuntimeError, match=r"after LocalSGD was made, or are of another model: dense.*/kernel"):
        train(model, optimizer, local, 1)
    local = LocalSGD(model, LOSSY, every=1)
    with pytest.raises(RuntimeError, match=r"LocalSGD.step was called within a tf.function"):
        tf.function(local.step)()
    with pytest.raises(TypeError, match="cannot be pickled"):
        local.__reduce__()
    local.close()
    with pytest.raises(RuntimeError, match="was closed"):
        local.step()


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    run_cases(hvd.rank(), hvd.size())
