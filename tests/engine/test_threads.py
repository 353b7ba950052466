"""Hooks on several threads at the same time, as autograd has them for a model on several devices."""

from __future__ import annotations

import threading

import numpy as np

from hvd_deepreduce.engine.buckets import Bucket, BucketLayout
from tests.engine.numpy_adapter import NumpyAdapter, run_ranks

MODEL = {"a": ((300,), np.float32), "b": ((300,), np.float32)}
CONFIG = {"scope": "bucket", "bucket_bytes": 1200, "sparsifier": "none"}


def test_no_thread_overtakes_another_between_a_buckets_turn_and_its_start():
    """Exchanges over MPI have no names: they must be started in the order in which the layout lists them."""
    started: list[int] = []

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, CONFIG)
        start, waiting = adapter.engine.start, threading.Event()

        def slow(bucket: Bucket) -> None:
            if bucket.number == 0:
                waiting.wait(0.3)  # for the other thread, which must not come so far
            started.append(bucket.number)
            waiting.set()
            start(bucket)

        adapter.engine.start = slow
        tickets = {}

        def hook(name: str) -> None:
            tickets[name] = adapter.start(name, np.ones(300, np.float32))

        threads = [threading.Thread(target=hook, args=(name,)) for name in ("b", "a")]
        threads[0].start()
        while not adapter.engine.in_flight:
            pass
        threads[1].start()
        for thread in threads:
            thread.join(20)
        for name in ("b", "a"):
            assert np.all(adapter.reducer.finish(tickets[name], 1.0) == 1)

    run_ranks(1, work)
    assert started == [0, 1]


def test_two_threads_that_begin_a_step_use_one_layout_and_one_vector():
    """Gradients of one bucket, from two threads at the same time; none is lost."""
    together = threading.Barrier(2)
    made: list[BucketLayout] = []
    make = BucketLayout.__init__

    def counted(self, *arguments, **more) -> None:
        made.append(self)
        make(self, *arguments, **more)

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {"sparsifier": "none", "scope": "model"})
        adapter.engine.agree([])
        adapter._agreed = True
        flat = adapter.reducer._tensors.device

        def slow(gradient: np.ndarray):
            together.wait(10)
            return flat(gradient)

        adapter.reducer._tensors.device = slow
        for step in range(20):
            tickets = {}

            def hook(name: str, step: int = step, tickets: dict = tickets) -> None:
                tickets[name] = adapter.start(name, np.full(300, 1.0 + step, np.float32))

            threads = [threading.Thread(target=hook, args=(name,)) for name in MODEL]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            for name in MODEL:
                assert np.all(adapter.reducer.finish(tickets[name], 1.0) == 1 + step)

    BucketLayout.__init__ = counted
    try:
        run_ranks(1, work)
    finally:
        BucketLayout.__init__ = make
    assert len(made) == 1
