"""States of P ranks are loaded by Q ranks; the words of a step check."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hvd_deepreduce.config.error_feedback import Residual, ScaledMomentum
from hvd_deepreduce.engine import Parameter, step_check
from hvd_deepreduce.engine.state import reshard

PARAMETERS = {
    "a": Parameter("a", 0, (3, 4), "float32", 7),
    "b": Parameter("b", 1, (5,), "float64", 7),
    "c": Parameter("c", 2, (2,), "float32", 7),
}
MEMORY = Residual()


def state(rank, size, step=7):
    rng = np.random.default_rng(rank)
    residuals = {"a": rng.standard_normal(12, np.float32), "b": rng.standard_normal(5)}
    if rank % 2:  # a parameter that had no gradient on some ranks
        residuals["c"] = rng.standard_normal(2, np.float32)
    return {"rank": rank, "size": size, "steps": dict.fromkeys(PARAMETERS, step), "residuals": residuals}


def total(residuals, name):
    return sum(r[name].astype(np.float64) for r in residuals if name in r)


@pytest.mark.parametrize(("old", "new", "how"), list(product([1, 2, 3, 5], [1, 2, 3, 5], [True, "sum", "mean"])))
def test_the_sum_or_the_mean_is_preserved(old, new, how):
    states = [state(rank, old) for rank in range(old)]
    made = [reshard(iter(reversed(states)), PARAMETERS, rank, new, how, MEMORY) for rank in range(new)]
    assert all(steps == dict.fromkeys(PARAMETERS, 7) for steps, _ in made)
    residuals = [residuals for _, residuals in made]
    scale = new / old if how == "mean" else 1
    for name, parameter in PARAMETERS.items():
        assert all(r[name].dtype == parameter.accumulated_in and r[name].ndim == 1 for r in residuals if name in r)
        before = total([one["residuals"] for one in states], name)
        assert np.allclose(total(residuals, name), scale * before, rtol=1e-6, atol=1e-6)
    if old == new:
        for one, (_, mine) in zip(states, made, strict=True):
            assert all(np.array_equal(one["residuals"][name], mine[name]) for name in one["residuals"])


def test_a_sum_beyond_the_dtype_stays_finite():
    states = [state(rank, 2) for rank in range(2)]
    for one in states:
        one["residuals"]["a"][:2] = np.finfo("f4").max, -np.finfo("f4").max
    _, residuals = reshard(states, PARAMETERS, 0, 1, True, MEMORY)
    assert residuals["a"][:2].tolist() == [np.finfo("f4").max, -np.finfo("f4").max]


def test_a_mean_square_is_the_mean_of_all_ranks():
    """The sum would make votes too small, and zeros those of a new rank too large."""
    states = [{**state(rank, 2), "memory": "scaled_momentum"} for rank in range(2)]
    for one in states:
        one["residuals"]["velocity of a"] = one["residuals"]["a"] ** 2
    for rank, how in product(range(3), (True, "mean")):
        mine = reshard(states, PARAMETERS, rank, 3, how, ScaledMomentum())[1]
        expected = (states[0]["residuals"]["a"] ** 2 + states[1]["residuals"]["a"] ** 2) / 2
        assert np.allclose(mine["velocity of a"], expected) and ("a" in mine) == (rank < 2)


def test_names_that_differ_by_a_wrapper_s_prefix():
    wrapped = {f"module.{name}": one for name, one in PARAMETERS.items()}
    for prefix, names in (("module.", PARAMETERS), ("", wrapped)):
        given = {prefix + name: 7 for name in PARAMETERS}
        with pytest.raises(ValueError, match="they differ by the module. that DistributedDataParallel puts before"):
            reshard([{**state(0, 1), "steps": given, "residuals": {}}], names, 0, 1, True, MEMORY)


def test_more_ranks_than_before_start_with_zero():
    states = [state(rank, 2) for rank in range(2)]
    assert reshard(states, PARAMETERS, 2, 3, True, MEMORY)[1] == {}


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([state(0, 3), state(2, 3)], r"states are missing, of the ranks \[1\]"),
        ([], "states are missing, of the ranks of the checkpoint"),
        ([state(0, 2), state(0, 2)], "rank 0 of 2, beside states of 1 other ranks of 2: give each rank's state"),
        ([state(0, 2), state(1, 3)], "rank 1 of 3, beside states of 1 other ranks of 2"),
        ([state(3, 2)], "rank 3 of 2, beside"),
        ([state(0, 2), state(1, 2, step=8)], "of different steps"),
        ([state(0, 2), {"rank": 1}], "has no residuals, size, steps"),
        ([state(0, 2), 5], "this is a int"),
        ([state(0, 2), {**state(1, 2), "residuals": {"a": np.ones(3, "f4")}}], "residual of a has 3 elements"),
        ([state(0, 2), {**state(1, 2), "residuals": {"a": np.full(12, np.nan, "f4")}}], "contains NaN"),
        (state(0, 1), "but one dict was given: give a list"),
        (5, "but one int was given"),
    ],
    ids=str,
)
def test_states_that_cannot_be_loaded(states, message):
    """On every rank, also where the wrong state belongs to another one."""
    for rank in range(2):
        with pytest.raises(ValueError, match=message):
            reshard(states, PARAMETERS, rank, 2, True, MEMORY)


def test_how():
    with pytest.raises(ValueError, match="reshard is average; it must be True, False, 'sum' or 'mean'"):
        reshard([], PARAMETERS, 0, 1, "average", MEMORY)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_step_checks(size):
    digests = [0, 1, 0xFFFF, 0x10000, 0xDEADBEEF, 0xFFFFFFFF]

    def meet(said, words=slice(4)):
        return step_check.outcome(sum((step_check.vote(*one) for one in said), np.zeros(step_check.WORDS)), size)[words]

    for digest in digests:
        assert meet([(digest, True)] * size) == (0, 0, True, 0)
        assert meet([(digest, True)] * (size - 1) + [(digest, True, True)]) == (0, 0, True, 1)
        assert meet([(digest, True)] * (size - 1)) == (1, 0, True, 0)
        assert meet([(digest, True)] * (size - 1) + [(digest, False)]) == (0, 1, True, 0)
        for other in digests:
            if other != digest and size > 1:
                assert meet([(digest, True)] * (size - 1) + [(other, True)]) == (0, 0, False, 0)

    said = [(7, True, False, (0, 0), {"step": 4, "fragment": 0}, False, True)] * (size - 1)
    assert meet([*said, (7, True, False, (0, 0), {"fragment": 0, "step": 4})], slice(6, None)) == (True, 0, size - 1)
    assert meet([*said, (7, True, False, (0, 0), {"step": 5}, True)], slice(6, None)) == (size == 1, 1, size - 1)
