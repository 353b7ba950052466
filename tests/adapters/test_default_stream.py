"""What PyTorch's adapter says of the streams of a job under Horovod with NCCL; CUDA and NCCL are stand-ins."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("horovod.torch")

from hvd_deepreduce.torch import horovod, streams  # noqa: E402

GPU = torch.device("cuda", 0)


class Stream(str):
    """By its name."""

    def record_event(self):
        return self


@pytest.fixture
def said(monkeypatch, caplog):
    """What is logged in the first steps of a job."""
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("default"))
    streams._warn_once.cache_clear()

    def job(*, stream="default", nccl=True, on_gpu=True, rank=0, whole=False, over_mpi=False):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(stream))
        monkeypatch.setattr(hvd, "nccl_built", lambda: nccl)
        engine = SimpleNamespace(
            parameters=["a", "b"],
            collectives=SimpleNamespace(speaks=lambda: rank == 0),
            max_bucket_bytes=None if whole else 1000,
            exchange=SimpleNamespace(own_thread=over_mpi),
        )
        carriers = horovod._Carriers(engine, None)
        carriers._ones[GPU] = torch.ones(len(engine.parameters))
        gradient = SimpleNamespace(is_cuda=on_gpu, device=GPU if on_gpu else torch.device("cpu"))
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                for number, name in enumerate(engine.parameters):
                    carriers.of(SimpleNamespace(name=name, number=number), gradient)
        return [record.getMessage() for record in caplog.records]

    yield job
    streams._warn_once.cache_clear()


def test_the_default_stream_is_told_once(said):
    assert said() == [streams.DEFAULT_STREAM]
    assert said() == [streams.DEFAULT_STREAM]  # of another DeepReduce
    assert "with torch.cuda.stream(stream):" in streams.DEFAULT_STREAM


@pytest.mark.parametrize(
    "job",
    [{"stream": "side"}, {"nccl": False}, {"on_gpu": False}, {"rank": 1}, {"whole": True}, {"over_mpi": True}],
    ids=lambda job: next(iter(job)),
)
def test_nothing_is_said_where_nothing_is_lost(said, job):
    assert said(**job) == []


def test_results_that_a_side_stream_does_not_wait_for(said, monkeypatch):
    monkeypatch.setenv("HOROVOD_ENABLE_ASYNC_COMPLETION", "0")
    assert said(stream="side") == []
    monkeypatch.setenv("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
    assert said(stream="side", whole=True) == [streams.NOT_WAITED_FOR]
    assert "Unset the variable" in streams.NOT_WAITED_FOR
