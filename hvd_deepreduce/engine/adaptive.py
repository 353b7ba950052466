"""Warns of an optimizer that loses accuracy under the job's config, such as AdamW with top-k of gradients.

What a step does not send waits in the residual and comes later as a rare, large element. SGD does not mind. Optimizers
that scale their steps by the size of past gradients do: their second moment grows by such elements, and steps become
too short (docs/which_preset.md has measurements). Updates of the parameters can be compressed instead, by LocalSGD.
And refuses one whose momentum the config's memory has already.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from hvd_deepreduce.config import Config

if TYPE_CHECKING:
    from hvd_deepreduce.engine.engine import Engine

LOGGER = "hvd_deepreduce.optimizer"
_log = logging.getLogger(LOGGER)
_NAMES = re.compile("ada(m|factor|grad|delta|belief)|rmsprop|lamb(?!da)|muon|shampoo", re.IGNORECASE)
"""Lion, Adan, SOAP, Prodigy and others are known by their ``betas``."""
OR_VOTES = "or take the preset 'sign_momentum' and the optimizer hvd_deepreduce.torch.SignMomentum (docs/using.md)"
"""Another way, which exchanges in each step."""


def is_adaptive(optimizer: Any) -> bool:
    """Whether an optimizer scales its steps by past gradients, by its class's name or by its settings."""
    groups = getattr(optimizer, "param_groups", ())
    if hasattr(optimizer, "beta_2") or any("betas" in group for group in groups):
        return True
    return any(_NAMES.search(one.__name__) for one in type(optimizer).__mro__)


def look_at(engine: Engine, optimizer: Any, instead: str) -> None:
    """Notes the optimizer of the engine's gradients, and warns now or once the config makes it necessary.

    Args:
        instead: the lines to write, as a clause.
    """
    if engine.adaptive is None and is_adaptive(optimizer):
        engine.adaptive = type(optimizer).__name__, instead
        warn(engine)


def warn(engine: Engine) -> None:
    """Warns once, on rank 0, if an adaptive optimizer gets gradients of which each step sends a part."""
    config, choice = engine.config, engine.choice
    if not engine.adaptive or not config.sends_parts or (choice is not None and not choice.compresses):
        return
    name, instead = engine.adaptive
    engine.adaptive = ()
    if engine.collectives.speaks() and engine.collectives.size() > 1:
        _log.warning(
            "the optimizer is %s, and this config sends a part of each gradient in a step. %s scales its steps "
            "by past gradients, so this costs accuracy: a small GPT lost 0.3 nats, and a recommender 28 points of hit "
            "rate (docs/which_preset.md). Instead, %s. To hide this warning: "
            'logging.getLogger("%s").setLevel("ERROR")',
            name, name, instead, LOGGER,
        )  # fmt: skip


def check_momentum(config: Config, optimizer: Any) -> None:
    """Before an optimizer's step.

    Raises:
        ValueError: the config has a memory with momentum, and the optimizer has momentum too; or it steps by the signs
            that ranks have sent (``SignMomentum``), and the memory is not ``scaled_momentum``.
    """
    memory = config.momentum
    if getattr(optimizer, "takes_votes", False) and not config.memory.leaves_whole:
        raise ValueError(
            f"the optimizer is {type(optimizer).__name__}, which steps by the sign of what the ranks have sent, and "
            f"memory is {config.memory.name!r}: use the preset 'sign_momentum', or another optimizer"
        )
    if memory is None:
        return
    what, instead = "momentum", (
        "torch.optim.SGD without momentum, and set the momentum in the config, as memory={'name': 'dgc', 'momentum': "
        "0.9}"
    )  # fmt: skip
    if memory.leaves_whole:
        what = "momentum and Adam's scaling"
        instead = "hvd_deepreduce.torch.SignMomentum, whose step is the sign of what the ranks have sent"
    for group in optimizer.param_groups:
        for key in ("momentum", "betas"):
            if group.get(key):
                raise ValueError(
                    f"memory is {memory.name!r}, which applies {what} on each rank, and the optimizer has {key}="
                    f"{group[key]}, so that it would be applied twice: use {instead}"
                )
