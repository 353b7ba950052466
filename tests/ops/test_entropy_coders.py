"""The entropy coders give the same sections on the host and on a GPU, and refuse the same broken ones."""

import numpy as np
import pytest

from hvd_deepreduce.ops import huffman, rans
from tests.ops.compare import both, broken, same

CODERS = {"huffman": (huffman.encode, huffman.decode), "rans": (rans.encode, rans.decode)}


def streams_of_symbols():
    rng = np.random.default_rng(11)
    for count in (1, 2, 300, 1023, 1024, 1030, 2048, 33_000):
        yield rng.integers(0, 256, count).astype(np.uint8)
        yield np.minimum(rng.geometric(0.3, count), 255).astype(np.uint8)
        yield np.full(count, 201, np.uint8)
    # An optimal code for these has words of more than twelve bits.
    yield np.repeat(np.arange(30, dtype=np.uint8), [min(2**k, 4000) for k in range(30)])
    yield np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("coder", CODERS)
def test_symbols(gpu, coder):
    encode, decode = CODERS[coder]
    streams = list(streams_of_symbols())
    if coder == "rans":  # three parts, of which the last ends within 32 symbols
        streams.append(np.minimum(np.random.default_rng(12).geometric(0.3, 98_400), 255).astype(np.uint8))
    for symbols in streams:
        section = both(gpu, encode, symbols)
        same(both(gpu, decode, section, symbols.size), symbols)
        if symbols.size in (300, 1030, 2048, 98_400):
            for other in broken(section, 12 if symbols.size < 5000 else 1):
                both(gpu, decode, other, symbols.size)
            both(gpu, decode, section, symbols.size + 1)
    both(gpu, encode, np.empty(0, np.uint8))
    both(gpu, decode, np.empty(0, np.uint8), 0)
    both(gpu, decode, np.zeros(3, np.uint8), 0)
