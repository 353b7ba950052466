"""scripts/dev/test_gpu.sh: all of it that needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from xml.etree import ElementTree

import pytest

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


def test_a_report_is_left_and_the_last_line_sums_it_up(tmp_path):
    tests = ["--tests", "tests/ops/test_bits.py", "--only", "indices", "--processes", "1"]
    ended = run(sys.executable, "--emulator", "--library", LIBRARY, "--report", tmp_path / "report", *tests)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = json.loads((tmp_path / "report" / "summary.json").read_text())["steps"]
    outcomes = {step["name"]: step["outcome"] for step in steps}
    assert outcomes == {
        "build": "skipped", "tests": "passed", "memcheck": "skipped", "synccheck": "skipped", "initcheck": "skipped",
        "racecheck": "skipped", "ncu": "skipped",
    }  # fmt: skip
    found = ElementTree.parse(tmp_path / "report" / "tests.xml").getroot().find("testsuite")
    assert found is not None and int(found.attrib["tests"]) > 0 and found.attrib["failures"] == "0"
    assert ended.stdout.splitlines()[-1].startswith("emulator: 1 steps passed, 0 did not, 6 were skipped")


def test_a_step_that_takes_too_long_is_ended_and_what_it_printed_stays(tmp_path):
    slow = tmp_path / "test_slow.py"
    slow.write_text("import time\ndef test_sleeps():\n    print('begun', flush=True)\n    time.sleep(100)\n")
    limit = ["--minutes", "0.6", "--processes", "0", "--tests", str(slow)]
    ended = run(sys.executable, "--emulator", "--library", LIBRARY, "--report", tmp_path / "report", *limit)
    assert ended.returncode == 1
    assert "tests: out of time" in ended.stdout
    assert "KeyboardInterrupt" in (tmp_path / "report" / "tests.log").read_text()


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
