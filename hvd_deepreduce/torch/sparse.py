"""Sparse (COO) gradients, as of ``nn.Embedding(sparse=True)``: what replaces them, and their sums.

Horovod passes a sparse gradient to no compression: it allgathers the indices and the values of ``p.grad``, and hands
the result to ``decompress``. So the gradient's container is sent before Horovod's hook runs, and ``p.grad`` becomes a
carrier: a sparse tensor of five entries at index 0, of which the first is 1 and the others are the digits of the
parameter's number. Of the gathered entries, the first says by which factor Horovod would have scaled the gradient.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.engine import Parameter, rows

BASE, DIGITS = 16, 4
"""Of a parameter's number in a carrier: digits that are exact in every floating-point dtype, even divided by ranks."""
MOST = BASE**DIGITS


@dataclass
class SparseTicket:
    """A sparse gradient between its exchange's start and its end.

    Attributes:
        parameter, key, pending: whose gradient it is, its container's key, and its allgather.
        flat: its numel and dtype on the way.
        like: an empty sparse tensor of its shape, dtype and device.
    """

    parameter: Parameter
    key: RngKey
    pending: Any
    flat: tuple[int, np.dtype[Any]]
    like: torch.Tensor


def tables(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The weights of PyTorch's modules that have sparse gradients."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [module.weight for module in modules if isinstance(module, kinds) and module.sparse]


def flattened(gradient: torch.Tensor) -> SparseTensor:
    """The elements of a sparse gradient, on the host; equal indices are added up. float32, or float64 as it is."""
    gradient = gradient.detach().coalesce()
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
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


def optimizers_of(compression: Any) -> list[Any]:
    """Horovod's optimizers that were given this compression.

    Horovod does not tell it. They are searched for among the objects that refer to it, which takes long.
    """
    found = []
    for holder in gc.get_referrers(compression):
        owners = gc.get_referrers(holder) if isinstance(holder, dict) else [holder]
        for one in owners:
            if isinstance(one, torch.optim.Optimizer) and vars(one).get("_compression") is compression:
                found.append(one)
    return found
