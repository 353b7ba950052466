"""The arguments of LocalSGD that are alike in all frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvd_deepreduce.config import Config, ConfigError
from hvd_deepreduce.config.local_sgd import LocalSettings

Every = int | Callable[[int], int]
Times = Callable[[int, int], bool]


class Options(NamedTuple):
    """What an instance of LocalSGD was given.

    Attributes:
        config: with ``local``.
        every: in place of the config's number, a function of the clock that returns how many steps the period has that
            begins there. A number is in the config.
        times: whether this rank takes part in an exchange after its step number ``clock``, in place of a period. Then
            ``every`` is the largest gap between two exchanges of this rank; None: any.
        local: settings, where gradients are exchanged, and the config has none.
    """

    config: Config
    every: Every | None = None
    times: Times | None = None
    local: LocalSettings | None = None

    @property
    def in_force(self) -> LocalSettings:
        """The settings: one of both has them."""
        settings = self.local or self.config.local
        assert settings is not None
        return settings


def options(
    config: str | Path | Mapping[str, Any] | Config | None,
    settings: dict[str, Any],
    *,
    every: Every | None = None,
    times: Times | None = None,
    own_outer: bool = False,
    **local: Any,
) -> Options:
    """
    Args:
        config: as ``Config.load``.
        settings: keys of the config, in place of its own.
        every, times: as in ``Options``.
        own_outer: whether the optimizer of the anchor was given.
        local: in place of settings in the config's key of this name; None: not given.

    Raises:
        ConfigError: the config cannot be used, or has settings of the optimizer of the anchor beside ``own_outer``.
        TypeError: ``times`` is no function.
        ValueError: it is given with fragments or a delay.
    """
    given = settings.pop("local", None) or {}
    named = set(given)
    if isinstance(given, LocalSettings):
        named, given = given.model_fields_set, given.model_dump()
    useless = [f"{key}={given[key]}" for key in ("lr", "momentum", "nesterov") if key in named]
    if own_outer and useless:
        raise ConfigError(
            f"local has {', '.join(useless)}, and outer is given, which makes the optimizer of the anchor: give one of "
            "them"
        )
    local["every"] = None if callable(every) else every
    changes = {**given, **{key: value for key, value in local.items() if value is not None}}
    loaded = Config.load(Config.load(config, **settings), local=changes)
    chosen = loaded.local or LocalSettings()
    if times is not None and not callable(times):
        raise TypeError(f"times is {type(times).__name__}, but it must be a function of rank and clock")
    if times is not None and (chosen.fragments > 1 or chosen.delay):
        raise ValueError("times is given beside fragments or delay: leave these out, or leave times out")
    return Options(loaded, every, times)
