"""Sparse linear models on dense vectors: the losses of SKCompress's table 2, and optimizers one element at a time."""

import math

import numpy as np


def loss(name: str, features: np.ndarray, labels: np.ndarray, theta: np.ndarray) -> float:
    """The mean loss of the rows of a dense matrix, without the l2 term."""
    total = 0.0
    for x, y in zip(features.tolist(), labels.tolist(), strict=True):
        z = sum(a * b for a, b in zip(x, theta.tolist(), strict=True))
        if name == "lr":
            total += math.log(1 + math.exp(-y * z))
        elif name == "svm":
            total += max(0.0, 1 - y * z)
        else:
            total += (y - z) ** 2 / 2
    return total / len(labels)


def gradient(name: str, features: np.ndarray, labels: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """The column "Gradient" of table 2, as a mean over the rows and without the l2 term."""
    total = np.zeros(theta.size)
    for x, y in zip(features, labels.tolist(), strict=True):
        z = float(theta @ x)
        if name == "lr":
            total += -y / (1 + math.exp(y * z)) * x
        elif name == "svm":
            total += -y * x * (y * z < 1)
        else:
            total += -(y - z) * x
    return total / len(labels)


def train(optimizer: str, gradients: list[dict[int, float]], numel: int, lr: float, l2: float) -> list[np.ndarray]:
    """All weights after each step, from 0: every weight decays in every step, and one that the gradient has moves."""
    theta, m, v, largest = np.zeros(numel), np.zeros(numel), np.zeros(numel), np.zeros(numel)
    after = []
    for t, given in enumerate(gradients, 1):
        theta = theta - lr * l2 * theta
        for i, g in given.items():
            if optimizer == "sgd":
                theta[i] -= lr * g
                continue
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            largest[i] = max(largest[i], v[i])
            second = largest[i] if optimizer == "amsgrad" else v[i]
            theta[i] -= lr * (m[i] / (1 - 0.9**t)) / (math.sqrt(second / (1 - 0.999**t)) + 1e-8)
        after.append(theta.copy())
    return after
