"""Times one call of an exchange over MPI, from the selection to the dense sum and the settled residual.

    mpirun -np 2 python scripts/bench/bench_exchange.py 1000 1
    mpirun -np 4 python scripts/bench/bench_exchange.py 24000000 0.1 --clustered --profile

Rank 0 prints one line of JSON: the median and the least microseconds of a call on the slowest rank, the CPU time of a
call on rank 0, MPI's own allreduce of the dense vector, and the load. Ranks meet in a barrier before each call. To
compare two versions on a machine with other work, run both in turn, with PYTHONPATH set to one and the other. With
--profile, rank 0 also prints where its time goes, by function; the profiler makes calls slower.
"""

import cProfile
import json
import os
import pstats
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from mpi4py import MPI

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.mpi import densestream
from hvd_deepreduce.ops import select
from hvd_deepreduce.tools.gradients import generated

WARM = 3


def main(
    numel: Annotated[int, typer.Argument(help="elements of the vector, float32")],
    density: Annotated[float, typer.Argument(help="share of the elements that each rank keeps")],
    repeat: Annotated[int, typer.Option(help="calls that are counted")] = 30,
    value: Annotated[str, typer.Option(help="raw, float16, bfloat16 or qsgd")] = "raw",
    coded: Annotated[bool, typer.Option(help="coded blocks, or the paper's plain ones")] = True,
    clustered: Annotated[bool, typer.Option(help="kept elements in clusters, as bench_net.py has")] = False,
    profile: Annotated[bool, typer.Option(help="print where the time goes")] = False,
    priority: Annotated[int, typer.Option(help="over other work on this machine, 0 to 20 (needs root)")] = 0,
) -> None:
    """Times DenseStream's allreduce."""
    comm = MPI.COMM_WORLD
    if priority:
        Path("/proc/self/autogroup").write_text(str(-priority))
    rng = np.random.default_rng(comm.rank)
    vector = generated(numel, comm.rank) if clustered else rng.standard_normal(numel).astype(np.float32)
    indices, values = select.topk(vector, None, max(1, int(density * numel)))
    tensor, codec = SparseTensor(numel, indices, values), DenseStream.model_validate({"value": value, "coded": coded})
    residual, out = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    seconds, own, dense = [], [], []
    profiler = cProfile.Profile()
    for step in range(repeat + WARM):
        residual[indices] = values
        comm.Barrier()
        if profile and step >= WARM:
            profiler.enable()
        began, cpu = time.perf_counter(), time.process_time()
        densestream.allreduce(comm, tensor, out=out, residual=residual, codec=codec, key=RngKey(1, 2, step))
        took = time.perf_counter() - began
        profiler.disable()
        own.append(time.process_time() - cpu)
        seconds.append(comm.allreduce(took, MPI.MAX))
        began = time.perf_counter()
        comm.Allreduce(vector, out)
        dense.append(time.perf_counter() - began)
    if comm.rank:
        return
    figures = {"median": np.median(seconds[WARM:]), "least": min(seconds[WARM:]), "cpu": np.median(own[WARM:]),
               "mpi allreduce": np.median(dense[WARM:])}  # fmt: skip
    microseconds = {name: round(1e6 * float(figure), 1) for name, figure in figures.items()}
    print(json.dumps({"ranks": comm.size, "numel": numel, **microseconds, "load": os.getloadavg()[0]}), flush=True)
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    typer.run(main)
