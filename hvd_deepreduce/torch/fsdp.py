"""Compressed gradients between the replicas of a sharded model: HSDP with PyTorch's ``fully_shard`` (FSDP2).

FSDP reduces and scatters gradients among the ranks of a shard group. Each rank then holds the sum for its shard, and
exchanges it with the ranks of the other replicas that hold the same shard. Error feedback lives on the shard. The
gradients of an FSDP module's own parameters are a bucket (``bucket_driver.py``), which is taken when the last of them
has come, while the backward pass goes on. When it is over, the means are in the parameters' ``grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.compiling import Compilation
from hvd_deepreduce.engine.compression import GradientCompression
from hvd_deepreduce.engine.parameter import plain
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.torch import sharding
from hvd_deepreduce.torch.bucket_driver import FSDP, Buckets, GradBucket, Made, Unused, advised, for_buckets
from hvd_deepreduce.torch.discovery import OF_REPLICAS, reducing, refuse_reduced, trains, weakly
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.owners import described, of_shard
from hvd_deepreduce.torch.rendezvous import Rendezvous
from hvd_deepreduce.torch.tensors import TorchTensors, hashes, keep_for_stream, of_each

UNUSABLE = (
    "No gradient was written, on any rank of this replica. Load a checkpoint on all ranks, close() what "
    "compress_replicas has returned, and call it again"
)


EMPTY = (
    "this rank has no element of a parameter that needs gradients, so that it has nothing to exchange: shard the model "
    "over fewer ranks"
)


class Replicas(GradientCompression):
    """What :func:`compress_replicas` returns, with the same arguments: settings, statistics, and this rank's state.

    After ``close`` each replica trains by itself.
    """

    def __init__(
        self, model: Any, group: dist.ProcessGroup, config: Config, timeout: timedelta | None, find_unused: bool
    ) -> None:
        self._find_unused, self._whole = find_unused, config.scope == "model"
        self._tensors = sharding.trained(model)
        usable, trained = self._usable(config), {name: one for name, one in self._tensors.items() if sharding.size(one)}
        refuse_reduced(self._tensors.values(), "it is called again")
        sharding.check_replicas(model, self._tensors, group)
        self._units = sharding.units(model, trained, self._whole)[::-1]  # in the order of the backward pass
        self._known = set(map(id, self._tensors.values()))
        self._sharded = {plain(name) for name, one in model.named_parameters() if isinstance(one, DTensor)}
        self._unit_of = {id(one): number for number, unit in enumerate(self._units) for one in unit}
        limit, mates = None if timeout is None else timeout.total_seconds(), sharding.ranks(self._tensors)
        met = Rendezvous("compress_replicas", mates, limit).meet(mates)
        tensors, local = TorchTensors(), sharding.local(trained)
        self._shards = DistributedCollectives(tensors, None, timeout, mates, met=met)
        self._shards.check(None if trained else ValueError(EMPTY))
        met = Rendezvous("compress_replicas", group, limit).meet(group)
        collectives = DistributedCollectives(tensors, group, timeout, several=True, met=met)
        used = collectives.size() > 1 or usable.has_velocity
        devices = [tensors.device(one) for one in local.values() if used]
        self._compilation = Compilation(usable, tensors, devices, dist.get_rank() == 0)
        # Ranks that hold a parameter whole must know it by the same number, whatever else they hold.
        parameters = [one for one in described(sharding.local(self._tensors)) if one.name in trained]
        self._used = set[int]()  # ids of the parameters whose gradients have come since the last step
        made = Made(
            trained, parameters, find_unused, self._used, lambda: hashes(sharding.local(trained)), OF_REPLICAS
        )  # fmt: skip
        self._buckets = Buckets(usable, collectives, tensors, 0, lambda: made, None)
        self._engine, self._fsdp = self._buckets.engine, model._get_fsdp_state()
        self._failure: Exception | None = None
        self._checked = self._waiting = False  # whether the parameters were; whether gradients wait for the last pass
        self._model = weakref.ref(model)
        self._come: set[int] = set()  # of these, those that have come in the step's last backward pass
        self._ending = False  # whether ``_end`` is queued
        self._begun: list[tuple[GradBucket, torch.futures.Future[torch.Tensor]]] = []
        # The model keeps this object: without it, the replicas would part in silence.
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._check_parameters, prepend=True),
            sharding.when_backward_begins(model, self._backward_begins),
            register_optimizer_step_pre_hook(weakly(self._check_optimizer)),
        ]
        came = weakly(self._gradient_came)
        hooks = {id(one): one.register_post_accumulate_grad_hook(came) for one in trained.values()}  # type: ignore
        self._handles += hooks.values()
        self._hook_of = {known: hook.id for known, hook in hooks.items()}
        reducing[self] = self._known

    def state_dict(self) -> dict[str, Any]:
        self._check_early()
        return {**self._buckets.state_dict(), "shard": self._shards.place()}

    def _settle(self) -> None:
        self._buckets.settle()

    def _load(self, state: State, reshard: Reshard) -> None:
        mine = partial(of_shard, shard=self._shards.place())
        self._buckets.load(of_each(mine, state, reshard), reshard)

    @property
    def config(self) -> Config:
        config = super().config
        return Config.load(config, scope="model") if self._whole else config

    def _change(self, new: Config) -> None:
        if (new.scope == "model") is not self._whole:
            raise ValueError(f"scope is {new.scope!r}, and a change to or from 'model' needs a new compress_replicas")
        self._buckets.set_config(self._usable(new))

    def _usable(self, config: Config) -> Config:
        """With scope ``model``, all parameters are in one bucket, or two under tensor parallelism."""
        sharding.refuse_measured(config, self._tensors)
        return for_buckets(Config.load(config, scope="bucket") if self._whole else config, 0, FSDP)

    def close(self) -> None:
        reducing.pop(self, None)
        while self._handles:
            self._handles.pop().remove()
        self._buckets.close()
        self._shards.close()
        self._units = []

    # A step

    def _check_parameters(self, model: torch.nn.Module, _: object) -> None:
        """Raises ``RuntimeError`` if gradients of a parameter would not come here; or the error of an earlier step."""
        if not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1:  # no backward pass is under way
            self._ending = False  # the last one has failed at its beginning
            if self._come and self._failure is None:
                self._failure = RuntimeError(
                    "the last backward pass has failed on this rank, and FSDP has not ended its part of it: start the "
                    "processes again, from a checkpoint"
                )
        if self._failure is not None:
            raise self._failure
        self._check_trained(model)

    def _check_trained(self, model: torch.nn.Module) -> None:
        self._checked = True
        strange = {id(one) for one in model.parameters() if one.requires_grad} - self._known
        if strange and any(  # FSDP may have made whole ones of its shards
            sharding.size(one) if isinstance(one, DTensor) else plain(name) not in self._sharded
            for name, one in model.named_parameters()
            if id(one) in strange
        ):
            raise RuntimeError(
                "parameters of the model were replaced or added, or began to need gradients, after compress_replicas, "
                "so that the replicas would not exchange their gradients: load states with assign=True, convert, add "
                "and unfreeze before compress_replicas, or close() its result and call it again, on all ranks"
            )

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raises ``RuntimeError`` if an optimizer steps before the means are there."""
        if self._waiting and trains(optimizer, self._known):
            if any(one.grad is not None for one in chain.from_iterable(self._units)):
                raise RuntimeError(
                    f"{type(optimizer).__name__} steps after a backward pass with set_is_last_backward(False), whose "
                    "gradients the replicas have not exchanged: call set_is_last_backward(True) before the last "
                    "backward pass of a step, also where an epoch ends early, or zero_grad() to drop them"
                )
            self._waiting = False
        if self._come and trains(optimizer, self._known):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps within the backward pass, before the replicas have exchanged its "
                "gradients: call its step() after backward()"
            )

    def _backward_begins(self, _: torch.Tensor) -> None:
        """``_end`` is to run after it, and not after that of a checkpointed part, which is one of its own."""
        if self._fsdp._state_ctx.is_last_backward and not self._ending:  # PyTorch has no public call for it
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
            self._ending = True

    def _gradient_came(self, tensor: torch.Tensor) -> None:
        """FSDP has added a gradient to a shard's."""
        self._used.add(id(tensor))
        if not self._fsdp._state_ctx.is_last_backward:
            self._waiting = True
            return
        self._backward_begins(tensor)  # of a part that was called alone
        self._come.add(id(tensor))
        number = self._unit_of[id(tensor)]
        if number < len(self._begun):
            self._failure = self._failure or RuntimeError(
                "a module's gradients have come again in one backward pass, after the replicas had begun to exchange "
                "them: it was used twice, in parts that are checkpointed with use_reentrant=True. Checkpoint them with "
                "use_reentrant=False, or give compress_replicas scope='model'"
            )
        while self._failure is None and len(self._begun) < len(self._units) - 1:  # the last one is begun by ``_end``
            unit = self._units[len(self._begun)]
            if any(one.requires_grad and id(one) not in self._come for one in unit):
                return
            if number == len(self._begun) and self._hook_of[id(tensor)] != list(_hooks(tensor))[-1]:
                return  # hooks of the user's come after this one, and may change the gradient: the next one begins it
            try:
                self._begin(unit)
            except Exception as error:  # the backward pass goes on, since the other ranks of this replica are in it
                self._failure = error

    def _begin(self, unit: list[DTensor], failure: Exception | None = None) -> None:
        if failure is None or isinstance(failure, Unused):
            self._compilation.wait()
            vector = torch.cat([sharding.gradient(one).flatten() for one in unit])
        else:  # there may be no memory for them
            vector = torch.zeros(1, dtype=unit[0].dtype, device=unit[0].to_local().device)
            vector = vector.expand(sum(map(sharding.size, unit)))
        number = len(self._begun)
        bucket = GradBucket(number, unit, vector, number + 1 == len(self._units))
        self._begun.append((bucket, self._buckets.take(bucket, failure)))

    def _end(self) -> None:
        """The backward pass is over, and FSDP has ended its own part: waits for the means, and writes them once all
        ranks of this replica have theirs."""
        self._ending = False
        if not self._come:
            return  # torch.autograd.grad asked for others
        try:
            if not self._checked and (model := self._model()) is not None:  # the model itself was not called
                self._check_trained(model)
        except RuntimeError as error:
            self._failure = error
        try:
            self._wait()
        except Exception as error:
            self._failure = self._failure or error
        begun, self._begun, self._come = self._begun, [], set()
        self._checked = self._waiting = False
        try:
            self._shards.check(self._failure)
            for bucket, _ in begun:
                self._write(bucket)
        except Exception as error:
            self._failure = advised(self._failure or error, UNUSABLE)
            self._engine.note_failure(error)
            self._buckets.take_leave()
            raise self._failure from None

    def _write(self, bucket: GradBucket) -> None:
        """Writes its means to the parameters' ``grad``."""
        keep_for_stream(bucket.vector)  # it was made on a stream of FSDP's
        tensors = self._units[bucket.number]
        for tensor, mean in zip(tensors, torch.split(bucket.vector, [*map(sharding.size, tensors)]), strict=True):
            if tensor.requires_grad or tensor.grad is not None:  # it may be frozen since a pass before
                sharding.write(tensor, mean)

    def _wait(self) -> None:
        """Begins what was not begun, and waits for all buckets."""
        while len(self._begun) < len(self._units):
            unit = self._units[len(self._begun)]
            late = (one for one in unit if one.requires_grad and id(one) not in self._come)
            missing = [self._buckets.parameter_of(one).name for one in late]
            failure = self._failure
            if failure is None and missing and not self._find_unused:
                failure = Unused(
                    f"no gradient has come of {', '.join(missing[:5])}, since this backward pass did not use them: "
                    "freeze them (requires_grad_(False)), or give compress_replicas "
                    "find_unused_parameters=True, with which they get gradients of zero"
                )
            self._begin(unit, failure)
        for _, future in self._begun:
            future.wait()  # on a GPU, the current stream does


def _hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """Those that are called when its gradient has come, in their order. PyTorch has no public call for them."""
    return tensor._post_accumulate_grad_hooks or {}


def compress_replicas(
    model: torch.nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    timeout: timedelta | None = None,
    find_unused_parameters: bool = False,
    **settings: Any,
) -> Replicas:
    """Averages the gradients of a model that ``fully_shard`` has sharded over its replicas, compressed.

    Call it once, after ``fully_shard``, on all ranks at the same time, with equal parameters on all replicas. The means
    are in the parameters' ``grad`` when ``backward()`` returns. With ``model.set_is_last_backward(False)``, or
    ``set_requires_gradient_sync(False)``, a backward pass only accumulates.

    Args:
        model: to which ``fully_shard`` was applied, on the mesh of one replica's ranks.
        mesh: of one dimension, or a process group: the ranks that hold the same shard.
        config: as for ``DeepReduceState``. In scope ``bucket``, a bucket has the gradients of an FSDP module's own
            parameters, and is exchanged during the backward pass; in scope ``model``, all at its end.
        timeout: of each exchange (None: the process group's), and of waiting for the other ranks at the beginning
            (None: ``HVD_DEEPREDUCE_HANDSHAKE_SECONDS``, 300).
        find_unused_parameters: whether a backward pass may use a part of the parameters, another one on each replica.
            The others get gradients of zero.
        **settings: keys of the config, in place of its own.

    Returns:
        What has ``stats()``, ``state_dict()``, ``set_config()`` and ``close()``. The model keeps it, too.

    Raises:
        TypeError: the model is not sharded, or by native HSDP (a mesh of two dimensions), which reduces over replicas.
        ValueError: the mesh is not that of replicas, or the model has nothing to train, or was given before.
        ConfigError: the config cannot be used.
        MismatchError: in ``backward()``: the ranks differ in release, config, model, parameters or step; on all ranks.
        ContainerError: in ``backward()``: a container cannot be decoded; on all ranks.
        RuntimeError: in ``backward()``: a rank has failed, on all others too; or a parameter was not used.

    Example::
        >>> mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
        >>> for block in [*model.blocks, model]:
        ...     fully_shard(block, mesh=mesh["shard"])
        >>> compression = compress_replicas(model, mesh["replicate"], "recommended")
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"the first argument of compress_replicas is {type(model).__name__}, to which fully_shard was not applied. "
            f"Write: {sharding.LINES['compress_replicas']}"
        )
    group = sharding.replicas_of(mesh)
    return Replicas(model, group, Config.load(config, **settings), timeout, find_unused_parameters)
