"""The adapter for stock Horovod on PyTorch.

Horovod calls ``compress(gradient)``, allreduces what comes back under the parameter's name, and calls
``decompress(output, context)``. So ``compress`` encodes, starts an allgather of the container, and hands Horovod a
carrier: one element, 1.0. What Horovod makes of it (1 for Average, the number of ranks for Sum) is the factor by which
Horovod would have scaled the gradient, whatever options led to it; ``decompress`` applies it to the containers' sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.compression import Compressor

from hvd_deepreduce.adapter import Parameter
from hvd_deepreduce.buckets import Bucket, BucketedAdapter
from hvd_deepreduce.codec import U8, Floats
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import device

LINE = (
    "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), "
    'compression=DeepReduce(model, "topk_rice_qsgd"))'
)
# The name that Horovod's stall warning shows.
HANDSHAKE = "deepreduce.handshake (if it stalls: was DeepReduce given the optimizer's process_set?)"


@dataclass
class _InFlight:
    """The context of one compressed gradient, between compress and decompress."""

    parameter: Parameter
    gradient: torch.Tensor
    flat: Floats
    handle: Any


@dataclass
class _InBucket:
    """The context of one gradient that is sent in a bucket."""

    parameter: Parameter
    gradient: torch.Tensor
    bucket: Bucket


class DeepReduce(BucketedAdapter, Compressor):
    """Sends a few percent of a gradient's bytes. For ``compression=`` of ``hvd.DistributedOptimizer``.

    Works with op Average and Sum, gradient_predivide_factor, groups, backward_passes_per_step, sparse_as_dense and
    process_set, under horovodrun (MPI or Gloo) and mpirun. All ranks must make it with the same config and model.

    Args:
        model: the module whose gradients come, or its ``named_parameters()``: a gradient says nothing of whose it is.
        config: a preset's name, the path of a YAML file, a dict, a ``Config``, or None for the recommended settings.
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
            name: Parameter(name, number, tuple(tensor.shape), str(tensor.dtype))
            for number, (name, tensor) in enumerate(pairs)
        }
        if len(self._parameters) != len(pairs):
            raise ValueError("two parameters have the same name; give each a name of its own")
        self._tensors = dict(pairs)
        self._reduced: set[str] = set()
        self._by_shape: dict[tuple[int, ...], list[Parameter]] = {}
        for parameter in self._parameters.values():
            self._by_shape.setdefault(parameter.shape, []).append(parameter)
            if self._tensors[parameter.name].requires_grad:
                self._tensors[parameter.name].register_post_accumulate_grad_hook(self._note_latest)
        self._latest: torch.Tensor | None = None
        self._copied: dict[str, list[torch.cuda.Event]] = {}
        self._agreed = False
        super().__init__(config, hvd.global_process_set if process_set is None else process_set, settings)
        self._trained()  # notes what Horovod will reduce

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and step counts. Each rank's differ: save and load them rank by rank."""
        state = super().state_dict()
        return {**state, "residuals": {name: torch.from_numpy(r) for name, r in state["residuals"].items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state_dict`` left off; the residuals may have been loaded to any device.

        Raises:
            ValueError: a state of another rank, another number of ranks, or another model; nothing has changed then.
        """
        residuals = state.get("residuals", {})
        on_host = {name: r.cpu() if isinstance(r, torch.Tensor) else r for name, r in residuals.items()}
        super().load_state_dict({**state, "residuals": on_host} if "residuals" in state else state)

    def compress(self, tensor: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        """Called by Horovod with a gradient; returns what Horovod allreduces, and the context for ``decompress``.

        Raises:
            ValueError: the tensor is not the gradient of a parameter of the model.
            MismatchError: at the first gradient, where the ranks do not agree.
        """
        if tensor is None:
            raise TypeError(f"compression= was given the class DeepReduce, not an instance. Write: {LINE}")
        self._stats.step_began()
        dense_bytes = tensor.numel() * tensor.element_size()
        if not tensor.is_floating_point() or tensor.is_sparse:
            self._stats.sending(dense_bytes, dense_bytes)
            return tensor, None
        parameter = self._find(tensor)
        if not self._agreed:
            trained = {one[0] for one in self._trained()}
            self._agree([(p.name, p.shape, p.dtype + " frozen" * (p.name not in trained)) for p in self._known()])
            self._agreed = True
        if self._config.scope != "tensor":
            return self._into_bucket(parameter, tensor)
        if tensor.numel() < self._config.min_elements:
            # Horovod reduces neither bfloat16 nor strided tensors: a copy goes, and comes back into the gradient.
            sent = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().to(_wire(tensor))
            self._stats.sending(sent.numel() * sent.element_size(), dense_bytes)
            return sent, None if sent is tensor else tensor
        self._not_in_flight(parameter)
        with _on(tensor):
            with self._stats.timed("encode"):
                flat = self._array(_flat(tensor))
                packed = self._encode(parameter, flat)
            handle = self._start_allgather(packed, parameter.name)
        carrier = torch.ones(1, dtype=torch.float64, device=_wire(tensor))
        self._stats.sending(packed.size + carrier.element_size(), dense_bytes)
        return carrier, _InFlight(parameter, tensor, flat, handle)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # type: ignore[override]
        """Called by Horovod with the allreduced carrier; returns the reduced gradient, in the gradient's own memory.

        Raises:
            ContainerError: a container cannot be read; names its rank.
            MismatchError: the ranks' configs differ.
        """
        if isinstance(ctx, _InBucket):
            return self._out_of_bucket(ctx, float(tensor))
        if not isinstance(ctx, _InFlight):
            if not self._in_flight:
                self._stats.step_ended()
            return tensor if ctx is None else ctx.copy_(tensor)
        with self._stats.timed("wait"), _on(ctx.gradient):
            gathered = self._wait_allgather(ctx.handle)
        self._in_flight.discard(ctx.parameter.name)
        with self._stats.timed("decode"), _on(ctx.gradient):
            self._decode(gathered, ctx.flat, float(tensor))
            result = _tensor(ctx.flat).view(ctx.gradient.shape)
            if ctx.gradient.data_ptr() != result.data_ptr():
                ctx.gradient.copy_(result)
        if not self._in_flight:
            self._stats.step_ended()
        return ctx.gradient

    def _not_in_flight(self, parameter: Parameter) -> None:
        if parameter.name in self._in_flight:
            raise RuntimeError(
                f"the gradient of {parameter.name} is still in flight: call optimizer.step() or "
                "optimizer.synchronize() before the next backward()"
            )

    def _into_bucket(self, parameter: Parameter, gradient: torch.Tensor) -> tuple[torch.Tensor, _InBucket]:
        self._not_in_flight(parameter)
        bucket = self._bucket_of(parameter, self._trained)
        with _on(gradient):
            with self._stats.timed("encode"):
                flat = _flat(gradient)
                bucket.put(parameter.name, flat.cpu().numpy() if self._over_mpi else self._array(flat))
            if gradient.is_cuda:
                copied = torch.cuda.current_stream(gradient.device).record_event()
                self._copied.setdefault(bucket.name, []).append(copied)
            self._came(bucket, parameter)
        carrier = torch.ones(1, dtype=torch.float64, device=_wire(gradient))
        self._stats.sending(carrier.element_size(), gradient.numel() * gradient.element_size())
        return carrier, _InBucket(parameter, gradient, bucket)

    def _out_of_bucket(self, ctx: _InBucket, carrier: float) -> torch.Tensor:
        self._sum_bucket(ctx.bucket)
        with _on(ctx.gradient):
            with self._stats.timed("decode"):
                summed = _tensor(ctx.bucket.part(ctx.parameter.name)).view(ctx.gradient.shape)
                ctx.gradient.copy_(summed * (carrier / self._process_set.size()))
        self._took(ctx.bucket, ctx.parameter)
        return ctx.gradient

    def _start(self, bucket: Bucket) -> None:
        # It may be called for a gradient on another GPU, and gradients may be copied on several streams.
        first = self._tensors[bucket.members[0]]
        with _on(first):
            for copied in self._copied.pop(bucket.name, []):
                torch.cuda.current_stream(first.device).wait_event(copied)
            super()._start(bucket)

    def _receive(self, bucket: Bucket) -> None:
        with _on(self._tensors[bucket.members[0]]):
            super()._receive(bucket)

    def _trained(self) -> list[tuple[str, int, np.dtype[Any], str]]:
        # Those frozen since they were first seen stay: Horovod goes on reducing zeros for them.
        self._reduced.update(name for name, tensor in self._tensors.items() if tensor.requires_grad)
        return [
            (
                name,
                parameter.numel,
                np.dtype(np.float64 if parameter.dtype == "torch.float64" else np.float32),
                "" if self._over_mpi or not self._tensors[name].is_cuda else str(self._tensors[name].device),
            )
            for name, parameter in self._parameters.items()
            if name in self._reduced
        ]

    def _start_allgather(self, packed: U8, name: str) -> Any:
        tensor = _tensor(packed)
        return hvd.allgather_async(tensor.to(_wire(tensor)), f"deepreduce.{name}", self._process_set)

    def _wait_allgather(self, pending: Any) -> U8:
        gathered = hvd.synchronize(pending)
        if gathered.is_cuda:  # Horovod allocates it on a stream of its own
            gathered.record_stream(torch.cuda.current_stream(gathered.device))
        return self._array(gathered)

    def _array(self, flat: torch.Tensor) -> Any:
        """The array of a tensor's memory: NumPy's, or on a GPU CuPy's."""
        return device.from_dlpack(flat) if flat.is_cuda else flat.numpy()

    def _mpi_enabled(self) -> bool:
        return bool(hvd.mpi_enabled())

    def _mpi_ranks(self) -> list[int] | None:
        return None if self._process_set is hvd.global_process_set else list(self._process_set.ranks)

    def _note_latest(self, tensor: torch.Tensor) -> None:
        self._latest = tensor

    def _local_size(self) -> int:
        return int(hvd.local_size())

    def _gather(self, said: U8) -> U8:
        gathered: U8 = hvd.allgather(torch.from_numpy(said.copy()), HANDSHAKE, self._process_set).numpy()
        return gathered

    def _known(self) -> list[Parameter]:
        return list(self._parameters.values())

    def _find(self, gradient: torch.Tensor) -> Parameter:
        """The parameter whose gradient this is."""
        candidates = [(p, self._tensors[p.name]) for p in self._by_shape.get(tuple(gradient.shape), [])]
        for parameter, tensor in candidates:
            if tensor.grad is gradient:
                return parameter
        # sparse_as_dense hands over a dense copy of a sparse gradient, in its parameter's own hook.
        sparse = [
            (parameter, tensor)
            for parameter, tensor in candidates
            if tensor.grad is not None and tensor.grad.is_sparse and parameter.name not in self._in_flight
        ]
        latest = [parameter for parameter, tensor in sparse if tensor is self._latest]
        if latest or len(sparse) == 1:
            self._latest = None
            return latest[0] if latest else sparse[0][0]
        # Without a hook (a step before its last backward pass): by the contents.
        equal = [p for p, t in sparse if t.grad is not None and torch.equal(t.grad.to_dense(), gradient)]
        if len(equal) == 1:
            return equal[0]
        raise self._stranger(gradient, equal)

    def _stranger(self, gradient: torch.Tensor, equal: list[Parameter]) -> ValueError:
        given = f"a gradient {gradient.dtype} {list(gradient.shape)}"
        if equal:
            names = ", ".join(parameter.name for parameter in equal)
            return ValueError(
                f"{given} could be that of {names}: their sparse gradients are equal. Call backward() "
                "backward_passes_per_step times before step()"
            )
        if any(tensor is gradient for tensor in self._tensors.values()):
            return ValueError(
                "Horovod handed over a parameter in place of its gradient, as op=hvd.Adasum does: Adasum cannot be "
                "computed on compressed gradients. Use op=hvd.Average or op=hvd.Sum"
            )
        if self._model is not None:
            now = dict(self._model.named_parameters())
            shapes = {name: tuple(tensor.shape) for name, tensor in now.items()}
            made = {parameter.name: parameter.shape for parameter in self._parameters.values()}
            changed = [name for name in {**now, **made} if shapes.get(name) != made.get(name)]
            changed += [name for name in now if name not in changed and now[name] is not self._tensors[name]]
            if changed:
                return ValueError(
                    f"the model was changed after DeepReduce was made: {', '.join(changed[:5])}. Make the optimizer "
                    "and DeepReduce again, after the change"
                )
        return ValueError(
            f"{given} came, and it is of no parameter of the model that DeepReduce was given. Give DeepReduce the "
            "model that the optimizer trains"
        )


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as float32 or float64 ``[numel]``, on its GPU or on the host: its own memory where that can be, else
    a copy."""
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    device = gradient.device if gradient.is_cuda else "cpu"
    return gradient.detach().to(device, dtype).contiguous().view(-1)


def _tensor(array: Any) -> torch.Tensor:
    """The tensor of an array's memory."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)


def _wire(tensor: torch.Tensor) -> torch.device:
    """Where Horovod takes what is sent of a tensor: on the tensor's GPU if it was built with NCCL, else on the host."""
    return tensor.device if not tensor.is_cuda or hvd.nccl_built() else torch.device("cpu")


def _on(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Inside, the CUDA backend works on the tensor's GPU, on PyTorch's current stream."""
    if not tensor.is_cuda:
        return nullcontext()
    return device.on_stream(tensor.device.index, torch.cuda.current_stream(tensor.device).cuda_stream)
