"""Rows of a matrix as a sparse vector and back, and containers among integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce import ContainerError
from hvd_deepreduce.engine import rows

dtypes = st.sampled_from([np.dtype(np.int32), np.dtype(np.int64)])


@given(st.data(), st.integers(1, 20), st.integers(1, 5), dtypes)
def test_rows_are_added_up_and_come_back(data, count, block, dtype):
    numbers = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=30)), dtype)
    values = np.random.default_rng(numbers.size).integers(-9, 9, (numbers.size, block)).astype(np.float32)
    dense = np.zeros((count, block), np.float32)
    for number, row in zip(numbers, values, strict=True):
        dense[number] += row
    flat = rows.flattened(numbers, values, dense.size)
    np.testing.assert_array_equal(flat.dense(), dense.reshape(-1))
    assert flat.indices.size == block * len(set(numbers.tolist()))
    back, elements = rows.in_rows(flat, block)
    assert back.tolist() == sorted(set(numbers.tolist()))
    np.testing.assert_array_equal(elements, dense[back])


@pytest.mark.parametrize("bad", [-1, 5])
def test_a_row_that_does_not_exist_is_refused(bad):
    with pytest.raises(ValueError, match="its parameter has 5 rows"):
        rows.flattened(np.array([2, bad]), np.ones((2, 3), np.float32), 15)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), dtypes, st.data())
def test_containers_among_integers_come_back_and_damage_is_found(containers, dtype, data):
    sent = [rows.as_integers(np.frombuffer(one, np.uint8), dtype) for one in containers]
    gathered = np.concatenate(sent)
    assert rows.from_integers(gathered, len(containers)).tobytes() == b"".join(containers)
    cut = data.draw(st.integers(0, gathered.size - 1))
    with pytest.raises(ContainerError, match="rank"):
        rows.from_integers(gathered[:cut], len(containers))
    with pytest.raises(ContainerError, match=f"rank {len(containers) - 1} .* bytes follow it"):
        rows.from_integers(np.append(gathered, dtype.type(0)), len(containers))
    gathered[0] = data.draw(st.integers(np.iinfo(dtype).min, -1) | st.integers(gathered.nbytes, np.iinfo(dtype).max))
    with pytest.raises(ContainerError, match="rank 0 cannot be read: it should have"):
        rows.from_integers(gathered, len(containers))
