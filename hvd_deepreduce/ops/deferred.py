"""Deferred device checks: the host waits for the GPU once where it would otherwise wait many times.

Kernels leave three kinds of results that the host needs: the size of a section, whether a gradient is finite, and
whether a section that was decoded is broken. Reading any of them waits for the device. Two contexts collect them:

- ``encoding`` surrounds the encoding of a gradient. Sizes, the gradient's finiteness and the number of zeros that top-k
  selected are written into one mailbox, which the host reads once, when it needs the first size.
- ``deferred_checks`` surrounds decoding. The decoders' error flags are read together at its end.

Outside these contexts each result is read at once. On the host there is nothing to defer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops import device
from hvd_deepreduce.ops.device import (
    NULL,
    THREADS,
    array_module,
    cleared,
    clearing_at_once,
    for_each,
    grid,
    launch,
    on_device_of,
    suffix,
)
from hvd_deepreduce.ops.dispatch import on_host, operation
from hvd_deepreduce.ops.library import Kernel, NonFiniteError, address, check, kernel, kernels_by_dtype
from hvd_deepreduce.ops.types import Device, Floats

R = TypeVar("R")
_finite = kernels_by_dtype("finite", "i", "PUi")


class FewerNonzerosError(Exception):
    """Top-k was asked for more elements than are not zero, and has filled up with zeros: select again, ``exact``."""


class _Encoding:
    """The encoding of one gradient on a GPU.

    The mailbox is a row of uint64 on the device that the host reads at once::

        | not finite? | zeros that top-k selected | size 1 | size 2 | ... |      SIZES sizes, or `sizes`

    Attributes:
        exact: top-k waits for the number of zeros.
        recorded: a program is being recorded, so that the host cannot wait.
        assumed: top-k has assumed that there are enough nonzero elements, and the host has not read since.
        selected: the selection has ended.
    """

    SIZES = 62
    recorded = False

    def __init__(self, xp: Any, gradient: Device, exact: bool, sizes: int = SIZES) -> None:
        self.gradient, self.exact, self.mailbox = gradient, exact, cleared(xp, 2 + sizes, np.uint64)
        self.verdict, self.zeros = self.mailbox[:1].view(np.int32)[:1], self.mailbox[1:2]
        self.checked = self.read = self.assumed = self.selected = False
        self.slots: dict[int, int] = {}

    def counter(self) -> Device | None:
        """The next free number of the mailbox, 0 so far; ``None`` if the mailbox is full."""
        at = len(self.slots) + 2
        if at >= self.mailbox.size:
            return None
        slot = self.mailbox[at : at + 1]
        self.slots[slot.data.ptr] = at
        return slot

    def check_finite(self, fused: bool = False) -> Device:
        """The verdict, which kernels launched so far will have written; ``fused``: the caller's kernel writes it."""
        if not self.checked and not fused and self.gradient.size:
            find_nonfinite(self.gradient, self.verdict)
        self.checked = True
        return self.verdict

    def ask(self, *slots: Device) -> list[int]:
        """The numbers in slots. Waits for the device.

        Raises:
            NonFiniteError: the gradient is not finite.
            FewerNonzerosError: zeros were selected. Not before the selection has ended, so that all of the gradient
                has been added to the residual.
        """
        self.check_finite()
        numbers = self.mailbox.get()
        self.read = True
        sizes = opened(numbers, self.selected)
        self.assumed = self.assumed and not self.selected
        return [sizes[self.slots[slot.data.ptr] - 2] for slot in slots]


def opened(mailbox: NDArray[Any], selected: bool = True) -> list[int]:
    """The sizes of a mailbox.

    Raises:
        NonFiniteError, FewerNonzerosError: as ``_Encoding.ask``.
    """
    numbers: list[int] = mailbox.tolist()
    not_finite, zeros, *sizes = numbers
    if not_finite:
        raise NonFiniteError
    if selected and zeros:
        raise FewerNonzerosError
    return sizes


class _State(threading.local):
    """What the current thread has deferred.

    Attributes:
        encoding: the encoding under way.
        errors: error flags of decoders that have not been read; ``None``: flags are read at once.
        starts: first bytes of sections that the host knows, by address. The sections are kept, so that their
            addresses are not used again.
        opened: the sections of all containers, within ``reading``, as ``sections.take_apart`` made them.
    """

    encoding: _Encoding | None = None
    errors: list[Device] | None = None
    starts: dict[int, tuple[Device, bytes]] | None = None
    opened: Device | None = None


state = _State()
_NOTHING_DEFERRED = nullcontext()


@operation()
def encoding(
    gradient: Floats, residual: Floats | None, threads: int = 1, exact: bool = False, finite: bool = False
) -> AbstractContextManager[None]:
    """The context for encoding a gradient.

    On a GPU, the host waits for the device once, when it needs the first size; without a residual, once more.

    Args:
        gradient, residual: of one tensor.
        threads: of the host.
        exact: on a GPU, each top-k waits to learn how many elements are not zero.
        finite: whether the gradient is known to be finite, so that the host need not look at it.

    Raises:
        NonFiniteError: the gradient contains NaN or infinity. The residual is then unchanged.
        FewerNonzerosError: on a GPU and without ``exact``, top-k has selected zeros. The gradient has been added to the
            residual, and nothing was subtracted from it.
    """
    if not finite and not _finite[gradient.dtype](address(gradient), gradient.size, threads):
        raise NonFiniteError
    return _NOTHING_DEFERRED


@encoding.cuda
@contextmanager
def _(
    gradient: Device, residual: Device | None, threads: int = 1, exact: bool = False, finite: bool = False
) -> Iterator[None]:
    with on_device_of(gradient), clearing_at_once():
        with _under_way(_Encoding(array_module(gradient), gradient, exact)) as encoding:
            if residual is None:
                encoding.ask()  # codecs are about to read the gradient itself
            yield
            end_selection()
            if not encoding.read or encoding.assumed:
                encoding.ask()


@contextmanager
def _under_way(encoding: _Encoding) -> Iterator[_Encoding]:
    """Within the context, this thread encodes so."""
    before = state.encoding, state.starts
    state.encoding, state.starts = encoding, {}
    try:
        yield encoding
    finally:
        state.encoding, state.starts = before


@operation()
def encoding_slices(gradient: Floats, slices: int) -> AbstractContextManager[None]:
    """The context for encoding several slices of what was selected within ``encoding``, which has ended.

    On a GPU, sizes that are asked for together are waited for once.

    Args:
        gradient: finite.
        slices: how many.
    """
    return _NOTHING_DEFERRED


@encoding_slices.cuda
@contextmanager
def _(gradient: Device, slices: int) -> Iterator[None]:
    with on_device_of(gradient), clearing_at_once():
        encoding = _Encoding(array_module(gradient), gradient, False, _Encoding.SIZES + slices)
        encoding.checked = True
        with _under_way(encoding):
            yield


@contextmanager
def recording(gradient: Any, finite: bool, feedback: bool) -> Iterator[_Encoding]:
    """The context for recording the encoding of a gradient, of which a ``Program`` has a placeholder; one size.

    Kernels leave the residual as it was if the gradient is not finite, and subtract nothing if zeros were selected. The
    caller reads the mailbox, with ``opened``.

    Args:
        finite: as for ``encoding``.
        feedback: whether there is a residual.
    """
    encoding = _Encoding(array_module(gradient), gradient, False, 1)
    encoding.recorded, encoding.checked = True, finite
    with _under_way(encoding):
        if not feedback:
            encoding.check_finite()  # codecs are about to read the gradient itself
        yield encoding


def end_selection() -> None:
    """Within ``encoding``: the gradient has been added to the residual, and the elements to send are selected."""
    if state.encoding is not None:
        state.encoding.selected = True


def check_selection() -> None:
    """Within ``encoding``, before the residual of the selected elements changes: waits, if top-k has assumed that there
    are enough nonzero elements and no wait has shown it.

    Raises:
        FewerNonzerosError, NonFiniteError: as ``encoding``.
    """
    if state.encoding is not None and state.encoding.assumed and not state.encoding.recorded:
        state.encoding.ask()


def selection_guard() -> Any:
    """Where kernels read how many zeros were selected, if the host cannot know yet: nothing is subtracted then."""
    return NULL if state.encoding is None or not state.encoding.recorded else state.encoding.zeros


@operation()
def reading(data: Any) -> AbstractContextManager[None]:
    """The context for decoding an allgather's result: what ``prefetch_short_headers`` reads is kept until its end.

    On a GPU, operations run on the device of ``data``.
    """
    return _NOTHING_DEFERRED


@reading.cuda
@contextmanager
def _(data: Device) -> Iterator[None]:
    before = state.starts, state.opened
    state.starts, state.opened = {}, None
    try:
        with on_device_of(data), clearing_at_once():
            yield
    finally:
        state.starts, state.opened = before


def run_deferred(array: Any, work: Callable[[], R]) -> R:
    """``work()`` within ``deferred_checks``. If a check fails, ``work()`` runs again without deferring, so that the
    error of the first failed check is raised.

    Args:
        array: an array that ``work`` reads; on the host nothing is deferred.
        work: decodes; may run twice.
    """
    if on_host(array):
        return work()
    try:
        with deferred_checks():
            return work()
    except ValueError:
        return work()


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Within the context, decoders on a GPU do not wait for the device; at its end their error flags are read at once.

    Until then a decoder's result may contain anything and must not be used as indices.

    Raises:
        ValueError: at the end of the context, for a section that an encoder cannot have written.
    """
    pending: list[Device] = []
    before, state.errors = state.errors, pending
    try:
        with clearing_at_once():
            yield
    finally:
        state.errors = before
    if pending:
        for error in device.read_flags(pending):
            check(error)


def check_later(error: Device) -> None:
    """Raises ``ValueError`` if a kernel has found a section broken. Waits for the device, or defers the check.

    Args:
        error: int32 ``[1]``, a negative number of ``library.check`` or 0.
    """
    if state.encoding is not None:
        return  # this process made the section just now
    if state.errors is None:
        check(int(error.get()[0]))
    else:
        state.errors.append(error)


def counter(xp: Any) -> Device:
    """A uint64 ``[1]`` of 0 on the device, for ``read_counter``."""
    slot = None if state.encoding is None else state.encoding.counter()
    return cleared(xp, 1, np.uint64) if slot is None else slot


def read_counter(counter: Device) -> int:
    """The number that a kernel has written to a ``counter``. Waits for the device."""
    return read_counters([counter])[0]


def read_counters(counters: Sequence[Device]) -> list[int]:
    """The numbers that kernels have written to counters. Waits for the device, within ``encoding`` once."""
    encoding = state.encoding
    if encoding is not None and all(counter.data.ptr in encoding.slots for counter in counters):
        return encoding.ask(*counters)
    return [int(counter.get()[0]) for counter in counters]


def residual_guard() -> Any:
    """Where kernels read whether the gradient is finite, so whether they may change the residual."""
    return NULL if state.encoding is None else state.encoding.check_finite()


def find_nonfinite(x: Device, found: Device) -> None:
    """Sets ``found``, int32 ``[1]``, if ``x`` contains NaN or infinity."""
    xp = array_module(x)
    for_each(xp, "arrays/arrays", f"finite_{suffix(x.dtype)}", x.size, x, np.uint64(x.size), found, tile=4 * THREADS)


def decode_values(file: str, kernel: str, like: Device, count: int, *arguments: Any) -> Device:
    """``count`` float32, written by a decoding kernel whose last arguments are (values, error). Waits for the device,
    or defers the check."""
    xp = array_module(like)
    values, error = xp.empty(count, np.float32), cleared(xp, 1, np.int32)
    device.launch(xp, file, kernel, grid(xp, count), *arguments, values, error)
    check_later(error)
    return values


_ON_DEVICE: dict[str, Callable[[Any], Any] | None] = {
    "p": None, "U": np.uint64, "u": lambda word: np.uint32(word & 0xFFFFFFFF), "i": np.uint32, "f": np.float32,
    "d": np.float64,
}  # fmt: skip


def generic_kernel(file: str, name: str, result: str, arguments: str, tile: int = THREADS) -> Kernel:
    """A kernel that host and GPU have under one name, with the same arguments; the first one is an array.

    Args:
        file: of the GPU's kernel, without its suffix.
        result: "v"; or "I" for a kernel that checks: 0 or an error on the host. On a GPU, such a kernel has one more
            argument, the error, and the check may be deferred.
        arguments: as of ``library.kernel``.
        tile: as of ``device.for_each``.

    Returns:
        A function of the number of items of the GPU's loop and of the arguments. It raises ``ValueError`` for what a
        kernel that checks has found.
    """
    on_cpu, types = kernel(name, result, arguments), [_ON_DEVICE[letter] for letter in arguments]

    def call(items: int, *given: Any) -> None:
        if type(given[0]) is np.ndarray or on_host(given[0]):  # the usual case first, as in dispatch.py
            if failed := on_cpu(*given):
                check(failed)
            return
        xp = array_module(given[0])
        passed = [argument if of is None else of(argument) for of, argument in zip(types, given, strict=True)]
        if result == "v":
            for_each(xp, file, name, items, *passed, tile=tile)
            return
        error = cleared(xp, 1, np.int32)
        launch(xp, file, name, grid(xp, items, tile), *passed, error)
        check_later(error)

    return call


@operation()
def finite(x: Floats, threads: int = 1) -> bool:
    """Whether no element of ``x``, float32 or float64, is NaN or infinite. On a GPU, the host waits for the device."""
    return bool(_finite[x.dtype](address(x), x.size, threads))


@finite.cuda
def _(x: Device, threads: int = 1) -> bool:
    found = cleared(array_module(x), 1, np.int32)
    if x.size:
        find_nonfinite(x, found)
    return not int(found.get()[0])


@operation()
def check_finite(values: Floats) -> None:
    """Checks that no value is NaN or infinite.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: a value is.
    """
    if not finite.host(values):
        check(-7)


@check_finite.cuda
def _(values: Device) -> None:
    found = cleared(array_module(values), 1, np.int32)
    if values.size:
        find_nonfinite(values, found)
        check_later(found)
