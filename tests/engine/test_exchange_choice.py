"""``exchange: auto``: the same choice on all ranks, from measured or given numbers, and the sums that belong to it."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_deepreduce import Config, ConfigError
from hvd_deepreduce.exchange import autotune
from tests.engine.numpy_adapter import Job, NumpyAdapter, ThreadCollectives, run_ranks

MODEL = {"w": ((40, 50), np.float32), "b": ((500,), np.float32)}
SLOW = {"bandwidth": 0.0001, "latency": 0}
FAR = {"bandwidth": 1000, "latency": 1000}


def config(**auto):
    return {"sparsifier": {"name": "topk", "density": 0.1}, "exchange": {"name": "auto", **auto}}


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in MODEL.items()}


def job(ranks: int, given, steps: int = 3, states=None):
    """What each rank has after the steps: its adapter and its last means; and the job."""
    messages = Job(ranks)

    def rank_of(collectives: ThreadCollectives):
        rank = collectives.rank()
        adapter = NumpyAdapter(collectives, MODEL, given)
        if states is not None:
            adapter.engine.load_state_dict(states[rank])
        for step in range(steps):
            means = adapter.step(gradients(rank, step))
        return adapter, means

    return run_ranks(ranks, rank_of, messages), messages


@pytest.mark.parametrize(("network", "name"), [(SLOW, "reduce_scatter"), (FAR, "allgather")])
def test_the_cheaper_exchange_is_chosen_and_gives_its_own_sums(network, name):
    chosen, _ = job(6, config(density=0.01, **network))
    plain = {"name": name, **({"density": 0.01} if name == "reduce_scatter" else {})}
    expected, _ = job(6, {**config(), "exchange": plain, "scope": "model"})
    for (adapter, means), (other, others) in zip(chosen, expected, strict=True):
        engine = adapter.engine
        assert engine.config.exchange.name == "auto" and engine.exchange.several == (name == "reduce_scatter")
        said = str(engine.report())
        assert f"exchange is auto: {name}, since the model predicts allgather " in said and "(given)" in said
        for key in means:
            np.testing.assert_array_equal(means[key], others[key])
        for key, residual in other.engine.state_dict()["residuals"].items():
            np.testing.assert_array_equal(engine.state_dict()["residuals"][key], residual)


@pytest.mark.parametrize("byte, rate", [(0.0, None), (1e-15, None), (1e-12, None), (1e-9, "8 Gbit/s")])
def test_a_rate_that_cannot_be_measured_is_said_to_be(byte, rate, monkeypatch):
    """Large messages that take no longer than small ones are no 8e+06 Gbit/s."""
    monkeypatch.setattr(autotune, "measured", lambda collectives, most: (1e-5, byte))
    chosen, _ = job(2, config(density=0.01), steps=1)
    said = str(chosen[0][0].engine.report())
    assert f"10 us a message and {rate or 'a rate that is too high to be measured'} (measured)" in said


def test_ranks_that_measure_differently_choose_the_same(monkeypatch):
    # Rank 0 would choose reduce_scatter, and the others the allgather.
    monkeypatch.setattr(
        autotune, "measured", lambda collectives, most: (1e-3, 1e-12) if collectives.rank() else (1e-12, 1e-3)
    )
    found, _ = job(5, config(density=0.01))
    assert {adapter.engine.report().said for adapter, _ in found} == {found[0][0].engine.report().said}
    assert "(measured)" in found[0][0].engine.report().said and not found[0][0].engine.exchange.several


def test_it_is_measured_once_and_no_later_step_says_more(monkeypatch):
    # Ranks that are threads copy within a cache: now and then, large messages take no longer than small ones.
    real = autotune.measured
    monkeypatch.setattr(autotune, "measured", lambda collectives, most: (real(collectives, most)[0], 1e-9))
    _, one = job(3, config(), steps=1)
    found, three = job(3, config(), steps=3)
    of = lambda messages: [name for name, _ in messages.sent[0]]  # noqa: E731
    first, later = of(one), of(three)[len(of(one)) :]
    assert sum(name == "the exchange's measurement" for name in first) == 2 + 7 + 3
    assert first.count("the exchange's choice") == 1 and not any(name.startswith("the exchange") for name in later)
    assert "Gbit/s (measured)" in found[0][0].engine.report().said


def test_a_state_goes_from_one_choice_to_another():
    before, _ = job(6, config(density=0.01, **SLOW))
    states = [adapter.engine.state_dict() for adapter, _ in before]
    after, _ = job(6, config(density=0.01, **FAR), steps=1, states=states)
    for name in MODEL:
        came = sum(state["residuals"][name].astype(np.float64) for state in states)
        came = came + sum(gradients(rank, 0)[name].reshape(-1) for rank in range(6))
        left = sum(adapter.engine.state_dict()["residuals"][name].astype(np.float64) for adapter, _ in after)
        np.testing.assert_allclose(6 * after[0][1][name].reshape(-1) + left, came, atol=1e-4)


def test_mode_auto_and_exchange_auto_say_both():
    (adapter, _), *_ = job(2, {**config(), "mode": "auto"}, steps=2)[0]
    said = adapter.engine.report().said.splitlines()
    assert len(said) == 2 and said[0].startswith("exchange is auto") and said[1].startswith("mode is auto")


def test_one_rank_needs_no_choice():
    (adapter, _), *_ = job(1, config())[0]
    assert "as there is one rank" in adapter.engine.report().said


def test_a_rank_that_says_no_numbers_is_an_error_on_all(monkeypatch):
    monkeypatch.setattr(autotune, "element_bytes", lambda config, numel: float("nan"))
    with pytest.raises(RuntimeError, match="did not say what it has measured"):
        job(2, config())


def test_what_is_possible():
    auto = Config.load(config(density=0.02))
    assert list(autotune.candidates(auto, False)) == ["allgather", "reduce_scatter"]
    found = autotune.candidates(auto, True)
    stream = found["densestream"].exchange
    assert (stream.value, stream.bits, stream.density) == ("qsgd", 7, 0.02)
    assert autotune.candidates(Config.load(config(), value="half"), True)["densestream"].exchange.value == (
        "bfloat16"
    )
    assert "densestream" not in autotune.candidates(Config.load(config(), memory="dgc"), True)
    assert "densestream" not in autotune.candidates(Config.load(config(), joint="skcompress"), True)
    with pytest.raises(ConfigError, match="scope is 'tensor' and exchange is 'auto'"):
        Config.load(config(), scope="tensor")
    with pytest.raises(ConfigError, match="exchange.density is 0.1 and has no effect"):
        Config.load(sparsifier="none", exchange={"name": "auto", "density": 0.1})
