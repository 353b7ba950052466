"""Index codecs that lose nothing write their oracle's bytes. test_context.py compares ``context`` with its oracle, and
tests/test_broken_sections.py has broken sections of all."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.index.rice import Rice
from hvd_deepreduce.codecs.index.rice_blocks import RiceBlocks
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.ops import bits
from tests.cases import INDEX, check_support, some_indices
from tests.oracle import bitmap, bitpack, delta, elias_fano, huffman, rans, rice, rice_blocks, rle
from tests.selection import first, thorough

KEY = RngKey(1, 2, 3)


def of_rice(indices, numel, section):
    """Two parameters may need equally many bits: the section's is one of the best."""
    b = section[0] if indices else 0
    assert rice.bits(indices, b) == min(rice.bits(indices, other) for other in range(32))
    return rice.encode(indices, b)


def of_rice_blocks(indices, numel, section):
    chosen = rice_blocks.parameters(section, len(indices))
    for block, b in zip(rice_blocks.blocks(rice.gaps(indices)), chosen, strict=True):
        assert rice_blocks.bits(block, b) == min(rice_blocks.bits(block, other) for other in range(32))
    return rice_blocks.encode(indices, chosen)


# Functions of indices, numel and the section.
ORACLES = {
    "bitmap": lambda indices, numel, _: bitmap.encode(indices, numel),
    "delta": lambda indices, numel, _: delta.encode(indices),
    "elias_fano": lambda indices, numel, _: elias_fano.encode(indices, numel),
    "huffman": lambda indices, numel, _: huffman.encode_indices(indices, numel),
    "packed": lambda indices, numel, _: bitpack.pack(indices, bitpack.width_of(numel)),
    "rans": lambda indices, numel, _: rans.encode_indices(indices),
    "raw": lambda indices, numel, _: struct.pack(f"<{len(indices)}I", *indices),
    "rice": of_rice,
    "rice_blocks": of_rice_blocks,
    "rle": lambda indices, numel, _: rle.encode(indices, numel),
}
LOSSLESS = [*ORACLES, "context"]
each = pytest.mark.parametrize("name", ORACLES)


def clustered(numel, density, seed=0):
    """Indices in blocks of 64 elements, each with its own density, as in the gradient of an embedding."""
    rng = np.random.default_rng(seed)
    weight = np.exp(rng.normal(0, 2, numel // 64 + 1))
    p = np.minimum(1, density * weight / weight.mean())
    return np.flatnonzero(rng.random(numel) < np.repeat(p, 64)[:numel]).astype(np.uint32)


def entropy_bytes(numel, count):
    """log2 C(numel, count) / 8."""
    return (math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)) / math.log(2) / 8


def check(name, indices, numel):
    """A round trip, and the oracle's bytes where it does not take long. Returns the section."""
    kept = np.asarray(indices, np.uint32)
    section, support = INDEX[name].encode(kept, numel, KEY)
    assert support is kept and (section.size or not kept.size or numel == 1)
    np.testing.assert_array_equal(INDEX[name].decode(section, numel, kept.size, KEY), kept)
    if name in ORACLES and (numel <= 1 << 17 or name not in ("bitmap", "huffman", "rle")) and kept.size <= 40_000:
        assert section.tobytes() == ORACLES[name](kept.tolist(), numel, section.tobytes())
    return section


@each
@given(data=st.data())
def test_bytes_equal_the_oracle(name, data):
    """Of runs of different densities."""
    indices, index = [], -1
    for most in data.draw(st.lists(st.integers(0, 50), max_size=5)):
        for gap in data.draw(st.lists(st.integers(0, most), max_size=70)):
            index += gap + 1
            indices.append(index)
    check(name, indices, index + data.draw(st.integers(1, 50)))


@pytest.mark.parametrize("name", sorted({*LOSSLESS} - {"bitmap"}))
@given(data=st.data())
def test_few_indices_in_a_tensor_of_any_size(name, data):
    numel = data.draw(st.one_of(st.integers(1, 2000), st.integers(1, 2**32 - 1)))
    check(name, sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=6))), numel)


EXTREMES = {
    "nothing": ([], 0),
    "empty": ([], 9),
    "only": ([0], 1),
    "last_of_a_window": ([127], 128),
    "first_of_a_window": ([128], 129),
    "last": ([2**32 - 2], 2**32 - 1),
    "both_ends": ([0, 2**32 - 2], 2**32 - 1),
    "huge": (some_indices(2**32 - 1, 40000, 0), 2**32 - 1),
    "far_apart": (range(0, 1 << 32, 1 << 21), 2**32 - 1),
    "all": (range(5000), 5000),
    "second_half": (range(499, 1000), 1000),
    "every_third": (range(2, 3000, 3), 3000),
    "every_eighth": (range(7, 1 << 20, 8), 1 << 20),
    "dense": (np.flatnonzero(np.random.default_rng(1).random(9973) < 0.9), 9973),
    "clustered": (clustered(200_003, 0.05), 200_003),
    "all_kept": (range(1 << 18), 1 << 18),
    "densities": ([*range(300), *range(300, 1 << 26, 1 << 18), *range(1 << 26, (1 << 26) + 300)], 1 << 27),
}


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize(("indices", "numel"), EXTREMES.values(), ids=EXTREMES)
def test_extremes(name, indices, numel):
    if name != "bitmap" or numel < 1 << 28:
        check(name, indices, numel)


@each
@pytest.mark.parametrize("count", first([511, 512, 2047, 2048, 8191, 8192, 33001], 6))  # EXTREMES have more
def test_bytes_equal_the_oracle_where_the_layout_changes(name, count):
    check(name, some_indices(1 << 17, count, count), 1 << 17)


# Decoders with vector instructions read 16 indices at a time. The cases have every number of low bits, long runs of
# zeros in the highs, and dense parts.
@pytest.mark.parametrize("name", ["rice", "rice_blocks", "elias_fano"])
@pytest.mark.parametrize("spread", [1, 3, 9, 100, 1000, 7000, 60000, 10**6])
def test_vectorized_decoders_equal_the_oracle(name, spread):
    rng = np.random.default_rng(spread)
    for count in (255, 256, 700, 2003):
        gaps = np.where(rng.random(count) < 0.02, 30 * spread, rng.integers(1, 2 * spread + 1, count))
        kept = np.cumsum(gaps, dtype=np.uint64).astype(np.uint32)
        numel = int(kept[-1]) + 1
        section = check(name, kept, numel)
        with pytest.raises(ValueError):
            INDEX[name].decode(section, numel - 1, count, KEY)


@pytest.mark.parametrize("name", ["bitmap", "packed", "raw", "rice", "rice_blocks"])
def test_what_is_accepted_is_what_was_written(name):
    """Bits that are changed, and any bytes: if a reader takes them, they are the section of what it reads."""
    codec, encoders = INDEX[name], {"rice": rice.encode, "rice_blocks": rice_blocks.encode}
    rng, accepted = np.random.default_rng(4), 0
    for attempt in range(1500):
        numel, count = (10_000, 600) if attempt % 2 else (int(rng.integers(1, 320)), int(rng.integers(1, 40)))
        section = rng.integers(0, 256, rng.integers(1, 40)).astype(np.uint8)
        if attempt % 2:
            section = codec.encode(some_indices(numel, count), numel, KEY)[0]
            section[rng.integers(section.size)] ^= 1 << rng.integers(8)
        try:
            found = codec.decode(section, numel, min(count, numel), KEY)
        except ValueError:
            continue
        check_support(found, numel, min(count, numel))
        data, accepted = section.tobytes(), accepted + 1
        parameter = data[0] if name == "rice" else rice_blocks.parameters(data, found.size)
        encode = encoders.get(name)
        right = encode(found.tolist(), parameter) if encode else ORACLES[name](found.tolist(), numel, data)
        assert data == right
    assert accepted or name in ("bitmap", "raw")  # whose every changed bit changes the count or the order


@pytest.mark.parametrize(
    ("name", "section", "numel", "count", "message"),
    [
        ("raw", np.uint32([1, 1]).tobytes(), 10, 2, "out of order or not below"),
        ("raw", np.uint32([2, 1]).tobytes(), 10, 2, "out of order or not below"),
        ("raw", np.uint32([1, 10]).tobytes(), 10, 2, "out of order or not below"),
        ("raw", np.uint32([0xFFFFFFFF, 0]).tobytes(), 10, 2, "out of order or not below"),
        *(("raw", bytes(size), 10, 2, "2 raw indices take 8") for size in (0, 4, 7, 9, 12)),
        ("rice", [], 8, 1, "ends before"), ("rice", [0], 8, 1, "ends before"), ("rice", [0, 0, 0], 8, 1, "ends before"),
        ("rice", [32, 255, 255], 8, 1, "not below"), ("rice", [0, 0, 1], 8, 1, "not below"),
        ("rice", [31] + [255] * 5, 8, 1, "not below"), ("rice", [3, 255], 8, 3, "ends before"),
        ("rice", [5], 8, 0, "no indices"), ("rice_blocks", [], 8, 1, "ends before"),
        ("rice_blocks", [0], 8, 1, "ends before"), ("rice_blocks", [31], 8, 1, "ends before"),
        ("rice_blocks", [32, 255], 8, 1, "other than zeros"), ("rice_blocks", [0, 0, 1], 8, 1, "not below"),
        ("rice_blocks", [1, 1, 2, 0], 8, 1, "continues|other than zeros"),
        ("rice_blocks", [0, 255], 8, 9, "ends before"),
    ],
)  # fmt: skip
def test_sections_that_no_encoder_wrote(name, section, numel, count, message):
    with pytest.raises(ValueError, match=message):
        INDEX[name].decode(np.array(list(section), np.uint8), numel, count, KEY)


# Bytes for 368 of 36,864 elements. The research code of the papers takes 662 (Bloom filter), 924 (RLE).
@pytest.mark.parametrize(
    ("name", "most"),
    [("rle", 480), ("huffman", 920), ("delta", 415), ("elias_fano", 394), ("rans", 400), ("rice", 390)],
)
def test_section_size_of_a_convolution_layer_at_one_percent(name, most):
    sizes = [INDEX[name].encode(some_indices(36864, 368, seed), 36864, KEY)[0].size for seed in range(10)]
    assert max(sizes) <= most
    if name == "huffman":
        assert 905 <= np.mean(sizes) <= 910  # 19.73 bits per index


@thorough
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_rans_is_within_a_percent_of_the_entropy(density):
    numel = 25_600_000
    kept = np.unique(np.random.default_rng(3).integers(0, numel, int(numel * density), dtype=np.uint32))
    assert check("rans", kept, numel).size < 1.01 * entropy_bytes(numel, kept.size)


def test_sizes_of_clusters_and_runs():
    kept = clustered(4_000_000, 0.01)
    assert check("rans", kept, 4_000_000).size < 0.9 * entropy_bytes(4_000_000, kept.size)
    runs = np.concatenate([np.arange(at, at + 4096) for at in range(0, 1 << 20, 65536)])
    assert check("rle", runs, 1 << 20).size < 100
    rng = np.random.default_rng(0)
    dense, thin = rng.choice(1 << 16, 3000, replace=False), rng.choice(np.arange(1 << 16, 1 << 22), 3000, replace=False)
    both = np.sort(np.concatenate([dense, thin])).astype(np.uint32)
    sizes = [codec.encode(both, 1 << 22, KEY)[0].size for codec in (RiceBlocks(), Rice())]
    assert sizes[0] < 0.9 * sizes[1]


@given(st.data(), st.integers(1, 32), st.sampled_from([np.uint8, np.uint32]))
def test_fields_of_every_width(data, width, dtype):
    width = min(width, 8 * np.dtype(dtype).itemsize)
    values = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=70))
    section = bits.pack(np.array(values, dtype), width)
    assert section.tobytes() == bitpack.pack(values, width)
    assert bits.unpack(section, len(values), width, dtype).tolist() == values
    for wrong in (section[:-1].copy(), np.append(section, np.uint8(0))) if section.size else ():
        with pytest.raises(ValueError, match=f"it must have {section.size} bytes, and it has {wrong.size}"):
            bits.unpack(wrong, len(values), width, dtype)


@pytest.mark.parametrize(("dtype", "most"), [(np.uint8, 8), (np.uint32, 32)])
@pytest.mark.parametrize("count", [143, 144, 145, 160, 1003])
def test_many_fields_of_every_width(dtype, most, count):
    random = np.random.default_rng(count)
    for width in range(most + 1):
        values = random.integers(0, 2**width, count, dtype=np.uint64).astype(dtype)
        section = bits.pack(values, width)
        assert section.tobytes() == bitpack.pack(values.tolist(), width)
        assert (bits.unpack(section, count, width, dtype) == values).all()
