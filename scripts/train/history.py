"""Training jobs: how a script starts one on several ranks, and the history that a job's ranks write."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hvd_deepreduce.exchange import traffic

SCRIPTS = Path(__file__).resolve().parents[1]


def mpirun(
    ranks: int, script: str | Path, *options: Any, out: Path | None = None, environment: Mapping[str, str] | None = None
) -> Any:
    """Runs a script under mpirun, in the folder of this process.

    Args:
        script: its path, or that in scripts/.
        out: a JSON file that the script writes.
        environment: beside this process's own.

    Returns:
        What it has written to ``out``; None without ``out``.

    Raises:
        SystemExit: the job failed.
    """
    command = ["mpirun", "-np", str(ranks), sys.executable, str(SCRIPTS / script), *map(str, options)]
    if subprocess.run(command, env={**os.environ, **(environment or {})}).returncode:
        raise SystemExit(f"the job failed; its output is above. The command was: {' '.join(command)}")
    return None if out is None else json.loads(out.read_text())


def same_on_all_ranks(arrays: Iterable[Any], gather: Callable[[Any], Any]) -> None:
    """Raises RuntimeError unless all ranks have the same parameters, NumPy arrays, to the bit; ``gather`` returns the
    uint8 ``[32]`` of all ranks, ``[ranks, 32]``."""
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()
    digests = gather(np.frombuffer(digest, np.uint8).copy())
    if not bool((digests == digests[0]).all()):
        raise RuntimeError("the ranks have different parameters: their gradients were not reduced to the same values")


def total(rows: list[dict[str, Any]], key: str) -> Any:
    """The sum of a figure over the rows of a history."""
    return sum(row[key] for row in rows)


class History:
    """The rows of a training, one for each epoch or part of it, as OUT/metrics.json has them.

    Args:
        out: the folder of metrics.json and of config.yaml.
        config: as the script was given it; ``none``: dense.
        compression: has ``stats()`` and ``config``; None: dense.
        rank: of this process. Rank 0 writes and prints.
        settings: of the job, for metrics.json; it has ``ranks``.
        numel: elements of the model.

    Attributes:
        rows: the history.
    """

    def __init__(
        self, out: Path, config: str, compression: Any, rank: int, settings: dict[str, Any], numel: int
    ) -> None:
        self._out, self._compression, self._rank, self._settings = out, compression, rank, settings
        self._dense = traffic.allreduce(4 * numel, settings["ranks"]).sent
        self._label = "dense" if config == "none" else Path(config).stem
        self._terminal = os.environ.get("HVD_DEEPREDUCE_TERMINAL") == "1"
        width = None if self._terminal else 110
        self._console = Console(force_terminal=self._terminal, quiet=rank != 0, width=width)
        self.rows: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)

    def progress(self, steps: int) -> tuple[Progress, Any]:
        """A bar for so many steps, shown in a terminal, and its task."""
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        disable = not self._terminal or self._rank != 0
        bar = Progress(*columns, TimeRemainingColumn(), console=self._console, disable=disable)
        return bar, bar.add_task(self._label, total=steps)

    def total(self) -> dict[str, Any]:
        """What the compression has counted so far; empty for dense."""
        return dict(self._compression.stats()["total"]) if self._compression is not None else {}

    def add(self, before: dict[str, Any], steps: int, seconds: float, waited: float = 0.0, **results: Any) -> None:
        """Adds a row, with the bytes and seconds of ``steps`` steps.

        Args:
            before: ``total()`` when they began.
            waited: seconds for the gradients, of a dense job.
        """
        dense = steps * self._dense
        spent = {"bytes_sent": dense, "encode_seconds": 0.0, "wait_seconds": waited, "decode_seconds": 0.0}
        spent |= {key: value - before[key] for key, value in self.total().items() if key in spent}
        epoch = len(self.rows) + 1
        self.rows.append({"epoch": epoch, "dense_bytes": dense, "seconds": seconds, **spent, **results})

    def write(self, done: str, results: str) -> None:
        """Writes both files and prints the last row, on rank 0.

        Args:
            done: what of the job is done, as in ``epoch  1/20``.
            results: a format for figures of the row, beside its loss.
        """
        if self._rank:
            return
        row, used = self.rows[-1], "none" if self._compression is None else self._compression.config.to_dict()
        metrics = {**self._settings, "config": used, "epochs_done": self.rows}
        (self._out / "metrics.json").write_text(json.dumps(metrics))
        (self._out / "config.yaml").write_text(yaml.safe_dump(used, sort_keys=False))
        if not self._terminal:
            share = row["bytes_sent"] / max(1, row["dense_bytes"])
            said = f"{self._label}: {done}  loss {row['loss']:.4f}  {results.format(**row)}"
            self._console.print(f"{said}  sent {share:.2%} of dense  {row['seconds']:.1f} s")
