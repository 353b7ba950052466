"""What every adapter must do on several ranks (see common.py)."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from hvd_deepreduce import ContainerError
from hvd_deepreduce.engine import MismatchError
from tests.adapters.common import LOSSLESS, LOSSY, Ledger, check_close, on
from tests.adapters.reports import Heard
from tests.adapters.scopes import ranks_of_node
from tests.case_runner import case
from tests.damaged import damage, repair


@case
def scopes_and_exchanges_equal_dense():
    for number, scope in enumerate(on.possible()):
        options = on.options[number % len(on.options)]
        dense = on.job(None, **options).run(3)
        for feedback in (True, False):
            if "density" in (exchange := scope.get("exchange", "")):
                scope = {**scope, "exchange": {**exchange, "density": 1.0}}
            ours = on.job({**LOSSLESS, **scope, "error_feedback": feedback}, **options).run(3)
            check_close(dense, ours)
            total = ours.compression.stats()["total"]
            assert total["steps"] == 3 and total["bytes_sent"] > 0
            assert bool(ours.compression.state_dict()["residuals"]) == feedback


@case
def what_is_not_sent_is_kept():
    """What all ranks sent and what they keep is what came; and a resumed run equals an unbroken one."""
    for scope in on.possible():
        job = on.job({**LOSSY, **scope})
        ledger = Ledger(job)
        for step in range(6):
            if step == 4:
                saved = job.saved()
            ledger.step(step)
        assert ledger.check().any(), scope
        total = job.compression.stats()["total"]
        assert 0 < total["bytes_sent"] < total["dense_bytes"] and total["steps"] == 6
        job.check_same()
        final = job.flat()
        assert np.array_equal(job.resumed(saved).run(4, 6).flat(), final), scope


@case
def two_levels():
    """What goes between nodes is what one rank would send."""
    local = ranks_of_node(on.size())
    for number, scope in enumerate(on.levels):
        options = on.options[number % len(on.options)]
        lossless = {**LOSSLESS, **scope, "exchange": "allgather", "hierarchical": local}
        check_close(on.job(None, **options).run(2), on.job(lossless, **options).run(2))
        job = on.job({**LOSSY, **scope, "hierarchical": local})
        ledger = Ledger(job)
        for step in range(4):
            if step == 2:
                saved = job.saved()
            ledger.step(step)
        kept, final = ledger.check(), job.flat()
        assert kept.any() == (on.size() == 4) and np.count_nonzero(kept) < 0.6 * kept.size
        job.check_same()
        stats = job.compression.stats()["last_step"]
        between = stats["bytes_sent"] - stats["inside_bytes_sent"]
        assert stats["inside_bytes_sent"] == stats["inside_bytes_received"] > 0
        assert between < 0.3 * stats["dense_bytes"], stats
        resumed = job.resumed(saved).run(2, 4)
        assert np.array_equal(resumed.flat(), final), scope
        poisoned = resumed.reduced(4, np.nan if on.rank() == on.size() - 1 else 1.0)
        assert not any(np.isfinite(one).any() for one in poisoned)
        assert all(np.isfinite(one).all() for one in resumed.residuals())
        with pytest.raises(ValueError, match="hierarchical is .* and cannot be changed to False after the first step"):
            resumed.compression.set_config(hierarchical=False)


@case
def nan_and_infinity_reach_every_rank():
    for poison in (np.nan, np.inf):
        job = on.job(LOSSY).run(2)
        before = copy.deepcopy(job.residuals())
        assert not np.isfinite(np.concatenate(job.reduced(2, poison if on.rank() == 1 else 1.0))).all()
        if on.rank() == 1:  # where the gradient was not finite
            assert all(np.array_equal(*pair) for pair in zip(before, job.residuals(), strict=True))
        job.run(3, 5)
        assert np.isfinite(job.flat()).all()
        job.check_same()


@case
def the_config_changes_between_steps():
    job = on.job(LOSSY).run(3)
    sparse, before = job.last("bytes_sent"), job.compression.config
    job.compression.set_config(sparsifier={"name": "topk", "density": 0.5})
    job.run(3, 5)
    assert job.last("bytes_sent") > 2 * sparse
    assert job.compression.config.model_copy(update={"sparsifier": before.sparsifier}) == before
    job.check_same()


@case
def a_config_changed_on_one_rank_only():
    """Ranks that wait for different containers would wait for ever. No gradient is applied, and no residual sent."""
    for before, after in on.changes:
        if len(list(on.possible((before, after)))) < 2:
            continue
        job = on.job({**LOSSY, **before}).run(2)
        values = job.flat()
        if on.rank() == 1:
            job.compression.set_config(**after)
        with on.raises(MismatchError, r"config\.\w+ is .* on ranks? 0.* on rank 1"):
            job.step(2)
        assert np.array_equal(job.flat(), values)


@case
def configs_differ():
    last = on.size() - 1
    config = {**LOSSY, "value": {"name": "qsgd", "bits": 4 if on.rank() == last else 7}}
    for mode in on.modes:
        with on.raises(MismatchError, rf'config.value is .*"bits": 7.* on rank.* 0.*"bits": 4.* on rank {last}'):
            on.job(config, **mode).step(0)


@case
def a_corrupt_container():
    job = on.job(LOSSY).run(2)
    values = job.flat()
    if on.rank() == 1:
        damage(job.engine.pipeline)
    with on.raises(ContainerError, "the container of rank 1 cannot be read: its checksum"):
        job.step(2)
    assert np.array_equal(values, job.flat())
    if on.rank() == 1:
        repair(job.engine.pipeline)
    job = on.job(LOSSY).run(2) if on.ends else job.run(3, 5)
    assert not np.array_equal(values, job.flat()) or on.ends
    job.check_same()


@case
def callbacks_and_measured_residuals():
    """In scope tensor, in a bucket, and by slices. An error in a callback leaves the step whole."""
    slices = {"scope": "bucket", "exchange": {"name": "reduce_scatter", "density": None}}
    for scope in ({"scope": "tensor"}, {"scope": "bucket"}, slices):
        job = on.job({**LOSSY, **scope})
        heard = Heard(job.compression)
        job.run(4)
        own, before = job.gradients(4), copy.deepcopy(job.residuals())
        job.step(4)
        heard.check(*(dict(zip(job.names(), parts, strict=True)) for parts in (before, own)))
        job.check_same()
        assert "residual / gradient: median" in str(job.compression.stats())
        for wrong in (0, 1.5, True):
            with pytest.raises(ValueError, match="it must be a number of steps"):
                job.compression.add_callback(print, every=wrong)
        with pytest.raises(TypeError, match="must be a function"):
            job.compression.add_callback(None)
