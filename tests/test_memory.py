from threading import Thread
from unittest.mock import patch

import numpy as np
import pytest

from hvd_deepreduce.ops import arrays
from hvd_deepreduce.pipeline.residuals import Memory

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def test_zeros_at_first_and_then_the_same_array():
    memory = Memory()
    first = memory.residual("a", 3, F64)
    assert first.dtype == F64 and first.tolist() == [0, 0, 0]
    first[1] = 5
    assert memory.residual("a", 3, F64) is first
    assert memory.residual("b", 3, F64) is not first
    assert memory.residual("empty", 0, F32).size == 0


@pytest.mark.parametrize(("numel", "dtype"), [(4, F32), (3, F64)])
def test_a_parameter_that_is_not_the_one_that_it_was(numel, dtype):
    memory = Memory()
    memory.residual("layer.weight", 3, F32)[:] = 7
    with pytest.raises(ValueError, match=rf"layer.weight is float32 \[3\], and its gradient is {dtype} \[{numel}\]"):
        memory.residual("layer.weight", numel, dtype)
    assert memory.residual("layer.weight", 3, F32).tolist() == [7, 7, 7]


def test_vectors_that_change_places():
    memory = Memory()
    names, sizes = ["a", "b"], [2, 3]
    memory.residual("b", 3, F32)[:] = [1, 2, 3]
    vector = memory.joined(names, sizes, F32, np.empty(0, np.float32))
    spare = memory.spare(names)
    assert spare is memory.spare(names) and not np.shares_memory(spare, vector)
    spare[:] = [4, 5, 6, 7, 8]
    memory.exchange(names, sizes, vector, spare, True)
    assert memory.joined(names, sizes, F32, vector) is spare and memory.spare(names) is vector
    assert memory.residual("b", 3, F32).tolist() == [6, 7, 8] and memory.state_dict()["a"].tolist() == [4, 5]
    memory.load_state_dict({"a": np.float32([9, 9])})
    memory.exchange(names, sizes, spare, vector, True)  # of a step that began before the state was loaded
    assert memory.state_dict()["a"].tolist() == [9, 9]
    again = memory.joined(names, sizes, F32, vector)
    assert again.tolist() == [9, 9, 0, 0, 0] and memory.spare(names) is not vector


def test_state_is_copied_both_ways():
    memory = Memory()
    memory.residual("a", 2, F32)[:] = [1, 2]
    state = memory.state_dict()
    memory.residual("a", 2, F32)[:] = 9
    assert state["a"].tolist() == [1, 2]
    other = Memory()
    other.residual("gone", 1, F32)
    other.load_state_dict(state)
    other.residual("a", 2, F32)[0] = 5
    assert state["a"].tolist() == [1, 2] and list(other.state_dict()) == ["a"]


def test_a_state_of_another_shape_becomes_flat():
    memory = Memory()
    memory.load_state_dict({"a": np.arange(6, dtype=np.float32).reshape(2, 3).T})
    assert memory.residual("a", 6, F32).tolist() == [0, 3, 1, 4, 2, 5]


def test_a_state_is_of_one_moment():
    """A bucket that is encoded on another thread meanwhile is in it before its encoding, or after it."""
    memory, names, sizes = Memory(), ["a", "b"], [2, 3]
    vector = memory.joined(names, sizes, F32, np.empty(0, F32))
    vector[:] = 1
    other = np.full(5, 2, F32)
    thread = Thread(target=memory.exchange, args=(names, sizes, vector, other, False))

    def to_host(array):
        if thread.ident is None:
            thread.start()
            thread.join(0.2)  # it may have to wait for the state
        return array

    with patch.object(arrays, "to_host", to_host):
        state = memory.state_dict()
    thread.join()
    assert {name: part.tolist() for name, part in state.items()} == {"a": [1] * 2, "b": [1] * 3}
    assert {name: part.tolist() for name, part in memory.state_dict().items()} == {"a": [2] * 2, "b": [2] * 3}
