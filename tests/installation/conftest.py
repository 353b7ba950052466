"""Builds of a copy of this checkout, and virtual environments to install them into.

The folder is not named `packaging`: launched tests have `tests/` on their path, and Horovod imports the package of that
name.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
CHECK = Path(__file__).with_name("check_installed.py")
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Runs a command without this process's PYTHONPATH; returns its output, or fails the test with it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=inherited | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}", pytrace=False)
    return done.stdout


@dataclass
class Environment:
    """A virtual environment; ``pip`` installs into it."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: str | Path, **environment: str) -> str:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "-q", "--disable-pip-version-check"]
        return run(*pip, *arguments, cwd=self.folder, **environment)

    def check(self, *arguments: str | Path, **environment: str) -> dict[str, Any]:
        """What check_installed.py finds, run from a directory that has nothing to do with the source tree."""
        found: dict[str, Any] = json.loads(run(self.python, CHECK, *arguments, cwd=self.folder, **environment))
        return found


def environment_of_this_python(folder: Path) -> Environment:
    """A virtual environment that sees the packages of the running one, without what the latter's .pth files do.

    So it has numpy, pydantic and setuptools, but not this checkout, which the running environment has as an editable
    installation.
    """
    venv.create(folder)
    made = Environment(folder)
    site = run(made.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    Path(site, "running.pth").write_text("".join(f"{path}\n" for path in paths))
    return made


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return environment_of_this_python(tmp_path / "environment")


@dataclass
class Source:
    """A copy of the files of this checkout, and the environment variables that a build from it needs."""

    folder: Path
    files: list[str]
    settings: dict[str, str]


def listed(*arguments: str) -> set[str]:
    """Files that git lists."""
    done = subprocess.run(["git", "ls-files", "-z", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("needs a git checkout: builds are made from a copy of the files that git knows")
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()}


def copy_of_the_checkout(folder: Path) -> list[str]:
    """Copies the tracked files, and new ones in tracked folders, with their times; returns their names."""
    tracked = listed("--cached")
    folders = sorted({name.split("/")[0] for name in tracked if "/" in name})
    names = sorted(tracked | listed("--others", "--exclude-standard", "--", *folders))
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return names


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Has the checkout's objects too, so that usually nothing needs to be compiled."""
    folder = tmp_path_factory.mktemp("source")
    files = copy_of_the_checkout(folder)
    objects = folder / "build" / "objects"
    if (ROOT / "build" / "objects").is_dir():
        shutil.copytree(ROOT / "build" / "objects", objects)
    # For builds in other folders, such as that of an unpacked sdist.
    extra = tmp_path_factory.mktemp("settings") / "extra.cfg"
    extra.write_text(f"[build_ext]\nbuild_temp = {objects}\n")
    return Source(folder, files, {"DIST_EXTRA_CONFIG": str(extra), "HVD_DEEPREDUCE_WITHOUT_TENSORFLOW": "1"})


@pytest.fixture(scope="session")
def sdist(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    code = f"import setuptools.build_meta as backend; backend.build_sdist({str(out)!r})"
    run(sys.executable, "-c", code, cwd=source.folder, **source.settings)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Needs a package index: skips where none can be reached, but not in continuous integration."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1", "annotated-types"]
    done = subprocess.run(
        command, cwd=tmp_path_factory.mktemp("index"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"no package index can be reached: {done.stdout.strip().splitlines()[-1]}")


@pytest.fixture(scope="session")
def wheel(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source.folder, source, tmp_path_factory.mktemp("wheel"))


def build_wheel(what: Path, source: Source, out: Path) -> Path:
    environment_of_this_python(out / "environment").pip("wheel", *OFFLINE, "-w", out, what, **source.settings)
    (made,) = out.glob("*.whl")
    return made
