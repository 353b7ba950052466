"""What the rivals of ddp_rivals.py must give, beside obvious NumPy; run on two ranks by test_bench_ddp.py."""

from __future__ import annotations

from functools import partial

import numpy as np

DENSITY, NUMEL, STEPS = 0.02, 9_000, 3


def gradient(rank, step):
    """Of two whole chunks of SparseLoCo's and a part of one; most of the second one is zeros."""
    vector = np.random.default_rng((rank, step)).standard_normal(NUMEL, np.float32)
    vector[4096 + 30 : 8192] = 0
    return vector


def largest(vector, count):
    return np.argsort(-np.abs(vector), kind="stable")[:count]


def means(ranks, select):
    """The mean of each step, if ranks send what ``select`` returns of their accumulators, and keep the rest."""
    residuals = np.zeros((ranks, NUMEL), np.float32)
    for step in range(STEPS):
        total = np.zeros(NUMEL, np.float32)
        for rank in range(ranks):
            residuals[rank] += gradient(rank, step)
            at = select(residuals[rank])
            total[at] += residuals[rank][at]
            residuals[rank][at] = 0
        yield total / ranks


def in_chunks(vector):
    return np.concatenate([at + largest(vector[at : at + 4096], 64) for at in range(0, NUMEL, 4096)])


def check_rivals():
    import torch.distributed as dist
    from bench_ddp import joined
    from ddp_rivals import OverMpi, SparseLoCoWire, TorchTopK, Zstd

    from hvd_deepreduce.exchange.mpi import sparcml, topk_allgather

    comm = joined("memory")
    ranks, topk = comm.size, partial(largest, count=round(DENSITY * NUMEL))
    exact = {
        "torch": (TorchTopK(None, DENSITY), topk),
        "topka": (OverMpi(None, topk_allgather.allreduce, DENSITY), topk),
        "topkda": (OverMpi(None, sparcml.allreduce, DENSITY), topk),
        "zstd": (Zstd(), lambda vector: slice(None)),
    }
    for name, (rival, select) in exact.items():
        for step, expected in enumerate(means(ranks, select)):
            own = gradient(comm.rank, step)
            rival.average(0, step, own)
            np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-7, err_msg=f"{name}, step {step}")

    wire = SparseLoCoWire()
    for step in range(STEPS):
        before = sum(comm.allgather(wire.residuals.get(0, np.zeros(3 * 4096, np.float32))))[:NUMEL]
        own = gradient(comm.rank, step)
        given = sum(comm.allgather(own.copy()))
        accumulated = (wire.residuals[0][:NUMEL] if step else 0) + own
        wire.average(0, step, own)
        chosen = set(np.concatenate(comm.allgather(in_chunks(accumulated))).tolist())
        found = set(np.flatnonzero(own).tolist())
        second = set(range(4096, 8192))  # which of its zeros are sent is not specified
        assert found - second == chosen - second and len(found & second) >= 64
        after = sum(comm.allgather(wire.residuals[0]))[:NUMEL]
        np.testing.assert_allclose(ranks * own + after, given + before, atol=1e-5)
    assert all(np.array_equal(own, other) for other in comm.allgather(own))
    dist.destroy_process_group()
