"""Sparse linear models: losses, and optimizers that touch a model only at a gradient's features.

Jiang, Fu, Yang, Shao, Cui, "SKCompress", VLDB Journal 2020, section 7.1 and table 2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from linear_data import Batch

from hvd_deepreduce import SparseTensor

F32 = npt.NDArray[np.float32]


class Loss(NamedTuple):
    """A loss of one example as a function of z = theta . x and its label y, -1 or 1, and its derivative by z."""

    value: Callable[[F32, F32], F32]
    slope: Callable[[F32, F32], F32]


def _sigmoid(x: F32) -> F32:
    return (0.5 * (1 + np.tanh(0.5 * x))).astype(np.float32)


LOSSES: dict[str, Loss] = {
    "lr": Loss(lambda z, y: np.logaddexp(np.float32(0), -y * z), lambda z, y: -y * _sigmoid(-y * z)),
    "svm": Loss(lambda z, y: np.maximum(0, 1 - y * z), lambda z, y: np.where(y * z < 1, -y, np.float32(0))),
    "linear": Loss(lambda z, y: np.float32(0.5) * (y - z) ** 2, lambda z, y: z - y),
}
"""Logistic regression, support vector machine and linear regression (table 2), without the l2 term, which ``Model``
has."""
MOMENTS = {"sgd": 0, "adam": 2, "amsgrad": 3}
"""The optimizers, and how many arrays each keeps beside the weights."""


class Model:
    """The weights, and the state of an optimizer; both dense in memory, and changed only at a gradient's features.

    One step, with t counted from 1, is

        theta <- (1 - lr * l2) theta, at all features;
        theta <- theta - (the optimizer's step), at the gradient's features.

    The first line is made up for when a feature is read or changed, by the power of its factor, so that it costs
    nothing elsewhere. For SGD it is the gradient of l2 / 2 ||theta||^2; for the others it is weight decay. The moments
    of Adam and AMSGrad do not decay at features that a gradient lacks (as those of ``torch.optim.SparseAdam``).

    Args:
        numel: of features.
        optimizer: ``sgd``; ``adam`` (Kingma and Ba, ICLR 2015, algorithm 1); ``amsgrad`` (Reddi, Kale, Kumar, ICLR
            2018), which divides by the largest second moment so far.
        lr, l2: eta and lambda.

    Attributes:
        steps: t.
        theta: float32 ``[numel]``, as of the step at which each feature was changed last, which is in ``last``.
        moments: of the optimizer, float32 ``[numel]`` each.
    """

    BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

    def __init__(self, numel: int, optimizer: str, lr: float, l2: float) -> None:
        self.optimizer, self.lr, self.l2, self.steps = optimizer, lr, l2, 0
        self.theta, self.last = np.zeros(numel, np.float32), np.zeros(numel, np.int32)
        self.moments = [np.zeros(numel, np.float32) for _ in range(MOMENTS[optimizer])]

    def at(self, support: npt.NDArray[np.uint32]) -> F32:
        """The weights of these features."""
        theta = self.theta[support]
        if self.l2:
            theta *= np.power(1 - self.lr * self.l2, self.steps - self.last[support]).astype(np.float32)
        return theta

    def gradient(self, batch: Batch, loss: Loss) -> SparseTensor:
        """The gradient of the mean loss of a batch, without the l2 term."""
        slopes = loss.slope(batch.features @ self.at(batch.support), batch.labels) / np.float32(batch.labels.size)
        return SparseTensor(self.theta.size, batch.support, batch.transposed @ slopes)

    def losses(self, batch: Batch, loss: Loss) -> float:
        """The sum of the losses of a batch, without the l2 term."""
        return float(loss.value(batch.features @ self.at(batch.support), batch.labels).sum(dtype=np.float64))

    def step(self, gradient: SparseTensor) -> None:
        """One step. No array is as long as the model but those that it has."""
        at, g = gradient.indices, gradient.values
        theta = self.at(at)
        self.steps += 1
        theta *= np.float32(1 - self.lr * self.l2)
        if self.optimizer == "sgd":
            theta -= np.float32(self.lr) * g
        else:
            m, v = (moment[at] for moment in self.moments[:2])
            m += np.float32(1 - self.BETA1) * (g - m)
            v += np.float32(1 - self.BETA2) * (g * g - v)
            self.moments[0][at], self.moments[1][at] = m, v
            if self.optimizer == "amsgrad":
                v = np.maximum(self.moments[2][at], v)
                self.moments[2][at] = v
            rate = np.float32(self.lr / (1 - self.BETA1**self.steps))
            theta -= rate * m / (np.sqrt(v / np.float32(1 - self.BETA2**self.steps)) + np.float32(self.EPSILON))
        self.theta[at] = theta
        self.last[at] = self.steps

    def state_dict(self) -> dict[str, Any]:
        """All arrays, for ``load_state_dict``; not copies."""
        moments = {f"moment{number}": moment for number, moment in enumerate(self.moments)}
        return {"steps": np.int64(self.steps), "theta": self.theta, "last": self.last, **moments}

    def load_state_dict(self, state: Any) -> None:
        """Continues where ``state_dict`` was called."""
        self.steps, self.theta, self.last = int(state["steps"]), state["theta"], state["last"]
        self.moments = [state[f"moment{number}"] for number in range(len(self.moments))]
