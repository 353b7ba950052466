"""Error feedback: what was not sent stays, and is sent later.

Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018; Karimireddy et al., "Error feedback fixes
SignSGD", ICML 2019. The residual is the accumulator itself: the gradient is added into it, and what the receivers will
decode is subtracted from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_deepreduce.codec import Floats


class Memory:
    """The residual of each parameter, by name; zeros until the parameter's first step."""

    def __init__(self) -> None:
        self._residuals: dict[str, Floats] = {}
        self._joined: dict[tuple[str, ...], Floats] = {}

    def residual(self, name: str, numel: int, dtype: np.dtype[Any]) -> Floats:
        """The parameter's residual, ``[numel]``, to be changed in place.

        Raises:
            ValueError: where it is kept in another size or dtype: the parameter is not the one that it was.
        """
        found = self._residuals.get(name)
        if found is None:
            found = self._residuals[name] = np.zeros(numel, dtype)
        if found.size != numel or found.dtype != dtype:
            raise ValueError(
                f"the residual of {name} is {found.dtype} [{found.size}], and its gradient {dtype} [{numel}]: "
                "the parameter was changed; make a new DeepReduce, or restore the parameter"
            )
        return found

    def joined(self, names: Sequence[str], sizes: Sequence[int], dtype: np.dtype[Any]) -> Floats:
        """The residuals of several parameters as one vector, ``[sum(sizes)]``; each one's is a view into it from then
        on.

        Raises:
            ValueError: as ``residual``.
        """
        key = tuple(names)
        parts = [self.residual(name, numel, dtype) for name, numel in zip(names, sizes, strict=True)]
        found = self._joined.get(key)
        if found is None:
            found = np.concatenate(parts)
            # A view can be in one vector only.
            self._joined = {other: vector for other, vector in self._joined.items() if not set(other) & set(key)}
            self._joined[key] = found
            views = np.split(found, np.cumsum(sizes)[:-1])
            self._residuals.update(zip(names, views, strict=True))
        return found

    def state_dict(self) -> dict[str, Floats]:
        """A copy of all residuals."""
        return {name: residual.copy() for name, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces all residuals by copies of these, of whatever shape."""
        self._residuals = {name: np.array(residual).reshape(-1) for name, residual in state.items()}
        self._joined = {}
