"""The parameters of a model, and the parameter of a gradient, which Horovod does not name."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import Parameter
from hvd_deepreduce.engine.parameter import plain
from hvd_deepreduce.wire.quoting import quoted

Model = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]
LINE = (
    "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), "
    'compression=DeepReduce(model, "recommended"))'
)
ADASUM = "op=hvd.Adasum: Adasum cannot be computed on compressed gradients. Use op=hvd.Average or op=hvd.Sum"


def named_parameters(model: Model | None, argument: str, line: str, why: str = "") -> dict[str, torch.Tensor]:
    """The model's parameters by their plain names, in its order.

    Args:
        argument, line, why: for errors: which one the model is, what to write, and why the model is needed.

    Raises:
        TypeError: this is no model, and not its ``named_parameters()``.
        ValueError: two parameters have the same name.
    """
    if not isinstance(model, Iterable | torch.nn.Module) or isinstance(model, str | Path | Mapping | Config):
        kind = type(model).__name__
        given = f"an optimizer ({kind})" if isinstance(model, torch.optim.Optimizer) else kind
        raise TypeError(f"{argument} is {given}, but it must be the model{why}. Write: {line}")
    pairs = list(model.named_parameters() if isinstance(model, torch.nn.Module) else model)
    if not all(map(_is_pair, pairs)):
        raise TypeError(
            f"{argument} must be a torch.nn.Module or its named_parameters(), but its items are not pairs of a name "
            f"and a tensor. Write: {line}"
        )
    if len(dict(pairs)) != len(pairs):
        raise ValueError("two parameters have the same name: give each parameter a name of its own")
    return by_plain_name(pairs)


def by_plain_name(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Parameters by their plain names. Raises ``ValueError`` if two have the same."""
    pairs = list(named)
    found = {plain(name): one for name, one in pairs}
    if len(found) != len(pairs):
        raise ValueError(
            "two parameters have the same name but for _orig_mod. and _checkpoint_wrapped_module., which are left out: "
            "give each parameter a name of its own"
        )
    return found


def with_plain_names(state: Any, keys: Sequence[str]) -> Any:
    """A state, if it is one, with plain names in the dicts and lists below ``keys``: states of earlier versions may
    have others."""
    if not isinstance(state, Mapping):
        return state
    found = dict(state)
    for key in keys:
        given = state.get(key)
        if isinstance(given, Mapping):
            found[key] = {plain(name) if isinstance(name, str) else name: one for name, one in given.items()}
        elif isinstance(given, list):
            found[key] = [plain(name) if isinstance(name, str) else name for name in given]
    return found


def of_shard(state: Any, shard: list[int] | None) -> Any:
    """A state of this shard.

    Args:
        shard: its number among the ranks of a replica, and how many these are; None: the model is not sharded.

    Raises:
        ValueError: the state says that it is of another shard. Those of earlier versions do not say it.
    """
    told = state.get("shard") if isinstance(state, Mapping) else None
    same = told is None or (isinstance(told, Sequence) and list(told) == shard)
    if shard is not None and not same:
        raise ValueError(
            f"the state is of shard {quoted(told)} of the model, and this rank holds shard {quoted(shard)} (the number "
            "of the shard, and how many there are): every rank must load the state that it saved. For another number "
            "of shards, save checkpointed(...) by torch.distributed.checkpoint"
        )
    return state


def _is_pair(given: object) -> bool:
    if not isinstance(given, tuple) or len(given) != 2:
        return False
    return isinstance(given[0], str) and isinstance(given[1], torch.Tensor)


def described(tensors: Mapping[str, torch.Tensor]) -> list[Parameter]:
    """What the engine knows of parameters, which get their positions as numbers."""
    return [
        Parameter(name, number, tuple(one.shape), str(one.dtype)) for number, (name, one) in enumerate(tensors.items())
    ]


class Owners:
    """The parameters of a model, found by their gradients.

    Args, Raises: as ``named_parameters``, of the first argument of ``DeepReduce``.

    Attributes:
        model: the module, if one was given.
        tensors: the model's own, by name.
        parameters: in the same order.
        of: the parameter that is the tensor with this id.
        latest: the tensor whose gradient came last, where hooks have noted it.
    """

    def __init__(self, model: Model | None) -> None:
        why = ": DeepReduce needs it to find the parameter of a gradient"
        self.tensors = named_parameters(model, "the first argument of DeepReduce", LINE, why)
        self.model = model if isinstance(model, torch.nn.Module) else None
        self.parameters = described(self.tensors)
        self.latest: torch.Tensor | None = None
        self.of = dict(zip(map(id, self.tensors.values()), self.parameters, strict=True))
        # The shape of each parameter, and whether it is float64.
        self._formats = {one.name: (one.shape, one.accumulated_in.itemsize == 8) for one in self.parameters}
        self._by_shape: dict[tuple[int, ...], list[tuple[Parameter, torch.Tensor]]] = {}
        for parameter in self.parameters:
            self._by_shape.setdefault(parameter.shape, []).append((parameter, self.tensors[parameter.name]))

    def forget(self) -> None:
        self.model = self.latest = None
        self.tensors, self.of, self._by_shape = {}, {}, {}

    def find(self, gradient: torch.Tensor, in_flight: Container[str]) -> tuple[Parameter, bool]:
        """The parameter whose gradient this is, and whether it is its ``grad``, and not a copy.

        Args:
            in_flight: names of the parameters whose gradients have come in this step.

        Raises:
            ValueError: there is none, or several may be it; or it has another shape, or another width, than its
                parameter had: the memory that was laid out for it has another size.
        """
        latest = self.latest
        if latest is not None and latest.grad is gradient:
            parameter, own = self.of[id(latest)], True
        else:
            parameter, own = self._find(gradient, in_flight)
        if (gradient.shape, gradient.dtype == torch.float64) != self._formats[parameter.name]:
            raise ValueError(
                f"the gradient of {parameter.name} is {gradient.dtype} {list(gradient.shape)}, but the parameter was "
                f"{parameter.dtype} {list(parameter.shape)} when DeepReduce was made: convert or resize the model "
                "first, then make the optimizer and DeepReduce"
            )
        return parameter, own

    def _find(self, gradient: torch.Tensor, in_flight: Container[str]) -> tuple[Parameter, bool]:
        candidates = self._by_shape.get(tuple(gradient.shape), [])
        for parameter, tensor in candidates:
            if tensor.grad is gradient:
                return parameter, True
        # sparse_as_dense passes a dense copy of a sparse gradient, in its parameter's own hook.
        sparse = [
            (parameter, tensor, grad)
            for parameter, tensor in candidates
            if (grad := tensor.grad) is not None and grad.is_sparse and parameter.name not in in_flight
        ]
        came = [one for one in sparse if one[1] is self.latest] or sparse
        if len(came) == 1:
            self.latest = None
            return came[0][0], False
        # Without a hook (a step before its last backward pass): compare the contents.
        equal = [parameter for parameter, _, grad in sparse if torch.equal(grad.to_dense(), gradient)]
        if len(equal) == 1:
            return equal[0], False
        raise self.unknown(gradient, equal)

    def unknown(self, gradient: torch.Tensor, equal: Iterable[Parameter] = ()) -> ValueError:
        """The error of a gradient, or of an optimizer's parameter, that is none of the model's; or of a gradient to
        which the sparse gradients of several parameters are ``equal``."""
        given = f"{gradient.dtype} {list(gradient.shape)}"
        names = ", ".join(parameter.name for parameter in equal)
        if names:
            return ValueError(
                f"a gradient {given} may belong to any of {names}, because their sparse gradients are equal: call "
                "backward() backward_passes_per_step times before step()"
            )
        if any(tensor is gradient for tensor in self.tensors.values()):
            return ValueError(f"Horovod passed a parameter in place of its gradient, as it does with {ADASUM}")
        if self.model is not None:
            now = dict(self.model.named_parameters())
            shapes = {name: tuple(tensor.shape) for name, tensor in now.items()}
            known = {parameter.name: parameter.shape for parameter in self.parameters}
            changed = [name for name in {**now, **known} if shapes.get(name) != known.get(name)]
            changed += [name for name in now if name not in changed and now[name] is not self.tensors[name]]
            if changed:
                return ValueError(
                    f"the model was changed after DeepReduce was created: {', '.join(changed[:5])}. Create the "
                    "optimizer and DeepReduce again after the change"
                )
        return ValueError(
            f"a gradient {given} does not belong to any parameter of the model that DeepReduce was given: give "
            "DeepReduce the model that the optimizer trains"
        )


def no_instance() -> TypeError:
    """For ``compression=DeepReduce``."""
    return TypeError(f"compression= was given the class DeepReduce; it must be an instance. Write: {LINE}")
