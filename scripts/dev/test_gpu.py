"""Tests and times all that runs on CUDA, on a bare machine with a GPU: see scripts/dev/test_gpu.sh.

It needs Python 3.10 or later with NumPy, PyTorch and CuPy 14, and a C++ compiler (or a library that was built
elsewhere, ``--library``). It needs no network, no Horovod and no MPI, and installs nothing. Small packages come from a
folder of wheels, which ``--collect-wheels`` fills where there is a network.

Each step has a limit of time, and what it has printed until then stays. A run that took too long goes on with
``--part``, and the report's folder keeps what it has of other parts. The report is a log of each step, the tests'
results as JUnit XML, and ``summary.json``; ``gpu-report.tar.gz`` has all of them.

This file uses the standard library alone, since it runs before anything is installed.
"""

import argparse
import importlib
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODULES = "setuptools pydantic yaml zstandard pytest pytest_timeout xdist hypothesis psutil typer rich".split()
"""What is imported besides PyTorch, CuPy and NumPy. Some packages have other names:"""
PACKAGES = {"yaml": "PyYAML", "pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist"}
PLATFORMS = [f"{name}_{platform.machine()}" for name in ("manylinux_2_28", "manylinux2014", "manylinux_2_17", "linux")]
CORES = os.cpu_count() or 1
PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "120", "--durations", "5"]
MARK = "HVD_DEEPREDUCE_TEST_GPU"
"""The environment variable by which a step's processes are known: torchrun starts its workers in sessions of their own,
and does not end them if it is killed."""
PACKED = "gpu-report.tar.gz"
BENCH = "scripts/bench/bench_gpu.py"
COMPILE = (
    "import sys, time, cupy; from hvd_deepreduce.ops import device; cupy.cuda.Device(0).use(); begin = time.time(); "
    "device._module(cupy, sys.argv[1]); print(f'{time.time() - begin:.1f} s without the start of the process')"
)
GPU_CASES = "tests/adapters/gpu_cases.py"
NAMES = "import pathlib as p, tests.case_runner as c, sys; print(*c.case_names(p.Path(sys.argv[1])))"
WAYS = {"1 rank": (1, {}), "1 queue": (1, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}), "2 ranks": (2, {})}
"""Of the adapters' cases: ranks, environment. One rank has NCCL, two share the GPU with Gloo. With one queue of the
GPU, the kernels of a stream wait for those that other streams were given before."""
CPU_JOBS = {"ddp_cases": 3, "fsdp_cases": 4, "fsdp_local_cases": 4}
SANITIZED = {
    "select": "ties or five_thousand or misleads or room_for or long_chunks",
    "sections": "ends or test_join or many_short",
    "index_codes": "some or ends or many_at_once or join_chunks",
    "qsgd": "ties or five_thousand or 7-32-False",
    "arrays": "ties or five_thousand or test_sum",
    "many_ranks": "test_sums or parts_of_rans",
    "others": "test_by_value or test_by_index",
    "program": "the_bytes or few_nonzeros",
    "quantizers": "of_many or many_segments or long_buckets or first_rates",
    "device_pipeline": "settings0 or settings12 or settings13 or GPU-20] or GPU-22] or (short_ and topk-rice_blocks)",
    "concurrency": "two_streams and recommended",
}
"""The tests that compute-sanitizer sees, by their files: the kernels of the recommended pipeline and of signs, with up
to two million elements. There are about 4,500 launches, and racecheck takes about 12 ms for one."""
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
KERNELS = (
    "topk_sample_f32|topk_collect_f32|topk_count_f32|topk_take_f32|rice_blocks_write|qsgd_encode_section|subtract_f32|"
    "measured_container|fused_jobs|fused_blocks_highs|fused_blocks_join|fused_values|fused_sum_starts|fused_sum"
)
"""What ncu looks at."""
Judge = Callable[[int, str], tuple[str, str]]
"""Gives, of a step's exit status and output, its outcome and a line about it."""


class Step(NamedTuple):
    """One step of a run. ``outcome`` is ``passed``, ``failed``, ``skipped`` or ``out of time``."""

    part: str
    name: str
    outcome: str
    seconds: float
    said: str


def last_line(code: int, output: str) -> tuple[str, str]:
    return "failed" if code else "passed", (output.strip() or "it printed nothing").rpartition("\n")[2]


def of_sanitizer(code: int, output: str) -> tuple[str, str]:
    lines = re.findall(r"^=* ?((?:ERROR|RACECHECK) SUMMARY: .*|\d+ (?:passed|failed|error).*?)[ =]*$", output, re.M)
    return "failed" if code else "passed", "; ".join(lines) or last_line(code, output)[1]


def of_cases(code: int, output: str) -> tuple[str, str]:
    """Of a program with cases (tests/case_runner.py): how many there were, and why some failed or were skipped."""
    # The reason is the first line that is not of the traceback's frames.
    ended = r"\b(passed|skipped|failed) (\w+) on rank \d+ in .*(?=\n?(?:Traceback.*\n|[ \t].*\n)*(.*))"
    found: dict[str, tuple[str, str]] = {}
    for kind, name, why in re.findall(ended, output):  # of a case on several ranks, the first failure counts
        if name not in found or (kind == "failed" and found[name][0] != kind):
            found[name] = kind, why
    kinds = [kind for kind, _ in found.values()]
    counts = [f"{kinds.count(kind)} {kind}" for kind in ("passed", "failed", "skipped") if kind in kinds]
    reasons = [f"{name}: {why[:200]}" for name, (kind, why) in found.items() if kind != "passed"]
    if "failed" not in kinds and (code or not kinds):
        reasons.append(f"status {code}, {last_line(code, output)[1]}")
    outcome = "failed" if code or not kinds or "failed" in kinds else "passed" if "passed" in kinds else "skipped"
    return outcome, "; ".join([", ".join(counts) or "no case has ended", *reasons])


def end(mark: str, number: int) -> None:
    """Sends all processes with this mark the signal, and SIGKILL those that are left 10 seconds later."""

    def left() -> set[int]:
        found = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark.encode() in path.read_bytes():
                    found.add(int(path.parent.name))
        return found

    for each, seconds in ((number, 10), (signal.SIGKILL, 5)):
        until, sent = time.monotonic() + seconds, set[int]()
        while (there := left()) and time.monotonic() < until:
            for process in there - sent:
                with suppress(OSError):
                    os.kill(process, each)
            sent |= there
            time.sleep(0.05)


class Report:
    """What a run has found out, in a folder, and what the folder has of runs of other parts."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder, self.minutes, self.begun = folder, minutes, time.monotonic()
        self.environment: dict[str, str] = {}
        self.machine: dict[str, str] = {}
        self.steps: list[Step] = []
        self.part, self.mark, self.lock = "", f"{MARK}={os.getpid()}-{time.time_ns()}:", threading.Lock()

    def left(self) -> float:
        """Seconds."""
        return 60 * self.minutes - (time.monotonic() - self.begun)

    def add(self, name: str, outcome: str, said: str, seconds: float = 0.0) -> None:
        with self.lock:
            self.steps.append(Step(self.part, name, outcome, seconds, said))
            print(f"{name:58} {outcome:12} {seconds:6.1f} s  {said}", flush=True)
            kept = {"machine": self.machine, "steps": [step._asdict() for step in self.steps]}
            (self.folder / "summary.json").write_text(json.dumps(kept, indent=1) + "\n")

    def run(
        self, name: str, seconds: float, program: str | None, *words: str, judge: Judge = last_line,
        stop: int = signal.SIGINT, **environment: str,
    ) -> bool:  # fmt: skip
        """Runs a command as a step, with its output in a log. Returns whether it passed.

        Args:
            seconds: the most that it may take. It gets the signal ``stop`` then, and so do all its children.
            program: None if it was not found.
        """
        limit, begin, code = min(seconds, self.left()), time.monotonic(), None
        if program is None:
            self.add(name, "skipped", "it was not found")
            return False
        if self.left() < 5:
            self.add(name, "out of time", f"the {self.minutes:g} minutes are over")
            return False
        log, mark = self.folder / f"{re.sub('[^A-Za-z0-9_]+', '-', name)}.log", self.mark + name
        variables = {**os.environ, **self.environment, **environment, MARK: mark.partition("=")[2]}
        with log.open("w") as output:
            process = subprocess.Popen(
                [program, *words], cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(limit)
            finally:
                end(f"{mark}\0", stop)
                process.wait()
        outcome, said = judge(code or 0, log.read_text(errors="replace"))
        outcome = "out of time" if code is None else outcome
        self.add(name, outcome, said[:800], time.monotonic() - begin)
        return outcome == "passed"

    def at_once(self, threads: int, steps: list[Callable[[], object]]) -> None:
        """Runs so many steps at the same time."""
        with ThreadPoolExecutor(threads) as pool:
            try:
                list(pool.map(lambda step: step(), steps))
            except BaseException:  # the pool would wait for all of them
                self.minutes = 0
                end(self.mark, signal.SIGKILL)
                raise

    def pack(self) -> None:
        with tarfile.open(self.folder / "unfinished", "w:gz") as packed:
            for path in sorted(self.folder.glob("*.*")):
                if path.name != PACKED:
                    packed.add(path, f"gpu-report/{path.name}")
        (self.folder / "unfinished").replace(self.folder / PACKED)


def collect(folder: Path, python: str) -> int:
    """Fills a folder with the wheels that a machine without a network may lack."""
    folder.mkdir(parents=True, exist_ok=True)
    constraints = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    kept = folder / "constraints.txt"
    kept.write_text("\n".join(line for line in constraints if not line.startswith(("numpy", "torch", "cupy"))) + "\n")
    command = [PYTHON, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--only-binary", ":all:"]
    command += ["--python-version", python, "--implementation", "cp", "--constraint", str(kept)]
    command += [PACKAGES.get(name, name) for name in MODULES]
    command += [f"--platform={name}" for name in PLATFORMS] + (["tomli", "exceptiongroup"] if python == "3.10" else [])
    ended = subprocess.run(command)
    if ended.returncode:
        print("test_gpu: the wheels could not be collected: this command needs a network and pip", file=sys.stderr)
        return ended.returncode
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels for Python {python}, {size / 2**20:.1f} MiB, are in {folder}")
    return 0


def prepare(report: Report, wheels: Path | None) -> None:
    """Unpacks all wheels into a folder, which needs no pip since a wheel is a ZIP file, and says where it is."""
    scratch = report.folder / "scratch"
    shutil.rmtree(scratch / "site", ignore_errors=True)
    (scratch / "site").mkdir(parents=True)
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(scratch / "site")
    # Before what is installed, which may be too old; PyTorch, CuPy and NumPy are not in it.
    sys.path[:0] = [str(ROOT), str(scratch / "site")]
    report.environment["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    report.environment |= {"PYTHONDONTWRITEBYTECODE": "1", "CUPY_CACHE_DIR": str(scratch / "kernel_cache")}


def look(report: Report, on_gpu: bool) -> bool:
    """Notes what the machine is, and says what is missing on it. Returns whether nothing is."""
    report.machine |= {"python": platform.python_version(), "system": platform.platform(), "cores": str(CORES)}
    lacks = {}
    for name in [*MODULES, "numpy", "torch", *(["cupy"] if on_gpu else [])]:
        try:
            report.machine[name] = str(getattr(importlib.import_module(name), "__version__", "there"))
        except Exception as error:
            lacks[name] = f"{name} cannot be imported: {type(error).__name__}: {error}"
    if "cupy" in report.machine:
        try:
            import cupy

            properties = cupy.cuda.runtime.getDeviceProperties(0)
            capability = f"compute capability {properties['major']}.{properties['minor']}"
            driver, runtime = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
            report.machine["gpu"] = f"{properties['name'].decode()}, {capability}, CUDA {driver}, {runtime}"
        except Exception as error:
            lacks["a GPU"] = f"CuPy finds no GPU ({type(error).__name__}: {error}). Nothing was run"
    for why in lacks.values():
        print(f"test_gpu: {why}", file=sys.stderr)
    if not lacks.keys().isdisjoint(MODULES):
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        print("Where there is a network, run", file=sys.stderr)
        print(f"    scripts/dev/test_gpu.sh --collect-wheels DIR --python {version}", file=sys.stderr)
        print("and give the folder here: --wheels DIR", file=sys.stderr)
    return not lacks


def find(tool: str) -> str | None:
    """A tool of CUDA's toolkit, which may not be on the PATH."""
    homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/usr/local/cuda"]
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes)]))


def build(report: Report, library: Path | None) -> bool:
    """Puts the CPU kernels beside the package."""
    made = ROOT / "hvd_deepreduce" / "_cpu.so"
    if library is not None:
        if not made.exists() or made.read_bytes() != library.read_bytes():
            beside = made.with_suffix(".new")
            shutil.copyfile(library, beside)
            beside.replace(made)  # processes that have loaded the old one keep it
        report.add("build", "skipped", f"{library.name} was given")
        return True
    if not shutil.which("g++") and not os.environ.get("CXX"):
        report.add("build", "failed", "there is no C++ compiler: install g++, or give --library")
        return False
    command = PYTHON, "setup.py", "-q", "build_ext", "--inplace"
    return report.run("build", 150, *command, HVD_DEEPREDUCE_WITHOUT_TENSORFLOW="1")


def compile_kernels(report: Report, options: argparse.Namespace) -> None:
    files = sorted((ROOT / "kernels").glob("*/*.cu"), key=lambda file: -file.stat().st_size)
    names = [f"{file.parent.name}/{file.stem}" for file in files]
    report.at_once(CORES, [partial(report.run, f"compile {name}", 120, PYTHON, "-c", COMPILE, name) for name in names])


def tests(report: Report, options: argparse.Namespace) -> None:
    command = [*PYTEST, "-q", "-n", str(options.processes), f"--junitxml={report.folder / 'tests.xml'}"]
    command += ["-m", "not thorough"] if options.emulator else ["--ignore=tests/ops/test_cuda_compiles.py"]
    command += [*(options.tests or ["tests/ops"]), *(["-k", options.only] if options.only else [])]
    report.run("tests", report.left() if options.emulator else 150, *command)


def torchrun(report: Report, name: str, seconds: float, ranks: int, *words: str, **environment: str) -> None:
    """SIGABRT makes each rank print its stacks."""
    command = PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words
    environment = {"OMP_NUM_THREADS": "1", **environment}
    report.run(name, seconds, *command, judge=of_cases, stop=signal.SIGABRT, **environment)


def adapters(report: Report, options: argparse.Namespace) -> None:
    variables = {**os.environ, **report.environment}
    cases = subprocess.check_output([PYTHON, "-c", NAMES, GPU_CASES], cwd=ROOT, env=variables, text=True).split()
    report.at_once(max(1, CORES // 4), [
        partial(torchrun, report, f"{way} {case}", 60, ranks, GPU_CASES, case, **environment)
        for way, (ranks, environment) in WAYS.items() for case in cases if (options.only or "") in case
    ])  # fmt: skip


def cpu(report: Report, options: argparse.Namespace) -> None:
    steps: list[Callable[[], object]] = []
    for name, ranks in CPU_JOBS.items():
        results = report.folder / "scratch" / "results" / name
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir(parents=True)
        words = f"tests/adapters/{name}.py", "--results", str(results)
        steps.append(partial(torchrun, report, f"cpu {name}", 240, ranks, *words, CUDA_VISIBLE_DEVICES=""))
    report.at_once(len(steps), steps)


def bench(report: Report, options: argparse.Namespace) -> None:
    for show in ("operations", "steps", "single"):
        if report.run(f"bench {show}", 100, PYTHON, BENCH, "--show", show):
            print((report.folder / f"bench-{show}.log").read_text().strip())


def profile(report: Report, options: argparse.Namespace) -> None:
    report.run("kernels", 120, PYTHON, BENCH, "--show", "kernels")
    options_of_ncu = ["--clock-control", "none", "--profile-from-start", "off", "--kernel-name", f"regex:^({KERNELS})$"]
    options_of_ncu += ["--section", "SpeedOfLight", "--section", "Occupancy", "--section", "LaunchStats"]
    report.run("ncu", 120, find("ncu"), *options_of_ncu, PYTHON, BENCH, "--show", "ncu")


def sanitize(report: Report, options: argparse.Namespace) -> None:
    words = " or ".join(f"(test_{name}.py and ({some}))" for name, some in SANITIZED.items())
    command = ["--error-exitcode", "99", "--target-processes", "all", *PYTEST, "-v", "-k", words]
    command += [f"tests/ops/test_{name}.py" for name in SANITIZED]
    run, sanitizer = partial(report.run, judge=of_sanitizer, HVD_DEEPREDUCE_SANITIZED="1"), find("compute-sanitizer")
    report.at_once(len(TOOLS), [partial(run, tool, 150, sanitizer, "--tool", tool, *command) for tool in TOOLS])


PARTS = {
    "compile": compile_kernels, "tests": tests, "adapters": adapters, "cpu": cpu, "bench": bench, "profile": profile,
    "sanitize": sanitize,
}  # fmt: skip
ON_HOST = ("tests", "adapters", "cpu")
"""Those that can do without a GPU."""


def go(options: argparse.Namespace) -> int:
    # A shell's background job ignores SIGINT, and so would its children, which are to write their summaries.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    report, kept = Report(options.report, options.minutes), options.report / "summary.json"
    if not kept.exists() and {path.name for path in report.folder.glob("*")} - {"scratch"}:
        print(f"test_gpu: {report.folder} holds something else than a report: give another --report", file=sys.stderr)
        return 2
    asked = [name for name in PARTS if name in (options.part or PARTS)]
    if options.part and kept.exists():
        steps = [Step(**step) for step in json.loads(kept.read_text())["steps"]]
        report.steps = [step for step in steps if step.part not in ("build", *asked)]
    else:
        shutil.rmtree(report.folder, ignore_errors=True)
    prepare(report, options.wheels)
    on_gpu = not options.emulator and asked != ["cpu"]
    if not look(report, on_gpu):
        return 2
    for name, value in report.machine.items():
        print(f"{name:24} {value}")
    if on_gpu:
        report.environment["HVD_DEEPREDUCE_GPU"] = "1"
    report.part = "build"
    built = build(report, options.library)
    for name in asked if built else ():
        report.part = name
        if options.emulator and name not in (ON_HOST if options.part else ("tests",)):
            report.add(name, "skipped", f"it runs with --part {name}" if name in ON_HOST else "there is no GPU")
            continue
        try:
            PARTS[name](report, options)
        except Exception as error:  # the other parts run: the machine may be lent for minutes only
            report.add(name, "failed", f"{type(error).__name__}: {error}")
        finally:
            report.pack()
    report.pack()
    count = {kind: sum(step.outcome == kind for step in report.steps) for kind in ("passed", "skipped")}
    bad = [step for step in report.steps if step.outcome not in count]
    for step in bad:
        print(f"{step.name}: {step.outcome}: {step.said}")
    print(
        f"{report.machine.get('gpu', 'without a GPU')}: {count['passed']} steps passed, {len(bad)} did not, "
        f"{count['skipped']} were skipped, in {time.monotonic() - report.begun:.0f} s; the report is in "
        f"{report.folder / PACKED}"
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
    add("--part", nargs="+", action="extend", choices=list(PARTS), help="what is run, in this order (all)")
    add("--processes", type=int, default=max(1, min(16, CORES // 2)), help="that run the tests (half of the cores)")
    add("--emulator", action="store_true", help="without a GPU: the tests; with --part, the adapters and cpu too")
    add("--tests", nargs="*", help="files or folders of tests, in place of tests/ops")
    add("--only", metavar="WORDS", help="pytest's -k for the tests; the adapters' cases whose names have them")
    options = parser.parse_args()
    for name in ("collect_wheels", "wheels", "library", "report"):
        path = getattr(options, name)
        setattr(options, name, path and path.absolute())
    if options.collect_wheels:
        return collect(options.collect_wheels, options.python)
    return go(options)


if __name__ == "__main__":
    sys.exit(main())
