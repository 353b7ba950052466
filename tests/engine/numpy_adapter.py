"""A whole adapter on NumPy arrays. The ranks of a job are threads of one process: no framework, no launcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition, current_thread
from typing import Any

import numpy as np

from hvd_deepreduce import Config
from hvd_deepreduce.engine import Collectives, Engine, Parameter, Reducer, Tensors, step_check
from hvd_deepreduce.ops import arrays
from tests import cuda_emulator

STEP_CHECK = "step check"
SECONDS = 20
"""After which a rank that waits for the others gives up."""


class Job:
    """The messages of a job. ``sent`` holds those of each rank: (name, data), in the order in which they were sent, but
    for the step checks. ``nodes`` are the names of the ranks' nodes."""

    def __init__(self, size: int, nodes: Sequence[str] = ()) -> None:
        self.size, self.nodes = size, nodes
        self.sent: list[list[tuple[str, np.ndarray]]] = [[] for _ in range(size)]
        self._posted: dict[Any, dict[int, np.ndarray]] = {}
        self._changed = Condition()
        self._of_groups: dict[tuple[int, ...], Job] = {}

    def of_group(self, ranks: Sequence[int]) -> Job:
        """The messages of some of the ranks, among themselves."""
        with self._changed:
            return self._of_groups.setdefault(tuple(ranks), Job(len(ranks)))

    def post(self, key: Any, rank: int, data: np.ndarray) -> None:
        with self._changed:
            if key[0] != STEP_CHECK:
                self.sent[rank].append((key[0], data))
            self._posted.setdefault(key, {})[rank] = data
            self._changed.notify_all()

    def all_of(self, key: Any) -> list[np.ndarray]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._posted[key]) == self.size, SECONDS):
                raise TimeoutError(f"{key}: only ranks {sorted(self._posted[key])} have sent theirs")
            return [self._posted[key][rank] for rank in range(self.size)]

    def wait(self, key: Any) -> np.ndarray:
        return np.concatenate(self.all_of(key))


class ThreadCollectives(Collectives):
    """One rank of a job. Allgathers are matched by name, as Horovod does."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self._rank = rank
        self._calls: Counter[str] = Counter()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.job.size

    def local_size(self) -> int:
        return self.job.size

    def node(self) -> str:
        return self.job.nodes[self._rank] if self.job.nodes else "here"

    def subsets(self, groups: Sequence[Sequence[int]], new: bool) -> list[Collectives]:
        return [ThreadCollectives(self.job.of_group(g), g.index(self._rank)) for g in groups if self._rank in g]

    def start_allgather(self, data: np.ndarray, name: str) -> Any:
        key = name, self._calls[name]
        self._calls[name] += 1
        self.job.post(key, self._rank, data.copy())
        return key

    def wait_allgather(self, pending: Any) -> np.ndarray:
        return self.job.wait(pending)

    def start_alltoall(self, data: np.ndarray, splits: Sequence[int], name: str) -> Any:
        assert data.size == sum(splits) and len(splits) == self.job.size
        ends = np.cumsum(splits)
        bounds = np.stack([ends - splits, ends], 1).astype(np.int64)
        bounds = bounds.view(np.uint8).reshape(-1)
        return self.start_allgather(data, name), self.start_allgather(bounds, f"{name}.bounds")

    def wait_alltoall(self, pending: Any) -> tuple[np.ndarray, list[int]]:
        parts = []
        for data, told in zip(*map(self.job.all_of, pending), strict=True):
            begin, end = told.view(np.int64).reshape(-1, 2)[self._rank]
            parts.append(data[begin:end])
        return np.concatenate(parts), [part.size for part in parts]

    def start_vote(self, vote: np.ndarray, name: str) -> Any:
        return self.start_allgather(vote.view(np.uint8), name)

    def wait_votes(self, pending: Any) -> np.ndarray:
        total: np.ndarray = self.job.wait(pending).view(np.float64).reshape(self.job.size, -1).sum(0)
        return total

    def mpi_enabled(self) -> bool:
        return False


class OverHost(ThreadCollectives):
    """As Horovod without NCCL, which takes bytes on the host."""

    def start_allgather(self, data, name):
        return super().start_allgather(arrays.to_host(data), name)

    def start_alltoall(self, data, splits, name):
        return super().start_alltoall(arrays.to_host(data), splits, name)


class NumpyTensors(Tensors[np.ndarray]):
    """Gradients are NumPy arrays of any shape and float dtype."""

    def flat(self, gradient: np.ndarray, on_host: bool = False) -> np.ndarray:
        dtype = np.float64 if gradient.dtype == np.float64 else np.float32
        return np.ascontiguousarray(gradient, dtype).reshape(-1)

    def write(self, gradient: np.ndarray, reduced: np.ndarray, scale: float = 1.0) -> None:
        gradient[...] = (reduced if scale == 1.0 else reduced * scale).reshape(gradient.shape)

    def can_wait(self, gradient: np.ndarray, view: np.ndarray) -> bool:
        alike = gradient.dtype == view.dtype and gradient.flags.c_contiguous
        return alike and gradient.ctypes.data != view.ctypes.data

    def addresses(self, waiting: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[int]:
        return [gradient.ctypes.data for gradient, _ in waiting]

    def copy_in_many(self, waiting: Iterable[tuple[np.ndarray, np.ndarray]]) -> bool:
        for gradient, view in waiting:
            view[:] = gradient.reshape(-1)
        return False


class EmulatedTensors(NumpyTensors):
    """Gradients that the engine gets on the emulated GPU.

    Attributes:
        side_streams_of: the name of each thread that has worked apart from the caller's.
    """

    def __init__(self) -> None:
        self.side_streams_of: list[str] = []

    def device(self, gradient: np.ndarray) -> str:
        return "emulated"

    def flat(self, gradient: np.ndarray, on_host: bool = False) -> Any:
        flat = super().flat(gradient)
        return flat if on_host else cuda_emulator.asarray(flat)

    def write(self, gradient: np.ndarray, reduced: Any, scale: float = 1.0) -> None:
        super().write(gradient, arrays.to_host(reduced), scale)

    def side_stream(self, device: Any) -> Any:
        @contextmanager
        def within() -> Iterator[None]:
            self.side_streams_of.append(current_thread().name)
            yield

        return super().side_stream(device) if device is None else within


class NumpyAdapter:
    """The hook of a framework that has a dict of gradients, by name.

    Args:
        model: (shape, dtype) of each parameter.
    """

    def __init__(
        self,
        collectives: Collectives,
        model: Mapping[str, tuple[tuple[int, ...], Any]],
        config: Mapping[str, Any],
        tensors: Tensors[np.ndarray] | None = None,
        expected: Callable[[], Any] | None = None,
    ) -> None:
        parameters = [
            Parameter(name, number, shape, str(np.dtype(dtype)))
            for number, (name, (shape, dtype)) in enumerate(model.items())
        ]
        self.engine = Engine(Config.load(config), collectives, parameters)
        self.reducer = Reducer(self.engine, tensors or NumpyTensors(), expected)
        self._agreed = False

    def start(self, name: str, gradient: np.ndarray) -> Any:
        if not self._agreed:
            self.engine.agree([(p.name, p.shape, p.dtype) for p in self.engine.parameters.values()])
            self._agreed = True
        self.engine.stats.begin_step()
        self.engine.stats.add(dense=gradient.nbytes)
        return self.reducer.start(self.engine.parameters[name], gradient)

    def _meet(self) -> None:
        """Finds out whether another rank has changed its config. The engine counts an allreduce."""
        collectives = self.engine.collectives
        vote = self.engine.vote(True).view(np.uint8)
        said = collectives.wait_allgather(collectives.start_allgather(vote, STEP_CHECK))
        self.engine.tally(said.view(np.float64).reshape(-1, step_check.WORDS).sum(axis=0), lambda: None)

    def step(self, gradients: Mapping[str, np.ndarray], order: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """The averages over all ranks; gradients come in this order, else in the reverse of the dict's."""
        if self._agreed:
            self._meet()
        reduced = {name: gradient.copy() for name, gradient in gradients.items()}
        tickets = [self.start(name, reduced[name]) for name in order or list(reversed(reduced))]
        for ticket in tickets:
            self.reducer.finish(ticket, 1 / self.engine.collectives.size())
        self.engine.stats.end_step()
        return reduced


def run_ranks(size: int, work: Callable[[ThreadCollectives], Any], job: Job | None = None) -> list[Any]:
    """What ``work`` returned on each rank. The first rank's exception is raised once all ranks have ended."""
    job = job or Job(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, ThreadCollectives(job, rank)) for rank in range(size)]
    return [future.result() for future in futures]
