"""scripts/dev/test_gpu.sh: all of it that needs no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import venv
from pathlib import Path
from xml.etree import ElementTree

import pytest
import test_gpu

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "dev" / "test_gpu.sh"
LIBRARY = ROOT / "hvd_deepreduce" / "_cpu.so"
pytestmark = pytest.mark.packaging


def run(python: Path | str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    command = [str(one) for one in (SCRIPT, *arguments)]
    return subprocess.run(
        command, env={**inherited, "PYTHON": str(python)}, capture_output=True, text=True, timeout=200
    )


def outcomes_in(folder: Path) -> dict[str, str]:
    return {step["name"]: step["outcome"] for step in json.loads((folder / "summary.json").read_text())["steps"]}


def test_a_report_is_left_and_the_last_line_sums_it_up(tmp_path):
    tests = ["--tests", "tests/ops/test_bits.py", "--only", "indices", "--processes", "1"]
    ended = run(sys.executable, "--emulator", "--library", LIBRARY, "--report", tmp_path / "report", *tests)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert outcomes_in(tmp_path / "report") == {
        "build": "skipped", "compile": "skipped", "tests": "passed", "adapters": "skipped", "cpu": "skipped",
        "bench": "skipped", "profile": "skipped", "sanitize": "skipped",
    }  # fmt: skip
    found = ElementTree.parse(tmp_path / "report" / "tests.xml").getroot().find("testsuite")
    assert found is not None and int(found.attrib["tests"]) > 0 and found.attrib["failures"] == "0"
    assert ended.stdout.splitlines()[-1].startswith("without a GPU: 1 steps passed, 0 did not, 7 were skipped")


def test_a_part_that_fails_does_not_end_the_others_and_a_later_run_keeps_them(tmp_path):
    """All is in one file."""
    folder, case = tmp_path / "report", "mixed_precision_and_batch_norm"
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_mixed_precision_and_batch_norm():\n    assert not 'empty'\n")
    given = ["--emulator", "--library", LIBRARY, "--report", folder, "--only", case, "--processes", "0"]
    ended = run(sys.executable, *given, "--tests", failing, "--part", "adapters", "tests")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    cases = {f"{way} {case}": "passed" for way in test_gpu.WAYS}
    assert outcomes_in(folder) == {"build": "skipped", "tests": "failed", **cases}
    assert "tests: failed: 1 failed in" in ended.stdout
    names = {"summary.json", "tests.log", "tests.xml", *(f"{re.sub('[^a-z0-9_]', '-', name)}.log" for name in cases)}
    with tarfile.open(folder / "gpu-report.tar.gz") as packed:
        assert set(packed.getnames()) == {f"gpu-report/{name}" for name in names}
        log = packed.extractfile("gpu-report/tests.log")
        assert log is not None and b"assert not 'empty'" in log.read()
    failing.write_text("def test_mixed_precision_and_batch_norm():\n    pass\n")
    ended = run(sys.executable, *given, "--tests", failing, "--part", "tests")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert outcomes_in(folder) == {"build": "skipped", "tests": "passed", **cases}
    assert ended.stdout.splitlines()[-1].startswith("without a GPU: 4 steps passed, 0 did not, 1 were skipped")


def test_a_step_that_takes_too_long_is_ended_and_what_it_printed_stays(tmp_path):
    slow = tmp_path / "test_slow.py"
    slow.write_text("import time\ndef test_sleeps():\n    print('begun', flush=True)\n    time.sleep(100)\n")
    limit = ["--minutes", "0.4", "--processes", "0", "--tests", str(slow)]
    ended = run(sys.executable, "--emulator", "--library", LIBRARY, "--report", tmp_path / "report", *limit)
    assert ended.returncode == 1
    assert "tests: out of time" in ended.stdout
    assert "KeyboardInterrupt" in (tmp_path / "report" / "tests.log").read_text()


ORPHAN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.argv[1:] == ["child"]:
    time.sleep(100)
child = subprocess.Popen([sys.executable, sys.argv[0], "child"], start_new_session=True)
print(child.pid, flush=True)
if sys.argv[1:] == ["hangs"]:
    time.sleep(100)
"""
"""Its child is in a session of its own, as torchrun's ranks are, and both ignore SIGINT."""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_process_of_a_step_is_left(tmp_path):
    """Neither of one that hangs, nor of one that ends."""
    (tmp_path / "orphan.py").write_text(ORPHAN)
    report = test_gpu.Report(tmp_path, 5)
    for word, outcome in (("hangs", "out of time"), ("ends", "passed")):
        begin = time.monotonic()
        report.run(f"a step {word}", 2, sys.executable, str(tmp_path / "orphan.py"), word)
        assert report.steps[-1].outcome == outcome and time.monotonic() - begin < 20
        assert not alive(int((tmp_path / f"a-step-{word}.log").read_text()))
    report.minutes = 0.01
    report.run("is late", 2, sys.executable, "-c", "print(1)")
    assert report.steps[-1].outcome == "out of time" and not (tmp_path / "is-late.log").exists()


CASES = """
import os, time, pytest
from tests.case_runner import case, run_cases

RANK = int(os.environ["RANK"])

@case
def works():
    time.sleep(RANK)

@case
def breaks_on_one_rank():
    if RANK == 1:
        raise ValueError("no ink")

@case
def is_left_out():
    pytest.skip("there is no paper")

@case
def hangs():
    time.sleep(100)

run_cases(RANK, int(os.environ["WORLD_SIZE"]))
"""


def test_cases_are_told_by_what_they_print(tmp_path):
    """Whatever the launcher prints after them. Ranks that hang print where."""
    (tmp_path / "cases.py").write_text(CASES)
    (tmp_path / "results").mkdir()
    report = test_gpu.Report(tmp_path, 10)
    report.environment["PYTHONPATH"] = str(ROOT)
    given = report, "go on", 120, 2, str(tmp_path / "cases.py"), "--results", str(tmp_path / "results")
    test_gpu.torchrun(*given, "works", "breaks_on_one_rank", "is_left_out")
    for name in ("is_left_out", "breaks_on_one_rank"):
        test_gpu.torchrun(report, name, 120, 2, str(tmp_path / "cases.py"), name)
    reason = "breaks_on_one_rank: ValueError: no ink"
    assert [(step.name, step.outcome) for step in report.steps] == [
        ("go on", "failed"), ("is_left_out", "skipped"), ("breaks_on_one_rank", "failed"),
    ]  # fmt: skip
    together, left_out, broken = (step.said for step in report.steps)
    assert together == f"1 passed, 1 failed, 1 skipped; {reason}; is_left_out: there is no paper"
    assert left_out == "1 skipped; is_left_out: there is no paper" and broken == f"1 failed; {reason}"
    for seconds in (8, 24, 72):  # on a busy machine, the ranks are still importing PyTorch after the first
        test_gpu.torchrun(report, "hangs", seconds, 2, str(tmp_path / "cases.py"), "hangs")
        assert report.steps[-1].outcome == "out of time"
        if "in hangs" in (stacks := (tmp_path / "hangs.log").read_text()):
            break
    assert "in hangs" in stacks


def test_a_sanitizer_s_line_has_both_summaries():
    output = "FAILED a.py\n=== 1 failed, 43 passed in 3.0s ===\n========= RACECHECK SUMMARY: 2 hazards displayed\n"
    said = "1 failed, 43 passed in 3.0s; RACECHECK SUMMARY: 2 hazards displayed"
    assert test_gpu.of_sanitizer(99, output) == ("failed", said)
    assert test_gpu.of_sanitizer(1, "Device not supported\n") == ("failed", "Device not supported")


def test_what_is_not_a_report_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    ended = run(sys.executable, "--emulator", "--report", tmp_path)
    assert ended.returncode == 2 and "holds something else than a report" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_unknown_part_is_an_error(tmp_path):
    ended = run(sys.executable, "--part", "tests", "paint", "--report", tmp_path / "report")
    assert ended.returncode == 2 and "invalid choice: 'paint'" in ended.stderr
    assert not (tmp_path / "report").exists()


def test_what_the_script_names_is_there():
    """Each file that compute-sanitizer sees has tests of these names, and each kernel exists."""
    words = " or ".join(f"(test_{name}.py and ({some}))" for name, some in test_gpu.SANITIZED.items())
    files = [f"tests/ops/test_{name}.py" for name in test_gpu.SANITIZED]
    command = [*test_gpu.PYTEST, "-q", "--collect-only", "-k", words, *files]
    environment = {**os.environ, "HVD_DEEPREDUCE_GPU": "1"}
    listed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    found = re.findall(r"^(\S+)::", listed, re.MULTILINE)
    assert set(found) == set(files) and 100 < len(found) < 200
    for word in re.findall(r"[\w-]+[]]?", " ".join(test_gpu.SANITIZED.values())):
        assert word in ("or", "and") or word in listed, word
    kernels = "".join(file.read_text() for file in (ROOT / "kernels").glob("*/*.cu"))
    for kernel in test_gpu.KERNELS.split("|"):
        stem = kernel.removesuffix("_f32")  # which a macro adds
        assert re.search(rf"KERNEL(\({stem},| {kernel}\()", kernels), kernel


ON_THE_HOST = """
import sys, contextlib, types
import numpy as np, torch
from tests import cuda_emulator

class Random:
    def standard_normal(self, size, dtype):
        return cuda_emulator.asarray(np.random.default_rng(0).standard_normal(size, dtype))

cupy = types.ModuleType("cupy")
cupy.zeros, cupy.empty, cupy.concatenate = cuda_emulator.zeros, cuda_emulator.empty, cuda_emulator.concatenate
cupy.asarray = cuda_emulator.asarray
cupy.random = types.SimpleNamespace(default_rng=lambda _: Random())
sys.modules["cupy"] = cupy
torch.cuda.synchronize, torch.cuda.profiler.profile = (lambda: None), contextlib.nullcontext
import bench_gpu
bench_gpu.WARM_UP, bench_gpu.COUNTED, bench_gpu.PROFILED_SIZE = 1, 1, 1000
bench_gpu.kernels_of = lambda call, inputs, runs: {"one": (1.0, 2.0)}
bench_gpu.kernels(2000, 0.01, 1, 2)
bench_gpu.MANY_RANKS, bench_gpu.MANY_TENSORS = 2, 20
bench_gpu.single(5000, 0.1, 1)
bench_gpu.ncu(2000, 0.01)
bench_gpu.steps(torch.device("cpu"), ((1, 64, 50),))
"""


def test_the_benchmark_calls_what_there_is():
    """With the emulator for CuPy; the times say nothing."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "scripts" / "bench")))
    ended = subprocess.run(
        [sys.executable, "-c", ON_THE_HOST], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    for config in ("default", "signs", "Bloom"):
        assert f"{config}, 2,000 float32, density 0.01, decode and sum of 4 ranks:" in ended.stdout
    assert "500 kept elements of 5,000" in ended.stdout and "| headers of 2 ranks x 20 tensors " in ended.stdout
    assert all(f"| {job} " in ended.stdout for job in ("DDP without a hook", "signs", "top-k, DGC's momentum"))


def test_what_is_missing_is_said_with_the_command_that_collects_it(tmp_path):
    venv.create(tmp_path / "empty", with_pip=False)
    ended = run(tmp_path / "empty" / "bin" / "python", "--emulator", "--report", tmp_path / "report")
    assert ended.returncode == 2
    assert "pydantic cannot be imported: ModuleNotFoundError" in ended.stderr
    assert f"--collect-wheels DIR --python {sys.version_info[0]}.{sys.version_info[1]}" in ended.stderr


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_run(tmp_path):
    ended = run(sys.executable, "--report", tmp_path / "report")
    assert ended.returncode == 2
    assert "CuPy finds no GPU" in ended.stderr or "cupy cannot be imported" in ended.stderr
