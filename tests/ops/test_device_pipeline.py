"""The whole way of a gradient on a device, in the emulator or on a GPU, gives the CPU's containers, residuals and sums:
see conftest.py."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.exchange.two_levels import SliceResidual, TwoLevelSum
from hvd_deepreduce.ops import deferred, sections
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.pipeline.bundle import Slice
from hvd_deepreduce.pipeline.residuals import Memory
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.standalone import ContainerError
from tests import cases, selection, two_levels

KEY = RngKey(21, 22, 23, 1)
INPUTS = cases.inputs()
LISTS = [("topk", index, "raw", None) for index in cases.INDEX]
LISTS += [("topk", "packed", value, None) for value in cases.VALUE]
LISTS += [(sparsifier, "rice", "qsgd", None) for sparsifier in cases.SPARSIFIERS]
LISTS += [(sparsifier, None, None, joint) for sparsifier in ("topk", "none") for joint in cases.JOINT]
# Settings that take another way through the kernels than the defaults do.
WAYS = [
    {"value": {"name": "qsgd", "bits": bits, "bucket_size": bucket, "norm": norm, "entropy": entropy}}
    for bits, bucket, norm, entropy in ((2, 64, "max", "none"), (5, 128, "max", "none"), (8, 4, "max", "none"),
                                        (7, 96, "max", "none"), (7, 512, "l2", "none"), (3, 10, "max", "rans"),
                                        (8, 512, "max", "huffman"))
]  # fmt: skip
WAYS += [{"index": {"name": "bloom", "policy": policy}} for policy in ("p1", "p2", "leftmost", "middle")]
WAYS += [{"value": {"name": "half", "dtype": "float16"}},
         {"value": {"name": "ternary", "clip": 1.5, "bucket_size": 33}},
         {"value": {"name": "sign", "bucket_size": 17}}, {"value": {"name": "deflate", "shuffle": False}},
         {"value": {"name": "fit_poly", "degree": 0, "segments": None}}, {"value": {"name": "uniform", "bits": 16}},
         {"index": "raw", "value": "fit_dexp", "force_index": True},
         {"sparsifier": {"name": "block_topk", "density": 0.5, "block": 7, "norm": "l1"}},
         {"sparsifier": {"name": "chunk_topk", "density": 0.2, "chunk": 33},
          "value": {"name": "quantile", "buckets": 4, "splits": "lloyd", "entropy": "rans"}},
         {"memory": {"name": "dgc", "clip": 0.5}},
         {"memory": {"name": "dgc", "nesterov": True}, "sparsifier": {"name": "topk", "density": 0.3}},
         {"memory": {"name": "scaled_momentum", "clip": 0.5}, "value": {"name": "sign", "magnitude": "one"}},
         {"memory": "scaled_momentum", "index": {"name": "bloom", "policy": "p1"}, "value": "fit_poly"},
         {"memory": "scaled_momentum", "joint": "densestream", "index": None, "value": None},
         {"index": {"name": "bloom", "policy": "naive"}, "error_feedback": False},
         {"value": {"name": "qsgd", "bits": 3, "bucket_size": 100, "norm": "l2", "entropy": "rans", "fit_scale": True}},
         {"value": {"name": "qsgd", "bits": 4, "bucket_size": 100, "norm": "l2", "scaled": True}},
         {"value": {"name": "uniform", "bits": 2, "bucket_size": 64, "rotate": True, "scaled": True}},
         {"value": {"name": "ternary", "bucket_size": None, "scaled": True}},
         {"joint": {"name": "densestream", "coded": False}, "index": None, "value": None},
         {"joint": {"name": "densestream", "value": "qsgd"}, "index": None, "value": None},
         {"value": {"name": "uniform", "bits": 3, "bucket_size": 64, "rotate": True, "fit_scale": True}},
         {"value": {"name": "uniform", "bits": 12, "bucket_size": 2**31, "rotate": True}},
         {"value": {"name": "quantile", "buckets": 64, "separate_signs": False, "entropy": "huffman"}},
         {"value": {"name": "quantile", "buckets": 9, "center": "middle", "entropy": "rans"}, "sparsifier": "none"},
         {"sparsifier": "none", "joint": {"name": "skcompress", "buckets": 16, "groups": 1, "center": "middle"},
          "index": None, "value": None},
         {"sparsifier": "none", "joint": {"name": "skcompress", "rows": 8, "columns": 4.0, "groups": 32},
          "index": None, "value": None}]  # fmt: skip


def same(gpu, ours, theirs):
    want, got = np.asarray(ours), gpu.host(theirs)
    assert got.dtype == want.dtype and got.tobytes() == want.tobytes()


def go(gpu, config, gradient):
    """Two steps, as if of two ranks, and their sum; with a residual in one order of the threads, without in the
    other."""
    ours, theirs = Pipeline(config), Pipeline(config)
    for feedback in {0: (True, False), 1: (True,), 2: (False,)}[gpu.order]:
        residual = (gradient[::-1] * gradient.dtype.type(0.25)).copy() if feedback else None
        copy = None if residual is None else gpu.put(residual)
        velocity = (gradient * gradient.dtype.type(0.125)).copy() if config.has_velocity and feedback else None
        if velocity is not None and config.memory.leaves_whole:
            velocity = np.abs(velocity)
        velocity_copy = None if velocity is None else gpu.put(velocity)
        containers = []
        for step in range(2):
            given = gradient * gradient.dtype.type(1 - 0.5 * step)
            ours_now = ours.encode(given, residual, KEY._replace(step=step, rank=step), velocity=velocity)
            on_device = gpu.put(given)
            theirs_now = theirs.encode(on_device, copy, KEY._replace(step=step, rank=step), velocity=velocity_copy)
            same(gpu, ours_now, theirs_now)
            same(gpu, given, on_device)
            if residual is not None:
                same(gpu, residual, copy)
            if velocity is not None:
                same(gpu, velocity, velocity_copy)
            containers.append(ours_now)
        gathered = np.concatenate(containers)
        want, got = np.ones_like(gradient), gpu.put(np.ones_like(gradient))
        ours.decode(wire.split(gathered, 2, gradient.size), want, 0.5)
        there = gpu.put(gathered)
        with deferred.reading(there):
            theirs.decode(wire.split(there, 2, gradient.size), got, 0.5)
        same(gpu, want, got)


@pytest.mark.parametrize("sparsifier, index, value, joint", selection.each_third(LISTS))
def test_every_codec_on_every_input(gpu, sparsifier, index, value, joint):
    for name, gradient in INPUTS.items():
        try:
            go(gpu, cases.config(sparsifier, index, value, joint), gradient)
        except Exception as error:
            error.add_note(f"on the input {name!r}")
            raise


@pytest.mark.parametrize("sparsifier, index, value, joint", selection.each_third(LISTS, 1))
def test_short_containers(gpu, sparsifier, index, value, joint):
    """Version 2: the same bytes, and the same sum of containers that begin anywhere."""
    pipeline = Pipeline(cases.config(sparsifier, index, value, joint))
    for name in ("prime", "one", "float64"):
        gradient = INPUTS[name]
        residuals = [None, None] if gpu.order else [np.zeros_like(gradient), gpu.put(np.zeros_like(gradient))]
        parts = []
        for given in (gradient, gradient[::-1].copy(), np.full_like(gradient, np.nan)):
            packed = pipeline.encode(given, residuals[0], KEY, 2)
            same(gpu, packed, pipeline.encode(gpu.put(given), residuals[1], KEY, 2))
            parts.append(packed)
        for some in (parts[:2], parts):
            gathered, want, got = np.concatenate(some), np.ones_like(gradient), gpu.put(np.ones_like(gradient))
            pipeline.decode(pipeline.unpack(gathered, len(some), want.size, want.dtype, KEY), want)
            there = gpu.put(gathered)
            with deferred.reading(there):
                decoded = deferred.run_deferred(
                    there, lambda s=some, t=there, w=want: pipeline.unpack(t, len(s), w.size, w.dtype, KEY)
                )
                pipeline.decode(decoded, got)
            same(gpu, want, got)


@pytest.mark.parametrize("number", selection.each_third((number,) for number in range(len(cases.SPARSIFIERS))))
def test_all_pairs(gpu, number):
    """Each on one input, which goes round."""
    names, count = list(INPUTS), len(cases.SPARSIFIERS)
    for at in range(number, len(cases.COMBINATIONS), count):
        codecs, name = cases.COMBINATIONS[at], names[at // 7 % len(names)]
        try:
            go(gpu, cases.config(*codecs), INPUTS[name])
        except Exception as error:
            error.add_note(f"{codecs} on the input {name!r}")
            raise


@pytest.mark.parametrize("number", selection.each_third((number,) for number in range(len(WAYS))))
def test_other_settings(gpu, number):
    config = Config.load({"sparsifier": {"name": "topk", "density": 0.2}, "index": "rice"}, **WAYS[number])
    for gradient in (cases.random(5003), INPUTS["prime"], INPUTS["one"], INPUTS["limits"], INPUTS["float64"]):
        go(gpu, config, gradient)


def test_parts(gpu):
    """A bucket's tensors: selected from one by one, with a container for each, at any place in memory."""
    gradient, parts = cases.random(2011), [(0, 900), (900, 901), (901, 901), (901, 2011)]
    keys = [KEY._replace(parameter=number) for number in range(len(parts))]
    for sparsifier in cases.SPARSIFIERS:
        pipeline = Pipeline(cases.config(sparsifier, "rice", "qsgd"))
        residual = np.zeros_like(gradient)
        there, copy = gpu.put(gradient), gpu.put(residual)
        for ours, theirs in zip(
            pipeline.select(gradient, residual, KEY, parts), pipeline.select(there, copy, KEY, parts), strict=True
        ):
            assert ours is None and theirs is None or same(gpu, ours, theirs) is None
        same(gpu, residual, copy)
        containers = []
        for (i, j), key in zip(parts, keys, strict=True):
            containers.append(pipeline.encode(gradient[i:j], residual[i:j], key, 2))
            same(gpu, containers[-1], pipeline.encode(there[i:j], copy[i:j], key, 2))
        same(gpu, residual, copy)
        gathered = np.concatenate(2 * containers)
        for put in (np.array, gpu.put):
            data, out = put(gathered), put(np.ones_like(gradient))
            expected = [pipeline.expected(j - i, out.dtype, key) for (i, j), key in zip(parts, keys, strict=True)]
            with deferred.reading(out):
                found = deferred.run_deferred(data, lambda d=data, e=expected: frame.split(d, 2, e))
                for of_part, (i, j) in zip(found, parts, strict=True):
                    pipeline.decode(of_part, out[i:j], 0.5)
            if put is np.array:
                want = out
            else:
                same(gpu, want, out)


@pytest.mark.parametrize("sparsifier", selection.each_third(((name,) for name in cases.SPARSIFIERS), 1))
def test_a_gradient_that_is_not_finite(gpu, sparsifier):
    """It goes whole, and the residual is as it was."""
    for index, value, joint in (("rice", "qsgd", None), ("packed", "raw", None), ("bloom", "fit_poly", None),
                                (None, None, "densestream"), (None, None, "skcompress")):  # fmt: skip
        pipeline = Pipeline(cases.config(sparsifier, index, value, joint))
        for bad in (np.nan, -np.inf):
            for feedback in (True, False):
                gradient = cases.random(307)
                gradient[200] = bad
                residual = gpu.put(cases.random(307, seed=1)) if feedback else None
                got = pipeline.encode(gpu.put(gradient), residual, KEY)
                same(gpu, Pipeline(pipeline.config).encode(gradient, None, KEY), got)
                if feedback:
                    same(gpu, cases.random(307, seed=1), residual)
                for parts in (None, [(0, 100), (100, 307)]):
                    assert pipeline.select(gpu.put(gradient), residual, KEY, parts) is None
                out = gpu.put(np.zeros(307, np.float32))
                pipeline.decode([wire.unpack(got)], out)
                assert not np.isfinite(gpu.host(out)[200])


@pytest.mark.parametrize("memory", ["dgc", "scaled_momentum"])
def test_a_gradient_that_is_not_finite_goes_as_it_is_beside_a_velocity(gpu, memory):
    pipeline, gradient = Pipeline(Config.load("topk_rice_qsgd", memory=memory)), cases.random(307)
    gradient[200] = np.nan
    for version in (1, 2):
        residual, velocity = (gpu.put(np.ones_like(gradient)) for _ in range(2))
        got = pipeline.encode(gpu.put(gradient), residual, KEY, version, velocity)
        same(gpu, pipeline.encode_uncompressed(gradient, KEY, version), got)
        same(gpu, pipeline.encode(gradient, np.ones_like(gradient), KEY, version, np.ones_like(gradient)), got)
        same(gpu, np.ones_like(gradient), residual)
        same(gpu, np.ones_like(gradient), velocity)


def test_an_encode_takes_few_launches_and_waits_once(gpu):
    """Of one tensor; and an exchange's selections from a bucket's tensors share the wait."""
    if not hasattr(gpu.module, "waits"):
        pytest.skip("launches are counted in the emulator")
    pipeline = Pipeline(Config.load("topk_rice_qsgd"))
    residual, gradient = gpu.put(cases.random(40_000)), gpu.put(cases.random(40_000, seed=2))
    blocks = Pipeline(Config.load("topk_rice_qsgd", joint="densestream", index=None, value=None))
    runs = ((13, 1, lambda: pipeline.encode(gradient, residual, KEY)),
            (17, 2, lambda: blocks.encode(gradient, residual, KEY)),  # it waits for the number of blocks, too
            (21, 1, lambda: pipeline.select(gradient, residual, KEY, [(0, 20_000), (20_000, 40_000)])))  # fmt: skip
    for most, waits, run in runs:
        before = gpu.module.launches, gpu.module.waits
        run()
        assert gpu.module.launches - before[0] <= most and gpu.module.waits - before[1] == waits


FEW = np.where(np.arange(4000) % 400 == 7, cases.random(4000), np.float32(0)).astype(np.float32)
"""Ten elements are not zero."""
WAYS_OF_FEW = [
    {}, {"index": "packed", "value": "sign"}, {"value": "fit_poly"}, {"index": "bloom", "value": "fit_dexp"},
    {"index": {"name": "bloom", "fpr": 0.3}, "value": "fit_poly", "force_index": True},
    {"index": "raw", "value": "fit_poly", "force_index": True},
    {"joint": "densestream"}, {"joint": "skcompress"},
    {"sparsifier": {"name": "topk", "density": 0.3, "density_of": "nonzeros"}, "index": "raw", "value": "raw"},
    *({"sparsifier": {"name": name, "density": 0.5}, "value": "sign"} for name in ("block_topk", "sampled_topk")),
    {"sparsifier": {"name": "topk_capped", "cap": 99}, "value": "sign"},
    {"memory": "dgc", "value": "sign"}, {"memory": "scaled_momentum", "value": "sign"},
    {"sparsifier": {"name": "chunk_topk", "density": 0.1, "chunk": 600}, "value": "sign"},
]  # fmt: skip


@pytest.mark.parametrize("settings", selection.each_third((settings,) for settings in WAYS_OF_FEW))
def test_fewer_nonzeros_than_are_to_be_kept(gpu, settings):
    """The device finds them out late, selects again, and gives the same bytes; on the next steps, at once."""
    config = Config.load({"sparsifier": {"name": "topk", "density": 0.2}, **settings})
    go(gpu, config, FEW)
    go(gpu, config, FEW.astype(np.float64))
    container = wire.unpack(Pipeline(config).encode(FEW, None, KEY))
    density_of = getattr(config.sparsifier, "density_of", "elements")
    if "bloom" not in str(settings) and "block" not in str(settings):
        assert container.count <= 10 and (container.count == 10 or density_of == "nonzeros")


@pytest.mark.parametrize("sparsifier", selection.each_third(((name,) for name in cases.SPARSIFIERS), 2))
def test_fewer_nonzeros_in_parts(gpu, sparsifier):
    """As exchanges over MPI select."""
    parts = [(0, 7), (7, 2000), (2000, 4000)]
    ours, theirs = (Pipeline(cases.config(sparsifier, "rice", "qsgd")) for _ in range(2))
    residual, there = FEW * 2, gpu.put(FEW * 2)
    for _ in range(2):
        selected = ours.select(FEW, residual, KEY, parts)
        on_device = theirs.select(gpu.put(FEW), there, KEY, parts)
        for want, got in zip((*selected, residual), (*on_device, there), strict=True):
            assert (want is None) == (got is None)
            if want is not None:
                same(gpu, want, got)


def test_fewer_nonzeros_are_found_with_few_waits(gpu):
    """The first time, they are selected again; afterwards, top-k of this parameter waits for its count."""
    if not hasattr(gpu.module, "waits"):
        pytest.skip("waits are counted in the emulator")
    pipeline, waits = Pipeline(Config.load("topk_rice_qsgd", density=0.2)), []
    for parameter, gradient in ((1, cases.random(4000)), (2, FEW), (2, FEW), (1, cases.random(4000))):
        residual, there = gpu.put(np.zeros(4000, np.float32)), gpu.put(gradient)
        before = gpu.module.waits
        pipeline.encode(there, residual, KEY._replace(parameter=parameter))
        waits.append(gpu.module.waits - before)
    assert waits == [1, 4, 3, 1]


def test_an_exchange_gets_the_nonzeros_only(gpu):
    """And the gradient is added to the residual once, though the elements are selected twice."""
    pipeline, residual = Pipeline(Config.load(density=0.2)), gpu.put(FEW)
    indices, values = pipeline.select(gpu.put(FEW), residual, KEY)
    same(gpu, FEW * 2, residual)
    same(gpu, np.flatnonzero(FEW).astype(np.uint32), indices)
    same(gpu, 2 * FEW[FEW != 0], values)


def test_a_decode_waits_three_times(gpu):
    """For the headers, the checksums and the codecs' verdicts, of all ranks together."""
    if not hasattr(gpu.module, "waits"):
        pytest.skip("waits are counted in the emulator")
    pipeline = Pipeline(Config.load("topk_rice_qsgd"))
    out = gpu.put(np.empty(9000, np.float32))
    parts = [pipeline.encode(cases.random(9000, seed=rank), None, KEY, 2) for rank in range(4)]
    gathered = gpu.put(np.concatenate(parts))
    before = gpu.module.waits
    with deferred.reading(out):
        found = deferred.run_deferred(gathered, lambda: pipeline.unpack(gathered, 4, 9000, out.dtype, KEY))
        pipeline.decode(found, out)
    assert gpu.module.waits - before == 3


@pytest.mark.parametrize("sparsifier, index, value, joint", selection.each_third(LISTS, 2))
def test_broken_containers(gpu, sparsifier, index, value, joint):
    """The same error as the CPU's where there is one, with the rank; and else the same sum."""
    pipeline, numel = Pipeline(cases.config(sparsifier, index, value, joint)), 1024
    good = pipeline.encode(INPUTS["thousand"], None, KEY)
    random = np.random.default_rng(4)

    def decoded(put, data):
        out = put(np.zeros(numel, np.float32))
        data = put(data)
        try:
            with deferred.reading(out):
                containers = deferred.run_deferred(out, lambda: wire.split(data, 2, numel))
                pipeline.decode(containers, out)
        except ContainerError as error:
            return str(error)
        return gpu.host(out).tobytes()

    for attempt in range(24):
        broken = good.copy()
        at = int(random.integers(64, good.size)) if attempt % 2 else int(random.integers(0, 64))
        broken[at] ^= 1 << random.integers(0, 8)
        if attempt > 3:
            broken[12:16] = np.array([sections.checksum(broken)], np.uint32).view(np.uint8)
        data = np.concatenate([good, broken])
        want, got = decoded(np.array, data), decoded(gpu.put, data)
        if isinstance(want, str) and isinstance(got, str):
            # Which of two complaints comes first may differ.
            assert ("rank 1" in want) == ("rank 1" in got)
        else:
            assert want == got
    for cut in (0, 8, 63, 64, good.size // 2 // 8 * 8, good.size - 8):
        data = np.concatenate([good, good[:cut]])
        assert decoded(np.array, data) == decoded(gpu.put, data)


def test_residuals_move_to_the_gradients_device(gpu):
    memory = Memory()
    like = gpu.put(np.empty(0, np.float32))
    for name in "ab":
        memory.residual(name, 3, np.dtype(np.float32))[:] = [1, 2, 3]
    assert gpu.host(memory.residual("a", 3, np.dtype(np.float32), like)).tolist() == [1, 2, 3]
    vector = memory.joined("ab", [3, 3], np.dtype(np.float32), like)
    assert gpu.host(vector).tolist() == [1, 2, 3] * 2
    vector[:1] = vector[2:3]
    state = memory.state_dict()
    assert state["a"].tolist() == [3, 2, 3] and isinstance(state["a"], np.ndarray)
    assert memory.residual("a", 3, np.dtype(np.float32)).tolist() == [3, 2, 3]
    memory.residual("a", 3, np.dtype(np.float32))[:] = 7
    assert gpu.host(memory.joined("ab", [3, 3], np.dtype(np.float32), like)).tolist() == [7, 7, 7, 1, 2, 3]


@pytest.mark.parametrize("settings", [{}, {"memory": "dgc"}, {"exchange": "reduce_scatter"}], ids=str)
def test_two_levels_are_summed_as_on_the_host(gpu, settings):
    """Of two nodes of two ranks, in two steps; in the first, a rank holds a residual of another one's slice. Then a
    rank fails, which all are told."""
    config, numel = Config.load(settings, scope="model", density=0.2, hierarchical=2), 240
    pipeline = Pipeline(config)
    held = np.zeros(numel, np.float32)
    held[numel // 2 :] = cases.random(numel // 2)
    sums: list[list[np.ndarray]] = [[], []]
    for made, put in zip(sums, (lambda one: one, gpu.put), strict=True):
        state = [[put(np.zeros(numel // 2, np.float32)) for _ in range(2)] for _ in range(4)]
        for step in range(3):
            works = []
            for place, (residual, velocity) in zip(two_levels.PLACES, state, strict=True):
                given = put(cases.random(numel, seed=10 * step + place.rank))
                works.append(
                    TwoLevelSum(
                        pipeline, place, [Slice(pipeline, (0, numel), KEY._replace(step=step))], given,
                        SliceResidual(residual, put(held) if (step, place.rank) == (0, 2) else None),
                        SliceResidual(velocity) if config.has_velocity else None,
                    )
                )  # fmt: skip
            if step == 2:
                works[3].failures.append(MemoryError("no ink"))
            ends = two_levels.run([work.steps() for work in works])
            if step == 2:
                assert {str(end) for end in ends} == {"rank 3 could not take part in the sum: MemoryError: no ink"}
                continue
            made.append(put(np.ones(numel, np.float32)))
            ends[3].write(made[-1], 0.5)
            made += [one.copy() for one in sum(state, [])]
    for ours, theirs in zip(*sums, strict=True):
        same(gpu, ours, theirs)
