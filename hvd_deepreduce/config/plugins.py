"""Codecs and exchanges of other packages, found by entry point.

A package names, in the entry point group ``hvd_deepreduce.codecs``, a module whose import registers its codecs::

    [options.entry_points]
    hvd_deepreduce.codecs =
        my_codec = my_package.my_codec

The ranks compare the versions of these packages before training, as they compare this one's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from hvd_deepreduce.codecs.interfaces import Codec

GROUP = "hvd_deepreduce.codecs"


@lru_cache(maxsize=1)
def _found() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


@lru_cache(maxsize=1)
def load() -> None:
    """Imports the modules of all entry points, once. A module that fails gives a ``RuntimeWarning``."""
    for point in _found():
        try:
            point.load()
        except Exception as error:  # another package's code: any error is possible, and none of them is this job's
            package = point.dist.name if point.dist else point.value
            warnings.warn(
                f"the codecs of the package {package} are not available: importing {point.value} raised "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


def versions(codecs: Iterable[Codec]) -> dict[str, str]:
    """Name and version of each other package that defines one of these codecs; ``"unknown"`` for a module that was
    registered without an entry point."""
    packages = {(point.module.split(".")[0]): point.dist for point in _found()}
    found = {}
    for codec in codecs:
        package = type(codec).__module__.split(".")[0]
        if package != __name__.split(".")[0]:
            distribution = packages.get(package)
            found[distribution.name if distribution else package] = distribution.version if distribution else "unknown"
    return found
