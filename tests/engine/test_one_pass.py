"""Gradients that stay where they are until their bucket is encoded, and residuals that change places with other memory:
what is sent and kept is what it is where every residual is changed in place."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from hvd_deepreduce.engine import Engine
from hvd_deepreduce.pipeline import Pipeline, bundle
from tests.engine.numpy_adapter import NumpyAdapter, run_ranks

MODEL = {"a": ((200, 30), "f4"), "b": ((30,), "f4"), "c": ((700,), "f4"), "d": ((0,), "f4"), "e": ((90, 100), "f4")}
RANKS, STEPS = 2, 6
FUSED = {"sparsifier": {"name": "topk", "density": 0.05}, "index": "rice_blocks", "value": {"name": "qsgd", "bits": 7}}
SCOPES = [
    {"scope": "tensor", "min_elements": 0},
    {"scope": "bucket", "bucket_bytes": 30_000},
    {"scope": "model"},
    {"scope": "model", "overrides": {"b": {"index": "raw"}}, "selection": "tensor"},
    {"scope": "model", "overrides": {"c": {"error_feedback": False}}, "selection": "tensor"},
]
every_scope = pytest.mark.parametrize("scope", SCOPES, ids=str)


def gradients_of(step, rank):
    rng = np.random.default_rng([step, rank])
    found = {name: (rng.standard_normal(shape) ** 3).astype(dtype) for name, (shape, dtype) in MODEL.items()}
    if step == 2 and rank == 1:
        found["a"][5, 5] = np.nan
    if step >= 3:
        del found["c" if rank else "b"]  # zeros are sent
    if step == 4:
        found["e"] = found["e"].T.copy().T  # not contiguous, so it is copied at once
    return found


def kept(engine):
    return {name: residual.tobytes() for name, residual in engine.state_dict()["residuals"].items()}


def one_by_one(adapter, rank):
    engine, found = adapter.engine, []
    for step in range(STEPS):
        came, tickets = gradients_of(step, rank), []
        for name, gradient in came.items():
            tickets.append(adapter.start(name, gradient))
            engine.stats.measuring = step == 5  # for which gradients are copied
        for ticket in tickets:
            adapter.reducer.finish(ticket, 0.5)
        engine.stats.end_step()
        found += [{name: one.tobytes() for name, one in came.items()}, kept(engine)]
    return found


def divisions(step):
    """Whole buckets of other parameters in every other step."""
    return [["a", "b"], ["c", "d", "e"]] if step % 2 else [["a", "b", "c"], ["d", "e"]]


def in_whole_buckets(adapter, rank):
    parameters, found = adapter.engine.parameters, []
    adapter.engine.agree([(p.name, p.shape, p.dtype) for p in parameters.values()])
    for step in range(STEPS):
        came = gradients_of(step % 3, rank)
        tickets = []
        for number, names in enumerate(divisions(step // 2)):
            vector = np.concatenate([came[name].reshape(-1) for name in names])
            tickets.append(adapter.reducer.start_bucket([parameters[name] for name in names], number, vector))
        found += [adapter.reducer.finish(ticket, 0.5).tobytes() for ticket in tickets]
        found.append(kept(adapter.engine))
    return found


@every_scope
@pytest.mark.parametrize("way", [one_by_one, in_whole_buckets])
def test_the_same_as_in_place(way, scope):
    if way is in_whole_buckets and scope["scope"] == "tensor":
        scope = {"scope": "bucket", "selection": "tensor"}
    elsewhere = []
    encode = bundle.encode

    def noted(*given):
        elsewhere.append(given[-1] is not None)
        return encode(*given)

    def work(collectives):
        return way(NumpyAdapter(collectives, MODEL, {**FUSED, **scope}), collectives.rank())

    with patch.object(bundle, "encode", noted):
        found = run_ranks(RANKS, work)
        # Gradients that are not contiguous, or measured, are copied into their bucket, whose residual changes in place.
        # So it does where a gradient of the bucket is not encoded by native calls.
        fused, whole = "overrides" not in scope, way is in_whole_buckets
        assert any(elsewhere) == (fused or whole) and all(elsewhere) == (fused and whole), elsewhere
        elsewhere.clear()
        with patch.object(Engine, "in_one_pass", lambda *_: False):
            assert run_ranks(RANKS, work) == found
        assert not any(elsewhere)


@every_scope
def test_results_are_apart_from_residuals(scope):
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**FUSED, **scope})
        parameters = adapter.engine.parameters
        for step in range(4):
            came = gradients_of(step % 2, collectives.rank())
            if not step:
                adapter.engine.agree([(p.name, p.shape, p.dtype) for p in parameters.values()])
            tickets = [adapter.reducer.start(parameters[name], came[name], True) for name in MODEL]
            results = [adapter.reducer.finish(ticket, 0.5) for ticket in tickets]
            before = kept(adapter.engine)
            for result in results:  # as an optimizer may
                result[...] = np.nan
            assert kept(adapter.engine) == before

    run_ranks(RANKS, work)


@pytest.mark.parametrize("whole", [False, True])
def test_an_error_on_the_way_leaves_the_residual(whole):
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**FUSED, "scope": "bucket", "bucket_bytes": 10**6})
        way = in_whole_buckets if whole else one_by_one
        way(adapter, 0)
        before, encode = kept(adapter.engine), Pipeline.encode

        def failing(*given, **settings):
            encode(*given, **settings)
            raise MemoryError("no room")

        adapter.engine.stats.measuring = False
        with patch.object(Pipeline, "encode", failing), pytest.raises(MemoryError, match="no room"):
            way(adapter, 0)
        assert kept(adapter.engine) == before

    run_ranks(1, work)
