"""Steps of the engine under the NumPy adapter: what comes out, what is kept, and what is said where it fails."""

from __future__ import annotations

import re
from queue import Queue

import numpy as np
import pytest

from hvd_deepreduce import Config, ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.engine import MismatchError, step_check
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.reduce_scatter import SlicedSum
from hvd_deepreduce.exchange.sliced import RunningProgram
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from tests.damaged import damage, repair
from tests.engine.numpy_adapter import Job, NumpyAdapter, run_ranks

RANKS = 3
MODEL = {"a": ((20, 30), "f4"), "b": ((30,), "f4"), "c": ((7, 8, 9), "f8"), "d": ((400,), "f2"), "e": ((1,), "f4")}
SCOPES = [
    {"scope": "tensor", "min_elements": 0},
    {"scope": "bucket", "bucket_bytes": 2000},
    {"scope": "bucket", "bucket_bytes": 2000, "selection": "tensor"},
    {"scope": "model"},
]
IN_SLICES = [
    {"scope": "model", "exchange": "reduce_scatter"},
    {"scope": "bucket", "bucket_bytes": 2000, "exchange": {"name": "reduce_scatter", "density": 1.0}},
    {"scope": "bucket", "bucket_bytes": 2000, "selection": "tensor", "exchange": "reduce_scatter"},
]
LOSSLESS = {"sparsifier": {"name": "topk", "density": 1.0}, "value": "raw", "index": "bitmap"}
LOSSY = {"sparsifier": {"name": "topk", "density": 0.05}}
every_scope = pytest.mark.parametrize("scope", SCOPES, ids=lambda s: "-".join(map(str, s.values())))
every_way = pytest.mark.parametrize("scope", SCOPES + IN_SLICES, ids=lambda s: "-".join(map(str, s.values())))


def gradients_of(step, rank, model=MODEL):
    rng = np.random.default_rng([step, rank])
    return {name: (rng.standard_normal(shape) ** 3).astype(dtype) for name, (shape, dtype) in model.items()}


def mean(step, model=MODEL):
    parts = [gradients_of(step, rank, model) for rank in range(RANKS)]
    return {name: np.mean([part[name].astype(np.float64) for part in parts], 0) for name in model}


def same_bytes(results):
    """All ranks' dicts of arrays are equal, bit for bit."""
    for other in results[1:]:
        assert list(other) == list(results[0])
        assert all(other[name].tobytes() == array.tobytes() for name, array in results[0].items())


def on_all_ranks(error, work, job=None):
    """Every rank raises it, with the same message, which is returned."""

    def caught(collectives):
        with pytest.raises(error) as info:
            work(collectives)
        return str(info.value)

    messages = run_ranks(RANKS, caught, job)
    assert len(set(messages)) == 1, messages
    return messages[0]


@every_way
def test_lossless_is_the_mean_in_whatever_order(scope):
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSLESS, **scope})
        names = list(MODEL)
        results = []
        for step in range(3):
            turn = (collectives.rank() + step) % len(names)
            results.append(adapter.step(gradients_of(step, collectives.rank()), names[turn:] + names[:turn]))
        return results

    for step, results in enumerate(zip(*run_ranks(RANKS, work), strict=True)):
        same_bytes(results)
        for name, expected in mean(step).items():
            assert results[0][name].dtype == MODEL[name][1] and results[0][name].shape == MODEL[name][0]
            tolerance = 2e-3 if MODEL[name][1] == "f2" else 1e-6
            assert np.allclose(results[0][name], expected, rtol=tolerance, atol=tolerance), name


def test_lossy_tensors_are_those_of_the_pipeline():
    model = {name: MODEL[name] for name in "abce"}

    def work(collectives):
        adapter = NumpyAdapter(collectives, model, {**LOSSY, **SCOPES[0], "seed": 5})
        return [adapter.step(gradients_of(step, collectives.rank(), model)) for step in range(3)], adapter.engine

    config = Config.load({**LOSSY, **SCOPES[0], "seed": 5})
    pipeline = Pipeline(config)
    ranks = run_ranks(RANKS, work)
    kept = [{name: np.zeros(np.prod(shape, dtype=int), dtype) for name, (shape, dtype) in model.items()} for _ in ranks]
    for step in range(3):
        for number, (name, (shape, dtype)) in enumerate(model.items()):
            containers = []
            for rank in range(RANKS):
                flat = gradients_of(step, rank, model)[name].reshape(-1)
                containers.append(wire.unpack(pipeline.encode(flat, kept[rank][name], RngKey(5, number, step, rank))))
            out = np.empty(np.prod(shape, dtype=int), dtype)
            pipeline.decode(containers, out, 1 / RANKS)
            assert out.tobytes() == ranks[0][0][step][name].tobytes()
    for (_, engine), residuals in zip(ranks, kept, strict=True):
        state = engine.state_dict()
        assert state["steps"] == dict.fromkeys(model, 3)
        assert all(state["residuals"][name].tobytes() == residual.tobytes() for name, residual in residuals.items())


@every_way
def test_sent_and_kept_is_what_came(scope):
    model = {name: MODEL[name] for name in "abce"}

    def work(collectives):
        adapter = NumpyAdapter(collectives, model, {**LOSSY, **scope})
        results = [adapter.step(gradients_of(step, collectives.rank(), model)) for step in range(4)]
        return results, adapter.engine.state_dict()["residuals"]

    ranks = run_ranks(RANKS, work)
    for step in range(4):
        same_bytes([results[step] for results, _ in ranks])
    for name, (shape, _) in model.items():
        sent = sum(result[name].astype(np.float64) * RANKS for result in ranks[0][0])
        kept = sum(residuals[name].reshape(shape) for _, residuals in ranks)
        came = sum(gradients_of(step, r, model)[name].astype(np.float64) for step in range(4) for r in range(RANKS))
        assert name == "e" or np.abs(kept).max() > 0  # a single element is sent as it is
        assert np.allclose(sent + kept, came, rtol=1e-5, atol=1e-5), name


@every_scope
def test_without_error_feedback_nothing_is_kept(scope):
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope, "error_feedback": False})
        first, again = (adapter.step(gradients_of(0, collectives.rank())) for _ in range(2))
        assert adapter.engine.state_dict()["residuals"] == {}
        assert all(np.array_equal(first[name] != 0, again[name] != 0) for name in MODEL)
        return again

    same_bytes(run_ranks(RANKS, work))


@pytest.mark.parametrize("scope", SCOPES[1:] + IN_SLICES, ids=str)
def test_parameters_without_a_gradient_count_as_zeros(scope):
    """d is not used by one rank; in the second step, b, which is a bucket of its own, is used by none."""
    expected = mean(0)
    expected["d"] = sum(gradients_of(0, rank)["d"] for rank in (0, 2)) / RANKS

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSLESS, **scope})
        for step in range(2):
            given = gradients_of(0, collectives.rank())
            if collectives.rank() == 1:
                del given["d"]
            if step:
                del given["b"]
            for name, array in adapter.step(given).items():
                tolerance = 2e-3 if MODEL[name][1] == "f2" else 1e-6
                assert np.allclose(array, expected[name], rtol=tolerance, atol=tolerance), name
        steps = adapter.engine.state_dict()["steps"]
        # Zeros are sent for d on the rank without it, and for b where its bucket has other gradients.
        assert steps == {"a": 2, "b": 2 if scope["scope"] == "model" else 1, "c": 2, "d": 2, "e": 2}

    run_ranks(RANKS, work)


def messages_of(scope):
    """Number, elements and dtype of each container, by message, in their order."""
    f4, f8 = np.dtype(np.float32), np.dtype(np.float64)
    tensors = [(0, 600, f4), (1, 30, f4), (2, 504, f8), (3, 400, f4), (4, 1, f4)]
    # float64 in the midst of the model: three runs of one dtype, and of a, b the first is too large for a bucket.
    buckets = [tensors[3:], tensors[2:3]]
    buckets += [tensors[:2]] if scope["scope"] != "bucket" else [tensors[1:2], tensors[:1]]
    if scope["scope"] == "tensor" or scope.get("selection") == "tensor":
        return buckets
    return [[(number, sum(n for _, n, _ in of), of[0][2])] for number, of in enumerate(buckets)]


@every_scope
def test_containers_have_the_keys_of_their_parameters(scope):
    """Numbers and steps, on which random choices depend; buckets are sent in the order of their numbers."""
    job = Job(RANKS)

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope, "seed": 9})
        for step in range(2):
            adapter.step(gradients_of(step, collectives.rank()))
        return adapter.engine.stats.to_dict()

    all_stats = run_ranks(RANKS, work, job)
    pipeline = Pipeline(Config.load({**LOSSY, **scope, "seed": 9}))
    for sent, stats in zip(job.sent, all_stats, strict=True):
        assert sent[0][0] == "handshake"
        for (_, data), (step, tensors) in zip(
            sent[1:], [(step, tensors) for step in range(2) for tensors in messages_of(scope)], strict=True
        ):
            expected = [pipeline.expected(numel, dtype, RngKey(9, number, step)) for number, numel, dtype in tensors]
            for (container,) in frame.split(data, 1, expected):
                assert decode_part(container, container.numel)[0].size == max(1, container.numel // 20)
        assert stats["total"]["steps"] == 2 and stats["last_step"]["steps"] == 1
        own = sum(data.size for _, data in sent)
        everything = sum(data.size for one in job.sent for _, data in one)
        met = traffic.allreduce(8 * step_check.WORDS, RANKS).sent  # once: the handshake begins the first step
        assert stats["total"]["bytes_sent"] == (RANKS - 1) * own + met, "containers and handshake go to all others"
        assert stats["total"]["bytes_received"] == everything - own + met
        assert stats["total"]["encode_seconds"] > 0 and stats["total"]["decode_seconds"] > 0


@every_way
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_on_one_rank_reaches_all(scope, poison):
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope})
        adapter.step(gradients_of(0, collectives.rank()))
        before = adapter.engine.state_dict()["residuals"]
        given = gradients_of(1, collectives.rank())
        if collectives.rank() == 1:
            given["a"][3, 4] = poison
        reduced = adapter.step(given)
        assert not np.isfinite(reduced["a"]).all() and np.isfinite(reduced["c"]).all()
        if collectives.rank() == 1:
            assert np.array_equal(before["a"], adapter.engine.state_dict()["residuals"]["a"])
        after = adapter.step(gradients_of(2, collectives.rank()))
        assert all(np.isfinite(array).all() for array in after.values())
        return after

    same_bytes(run_ranks(RANKS, work))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsifier": {"name": "topk", "density": 0.1}}, r"config.sparsifier is .*0.05.* on ranks 0, 2, .*on rank 1"),
        ({"scope": "bucket"}, r'config.scope is model on ranks 0, 2, bucket on rank 1'),
        ({"seed": 3}, "config.seed is 0 on ranks 0, 2, 3 on rank 1"),
    ],
)
def test_configs_that_differ(change, message):
    """At the first step, and where one rank alone changes its config later."""

    def at_once(collectives):
        own = change if collectives.rank() == 1 else {}
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, "scope": "model", **own})
        adapter.step(gradients_of(0, collectives.rank()))

    def later(collectives):
        adapter = NumpyAdapter(collectives, {"a": MODEL["a"]}, {**LOSSY, "scope": "model"})
        adapter.step({"a": gradients_of(0, collectives.rank())["a"]})
        if collectives.rank() == 1:
            adapter.engine.set_config(**change)
        adapter.step({"a": gradients_of(1, collectives.rank())["a"]})

    for work in (at_once, later):
        assert re.search(message, on_all_ranks(MismatchError, work))


@every_scope
def test_residuals_go_with_error_feedback_and_this_is_told(scope, caplog):
    """A residual that no step sends would wait for a config with error feedback."""

    def work(collectives):
        def lossy():
            adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope})
            adapter.step(gradients_of(0, collectives.rank()))
            return adapter

        adapter, saved = lossy(), lossy().engine.state_dict()
        assert saved["residuals"]
        adapter.engine.set_config(seed=1)
        assert adapter.engine.state_dict()["residuals"]
        adapter.engine.set_config(error_feedback=False)
        assert not adapter.engine.state_dict()["residuals"]
        adapter.step(gradients_of(1, collectives.rank()))
        adapter.engine.load_state_dict(saved)
        assert not adapter.engine.state_dict()["residuals"]

    run_ranks(RANKS, work)
    assert "what they had not sent yet is never sent" in caplog.text


def test_models_that_differ():
    def work(collectives):
        model = dict(MODEL, f=((3,), "f4")) if collectives.rank() == 2 else MODEL
        NumpyAdapter(collectives, model, LOSSY).step(gradients_of(0, collectives.rank(), model))

    said = on_all_ranks(MismatchError, work)
    assert "parameter f is missing on ranks 0, 1, float32 [3] on rank 2. Use the same" in said

    def reordered(collectives):
        model = dict(reversed(MODEL.items())) if collectives.rank() == 2 else MODEL
        NumpyAdapter(collectives, model, LOSSY).step(gradients_of(0, collectives.rank(), model))

    assert "the order of the parameters is" in on_all_ranks(MismatchError, reordered)


@every_scope
def test_a_broken_container_is_the_same_error_everywhere(scope):
    """And with the state from before, the job goes on."""

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope})
        adapter.step(gradients_of(0, collectives.rank()))
        state = adapter.engine.state_dict()
        if collectives.rank() == 1:
            damage(adapter.engine.pipeline)
        with pytest.raises(ContainerError) as info:
            adapter.step(gradients_of(1, collectives.rank()))
        with pytest.raises(RuntimeError, match="while gradients are in flight: call it after step"):
            adapter.engine.set_config(seed=1)
        if collectives.rank() == 1:
            repair(adapter.engine.pipeline)
        adapter.engine.load_state_dict(state)
        return str(info.value), adapter.step(gradients_of(2, collectives.rank()))

    def unbroken(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope})
        adapter.step(gradients_of(0, collectives.rank()))
        return adapter.step(gradients_of(2, collectives.rank()))

    ranks = run_ranks(RANKS, work)
    assert {said for said, _ in ranks} == {ranks[0][0]} and "the container of rank 1 cannot be read" in ranks[0][0]
    same_bytes([results for _, results in ranks] + run_ranks(RANKS, unbroken))


@pytest.mark.parametrize("scope", IN_SLICES, ids=str)
def test_a_broken_slice_is_the_same_error_everywhere(scope):
    """It is found by the slice's owner, which tells all others; and with the state from before, the job goes on."""

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope})
        adapter.step(gradients_of(0, collectives.rank()))
        state = adapter.engine.state_dict()
        pipeline = adapter.engine.pipeline
        encode = pipeline.encode_selected

        def damaged(*arguments):
            packed, support = encode(*arguments)
            packed[-1] ^= 4
            return packed, support

        if collectives.rank() == 1:
            pipeline.encode_selected = damaged
        with pytest.raises(ContainerError) as info:
            adapter.step(gradients_of(1, collectives.rank()))
        failed = next(bucket for bucket in adapter.reducer._layout.buckets if bucket.pending)
        with pytest.raises(ContainerError, match="the container of rank 1 cannot be read"):
            adapter.engine.receive(failed)  # again, for another tensor of it
        pipeline.encode_selected = encode
        adapter.engine.load_state_dict(state)
        return str(info.value), adapter.step(gradients_of(2, collectives.rank()))

    ranks = run_ranks(RANKS, work)
    assert {said for said, _ in ranks} == {ranks[0][0]} and "the container of rank 1 cannot be read" in ranks[0][0]
    same_bytes([results for _, results in ranks])


@pytest.mark.parametrize("scope", IN_SLICES, ids=str)
def test_bytes_of_slices_are_counted(scope):
    """All that goes to other ranks, and nothing of what stays."""
    job = Job(RANKS)

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope})
        adapter.step(gradients_of(0, collectives.rank()))
        return adapter.engine.stats.to_dict()["total"]

    stats = run_ranks(RANKS, work, job)
    for rank, (sent, counted) in enumerate(zip(job.sent, stats, strict=True)):
        by_name, expected = dict(sent), 0
        for name, data in sent:
            if f"{name}.bounds" in by_name:  # an alltoall
                begin, end = by_name[f"{name}.bounds"].view(np.int64).reshape(-1, 2)[rank]
                expected += data.size - (end - begin)
            elif not name.endswith(".bounds"):
                expected += (RANKS - 1) * data.size
        assert counted["bytes_sent"] == expected
    assert sum(one["bytes_sent"] for one in stats) == sum(one["bytes_received"] for one in stats)


def test_slices_call_back_when_their_sum_is_there():
    """Of buckets whose ranks wait for them in different orders, and with the error of a rank that failed."""

    def work(collectives):
        rank = collectives.rank()
        engine = NumpyAdapter(collectives, {}, {"exchange": "reduce_scatter", "density": 0.5}).engine
        works = [SlicedSum(engine.pipeline, RANKS, RngKey(0, n, 0, rank), gradients_of(n, rank)["b"]) for n in range(4)]
        if rank == 1:
            works[3]._encode = lambda *_: 1 / 0
        out = np.empty((4, 30), np.float32)
        exchanges = [RunningProgram(one, collectives, f"b{n}", engine, out[n]) for n, one in enumerate(works)]
        done = Queue()
        for exchange in exchanges if rank else reversed(exchanges):
            exchange.add_done_callback(done.put)
        for _ in exchanges:
            done.get(timeout=20)
        with pytest.raises(ContainerError, match="^rank 1 could not take part in the sum: ZeroDivisionError"):
            exchanges[3].result(1.0)
        for exchange in exchanges[:3]:
            exchange.result(1.0)
        return {"sums": out[:3]}

    same_bytes(run_ranks(RANKS, work))


def test_one_rank_alone_exchanges_no_slices():
    job = Job(1)

    def work(collectives):
        adapter = NumpyAdapter(collectives, {"a": MODEL["a"]}, {**LOSSLESS, "exchange": "reduce_scatter"})
        return adapter.step({"a": gradients_of(0, 0)["a"]})["a"]

    (result,) = run_ranks(1, work, job)
    assert np.array_equal(result, gradients_of(0, 0)["a"]) and [name for name, _ in job.sent[0]] == ["handshake"]


def test_a_momentum_of_scaled_gradients_is_no_residual():
    """The memory can change before the first step, and not after it."""

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, LOSSY)
        adapter.engine.set_config(memory="scaled_momentum")
        adapter.step(gradients_of(0, collectives.rank()))
        with pytest.raises(ValueError, match="memory is 'scaled_momentum' and cannot be changed to 'residual' after"):
            adapter.engine.set_config(memory="residual")
        adapter.engine.set_config(memory={"decay": 0.5})
        return adapter.step(gradients_of(1, collectives.rank()))

    same_bytes(run_ranks(2, work))


def test_configs_that_were_made_equal_again():
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **SCOPES[0]})
        state = adapter.engine.state_dict()
        for _ in range(2):
            if collectives.rank() == 1:
                adapter.engine.set_config(seed=3)
            with pytest.raises(MismatchError, match="config.seed is 0 on ranks 0, 2, 3 on rank 1"):
                adapter.step(gradients_of(0, collectives.rank()))
            adapter.engine.load_state_dict(state)
            if collectives.rank() == 1:
                adapter.engine.set_config(seed=0)
            results = adapter.step(gradients_of(1, collectives.rank()))
            adapter.engine.load_state_dict(state)
        return results

    same_bytes(run_ranks(RANKS, work))


@every_way
def test_a_resumed_run_equals_an_unbroken_one(scope):
    def work(collectives):
        rank = collectives.rank()
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope})
        adapter.step(gradients_of(0, rank))
        adapter.step(gradients_of(1, rank))
        state = adapter.engine.state_dict()
        unbroken = [adapter.step(gradients_of(step, rank)) for step in (2, 3)]
        other = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope})
        other.step(gradients_of(7, rank))  # what it has of its own is replaced
        other.engine.load_state_dict(state)
        resumed = [other.step(gradients_of(step, rank)) for step in (2, 3)]
        for one, two in zip(unbroken, resumed, strict=True):
            same_bytes([one, two])
        last, own = adapter.engine.state_dict(), other.engine.state_dict()
        assert last["steps"] == own["steps"] == dict.fromkeys(MODEL, 4)
        same_bytes([last["residuals"], own["residuals"]])

    run_ranks(RANKS, work)


def test_config_and_scope_change_between_steps():
    """Residuals stay with their parameters: nothing is lost on the way."""
    model = {name: MODEL[name] for name in "abce"}
    changes = [*SCOPES, SCOPES[0], {"scope": "bucket", "bucket_bytes": 1024, "value": "raw"}, SCOPES[3]]
    # a b | c | e: of one dtype; a is too large for a bucket.
    exchanges = [3, 4, 4, 3, 3, 4, 3]
    job = Job(RANKS)

    def work(collectives):
        adapter = NumpyAdapter(collectives, model, LOSSY)
        results = []
        for step, change in enumerate(changes):
            adapter.engine.set_config({**LOSSY, **change})
            before = len(job.sent[collectives.rank()])
            results.append(adapter.step(gradients_of(step, collectives.rank(), model)))
            assert len(job.sent[collectives.rank()]) - before == exchanges[step] + (not step), change
        return results, adapter.engine.state_dict()["residuals"]

    ranks = run_ranks(RANKS, work, job)
    for step in range(len(changes)):
        same_bytes([results[step] for results, _ in ranks])
    for name, (shape, _) in model.items():
        sent = sum(result[name].astype(np.float64) * RANKS for result in ranks[0][0])
        kept = sum(residuals[name].reshape(shape) for _, residuals in ranks)
        steps = range(len(changes))
        came = sum(gradients_of(step, r, model)[name].astype(np.float64) for step in steps for r in range(RANKS))
        assert np.allclose(sent + kept, came, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_a_gradient_that_comes_too_early(scope):
    def work(collectives):
        model = {"a": ((4,), "f4"), "b": ((4,), "f4"), "c": ((900,), "f4")}
        adapter = NumpyAdapter(collectives, model, {**LOSSLESS, **scope})
        given = {name: np.ones(*of) for name, of in model.items()}
        tickets = {name: adapter.start(name, given[name]) for name in model}
        with pytest.raises(RuntimeError, match=r"the gradient of b is still in flight: call optimizer.step"):
            adapter.start("b", np.ones(4, "f4"))
        with pytest.raises(RuntimeError, match="call it after step"):
            adapter.engine.set_config(seed=1)
        adapter.reducer.finish(tickets.pop("b"), 1.0)
        adapter.reducer.finish(tickets.pop("c"), 1.0)
        if scope["scope"] != "tensor":
            # With small buckets c is alone in one, which would be ready for the next step: a and b are not.
            for name in ("b", "c"):
                with pytest.raises(RuntimeError, match=r"backward\(\) ran again before the previous step's bucket"):
                    adapter.start(name, np.ones(*model[name]))
        adapter.reducer.finish(tickets.pop("a"), 1.0)
        assert not adapter.engine.in_flight
        again = adapter.step({name: np.ones(*of) for name, of in model.items()})
        assert all((array == 1).all() for array in again.values())

    run_ranks(1, work)


def test_an_exchange_over_mpi_without_mpi():
    def work(collectives):
        config = {"scope": "model", "exchange": "densestream"}
        NumpyAdapter(collectives, MODEL, config).step(gradients_of(0, collectives.rank()))

    said = on_all_ranks(RuntimeError, work)
    assert "exchange 'densestream' needs MPI" in said and "set exchange to 'allgather'" in said
