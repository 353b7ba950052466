"""The engine's interface to the framework's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.ops.dispatch import on_host

G = TypeVar("G")
"""The framework's type of a gradient."""

Device = Hashable | None
"""A GPU, by whatever the framework names it; None: the host."""

_HOST: AbstractContextManager[None] = nullcontext()


class Tensors(ABC, Generic[G]):
    """How to get at a gradient's memory. Frameworks without GPUs implement ``flat`` and ``write`` alone.

    Attributes:
        small: elements up to which gradients that are given with ``as_view`` are better copied together with others.
    """

    small = 0

    def device(self, gradient: G) -> Device:
        """Where the gradient is."""
        return None

    @abstractmethod
    def flat(self, gradient: G, on_host: bool = False) -> Floats:
        """The gradient as a contiguous array ``[numel]``: its own memory where possible, else a copy.

        Args:
            on_host: return a NumPy array, even of a gradient on a GPU. Else it is an array on the gradient's device.

        Returns:
            float64 for a float64 gradient, else float32.
        """

    @abstractmethod
    def write(self, gradient: G, reduced: Floats, scale: float = 1.0) -> None:
        """``gradient = scale * reduced``, in the gradient's own memory and dtype.

        Args:
            reduced: ``[numel]``, on the host or the gradient's device; it may be the array that ``flat`` returned.
        """

    def view(self, part: Floats, gradient: G) -> Any:
        """A gradient's part of a bucket, ``[numel]``, in the form that ``copy_in`` and ``copy_out`` want; made once."""
        return part

    def copy_in(self, gradient: G, view: Any, as_view: bool) -> bool:
        """Copies a gradient into its part of a bucket.

        Args:
            view: what ``view`` returned.
            as_view: the gradient may alias the part's memory from now on, which the next step overwrites.

        Returns:
            Whether it is known to be finite; False if nobody has looked.
        """
        view[:] = self.flat(gradient, on_host(view))
        return False

    def can_wait(self, gradient: G, view: Any) -> bool:
        """Whether a gradient, on the host, is contiguous, of the dtype of its part of a bucket, and elsewhere: it can
        stay there until the bucket is encoded, and need not be copied, or is copied with others by ``copy_in_many``.
        With ``as_view``, its view is the result, so that must be in the form of ``gradient``."""
        return False

    def addresses(self, waiting: Iterable[tuple[G, Any]]) -> list[int]:
        """Where gradients that have waited are, each given with its view."""
        raise NotImplementedError

    def copy_in_many(self, waiting: Iterable[tuple[G, Any]]) -> bool:
        """As ``copy_in``, for the gradients of a bucket that have waited, each with its view."""
        raise NotImplementedError

    def copy_out(self, gradient: G, view: Any, scale: float) -> None:
        """``gradient = scale * (its part of a bucket)``."""
        self.write(gradient, view, scale)

    def now(self, device: Device) -> Any:
        """The framework's current stream of this device, for ``copy_in_from``; None where nothing is asynchronous."""
        return None

    def copy_in_from(self, device: Device, arrived: Sequence[tuple[G, Any, bool, Any]]) -> None:
        """As ``copy_in``, for gradients on this device that have waited for each other, within ``stream`` of it.

        Args:
            arrived: each gradient with its view, ``as_view``, and ``now`` when it came: it was computed by what was
                enqueued there.
        """
        for gradient, view, as_view, _ in arrived:
            self.copy_in(gradient, view, as_view)

    def copy_out_many(self, copies: Sequence[tuple[G, Any]]) -> None:
        """As ``copy_out``, for gradients on one device, each with its view, and a scale of 1."""
        for gradient, view in copies:
            self.copy_out(gradient, view, 1.0)

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        """Inside, array operations run on this device, in order with the framework's current stream."""
        return _HOST

    def record(self, device: Device) -> Callable[[], None] | None:
        """Marks the work that is enqueued on the framework's current stream of this device.

        Returns:
            A function that makes the stream that is current when it is called wait for the marked work; None where
            nothing is asynchronous.
        """
        return None

    def side_stream(self, device: Device) -> Callable[[], AbstractContextManager[Any]]:
        """Notes the work that is enqueued on the framework's current stream of this device.

        Returns:
            A function that makes a context for another thread, which stays on this device. Inside, array operations run
            there, on a stream apart from those of the framework's threads, after the noted work.
        """
        return lambda: self.stream(device)

    def join(self, device: Device) -> None:
        """Makes the framework's current stream of this device wait for what was enqueued inside ``side_stream``."""

    def return_to(self, device: Device) -> Callable[[], None] | None:
        """Notes the framework's current stream of this device, on which memory is about to be allocated.

        Returns:
            A function that makes this stream wait for the stream that is current when it is called: the memory may be
            freed then, though the other stream has used it. None where nothing is asynchronous.
        """
        return None
