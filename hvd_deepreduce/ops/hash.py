"""A 64-bit hash of an array on the host: finds faults in messages, and ranks whose results differ."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from hvd_deepreduce.ops.library import address, kernel

_hash64 = kernel("hash64", "U", "pUU")


def hash64(data: NDArray[Any], seed: int = 0) -> int:
    """The hash of a contiguous array's bytes, 0 to 2^64 - 1.

    It finds every change of a single bit, and any other change with a probability of about 1 - 2^-64. It depends on the
    position of each word and on the number of bytes.

    Args:
        seed: another seed gives another hash; the hash of one array as the seed of the next one joins them.
    """
    return int(_hash64(address(data), data.nbytes, seed))
