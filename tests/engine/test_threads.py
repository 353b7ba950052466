"""Hooks on several threads at the same time, as autograd has them for a model on several devices."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from hvd_deepreduce.engine import cores
from hvd_deepreduce.engine.buckets import Bucket, BucketLayout
from hvd_deepreduce.pipeline import bundle
from tests.engine.numpy_adapter import NumpyAdapter, NumpyTensors, run_ranks

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


LOSSY = {"scope": "bucket", "bucket_bytes": 1200, "sparsifier": {"name": "topk", "density": 0.1}}


def summed(config, busy, monkeypatch, steps=3):
    """What two ranks get in a few steps, with four cores each; and the names of the threads that have encoded."""
    monkeypatch.setattr(cores, "of_rank", lambda local_size: 4)
    found: dict[int, list[bytes]] = {0: [], 1: []}
    names = set()

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, config)
        adapter.reducer._busy = busy
        start = adapter.engine.start

        def noted(bucket: Bucket) -> None:
            names.add(threading.current_thread().name.partition("_")[0])
            start(bucket)

        adapter.engine.start = noted
        rng = np.random.default_rng(collectives.rank())
        for _ in range(steps):
            tickets = {name: adapter.start(name, rng.standard_normal(300).astype(np.float32)) for name in ("b", "a")}
            found[collectives.rank()] += [adapter.reducer.finish(tickets[name], 0.5).tobytes() for name in MODEL]

    run_ranks(2, work)
    assert found[0] == found[1]
    return found[0], names


def test_buckets_are_encoded_on_a_thread_where_a_core_is_free(monkeypatch):
    here, threads_here = summed(LOSSY, lambda: 4, monkeypatch)
    apart, threads_apart = summed(LOSSY, lambda: 3, monkeypatch)
    assert here == apart
    assert threads_apart == {"deepreduce encode"} and "deepreduce encode" not in threads_here


class OneDevice(NumpyTensors):
    """Gradients on a device. Notes in which context each thread works."""

    def __init__(self):
        self.here = threading.local()
        self.log = []

    def device(self, gradient):
        return "gpu"

    @contextmanager
    def stream(self, device):
        before, self.here.stream = getattr(self.here, "stream", None), device
        try:
            yield
        finally:
            self.here.stream = before

    def side_stream(self, device):
        thread = threading.current_thread()
        self.log.append("noted")

        @contextmanager
        def within():
            assert threading.current_thread() is not thread
            with self.stream(f"{device}, apart"):
                yield

        return within

    def join(self, device):
        assert self.here.stream == device
        self.log.append("joined")


def test_a_gpu_s_buckets_are_encoded_apart_and_joined_before_their_sums_are_written(monkeypatch):
    found = {}
    for each_has in (1, 2):  # cores; PyTorch's threads for the host do not count
        monkeypatch.setattr(cores, "of_rank", lambda local_size, n=each_has: n)

        def work(collectives):
            tensors = OneDevice()
            adapter = NumpyAdapter(collectives, MODEL, LOSSY, tensors)
            adapter.reducer._busy = lambda: 64
            start, receive = adapter.engine.start, adapter.engine.receive

            def starting(bucket):
                tensors.log.append(f"encoded on {tensors.here.stream}")
                start(bucket)

            def receiving(bucket, scale):
                tensors.log.append(f"received on {tensors.here.stream}")
                receive(bucket, scale)

            adapter.engine.start, adapter.engine.receive = starting, receiving
            rng = np.random.default_rng(collectives.rank())
            sums = []
            for _ in range(2):
                tickets = {
                    name: adapter.start(name, rng.standard_normal(300).astype(np.float32)) for name in ("b", "a")
                }
                sums += [adapter.reducer.finish(tickets[name], 0.5).tobytes() for name in MODEL]
            return sums, tensors.log

        found[each_has] = run_ranks(2, work)
    here, apart = found[1][0], found[2][0]
    assert here[0] == apart[0]
    buckets = here[1].count("encoded on gpu")
    assert buckets >= 4 and set(here[1]) == {"encoded on gpu", "received on gpu"}
    for step in (apart[1][: 4 * buckets // 2], apart[1][4 * buckets // 2 :]):
        assert sorted(step) == sorted(["noted", "encoded on gpu, apart", "joined", "received on gpu"] * (buckets // 2))
        assert all(step[i - 1] == "joined" for i, line in enumerate(step) if line == "received on gpu")


def test_an_exchange_of_several_collectives_starts_on_the_callers_thread(monkeypatch):
    _, names = summed({**LOSSY, "exchange": "reduce_scatter"}, lambda: 1, monkeypatch)
    assert "deepreduce encode" not in names


def test_an_error_while_encoding_on_a_thread_comes_from_finish(monkeypatch):
    monkeypatch.setattr(cores, "of_rank", lambda local_size: 2)

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, LOSSY)
        adapter.reducer._busy = lambda: 1
        tickets = {name: adapter.start(name, np.ones(300, np.float32)) for name in ("b", "a")}
        for name in MODEL:
            adapter.reducer.finish(tickets[name], 1.0)

        def failing(*arguments):
            raise MemoryError("no memory for the container")

        monkeypatch.setattr("hvd_deepreduce.pipeline.bundle.encode", failing)
        ticket = adapter.start("b", np.ones(300, np.float32))
        with pytest.raises(MemoryError, match="no memory for the container"):
            adapter.reducer.finish(ticket, 1.0)

    run_ranks(1, work)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, float("inf")),
        ({"cpu.max": "max 100000\n"}, float("inf")),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "what\n"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
        ({"cpu/cpu.cfs_quota_us": "300000\n"}, float("inf")),
    ],
)
def test_a_container_s_limit_counts(tmp_path, monkeypatch, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    assert cores.of_rank(1, tmp_path) == int(min(64, quota))
    assert cores.of_rank(2, tmp_path) == max(1, int(min(64, quota) / 2))
    assert cores.of_rank(1000, tmp_path) == 1


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({1: range(4), 2: range(4, 8)}, 4.0),  # each rank has cores of its own
        ({1: range(4), 2: range(4)}, 2.0),
        ({1: range(4), 2: range(2, 6)}, 2.0),
        ({1: range(4)}, 2.0),  # the other one is another process' child
        ({1: range(4), 2: None}, 2.0),
    ],
)
def test_ranks_that_a_launcher_binds_have_cores_of_their_own(tmp_path, monkeypatch, masks, expected):
    def affinity(pid):
        if masks[pid or 1] is None:
            raise ProcessLookupError
        return set(masks[pid or 1])

    monkeypatch.setattr("os.sched_getaffinity", affinity)
    monkeypatch.setattr(cores, "_siblings", lambda: list(masks))
    assert cores.share(2, tmp_path) == expected and cores.of_rank(2, tmp_path) == expected


def test_a_process_is_among_its_siblings():
    assert os.getpid() in cores._siblings()


def test_a_state_that_is_loaded_while_a_bucket_is_encoded_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(cores, "of_rank", lambda local_size: 2)
    encode = bundle.encode

    def slow(*arguments):
        time.sleep(0.1)
        return encode(*arguments)

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, LOSSY)
        adapter.reducer._busy = lambda: 1
        for _ in range(2):
            tickets = {name: adapter.start(name, np.ones(300, np.float32)) for name in ("b", "a")}
            for name in MODEL:
                adapter.reducer.finish(tickets[name], 1.0)
        state = adapter.engine.state_dict()
        monkeypatch.setattr(bundle, "encode", slow)
        for name in ("b", "a"):
            adapter.start(name, np.ones(300, np.float32))
        adapter.reducer.settle()
        adapter.engine.load_state_dict(state)
        time.sleep(0.3)
        again = adapter.engine.state_dict()
        assert again["steps"] == state["steps"]
        for name, residual in state["residuals"].items():
            np.testing.assert_array_equal(again["residuals"][name], residual)

    run_ranks(1, work)
