"""Libraries that count the bytes of a collective with 32 bits: here with fewer, which small gradients exceed."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_deepreduce import Config, ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.exchange.reduce_scatter import SlicedSum
from hvd_deepreduce.exchange.two_levels import TwoLevelSum
from hvd_deepreduce.horovod import HorovodCollectives
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.pipeline.bundle import Slice
from tests import cases
from tests.engine.numpy_adapter import Job, NumpyAdapter, ThreadCollectives, run_ranks
from tests.support.simulated_collectives import CollectiveNetwork
from tests.two_levels import PLACES, run

RANKS = 3
MODEL = {"a": ((500,), np.float32), "b": ((500,), np.float32)}
TOP = {"sparsifier": {"name": "topk", "density": 0.1}, "index": "rice", "value": "raw"}
LIMIT = 6000
"""Between the bytes of the ranks' containers and those of their gradients, 12,000; one rank's gradient is within it."""


class Limited(ThreadCollectives):
    most_bytes = LIMIT


def test_horovod_is_limited():
    assert HorovodCollectives.most_bytes == 2**31 - 1


def steps(config, poisoned=(), most_bytes=LIMIT, size=RANKS):
    """What each rank gets in two steps, or its error in the second; and the names of what it has sent."""
    job = Job(size)

    def work(collectives):
        collectives = Limited(job, collectives.rank())
        collectives.most_bytes = most_bytes
        adapter, found = NumpyAdapter(collectives, MODEL, config), []
        for step in range(2):
            given = {name: cases.random(500, seed=10 * step + collectives.rank()) for name in MODEL}
            if step and collectives.rank() in poisoned:
                given["a"][3] = np.nan
            try:
                found.append(adapter.step(given))
            except ContainerError as error:
                return [*found, error]
        return found

    found = run_ranks(size, work, job)
    return found, [[name for name, _ in sent if name.startswith("bucket")] for sent in job.sent]


@pytest.mark.parametrize(("scope", "named"), [("model", ["a"]), ("tensor", ["b", "a"])])
def test_what_fits_comes_as_without_a_limit(scope, named):
    """The model as a whole, and each tensor alone, are too large if nothing is left out of them: they are counted."""
    free, _ = steps({**TOP, "scope": scope}, most_bytes=None)
    limited, names = steps({**TOP, "scope": scope})
    for ours, theirs in zip(limited, free, strict=True):
        assert [step[name].tobytes() for step in ours for name in MODEL] == [
            step[name].tobytes() for step in theirs for name in MODEL
        ]
    counted = [f"bucket.{name}.bytes" for name in named]
    for sent in names:
        assert [name for name in sent if name.endswith(".bytes")] == 2 * counted
        assert sorted(sent) == sorted(2 * (counted + [f"bucket.{name}" for name in named]))


@pytest.mark.parametrize(("most_bytes", "sent"), [(7000, ["bucket.b", "bucket.a"]), (20_000, ["bucket.a"])])
def test_buckets_are_divided_so_that_they_fit(most_bytes, sent):
    _, names = steps({**TOP, "scope": "bucket"}, most_bytes=most_bytes)
    assert names == [2 * sent] * RANKS


def test_one_rank_that_is_not_finite_fits():
    found, _ = steps({**TOP, "scope": "model"}, poisoned=[1])
    assert all(np.isnan(step[1]["a"][3]) for step in found)


def test_more_than_fits_is_an_error_on_all_ranks_before_it_is_sent():
    found, names = steps({**TOP, "scope": "model"}, poisoned=[0, 1])
    errors = [step[1] for step in found]
    assert all(isinstance(error, ContainerError) for error in errors)
    assert len(set(map(str, errors))) == 1
    said = str(errors[0])
    assert "one allgather takes at most 6000: set scope to 'bucket'" in said and "NaN or infinity" in said
    assert names == [["bucket.a.bytes", "bucket.a", "bucket.a.bytes"]] * RANKS


def test_containers_larger_than_their_gradient_are_refused():
    """Raw indices beside the values: 8 bytes an element."""
    config = {"sparsifier": {"name": "topk", "density": 1.0}, "index": "raw", "value": "raw", "scope": "model"}
    found, names = steps(config, most_bytes=13_000)
    assert all("takes at most 13000" in str(error) for step in found for error in step)
    assert names == [["bucket.a"]] * RANKS, "the error, in place of the containers"


def test_of_one_rank_they_are_refused_on_all():
    """The others cannot know, and have begun."""
    config = {"sparsifier": {"name": "threshold", "threshold": 0.5}, "index": "raw", "value": "raw", "scope": "model"}
    job = Job(RANKS)

    def work(collectives):
        collectives = Limited(job, collectives.rank())
        collectives.most_bytes = 13_000
        adapter = NumpyAdapter(collectives, MODEL, config)
        with pytest.raises(ContainerError) as error:
            adapter.step({name: np.full(500, collectives.rank() == 1, np.float32) for name in MODEL})
        return str(error.value)

    assert all("takes at most 13000" in said for said in run_ranks(RANKS, work, job))


def test_sums_of_slices(monkeypatch):
    """The ranks send other elements each, so that the sums have more bytes than what any of them has sent."""
    config = Config.load(
        {**TOP, "sparsifier": {"name": "topk", "density": 0.3}}, exchange="reduce_scatter", scope="model"
    )
    gradients = [np.zeros(300, np.float32) for _ in range(3)]
    for rank, gradient in enumerate(gradients):
        gradient[rank::3] = 1 + cases.random(100) ** 2
    pipeline = Pipeline(config)

    def summed():
        works = [SlicedSum(pipeline, 3, RngKey(3, 1, 7, rank), one) for rank, one in enumerate(gradients)]
        return CollectiveNetwork(3).run([one.steps() for one in works])

    summed()
    monkeypatch.setattr("hvd_deepreduce.exchange.reduce_scatter.MAX_BYTES", 1000)
    with pytest.raises(ContainerError, match="^rank 0 has .* of the sum of its slice, and at most 1000 of all 3 ranks"):
        summed()


def two_levels(gradients):
    pipeline = Pipeline(Config.load(TOP, scope="model"))
    whole = [Slice(pipeline, (0, gradients[0].size), RngKey(0, 1, 2))]
    return run([
        TwoLevelSum(pipeline, place, whole, one).steps() for place, one in zip(PLACES, gradients, strict=True)
    ])  # fmt: skip


def test_two_levels(monkeypatch):
    gradients = [cases.random(1000, seed=rank) for rank in range(4)]
    assert not any(isinstance(one, ContainerError) for one in two_levels(gradients))
    monkeypatch.setattr("hvd_deepreduce.exchange.two_levels.MAX_BYTES", 3500)
    errors = two_levels(gradients)
    assert {str(one) for one in errors} == {
        "a bucket has 4000 bytes, and at most 3500 fit into one collective of the ranks of a node: set scope to "
        "'bucket', and bucket_bytes lower"
    }
    smaller = [one[:850] for one in gradients]
    assert not any(isinstance(one, ContainerError) for one in two_levels(smaller))
    for one in smaller:
        one[7] = np.nan
    monkeypatch.setattr("hvd_deepreduce.exchange.two_levels.MAX_BYTES", 3400)
    errors = two_levels(smaller)
    assert all("at most 3400 of all 2 nodes fit into one allgather" in str(one) for one in errors)
