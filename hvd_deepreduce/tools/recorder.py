"""Recording gradients of a job into files (``gradient_file``): which steps and parameters, and when a file is complete.

The frameworks' ``Capture`` is a ``Recorder`` that is given each gradient as it comes out of the backward pass.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import index
from pathlib import Path
from threading import Lock
from typing import Any, TypedDict

import numpy as np

from hvd_deepreduce.tools import gradient_file

FILE_VARIABLE = "HVD_DEEPREDUCE_CAPTURE"
"""Names the file where the job names none. Without it, nothing is recorded then."""
STEPS_VARIABLE = "HVD_DEEPREDUCE_CAPTURE_STEPS"
"""The steps, such as ``10,100``, in place of the job's."""
MAX_BYTES = 2**30
_log = logging.getLogger("hvd_deepreduce")
Array = np.ndarray[Any, np.dtype[Any]]


class Options(TypedDict, total=False):
    """The keyword arguments that every ``Capture`` has; PyTorch's describes them."""

    only: str
    all_ranks: bool
    passes: int
    max_bytes: int



class Recorder:
    """Collects one rank's gradients of the wanted steps, and writes a file for each.

    A step is a backward pass, or ``passes`` of them. One begins when a gradient comes of a parameter that has had one
    in this pass already, or after ``end_pass``. A file is written when all parameters' gradients are there, and
    otherwise when the next pass begins, or the process ends, with zeros for parameters without a gradient. The gradient
    of a step's last pass is recorded.

    Args:
        file, steps, only, all_ranks, passes, max_bytes: as of PyTorch's ``Capture``.
        shapes: of the parameters, by name, in the model's order.
        rank: of this process.
        accumulators: whether gradients with the residual added are recorded, too.
        about: of the job, for the file.

    Raises:
        ValueError: the file does not end in ``.npz``, a step is not a number of 1 or more, or there is none; no
            parameter matches ``only``, the vectors take more bytes, or the file cannot be written.

    Attributes:
        files: that were written.
    """

    def __init__(
        self,
        file: str | Path | None,
        steps: Sequence[int],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        rank: int = 0,
        accumulators: bool = False,
        about: Mapping[str, Any] | None = None,
        only: str = "*",
        all_ranks: bool = False,
        passes: int = 1,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.files: list[Path] = []
        self._lock = Lock()
        found, self._steps = _where(file, steps)
        self._several = len(self._steps) > 1
        if found is None or (rank and not all_ranks):
            self._steps = []
            return
        self._file = found.with_name(f"{found.stem}_rank{rank}{found.suffix}") if all_ranks else found
        self._shapes = {name: list(shape) for name, shape in shapes.items() if fnmatchcase(name, only)}
        if not shapes:
            raise ValueError("the model has no parameters that are trained, so there are no gradients to capture")
        if not self._shapes:
            raise ValueError(f"only is {only!r}, which matches none of the {len(shapes)} parameters: correct it")
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self._kinds: list[gradient_file.Kind] = ["gradient", "accumulator"] if accumulators else ["gradient"]
        size = sum(self._sizes) * 4 * len(self._kinds)
        if size > max_bytes:
            raise ValueError(
                f"the captured vectors of a step would take {size:,} bytes, and max_bytes is {max_bytes:,}: raise it, "
                "or record fewer parameters, as with only='layer4.*'"
            )
        if type(passes) is not int or passes < 1:
            raise ValueError(f"passes is {passes!r}; a step has one backward pass or more, an integer")
        folder = next(one for one in self._file.absolute().parents if one.exists())
        if self._file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            why = "is a folder" if self._file.is_dir() else f"would be in {folder}, which cannot be written to"
            raise ValueError(f"the file of captured gradients is {str(self._file)!r}, which {why}: give another name")
        self._about, self._rank, self._pass, self._passes = dict(about or {}), rank, 1, passes
        self._came: set[str] = set()
        self._vectors: dict[str, list[gradient_file.Vector]] = {}
        atexit.register(_close_at_exit, weakref.ref(self))

    @property
    def done(self) -> bool:
        """Whether all wanted steps are over, or this rank records nothing."""
        return not self._steps

    def put(self, name: str, gradient: Callable[[], Array], residual: Callable[[], Array | None] | None = None) -> None:
        """A parameter's gradient of this pass is there.

        Args:
            gradient: returns it, of any floating-point dtype; called where the step is wanted.
            residual: returns what is added to it before it is compressed; None: nothing.
        """
        with self._lock:
            if self.done or name not in self._shapes:
                return
            if name in self._came:  # of the next pass
                self._end_pass()
            self._came.add(name)
            if self.done or self._pass != self._steps[0] * self._passes:
                return
            vector = np.array(gradient(), np.float32).reshape(-1)
            rest = residual() if residual is not None else None
            self._vectors[name] = [vector, vector if rest is None else vector + rest.astype(np.float32).reshape(-1)]
            if len(self._vectors) == len(self._shapes):
                self._write()

    def end_pass(self) -> None:
        """A backward pass has ended, for frameworks that say so: what comes now is of the next one."""
        with self._lock:
            if self._came:
                self._end_pass()

    def _end_pass(self) -> None:
        self._write()
        self._came.clear()
        self._pass += 1

    def close(self) -> None:
        """Writes what is there of a step that is under way. Nothing is recorded afterwards. It can be called more than
        once."""
        with self._lock:
            self._write()
            self._steps = []

    def _write(self) -> None:
        if self.done or not self._vectors:
            return
        step, file = self._steps.pop(0), self._file
        if self._several:
            file = file.with_name(f"{file.stem}_step{step}{file.suffix}")
        parts = [
            self._vectors.get(name) or 2 * [np.zeros(size, np.float32)]
            for name, size in zip(self._shapes, self._sizes, strict=True)
        ]
        vectors = {
            (kind, self._rank): np.concatenate([part[number] for part in parts])
            for number, kind in enumerate(self._kinds)
        }
        missing = [name for name in self._shapes if name not in self._vectors]
        about = {**self._about, "step": step, "passes": self._passes, "rank": self._rank}
        about |= {"without_gradient": missing, "shapes": list(self._shapes.values())}
        self._vectors = {}
        try:
            gradient_file.write(file, vectors, list(self._shapes), self._sizes, about)
        except OSError as error:
            _log.warning("the gradients of step %d were not captured (%s); the job goes on", step, error)
            return
        self.files.append(file)
        _log.info("the gradients of step %d are in %s", step, file)


def _close_at_exit(known: weakref.ref[Recorder]) -> None:
    """The job's last step may be a wanted one, with a parameter that has no gradient."""
    recorder = known()
    if recorder is not None:
        recorder.close()


def _where(file: str | Path | None, steps: Sequence[int]) -> tuple[Path | None, list[int]]:
    """The file (None: nothing is recorded) and the steps, with what the environment says."""
    given: Any = os.environ.get(STEPS_VARIABLE) or steps
    try:
        numbers = sorted({int(one) for one in given.split(",")} if isinstance(given, str) else set(map(index, given)))
    except (TypeError, ValueError):
        numbers = []
    if not numbers or numbers[0] < 1:
        raise ValueError(
            f"the steps to capture are {given!r}; they must be numbers from 1 on, such as [10, 100] (in "
            f"{STEPS_VARIABLE}: 10,100)"
        )
    found = file or os.environ.get(FILE_VARIABLE)
    if found and Path(found).suffix != ".npz":
        raise ValueError(f"the file of captured gradients is {str(found)!r}; its name must end in .npz")
    return (Path(found) if found else None), numbers
