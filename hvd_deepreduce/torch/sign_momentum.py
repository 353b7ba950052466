"""The optimizer of the memory ``scaled_momentum``: momentum and scaling are on the ranks, before the exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_deepreduce.torch.tensors import own, real


class SignMomentum(torch.optim.Optimizer):
    """Steps by the sign of the reduced gradient: ``p = (1 - lr * weight_decay) * p - lr * sign(p.grad)``.

    For jobs whose compression has the memory ``scaled_momentum``, as the preset ``sign_momentum``: the gradient is then
    the mean over the ranks of the signs that each has sent, and an element that no rank has sent, or on which as many
    ranks voted for one direction as for the other, does not move. So ``lr`` is how far an element moves, as under
    AdamW; and only the weight decay, as AdamW's, moves all elements. The optimizer has no state. An element whose
    gradient is not finite becomes NaN, as under AdamW.

    Args:
        params: as of all optimizers: parameters, or groups of them with settings of their own.
        lr: learning rate, 0 or more.
        weight_decay: 0 or more.

    Raises:
        ValueError: a setting is negative.

    Example::
        >>> optimizer = SignMomentum(model.parameters(), lr=1e-3)
        >>> compression = DeepReduce(model, "sign_momentum")
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
    """

    takes_votes = True  # for engine/adaptive.py; the classes that Horovod derives from this one have it too

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        for name, given in (("lr", lr), ("weight_decay", weight_decay)):
            if not given >= 0:
                raise ValueError(f"{name} is {given}; it must be 0 or more")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: computes the loss anew, and its gradients; None: they are there.

        Returns:
            What the closure returned.

        Raises:
            ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            # Of sharded parameters, this rank's shards: what is computed is of single elements.
            params, gradients = [own(one) for one in trained], [own(one.grad) for one in trained]
            if any(one.layout != torch.strided for one in gradients):
                raise ValueError(
                    "SignMomentum was given a sparse gradient, and the memory 'scaled_momentum' has dense ones only: "
                    "make the layer without sparse=True"
                )
            params, gradients = list(map(real, params)), list(map(real, gradients))
            if params:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                signs = torch._foreach_sign(gradients)
                torch._foreach_add_(signs, torch._foreach_sub(gradients, gradients))  # NaN has the sign 0, infinity 1
                torch._foreach_add_(params, signs, alpha=-group["lr"])
        return loss
