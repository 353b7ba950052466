"""A sparse vector: how many elements, which of them are kept, and their values."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_NUMEL = 2**32 - 1
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.float64)}
"""The dtypes that values can have, by their number in a container's header and in a packed stream's."""
DTYPE_IDS = {dtype: number for number, dtype in DTYPES.items()}


@dataclass(frozen=True)
class SparseTensor:
    """``numel`` elements, zero but for ``values[i]`` at ``indices[i]``.

    Attributes:
        numel: 0 to 2^32 - 1.
        indices: uint32 ``[r]``, strictly increasing, below ``numel``: the support.
        values: float32 or float64 ``[r]``.

    Raises:
        TypeError: ``numel`` is not an integer, or the others are no arrays.
        ValueError: where the three do not fit together.
    """

    numel: int
    indices: NDArray[np.uint32]
    values: NDArray[np.floating[Any]]

    def __post_init__(self) -> None:
        if type(self.numel) is not int:  # NumPy's integers overflow
            try:
                object.__setattr__(self, "numel", operator.index(self.numel))
            except TypeError:
                raise TypeError(f"numel is {self.numel!r}; it must be an integer") from None
        if not 0 <= self.numel <= MAX_NUMEL:
            raise ValueError(f"numel is {self.numel}; a sparse tensor holds 0 to 2^32 - 1 elements: split it")
        for name, given in (("indices", self.indices), ("values", self.values)):
            if not hasattr(given, "dtype"):
                raise TypeError(f"{name} are of type {type(given).__name__}; a NumPy array is needed")
        if self.indices.dtype != np.uint32 or self.indices.ndim != 1:
            raise ValueError(f"indices are {self.indices.dtype}{list(self.indices.shape)}; uint32 [r] is needed")
        if self.values.dtype not in (np.float32, np.float64) or self.values.shape != self.indices.shape:
            raise ValueError(
                f"values are {self.values.dtype}{list(self.values.shape)}; float32 or float64 "
                f"{list(self.indices.shape)} is needed, one for each index"
            )
        if self.indices.size and (self.indices[-1] >= self.numel or np.any(self.indices[1:] <= self.indices[:-1])):
            raise ValueError(f"indices must be strictly increasing and below numel = {self.numel}")

    def dense(self) -> NDArray[np.floating[Any]]:
        """All ``numel`` elements."""
        out = np.zeros(self.numel, self.values.dtype)
        out[self.indices] = self.values
        return out
