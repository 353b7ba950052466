"""The step check: one small allreduce at the beginning of each step, before any rank sends a container.

It finds ranks that would leave the others waiting for ever: one that has called ``hvd.join()``, one whose config was
changed alone, and one that is new in the job and waits for the handshake; and ranks whose updates must not be added up,
because they are at different places of the training, or because an error has left one behind. A rank can also ask all
others to send nothing in this step, and after a trial (``dense_or_compressed.py``) it says what it has measured.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats

_in_order = json.JSONEncoder(sort_keys=True).encode
WORDS = 15
"""Elements of what a rank says."""

Place = Mapping[str, int | str]
"""What must be equal on all ranks at a step check, by a name that an error message shows."""


class Outcome(NamedTuple):
    """What the ranks have found out.

    Attributes:
        missing: how many ranks said nothing: they have joined.
        newcomers: how many ranks ask for the handshake.
        same_config: whether all ranks that said something have the same config.
        discarding: how many ranks ask for this step to be discarded.
        dense, compressed: the ranks' sums of ``Choice.word``.
        same_place: whether all ranks that said something are at the same place.
        failed: how many ranks an error has left behind.
        sending: how many ranks take part in the exchange that would follow.
    """

    missing: int
    newcomers: int
    same_config: bool
    discarding: int = 0
    dense: int = 0
    compressed: int = 0
    same_place: bool = True
    failed: int = 0
    sending: int = 0


def vote(
    digest: int,
    agreed: bool,
    discard: bool = False,
    times: tuple[int, int] = (0, 0),
    place: Place | None = None,
    failed: bool = False,
    sends: bool = False,
) -> Floats:
    """What a rank says: float64 ``[WORDS]``, to be added up over the ranks.

    Args:
        digest: of its config.
        agreed: whether it has taken part in the handshake.
        discard: whether it asks for this step to be discarded.
        times: its ``Choice.word``.
        place: where it is; None: nowhere in particular.
        failed: whether an error has left it behind the other ranks.
        sends: whether it takes part in the exchange that would follow.
    """
    where = zlib.crc32(_in_order(place).encode()) if place else 0
    (high, low), (place_high, place_low) = divmod(digest, 1 << 16), divmod(where, 1 << 16)
    return np.array(
        [
            1, not agreed, high, high * high, low, low * low, discard, *times,
            place_high, place_high * place_high, place_low, place_low * place_low, failed, sends,
        ],
        np.float64,
    )  # fmt: skip


def outcome(total: Floats, size: int) -> Outcome:
    """What the sum of all ranks' words says; every rank concludes the same.

    Integers below 2^53 are exact in float64, which suffices for 2^21 ranks. By Cauchy and Schwarz, n times the sum of
    the squares of n numbers is the square of their sum only if the numbers are equal.
    """
    said = list(map(int, total.tolist()))
    present, newcomers, c1, c2, c3, c4, discarding, dense, compressed, p1, p2, p3, p4, failed, sending = said
    same_config = present * c2 == c1 * c1 and present * c4 == c3 * c3
    same_place = present * p2 == p1 * p1 and present * p4 == p3 * p3
    return Outcome(
        size - present, newcomers, same_config, discarding, dense, compressed, same_place, failed, sending
    )  # fmt: skip


def join_error(missing: int) -> RuntimeError:
    """For ranks that still have gradients when others have called ``hvd.join()``."""
    return RuntimeError(
        f"{missing} rank{'s have' if missing > 1 else ' has'} called hvd.join() while this rank still has gradients, "
        "and Horovod cannot join an exchange of compressed gradients. Let all ranks take the same number of steps: "
        "divide the data evenly (torch.utils.data.DistributedSampler, tf.data's shard), or stop at the smallest number "
        "of batches, hvd.allreduce(batches, op=hvd.Min). No gradient of this step was applied"
    )


def left_behind(failed: int) -> str:
    """The error for all ranks after one has failed where the others have not."""
    return (
        f"an error has left {failed} rank{'s' if failed > 1 else ''} behind: other ranks may have applied its last "
        "step, so that the parameters of the ranks may differ now. That rank has said what went wrong. Begin again "
        "from a checkpoint on all ranks. No gradient of this step was applied"
    )
