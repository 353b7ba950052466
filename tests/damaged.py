"""A rank whose containers arrive damaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_deepreduce.pipeline import Pipeline


def last_bit_changed(encode: Callable[..., np.ndarray], *arguments: Any) -> np.ndarray:
    """What ``encode`` returns, with another last byte."""
    packed = encode(*arguments)
    packed[-1] ^= 4
    return packed


def damage(pipeline: Pipeline) -> None:
    """From now on the pipeline's containers are damaged; ``repair`` ends it."""
    encode = pipeline.encode
    pipeline.encode = lambda *arguments: last_bit_changed(encode, *arguments)  # type: ignore[method-assign]


def repair(pipeline: Pipeline) -> None:
    """Ends ``damage``."""
    del pipeline.encode  # the instance's, before that of the class
