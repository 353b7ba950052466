"""Recording gradients of a job into files of ``captured``: which steps, which parameters, and when a file is complete.

The frameworks' ``Capture`` gives a ``Recorder`` each gradient as it comes out of the backward pass.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from hvd_deepreduce.tools import gradient_file

FILE_VARIABLE = "HVD_DEEPREDUCE_CAPTURE"
"""Names the file where the job names none. Without it, nothing is recorded then."""
STEPS_VARIABLE = "HVD_DEEPREDUCE_CAPTURE_STEPS"
"""The steps, such as ``10,100``, in place of the job's."""
MAX_BYTES = 2**30
_log = logging.getLogger("hvd_deepreduce")
Array = np.ndarray[Any, np.dtype[Any]]


def where(file: str | Path | None, steps: Sequence[int], rank: int, all_ranks: bool) -> tuple[Path | None, list[int]]:
    """A rank's file (None: it records nothing) and the steps, with what the environment says.

    Raises:
        ValueError: a step is not a number of 1 or more, or there is none.
    """
    given: Any = os.environ.get(STEPS_VARIABLE) or steps
    try:
        numbers = sorted({int(one) for one in (given.split(",") if isinstance(given, str) else given)})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise ValueError(
            f"the steps to capture are {given!r}; they must be numbers from 1 on, such as [10, 100] (in "
            f"{STEPS_VARIABLE}: 10,100)"
        )
    found = file or os.environ.get(FILE_VARIABLE)
    if found and Path(found).suffix != ".npz":
        raise ValueError(f"the file of captured gradients is {str(found)!r}; its name must end in .npz")
    if not found or (rank and not all_ranks):
        return None, numbers
    path = Path(found)
    return (path.with_name(f"{path.stem}_rank{rank}{path.suffix}") if all_ranks else path), numbers


class Recorder:
    """Collects one rank's gradients of the wanted steps, and writes a file for each.

    A step is a backward pass, or ``passes`` of them. One begins when a gradient comes of a parameter that has had one
    in this pass already. A file is written when all parameters' gradients are there, and otherwise when the next pass
    begins, with zeros for parameters without a gradient.

    Args:
        file: ends in ``.npz``. With several steps, each has a file of its own: ``name_step100.npz``.
        steps: numbers from 1 on.
        shapes: of the parameters, by name, in the model's order.
        only: a pattern, in the syntax of ``fnmatch``, of the parameters to record.
        rank: of this process.
        passes: backward passes of a step; the gradient of the last one is recorded.
        max_bytes: the most that the recorded vectors of a step may take.
        about: of the job, for the file.

    Raises:
        ValueError: no parameter matches ``only``, or the vectors take more bytes.

    Attributes:
        files: that were written.
    """

    def __init__(
        self,
        file: Path,
        steps: Sequence[int],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        only: str = "*",
        rank: int = 0,
        passes: int = 1,
        max_bytes: int = MAX_BYTES,
        accumulators: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._shapes = {name: tuple(shape) for name, shape in shapes.items() if fnmatchcase(name, only)}
        if not self._shapes:
            raise ValueError(f"only is {only!r}, which matches none of the {len(shapes)} parameters: correct it")
        size = sum(map(math.prod, self._shapes.values())) * 4 * (2 if accumulators else 1)
        if size > max_bytes:
            raise ValueError(
                f"the captured vectors of a step would take {size:,} bytes, and max_bytes is {max_bytes:,}: raise it, "
                "or record fewer parameters, as with only='layer4.*'"
            )
        self._file, self._steps, self._rank, self._passes = file, list(steps), rank, passes
        self._about, self._accumulators = dict(about or {}), accumulators
        self._pass = 1
        self._came: set[str] = set()
        self._gradients: dict[str, Array] = {}
        self._residuals: dict[str, Array] = {}
        self._lock = Lock()
        self.files: list[Path] = []

    @property
    def done(self) -> bool:
        """Whether all wanted steps are over."""
        return not self._steps

    def put(self, name: str, gradient: Callable[[], Array], residual: Callable[[], Array | None] | None = None) -> None:
        """A parameter's gradient of this pass is there.

        Args:
            gradient: copies it, of any floating-point dtype; called where the step is wanted.
            residual: copies what is added to it before it is compressed; None: nothing.
        """
        with self._lock:
            if self.done or name not in self._shapes:
                return
            if name in self._came:
                self._end_pass()
            self._came.add(name)
            if self.done or self._pass != self._steps[0] * self._passes:
                return
            self._gradients[name] = gradient().astype(np.float32).reshape(-1)
            rest = residual() if residual is not None else None
            if rest is not None:
                self._residuals[name] = rest.astype(np.float32).reshape(-1)
            if len(self._gradients) == len(self._shapes):
                self._write()

    def close(self) -> None:
        """Writes what is there of the step that is under way. Nothing is recorded afterwards."""
        with self._lock:
            if self._gradients:
                self._write()
            self._steps = []

    def _end_pass(self) -> None:
        if self._gradients:
            self._write()
        self._came.clear()
        self._pass += 1

    def _write(self) -> None:
        step = self._steps.pop(0)
        file = self._file
        if self._steps or self.files:
            file = file.with_name(f"{file.stem}_step{step}{file.suffix}")
        sizes = [math.prod(shape) for shape in self._shapes.values()]

        def joined(parts: Mapping[str, Array]) -> gradient_file.Vector:
            return np.concatenate([
                parts.get(name, np.zeros(size, np.float32))
                for name, size in zip(self._shapes, sizes, strict=True)
            ])  # fmt: skip

        vectors: dict[tuple[gradient_file.Kind, int], gradient_file.Vector] = {
            ("gradient", self._rank): joined(self._gradients)
        }
        if self._accumulators:
            vectors["accumulator", self._rank] = vectors["gradient", self._rank] + joined(self._residuals)
        about = {**self._about, "step": step, "passes": self._passes, "rank": self._rank}
        missing = [name for name in self._shapes if name not in self._gradients]
        about |= {"without_gradient": missing, "shapes": [list(shape) for shape in self._shapes.values()]}
        gradient_file.write(file, vectors, list(self._shapes), sizes, about)
        self._gradients, self._residuals = {}, {}
        self.files.append(file)
        _log.info("the gradients of step %d are in %s", step, file)


class Capturing:
    """What ``Capture`` is in all frameworks."""

    _recorder: Recorder | None = None

    def _record(
        self, file: str | Path | None, steps: Sequence[int], rank: int, all_ranks: bool,
        shapes: Mapping[str, tuple[int, ...]], **options: Any,
    ) -> None:  # fmt: skip
        """Makes the recorder, where this rank records anything; the arguments are those of ``where`` and of it."""
        path, numbers = where(file, steps, rank, all_ranks)
        if path is not None:
            self._recorder = Recorder(path, numbers, shapes, rank=rank, **options)

    @property
    def files(self) -> list[Path]:
        """The files that were written."""
        return self._recorder.files if self._recorder else []

    def close(self) -> None:
        """Writes what is there of a step that is under way, and records no more. It can be called more than once."""
        if self._recorder is not None:
            self._recorder.close()
