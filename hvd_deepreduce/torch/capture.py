"""Records gradients of a PyTorch job: of one process, Horovod or DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hvd_deepreduce.tools import recorder
from hvd_deepreduce.tools.recorder import Array, Capturing


class Capture(Capturing):
    """Records this rank's gradients of some steps into files that ``hvd-deepreduce inspect`` and ``bench`` read.

    One line before the training loop, after the model is where it is trained: ``Capture(model, "gradients.npz",
    steps=[10, 100])``. A gradient is recorded as it comes out of the backward pass, before ranks exchange it. The hooks
    are removed after the last step. They hold this object, so that it need not be kept.

    Args:
        model: the module that is trained; that of DistributedDataParallel too.
        file: its name ends in ``.npz``. With several steps, each has a file of its own: ``gradients_step100.npz``.
            None: the environment variable HVD_DEEPREDUCE_CAPTURE names it; where it is not set, nothing is done.
        steps: from 1 on: the first backward pass is that of step 1. The environment variable
            HVD_DEEPREDUCE_CAPTURE_STEPS (``10,100``) replaces them.
        compression: the job's ``DeepReduce`` or ``DeepReduceState``. Accumulators are recorded too then: gradient +
            residual, which it selects from.
        only: a pattern of the parameters' names, in the syntax of Python's ``fnmatch``.
        all_ranks: every rank records, into a file with its number (``gradients_rank3.npz``), and not rank 0 alone.
        passes: backward passes of a step (``backward_passes_per_step``). The gradient is then the sum of the passes.
        max_bytes: the most that the recorded vectors of a step may take in memory.

    Raises:
        ValueError: a wrong name or step; no parameter matches; the vectors take more than ``max_bytes``; or a
            compression whose accumulators are not gradient + residual (memory ``dgc``, ``hierarchical``).

    Attributes:
        files: that were written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        file: str | Path | None = None,
        steps: Sequence[int] = (10,),
        *,
        compression: Any = None,
        only: str = "*",
        all_ranks: bool = False,
        passes: int = 1,
        max_bytes: int = recorder.MAX_BYTES,
    ) -> None:
        self._handles: list[Any] = []
        about: dict[str, Any] = {"framework": f"torch {torch.__version__}"}
        config = None if compression is None else compression.config
        accumulators = config is not None and config.error_feedback
        if config is not None:
            about["config"] = config.to_dict()
        module = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        tensors = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._record(
            file, steps, _rank(), all_ranks, {name: tuple(one.shape) for name, one in tensors.items()}, only=only,
            passes=passes, max_bytes=max_bytes, accumulators=accumulators, about=about,
        )  # fmt: skip
        if self._recorder is None:
            return
        if config is not None and (config.has_velocity or config.hierarchical is not False):
            raise ValueError(
                "compression has the memory 'dgc', or 'hierarchical', under which it does not select from gradient "
                "+ residual: leave compression out, to record gradients alone"
            )
        for name, tensor in tensors.items():
            hook = self._recording(name, compression.residual if accumulators else None)
            self._handles.append(tensor.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Writes what is there of a step that is under way, and removes the hooks. It can be called more than once."""
        super().close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _recording(self, name: str, residual: Callable[[str], Any] | None) -> Callable[[torch.Tensor], None]:
        """The hook of a parameter."""

        def copy(tensor: torch.Tensor) -> Array:
            dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
            found: Array = dense.float().cpu().contiguous().numpy().copy()
            return found

        def hook(parameter: torch.Tensor) -> None:
            recorder, gradient = self._recorder, parameter.grad
            if recorder is None or gradient is None:
                return
            recorder.put(name, lambda: copy(gradient), (lambda: residual(name)) if residual is not None else None)
            if recorder.done:
                self.close()

        return hook


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    horovod = sys.modules.get("horovod.torch")
    return int(horovod.rank()) if horovod is not None and horovod.is_initialized() else 0
