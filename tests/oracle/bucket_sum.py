"""The orders of summation of docs/container.md."""


def in_lanes(terms: list[float], number: int) -> float:
    """The sums of every ``number``-th term, and of these by halves."""
    lanes = [0.0] * number
    for j, term in enumerate(terms):
        lanes[j % number] += term
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[j] + lanes[j + half] for j in range(half)]
    return lanes[0]


def bucket_sum(terms: list[float]) -> float:
    """Blocks of 1024 terms in 32 lanes, then the same for their sums."""
    while True:
        terms = [in_lanes(terms[at : at + 1024], 32) for at in range(0, max(len(terms), 1), 1024)]
        if len(terms) == 1:
            return terms[0]
