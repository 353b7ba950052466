"""The model of a step: cases computed by hand, its limits, and what it is monotone in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce import Config
from hvd_deepreduce.exchange.costs import Link
from hvd_deepreduce.tools.advise import prediction, report
from hvd_deepreduce.tools.advise.prediction import CodecSpeed, Job, Machine, NotPredictedError

MACHINE = Machine(copy=0.0, half=2e-9)
COPYING = Machine(copy=1e-10, half=2e-9)
SPEED = CodecSpeed(encode=0.010, decode=0.002, decode_each=0.001, size=100_000, kept=10_000)
JOB = Job([1_000_000], 4, compute=0.3, tensor_overhead=0.0)
GIGABIT = Link(1e9, 100e-6)
TOPK, MODEL = Config.load("topk_rice_qsgd"), Config.load("topk_model")
REDUCED = Config.load("reduce_scatter")
UPDATES = Config.load("adamw_small")


def milliseconds(one):
    return pytest.approx(1e3 * one.seconds)


def test_buckets_are_those_of_the_last_tensors_first():
    assert prediction.buckets([5, 10, 20, 30], 4 * 40) == [50, 15]
    assert prediction.buckets([5, 10, 20, 30], 4 * 50) == [50, 15]
    assert prediction.buckets([5, 10, 20, 30], 4 * 51) == [60, 5]
    assert prediction.buckets([5, 10], 4) == [10, 5]
    assert prediction.buckets([5, 10], None) == [15]


def test_dense_in_one_bucket():
    """A ring of 4: 6 messages of 100 us, and 1.5 x 4 MB at 1 Gbit/s: 48 ms. It begins when computing ends."""
    assert milliseconds(prediction.dense(JOB, GIGABIT, MACHINE)) == 300 + 0.6 + 48
    assert prediction.dense(JOB, GIGABIT, MACHINE).received == pytest.approx(6e6)


def test_buckets_overlap_with_the_backward_pass():
    """Two buckets of 24.6 ms. The first one is full after half of the backward pass, so it is away before its end."""
    job = replace(JOB, sizes=[500_000, 500_000], bucket_bytes=2_000_000)
    assert milliseconds(prediction.dense(job, GIGABIT, MACHINE)) == 300 + 0.6 + 24
    # At a tenth of the rate, the first one begins at 200 ms, and takes 240.6 ms as the second one does.
    assert milliseconds(prediction.dense(job, replace(GIGABIT, bits_per_second=1e8), MACHINE)) == 200 + 2 * 240.6


def test_the_network_stack_takes_a_core_unless_one_is_free():
    """10 ns for each of 6 MB: 60 ms, which is more than the 48 ms of the link."""
    link = replace(GIGABIT, cpu=10e-9)
    assert milliseconds(prediction.dense(JOB, link, MACHINE)) == 300 + 0.6 + 60
    assert milliseconds(prediction.dense(replace(JOB, sharing=2.0), link, MACHINE)) == 300 + 0.6 + 120
    halves = replace(JOB, sizes=[500_000, 500_000], bucket_bytes=2_000_000)
    assert milliseconds(prediction.dense(halves, link, MACHINE)) == 300 + 60
    assert milliseconds(prediction.dense(replace(halves, free_core=True), link, MACHINE)) == 300 + 0.6 + 30


def test_fp16():
    """Half of the bytes; 1 ms to convert before, and after."""
    assert milliseconds(prediction.dense(JOB, GIGABIT, MACHINE, half=True)) == 300 + 0.6 + 24 + 2
    slow = replace(GIGABIT, cpu=1e-9, cpu_half=20e-9)
    assert milliseconds(prediction.dense(JOB, slow, MACHINE, half=True)) == 300 + 0.6 + 60 + 2


def test_allgather_of_containers():
    """Encoding 10 ms; 2 collectives of 3 messages; 3 x 0.1 MB in 2.4 ms; decoding 2 + 4 x 1 ms."""
    found = prediction.compressed("x", TOPK, JOB, GIGABIT, MACHINE, SPEED)
    assert milliseconds(found) == 300 + 10 + 0.6 + 2.4 + 6
    assert (found.codec, found.link, found.received) == pytest.approx((0.016, 0.003, 300_000))


def test_a_link_is_shared_by_the_ranks_of_its_host():
    """Each of 2 ranks gets the containers of 2 ranks of the other host, over one link; the dense ring crosses it
    once."""
    job = replace(JOB, per_host=2)
    assert prediction.compressed("x", TOPK, job, GIGABIT, MACHINE, SPEED).received == pytest.approx(2 * 2 * 100_000)
    assert prediction.dense(job, GIGABIT, MACHINE).received == pytest.approx(6e6)
    alone = prediction.compressed("x", TOPK, replace(JOB, per_host=4), GIGABIT, MACHINE, SPEED)
    assert alone.received == pytest.approx(300_000)


def test_a_free_core_encodes_beside_the_backward_pass():
    """Two buckets: the first one's 5 + 1.8 + 3 ms are hidden; without a free core, its 5 and 3 ms of work are not."""
    job = replace(JOB, sizes=[500_000, 500_000], bucket_bytes=2_000_000, free_core=True)
    found = prediction.compressed("x", TOPK, job, GIGABIT, MACHINE, SPEED)
    assert milliseconds(found) == 300 + 5 + 0.6 + 1.2 + 3
    busy = prediction.compressed("x", TOPK, replace(job, free_core=False), GIGABIT, MACHINE, SPEED)
    assert milliseconds(busy) == 300 + 16


def test_reduce_scatter_receives_about_twice_its_slices():
    """3/4 of its 10,000 elements, and 3/4 of the sum's 10,000, in 10 bytes each; and two bytes for 3/4 of 256 cells."""
    found = prediction.compressed("x", REDUCED, JOB, GIGABIT, MACHINE, SPEED)
    assert found.received == pytest.approx(150_000 + 384)
    assert found.link == pytest.approx(4 * 2 * 3 * 100e-6 + 8 * 150_384 / 1e9)


def test_updates_are_exchanged_every_few_steps():
    """(10 + 0.6 + 2.4 + 6 ms, and 6 copies of 4 MB) over 4 steps, with nothing beside them."""
    found = prediction.compressed("x", UPDATES, JOB, GIGABIT, COPYING, SPEED)
    assert milliseconds(found) == 300 + (19 + 2.4) / 4
    assert found.updates and found.every == 4 and found.received == pytest.approx(75_000)


def test_uncompressed_updates_go_through_an_allreduce():
    found = prediction.compressed("x", Config.load("diloco"), JOB, GIGABIT, COPYING, SPEED)
    assert milliseconds(found) == 300 + (48.6 + 2.4) / 64


def test_a_delay_hides_the_transfer():
    delayed = Config.load(UPDATES, local={"every": 4, "delay": 1})
    found = prediction.compressed("x", delayed, JOB, GIGABIT, MACHINE, SPEED)
    assert milliseconds(found) == 300 + 16 / 4
    slow = prediction.compressed("x", delayed, JOB, replace(GIGABIT, bits_per_second=2.4e6), MACHINE, SPEED)
    assert milliseconds(slow) == 300 + (16 + 1000.6 - 300) / 4


def test_tensors_cost_the_framework_time():
    job = replace(JOB, sizes=[10_000] * 100, tensor_overhead=25e-6)
    assert milliseconds(prediction.dense(job, GIGABIT, MACHINE)) == 300 + 2.5 + 0.6 + 48
    assert milliseconds(prediction.local(job)) == 300
    shared = replace(job, sharing=2.0)
    assert milliseconds(prediction.dense(shared, GIGABIT, COPYING)) == 300 + 5 + 0.4 + 0.6 + 48
    found = prediction.compressed("x", TOPK, shared, GIGABIT, COPYING, SPEED)
    assert milliseconds(found) == 300 + 15 + 0.4 + 10 + 0.6 + 2.4 + 6


def test_computing_is_found_from_a_dense_step():
    for compute in (0.0, 0.01, 0.3):
        job = replace(JOB, compute=compute, sizes=[250_000] * 4, bucket_bytes=1_000_000)
        step = prediction.dense(job, GIGABIT, MACHINE).seconds
        assert prediction.computing(job, GIGABIT, MACHINE, step) == pytest.approx(compute, abs=1e-9)
    assert prediction.computing(JOB, GIGABIT, MACHINE, 0.001) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", ["densestream_model", "recommended_two_levels"])
def test_what_is_not_modelled_is_said(name):
    job = replace(JOB, per_host=2)
    with pytest.raises(NotPredictedError, match="predicted"):
        prediction.compressed(name, Config.load(name), job, GIGABIT, MACHINE, SPEED)
    found = report.advise(replace(job, sizes=[1000]), GIGABIT, [(name, Config.load(name))])
    assert list(found.left_out) == [name] and len(found.predictions) == 3


def every_way(job, link):
    ways = [("topk", TOPK), ("model", MODEL), ("reduced", REDUCED), ("updates", UPDATES)]
    found = [prediction.dense(job, link, MACHINE), prediction.dense(job, link, MACHINE, half=True)]
    return found + [prediction.compressed(name, config, job, link, MACHINE, SPEED) for name, config in ways]


jobs = st.builds(
    Job,
    st.lists(st.integers(1, 10**7), min_size=1, max_size=20),
    st.sampled_from([2, 4, 6, 64]),
    st.sampled_from([1, 2]),
    st.floats(0, 2),
    free_core=st.booleans(),
    sharing=st.floats(1, 4),
    bucket_bytes=st.sampled_from([1 << 10, 25 << 20]),
)
links = st.builds(Link, st.floats(1e6, 1e12), st.floats(0, 1e-2), st.floats(0, 1e-8))


@given(jobs, links, st.floats(1, 100))
def test_a_faster_machine_is_never_slower(job, link, factor):
    """More bits a second, fewer seconds a message, a byte and a step, fewer ranks on a core; and no exchange at all."""
    better = [
        (job, replace(link, bits_per_second=factor * link.bits_per_second)),
        (job, replace(link, latency=link.latency / factor)),
        (job, replace(link, cpu=link.cpu / factor)),
        (replace(job, compute=job.compute / factor), link),
        (replace(job, sharing=max(1.0, job.sharing / factor)), link),
        (replace(job, free_core=True), link),
    ]
    slow = every_way(job, link)
    for changed in better:
        for one, other in zip(every_way(*changed), slow, strict=True):
            assert one.seconds <= other.seconds * (1 + 1e-9), changed
    assert all(one.seconds >= job.compute for one in slow)


@given(jobs)
def test_dense_is_best_on_a_perfect_link(job):
    link = Link(float("inf"), 0.0)
    found = every_way(job, link)
    assert prediction.best(found).name == prediction.DENSE
    assert found[0].seconds == pytest.approx(job.compute + prediction.overhead(job, MACHINE, False))


def test_the_slowest_link_is_for_the_fewest_bytes():
    found = every_way(JOB, Link(1e4, 0.0))
    assert prediction.best(found).received == min(one.received for one in found if not one.updates)


def an_advice(seconds, optimizer="sgd", asked=False, **updates):
    rows = [prediction.Prediction(name, False, one) for name, one in {"no exchange": 0.1, **seconds}.items()]
    rows += [prediction.Prediction(name, True, one, every=4) for name, one in updates.items()]
    return report.Advice(JOB, GIGABIT, rows, optimizer=optimizer, asked=asked)


def test_advice_for_dense_says_by_how_much():
    said = " ".join(an_advice({"dense": 0.2, "fp16": 0.3, "topk_model": 0.25}).sentences())
    assert said.startswith("Use dense gradients") and "topk_model" in said and "1.25 times as long (50 ms more)" in said


def test_advice_for_a_preset_says_by_how_much():
    found = an_advice({"dense": 0.5, "fp16": 0.4, "topk_model": 0.25}, sgd_small=0.2)
    said = " ".join(found.sentences())
    assert (
        "preset topk_model: a step takes 250 ms" in said and "500 ms with dense gradients, 2.00 times as long" in said
    )
    assert "0.1 nats on an LSTM" in said and "sgd_small (200 ms): LocalSGD changes the training" in said


def test_dense_within_the_deviation_is_dense():
    said = " ".join(an_advice({"dense": 0.29, "fp16": 0.3, "topk_model": 0.25}).sentences())
    assert said.startswith("Use dense gradients. A step with topk_model is predicted to take 250 ms, and 290 ms")
    assert "deviate by up to 20%" in said and "mode: auto" in said
    said = " ".join(an_advice({"dense": 0.29, "fp16": 0.3}, "adamw", adamw_safe=0.25).sentences())
    assert said.startswith("Use dense gradients. A step with adamw_safe") and "mode: auto" not in said


TIMES = {"dense": 2.0, "fp16": 1.5, "recommended": 0.32, "fast": 0.30, "reduce_scatter": 0.29, "smallest": 0.2}


def test_of_those_about_equally_fast_the_one_that_loses_least_is_recommended():
    assert an_advice(TIMES).best("sgd").name == "recommended"  # 10% slower than reduce_scatter
    assert an_advice({**TIMES, "recommended": 0.5, "fast": 0.5}).best("sgd").name == "reduce_scatter"


@pytest.mark.parametrize("optimizer", ["adam", "AdamW", "muon", "FusedLAMB"])
def test_gradients_are_not_compressed_under_adam(optimizer):
    found = an_advice(TIMES, optimizer, adamw_safe=0.3, adamw_small=0.2, sparseloco=0.1, diloco=0.1)
    assert found.best("adam").name == "adamw_safe"
    said = " ".join(found.sentences())
    assert said.startswith("Use LocalSGD with preset adamw_safe") and "every 4 steps" in said
    assert "smallest (200 ms): compressed gradients inflate" in said and "sparseloco (100 ms)" in said
    alone = an_advice({**TIMES, "fp16": 3.0}, optimizer, asked=True)
    assert alone.best("adam").name == "dense" and "no preset that was looked at is safe" in alone.sentences()[0]


def test_what_loses_most_must_be_asked_for():
    assert an_advice(TIMES, asked=True).best("sgd").name == "smallest"
    assert an_advice({"dense": 2.0, "fp16": 1.5}, "adamw", True, diloco=0.1).best("adam").name == "diloco"
    assert an_advice({"dense": 2.0, "fp16": 1.5}, "adamw", False, diloco=0.1).best("adam").name == "fp16"
    assert "what mine.yaml loses was not measured" in an_advice({"dense": 2.0, "mine.yaml": 1.0}).sentences()[0]


def test_without_an_optimizer_there_are_two_answers():
    found = an_advice(TIMES, None, adamw_safe=0.3)
    first, sgd, adam = found.sentences()
    assert "--optimizer sgd, adam, adamw, muon" in first
    assert sgd.startswith("With SGD: use preset recommended:")
    assert adam.startswith("With Adam, AdamW, Muon and their relatives: use LocalSGD with preset adamw_safe:")
    data = found.to_dict()
    assert data["best"] is None and data["best_with"] == {"sgd": "recommended", "adam": "adamw_safe"}
    assert data["lost"]["gpt"] == {
        "unit": "nats", "page": "docs/results/presets.md", "recommended": 0.45, "fast": 0.45, "smallest": 0.67,
        "adamw_safe": 0.10,
    }  # fmt: skip


def test_an_unknown_optimizer_is_an_error():
    with pytest.raises(ValueError, match="did you mean 'adamw'"):
        report.advise(JOB, GIGABIT, optimizer="admw")


def test_advice_needs_two_ranks():
    with pytest.raises(ValueError, match="ranks is 1; it must be 2 or more"):
        report.advise(replace(JOB, ranks=1), GIGABIT, [])
