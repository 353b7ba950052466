"""A sparse allreduce over plain mpi4py.

    mpirun -np 4 python examples/mpi_allreduce.py

It needs neither Horovod nor a framework.
"""

import numpy as np
from mpi4py import MPI

from hvd_deepreduce import SparseTensor
from hvd_deepreduce.exchange.mpi import densestream

comm = MPI.COMM_WORLD
numel, kept = 1_000_000, 10_000
random = np.random.default_rng(comm.rank)
indices = np.sort(random.choice(numel, kept, replace=False)).astype(np.uint32)
own = SparseTensor(numel, indices, random.standard_normal(kept).astype(np.float32))

total = densestream.allreduce(comm, own)  # a SparseTensor, bitwise the same on every rank

expected = np.empty(numel, np.float32)
comm.Allreduce(own.dense(), expected)
np.testing.assert_allclose(total.dense(), expected, rtol=0, atol=1e-5)
if comm.rank == 0:
    print(f"{comm.size} ranks sent {kept} elements each; their sum has {total.indices.size}")
