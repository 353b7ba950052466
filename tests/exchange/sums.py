"""Cases of mpi_cases.py: all exchanges against the float64 sum."""

import contextlib
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.config import Config
from hvd_deepreduce.exchange import costs
from hvd_deepreduce.exchange.mpi import announcement, densestream, messages, sparcml, topk_allgather
from hvd_deepreduce.exchange.mpi.private_comm import PrivateComm
from tests import cuda_emulator
from tests.case_runner import case
from tests.exchange.faults import with_cards
from tests.support.simulated_mpi import Network

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))
from simulate_scale import programs_of  # noqa: E402

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
PLAIN, CODED = DenseStream(coded=False), DenseStream()


def on_cards(tensor, **more):
    """Small tensors on cards, which the other modules of mpi_cases.py turn off."""
    with with_cards():
        return densestream.allreduce(COMM, tensor, codec=CODED, timeout=30, **more)


EXCHANGES = {
    "plain": lambda t, **k: densestream.allreduce(COMM, t, codec=PLAIN, timeout=30, **k),
    "coded": lambda t, **k: densestream.allreduce(COMM, t, codec=CODED, timeout=30, **k),
    "on cards": on_cards,
    "topk": lambda t, **k: topk_allgather.allreduce(COMM, t, timeout=30, **k),
    "split": lambda t, **k: sparcml.allreduce(COMM, t, algorithm="split_allgather", timeout=30, **k),
    "doubling": lambda t, **k: sparcml.allreduce(COMM, t, algorithm="recursive_doubling", timeout=30, **k),
}


def check(tensors: list[SparseTensor], names=tuple(EXCHANGES), dense=True) -> None:
    """``tensors``: one for each rank, the same list on all ranks."""
    mine = tensors[RANK]
    kept = np.unique(np.concatenate([t.indices for t in tensors]))
    total, size = np.zeros(kept.size), np.zeros(kept.size)
    for t in tensors:
        at = np.searchsorted(kept, t.indices)
        total[at] += t.values
        size[at] += np.abs(t.values)
    bound = size * (SIZE + 1) * np.finfo(mine.values.dtype).eps
    sums = []
    for name in names:
        found = EXCHANGES[name](mine)
        sums.append(zlib.crc32(found.indices.tobytes() + found.values.tobytes()))
        assert found.numel == mine.numel and found.values.dtype == mine.values.dtype
        assert np.isin(found.indices, kept).all(), f"{name}: elements that nobody sent"
        values = np.zeros(kept.size)
        values[np.searchsorted(kept, found.indices)] = found.values
        assert np.all(np.abs(values - total) <= bound), f"{name}: {np.abs(values - total).max()}"
        if dense:
            out = np.full(mine.numel, np.nan, mine.values.dtype)
            again = EXCHANGES[name](mine, out=out)
            assert again is out and np.array_equal(out, found.dense()), f"{name}: dense and sparse sums differ"
    assert len(set(COMM.allgather(tuple(sums)))) == 1, f"the ranks' sums differ, of {names}: {sums}"


def tensor(numel, indices, rng, dtype=np.float32) -> SparseTensor:
    indices = np.unique(np.asarray(indices, np.uint32))
    return SparseTensor(numel, indices, rng.standard_normal(indices.size).astype(dtype))


def uniform(numel, count, rng, dtype=np.float32) -> SparseTensor:
    return tensor(numel, rng.choice(numel, count, replace=False), rng, dtype)


@case
@settings(derandomize=True, database=None, deadline=None, max_examples=8, phases=[Phase.generate])
@given(st.data())
def hypothesis_made(data: st.DataObject) -> None:
    """Derandomized, so every rank draws the same."""
    numel = data.draw(st.sampled_from([1, 2, 3, 17, 300, 5000]))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    rows = []
    for _ in range(SIZE):
        clusters = data.draw(st.lists(st.tuples(st.integers(0, numel - 1), st.integers(1, 40)), max_size=4))
        indices = sorted({i for at, length in clusters for i in range(at, min(at + length, numel))})
        value = st.floats(-(2.0**90), 2.0**90, width=32)
        few = np.array(data.draw(st.lists(value, min_size=1, max_size=5)))
        rows.append(SparseTensor(numel, np.array(indices, np.uint32), np.resize(few, len(indices)).astype(dtype)))
    check(rows)


@case
def edges() -> None:
    rng = np.random.default_rng(1)
    empty = lambda n: SparseTensor(n, np.empty(0, np.uint32), np.empty(0, np.float32))  # noqa: E731
    check([empty(1000)] * SIZE)
    with pytest.raises(ValueError, match="algorithm is 'ring'; allowed are auto, split_allgather"):
        sparcml.allreduce(COMM, empty(10), algorithm="ring")
    check([empty(0)] * SIZE)
    check([empty(1000) if rank % 2 else uniform(1000, 50, rng) for rank in range(SIZE)])
    check([empty(1000) if rank else uniform(1000, 50, rng) for rank in range(SIZE)])
    check([tensor(100000, range(500, 700), rng) for _ in range(SIZE)])  # all in the region of one rank
    check([tensor(100000, [99999], rng) for _ in range(SIZE)])  # fewer than ranks
    check([tensor(100000, [rank], rng) for rank in range(SIZE)])
    check([tensor(3, [rank % 3], rng) for rank in range(SIZE)])
    check([tensor(5000, range(5000), rng) for _ in range(SIZE)])
    check([tensor(40000, range(rank, 40000, SIZE), rng) for rank in range(SIZE)])
    top = 2**32 - 2
    check([tensor(2**32 - 1, [0, rank, top - rank, top, 2**31], rng) for rank in range(SIZE)], dense=False)
    huge = [tensor(2**32 - 1, rng.integers(0, 2**32 - 1, 2000), rng) for rank in range(SIZE)]
    check(huge, dense=False)
    check([uniform(50000, 5000, rng, np.float64) for _ in range(SIZE)])
    # Sums that cancel leave zeros where blocks begin.
    signs = [SparseTensor(90, np.arange(90, dtype=np.uint32), np.full(90, 1 - 2 * (rank % 2), np.float32))
             for rank in range(SIZE)]  # fmt: skip
    check(signs)
    for name, exchange in EXCHANGES.items():
        row = np.linspace(-1, 1, 501, dtype=np.float32) * (RANK + 1)
        mean = np.linspace(-1, 1, 501) * (SIZE + 1) / 2
        assert np.allclose(exchange(row, dense=True), mean * SIZE, atol=1e-4), name
        assert np.allclose(exchange(row, dense=True, scale=1 / SIZE), mean, atol=1e-4), name
        assert np.allclose(exchange(row, scale=1 / SIZE).dense(), mean, atol=1e-4), name


@case
def many_slices() -> None:
    rng = np.random.default_rng(2)
    densestream.SLICE_ELEMENTS = 150
    check([uniform(30011, 8000 + 777 * rank, rng) for rank in range(SIZE)])
    clustered = [np.concatenate([np.arange(at, at + 300) for at in rng.integers(0, 29000, 12)]) for _ in range(SIZE)]
    check([tensor(30011, indices, rng) for indices in clustered])
    densestream.SLICE_ELEMENTS = 1 << 13


@case
def the_simulation_counts_what_is_sent() -> None:
    """The programs' bytes, with slices, and the small allreduces: the figures of scripts/bench/simulate_scale.py."""
    rng = np.random.default_rng(6)
    tensors = [uniform(4000, 900, rng) for _ in range(SIZE)]
    names = {"plain": "DSA", "coded": "DSA coded", "topk": "TopkA", "split": "TopkDA split",
             "doubling": "TopkDA doubling"}  # fmt: skip
    numbers: list[int] = []
    cards: list[int] = []
    sizes: list[int] = []

    def pack(*arguments):
        packed = original_pack(*arguments)
        sizes.append(packed.size)
        return packed

    def allreduce(comm, values, *arguments):
        numbers.append(values.size)
        return original_allreduce(comm, values, *arguments)

    def allgather(comm, own, *arguments):
        cards.append(own.size)
        return original_allgather(comm, own, *arguments)

    original_pack, original_allreduce, original_allgather = messages.pack, PrivateComm.allreduce, PrivateComm.allgather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(densestream, "SLICE_ELEMENTS", 50)
        slices = densestream.slice_count(900, SIZE)
        patch.setattr(PrivateComm, "allreduce", allreduce)
        patch.setattr(PrivateComm, "allgather", allgather)
        patch.setattr(messages, "pack", pack)
        for name, simulated in names.items():
            network = Network(SIZE)
            network.run(programs_of(simulated, tensors, slices))
            numbers.clear()
            cards.clear()
            sizes.clear()
            EXCHANGES[name](tensors[RANK])
            assert (len(sizes), sum(sizes)) == (network.messages[RANK], network.sent[RANK]), name
            cells: list[int] = []
            if simulated.startswith("DSA") and SIZE > densestream.DIRECT_RANKS:
                _, cells = densestream.balanced_split(tensors, SIZE * slices)
            assert numbers == [*cells, costs.AGREEMENT] and cards == [announcement.CARD_BYTES], name
            beside = 8 * (SIZE - 1).bit_length() * sum(numbers) + (SIZE - 1) * cards[0]
            assert costs.small_collectives(SIZE, *cells).beside == beside
            assert slices > 1


@case
def nothing_is_lost() -> None:
    """The sum and the residuals afterwards are the residuals before, whatever is rounded on the way."""
    densestream.SLICE_ELEMENTS = 500
    with with_cards():
        _nothing_is_lost(1000)
    _nothing_is_lost(30011)
    densestream.SLICE_ELEMENTS = 1 << 13


def _nothing_is_lost(numel: int) -> None:
    for codec in (PLAIN, CODED, *(DenseStream(coded=c, value=v) for c in (False, True)
                                  for v in ("float16", "bfloat16", "qsgd"))):  # fmt: skip
        for fill in (False, True):
            residual = np.random.default_rng(RANK).standard_normal(numel).astype(np.float32)
            before = residual.copy()
            indices = np.flatnonzero(np.abs(residual) > 1.5).astype(np.uint32)
            total = densestream.allreduce(
                COMM, SparseTensor(numel, indices, residual[indices]), dense=True, codec=codec, residual=residual,
                fill=fill, key=RngKey(1, 2, 3), timeout=30,
            )  # fmt: skip
            assert len(set(COMM.allgather(zlib.crc32(total.tobytes())))) == 1
            whole, left = COMM.allreduce(before.astype(np.float64)), COMM.allreduce(residual.astype(np.float64))
            assert np.abs(total + left - whole).max() < 3e-5 * SIZE, codec
            if codec.value == "raw":
                assert not residual[indices].any()
                sent = np.count_nonzero(before != residual)
                assert sent > 1.05 * indices.size if fill and not codec.coded else sent == indices.size
            else:
                assert np.abs(total - whole).max() > 1e-4
    residual, values = before.copy(), before[indices].clip(-2, 2)  # filling is for what is not sent
    clipped = SparseTensor(numel, indices, values)
    densestream.allreduce(COMM, clipped, codec=PLAIN, residual=residual, fill=True, timeout=30)
    assert np.array_equal(residual[indices], before[indices] - values)
    for allreduce in (topk_allgather.allreduce, sparcml.allreduce):
        residual = before.copy()
        total = allreduce(COMM, SparseTensor(numel, indices, before[indices]), residual=residual, timeout=30)
        assert not residual[indices].any() and np.count_nonzero(residual) == numel - indices.size


@case
def the_published_preset_fills_its_blocks() -> None:
    """The residual's elements between two kept ones that are at most three places apart (section III.A: two zeros) are
    sent, and so are 0 in the residual afterwards. Coded blocks have nothing to fill."""
    numel = 100_000
    before = np.random.default_rng(RANK).standard_normal(numel).astype(np.float32)
    kept = np.flatnonzero(np.abs(before) > 1.5).astype(np.uint32)
    steps = np.diff(kept)
    filled = np.concatenate([kept, kept[:-1][(steps == 2) | (steps == 3)] + 1, kept[:-1][steps == 3] + 2])
    for name, sent in (("densestream_plain", filled), ("densestream_model", kept)):
        out, residual = np.empty(numel, np.float32), before.copy()
        tensor, key = SparseTensor(numel, kept, before[kept]), RngKey(1, 2, 3)
        densestream.run_exchange(Config.load(name).exchange, COMM, tensor, out, residual, key)
        left = before.copy()
        left[sent] = 0
        np.testing.assert_array_equal(residual, left)
        total = COMM.allreduce((before - left).astype(np.float64))
        assert np.abs(out - total).max() < 1e-5 * SIZE, name


@case
def on_a_gpu() -> None:
    """Residual and sum on a GPU, in the emulator: those of the host, and the other ranks may be on the host."""
    if cuda_emulator.available():
        pytest.skip(cuda_emulator.available())
    numel, density = 3001, 0.02
    ways = [(densestream.allreduce, {"codec": codec, "fill": fill, "density": cut, "key": RngKey(1, 2, 3)})
            for codec, fill, cut in ((PLAIN, True, None), (CODED, False, None), (CODED, True, density),
                                     (DenseStream(value="qsgd"), True, None), (DenseStream(value="float16"), False,
                                      density))]  # fmt: skip
    ways += [(topk_allgather.allreduce, {}), *((sparcml.allreduce, {"algorithm": one})
             for one in ("split_allgather", "recursive_doubling"))]  # fmt: skip
    before = np.random.default_rng(RANK).standard_normal(numel).astype(np.float32)
    indices = np.flatnonzero(np.abs(before) > 1.5).astype(np.uint32)
    values = before[indices]
    values[3], before[indices[3]] = [np.inf] * 2
    for number, (allreduce, more) in enumerate(ways):
        results = []
        for there in (False, True, RANK % 2 == 0):
            put = cuda_emulator.asarray if there else np.array
            out, residual = put(np.full(numel, np.nan, np.float32)), put(before)
            with with_cards() if number % 2 else contextlib.nullcontext():
                total = allreduce(COMM, SparseTensor(numel, indices, values), out=out, residual=residual,
                                  scale=0.25, timeout=30, **more)  # fmt: skip
            assert total is out
            results.append([(one.get() if there else one).tobytes() for one in (out, residual)])
        assert results[0] == results[1] == results[2], (number, allreduce, more)
        assert results[0][1] != before.tobytes()
    with pytest.raises(ValueError, match="out and residual share memory"):
        both = cuda_emulator.asarray(before)
        densestream.allreduce(COMM, before[1:], out=both[1:], residual=both[:-1], timeout=30)


@case
def partial_sums_are_cut() -> None:
    """With a density, and with the numbers that many ranks exchange in place of cards."""
    numel, most = 30011, 300
    for many in (False, True):
        for codec in (PLAIN, CODED, DenseStream(value="qsgd")):
            residual = np.random.default_rng(RANK).standard_normal(numel).astype(np.float32)
            before, indices = residual.copy(), np.flatnonzero(np.abs(residual) > 2).astype(np.uint32)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(announcement, "MOST_CARDS", 0 if many else 32)
                total = densestream.allreduce(
                    COMM, SparseTensor(numel, indices, residual[indices]), dense=True, codec=codec, residual=residual,
                    density=most / numel, key=RngKey(1, 2, 3), timeout=30,
                )  # fmt: skip
            assert len(set(COMM.allgather(zlib.crc32(total.tobytes())))) == 1
            assert most - SIZE < np.count_nonzero(total) <= most
            whole, left = COMM.allreduce(before.astype(np.float64)), COMM.allreduce(residual.astype(np.float64))
            assert np.abs(total + left - whole).max() < 3e-5 * SIZE, codec
    own = uniform(1000, 50, np.random.default_rng(RANK))
    for many in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(announcement, "MOST_CARDS", 0 if many else 32)
            if SIZE > 1:
                with pytest.raises(ValueError, match="settings differ.*and density 0.1.*and density 0.2"):
                    densestream.allreduce(COMM, own, density=0.2 if RANK == SIZE - 1 else 0.1, timeout=30)
            number = float if RANK else np.float32  # equal numbers of two types are one setting
            densestream.allreduce(COMM, own, density=number(0.5), timeout=30)
            with pytest.raises(ValueError, match="density is 0; it must be above 0 and at most 1"):
                densestream.allreduce(COMM, own, density=0, timeout=30)


@case
def infinities_reach_every_rank() -> None:
    for codec in (PLAIN, DenseStream(value="qsgd"), DenseStream(value="float16")):
        row = np.ones(1000, np.float32)
        if RANK == SIZE - 1:
            row[[3, 700]] = np.nan, np.inf
        for way in (contextlib.nullcontext(), with_cards()):
            with way:
                total = densestream.allreduce(COMM, row, dense=True, codec=codec, timeout=30)
            assert np.isnan(total[3]) and np.isinf(total[700]), codec


@case
def other_communicators() -> None:
    for _ in range(3):
        part = COMM.Split(RANK % 2, RANK)
        row = np.full(10, 1.0, np.float32)
        for module in (densestream, topk_allgather, sparcml):
            total = module.allreduce(part, row, dense=True, timeout=30)
            assert np.all(total == part.size)
        part.Free()
