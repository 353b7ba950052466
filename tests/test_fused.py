"""The one native call for top-k, Rice and QSGD: the composed way's bytes, residuals and sums, and its errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops.pieces import Pieces
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.wire.standalone import ContainerError
from tests import cases
from tests.selection import examples

KEY = RngKey(3, 4, 2**32 + 5, 1)


def config(density=0.05, index="rice", **value):
    return Config.load(
        sparsifier={"name": "topk", "density": density},
        index=index,
        value={"name": "qsgd", "fit_scale": False} | value,
    )


def both(given):
    """The same pipeline twice, the second without native calls."""
    native, composed = Pipeline(given), Pipeline(given)
    assert native.fused is not None
    composed.fused = None
    return native, composed


def slices(pipeline, sizes, key=KEY):
    return cases.slices(pipeline, sizes, key._replace(parameter=0))


def message(pipeline, gradient, residual, sizes, key=KEY, finite=False):
    return bundle.encode(gradient, residual, None, slices(pipeline, sizes, key), 2, finite)


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_messages_are_those_of_the_composed_way(data):
    sizes = data.draw(st.lists(st.one_of(st.integers(0, 40), st.integers(500, 3000)), min_size=1, max_size=4))
    given = config(
        data.draw(st.sampled_from([1e-4, 0.01, 0.3, 1.0])),
        data.draw(st.sampled_from(["rice", "rice_blocks"])),
        bits=data.draw(st.integers(2, 8)),
        bucket_size=data.draw(st.sampled_from([1, 7, 64, 512, 2**31])),
        norm=data.draw(st.sampled_from(["max", "l2"])),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    numel, ranks = sum(sizes), data.draw(st.integers(1, 3))
    scale = data.draw(st.sampled_from([1.0, 1 / 3]))
    feedback, finite = data.draw(st.booleans()), data.draw(st.booleans())
    zeros = data.draw(st.sampled_from([0.0, 0.5, 0.99, 1.0]))
    found = []
    gradients = [
        (rng.standard_normal(numel) ** 3 * (rng.random(numel) >= zeros) * 10.0 ** rng.integers(-42, 30)).astype("f4")
        for _ in range(ranks)
    ]
    start = rng.standard_normal(numel).astype(np.float32)
    for pipeline in both(given):
        residuals = [start.copy() if feedback else None for _ in range(ranks)]
        sent = [
            message(pipeline, gradient.copy(), residual, sizes, KEY._replace(rank=rank), finite)
            for rank, (gradient, residual) in enumerate(zip(gradients, residuals, strict=True))
        ]
        out = np.full(numel, 7, np.float32)
        last = KEY._replace(rank=ranks - 1)
        own = bundle.sum_into(out, np.concatenate(sent), ranks, slices(pipeline, sizes, last), scale)
        assert own == sent[-1].size
        found.append([one.tobytes() for one in (*sent, out, *residuals) if one is not None])
    assert found[0] == found[1]


def cut(gradient, places):
    """The same vector in pieces, each in memory of its own, which begins anywhere in a cache line."""
    arrays = []
    for number, part in enumerate(np.split(gradient, sorted(places))):
        room = np.empty(part.size + 16, part.dtype)
        arrays.append(room[number % 16 :][: part.size])
        arrays[-1][:] = part
    addresses = [one.ctypes.data for one in arrays]
    return Pieces(addresses, [one.size for one in arrays], gradient.dtype, arrays), arrays


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_pieces_and_another_residual_give_the_same_bytes(data):
    """Of sizes below and above those from which on the sums are streamed past the cache."""
    numel = data.draw(st.one_of(st.integers(1, 9000), st.integers(65_000, 200_000)))
    ends = sorted(data.draw(st.lists(st.integers(0, numel), max_size=3)))
    sizes = np.diff([0, *ends, numel]).tolist()
    places = data.draw(st.lists(st.integers(0, numel), max_size=5))
    given = config(data.draw(st.sampled_from([1e-4, 0.01, 0.3, 1.0])), data.draw(st.sampled_from(["rice", "raw"])))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    gradient = (rng.standard_normal(numel) ** 3).astype(np.float32)
    gradient[rng.random(numel) < data.draw(st.sampled_from([0.0, 0.9, 1.0]))] = 0
    residual = rng.standard_normal(numel) * data.draw(st.sampled_from([0.0, 1.0, 3e38]))
    residual = residual.clip(-3e38, 3e38).astype(np.float32)
    if data.draw(st.booleans()):
        gradient[rng.integers(numel)] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 3e38]))
    pipeline = Pipeline(given, threads=data.draw(st.integers(1, 3)))
    expected = residual.copy()
    sent = message(pipeline, gradient, expected, sizes)
    begin = data.draw(st.integers(1, 16))
    room, before = np.full(numel + 32, 7, np.float32), residual.copy()
    into = room[begin:][:numel]
    pieces, arrays = cut(gradient, places)
    found = bundle.encode(pieces, residual, None, slices(pipeline, sizes), 2, False, into)
    assert found.tobytes() == sent.tobytes()
    assert into.tobytes() == expected.tobytes() and residual.tobytes() == before.tobytes()
    assert (room[:begin] == 7).all() and (room[begin + numel :] == 7).all()
    assert np.concatenate(arrays).tobytes() == gradient.tobytes()


def test_parts_of_pieces():
    vector = np.arange(40, dtype=np.float32)
    pieces, _ = cut(vector, [0, 7, 7, 30])
    assert pieces.size == 40
    for begin in range(41):
        for end in range(begin, 41):
            np.testing.assert_array_equal(pieces.part(begin, end).joined(), vector[begin:end])


def test_the_gradient_does_not_change():
    pipeline, _ = both(config())
    gradient = cases.random(1000)
    before = gradient.copy()
    for residual in (None, np.zeros_like(gradient)):
        pipeline.encode(gradient, residual, KEY, 2)
        np.testing.assert_array_equal(gradient, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_slice_that_is_not_finite_is_sent_whole_and_the_others_are_not(bad):
    sizes = [300, 200, 500]
    gradient = cases.random(1000)
    gradient[320] = bad
    found = []
    for pipeline in both(config()):
        residual = np.ones_like(gradient)
        sent = message(pipeline, gradient, residual, sizes)
        np.testing.assert_array_equal(residual[300:500], 1)
        assert (residual[:300] != 1).all()
        out = np.empty_like(gradient)
        bundle.sum_into(out, sent, 1, slices(pipeline, sizes, KEY._replace(rank=0)), 1.0)
        np.testing.assert_array_equal(out[300:500], gradient[300:500])
        found.append((sent.tobytes(), out.tobytes(), residual.tobytes()))
    assert found[0] == found[1]


def test_any_changed_byte_is_refused_with_the_composed_way_s_error():
    pipeline, _ = both(config())
    sizes = [150, 90]
    sent = [message(pipeline, cases.random(240, seed=seed), None, sizes, KEY._replace(rank=seed)) for seed in range(2)]
    whole = np.concatenate(sent)
    assert bundle.sum_into(np.empty(240, np.float32), whole, 2, slices(pipeline, sizes), 1.0) == sent[1].size
    for at in range(whole.size):
        broken = whole.copy()
        broken[at] ^= 1 << at % 8
        out = np.full(240, 7, np.float32)
        with pytest.raises(ContainerError, match=f"rank {int(at >= sent[0].size)} cannot be read"):
            bundle.sum_into(out, broken, 2, slices(pipeline, sizes), 1.0)
        assert (out == 7).all()
    for cut in range(whole.size):
        with pytest.raises(ContainerError, match="cannot be read"):
            bundle.sum_into(np.empty(240, np.float32), whole[:cut], 2, slices(pipeline, sizes), 1.0)
    with pytest.raises(ContainerError, match="1 bytes follow"):
        bundle.sum_into(np.empty(240, np.float32), np.append(whole, np.uint8(0)), 2, slices(pipeline, sizes), 1.0)


def test_a_container_of_another_step_is_refused():
    pipeline, _ = both(config())
    sent = message(pipeline, cases.random(100), None, [100])
    with pytest.raises(ContainerError, match="of another tensor, step or config"):
        bundle.sum_into(np.empty(100, np.float32), sent, 1, slices(pipeline, [100], KEY._replace(step=6, rank=0)), 1.0)


@pytest.mark.parametrize(
    "other",
    [
        Config.load("topk_rice_qsgd", index="raw"),
        Config.load("topk_rice_qsgd", value={"entropy": "rans"}),
        Config.load("topk_rice_qsgd", value={"fit_scale": True}),
        Config.load("topk_rice_qsgd", value={"scaled": True}),
        Config.load("topk_rice_qsgd", value={"bits": 2, "bucket_size": 4096, "norm": "l2"}),  # fits scales by itself
        Config.load("topk_rice_qsgd", memory="dgc"),
        Config.load("topk_rice_qsgd", sparsifier={"name": "threshold", "threshold": 0.5}),
    ],
)
def test_other_configs_are_encoded_the_composed_way_and_summed_alike(other):
    native, composed = Pipeline(other), Pipeline(other)
    assert native.fused is None or not native.fused.encodes
    composed.fused = None
    key = KEY._replace(rank=0)
    data, sums = message(composed, cases.random(1000), None, [1000], key), []
    for pipeline in (native, composed):
        out = np.full(1000, 7, np.float32)
        bundle.sum_into(out, np.concatenate([data, data]), 2, slices(pipeline, [1000], key), 0.5)
        sums.append(out.tobytes())
    assert sums[0] == sums[1]


def test_the_recommended_preset_has_them_and_other_dtypes_go_the_composed_way():
    pipeline = Pipeline(Config.load("topk_rice_qsgd"))
    assert pipeline.fused is not None
    gradient = cases.random(1000).astype(np.float64)
    assert not pipeline.fused.takes(gradient)
    key = KEY._replace(rank=0)
    out = np.empty_like(gradient)
    bundle.sum_into(out, message(pipeline, gradient, None, [1000], key), 1, slices(pipeline, [1000], key), 1.0)
    assert np.count_nonzero(out) == 10


def test_a_schedule_of_the_density_is_followed():
    given = Config.load("topk_rice_qsgd", density_schedule={"steps": [(10, 0.25)]})
    for step in (0, 100):
        sizes = [pipeline.encode(cases.random(4000), None, KEY._replace(step=step), 2).size for pipeline in both(given)]
        assert sizes[0] == sizes[1] and (sizes[0] > 1000) == (step == 0)
