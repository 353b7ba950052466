"""What ``doctor`` asks of a library, each in a process of its own: ``python -m hvd_deepreduce.tools.probes torch``.

A library that crashes, hangs or prints then ends no more than its probe. A probe prints a JSON object in its last line,
or ends with an exception.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import hvd_deepreduce
from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.ops import arrays, device, library
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.tools.gradients import generated
from hvd_deepreduce.wire.standalone import unpack

NUMEL = 100_000
PRESET = "recommended"


def round_trip(on_device: Callable[[Any], Any]) -> dict[str, Any]:
    """Encodes a generated gradient by the recommended config and decodes it, and compares with the CPU's.

    Both versions of the container: a file's, and a job's, which take other kernels.

    Args:
        on_device: copies a NumPy array to where the gradient is to be.

    Raises:
        RuntimeError: what was sent and what stays in the residual do not add up to the gradient, or the container is
            not the CPU's.
    """
    gradient, key = generated(NUMEL, 0), RngKey(0, 0, 0)
    pipeline = Pipeline(Config.load(PRESET))
    slices = [bundle.Slice(pipeline, (0, NUMEL), key)]

    def encoded(version: int, copy: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The container, and the residual."""
        residual = copy(np.zeros(NUMEL, np.float32))
        if version == 1:
            return pipeline.encode(copy(gradient), residual, key), residual
        return bundle.encode(copy(gradient), residual, None, slices, 1, False), residual

    for version in (2, 1):
        out = on_device(np.zeros(NUMEL, np.float32))
        packed, residual = encoded(version, on_device)
        if version == 1:
            pipeline.decode([unpack(packed)], out)
        else:
            bundle.sum_into(out, packed, 1, slices, 1.0)
        sent, stays, container = (arrays.to_host(one) for one in (out, residual, packed))
        if not np.allclose(sent + stays, gradient, rtol=1e-5, atol=1e-5):
            raise RuntimeError("what was sent and what stays in the residual do not add up to the gradient")
        if not np.array_equal(container, encoded(version, np.copy)[0]):
            raise RuntimeError("the container differs from the CPU's")
    return {"bytes": int(container.size), "elements": NUMEL}


def kernels() -> dict[str, Any]:
    """The CPU kernels, and a round trip by them."""
    return {"level": int(library.vector_level()), **round_trip(lambda array: array)}


def torch() -> dict[str, Any]:
    """PyTorch: version, GPUs, and the backends of torch.distributed."""
    import torch

    backends = []
    if torch.distributed.is_available():
        known = {"gloo": torch.distributed.is_gloo_available, "nccl": torch.distributed.is_nccl_available}
        backends = [name for name, there in known.items() if there()]
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    assert float(torch.ones(3).sum()) == 3
    return {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "backends": backends}


def tensorflow() -> dict[str, Any]:
    """TensorFlow: version, the Keras behind ``tf.keras``, GPUs, and the operations in C++."""
    import tensorflow as tf

    try:
        keras = str(getattr(tf.keras, "__version__", "2.x"))  # tf_keras has none here
    except ImportError:
        keras = ""
    built = sorted(
        path.stem.partition("-")[2] for path in Path(hvd_deepreduce.__file__).parent.glob("_tensorflow-*.so")
    )
    if tf.__version__ in built:
        tf.load_op_library(str(Path(hvd_deepreduce.__file__).parent / f"_tensorflow-{tf.__version__}.so"))
    gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
    return {"version": tf.__version__, "keras": keras, "operations": built, "gpus": gpus}


def horovod(framework: str) -> dict[str, Any]:
    """Horovod with a framework: what it was built with; it is initialized, as the only rank."""
    hvd = import_module(f"horovod.{framework}")
    built = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, f"{name}_built")()]
    hvd.init()
    size = hvd.size()
    hvd.shutdown()
    return {"built": built, "size": size}


def mpi4py() -> dict[str, Any]:
    """mpi4py: version, library and thread level of MPI."""
    import mpi4py
    from mpi4py import MPI

    lines = MPI.Get_library_version().strip("\0").splitlines()
    return {
        "version": mpi4py.__version__,
        "library": lines[0].split(", package")[0].strip(),
        "threads": MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
    }


def cupy() -> dict[str, Any]:
    """CuPy: version, GPUs, and a round trip on the first of them, on a stream and in memory of another library's."""
    cupy = device.array_module(None)
    found: dict[str, Any] = {"version": cupy.__version__, "gpus": []}
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return {**found, "why": str(error)}
    for number in range(count):
        found["gpus"].append(cupy.cuda.runtime.getDeviceProperties(number)["name"].decode())
    if count:
        found["runtime"] = cupy.cuda.runtime.runtimeGetVersion()
        runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
        with device.on_stream(0, stream.ptr, lambda size, _: runtime.malloc(size), lambda at, _: runtime.free(at)):
            found |= round_trip(cupy.asarray)
    return found


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "kernels": kernels,
    "torch": torch,
    "tensorflow": tensorflow,
    "horovod.torch": lambda: horovod("torch"),
    "horovod.tensorflow": lambda: horovod("tensorflow"),
    "mpi4py": mpi4py,
    "cupy": cupy,
}

if __name__ == "__main__":
    print("\n" + json.dumps(PROBES[sys.argv[1]]()))
