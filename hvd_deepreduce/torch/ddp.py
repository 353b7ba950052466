"""The communication hook for ``torch.nn.parallel.DistributedDataParallel``; needs neither Horovod nor MPI.

DDP calls the hook with each bucket of gradients during the backward pass, in the same order on all ranks. The hook
returns at once, while threads work on the bucket (``bucket_driver.py``). That of a step's last bucket waits for all of
them: DDP would wait there anyway, and so an error comes out of ``backward()`` with its own type.
"""

# Without ``from __future__ import annotations``: DDP compares the hook's annotations with the types.
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.compiling import Compilation
from hvd_deepreduce.engine.compression import GradientCompression
from hvd_deepreduce.engine.parameter import plain
from hvd_deepreduce.engine.rank_state import CLOSED
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.engine.stats import Report, Stats
from hvd_deepreduce.torch.bucket_driver import Buckets, Loaded, Made, advised, for_buckets
from hvd_deepreduce.torch.discovery import Models
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.owners import by_plain_name, described
from hvd_deepreduce.torch.rendezvous import Rendezvous
from hvd_deepreduce.torch.tensors import TorchTensors, is_dense, real

HOOK = "model.register_comm_hook(DeepReduceState(config), deepreduce_hook)"
UNUSABLE = (
    "This DDP model cannot go on in this process: after an error in backward() its next forward() fails. Make a new "
    "one from a checkpoint, on all ranks, when this one is deleted"
)


class DeepReduceState(GradientCompression):
    r"""Config and state of :func:`deepreduce_hook`, one for each DDP model.

    Args:
        config: a preset's name, the path of a YAML file, a dict, a ``Config``, or None for the default for SGD;
            the same on all ranks. With scope ``bucket``, a container holds what is selected from one of DDP's buckets;
            with ``selection: tensor``, or scope ``tensor``, each gradient in it has a container of its own.
        process_group: of the ranks that take part; None: the model's.
        start_iter: so many iterations at the beginning average the gradients as DDP does without a hook.
        timeout: of each exchange (None: the process group's), and of waiting for the other ranks at the first one
            (None: ``HVD_DEEPREDUCE_HANDSHAKE_SECONDS``, 300).
        **settings: keys of the config, in place of its own.

    Raises:
        ConfigError: the config cannot be used, or not with DDP.
        TypeError: another argument is not what it should be.

    The model is not known before the first iteration: a state that is loaded then is kept, and what is wrong with it is
    an error of the first ``backward()``, on all ranks.

    Example::
        >>> state = DeepReduceState("recommended", process_group=None, start_iter=100)
        >>> ddp_model.register_comm_hook(state, deepreduce_hook)
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        start_iter: int = 0,
        timeout: timedelta | None = None,
        **settings: Any,
    ) -> None:
        for name, value, kinds, allowed in (
            ("process_group", process_group, dist.ProcessGroup, "a process group of torch.distributed"),
            ("timeout", timeout, timedelta, "a datetime.timedelta, as timedelta(seconds=60)"),
        ):
            if value is not None and not isinstance(value, kinds):
                raise TypeError(f"{name} is {value!r}, but it must be {allowed}, or None")
        if not isinstance(start_iter, int) or start_iter < 0:
            raise TypeError(f"start_iter is {start_iter!r}, but it must be a number of iterations, 0 or more")
        self.process_group = process_group
        self.start_iter = start_iter
        self.timeout = timeout
        self._loaded: Loaded | None = None
        self._models = Models(self)
        self._compilation: Compilation | None = None
        # The ranks and the model are known when the first bucket comes.
        self._engine: Any = _NoEngine(for_buckets(Config.load(config, **settings), start_iter))
        self._buckets: Buckets | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as of a model for its averages, has the same settings and no state."""
        return partial(DeepReduceState, start_iter=self.start_iter, timeout=self.timeout), (self.config,)

    def __deepcopy__(self, memo: object) -> Any:
        made, settings = self.__reduce__()
        return made(*settings, process_group=self.process_group)

    def _change(self, new: Config) -> None:
        new = for_buckets(new, self.start_iter)
        if self._buckets:
            self._buckets.set_config(new)
        else:
            self._engine.config = new

    def state_dict(self) -> dict[str, Any]:
        """As ``DeepReduce.state_dict``; before the first iteration what was loaded, or empty.

        Raises:
            RuntimeError: states were loaded with ``reshard``, and the first iteration has yet to divide them.
        """
        if self._buckets is not None:
            self._check_early()
            return self._buckets.state_dict()
        state, reshard = self._loaded or ({}, False)
        if reshard is not False:
            raise RuntimeError(
                "the states of another number of ranks were loaded, and the first iteration will divide them among "
                "these: save a state after it. Until then, the checkpoint that was loaded is the state of this job"
            )
        return dict(state) if isinstance(state, Mapping) else {}

    def residual(self, name: str) -> Floats | None:
        """As of ``GradientCompression``."""
        name = plain(name)
        kept = super().residual(name)
        return kept if kept is None or self._buckets is None else self._buckets.in_order(name, kept)

    def _settle(self) -> None:
        if self._buckets is not None:
            self._buckets.settle()

    def _load(self, state: State, reshard: Reshard) -> None:
        if self._buckets:
            self._buckets.load(state, reshard)
        else:  # a generator may read files that are gone then
            self._loaded = list(state) if reshard is not False and not isinstance(state, Mapping) else state, reshard

    def close(self) -> None:
        """As ``DeepReduce.close``; it ends its process groups, and every rank calls it after the same iteration."""
        if self._buckets:
            self._buckets.close()
        else:
            self._engine.closed = True

    def prepare(self, device: torch.device) -> Compilation:
        """Begins to compile the kernels for gradients on this device, unless that was done."""
        if self._compilation is None:
            config, tensors = self._engine.config, TorchTensors()
            used = device.type == "cuda" and (dist.get_world_size(self.process_group) > 1 or config.has_velocity)
            self._compilation = Compilation(config, tensors, [device] if used else [], dist.get_rank() == 0)
        return self._compilation

    def buckets(self, first: Any) -> Buckets:
        """What takes DDP's buckets; made, on all ranks at the same time, when the first one comes."""
        if self._buckets is None:
            self._engine.check_open()
            compilation = self.prepare(first.buffer().device)
            tensors, models = TorchTensors(), self._models.of(first.parameters()[0])
            whole = models[0].process_group if models else self.process_group
            group = self.process_group or whole
            limit = None if self.timeout is None else self.timeout.total_seconds()
            met = Rendezvous("hook", whole, limit).meet(group, first.buffer())
            collectives = DistributedCollectives(tensors, group, self.timeout, several=True, met=met)
            if not self.start_iter:
                compilation.wait()
            made = partial(_made, models)
            buckets = Buckets(self._engine.config, collectives, tensors, self.start_iter, made, self._loaded)
            buckets.engine.stats.wishes = self._engine.stats.wishes
            self._buckets, self._engine, self._loaded = buckets, buckets.engine, None
        return self._buckets


def _made(models: Sequence[DistributedDataParallel]) -> Made:
    """What was found by ``Models``."""
    if not models:
        raise RuntimeError(
            "the DistributedDataParallel model of a gradient was not found, since it was not called after "
            "register_comm_hook: register the hook before the first forward pass, and call the model itself, "
            "as model(x)"
        )
    if any(isinstance(one, DistributedDataParallel) for model in models for one in model.module.modules()):
        raise RuntimeError(
            "a DistributedDataParallel model is inside another one, and both reduce the same gradients: wrap "
            "the model once"
        )
    trained = by_plain_name(models[0].module.named_parameters())
    # In DDP's buckets, a complex number is two real ones.
    numbers = {name: real(one) for name, one in trained.items()}
    strided = {name: one for name, one in numbers.items() if not one.is_contiguous() and is_dense(one)}
    used = _used(models[0], trained)
    return Made(trained, described(numbers), models[0].find_unused_parameters, used, strided=strided)


def _used(model: DistributedDataParallel, trained: Mapping[str, torch.Tensor]) -> set[int] | None:
    """The ids of the parameters that this rank has used since the last step, from now on. A gradient that is not zero
    may be left from an earlier step, where each optimizer clears only its own."""
    if not (model.find_unused_parameters or model.static_graph):
        return None
    used = {id(one) for one in trained.values() if one.grad is not None}

    def came(parameter: torch.Tensor) -> None:
        used.add(id(parameter))

    handles = []
    for one in trained.values():
        if one.is_floating_point() or one.is_complex():
            # One that is frozen takes no hook, and may be trained later.
            needs, one.requires_grad = one.requires_grad, True
            handles.append(one.register_post_accumulate_grad_hook(came))  # type: ignore[no-untyped-call]
            one.requires_grad = needs
    weakref.finalize(model, lambda: [one.remove() for one in handles]).atexit = False
    return used


class _NoEngine:
    """What is known before the first bucket comes."""

    def __init__(self, config: Config) -> None:
        self.config, self.stats, self.closed = config, Stats(), False

    def check_open(self) -> None:
        if self.closed:
            raise RuntimeError(CLOSED)

    def report(self) -> Report:
        return self.stats.to_dict()

    def residual_of(self, name: str) -> None:
        return None


def deepreduce_hook(
    state: DeepReduceState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    *more: object,
) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients over all ranks, compressed to a few percent of their bytes.

    To be registered by ``register_comm_hook`` of a DDP model, as PyTorch's ``powerSGD_hook`` is. It can be wrapped in
    ``fp16_compress_wrapper`` or ``bf16_compress_wrapper``.

    Args:
        state: of the model; see :class:`DeepReduceState`.
        bucket: of gradients, of any floating-point or complex dtype.
        more: refused.

    Returns:
        Future of the bucket's buffer, which holds the mean then.

    Raises:
        MismatchError: the ranks differ in release, config, model or iteration; on all ranks.
        ContainerError: a container cannot be decoded; on all ranks.
        RuntimeError: a rank has failed, on all others too; or a rank has died; or ``close`` was called.
        TimeoutError: not all ranks have registered the hook in time, at the first bucket.
        TypeError: it was not registered as in the example, or a gradient is sparse.

    After any error, make a new DDP model from a checkpoint.

    Example::
        >>> ddp_model.register_comm_hook(DeepReduceState("recommended"), deepreduce_hook)
    """
    if not isinstance(bucket, dist.GradBucket):  # type: ignore[attr-defined]
        raise TypeError(
            "deepreduce_hook was registered with a model that gives it no buckets of DistributedDataParallel, as "
            "FullyShardedDataParallel does. Wrap the model in torch.nn.parallel.DistributedDataParallel; or shard it "
            "by fully_shard, and use compress_replicas of hvd_deepreduce.torch.fsdp"
        )
    if not isinstance(state, DeepReduceState):
        given = state.__name__ if isinstance(state, type) else f"{state!r:.80}"
        raise TypeError(
            f"the state of deepreduce_hook is {given}, and must be an instance of DeepReduceState. Write: {HOOK}. "
            f"{UNUSABLE}"
        )
    if bucket.buffer().is_sparse:
        raise TypeError(
            "a parameter has sparse gradients, as of torch.nn.Embedding(sparse=True), which DDP gives to no hook as a "
            f"bucket of its own memory: make the layer with sparse=False. {UNUSABLE}"
        )
    try:
        return state.buckets(bucket).take(bucket)
    except Exception as error:
        advised(error, UNUSABLE)
        raise
