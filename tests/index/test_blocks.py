"""The index codec ``blocks``: its support, its bytes and its refusals."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.index.auto import CHOICES, Auto
from hvd_deepreduce.codecs.index.blocks import Blocks
from hvd_deepreduce.codecs.interfaces import RngKey, index_codecs
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.standalone import unpack
from tests.cases import random

KEY = RngKey(1, 2, 3)


@given(st.data())
def test_the_support_is_the_elements_of_the_blocks_that_have_an_index(data):
    numel, block = data.draw(st.integers(1, 300)), data.draw(st.sampled_from([1, 2, 3, 4, 8, 64, 2**31]))
    indices = sorted(data.draw(st.sets(st.integers(0, numel - 1), min_size=1, max_size=40)))
    numbers = sorted({index // block for index in indices})
    expected = [index for index in range(numel) if index // block in numbers]
    kept = np.array(indices, np.uint32)
    section, support = Blocks(block=block).encode(kept, numel, KEY)
    assert support.tolist() == expected and (support is kept or len(expected) > len(indices))
    total = -(-numel // block)
    coder = Auto().resolve(np.array(numbers, np.uint32), total)
    inner, _ = coder.encode(np.array(numbers, np.uint32), total, KEY)
    assert section.tobytes() == struct.pack("<IBxxx", block, coder.id) + inner.tobytes()
    assert Blocks.decode(section, numel, support.size, KEY).tolist() == expected


def test_what_is_no_section_is_refused():
    section, support = Blocks(block=4).encode(np.array([0, 1, 9], np.uint32), 10, KEY)
    assert support.tolist() == [0, 1, 2, 3, 8, 9]
    for place, byte, reason in ((0, 0, "begins with"), (4, 99, "begins with"), (5, 1, "begins with"),
                                (4, index_codecs.by_name["bloom"].id, "begins with")):  # fmt: skip
        broken = section.copy()
        broken[place] = byte
        if place == 0:
            broken[:4] = 0
        with pytest.raises(ValueError, match=reason):
            Blocks.decode(broken, 10, support.size, KEY)
    with pytest.raises(ValueError, match="begins with 8 bytes, and this one has 7"):
        Blocks.decode(section[:7], 10, support.size, KEY)
    with pytest.raises(ValueError, match="blocks of 4 elements have 6 in all, and 7 are announced"):
        Blocks.decode(section, 10, 7, KEY)
    with pytest.raises(ValueError, match="no indices take none"):
        Blocks.decode(section, 10, 0, KEY)


def test_blocks_of_four_cost_a_quarter_of_their_numbers_and_the_residual_s_values_are_sent():
    x = random(40_000)
    config = Config.load(sparsifier={"name": "block_topk", "density": 0.03, "block": 4}, index="blocks", value="raw")
    single = config.load(config, index="auto")
    sizes = [
        unpack(Pipeline(one).encode(x, np.zeros_like(x), RngKey(0, 0, 0))).indices.size for one in (config, single)
    ]
    assert sizes[0] < 0.75 * sizes[1] and sizes[0] < 8 + 1.05 * 40_000 * 0.03 / 4 * 6.5 / 8
    few = Config.load(sparsifier={"name": "topk", "density": 0.01}, index="blocks", value="raw")
    residual = np.zeros_like(x)
    container = unpack(Pipeline(few).encode(x, residual, RngKey(0, 0, 0)))
    assert container.count > 1.5 * 400 and np.count_nonzero(residual == 0) >= container.count
    out = np.zeros_like(x)
    Pipeline(few).decode([container], out)
    np.testing.assert_array_equal(out + residual, x)
    assert {codec.id for codec in CHOICES} <= {codec.id for codec in index_codecs.by_name.values()}
