"""The engine's view of PyTorch's tensors; needs no Horovod."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine import Device, Engine, Parameter, Tensors
from hvd_deepreduce.engine.state import Reshard
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.ops import device as cuda
from hvd_deepreduce.torch.owners import with_plain_names
from hvd_deepreduce.wire.quoting import quoted

SMALL = 1 << 14
"""Elements up to which gradients are copied together; 64 KiB of float32."""
IS_TRAINED = attrgetter("requires_grad")
"""Of a parameter; without a Python call where many are asked."""
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _allocate(size: int, device: int) -> int:
    """Memory of PyTorch's allocator, for use on the stream of the operations, which is PyTorch's current one. To ask
    PyTorch for that takes longer than the allocation."""
    return int(torch.cuda.caching_allocator_alloc(size, device, cuda.current_stream()))


def _free(address: int, device: int) -> None:
    torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]


def real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers, of which a complex one has two."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """For what makes tensors that stay: those of ``torch.inference_mode()`` could not be changed after it."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def hashes(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A number for the values of each tensor: the sum of their bits as integers, modulo 2^64. One pass over memory, on
    the tensors' devices."""
    sums = {}
    for name, tensor in tensors.items():
        flat = real(tensor)
        bits = flat.detach().contiguous().view(-1).view(_INTEGERS[flat.element_size()])
        sums[name] = torch.sum(bits, dtype=torch.int64)
    return {name: int(one) for name, one in sums.items()}


def accumulated_in(tensor: torch.Tensor) -> torch.dtype:
    """As ``Parameter.accumulated_in``."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def keep_for_stream(tensor: torch.Tensor) -> None:
    """On a GPU, the tensor's memory is given to nobody before PyTorch's current stream has done what is enqueued there
    when the tensor is freed. To be called where that is not the stream on which it was allocated."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _copy(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies each second tensor to the first, in one operation, unless they share their memory already."""
    apart = [(to, source) for to, source in copies if to.data_ptr() != source.data_ptr()]
    if apart:
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in apart], [source for _, source in apart])


class TorchTensors(Tensors[torch.Tensor]):
    """Gradients in a host's or a CUDA device's memory."""

    small = SMALL

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # of ``side_stream``

    def device(self, gradient: torch.Tensor) -> Device:
        return gradient.device if gradient.is_cuda else None

    def flat(self, gradient: torch.Tensor, on_host: bool = False) -> Floats:
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32  # in every step: no call
        device = gradient.device if gradient.is_cuda and not on_host else "cpu"
        array: Floats = self.array(gradient.detach().to(device, dtype).contiguous().view(-1))
        return array

    def write(self, gradient: torch.Tensor, reduced: Floats, scale: float = 1.0) -> None:
        result = self.tensor(reduced).view(gradient.shape)
        if scale != 1.0:
            result = result * scale
        if gradient.data_ptr() != result.data_ptr():
            gradient.copy_(result)

    def view(self, part: Floats, gradient: torch.Tensor) -> torch.Tensor:
        return self.tensor(part).view(gradient.shape)

    def copy_in(self, gradient: torch.Tensor, view: torch.Tensor, as_view: bool) -> bool:
        """Copies the gradient. With ``as_view``, a contiguous one of the bucket's dtype and device becomes a view of
        the bucket, and its former memory is freed."""
        source, to = gradient.data_ptr(), view.data_ptr()
        if source == to:
            return False
        dtype: torch.dtype = gradient.dtype
        finite = False
        if dtype != view.dtype or gradient.is_cuda or view.is_cuda or not gradient.is_contiguous():
            view.copy_(gradient.detach())
            as_view = as_view and dtype == view.dtype and gradient.device == view.device and gradient.is_contiguous()
        else:
            finite = arrays.copy_finite(to, source, gradient.numel(), _NUMPY[dtype], torch.get_num_threads())
        if as_view:
            gradient.set_(view)  # type: ignore[call-overload]
        return finite

    def can_wait(self, gradient: torch.Tensor, view: torch.Tensor) -> bool:
        return (
            gradient.dtype == view.dtype
            and gradient.is_contiguous()
            and not gradient.is_cuda
            and gradient.data_ptr() != view.data_ptr()
        )

    def addresses(self, waiting: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
        return [gradient.data_ptr() for gradient, _ in waiting]

    def copy_in_many(self, waiting: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        copies = [(view.data_ptr(), gradient.data_ptr(), gradient.numel()) for gradient, view in waiting]
        return arrays.copy_finite_many(copies, _NUMPY[next(iter(waiting))[1].dtype])

    def copy_out(self, gradient: torch.Tensor, view: torch.Tensor, scale: float) -> None:
        if gradient.data_ptr() != view.data_ptr():
            gradient.copy_(view if scale == 1.0 else view * scale)
        elif scale != 1.0:
            gradient.mul_(scale)

    def now(self, device: Device) -> Any:
        return torch.cuda.current_stream(device) if isinstance(device, torch.device) else None

    def copy_in_from(
        self, device: Device, arrived: Sequence[tuple[torch.Tensor, torch.Tensor, bool, Any]]
    ) -> None:
        """In one operation. The gradients' memory may be freed as soon as this returns."""
        now = self.now(device)
        for other in {stream for *_, stream in arrived} - {now}:
            now.wait_stream(other)
        for gradient, _, _, stream in arrived:
            if stream != now:
                gradient.record_stream(now)
        _copy([(view, gradient) for gradient, view, *_ in arrived])
        for gradient, view, as_view, _ in arrived:
            if as_view and gradient.dtype == view.dtype and gradient.device == view.device and gradient.is_contiguous():
                gradient.set_(view)  # type: ignore[call-overload]

    def copy_out_many(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        _copy(copies)

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        if not isinstance(device, torch.device):
            return super().stream(device)
        return cuda.on_stream(device.index, torch.cuda.current_stream(device).cuda_stream, _allocate, _free)

    def record(self, device: Device) -> Callable[[], None] | None:
        if not isinstance(device, torch.device):
            return None
        event = torch.cuda.current_stream(device).record_event()
        return lambda: torch.cuda.current_stream(device).wait_event(event)

    def side_stream(self, device: Device) -> Callable[[], AbstractContextManager[Any]]:
        """A stream of this object, one for each GPU; it is PyTorch's current stream inside. The thread stays on that
        GPU: a thread begins on the first one, and to go back there makes a context, which takes half a gigabyte."""
        if not isinstance(device, torch.device):
            return super().side_stream(device)
        event = torch.cuda.current_stream(device).record_event()
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        @contextmanager
        def within() -> Iterator[None]:
            torch.cuda.set_device(device)
            with torch.cuda.stream(stream):
                stream.wait_event(event)
                with self.stream(device):
                    yield

        return within

    def join(self, device: Device) -> None:
        if isinstance(device, torch.device) and device in self._streams:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])

    def return_to(self, device: Device) -> Callable[[], None] | None:
        """PyTorch's allocator gives memory to the stream again that it was allocated on."""
        if not isinstance(device, torch.device):
            return None
        began = torch.cuda.current_stream(device)

        def back() -> None:
            now = torch.cuda.current_stream(device)
            if now != began:
                began.wait_stream(now)

        return back

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """Waits for what was enqueued, on any stream, on the GPUs of these tensors."""
        for device in {one.device for one in tensors if one.is_cuda}:
            torch.cuda.synchronize(device)

    def array(self, flat: torch.Tensor) -> Any:
        """The array of a contiguous tensor's memory: NumPy's, or on a GPU CuPy's."""
        return cuda.from_dlpack(flat) if flat.is_cuda else flat.numpy()

    def tensor(self, array: Any) -> torch.Tensor:
        """The tensor of an array's memory."""
        return torch.from_numpy(array) if isinstance(array, np.ndarray) else from_dlpack(array)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are in consecutive places of memory, in any order of its dimensions."""
    ends = ((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return 1 + sum(ends) == tensor.numel()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, whose class takes a second to import."""
    return hasattr(tensor, "to_local")


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, without a gradient, which shares the tensor's memory; a plain tensor is its own."""
    detached = tensor.detach()
    return detached.to_local() if is_sharded(detached) else detached  # type: ignore[attr-defined]


def flush(engine: Engine, tensors: TorchTensors, parameter: Parameter, gradient: torch.Tensor) -> None:
    """Adds the parameter's residual to a gradient that is sent dense (``Engine.to_flush``)."""
    with tensors.stream(tensors.device(gradient)):
        total = engine.flush(parameter, tensors.flat(gradient))
        if total is not None:
            before = gradient.clone()
            tensors.write(gradient, total)
            if bool(torch.isfinite(gradient).all()):
                engine.flushed(parameter, total, tensors.flat(gradient))
            else:  # too large for a small dtype
                gradient.copy_(before)


def as_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with residuals as tensors."""
    return {**state, "residuals": {name: torch.from_numpy(r) for name, r in state["residuals"].items()}}


def of_each(call: Callable[[Any], Any], state: Any, reshard: Reshard) -> Any:
    """What ``call`` makes of a state; with ``reshard``, an iterator over what it makes of each of several."""
    many = reshard is not False and isinstance(state, Iterable) and not isinstance(state, Mapping)
    return map(call, state) if many else call(state)


def on_host(state: Any) -> Any:
    """A state with arrays in place of tensors, and with plain names."""
    state = with_plain_names(state, ("steps", "residuals"))
    residuals = state.get("residuals") if isinstance(state, Mapping) else None
    if not isinstance(residuals, Mapping):
        return state
    return {**state, "residuals": {name: _as_array(name, given) for name, given in residuals.items()}}


def _as_array(name: Any, residual: Any) -> Any:
    """A tensor of a state as a NumPy array; anything else as it is."""
    if not isinstance(residual, torch.Tensor):
        return residual
    try:
        return residual.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:  # sparse, quantized, of a dtype that NumPy lacks, or without memory
        raise ValueError(
            f"the residual of {quoted(name)} is a tensor {residual.dtype} on {residual.device} that cannot be read: "
            f"{error}"
        ) from None
