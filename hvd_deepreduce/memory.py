"""Error feedback: what was not sent stays, and is sent later.

Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018; Karimireddy et al., "Error feedback fixes
SignSGD", ICML 2019. The residual is the accumulator itself: the gradient is added into it, and what the receivers will
decode is subtracted from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_deepreduce.codec import ON_HOST, Floats
from hvd_deepreduce.ops import arrays


class Memory:
    """The residual of each parameter, by name; zeros until the parameter's first step."""

    def __init__(self) -> None:
        self._residuals: dict[str, Floats] = {}
        self._joined: dict[tuple[str, ...], Floats] = {}

    def residual(self, name: str, numel: int, dtype: np.dtype[Any], like: Any = ON_HOST) -> Floats:
        """The parameter's residual, ``[numel]``, to be changed in place; where ``like`` is, its gradient.

        Raises:
            ValueError: where it is kept in another size or dtype: the parameter is not the one that it was.
        """
        found = self._residuals.get(name)
        if found is None or getattr(found, "device", None) != getattr(like, "device", None):
            found = arrays.zeros(numel, dtype, like) if found is None else arrays.move_like(arrays.to_host(found), like)
            self._residuals[name] = found
            self._part([name])
        if found.size != numel or found.dtype != dtype:
            raise ValueError(
                f"the residual of {name} is {found.dtype} [{found.size}], and its gradient {dtype} [{numel}]: "
                "the parameter was changed; make a new DeepReduce, or restore the parameter"
            )
        return found

    def joined(self, names: Sequence[str], sizes: Sequence[int], dtype: np.dtype[Any], like: Any) -> Floats:
        """The residuals of several parameters as one vector, ``[sum(sizes)]``, where ``like`` is; each one's is a view
        into it from then on.

        Raises:
            ValueError: as ``residual``.
        """
        key = tuple(names)
        parts = [self.residual(name, numel, dtype, like) for name, numel in zip(names, sizes, strict=True)]
        found = self._joined.get(key)
        if found is None:
            found = arrays.concatenate(parts)
            self._part(key)
            self._joined[key] = found
            ends = np.cumsum(sizes).tolist()
            views = (found[end - size : end] for size, end in zip(sizes, ends, strict=True))
            self._residuals.update(zip(names, views, strict=True))
        return found

    def _part(self, names: Sequence[str]) -> None:
        """These residuals are no views any more: a view can be in one vector only."""
        self._joined = {key: vector for key, vector in self._joined.items() if not set(key) & set(names)}

    def state_dict(self) -> dict[str, Floats]:
        """A copy of all residuals, on the host."""
        return {name: np.array(arrays.to_host(residual)) for name, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces all residuals by copies of these, of whatever shape."""
        self._residuals = {name: np.array(residual).reshape(-1) for name, residual in state.items()}
        self._joined = {}
