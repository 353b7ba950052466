"""Compiles the CUDA kernels that a config needs while the job is still preparing its first step.

A kernel is compiled when it is first launched, which takes seconds where ``ops/cubins.py`` has not kept it. So a
gradient of random numbers is encoded on one thread, and on another one the containers that the host has made of it are
decoded. These launch nearly all that a step launches. The two have different kernels for the most part, so that they
take about as long as the slowest file of kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, Floats, RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.pipelines import Pipelines
from hvd_deepreduce.engine.tensors import Device, Tensors
from hvd_deepreduce.ops import arrays, cubins
from hvd_deepreduce.ops.device import array_module
from hvd_deepreduce.pipeline import Pipeline, bundle

NUMEL = 1 << 18
"""Elements of the gradient, of which some are left by a density of 0.1%."""
RANKS = 2
PATIENCE = 1.0
"""Seconds that ``Compilation.wait`` waits before it says so."""
_log = logging.getLogger("hvd_deepreduce")
Within = Callable[[], AbstractContextManager[Any]]


class Compilation:
    """Compiles on threads of its own, beside what the caller does.

    Args:
        config: of the job.
        tensors: of the framework.
        devices: those of the gradients; on the host there is nothing to compile.
        speaks: whether this rank says that it waits.
    """

    def __init__(self, config: Config, tensors: Tensors[Any], devices: Collection[Device], speaks: bool) -> None:
        self._speaks, self._work = speaks, list[Future[None]]()
        streams = [tensors.side_stream(device) for device in set(devices) - {None}]
        if streams:
            threads = ThreadPoolExecutor(2, "deepreduce compile")
            self._work += [threads.submit(_attempt, part, config, streams) for part in (_encode_on, _decode_on)]
            threads.shutdown(wait=False)

    def wait(self) -> None:
        """Waits until all is compiled. What has failed is tried again by the step that needs it, which raises it."""
        if self._work:
            if wait(self._work, PATIENCE).not_done and self._speaks:
                _log.warning(
                    "DeepReduce compiles its CUDA kernels, which takes some seconds, and keeps them in %s. With this "
                    "config, later jobs of this user on this kind of GPU will not wait",
                    cubins.cache_folder(),
                )
            wait(self._work)
            self._work.clear()


def _attempt(part: Callable[[Pipeline, Within], None], config: Config, streams: list[Within]) -> None:
    try:
        for pipeline in Pipelines(config, 1):
            for within in streams:
                part(pipeline, within)
    except Exception:
        _log.debug("kernels could not be compiled before the first step", exc_info=True)


def _gradient() -> Floats:
    return np.random.default_rng(0).standard_normal(NUMEL, np.float32)


def _slice(pipeline: Pipeline, rank: int) -> bundle.Slice:
    return bundle.Slice(pipeline, (0, NUMEL), RngKey(pipeline.config.seed, 0, 0, rank))


def _encode(pipeline: Pipeline, gradient: Floats, rank: int) -> U8:
    zeros = partial(arrays.zeros, NUMEL, np.float32, gradient)
    residual = zeros() if pipeline.config.error_feedback else None
    velocity = zeros() if pipeline.config.has_velocity else None
    return bundle.encode(gradient, residual, velocity, [_slice(pipeline, rank)], RANKS, False)


def _encode_on(pipeline: Pipeline, within: Within) -> None:
    with within():
        gradient = array_module(None).asarray(_gradient())
        if pipeline.config.exchange.implementation is None:
            _encode(pipeline, gradient, 0)
        else:
            pipeline.select(gradient, arrays.zeros(NUMEL, np.float32, gradient), RngKey(0, 0, 0))


def _decode_on(pipeline: Pipeline, within: Within) -> None:
    if pipeline.config.exchange.implementation is None:
        gathered = np.concatenate([_encode(pipeline, _gradient(), rank) for rank in range(RANKS)])
        with within():
            total = array_module(None).asarray(_gradient())
            bundle.sum_into(total, gathered, RANKS, [_slice(pipeline, 0)], 1.0)
