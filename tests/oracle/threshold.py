"""Every element whose magnitude reaches a threshold, one by one; zeros never."""

import numpy as np


def select(values: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    kept = [i for i, x in enumerate(values.tolist()) if abs(x) >= least and x != 0]
    return np.array(kept, np.uint32), values[kept]
