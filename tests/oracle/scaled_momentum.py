"""Signs of scaled momentum, one rank and one element at a time."""

import math


def step(square, momentum, gradient, t, decay, beta2, eps, k, clip=None):
    """Step t = 1, 2, ... of one rank; changes square and momentum, lists of floats.

    Args:
        k: how many elements are sent.
        clip: the largest norm of the gradient; None: any.

    Returns:
        The votes, as a dict from index to 1 or -1.
    """
    norm = sum(g * g for g in gradient) ** 0.5
    scale = clip / norm if clip is not None and norm > clip else 1.0
    for i, g in enumerate(gradient):
        g *= scale
        square[i] = beta2 * square[i] + (1 - beta2) * g * g
        momentum[i] = decay * momentum[i] + g / (math.sqrt(square[i] / (1 - beta2**t)) + eps)
    largest = sorted(range(len(momentum)), key=lambda i: (-abs(momentum[i]), i))[:k]
    votes = {i: math.copysign(1.0, momentum[i]) for i in largest if momentum[i] != 0}
    for i in votes:
        momentum[i] = 0.0
    return votes
