"""Every operation has two implementations with one signature, a docstring, and a test here or a codec that calls it."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

from hvd_deepreduce import ops
from hvd_deepreduce.ops.dispatch import OPERATIONS

for module in pkgutil.iter_modules(ops.__path__):
    importlib.import_module(f"{ops.__name__}.{module.name}")


def operations_in(path: Path) -> set[str]:
    """The names ``<module>.<name>`` that a file reads from modules of ``hvd_deepreduce.ops``."""
    tree = ast.parse(path.read_text("utf-8"), str(path))
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == ops.__name__
        for alias in node.names
    }
    return {
        f"{modules[node.value.id]}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
    }


HERE = Path(__file__).parent
# test_device_pipeline.py compares the implementations of what any codec calls.
FILES = [*HERE.glob("test_*.py"), *(HERE.parents[1] / "hvd_deepreduce" / "codecs").glob("*/*.py")]
TESTED = set().union(*map(operations_in, sorted(FILES)))


def test_operations_are_found():
    assert len(OPERATIONS) > 80


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_has_both_implementations_and_a_test(name):
    operation = OPERATIONS[name]
    assert operation.device is not None, f"{name} has no implementation for arrays on a GPU"
    host, device = (list(inspect.signature(f).parameters) for f in (operation.host, operation.device))
    assert host == device, f"the two implementations of {name} have different parameters"
    assert operation.__doc__, f"{name} has no docstring"
    assert "TODO" not in operation.__doc__, f"{name} has a docstring that is not finished"
    assert name in TESTED, f"{name} has no test in tests/ops"
