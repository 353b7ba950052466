"""Uses an installed hvd_deepreduce and prints what it found, as JSON.

    python check_installed.py            # a preset, an encode and decode, where everything was loaded from
    python check_installed.py --golden   # also every golden container of the checkout that has this file
"""

import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np

import hvd_deepreduce
from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import presets
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.resources import folder
from hvd_deepreduce.wire import standalone as wire

ROOT = Path(__file__).resolve().parent.parent.parent


def round_trip(preset: str) -> int:
    """Encodes and decodes a gradient by a preset; returns the container's bytes."""
    gradient = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    residual, decoded = np.zeros_like(gradient), np.empty_like(gradient)
    pipeline = Pipeline(Config.load(preset))
    data = pipeline.encode(gradient, residual, RngKey(0, 0, 0))
    pipeline.decode([wire.unpack(data)], decoded)
    assert 0 < np.count_nonzero(decoded) <= 200
    np.testing.assert_allclose(decoded + residual, gradient, atol=1e-6)
    return int(data.size)


def golden() -> int:
    """Decodes every golden container to the expected bits, and encodes it again; returns how many there are."""
    sys.path.append(str(ROOT))
    from tests.golden import make

    made = make.golden()
    for name, (config, gradient) in made.items():
        file = make.FOLDER / f"{name}.hvdr"
        expected, data = np.load(file.with_suffix(".npy")), np.fromfile(file, np.uint8)
        assert make.decode(data, expected.dtype).tobytes() == expected.tobytes(), name
        assert make.decode(make.encode(config, gradient), expected.dtype).tobytes() == expected.tobytes(), name
    return len(made)


def main() -> None:
    found = {
        "python": list(sys.version_info[:2]),
        "version": hvd_deepreduce.__version__,
        "package": str(Path(hvd_deepreduce.__file__).parent),
        "presets": list(presets.files()),
        "container_bytes": round_trip("topk_rice_qsgd"),
        "kernels": sorted(str(path.relative_to(folder("kernels"))) for path in folder("kernels").glob("*/*.*")),
        "golden": golden() if "--golden" in sys.argv[1:] else 0,
    }
    try:
        found["metadata"] = dict(importlib.metadata.metadata("hvd-deepreduce").items())
    except importlib.metadata.PackageNotFoundError:
        found["metadata"] = {}
    # Modules and shared libraries of this process, as far as they are the package's.
    files = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "hvd_deepreduce"]
    mapped = [line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").open() if "_cpu.so" in line]
    found["loaded"] = sorted({str(file) for file in [*files, *mapped]})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
