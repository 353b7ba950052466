"""Other ways to use the engine: buckets that a framework filled, local-update training, and gradients on devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from tests.engine.numpy_adapter import Job, NumpyAdapter, NumpyTensors, run_ranks
from tests.engine.test_step import LOSSLESS, LOSSY, RANKS, SCOPES, every_scope, gradients_of, same_bytes

MODEL = {"a": ((20, 30), "f4"), "b": ((30,), "f4"), "c": ((300,), "f4"), "d": ((5,), "f4")}


def test_buckets_of_the_framework():
    """As DDP's communication hook gets them: a vector of several gradients, and a future for the result.

    After the first step they are divided anew. Results come on another thread while later buckets are started.
    """
    division = {0: [["d"], ["a", "b", "c"]], 1: [["d", "c"], ["b", "a"]], 2: [["d", "c"], ["b", "a"]]}
    job = Job(RANKS)

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, "scope": "bucket"})
        engine, parameters = adapter.engine, adapter.engine.parameters
        reduced = []
        with ThreadPoolExecutor(1) as worker:
            for step in range(3):
                given = gradients_of(step, collectives.rank(), MODEL)
                engine.stats.begin_step()
                futures = []
                for number, names in enumerate(division[step]):
                    vector = np.concatenate([given[name].reshape(-1) for name in names])
                    ticket = adapter.reducer.start_bucket([parameters[name] for name in names], number, vector)
                    futures.append(worker.submit(adapter.reducer.finish, ticket, 1 / RANKS))
                    futures[-1].vector = vector
                reduced.append({})
                for names, future in zip(division[step], futures, strict=True):
                    future.result()
                    ends = np.cumsum([given[name].size for name in names])
                    parts = np.split(future.vector, ends[:-1])
                    reduced[-1].update((n, p.reshape(MODEL[n][0])) for n, p in zip(names, parts, strict=True))
                engine.stats.end_step()
                assert not engine.in_flight
        state = engine.state_dict()
        assert state["steps"] == dict.fromkeys(MODEL, 3) and engine.stats.to_dict()["total"]["steps"] == 3
        return reduced, state["residuals"]

    ranks = run_ranks(RANKS, work, job)
    for step in range(3):
        same_bytes([results[step] for results, _ in ranks])
    for name, (shape, _) in MODEL.items():
        sent = sum(result[name].astype(np.float64) * RANKS for result in ranks[0][0])
        kept = sum(residuals[name].reshape(shape) for _, residuals in ranks)
        came = sum(gradients_of(step, rank, MODEL)[name] for step in range(3) for rank in range(RANKS))
        assert np.abs(kept).max() > 0 and np.allclose(sent + kept, came, rtol=1e-5, atol=1e-5), name
    pipeline = Pipeline(Config.load({**LOSSY, "scope": "bucket"}))
    for sent in job.sent:
        places = [(number, step) for step in range(3) for number in range(2)]
        for (_, data), (number, step) in zip(sent, places, strict=True):
            numel = sum(np.prod(MODEL[name][0], dtype=int) for name in division[step][number])
            frame.unpack(data, pipeline.expected(int(numel), np.dtype(np.float32), RngKey(0, number, step)))


def test_buckets_of_the_framework_that_cannot_be():
    def work(collectives):
        model = {**MODEL, "double": ((5,), "f8")}
        adapter = NumpyAdapter(collectives, model, LOSSLESS)
        a, b, double = (adapter.engine.parameters[name] for name in ("a", "b", "double"))
        with pytest.raises(ValueError, match="one dtype .* holds 605 elements of float32, float64: divide it"):
            adapter.reducer.start_bucket([a, double], 0, np.ones(605, "f4"))
        with pytest.raises(ValueError, match=r"bucket.a was given 600 elements, but its parameters have 630"):
            adapter.reducer.start_bucket([a, b], 0, np.ones(600, "f4"))
        vector = np.ones(630, "f4")
        ticket = adapter.reducer.start_bucket([a, b], 0, vector)
        with pytest.raises(RuntimeError, match="the gradient of b is still in flight"):
            adapter.reducer.start_bucket([b], 1, np.ones(30, "f4"))
        adapter.reducer.finish(ticket, 2.0)
        assert (vector == 2).all() and not adapter.engine.in_flight

    run_ranks(1, work)


@every_scope
@pytest.mark.parametrize("config", [LOSSLESS, LOSSY], ids=["lossless", "lossy"])
def test_local_updates(scope, config):
    """LocalSGD: each rank takes steps of its own. Every third time the change since the last exchange is averaged, and
    an outer step applies it everywhere."""

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**config, **scope})
        anchor = {name: np.zeros(*of) for name, of in MODEL.items()}
        weights = {name: array.copy() for name, array in anchor.items()}
        target = {name: array + collectives.rank() for name, array in gradients_of(0, 0, MODEL).items()}
        for step in range(12):
            for name, array in weights.items():
                array -= 0.1 * (array - target[name])
            if step % 3 == 2:
                average = adapter.step({name: weights[name] - anchor[name] for name in MODEL})
                for name, array in anchor.items():
                    array += average[name]
                    weights[name] = array.copy()
        assert adapter.engine.state_dict()["steps"] == dict.fromkeys(MODEL, 4)
        assert adapter.engine.stats.to_dict()["total"]["steps"] == 4
        return weights

    ranks = run_ranks(RANKS, work)
    same_bytes(ranks)
    goal = {name: array + (RANKS - 1) / 2 for name, array in gradients_of(0, 0, MODEL).items()}
    # All updates are linear: averaging them is taking the steps towards the mean of the targets.
    left = {name: goal[name] - ranks[0][name] for name in MODEL}
    if config is LOSSLESS:
        assert all(np.allclose(left[name], 0.9**12 * goal[name], rtol=1e-3, atol=1e-5) for name in MODEL)
    else:
        norms = [sum(np.square(array).sum() for array in arrays.values()) ** 0.5 for arrays in (left, goal)]
        assert 0.9**12 < norms[0] / norms[1] < 0.9


class Devices(NumpyTensors):
    """Gradients on devices with streams: a, b on one, the others on another. Notes what is done inside which stream."""

    def __init__(self):
        self.where = {}
        self.current = None
        self.log = []

    def device(self, gradient):
        return self.where[gradient.size]

    @contextmanager
    def stream(self, device):
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    def record(self, device):
        assert device == self.current
        number = len(self.log)
        self.log.append(f"copied on {device}")
        return lambda: self.log.append(f"waited for {number} on {self.current}")

    def flat(self, gradient, on_host=False):
        assert self.current == self.where[gradient.size]
        return super().flat(gradient, on_host)

    def write(self, gradient, reduced, scale=1.0):
        assert self.current == self.where[gradient.size]
        super().write(gradient, reduced, scale)


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_each_device_has_its_stream(scope):
    """A bucket is on one device, and is encoded on its stream after all gradients have been copied into it, together
    when the last one has come."""

    def work(collectives):
        tensors = Devices()
        tensors.where = {600: "gpu 0", 30: "gpu 0", 300: "gpu 1", 5: "gpu 1"}
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSLESS, **scope}, tensors)
        adapter.reducer._expected = lambda: [(p, tensors.where[p.numel]) for p in adapter.engine.parameters.values()]
        engine = adapter.engine
        encode, receive = engine.pipeline.encode, engine.receive

        def encoding(gradient, *others):
            members = {"gpu 0": (600, 30, 630), "gpu 1": (300, 5, 305)}
            assert gradient.size in members[tensors.current]
            tensors.log.append(f"encoded on {tensors.current}")
            return encode(gradient, *others)

        def receiving(bucket, scale):
            assert bucket.device == tensors.current
            receive(bucket, scale)

        engine.pipeline.encode, engine.receive = encoding, receiving
        given = gradients_of(0, collectives.rank(), MODEL)
        # The first device's bucket becomes full on the other one's stream, as it waits for the second's.
        reduced = adapter.step(given, ["a", "b", "c", "d"])
        return reduced, (tensors.log, len(adapter.reducer.buckets))

    ranks = run_ranks(RANKS, work)
    same_bytes([reduced for reduced, _ in ranks])
    log, buckets = ranks[0][1]
    if scope["scope"] == "model":
        assert log == [
            "copied on gpu 0", "copied on gpu 1", "waited for 1 on gpu 1", "encoded on gpu 1", "waited for 0 on gpu 0",
            "encoded on gpu 0",
        ]  # fmt: skip
    else:
        where = (1, 1, 0, 0) if scope["scope"] == "tensor" or "selection" in scope else (1, 0, 0)
        encodes = [line for line in log if "copied" not in line and "waited" not in line]
        assert encodes == [f"encoded on gpu {n}" for n in where]
        assert [sum(word in line for line in log) for word in ("copied", "waited")] == [buckets, buckets]
