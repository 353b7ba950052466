"""The wheel in a fresh environment of every Python version that setup.cfg claims, with packages from the index."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_deepreduce
from tests.golden import make
from tests.installation.conftest import ROOT, Environment, run

pytestmark = pytest.mark.packaging
UNCOMPILED = ["--no-compile"]
"""Most modules of the requirements are never imported."""
CLASSIFIER = "Programming Language :: Python :: 3."


def setup_cfg(section: str, key: str) -> list[str]:
    """The lines of a value."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings[section][key].split("\n")


def claimed() -> list[str]:
    """The Python versions of setup.cfg's classifiers."""
    lines = setup_cfg("metadata", "classifiers")
    return [f"3.{line.removeprefix(CLASSIFIER)}" for line in lines if line.startswith(CLASSIFIER)]


def output(*command: str) -> str:
    """What a command prints; nothing where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def interpreter(version: str) -> str:
    """An interpreter of this version: one of HVD_PYTHONS (paths, separated as in PATH), of the PATH, or of pyenv."""
    name = f"python{version}"
    candidates = [path for path in os.environ.get("HVD_PYTHONS", "").split(os.pathsep) if path]
    candidates.append(name)
    if shutil.which("pyenv"):  # the shims on the PATH fail for versions that are not selected
        for one in output("pyenv", "whence", name).split():
            candidates.append(f"{output('pyenv', 'prefix', one).strip()}/bin/{name}")
    code = "import sys, venv; print(*sys.version_info[:2], sep='.')"
    for candidate in candidates:
        if shutil.which(candidate) and output(candidate, "-c", code).strip() == version:
            return candidate
    pytest.skip(f"no {name} on the PATH, in HVD_PYTHONS or in pyenv")


def environment_of(version: str, folder: Path) -> Environment:
    run(interpreter(version), "-m", "venv", "--without-pip", "environment", cwd=folder)
    return Environment(folder / "environment")


def assert_every_container_decodes(environment: Environment, version: str) -> None:
    found = environment.check("--golden")
    assert ".".join(map(str, found["python"])) == version
    assert found["metadata"]["Version"] == hvd_deepreduce.__version__
    assert found["golden"] == len(list(make.FOLDER.glob("*.hvdr")))
    assert all(Path(file).is_relative_to(environment.folder) for file in found["loaded"])
    run(environment.folder / "bin" / "hvd-deepreduce", "configs", "topk_rice_qsgd", cwd=environment.folder)


def test_the_claimed_versions_begin_where_the_package_does():
    assert setup_cfg("options", "python_requires") == [f">={claimed()[0]}"]
    assert claimed() == [f"3.{minor}" for minor in range(10, 14)]


@pytest.mark.parametrize("version", [one for one in claimed() if one != f"3.{sys.version_info.minor}"])
def test_wheel(version, wheel, index, tmp_path):
    """test_install.py has that of the Python that runs the tests."""
    environment = environment_of(version, tmp_path)
    environment.pip("install", *UNCOMPILED, "-c", ROOT / "constraints.txt", wheel)
    assert_every_container_decodes(environment, version)


def test_lowest_versions_of_the_requirements(wheel, index, tmp_path):
    """The lower bounds of setup.cfg, on the lowest Python version."""
    environment = environment_of(claimed()[0], tmp_path)
    lowest = [line.replace(">=", "==") for line in setup_cfg("options", "install_requires") if line]
    assert all("==" in requirement for requirement in lowest)
    environment.pip("install", *UNCOMPILED, *lowest, wheel)
    assert_every_container_decodes(environment, claimed()[0])
