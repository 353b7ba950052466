"""The cases of a program that a launcher starts on several ranks: which there are, and the loop that runs them.

A case is a function at the top level of a file, decorated with ``@case``. Every rank runs every case, in the same
order. ``tests/jobs.py`` starts such a program and reports each case as a test of its own. By hand it is started as

    mpirun -np 2 python tests/adapters/torch_cases.py [CASE ...]
"""

from __future__ import annotations

import argparse
import ast
import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASE_SECONDS = 240.0
"""The longest time that one case may take. Every rank prints its stacks shortly before, then the job is stopped."""
GRACE_SECONDS = 20.0
"""How long a rank waits for the others after its own case failed: they may be waiting for it for ever."""

CASES: dict[str, Callable[[], Any]] = {}
"""The cases of this program, by name."""


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a case. What it returns goes into its record; JSON must be able to hold it."""
    CASES[function.__name__] = function
    return function


def case_names(*files: Path) -> list[str]:
    """The names of all cases in ``files``, found without importing them."""
    return [
        node.name
        for file in files
        for node in ast.parse(file.read_text("utf-8"), str(file)).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(decorator, ast.Name) and decorator.id == "case" for decorator in node.decorator_list)
    ]


class Records:
    """How each case ended on each rank: files in a folder that all ranks of the job and pytest read.

    Args:
        folder: an existing folder.
        size: the number of ranks.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size

    def write(self, name: str, rank: int, record: Any) -> None:
        """Stores what ``rank`` has to say about ``name``. Readers see the whole record or none."""
        unfinished = self.folder / f"{name}.{rank}.unfinished"
        unfinished.write_text(json.dumps(record))
        unfinished.rename(self.folder / f"{name}.{rank}.json")

    def read(self, name: str) -> dict[int, Any]:
        """The records of ``name`` so far, by rank."""
        paths = {rank: self.folder / f"{name}.{rank}.json" for rank in range(self.size)}
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}

    def count(self) -> int:
        """The number of records of all names: it grows while the job makes progress."""
        return len(list(self.folder.glob("*.json")))

    def wait_for_all(self, name: str, seconds: float) -> bool:
        """Waits until every rank has written its record of ``name``. False if that takes more than ``seconds``."""
        paths = [self.folder / f"{name}.{rank}.json" for rank in range(self.size)]
        deadline = time.monotonic() + seconds
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


def run_cases(rank: int, size: int, go_on: bool = True, before: Callable[[], Any] = lambda: None) -> None:
    """Runs the cases that the command line names, or all.

    Args:
        rank: of this process.
        size: the number of ranks.
        go_on: whether a case can run after another one has failed. Without it, pytest runs the cases that are left in
            a new launch.
        before: is called before each case.

    Raises:
        SystemExit: the command line names no case of the program.
    """
    files = dict.fromkeys(Path(sys.modules[function.__module__].__file__ or "") for function in CASES.values())
    if list(CASES) != case_names(*files):
        raise SystemExit(f"pytest would report {case_names(*files)}, and the program has {list(CASES)}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, help="the folder for the records; without it, the first failure ends")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    faulthandler.enable()
    gc.freeze()  # the collector need not go through all that the frameworks made while they were imported
    records = Records(options.results, size) if options.results else None
    if records:
        records.write("ready", rank, None)
    for name in options.cases or CASES:
        faulthandler.dump_traceback_later(CASE_SECONDS - 10)
        began, cpu = time.monotonic(), time.process_time()
        record: dict[str, Any] = {"outcome": "passed", "text": ""}
        try:
            before()
            record["value"] = CASES[name]()
        except pytest.skip.Exception as reason:
            record = {"outcome": "skipped", "text": str(reason)}
        except BaseException:
            record = {"outcome": "failed", "text": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        failed = record["outcome"] == "failed"
        if rank == 0 or failed:
            seconds = f"{time.monotonic() - began:.1f} s, {time.process_time() - cpu:.1f} s of them on a processor"
            print(f"{record['outcome']} {name} on rank {rank} in {seconds}", flush=True)
            print(record["text"], end="\n" if record["text"] else "", flush=True)
        if records is None:
            if failed:
                os._exit(1)
            continue
        records.write(name, rank, record)
        if not records.wait_for_all(name, GRACE_SECONDS if failed else CASE_SECONDS):
            print(f"rank {rank}: not all ranks ended {name}", flush=True)
            os._exit(1)  # a normal exit would wait for them
        if not go_on and any(record["outcome"] == "failed" for record in records.read(name).values()):
            os._exit(1)
