"""The setting ``scaled`` of unbiased quantizers: the operator of lemma 1 of Qsparse-local-SGD. test_oracles.py compares
its bytes with the oracle's."""

from math import log2, sqrt

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config, ConfigError
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.standalone import unpack

NUMEL, KEPT, DRAWS = 640, 64, 400
EQUAL = np.ones(KEPT)
ENDS = np.array([1, -1, *np.resize([1e-3, -1e-3], KEPT - 2)])
SMALL = np.array([1, *np.full(KEPT - 1, 0.15)])
# Of each quantizer with few levels: beta of its 64 values, and values whose variance exceeds their squares.
OPERATORS = {
    "qsgd": ({"name": "qsgd", "bits": 2, "norm": "l2"}, min(KEPT, sqrt(KEPT)), EQUAL),
    "qsgd, 3 bits": ({"name": "qsgd", "bits": 3, "norm": "l2"}, min(KEPT / 9, sqrt(KEPT) / 3), EQUAL),
    "qsgd, largest": ({"name": "qsgd", "bits": 2}, min(KEPT / 4, sqrt(KEPT)), SMALL),
    "ternary": ({"name": "ternary"}, min(KEPT / 4, sqrt(KEPT)), SMALL),
    "uniform": ({"name": "uniform", "bits": 1}, KEPT / 2, ENDS),
    "rotated": ({"name": "uniform", "bits": 1, "rotate": True}, 2 * log2(2 * KEPT), EQUAL),
}


def draws_of(value, sparsifier, x):
    """What a receiver decodes in each of many steps, float64 ``[DRAWS, NUMEL]``."""
    sparsifier = {"name": sparsifier, "density": KEPT / NUMEL}
    pipeline = Pipeline(Config.load(sparsifier=sparsifier, value=value, error_feedback=False))
    out = np.empty((DRAWS, NUMEL), np.float32)
    for step in range(DRAWS):
        key = RngKey(3, 1, step)
        pipeline.decode([unpack(pipeline.encode(x, None, key))], out[step], 1.0, key)
    return out.astype(np.float64)


@pytest.mark.parametrize("sparsifier", ["topk", "randomk"])
@pytest.mark.parametrize("name", OPERATORS)
def test_lemma_1_where_the_operator_without_the_division_is_no_compression(name, sparsifier):
    """E||x - Q(Comp_k(x)) / (1 + beta)||^2 <= (1 - k / (d (1 + beta))) ||x||^2."""
    settings, beta, values = OPERATORS[name]
    x = np.zeros(NUMEL, np.float32)
    x[5:] = np.resize(values, NUMEL - 5) if sparsifier == "randomk" else np.append(values, np.zeros(NUMEL - 5 - KEPT))
    energy, value = np.sum(x.astype(np.float64) ** 2), {**settings, "bucket_size": KEPT}
    plain, scaled = (draws_of({**value, "scaled": one}, sparsifier, x) for one in (False, True))
    np.testing.assert_allclose(scaled * (1 + beta), plain, rtol=3e-7, atol=3e-6)
    errors, without = (np.sum((x - one) ** 2, 1) for one in (scaled, plain))
    assert np.mean(without) - 4 * np.std(without) / sqrt(DRAWS) > energy
    assert np.mean(errors) - 4 * np.std(errors) / sqrt(DRAWS) <= (1 - KEPT / (NUMEL * (1 + beta))) * energy
    if sparsifier == "topk":  # it keeps all of x, so that the quantizer alone is a compression with 1 / (1 + beta)
        assert np.mean(errors) <= beta / (1 + beta) * energy + 4 * np.std(errors) / sqrt(DRAWS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "qsgd", "scaled": True, "fit_scale": True}, "value.scaled is True and value.fit_scale is True: both"),
        ({"name": "uniform", "scaled": True, "fit_scale": True}, "value.scaled is True and value.fit_scale is True"),
        ({"name": "ternary", "scaled": True, "clip": 2.5}, "value.scaled is True and value.clip is 2.5: the division"),
    ],
)
def test_what_excludes_the_division_is_refused(value, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Config.load(value=value)
    assert Config.load(value={**value, "fit_scale": False, **({"clip": None} if "clip" in value else {})})
