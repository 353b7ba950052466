"""The meeting: one small allreduce at the beginning of each step, before any rank sends a container.

It finds ranks that would leave the others waiting for ever: one that has called ``hvd.join()``, one whose config was
changed alone, and one that is new in the job and waits for the handshake. A rank can also ask all others to send
nothing in this step, and after a trial (``choice.py``) it says what it has measured.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hvd_deepreduce.codec import Floats

WORDS = 9
"""Elements of what a rank says."""


class Outcome(NamedTuple):
    """What the ranks have found out.

    Attributes:
        missing: how many ranks said nothing: they have joined.
        newcomers: how many ranks ask for the handshake.
        same_config: whether all ranks that said something have the same config.
        discarding: how many ranks ask for this step to be discarded.
        dense, compressed: the ranks' sums of ``Choice.word``.
    """

    missing: int
    newcomers: int
    same_config: bool
    discarding: int = 0
    dense: int = 0
    compressed: int = 0


def word(digest: int, agreed: bool, discard: bool = False, times: tuple[int, int] = (0, 0)) -> Floats:
    """What a rank says: float64 ``[WORDS]``, to be added up over the ranks.

    Args:
        digest: of its config.
        agreed: whether it has taken part in the handshake.
        discard: whether it asks for this step to be discarded.
        times: its ``Choice.word``.
    """
    high, low = divmod(digest, 1 << 16)
    return np.array([1, not agreed, high, high * high, low, low * low, discard, *times], np.float64)


def outcome(total: Floats, size: int) -> Outcome:
    """What the sum of all ranks' words says; every rank concludes the same.

    Integers below 2^53 are exact in float64, which suffices for 2^21 ranks. By Cauchy and Schwarz, n times the sum of
    the squares of n numbers is the square of their sum only if the numbers are equal.
    """
    present, newcomers, high, high_squares, low, low_squares, discarding, *times = (int(value) for value in total)
    same = present * high_squares == high * high and present * low_squares == low * low
    return Outcome(size - present, newcomers, same, discarding, *times)


def join_error(missing: int) -> RuntimeError:
    """For ranks that still have gradients when others have called ``hvd.join()``."""
    return RuntimeError(
        f"{missing} rank{'s have' if missing > 1 else ' has'} called hvd.join() while this rank still has gradients, "
        "and Horovod cannot join an exchange of compressed gradients. Let all ranks take the same number of steps: "
        "divide the data evenly (torch.utils.data.DistributedSampler, tf.data's shard), or stop at the smallest number "
        "of batches, hvd.allreduce(batches, op=hvd.Min). No gradient of this step was applied"
    )
