"""Loads and launches kernels. ``cpu`` and ``cuda`` have the same operations, with the same bytes out; ``of`` says which
of the two an array needs."""

from typing import Any

import numpy as np

from hvd_deepreduce.backend import cpu, cuda


def of(array: Any) -> Any:
    """The backend whose operations take this array: ``cpu`` for NumPy's, else ``cuda``."""
    return cpu if isinstance(array, np.ndarray) else cuda
