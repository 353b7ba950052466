"""What the adapters for PyTorch must do, under Horovod and in DDP, on several ranks (see common.py)."""

from __future__ import annotations

import tempfile
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_deepreduce.engine import dense_or_compressed
from hvd_deepreduce.tools import gradient_file
from hvd_deepreduce.torch import Capture, SignMomentum
from tests.adapters import calls, containers, timelines, votes_job
from tests.adapters.common import LOSSLESS, LOSSY, Ledger, on
from tests.adapters.optimizer_warnings import heard
from tests.adapters.torch_job import network
from tests.case_runner import case


@case
def a_job_that_chooses_sends_all_of_its_gradients():
    for config, dtype in on.choosing:
        with pytest.MonkeyPatch.context() as patch:
            for name, steps in {"BLOCK": 3, "BLOCKS": 4, "AGAIN": 8}.items():
                patch.setattr(dense_or_compressed, name, steps)
            faster = config == {"scope": "bucket"}  # a dense step seems to be
            if faster:
                patch.setattr(dense_or_compressed.Choice, "vote", lambda self: (7, 8) if self.agreeing else (0, 0))
            job = on.job({**LOSSY, **config, "mode": "auto"}, dtype=dtype)
            ledger, whole = Ledger(job), []
            for step in range(dense_or_compressed.WARM_UP + 27):
                ledger.step(step)
                whole.append(job.last("bytes_sent") >= job.last("dense_bytes"))
            ledger.check(1e-5 if dtype == torch.float32 else 0.05)
            trial = [number // 3 % 2 == 0 for number in range(12)]
            warm_up, whole = whole[: dense_or_compressed.WARM_UP], whole[dense_or_compressed.WARM_UP :]
            begun, ended, again = whole[:13], whole[13:20], whole[20:]
            assert not any(warm_up) and begun == [*trial, False]
            assert len(set(ended)) == 1 and again == trial[:7], (ended, again)
            assert ended[0] or not faster
            assert job.compression.stats()["total"]["steps"] == dense_or_compressed.WARM_UP + 27
            said = set(on.gathered(job.compression.stats().said))
            assert len(said) == 1 and ("gradients are dense" in said.pop()) == ended[0]
            job.check_same()
            job.close()


@case
def a_compiled_model_has_the_names_of_the_model_itself():
    """In overrides, residuals and states, also in those of earlier versions, which had the prefix."""
    config = {**LOSSY, "selection": "tensor", "overrides": {"0.*": {"density": 0.5}}}
    model = network()
    both = model, torch.compile(network(), backend="eager")
    job, compiled = (on.job(config, model=one, **on.in_one) for one in both)
    job.run(2), compiled.run(2)
    np.testing.assert_array_equal(job.flat(), compiled.flat())
    state = compiled.compression.state_dict()
    assert list(state["steps"]) == [name for name, _ in model.named_parameters()]
    for name, kept in state["residuals"].items():
        assert np.array_equal(kept, job.compression.residual(name)) and kept.any()
        assert np.array_equal(kept, compiled.compression.residual(f"_orig_mod.{name}"))
    former = {key: {f"_orig_mod.{name}": one for name, one in state[key].items()} for key in ("steps", "residuals")}
    job.compression.load_state_dict({**state, **former})
    job.run(2, 4), compiled.run(2, 4)
    np.testing.assert_array_equal(job.flat(), compiled.flat())
    job.check_same()


@case
def a_step_takes_few_python_calls():
    """What does not change from step to step is made once, for gradients that are copied alone, and together."""
    for width, most, each in on.few_calls:
        counts = {}
        for layers in (1, 11):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            job = on.job({}, model=model, **on.in_one)

            def step(number, job=job, width=width):
                job.optimizer.zero_grad()
                generator = torch.Generator().manual_seed(number * on.size() + on.rank())
                job.called(torch.randn(8, width, generator=generator)).square().mean().backward()
                job.optimizer.step()

            seen = calls.of_a_step(step)
            counts[layers] = len(seen)
            assert job.last("bytes_sent") > 0
            assert layers > 1 or len(seen) <= most, seen
            job.close()
        assert counts[11] - counts[1] <= 10 * each, counts


@case
def the_timeline_has_the_spans_of_each_bucket():
    config = {**LOSSY, "scope": "bucket", **on.small_buckets}
    timelines.check(on.rank(), lambda: on.job(config).run(3).close(), on.spans)


@case
def an_optimizer_that_loses_under_the_config_is_told_once():
    def unnamed(parameters, lr):
        """Of another library: known by its settings alone."""
        return torch.optim.SGD([{"params": list(parameters), "betas": (0.9, 0.99)}], lr=lr)

    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    told = [(adamw, LOSSY, "AdamW"), (torch.optim.Adafactor, LOSSY, "Adafactor"), (unnamed, LOSSY, "SGD")]
    others = [(sgd, LOSSY, ""), *((adamw, config, "") for config in (LOSSLESS, "natural", {**LOSSY, "mode": "auto"}))]
    for make, config, name in told + others:
        job = on.job(config, make=make)
        with heard() as texts:
            job.run(3)
        assert len(texts) == (bool(name) and on.rank() == 0), texts
        assert all(f"the optimizer is {name}, and" in one and on.advice in one for one in texts)
        job.close()


@case
def sign_momentum_steps_as_a_simulation_of_all_ranks():
    """Parameters, bit for bit, also of a resumed job, by both exchanges; and no warning."""
    rate, decay = 0.125, 0.1
    first = {f"p{at}": np.linspace(-1, 1, size) for at, size in enumerate(votes_job.SIZES)}

    def made(scope, exchange):
        config = {**votes_job.config(scope), "exchange": exchange}
        return on.given(first, config, make=lambda params, lr: SignMomentum(params, rate, decay))

    for scope, exchange in (*((scope, "allgather") for scope in votes_job.SCOPES), ("bucket", "reduce_scatter")):
        job, values = made(scope, exchange), np.concatenate(list(first.values()))
        with heard() as texts:
            for step, total in enumerate(votes_job.sums(scope, on.size())):
                if step == 3:
                    saved, job = job.saved(), made(scope, exchange)
                    job.load(saved)
                job.reduced(votes_job.gradients(step, on.rank()))
                job.apply()
                values = values * (1 - rate * decay) - rate * np.sign(total)
                assert np.array_equal(np.concatenate(job.values()), values), (scope, exchange, step)
        job.check_same()
        assert not texts
        broken = [one.copy() for one in votes_job.gradients(0, on.rank())]
        broken[0][0] = np.nan if on.rank() == 0 else 1.0
        job.reduced(broken)
        job.apply()
        assert np.isnan(job.values()[0][0]), "a step of full size by gradients that nobody sees are broken"
        job.close()


@case
def an_optimizer_with_momentum_beside_that_of_the_config():
    """It is refused on all ranks, and one without takes steps. So is one that wants signs of a momentum."""
    votes, nesterov = votes_job.config("bucket"), partial(torch.optim.SGD, momentum=0.9, nesterov=True)
    for config, make, match in (
        ({**LOSSY, "memory": "dgc"}, nesterov, "memory is 'dgc'.*has momentum=.* use torch.optim.SGD"),
        (votes, torch.optim.AdamW, "memory is 'scaled_momentum'.*has betas=.*torch.SignMomentum"),
        (LOSSY, SignMomentum, "optimizer is .*SignMomentum.*memory is 'residual': use the preset 'sign_momentum'"),
    ):
        job = on.job(config, make=make)
        before = job.flat()
        with pytest.raises(ValueError, match=match):
            job.step(0)
        assert np.array_equal(job.flat(), before)
        job.close()
        after = register_optimizer_step_pre_hook(lambda *_: None)  # PyTorch calls it if ours has left the hooks alone
        make(job.model.parameters()).step()  # the config is that of no job any more
        after.remove()
    on.job(votes, make=torch.optim.SGD).run(2).check_same()


@case
def a_capture_is_what_a_rank_selects_from():
    for scope in ("tensor", "bucket"):
        folder, rank = tempfile.mkdtemp(), on.rank()
        job = on.job({**LOSSY, "scope": scope})
        capture = Capture(job.called, f"{folder}/of.npz", [3, 4], compression=job.compression, all_ranks=True)
        job.run(3)
        own, kept = np.concatenate(job.gradients(3)), np.concatenate(job.residuals())
        job.run(3, 5)
        files = [f"{folder}/of_rank{rank}_step{step}.npz" for step in (3, 4)]
        assert [str(file) for file in capture.files] == files
        gradient, total = (gradient_file.read(files[1], kind, rank) for kind in ("gradient", "accumulator"))
        np.testing.assert_allclose(gradient, own, rtol=1e-5, atol=1e-7)
        assert gradient_file.parameters(files[1])[0] == [name for name, _ in job.model.named_parameters()]
        assert kept.any() and np.array_equal(total, gradient + kept)
        job.close()


@case
def containers_in_equal_buckets():
    """Returned: test_ddp.py compares those under Horovod and in DDP."""
    return containers.of_equal_buckets()
