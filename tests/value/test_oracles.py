"""Value codecs write their oracle's bytes, and decode them to its values. test_fit_poly.py and test_fit_dexp.py have
those that sort, and test_deflate_zstd.py those that lose nothing."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.joint.three_lc import ThreeLC
from hvd_deepreduce.codecs.value.half import Half
from hvd_deepreduce.codecs.value.natural import Natural
from hvd_deepreduce.codecs.value.qsgd import QSGD
from hvd_deepreduce.codecs.value.quantile import Quantile
from hvd_deepreduce.codecs.value.sign import Sign
from hvd_deepreduce.codecs.value.ternary import Ternary
from hvd_deepreduce.codecs.value.uniform import Uniform
from tests.oracle import half, huffman, lloyd, natural, qsgd, quantile, rans, sign, ternary, three_lc, uniform
from tests.value.quantizers import AWKWARD, KEY, clipped, normals, round_trip, vectors


class Case(NamedTuple):
    """Settings that are drawn, those for longer inputs, and the oracle's functions of a codec and its input."""

    codec: type
    drawn: dict[str, Sequence[Any]]
    usual: list[dict[str, Any]]
    encode: Callable[[Any, np.ndarray], bytes]
    decode: Callable[[bytes, int], np.ndarray]


SIZES = [1, 2, 7, 64, 512]
BUCKETS = [2, 3, 4, 5, 7, 8, 16, 64, 256]
CODERS = {"none": (), "huffman": (1, huffman.encode), "rans": (2, rans.encode)}


def of_qsgd(codec, x):
    return qsgd.encode(x, codec.bits, codec.bucket_size, codec.norm == "l2", KEY, codec.scaled)


def of_quantile(codec, x):
    return quantile.encode(x, codec.buckets, codec.center, codec.separate_signs, *CODERS[codec.entropy])


CASES = {
    "qsgd": Case(QSGD, {"bits": range(2, 9), "bucket_size": SIZES, "norm": ["max", "l2"], "scaled": [False, True]},
                 [{}, {"bucket_size": 700, "norm": "l2"}, {"bits": 2, "scaled": True}], of_qsgd, qsgd.decode),
    "natural": Case(Natural, {}, [{}], lambda codec, x: natural.encode(x, KEY), natural.decode),
    "sign": Case(Sign, {"bucket_size": [*SIZES, None]}, [{}, {"bucket_size": 700}],
                 lambda codec, x: sign.encode(x, codec.bucket_size), sign.decode),
    "ternary": Case(Ternary, {"bucket_size": [*SIZES, None], "clip": [None, 1.0, 2.5]},
                    [{}, {"bucket_size": 1500, "clip": 2.5}, {"bucket_size": None, "clip": 2.5},
                     {"bucket_size": None, "scaled": True}, {"bucket_size": 100, "scaled": True}],
                    lambda codec, x: ternary.encode(x, codec.bucket_size or max(1, x.size), codec.clip, KEY,
                                                    codec.scaled), ternary.decode),
    "uniform": Case(Uniform, {"bits": range(1, 17), "bucket_size": SIZES, "scaled": [False, True]},
                    [{"bits": 8}, {"bits": 16}, {"bits": 1, "bucket_size": 100, "scaled": True}],
                    lambda codec, x: uniform.encode(x, codec.bits, codec.bucket_size, KEY, scaled=codec.scaled),
                    lambda data, count: uniform.decode(data, count, KEY)),
    "rotated": Case(Uniform, {"rotate": [True], "bits": range(1, 17), "bucket_size": [1, 2, 8, 64, 512, 2**31],
                              "scaled": [False, True]},
                    [{"rotate": True, "bits": 16, "bucket_size": 256},
                     {"rotate": True, "bits": 2, "bucket_size": 256, "scaled": True}],
                    lambda codec, x: uniform.encode(x, codec.bits, codec.bucket_size, KEY, True, codec.scaled),
                    lambda data, count: uniform.decode(data, count, KEY)),
    "half": Case(Half, {"dtype": ["float16", "bfloat16"]}, [{"dtype": "float16"}, {"dtype": "bfloat16"}],
                 lambda codec, x: half.encode(x, codec.dtype), lambda data, count: half.decode(data)),
    "quantile": Case(Quantile, {"buckets": BUCKETS, "center": ["mean", "middle"], "separate_signs": [False, True]},
                     [{"buckets": 100, "center": center, "separate_signs": separate, "entropy": entropy}
                      for center in ("mean", "middle") for separate in (False, True) for entropy in CODERS],
                     of_quantile, quantile.decode),
    "lloyd": Case(Quantile, {"splits": ["lloyd"], "buckets": [2, 3, 4, 8, 64]},
                  [{"splits": "lloyd", "buckets": buckets} for buckets in (2, 4, 16)],
                  lambda codec, x: lloyd.encode(x, codec.buckets), quantile.decode),
    "three_lc": Case(ThreeLC, {"multiplier": [1.0, 1.5, 1.75, 1.999]}, [{}, {"multiplier": 1.9}],
                     lambda codec, x: three_lc.encode(x, codec.multiplier), three_lc.decode),
}  # fmt: skip


def check(name, codec, values):
    section, decoded = round_trip(codec, values)
    assert section.tobytes() == CASES[name].encode(codec, clipped(values))
    if getattr(codec, "entropy", "none") == "none":
        expected = CASES[name].decode(section.tobytes(), values.size)
        # Of QSGD, docs/container.md leaves the order of the last two factors open.
        np.testing.assert_allclose(decoded, expected, *((3e-7, 1e-44) if name == "qsgd" else (0, 0)))


@pytest.mark.parametrize("name", CASES)
@given(values=vectors, data=st.data())
def test_bytes_and_values_are_the_oracle_s(name, values, data):
    settings = {key: data.draw(st.sampled_from(allowed)) for key, allowed in CASES[name].drawn.items()}
    check(name, CASES[name].codec(**settings), values)


@pytest.mark.parametrize("name", CASES)
def test_awkward_values(name):
    for settings in CASES[name].usual:
        codec = CASES[name].codec(**settings)
        for kind, values in AWKWARD.items():
            if name not in ("quantile", "lloyd") or values.size < 1100:  # these oracles are slow
                check(name, codec, values)
            for entropy in ("huffman", "rans") if name == "qsgd" else ():
                coded = round_trip(codec.model_copy(update={"entropy": entropy}), values)[1]
                np.testing.assert_array_equal(coded, round_trip(codec, values)[1], err_msg=kind)


@pytest.mark.parametrize("settings", CASES["quantile"].usual, ids=str)
def test_quantiles_of_many_equal_values(settings):
    values = normals(1500)
    values[::3] = 0
    values[::11] = 0.25
    check("quantile", Quantile(**settings), values)
