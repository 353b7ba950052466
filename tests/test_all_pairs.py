"""Every pair of sparsifier, index codec and value codec, and every sparsifier x joint codec, on every awkward input."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from tests import cases

KEY = RngKey(21, 22, 23, 1)
INPUTS = cases.inputs()


def increasing(indices, numel):
    return bool(np.all(indices[1:] > indices[:-1])) and (not indices.size or int(indices[-1]) < numel)


def go(pipeline, gradient, residual):
    """Encodes, reads back, and checks what always holds."""
    numel = gradient.size
    whole = gradient.copy() if residual is None else residual + gradient
    data = pipeline.encode(gradient, residual, KEY)
    container = wire.unpack(data, 2, numel)
    assert container.nbytes == data.size and container.dtype == gradient.dtype
    support, values = decode_part(container, numel, 2)
    assert np.isfinite(values).all() and values.size == container.count
    assert whole.any() or not values.any()
    if support is None:
        assert container.count == numel and container.sparsifier == 0
        support = np.arange(numel)
    else:
        assert support.dtype == np.uint32 and support.size == container.count and increasing(support, numel)
    if residual is not None:
        # What every receiver decodes, and nothing else, was taken out of the residual.
        whole[support] -= values.astype(whole.dtype)
        np.testing.assert_array_equal(residual, whole)


@pytest.mark.parametrize(("sparsifier", "index", "value", "joint"), cases.COMBINATIONS)
def test_all_inputs(sparsifier, index, value, joint):
    pipeline = Pipeline(cases.config(sparsifier, index, value, joint))
    for name, gradient in INPUTS.items():
        try:
            go(pipeline, gradient, (gradient[::-1] * gradient.dtype.type(0.25)).copy())
        except Exception as error:
            error.add_note(f"on the input {name!r}, with a residual")
            raise


@pytest.mark.parametrize("sparsifier", cases.SPARSIFIERS)
def test_without_a_residual(sparsifier):
    for index, value, joint in (codecs[1:] for codecs in cases.COMBINATIONS if codecs[0] == "topk"):
        pipeline = Pipeline(cases.config(sparsifier, index, value, joint))
        for gradient in INPUTS.values():
            before = gradient.copy()
            go(pipeline, gradient, None)
            np.testing.assert_array_equal(gradient, before)


@pytest.mark.parametrize("kind", ["index", "value", "joint"])
def test_density_one(kind):
    every = {"index": cases.INDEX, "value": cases.VALUE, "joint": cases.JOINT}[kind]
    for codec in every.values():
        pipeline = Pipeline(Config.load({kind: codec}, sparsifier={"name": "topk", "density": 1.0}))
        for name in ("empty", "one", "all_zero", "prime", "float64"):
            go(pipeline, INPUTS[name], np.zeros_like(INPUTS[name]))


@pytest.mark.parametrize("name", cases.VALUE)
def test_value_codecs_decode_what_they_promise(name):
    codec = cases.VALUE[name]
    for kind, values in INPUTS.items():
        before = values.copy()
        for support in (None, np.arange(3, 3 + 2 * values.size, 2, dtype=np.uint32)):
            section, order = codec.encode(values, support, KEY)
            np.testing.assert_array_equal(values, before)
            assert section.dtype == np.uint8 and section.ndim == 1
            decoded = type(codec).decode(aligned(section), values.size, support, values.dtype, KEY._replace(rank=0))
            assert decoded.dtype in (np.float32, values.dtype), kind
            assert decoded.shape == values.shape and np.isfinite(decoded).all(), kind
            if order is not None:
                assert order.dtype == np.uint32 and sorted(order.tolist()) == list(range(values.size)), kind
            again, _ = codec.encode(values, support, KEY)
            np.testing.assert_array_equal(again, section, err_msg=f"{kind}: a second time gives other bytes")


def aligned(section):
    """A section as a container hands it out: read-only bytes that begin on a word."""
    room = np.zeros(-(-max(section.size, 1) // 8), np.uint64)
    copy = room.view(np.uint8)[: section.size]
    copy[:] = section
    copy.flags.writeable = False
    return copy


DIGESTS = """
import hashlib
import itertools
import numpy as np
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.ops import arrays, blocks, library, select
from hvd_deepreduce.codecs.entropy import huffman, rans
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.wire.decoding import decode_part
from hvd_deepreduce.pipeline import Pipeline
from tests import cases
from tests.entropy.test_coders import STREAMS
from tests.index.test_lossless import EXTREMES, LOSSLESS
from tests.oracle.pipeline import accumulated

print(library.vector_level())
configs = {f"index {n}": dict(index=c, value="raw") for n, c in cases.INDEX.items()}
configs |= {f"value {n}": dict(index="raw", value=c) for n, c in cases.VALUE.items()}
configs |= {f"joint {n}": dict(joint=c) for n, c in cases.JOINT.items()}
inputs = [*cases.inputs().values(), cases.random(9001), np.round(cases.random(5003), 1)]
for name, codecs in configs.items():
    digest = hashlib.sha256()
    for density in (0.02, 0.3, 1.0):
        pipeline = Pipeline(Config.load(sparsifier={"name": "topk", "density": density}, **codecs))
        for gradient in inputs:
            residual = np.zeros_like(gradient)
            data = pipeline.encode(gradient, residual, RngKey(1, 2, 3))
            support, values = decode_part(wire.unpack(data), gradient.size)
            for array in (data, residual, values) if support is None else (data, residual, values, support):
                digest.update(array.tobytes())
    print(name.replace(" ", "-"), digest.hexdigest())
# Where index codecs and entropy coders change their layout.
for name, coder in (("huffman", huffman), ("rans", rans)):
    digest = hashlib.sha256()
    for symbols in STREAMS.values():
        section = coder.encode(symbols)
        digest.update(section.tobytes() + coder.decode(section, symbols.size).tobytes())
    print(f"coder-{name}", digest.hexdigest())
for name in LOSSLESS:
    digest = hashlib.sha256()
    for indices, numel in EXTREMES.values():
        if numel < 1 << 28 or name != "bitmap":
            kept = np.array(indices, np.uint32)
            section, _ = cases.INDEX[name].encode(kept, numel, RngKey(1, 2, 3))
            assert np.array_equal(cases.INDEX[name].decode(section, numel, kept.size, RngKey(1, 2, 3)), kept)
            digest.update(section.tobytes())
    print(f"extremes-{name}", digest.hexdigest())
# Selections and accumulations, which saturate at the largest number.
digest = hashlib.sha256()
for n, dtype in itertools.product((1, 15, 16, 17, 4100, 70001), (np.float32, np.float64)):
    dense, limit = np.round(50 * cases.random(n, dtype), n % 2 * 6), np.finfo(dtype).max
    many = np.random.default_rng(n).choice([limit, -limit, 1, 0], n).astype(dtype)
    for k, gradient in itertools.product((1, -(-n // 100), n), (cases.random(n, dtype, 1), many)):
        for operation in (lambda x: select.topk(x, gradient, k), lambda x: select.threshold(x, gradient, 40.0),
                          lambda x: [arrays.add(x, gradient)][1:], lambda x: [blocks.norms(x, gradient, 64, True)]):
            for start in (dense, many):
                work = start.copy()
                for array in operation(work):
                    digest.update(array.tobytes())
                assert work.tobytes() == accumulated(start, gradient).tobytes()
print("selections", digest.hexdigest())
# What is wrong with sections that end early and have indices that are too large, and which of the two is said.
none = np.empty(0, np.uint8)
indices = np.flatnonzero(np.random.default_rng(0).random(9001) < 0.1).astype(np.uint32)
for name, codec in cases.INDEX.items():
    section, support = codec.encode(indices, 9001, RngKey(1, 2, 3))
    said = []
    for cut, numel in itertools.product(range(0, section.size + 1, 1 + section.size // 40), (9001, 5000, 1000)):
        count = min(support.size, numel)
        key, values = RngKey(1, 2, 3), np.zeros(4 * count, np.uint8)
        one = wire.Container(1, codec.id, 1, np.dtype("f4"), numel, count, key, 0, section[:cut], values, none)
        try:
            decode_part(one, numel)
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 20
    print(f"refusals-{name}", "-".join(sorted(set(said))).replace(" ", "_")[:300], end="")
    print(hashlib.sha256(repr(said).encode()).hexdigest())
"""


def test_all_vector_levels_give_the_same_bytes():
    """Ranks on different machines must send and decode the same."""
    found = {}
    for wanted in ("portable", "avx2", ""):
        environment = {**os.environ, "HVD_DEEPREDUCE_VECTOR": wanted}
        paths = [environment.get("PYTHONPATH", ""), str(Path(__file__).parents[1])]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        done = subprocess.run([sys.executable, "-c", DIGESTS], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        level, *lines = done.stdout.splitlines()
        found[wanted] = int(level), dict(line.split() for line in lines)
    assert found["portable"][0] == 0 and found["avx2"][0] <= 1
    for wanted in ("avx2", ""):
        assert found[wanted][1] == found["portable"][1]
