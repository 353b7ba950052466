"""States of the engine with PyTorch's tensors for its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvd_deepreduce.wire.quoting import quoted


def as_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with residuals as tensors."""
    return {**state, "residuals": {name: torch.from_numpy(r) for name, r in state["residuals"].items()}}


def on_host(state: Any) -> Any:
    """A state with arrays in place of tensors."""
    residuals = state.get("residuals") if isinstance(state, Mapping) else None
    if not isinstance(residuals, Mapping):
        return state
    return {**state, "residuals": {name: _as_array(name, given) for name, given in residuals.items()}}


def _as_array(name: Any, residual: Any) -> Any:
    """A tensor of a state as a NumPy array; anything else as it is."""
    if not isinstance(residual, torch.Tensor):
        return residual
    try:
        return residual.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:  # sparse, quantized, of a dtype that NumPy lacks, or without memory
        raise ValueError(
            f"the residual of {quoted(name)} is a tensor {residual.dtype} on {residual.device} that cannot be read: "
            f"{error}"
        ) from None
