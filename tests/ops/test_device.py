"""Arrays of other libraries."""

import numpy as np

from hvd_deepreduce.ops.device import WithoutStream


class RefusesStreams:
    """As TensorFlow's tensors, whose ``__dlpack__`` takes no stream."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, *, stream=None):
        if stream is not None:
            raise RuntimeError("a stream was given")
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_a_library_that_refuses_streams_is_not_told_one():
    array = np.arange(5, dtype=np.float32)
    wrapped = WithoutStream(RefusesStreams(array))
    wrapped.__dlpack__(stream=7, max_version=(1, 0))
    found = np.from_dlpack(wrapped)
    assert found.ctypes.data == array.ctypes.data and found.tolist() == array.tolist()
