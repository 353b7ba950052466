"""What the engine knows of one parameter of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

VELOCITY = "velocity of "
"""Begins the name of a parameter's velocity beside the residuals, under a memory that has one."""
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
"""What ``torch.compile`` and ``checkpoint_wrapper`` put into names."""
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def plain(name: str) -> str:
    """A parameter's name without wrappers, so that a state can be loaded when these have changed."""
    return _WRAPPERS.sub("", name)


@dataclass
class Parameter:
    """A parameter of the model; its gradients share one residual.

    Attributes:
        name: unique in the model. Names the residual, and the parameter in errors.
        number: position in the model; part of its containers' keys, so it must be the same on every rank.
        shape: -1 for a size that is not known before the gradient is there.
        dtype: name of the dtype, as the framework prints it.
        step: number of gradients encoded so far, with zeros for those that were missing in a bucket; part of its
            containers' keys, so equal on every rank.
        known_as: the name that a config's overrides match; "": ``name``.
        repeated: the same text for parameters that the same ranks of a sharded model's replica hold too; "": only this
            one does. A parameter stays equal on these ranks if what is selected of it does not depend on others: it
            shares buckets only with those of its text.
    """

    name: str
    number: int
    shape: tuple[int, ...]
    dtype: str
    step: int = 0
    known_as: str = ""
    repeated: str = ""

    @property
    def numel(self) -> int:
        """Number of elements. Do not use it if ``shape`` contains -1."""
        return prod(self.shape)

    @cached_property
    def accumulated_in(self) -> np.dtype[Any]:
        """dtype of its residual and of its flat gradients: float64 for float64, float32 for everything else."""
        return _FLOAT64 if self.dtype.endswith("float64") else _FLOAT32

    @property
    def half(self) -> str | None:
        """``"bfloat16"`` or ``"float16"`` if this is the dtype of its gradients; else None."""
        found: str | None = next((name for name in ("bfloat16", "float16") if self.dtype.endswith(name)), None)
        return found


def owner(name: str, parameters: Mapping[str, Parameter]) -> Parameter | None:
    """The parameter whose residual or velocity has this name; None: there is none."""
    return parameters.get(name) or parameters.get(name.removeprefix(VELOCITY))
