"""Sparse (COO) gradients, as of ``nn.Embedding(sparse=True)``: what replaces them, and their sums.

Horovod passes a sparse gradient to no compression: it allgathers the indices and the values of ``p.grad``, and hands
the result to ``decompress``. So the gradient's container is sent before Horovod's hook runs, and ``p.grad`` becomes a
carrier: a sparse tensor of five entries at index 0, of which the first is 1 and the others are the digits of the
parameter's number. Of the gathered entries, the first says by which factor Horovod would have scaled the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparse_tensor import MAX_NUMEL, SparseTensor
from hvd_deepreduce.engine import Engine, Parameter, rows
from hvd_deepreduce.engine.ticket import in_flight
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.torch.checks import Optimizers
from hvd_deepreduce.torch.owners import Owners
from hvd_deepreduce.torch.tensors import accumulated_in

BASE, DIGITS = 16, 4
"""Of a parameter's number in a carrier: digits that are exact in every floating-point dtype, even divided by ranks."""
MOST = BASE**DIGITS


class _Started(NamedTuple):
    """A gradient whose exchange was started: its container's key, and its allgather. ``like`` is an empty sparse tensor
    of its shape, dtype and device."""

    parameter: Parameter
    key: RngKey
    pending: Any
    numel: int
    dtype: np.dtype[Any]
    like: torch.Tensor


class SparseGradients:
    """The sparse gradients of one DeepReduce.

    Args:
        is_small: whether a parameter's gradients are too small to be compressed.
        meet: begins a step; with True, only where the ranks are not compared yet.

    Attributes:
        alone: names of the parameters that had one, and are left out of the buckets of later steps.
    """

    def __init__(
        self,
        engine: Engine,
        owners: Owners,
        optimizers: Optimizers,
        is_small: Callable[[Parameter], bool],
        meet: Callable[[bool], None],
    ) -> None:
        self._engine, self._owners, self._optimizers = engine, owners, optimizers
        self._is_small, self._check_step = is_small, meet
        self._bytes: dict[torch.Tensor, int] = {}  # of those that Horovod is about to gather
        self._started: dict[int, _Started] = {}
        self.alone: set[str] = set()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets which parameters have had sparse gradients; those of PyTorch's embeddings are known."""
        kinds, model, of = (torch.nn.Embedding, torch.nn.EmbeddingBag), self._owners.model, self._owners.of
        tables = [one for one in model.modules() if isinstance(one, kinds) and one.sparse] if model is not None else []
        self.alone.clear()
        self.alone.update(of[id(table.weight)].name for table in tables if id(table.weight) in of)

    def forget(self) -> None:
        """Forgets gradients in flight."""
        self._bytes.clear()
        self._started.clear()

    def grad_ready(self, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        """A parameter's gradient came: starts its exchange, if Horovod is about to send it, and notes its bytes, since
        Horovod shows only the ranks' sum."""
        self._engine.begin_step()
        parameter = self._owners.of[id(tensor)]
        self._engine.check_sparse(
            parameter, "make the layer with sparse=False, or give hvd.DistributedOptimizer sparse_as_dense=True"
        )
        if self._sends(tensor) and gradient.is_floating_point():
            if self._compresses(parameter, gradient):
                gradient = tensor.grad = self._start(parameter, gradient)
            elif parameter.name in self.alone:  # else a bucket of this step has the residual
                unsent = self._engine.take_unsent(parameter, lambda: bool(gradient._values().isfinite().all()))
                if unsent is not None:
                    gradient = tensor.grad = gradient + unflattened(unsent, gradient)
        self._bytes[tensor] = _coo_bytes(gradient)
        self.alone.add(parameter.name)

    def _sends(self, tensor: torch.Tensor) -> bool:
        """Whether Horovod's hook, which runs next, sends the parameter's gradient, and as a sparse one."""
        owner = next((one for one in self._optimizers.known() if tensor in one._requires_update), None)
        if owner is None or owner.sparse_as_dense or owner._groups is not None:
            return False
        return bool(owner._allreduce_delay[tensor] == 1)

    def _compresses(self, parameter: Parameter, gradient: torch.Tensor) -> bool:
        """Whether a container takes the gradient's place."""
        self._check_step(True)
        return (
            not self._engine.dense
            and self._engine.takes_sparse(parameter)
            and parameter.name in self.alone  # else it is in a bucket of this step
            and 0 < gradient.numel() <= MAX_NUMEL
            and parameter.number < MOST
            and not self._is_small(parameter)
        )

    def _start(self, parameter: Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Sends a gradient. Returns the carrier that takes its place."""
        engine = self._engine
        if parameter.name in engine.in_flight:
            raise in_flight(parameter)
        self._check_step(False)
        with engine.stats.span("encode", parameter.name):
            key, flat = engine.key(parameter), flattened(gradient)
            packed = engine.encode_sparse(parameter, flat)
        pending, like = engine.collectives.start_allgather(packed, parameter.name), torch.zeros_like(gradient)
        self._started[parameter.number] = _Started(parameter, key, pending, flat.numel, flat.values.dtype, like)
        return carrier(gradient, parameter.number)

    def finish(self, gathered: torch.Tensor) -> torch.Tensor:
        """The reduced gradient whose carriers Horovod has gathered; other sparse gradients as they are."""
        engine = self._engine
        ranks = engine.collectives.size()
        self._count(gathered, ranks)
        read = read_carriers(gathered, ranks) if self._started else None
        one = None if read is None else self._started.pop(read[0], None)
        if read is None or one is None:
            return gathered
        name = one.parameter.name
        with engine.stats.span("wait", name):
            packed = engine.collectives.wait_allgather(one.pending)
        with engine.stats.span("decode", name):
            total = engine.decode_sparse(one.parameter, packed, one.numel, one.dtype, read[1], one.key)
            with engine.receiving():
                return unflattened(total, one.like)

    def _count(self, total: torch.Tensor, ranks: int) -> None:
        """Counts a gradient that Horovod has gathered. Gradients of one shape may be taken for each other: it is their
        sum that matters."""
        size = _coo_bytes(total)
        known = next((tensor for tensor in self._bytes if tensor.shape == total.shape), None)
        own = size // ranks if known is None else self._bytes.pop(known)
        dense = traffic.allreduce(total.numel() * total.element_size(), ranks).sent
        self._engine.stats.add(wire=traffic.allgather(own, size, ranks), dense=dense)


def _coo_bytes(gradient: torch.Tensor) -> int:
    """Bytes of a sparse gradient's indices (int64) and values."""
    return 8 * gradient._indices().numel() + gradient._values().numel() * gradient.element_size()


def flattened(gradient: torch.Tensor) -> SparseTensor:
    """The elements of a sparse gradient, on the host; equal indices are added up. float32, or float64 as it is."""
    gradient = gradient.detach().coalesce()
    dtype = accumulated_in(gradient)
    dims = gradient.sparse_dim()
    numbers = np.ravel_multi_index(tuple(gradient.indices().cpu().numpy()), tuple(gradient.shape[:dims]))
    values = gradient.values().to("cpu", dtype).contiguous().view(numbers.size, math.prod(gradient.shape[dims:]))
    return rows.flattened(numbers, values.numpy(), gradient.numel())


def unflattened(total: SparseTensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse: a sparse tensor of the shape, the sparse dimensions, the dtype and the device of ``like``."""
    dims = like.sparse_dim()
    numbers, values = rows.in_rows(total, math.prod(like.shape[dims:]))
    indices = np.stack(np.unravel_index(numbers, tuple(like.shape[:dims]))).astype(np.int64)
    return torch.sparse_coo_tensor(
        torch.from_numpy(indices), torch.from_numpy(values).reshape(numbers.size, *like.shape[dims:]), like.shape,
        dtype=like.dtype, device=like.device, is_coalesced=True, check_invariants=False,
    )  # fmt: skip


def carrier(gradient: torch.Tensor, number: int) -> torch.Tensor:
    """What Horovod gathers in place of the gradient of the parameter with this number, below ``MOST``."""
    digits = [1, *(number // BASE**place % BASE for place in range(DIGITS))]
    dims = gradient.sparse_dim()
    values = torch.zeros(len(digits), *gradient.shape[dims:], dtype=gradient.dtype, device=gradient.device)
    values.view(len(digits), -1)[:, 0] = torch.tensor(digits, dtype=gradient.dtype)
    indices = torch.zeros(dims, len(digits), dtype=torch.int64, device=gradient.device)
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False)


def read_carriers(gathered: torch.Tensor, ranks: int) -> tuple[int, float] | None:
    """The parameter's number and the factor of the carriers that Horovod has gathered; None: they are no carriers."""
    indices, values = gathered._indices(), gathered._values()
    if values.shape[:1] != (ranks * (1 + DIGITS),) or not values.numel() or bool(indices.any()):
        return None
    firsts = values.reshape(ranks, 1 + DIGITS, -1)[:, :, 0].double()
    factor = float(firsts[0, 0])
    if not bool((firsts == firsts[0]).all()) or factor <= 0:
        return None
    digits = [round(digit / factor) for digit in firsts[0, 1:].tolist()]
    return sum(digit * BASE**place for place, digit in enumerate(digits)), factor
