"""When residuals are measured."""

from hvd_deepreduce.engine.stats import Wishes


def test_residuals_are_measured_in_the_next_step_and_then_in_each_nth():
    wishes = Wishes()
    assert not wishes.measures()
    for every in (1, 2, 3):
        wishes.measure(every)
        assert [wishes.measures() for _ in range(7)] == [step % every == 0 for step in range(7)]
    wishes.measure(0)
    assert not wishes.measures()
