import numpy as np
import pytest

from hvd_deepreduce.codecs.sparse_tensor import SparseTensor


def test_dense():
    found = SparseTensor(5, np.array([1, 4], np.uint32), np.array([2, -3], np.float64)).dense()
    assert found.dtype == np.float64 and found.tolist() == [0, 2, 0, 0, -3]
    assert SparseTensor(0, np.empty(0, np.uint32), np.empty(0, np.float32)).dense().size == 0
    assert SparseTensor(2**32 - 1, np.array([2**32 - 2], np.uint32), np.ones(1, np.float32)).indices.size == 1


@pytest.mark.parametrize(
    ("numel", "indices", "values", "message"),
    [
        (-1, np.empty(0, np.uint32), np.empty(0, np.float32), "numel is -1"),
        (2**32, np.empty(0, np.uint32), np.empty(0, np.float32), "numel is 4294967296.*split"),
        (9, np.zeros(1, np.int64), np.zeros(1, np.float32), r"indices are int64\[1\]"),
        (9, np.zeros((1, 1), np.uint32), np.zeros((1, 1), np.float32), r"uint32 \[r\] is needed"),
        (9, np.zeros(1, np.uint32), np.zeros(1, np.float16), "values are float16"),
        (9, np.zeros(1, np.uint32), np.zeros(2, np.float32), "one for each index"),
        (9, np.array([1, 1], np.uint32), np.zeros(2, np.float32), "strictly increasing"),
        (9, np.array([2, 1], np.uint32), np.zeros(2, np.float32), "strictly increasing"),
        (9, np.array([1, 9], np.uint32), np.zeros(2, np.float32), "below numel = 9"),
        (0, np.array([0], np.uint32), np.zeros(1, np.float32), "below numel = 0"),
    ],
)
def test_what_does_not_fit_together(numel, indices, values, message):
    with pytest.raises(ValueError, match=message):
        SparseTensor(numel, indices, values)
