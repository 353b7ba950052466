"""Two levels under the NumPy adapter: the oracle's sums, nothing lost, errors that all ranks get."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_deepreduce import Config, ConfigError, ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.exchange import levels
from hvd_deepreduce.exchange import two_levels as two_levels_exchange
from hvd_deepreduce.exchange.collectives import NoSubsetsError
from hvd_deepreduce.exchange.settings import ReduceScatter
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.pipeline.bundle import Slice
from tests import two_levels as two_ranks_a_node
from tests.damaged import damage
from tests.engine.numpy_adapter import Job, NumpyAdapter, run_ranks
from tests.oracle import topk
from tests.oracle.two_levels import two_levels
from tests.selection import examples

MODEL = {"a": ((20, 30), "f4"), "b": ((30,), "f4"), "d": ((401,), "f2"), "c": ((7, 8, 9), "f8"), "e": ((1,), "f4")}
EXACT = {"sparsifier": {"name": "topk", "density": 0.1}, "value": "raw", "hierarchical": 2}
WAYS = [
    {"scope": "model"},
    {"scope": "bucket", "bucket_bytes": 2000},
    {"scope": "bucket", "bucket_bytes": 2000, "selection": "tensor"},
    {"scope": "bucket", "bucket_bytes": 2000, "exchange": "reduce_scatter"},
    {"scope": "model", "exchange": {"name": "reduce_scatter", "density": 0.1}, "selection": "tensor"},
]


def gradients_of(step, rank, model=MODEL):
    rng = np.random.default_rng([step, rank])
    return {name: rng.integers(-50, 50, shape).astype(dtype) for name, (shape, dtype) in model.items()}


def flat(arrays, model=MODEL):
    return np.concatenate([np.asarray(arrays.get(name, np.zeros(shape))).ravel() for name, (shape, _) in model.items()])


def job(config, ranks, steps=3, model=MODEL, first=0, states=None, names=(), reshard=False, gradients=None):
    """Of each rank: what each step gave, times the number of ranks; its state; the last step's stats; its groups."""

    def work(collectives):
        adapter = NumpyAdapter(collectives, model, config)
        rank = collectives.rank()
        if states is not None:
            adapter.engine.load_state_dict(states if reshard else states[rank], reshard=reshard)
        totals = []
        for step in range(first, first + steps):
            came = gradients(step, rank) if gradients else gradients_of(step, rank, model)
            totals.append({name: mean * ranks for name, mean in adapter.step(came).items()})
        return totals, adapter.engine.state_dict(), adapter.engine.report()["last_step"], adapter.engine.levels

    results = run_ranks(ranks, work, Job(ranks, names))
    for totals, _, _, _ in results[1:]:
        for ours, theirs in zip(totals, results[0][0], strict=True):
            assert all(ours[name].tobytes() == theirs[name].tobytes() for name in model), "the ranks differ"
    return results


def waiting(results, model=MODEL):
    return sum(flat(state["residuals"], model) for _, state, _, _ in results)


@given(
    numel=st.integers(1, 70), nodes=st.integers(1, 3), local=st.integers(2, 4), seed=st.integers(0, 99),
    density=st.floats(0.02, 1), double=st.booleans(),
)  # fmt: skip
@example(numel=3, nodes=2, local=4, seed=0, density=0.5, double=False)
@example(numel=1, nodes=2, local=2, seed=0, density=0.5, double=True)
@settings(deadline=None, max_examples=examples(40))
def test_sums_and_residuals_are_those_of_the_oracle(numel, nodes, local, seed, density, double):
    model = {"x": ((numel,), "f8" if double else "f4")}
    config = {"sparsifier": {"name": "topk", "density": density}, "value": "raw", "hierarchical": local}
    ranks = nodes * local
    results = job(config, ranks, steps=2, model=model, first=seed)

    def compress(vector):
        sent = np.zeros_like(vector)
        indices, values = topk.select(vector, kept_of(density, vector.size) if vector.size else 0)
        sent[indices] = values
        return sent if nodes > 1 else vector

    divided = [list(range(first, first + local)) for first in range(0, ranks, local)]
    residuals = [np.zeros(numel, model["x"][1]) for _ in range(ranks)]
    for step in range(2):
        gradients = [gradients_of(seed + step, rank, model)["x"] for rank in range(ranks)]
        total, residuals = two_levels(gradients, residuals, divided, compress)
        np.testing.assert_allclose(results[0][0][step]["x"], total, rtol=1e-6)  # the mean is divided and multiplied
    for (_, state, _, _), expected in zip(results, residuals, strict=True):
        assert np.array_equal(state["residuals"].get("x", np.zeros(numel)), expected)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_nothing_is_lost_and_a_resumed_run_equals_an_unbroken_one(way, nodes):
    config, ranks = {**EXACT, **way}, 2 * nodes
    whole = job(config, ranks, steps=4)
    came = sum(flat(gradients_of(step, rank)).astype("f8") for step in range(4) for rank in range(ranks))
    np.testing.assert_allclose(sum(map(flat, whole[0][0])) + waiting(whole), came, rtol=1e-4, atol=0.5)
    assert np.any(waiting(whole)) == (nodes > 1)
    first = job(config, ranks, steps=2)
    again = job(config, ranks, steps=2, first=2, states=[state for _, state, _, _ in first])
    for (totals, state, _, _), (ours, mine, _, _) in zip(whole, again, strict=True):
        assert all(totals[2 + at][name].tobytes() == ours[at][name].tobytes() for at in range(2) for name in MODEL)
        assert all(np.array_equal(state["residuals"][name], one) for name, one in mine["residuals"].items())


CODECS = [
    {"index": index, "value": value, "sparsifier": sparsifier}
    for index, value, sparsifier in (
        ("rice", "qsgd", {"name": "topk", "density": 0.1}),
        ("rans", "half", {"name": "threshold", "threshold": 20.0}),
        ("bloom", "raw", {"name": "topk", "density": 0.1}),
        (None, "qsgd", "none"),
        (None, "sign", {"name": "randomk", "density": 0.2}),
    )
] + [{"joint": "densestream", "index": None, "value": None}]


@pytest.mark.parametrize("codecs", CODECS, ids=str)
def test_nothing_is_lost_with_any_codec(codecs):
    config = {"hierarchical": 3, "scope": "bucket", "bucket_bytes": 2000, **codecs}
    results = job(config, 6)
    came = sum(flat(gradients_of(step, rank)).astype("f8") for step in range(3) for rank in range(6))
    np.testing.assert_allclose(sum(map(flat, results[0][0])) + waiting(results), came, rtol=1e-3, atol=0.5)


def test_a_rank_holds_the_residual_of_its_slice_alone():
    model = {name: ((100,), "f4") for name in "abcd"}
    results = job({**EXACT, "scope": "model"}, 4, model=model)
    assert [sorted(state["residuals"]) for _, state, _, _ in results] == [["a", "b"], ["c", "d"]] * 2
    uneven = {"a": ((150,), "f4"), "b": ((50,), "f4")}
    results = job({**EXACT, "scope": "model"}, 4, model=uneven)
    kept = [state["residuals"] for _, state, _, _ in results]
    assert [sorted(one) for one in kept] == [["a"], ["a", "b"]] * 2
    assert not kept[0]["a"][100:].any() and not kept[1]["a"][:100].any() and kept[1]["a"][100:].any()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((2, 2), (2, 2)),
        ((2, 2), (3, 2)),
        ((2, 3), (2, 2)),
        ((2, 2), (4, False)),
        ((4, False), (2, 2)),
        ((3, 2), (1, 2)),
    ],
)
def test_states_of_another_topology_keep_their_sum(old, new):
    def ranks_of(topology):
        return topology[0] * (topology[1] or 1)

    scope = {**EXACT, "scope": "bucket", "bucket_bytes": 2000}
    before = job({**scope, "hierarchical": old[1]}, ranks_of(old))
    states = [state for _, state, _, _ in before]
    other = {**scope, "hierarchical": new[1], "bucket_bytes": 3000}  # other buckets, and other slices
    after = job(other, ranks_of(new), steps=1, first=3, states=states, reshard=True)
    came = sum(flat(gradients_of(3, rank)).astype("f8") for rank in range(ranks_of(new)))
    np.testing.assert_allclose(flat(after[0][0][0]) + waiting(after), came + waiting(before), rtol=1e-4, atol=0.5)


def test_momentum_of_dgc_is_that_of_one_rank_a_node():
    """With slices that are whole tensors, two nodes of two ranks do what two ranks with the nodes' sums do."""
    model = {"a": ((200,), "f4"), "b": ((200,), "f4")}
    config = {**EXACT, "scope": "model", "selection": "tensor", "memory": "dgc"}
    ours = job(config, 4, steps=4, model=model)

    def work(collectives):
        adapter = NumpyAdapter(collectives, model, {**config, "hierarchical": False})
        node, totals = collectives.rank(), []
        for step in range(4):
            parts = [gradients_of(step, rank, model) for rank in (2 * node, 2 * node + 1)]
            reduced = adapter.step({name: parts[0][name] + parts[1][name] for name in model})
            totals.append({name: 2 * one for name, one in reduced.items()})
        return totals, adapter.engine.state_dict()

    theirs = run_ranks(2, work)
    for mine, other in zip(ours[0][0], theirs[0][0], strict=True):
        assert all(np.array_equal(mine[name], other[name]) for name in model)
    for rank, (_, state, _, _) in enumerate(ours):
        (name,) = [name for name in state["residuals"] if name in model]
        assert name == "ab"[rank % 2]
        for key in (name, f"velocity of {name}"):
            assert np.array_equal(state["residuals"][key], theirs[rank // 2][1]["residuals"][key]), key
    # What a rank holds elsewhere goes to the slice's rank, and is the same there: the residual and the velocity.
    states = [state for _, state, _, _ in ours]
    for pair in (states[:2], states[2:]):
        held = [dict(state["residuals"]) for state in pair]
        pair[0]["residuals"], pair[1]["residuals"] = held[1], held[0]
    swapped = job(config, 4, steps=1, first=4, model=model, states=states)
    straight = job(config, 4, steps=5, model=model)
    assert all(np.array_equal(swapped[0][0][0][name], straight[0][0][4][name]) for name in model)
    with pytest.raises(RuntimeError, match="all ranks are on one node.*memory is 'dgc'"):
        job(config, 2, model=model)


def test_names_of_nodes_divide_the_ranks():
    names = ["x", "y", "x", "y"]
    for hierarchical in (True, "auto"):
        results = job({**EXACT, "hierarchical": hierarchical}, 4, names=names)
        places = [groups.place for _, _, _, groups in results]
        assert [(place.inside, place.across) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    one_each = job({**EXACT, "hierarchical": True}, 3, names="xyz")
    as_before = job({**EXACT, "hierarchical": False}, 3)
    assert [groups for _, _, _, groups in one_each] == [None] * 3
    for (ours, mine, _, _), (theirs, other, _, _) in zip(one_each, as_before, strict=True):
        assert all(a[name].tobytes() == b[name].tobytes() for a, b in zip(ours, theirs, strict=True) for name in MODEL)
        assert all(np.array_equal(mine["residuals"][name], other["residuals"][name]) for name in MODEL)
    assert job({**EXACT, "hierarchical": "auto"}, 2, steps=1, names="xx")[0][3] is None
    assert job({**EXACT, "hierarchical": True}, 2, steps=1, names="xx")[0][3].across is None
    assert job({**EXACT, "hierarchical": "auto"}, 3, steps=1, names="xxy")[0][3] is None
    with pytest.raises(RuntimeError, match="is True, and nodes have different numbers of ranks .2 on x, 1 on y"):
        job({**EXACT, "hierarchical": True}, 3, names="xxy")
    with pytest.raises(RuntimeError, match="is 2, and 3 ranks cannot be divided into nodes of 2"):
        job(EXACT, 3)
    with pytest.raises(NoSubsetsError):
        levels.nodes_of(["a", "b", "b"], True)


def test_bytes_between_nodes_are_those_of_one_rank_a_node():
    config = {**EXACT, "scope": "model", "sparsifier": {"name": "topk", "density": 0.02}}
    totals = [stats for _, _, stats, _ in job(config, 6)]
    flat_totals = [stats for _, _, stats, _ in job({**config, "hierarchical": False}, 6)]
    dense = sum(np.prod(shape, dtype=int) * (8 if dtype == "f8" else 4) for shape, dtype in MODEL.values())
    for stats in totals:
        inside = stats["inside_bytes_sent"]
        assert inside == stats["inside_bytes_received"] and abs(inside - dense) <= 3 * 8  # half, and half again
    between = sum(stats["bytes_sent"] - stats["inside_bytes_sent"] for stats in totals)
    everything = sum(stats["bytes_sent"] for stats in flat_totals)
    # Each rank sends its slice to two nodes, and in one level the whole container to four ranks on other nodes.
    assert between < 0.3 * 4 / 5 * everything
    assert all(stats["inside_bytes_sent"] == 0 for stats in flat_totals)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_nan_on_one_rank_reaches_all_and_leaves_the_residuals(way):
    def gradients(step, rank):
        came = gradients_of(step, rank)
        return {name: one * np.float16(np.nan) for name, one in came.items()} if (step, rank) == (1, 2) else came

    results = job({**EXACT, **way}, 4, gradients=gradients)
    broken, after = results[0][0][1], results[0][0][2]
    assert not any(np.isfinite(one).any() for one in broken.values())
    assert all(np.isfinite(one).all() for one in after.values())
    assert np.isfinite(waiting(results)).all()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("where", ["memory", "encode", "sum"])
def test_what_fails_on_one_rank_is_an_error_on_all(way, where):
    caught = []

    def failing(*_, **__):
        raise MemoryError("no ink")

    def break_down(engine):
        if where == "memory":
            engine._memory.slice = failing
        elif where == "encode":
            for one in (engine.pipeline, *map(engine.pipeline_of, engine.parameters.values())):
                one.select = one.encode = failing
        else:
            inside = engine.levels.inside
            plain = inside.wait_alltoall

            def shortened(pending):
                received, sizes = plain(pending)
                return received[:-1], [1, *sizes[1:]]

            inside.wait_alltoall = shortened

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**EXACT, **way})
        adapter.step(gradients_of(0, collectives.rank()))
        if collectives.rank() == 3:
            break_down(adapter.engine)
        try:
            adapter.step(gradients_of(1, collectives.rank()))
        except ContainerError as error:
            caught.append(str(error))

    run_ranks(4, work)
    assert len(caught) == 4 and len(set(caught)) == 1, caught
    expected = r"container of rank 2 .*: it has 1 bytes" if where == "sum" else "rank 3 could not.*MemoryError: no ink"
    assert re.search(expected, caught[0]), caught[0]


@pytest.mark.parametrize("memory", ["residual", "dgc"])
@pytest.mark.parametrize("refused_by", ["size", "another rank"])
def test_a_residual_outside_of_the_slice_outlives_a_refused_bucket(refused_by, memory, monkeypatch):
    """What a rank holds of another one's slice stays with it, unless it was taken."""
    model = {"a": ((200,), "f4"), "b": ((150,), "f4"), "c": ((50,), "f4")}
    config = {**EXACT, "scope": "model", "selection": "tensor", "memory": memory}
    states = [state for _, state, _, _ in job(config, 4, model=model)]
    for pair in (states[:2], states[2:]):  # each holds the other one's slice
        held = [dict(state["residuals"]) for state in pair]
        pair[0]["residuals"], pair[1]["residuals"] = held[1], held[0]
    if refused_by == "size":
        # A message with residuals is three times as long as one without.
        monkeypatch.setattr(two_levels_exchange, "MAX_BYTES", 2 * 4 * 400)
    refusing = range(4) if refused_by == "size" else (2, 3)

    def work(collectives):
        rank = collectives.rank()
        adapter = NumpyAdapter(collectives, model, config)
        adapter.engine.load_state_dict(states[rank])
        if refused_by == "another rank" and rank == 3:
            monkeypatch.setattr(adapter.engine._memory, "slice", lambda *_: 1 / 0)
        with pytest.raises(ContainerError, match="at most 3200 fit" if refused_by == "size" else "ZeroDivisionError"):
            adapter.step(gradients_of(3, rank, model))
        return adapter.engine.state_dict()["residuals"]

    for rank, held in enumerate(run_ranks(4, work)):
        if rank in refusing:
            before = {name: one for name, one in states[rank]["residuals"].items() if one.any()}
            assert held.keys() >= before.keys() and len(before) >= 1 + (memory == "dgc")
            assert all(np.array_equal(one, before.get(name, np.zeros_like(one))) for name, one in held.items())


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("exchange", ["allgather", "reduce_scatter"])
def test_a_damaged_container_is_an_error_on_all(bad, exchange):
    """Whichever rank of a group it is of; the error names its rank in the job."""
    caught = []

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**EXACT, "scope": "model", "exchange": exchange})
        adapter.step(gradients_of(0, collectives.rank()))
        if collectives.rank() == bad:
            damage(adapter.engine.pipeline)
        try:
            adapter.step(gradients_of(1, collectives.rank()))
        except ContainerError as error:
            caught.append(str(error))

    run_ranks(4, work)
    assert len(caught) == 4 and len(set(caught)) == 1, caught
    assert f"rank {bad} cannot be read: its checksum" in caught[0]


TAILS = [b"\0", b"\0\0", b"\0\1", b"\0\x80", b"\7"]


@pytest.mark.parametrize("exchange", ["allgather", "reduce_scatter"])
@pytest.mark.parametrize("bad", range(4))
def test_bytes_behind_a_message_between_nodes_are_the_same_error_on_all(bad, exchange):
    """Nobody waits: neither a rank of the group nor one of their nodes. A group's last rank is named for certain."""
    pipeline = Pipeline(Config.load(exchange=exchange, density=0.2, hierarchical=2, scope="model"))
    for tail, at in itertools.product(TAILS, (1, 2)[: 1 + (exchange == "reduce_scatter")]):

        def longer(number, asked, tail=tail, at=at):
            if number != at:
                return asked
            asked = asked._replace(data=np.append(asked.data, np.frombuffer(tail, np.uint8)))
            return asked._replace(splits=[*asked.splits[:-1], asked.splits[-1] + len(tail)]) if at == 1 and (
                exchange == "reduce_scatter"
            ) else asked  # fmt: skip

        programs = [
            two_levels_exchange.TwoLevelSum(
                pipeline, place, [Slice(pipeline, (0, 600), RngKey(1, 2, 3))],
                np.random.default_rng(place.rank).standard_normal(600).astype("f4"),
                two_levels_exchange.SliceResidual(np.zeros(300, "f4")),
            ).steps()
            for place in two_ranks_a_node.PLACES
        ]  # fmt: skip
        ends = two_ranks_a_node.run(programs, longer, bad)
        assert all(isinstance(end, ContainerError) for end in ends) and len(set(map(str, ends))) == 1, (tail, ends)
        assert re.search(f"rank ({bad}|{bad + 2}) cannot be read", str(ends[0])), ends[0]


def test_residuals_that_a_dense_step_sends_are_whole_and_go_back():
    """As ``mode: auto`` asks for them (``Engine.unsent``)."""

    def work(asks):
        def run(collectives):
            adapter = NumpyAdapter(collectives, MODEL, {**EXACT, "scope": "bucket", "bucket_bytes": 2000})
            for step in range(4):
                reduced = adapter.step(gradients_of(step, collectives.rank()))
                if asks and step == 1:
                    before = adapter.engine.state_dict()["residuals"]
                    held = {name: adapter.engine._memory.held(name) for name in MODEL}
                    assert {name for name, one in held.items() if one is not None} == set(before)
                    for name, one in before.items():
                        assert np.array_equal(held[name], one)
                        held[name][:] = held[name]  # the memory's own
            return reduced, adapter.engine.state_dict()["residuals"]

        return run_ranks(4, run)

    for (ours, mine), (theirs, others) in zip(work(True), work(False), strict=True):
        assert all(np.array_equal(ours[name], theirs[name]) for name in MODEL)
        assert mine.keys() == others.keys() and all(np.array_equal(mine[name], others[name]) for name in mine)


def test_the_division_stays_after_the_first_step():
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, EXACT)
        adapter.engine.set_config(hierarchical=4)
        adapter.step(gradients_of(0, collectives.rank()))
        with pytest.raises(ValueError, match="hierarchical is 4 and cannot be changed to False after the first step"):
            adapter.engine.set_config(hierarchical=False)
        adapter.engine.set_config(density=0.3, scope="model", exchange={"name": "reduce_scatter"})
        assert isinstance(adapter.engine.config.exchange, ReduceScatter)
        adapter.step(gradients_of(1, collectives.rank()))
        return adapter.engine.levels.place.ranks

    assert run_ranks(8, work) == [4] * 8


def test_settings_of_single_tensors():
    config = {
        **EXACT, "scope": "bucket", "selection": "tensor", "overrides": {"a": {"sparsifier": "none", "value": "raw"}}
    }  # fmt: skip
    results = job(config, 4)
    assert not any(state["residuals"]["a"].any() for _, state, _, _ in results if "a" in state["residuals"])
    assert any(state["residuals"]["d"].any() for _, state, _, _ in results if "d" in state["residuals"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hierarchical": "yes"}, "hierarchical is 'yes'; it must be True, False, 'auto', or the number of ranks"),
        ({"hierarchical": 0}, "hierarchical is 0; it must be"),
        ({"hierarchical": 2.0}, "hierarchical is 2.0; it must be"),
        ({"hierarchical": 2, "exchange": "densestream"}, "exchange is 'densestream', which needs all ranks: set excha"),
        ({"hierarchical": True, "scope": "tensor"}, "hierarchical is True and scope is 'tensor'"),
        ({"hierarchical": True, "min_elements": 7}, "hierarchical is True and scope is 'tensor'"),
        ({"hierarchical": "auto", "local": {}}, "hierarchical is 'auto' and local is given"),
    ],
)
def test_settings_that_cannot_be_combined(given, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(given)
    assert Config.load({"scope": "tensor", "min_elements": 5}, hierarchical=2).scope == "bucket"
    for change in ({"scope": "tensor"}, {"min_elements": 3}, {"exchange": "densestream"}, {"local": {"every": 2}}):
        assert Config.load("recommended_two_levels", **change).hierarchical is False
