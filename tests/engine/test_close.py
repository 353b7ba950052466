"""What is left of an engine that is closed, or that is gone."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.engine.numpy_adapter import NumpyAdapter, run_ranks
from tests.engine.test_step import LOSSY, MODEL, SCOPES, every_scope, gradients_of


@every_scope
def test_a_closed_engine_holds_nothing_and_says_so(scope):
    def work(collectives):
        closed = []
        collectives.close = lambda: closed.append(True)
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **scope})
        engine = adapter.engine
        adapter.step(gradients_of(0, collectives.rank()))
        state = engine.state_dict()
        residuals = [weakref.ref(residual) for residual in engine._memory._residuals.values()]
        assert residuals
        engine.close()
        engine.close()
        gc.collect()
        assert closed and not [one for one in residuals if one() is not None]
        assert engine.stats.to_dict()["total"]["steps"] == 1 and engine.config.scope == scope["scope"]
        for use in (
            engine.state_dict,
            lambda: engine.load_state_dict(state),
            lambda: engine.set_config(seed=1),
            lambda: adapter.step(gradients_of(1, collectives.rank())),
        ):
            with pytest.raises(RuntimeError, match=r"this was closed, by close\(\): create a new one on every rank"):
                use()
        assert len(state["steps"]) == len(MODEL)  # what was saved before is the user's

    run_ranks(2, work)


def test_close_in_the_midst_of_a_step():
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**LOSSY, **SCOPES[0]})
        ticket = adapter.start("a", gradients_of(0, collectives.rank())["a"])
        adapter.engine.close()
        with pytest.raises(RuntimeError, match="this was closed"):
            adapter.reducer.finish(ticket, 1.0)

    run_ranks(2, work)
