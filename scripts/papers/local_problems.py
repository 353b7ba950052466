"""Problems of R simulated workers, each with data of its own: softmax regression, and the digits ResNet.

A problem has the ``sizes`` of the model's tensors, and the ``momentum`` of the workers' own steps.
"""

import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train",))

import numpy as np
import numpy.typing as npt
import torch
from simulated_training import Network, accuracy
from torch.nn import functional
from train_torch import ResNet, digits

Vector = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


class Softmax:
    """Softmax regression with ``l2 / 2 * ||weights||^2``; the biases are a row of the weights.

    Args:
        data: training images ``[n, pixels]``, labels, test images, labels. Worker r has the images r, r + R, ...
        workers: R.
        batch: images of a worker in a step, drawn with replacement.
        l2: None: 1 / n.
    """

    momentum = 0.0

    def __init__(
        self, data: tuple[Vector, Labels, Vector, Labels], workers: int, batch: int = 8, l2: float | None = None
    ) -> None:
        self._images, self._test = (
            np.hstack([part, np.ones((len(part), 1), np.float32)]).astype(np.float32) for part in data[::2]
        )
        self._labels, self._test_labels = data[1], data[3]
        self._classes = int(self._labels.max()) + 1
        self._workers, self._batch = workers, batch
        self.l2 = np.float32(1 / len(self._images) if l2 is None else l2)
        self.sizes = [self._images.shape[1] * self._classes]

    def start(self, seed: int) -> Vector:
        """The first model, float32 ``[numel]``."""
        return np.zeros(self.sizes[0], np.float32)

    def gradients(self, models: Vector, rng: np.random.Generator, out: Vector) -> None:
        """A gradient of each worker at its own model, of a batch of its own data: ``[R, numel]`` into ``out``."""
        workers, each = self._workers, len(self._images) // self._workers
        drawn = rng.integers(0, each, (workers, self._batch)) * workers + np.arange(workers)[:, None]
        x = self._images[drawn]
        weights = models.reshape(workers, -1, self._classes)
        errors = _softmax(x @ weights)
        errors[np.arange(workers)[:, None], np.arange(self._batch), self._labels[drawn]] -= 1
        errors /= np.float32(self._batch)
        np.matmul(x.transpose(0, 2, 1), errors, out=out.reshape(weights.shape))
        out += self.l2 * models

    def evaluate(self, model: Vector) -> tuple[float, float]:
        """The objective on all training data, and the share of the test data whose label is not found."""
        weights = model.reshape(-1, self._classes)
        found = _softmax(self._images @ weights)[np.arange(len(self._labels)), self._labels]
        loss = -np.log(np.maximum(found, 1e-30)).mean() + 0.5 * float(self.l2) * float(model @ model)
        wrong = (self._test @ weights).argmax(1) != self._test_labels
        return float(loss), float(wrong.mean())


def _softmax(scores: Vector) -> Vector:
    """Along the last axis, in place."""
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores


class DigitsResNet:
    """The ResNet of scripts/train/train_torch.py on scikit-learn's digits, with its momentum and weight decay.

    The workers take turns on one network. So the running statistics of its normalizations, which tests use, are of all
    workers' batches; training uses those of the worker's own batch. Worker r has the images r, r + R, ...
    """

    momentum = 0.9

    def __init__(self, workers: int, batch: int = 32, width: int = 16) -> None:
        torch.set_num_threads(1)
        self._width, self._network = width, Network(ResNet(width))
        self._images, self._labels, self._test, self._test_labels = digits()
        self._workers, self._batch = workers, batch
        self.sizes = self._network.sizes

    def start(self, seed: int) -> Vector:
        torch.manual_seed(seed)
        self._network = Network(ResNet(self._width))
        return self._network.vector()

    def gradients(self, models: Vector, rng: np.random.Generator, out: Vector) -> None:
        self._network.model.train()
        for worker, model in enumerate(models):
            self._network.load(model)
            drawn = torch.from_numpy(rng.integers(0, len(self._images) // self._workers, self._batch))
            drawn = drawn * self._workers + worker
            loss = functional.cross_entropy(self._network.model(self._images[drawn]), self._labels[drawn])
            out[worker] = self._network.gradient(loss)
        out += np.float32(5e-4) * models

    def evaluate(self, model: Vector) -> tuple[float, float]:
        self._network.load(model)
        wrong = 1 - accuracy(self._network.model, self._test, self._test_labels)
        with torch.no_grad():
            return float(functional.cross_entropy(self._network.model(self._images), self._labels)), wrong


Problem = Softmax | DigitsResNet
