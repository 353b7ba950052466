"""Tests and times the CUDA kernels on a bare machine with a GPU: see scripts/dev/test_gpu.sh.

It needs Python 3.10 or later with NumPy, PyTorch and CuPy 14, and a C++ compiler (or a library that was built
elsewhere, ``--library``). It needs no network, no Horovod and no MPI, and installs nothing. Small packages come from a
folder of wheels, which ``--collect-wheels`` fills where there is a network.

Each step has a time of its own, and what it has printed until then stays. The report is a folder: a log of each step,
the tests' results as JUnit XML, ``bench.md`` and ``summary.json``. The last lines that are printed are its summary.

This file uses the standard library alone, since it runs before anything is installed.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "setuptools": "setuptools", "pydantic": "pydantic", "yaml": "PyYAML", "zstandard": "zstandard", "pytest": "pytest",
    "pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist", "hypothesis": "hypothesis", "psutil": "psutil",
    "typer": "typer", "rich": "rich",
}  # fmt: skip
"""What is needed besides PyTorch, CuPy and NumPy: the name that is imported, and the name of the package."""
PLATFORMS = [f"{name}_{platform.machine()}" for name in ("manylinux_2_28", "manylinux2014", "manylinux_2_17", "linux")]
MOST_BYTES = 64 * 2**20
"""Of the wheels and of this project's files together."""
SANITIZED = "test_select.py test_sections.py test_index_codes.py test_qsgd.py test_arrays.py"
"""The files of tests/ops that compute-sanitizer sees: the kernels of the recommended pipeline."""
TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")
KERNELS = "topk_collect_f32|topk_take_f32|rice_write|qsgd_encode_section|rice_join|sum_f32"
"""What ncu looks at."""


@dataclass
class Step:
    """One step of a run.

    Attributes:
        outcome: ``passed``, ``failed``, ``skipped`` or ``out of time``.
        seconds: it took.
        said: one line about it.
    """

    name: str
    outcome: str
    seconds: float
    said: str


@dataclass
class Report:
    """What a run has found out, in a folder."""

    folder: Path
    minutes: float
    begun: float = field(default_factory=time.monotonic)
    machine: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds."""
        return 60 * self.minutes - (time.monotonic() - self.begun)

    def skip(self, name: str, why: str) -> None:
        self.add(Step(name, "skipped", 0.0, why))

    def add(self, step: Step) -> None:
        self.steps.append(step)
        print(f"{step.name:24} {step.outcome:12} {step.seconds:6.1f} s  {step.said}", flush=True)
        kept = {"machine": self.machine, "steps": [asdict(one) for one in self.steps]}
        (self.folder / "summary.json").write_text(json.dumps(kept, indent=1) + "\n")

    def run(self, name: str, share: float, *command: str | Path, **environment: str) -> bool:
        """Runs a command as a step, with its output in a log, for a share of all time. Returns whether it passed."""
        limit = min(60 * self.minutes * share, self.left)
        if limit < 5:
            self.add(Step(name, "out of time", 0.0, f"the {self.minutes:g} minutes are over"))
            return False
        # A shell's background job ignores SIGINT, and so would its children, which are to write their summaries.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log, begin = self.folder / f"{name.replace(' ', '-')}.log", time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(word) for word in command], cwd=ROOT, env={**os.environ, **environment}, stdout=output,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGINT)  # pytest writes its summary
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        outcome = "out of time" if code is None else "failed" if code else "passed"
        self.add(Step(name, outcome, time.monotonic() - begin, lines[-1][:160] if lines else "it printed nothing"))
        return code == 0


def collect(folder: Path, python: str) -> int:
    """Fills a folder with the wheels that a machine without a network may lack."""
    folder.mkdir(parents=True, exist_ok=True)
    constraints = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    kept = folder / "constraints.txt"
    kept.write_text("\n".join(line for line in constraints if not line.startswith(("numpy", "torch", "cupy"))) + "\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--only-binary", ":all:"]
    command += ["--python-version", python, "--implementation", "cp", "--constraint", str(kept)]
    command += [f"--platform={name}" for name in PLATFORMS] + [*PACKAGES.values()]
    if python in ("3.10",):
        command += ["tomli", "exceptiongroup"]
    ended = subprocess.run(command)
    if ended.returncode:
        print("test_gpu: the wheels could not be collected: this command needs a network and pip", file=sys.stderr)
        return ended.returncode
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels for Python {python}, {size / 2**20:.1f} MiB, are in {folder}")
    return 0


def unpack(wheels: Path | None, site: Path) -> None:
    """Unpacks all wheels into a folder. A wheel is a ZIP file, so that this needs no pip."""
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)


def missing(environment: dict[str, str]) -> dict[str, str]:
    """The packages of ``PACKAGES`` that cannot be imported, and why."""
    found = {}
    for module, package in PACKAGES.items():
        command = [sys.executable, "-c", f"import {module}"]
        ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        if ended.returncode:
            found[package] = ended.stderr.strip().rpartition("\n")[2]
    return found


def versions(report: Report) -> list[str]:
    """Notes what the machine is, and returns what is missing on it."""
    lacks = []
    report.machine |= {"python": platform.python_version(), "system": platform.platform()}
    for module in ("numpy", "torch", "cupy"):
        try:
            report.machine[module] = str(__import__(module).__version__)
        except Exception as error:
            lacks.append(f"{module} cannot be imported ({type(error).__name__}: {error})")
    if "cupy" in report.machine:
        try:
            import cupy

            properties = cupy.cuda.runtime.getDeviceProperties(0)
            report.machine["gpu"] = properties["name"].decode()
            report.machine["gpus"] = str(cupy.cuda.runtime.getDeviceCount())
            report.machine["compute capability"] = f"{properties['major']}.{properties['minor']}"
            report.machine["driver, runtime"] = (
                f"{cupy.cuda.runtime.driverGetVersion()}, {cupy.cuda.runtime.runtimeGetVersion()}"
            )
        except Exception as error:
            lacks.append(f"CuPy finds no GPU ({type(error).__name__}: {error})")
    return lacks


def build(report: Report, library: Path | None, environment: dict[str, str]) -> bool:
    """Puts the CPU kernels beside the package."""
    made = ROOT / "hvd_deepreduce" / "_cpu.so"
    if library is not None:
        if not made.exists() or made.read_bytes() != library.read_bytes():
            beside = made.with_suffix(".new")
            shutil.copyfile(library, beside)
            beside.replace(made)  # processes that have loaded the old one keep it
        report.skip("build", f"{library.name} was given")
        return True
    if not shutil.which("g++") and not os.environ.get("CXX"):
        report.add(Step("build", "failed", 0.0, "there is no C++ compiler: install g++, or give --library"))
        return False
    return report.run(
        "build", 0.25, sys.executable, "setup.py", "-q", "build_ext", "--inplace",
        HVD_DEEPREDUCE_WITHOUT_TENSORFLOW="1", **environment,
    )  # fmt: skip


def go(options: argparse.Namespace) -> int:
    report = Report(options.report, options.minutes)
    shutil.rmtree(report.folder, ignore_errors=True)
    report.folder.mkdir(parents=True)
    site = report.folder / "site"
    unpack(options.wheels, site)
    # Before what is installed, which may be too old; PyTorch, CuPy and NumPy are not in it.
    environment = {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(site))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUPY_CACHE_DIR": str(report.folder / "kernel_cache"),
    }
    lacks = missing(environment)
    if lacks:
        for package, why in lacks.items():
            print(f"test_gpu: {package} cannot be imported: {why}", file=sys.stderr)
        print(
            "Where there is a network, run\n"
            f"    scripts/dev/test_gpu.sh --collect-wheels DIR --python {sys.version_info[0]}.{sys.version_info[1]}\n"
            "and give the folder here: --wheels DIR",
            file=sys.stderr,
        )
        return 2
    on_gpu = not options.emulator
    without = versions(report) if on_gpu else []
    if without:
        print("test_gpu: " + "; ".join(without) + ". Nothing was run", file=sys.stderr)
        return 2
    for name, value in report.machine.items():
        print(f"{name:24} {value}")
    python = sys.executable
    if not build(report, options.library, environment):
        return summary(report)
    tests, select = options.tests or ["tests/ops"], ["-k", options.only] if options.only else []
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "120"]
    if on_gpu:
        environment["HVD_DEEPREDUCE_GPU"] = "1"
        report.run("bench", 0.12, python, "scripts/bench/bench_gpu.py", **environment)
        shutil.copyfile(report.folder / "bench.log", report.folder / "bench.md")
    report.run(
        "tests", 0.5, *pytest, "-q", "-n", str(options.processes), f"--junitxml={report.folder / 'tests.xml'}", "-m",
        "not thorough", *tests, *select, **environment,
    )  # fmt: skip
    sanitizer, ncu = (find(name) for name in ("compute-sanitizer", "ncu"))
    for tool in TOOLS:
        if not on_gpu or sanitizer is None:
            report.skip(tool, "there is no GPU" if not on_gpu else "compute-sanitizer was not found")
            continue
        files = [f"tests/ops/{name}" for name in SANITIZED.split()]
        report.run(
            tool, 0.08, sanitizer, "--tool", tool, "--error-exitcode", "99", "--target-processes", "all", *pytest, "-q",
            "-x", "-k", "some or ends or ties or five_thousand", *files, **environment,
        )  # fmt: skip
    if not on_gpu or ncu is None:
        report.skip("ncu", "there is no GPU" if not on_gpu else "ncu was not found")
    else:
        report.run(
            "ncu", 0.1, ncu, "--kernel-name", f"regex:{KERNELS}", "--launch-count", "12", "--section", "SpeedOfLight",
            "--section", "Occupancy", "--section", "LaunchStats", python, "scripts/bench/bench_gpu.py", "--runs", "1",
            **environment,
        )  # fmt: skip
    return summary(report)


def find(tool: str) -> str | None:
    """A tool of CUDA's toolkit, which may not be on the PATH."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    return shutil.which(tool) or next((str(p) for h in homes if h and (p := Path(h) / "bin" / tool).exists()), None)


def summary(report: Report) -> int:
    """Prints the last lines. Returns the exit status: 0 if nothing failed."""
    bad = [step for step in report.steps if step.outcome in ("failed", "out of time")]
    done = sum(step.outcome == "passed" for step in report.steps)
    skipped = sum(step.outcome == "skipped" for step in report.steps)
    table = report.folder / "bench.md"
    if table.exists():
        print(table.read_text().strip())
    for step in report.steps:
        print(f"{step.name}: {step.outcome}: {step.said}")
    print(
        f"{report.machine.get('gpu', 'emulator')}: {done} steps passed, {len(bad)} did not, {skipped} were skipped, in "
        f"{time.monotonic() - report.begun:.0f} s; the report is in {report.folder}"
    )
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], prog="scripts/dev/test_gpu.sh")
    add = parser.add_argument
    add("--collect-wheels", type=Path, metavar="DIR", help="fill DIR with the wheels that may be missing, and end")
    add("--python", default="3.12", help="for which Python to collect them (3.12)")
    add("--wheels", type=Path, metavar="DIR", help="where the wheels are")
    add("--library", type=Path, metavar="FILE", help="the CPU kernels, built elsewhere (_cpu.so); else they are built")
    add("--report", type=Path, default=ROOT / "build" / "gpu", metavar="DIR", help="the report's folder (build/gpu)")
    add("--minutes", type=float, default=9.0, help="the most that all of it may take (9)")
    add("--processes", type=int, default=min(4, os.cpu_count() or 1), help="that run the tests (4)")
    add("--emulator", action="store_true", help="all but the GPU: the tests run in the emulator, nothing is timed")
    add("--tests", nargs="*", help="files or folders of tests, in place of tests/ops")
    add("--only", metavar="WORDS", help="pytest's -k")
    options = parser.parse_args()
    for name in ("collect_wheels", "wheels", "library", "report"):
        path = getattr(options, name)
        setattr(options, name, path and path.absolute())
    if options.collect_wheels:
        return collect(options.collect_wheels, options.python)
    return go(options)


if __name__ == "__main__":
    sys.exit(main())
