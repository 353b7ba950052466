"""Gradients that are sent dense, with ``mode: auto``."""

from __future__ import annotations

import torch

from hvd_deepreduce.engine import Engine, Parameter
from hvd_deepreduce.torch.tensors import TorchTensors


def flush(engine: Engine, tensors: TorchTensors, parameter: Parameter, gradient: torch.Tensor) -> None:
    """Adds the parameter's residual to a gradient that is sent dense (``Engine.to_flush``)."""
    with tensors.stream(tensors.device(gradient)):
        total = engine.flush(parameter, tensors.flat(gradient))
        if total is not None:
            before = gradient.clone()
            tensors.write(gradient, total)
            if bool(torch.isfinite(gradient).all()):
                engine.flushed(parameter, total, tensors.flat(gradient))
            else:  # too large for a small dtype
                gradient.copy_(before)
