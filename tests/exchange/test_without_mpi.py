"""The exchanges' programs, the simulation and the settings work on a machine without mpi4py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mpi4py":
            raise ImportError("mpi4py is blocked")

sys.meta_path.insert(0, Blocked())

import numpy as np
from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.exchange import costs, settings
from hvd_deepreduce.exchange.mpi import densestream, errors, sparcml, topk_allgather
from tests.support.simulated_mpi import Network
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor

ranks, numel = 5, 200
dtype = np.dtype(np.float32)
tensors = [
    SparseTensor(numel, np.arange(rank, numel, 3, dtype=np.uint32), np.ones(len(range(rank, numel, 3)), dtype))
    for rank in range(ranks)
]
bounds, _ = densestream.balanced_split(tensors, ranks)
codec = DenseStream()

def dsa(transport):
    plan = densestream.Plan(codec, numel, dtype, bounds, 1, RngKey(0, 0, 0), None)
    return densestream.programs(transport, tensors[transport.rank], plan, buffers[transport.rank])

def split(transport):
    return sparcml.split_allgather(transport, tensors[transport.rank], 1, buffers[transport.rank])

for make in (dsa, split):
    buffers = [SumBuffer(numel, dtype, True, None) for _ in tensors]
    network = Network(ranks)
    network.run(make)
    for buffer in buffers:
        assert np.array_equal(buffer.result(), sum(t.dense() for t in tensors))
    assert network.received.min() > 0

received = [[] for _ in tensors]
network = Network(ranks)
network.run(lambda t: [topk_allgather.program(t, tensors[t.rank], lambda rank, s: received[t.rank].append(rank))])
assert all(sorted(row) == list(range(ranks)) for row in received)

assert Config.load({"exchange": "sparcml"}).exchange.load() is sparcml.run_exchange
for call in (
    lambda: densestream.allreduce(None, tensors[0]),
    lambda: __import__("hvd_deepreduce.exchange.mpi.queue"),
):
    try:
        call()
    except ImportError as error:
        assert "mpi4py is blocked" in str(error)
    else:
        raise AssertionError("mpi4py was not needed")
assert "mpi4py" not in sys.modules
print("works without mpi4py")
"""


def test_programs_and_simulation_need_no_mpi() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "works without mpi4py", done.stderr
