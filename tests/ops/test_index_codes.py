"""The codes of indices, and the entropy coders: the same sections on the host and on a GPU, and the same refusals."""

import numpy as np
import pytest

from hvd_deepreduce.ops import (
    bitmap,
    deferred,
    delta,
    elias_fano,
    entropy,
    flagged_keys,
    huffman,
    index_sizes,
    rans,
    rice,
    rice_blocks,
    rle,
)
from tests.ops.compare import INDICES, both, broken, same
from tests.selection import first

CODES = {
    "bitmap": (bitmap.encode, bitmap.decode),
    "rice": (rice.encode, rice.decode),
    "rice_blocks": (rice_blocks.encode, rice_blocks.decode),
    "elias_fano": (elias_fano.encode, elias_fano.decode),
    "flagged": (flagged_keys.encode, flagged_keys.decode),
    "rle": (rle.encode, rle.decode),
    "huffman": (huffman.encode_indices, huffman.decode_indices),
    "rans": (rans.encode_indices, rans.decode_indices),
    "delta": (delta.encode, delta.decode),
}
TAKES_NUMEL = {"bitmap", "rice", "rice_blocks", "elias_fano", "rle", "huffman"}


def encoded(gpu, code, indices, numel):
    return both(gpu, CODES[code][0], indices, *([numel] if code in TAKES_NUMEL else []))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", first(sorted(INDICES, key=lambda name: name in ("all", "dense", "far", "ends")), 5))
def test_index_codes(gpu, code, name):
    indices, numel = INDICES[name]
    if code == "bitmap" and numel > 2**24:
        return
    section = encoded(gpu, code, indices, numel)
    same(both(gpu, CODES[code][1], section, numel, indices.size), indices)
    for other in broken(section):
        both(gpu, CODES[code][1], other, numel, indices.size)
    both(gpu, CODES[code][1], section, numel, indices.size + 1)
    both(gpu, CODES[code][1], section, max(1, int(indices[-1])), indices.size)


def test_codes_of_no_indices(gpu):
    nothing = np.empty(0, np.uint32)
    for code in set(CODES) - {"rice", "rice_blocks"}:
        section = encoded(gpu, code, nothing, 100)
        both(gpu, CODES[code][1], section, 100, 0)
        both(gpu, CODES[code][1], np.zeros(2, np.uint8), 100, 0)


def test_estimate(gpu):
    for indices, numel in (INDICES[name] for name in ("one_of_one", "some", "dense", "far")):
        sizes = both(gpu, index_sizes.estimate, indices, numel)
        codes = ("rice", "rle", "delta", "rice_blocks", "elias_fano")
        sections = [encoded(gpu, code, indices, numel) for code in codes]
        assert sizes[:5] == [section.size for section in sections]  # rans's is an estimate


@pytest.mark.parametrize(
    "encode, encode_many",
    [(rice.encode, rice.encode_many), (rice_blocks.encode, rice_blocks.encode_many)],
    ids=["rice", "rice_blocks"],
)
def test_many_at_once(gpu, encode, encode_many):
    """The sections are those of one list at a time; a device's are waited for once."""
    lists, numels = map(list, zip(*INDICES.values(), strict=True))
    want = [encode(indices, numel) for indices, numel in zip(lists, numels, strict=True)]
    same(encode_many(lists, numels), want)
    there, gradient = [gpu.put(one) for one in lists], gpu.put(np.zeros(1, np.float32))
    before = getattr(gpu.module, "waits", 0)
    with deferred.encoding_slices(gradient, len(lists)):
        sections = encode_many(there, numels)
    assert getattr(gpu.module, "waits", 1) - before == 1
    same(gpu.host(sections), want)
    with deferred.encoding_slices(lists[0].astype(np.float32), len(lists)):
        same(encode_many(lists, numels), want)


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


@pytest.mark.parametrize("entries", [12, 48, 128])
def test_join_chunks(gpu, entries):
    """Against one walk over all chunks: fewer than there are runs, and several a run."""
    rng = np.random.default_rng(entries)
    for chunks in (1, 31, 100, 1030):
        counts, to = rng.integers(0, 2049, (chunks, entries)), rng.integers(0, entries, (chunks, entries))
        exits = gpu.put((counts << 32 | to).astype(np.uint64).reshape(-1))
        want, number, entry = [], 0, 0
        for chunk in range(chunks):
            want.append(number << 8 | entry)
            number, entry = number + int(counts[chunk, entry]), int(to[chunk, entry])
        starts, words = entropy.join_chunks(gpu.module, exits, entries, chunks)
        assert gpu.host(starts).tolist() == want and gpu.host(words).tolist() == [number]
