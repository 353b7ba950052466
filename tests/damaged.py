"""A rank whose containers arrive damaged, and one that cannot decode what it has received."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hvd_deepreduce.exchange.reduce_scatter import SlicedSum
from hvd_deepreduce.exchange.two_levels import TwoLevelSum
from hvd_deepreduce.pipeline import Pipeline, bundle


def last_bit_changed(encode: Callable[..., np.ndarray], *arguments: Any, **others: Any) -> np.ndarray:
    """What ``encode`` returns, with another last byte."""
    packed = encode(*arguments, **others)
    packed[-1] ^= 4
    return packed


def damage(pipeline: Pipeline) -> None:
    """From now on the pipeline's containers are damaged; ``repair`` ends it."""
    encode = pipeline.encode
    pipeline.encode = lambda *arguments, **others: last_bit_changed(encode, *arguments, **others)  # type: ignore[method-assign]


def repair(pipeline: Pipeline) -> None:
    """Ends ``damage``."""
    del pipeline.encode  # the instance's, before that of the class


@contextmanager
def decoding_fails(here: bool) -> Iterator[None]:
    """Meanwhile, this process has no memory to decode what it receives.

    Args:
        here: False: it has.
    """

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((bundle, "sum_into"), (SlicedSum, "_decoded"), (TwoLevelSum, "_whole")) if here else ():
            patch.setattr(owner, name, fail)
        yield
