"""The adapters' protocol of streams and events, on the emulated GPU: one rank, whose exchanges are with itself."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hvd_deepreduce import Config
from hvd_deepreduce.engine import Engine, Reducer
from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch import collectives
from hvd_deepreduce.torch import horovod as adapter
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.horovod import DeepReduce
from hvd_deepreduce.torch.local_sgd import LocalSGD
from hvd_deepreduce.torch.owners import described
from hvd_deepreduce.torch.tensors import TorchTensors
from tests import cuda_emulator
from tests.adapters import horovod_stand_in
from tests.adapters.driven_buckets import SIZES, DrivenBuckets, compare_with_host, vector
from tests.adapters.emulated_gpu import current, emulated_gpu, on_stream, put
from tests.adapters.torch_job import Given
from tests.cuda_emulator import streams
from tests.cuda_emulator.streams import Event

pytestmark = [
    pytest.mark.emulator, pytest.mark.skipif(bool(cuda_emulator.available()), reason=cuda_emulator.available())
]  # fmt: skip
GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
SIGNS = {"memory": "scaled_momentum", "value": "sign", "scope": "bucket"}
"""As the next one, a config that compresses with one rank, too, since it has a momentum."""
LARGEST = {"memory": "dgc", "sparsifier": {"name": "topk", "density": 0.1}, "value": "raw", "scope": "bucket"}


@pytest.fixture
def rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("config", [
    SIGNS, LARGEST, {**SIGNS, "selection": "tensor"}, {**SIGNS, "exchange": "reduce_scatter"},
    {**LARGEST, "exchange": "reduce_scatter"},
])  # fmt: skip
@pytest.mark.parametrize("settings", [{}, {"find_unused": True}])
def test_means_of_buckets(rank, config, settings):
    """Also under ``bf16_compress_wrapper``."""
    compare_with_host(config, **settings)


def test_encoding_does_not_wait_for_the_exchange_before(rank):
    """The stream that encodes a bucket knows nothing of the end of the one before."""
    with emulated_gpu() as gpu:
        driver, waited = DrivenBuckets(SIGNS, gpu), []
        driver.step(0)
        with driver.within():
            vectors = [put(vector(1, number)) for number in range(len(SIZES))]
            futures = [driver.take(0, vectors[0])]
            driver.buckets._finished[0].result()  # a host that is in no hurry: bucket 0 is at its end
            exchanged = gpu.collectives.record_event()
            start = driver.buckets._start

            def watched(number, *arguments):
                try:
                    return start(number, *arguments)
                finally:
                    waited.append(driver.buckets._start_stream.follows(exchanged))

            with mock.patch.object(driver.buckets, "_start", watched):
                futures += [driver.take(number, vectors[number]) for number in (1, 2)]
            for future in futures:
                future.wait()
        driver.close()
    assert waited == [False, False]


def test_residuals_are_read_when_all_is_over(rank):
    with emulated_gpu() as gpu:
        driver = DrivenBuckets(LARGEST, gpu)
        driver.step(0)
        buckets, device = driver.buckets, torch.device("cpu")
        before = buckets.state_dict()["residuals"]
        with on_stream(buckets._start_stream), buckets._tensors.stream(device):
            buckets.engine.decay(buckets.engine.parameters.values(), 0.5)
        after = buckets.state_dict()["residuals"]
        driver.close()
    names = [name for name in after if name.startswith("p")]
    assert len(names) == 5 and all(np.array_equal(after[name], before[name] / 2) for name in names)


def test_memory_that_an_error_leaves_is_not_given_away(rank):
    with emulated_gpu() as gpu:
        driver = DrivenBuckets(LARGEST, gpu)
        driver.step(0)
        finish = driver.buckets._reducer.finish

        def failing(*arguments):
            finish(*arguments)
            raise MemoryError("no room")

        with mock.patch.object(driver.buckets._reducer, "finish", failing), suppress(MemoryError):
            driver.step(1)
        driver.close()
        assert driver.buckets.iteration == 2 and driver.buckets._finished[-1].exception() is not None
        driver.buckets._finished.clear()
        gc.collect()


def test_received_memory_is_kept_for_the_stream_that_reads_it(rank):
    with emulated_gpu() as gpu:
        tensors = TorchTensors()
        exchanging = DistributedCollectives(tensors)
        exchanging._devices = dist.new_group(backend="gloo")
        with on_stream(gpu.stream("start")):
            given = put(torch.arange(100, dtype=torch.uint8))
            with tensors.stream(tensors.device(given)):
                pending = exchanging.start_allgather(tensors.array(given), "")
        with on_stream(gpu.stream("finish")), tensors.stream(tensors.device(given)):
            received = exchanging.wait_allgather(pending)
            copied = received.copy()
            del pending, received
            assert (copied.get() == np.arange(100)).all()
        exchanging.close()


# Under Horovod


@pytest.fixture
def horovod(rank, monkeypatch):
    """Horovod that takes tensors on a GPU. It is never done before somebody waits: all containers are held back."""
    monkeypatch.setattr(collectives, "hvd", horovod_stand_in)
    monkeypatch.setattr(horovod_stand_in, "nccl", True)
    monkeypatch.setattr(horovod_stand_in, "poll", lambda handle: False)


def test_a_container_that_was_held_back_is_sent_when_it_is_written(horovod):
    """By another thread than the one that has encoded it, whose stream is another one."""
    with emulated_gpu() as gpu, on_stream(gpu.stream("user")):
        tensors = TorchTensors()
        sending = collectives.TorchCollectives(tensors)
        sending.start_step_check(np.zeros(1), "step", lambda total: None)
        within, started = tensors.side_stream(torch.device("cpu")), []

        def encode():
            with within():
                data = cuda_emulator.asarray(np.arange(100, dtype=np.uint8))
                started.append(sending.start_allgather(data, "gathered"))
                started.append(sending.start_alltoall(data, [100], "scattered"))

        thread = threading.Thread(target=encode, name="deepreduce encode")
        thread.start()
        thread.join()
        assert len(started) == 2 == len(sending._held)
        sending.wait_step_check()
        assert (sending.wait_allgather(started[0]) == np.arange(100)).all()
        assert (sending.wait_alltoall(started[1])[0] == np.arange(100)).all()


class Hooked:
    """Drives a ``Reducer`` as Horovod's hooks do: the backward pass has two streams, and buckets are encoded by a
    thread. Those of ``alone`` are in no bucket."""

    def __init__(self, config, gpu=None, sizes=(300, 200, 50, 400, 7), alone=("p1",)):
        self.alone = alone
        self.put = put if gpu else lambda tensor: tensor
        self.streams = [gpu and gpu.stream(name) for name in ("user", "side")]
        with on_stream(self.streams[0]):
            self.tensors = TorchTensors()
            self.collectives = collectives.TorchCollectives(self.tensors)
            self.every = {f"p{number}": self.put(torch.zeros(size)) for number, size in enumerate(sizes)}
            self.engine = Engine(Config.load(config), self.collectives, described(self.every))
            self.engine.agree([(one.name, one.shape, one.dtype) for one in self.engine.parameters.values()])
            self.reducer = Reducer(self.engine, self.tensors, self.expected, busy=lambda: 1)

    def expected(self):
        every = self.engine.parameters.values()
        return [(one, self.tensors.device(self.every[one.name])) for one in every if one.name not in self.alone]

    def begin_step(self):
        self.engine.begin_step()
        self.collectives.start_step_check(self.engine.vote(True), "step", lambda total: None)
        if self.streams[1]:
            self.streams[1].wait_stream(self.streams[0])

    def came(self, name, given, **how):
        """A gradient, on the stream of its number."""
        parameter = self.engine.parameters[name]
        with on_stream(self.streams[parameter.number % 2]):
            gradient = self.put(given).mul_(2)
            return self.reducer.start(parameter, gradient, **how)

    def step(self, step, missing=(), as_view=False, dtype=torch.float32, order=reversed, resting=()):
        tickets, random = {}, np.random.default_rng(step)
        self.begin_step()
        for name in order([name for name in self.every if name not in missing]):
            given = torch.from_numpy(random.standard_normal(self.every[name].numel(), np.float32)).to(dtype)
            rests = name in resting
            tickets[name] = self.came(name, given * (not rests), as_view=as_view, resting=rests)
        if self.streams[1]:  # as autograd does
            self.streams[0].wait_stream(self.streams[1])
        with on_stream(self.streams[0]):
            means = {name: self.reducer.finish(ticket, 1.0) for name, ticket in tickets.items()}
            found = {name: one.float().cpu().numpy().copy() for name, one in means.items()}
        self.engine.stats.end_step()
        return found

    def close(self):
        self.engine.close()


ORDERS = reversed, sorted, lambda names: sorted(names, key="p2 p4 p0 p3 p1".split().index)
"""Of gradients: buckets are full in the order of their exchanges, or earlier than those before them."""


@pytest.mark.parametrize("config", [
    SIGNS, LARGEST, {**LARGEST, "bucket_bytes": 1024}, {**SIGNS, "scope": "model", "exchange": "reduce_scatter"},
    {**LARGEST, "scope": "tensor"},
])  # fmt: skip
@pytest.mark.parametrize("cores", [1, 4])  # with one, there is no thread that encodes
def test_gradients_of_hooks(horovod, monkeypatch, config, cores):
    monkeypatch.setattr("hvd_deepreduce.engine.cores.of_rank", lambda *_: cores)
    found = []
    for there in (False, True):
        with emulated_gpu() if there else nullcontext() as gpu:
            job = Hooked(config, gpu)
            found.append([job.step(step) for step in range(3)])
            found[-1] += [job.step(3, ["p2"]), job.step(4), job.step(5, as_view=True), job.step(6, ["p0"], True)]
            found[-1] += [job.step(7 + more, dtype=torch.float16, order=order) for more, order in enumerate(ORDERS)]
            found[-1] += [job.step(10 + more, as_view=True, order=order) for more, order in enumerate(ORDERS)]
            kept = [job.engine.residual_of(name) for name in ("p0", "p1")]
            found[-1].append(job.step(13, resting=["p0", "p1"]))
            assert all(map(np.array_equal, kept, (job.engine.residual_of(name) for name in ("p0", "p1"))))
            assert (job.reducer._encoder is not None) == (cores > 1 and "exchange" not in config) or not there
            job.close()
    for ours, theirs in zip(*found, strict=True):
        assert ours.keys() == theirs.keys() and all(np.array_equal(one, theirs[name]) for name, one in ours.items())


@contextmanager
def counting(tensors):
    """Counts what takes the host's time for gradients on a GPU, by kind."""
    counts, operation, stream, event = Counter(), streams.operation, tensors.stream, Event.record

    def counted_operation(what, *arguments):
        counts[what] += 1
        return operation(what, *arguments)

    def counted_stream(device):
        counts["stream"] += 1
        return stream(device)

    def counted_event(*arguments):
        counts["event"] += 1
        return event(*arguments)

    with (
        mock.patch.object(streams, "operation", counted_operation),
        mock.patch.object(tensors, "stream", counted_stream),
        mock.patch.object(Event, "record", counted_event),
    ):
        yield counts


@pytest.mark.parametrize("how", [{}, {"as_view": True}, {"dtype": torch.float16}], ids=str)
def test_the_host_s_work_does_not_grow_with_the_parameters(horovod, monkeypatch, how):
    """Of a bucket: its gradients are copied together, with one event, and so are their means. They come on two streams,
    of which one waits for the other."""
    monkeypatch.setattr("hvd_deepreduce.engine.cores.of_rank", lambda *_: 4)
    found = []
    for sizes in ((300, 200, 50, 400), (300, 200, 50, *[20] * 37)):
        with emulated_gpu() as gpu:
            job = Hooked(LARGEST, gpu, sizes, alone=())
            job.step(0, **how)
            job.begin_step()
            with counting(job.tensors) as counts:
                tickets = [job.came(name, torch.ones(one.numel(), dtype=how.get("dtype")), as_view="as_view" in how)
                           for name, one in reversed(job.every.items())]  # fmt: skip
                job.streams[0].wait_stream(job.streams[1])
                with on_stream(job.streams[0]):
                    for ticket in tickets:
                        job.reducer.finish(ticket, 1.0)
            job.engine.stats.end_step()
            job.close()
            assert counts.pop("aten.mul_.Tensor") == len(sizes) == len(tickets)  # by ``came``
            views = counts.pop("aten.set_.source_Tensor", 0)  # which enqueues nothing
            assert views == (len(sizes) if "as_view" in how else 0)
            assert counts["aten._foreach_copy_.default"] == (1 if views else 2) and "aten.copy_.default" not in counts
            found.append(counts)
    assert found[0] == found[1] and found[0]["stream"] and found[0]["event"]


def test_memory_is_free_once_a_bucket_is_full(horovod):
    """Though it is not sent before another one is."""
    with emulated_gpu() as gpu:
        job = Hooked({**LARGEST, "bucket_bytes": 1024}, gpu)
        job.begin_step()
        gradients = {}
        for name in ("p0", "p2", "p3"):
            with on_stream(job.streams[0]):
                gradient = gradients[name] = put(torch.ones(job.every[name].numel()))
                job.reducer.start(job.engine.parameters[name], gradient, True)
        of = job.reducer._layout.bucket_of
        assert of["p0"] is not of["p2"] and of["p0"].full and of["p0"].pending is None
        for name, gradient in gradients.items():
            assert not of[name].full or gradient.data_ptr() == of[name].views[name].data_ptr()
        job.reducer.settle()
        job.close()


class Called:
    """Calls ``DeepReduce`` as Horovod does, for two optimizers: it multiplies the carriers of each by a factor of its
    own. On a GPU, it does so on a stream that waits for the one on which it was called, and the host waits for that."""

    def __init__(self, gpu=None):
        self.gpu, self.put = gpu, put if gpu else lambda tensor: tensor
        self.streams = [gpu and gpu.stream(name) for name in ("user", "side")]
        with on_stream(self.streams[0]):
            self.model = Given({f"p{number}": np.zeros(30 + number, np.float32) for number in range(20)})
            for one in self.model.parameters():
                self.put(one.data)
            self.compression = DeepReduce(self.model, {**SIGNS, "sparsifier": {"name": "topk", "density": 0.5}})
            every = list(self.model.parameters())
            self.optimizers = [torch.optim.SGD(half, lr=0.1) for half in (every[:10], every[10:])]
            for one in self.optimizers:
                one.op, one._requires_update = horovod_stand_in.Average, set(one.param_groups[0]["params"])
            if gpu:
                self.compression._carriers._ones[GPU] = self.put(torch.ones(len(every), dtype=torch.float64))

    def begin(self):
        """As before a step of the optimizers."""
        for one in self.optimizers:
            self.compression._optimizers.check(one)

    def reduced(self, number, factor):
        parameter = list(self.model.parameters())[number]
        gradient = torch.from_numpy(np.random.default_rng(number).standard_normal(parameter.numel(), np.float32))
        with on_stream(self.streams[number % 2]):
            parameter.grad = self.put(gradient).mul_(2)
            carrier, context = self.compression.compress(parameter.grad)
            stream = self.gpu and self.gpu.stream("horovod")
            if stream:
                stream.wait_stream(current())
            with on_stream(stream):
                carrier.mul_(factor)
        return carrier, context

    def step(self, factors=(1.0, 1.0)):
        if self.gpu:
            self.streams[1].wait_stream(self.streams[0])
        sent = [self.reduced(number, factors[number // 10]) for number in reversed(range(20))]
        if self.gpu:
            self.gpu.synchronize()
        with on_stream(self.streams[0]):
            means = [self.compression.decompress(carrier, context) for carrier, context in sent]
            return [(one + 0).cpu().numpy().copy() for one in means]


def test_one_carrier_of_an_optimizer_is_read_in_a_step(horovod, monkeypatch):
    """Where the optimizer is known; and they are written together. Each optimizer's gradients get its factor, whatever
    it was in the step before."""
    monkeypatch.setattr(horovod_stand_in, "poll", lambda handle: True)
    monkeypatch.setattr("hvd_deepreduce.torch.checks.hvd", horovod_stand_in)
    monkeypatch.setattr(adapter, "wire_device", lambda tensor: GPU if tensor.is_cuda else HOST)
    monkeypatch.setattr(adapter, "look_at_stream", lambda *_: None)
    factors, found, reads = [(2.0, 0.5), (1.0, 1.0), (0.5, 4.0)], [], []
    for there in (False, True):
        with emulated_gpu() if there else nullcontext() as gpu:
            job = Called(gpu)
            found.append([])
            for step, of in enumerate(factors):
                if step:
                    job.begin()
                with counting(job.compression._tensors) as counts:
                    found[-1] += job.step(of if there else (1.0, 1.0))
                reads.append((counts["aten._local_scalar_dense.default"], counts["aten.fill_.Scalar"]))
            job.compression.close()
    assert reads == [(0, 0)] * 3 + [(20, 1), (2, 1), (2, 1)]
    applied = [factor for first, second in factors for factor in [second] * 10 + [first] * 10]
    assert all(np.array_equal(ours, f * theirs) for theirs, ours, f in zip(*found, applied, strict=True))
    assert all(any(map(np.any, found[0][begin : begin + 10])) for begin in range(0, 60, 10))


# Local updates


@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "delay": 1}, {"anchors": "host"}, {"store": True}])
def test_local_updates(rank, tmp_path, settings):
    """With residuals that decay, which the package does between exchanges."""
    found = []
    for there in (False, True):
        store = SharedStore(tmp_path / str(there), peer=0, peers=2, wait=0) if "store" in settings else None
        given = {**settings, "store": store, "process_group": None if store else dist.group.WORLD}
        with emulated_gpu() if there else nullcontext() as gpu, on_stream(gpu and gpu.stream("user")):
            model = nn.Linear(30, 20)
            for number, one in enumerate(model.parameters()):
                one.data = (put if there else torch.Tensor.detach)(torch.full(one.shape, 0.5 + number))
            inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            config = {"sparsifier": {"name": "topk", "density": 0.1}, "value": "qsgd", "scope": "bucket"}
            optimizer = LocalSGD(inner, model, config, every=2, decay=0.9, **given)
            if there and not store:
                optimizer._updates.collectives._devices = dist.new_group(backend="gloo")
            random = np.random.default_rng(0)
            for _ in range(7):
                for one in model.parameters():
                    one.grad = torch.from_numpy(random.standard_normal(one.shape, np.float32))
                    if there:
                        put(one.grad).mul_(1)
                optimizer.step()
            kept = optimizer.state_dict()["local_sgd"]["compression"]["residuals"]
            found.append([one.detach().cpu().numpy().copy() for one in (*model.parameters(), *kept.values())])
            optimizer.close()
    assert len(found[0]) == 4 and all(map(np.array_equal, *found))
