"""Buckets of gradients that come and go through operations of a graph; the operations are functions of this file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_deepreduce import Config
from hvd_deepreduce.engine import BucketLayout, Member, Parameter
from hvd_deepreduce.engine.graph.buckets import IN_FLIGHT, GraphBuckets
from hvd_deepreduce.engine.graph.held import HeldUnit
from hvd_deepreduce.engine.graph.parameters import GraphEngine
from hvd_deepreduce.engine.graph.slots import Graph, Slot, Unit
from tests.engine.numpy_adapter import ThreadCollectives, run_ranks

ALL = {"sparsifier": {"name": "topk", "density": 1.0}, "index": "bitmap", "value": "raw", "scope": "bucket"}
FLOAT32 = SimpleNamespace(name="float32", size=4)


class Futures(ThreadCollectives):
    """Each allgather is on a thread of its own, as on TensorFlow."""

    def __init__(self, one):
        super().__init__(one.job, one.rank())
        self._threads = ThreadPoolExecutor(8)

    def start_allgather(self, data, name):
        return self._threads.submit(self.job.wait, super().start_allgather(data, name))

    def wait_allgather(self, pending):
        return pending.result()


class Arrays(HeldUnit):
    """Is given all gradients at once, and takes all sums when the last of them is there."""

    def begin(self, run, slots, force=False):
        self.run, self.sums, self.ended, self.failure = run, {}, Event(), None
        return super().begin(run, slots, force)

    def put_all(self, gradients):
        for at, gradient in enumerate(gradients):
            self.hold(at, self.run, gradient)

    def _wake(self, slots):
        self.failure = self._failure
        self.sums.update({at: self._sums[at][0] / self._sums[at][1] for at in slots if at in self._sums})
        if not self._came:
            self.ended.set()


def traced(collectives, sizes, **settings):
    """The buckets and the graph of one rank's function."""
    engine = GraphEngine(Config.load(ALL, **settings), Futures(collectives))
    engine.vote(False)  # as in the step check of a step
    buckets = GraphBuckets(engine, lambda: 1)
    graph, unit = Graph(compressed=len(sizes), built=len(sizes)), Unit(0, 0)
    for at, size in enumerate(sizes):
        slot = Slot(graph, at, f"g{at}", (size,), FLOAT32, unit=unit)
        graph.slots.append(slot)
        unit.slots.append(slot)
    graph.units.append(unit)
    return buckets, graph, buckets.runtime(unit, graph, Arrays)


@pytest.mark.parametrize("bucket_bytes", [1024, 10**6])
def test_sums_come_back_in_every_run(bucket_bytes):
    sizes = [200, 7, 150, 1]

    def work(collectives):
        buckets, graph, runtime = traced(collectives, sizes, bucket_bytes=bucket_bytes)
        found = []
        for run in range(1, 4):
            rng = np.random.default_rng([run, collectives.rank()])
            buckets.begin(graph, run, place=True)
            runtime.put_all([rng.standard_normal(size).astype(np.float32) for size in sizes])
            assert runtime.ended.wait(20) and not runtime.failure
            found.append([runtime.sums[at] for at in range(len(sizes))])
        engine = buckets._engine
        assert not engine.in_flight and graph.step is None and engine.stats.total.steps == 3
        buckets.close()
        return found, {parameter.step for parameter in engine.parameters.values()}

    ranks = run_ranks(2, work)
    for run in range(1, 4):
        given = [np.random.default_rng([run, rank]) for rank in range(2)]
        for at, size in enumerate(sizes):
            total = np.sum([rng.standard_normal(size).astype(np.float32) for rng in given], 0)
            for found, steps in ranks:
                np.testing.assert_allclose(found[run - 1][at], total / 2, atol=1e-6)
                assert steps == {3}


def test_a_bucket_can_come_after_another_one_has_gone():
    layout = BucketLayout([Member(Parameter(f"p{at}", at, (400,), "float32"), 400) for at in range(2)], 1024)
    first, second = layout.buckets
    for _ in range(2):
        assert layout.mark_full(first) == [first]
        layout.release_all(first)
        assert layout.mark_full(second) == [second]
        layout.release_all(second)


def test_a_run_that_has_not_ended_is_an_error_until_it_is_forgotten():
    def work(collectives):
        buckets, graph, runtime = traced(collectives, [5])
        buckets.begin(graph, 1, place=True)
        runtime._came.add(0)  # its gradient came, and an error ended the step
        with pytest.raises(RuntimeError, match=IN_FLIGHT[:30]):
            buckets.begin(graph, 2, place=True)
        buckets.forget_all([graph])
        buckets.begin(graph, 3, place=True)
        runtime.put_all([np.ones(5, np.float32)])
        assert runtime.ended.wait(20) and np.array_equal(runtime.sums[0], np.ones(5))
        buckets.close()

    run_ranks(1, work)


def test_an_error_of_a_bucket_is_raised_at_the_end_of_the_step(monkeypatch):
    def work(collectives):
        buckets, graph, runtime = traced(collectives, [200, 150], bucket_bytes=1024)
        buckets.begin(graph, 1, place=True)
        received, engine = [], buckets._engine
        receive = engine.receive

        def fails_first(bucket, scale=1.0):
            received.append(bucket)
            if len(received) == 1:
                raise ValueError("a broken container")
            receive(bucket, scale)

        monkeypatch.setattr(engine, "receive", fails_first)
        runtime.put_all([np.ones(200, np.float32), np.ones(150, np.float32)])
        assert runtime.ended.wait(20) and "ValueError: a broken container" in runtime.failure
        first, second = ([0], [1]) if received[0].members[0].name.endswith("g0") else ([1], [0])
        assert not runtime.sums[first[0]].any() and runtime.sums[second[0]].all()
        buckets.close()

    run_ranks(1, work)
