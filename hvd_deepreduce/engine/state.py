"""One rank's state, as it is saved with a checkpoint: residuals and step counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvd_deepreduce.codec import Floats
from hvd_deepreduce.engine.parameter import Parameter

KEYS = ("rank", "size", "steps", "residuals")


def save(parameters: Mapping[str, Parameter], residuals: Mapping[str, Floats], rank: int, size: int) -> dict[str, Any]:
    """The state as plain numbers and NumPy arrays, with parameters in the model's order."""
    return {
        "rank": rank,
        "size": size,
        "steps": {name: parameter.step for name, parameter in parameters.items()},
        "residuals": {name: residuals[name] for name in parameters if name in residuals},
    }


def check(
    state: Mapping[str, Any], parameters: Mapping[str, Parameter], rank: int, size: int
) -> tuple[dict[str, int], dict[str, Floats]]:
    """Validates a saved state; changes nothing.

    Args:
        state: what ``save`` returned, from a checkpoint.
        parameters: the model's, by name.
        rank, size: of this process.

    Returns:
        The step counts and the residuals, by the parameters' names.

    Raises:
        ValueError: it is of another rank, another number of ranks or another model, or not a state at all.
    """
    missing = sorted(set(KEYS) - set(state))
    if missing:
        raise ValueError(f"this is not a state of DeepReduce: it has no {', '.join(missing)}")
    if (state["rank"], state["size"]) != (rank, size):
        raise ValueError(
            f"the state is of rank {state['rank']} of {state['size']}, and this is rank {rank} of {size}: every rank "
            "must load the state that it saved. With another number of ranks, start without a state"
        )
    residuals = {name: np.asarray(residual) for name, residual in state["residuals"].items()}
    for name in [*state["steps"], *residuals]:
        if name not in parameters:
            raise ValueError(f"the state has a parameter {name}, but the model does not: load the state of this model")
    steps = {name: int(step) for name, step in state["steps"].items()}
    for name, step in steps.items():
        if step < 0:
            raise ValueError(f"the step count of {name} is {step}; it must be 0 or more")
    for name, residual in residuals.items():
        parameter = parameters[name]
        if residual.size != parameter.numel and -1 not in parameter.shape:
            raise ValueError(
                f"the residual of {name} has {residual.size} elements, but the parameter has {parameter.numel}: load "
                "the state of this model"
            )
        if residual.dtype not in (np.float32, np.float64):
            raise ValueError(f"the residual of {name} is {residual.dtype}; it must be float32 or float64")
    return steps, residuals
