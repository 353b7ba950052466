"""PyTorch's view of the emulated GPU (tests/cuda_emulator): within ``emulated_gpu`` the adapters run their protocol of
streams and events on a machine without a GPU.

Tensors of ``put`` are in its memory, and so is what PyTorch computes of them. They are on the host as PyTorch sees it,
but their ``is_cuda`` is true, ``hvd_deepreduce`` makes arrays of the emulator of them, and ``torch.cuda``'s streams are
the emulator's. PyTorch's operations on them are checked too: on threads within ``torch.cuda.stream``.

Collectives of ``torch.distributed`` on such tensors run on a stream of their own, as NCCL's do: it waits for the
current stream when they are started, and ``wait`` of a collective makes the current stream wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvd_deepreduce.ops import device
from tests import cuda_emulator
from tests.cuda_emulator import EmulationError, streams
from tests.cuda_emulator.streams import Event, Place, Stream

_local = threading.local()
_numbered: dict[int, Stream] = {}


def current(_: Any = None) -> Stream:
    """As ``torch.cuda.current_stream``: not CuPy's, which is the emulator's."""
    return getattr(_local, "stream", streams.NULL)


def set_device(_: Any) -> None:
    """As ``torch.cuda.set_device``: there is one GPU, but the package's threads must say so."""
    _local.on_gpu = True


def put(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory is the emulated GPU's from now on, and was allocated on the current stream."""
    storage = tensor.untyped_storage()
    streams.allocated(storage, storage.data_ptr(), storage.nbytes(), current())
    return tensor


def _there(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor) or tensor.is_sparse or not tensor.numel():
        return False
    return streams.known(tensor.data_ptr())


def _place(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr(), tensor.nbytes


class _Watched(TorchDispatchMode):
    """Enqueues PyTorch's operations of this thread on its current stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "aten":
            return result
        given = dict(zip([one.name for one in func._schema.arguments], args, strict=False)) | (kwargs or {})
        reads, writes = [], []
        for argument in func._schema.arguments:
            found = filter(_there, tree_leaves(given.get(argument.name)))
            if argument.alias_info is None:
                reads += found
            elif argument.alias_info.is_write:
                writes += found
        if reads or writes:
            made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor) and not _there(one)]
            writes += filter(_there, map(put, made))
            streams.operation(str(func), map(_place, reads), map(_place, writes), current())
        if reads and func._overloadpacket is torch.ops.aten._local_scalar_dense:
            current().synchronize()
        return result


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """As ``torch.cuda.stream``."""
    before, watched, name = current(), getattr(_local, "watched", False), threading.current_thread().name
    if stream is None:
        yield
        return
    if name.startswith("deepreduce") and not getattr(_local, "on_gpu", False):
        raise EmulationError(f"the thread {name} has not called torch.cuda.set_device: it makes a context on GPU 0")
    _local.stream, _local.watched = stream, True
    try:
        with nullcontext() if watched else _Watched():
            yield
    finally:
        _local.stream, _local.watched = before, watched


class GpuFuture(torch.futures.Future):  # type: ignore[type-arg]
    """As one with ``devices``: the stream that is current when the result is set, and ``wait`` for it."""

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()
        self.event = Event()

    def set_result(self, result: Any) -> None:
        self.event.record(current())
        super().set_result(result)

    def wait(self) -> Any:
        result = super().wait()
        current().wait_event(self.event)
        return result


class _Work:
    """A collective in flight.

    Attributes:
        done: its end.
    """

    def __init__(self, work: Any, done: Event) -> None:
        self._work, self.done = work, done

    def wait(self) -> None:
        self._work.wait()
        current().wait_event(self.done)


class Gpu:
    """
    Attributes:
        collectives: the stream on which they run.
    """

    def __init__(self) -> None:
        self.collectives = self.stream("collectives")

    def stream(self, name: str) -> Stream:
        stream = Stream(name)
        stream.cuda_stream = len(_numbered)  # type: ignore[attr-defined]
        _numbered[stream.cuda_stream] = stream  # type: ignore[attr-defined]
        return stream

    def new_stream(self, _: Any = None, priority: int = 0) -> Stream:
        """As ``torch.cuda.Stream``: it is named after its thread."""
        return self.stream(f"{len(_numbered)} of {threading.current_thread().name}")

    def synchronize(self, _: Any = None) -> None:
        for stream in _numbered.values():
            stream.synchronize()

    def collective(self, call: Callable[..., Any], given: Callable[..., tuple[list[Any], list[Any]]]) -> Any:
        """A collective of ``torch.distributed``; ``given`` says what it reads and writes of its arguments."""

        def started(*args: Any, **settings: Any) -> Any:
            reads, writes = given(*args)
            if not any(map(_there, reads + writes)):
                return call(*args, **settings)
            self.collectives.wait_stream(current())
            what = f"the collective {call.__name__}"
            streams.operation(what, map(_place, reads), map(_place, writes), self.collectives)
            done = self.collectives.record_event()
            return _Work(call(*args, **settings), done)

        return started


@contextmanager
def _of_cupy(_: int, pointer: int, *__: Any) -> Iterator[None]:
    """As ``ops.device.on_stream``."""
    with _numbered[pointer]:
        yield


def _from_dlpack(tensor: torch.Tensor) -> Any:
    """As CuPy's: its current stream waits for PyTorch's."""
    streams.current().wait_stream(current())
    return cuda_emulator.from_dlpack(tensor)


def _to_host(tensor: torch.Tensor, plain: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu) -> torch.Tensor:
    if not _there(tensor):
        return plain(tensor)
    streams.operation("a copy to the host", [_place(tensor)], [], current())
    current().synchronize()
    return torch.from_numpy(tensor.detach().numpy().copy())


@contextmanager
def emulated_gpu() -> Iterator[Gpu]:
    """
    Raises:
        EmulationError: an operation was not ordered after what it needs, or memory was freed too early.
    """
    with streams.checking(), ExitStack() as stack:
        _numbered.clear()
        _numbered[0] = streams.NULL
        streams.NULL.cuda_stream = 0  # type: ignore[attr-defined]
        gpu = Gpu()
        for of, name, what in (
            (torch.cuda, "current_stream", current), (torch.cuda, "stream", on_stream),
            (torch.cuda, "Stream", gpu.new_stream), (torch.cuda, "set_device", set_device),
            (torch.cuda, "synchronize", gpu.synchronize), (torch.cuda, "device", lambda _: nullcontext()),
            (torch.futures, "Future", GpuFuture),
            (device, "on_stream", _of_cupy), (device, "from_dlpack", _from_dlpack),
            (dist, "all_to_all_single", gpu.collective(dist.all_to_all_single, lambda out, of, *_: ([of], [out]))),
            (dist, "all_reduce", gpu.collective(dist.all_reduce, lambda tensor, *_: ([tensor], [tensor]))),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(of, name, what))
        for name, member in (
            ("is_cuda", property(_there)), ("cpu", _to_host),
            ("record_stream", lambda tensor, stream: streams.record(tensor.data_ptr(), stream)),
        ):  # fmt: skip
            setattr(torch.Tensor, name, member)
            stack.callback(delattr, torch.Tensor, name)
        yield gpu
