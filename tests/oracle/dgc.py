"""Deep gradient compression, algorithm 4 with momentum correction and masking, one element at a time."""

import numpy as np


def step(velocity, residual, gradient, momentum, k, nesterov=False, most=None):
    """One step of one rank; changes velocity and residual, lists of floats.

    Args:
        k: how many elements are sent.
        most: the largest norm of the gradient; None: any.

    Returns:
        The sent elements, as a dict from index to value.
    """
    norm = sum(g * g for g in gradient) ** 0.5
    scale = most / norm if most is not None and norm > most else 1.0
    for i, g in enumerate(gradient):
        g *= scale
        if nesterov:
            velocity[i] = momentum * (velocity[i] + g)
            residual[i] += velocity[i] + g
        else:
            velocity[i] = momentum * velocity[i] + g
            residual[i] += velocity[i]
    largest = sorted(range(len(residual)), key=lambda i: (-abs(residual[i]), i))[:k]
    sent = {i: residual[i] for i in largest if residual[i] != 0}
    for i in sent:
        residual[i] = velocity[i] = 0.0
    return sent


def schedule(steps, interpolation, final, step):
    """The density of a step: the table of all steps, read at one."""
    table, begin = [], 0
    ends = [end for end, _ in steps]
    densities = [density for _, density in steps] + [final]
    for number, end in enumerate(ends):
        if interpolation == "constant":
            table += [densities[number]] * (end - begin)
        else:
            table += np.geomspace(densities[number], densities[number + 1], end - begin + 1)[:-1].tolist()
        begin = end
    return table[step] if step < len(table) else final
