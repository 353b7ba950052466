"""The adapter for stock Horovod on PyTorch.

Horovod calls ``compress(gradient)``, allreduces what comes back under the parameter's name, and calls
``decompress(output, context)``. So ``compress`` encodes, starts an allgather of the container, and hands Horovod a
carrier: one element, 1.0. What Horovod makes of it (1 for Average, the number of ranks for Sum) is the factor by which
Horovod would have scaled the gradient, whatever options led to it; ``decompress`` applies it to the containers' sum.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.compression import Compressor

import hvd_deepreduce
from hvd_deepreduce import agreement
from hvd_deepreduce import container as wire
from hvd_deepreduce.codec import Floats, Key
from hvd_deepreduce.config import Config
from hvd_deepreduce.memory import Memory
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.stats import Stats

LINE = (
    "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), "
    'compression=DeepReduce(model, "configs/topk_rice_qsgd.yaml"))'
)
# The name that Horovod's stall warning shows.
HANDSHAKE = "deepreduce.handshake (if it stalls: was DeepReduce given the optimizer's process_set?)"


@dataclass
class _Parameter:
    name: str
    number: int
    tensor: torch.Tensor
    shape: torch.Size
    step: int = 0


@dataclass
class _InFlight:
    """The context of one compressed gradient, between compress and decompress."""

    parameter: _Parameter
    gradient: torch.Tensor
    flat: Floats
    handle: Any


class DeepReduce(Compressor):
    """Sends a few percent of a gradient's bytes. For ``compression=`` of ``hvd.DistributedOptimizer``.

    Works with op Average and Sum, gradient_predivide_factor, groups, backward_passes_per_step, sparse_as_dense and
    process_set, under horovodrun (MPI or Gloo) and mpirun. All ranks must make it with the same config and model.

    Args:
        model: the module whose gradients come, or its ``named_parameters()``: a gradient says nothing of whose it is.
        config: the path of a YAML file, a dict, a ``Config``, or None for the recommended settings.
        process_set: the one given to the optimizer, if any.
        **settings: keys of the config, in place of its own.

    Raises:
        TypeError: no model given.
        ConfigError: a config that cannot be used.
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]] | None = None,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        process_set: Any = None,
        **settings: Any,
    ) -> None:
        if model is None or isinstance(model, str | Path | Mapping | Config):
            raise TypeError(
                f"DeepReduce needs the model first, and {type(model).__name__} was given: it tells by the model which "
                f"parameter a gradient belongs to. Write: {LINE}"
            )
        self._model = model if isinstance(model, torch.nn.Module) else None
        pairs = list(model.named_parameters() if isinstance(model, torch.nn.Module) else model)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise TypeError(f"DeepReduce needs a torch.nn.Module or its named_parameters(). Write: {LINE}")
        self._parameters = {
            name: _Parameter(name, number, tensor, tensor.shape) for number, (name, tensor) in enumerate(pairs)
        }
        if len(self._parameters) != len(pairs):
            raise ValueError("two parameters have the same name; give each a name of its own")
        self._by_shape: dict[torch.Size, list[_Parameter]] = {}
        for parameter in self._parameters.values():
            self._by_shape.setdefault(parameter.shape, []).append(parameter)
            if parameter.tensor.requires_grad:
                parameter.tensor.register_post_accumulate_grad_hook(self._note_latest)
        self._latest: torch.Tensor | None = None
        self._process_set = hvd.global_process_set if process_set is None else process_set
        self._memory = Memory()
        self._stats = Stats()
        self._in_flight: set[str] = set()
        self._agreed = False
        self._config = Config.load(config, **settings)
        self._pipeline: Pipeline | None = None

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
        return {
            "rank": self._process_set.rank(),
            "size": self._process_set.size(),
            "steps": {parameter.name: parameter.step for parameter in self._parameters.values()},
            "residuals": {name: torch.from_numpy(r) for name, r in self._memory.state_dict().items()},
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
        for name in [*state["steps"], *residuals]:
            if name not in self._parameters:
                raise ValueError(f"the state has a parameter {name}, and the model has not")
        for name, residual in residuals.items():
            if residual.size != self._parameters[name].tensor.numel():
                raise ValueError(
                    f"the residual of {name} has {residual.size} elements, and the parameter "
                    f"{self._parameters[name].tensor.numel()}"
                )
        self._memory.load_state_dict(residuals)
        for name, step in state["steps"].items():
            self._parameters[name].step = int(step)
        self._in_flight.clear()

    def compress(self, tensor: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        """Called by Horovod with a gradient; returns what Horovod allreduces, and the context for ``decompress``.

        Raises:
            ValueError: the tensor is not the gradient of a parameter of the model.
            MismatchError: at the first gradient, where the ranks do not agree.
        """
        if tensor is None:
            raise TypeError(f"compression= was given the class DeepReduce, not an instance. Write: {LINE}")
        dense_bytes = tensor.numel() * tensor.element_size()
        if not tensor.is_floating_point() or tensor.is_sparse:
            self._stats.sending(dense_bytes, dense_bytes)
            return tensor, None
        parameter = self._find(tensor)
        pipeline = self._ready()
        if tensor.numel() < self._config.min_elements:
            # Horovod reduces neither bfloat16 nor strided tensors: a copy goes, and comes back into the gradient.
            sent = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous()
            self._stats.sending(sent.numel() * sent.element_size(), dense_bytes)
            return sent, None if sent is tensor else tensor
        if parameter.name in self._in_flight:
            raise RuntimeError(
                f"the gradient of {parameter.name} is still in flight: call optimizer.step() or "
                "optimizer.synchronize() before the next backward()"
            )
        with self._stats.timed("encode"):
            flat = _flat(tensor)
            residual = None
            if self._config.error_feedback:
                residual = self._memory.residual(parameter.name, flat.size, flat.dtype)
            key = Key(self._config.seed, parameter.number, parameter.step, self._process_set.rank())
            packed = pipeline.encode(flat, residual, key)
        parameter.step += 1
        carrier = torch.ones(1, dtype=torch.float64, device=tensor.device)
        self._stats.sending(packed.size + carrier.element_size(), dense_bytes)
        self._in_flight.add(parameter.name)
        handle = hvd.allgather_async(torch.from_numpy(packed), f"deepreduce.{parameter.name}", self._process_set)
        return carrier, _InFlight(parameter, tensor, flat, handle)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # type: ignore[override]
        """Called by Horovod with the allreduced carrier; returns the reduced gradient, in the gradient's own memory.

        Raises:
            ContainerError: a container cannot be read; names its rank.
            MismatchError: the ranks' configs differ.
        """
        if not isinstance(ctx, _InFlight):
            if not self._in_flight:
                self._stats.step_ended()
            return tensor if ctx is None else ctx.copy_(tensor)
        size = self._process_set.size()
        with self._stats.timed("wait"):
            gathered = hvd.synchronize(ctx.handle).numpy()
        self._in_flight.discard(ctx.parameter.name)
        with self._stats.timed("decode"):
            containers = wire.split(gathered, size, ctx.flat.size)
            if any(container.digest != containers[0].digest for container in containers):
                self._agree()
            self._ready().decode(containers, ctx.flat, float(tensor) / size)
            result = torch.from_numpy(ctx.flat).view(ctx.gradient.shape)
            if ctx.gradient.data_ptr() != result.data_ptr():
                ctx.gradient.copy_(result)
        if not self._in_flight:
            self._stats.step_ended()
        return ctx.gradient

    def _note_latest(self, tensor: torch.Tensor) -> None:
        self._latest = tensor

    def _ready(self) -> Pipeline:
        """The pipeline of the config in force; at the first call, the ranks compare themselves."""
        if self._pipeline is None:
            self._pipeline = Pipeline(self._config, max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
        if not self._agreed:
            self._agree()
            self._agreed = True
        return self._pipeline

    def _agree(self) -> None:
        parameters = [
            (p.name, tuple(p.tensor.shape), str(p.tensor.dtype) + ("" if p.tensor.requires_grad else " frozen"))
            for p in self._parameters.values()
        ]
        said = np.frombuffer(agreement.statement(hvd_deepreduce.__version__, self._config, parameters), np.uint8)
        sizes = hvd.allgather(torch.tensor([said.size]), HANDSHAKE, self._process_set).tolist()
        gathered = hvd.allgather(torch.from_numpy(said.copy()), f"{HANDSHAKE} texts", self._process_set)
        agreement.compare([bytes(part.numpy()) for part in gathered.split(sizes)])

    def _find(self, gradient: torch.Tensor) -> _Parameter:
        """The parameter whose gradient this is."""
        candidates = self._by_shape.get(gradient.shape, [])
        for parameter in candidates:
            if parameter.tensor.grad is gradient:
                return parameter
        # sparse_as_dense hands over a dense copy of a sparse gradient, in its parameter's own hook.
        sparse = [
            parameter
            for parameter in candidates
            if parameter.tensor.grad is not None
            and parameter.tensor.grad.is_sparse
            and parameter.name not in self._in_flight
        ]
        latest = [parameter for parameter in sparse if parameter.tensor is self._latest]
        if latest or len(sparse) == 1:
            self._latest = None
            return (latest or sparse)[0]
        # Without a hook (a step before its last backward pass): by the contents.
        equal = [p for p in sparse if p.tensor.grad is not None and torch.equal(p.tensor.grad.to_dense(), gradient)]
        if len(equal) == 1:
            return equal[0]
        raise self._stranger(gradient, equal)

    def _stranger(self, gradient: torch.Tensor, equal: list[_Parameter]) -> ValueError:
        given = f"a gradient {gradient.dtype} {list(gradient.shape)}"
        if equal:
            names = ", ".join(parameter.name for parameter in equal)
            return ValueError(
                f"{given} could be that of {names}: their sparse gradients are equal. Call backward() "
                "backward_passes_per_step times before step()"
            )
        if any(parameter.tensor is gradient for parameter in self._parameters.values()):
            return ValueError(
                "Horovod handed over a parameter in place of its gradient, as op=hvd.Adasum does: Adasum cannot be "
                "computed on compressed gradients. Use op=hvd.Average or op=hvd.Sum"
            )
        if self._model is not None:
            now = {name: list(tensor.shape) for name, tensor in self._model.named_parameters()}
            made = {parameter.name: list(parameter.shape) for parameter in self._parameters.values()}
            changed = [name for name in {**now, **made} if now.get(name) != made.get(name)]
            changed += [
                name
                for name, tensor in self._model.named_parameters()
                if name not in changed and tensor is not self._parameters[name].tensor
            ]
            if changed:
                return ValueError(
                    f"the model was changed after DeepReduce was made: {', '.join(changed[:5])}. Make the optimizer "
                    "and DeepReduce again, after the change"
                )
        return ValueError(
            f"{given} came, and it is of no parameter of the model that DeepReduce was given. Give DeepReduce the "
            "model that the optimizer trains"
        )


def _flat(gradient: torch.Tensor) -> Floats:
    """The gradient as float32 or float64 ``[numel]`` on the host: its own memory where that can be, else a copy."""
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    array: Floats = gradient.detach().to("cpu", dtype).contiguous().view(-1).numpy()
    return array
