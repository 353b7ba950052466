import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.ops import arrays, deferred
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from hvd_deepreduce.wire.standalone import ContainerError
from tests import cases
from tests.oracle import container as oracle_container
from tests.oracle import pipeline as oracle

KEY = RngKey(1, 2, 3)
PLAIN = Pipeline(cases.config("topk", "rice", "raw"))
PIPELINES = {name: Pipeline(config) for name, config in cases.CONFIGS.items()}


def total(data, numel, dtype=np.float64, scale=1.0, threads=1):
    """The decoded sum of some containers' bytes."""
    out = np.full(numel, 7, dtype)
    containers = [wire.unpack(one, rank, numel) for rank, one in enumerate(data)]
    Pipeline(PLAIN.config, threads).decode(containers, out, scale)
    return out


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sent_and_residual_are_gradient_and_old_residual(name, dtype):
    """Over several steps, the sum of all that was sent and the last residual is the sum of all gradients."""
    pipeline, numel = PIPELINES[name], 400
    residual, gradients, sent = np.zeros(numel, dtype), np.zeros(numel), np.zeros(numel)
    for step in range(8):
        gradient = cases.random(numel, dtype, seed=step)
        before, old = gradient.copy(), residual.astype(np.float64)
        decoded = total([pipeline.encode(gradient, residual, RngKey(1, 2, step))], numel)
        np.testing.assert_array_equal(gradient, before)
        sent += decoded
        gradients += gradient
        one_step = gradient.astype(np.float64) + old
        slack = 4 * np.finfo(dtype).eps * (np.abs(gradient) + np.abs(old) + np.abs(decoded))
        assert np.all(np.abs(decoded + residual - one_step) <= slack)
    np.testing.assert_allclose(sent + residual, gradients, rtol=0, atol=200 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", PIPELINES)
def test_what_is_not_finite_goes_raw_and_whole(name):
    for dtype, bad, numel in itertools.product((np.float32, np.float64), (np.nan, np.inf, -np.inf), (1, 50)):
        gradient, residual = cases.random(numel, dtype), cases.random(numel, dtype, seed=5)
        gradient[numel // 2] = bad
        before = residual.copy()
        data = PIPELINES[name].encode(gradient, residual, KEY)
        np.testing.assert_array_equal(residual, before)
        container = wire.unpack(data, 0, numel)
        assert (container.sparsifier, container.index, container.value, container.joint) == (0, 0, 1, False)
        assert container.count == numel and container.values.size == gradient.nbytes
        other = PIPELINES[name].encode(cases.random(numel, dtype, seed=2), None, KEY)
        summed = total([other, data, other], numel, dtype, 0.5)
        assert np.flatnonzero(~np.isfinite(summed)).tolist() == [numel // 2]
        alone = total([data], numel, dtype)
        np.testing.assert_array_equal(alone, gradient)


def test_nan_at_the_end_of_a_large_tensor_is_seen_by_every_thread_count():
    gradient = np.zeros((1 << 20) * 2 + 5, np.float32)
    for at in (0, 1 << 20, gradient.size - 1):
        gradient[at] = np.nan
        for threads in (1, 2, 3):
            assert not deferred.finite(gradient, threads)
        gradient[at] = 0
    assert deferred.finite(gradient, 3)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_residual_that_would_overflow_stays_finite(name):
    limit = np.finfo(np.float32).max
    for sign in (1, -1):
        gradient, residual = np.full(64, sign * limit), np.full(64, sign * limit)
        for step in range(30):
            data = PIPELINES[name].encode(gradient, residual, RngKey(1, 2, step))
            _, values = decode_part(wire.unpack(data), 64)
            assert np.isfinite(values).all()
            assert not np.isnan(residual).any()


def test_a_tensor_that_is_too_large():
    stub = SimpleNamespace(size=2**32)
    residual = np.zeros(3, np.float32)
    with pytest.raises(ContainerError, match="4294967296 elements, and at most 2\\^32 - 1 are allowed: split"):
        PLAIN.encode(stub, residual, KEY)
    with pytest.raises(ContainerError, match="split"):
        PLAIN.encode(np.broadcast_to(np.float32(1), 2**32), residual, KEY)
    with pytest.raises(ContainerError, match="split"):
        PLAIN.select(stub, residual, KEY, into=np.zeros(3, np.float32))
    assert not residual.any()


def test_a_gradient_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        PLAIN.encode(np.zeros(20, np.float32)[::2], None, KEY)
    with pytest.raises(ValueError, match="not contiguous"):
        PLAIN.decode([], np.zeros(20, np.float32)[::2])


@pytest.mark.parametrize("name", ["recommended", "topk_raw", "signtopk"])
def test_the_residual_of_another_gradient_and_other_dtypes_are_refused(name):
    pipeline, gradient = Pipeline(Config.load(name)), np.ones(100, np.float32)
    for residual in (np.zeros(10, np.float32), np.zeros(1000, np.float32), np.zeros(100, np.float64)):
        for version in (1, 2):
            with pytest.raises(ValueError, match=r"gradient float32 \[100\]: give the residual of this gradient"):
                pipeline.encode(gradient, residual, RngKey(0, 0, 0), version)
        assert not residual.any()
    with pytest.raises(TypeError, match="an array is float16; float32 or float64 is needed"):
        pipeline.encode(gradient.astype(np.float16), None, RngKey(0, 0, 0))


def test_memory_whose_elements_are_not_aligned_is_refused():
    """Vector instructions would end the process."""
    gradient, out = (np.zeros(44, np.uint8)[past : past + 40].view(np.float32) for past in (1, 2))
    container = wire.unpack(PLAIN.encode(np.arange(10, dtype=np.float32), None, KEY))
    for call in (lambda: PLAIN.encode(gradient, None, KEY), lambda: PLAIN.decode([container], out)):
        with pytest.raises(ValueError, match=r"array of float32 that begins within .*: pass array.copy\(\)"):
            call()
    assert not out.any()


@given(st.data(), st.integers(1, 5), st.sampled_from([np.float32, np.float64]), st.sampled_from([1.0, 0.5, 1 / 3, 0.0]))
def test_sums_equal_the_oracle(data, ranks, dtype, scale):
    numel = data.draw(st.sampled_from([1, 16383, 16384, 16385, 50000]) if ranks < 4 else st.integers(0, 300))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    parts, magnitudes = [], np.zeros(numel)
    for _ in range(ranks):
        indices = None
        if rng.random() < 0.7:
            indices = np.flatnonzero(rng.random(numel) < rng.choice([0, 0.01, 0.9])).astype(np.uint32)
        values = rng.standard_normal(numel if indices is None else indices.size)
        parts.append((indices, values.astype(rng.choice([np.float32, dtype]))))
        magnitudes[slice(None) if indices is None else indices] += np.abs(values)
    room = np.full(numel + 21, 7, dtype)
    offset = data.draw(st.integers(0, 16))  # an output that begins anywhere within a cache line
    out = room[offset : offset + numel]
    arrays.sum_into(out, parts, scale, data.draw(st.integers(1, 3)))
    slack = np.finfo(dtype).eps * (ranks + 1) * magnitudes
    assert np.all(np.abs(out - oracle.total(parts, numel, scale)) <= slack)
    assert np.all(room[:offset] == 7) and np.all(room[offset + numel :] == 7)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_sums_do_not_hang_on_threads(ranks):
    numel = (1 << 20) * 2 + 4097
    sparse, dense = Pipeline(cases.config("topk", "rice", "raw")), Pipeline(cases.config("none", "raw", "half"))
    data = [
        (dense if rank == 1 else sparse).encode(cases.random(numel, seed=rank), None, RngKey(1, 2, 3, rank))
        for rank in range(ranks)
    ]
    expected = total(data, numel, np.float32, 1 / ranks)
    for threads in (2, 3):
        np.testing.assert_array_equal(total(data, numel, np.float32, 1 / ranks, threads), expected)
    parts = [decode_part(wire.unpack(one), numel) for one in data]
    np.testing.assert_allclose(expected, oracle.total(parts, numel, 1 / ranks), atol=1e-5)


@pytest.mark.parametrize("name", PIPELINES)
def test_threads_change_no_container(name):
    numel = (1 << 20) + 4097 if name in ("value raw", "value qsgd") else 5000
    data = []
    for threads in (1, 2, 3):
        residual = cases.random(numel, seed=4)
        pipeline = Pipeline(PIPELINES[name].config, threads)
        data.append((pipeline.encode(cases.random(numel), residual, KEY).tobytes(), residual.tobytes()))
    assert data[0] == data[1] == data[2]


def test_the_config_says_how_many_threads():
    assert Pipeline(cases.config("topk", "rice", "raw", threads=2), threads=5).threads == 2
    assert Pipeline(cases.config("topk", "rice", "raw"), threads=5).threads == 5


def test_sum_of_no_containers_is_zero():
    assert total([], 10).tolist() == [0] * 10


def test_an_error_leaves_the_output_as_it_was():
    good = PIPELINES["value qsgd"].encode(cases.random(300), None, KEY)
    header = oracle_container.read(good.tobytes())
    broken = bytearray(good)
    broken[64] = 40  # no Rice parameter is above 31
    bad = np.frombuffer(oracle_container.repaired(bytes(broken)), np.uint8)
    assert header["index"] == 4
    out = np.full(300, 7, np.float32)
    with pytest.raises(ContainerError, match="the container of rank 1 cannot be read"):
        PLAIN.decode([wire.unpack(one, rank) for rank, one in enumerate((good, bad))], out)
    with pytest.raises(ContainerError, match="rank 2 .* 200 elements, and this one has 300"):
        other = PLAIN.encode(cases.random(200), None, KEY)
        PLAIN.decode([wire.unpack(one) for one in (good, good, other)], out)
    assert np.all(out == 7)


def test_header_says_what_was_done():
    container = wire.unpack(PIPELINES["value qsgd"].encode(cases.random(300), None, RngKey(4, 5, 6, 7)))
    assert (container.sparsifier, container.index, container.value, container.joint) == (1, 4, 3, False)
    assert (container.numel, container.count, container.key) == (300, 30, RngKey(4, 5, 6))
    assert container.digest == PIPELINES["value qsgd"].config.digest() and container.dtype == np.float32
    repeated = wire.unpack(PIPELINES["randomk value qsgd"].encode(cases.random(300), None, KEY))
    assert (repeated.sparsifier, repeated.index, repeated.indices.size) == (2, 0, 0)
