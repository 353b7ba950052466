import numpy as np
import pytest

from hvd_deepreduce import Config, ConfigError
from hvd_deepreduce.engine import Engine, Parameter, dense_or_compressed, step_check
from hvd_deepreduce.engine.dense_or_compressed import AGAIN, BLOCK, BLOCKS, WARM_UP, Choice
from tests.engine.numpy_adapter import Job, ThreadCollectives

TRIAL = BLOCK * BLOCKS


def run(ranks, steps, seconds):
    """Lets the ranks' choices take steps; returns whether each step was dense, by rank.

    ``seconds(rank, step, dense)`` is how long a step takes.
    """
    clocks, kinds = [0.0] * len(ranks), [[] for _ in ranks]
    for step in range(steps):
        words = []
        for rank, one in enumerate(ranks):
            one.begin_step(clocks[rank])
            kinds[rank].append(one.dense)
            clocks[rank] += seconds(rank, step, one.dense)
            words.append(step_check.vote(0, True, False, one.vote()))
        heard = step_check.outcome(sum(words), len(ranks))
        for one in ranks:
            one.tally(heard.dense, heard.compressed, len(ranks))
    return kinds


def test_a_state_that_is_loaded_in_dense_steps_is_sent_in_the_next_one():
    one = Parameter("a", 0, (4,), "float32")
    engine = Engine(Config.load({"mode": "auto", "min_elements": 0}), ThreadCollectives(Job(1), 0), [one])
    engine.choice = Choice(dense=True)
    parameter, state = engine.parameters["a"], engine.state_dict()
    state["residuals"] = {"a": np.ones(4, np.float32)}
    for _ in range(2):
        engine.load_state_dict(state)
        assert engine.to_flush(parameter)
        total = engine.flush(parameter, np.zeros(4, np.float32))
        engine.flushed(parameter, total, total.copy())
        assert not engine.to_flush(parameter)


@pytest.mark.parametrize("dense", [0.010, 0.030])
def test_the_faster_kind_is_kept_and_tried_again(dense):
    ranks = [Choice() for _ in range(3)]
    steps = WARM_UP + TRIAL + 1 + AGAIN
    kinds = run(ranks, steps, lambda rank, step, whole: dense if whole else 0.020)
    assert kinds[0] == kinds[1] == kinds[2]
    kept = dense < 0.020
    trial = [number // BLOCK % 2 == 0 for number in range(TRIAL)]
    assert kinds[0] == [False] * WARM_UP + trial + [False] + [kept] * (AGAIN - 1) + [True]
    for one in ranks:
        assert (one.decided, one.trials) == (True, 1)
        assert one.dense_ms == pytest.approx(1e3 * dense) and one.compressed_ms == pytest.approx(20)
        assert ("are dense" in one.sentence()) == kept


def test_ranks_that_measure_different_times_decide_the_same():
    # On rank 0 dense is faster, on rank 1 compressed, by more.
    times = {(0, True): 0.010, (0, False): 0.012, (1, True): 0.019, (1, False): 0.012}
    ranks = [Choice(), Choice()]
    kinds = run(ranks, WARM_UP + TRIAL + 10, lambda rank, step, whole: times[rank, whole])
    assert kinds[0] == kinds[1] and not any(kinds[0][WARM_UP + TRIAL :])
    assert (ranks[0].dense_ms, ranks[0].compressed_ms) == pytest.approx((14.5, 12.0))


def test_a_change_of_kinds_and_a_slow_step_do_not_count():
    def seconds(rank, step, whole):
        at = step - WARM_UP
        slow = at in (BLOCK + 1, 1) or at % BLOCK == 0
        return 9.0 if slow else 0.010 if whole else 0.020

    ranks = [Choice()]
    run(ranks, WARM_UP + TRIAL + 1, seconds)
    assert (ranks[0].dense_ms, ranks[0].compressed_ms) == pytest.approx((10, 20))


def test_the_second_trial_may_decide_otherwise():
    ranks = [Choice()]
    first = WARM_UP + TRIAL + AGAIN
    kinds = run(ranks, 2 * first, lambda rank, step, whole: 0.010 if whole == (step < first) else 0.020)
    assert kinds[0][first - 1] and not kinds[0][-1] and ranks[0].trials == 2


def test_a_compressed_step_forgets_which_residuals_were_sent():
    one = Choice()
    run([one], WARM_UP + 1, lambda *_: 0.01)
    one.flushed.add("a")
    run([one], BLOCK - 1, lambda *_: 0.01)
    assert one.dense and one.flushed == {"a"}
    run([one], 1, lambda *_: 0.01)
    assert not one.dense and not one.flushed


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"memory": {"name": "dgc", "momentum": 0.9}}, "mode is 'auto', and memory is 'dgc'"),
     ({"local": {"every": 4}}, "mode is 'auto', and the updates of LocalSGD"),
     ({"mode": "sometimes"}, "mode is 'sometimes'")],
)  # fmt: skip
def test_settings_that_do_not_go_together(settings, said):
    with pytest.raises(ConfigError, match=said):
        Config.load({"mode": "auto", **settings})


def test_the_constants_leave_steps_to_count():
    block, blocks = dense_or_compressed.BLOCK, dense_or_compressed.BLOCKS
    assert block >= 3 and blocks % 2 == 0 and dense_or_compressed.AGAIN > 10 * block * blocks
