"""Sparse linear models: data, losses, optimizers and exchanges against slow dense ones, and a job of two ranks."""

from __future__ import annotations

import json

import linear_data
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_exchange import Endpoint, exchange_all
from linear_models import LOSSES, MOMENTS, Model
from scipy.sparse import csr_matrix
from sklearn.datasets import dump_svmlight_file

from hvd_deepreduce import Config, SparseTensor
from tests.oracle import linear as oracle
from tests.ranks import ROOT, launch

RAW = Config.load("sparse_best", value="raw")
FEEDBACK = {
    "sparsifier": {"name": "topk", "density": 0.5, "density_of": "nonzeros"},
    "index": "rice",
    "value": {"name": "qsgd", "bits": 3, "bucket_size": 64},
}


def some_rows(count=40, numel=30, seed=0):
    rng = np.random.default_rng(seed)
    dense = (rng.standard_normal((count, numel)) * (rng.random((count, numel)) < 0.2)).astype(np.float32)
    labels = rng.choice([-1, 1], count).astype(np.float32)
    return linear_data.Rows(csr_matrix(dense), labels)


def sparse_vector(numel, elements):
    indices = np.array(sorted(elements), np.uint32)
    return SparseTensor(numel, indices, np.array([elements[i] for i in indices.tolist()], np.float32))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients(name):
    rows, model = some_rows(), Model(30, "sgd", 0.1, 0.0)
    model.theta[:] = np.random.default_rng(1).standard_normal(30)
    batch = linear_data.Batch.of(rows)
    dense = rows.features.toarray().astype(np.float64)
    want = oracle.gradient(name, dense, rows.labels, model.theta.astype(np.float64))
    got = model.gradient(batch, LOSSES[name])
    assert got.indices.tolist() == np.flatnonzero(dense.any(0)).tolist()
    np.testing.assert_allclose(got.dense(), want, rtol=1e-5, atol=1e-6)
    mean = oracle.loss(name, dense, rows.labels, model.theta.astype(np.float64))
    assert model.losses(batch, LOSSES[name]) / 40 == pytest.approx(mean, rel=1e-5)
    slope = np.zeros(30)
    for i in range(30):
        step = 1e-6 * np.eye(30)[i]
        slope[i] = oracle.loss(name, dense, rows.labels, model.theta + step)
        slope[i] = (slope[i] - oracle.loss(name, dense, rows.labels, model.theta - step)) / 2e-6
    np.testing.assert_allclose(want, slope, atol=1e-5)


@pytest.mark.parametrize("optimizer", MOMENTS)
@settings(max_examples=30)
@given(
    steps=st.lists(st.dictionaries(st.integers(0, 9), st.floats(-4, 4).filter(lambda g: abs(g) > 1e-3)), max_size=12),
    l2=st.sampled_from([0.0, 0.5]),
)
def test_lazy_steps_are_the_dense_ones(optimizer, steps, l2):
    model, everywhere = Model(10, optimizer, 0.1, l2), np.arange(10, dtype=np.uint32)
    for elements, want in zip(steps, oracle.train(optimizer, steps, 10, 0.1, l2), strict=True):
        model.step(sparse_vector(10, elements))
        np.testing.assert_allclose(model.at(everywhere), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", MOMENTS)
def test_dense_steps_are_those_of_torch(optimizer):
    weights, model, rng = torch.zeros(9), Model(9, optimizer, 0.05, 0.0), np.random.default_rng(0)
    theirs = {
        "sgd": lambda: torch.optim.SGD([weights], lr=0.05),
        "adam": lambda: torch.optim.Adam([weights], lr=0.05),
        "amsgrad": lambda: torch.optim.Adam([weights], lr=0.05, amsgrad=True),
    }[optimizer]()
    for _ in range(20):
        gradient = rng.standard_normal(9).astype(np.float32)
        weights.grad = torch.from_numpy(gradient)
        theirs.step()
        model.step(SparseTensor(9, np.arange(9, dtype=np.uint32), gradient))
    np.testing.assert_allclose(model.theta, weights.numpy(), rtol=1e-4, atol=1e-5)


def test_libsvm_files_are_read_in_parts(tmp_path):
    rows, path = some_rows(57, 30), tmp_path / "data.svm"
    dump_svmlight_file(rows.features, rows.labels > 0, str(path), zero_based=False)
    for ranks in (1, 2, 5):
        parts = [linear_data.resized(linear_data.read_libsvm(path, rank, ranks), 30) for rank in range(ranks)]
        assert all(part.labels.size > 5 for part in parts)
        features = np.concatenate([part.features.toarray() for part in parts])
        np.testing.assert_array_equal(features, rows.features.toarray())
        np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), rows.labels)
    with pytest.raises(SystemExit, match="has no lines for rank 499 of 500"):
        linear_data.read_libsvm(path, 499, 500)
    with pytest.raises(SystemExit, match="57 rows do not give 100 batches"):
        linear_data.batches(rows, 0.01)


def test_batches_and_the_split_have_each_row_once():
    rows = some_rows(81)
    train, test = rows.split(3)
    assert (train.labels.size, test.labels.size) == (60, 21)
    both = np.concatenate([train.features.toarray(), test.features.toarray()])
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, rows.features.toarray().tolist()))
    batches = linear_data.batches(train, 0.1)
    assert [one.labels.size for one in batches] == [6] * 10
    for number, batch in enumerate(batches):
        dense = np.zeros((6, 30), np.float32)
        dense[:, batch.support] = batch.features.toarray()
        np.testing.assert_array_equal(dense, train.features[6 * number : 6 * number + 6].toarray())
        np.testing.assert_array_equal(batch.transposed.toarray(), batch.features.toarray().T)
    assert sorted(linear_data.epoch_order(10, 0, 1)) == list(range(10))


def test_generated_rows_have_the_statistics_of_kdd10():
    count, numel = linear_data.scaled_kdd10(1000)
    rows = linear_data.generated(count, numel, 0)
    assert rows.features.shape == (count, numel)
    assert set(np.diff(rows.features.indptr)) == {linear_data.ROW_NONZEROS}
    np.testing.assert_allclose(np.sqrt(np.asarray(rows.features.power(2).sum(1))), 1, rtol=1e-5)
    train, _ = rows.split(0)
    for share, density in ((0.1, 0.1), (0.01, 0.0177)):  # SKCompress, section 7.2
        found = np.mean([one.support.size for one in linear_data.batches(train, share)]) / numel
        assert found == pytest.approx(density, rel=0.1)
    other = linear_data.generated(100, numel, 0, begin=100)
    assert (other.features != rows.features[:100]).nnz


@pytest.mark.parametrize("servers", [0, 1, 3])
def test_an_exchange_gives_the_mean(servers):
    rng, numel = np.random.default_rng(servers), 500
    endpoints = [Endpoint(RAW, rank, 4, numel, servers) for rank in range(4)]
    for _ in range(3):
        gradients = [sparse_vector(numel, {i: rng.standard_normal() for i in range(numel) if rng.random() < 0.1})
                     for _ in range(4)]  # fmt: skip
        exchanged = exchange_all(endpoints, gradients)
        np.testing.assert_allclose(exchanged.mean.dense(), sum(one.dense() for one in gradients) / 4, atol=1e-6)
        assert exchanged.up > 0 and (exchanged.down > 0) == (servers > 0)
    assert {one.step for one in endpoints} == {3}


@pytest.mark.parametrize("servers", [0, 2])
def test_feedback_keeps_what_was_not_sent(servers):
    rng, numel = np.random.default_rng(0), 300
    endpoints = [Endpoint(Config.load(FEEDBACK), rank, 3, numel, servers) for rank in range(3)]
    given, applied = np.zeros(numel), np.zeros(numel)
    for _ in range(10):
        gradients = [sparse_vector(numel, {i: rng.standard_normal() for i in range(numel) if rng.random() < 0.1})
                     for _ in range(3)]  # fmt: skip
        given += sum(one.dense() for one in gradients) / 3
        applied += exchange_all(endpoints, gradients).mean.dense()
    kept = sum(one.residuals[0] for one in endpoints) / 3
    if servers:
        kept = kept + np.concatenate([one.residuals[1] for one in endpoints])
    np.testing.assert_allclose(applied + kept, given, atol=1e-5)
    assert kept.any()


@pytest.mark.launch
def test_a_job_is_its_simulation_and_resumes_exactly(tmp_path):
    """Two ranks, of which one is the server, stopped after an epoch and resumed: the models of both are those of the
    same training in this process, to the bit."""
    rows, path, out = some_rows(160, 50), tmp_path / "data.svm", tmp_path / "out"
    dump_svmlight_file(rows.features, rows.labels, str(path), zero_based=False)
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(FEEDBACK))
    program = ROOT / "scripts" / "train" / "train_linear.py"
    arguments = ["--config", str(config), "--data", str(path), "--features", "50", "--servers", "1", "--epochs", "2",
                 "--model", "svm", "--lr", "0.05", "--out", str(out)]  # fmt: skip
    launch("mpirun", 2, program, *arguments, "--stop-after", "1")
    launch("mpirun", 2, program, *arguments, "--resume")

    parts = [linear_data.resized(linear_data.read_libsvm(path, rank, 2), 50).split(0)[0] for rank in range(2)]
    batches = [linear_data.batches(part, 0.1) for part in parts]
    endpoints = [Endpoint(Config.load(FEEDBACK), rank, 2, 50, 1) for rank in range(2)]
    model, sent = Model(50, "adam", 0.05, 0.01), [0, 0]
    for epoch in range(2):
        for number in linear_data.epoch_order(10, 0, epoch):
            exchanged = exchange_all(endpoints, [model.gradient(own[number], LOSSES["svm"]) for own in batches])
            model.step(exchanged.mean)
            sent[epoch] += exchanged.down // 2
    for rank in range(2):
        with np.load(out / f"checkpoint.rank{rank}.npz") as saved:
            for name, want in model.state_dict().items():
                assert saved[name].tobytes() == want.tobytes()
            for number, residual in enumerate(endpoints[rank].residuals):
                assert saved[f"residual{number}"].tobytes() == residual.tobytes()
    epochs = json.loads((out / "metrics.json").read_text())["epochs_done"]
    assert [row["epoch"] for row in epochs] == [1, 2] and epochs[1]["loss"] < epochs[0]["loss"]
    assert all(row["bytes_sent"] == row["bytes_received"] > down for row, down in zip(epochs, sent, strict=True))
