"""All nonzero elements with a magnitude of at least the threshold, one by one."""

import numpy as np


def select(values: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    kept = [i for i, x in enumerate(values.tolist()) if abs(x) >= least and x != 0]
    return np.array(kept, np.uint32), values[kept]
