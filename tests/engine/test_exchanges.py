"""What other ranks say when the queues of exchanges over MPI are made."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.exchange.mpi.over_mpi import Queues


class Collectives:
    """Of rank 0 of 2; rank 1 sends given bytes."""

    def __init__(self, other: bytes) -> None:
        self.other = other

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def mpi_enabled(self) -> bool:
        return True

    def allgather(self, data: np.ndarray, name: str) -> np.ndarray:
        return np.frombuffer(data.tobytes() + self.other, np.uint8)


@pytest.mark.parametrize(
    "told",
    [[], 3, {}, {"rank": 1}, {"rank": 1, "world": "one", "tag": 0}, {"rank": 1, "world": -1, "tag": 0},
     {"rank": 1, "world": 1, "tag": 1 << 40}, {"rank": 1, "world": True, "tag": 0}],
)  # fmt: skip
def test_rubbish_is_an_error_that_names_its_rank(told):
    with pytest.raises(MismatchError, match="rank 1 sent no"):
        Queues(Collectives(json.dumps(told).encode() + b"\n")).queue(0, "densestream")


def test_an_error_of_another_rank_is_quoted():
    line = json.dumps({"rank": 1, "error": "no\x1b[2J MPI" + 10_000 * "!"}).encode() + b"\n"
    with pytest.raises(RuntimeError, match="exchange 'densestream' cannot start: rank 1: ") as error:
        Queues(Collectives(line)).queue(0, "densestream")
    assert "\x1b" not in str(error.value) and len(str(error.value)) < 400
