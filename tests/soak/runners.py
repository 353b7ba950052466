"""The same small job in each framework: gradients in, sums out. Horovod and the frameworks are imported when needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_deepreduce import Config
from tests.soak.episodes import Episode

Hook = Callable[[], None]
RATE = np.float32(0.01)


def parts(flat: np.ndarray, one: Episode) -> list[np.ndarray]:
    """A flat vector as the episode's parameters."""
    sizes = [int(np.prod(shape)) for shape in one.shapes]
    pieces = np.split(flat, np.cumsum(sizes)[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, one.shapes, strict=True)]


class Runner(ABC):
    """A job of one rank."""

    def __init__(self, one: Episode) -> None:
        self.one = one

    @abstractmethod
    def step(self, gradient: np.ndarray, hook: Hook | None) -> np.ndarray:
        """The sum of all ranks' gradients as far as they were sent, float32 ``[numel]``.

        Args:
            gradient: of this rank, ``[numel]``.
            hook: to be called within the step.
        """

    @abstractmethod
    def apply(self) -> None:
        """Updates the parameters by the last sum."""

    @abstractmethod
    def parameters(self) -> np.ndarray:
        """All parameters, float32 ``[numel]``."""

    @abstractmethod
    def residual(self) -> np.ndarray:
        """What was not sent, float32 ``[numel]``."""

    @abstractmethod
    def state(self) -> Any:
        """A deep copy of the parameters and of what the package saves."""

    @abstractmethod
    def load(self, state: Any) -> None:
        """Goes back to a state."""

    @abstractmethod
    def change(self) -> None:
        """Changes the config of this rank."""

    def load_with_nan(self) -> None:
        """Loads a state with NaN in a residual, which the package must refuse with a ``ValueError``."""
        parameters, state = self.state()
        for residual in state["residuals"].values():
            residual.reshape(-1)[0] = np.nan
        self.load((parameters, state))


def saved_residual(state: dict[str, Any], one: Episode) -> np.ndarray:
    """The residuals of a state, in the order of the parameters."""
    found = [np.asarray(state["residuals"][name]).reshape(-1) for name in state["steps"]]
    assert [residual.size for residual in found] == [int(np.prod(shape)) for shape in one.shapes]
    return np.concatenate(found)


class HorovodRunner(Runner):
    """A job of tests/adapters/common.py; a subclass makes it, of the config and the parameters."""

    def __init__(self, one: Episode) -> None:
        super().__init__(one)
        zeros = {f"episode{one.seed}_{at}": np.zeros(shape, np.float32) for at, shape in enumerate(one.shapes)}
        self.job = self.made(Config.load(dict(one.config)), zeros)

    @abstractmethod
    def made(self, config: Config, zeros: dict[str, np.ndarray]) -> Any:
        """The job."""

    def step(self, gradient: np.ndarray, hook: Hook | None) -> np.ndarray:
        if hook is not None:
            hook()
        return np.concatenate(self.job.reduced(parts(gradient, self.one)))

    def apply(self) -> None:
        self.job.apply()

    def parameters(self) -> np.ndarray:
        return np.concatenate(self.job.values())

    def residual(self) -> np.ndarray:
        return saved_residual(self.job.compression.state_dict(), self.one)

    def state(self) -> Any:
        return self.job.saved()

    def load(self, state: Any) -> None:
        self.job.load(state)

    def change(self) -> None:
        self.job.compression.set_config(**self.one.changed)


class TorchRunner(HorovodRunner):
    """``hvd.DistributedOptimizer`` of PyTorch. The hook is called within the backward pass."""

    def made(self, config: Config, zeros: dict[str, np.ndarray]) -> Any:
        import horovod.torch as hvd

        from tests.adapters.torch_horovod_job import HorovodJob
        from tests.adapters.torch_job import Given

        return HorovodJob(config, model=Given(zeros), op=hvd.Sum)

    def step(self, gradient: np.ndarray, hook: Hook | None) -> np.ndarray:
        if hook is None:
            return super().step(gradient, None)
        tensors = list(self.job.model.parameters())
        handle = tensors[int(self.one.point * len(tensors))].register_hook(lambda _: hook())
        total = super().step(gradient, None)
        handle.remove()
        return total


class TensorFlowRunner(HorovodRunner):
    """``hvd.DistributedGradientTape`` in a tf.function."""

    def made(self, config: Config, zeros: dict[str, np.ndarray]) -> Any:
        import horovod.tensorflow as hvd

        from tests.adapters.tensorflow_job import TensorFlowJob

        return TensorFlowJob(config, given=zeros, graph=True, op=hvd.Sum)


class MpiRunner(Runner):
    """The exchanges of ``hvd_deepreduce.exchange`` on mpi4py alone."""

    def __init__(self, one: Episode) -> None:
        from mpi4py import MPI

        super().__init__(one)
        self.comm = MPI.COMM_WORLD.Dup()
        self.values, self.kept = np.zeros((2, one.numel), np.float32)
        self.total = np.zeros(one.numel, np.float32)
        self.config: dict[str, Any] = dict(one.config)
        self.count = 0

    def step(self, gradient: np.ndarray, hook: Hook | None) -> np.ndarray:
        from hvd_deepreduce.codecs.interfaces import RngKey
        from hvd_deepreduce.codecs.joint.densestream import DenseStream
        from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
        from hvd_deepreduce.exchange.mpi import densestream, sparcml, topk_allgather

        if hook is not None:
            hook()
        exchange = self.config["exchange"]
        given = dict(exchange) if isinstance(exchange, dict) else {"name": exchange}
        keywords: dict[str, Any] = {}
        if given["name"] == "densestream":
            keywords["fill"] = given.get("fill", True)
            keywords["codec"] = DenseStream(coded=given.get("coded", True), value=given.get("value", "raw"))
            keywords["key"] = RngKey(0, 0, self.count)
        module = {"densestream": densestream, "sparcml": sparcml, "topk_allgather": topk_allgather}[given["name"]]
        # A gradient that is not finite is sent whole, and leaves the residual unchanged, as in the engine.
        finite = bool(np.isfinite(gradient).all())
        if finite:
            self.kept += gradient
            most = max(1, int(self.config["sparsifier"]["density"] * gradient.size))
            chosen = np.sort(np.argpartition(np.abs(self.kept), -most)[-most:]).astype(np.uint32)
            tensor = SparseTensor(gradient.size, chosen, self.kept[chosen])
        else:
            keywords["fill"] = False
        if given["name"] != "densestream":
            keywords.pop("fill", None)
        residual = self.kept if finite else None
        self.total = module.allreduce(
            self.comm, tensor if finite else gradient, dense=True, residual=residual, **keywords
        )
        self.count += 1
        return self.total

    def apply(self) -> None:
        self.values -= RATE * self.total

    def parameters(self) -> np.ndarray:
        return self.values

    def residual(self) -> np.ndarray:
        return self.kept.copy()

    def state(self) -> Any:
        return self.values.copy(), {"residuals": {"all": self.kept.copy()}}

    def load(self, state: Any) -> None:
        self.values, self.kept = state[0], state[1]["residuals"]["all"]

    def change(self) -> None:
        self.config |= self.one.changed


RUNNERS = {"torch": TorchRunner, "tensorflow": TensorFlowRunner, "mpi4py": MpiRunner}
