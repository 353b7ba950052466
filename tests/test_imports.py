"""Imports run one way: adapters -> engine -> pipeline -> codecs -> backend (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hvd_deepreduce"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
FRAMEWORKS = {"torch", "tensorflow", "horovod", "keras", "tf_keras", "cupy", "mpi4py"}
CODECS = ("index", "value", "joint", "sparsify", "entropy")


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            assert node.module is not None
            # `from package import module` names the module; of other names the prefix is enough.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer(path: Path) -> str:
    """The folder, or the module at the top: index, value, backend, pipeline, config, ..."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def own(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("hvd_deepreduce.")}


def outside(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_direction(path):
    names, where = imported(path), layer(path)
    inside = own(names)
    if where == "backend":
        assert inside <= {"backend"}
    elif where == "sparse":
        assert not inside
    elif where in ("codec", *CODECS):
        assert inside <= {"codec", "sparse", "backend", *CODECS}
    elif where in ("config", "container", "memory", "pipeline"):
        # Of an exchange, a config knows the settings alone: those load no MPI.
        exchange = {name for name in names if name.startswith("hvd_deepreduce.exchange")}
        assert all(where == "config" and name.startswith("hvd_deepreduce.exchange.settings.") for name in exchange)
        assert not inside & {"torch", "tensorflow"}
    if path.relative_to(PACKAGE).as_posix() in ("exchange/__init__.py", "exchange/settings.py"):
        assert inside <= {"codec"} and "mpi4py" not in outside(names)
    if where in ("config", "container", "memory"):
        assert "pipeline" not in inside
    elif where == "exchange":
        assert not inside & {"torch", "tensorflow"}
    elif where == "engine":
        assert inside <= {"engine", "exchange", "pipeline", "memory", "config", "container", "codec",
                          "sparse", "backend"}  # fmt: skip
        # Of the exchanges, the queue alone; it is imported when an exchange over MPI is first used.
        exchange = {name for name in names if name.startswith("hvd_deepreduce.exchange")}
        assert exchange <= {"hvd_deepreduce.exchange.queue.ExchangeQueue"}
    elif where == "horovod":
        assert inside <= {"engine", "codec"}
    elif where in ("torch", "tensorflow"):
        assert not inside & ({"torch", "tensorflow"} - {where})


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_frameworks(path):
    found, where = outside(imported(path)) & FRAMEWORKS, layer(path)
    allowed = {
        "torch": {"torch", "horovod", "cupy"},
        "tensorflow": {"tensorflow", "horovod", "keras", "tf_keras", "cupy"},
        "exchange": {"mpi4py"},
        "backend": {"cupy"},
    }.get(where, set())
    assert found <= allowed, f"{path} imports {found - allowed}"


def test_no_framework_is_loaded_by_the_package():
    import subprocess
    import sys

    code = (
        "import sys, hvd_deepreduce, hvd_deepreduce.pipeline, hvd_deepreduce.engine, hvd_deepreduce.horovod;"
        f"print(sorted({FRAMEWORKS!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
