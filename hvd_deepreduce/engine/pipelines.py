"""The encoder and decoder of each parameter under one config, which may have settings of its own for some of them."""

from __future__ import annotations

from collections.abc import Iterator

from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline


class Pipelines:
    """One pipeline for the config, and one for each of its overrides.

    Args:
        config: the job's.
        threads: as for ``Pipeline``.

    Attributes:
        default: of parameters that no override matches.
    """

    def __init__(self, config: Config, threads: int) -> None:
        self.default = Pipeline(config, threads)
        self._overrides = {pattern: Pipeline(variant, threads) for pattern, variant in config.variants.items()}
        self._config = config
        self._found: dict[str, Pipeline] = {}

    def __iter__(self) -> Iterator[Pipeline]:
        """All of them."""
        return iter([self.default, *self._overrides.values()])

    def of(self, name: str) -> Pipeline:
        """The pipeline of the parameter with this name."""
        if not self._overrides:
            return self.default
        if name not in self._found:
            pattern = self._config.override_of(name)
            self._found[name] = self.default if pattern is None else self._overrides[pattern]
        return self._found[name]
