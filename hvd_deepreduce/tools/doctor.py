"""``hvd-deepreduce doctor``: what is installed, what will not work, and how to mend it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, NamedTuple

import typer

import hvd_deepreduce
from hvd_deepreduce.engine import cores
from hvd_deepreduce.needs import INSTALL
from hvd_deepreduce.tools import output
from hvd_deepreduce.tools.bench import VECTOR_LEVELS
from hvd_deepreduce.tools.output import ExitCode, Json

EPILOG = """Examples:

  hvd-deepreduce doctor

  hvd-deepreduce doctor --json
"""
SECONDS = 120.0
"""The most that a probe may take."""
RANK_VARIABLES = ("OMPI_COMM_", "OMPI_UNIVERSE", "PMIX_", "PMI_", "HOROVOD_", "SLURM_")
"""Begin variables by which a launcher tells a process its rank. A probe is the only rank of its job."""
INSTALL_HOROVOD = (
    "install Horovod 0.28.1 with the frameworks of this environment (in a checkout, scripts/dev/build_horovod.sh "
    "builds it)"
)


class Line(NamedTuple):
    """What was found out about one component.

    Attributes:
        name: of the component.
        state: ``ok``; ``absent``: it is not installed; ``note``: it works, but not everything will; ``fails``.
        found: versions and the like.
        advice: what will not work, and how to mend it; empty where nothing is wrong.
    """

    name: str
    state: str
    found: str
    advice: str = ""


class Probe(NamedTuple):
    """The end of a probe's process.

    Attributes:
        found: what it printed; None: it failed.
        error: why, as far as it said.
    """

    found: dict[str, Any] | None
    error: str


def doctor(as_json: Json = False) -> None:
    """Shows what is installed, what will not work, and how to mend it.

    It imports each library in a process of its own, and sends a generated gradient through the recommended config, on
    the CPU and, where CuPy finds one, on a GPU. It ends with 1 if something that is installed does not work.
    """
    lines = [_system(), *diagnosed(output.progress)]
    failed = any(line.state == "fails" for line in lines)
    if as_json:
        output.print_json({"works": not failed, "components": [line._asdict() for line in lines]})
    else:
        output.table(("component", "state", "found"), [line[:3] for line in lines], left=3)
        advice = [line for line in lines if line.advice]
        output.say()
        output.say("What will not work, and how to mend it:" if advice else "Everything that is installed works.")
        for line in advice:
            output.paragraph(f"- {line.name}: {line.advice}.")
    if failed:
        raise typer.Exit(ExitCode.FOUND)


def probe(name: str) -> Probe:
    """Runs one of ``probes.PROBES`` in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(RANK_VARIABLES)}
    command = [sys.executable, "-m", "hvd_deepreduce.tools.probes", name]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Probe(None, f"it did not end within {SECONDS:.0f} s")
    if ended.returncode < 0:
        return Probe(None, f"its process was ended by {signal.Signals(-ended.returncode).name}")
    said = [line for line in (ended.stderr if ended.returncode else ended.stdout).splitlines() if line.strip()]
    last = said[-1].strip() if said else "it printed nothing"
    if ended.returncode:
        return Probe(None, last)
    try:
        return Probe(json.loads(last), "")
    except ValueError:
        return Probe(None, f"it ended with {last!r}")


def diagnosed(progress: Callable[[list[Any], str], Any]) -> Iterator[Line]:
    """What the probes of all components find."""
    installed = {name: there for name, there in ((one, _installed(one)) for one in COMPONENTS) if there}
    with ThreadPoolExecutor(max(1, min(4, cores.of_rank(1)))) as pool:
        running = {name: pool.submit(probe, name) for name in installed}
        ended = {name: one.result() for name, one in progress(list(running.items()), "importing libraries")}
    for name, (package, judge, without) in COMPONENTS.items():
        if name not in ended:
            yield Line(name, "absent", "", without)
        elif ended[name].found is None:
            yield _broken(name, package, ended[name].error)
        else:
            yield judge(name, ended[name].found or {}, ended)
    yield _launchers("mpi4py" in ended)
    version = _version("matplotlib")
    without = f"'hvd-deepreduce bench --picture' needs it: run {INSTALL['matplotlib']}"
    yield Line("matplotlib", "ok", version) if version else Line("matplotlib", "absent", "", without)


def _installed(name: str) -> bool:
    """Whether a component is there to be probed, found out without importing it."""
    if name == "kernels":
        return True
    top, _, framework = name.partition(".")
    return find_spec(top) is not None and (not framework or find_spec(framework) is not None)


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _broken(name: str, package: str, error: str) -> Line:
    mend = f"install {package} again" if name != "kernels" else "install hvd-deepreduce again, on this machine"
    if name.startswith("horovod"):
        mend = INSTALL_HOROVOD
    return Line(name, "fails", _version(package), f"it does not work: {error}. To mend it, {mend}")


def _system() -> Line:
    mine, limit = cores.of_rank(1), os.environ.get("OMP_NUM_THREADS")
    found = f"hvd_deepreduce {hvd_deepreduce.__version__}, Python {platform.python_version()}, {mine} cores"
    packages = ", ".join(f"{name} {_version(name)}" for name in ("numpy", "pydantic", "zstandard"))
    found += (f", OMP_NUM_THREADS={limit}" if limit else "") + f", {packages}"
    if sys.platform != "linux":
        return Line("system", "note", found, f"only Linux is tested, and this is {sys.platform}")
    return Line("system", "ok", found)


def _kernels(name: str, found: dict[str, Any], _: dict[str, Probe]) -> Line:
    said = f"{VECTOR_LEVELS[found['level']]}; {found['elements']:,} elements went through {found['bytes']:,} bytes"
    if found["level"] == 0 and platform.machine() == "x86_64":
        return Line(name, "note", said, "this processor has no AVX2, so that encoding takes several times as long")
    return Line(name, "ok", said)


def _torch(name: str, found: dict[str, Any], ended: dict[str, Probe]) -> Line:
    gpus = found["gpus"]
    said = f"{found['version']}, torch.distributed with {', '.join(found['backends']) or 'no backend'}"
    said += f", CUDA {found['cuda']}, {', '.join(gpus)}" if gpus else ", no GPU"
    cupy = ended.get("cupy")
    if gpus and (cupy is None or cupy.found is None or not cupy.found["gpus"]):
        advice = f"gradients on a GPU need CuPy: run {INSTALL['cupy']} (this PyTorch has CUDA {found['cuda']})"
        return Line(name, "note", said, advice)
    return Line(name, "ok", said)


def _tensorflow(name: str, found: dict[str, Any], _: dict[str, Probe]) -> Line:
    version, keras, built = found["version"], found["keras"], found["operations"]
    said = f"{version}, Keras {keras or 'not installed'}"
    said += f", operations in C++ for {', '.join(built)}" if built else ", no operations in C++"
    if not keras.startswith("2."):
        package = "" if find_spec("tf_keras") else "install the package tf_keras, and "
        advice = (
            f"Horovod 0.28 works with Keras 2 alone, and hvd_deepreduce.tensorflow refuses others: {package}set the "
            "environment variable TF_USE_LEGACY_KERAS=1 before TensorFlow is imported"
        )
        return Line(name, "note", said, advice)
    if version not in built:
        advice = (
            f"the operations in C++ were not built for TensorFlow {version}, so that Python is in their place, which "
            "is slower, and 'mode: auto' is an error: install hvd-deepreduce again, in this environment, with "
            "'pip install --no-build-isolation' and a C++ compiler"
        )
        return Line(name, "note", said, advice)
    return Line(name, "ok", said)


def _horovod(name: str, found: dict[str, Any], _: dict[str, Probe]) -> Line:
    built = found["built"]
    said = f"{_version('horovod')}, built with {', '.join(built) or 'neither Gloo nor MPI'}"
    if "gloo" not in built and "mpi" not in built:
        return Line(name, "fails", said, f"it has no way to communicate: {INSTALL_HOROVOD}")
    if "mpi" not in built:
        advice = "it was built without MPI, so that the exchanges over MPI (densestream, sparcml) do not run beside it"
        return Line(name, "note", said, f"{advice}: use the exchange allgather or reduce_scatter, or {INSTALL_HOROVOD}")
    return Line(name, "ok", said)


def _mpi4py(name: str, found: dict[str, Any], _: dict[str, Probe]) -> Line:
    said = f"{found['version']}, {found['library']}"
    if not found["threads"]:
        advice = (
            "this MPI has no MPI_THREAD_MULTIPLE, which the exchanges over MPI need beside Horovod: use an MPI that "
            "was built with it, or the exchange allgather or reduce_scatter"
        )
        return Line(name, "note", said, advice)
    if "Open MPI v5" in found["library"]:
        return Line(name, "note", said, "'horovodrun --mpi' passes options that Open MPI 5 does not read: use mpirun")
    return Line(name, "ok", said)


def _cupy(name: str, found: dict[str, Any], _: dict[str, Probe]) -> Line:
    if not found["gpus"]:
        why = found.get("why", "")
        return Line(
            name, "note", f"{found['version']}, no GPU", f"it finds no GPU ({why}), so that all runs on the CPU"
        )
    said = f"{found['version']}, CUDA {found['runtime']}, {', '.join(found['gpus'])}; "
    return Line(name, "ok", said + f"{found['elements']:,} elements went through {found['bytes']:,} bytes on the GPU")


def _launchers(with_mpi: bool) -> Line:
    there = [name for name in ("horovodrun", "mpirun", "torchrun") if shutil.which(name)]
    found = ", ".join(there) or "none on the PATH"
    if not there:
        return Line(
            "launchers", "absent", found, "a job of several ranks needs one: put mpirun or torchrun on the PATH"
        )
    if "mpirun" in there and with_mpi:
        if not (shutil.which("ssh") or shutil.which("rsh")) and os.environ.get("OMPI_MCA_plm_rsh_agent") != "":
            advice = "there is no ssh, which mpirun of Open MPI needs even on one machine: set OMPI_MCA_plm_rsh_agent="
            return Line("launchers", "note", found, f"{advice} (to nothing), or install ssh")
        if os.geteuid() == 0 and "OMPI_ALLOW_RUN_AS_ROOT" not in os.environ:
            advice = "mpirun of Open MPI refuses to run as root: set OMPI_ALLOW_RUN_AS_ROOT=1"
            return Line(
                "launchers", "note", found, f"{advice} and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or use another user"
            )
    return Line("launchers", "ok", found)


COMPONENTS: dict[str, tuple[str, Callable[[str, dict[str, Any], dict[str, Probe]], Line], str]] = {
    "kernels": ("hvd-deepreduce", _kernels, ""),
    "torch": ("torch", _torch, f"hvd_deepreduce.torch needs it: run {INSTALL['torch']}"),
    "tensorflow": (
        "tensorflow", _tensorflow, f"hvd_deepreduce.tensorflow needs it: run {INSTALL['tensorflow']}",
    ),
    "horovod.torch": (
        "horovod", _horovod, f"hvd.DistributedOptimizer on PyTorch needs it (DDP does not): {INSTALL_HOROVOD}",
    ),
    "horovod.tensorflow": ("horovod", _horovod, f"hvd_deepreduce.tensorflow needs it: {INSTALL_HOROVOD}"),
    "mpi4py": ("mpi4py", _mpi4py, f"the exchanges over MPI need it: run {INSTALL['mpi4py']}"),
    "cupy": (
        "cupy", _cupy, f"gradients on an NVIDIA GPU need it: run {INSTALL['cupy']}",
    ),
}  # fmt: skip
"""By the name of the probe: the package, what makes a line of what was found, and what will not work without it."""
