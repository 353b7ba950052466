"""Array types in signatures.

An array is NumPy's or, on a GPU, CuPy's. Both are contiguous and one-dimensional. The types name NumPy's array, since
CuPy's has the same attributes as far as this package uses them (``size``, ``dtype``, ``itemsize``, ``nbytes``,
``view``, slices).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]
"""float32 or float64."""
Parts = Sequence[tuple[int, int]]
"""(begin, end) of slices of a vector."""
Device = Any
"""An array on a GPU, in the signatures of CUDA implementations: ``cupy.ndarray`` or the emulator's."""

u32, u64, i32, f32, f64 = np.uint32, np.uint64, np.int32, np.float32, np.float64
"""Types of kernel arguments and of arrays."""
