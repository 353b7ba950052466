"""Counts the calls of the package's Python functions."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import hvd_deepreduce

PACKAGE = str(Path(hvd_deepreduce.__file__).parent)


class Calls:
    """Within ``with calls:``, this thread and those that begin are watched; ``calls.on`` says whether they are counted.

    Functions, properties, comprehensions and lambdas count; C functions, and what Python generates, do not.

    Attributes:
        seen: the functions that were called, in order.
    """

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []

    def __call__(self, frame, event, argument) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.seen.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")

    def __enter__(self) -> Calls:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)
        sys.setprofile(None)


def of_a_step(step, warm_up: int = 3, steps: int = 20) -> list[str]:
    """The calls of ``step(number)`` after so many other steps. Of several steps the one with the fewest: a rank that
    the others have waited for finds the step check over earlier, and asks for it once more."""
    counted = []
    gc.collect()  # optimizers of other jobs are looked at as long as these live
    with Calls() as calls:
        for number in range(warm_up + steps):
            calls.seen, calls.on = [], number >= warm_up
            step(number)
            calls.on = False
            counted.append(calls.seen)
    return min(counted[warm_up:], key=len)
