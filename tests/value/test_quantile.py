"""The value codec ``quantile``. test_oracles.py compares its bytes with the oracle's; bounds/test_skcompress.py has the
bounds of its error."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.value.quantile import Quantile
from hvd_deepreduce.ops import quantile
from tests.cases import EQUAL
from tests.value.quantizers import normals, round_trip


@pytest.mark.parametrize("entropy", ["huffman", "rans"])
def test_entropy_coder_is_not_used_if_it_saves_nothing(entropy):
    values = normals(2**14)
    assert round_trip(Quantile(entropy=entropy), values)[0].tobytes() == round_trip(Quantile(), values)[0].tobytes()


def test_quantiles_equal_those_of_the_papers_sketch():
    """The papers use Yahoo's (now Apache) DataSketches. Its rank of each bucket's start must be the expected one."""
    sketch = pytest.importorskip("datasketches").kll_floats_sketch(1000)
    values = np.abs(normals(50_000, seed=6))
    _, codes, _ = quantile.encode(values, 64, False)
    sketch.update(values)
    begins = [float(values[codes == j].min()) for j in range(64)]
    ranks = np.array([sketch.get_rank(begin) for begin in begins])
    assert np.abs(ranks - np.arange(64) / 64).max() < 2 * sketch.normalized_rank_error(False)


@pytest.mark.parametrize("values", EQUAL.values(), ids=EQUAL)
def test_awkward_values_are_exact(values):
    _, decoded = round_trip(Quantile(), values)
    assert (decoded == values).all()
