"""What the adapters of both frameworks must do under Horovod, on several ranks (see common.py)."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from hvd_deepreduce import Config, ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import standalone as wire
from tests import cuda_emulator
from tests.adapters import containers, dgc_job
from tests.adapters.common import LOSSLESS, LOSSY, check_close, on
from tests.case_runner import case
from tests.damaged import decoding_fails


@case
def lossless_equals_dense_with_every_option():
    for number, options in enumerate(on.options):
        dense = on.job(None, **options).run(3)
        check_close(dense, on.job({**LOSSLESS, "min_elements": 100 * (number % 2)}, **options).run(3))


@case
def lossy_equals_the_pipeline_run_by_hand():
    """Each rank repeats all ranks' encoding and decoding from their gradients, which all can compute."""
    job, pipeline = on.job(LOSSY, **on.by_hand), Pipeline(Config.load(LOSSY))
    kept = [[np.zeros(one.size, np.float32) for one in job.values()] for _ in range(on.size())]
    for step in range(4):
        given = [job.gradients(step, rank) for rank in range(on.size())]
        for number, ours in enumerate(job.reduced(step)):
            packed = [
                wire.unpack(pipeline.encode(given[rank][number], kept[rank][number], RngKey(0, number, step, rank)))
                for rank in range(on.size())
            ]
            pipeline.decode(packed, mean := np.empty_like(ours), 1 / on.size())
            assert np.array_equal(ours, mean), (step, number)
        job.apply()
    assert all(np.array_equal(*pair) for pair in zip(job.residuals(), kept[on.rank()], strict=True))
    job.check_same()


@case
def an_error_while_decoding_on_one_rank():
    """The others apply the step, and the next one is an error on all ranks, until a state is loaded."""
    behind = on.rank() == 1
    for scope in ({}, {"scope": "bucket"}, {"scope": "bucket", "exchange": "reduce_scatter"}):
        job = on.job({**LOSSY, **scope}).run(1)
        saved, before = job.saved(), job.flat()
        with on.raises(MemoryError, "no room") if behind else nullcontext(), decoding_fails(behind):
            job.step(1)
        assert np.array_equal(before, job.flat()) == behind
        before = job.flat()
        for step in (2, 3):
            with on.raises(MismatchError, "an error has left 1 rank behind: other ranks may have applied"):
                job.step(step)
        assert np.array_equal(before, job.flat()) and job.engine.failed == behind
        job.load(saved)
        job.run(4, 6)
        job.check_same()


@case
def more_bytes_than_an_allgather_takes():
    """The ranks count what they have first; if it is too much, all raise an error, and none of them has sent it."""
    config = {**LOSSY, "scope": "model"}
    free, job = on.job(config), on.job(config)
    job.engine.collectives.most_bytes = 10_000  # of a model of 10,816
    for step in range(2):
        for ours, theirs in zip(job.reduced(step), free.reduced(step), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    saved = job.saved()
    with on.raises(ContainerError, "and one allgather takes at most 10000: set scope to 'bucket'"):
        job.step(2, np.nan)
    job.load(saved)
    job.run(2, 4)
    job.check_same()


@case
def momentum_of_dgc_equals_the_oracle_and_resumes():
    for scope in dgc_job.SCOPES:
        zeros = {f"p{at}": np.zeros(size) for at, size in enumerate(dgc_job.SIZES)}
        job, results = on.given(zeros, dgc_job.config(scope)), []
        for step, mean in enumerate(dgc_job.means(scope, on.size())):
            if step == 3:
                saved = job.saved()
            results.append(np.concatenate(job.reduced(dgc_job.gradients(step, on.rank()))))
            np.testing.assert_allclose(results[-1], mean, rtol=1e-9, atol=1e-12)
        again = on.given(zeros, dgc_job.config(scope))
        again.load(saved)
        for step in range(3, dgc_job.STEPS):
            results.append(np.concatenate(again.reduced(dgc_job.gradients(step, on.rank()))))
            assert np.array_equal(results[-1], results[step]), (scope, step)
        assert len(set(on.gathered(np.stack(results).tobytes()))) == 1, "the ranks' results differ"


@case
def gradients_on_a_device_equal_those_on_the_host():
    """Parameters and residuals, bit for bit, with NaN on the way and through a checkpoint."""
    if cuda_emulator.available():
        pytest.skip(cuda_emulator.available())
    bucket = {**LOSSY, "scope": "bucket", "bucket_bytes": 5000}
    settings = [LOSSY, {**LOSSY, "value": "fit_poly", "index": {"name": "bloom", "policy": "p1"}}]
    settings += [{**bucket, "selection": "tensor"}, {**LOSSY, "scope": "model"}]
    pairs = {"exchange": {"name": "densestream", "density": 0.1}, "index": None, "value": None}
    settings += on.possible([{**bucket, **pairs}])
    for config in settings:
        for dtype in on.dtypes:
            found = []
            for device in (False, True):
                job = on.job(config, dtype=dtype, device=device).run(2)
                poisoned = job.reduced(2, np.nan if on.rank() == 0 else 1.0)
                assert not any(np.isfinite(one).any() for one in poisoned)
                job.load(job.saved())
                job.run(3, 5)
                job.check_same()
                found.append([one.tobytes() for one in (*job.values(), *job.residuals())])
            assert np.isfinite(job.flat()).all() and found[0] == found[1], config


@case
def containers_and_sums_of_given_gradients():
    """Returned, to be compared with those of the other framework."""
    return containers.of_each_config()
