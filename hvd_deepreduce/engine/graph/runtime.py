"""What runs the operations of a unit: put takes a gradient for its bucket, take hands out its sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hvd_deepreduce.engine.buckets import Bucket

FULL, WANTED, HELD = 1, 2, 3
"""What a unit tells: a bucket is full, its sums are asked for, all gradients of unknown sizes are there."""
Listener = Callable[[int, int, int, float, bool], None]
"""Called with (event, bucket, run, carrier, flag), on a thread of the framework. The flag: of ``WANTED``, whether all
carriers are equal."""


class Runtime(Protocol):
    """The gradients of a tape or optimizer in one graph, as their operations know them.

    Attributes:
        early: whether gradients can be counted for their buckets as they come.
    """

    early: bool

    def put(self, gradient: Any, number: Any, sent: Any, at: int, name: str) -> Any:
        """Adds the operation that puts a gradient into its bucket, and returns its carrier.

        Args:
            number: of the run, a tensor.
            sent: dtype of the carrier.
            at: the slot's number in the unit.
        """

    def take(self, carrier: Any, number: Any, like: Any, dtype: Any, at: int) -> Any:
        """Adds the operation that returns a sum, of the shape of ``like``, when its bucket is there."""

    def begin(self, run: int, slots: int, force: bool = False) -> bool:
        """A run begins. False: gradients of the last one are still in flight; ``force`` forgets them."""

    def sizes(self, slots: int) -> list[int]:
        """The numbers of elements of all gradients, which are held."""

    def lay_out(self, places: np.ndarray[Any, np.dtype[np.int64]], buckets: Sequence[Bucket]) -> None:
        """Says where this run's gradients go.

        Args:
            places: int64 ``[3, slots]``: the bucket of each slot, where it begins there, and its number of elements.
        """

    def fill(self, at: int, bucket: Bucket, as_pieces: bool) -> None:
        """Takes the gradients of a bucket that is full.

        Args:
            at: the bucket's number among those of ``lay_out``.
            as_pieces: they may stay where they are, as ``bucket.pieces``.
        """

    def deliver(self, run: int, at: int, bucket: Bucket, divisor: float = 0.0, error: str | None = None) -> None:
        """Gives the sums of a bucket to the operations that wait for them.

        Args:
            at: as for ``fill``.
            divisor: each sum is multiplied by its carrier / ``divisor`` before; 0: they are as they are.
            error: with which the operations fail instead.
        """

    def fail(self, error: str) -> None:
        """All operations of the run fail with this error."""
