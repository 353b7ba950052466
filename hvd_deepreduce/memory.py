"""Error feedback: what was not sent is kept in the residual and sent later.

Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018; Karimireddy et al., "Error feedback fixes
SignSGD", ICML 2019. The residual is the accumulator itself: a gradient is added to it, and what the receivers will
decode is subtracted from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_deepreduce.codec import ON_HOST, Floats
from hvd_deepreduce.ops import arrays


class Memory:
    """The residual of each parameter, by name. A parameter's residual is zero before its first step."""

    def __init__(self) -> None:
        self._residuals: dict[str, Floats] = {}
        self._joined: dict[tuple[str, ...], Floats] = {}

    def residual(self, name: str, numel: int, dtype: np.dtype[Any], like: Any = ON_HOST) -> Floats:
        """The residual of a parameter, to be changed in place.

        Args:
            name: of the parameter.
            numel, dtype: of its gradient.
            like: an array on the device of the gradient. The residual is moved there if it is elsewhere.

        Returns:
            ``dtype`` ``[numel]``.

        Raises:
            ValueError: the residual has another size or dtype, so the parameter was replaced.
        """
        residual = self._residuals.get(name)
        if residual is None or getattr(residual, "device", None) != getattr(like, "device", None):
            if residual is None:
                residual = arrays.zeros(numel, dtype, like)
            else:
                residual = arrays.move_like(arrays.to_host(residual), like)
            self._residuals[name] = residual
            self._discard_joined([name])
        if residual.size != numel or residual.dtype != dtype:
            raise ValueError(
                f"the residual of {name} is {residual.dtype} [{residual.size}], and its gradient is {dtype} [{numel}]: "
                "the parameter was replaced. Make a new DeepReduce, or restore the parameter"
            )
        return residual

    def joined(self, names: Sequence[str], sizes: Sequence[int], dtype: np.dtype[Any], like: Any) -> Floats:
        """The residuals of several parameters as one vector. Each parameter's residual is a view into it afterwards.

        Args:
            names: of the parameters, in the order of the vector.
            sizes: their numbers of elements.
            dtype, like: as in ``residual``.

        Returns:
            ``dtype`` ``[sum(sizes)]``.

        Raises:
            ValueError: as in ``residual``.
        """
        key = tuple(names)
        vector = self._joined.get(key)
        if vector is not None and (vector.size, vector.dtype) == (sum(sizes), dtype):
            if getattr(vector, "device", None) == getattr(like, "device", None):
                return vector
        residuals = [self.residual(name, numel, dtype, like) for name, numel in zip(names, sizes, strict=True)]
        vector = self._joined.get(key)
        if vector is None:
            vector = arrays.concatenate(residuals)
            self._discard_joined(key)
            self._joined[key] = vector
            ends = np.cumsum(sizes).tolist()
            views = (vector[end - size : end] for size, end in zip(sizes, ends, strict=True))
            self._residuals.update(zip(names, views, strict=True))
        return vector

    def held(self, name: str) -> Floats | None:
        """The parameter's residual; None: it has none."""
        return self._residuals.get(name)

    def scale(self, names: Sequence[str], factor: float) -> None:
        """Multiplies the residuals of these parameters by ``factor``, where they have one."""
        for name in names:
            residual = self._residuals.get(name)
            if residual is not None:
                residual *= residual.dtype.type(factor)

    def _discard_joined(self, names: Sequence[str]) -> None:
        """Forgets the vectors of these parameters: a residual can be a view into one vector only."""
        self._joined = {key: vector for key, vector in self._joined.items() if not set(key) & set(names)}

    def state_dict(self) -> dict[str, Floats]:
        """A copy of all residuals on the host, by parameter."""
        return {name: np.array(arrays.to_host(residual)) for name, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces all residuals by copies of these, which may have any shape."""
        self._residuals = {name: np.array(residual).reshape(-1) for name, residual in state.items()}
        self._joined = {}
