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

EXAMPLES = ("doctor", "doctor --json")
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


def doctor(as_json: output.Json = False) -> None:
    """Shows what is installed, what will not work, and how to mend it.

    It imports each library in a process of its own, and sends a generated gradient through the recommended config, on
    the CPU and, where CuPy finds one, on a GPU. It ends with 1 if something that is installed does not work.
    """
    lines = [line._asdict() for line in (_system(), *diagnosed(output.progress))]
    failed = any(line["state"] == "fails" for line in lines)
    output.show({"works": not failed, "components": lines}, as_json, _show)
    if failed:
        raise typer.Exit(output.ExitCode.FOUND)


def _show(found: dict[str, Any]) -> None:
    lines = found["components"]
    output.columns(lines, [("component", "{name}"), ("state", "{state}"), ("found", "{found}")], left=3)
    advice = [line for line in lines if line["advice"]]
    output.say()
    output.say("What will not work, and how to mend it:" if advice else "Everything that is installed works.")
    for line in advice:
        output.paragraph("- {name}: {advice}.".format(**line))


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
    installed = [name for name in COMPONENTS if _installed(name)]
    with ThreadPoolExecutor(max(1, min(4, cores.of_rank(1)))) as pool:
        running = {name: pool.submit(probe, name) for name in installed}
        ended = {name: one.result() for name, one in progress(list(running.items()), "importing libraries")}
    for name, (package, judge, without) in COMPONENTS.items():
        if name not in ended:
            yield Line(name, "absent", "", without)
        elif (found := ended[name].found) is None:
            mend = f"install {package} again" if name != "kernels" else "install hvd-deepreduce again, on this machine"
            mend = INSTALL_HOROVOD if package == "horovod" else mend
            advice = f"it does not work: {ended[name].error}. To mend it, {mend}"
            yield _line(name, _version(package), advice, "fails")
        else:
            yield _line(name, *judge(found, ended))
    yield _line("launchers", *_launchers("mpi4py" in ended))
    version, need = _version("matplotlib"), f"'hvd-deepreduce bench --picture' needs it: run {INSTALL['matplotlib']}"
    yield _line("matplotlib", version) if version else _line("matplotlib", "", need, "absent")


def _line(name: str, found: str, advice: str = "", state: str = "") -> Line:
    return Line(name, state or ("note" if advice else "ok"), found, advice)


def _installed(name: str) -> bool:
    """Whether a component is there to be probed, found out without importing it."""
    if name == "kernels":
        return True
    top, _, framework = name.partition(".")
    return find_spec(top) is not None and (not framework or find_spec(framework) is not None)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _system() -> Line:
    mine, limit = cores.of_rank(1), os.environ.get("OMP_NUM_THREADS")
    found = f"hvd_deepreduce {hvd_deepreduce.__version__}, Python {platform.python_version()}, {mine} cores"
    packages = ", ".join(f"{name} {_version(name)}" for name in ("numpy", "pydantic", "zstandard"))
    found += (f", OMP_NUM_THREADS={limit}" if limit else "") + f", {packages}"
    advice = "" if sys.platform == "linux" else f"only Linux is tested, and this is {sys.platform}"
    return _line("system", found, advice)


Judgement = tuple[str, ...]
"""``found``, ``advice`` and ``state`` of a ``Line``, of which the last ones may be missing."""


def _kernels(found: dict[str, Any], _: dict[str, Probe]) -> Judgement:
    said = f"{VECTOR_LEVELS[found['level']]}; {found['elements']:,} elements went through {found['bytes']:,} bytes"
    if found["level"] == 0 and platform.machine() == "x86_64":
        return said, "this processor has no AVX2, so that encoding takes several times as long"
    return (said,)


def _torch(found: dict[str, Any], ended: dict[str, Probe]) -> Judgement:
    gpus = found["gpus"]
    said = f"{found['version']}, torch.distributed with {', '.join(found['backends']) or 'no backend'}"
    said += f", CUDA {found['cuda']}, {', '.join(gpus)}" if gpus else ", no GPU"
    cupy = ended.get("cupy")
    if gpus and (cupy is None or cupy.found is None or not cupy.found["gpus"]):
        return said, f"gradients on a GPU need CuPy: run {INSTALL['cupy']} (this PyTorch has CUDA {found['cuda']})"
    return (said,)


def _tensorflow(found: dict[str, Any], _: dict[str, Probe]) -> Judgement:
    version, keras, built = found["version"], found["keras"], found["operations"]
    said = f"{version}, Keras {keras or 'not installed'}"
    said += f", operations in C++ for {', '.join(built)}" if built else ", no operations in C++"
    if not keras.startswith("2."):
        package = "" if find_spec("tf_keras") else "install the package tf_keras, and "
        return said, (
            f"Horovod 0.28 works with Keras 2 alone, and hvd_deepreduce.tensorflow refuses others: {package}set the "
            "environment variable TF_USE_LEGACY_KERAS=1 before TensorFlow is imported"
        )
    if version not in built:
        return said, (
            f"the operations in C++ were not built for TensorFlow {version}, so that Python is in their place, which "
            "is slower, and 'mode: auto' is an error: install hvd-deepreduce again, in this environment, with "
            "'pip install --no-build-isolation' and a C++ compiler"
        )
    return (said,)


def _horovod(found: dict[str, Any], _: dict[str, Probe]) -> Judgement:
    built = found["built"]
    said = f"{_version('horovod')}, built with {', '.join(built) or 'neither Gloo nor MPI'}"
    if "gloo" not in built and "mpi" not in built:
        return said, f"it has no way to communicate: {INSTALL_HOROVOD}", "fails"
    if "mpi" not in built:
        return said, (
            "it was built without MPI, so that the exchanges over MPI (densestream, sparcml) do not run beside it: use "
            f"the exchange allgather or reduce_scatter, or {INSTALL_HOROVOD}"
        )
    return (said,)


def _mpi4py(found: dict[str, Any], _: dict[str, Probe]) -> Judgement:
    said = f"{found['version']}, {found['library']}"
    if not found["threads"]:
        return said, (
            "this MPI has no MPI_THREAD_MULTIPLE, which the exchanges over MPI need beside Horovod: use an MPI that "
            "was built with it, or the exchange allgather or reduce_scatter"
        )
    if "Open MPI v5" in found["library"]:
        return said, "'horovodrun --mpi' passes options that Open MPI 5 does not read: use mpirun"
    return (said,)


def _cupy(found: dict[str, Any], _: dict[str, Probe]) -> Judgement:
    if not found["gpus"]:
        return f"{found['version']}, no GPU", f"it finds no GPU ({found.get('why', '')}), so that all runs on the CPU"
    said = f"{found['version']}, CUDA {found['runtime']}, {', '.join(found['gpus'])}; "
    return (said + f"{found['elements']:,} elements went through {found['bytes']:,} bytes on the GPU",)


def _launchers(with_mpi: bool) -> Judgement:
    there = [name for name in ("horovodrun", "mpirun", "torchrun") if shutil.which(name)]
    found = ", ".join(there)
    if not there:
        return "none on the PATH", "a job of several ranks needs one: put mpirun or torchrun on the PATH", "absent"
    if "mpirun" in there and with_mpi:
        if not (shutil.which("ssh") or shutil.which("rsh")) and os.environ.get("OMPI_MCA_plm_rsh_agent") != "":
            return found, (
                "there is no ssh, which mpirun of Open MPI needs even on one machine: set OMPI_MCA_plm_rsh_agent= (to "
                "nothing), or install ssh"
            )
        if os.geteuid() == 0 and "OMPI_ALLOW_RUN_AS_ROOT" not in os.environ:
            return found, (
                "mpirun of Open MPI refuses to run as root: set OMPI_ALLOW_RUN_AS_ROOT=1 and "
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or use another user"
            )
    return (found,)


COMPONENTS: dict[str, tuple[str, Callable[[dict[str, Any], dict[str, Probe]], Judgement], str]] = {
    "kernels": ("hvd-deepreduce", _kernels, ""),
    "torch": ("torch", _torch, f"hvd_deepreduce.torch needs it: run {INSTALL['torch']}"),
    "tensorflow": ("tensorflow", _tensorflow, f"hvd_deepreduce.tensorflow needs it: run {INSTALL['tensorflow']}"),
    "horovod.torch": (
        "horovod", _horovod, f"hvd.DistributedOptimizer on PyTorch needs it (DDP does not): {INSTALL_HOROVOD}",
    ),
    "horovod.tensorflow": ("horovod", _horovod, f"hvd_deepreduce.tensorflow needs it: {INSTALL_HOROVOD}"),
    "mpi4py": ("mpi4py", _mpi4py, f"the exchanges over MPI need it: run {INSTALL['mpi4py']}"),
    "cupy": ("cupy", _cupy, f"gradients on an NVIDIA GPU need it: run {INSTALL['cupy']}"),
}  # fmt: skip
"""By the name of the probe: the package, what makes a line of what was found, and what will not work without it."""
