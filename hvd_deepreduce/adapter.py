"""What the adapters of all frameworks share: one rank's encoder and decoder, what it keeps and what it counts."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hvd_deepreduce
from hvd_deepreduce import agreement
from hvd_deepreduce import container as wire
from hvd_deepreduce.backend import of
from hvd_deepreduce.codec import U8, Floats, Key
from hvd_deepreduce.config import Config
from hvd_deepreduce.memory import Memory
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.stats import Stats


@dataclass
class Parameter:
    """What an adapter knows of a tensor of the model.

    Attributes:
        name: in errors, and of its residual.
        number: the parameter of its containers' keys.
        shape, dtype: as the framework has them; -1 stands for a size that only the gradient tells.
        step: how many of its gradients have been encoded.
    """

    name: str
    number: int
    shape: tuple[int, ...]
    dtype: str
    step: int = 0

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape))


class Adapter(ABC):
    """One rank's part of a job. A subclass knows the framework's tensors and operations.

    Args:
        config: the path of a YAML file, a dict, a ``Config``, or None for the recommended settings.
        process_set: Horovod's, of the ranks that take part.
        settings: keys of the config, in place of its own.

    Raises:
        ConfigError: a config that cannot be used.
    """

    def __init__(
        self, config: str | Path | Mapping[str, Any] | Config | None, process_set: Any, settings: Mapping[str, Any]
    ) -> None:
        self._config = Config.load(config, **settings)
        self._process_set = process_set
        self._memory = Memory()
        self._stats = Stats()
        self._in_flight: set[str] = set()
        self._pipeline: Pipeline | None = None

    @abstractmethod
    def _local_size(self) -> int:
        """How many ranks share this machine."""

    @abstractmethod
    def _gather(self, said: U8) -> U8:
        """An allgather in the process set, outside all training; waits for it."""

    @abstractmethod
    def _known(self) -> list[Parameter]:
        """All parameters, in the order of their numbers."""

    def _described(self) -> agreement.Parameters:
        """All parameters, as the ranks compare them."""
        return [(parameter.name, parameter.shape, parameter.dtype) for parameter in self._known()]

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._config

    def set_config(
        self, config: str | Path | Mapping[str, Any] | Config | None = None, /, **settings: Any
    ) -> None:
        """Changes the settings from the next step on; on all ranks, between the same two steps.

        Args:
            config: a whole new config; None: the one in force, with ``settings`` in place of its own.

        Raises:
            RuntimeError: gradients are in flight.
            ConfigError: a config that cannot be used; the old one stays in force.
        """
        if self._in_flight:
            raise RuntimeError("set_config was called between backward() and step(): call it when the step is done")
        self._config = Config.load(self._config if config is None else config, **settings)
        self._pipeline = None

    def stats(self) -> dict[str, Any]:
        """``{"total": ..., "last_step": ...}`` of the counters of ``hvd_deepreduce.stats.Counters``, on this rank."""
        return self._stats.to_dict()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and step counts. Each rank's differ: save and load them rank by rank."""
        residuals = self._memory.state_dict()
        names = [parameter.name for parameter in self._known()]
        return {
            "rank": self._process_set.rank(),
            "size": self._process_set.size(),
            "steps": {parameter.name: parameter.step for parameter in self._known()},
            "residuals": {name: residuals[name] for name in names if name in residuals},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state_dict`` left off.

        Raises:
            ValueError: a state of another rank, another number of ranks, or another model; nothing has changed then.
        """
        missing = {"rank", "size", "steps", "residuals"} - set(state)
        if missing:
            raise ValueError(f"this is no state of DeepReduce: it has no {', '.join(sorted(missing))}")
        here = (self._process_set.rank(), self._process_set.size())
        if (state["rank"], state["size"]) != here:
            raise ValueError(
                f"the state is of rank {state['rank']} of {state['size']} and this is rank {here[0]} of {here[1]}: "
                "every rank loads its own state; with another number of ranks, start without it"
            )
        residuals = {name: np.asarray(residual) for name, residual in state["residuals"].items()}
        parameters = {parameter.name: parameter for parameter in self._known()}
        for name in [*state["steps"], *residuals]:
            if name not in parameters:
                raise ValueError(f"the state has a parameter {name}, and the model has not")
        for name, residual in residuals.items():
            numel = parameters[name].numel
            if residual.size != numel and -1 not in parameters[name].shape:
                raise ValueError(
                    f"the residual of {name} has {residual.size} elements, and the parameter {numel}"
                )
        self._memory.load_state_dict(residuals)
        for name, step in state["steps"].items():
            parameters[name].step = int(step)
        self._in_flight.clear()

    def _ready(self) -> Pipeline:
        """The pipeline of the config in force."""
        pipeline = self._pipeline
        if pipeline is None:
            threads = max(1, len(os.sched_getaffinity(0)) // self._local_size())
            pipeline = self._pipeline = Pipeline(self._config, threads)
        return pipeline

    def _agree(self, parameters: agreement.Parameters) -> None:
        """Compares the ranks. Called once before any gradient is used, and where containers show different configs.

        Raises:
            MismatchError: on all ranks, where they differ.
        """
        said = agreement.statement(hvd_deepreduce.__version__, self._config, parameters)
        gathered = self._gather(np.frombuffer(said + b"\n", np.uint8))
        agreement.compare(gathered.tobytes().splitlines())

    def _encode(self, parameter: Parameter, flat: Floats) -> U8:
        """The container of the parameter's next gradient, where the gradient is."""
        residual = None
        if self._config.error_feedback:
            residual = self._memory.residual(parameter.name, flat.size, flat.dtype, flat)
        key = Key(self._config.seed, parameter.number, parameter.step, self._process_set.rank())
        packed = self._ready().encode(flat, residual, key)
        parameter.step += 1
        self._in_flight.add(parameter.name)
        return packed

    def _decode(self, gathered: U8, out: Floats, carrier: float) -> None:
        """``out`` becomes the reduced gradient: the containers' sum times ``carrier / size``.

        Raises:
            ContainerError: a container cannot be read; names its rank.
            MismatchError: the ranks' configs differ.
        """
        size = self._process_set.size()
        with of(out).reading(out):
            gathered = of(out).put(gathered, out)
            containers = of(gathered).together(lambda: wire.split(gathered, size, out.size))
            if any(container.digest != containers[0].digest for container in containers):
                self._agree(self._described())
            self._ready().decode(containers, out, carrier / size)
