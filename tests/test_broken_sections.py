"""Broken sections of every codec and setting that writes another form: an error that says why, or a valid result."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from hvd_deepreduce.codecs.entropy import huffman, rans
from hvd_deepreduce.codecs.index.bloom import POLICIES, Bloom
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint import stream_format
from hvd_deepreduce.codecs.joint.context_qsgd import ContextQSGD
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.skcompress import SKCompress
from hvd_deepreduce.codecs.joint.sketchml import SketchML
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.codecs.value.deflate import Deflate
from hvd_deepreduce.codecs.value.fit_poly import FitPoly
from hvd_deepreduce.codecs.value.qsgd import QSGD
from hvd_deepreduce.codecs.value.quantile import Quantile
from hvd_deepreduce.codecs.value.sign import Sign
from hvd_deepreduce.codecs.value.ternary import Ternary
from hvd_deepreduce.codecs.value.uniform import Uniform
from hvd_deepreduce.codecs.value.zstd import Zstd
from tests import cases

KEY = RngKey(1, 2, 3)


class Section(NamedTuple):
    """Bytes, the number of elements in them, and what reads as many of other bytes: it raises ValueError, or checks
    its result."""

    data: np.ndarray
    count: int
    read: Callable[[np.ndarray, int], None]


def no_more_than(numel, count):
    """No caller asks for more."""
    if count > numel:
        raise ValueError


def of_index(codec, numel=10_007, count=701):
    indices = cases.some_indices(numel, count)
    codec = codec.resolve(indices, numel)
    section, support = codec.encode(indices, numel, KEY)

    def read(data, count):
        no_more_than(numel, count)
        cases.check_support(codec.decode(data, numel, count, KEY), numel, count)

    return Section(section, support.size, read)


def of_value(codec, count=701):
    values = cases.heavy(count)

    def read(data, count):
        decoded = codec.decode(data, count, None, values.dtype, KEY)
        assert decoded.size == count and (codec.name == "raw" or np.isfinite(decoded).all())  # NaN is sent raw

    return Section(codec.encode(values, None, KEY)[0], count, read)


def of_joint(codec, dense, numel=4001, count=701):
    numel = count if dense else numel
    values, indices = cases.heavy(count), None if dense else cases.some_indices(numel, count)
    section, support = codec.encode(indices, values, numel, KEY)

    def read(data, count):
        no_more_than(numel, count)
        if dense and count != numel:
            raise ValueError
        found, decoded = codec.decode(data, numel, count, dense, values.dtype, KEY)
        assert decoded.size == count and np.isfinite(decoded).all() and (found is None) == dense
        if not dense:
            cases.check_support(found, numel, count)

    return Section(section, count if support is None else support.size, read)


def of_pairs(numel=4001, count=701):
    """The form of DenseStream that only exchanges send."""
    tensor = SparseTensor(numel, cases.some_indices(numel, count), cases.heavy(count))

    def read(data, count):
        found = stream_format.unpack(data, numel, tensor.values.dtype)
        if found.values.size != count:
            raise ValueError
        cases.check_support(found.indices(), numel, count)

    return Section(stream_format.pack(Stream.from_pairs(tensor), stream_format.PAIRS), count, read)


def of_symbols(coder, count):
    symbols = np.minimum(np.random.default_rng(3).geometric(0.15, count), 255).astype(np.uint8)

    def read(data, count):
        assert coder.decode(data, count).size == count

    return Section(coder.encode(symbols), count, read)


VALUES = [
    *(QSGD(bucket_size=64, entropy=entropy) for entropy in ("huffman", "rans")), QSGD(bits=3, bucket_size=64),
    *(Quantile(buckets=20, entropy=entropy) for entropy in ("none", "huffman", "rans")), Sign(bucket_size=64),
    *(Uniform(bits=bits, bucket_size=64) for bits in (3, 8, 16)), Uniform(bits=5, bucket_size=64, rotate=True),
    Ternary(bucket_size=64), Deflate(shuffle=False), Zstd(shuffle=False), FitPoly(degree=2, segments=3),
]  # fmt: skip
JOINTS = [
    *(DenseStream(coded=c, value=v) for c in (False, True) for v in ("raw", "float16", "bfloat16", "qsgd")),
    *(codec(buckets=40, groups=5) for codec in (SketchML, SKCompress)), *(ContextQSGD(bits=bits) for bits in (3, 7)),
]  # fmt: skip
SECTIONS: dict[str, Callable[[], Section]] = {
    **{f"index {name}": partial(of_index, codec) for name, codec in cases.INDEX.items()},
    **{f"dense index {name}": partial(of_index, codec, 9000, 5000) for name, codec in cases.INDEX.items()},
    **{f"bloom {policy}": partial(of_index, Bloom(fpr=0.01, policy=policy), 3000, 60) for policy in POLICIES},
    **{f"value {name}": partial(of_value, codec) for name, codec in cases.VALUE.items()},
    **{f"value {codec!r}": partial(of_value, codec) for codec in VALUES},
    **{f"joint {name}": partial(of_joint, codec, False) for name, codec in cases.JOINT.items()},
    **{f"joint {codec!r}": partial(of_joint, codec, False) for codec in JOINTS},
    **{f"dense {codec!r}": partial(of_joint, codec, True) for codec in [*cases.JOINT.values(), *JOINTS]},
    "pairs": of_pairs,
    **{f"{name} of {count}": partial(of_symbols, coder, count) for name, coder in (("huffman", huffman), ("rans", rans))
       for count in (31, 368, 2051, 32_799, 98_400)},
}  # fmt: skip


def refused(read, data, count, must_be=False):
    try:
        read(data, count)
    except ValueError as error:
        assert not error.args or len(str(error).split()) > 2, "an error is a sentence"
        return True
    assert not must_be, "it was accepted"
    return False


@pytest.mark.parametrize("name", SECTIONS)
def test_cut_and_longer_sections_and_other_counts_are_refused(name):
    section, count, read = SECTIONS[name]()
    read(section, count)
    must_be = "bloom" not in name  # a filter of another size is another filter, which can have as many positives
    rng = np.random.default_rng(2)
    for size in {*range(min(section.size, 60)), *rng.integers(0, section.size, 60).tolist(), section.size - 1}:
        refused(read, section[:size].copy(), count, must_be)
    for more in (1, 2, 4, 8):
        refused(read, np.append(section, np.zeros(more, np.uint8)), count, must_be)
    more = () if "fit_" in name or "Fit" in name else (count + 40, 2**32 - 1)  # a fit's other values are zeros
    for other in (count - 30, 0, *more):
        refused(read, section, other, must_be)


@pytest.mark.parametrize("name", SECTIONS)
def test_changed_sections_are_refused_or_valid(name):
    """Half of the changes are at the beginning, in settings and scales."""
    section, count, read = SECTIONS[name]()
    rng, number = np.random.default_rng(0), 0
    for _ in range(300):
        broken = section.copy()
        at = rng.integers(min(section.size, 24) if rng.random() < 0.5 else section.size)
        broken[at] ^= np.uint8(1 << rng.integers(8))
        number += refused(read, broken, count)
    assert number or name in ("value raw", "index bitmap"), "no change was refused"


@pytest.mark.parametrize("name", SECTIONS)
def test_any_bytes_are_refused_or_valid(name):
    """Alone, and behind the beginning of a section."""
    section, _, read = SECTIONS[name]()
    rng = np.random.default_rng(1)
    for attempt in range(100):
        size, count = rng.integers(0, 80), int(rng.choice([0, 1, 9, 200, 3000]))
        data = rng.choice([0, 1, 127, 128, 255], size) if attempt % 3 else rng.integers(0, 256, size)
        kept = section[: rng.integers(1 + section.size // 8) if attempt % 2 else 0]
        refused(read, np.append(kept, data.astype(np.uint8)), count)
