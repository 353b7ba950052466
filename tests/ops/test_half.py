"""Values in 16 bits, on the host and on a GPU, where a section must be aligned, as it is in a container."""

import numpy as np
import pytest

from hvd_deepreduce.ops import half
from tests.ops.compare import INPUTS, both, same


@pytest.mark.parametrize("bfloat16", [False, True])
def test_rounding(gpu, bfloat16):
    every = np.arange(2**16, dtype=np.uint32) << 16 | np.random.default_rng(0).integers(0, 2**16, 2**16, np.uint32)
    every = every.view(np.float32)[::9]
    near = np.arange(0, 0x7C00, 7, np.uint16).view(np.float16).astype(np.float32)
    limits = np.float32([65504, 65519.99, 65520, 1e-8])
    halfway = (np.arange(1, 4096, dtype=np.float64) * 2.0**-25).astype(np.float32)
    floats = np.concatenate([every, near, near * np.float32(1.0003), limits, halfway, -halfway])
    for x in (floats[np.isfinite(floats)], INPUTS["float64_beyond_float32"], INPUTS["empty"]):
        section = both(gpu, half.encode, x, bfloat16)
        same(gpu.host(half.decode(gpu.put(section), x.size)), half.decode(section, x.size))
        with pytest.raises(ValueError):
            half.decode(gpu.put(section), x.size + 1)


@pytest.mark.parametrize("words", [(0, 0x7C00), (0, 0xFE00), (1, 0x7F80), (1, 0xFFC1), (2, 0), (2,), (256,)])
def test_broken_sections(gpu, words):
    section = np.array(words, np.uint16).view(np.uint8)
    with pytest.raises(ValueError):
        half.decode(section, len(words) - 1)
    with pytest.raises(ValueError):
        half.decode(gpu.put(np.array(words, np.uint16)).view(np.uint8), len(words) - 1)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_every_word_decodes_as_numpy_decodes_it(bfloat16):
    words = np.arange(2**16, dtype=np.uint16)
    want = (words.astype(np.uint32) << 16).view(np.float32) if bfloat16 else words.view(np.float16).astype(np.float32)
    finite = np.isfinite(want)
    section = np.concatenate([np.uint16([bfloat16]), words[finite]]).view(np.uint8)
    assert half.decode(section, int(finite.sum())).tobytes() == want[finite].tobytes()
    for word in words[~finite][::37]:
        with pytest.raises(ValueError, match="not finite"):
            half.decode(np.uint16([bfloat16, word]).view(np.uint8), 1)


def test_float16_is_rounded_as_numpy_rounds_it():
    rng = np.random.default_rng(5)
    x = rng.integers(0, 2**32, 400_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x, (rng.standard_normal(400_000) * 10.0 ** rng.uniform(-9, 5, 400_000)).astype(np.float32)])
    x = x[np.isfinite(x)]
    want = np.clip(x, -65504, 65504).astype(np.float16)
    assert half.encode(x, False)[2:].tobytes() == want.tobytes()
