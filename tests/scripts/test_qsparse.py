"""Local steps and compressed updates, simulated: Qsparse-local-SGD against its oracle, and its rate of convergence."""

from __future__ import annotations

import numpy as np
import pytest
import qsparse_bits
import qsparse_ends
from hypothesis import given, settings
from hypothesis import strategies as st
from local_problems import Softmax
from local_updates import LocalUpdates, Outer, own_times
from mnist import mnist_5k
from simulated_ranks import SimulatedRanks
from sklearn.datasets import load_digits

from hvd_deepreduce import Config
from tests.oracle.qsparse import qsparse_local_sgd

DENSE = {"sparsifier": "none", "value": "raw", "error_feedback": False}


def job(numel, workers, k=None, **changes):
    if k is None:
        return SimulatedRanks(Config.load(DENSE, scope="model", **changes), workers, [numel])
    config = Config.load("topk_raw", sparsifier={"name": "topk_capped", "cap": k}, scope="model", **changes)
    return SimulatedRanks(config, workers, [numel])


class Quadratic:
    """Worker r has f_r(x) = sum(curvature * (x - centre_r)^2) / 2, and gradients with noise."""

    def __init__(self, workers=4, numel=20, noise=1.0, spread=1.0, distance=1.0, seed=0):
        rng = np.random.default_rng(seed)
        self.curvature = np.linspace(1, 2, numel)  # mu = 1, L = 2
        self.centres = spread * rng.standard_normal((workers, numel))
        self.best = self.centres.mean(0)
        self.start = (self.best + distance * rng.standard_normal(numel)).astype(np.float32)
        self.noise, self.seed = noise, seed

    def gradient(self, worker, step, model):
        rng = np.random.default_rng((self.seed, worker, step))
        return self.curvature * (model - self.centres[worker]) + self.noise * rng.standard_normal(model.size)

    def error(self, model):
        """f(model) - f*."""
        return 0.5 * float(self.curvature @ (model - self.best) ** 2)


def run(problem, updates, rates, times):
    for step, eta in enumerate(rates):
        for worker, model in enumerate(updates.local):
            model -= np.float32(eta) * problem.gradient(worker, step, model).astype(np.float32)
        if times[step].any():
            updates.synchronise(np.flatnonzero(times[step]).tolist())


@given(seed=st.integers(0, 1000), workers=st.integers(1, 4), most=st.integers(1, 5), k=st.integers(1, 12),
       asynchronous=st.booleans())  # fmt: skip
@settings(max_examples=25)
def test_the_master_and_the_memories_are_those_of_the_paper(seed, workers, most, k, asynchronous):
    problem, steps = Quadratic(workers, 12, seed=seed), 17
    rates = [0.3 / (1 + step / 10) for step in range(steps)]
    together = np.tile((np.arange(1, steps + 1) % most == 0)[:, None], workers)
    times = own_times(workers, steps, most, seed) if asynchronous else together
    updates = LocalUpdates(job(12, workers, k), problem.start)
    run(problem, updates, rates, times)
    master, memories = qsparse_local_sgd(problem.start, problem.gradient, rates, times, k)
    np.testing.assert_allclose(updates.master, master, atol=2e-5)
    np.testing.assert_allclose(updates.job.residuals, memories, atol=2e-5)


def test_one_step_without_compression_is_synchronous_sgd():
    problem, workers = Quadratic(), 4
    updates = LocalUpdates(job(20, workers), problem.start)
    run(problem, updates, [0.1] * 30, np.ones((30, workers), bool))
    model = problem.start.astype(np.float64)
    for step in range(30):
        model -= 0.1 * np.mean([problem.gradient(worker, step, model) for worker in range(workers)], 0)
    np.testing.assert_allclose(updates.master, model, atol=1e-5)
    assert (updates.local == updates.master).all() and (updates.anchors == updates.master).all()


def test_more_steps_without_compression_average_the_local_models():
    problem = Quadratic(workers=3)
    updates = LocalUpdates(job(20, 3), problem.start)
    times = np.zeros((5, 3), bool)
    times[4] = True
    run(problem, updates, [0.1] * 5, times)
    ends = []
    for worker in range(3):
        model = problem.start.astype(np.float64)
        for step in range(5):
            model -= 0.1 * problem.gradient(worker, step, model)
        ends.append(model)
    np.testing.assert_allclose(updates.master, np.mean(ends, 0), atol=1e-5)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("preset", ["signtopk", "topk_rice_qsgd"])
def test_what_is_sent_and_what_is_kept_are_the_progress(preset, asynchronous):
    problem, workers, steps = Quadratic(numel=200), 4, 40
    config = Config.load(preset, density=0.05, scope="model")
    updates = LocalUpdates(SimulatedRanks(config, workers, [200]), problem.start)
    times = own_times(workers, steps, 4, seed=1) if asynchronous else np.tile(np.arange(1, 41) % 4 == 0, (workers, 1)).T
    progress, sent = np.zeros(200), np.zeros(200)
    for step in range(steps):
        for worker, model in enumerate(updates.local):
            model -= np.float32(0.1) * problem.gradient(worker, step, model).astype(np.float32)
        here = np.flatnonzero(times[step]).tolist()
        if here:
            progress += (updates.anchors - updates.local)[here].sum(0)
            sent += workers * updates.synchronise(here).astype(np.float64)
    np.testing.assert_allclose(sent + np.sum(updates.job.residuals, 0), progress, atol=1e-3)
    np.testing.assert_allclose(workers * (problem.start - updates.master), sent, atol=1e-3)


def test_an_absent_worker_keeps_its_memory_and_its_model():
    updates = LocalUpdates(job(100, 3, k=20), np.zeros(100, np.float32), decay=0.5)
    rng = np.random.default_rng(0)
    updates.local[:] = rng.standard_normal((3, 100))
    updates.synchronise()
    before, local, bytes_before = updates.job.residuals[1].copy(), updates.local.copy(), updates.job.container_bytes
    updates.local[:] += rng.standard_normal((3, 100)).astype(np.float32)
    mine, mean = updates.local[1].copy(), updates.synchronise([0, 2])
    assert np.array_equal(updates.job.residuals[1], before) and np.array_equal(updates.local[1], mine)
    assert np.array_equal(updates.anchors[1], local[1]) and not np.array_equal(updates.anchors[0], local[0])
    assert np.count_nonzero(mean) <= 40
    assert updates.job.container_bytes - bytes_before == pytest.approx(2 / 3 * bytes_before, rel=0.05)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_the_outer_step_is_that_of_pytorch(momentum):
    import torch

    rng = np.random.default_rng(0)
    model = rng.standard_normal(8).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(model.copy()))
    theirs = torch.optim.SGD([parameter], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    ours = Outer(0.7, momentum)
    for _ in range(5):
        update = rng.standard_normal(8).astype(np.float32)
        parameter.grad = torch.from_numpy(update.copy())
        theirs.step()
        ours.step(model, update)
    np.testing.assert_allclose(model, parameter.detach().numpy(), atol=1e-6)


def test_own_times_keep_the_gap():
    times = own_times(5, 200, 6, seed=3)
    assert times[-1].all() and not (times == times[:, :1]).all()
    for column in times.T:
        gaps = np.diff(np.flatnonzero(column), prepend=-1)
        assert gaps.min() >= 1 and gaps.max() <= 6 and len(set(gaps.tolist())) > 3


# Theorem 2: mu = 1, L = 2, gamma = k / d = 1/2, H = 8, so a >= max(4 H / gamma, 32 L / mu, H) = 64.
A, K, EVERY = 64, 10, 8


def slope(weight, asynchronous=False, **changes):
    """Of log(E f(mean model) - f*) against log T, from T = 8 a to 64 a, mean of four seeds.

    Args:
        weight: of the models after t steps in the average over t.
        asynchronous: each worker synchronises at times of its own, ``EVERY`` steps apart at most.
    """
    ends = [8 * A, 16 * A, 32 * A, 64 * A]
    errors = np.zeros(len(ends))
    for seed in range(4):
        problem = Quadratic(noise=8.0, spread=3.0, distance=40.0, seed=seed)
        updates = LocalUpdates(job(20, 4, K, **changes), problem.start)
        noise = np.random.default_rng(seed)
        together = np.tile((np.arange(1, ends[-1] + 1) % EVERY == 0)[:, None], 4)
        times = own_times(4, ends[-1], EVERY, seed) if asynchronous else together
        sums, weights = np.zeros(20), 0.0
        for step in range(ends[-1]):
            w = weight(step)
            sums, weights = sums + w * updates.local.mean(0), weights + w
            eta = 8 / (A + step)
            gradients = problem.curvature * (updates.local - problem.centres)
            gradients += problem.noise * noise.standard_normal(gradients.shape)
            updates.local -= (eta * gradients).astype(np.float32)
            if times[step].any():
                updates.synchronise(np.flatnonzero(times[step]).tolist())
            if step + 1 in ends:
                errors[ends.index(step + 1)] += problem.error(sums / weights)
    return np.polyfit(np.log(ends), np.log(errors), 1)[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_error_falls_as_one_over_t(asynchronous):
    """Corollary 2 and theorem 4: O(sigma^2 / (mu b R T)) with eta_t = 8 / (mu (a + t)), averaged with the weights
    (a + t)^2."""
    assert slope(lambda t: (A + t) ** 2, asynchronous) == pytest.approx(-1, abs=0.15)


@pytest.mark.parametrize("broken", ["no error feedback", "equal weights"])
def test_the_rate_needs_error_feedback_and_the_weights(broken):
    found = slope(lambda t: (A + t) ** 2, error_feedback=False) if broken == "no error feedback" else slope(lambda t: 1)
    assert abs(found + 1) > 0.4, found


def small_digits(workers, batch=8):
    """Softmax regression on scikit-learn's digits."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    return Softmax((images[:1400], labels[:1400], images[1400:], labels[1400:]), workers, batch)


def test_the_gradients_of_softmax_regression_are_those_of_pytorch():
    import torch

    problem, rng = small_digits(3, 5), np.random.default_rng(0)
    models = rng.standard_normal((3, problem.sizes[0])).astype(np.float32)
    found = np.empty_like(models)
    problem.gradients(models, np.random.default_rng(1), found)
    drawn = np.random.default_rng(1).integers(0, 466, (3, 5)) * 3 + np.arange(3)[:, None]
    images, labels = load_digits(return_X_y=True)
    for worker in range(3):
        x = torch.tensor(images[drawn[worker]] / 16, dtype=torch.float32)
        model = torch.tensor(models[worker].reshape(65, 10), requires_grad=True)
        scores = x @ model[:64] + model[64]
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels[drawn[worker]]))
        (loss + model.square().sum() / 2 / 1400).backward()
        np.testing.assert_allclose(found[worker], model.grad.numpy().reshape(-1), atol=1e-5)
    loss, error = problem.evaluate(models[0])
    model = torch.tensor(models[0].reshape(65, 10))
    scores = torch.tensor(images / 16, dtype=torch.float32) @ model[:64] + model[64]
    expected = (
        torch.nn.functional.cross_entropy(scores[:1400], torch.tensor(labels[:1400])) + model.square().sum() / 2800
    )
    assert loss == pytest.approx(float(expected), rel=1e-5)
    assert error == pytest.approx(float((scores[1400:].argmax(1) != torch.tensor(labels[1400:])).float().mean()))


def test_bits_as_the_paper_counts():
    """d = 7,850: 13 bits an index; k = 78."""
    of = {(method.name, method.every): method.paper_bits(7850) for method in qsparse_bits.of_the_paper(0.01)}
    assert of["SGD", 1] == of["SGD", 8] == 32 * 7850
    assert of["Top_k", 4] == 78 * (32 + 13)
    assert of["EF-SignSGD", 1] == 7850 + 32
    assert of["Q o Top_k", 1] == 78 * (4 + 13) + 32
    assert of["SignTop_k", 8] == 78 * (1 + 13) + 32


def test_bits_until_a_target():
    """Fewer synchronisations and fewer elements need fewer bits; the bits are those of the containers."""
    problem, setting = small_digits(5), qsparse_bits.Setting(5, 160, 4, (0.02, 0.5, 20.0), 1000, 0.15, 0.6)
    methods = [method for method in qsparse_bits.of_the_paper(0.05) if method.name in ("SGD", "Top_k", "SignTop_k")]
    results = [qsparse_bits.best(problem, method, setting, 2) for method in methods if method.every != 4]
    bits = {(loss.method.name, loss.method.every): loss.needed("sent_bits") for loss, _ in results}
    assert bits["SGD", 1] > 4 * bits["SGD", 8] > bits["Top_k", 8] > 3 * bits["SignTop_k", 8]
    assert all(loss.rate == 0.5 and not loss.at_edge for loss, _ in results)
    for loss, error in results:
        for curve in loss.curves:
            assert curve[-1].loss <= 0.6 and min(point.error for point in curve) <= error.target == 0.15
            rounds = curve[-1].step // loss.method.every
            assert curve[-1].paper_bits == 5 * rounds * loss.method.paper_bits(650)
    first = results[0][0].curves[0][-1]
    assert first.paper_bits <= first.sent_bits <= 1.01 * first.paper_bits  # a header
    text = qsparse_bits.table(results)
    assert text.count("\n") == 1 + len(results) and "not reached" not in text
    head, row = (line.split(" | ") for line in text.splitlines()[::2][:2])
    assert row[head.index("SGD / this")] == "1x"


def test_each_target_has_its_step_size_and_none_at_the_edge_of_the_grid(monkeypatch):
    """The loss is reached first with 0.4, the error with 0.2; the figures are those of the target's own step size."""
    steps = {0.1: (40, 40), 0.2: (30, 8), 0.4: (16, 24), 0.8: (40, 40)}

    def train(problem, method, setting, rate, seed, most):
        loss, error = steps[rate]
        return [qsparse_bits.Point(n, 0.0, 100.0 * n, 0.2 if n >= loss else 1, 0.1 if n >= error else 1)
                for n in range(2, 41, 2)]  # fmt: skip

    monkeypatch.setattr(qsparse_bits, "train", train)
    methods = [one for one in qsparse_bits.of_the_paper(0.01) if one.name in ("SGD", "Top_k") and one.every == 1]

    def found(*rates):
        setting = qsparse_bits.Setting(1, 40, 2, rates, 1, 0.1, 0.2)
        return [qsparse_bits.best(None, method, setting, 1) for method in methods]

    for loss, error in found(0.1, 0.2, 0.4, 0.8):
        assert (loss.rate, loss.needed("sent_bits"), loss.at_edge) == (0.4, 1600, False)
        assert (error.rate, error.needed("sent_bits"), error.at_edge) == (0.2, 800, False)
    pairs = found(0.1, 0.2, 0.4)
    assert all(loss.at_edge and not error.at_edge for loss, error in pairs)
    for row in qsparse_bits.table(pairs).splitlines()[2:]:
        assert "at the edge" in row and "1600" not in row and row.endswith("| 0.2 | 8 | 0.0008 Mbit | 1x | 1x |")


def test_errors_at_the_end_are_of_the_step_size_that_is_best_on_a_seed_of_its_own(monkeypatch):
    """Of whole trainings, whatever the targets: a method that is faster at first may end worse. One that diverges, and
    one at the edge of the grid, have no figure."""
    ends = {("SGD", 0.2): 0.10, ("SGD", 0.1): 0.20, ("Top_k", 0.2): 0.115, ("Top_k", 0.1): 0.05}
    seen = []

    def train(problem, method, setting, rate, seed):
        assert setting.loss == setting.error == -np.inf
        seen.append(seed)
        steps = range(4, 41 if rate < 0.8 else 21, 4)  # 0.8 diverges
        error = ends.get((method.name, rate), 0.3) + 0.01 * (seed if seed < 3 else 0)
        return [qsparse_bits.Point(n, 0.0, 0.0, 0.1, 0.0 if n <= 20 else error) for n in steps]

    monkeypatch.setattr(qsparse_ends, "train", train)
    methods = [one for one in qsparse_ends.compared() if one.name in ("SGD", "Top_k") and one.every == 1]

    def table(*rates):
        setting = qsparse_bits.Setting(1, 40, 4, rates, 1, 0.5, 0.5)
        return qsparse_ends.table("job", [qsparse_ends.end(None, one, setting, 3) for one in methods]).splitlines()[2:]

    assert table(0.05, 0.1, 0.2, 0.4, 0.8) == [
        "| SGD | 1 | 0.2 | 11.00% (10.00% to 12.00%) | +0.00 |", "| Top_k | 1 | 0.1 | 6.00% (5.00% to 7.00%) | -5.00 |",
    ]  # fmt: skip
    assert seen == [qsparse_ends.TUNING_SEED] * 5 + [0, 1, 2] + [qsparse_ends.TUNING_SEED] * 5 + [0, 1, 2]
    assert table(0.1, 0.2, 0.8)[1] == "| Top_k | 1 | at the edge |  |  |"


def test_the_mnist_digits_are_there():
    images, labels, test, test_labels = mnist_5k()
    assert images.shape == (4000, 784) and test.shape == (1000, 784) and images.max() == 1
    assert np.bincount(np.concatenate([labels, test_labels])).tolist() == [500] * 10
