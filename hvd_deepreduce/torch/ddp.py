"""The communication hook for ``torch.nn.parallel.DistributedDataParallel``; needs neither Horovod nor MPI.

DDP calls the hook with each bucket of gradients during the backward pass, in the same order on all ranks. The hook
returns at once. One thread encodes the bucket and starts its exchange, which the next bucket need not wait for; another
one waits for it, decodes, and completes the future that DDP has got. The hook of a step's last bucket waits for all of
them: DDP would wait there anyway, and so an error comes out of ``backward()`` with its own type.
"""

# Without ``from __future__ import annotations``: DDP compares the hook's annotations with the types.
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.reporting import Reporting
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.engine.stats import Report, Stats
from hvd_deepreduce.torch.ddp_driver import Buckets, Loaded, Models, for_buckets
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.rendezvous import Rendezvous
from hvd_deepreduce.torch.states import as_tensors
from hvd_deepreduce.torch.tensors import TorchTensors

HOOK = "model.register_comm_hook(DeepReduceState(config), deepreduce_hook)"
UNUSABLE = (
    "This DDP model cannot go on in this process: after an error in backward() its next forward() fails. Make a new "
    "one from a checkpoint, on all ranks, when this one is deleted"
)


class DeepReduceState(Reporting):
    r"""Config and state of :func:`deepreduce_hook`, one for each DDP model.

    Args:
        config: a preset's name, the path of a YAML file, a dict, a ``Config``, or None for the default for SGD;
            the same on all ranks. With scope ``bucket``, a container holds what is selected from one of DDP's buckets;
            with ``selection: tensor``, or scope ``tensor``, each gradient in it has a container of its own.
        process_group: of the ranks that take part; None: the model's.
        start_iter: so many iterations at the beginning average the gradients as DDP does without a hook.
        timeout: of each exchange, and of waiting for the other ranks at the first; None: PyTorch's default.
        **settings: keys of the config, in place of its own.

    Raises:
        ConfigError: the config cannot be used, or not with DDP.

    Example::
        >>> state = DeepReduceState("topk_rice_qsgd", process_group=None, start_iter=100)
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
        self.process_group = process_group
        self.start_iter = start_iter
        self.timeout = timeout
        self._config = for_buckets(Config.load(config, **settings), start_iter)
        self._loaded: Loaded | None = None
        self._before = Stats()
        self._models = Models(self)
        self._buckets: Buckets | None = None  # the ranks and the model are known when the first bucket comes

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._buckets.engine.config if self._buckets else self._config

    def set_config(self, config: str | Path | Mapping[str, Any] | Config | None = None, /, **settings: Any) -> None:
        """Changes the settings from the next iteration on; on all ranks, between the same two iterations.

        Args:
            config: the new config; None: the one in force, with ``settings`` in place of its own.

        Raises:
            ConfigError: the config cannot be used; the old one stays in force.
        """
        new = for_buckets(Config.load(self.config if config is None else config, **settings), self.start_iter)
        if self._buckets:
            self._buckets.set_config(new)
        self._config = new

    def stats(self) -> Report:
        """``{"total": ..., "last_step": ...}`` with this rank's ``hvd_deepreduce.engine.stats.Counters``;
        ``print`` shows a table."""
        return self._buckets.engine.report() if self._buckets else self._before.to_dict()

    def _counted(self) -> Stats:
        return self._buckets.engine.stats if self._buckets else self._before

    def residual(self, name: str) -> Floats | None:
        """A copy of this rank's residual of a parameter, ``[numel]``, as a NumPy array; None: nothing is kept of it.

        A gradient in flight may be changing it: call it between two steps.
        """
        return self._buckets.engine.residual_of(name) if self._buckets else None

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, as tensors, and step counts. Ranks differ: each saves and loads its own.

        Before the first iteration it is what was loaded, or empty.
        """
        if self._buckets is None:
            state, reshard = self._loaded or ({}, False)
            return dict(state) if isinstance(state, Mapping) and reshard is False else {}
        self._buckets.synchronize()
        return {**as_tensors(self._buckets.engine.state_dict()), "iteration": self._buckets.iteration}

    def load_state_dict(self, state: State, *, reshard: Reshard = False) -> None:
        """Continues where ``state_dict`` was called.

        Before the first iteration the model is not known: the state is kept, and what is wrong with it is an error of
        the first ``backward()``, on all ranks.

        Args:
            state: what ``state_dict`` returned on this rank; with ``reshard``, an iterable of what it returned on each
                rank, of which there may have been more or fewer.
            reshard: as in ``DeepReduce.load_state_dict``.

        Raises:
            ValueError: a state of another rank, another number of ranks or another model, with a residual that is not
                finite, or not a state at all; nothing has changed then.
        """
        if reshard is not False and not isinstance(state, Mapping):
            state = list(state)
        if self._buckets:
            self._buckets.load(state, reshard)
        else:
            self._loaded = state, reshard

    def close(self) -> None:
        """Ends its threads and process groups, and frees the residuals.

        Every rank calls it after the same iteration. It can be called more than once. Afterwards ``config`` and
        ``stats()`` can be read; the hook raises ``RuntimeError``.
        """
        if self._buckets:
            self._buckets.close()

    def buckets(self, first: Any) -> Buckets:
        """What takes DDP's buckets; made, on all ranks at the same time, when the first one comes.

        Args:
            first: that one.

        Raises:
            RuntimeError, TimeoutError: as ``deepreduce_hook``.
        """
        if self._buckets is None:
            tensors, models = TorchTensors(), self._models.of(first.parameters()[0])
            whole = models[0].process_group if models else self.process_group
            group = self.process_group or whole
            limit = None if self.timeout is None else self.timeout.total_seconds()
            Rendezvous("hook", whole, limit).meet(group, first.buffer())
            collectives = DistributedCollectives(tensors, group, self.timeout)
            self._buckets = Buckets(self._config, collectives, tensors, self.start_iter, models, self._loaded)
            self._loaded = None
            self._buckets.engine.stats.wishes = self._before.wishes
        return self._buckets


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
        TypeError: it was not registered as in the example. After any error, make a new DDP model from a checkpoint.

    Example::
        >>> ddp_model.register_comm_hook(DeepReduceState("topk_rice_qsgd"), deepreduce_hook)
    """
    if not isinstance(bucket, dist.GradBucket):  # type: ignore[attr-defined]
        raise TypeError(
            "deepreduce_hook was registered with a model that gives it no buckets of DistributedDataParallel, as "
            "FullyShardedDataParallel does: DeepReduce compresses no sharded gradients. Wrap the model in "
            "torch.nn.parallel.DistributedDataParallel"
        )
    if not isinstance(state, DeepReduceState):
        given = state.__name__ if isinstance(state, type) else f"{state!r:.80}"
        raise TypeError(
            f"the state of deepreduce_hook is {given}, and must be an instance of DeepReduceState. Write: {HOOK}. "
            f"{UNUSABLE}"
        )
    try:
        return state.buckets(bucket).take(bucket)
    except Exception as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (f"{error.args[0].rstrip('.')}. {UNUSABLE}", *error.args[1:])
        elif hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(UNUSABLE)
        raise
