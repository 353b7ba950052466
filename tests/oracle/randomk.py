"""The selection of random-k: the sorted images of 0 .. count - 1 under the permutation given by a Philox block."""

from tests.oracle.philox import permute, philox4x32

STREAM_RANDOMK = 2


def indices_of(numel: int, count: int, seed: int, parameter: int, step: int) -> list[int]:
    k0, k1, k2, _ = philox4x32((seed, parameter), (0, step, STREAM_RANDOMK, 0))
    return sorted(permute(i, numel, k0, k1, k2) for i in range(count))
