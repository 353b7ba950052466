"""Gradients that are sparse from the data on: the container of the dense gradient, and sums that stay sparse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_deepreduce import Config, ContainerError, SparseTensor
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.ops import sparse
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from tests import cases
from tests.oracle import pipeline as oracle
from tests.oracle import sparse_sum
from tests.selection import examples

SELECTING = [name for name, sparsifier in cases.SPARSIFIERS.items() if sparsifier.selects_sparse]
LISTS = [
    *((sparsifier, "rice", "qsgd", None) for sparsifier in SELECTING),
    *(("nonzero", index, "raw", None) for index in cases.INDEX),
    *(("topk", "packed", value, None) for value in cases.VALUE),
    *((sparsifier, None, None, joint) for sparsifier in ("nonzero", "topk") for joint in cases.JOINT),
]
CONFIGS = {"-".join(filter(None, names)): cases.config(*names, error_feedback=False) for names in LISTS}
CONFIGS |= {
    "topk of nonzeros": Config.load(sparsifier={"name": "topk", "density": 0.3, "density_of": "nonzeros"}),
    "capped at 3": Config.load(sparsifier={"name": "topk_capped", "cap": 3}),
    **{
        f"bloom {policy}": Config.load("topk_raw", index={"name": "bloom", "policy": policy, "fpr": 0.1})
        for policy in ("p0", "p1", "p2", "middle")
    },
}
PIPELINES = {name: Pipeline(Config.load(config, error_feedback=False)) for name, config in CONFIGS.items()}
WITH_RESIDUAL = {name: Pipeline(Config.load(config, error_feedback=True)) for name, config in CONFIGS.items()}
KEY = RngKey(4, 5, 6, 1)


@st.composite
def gradients(draw, numel=None):
    """A sparse tensor with zeros of both signs among its values, and equal magnitudes."""
    numel = draw(st.integers(1, 700)) if numel is None else numel
    indices = draw(st.lists(st.integers(0, numel - 1), unique=True, max_size=60))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    number = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5]) | st.floats(
        -(2.0**99), 2.0**99, width=32, allow_subnormal=False
    )
    values = draw(st.lists(number, min_size=len(indices), max_size=len(indices)))
    return SparseTensor(numel, np.array(sorted(indices), np.uint32), np.array(values, dtype))


def test_dense():
    found = SparseTensor(5, np.array([1, 4], np.uint32), np.array([2, -3], np.float64)).dense()
    assert found.dtype == np.float64 and found.tolist() == [0, 2, 0, 0, -3]
    assert SparseTensor(0, np.empty(0, np.uint32), np.empty(0, np.float32)).dense().size == 0
    assert SparseTensor(2**32 - 1, np.array([2**32 - 2], np.uint32), np.ones(1, np.float32)).indices.size == 1


def test_numel_is_an_integer_of_python():
    """Products of NumPy's wrap, and have no ``bit_length``."""
    tensor = SparseTensor(np.uint32(9), np.array([1], np.uint32), np.ones(1, np.float32))
    assert type(tensor.numel) is int and tensor.numel == 9
    with pytest.raises(TypeError, match="numel is 9.0; it must be an integer"):
        SparseTensor(9.0, np.array([1], np.uint32), np.ones(1, np.float32))


def test_lists_are_no_arrays():
    with pytest.raises(TypeError, match="indices are of type list; a NumPy array is needed"):
        SparseTensor(9, [1], np.ones(1, np.float32))
    with pytest.raises(TypeError, match="values are of type list"):
        SparseTensor(9, np.array([1], np.uint32), [1.0])


@pytest.mark.parametrize(
    ("numel", "indices", "values", "message"),
    [
        (-1, np.empty(0, np.uint32), np.empty(0, np.float32), "numel is -1"),
        (2**32, np.empty(0, np.uint32), np.empty(0, np.float32), "numel is 4294967296.*split"),
        (9, np.zeros(1, np.int64), np.zeros(1, np.float32), r"indices are int64\[1\]"),
        (9, np.zeros((1, 1), np.uint32), np.zeros((1, 1), np.float32), r"uint32 \[r\] is needed"),
        (9, np.zeros(1, np.uint32), np.zeros(1, np.float16), "values are float16"),
        (9, np.zeros(1, np.uint32), np.zeros(2, np.float32), "one for each index"),
        (9, np.array([1, 1], np.uint32), np.zeros(2, np.float32), "strictly increasing"),
        (9, np.array([2, 1], np.uint32), np.zeros(2, np.float32), "strictly increasing"),
        (9, np.array([1, 9], np.uint32), np.zeros(2, np.float32), "below numel = 9"),
        (0, np.array([0], np.uint32), np.zeros(1, np.float32), "below numel = 0"),
    ],
)
def test_what_does_not_fit_together(numel, indices, values, message):
    with pytest.raises(ValueError, match=message):
        SparseTensor(numel, indices, values)


@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=examples(20))
@given(gradient=gradients(), version=st.sampled_from([1, 2]))
def test_the_container_is_that_of_the_dense_gradient(name, gradient, version):
    pipeline = PIPELINES[name]
    want = pipeline.encode(gradient.dense(), None, KEY, version)
    assert pipeline.encode_sparse(gradient, None, KEY, version).tobytes() == want.tobytes()


@pytest.mark.parametrize("name", WITH_RESIDUAL)
@settings(max_examples=examples(20))
@given(data=st.data())
def test_only_the_gradients_elements_of_the_residual_are_sent(name, data):
    """The container is that of a dense vector: the residual plus the gradient at the gradient's indices, 0 elsewhere.
    But a Bloom filter's false positives, and the other elements of a block, have the residual's values."""
    pipeline, gradient = WITH_RESIDUAL[name], data.draw(gradients())
    residual = cases.random(gradient.numel, gradient.values.dtype.type)
    before = residual.copy()
    sent = pipeline.encode_sparse(gradient, residual, KEY)
    added = oracle.accumulated(before, gradient.dense())
    support, values = decode_part(wire.unpack(sent), gradient.numel)
    left = added.copy()
    left[support] -= values.astype(left.dtype)
    np.testing.assert_array_equal(residual, left)
    if "bloom" in name or "-blocks-" in name:
        return
    touched = np.zeros_like(before)
    touched[gradient.indices] = added[gradient.indices]
    want = np.zeros_like(before)
    assert sent.tobytes() == pipeline.encode(touched, want, KEY).tobytes()


@pytest.mark.parametrize("name", ["topk-rice-qsgd", "topk of nonzeros", "nonzero-skcompress"])
def test_sent_and_residual_are_the_gradients(name):
    pipeline, numel, rng = WITH_RESIDUAL[name], 500, np.random.default_rng(0)
    residual, sent, given = np.zeros(numel, np.float32), np.zeros(numel), np.zeros(numel)
    for step in range(30):
        support = np.flatnonzero(rng.random(numel) < 0.1).astype(np.uint32)
        gradient = SparseTensor(numel, support, rng.standard_normal(support.size).astype(np.float32))
        container = pipeline.encode_sparse(gradient, residual, RngKey(1, 2, step), 2)
        expected = pipeline.expected(numel, residual.dtype, RngKey(1, 2, step))
        sent += pipeline.decode_sparse(frame.split(container, 1, [expected])[0], numel, sent.dtype).dense()
        given += gradient.dense()
    np.testing.assert_allclose(sent + residual, given, atol=2e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_goes_raw_and_whole(bad):
    gradient = SparseTensor(50, np.uint32([3, 7]), np.float32([1.0, bad]))
    residual = cases.random(50)
    before = residual.copy()
    pipeline = WITH_RESIDUAL["topk-rice-qsgd"]
    sent = pipeline.encode_sparse(gradient, residual, KEY)
    np.testing.assert_array_equal(residual, before)
    assert sent.tobytes() == pipeline.encode(gradient.dense(), residual, KEY).tobytes()
    total = pipeline.decode_sparse([wire.unpack(sent)] * 2, 50, np.dtype(np.float32), key=KEY)
    np.testing.assert_array_equal(total.indices, [3, 7])
    np.testing.assert_array_equal(total.values, np.float32([2.0, bad]))


@pytest.mark.parametrize("name", sorted(set(cases.SPARSIFIERS) - set(SELECTING)))
def test_other_sparsifiers_refuse(name):
    pipeline = Pipeline(cases.config(name, "rice" if name != "randomk" else None, "raw"))
    gradient = SparseTensor(50, np.uint32([3, 7]), np.float32([1.0, 2.0]))
    residual = np.zeros(50, np.float32)
    with pytest.raises(ValueError, match=f"the sparsifier is {name!r}, which cannot select from a sparse gradient"):
        pipeline.encode_sparse(gradient, residual, KEY)
    assert not residual.any()


@pytest.mark.parametrize("residual", [np.zeros(49, np.float32), np.zeros(50)])
def test_the_residual_of_another_gradient_is_refused(residual):
    gradient = SparseTensor(50, np.uint32([3, 49]), np.float32([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"the residual is .*, and the gradient float32 \[50\]"):
        WITH_RESIDUAL["topk-rice-qsgd"].encode_sparse(gradient, residual, KEY)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data(), scale=st.sampled_from([1.0, 0.25, 1 / 3]))
def test_a_sum_is_the_union(dtype, data, scale):
    numel = data.draw(st.sampled_from([700, 10_000, 2**32 - 1]))
    tensors = data.draw(st.lists(gradients(numel), max_size=5))
    parts = [(one.indices, one.values.astype(np.float32)) for one in tensors]
    indices, values = sparse.total(parts, np.dtype(dtype), scale)
    want_indices, want_values = sparse_sum.total(parts, dtype, scale)
    assert indices.tobytes() == want_indices.tobytes() and indices.dtype == np.uint32
    assert values.tobytes() == want_values.tobytes() and values.dtype == dtype


@pytest.mark.parametrize("name", ["nonzero-rice-raw", "topk-rice-qsgd", "topk-skcompress"])
def test_sparse_and_dense_sums_of_containers_are_equal(name):
    pipeline, numel, rng = PIPELINES[name], 20_000, np.random.default_rng(0)
    containers, dense = [], np.empty(numel, np.float32)
    for rank in range(5):
        support = np.flatnonzero(rng.random(numel) < [0, 0.01, 0.2][rank % 3]).astype(np.uint32)
        gradient = SparseTensor(numel, support, rng.standard_normal(support.size).astype(np.float32))
        containers.append(wire.unpack(pipeline.encode_sparse(gradient, None, KEY._replace(rank=rank))))
    pipeline.decode(containers, dense, 0.2, KEY)
    summed = pipeline.decode_sparse(containers, numel, dense.dtype, 0.2, KEY)
    assert summed.dense().tobytes() == dense.tobytes()
    nothing = pipeline.decode_sparse([], numel, dense.dtype)
    assert nothing.numel == numel and not nothing.indices.size


def test_containers_of_another_config_or_size_are_refused():
    gradient = SparseTensor(50, np.uint32([3, 7]), np.float32([1.0, 2.0]))
    mine = wire.unpack(PIPELINES["nonzero-rice-raw"].encode_sparse(gradient, None, KEY))
    theirs = wire.unpack(PIPELINES["nonzero-packed-raw"].encode_sparse(gradient, None, KEY))
    with pytest.raises(ContainerError, match="rank 1.*this job's config cannot give"):
        PIPELINES["nonzero-rice-raw"].decode_sparse([mine, theirs], 50, np.dtype(np.float32), key=KEY)
    with pytest.raises(ContainerError, match="rank 0.*has 50 elements, and this one has 51"):
        PIPELINES["nonzero-rice-raw"].decode_sparse([mine], 51, np.dtype(np.float32), key=KEY)
