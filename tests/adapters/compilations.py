"""When an adapter begins to compile kernels, and waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def noted(module: ModuleType) -> Iterator[list[Any]]:
    """Within the context, the calls of the ``Compilation`` of an adapter's module: (GPUs, whether it speaks) where one
    is made, and "waited"."""
    calls: list[Any] = []

    class Noted:
        def __init__(self, config: Any, tensors: Any, devices: Any, speaks: bool) -> None:
            calls.append((list(devices), speaks))

        def wait(self) -> None:
            calls.append("waited")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Compilation", Noted)
        yield calls
