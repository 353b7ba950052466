"""Plants each fault of faults.py in a copy of the project, and says which of them the tests of `make test` find.

    python tests/mutants/run.py [--all] [NAME ...]

Tests that start launchers run only if the others have passed. ``--all`` runs the thorough ones too.
Ends with status 1 if a fault is not found. A name is a part, such as ``engine``, or a number.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from tests.mutants.faults import FAULTS  # noqa: E402

ASIDE = shutil.ignore_patterns(".git", ".venv", "build", "runs", "dist", "docs", "__pycache__", ".hypothesis")


def place(package: Path, text: str) -> Path:
    """The file that has the text, which must stand once in the package."""
    found = [path for path in package.rglob("*.py") for _ in range(path.read_text("utf-8").count(text))]
    if len(found) != 1:
        raise SystemExit(f"faults.py is out of date: {text!r} stands {len(found)} times in {package.name}")
    return found[0]


def finder(copy: Path, tests: list[str], thorough: bool) -> str:
    """The test that fails in the copy, or nothing."""
    for select in ("not launch", "launch"):
        marks = f"{select} and not elastic" + ("" if thorough else " and not thorough")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests],
            cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 1, 2, 5):
            raise SystemExit(done.stdout + done.stderr)
        if done.returncode in (1, 2):
            lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return lines[0].split(" - ")[0] if lines else "pytest ended with an error"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run the thorough tests too")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=ASIDE, symlinks=True)
        for number, (part, old, new, tests) in enumerate(FAULTS):
            if options.names and not {part, str(number)} & set(options.names):
                continue
            path, began = place(copy / "hvd_deepreduce", old), time.monotonic()
            text = path.read_text("utf-8")
            path.write_text(text.replace(old, new), "utf-8")
            found = finder(copy, tests.split(), options.all)
            path.write_text(text, "utf-8")
            missed += not found
            print(f"{number} {part} ({time.monotonic() - began:.0f} s): {found or 'NOT FOUND'}: {new!r}", flush=True)
    print(f"{missed} not found")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
