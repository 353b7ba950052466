"""The sum of vectors slice by slice, with values that no codec rounds, element by element."""

from __future__ import annotations

import numpy as np

from tests.oracle import topk


def quotas_of(bounds: list[int], most: int) -> list[int]:
    """The owners take one element each in turns, those whose slice is not all taken, until ``most`` are. Who has got
    none takes one."""
    lengths = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
    quotas = [0] * len(lengths)
    while most > 0 and quotas != lengths:
        for owner, length in enumerate(lengths):
            if most > 0 and quotas[owner] < length:
                quotas[owner] += 1
                most -= 1
    return [max(quota, min(length, 1)) for quota, length in zip(quotas, lengths, strict=True)]


def reduce_scatter(
    accumulated: list[np.ndarray], kept: list[np.ndarray], bounds: list[int], most: int | None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """What all ranks decode, and the residual of each rank.

    Args:
        accumulated: of each rank, the sum of its gradient and its residual.
        kept: the indices that each rank sends.
        bounds: slice r is from ``bounds[r]`` to ``bounds[r + 1]``; its owner is rank r.
        most: the number of elements that all owners may send; None: all.
    """
    quotas = None if most is None else quotas_of(bounds, most)
    total = np.zeros_like(accumulated[0])
    residuals = [vector.copy() for vector in accumulated]
    for rank, indices in enumerate(kept):
        for index in indices:
            total[index] += accumulated[rank][index]
            residuals[rank][index] = 0
    for owner in range(len(kept)):
        inside = range(bounds[owner], bounds[owner + 1])
        sent = inside
        if quotas is not None:
            chosen, _ = topk.select(total[bounds[owner] : bounds[owner + 1]], quotas[owner])
            sent = {bounds[owner] + int(index) for index in chosen}
        for index in inside:
            if index not in sent:
                residuals[owner][index] += total[index]
                total[index] = 0
    return total, residuals
