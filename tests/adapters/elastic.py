"""What the jobs of test_elastic.py have in common: the hosts that the launcher sees, and what each process notes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

TWO = "localhost:2\n"
THREE = "localhost:2\n127.0.0.1:1\n"


def set_hosts(folder: Path, hosts: str) -> None:
    """What the host discovery script prints from now on."""
    part = folder / f"hosts.{os.getpid()}"
    part.write_text(hosts)
    part.rename(folder / "hosts")


def discovery(folder: Path) -> str:
    """Writes the script; returns its path."""
    set_hosts(folder, TWO)
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat '{folder / 'hosts'}'\n")
    script.chmod(0o755)
    return str(script)


def note(folder: Path, **what: Any) -> None:
    """Adds a line to this process's notes."""
    with open(folder / f"notes.{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(what) + "\n")


def notes(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """All notes, by process."""
    return {
        int(path.name.split(".")[1]): [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("notes.*.jsonl")
    }


def digest(state: dict[str, Any]) -> str:
    """Of the residuals of a ``state_dict``; "" if there are none."""
    said = hashlib.sha256()
    for name, residual in state["residuals"].items():
        said.update(name.encode() + bytes(memoryview(residual).cast("B")))
    return said.hexdigest()[:16] if state["residuals"] else ""
