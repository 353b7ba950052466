"""The engine's view of PyTorch's tensors; needs no Horovod."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from hvd_deepreduce.codec import Floats
from hvd_deepreduce.engine import Device, Tensors
from hvd_deepreduce.ops import device as cuda


class TorchTensors(Tensors[torch.Tensor]):
    """Gradients in a host's or a CUDA device's memory."""

    def device(self, gradient: torch.Tensor) -> Device:
        """The gradient's GPU; None: the host."""
        return gradient.device if gradient.is_cuda else None

    def flat(self, gradient: torch.Tensor, on_host: bool = False) -> Floats:
        """The gradient's own memory where it is contiguous float32 or float64, else a copy."""
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        device = gradient.device if gradient.is_cuda and not on_host else "cpu"
        array: Floats = self.array(gradient.detach().to(device, dtype).contiguous().view(-1))
        return array

    def write(self, gradient: torch.Tensor, reduced: Floats, scale: float = 1.0) -> None:
        """``gradient = scale * reduced``."""
        result = self.tensor(reduced).view(gradient.shape)
        if scale != 1.0:
            result = result * scale
        if gradient.data_ptr() != result.data_ptr():
            gradient.copy_(result)

    def view(self, part: Floats, gradient: torch.Tensor) -> torch.Tensor:
        """A tensor of the gradient's shape, contiguous, in the memory of the part."""
        return self.tensor(part).view(gradient.shape)

    def put(self, gradient: torch.Tensor, view: torch.Tensor, own: bool) -> None:
        """Copies the gradient. With ``own``, one of the bucket's dtype and device that is contiguous becomes a view of
        the bucket, and its former memory is freed."""
        if gradient.data_ptr() == view.data_ptr():
            return
        view.copy_(gradient.detach())
        if own and gradient.dtype == view.dtype and gradient.device == view.device and gradient.is_contiguous():
            gradient.set_(view)  # type: ignore[call-overload]

    def take(self, gradient: torch.Tensor, view: torch.Tensor, scale: float) -> None:
        """Copies the part, unless the gradient is a view of it."""
        if gradient.data_ptr() != view.data_ptr():
            gradient.copy_(view if scale == 1.0 else view * scale)
        elif scale != 1.0:
            gradient.mul_(scale)

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        """Inside, CUDA operations run on this GPU, on PyTorch's current stream."""
        if not isinstance(device, torch.device):
            return super().stream(device)
        return cuda.on_stream(device.index, torch.cuda.current_stream(device).cuda_stream)

    def record(self, device: Device) -> Callable[[], None] | None:
        """An event on PyTorch's current stream."""
        if not isinstance(device, torch.device):
            return None
        event = torch.cuda.current_stream(device).record_event()
        return lambda: torch.cuda.current_stream(device).wait_event(event)

    def array(self, flat: torch.Tensor) -> Any:
        """The array of a contiguous tensor's memory: NumPy's, or on a GPU CuPy's."""
        return cuda.from_dlpack(flat) if flat.is_cuda else flat.numpy()

    def tensor(self, array: Any) -> torch.Tensor:
        """The tensor of an array's memory."""
        return torch.from_numpy(array) if isinstance(array, np.ndarray) else from_dlpack(array)
