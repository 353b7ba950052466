"""Freed memory stays with the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np
import pytest

from hvd_deepreduce.ops import heap
from tests.engine.numpy_adapter import NumpyAdapter, run_ranks

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
STEPS = """
import resource, sys
import numpy as np
from hvd_deepreduce.ops import heap

if "keep" in sys.argv:
    heap.keep_freed()
for step in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [np.ones(2**18, np.float32) for _ in range(64)]
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    gradients.clear()
print(taken)
"""
PAGES = 64 * 2**20 // 4096


def pages(*words: str, **environment: str) -> int:
    """How many pages the last step fetches."""
    inherited = {name: value for name, value in os.environ.items() if name not in heap._CHOSEN}
    command = [sys.executable, "-c", STEPS, *words]
    return int(subprocess.run(command, env={**inherited, **environment}, capture_output=True, check=True).stdout)


def test_a_step_fetches_no_memory_that_the_last_one_has_freed():
    assert pages() > PAGES / 2
    assert pages("keep") < PAGES / 100


def test_settings_of_the_environment_hold():
    assert pages("keep", MALLOC_TRIM_THRESHOLD_="131072") > PAGES / 2


@pytest.mark.parametrize("whole", [False, True])
def test_the_first_bucket_on_the_host_asks_for_it(whole):
    def work(collectives):
        adapter, gradient = NumpyAdapter(collectives, {"a": ((9,), "f4")}, "topk_rice_qsgd"), np.ones(9, "f4")
        if whole:
            adapter.reducer.start_bucket([adapter.engine.parameters["a"]], 0, gradient)
        else:
            adapter.step({"a": gradient})

    with patch.object(heap, "keep_freed") as asked:
        run_ranks(1, work)
    assert asked.called


def test_large_memory_is_taken_again_when_nothing_has_it():
    size = 3 << 20
    heap._free.clear()
    first = heap.room(size)
    where, part = first.ctypes.data, first[5:7]
    del first
    assert heap.room(size).ctypes.data != where, "a view of it is still there"
    part[:] = 1
    del part
    heap._free.clear()
    last = heap.room(size + 1000)
    where = last.ctypes.data
    del last
    again = heap.room(size)
    assert again.ctypes.data == where and again.size == size and again.flags.writeable
    assert heap.room(size).ctypes.data != where
    del again
    heap.room(3 * size)
    assert not any(block.size < 3 * size for block in heap._free.values()), "memory of other sizes is not kept for ever"
    assert heap.room(10).size == 10 and heap.room(0).size == 0


def test_no_two_threads_get_the_same_memory():
    heap._free.clear()

    def fill(number):
        for _ in range(50):
            room = heap.room((1 << 20) + 1000 * number)
            room[:: 1 << 16] = number
            time.sleep(0.0001)
            assert (room[:: 1 << 16] == number).all()
            del room

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(fill, range(8)))
