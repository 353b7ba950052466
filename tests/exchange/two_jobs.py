"""Two Horovod jobs in one world of MPI, and a process set in one of them: each exchange has the ranks of its own job.

mpirun -np 5 python tests/exchange/two_jobs.py
"""

import horovod.torch as hvd
import torch
from mpi4py import MPI

from hvd_deepreduce.torch import DeepReduce

WORLD = MPI.COMM_WORLD
JOBS = [[1, 0], [4, 2, 3]]
"""The world's ranks of each job, in the job's order."""
MINE = next(job for job in JOBS if WORLD.rank in job)


def averages(process_set: hvd.ProcessSet | None, exchange: str) -> list[float]:
    """The gradients after two steps, in which a rank's gradients are 1 + its rank in the world."""
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 3)
    more = {} if process_set is None else {"process_set": process_set}
    compression = DeepReduce(model, exchange=exchange, scope="model", sparsifier="none", index=None, value=None, **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, **more
    )
    for _ in range(2):
        optimizer.zero_grad()
        ((1.0 + WORLD.rank) * sum(parameter.sum() for parameter in model.parameters())).backward()
        optimizer.step()
    return sorted({float(value) for parameter in model.parameters() for value in parameter.grad.flatten()})


def expected(ranks: list[int]) -> list[float]:
    return [sum(1.0 + rank for rank in ranks) / len(ranks)]


some = hvd.ProcessSet([0, len(MINE) - 1])
hvd.init(comm=WORLD.Create_group(WORLD.group.Incl(MINE)), process_sets=[some] if len(MINE) > 2 else [])
assert hvd.size() == len(MINE) and MINE[hvd.rank()] == WORLD.rank
for name in ("densestream", "topk_allgather"):
    assert averages(None, name) == expected(MINE), name
    if len(MINE) > 2 and some.included():
        assert averages(some, name) == expected([MINE[rank] for rank in some.ranks]), name
print("all sums are right", flush=True)
WORLD.Barrier()  # a rank that leaves Horovod ends it for all ranks of its job
hvd.shutdown()
