"""The parameter of a gradient, which Horovod does not name."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import torch

from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import Parameter

LINE = (
    "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), "
    'compression=DeepReduce(model, "topk_rice_qsgd"))'
)
ADASUM = "op=hvd.Adasum: Adasum cannot be computed on compressed gradients. Use op=hvd.Average or op=hvd.Sum"


class Owners:
    """The parameters of a model, found by their gradients.

    Args:
        model: as for ``DeepReduce``.

    Raises:
        TypeError: no model was given.
        ValueError: two parameters have the same name.

    Attributes:
        model: the module, if one was given.
        tensors: the model's own, by name.
        parameters: in the same order.
        formats: the shape of each parameter, and whether it is float64, by name.
        latest: the tensor whose gradient came last, where hooks have noted it.
    """

    def __init__(self, model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]] | None) -> None:
        if not isinstance(model, Iterable | torch.nn.Module) or isinstance(model, str | Path | Mapping | Config):
            raise TypeError(
                f"the first argument of DeepReduce is {_a(model)}, but it must be the model: DeepReduce needs it to "
                f"find the parameter of a gradient. Write: {LINE}"
            )
        self.model = model if isinstance(model, torch.nn.Module) else None
        pairs = list(model.named_parameters() if isinstance(model, torch.nn.Module) else model)
        if not all(map(_is_pair, pairs)):
            raise TypeError(
                "the first argument of DeepReduce must be a torch.nn.Module or its named_parameters(), but its items "
                f"are not pairs of a name and a tensor. Write: {LINE}"
            )
        self.tensors = dict(pairs)
        if len(self.tensors) != len(pairs):
            raise ValueError("two parameters have the same name: give each parameter a name of its own")
        self.parameters = [
            Parameter(name, number, tuple(tensor.shape), str(tensor.dtype))
            for number, (name, tensor) in enumerate(pairs)
        ]
        self.latest: torch.Tensor | None = None
        self._of = {id(self.tensors[parameter.name]): parameter for parameter in self.parameters}
        self.formats = {one.name: (one.shape, one.accumulated_in.itemsize == 8) for one in self.parameters}
        self._by_shape: dict[tuple[int, ...], list[tuple[Parameter, torch.Tensor]]] = {}
        for parameter in self.parameters:
            self._by_shape.setdefault(parameter.shape, []).append((parameter, self.tensors[parameter.name]))

    def of(self, tensor: torch.Tensor) -> Parameter | None:
        """The parameter that is this tensor; None: it is none of the model's."""
        return self._of.get(id(tensor))

    def named(self, tensor: torch.Tensor) -> Parameter:
        """As ``of``, where it is one of the model's."""
        return self._of[id(tensor)]

    def forget(self) -> None:
        """Lets go of the model."""
        self.model = self.latest = None
        self.tensors, self._of, self._by_shape = {}, {}, {}

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
            parameter, own = self._of[id(latest)], True
        else:
            parameter, own = self._find(gradient, in_flight)
        if (gradient.shape, gradient.dtype == torch.float64) != self.formats[parameter.name]:
            raise ValueError(
                f"the gradient of {parameter.name} is {gradient.dtype} {list(gradient.shape)}, but the parameter was "
                f"{parameter.dtype} {list(parameter.shape)} when DeepReduce was made: convert or resize the model "
                "first, then make the optimizer and DeepReduce"
            )
        return parameter, own

    def _find(self, gradient: torch.Tensor, in_flight: Container[str]) -> tuple[Parameter, bool]:
        latest = self.latest
        candidates = self._by_shape.get(tuple(gradient.shape), [])
        for parameter, tensor in candidates:
            if tensor.grad is gradient:
                return parameter, True
        # sparse_as_dense passes a dense copy of a sparse gradient, in its parameter's own hook.
        sparse = [
            (parameter, tensor)
            for parameter, tensor in candidates
            if tensor.grad is not None and tensor.grad.is_sparse and parameter.name not in in_flight
        ]
        came = [parameter for parameter, tensor in sparse if tensor is latest]
        if came or len(sparse) == 1:
            self.latest = None
            return came[0] if came else sparse[0][0], False
        # Without a hook (a step before its last backward pass): compare the contents.
        equal = [p for p, t in sparse if t.grad is not None and torch.equal(t.grad.to_dense(), gradient)]
        if len(equal) == 1:
            return equal[0], False
        raise self.unknown(gradient, equal)

    def unknown(self, gradient: torch.Tensor, equal: Iterable[Parameter] = ()) -> ValueError:
        """The error of a gradient, or of an optimizer's parameter, that is none of the model's.

        Args:
            equal: parameters whose sparse gradients are equal to it.
        """
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


def _a(given: object) -> str:
    """What an argument is, for an error."""
    kind = type(given).__name__
    return f"an optimizer ({kind})" if isinstance(given, torch.optim.Optimizer) else kind


def _is_pair(given: object) -> bool:
    """Whether it is a name and a tensor."""
    if not isinstance(given, tuple) or len(given) != 2:
        return False
    return isinstance(given[0], str) and isinstance(given[1], torch.Tensor)
