"""Two levels, slice by slice: the sum of each node, and the sum over the nodes of what each sends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def two_levels(
    gradients: list[np.ndarray],
    residuals: list[np.ndarray],
    nodes: list[list[int]],
    compress: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The sum that all ranks apply, and the residual of each rank afterwards.

    Args:
        gradients, residuals: of each rank, of the whole vector.
        nodes: the ranks of each node. The n-th one of each has slice n.
        compress: what others decode of what a slice's rank would send.
    """
    numel, slices = gradients[0].size, len(nodes[0])
    total = np.zeros_like(gradients[0])
    after = [np.zeros_like(vector) for vector in residuals]
    for number in range(slices):
        part = slice(numel * number // slices, numel * (number + 1) // slices)
        for node in nodes:
            owner = node[number]
            waiting = residuals[owner][part].copy()
            for rank in node:
                if rank != owner:
                    waiting += residuals[rank][part]
            came = np.zeros_like(waiting)
            for rank in node:
                came += gradients[rank][part]
            if not np.isfinite(came).all():
                total[part] += came
                after[owner][part] = waiting
                continue
            accumulated = waiting + came
            sent = compress(accumulated)
            after[owner][part] = accumulated - sent
            total[part] += sent
    return total, after
