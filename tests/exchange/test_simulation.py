"""The exchanges' programs on simulated ranks: any number of ranks, correct sums, and the bytes of the cost model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.joint.stream_format import unpack
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.mpi import densestream, sparcml, topk_allgather
from hvd_deepreduce.exchange.mpi.schedules import halving_rounds
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from hvd_deepreduce.exchange.mpi.transport import Program
from tests.support.simulated_mpi import Network, SimulatedTransport

F32 = np.dtype(np.float32)
NAMES = ["plain", "coded", "direct", "topk", "split", "doubling"]


def simulate(name: str, tensors: list[SparseTensor], slices: int = 1, count_only: bool = False) -> tuple[Network, list]:
    """The network after one allreduce, and each rank's sum."""
    size, numel = len(tensors), tensors[0].numel
    network = Network(size)
    received: list[dict[int, Stream]] = [{} for _ in tensors]
    totals = [None if count_only else SumBuffer(numel, F32, True, None) for _ in tensors]
    codec = DenseStream(coded=name == "coded")
    parts = size * slices
    bounds, _ = densestream.balanced_split(tensors, parts)
    if name == "direct":
        bounds = bounds[::size]

    def programs(transport: SimulatedTransport) -> list[Program]:
        own, total = tensors[transport.rank], totals[transport.rank]
        if name == "topk":

            def add(rank: int, section: np.ndarray) -> None:
                if not count_only:
                    received[transport.rank][rank] = unpack(section, numel, F32)

            return [topk_allgather.program(transport, own, add)]
        if name == "split":
            return sparcml.split_allgather(transport, own, slices, total)
        if name == "doubling":
            return [sparcml.recursive_doubling(transport, own, total)]
        make = densestream.direct_programs if name == "direct" else densestream.programs
        plan = densestream.Plan(codec, numel, F32, bounds, slices, RngKey(0, 0, 0), None)
        return make(transport, own, plan, total)

    network.run(programs)
    if name == "topk" and not count_only:
        for total, row in zip(totals, received, strict=True):
            total.out[:] = sum(row[rank].to_sparse().dense() for rank in range(size))
    return network, [total and total.out for total in totals]


def random_tensors(size: int, numel: int, count: int, seed: int) -> list[SparseTensor]:
    rng = np.random.default_rng(seed)
    rows = [np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32) for _ in range(size)]
    return [SparseTensor(numel, row, rng.standard_normal(count).astype(np.float32)) for row in rows]


@pytest.mark.parametrize("size", [*range(1, 20), 31, 32, 33, 64])
def test_every_rank_sends_what_another_waits_for(size: int) -> None:
    rounds = [halving_rounds(rank, size) for rank in range(size)]
    assert max(len(steps) for steps in rounds) == math.ceil(math.log2(size))
    for t in range(max(map(len, rounds))):
        sent = [(rank, to) for rank in range(size) if t < len(rounds[rank]) for to in rounds[rank][t].send_to]
        received = [
            (source, rank) for rank in range(size) if t < len(rounds[rank]) for source in rounds[rank][t].receive_from
        ]
        assert sorted(sent) == sorted(received)
    # Following the halves of the ranges, each rank is left with a region of its own.
    for rank, steps in enumerate(rounds):
        mine = range(size)
        for step in steps:
            assert sorted([*step.own_half, *step.other_half]) == list(mine) and rank in step.own_half
            mine = step.own_half
        assert list(mine) == [rank]


@given(st.sampled_from(NAMES), st.integers(1, 17), st.integers(0, 60), st.integers(1, 4), st.integers(0, 2**32))
def test_sums(name: str, size: int, count: int, slices: int, seed: int) -> None:
    tensors = random_tensors(size, 60, count, seed)
    _, sums = simulate(name, tensors, slices)
    exact = sum(t.dense().astype(np.float64) for t in tensors)
    largest = sum(np.abs(t.dense()) for t in tensors)
    for total in sums:
        assert np.all(np.abs(total - exact) <= largest * size * 1.2e-7)
        assert total.tobytes() == sums[0].tobytes()


def test_a_failure_travels() -> None:
    def programs(transport: SimulatedTransport) -> list[Program]:
        plan = densestream.Plan(DenseStream(), 50, F32, [50 * i // 6 for i in range(7)], 1, RngKey(0, 0, 0), None)
        if transport.rank == 4:
            plan.bounds = [0, 0, 0, 0, 0, 0, 50]  # its own idea of the regions
        tensor = SparseTensor(50, np.arange(50, dtype=np.uint32), np.ones(50, np.float32))
        return densestream.programs(transport, tensor, plan, SumBuffer(50, F32, True, None))

    with pytest.raises(ValueError, match="cannot read the stream of rank"):
        Network(6).run(programs)


@pytest.mark.parametrize("size", [4, 7, 16])
def test_regions_are_balanced_where_the_ranks_boundaries_have_no_mean(size: int) -> None:
    """Half of the ranks keep the front and half the back, which averaged boundaries would give to one region."""
    kept, numel = 500, 100_000
    begins = [rank % 2 * (numel - kept) for rank in range(size)]
    ones = np.ones(kept, np.float32)
    tensors = [SparseTensor(numel, np.arange(begin, begin + kept, dtype=np.uint32), ones) for begin in begins]
    for slices in (1, 3):
        bounds, rounds = densestream.balanced_split(tensors, size * slices)
        loads = sum(np.diff(np.searchsorted(tensor.indices, np.array(bounds))) for tensor in tensors)
        assert len(bounds) == size * slices + 1 and max(loads) <= 1.6 * size * kept / (size * slices)
        assert 2 <= len(rounds) <= 4
