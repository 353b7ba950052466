"""The table of docs/architecture.md is what the launch code asks for now."""

import runpy
import sys
from pathlib import Path

import pytest

from tests import cuda_emulator

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.emulator
def test_the_table_is_up_to_date(monkeypatch):
    reason = cuda_emulator.available()
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts" / "dev"), *sys.path])
    monkeypatch.setattr(cuda_emulator, "order", 0)
    table = runpy.run_path(str(ROOT / "scripts" / "bench" / "gpu_costs.py"))["table"]()
    assert "encode: top-k, rice_blocks, qsgd" in table
    assert table in (ROOT / "docs" / "architecture.md").read_text(), "run python scripts/bench/gpu_costs.py --write"
