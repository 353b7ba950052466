"""Every way of installing the package: it works from another directory, and with files from where they belong."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import hvd_deepreduce
from tests.installation.conftest import OFFLINE, Environment, Source, build_wheel, run

pytestmark = pytest.mark.packaging
# Files that an sdist leaves out.
CI_FILES = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml")


def assert_it_works(found: dict[str, Any], source: Source, package: Path) -> None:
    """Everything that an environment found is that of ``source``, and was loaded from the folder ``package``."""
    assert found["version"] == hvd_deepreduce.__version__
    assert found["container_bytes"] > 0
    assert found["presets"] == sorted(Path(name).stem for name in source.files if name.startswith("configs/"))
    assert found["kernels"] == sorted(name[len("kernels/") :] for name in source.files if name.startswith("kernels/"))
    assert any(name.endswith(".cu") for name in found["kernels"])
    assert Path(found["package"]) == package
    assert str(package / "_cpu.so") in found["loaded"]
    elsewhere = [name for name in found["loaded"] if not Path(name).is_relative_to(package)]
    assert not elsewhere, f"loaded from outside of {package}: {elsewhere}"


def installed(environment: Environment) -> Path:
    (package,) = environment.folder.glob("lib/python3.*/site-packages/hvd_deepreduce")
    return package


def test_pip_install(source, environment):
    environment.pip("install", *OFFLINE, source.folder, **source.settings)
    found = environment.check()
    assert_it_works(found, source, installed(environment))
    assert found["metadata"]["Version"] == hvd_deepreduce.__version__
    assert found["metadata"]["License-Expression"] == "Apache-2.0"
    assert "preset" in run(environment.folder / "bin" / "hvd-deepreduce", "configs", cwd=environment.folder)


def test_pip_install_editable(source, environment, tmp_path):
    folder = shutil.copytree(source.folder, tmp_path / "checkout")
    environment.pip("install", *OFFLINE, "-e", folder, **source.settings)
    assert_it_works(environment.check(), source, folder / "hvd_deepreduce")
    # A change is seen without another installation.
    (folder / "configs" / "my_preset.yaml").write_text("seed: 3\n")
    assert "my_preset" in environment.check()["presets"]


def test_in_place(source, environment, tmp_path):
    folder = shutil.copytree(source.folder, tmp_path / "checkout")
    run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=folder, **source.settings)
    assert_it_works(environment.check(PYTHONPATH=str(folder)), source, folder / "hvd_deepreduce")


def test_operations_of_tensorflow_are_built_where_it_is_installed(source, tmp_path):
    version = importlib.metadata.version("tensorflow")
    folder = shutil.copytree(source.folder, tmp_path / "checkout")
    settings = {name: value for name, value in source.settings.items() if "WITHOUT" not in name}
    build = (sys.executable, "setup.py", "build_ext", "--inplace")
    run(*build, cwd=folder, **settings, HVD_DEEPREDUCE_WITH_TENSORFLOW="1")
    library = folder / "hvd_deepreduce" / f"_tensorflow-{version}.so"
    assert library.exists()
    # What cannot be compiled is no error unless it is asked for: Python takes the operations' place.
    library.unlink()
    (folder / "kernels" / "tensorflow" / "operations.cpp").write_text("#error no\n")
    said = run(*build, cwd=folder, **settings)
    assert f"the operations of TensorFlow {version} were not built, and Python takes their place" in said
    assert not library.exists() and (folder / "hvd_deepreduce" / "_cpu.so").exists()


def test_wheel(source, wheel, environment):
    environment.pip("install", *OFFLINE, wheel, **source.settings)
    assert_it_works(environment.check(), source, installed(environment))


def test_wheel_is_for_every_python_3_of_one_platform(wheel):
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version) == ("hvd_deepreduce", hvd_deepreduce.__version__)
    assert (python, abi) == ("py3", "none") and platform.startswith("linux_")


def test_sdist_then_wheel(source, sdist, wheel, environment, tmp_path):
    made = build_wheel(sdist, source, tmp_path)
    assert made.name == wheel.name
    assert zipfile.ZipFile(made).namelist() == zipfile.ZipFile(wheel).namelist()
    environment.pip("install", *OFFLINE, made, **source.settings)
    assert_it_works(environment.check(), source, installed(environment))


def test_sdist_is_complete(source, sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    made = {name for name in names if name == "PKG-INFO" or name.startswith("hvd_deepreduce.egg-info/")}
    assert names - made == {name for name in source.files if not name.startswith(CI_FILES)}


def test_wheel_has_the_package_and_nothing_else(source, wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {name for name in source.files if name.startswith("hvd_deepreduce/")}
    mapped = {f"hvd_deepreduce/{name}" for name in source.files if name.startswith(("kernels/", "configs/"))}
    assert names == package | mapped | {"hvd_deepreduce/_cpu.so"}
    assert "hvd_deepreduce/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_missing_kernels_are_an_error_that_says_what_to_do(source, environment, tmp_path):
    folder = shutil.copytree(source.folder, tmp_path / "checkout")
    # A library of an earlier release, which had Python's version in its name, is not taken for today's.
    (folder / "hvd_deepreduce" / "_cpu.cpython-310-x86_64-linux-gnu.so").touch()
    code = "try: import hvd_deepreduce\nexcept ImportError as error: print(error)"
    said = run(environment.python, "-c", code, cwd=tmp_path, PYTHONPATH=str(folder))
    assert f"the compiled CPU kernels are missing ({folder / 'hvd_deepreduce' / '_cpu.so'})" in said
    assert "pip install ." in said and "build_ext --inplace" in said
    # setuptools, which Python 3.12 does not bring, in the version that the build asks for.
    built_with = (source.folder / "pyproject.toml").read_text().split("[build-system]")[1].split("\n[")[0]
    (needed,) = ast.literal_eval(re.search(r"^requires = (.+)$", built_with, re.MULTILINE)[1])
    assert f"pip install '{needed}'" in said


def test_a_library_of_other_sources_is_refused(source, environment, tmp_path):
    """Before a function is called, whose arguments may be others."""
    folder = shutil.copytree(source.folder, tmp_path / "checkout", ignore=shutil.ignore_patterns("build"))
    shutil.copy(Path(hvd_deepreduce.__file__).with_name("_cpu.so"), folder / "hvd_deepreduce" / "_cpu.so")
    code = "try: import hvd_deepreduce\nexcept ImportError as error: print(error)\nelse: print('loaded')"

    def said() -> str:
        return run(environment.python, "-c", code, cwd=tmp_path, PYTHONPATH=str(folder))

    assert said() == "loaded\n"
    (folder / "kernels" / "tensorflow" / "operations.cpp").write_text("// of another library\n")
    assert said() == "loaded\n"
    with (folder / "kernels" / "common" / "cpu.h").open("a") as header:
        header.write("// changed\n")
    told = said()
    assert f"({folder / 'hvd_deepreduce' / '_cpu.so'}) are of another release than their sources" in told
    assert "build_ext --inplace" in told


def test_what_an_earlier_build_left_is_not_installed(source, tmp_path):
    """A preset or a module that was removed since."""
    folder = shutil.copytree(source.folder, tmp_path / "checkout")
    for name in ("configs/removed.yaml", "hvd_deepreduce/removed.py"):
        (folder / name).touch()
    build = (sys.executable, "setup.py", "-q", "build", "--build-lib", "build/lib")
    run(*build, cwd=folder, **source.settings)
    made = folder / "build" / "lib" / "hvd_deepreduce"
    assert (made / "configs" / "removed.yaml").exists() and (made / "removed.py").exists()
    for name in ("configs/removed.yaml", "hvd_deepreduce/removed.py"):
        (folder / name).unlink()
    run(*build, cwd=folder, **source.settings)
    assert not (made / "configs" / "removed.yaml").exists() and not (made / "removed.py").exists()
    assert (made / "_cpu.so").exists() and (folder / "hvd_deepreduce" / "__init__.py").exists()
