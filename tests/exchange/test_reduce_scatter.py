"""Programs of all ranks in one process: the oracle's sums, nothing lost with any codec, errors that all ranks get."""

from __future__ import annotations

import contextlib
import itertools
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_deepreduce import Config, ConfigError, ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.exchange.balance import AllGather, AllToAll, balanced_bounds, from_codes, quotas, to_codes
from hvd_deepreduce.exchange.reduce_scatter import SlicedSum
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from tests import cases
from tests.oracle import topk
from tests.oracle.reduce_scatter import quotas_of, reduce_scatter
from tests.selection import examples, first
from tests.support.simulated_collectives import CollectiveNetwork, altered

TOP = {"name": "reduce_scatter", "density": 0.1}
RAW = {"value": "raw", "scope": "model"}


def works(config, gradients, residuals, velocities=None, parts=None):
    pipeline = Pipeline(config)
    return [
        SlicedSum(
            pipeline, len(gradients), RngKey(3, 1, 7, rank), gradient, residual, residual,
            None if velocities is None else velocities[rank], parts,
        )
        for rank, (gradient, residual) in enumerate(zip(gradients, residuals, strict=True))
    ]  # fmt: skip


def summed(config, gradients, residuals, **others):
    """The sum, which must have the same bytes on all ranks, and the network."""
    network = CollectiveNetwork(len(gradients))
    outs = []
    for result in network.run([one.steps() for one in works(config, gradients, residuals, **others)]):
        outs.append(np.full_like(gradients[0], 9))
        result.write(outs[-1], 1.0)
    assert all(out.tobytes() == outs[0].tobytes() for out in outs)
    return outs[0], network


def bounds_of(supports, numel):
    failures = []
    network = CollectiveNetwork(len(supports))
    found = network.run([balanced_bounds(s, numel, r, len(supports), failures.append) for r, s in enumerate(supports)])
    assert all(bounds == found[0] for bounds in found) and not failures
    return found[0], network


def vectors(numel, ranks, seed, dtype=np.float32, zeros=0.3):
    rng = np.random.default_rng([seed, numel, ranks])
    return [np.where(rng.random(numel) < zeros, 0, rng.integers(-50, 50, numel)).astype(dtype) for _ in range(ranks)]


@given(
    numel=st.integers(0, 70), ranks=st.integers(1, 9), seed=st.integers(0, 99), density=st.floats(0.02, 1),
    top=st.none() | st.floats(0.02, 1), feedback=st.booleans(), double=st.booleans(),
)  # fmt: skip
@example(numel=3, ranks=9, seed=0, density=0.5, top=0.5, feedback=True, double=False)
@settings(deadline=None, max_examples=examples(150))
def test_sums_and_residuals_are_those_of_the_oracle(numel, ranks, seed, density, top, feedback, double):
    dtype = np.float64 if double else np.float32
    config = Config.load(
        RAW, sparsifier={"name": "topk", "density": density}, exchange={"name": "reduce_scatter", "density": top},
        error_feedback=feedback,
    )  # fmt: skip
    gradients = vectors(numel, ranks, seed, dtype)
    before = [one / 4 for one in vectors(numel, ranks, seed + 1000, dtype)]
    residuals = [one.copy() if feedback else None for one in before]
    total, network = summed(config, gradients, residuals)
    accumulated = [g + b if feedback else g for g, b in zip(gradients, before, strict=True)]
    kept = [topk.select(one, kept_of(density, numel))[0] for one in accumulated]
    bounds = [numel * rank // ranks for rank in range(ranks + 1)]
    most = None
    if top is not None and ranks > 1 and numel:
        bounds, _ = bounds_of(kept, numel)
        most = kept_of(top, numel)
    expected, left = reduce_scatter(accumulated, kept, bounds, most)
    np.testing.assert_array_equal(total, expected)
    for residual, one in zip(residuals, left, strict=True):
        assert residual is None or np.array_equal(residual, one)
    assert (network.alltoalls, network.allgathers) >= ((1, 1) if ranks > 1 else (0, 0))
    assert ranks > 1 or network.sent.sum() == 0


CONFIGS = [{"sparsifier": one, "value": value} for one in cases.SPARSIFIERS.values() for value in ("qsgd", "raw")]
CONFIGS += [{"index": name, "value": "raw"} for name in cases.INDEX]
CONFIGS += [{"value": codec} for codec in cases.VALUE.values()]
CONFIGS += [{"sparsifier": "none", "value": codec} for codec in cases.VALUE.values()]
CONFIGS += [{"joint": name} for name in cases.JOINT] + [{"sparsifier": "none", "joint": "three_lc"}]
CONFIGS += [{"sparsifier": "randomk", "index": "rice"}]


def at_ten_percent(given):
    sparsifier = given.get("sparsifier", {"name": "topk", "density": 0.1})
    return {**given, "sparsifier": sparsifier}


def name_of(given):
    return "-".join(str(getattr(one, "name", one)) for one in given.values())


@pytest.mark.parametrize("top", [None, 0.1])
@pytest.mark.parametrize("given", CONFIGS, ids=name_of)
def test_sent_and_kept_is_what_came_with_any_codec(given, top):
    ranks, numel = 3, 407
    try:
        config = Config.load(at_ten_percent(given), exchange={"name": "reduce_scatter", "density": top})
    except ConfigError as error:
        assert top is not None and "exchange.density is 0.1 and has no effect" in str(error), error
        return
    residuals = [np.zeros(numel, np.float32) for _ in range(ranks)]
    sent, came = np.zeros(numel), np.zeros(numel)
    for step in range(3):
        gradients = [cases.random(numel, seed=10 * step + rank) for rank in range(ranks)]
        total, _ = summed(config, gradients, residuals)
        sent += total
        came += np.sum(gradients, 0, np.float64)
    assert np.abs(sent).max() > 0
    np.testing.assert_allclose(sent + np.sum(residuals, 0, np.float64), came, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("sparsifier", [name for name in cases.SPARSIFIERS if name != "randomk"])
@pytest.mark.parametrize("memory", ["residual", "dgc", "scaled_momentum"])
def test_without_rounding_it_is_the_sum_of_the_allgather(sparsifier, memory):
    """Bit for bit, with the same residuals and velocities; of votes the direction."""
    velocity = memory != "residual"
    if velocity and cases.SPARSIFIERS[sparsifier].sends_all:
        return
    given = {**RAW, "sparsifier": cases.SPARSIFIERS[sparsifier], "memory": memory}
    votes = memory == "scaled_momentum"
    if votes:
        given["value"] = {"name": "sign", "magnitude": "one"}
    ranks, numel = 4, 300
    sides = []
    for exchange in ("allgather", "reduce_scatter"):
        config = Config.load(given, exchange=exchange)
        pipeline = Pipeline(config)
        residuals, velocities = ([np.zeros(numel, np.float32) for _ in range(ranks)] for _ in range(2))
        for step in range(3):
            gradients = [cases.random(numel, seed=10 * step + rank) for rank in range(ranks)]
            if exchange == "reduce_scatter":
                out, _ = summed(config, gradients, residuals, velocities=velocities if velocity else None)
                continue
            keys = [RngKey(3, 1, 7, rank) for rank in range(ranks)]
            packed = [
                pipeline.encode(g, r, key, 2, v if velocity else None, ranks)
                for g, r, v, key in zip(gradients, residuals, velocities, keys, strict=True)
            ]
            out = np.empty(numel, np.float32)
            expected = pipeline.expected(numel, out.dtype, keys[0])
            pipeline.decode(frame.split(np.concatenate(packed), ranks, [expected])[0], out)
        sides.append((np.sign(out) if votes else out, *residuals, *velocities))
    for one, other in zip(*sides, strict=True):
        np.testing.assert_array_equal(one, other)


def test_tensors_select_by_themselves():
    config = Config.load(RAW, selection="tensor", exchange="reduce_scatter", density=0.1)
    small, large = ([cases.random(n, seed=seed + rank) for rank in (0, 1)] for n, seed in ((50, 0), (150, 9)))
    gradients = [np.concatenate([one, 100 * other]) for one, other in zip(small, large, strict=True)]
    total, _ = summed(config, gradients, [np.zeros(200, np.float32) for _ in gradients], parts=[(0, 50), (50, 200)])
    assert np.count_nonzero(total[:50]) >= 5


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("given", [{}, {"exchange": TOP}, {"sparsifier": "none"}, {"sparsifier": "randomk"}], ids=str)
def test_what_is_not_finite_reaches_all_and_no_residual(given, poison):
    config = Config.load(RAW, **{"exchange": "reduce_scatter", **given})
    gradients = [cases.random(90, seed=rank) for rank in range(3)]
    gradients[1][40] = poison
    residuals = [cases.random(90, seed=5) for _ in gradients]
    before = residuals[1].copy()
    total, _ = summed(config, gradients, residuals)
    assert not np.isfinite(total[40]) and np.isfinite(np.delete(total, 40)).all()
    assert np.count_nonzero(total) == 90, "every element of the rank's gradient arrives, also in other slices"
    np.testing.assert_array_equal(residuals[1], before)
    assert all(np.isfinite(one).all() for one in residuals)


def test_a_sum_beyond_the_largest_number_is_not_finite():
    config = Config.load(RAW, exchange="reduce_scatter", density=1.0)
    residuals = [np.zeros(9, np.float32) for _ in range(2)]
    total, _ = summed(config, [np.full(9, 3e38, np.float32)] * 2, residuals)
    assert np.isinf(total).all() and all(np.isfinite(one).all() for one in residuals)


def damaged(work, number, change):
    """The program, of which the request with this number is changed."""
    return altered(work.steps(), lambda at, asked: change(asked) if at == number else asked)


def flip(asked):
    data = asked.data.copy()
    if data.size:
        data[data.size // 3] ^= 16
    return asked._replace(data=data)


def cut(asked):
    data = asked.data[:-1]
    if isinstance(asked, AllToAll):
        return AllToAll(data, [*asked.splits[:-1], asked.splits[-1] - 1])
    return asked._replace(data=data)


def longer(asked):
    data = np.append(asked.data, np.uint8(1))
    if isinstance(asked, AllToAll):
        return AllToAll(data, [*asked.splits[:-1], asked.splits[-1] + 1])
    return asked._replace(data=data)


def empty(asked):
    if isinstance(asked, AllToAll):
        return AllToAll(asked.data[:0], [0] * len(asked.splits))
    return asked._replace(data=asked.data[:0])


@pytest.mark.parametrize("change", [flip, cut, longer, empty])
@pytest.mark.parametrize("exchange", ["reduce_scatter", TOP], ids=str)
def test_damage_is_the_same_error_everywhere(exchange, change):
    """It names the rank, nobody waits, and no owner keeps a loss of a sum that was not applied."""
    config = Config.load(exchange=exchange, density=0.1)
    gradients = [cases.random(300, seed=rank) for rank in range(3)]
    rounds = 2 if exchange == "reduce_scatter" else 4
    for number in range(rounds):  # the request that is damaged: alltoalls and allgathers in turns
        residuals = [np.zeros(300, np.float32) for _ in gradients]
        programs = [one.steps() for one in works(config, gradients, residuals)]
        programs[1] = damaged(works(config, gradients, residuals)[1], number, change)
        if exchange == TOP and number < 2 and change is flip:
            # Counts have no checksum: they only divide the vector, for all ranks alike.
            results = CollectiveNetwork(3).run(programs)
            assert len({tuple(part[:2] for part in one.parts) for one in results}) == 1
            continue
        with pytest.raises(ContainerError) as info:
            CollectiveNetwork(3).run(programs)
        # An allgather does not say where a rank's bytes end, so that it may be the next one that cannot be read.
        named = "rank 1" if number % 2 == 0 or change is flip else "rank [12]|bytes follow|have sent the sums of"
        assert re.search(named, str(info.value)), info.value
        if number == rounds - 1:  # what was sent in the first encoding is gone, as with an allgather; nothing came back
            for residual, gradient in zip(residuals, gradients, strict=True):
                kept = selected_by(config, gradient)
                assert np.array_equal(residual[kept == 0], gradient[kept == 0])


TAILS = [b"\0", b"\0\0", b"\0\1", b"\0\x80", b"\0" + 9 * b"\xff", b"\7"]


@pytest.mark.parametrize("kept", [0.2, 0.9])  # the slices have short forms, and they have none
@pytest.mark.parametrize("exchange", ["reduce_scatter", TOP], ids=str)
@pytest.mark.parametrize("bad", range(3))
def test_bytes_behind_a_message_are_an_error_that_names_a_rank(bad, exchange, kept):
    config = Config.load(exchange=exchange, density=kept)
    gradients = [cases.random(600, seed=rank) for rank in range(3)]
    for number, tail in itertools.product(range(2 if exchange == "reduce_scatter" else 4), TAILS):

        def longer_by(asked, tail=tail):
            asked = asked._replace(data=np.append(asked.data, np.frombuffer(tail, np.uint8)))
            if isinstance(asked, AllToAll):
                asked = asked._replace(splits=[*asked.splits[:-1], asked.splits[-1] + len(tail)])
            return asked

        programs = [one.steps() for one in works(config, gradients, [None] * 3)]
        programs[bad] = damaged(works(config, gradients, [None] * 3)[bad], number, longer_by)
        with pytest.raises(ContainerError) as info:
            CollectiveNetwork(3).run(programs)
        # An allgather does not say where a rank's bytes end.
        named = f"rank {bad}" if number % 2 == 0 else f"rank {bad}|rank {bad + 1}|have sent the sums of"
        assert re.search(named, str(info.value)), info.value


def test_sums_of_counts_that_differ_on_a_rank_are_an_error_on_all():
    """Counts have no checksum. The ranks that they divide otherwise have slices of other sizes, which the containers'
    checksums cover."""
    config = Config.load(exchange=TOP, density=0.1)
    gradients = [cases.random(300, seed=rank) for rank in range(3)]
    flips = np.random.default_rng(1).choice(256 * 8, 60, replace=False).tolist()
    ends = []
    for bit, bad in zip(flips, itertools.cycle(range(3))):

        def other(number, answer, bit=bit):
            if number == 1:  # the sums of the first round, as one rank gets them
                answer = answer.copy()
                answer[bit // 8] ^= 1 << bit % 8
            return answer

        programs = [one.steps() for one in works(config, gradients, [None] * 3)]
        programs[bad] = altered(programs[bad], gets=other)
        try:
            results = CollectiveNetwork(3).run(programs)
        except (ContainerError, RuntimeError) as error:  # the texts may differ, and nobody waits
            assert isinstance(error, ContainerError) or "0 ranks wait, 0 have ended, 3 failed" in str(error), error
            ends.append(str(error))
            continue
        outs = [np.empty(300, np.float32) for _ in results]
        for result, out in zip(results, outs, strict=True):
            result.write(out, 1.0)
        assert all(out.tobytes() == outs[0].tobytes() for out in outs)
    assert len(ends) > 5


def selected_by(config, gradient):
    """1 where top-k selects, else 0."""
    kept = np.zeros_like(gradient)
    kept[topk.select(gradient, kept_of(config.sparsifier.density, gradient.size))[0]] = 1
    return kept


@pytest.mark.parametrize("exchange", ["reduce_scatter", TOP], ids=str)
def test_a_rank_that_fails_tells_the_others(exchange):
    config = Config.load(exchange=exchange, density=0.1)
    for numel in (300, 2):  # rank 0 has no slice of two elements
        gradients = [cases.random(numel, seed=rank) for rank in range(3)]
        for broken in ("_select", "_encode", "_sum"):
            for rank in range(3):
                all_works = works(config, gradients, [np.zeros(numel, np.float32) for _ in gradients])

                def fail(*_):
                    raise MemoryError("no memory")

                setattr(all_works[rank], broken, fail)
                said = f"^rank {rank} could not take part in the sum: MemoryError: no memory$"
                with pytest.raises(ContainerError, match=said):
                    CollectiveNetwork(3).run([one.steps() for one in all_works])


def test_a_container_of_another_slice_is_refused():
    config = Config.load(RAW, exchange="reduce_scatter", density=0.1)
    gradients = [cases.random(300, seed=rank) for rank in range(3)]

    def swapped(asked):
        one, two, three = np.split(asked.data, np.cumsum(asked.splits)[:-1])
        return AllToAll(np.concatenate([two, one, three]), [two.size, one.size, three.size])

    all_works = works(config, gradients, [None] * 3)
    programs = [one.steps() for one in all_works]
    programs[2] = damaged(works(config, gradients, [None] * 3)[2], 0, swapped)
    with pytest.raises(ContainerError, match="the container of rank 2 cannot be read: its checksum"):
        CollectiveNetwork(3).run(programs)


def test_a_container_is_bound_to_its_slice():
    """Neither the vector's key reads it nor that of another slice."""
    config = Config.load(RAW, exchange="reduce_scatter", density=0.9)  # too many for the short forms of slices
    asked = []
    all_works = works(config, [cases.random(300, seed=rank) for rank in range(3)], [None] * 3)
    CollectiveNetwork(3).run([altered(one.steps(), lambda _, given: asked.append(given) or given) for one in all_works])
    work, containers = all_works[0], np.split(asked[0].data, np.cumsum(asked[0].splits)[:-1])
    for number, data in enumerate([*containers, *(one.data for one in asked[3:])]):
        read = []
        for at, key in enumerate([*work._keys(), work.key]):
            with contextlib.suppress(ContainerError):
                frame.unpack(data, work.pipeline.expected(100, np.dtype(np.float32), key), 0)
                read.append(at)
        assert read == [number % 3]


def test_more_bytes_than_an_alltoall_can_send_are_an_error_on_all(monkeypatch):
    config = Config.load(RAW, exchange="reduce_scatter", density=0.1)
    gradients = [cases.random(300, seed=rank) for rank in range(3)]
    gradients[1][7] = np.nan  # sent whole: 1200 bytes
    monkeypatch.setattr("hvd_deepreduce.exchange.reduce_scatter.MAX_BYTES", 1000)
    said = "^rank 1 has 1215 bytes of containers, and at most 1000 fit"
    with pytest.raises(ContainerError, match=said):
        summed(config, gradients, [None] * 3)


def test_bytes_are_those_of_the_containers():
    """What the network counts: each slice's containers but a rank's own, and the sums' containers of the others."""
    config = Config.load(RAW, exchange="reduce_scatter", density=0.1)
    gradients = [cases.random(300, seed=rank) for rank in range(3)]
    asked = []
    network = CollectiveNetwork(3)
    network.run(
        [
            altered(one.steps(), lambda _, request: asked.append(request) or request)
            for one in works(config, gradients, [None] * 3)
        ]
    )
    first, second = asked[:3], asked[3:]
    for rank in range(3):
        assert network.sent[rank] == sum(first[rank].splits) - first[rank].splits[rank] + 2 * second[rank].data.size
        others = [one for other, one in enumerate(first) if other != rank]
        came = sum(one.splits[rank] for one in others) + sum(one.data.size for one in second) - second[rank].data.size
        assert network.received[rank] == came


# Balance


@given(
    numel=st.integers(1, 3000), ranks=st.integers(2, 24), seed=st.integers(0, 999),
    width=st.floats(0.001, 1), kinds=st.integers(1, 3),
)  # fmt: skip
@settings(deadline=None, max_examples=examples(150))
def test_slices_hold_about_as_many_elements(numel, ranks, seed, width, kinds):
    """Wherever the supports lie: in a narrow part of the vector, and in several of them."""
    rng = np.random.default_rng(seed)
    inside = max(1, int(width * numel))
    begins = rng.integers(0, numel - inside + 1, kinds)
    supports = []
    for rank in range(ranks):
        chosen = rng.choice(inside, rng.integers(0, inside + 1), replace=False) + begins[rank % kinds]
        supports.append(np.sort(chosen).astype(np.uint32))
    bounds, _ = bounds_of(supports, numel)
    assert bounds[0] == 0 and bounds[-1] == numel and bounds == sorted(bounds) and len(bounds) == ranks + 1
    held = np.bincount(np.concatenate(supports), minlength=numel)
    loads = np.add.reduceat(np.append(held, 0), np.minimum(bounds[:-1], numel)) * (np.diff(bounds) > 0)
    mean = held.sum() / ranks
    assert loads.sum() == held.sum() and loads.max() <= 1.125 * (1.125 * mean + max(0.5 * mean, held.max())) + 1


@pytest.mark.parametrize("ranks", [2, 5, 16, 64])
def test_the_hot_slice_is_divided(ranks):
    """All supports in the first slice; half of them at the front and half at the back; all alike."""
    numel, kept = 1 << 20, 4000
    rng = np.random.default_rng(1)

    def support(begin, width):
        return np.sort(begin + rng.choice(width, kept, replace=False)).astype(np.uint32)

    alike = support(0, numel)
    for supports in (
        [support(0, 2 * kept) for _ in range(ranks)],
        [support(rank % 2 * (numel - 2 * kept), 2 * kept) for rank in range(ranks)],
        [alike] * ranks,
        [support(rank * kept, kept) for rank in range(ranks)],
    ):
        bounds, network = bounds_of(supports, numel)
        loads = sum(np.diff(np.searchsorted(one, np.array(bounds))) for one in supports)
        assert loads.max() <= 1.6 * kept
        assert network.received.max() <= 16 * max(256, 4 * ranks), "the histogram is small"


@given(st.lists(st.integers(0, 2**33), max_size=50))
def test_codes_round_up_a_little(numbers):
    given = np.array(numbers, np.int64)
    read = from_codes(to_codes(given))
    assert np.all((read >= given) & (read <= 1.125 * given)) and np.array_equal(read[given < 16], given[given < 16])


@pytest.mark.parametrize("sizes", [[1, 0], [3, 5]])
def test_counts_that_cannot_be_read_are_told(sizes):
    failures = []
    program = balanced_bounds(np.arange(9, dtype=np.uint32), 100, 0, 2, failures.append)
    asked = next(program)
    assert isinstance(asked, AllToAll) and sum(asked.splits) == 100
    asked = program.send((np.ones(sum(sizes), np.uint8), sizes))
    assert isinstance(asked, AllGather) and len(failures) == 2 and "rank 0" in str(failures[0])
    with pytest.raises(ContainerError, match="the sums of 7 cells, and there are 100"):
        program.send(np.ones(7, np.uint8))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 120))
def test_quotas_are_the_oracles(lengths, total):
    bounds = [0, *np.cumsum(lengths).tolist()]
    assert quotas(bounds, total) == quotas_of(bounds, total)


# Many steps, and the costs


ROUGH = [{"exchange": TOP}, {}, {"exchange": TOP, "value": "sign"}, {"sparsifier": "none", "value": "sign"}]


@pytest.mark.parametrize("given", first(ROUGH), ids=str)
def test_residuals_stay_bounded(given):
    """With both encodings' losses, of four ranks: their norm, in units of the gradients', stops growing."""
    config = Config.load(
        {"sparsifier": {"name": "topk", "density": 0.05}, "exchange": "reduce_scatter", **given}, seed=4
    )
    ranks, numel, steps, rng = 4, 400, 240, np.random.default_rng(5)
    residuals = [np.zeros(numel, np.float32) for _ in range(ranks)]
    norms = []
    for _ in range(steps):
        common = rng.standard_normal(numel)
        gradients = [(common + rng.standard_normal(numel)).astype(np.float32) for _ in range(ranks)]
        summed(config, gradients, residuals)
        norms.append(np.linalg.norm(np.sum(residuals, 0)) / np.linalg.norm(np.sum(gradients, 0)))
    assert max(norms[-80:]) <= 1.3 * max(norms[80:160]) + 0.6, norms[::20]


def as_half(values, dtype):
    """Rounded to nearest, ties to even; as float32."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


DENSE = {"sparsifier": "none", "value": "lossless", "scope": "model"}


def in_rank_order(gradients):
    total = np.zeros_like(gradients[0])
    for gradient in gradients:
        total += gradient
    return total


@pytest.mark.parametrize("ranks", first([4, 2, 3, 7]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_lossless_is_the_dense_sum_in_rank_order_bit_for_bit(ranks, dtype):
    numel = 20_011
    gradients = [cases.heavy(numel, seed) * np.float32(0.01) for seed in range(ranks)]
    for gradient in gradients:
        gradient[:3000] = 0
        gradient[3000:3010] = [1e-45, -1e-45, 1e-39, -0.0, 1.0, -1.0, 2.0**-24, 3e-8, 5.0, -7.0]
    if dtype in ("bfloat16", "float16"):
        gradients = [as_half(gradient, dtype) for gradient in gradients]
    if dtype == "float64":
        gradients = [gradient.astype(np.float64) / 3 for gradient in gradients]
    dense = in_rank_order(gradients)
    config = Config.load(DENSE, exchange="reduce_scatter", error_feedback=False)
    total, network = summed(config, gradients, [None] * ranks)
    assert total.tobytes() == dense.tobytes()
    if dtype == "float64":
        return
    ring = 2 * (ranks - 1) * dense.nbytes
    assert network.sent.sum() < 0.9 * ring
    if dtype != "float32":
        config = Config.load("lossless", mode="always")
        works = [
            SlicedSum(Pipeline(config), ranks, RngKey(3, 1, 7, rank), gradient, half=dtype)
            for rank, gradient in enumerate(gradients)
        ]
        network = CollectiveNetwork(ranks)
        for result in network.run([one.steps() for one in works]):
            total = np.empty_like(dense)
            result.write(total, 1.0)
            assert total.tobytes() == as_half(dense, dtype).tobytes()
        assert network.sent.sum() < 0.47 * ring


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("bfloat16", 3.3895313892515355e38)])
def test_a_sum_beyond_16_bits_is_not_rounded(dtype, largest):
    """Slice 0 is, and slice 1 is not, whose sum is too large. With NaN or infinity, ranks send all as it is."""
    config = Config.load("lossless", mode="always")
    for large in (0.75 * largest, np.inf, np.nan):
        gradients = [np.float32([1.0, 2.0**-12, 1.0, large]), np.float32([2.0**-12, 1.0, 2.0**-12, large])]
        with np.errstate(over="ignore"):
            dense = in_rank_order(gradients)
        network = CollectiveNetwork(2)
        works = [
            SlicedSum(Pipeline(config), 2, RngKey(3, 1, 7, rank), gradient, half=dtype)
            for rank, gradient in enumerate(gradients)
        ]
        for result in network.run([one.steps() for one in works]):
            total = np.empty(4, np.float32)
            result.write(total, 1.0)
            np.testing.assert_array_equal(total, [1, 1, *dense[2:]] if np.isfinite(large) else dense)


@pytest.mark.parametrize("value", ["lossless", "raw", "qsgd"])
def test_rounding_errors_of_the_sum_stay_in_the_owners_residuals(value):
    ranks, numel = 3, 407
    exchange = {"name": "reduce_scatter", "round_sum": True}
    config = Config.load(sparsifier={"name": "topk", "density": 0.3}, value=value, scope="model", exchange=exchange)
    gradients = [as_half(cases.heavy(numel, seed), "bfloat16") for seed in range(ranks)]
    residuals = [np.zeros(numel, np.float32) for _ in gradients]
    network, totals = CollectiveNetwork(ranks), []
    works = [
        SlicedSum(Pipeline(config), ranks, RngKey(3, 1, 7, rank), gradient, residual, residual, half="bfloat16")
        for rank, (gradient, residual) in enumerate(zip(gradients, residuals, strict=True))
    ]
    for result in network.run([one.steps() for one in works]):
        totals.append(np.empty(numel, np.float32))
        result.write(totals[-1], 1.0)
    came = np.sum(np.float64(gradients), axis=0)
    np.testing.assert_allclose(totals[0] + np.sum(np.float64(residuals), axis=0), came, atol=1e-5)
    if value != "qsgd":
        np.testing.assert_array_equal(totals[0], as_half(totals[0], "bfloat16"))
