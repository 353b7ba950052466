"""Checks Horovod's optimizers before their steps, through PyTorch's own hook for all optimizers.

With one rank Horovod calls no compression, and with many it shows only the gradients that it reduces. So mistakes that
it hides are found here, in a process that is debugged alone too.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_deepreduce.torch.horovod import DeepReduce
from hvd_deepreduce.torch.owners import no_instance


def check(optimizer: Any, args: Any, kwargs: Any) -> None:
    """
    Raises:
        TypeError: the class DeepReduce was given to Horovod, not an instance.
        ValueError, RuntimeError: as ``DeepReduce.check_optimizer``.
    """
    compression = vars(optimizer).get("_compression")  # only Horovod's optimizers have one
    if isinstance(compression, DeepReduce):
        compression.check_optimizer(optimizer)
    elif isinstance(compression, type) and issubclass(compression, DeepReduce):
        raise no_instance()


register_optimizer_step_pre_hook(check)
