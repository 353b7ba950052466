"""The order of summation of docs/container.md: blocks of 1024 terms in 32 lanes, then the same for their sums."""


def bucket_sum(terms: list[float]) -> float:
    while True:
        sums = []
        for at in range(0, max(len(terms), 1), 1024):
            lanes = [0.0] * 32
            for j, term in enumerate(terms[at : at + 1024]):
                lanes[j % 32] += term
            for half in (16, 8, 4, 2, 1):
                lanes = [lanes[j] + lanes[j + half] for j in range(half)]
            sums.append(lanes[0])
        if len(sums) == 1:
            return sums[0]
        terms = sums
