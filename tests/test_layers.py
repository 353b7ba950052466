"""Imports go one way, from the adapters down to the kernels (docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "hvd_deepreduce"
LAYERS: list[set[str]] = [
    {"needs", "resources", "codecs.sparse_tensor", "tools.gradient_file"},
    {"tools.recorder"},
    {"ops.types", "ops.cubins"},
    {"ops.dispatch", "ops.library", "ops.device"},
    {"ops.deferred"},
    {"ops"},
    {"codecs"},
    {"codecs.entropy"},
    {"codecs.index", "codecs.sparsify", "codecs.value"},
    {"codecs.joint"},
    {"exchange.settings", "exchange.traffic"},
    {"config"},
    {"wire"},
    {"pipeline"},
    {"exchange"},
    {"exchange.mpi"},
    {"exchange.mpi.private_comm", "exchange.mpi.mpi_transport"},
    {"exchange.mpi.session"},
    {"exchange.mpi.densestream", "exchange.mpi.sparcml", "exchange.mpi.topk_allgather"},
    {"exchange.costs", "exchange.mpi.queue"},
    {"exchange.autotune", "exchange.mpi.over_mpi"},
    {"engine"},
    {"tools.advise", "tools.measuring"},
    {"horovod"},
    {"torch", "tensorflow"},
    {"tools", "tools.advise.command", "tools.probes", "tools.ranks", "__main__"},
]
"""All modules of the package, lowest layer first. A package's name stands for its modules that have no entry of their
own. A module imports modules of its own layer and of lower ones."""
INDEPENDENT = {"torch", "tensorflow"}
"""These do not import each other."""
FRAMEWORKS = {"torch", "tensorflow", "horovod", "keras", "tf_keras", "cupy", "mpi4py"}
ALLOWED = {
    "torch": {"torch", "horovod"},
    "tensorflow": {"tensorflow", "horovod", "keras", "tf_keras"},
    "exchange.mpi.mpi_transport": {"mpi4py"},
    "exchange.mpi.private_comm": {"mpi4py"},
    "exchange.mpi.session": {"mpi4py"},
    "exchange.mpi.queue": {"mpi4py"},
    "ops.device": {"cupy"},
    "tools": {"torch"},
    "tools.ranks": {"torch", "mpi4py"},
    "tools.probes": {"torch", "tensorflow", "horovod", "cupy", "mpi4py"},
}
"""Which of them an entry of the table may import; the others import none."""


def name_of(path: Path) -> str:
    """The module's name without the package's: ``"ops.rice"``, or ``""`` for the package itself."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def entry_of(name: str) -> str | None:
    """The longest entry of the table that is the module or a package around it."""
    entries = [entry for layer in LAYERS for entry in layer if name == entry or name.startswith(entry + ".")]
    return max(entries, key=len, default=None)


def level(entry: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if entry in layer)


def imported(source: str) -> set[str]:
    """Full names of all that a module imports, inside functions too. Of ``from a import b`` it is ``a.b``.

    Imports for type checkers alone do not count.
    """
    names, tree = set(), ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are written with the package's name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(name: str, imports: set[str]) -> list[str]:
    """What the module must not import, as sentences."""
    entry = entry_of(name)
    assert entry is not None, f"{name} is in no layer: add it to the table"
    found = []
    for target in sorted(imports):
        top, _, inner = target.partition(".")
        if top in FRAMEWORKS and top not in ALLOWED.get(entry, set()):
            found.append(f"{name} imports {top}")
        if top != PACKAGE:
            continue
        # A name of the package itself, such as __version__, is in no layer.
        other = entry_of(inner)
        if other is not None and (level(other) > level(entry) or {other, entry} == INDEPENDENT):
            found.append(f"{name} imports {target}, which is not in a lower layer")
    return found


def test_imports_go_down():
    for name in filter(None, MODULES):
        assert not violations(name, imported(MODULES[name].read_text()))


def test_a_planted_import_is_found():
    """An import of each higher layer, and of each framework that is not allowed, in each layer."""
    for at, layer in enumerate(LAYERS):
        for entry in layer:
            higher = {other for above in LAYERS[at + 1 :] for other in above}
            for other in higher | (INDEPENDENT - {entry} if entry in INDEPENDENT else set()):
                line = f"def f():\n    from {PACKAGE}.{other} import x"
                assert violations(entry, imported(line)), f"{line} in {entry} passes"
            for framework in FRAMEWORKS - ALLOWED.get(entry, set()):
                assert violations(entry, imported(f"import {framework}.x")), f"import {framework} in {entry} passes"


def test_every_entry_is_a_module():
    for layer in LAYERS:
        for entry in layer:
            assert entry in MODULES, f"the table has {entry}, which does not exist"


def test_no_framework_is_loaded_by_the_package():
    code = (
        f"import sys, {PACKAGE}, {PACKAGE}.pipeline, {PACKAGE}.engine;print(sorted({FRAMEWORKS!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
