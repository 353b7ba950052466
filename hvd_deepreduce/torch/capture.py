"""Records gradients of a PyTorch job: of one process, Horovod or DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvd_deepreduce.engine.local_sgd import LocalSGDBase
from hvd_deepreduce.engine.parameter import plain
from hvd_deepreduce.tools.recorder import Options, Recorder
from hvd_deepreduce.torch.tensors import is_sharded

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Capture(Recorder):
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
        max_bytes: the most that the recorded vectors of a step may take in memory; 1 GiB unless it is given.

    Raises:
        TypeError: ``compression`` is a LocalSGD or a PeerOptimizer, or no compression; or a parameter is complex or
            sharded.
        ValueError: a wrong name or step; no parameter matches; the vectors take more than ``max_bytes``; or a
            compression whose accumulators are not gradient + residual (a memory with momentum, ``hierarchical``).

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
        **options: Unpack[Options],
    ) -> None:
        self._handles: list[Any] = []
        about: dict[str, Any] = {"framework": f"torch {torch.__version__}"}
        if isinstance(compression, LocalSGDBase):
            raise TypeError(
                f"compression is {type(compression).__name__}, which gives no accumulators of gradients: leave it out, "
                "to record gradients alone"
            )
        if compression is not None and not hasattr(compression, "residual"):
            raise TypeError(f"compression is {compression!r}; it must be the job's DeepReduce or DeepReduceState")
        config = None if compression is None else compression.config
        accumulators = config is not None and config.error_feedback
        if config is not None:
            about["config"] = config.to_dict()
        module = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        tensors = {plain(name): one for name, one in module.named_parameters() if one.requires_grad}
        if imaginary := [name for name, one in tensors.items() if one.is_complex()]:
            raise TypeError(f"parameter {imaginary[0]} is complex, and a capture has real numbers")
        if sharded := [name for name, one in tensors.items() if is_sharded(one)]:
            raise TypeError(
                f"parameter {sharded[0]} is sharded, and a capture has whole gradients: record them in a job whose "
                "model is not sharded, such as one of a smaller model"
            )
        shapes = {name: tuple(one.shape) for name, one in tensors.items()}
        super().__init__(file, steps, shapes, rank=_rank(), accumulators=accumulators, about=about, **options)
        if self.done:
            return
        if config is not None and (config.has_velocity or config.hierarchical is not False):
            memory = config.momentum
            raise ValueError(
                f"compression has {'hierarchical' if memory is None else f'the memory {memory.name!r}'}, under which "
                "it does not select from gradient + residual: leave compression out, to record gradients alone"
            )
        self._tensors, self._residual = tensors, compression.residual if accumulators else None
        self._handles.append(module.register_forward_pre_hook(self._passed))
        for name, tensor in tensors.items():
            self._handles.append(tensor.register_post_accumulate_grad_hook(partial(self._take, name)))

    def close(self) -> None:
        """As ``Recorder.close``; removes the hooks."""
        super().close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _passed(self, *_: object) -> None:
        """The model is called: a backward pass before has ended. Of several, a parameter may have its gradient from an
        earlier one."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for name, tensor in self._tensors.items() if self._passes > 1 and self._came else ():
            if name not in self._came:
                self._take(name, tensor)
        self.end_pass()

    def _take(self, name: str, parameter: torch.Tensor) -> None:
        """The hook of a parameter."""
        gradient, residual = parameter.grad, self._residual
        if gradient is not None:
            kept = None if residual is None else partial(residual, name)
            self.put(name, lambda: gradient.detach().to_dense().float().cpu().numpy(), kept)
        if self.done:
            self.close()


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    horovod = sys.modules.get("horovod.torch")
    return int(horovod.rank()) if horovod is not None and horovod.is_initialized() else 0
