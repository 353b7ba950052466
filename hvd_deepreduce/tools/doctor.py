"""``hvd-deepreduce doctor``: what is installed, what will not work, and how to fix it."""

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
from typing import Any

import typer

import hvd_deepreduce
from hvd_deepreduce.engine import cores
from hvd_deepreduce.needs import INSTALL
from hvd_deepreduce.tools import output
from hvd_deepreduce.tools.bench import VECTOR_LEVELS

EXAMPLES = ("doctor", "doctor --json")
SECONDS = 120.0
"""The most that a probe may take."""
RANK_VARIABLES = (
    "OMPI_COMM_", "OMPI_UNIVERSE", "OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "PMIX_", "PMI_", "HOROVOD_",
    "SLURM_",
)  # fmt: skip
"""Begin variables by which a launcher tells a process its rank, and Open MPI's where its daemon is. A probe is the only
rank of its job."""
INSTALL_HOROVOD = (
    "install Horovod 0.28.1 with the frameworks of this environment (in a checkout, scripts/dev/build_horovod.sh VENV "
    "builds it)"
)


Found = dict[str, dict[str, Any] | str]
"""What each probe has printed, or why it failed."""


def doctor(as_json: output.Json = False) -> None:
    """Shows what is installed, what will not work, and how to fix it.

    It imports each library in a process of its own, and sends a generated gradient through the recommended config, on
    the CPU and, where CuPy finds one, on a GPU. It ends with 1 if something that is installed does not work.
    """
    lines = [_line("system", *_system()), *diagnosed(output.progress)]
    failed = any(line["state"] == "fails" for line in lines)
    output.show({"works": not failed, "components": lines}, as_json, _show)
    if failed:
        raise typer.Exit(output.FOUND)


def _show(found: dict[str, Any]) -> None:
    lines = found["components"]
    output.columns(lines, [("component", "{name}"), ("state", "{state}"), ("found", "{found}")], left=3)
    advice = [line for line in lines if line["advice"]]
    output.say()
    output.say("What will not work, and how to fix it:" if advice else "Everything that is installed works.")
    for line in advice:
        output.paragraph("- {name}: {advice}.".format(**line))


def probe(name: str) -> dict[str, Any] | str:
    """What one of ``probes.PROBES`` prints in a process of its own; or why it fails, as far as it says."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(RANK_VARIABLES)}
    command = [sys.executable, "-m", "hvd_deepreduce.tools.probes", name]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"it did not end within {SECONDS:.0f} s"
    if ended.returncode < 0:
        return f"its process was ended by {signal.Signals(-ended.returncode).name}"
    said = [line for line in (ended.stderr if ended.returncode else ended.stdout).splitlines() if line.strip()]
    last = said[-1].strip() if said else "it printed nothing"
    if ended.returncode:
        return last
    try:
        found: dict[str, Any] = json.loads(last)
    except ValueError:
        return f"it ended with {last!r}"
    return found


def diagnosed(progress: Callable[[list[Any], str], Any]) -> Iterator[dict[str, str]]:
    """What the probes of all components find."""
    installed = [name for name in COMPONENTS if _installed(name)]
    with ThreadPoolExecutor(max(1, min(4, cores.of_rank(1)))) as pool:
        running = {name: pool.submit(probe, name) for name in installed}
        ended = {name: one.result() for name, one in progress(list(running.items()), "importing libraries")}
    for name, (package, judge, without) in COMPONENTS.items():
        found = ended.get(name)
        if found is None:
            yield _line(name, "", without, "absent")
        elif isinstance(found, str):
            mend = f"install {package} again" if name != "kernels" else "install hvd-deepreduce again, on this machine"
            mend = INSTALL_HOROVOD if package == "horovod" else mend
            known = INSTALL.get(package, mend) in found  # the error says it already
            advice = f"it does not work: {found}" + ("" if known else f". To fix it, {mend}")
            yield _line(name, _version(package), advice, "fails")
        else:
            yield _line(name, *judge(found, ended))
    yield _line("launchers", *_launchers("mpi4py" in ended))
    version, need = _version("matplotlib"), f"'hvd-deepreduce bench --picture' needs it: run {INSTALL['matplotlib']}"
    yield _line("matplotlib", version) if version else _line("matplotlib", "", need, "absent")


def _line(name: str, found: str, advice: str = "", state: str = "") -> dict[str, str]:
    """What was found out about one component.

    Args:
        found: versions and the like.
        advice: what will not work, and how to fix it; empty where nothing is wrong.
        state: ``ok``; ``absent``: it is not installed; ``note``: it works, but not everything will; ``fails``.
            Unless it is given, it is ``note`` with advice, and ``ok`` without.
    """
    return {"name": name, "state": state or ("note" if advice else "ok"), "found": found, "advice": advice}


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


# Each of these yields the arguments of _line after the name, of which the last ones may be missing.


def _system() -> Iterator[str]:
    mine, limit = cores.of_rank(1), os.environ.get("OMP_NUM_THREADS")
    packages = ", ".join(f"{name} {_version(name)}" for name in ("numpy", "pydantic", "zstandard"))
    yield (
        f"hvd_deepreduce {hvd_deepreduce.__version__}, Python {platform.python_version()}, {mine} cores"
        + (f", OMP_NUM_THREADS={limit}" if limit else "") + f", {packages}"
    )  # fmt: skip
    if sys.platform != "linux":
        yield f"only Linux is tested, and this is {sys.platform}"


def _kernels(found: dict[str, Any], _: Found) -> Iterator[str]:
    yield f"{VECTOR_LEVELS[found['level']]}; {found['elements']:,} elements went through {found['bytes']:,} bytes"
    if found["level"] == 0 and platform.machine() == "x86_64":
        yield "this processor has no AVX2, so that encoding takes several times as long"


def _torch(found: dict[str, Any], ended: Found) -> Iterator[str]:
    gpus, cupy = found["gpus"], ended.get("cupy")
    devices = f", CUDA {found['cuda']}, {', '.join(gpus)}" if gpus else ", no GPU"
    yield f"{found['version']}, torch.distributed with {', '.join(found['backends']) or 'no backend'}{devices}"
    if gpus and not (isinstance(cupy, dict) and cupy["gpus"]):
        yield f"gradients on a GPU need CuPy: run {INSTALL['cupy']} (this PyTorch has CUDA {found['cuda']})"


def _tensorflow(found: dict[str, Any], _: Found) -> Iterator[str]:
    version, keras, built = found["version"], found["keras"], found["operations"]
    operations = f"operations in C++ for {', '.join(built)}" if built else "no operations in C++"
    yield f"{version}, Keras {keras or 'not installed'}, {operations}"
    if not keras.startswith("2."):
        package = "" if find_spec("tf_keras") else "install the package tf_keras, and "
        yield (
            f"Horovod 0.28 works with Keras 2 alone, and hvd_deepreduce.tensorflow refuses others: {package}set the "
            "environment variable TF_USE_LEGACY_KERAS=1 before TensorFlow is imported"
        )
    elif version not in built:
        yield (
            f"the operations in C++ were not built for TensorFlow {version}, so that Python is in their place, which "
            "is slower, and 'mode: auto' is an error: install hvd-deepreduce again, in this environment, with "
            "'pip install --no-build-isolation' and a C++ compiler"
        )


def _horovod(found: dict[str, Any], _: Found) -> Iterator[str]:
    built = found["built"]
    yield f"{_version('horovod')}, built with {', '.join(built) or 'neither Gloo nor MPI'}"
    if "gloo" not in built and "mpi" not in built:
        yield from (f"it has no way to communicate: {INSTALL_HOROVOD}", "fails")
    elif "mpi" not in built:
        yield (
            "it was built without MPI, so that the exchanges over MPI (densestream, sparcml) do not run beside it: use "
            f"the exchange allgather or reduce_scatter, or {INSTALL_HOROVOD}"
        )


def _mpi4py(found: dict[str, Any], _: Found) -> Iterator[str]:
    yield f"{found['version']}, {found['library']}"
    if not found["threads"]:
        yield (
            "this MPI has no MPI_THREAD_MULTIPLE, which the exchanges over MPI need beside Horovod: use an MPI that "
            "was built with it, or the exchange allgather or reduce_scatter"
        )
    elif "Open MPI v5" in found["library"]:
        yield "'horovodrun --mpi' passes options that Open MPI 5 does not read: use mpirun"


def _cupy(found: dict[str, Any], _: Found) -> Iterator[str]:
    if found["gpus"]:
        yield (
            f"{found['version']}, CUDA {found['runtime']}, {', '.join(found['gpus'])}; {found['elements']:,} elements "
            f"went through {found['bytes']:,} bytes on the GPU"
        )
    else:
        yield f"{found['version']}, no GPU"
        yield f"it finds no GPU ({found.get('why', '')}), so that all runs on the CPU"


def _launchers(with_mpi: bool) -> Iterator[str]:
    there = [name for name in ("horovodrun", "mpirun", "torchrun") if shutil.which(name)]
    yield ", ".join(there) or "none on the PATH"
    if not there:
        yield from ("a job of several ranks needs one: put mpirun or torchrun on the PATH", "absent")
    elif "mpirun" in there and with_mpi:
        if not (shutil.which("ssh") or shutil.which("rsh")) and os.environ.get("OMPI_MCA_plm_rsh_agent") != "":
            yield (
                "there is no ssh, which mpirun of Open MPI needs even on one machine: set OMPI_MCA_plm_rsh_agent= (to "
                "nothing), or install ssh"
            )
        elif os.geteuid() == 0 and "OMPI_ALLOW_RUN_AS_ROOT" not in os.environ:
            yield (
                "mpirun of Open MPI refuses to run as root: set OMPI_ALLOW_RUN_AS_ROOT=1 and "
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or use another user"
            )


COMPONENTS: dict[str, tuple[str, Callable[[dict[str, Any], Found], Iterator[str]], str]] = {
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
