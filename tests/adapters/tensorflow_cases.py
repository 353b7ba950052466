"""What the TensorFlow adapter must do on several ranks: the cases of test_tensorflow.py (see tests/case_runner.py).

mpirun -np 2 python tests/adapters/tensorflow_cases.py [CASE ...]
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_deepreduce import Config, ConfigError, SparseTensor
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.engine import dense_or_compressed
from hvd_deepreduce.engine.graph.buckets import GraphBuckets
from hvd_deepreduce.engine.state import to_bytes
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.ops import device
from hvd_deepreduce.ops.pieces import Pieces
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.tensorflow import Capture, DeepReduce, SaveState, callbacks, handshake, native, optimizers
from hvd_deepreduce.tensorflow.elastic import TensorFlowState
from hvd_deepreduce.tensorflow.operations import Operations
from hvd_deepreduce.tools import gradient_file
from hvd_deepreduce.wire import standalone as wire
from tests.adapters import containers, votes_job
from tests.adapters.common import on
from tests.adapters.optimizer_warnings import heard
from tests.adapters.scopes import SCOPES, TWO_LEVELS
from tests.adapters.tcp import Meter
from tests.adapters.tensorflow_job import TensorFlowJob, batch, loss_of, network
from tests.case_runner import case, run_cases
from tests.damaged import damage, repair

LOSSLESS = {"sparsifier": {"name": "topk", "density": 1.0}, "value": "raw", "index": "bitmap", "min_elements": 0}
LOSSY = {"sparsifier": {"name": "topk", "density": 0.05}, "min_elements": 0}
keras = tf.keras


def ring(*sizes):
    """Bytes that a rank sends where Horovod allreduces float32 tensors of these sizes without compression."""
    return sum(traffic.allreduce(4 * size, hvd.size()).sent for size in sizes)


def train(model, compression, steps=3, first=0, graph=False, variables=None, data=batch, **options):
    """Steps of SGD with momentum under Horovod's tape; in eager mode or in a tf.function. Returns one of them."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    variables = model.trainable_variables if variables is None else variables

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = tf.function(step) if graph else step

    def go(number):
        run(*map(tf.constant, data(number)))

    for number in range(first, first + steps):
        go(number)
    return go


def fit(model, optimizer, used=(), steps=3, size=16, epochs=1, **options):
    """model.fit on the batches that ``train`` has, the last one shorter where ``size`` is."""
    parts = [batch(step, size=16 if step + 1 < steps else size) for step in range(steps)]
    x, y = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model.fit(x, y, 16, epochs, shuffle=False, verbose=0, callbacks=list(used)).history


def flat(model):
    return np.concatenate([v.numpy().astype(np.float64).reshape(-1) for v in model.trainable_variables])


def same_everywhere(model, process_set=hvd.global_process_set):
    """All parameters bitwise equal on all ranks."""
    words = np.concatenate([np.frombuffer(v.numpy().tobytes(), np.uint8) for v in model.trainable_variables])
    gathered = hvd.allgather(tf.constant(words), process_set=process_set).numpy().reshape(process_set.size(), -1)
    assert (gathered == gathered[0]).all(), "the ranks' parameters differ"


def close(a, b, tolerance=1e-5):
    return np.allclose(a, b, rtol=1e-4, atol=tolerance)


def subtract(variables, gradients):
    """A step of plain SGD."""
    for v, g in zip(variables, gradients, strict=True):
        v.assign_sub(0.1 * g)


def reducing(variables, compression, loss, graph=True, **options):
    """A function that gives this rank's gradients, and what all ranks' are reduced to."""

    def both(*given):
        with tf.GradientTape(persistent=True) as tape:
            value = loss(*given)
        own = tape.gradient(value, variables)
        tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
        return own, tape.gradient(value, variables)

    return tf.function(both) if graph else both


DENSITY = {"sparsifier": {"name": "topk", "density": 0.25}}
on.use(
    job=TensorFlowJob, rank=hvd.rank, size=hvd.size, gathered=hvd.allgather_object, over_mpi=hvd.mpi_enabled,
    given=lambda arrays, config: TensorFlowJob(config, given=arrays), error=lambda kind: (kind, tf.errors.OpError),
    scopes=[{"scope": "tensor"}, *SCOPES], levels=TWO_LEVELS, dtypes=(None,), by_hand={"graph": False},
    modes=[{"graph": True}, {"graph": False}],
    options=[{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 2}, {"num_groups": 1},
             {"groups": "a list"}, {"sparse_as_dense": True}],
    changes=[({}, DENSITY), (SCOPES[0], SCOPES[1]), (SCOPES[3], DENSITY)],
)  # fmt: skip


@case
def votes_of_scaled_momentum_are_those_of_a_simulation():
    """Keras has no SignMomentum: a loop of one's own takes the sign of what all ranks' gradients are reduced to."""
    for scope in votes_job.SCOPES:
        zeros = {f"p{at}": np.zeros(size) for at, size in enumerate(votes_job.SIZES)}
        job = on.given(zeros, votes_job.config(scope))
        for step, total in enumerate(votes_job.sums(scope, on.size())):
            reduced = np.concatenate(job.reduced(votes_job.gradients(step, on.rank())))
            np.testing.assert_allclose(reduced, total / on.size(), rtol=1e-12, atol=0)


@case
def an_optimizer_that_loses_under_the_config_is_told_once():
    # The first case, since optimizers of others would make it uncertain which one gets the gradients.
    gc.collect()
    others = [one for one in gc.get_objects() if issubclass(type(one), optimizers.KINDS)]
    model = network()
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=DeepReduce(LOSSY))
    with heard() as texts:
        fit(model, optimizer)
    if not others:
        assert len(texts) == (hvd.rank() == 0), texts
        assert all("the optimizer is Adam, and" in one and 'LocalSGD(model, "adamw_safe")' in one for one in texts)
    with heard() as texts:
        fit(network(), hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=DeepReduce(LOSSY)))
        fit(network(), hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.1), compression=DeepReduce("natural")))
    assert not texts


@case
def gradients_stay_where_they_are_until_their_bucket_is_encoded():
    """Results that are kept keep their values, though a bucket's memory and its residual change places."""
    if native.library() is None:
        return
    copied = []
    copy_to = Pieces.copy_to
    for dtype, copies in ((tf.float32, False), (tf.float64, True)):
        variables = [tf.Variable(tf.zeros(size, dtype)) for size in (40_000, 64, 32_000)]
        compression, kept = DeepReduce("topk_rice_qsgd"), []

        def loss(rates, variables=variables):
            return tf.add_n([tf.reduce_sum(v * rates[: v.shape[0]]) for v in variables])

        run = reducing(variables, compression, loss)
        with patch.object(Pieces, "copy_to", lambda pieces, to: copied.append(pieces.size) or copy_to(pieces, to)):
            for step in range(5):
                rates = np.random.default_rng([step, hvd.rank()]).standard_normal(40_000)
                before = compression.state_dict()["residuals"]
                own, reduced = run(tf.constant(rates, dtype))
                after = compression.state_dict()["residuals"]
                # What all ranks have sent of each gradient is what is not in their residuals.
                for gradient, result, name in zip(own, reduced, after, strict=True):
                    sent = gradient + before.get(name, np.zeros(gradient.shape)) - after[name]
                    assert close(hvd.allreduce(sent), result), (dtype, step, name)
                kept.append((reduced, [result.numpy().copy() for result in reduced]))
        for results, values in kept:
            assert all(np.array_equal(*pair) for pair in zip(results, values, strict=True))
        assert bool(copied) == copies, copied
        compression.close()


def equals_dense(run, config, tolerance=1e-5):
    """``run`` trains with a compression, and returns all parameters. Returns the DeepReduce."""
    dense, ours = run(hvd.Compression.none), run(compression := DeepReduce(config))
    assert close(dense, ours, tolerance), config
    return compression


def fitted(wrap, **options):
    """For ``equals_dense``: ``model.fit`` with the optimizer that ``wrap`` makes."""

    def run(compression):
        model = network()
        fit(model, wrap(compression), steps=4, size=5, **options)
        same_everywhere(model)
        return flat(model)

    return run


@case
def keras_optimizers_and_fit():
    def wrap(compression, how):
        if how == "tensorflow":
            return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=compression)
        inner = keras.optimizers.legacy.SGD(0.1) if how == "legacy" else keras.optimizers.SGD(0.1, momentum=0.9)
        more = {"backward_passes_per_step": 2, "average_aggregated_gradients": True} if how == "passes" else {}
        more |= {"op": hvd.Sum} if how == "sum" else {"groups": 2} if how == "groups" else {}
        return hvd_keras.DistributedOptimizer(inner, compression=compression, **more)

    for how in ("tensorflow", "sum", "groups", "legacy", "passes", "eagerly"):
        run = fitted(functools.partial(wrap, how=how), run_eagerly=how == "eagerly")
        # The last batch is shorter: TensorFlow traces again, and it is the same list of parameters.
        state = equals_dense(run, LOSSLESS).state_dict()
        assert set(state["steps"].values()) == {2 if how == "passes" else 4} and len(state["lists"]) == 1, how

    def custom(compression):
        """A loop with backward_passes_per_step outside Keras' own."""
        model = network()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), compression=compression, backward_passes_per_step=2
        )
        for step in range(4):
            x, y = batch(step)
            optimizer.minimize(lambda: loss_of(model, x, y), model.trainable_variables)  # noqa: B023
        same_everywhere(model)
        return flat(model)

    equals_dense(custom, LOSSLESS)


@case
def gradients_that_are_none_and_another_choice_of_variables():
    """The names of the gradients do not count where the tape says so."""

    def run(compression):
        model = network()
        unused = tf.Variable(tf.ones([7, 3]), name="unused")
        frozen = model.trainable_variables[0].numpy()
        for number in range(2):
            variables = [*model.trainable_variables[2:4], unused, *model.trainable_variables[4:]]
            with tf.GradientTape() as tape:
                loss = loss_of(model, *batch(number))
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            gradients = list(tape.gradient(loss, variables, use_generic_names=True))
            assert [gradient is None for gradient in gradients] == [one is unused for one in variables]
            del variables[2], gradients[2]
            subtract(variables, gradients)
        assert np.array_equal(frozen, model.trainable_variables[0].numpy())
        train(model, compression, steps=2)
        same_everywhere(model)
        return flat(model)

    with heard("hvd_deepreduce") as texts:
        state = equals_dense(run, LOSSLESS).state_dict()
    said = [text for text in texts if text.startswith("Horovod passes 6 gradients in a step, of other shapes than")]
    assert len(said) == (hvd.rank() == 0), texts
    assert [len(names) for names in state["lists"]] == [4, 6] and len(state["residuals"]) == 10
    assert [int(name.split()[0]) for name in state["steps"]] == list(range(10))


@case
def two_models_in_one_step():
    """Two tapes in one function, two optimizers in one train_step: each gradient has its own residual."""

    def run(compression):
        models = network(1), network(2)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as first, tf.GradientTape() as second:
                losses = [loss_of(model, x, y) for model in models]
            for tape, loss, model in zip((first, second), losses, models, strict=True):
                tape = hvd.DistributedGradientTape(tape, compression=compression)
                subtract(model.trainable_variables, tape.gradient(loss, model.trainable_variables))

        for number in range(3):
            step(*map(tf.constant, batch(number)))
        for model in models:
            same_everywhere(model)
        return np.concatenate([flat(model) for model in models])

    compression = equals_dense(run, LOSSLESS)
    assert len(compression.state_dict()["residuals"]) == 12
    assert compression.stats()["total"]["steps"] == 3


def sums_of_sines(variables, compression, steps):
    """Trains 40 variables of 300 elements, whose gradients come in whatever order, and compares the ranks."""

    @tf.function
    def step(number):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.sin(v * tf.cast(number, tf.float32))) for v in variables])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        subtract(variables, tape.gradient(loss, variables))

    for number in range(steps):
        step(tf.constant(number + hvd.rank()))
    same_everywhere(type("Model", (), {"trainable_variables": variables}))
    stats = compression.stats()
    assert stats["total"]["steps"] == steps and stats["last_step"]["dense_bytes"] == 40 * ring(300)


@case
def many_tensors_in_whatever_order():
    variables = [tf.Variable(np.random.default_rng(i).standard_normal(300).astype("f")) for i in range(40)]
    sums_of_sines(variables, DeepReduce(LOSSY), 8)


class Tables(keras.Model):
    """Two embeddings of one shape: their gradients look alike."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(3)
        self.one, self.two = keras.layers.Embedding(50, 8), keras.layers.Embedding(50, 8)
        self.out = keras.layers.Dense(4)

    def call(self, pairs):
        return self.out(tf.reduce_mean(self.one(pairs[0]), 1) - tf.reduce_mean(self.two(pairs[1]), 1))


def table_batch(step):
    pairs = np.random.default_rng(10 * step + hvd.rank()).integers(0, 50, (2, 16, 3))
    return pairs, pairs[0, :, 0] % 4


@case
def larger_scopes_in_keras():
    for passes, scope in enumerate(on.possible((SCOPES[0], SCOPES[4])), 1):

        def wrap(compression, passes=passes):
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            return hvd.DistributedOptimizer(optimizer, compression=compression, backward_passes_per_step=passes)

        state = equals_dense(fitted(wrap, steps_per_execution=3 - passes), {**LOSSLESS, **scope}).state_dict()
        assert set(state["steps"].values()) == {4 // passes} and len(state["lists"]) == 1, scope


@case
def larger_scopes_with_nan_integers_and_changes():
    for scope in on.possible((SCOPES[0], SCOPES[3])):
        compression = DeepReduce(LOSSY, **scope)

        @tf.function
        def reduce(factor, counts, *given, compression=compression):
            given = [counts, *(g * tf.cast(factor, g.dtype) for g in given)]
            return [hvd.allreduce(g, compression=compression, name=f"g{i}") for i, g in enumerate(given)]

        dtypes = (tf.float32, tf.float16, tf.float64, tf.float64, tf.bfloat16, tf.float32, tf.float32)
        given = [tf.cast(tf.random.normal((40, 3 * i + 1), seed=i), d) for i, d in enumerate(dtypes)]
        given[-1] = tf.zeros([0, 3])
        for step in range(3):
            # On rank 1 TensorFlow traces the second step again.
            counts, *reduced = reduce(float("nan") if step == 1 and hvd.rank() == 1 else 1.0, tf.range(5), *given)
            assert counts.numpy().tolist() == [0, 1, 2, 3, 4]
            assert all(r.dtype == g.dtype and r.shape == g.shape for r, g in zip(reduced, given, strict=True))
            finite = [bool(tf.reduce_all(tf.math.is_finite(tf.cast(r, tf.float64)))) for r in reduced]
            assert all(finite) == (step != 1) and finite[-1], scope
        for change in on.possible(SCOPES):
            compression.set_config(LOSSY, **change)
            reduced = reduce(1.0, tf.range(5), *given)
            assert all(np.isfinite(tf.cast(r, tf.float64)).all() for r in reduced), (scope, change)
        with pytest.raises(ValueError, match=r"scope is .* and cannot be changed to 'tensor' now, because"):
            compression.set_config(LOSSY)
        reduce(1.0, tf.range(5), *given)


@case
def buckets_of_which_one_needs_the_sum_of_another():
    """Two tapes in one function, the second one's gradients made of what the first one's were reduced to."""

    def run(compression):
        models = network(1), network(2)

        @tf.function
        def step(x, y):
            for model in models:
                with tf.GradientTape() as tape:
                    loss = loss_of(model, x, y) + tf.reduce_sum(models[0].trainable_variables[0])
                tape = hvd.DistributedGradientTape(tape, compression=compression)
                gradients = tape.gradient(loss, model.trainable_variables)
                subtract(model.trainable_variables, gradients)
            x = x + hvd.allreduce(tf.reduce_sum(gradients[0]), compression=compression, name="first")
            return hvd.allreduce(tf.reduce_sum(x), compression=compression, name="then")

        for number in range(3):
            last = step(*map(tf.constant, batch(number)))
        for model in models:
            same_everywhere(model)
        return np.concatenate([*map(flat, models), last.numpy().reshape(1)])

    for scope in on.possible((SCOPES[1], SCOPES[3])):
        assert equals_dense(run, {**LOSSLESS, **scope}, 1e-3).stats()["total"]["steps"] == 3


@case
def buckets_of_several_compressors_in_whatever_order():
    """Optimizers with a DeepReduce of their own, in functions that TensorFlow runs at the same time."""
    for scope in on.possible((SCOPES[1], SCOPES[3])):
        rng = np.random.default_rng(5)
        sets = [[tf.Variable(rng.standard_normal(size).astype("f")) for size in (700, 50, 900, 3)] for _ in range(3)]
        dense = [[v.numpy() for v in variables] for variables in sets]
        steps = []
        for number, variables in enumerate(sets):
            compression = DeepReduce(LOSSLESS, **scope)
            wait = 0.002 * ((number + hvd.rank()) % 3)

            def loss(factor, variables=variables, wait=wait):
                # Each rank comes to them in another order.
                factor = tf.numpy_function(lambda given, s=wait: time.sleep(s) or given, [factor], tf.float32)
                return tf.add_n([tf.reduce_sum(tf.sin(v * factor)) for v in variables])

            steps.append(reducing(variables, compression, loss))

        @tf.function
        def step(factor, sets=sets, steps=steps):
            for reduce, variables in zip(steps, sets, strict=True):
                subtract(variables, reduce(factor)[1])

        for number in range(3):
            step(tf.constant(1.0 + number + hvd.rank()))
            for variables in dense:
                for at, v in enumerate(variables):
                    factors = [np.float32(1.0 + number + rank) for rank in range(hvd.size())]
                    variables[at] = v - np.float32(0.1) * sum(np.cos(v * f) * f for f in factors) / hvd.size()
        for variables, by_hand in zip(sets, dense, strict=True):
            same_everywhere(type("Model", (), {"trainable_variables": variables}))
            assert all(close(v.numpy(), own, 1e-4) for v, own in zip(variables, by_hand, strict=True)), scope


@case
def many_tensors_in_buckets():
    variables = [tf.Variable(np.random.default_rng(i).standard_normal(300).astype("f")) for i in range(40)]
    for kind, scope in ((DeepReduce, SCOPES[1]), (InPython, SCOPES[1]), (DeepReduce, SCOPES[3])):
        if list(on.possible([scope])):
            sums_of_sines(variables, compression := kind(LOSSY, **scope), 6)
            assert set(compression.state_dict()["steps"].values()) == {6}


@case
def what_fails_in_buckets_is_raised_at_the_end_of_the_step():
    kinds = [(SCOPES[1], DeepReduce), (SCOPES[1], InPython), (SCOPES[3], DeepReduce)]
    for scope, kind in [one for one in kinds if list(on.possible(one[:1]))]:
        model, compression = network(), kind(LOSSY, **scope)
        run = train(model, compression, steps=1, graph=True)
        weights = flat(model)
        if compression.config.exchange.name == "allgather":
            match = "ContainerError: the container of rank 1 cannot be read"
            if hvd.rank() == 1:
                damage(compression._engine.pipeline)
        else:
            # A message that cannot be read is told to all ranks by the exchange itself (tests/exchange).
            def broken(*arguments):
                failed = Future()
                failed.set_exception(ValueError("the exchange came to nothing"))
                return failed

            queue = compression._engine.queues.queue(0, "densestream")
            queue.submit, match = broken, "the exchange came to nothing"
        with pytest.raises(tf.errors.OpError, match=match) as caught:
            run(7)
        assert not isinstance(caught.value, tf.errors.UnknownError)  # which hvd.elastic.run drops
        same_everywhere(model)
        if compression.config.exchange.name != "allgather":
            del queue.submit
        elif hvd.rank() == 1:
            repair(compression._engine.pipeline)
        run(8)
        assert not np.array_equal(weights, flat(model))
        same_everywhere(model)


@case
def a_step_with_buckets_that_another_error_ends():
    for kind in (DeepReduce, InPython):
        another_error_ends_a_step(kind(LOSSLESS, scope="model"))


def another_error_ends_a_step(compression):
    variables = [tf.Variable(tf.ones([50]), name=f"v{i}") for i in range(3)]

    def late(gradient, fails, seen):
        if fails:
            time.sleep(0.5)  # the other gradients are in their bucket by then
            raise ZeroDivisionError
        return gradient

    @tf.function
    def step(fails):
        gradients = [tf.sin(v) for v in variables]
        seen = hvd.allreduce(tf.zeros(1), name="seen")
        gradients[1] = tf.numpy_function(late, [gradients[1], fails, seen], tf.float32)
        gradients[1].set_shape([50])
        return hvd.grouped_allreduce(gradients, compression=compression)

    step(0)
    with pytest.raises(tf.errors.OpError, match="ZeroDivisionError"):
        step(1)
    with pytest.raises(tf.errors.OpError, match="buckets of another step are still in flight: either an error"):
        step(0)


@case
def exchanges_over_mpi_say_so_under_gloo():
    if hvd.mpi_enabled():
        return
    with pytest.raises(RuntimeError, match="was started with Gloo: start it with horovodrun --mpi or mpirun"):
        train(network(), DeepReduce(exchange="densestream"))
    compression = DeepReduce(scope="model")
    run = train(network(), compression)
    with pytest.raises(RuntimeError, match="was started with Gloo: start it with horovodrun --mpi or mpirun"):
        compression.set_config(exchange="sparcml", index=None, value=None)
    run(8)


@case
def sparse_gradients_as_dense_and_as_they_are():
    def run(compression, **options):
        model = Tables()
        model(table_batch(0)[0])
        train(model, compression, data=table_batch, graph=options.pop("graph", True), **options)
        same_everywhere(model)
        return flat(model)

    dense = run(hvd.Compression.none, sparse_as_dense=True)
    for graph in (False, True):
        compression = DeepReduce(sparsifier="nonzero", value="raw", min_elements=0)
        assert close(dense, run(compression, sparse_as_dense=True, graph=graph))
        stats = compression.stats()["total"]
        # Each container is sent to every other rank.
        assert stats["bytes_sent"] < (hvd.size() - 1) * stats["steps"] * 4 * dense.size
        assert len(compression.state_dict()["residuals"]) == 4
    for number, scope in enumerate(on.possible((SCOPES[0], SCOPES[4]))):
        # In eager mode a sparse gradient's shape is not known until it comes.
        compression = DeepReduce(LOSSLESS, **scope)
        assert close(dense, run(compression, sparse_as_dense=True, graph=number % 2 > 0)), scope
        state = compression.state_dict()
        compression.load_state_dict(state)
        assert [residual.size for residual in state["residuals"].values()] == [400, 400, 32, 4]
    # Without sparse_as_dense they stay sparse, and have containers of their own.
    compression = DeepReduce(sparsifier="nonzero", value="raw", min_elements=0)
    assert close(dense, run(compression))
    state = compression.state_dict()
    assert [p[1] for p in state["lists"][0]] == [(50, 8), (50, 8), (8, 4), (4,)]
    assert [residual.size for residual in state["residuals"].values()] == [400, 400, 32, 4]
    compression = DeepReduce(LOSSLESS, scope="model")
    assert close(dense, run(compression))
    assert len(compression.state_dict()["residuals"]) == len(compression.state_dict()["steps"]) == 4


@case
def sparse_gradients_of_several_compressors_in_one_function():
    """Each has its own, and those of stock Horovod stay as they are."""
    tables = [tf.Variable(tf.ones([30, 4]), name=f"table{at}") for at in range(3)]
    weights = [tf.Variable(tf.ones([4]), name=f"weight{at}") for at in range(3)]
    used = [DeepReduce(sparsifier="nonzero", value="raw", min_elements=0) for _ in range(2)]

    @tf.function
    def step(rows):
        reduced = []
        for table, weight, compression in zip(tables, weights, (*used, hvd.Compression.none), strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows) * weight)
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            reduced += tape.gradient(loss, [weight, table])
        return reduced

    given = [np.random.default_rng(rank).integers(0, 30, 20) for rank in range(hvd.size())]
    reduced = step(tf.constant(given[hvd.rank()]))
    expected = np.bincount(np.concatenate(given), minlength=30) / hvd.size()
    for table in reduced[1::2]:
        assert close(tf.convert_to_tensor(table).numpy(), expected[:, None] * np.ones(4))
    assert [one.values.shape[0] == 20 * hvd.size() for one in reduced[1::2]] == [False, False, True]
    for compression in used:
        assert list(compression.state_dict()["steps"].values()) == [1, 1]


ROWS = {"sparsifier": {"name": "topk", "density": 0.3, "density_of": "nonzeros"}, "min_elements": 0}


@case
def indexed_slices_equal_the_pipeline_run_by_hand():
    """With rows that occur twice, a rank without rows, NaN on one, and a sparse gradient that is the last one."""
    buckets = Config.load({"sparsifier": ROWS["sparsifier"]}, scope="bucket")
    made = (tf.Variable(tf.ones([50, 8]), name="table"), tf.Variable(tf.ones([8]), name="last"))

    def given(step, rank):
        rng = np.random.default_rng(10 * step + rank)
        count = 0 if step == 1 and rank == hvd.size() - 1 else 40
        weights = rng.integers(-50, 50, (count, 8)).astype(np.float32) / 8  # their sums are exact
        if step == 2 and rank == 0:
            weights[3, 4] = np.nan
        return rng.integers(0, 50, count), weights

    for graph, place, op, config in (
        (True, 0, hvd.Average, Config.load(ROWS)),
        (False, 0, hvd.Sum, buckets),
        (True, 1, hvd.Average, buckets),
    ):
        pipeline, compression, variables = Pipeline(config), DeepReduce(config), made[::-1] if place else made
        loss = lambda rows, weights: tf.reduce_sum(tf.gather(made[0], rows) * weights * made[1])  # noqa: E731
        reduce = reducing(variables, compression, loss, graph, op=op)
        residuals = [np.zeros(400, np.float32) for _ in range(hvd.size())]
        for step in range(4):
            reduced = reduce(*map(tf.constant, given(step, hvd.rank())))[1][place]
            sent = []
            for rank, residual in enumerate(residuals):
                rows, weights = given(step, rank)
                gradient = np.zeros((50, 8), np.float32)
                np.add.at(gradient, rows, weights)
                support = (np.unique(rows)[:, None] * 8 + np.arange(8)).reshape(-1).astype(np.uint32)
                key = RngKey(0, place, step, rank)
                gradient = SparseTensor(400, support, gradient.reshape(-1)[support])
                sent.append(wire.unpack(pipeline.encode_sparse(gradient, residual, key)))
            scale = 1.0 if op == hvd.Sum else 1 / hvd.size()
            total = pipeline.decode_sparse(sent, 400, np.dtype(np.float32), scale).dense()
            assert isinstance(reduced, tf.IndexedSlices)
            ours = tf.convert_to_tensor(tf.IndexedSlices(reduced.values, reduced.indices, (50, 8))).numpy().reshape(-1)
            assert np.array_equal(ours, total, equal_nan=True), (graph, place, step)
            assert np.isnan(ours).any() == (step == 2) and (np.diff(reduced.indices) > 0).all()
        kept = list(compression.state_dict()["residuals"].values())[place]
        assert kept.any() and np.array_equal(kept, residuals[hvd.rank()])
        # What waits goes with the next ones, if they are sent as they are from now on.
        compression.set_config(sparsifier="none")
        for total in (sum(residuals) * scale, np.zeros(400)):
            one = reduce(*(tf.constant(part[:2] * 0) for part in given(0, 0)))[1][place]
            ours = tf.convert_to_tensor(tf.IndexedSlices(one.values, one.indices, (50, 8))).numpy().reshape(-1)
            np.testing.assert_allclose(ours, total, rtol=1e-6)
        compression.set_config(config)
    momentum = DeepReduce({**ROWS, "memory": "dgc"})
    with pytest.raises(tf.errors.OpError, match="has a sparse gradient, and memory is 'dgc'.*sparse_as_dense=True"):
        reducing(made, momentum, loss, graph)(*map(tf.constant, given(0, hvd.rank())))
    momentum.close()
    # A container that was damaged is an error on all ranks, and nothing else is lost.
    engine, encode = compression._engine, compression._engine.pipeline.encode_sparse
    rows = given(4, hvd.rank())
    if hvd.rank() == 1:
        engine.pipeline.encode_sparse = lambda *arguments: encode(*arguments)[:-1]
    with pytest.raises(tf.errors.OpError, match="ContainerError: the container of rank 1 cannot be read"):
        reduce(*map(tf.constant, rows))
    engine.pipeline.encode_sparse = encode
    assert np.isfinite(reduce(*map(tf.constant, rows))[1][1].values).all()


@case
def sparse_gradients_in_keras():
    """Of fit: as stock Horovod's, with fewer bytes than its own; and a resumed job goes on as it would have."""

    def job(compression, **options):
        keras.utils.set_random_seed(4)
        layers = [keras.layers.Embedding(50, 8), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((3,), dtype="int64"), *layers])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=compression)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
        return model, optimizer

    x = np.random.default_rng(hvd.rank()).integers(0, 50, (64, 3))

    def run(model, part):
        model.fit(x[part], x[part, 0] % 4, 16, shuffle=False, verbose=0)
        same_everywhere(model)
        return flat(model)

    lossless = DeepReduce(sparsifier="nonzero", value="raw", min_elements=0)
    dense = run(job(hvd.Compression.none)[0], slice(64))
    assert close(dense, run(job(lossless, steps_per_execution=2)[0], slice(64)))
    model, optimizer = job(compression := DeepReduce(ROWS))
    run(model, slice(32))
    folder = Path(tempfile.mkdtemp())
    tf.train.Checkpoint(model=model, optimizer=optimizer, compression=compression).write(str(folder / "whole"))
    final = run(model, slice(32, 64))
    assert set(compression.state_dict()["steps"].values()) == {4}
    assert next(iter(compression.state_dict()["residuals"].values())).any()
    again, optimizer = job(compression := DeepReduce(ROWS))
    names = {"model": again, "optimizer": optimizer, "compression": compression}
    tf.train.Checkpoint(**names).read(str(folder / "whole")).expect_partial()
    assert np.array_equal(final, run(again, slice(32, 64)))
    sent = compression.stats()["last_step"]["bytes_sent"]
    # The graph has the operations for both ways. This sparsifier cannot select from rows.
    compression.set_config(sparsifier="block_topk")
    run(again, slice(16))
    assert sorted(compression.state_dict()["steps"].values()) == [4, 5, 5]
    assert sent < compression.stats()["last_step"]["bytes_sent"] / 2


@case
def a_process_set():
    some = PROCESS_SET

    def train_tables():
        model = Tables()
        model(table_batch(0)[0])
        compression = DeepReduce(sparsifier="nonzero", value="raw", min_elements=0, process_set=some)
        train(model, compression, 1, data=table_batch, graph=True, process_set=some)

    if not some.included():
        train_tables()
        # Horovod builds the operations of a set on the ranks that are not in it, too, and never runs them.
        for scope in ({}, *on.possible((SCOPES[0], SCOPES[3]))):
            train(network(), DeepReduce(LOSSLESS, process_set=some, **scope), steps=1, process_set=some)
        return
    finals = []
    scopes = [{}, *on.possible((SCOPES[0], SCOPES[3]))]
    for compression in (hvd.Compression.none, *(DeepReduce(LOSSLESS, process_set=some, **scope) for scope in scopes)):
        model = network()
        train(model, compression, process_set=some)
        same_everywhere(model, some)
        finals.append(flat(model))
    assert all(close(finals[0], final) for final in finals[1:])
    train_tables()
    with pytest.raises(ValueError, match="a process_set that DeepReduce was not given"):
        train(network(), DeepReduce(LOSSLESS), process_set=some)


@case
def every_dtype_and_a_shape_that_is_not_known():
    for dtype, tolerance in ((tf.float16, 3e-2), (tf.bfloat16, 2e-1), (tf.float64, 1e-9)):
        reduced = []
        gradients = [np.random.default_rng(i + hvd.rank()).standard_normal((20, 30)) for i in range(2)]
        for min_elements in (None, 0, 10**6):
            none = hvd.Compression.fp16 if dtype == tf.bfloat16 else hvd.Compression.none
            compression = none if min_elements is None else DeepReduce(LOSSLESS, min_elements=min_elements)

            @tf.function
            def reduce(*given, compression=compression):
                return hvd.grouped_allreduce(list(given), compression=compression)

            results = reduce(*(tf.cast(g, dtype) for g in gradients))
            assert all(r.dtype == dtype and r.shape == (20, 30) for r in results)
            reduced.append(np.stack([tf.cast(r, tf.float64).numpy() for r in results]))
        for one in reduced[1:]:
            assert np.allclose(reduced[0], one, rtol=tolerance, atol=tolerance), dtype

    compression = DeepReduce(LOSSLESS)

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def reduce(given):
        return hvd.allreduce(given, compression=compression, name="unknown")

    for shape in ((3, 4), (3, 4)):
        assert np.allclose(reduce(tf.ones(shape) * (1.0 + hvd.rank())), 1 + (hvd.size() - 1) / 2)


class InPython(DeepReduce):
    """Its operations are Python functions, as where those in C++ were not built."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self._operations.native = None


def needs_operations_in_cpp():
    if native.library() is None:
        pytest.skip("the operations in C++ were not built for this TensorFlow: python setup.py build_ext --inplace")


KINDS = [((200, 130), tf.float32, hvd.Average), ((7,), tf.float64, hvd.Sum), ((30, 40), tf.float32, hvd.Average),
         ((90, 5), tf.float32, hvd.Sum), ((400,), tf.float16, hvd.Average)]  # fmt: skip
"""Shape, dtype and operation of tensors. The graph does not know the third one's shape."""


def each_reduced(compression):
    """A function of tensors of ``KINDS``, which reduces them, and twice the first result."""
    signature = [tf.TensorSpec([None, None] if at == 2 else shape, kind) for at, (shape, kind, _) in enumerate(KINDS)]

    @tf.function(input_signature=[signature])
    def reduce(given):
        kinds = enumerate(zip(given, KINDS, strict=True))
        first = [hvd.allreduce(g, op=kind[2], compression=compression, name=f"each{i}") for i, (g, kind) in kinds]
        return [*first, hvd.allreduce(first[0] * 2.0, compression=compression, name="of_a_result")]

    return reduce


def each_given(step):
    rng = np.random.default_rng([step, hvd.rank()])
    return [tf.cast(rng.standard_normal(shape), dtype) for shape, dtype, _ in KINDS]


@case
def steps_are_dense_or_compressed_by_choice():
    """Nothing is lost where the kind of a step changes, and all ranks change at the same steps."""
    needs_operations_in_cpp()
    warm_up = dense_or_compressed.WARM_UP
    for scope in ({"scope": "bucket"}, {"min_elements": 10}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dense_or_compressed, "BLOCK", 3)
            patch.setattr(dense_or_compressed, "BLOCKS", 4)
            compression = DeepReduce({"sparsifier": LOSSY["sparsifier"], **scope, "mode": "auto"})
            reduce, whole = each_reduced(compression), []
            given, taken = ([np.zeros(shape) for shape, _, _ in KINDS] for _ in range(2))
            for step in range(warm_up + 18):
                gradients = each_given(step)
                # In the first step of a dense block: what is not finite takes no residual with it.
                poisoned = step == warm_up + 6
                gradients[0] = np.where(poisoned, np.nan, gradients[0]).astype(np.float32)
                results = reduce(gradients)[:-1]
                for own, total, gradient, reduced in zip(given, taken, gradients, results, strict=True):
                    assert reduced.shape == gradient.shape and reduced.dtype == gradient.dtype
                    assert np.isnan(reduced).any() == (poisoned and total is taken[0])
                    if np.isfinite(reduced).all():
                        own += np.asarray(gradient)
                        total += reduced.numpy()
                last = compression.stats()["last_step"]
                whole.append(last["bytes_sent"] >= last["dense_bytes"])
            state = compression.state_dict()
            numbers = {int(name.split()[0]): residual for name, residual in state["residuals"].items()}
            for at, (own, total, (shape, _, op)) in enumerate(zip(given, taken, KINDS, strict=True)):
                left = np.reshape(numbers.get(at, np.zeros(shape)), shape)
                expected = hvd.allreduce(tf.constant(own - left), op=op, name=f"expected{at}").numpy()
                np.testing.assert_allclose(total, expected, rtol=0, atol=0.05 if at == 4 else 1e-4)
            trial = [number // 3 % 2 == 0 for number in range(12)]
            begun, ended = whole[:warm_up], whole[warm_up + 13 :]
            assert not any(begun) and whole[warm_up:][:13] == [*trial, False], whole
            assert len(set(ended)) == 1
            same = hvd.allgather_object(compression.stats().said)
            assert len(set(same)) == 1 and ("gradients are dense" in same[0]) == ended[0]
            with pytest.raises(ValueError, match="mode is 'auto' and cannot be changed to 'always' now"):
                compression.set_config(mode="always")
            compression.close()


@case
def operations_in_cpp_equal_those_in_python():
    """Containers, results and residuals, bit for bit: dtypes, factors, shapes that are not known, several units."""
    needs_operations_in_cpp()
    for scope in [{"min_elements": 0}, {"min_elements": 100}, *on.possible(SCOPES[:4])]:
        found = []
        for kind in (DeepReduce, InPython):
            with containers.watched() as sent, kind(LOSSY, **scope) as compression:
                reduce = each_reduced(compression)
                results = [reduce(each_given(step)) for step in range(3)]
                # Results stay what they are while later steps run.
                values = [one.numpy().tobytes() for of_step in results for one in of_step]
                state, stats = compression.state_dict(), compression.stats()["total"]
                assert set(state["steps"].values()) in ({3}, {0, 3}) and stats["steps"] == 3
                kept = [one.tobytes() for one in state["residuals"].values()]
                found.append([sorted(sent), values, kept, stats["bytes_sent"], stats["dense_bytes"]])
        assert found[0] == found[1], scope


@case
def gradients_that_nothing_reads():
    """A bucket waits for all of its gradients, so TensorFlow must leave out none of them."""
    values = np.random.default_rng(hvd.rank()).standard_normal((4, 30, 20)).astype("f")
    variables = [tf.Variable(one, name=f"unread{i}") for i, one in enumerate(values)]
    for kind, ways in ((DeepReduce, ("tape", "groups", "direct", "loop")), (InPython, ("tape",))):
        for how in ways:
            compression = kind(LOSSY, scope="model")

            def reduced(how=how, compression=compression):
                with tf.GradientTape() as tape:
                    loss = tf.add_n([tf.reduce_sum(tf.square(one)) for one in variables])
                if how == "direct":
                    found = enumerate(tape.gradient(loss, variables))
                    return [hvd.allreduce(one, compression=compression, name=f"unread{i}") for i, one in found][2]
                options = {"groups": 2} if how == "groups" else {}
                tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
                return tape.gradient(loss, variables)[2]

            @tf.function
            def step(how=how, reduced=reduced):
                if how != "loop":
                    return reduced()
                return tf.while_loop(
                    lambda at: at < 2, lambda at: at + 1 + 0 * tf.cast(reduced()[0, 0], tf.int32), (0,)
                )

            for _ in range(2):
                step()
            assert compression.stats()["total"]["steps"] == (4 if how == "loop" else 2), (kind, how)
            residuals = list(compression.state_dict()["residuals"].values())
            assert sum(one.size for one in residuals) == values.size and all(one.any() for one in residuals)
            compression.close()


@case
def operations_in_cpp_reuse_the_memory_of_results_that_are_gone():
    needs_operations_in_cpp()
    compression = DeepReduce(LOSSLESS, scope="model")
    variable = tf.Variable(tf.ones([200, 200]))

    @tf.function
    def step(factor):
        return hvd.allreduce(tf.square(variable) * factor, compression=compression)

    def memory():
        ((run,),) = [compression._buckets._runs.values()]
        return run.layout.buckets[0].gradient

    first = step(tf.constant(2.0))
    kept = memory()
    assert np.shares_memory(np.asarray(memoryview(first)), kept)
    second = step(tf.constant(3.0))
    assert not np.shares_memory(np.asarray(memoryview(second)), kept)
    assert (first.numpy() == 2).all() and (second.numpy() == 3).all()
    used = memory().ctypes.data
    del second
    step(tf.constant(4.0))
    assert memory().ctypes.data == used and (first.numpy() == 2).all()


@case
def a_step_makes_few_calls_in_python():
    """Their number is that of the buckets, not of the tensors."""
    needs_operations_in_cpp()
    calls, counts, package = [], [], str(Path(native.__file__).parents[1])

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame.f_code.co_name)

    def profiled(function):
        @functools.wraps(function)
        def run(*arguments):  # on a thread of TensorFlow
            sys.setprofile(profile)
            try:
                return function(*arguments)
            finally:
                sys.setprofile(None)

        return run

    threading.setprofile(profile)
    try:
        with pytest.MonkeyPatch.context() as patch:
            make = tf.numpy_function
            patch.setattr(tf, "numpy_function", lambda function, *rest, **key: make(profiled(function), *rest, **key))
            patch.setattr(GraphBuckets, "_told", profiled(GraphBuckets._told))
            for count in (1, 11):
                variables = [tf.Variable(tf.ones([200, 100])) for _ in range(count)]
                with DeepReduce(LOSSY, scope="bucket") as compression:

                    @tf.function
                    def step(factor, variables=variables, compression=compression):
                        with tf.GradientTape() as tape:
                            loss = tf.add_n([tf.reduce_sum(tf.sin(factor * one)) for one in variables])
                        tape = hvd.DistributedGradientTape(tape, compression=compression)
                        return tape.gradient(loss, variables)

                    for at in range(6):
                        if at == 2:
                            calls.clear()
                        step(tf.constant(1.0 + at))
                    time.sleep(0.2)  # until the threads are idle
                    counts.append(len(calls) / 4)
    finally:
        threading.setprofile(None)
    assert counts[0] <= 165 and abs(counts[1] - counts[0]) < 5, counts


@case
def integer_and_tiny_and_zero_gradients():
    compression = DeepReduce(min_elements=0)

    @tf.function
    def reduce(counts, scalar, zeros, one):
        given = (counts, scalar, zeros, one)
        return [hvd.allreduce(x, op=hvd.Sum, compression=compression, name=f"x{i}") for i, x in enumerate(given)]

    counts, scalar, zeros, one = reduce(tf.range(5), tf.constant(2.0), tf.zeros([3, 2]), tf.constant([-3.5]))
    assert counts.numpy().tolist() == [hvd.size() * i for i in range(5)]
    assert scalar.numpy() == 2 * hvd.size() and zeros.numpy().tolist() == [[0, 0]] * 3
    assert one.numpy().tolist() == [-3.5 * hvd.size()]
    stats = compression.stats()["total"]
    assert stats["steps"] == 1 and abs(stats["dense_bytes"] - ring(5, 1, 6, 1)) < 4


@case
def stats_are_the_bytes_on_the_wire():
    """Of containers, of gradients that are not compressed, and of IndexedSlices, grouped or not."""
    raw = {"sparsifier": {"name": "topk", "density": 0.1}, "value": "raw", "index": "raw"}
    for number, settings in enumerate([raw, {**raw, "min_elements": 10**7}, None, None, None]):
        whole = {"sparsifier": "block_topk"} if number == 4 else {}  # which cannot select from IndexedSlices
        compression = DeepReduce(LOSSY if settings is None else settings, **whole)
        values = np.random.default_rng(0).standard_normal((5_000, 40)).astype("f")
        made = zip(("table", "out", "last"), (values, values.T, values[0]), strict=True)
        table, out, last = (tf.Variable(value, name=f"{name}{number}") for name, value in made)  # groups go by name
        options = {"groups": [[table], [out, last]]} if number == 3 else {}

        @tf.function(autograph=False)
        def step(rows, settings=settings, table=table, out=out, last=last, compression=compression, options=options):
            with tf.GradientTape() as tape:
                found = tf.gather(table, rows) if settings is None else tf.square(table)
                loss = tf.reduce_sum(tf.square(found * last)) + tf.reduce_sum(tf.square(out))
            tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
            return tape.gradient(loss, [table, out, last])

        def rows(at):
            return tf.constant(np.random.default_rng(10 * at + hvd.rank()).integers(0, 5_000, 3_000))

        step(rows(0))  # makes the graph, which takes long, and Horovod's ranks talk all the time
        for _ in range(4):
            hvd.allreduce(tf.zeros(1), name=f"begin{number}")
            before, meter = compression.stats()["total"], Meter()
            for at in range(2):
                step(rows(at))
            measured, idle = meter.read()
            stats = compression.stats()
            said = [stats["total"][key] - before[key] for key in ("bytes_sent", "bytes_received")]
            numbers = hvd.allreduce(tf.constant([*said, *measured, idle], tf.float64), op=hvd.Sum).numpy()
            counted, real, idle = numbers[:2], numbers[2:4], numbers[4]
            assert (0.995 * counted < real).all(), (number, numbers)
            if (real < 1.04 * counted + 2 * idle).all():
                break  # a busy machine adds talk, and takes none away
        else:
            raise AssertionError(f"more was sent or received than was counted: {number}, {numbers}")
        assert stats["total"]["steps"] == before["steps"] + 2
        assert stats["last_step"]["dense_bytes"] == ring(200_000, 200_000, 40)
        if settings is None:
            assert (stats["last_step"]["bytes_received"] > 3_000 * 40 * 4) == (number == 4)


@case
def horovods_callbacks_in_fit():
    """The stock ones fail with this Keras, without DeepReduce too."""
    seen = []
    legacy = keras.optimizers.legacy

    class Seen(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            optimizer = self.model.optimizer
            seen.append((float(optimizer.lr), float(optimizer.momentum)))

    with pytest.raises(AttributeError):
        hvd_keras.callbacks.MetricAverageCallback().on_epoch_end(0, {"loss": 1.0})
    for number, kind in enumerate((keras.optimizers.SGD, legacy.SGD)):
        model, compression = network(), DeepReduce(LOSSY)
        optimizer = hvd.DistributedOptimizer(kind(0.4, momentum=0.9), compression=compression)
        warmup = callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=1, steps_per_epoch=4)
        later = callbacks.LearningRateScheduleCallback(0.4, 0.5, start_epoch=1)
        seen.clear()
        logs = fit(model, optimizer, [Seen(), warmup, later, callbacks.MetricAverageCallback()], steps=4, epochs=2)
        # Linear to 0.4; in the second epoch 0.4 * 0.5 ** 0.
        n = hvd.size()
        rates = [0.4 / n * (step / 4 * (n - 1) + 1) for step in range(1, 5)] + [0.4] * 4
        assert close([rate for rate, _ in seen], rates), (kind, seen)
        # A batch's momentum is that of the last one's rate, where the optimizer can change it.
        ratios = np.array(rates) / [0.4, *rates[:-1]]
        assert close([momentum for _, momentum in seen], 0.9 * (ratios if number else np.ones(8)))
        same_everywhere(model)
        gathered = hvd.allgather(tf.constant([logs["loss"]])).numpy()
        assert (gathered == gathered[0]).all(), "the ranks' losses are not averaged"


@case
def loss_scaling_skips_the_same_steps_everywhere():
    model, compression = network(), DeepReduce(LOSSY)
    # Horovod cannot wrap it the other way around.
    optimizer = keras.mixed_precision.LossScaleOptimizer(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression),
        initial_scale=2.0**127, dynamic_growth_steps=3,
    )  # fmt: skip

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y) * 100
        optimizer.minimize(loss, model.trainable_variables, tape)

    for number in range(12):
        step(*map(tf.constant, batch(number)))
    scales = hvd.allgather(tf.reshape(optimizer.loss_scale, [1])).numpy()
    assert (scales == scales[0]).all() and scales[0] < 2.0**127
    assert np.isfinite(flat(model)).all()
    assert compression.stats()["total"]["steps"] == 12
    same_everywhere(model)


@case
def mixed_precision_in_keras():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = network()
        compression = DeepReduce(LOSSY)
        fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression), steps=3)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert compression.stats()["total"]["steps"] == 3 and np.isfinite(flat(model)).all()
    same_everywhere(model)


def resumable(seed=0):
    model, compression = network(seed), DeepReduce(LOSSY)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=compression)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, optimizer, compression


def epochs(model, count, first=0, callbacks=()):
    for epoch in range(first, first + count):
        x, y = batch(epoch, size=32)
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0, initial_epoch=epoch, epochs=epoch + 1,
                  callbacks=list(callbacks))  # fmt: skip


@case
def a_resume_within_an_epoch():
    """All batches are equal, since Keras does not know which ones it has left out."""
    x, y = (np.tile(one, (10, *[1] * (one.ndim - 1))) for one in batch(0, size=16))

    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, number, logs=None):
            if self.model.optimizer.iterations == 17:  # the last backup is of the 15th
                raise KeyboardInterrupt

    def trained(*callbacks, kept=True):
        model, _, compression = resumable()
        backup = keras.callbacks.BackupAndRestore(folder / f"{hvd.rank()}", 3)
        kept = [backup, SaveState(compression, folder, save_freq=3)] * kept
        with suppress(KeyboardInterrupt):
            model.fit(x, y, 16, epochs=3, shuffle=False, verbose=0, callbacks=[*kept, *callbacks])
        return flat(model)

    folder = Path(tempfile.mkdtemp())
    unbroken, broken = trained(kept=False), trained(Dies())
    resumed = trained()
    assert not np.array_equal(unbroken, broken)
    np.testing.assert_array_equal(unbroken, resumed)
    with pytest.raises(ValueError, match="save_freq is 0; it must be 'epoch' or a number of batches"):
        SaveState(None, folder, save_freq=0)


@case
def checkpoints_of_keras_and_states_that_are_wrong():
    unbroken, _, _ = resumable()
    epochs(unbroken, 3)
    folder = Path(tempfile.mkdtemp())
    model, optimizer, compression = resumable()
    epochs(model, 2, callbacks=[SaveState(compression, folder / "keras", delete=False)])
    tf.train.Checkpoint(model=model, optimizer=optimizer, compression=compression).write(str(folder / "whole"))
    tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(folder / "stock"))
    for whole in (True, False):
        resumed, optimizer, again = resumable(seed=9)
        if whole:
            names = {"model": resumed, "optimizer": optimizer, "compression": again}
            tf.train.Checkpoint(**names).read(str(folder / "whole")).expect_partial()
            epochs(resumed, 1, first=2)
        else:
            tf.train.Checkpoint(model=resumed, optimizer=optimizer).read(str(folder / "stock")).expect_partial()
            epochs(resumed, 1, first=2, callbacks=[SaveState(again, folder / "keras")])
            assert not list((folder / "keras").iterdir())
        assert np.array_equal(flat(unbroken), flat(resumed)), whole
        assert set(again.state_dict()["steps"].values()) == {6}
    saved = again.state_dict()
    name, (all_of_it,) = next(iter(saved["residuals"])), saved["lists"]
    bad = {
        "every rank must load the state that it saved": saved | {"rank": hvd.rank() + 1},
        "parameter other, but the model does not": saved | {"steps": {"other": 3}},
        f"residual of {name} has 7 elements": saved | {"residuals": {name: np.zeros(7)}},
        f"the residual of {name} contains NaN or infinity": saved
        | {"residuals": saved["residuals"] | {name: saved["residuals"][name] * np.nan}},
        "it has no lists": {"rank": 0},
    }
    for message, lists in {
        "it has 7 in place of a list": 7,
        "it has a_text in place of a list": ["a_text"],
        "its lists have .* in place of the name, shape and dtype": [[*all_of_it, ["more", [3]]]],
        r'its lists have \["more", \[-2\], "float32"\] in place': [[*all_of_it, ["more", [-2], "float32"]]],
        r'its lists have \[7, \[3\], "float32"\] in place': [[*all_of_it, [7, [3], "float32"]]],
        r'its lists have \["more", \[3.0\], "float32"\] in': [[*all_of_it, ["more", [3.0], "float32"]]],
        "twice": [all_of_it, all_of_it],
        "two of its lists are of equal gradients": [
            all_of_it, [[f"again {at}", *one[1:]] for at, one in enumerate(all_of_it)],
        ],
        "the model has a parameter more, but the state does not": [all_of_it, [["more", [3], "float32"]]],
    }.items():  # fmt: skip
        bad[message] = to_bytes(saved | {"lists": lists})
    for other in (again, DeepReduce(LOSSY)):
        before = other.state_dict()
        for message, state in {**bad, "this is not a state of DeepReduce": b"something else"}.items():
            with pytest.raises(ValueError, match=message):
                (other.deserialize if isinstance(state, bytes) else other.load_state_dict)(state)
        assert other.state_dict()["steps"] == before["steps"] and other.state_dict()["lists"] == before["lists"]
        assert all(np.array_equal(r, before["residuals"][n]) for n, r in other.state_dict()["residuals"].items())
    other = DeepReduce(LOSSY)
    other.load_state_dict(saved)
    tables = Tables()
    tables(table_batch(0)[0])
    with pytest.raises(tf.errors.OpError, match=r"the state is of another model: its gradients are float32 \[20, 50\]"):
        train(tables, other, data=table_batch, steps=1, sparse_as_dense=True)
    with pytest.raises(ValueError, match="the state is of another model"):
        again.load_state_dict({**saved, "lists": [saved["lists"][0][:3]]})


@case
def a_deepreduce_that_is_closed():
    """Horovod keeps it until the process ends; its threads and what it held are gone."""
    for scope in on.possible((SCOPES[1], SCOPES[3])):
        before = set(threading.enumerate())
        with DeepReduce(LOSSY, **scope) as compression:
            run = train(network(), compression, steps=1, graph=True)
            state = compression.state_dict()
            assert state["residuals"]
        compression.close()
        deadline = time.monotonic() + 20
        left = True
        while left and time.monotonic() < deadline:
            left = [t for t in threading.enumerate() if t not in before and t.name.startswith("deepreduce")]
            time.sleep(0.005)
        assert not left, scope
        assert not compression._engine._memory.state_dict()
        assert not compression._buckets._runs
        assert compression.stats()["total"]["steps"] == 1 and compression.config.scope == scope["scope"]
        for use in (
            compression.serialize,
            lambda c=compression, s=state: c.load_state_dict(s),
            lambda c=compression: c.set_config(seed=1),
            lambda c=compression: c.compress(tf.ones(3)),
        ):
            with pytest.raises(RuntimeError, match=r"this was closed, by close\(\): create a new one on every rank"):
                use()
        with pytest.raises(tf.errors.OpError, match="this was closed"):
            run(7)
    # One that was traced and never ran.
    model, compression = network(), DeepReduce(LOSSY)
    step = reducing(model.trainable_variables, compression, lambda x, y: loss_of(model, x, y))
    step.get_concrete_function(*map(tf.constant, batch(0)))
    assert compression._handshake in handshake._waiting
    compression.close()
    assert compression._handshake not in handshake._waiting


@case
def the_state_of_an_elastic_job_restores_and_synchronizes():
    """Also its state_dicts, which any number of ranks may load."""
    variable = tf.Variable(tf.ones([30, 100]) * (hvd.rank() + 1.0))
    compression = DeepReduce(LOSSY)
    state = TensorFlowState([variable], compression=compression, step=0)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(variable * tf.range(100, dtype=tf.float32)) * (hvd.rank() + 1.0))
        (gradient,) = hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])
        variable.assign_sub(0.1 * gradient)
        state.step += 1

    def now():
        return [state.step, variable.numpy(), *compression.state_dict()["residuals"].values()]

    def same(a, b):
        assert len(a) == len(b) > 2 and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))

    state.sync()
    assert (variable.numpy() == 1).all()
    empty = compression.state_dict()
    step()
    state.restore()  # to what there was before the first step
    state.sync()
    assert state.step == 0 and not compression.state_dict()["residuals"]
    step()
    compression.load_state_dict(empty)
    step()
    state.save()
    committed = now()
    step()
    once = now()
    state.restore()
    state.sync()
    same(now(), committed)
    step()
    same(now(), once)
    states = [pickle.loads(one) for one in hvd.allgather_object(pickle.dumps(compression.state_dict()))]
    compression.load_state_dict(reversed(states), reshard=True)
    same(now(), once)
    with pytest.raises(ValueError, match="states are missing, of the ranks"):
        compression.load_state_dict(states[1:], reshard=True)
    with pytest.raises(TypeError, match="use the states of hvd_deepreduce.tensorflow.elastic"):
        pickle.dumps(compression)


@case
def settings_of_single_tensors():
    """Biases are sent exactly, and the other tensors are not, where tensors are encoded one by one."""
    overrides = {"*/bias": {"density": 1.0, "value": "raw"}, "dense/*": {"error_feedback": False}}
    keras.backend.clear_session()
    dense = network()
    train(dense, hvd.Compression.none, steps=1)
    for graph, scope in enumerate(({"scope": "tensor"}, {"scope": "model", "selection": "tensor"})):
        keras.backend.clear_session()
        model = network()
        compression = DeepReduce(LOSSY, variables=model.trainable_variables, overrides=overrides, **scope)
        train(model, compression, steps=1, graph=bool(graph))
        for ours, exact in zip(model.trainable_variables, dense.trainable_variables, strict=True):
            assert close(ours.numpy(), exact.numpy()) == ours.name.endswith("/bias:0"), ours.name
        kept = [bool(residual.any()) for residual in compression.state_dict()["residuals"].values()]
        assert sum(kept) == 2
        same_everywhere(model)
        with pytest.raises(ConfigError, match="the pattern 'decoder.*' of overrides matches none of the 6 parameters"):
            compression.set_config(overrides={"decoder.*": {}})
    with pytest.raises(ConfigError, match="overrides matches the names of variables, and Horovod does not tell them"):
        DeepReduce(LOSSY, overrides=overrides)
    names, model = {"overrides": {"*": {"value": "raw"}}}, network()
    turned = DeepReduce({**LOSSY, **names}, variables=model.trainable_variables[::-1])
    with pytest.raises(ValueError, match=r"gradient 0 is float32 \[20, 50\], and variable 0 .* float32 \[4\]"):
        train(model, turned)
    more = DeepReduce({**LOSSY, **names}, variables=[*model.trainable_variables, tf.Variable(1.0)])
    with pytest.raises(tf.errors.OpError, match="Horovod got 6 gradients, and DeepReduce.* has 7 variables"):
        train(model, more)


@case
def a_rank_that_joins_early():
    """Horovod would break down if an allgather were started now. A gradient that is not compressed is not started
    either: a late rank, which has the error before its gradient is there, would never start it."""
    for scope, steps in (({}, 0), (SCOPES[1], 1), ({"min_elements": 100}, 1)):  # before the handshake, and after
        model, compression = network(), DeepReduce(LOSSY, **scope)
        late = tf.Variable(0.0)

        def loss(x, y, model=model, late=late):
            return loss_of(model, x, y) + tf.reduce_sum(_late(model.trainable_variables[1], tf.convert_to_tensor(late)))

        step = reducing(model.trainable_variables, compression, loss)
        for number in range(steps):
            step(*map(tf.constant, batch(number)))
        late.assign(0.5 * (hvd.rank() == 0))
        if hvd.rank() < hvd.size() - 1:
            with pytest.raises((RuntimeError, tf.errors.OpError), match=r"1 rank has called hvd.join\(\)"):
                step(*map(tf.constant, batch(7)))
            hvd.allreduce(tf.ones(1), name="after_the_error")
        hvd.join()


@tf.custom_gradient
def _late(given, seconds):
    """``given``, whose gradient takes so many seconds."""

    def sleep(upstream, seconds):
        time.sleep(float(seconds))
        return upstream

    return tf.identity(given), lambda upstream: (tf.numpy_function(sleep, [upstream, seconds], tf.float32), None)


@case
def models_differ():
    for graph in (True, False):
        last = [keras.layers.Dense(4)] if hvd.rank() == 1 else []
        layers = [keras.layers.Dense(31 if hvd.rank() == 1 else 30, "tanh"), keras.layers.Dense(4), *last]
        model = keras.Sequential([keras.Input((20,)), *layers])
        match = r"parameter 0 is float32 \[20, 30\] on .*\[20, 31\] on rank 1.*parameter 4 is missing on"
        with pytest.raises(tf.errors.OpError, match=match):
            train(model, DeepReduce(LOSSY), graph=graph)


@case
def what_cannot_be():
    with pytest.raises(ConfigError):
        DeepReduce(scope="tensor", exchange="densestream")
    for given in ([network(), "smallest"], [network()], [keras.optimizers.SGD(0.1)], ["smallest", 2]):
        names = ", ".join(type(one).__name__ for one in given)
        with pytest.raises(TypeError, match=f"was given {names}. On TensorFlow its only positional argument is the co"):
            DeepReduce(*given)
    with pytest.raises(TypeError, match="the class DeepReduce; it must be an instance"):
        train(network(), DeepReduce)
    with pytest.raises(RuntimeError, match="this tensor is not in a graph"):
        hvd.allreduce(tf.ones(3), compression=DeepReduce())
    with pytest.raises(ValueError, match="Adasum cannot be computed on compressed gradients"):
        train(network(), DeepReduce(), op=hvd.Adasum)
    with pytest.raises(ValueError, match="Adasum cannot be computed on compressed gradients"):
        train(network(), DeepReduce(), op=hvd.Adasum, graph=True)
    with pytest.raises(ValueError, match="only op=hvd.Average and op=hvd.Sum"):
        train(network(), DeepReduce(), op=hvd.Min)
    with pytest.raises(ValueError, match="was given to a HorovodReducescatter"):
        tf.function(lambda: hvd.reducescatter(tf.ones([6, 400]), compression=DeepReduce()))()

    variable = tf.Variable(tf.ones([40, 50]))

    @tf.function(jit_compile=True)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(variable))
        return hvd.DistributedGradientTape(tape, compression=DeepReduce()).gradient(loss, [variable])

    with pytest.raises(RuntimeError, match=r"XLA cannot compile a function .* Turn XLA off: .*jit_compile=False"):
        step()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=DeepReduce())
    with pytest.raises(RuntimeError, match="XLA cannot compile a function"):
        fit(network(), optimizer, jit_compile=True)


@case
def a_capture_records_each_ranks_gradients():
    """Or those of rank 0 alone, beside ranks whose graphs record nothing."""
    compressed = {"sparsifier": {"name": "topk", "density": 0.05}, "scope": "bucket"}
    for compression, all_ranks in ((None, True), (compressed, True), (None, False), (compressed, False)):
        folder, model = tempfile.mkdtemp(), network()
        inner = None if compression is None else DeepReduce(compression)
        path, records = f"{folder}/of.npz", all_ranks or hvd.rank() == 0
        capture = Capture(model.trainable_variables, path, [1, 3], compression=inner, all_ranks=all_ranks)
        with tf.GradientTape() as tape:
            loss = loss_of(model, *batch(0))
        own = np.concatenate([one.numpy().reshape(-1) for one in tape.gradient(loss, model.trainable_variables)])
        train(model, capture, 4, graph=True)
        same_everywhere(model)
        of_rank = f"_rank{hvd.rank()}" if all_ranks else ""
        files = [f"{folder}/of{of_rank}_step{step}.npz" for step in (1, 3)] if records else []
        assert [str(file) for file in capture.files] == files
        if records:
            first, third = (gradient_file.read(file, "gradient", hvd.rank()) for file in files)
            assert close(first, own)
            names = [v.name.removesuffix(":0") for v in model.trainable_variables]
            assert gradient_file.parameters(files[0])[0] == names
            assert third.any() and not np.array_equal(first, third)
        if inner is not None:
            assert inner.stats()["total"]["steps"] == 4
            inner.close()
    three = [tf.Variable(tf.ones([4])) for _ in range(3)]
    for used, graph in ((three[::2], True), (three[:1], False)):
        capture = Capture(three, f"{folder}/other.npz", [1])
        with pytest.raises(ValueError, match=f"Horovod got {len(used)} gradients, and Capture has 3 variables"):
            reducing(three, capture, lambda used=used: tf.add_n(used), graph)()


@case
def memory_on_another_gpu_than_tensorflow_says():
    """It tells its own number of a GPU, 0, to which CuPy would send the kernels; CuPy and its runtime are stand-ins."""
    numbers = {1000: 0, 2000: 3}
    runtime = SimpleNamespace(pointerGetAttributes=lambda address: SimpleNamespace(device=numbers[address]))
    with pytest.MonkeyPatch.context() as patch:
        for address, size in ((1000, 5), (2000, 5), (0, 0)):
            array = SimpleNamespace(size=size, data=SimpleNamespace(ptr=address), device=SimpleNamespace(id=0))
            cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), from_dlpack=lambda given, array=array: array)
            patch.setattr(device, "_cupy", lambda cupy=cupy: cupy)
            if address == 2000:
                with pytest.raises(RuntimeError, match=r"are on GPU 3, which .* calls GPU 0.*CUDA_VISIBLE_DEVICES"):
                    Operations.array(None, tf.zeros(size))
            else:
                assert Operations.array(None, tf.zeros(size)) is array


if __name__ == "__main__":
    from tests.adapters import all_cases, horovod_cases  # noqa: F401 (their cases, after those above)

    # Horovod wants the set before it is started, and no set of all ranks.
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["HOROVOD_SIZE"])
    PROCESS_SET = hvd.ProcessSet([0, ranks - 1] if ranks > 2 else [0])
    if ranks > 2:  # nothing may hold a thread while it waits
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # for two levels
    hvd.init(process_sets=[PROCESS_SET])
    on.scopes = on.scopes[:: 2 if hvd.mpi_enabled() else 3]  # to trace a step takes long; PyTorch's cases have all
    # Horovod identifies tensors by name, and Keras numbers its layers. Not every rank makes every model of every case:
    # without this, the ranks' numbers would differ.
    run_cases(hvd.rank(), hvd.size(), before=keras.backend.clear_session)
