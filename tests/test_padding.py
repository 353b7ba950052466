"""Bits and bytes of a container that stand for nothing are zeros, and a reader refuses others. And blocks without a
number: DenseStream's coded form, whose sections no size in the header determines."""

import struct

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey, joint_codecs
from hvd_deepreduce.codecs.joint.stream_format import CODED, HEADER, PAIRS, PLAIN, unpack
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from hvd_deepreduce.wire.standalone import Container, ContainerError
from tests import cases
from tests.oracle import container as oracle
from tests.selection import first

KEY = RngKey(11, 12, 13)
F32 = np.dtype(np.float32)

NOT_EVERY_BIT = {"deflate", "fit_dexp", "fit_poly", "qsgd", "quantile", "sign", "ternary", "zstd"}
# Codecs whose every bit, but for padding, changes what is decoded. Not so: a bit of a Bloom filter that no element has,
# a bin of a sketch that no key has, the inside of a zlib or Zstandard stream, the last bit of a coefficient.
CONFIGS: dict[str, dict] = {
    **{
        f"index {name}": {"index": cases.INDEX[name], "value": "raw"}
        for name in cases.INDEX
        if name not in ("bloom", "auto")
    },
    **{f"value {name}": {"index": "raw", "value": name} for name in cases.VALUE if name not in NOT_EVERY_BIT},
    **{f"qsgd {bits} bits": {"value": {"name": "qsgd", "bits": bits, "bucket_size": 64}} for bits in range(2, 9)},
    "sign": {"value": "sign"},
    "ternary": {"value": "ternary"},
    "quantile": {"value": {"name": "quantile", "buckets": 11}},
    "three_lc": {"joint": "three_lc"},
    **{
        f"densestream {value} coded {coded}": {"joint": {"name": "densestream", "value": value, "coded": coded}}
        for value in ("raw", "bfloat16", "qsgd")
        for coded in (False, True)
    },
}


def decoded(data: bytes) -> tuple[object, ...]:
    """What a receiver reads, without the fields of the header that only name the sender."""
    container = wire.unpack(np.frombuffer(data, np.uint8), 3)
    support, values = decode_part(container, container.numel, 3)
    return None if support is None else support.tobytes(), values.tobytes(), values.dtype


def with_a_meaning(name: str, data: bytes) -> set[int]:
    """Bytes of the sections that mean something, though a change need not change the result: a bucket size above the
    number of values, the length of a code word that does not occur."""
    header = oracle.read(data)
    values_at = 64 + -(-header["index_bytes"] // 8) * 8
    if name == "index delta":
        return set(range(65, 70))
    if name.startswith("densestream qsgd"):
        a, b, _ = HEADER.unpack_from(data, values_at)[-3:]
        values_at += HEADER.size + -(-a // 8) * 8 + -(-b // 8) * 8
    elif not name.startswith(("qsgd", "sign", "ternary", "value uniform")):
        return set()
    return set(range(values_at + 4, values_at + 8))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("numel", "ratio"), first([(61, 0.11), (307, 0.09)]))
def test_every_flipped_bit_is_refused_or_changes_the_result(name: str, numel: int, ratio: float) -> None:
    config = Config.load(sparsifier={"name": "topk", "density": ratio}, **CONFIGS[name])
    gradient = cases.random(numel, seed=numel)
    if name == "ternary" or name.startswith(("qsgd", "densestream qsgd")):
        gradient = np.sign(gradient)  # no level is rounded to zero, so every norm matters
    data = Pipeline(config).encode(gradient, None, KEY).tobytes()
    right = decoded(data)
    for at in sorted(set(range(64, len(data))) - with_a_meaning(name, data)):
        for bit in range(8):
            other = bytearray(data)
            other[at] ^= 1 << bit
            try:
                same = decoded(oracle.repaired(bytes(other))) == right
            except ContainerError:
                continue
            assert not same, f"bit {bit} of byte {at} of {len(data)} means nothing, and was not refused"


@pytest.mark.parametrize("name", ["sketchml", "skcompress"])
def test_sketches(name: str) -> None:
    """The zeros of the frame, the bits after the keys' prefixes or lengths, and those after the bins."""
    settings = {"name": name, "groups": 1, "buckets": 8, "rows": 1, "columns": 1.0}
    config = Config.load(sparsifier={"name": "topk", "density": 0.1}, joint=settings)
    data = Pipeline(config).encode(cases.random(307, seed=4), None, KEY).tobytes()
    section = 64
    size = oracle.read(data)["value_bytes"]
    for at in (section + 1, section + 2, section + 3, section + size - 1):
        other = bytearray(data)
        other[at] |= 0x80
        if bytes(other) != data:
            with pytest.raises(ContainerError, match="rank 3 cannot be read"):
                decoded(oracle.repaired(bytes(other)))


@pytest.mark.parametrize("bits", range(1, 8))
def test_an_order(bits: int) -> None:
    """Dense values in another order: the order section's last byte."""
    numel = 8 + bits  # 4 bits each
    data = Pipeline(Config.load(sparsifier="none", value="fit_poly")).encode(cases.random(numel), None, KEY)
    header = oracle.read(data.tobytes())
    assert header["order_bytes"] == (4 * numel + 7) // 8
    if numel % 2:
        other = bytearray(data.tobytes())
        at = 64 + -(-header["value_bytes"] // 8) * 8 + header["order_bytes"] - 1
        other[at] |= 0x10
        with pytest.raises(ContainerError, match="other than zeros follows"):
            decoded(oracle.repaired(bytes(other)))


def stream(form: int, blocks: int, count: int, a: bytes, b: bytes, numel: int = 10_000) -> bytes:
    """A DenseStream section of ``count`` raw values 1 with these parts."""
    parts = [a, b, struct.pack("<f", 1.0) * count]
    head = HEADER.pack(form, 1, 1, numel, blocks, count, *map(len, parts))
    return head + b"".join(part + bytes(-len(part) % 8) for part in parts)


def words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


ATTACKS = {
    # Blocks whose number the header does not give: as many starts as the sender likes, and one length, behind which a
    # megabyte would be read.
    "many starts and one length": stream(CODED, 0, 1, words(*range(250_000)), words(1)),
    "starts without lengths": stream(CODED, 0, 1, words(*range(250_000)), b""),
    "more starts than lengths": stream(CODED, 0, 2, words(5, 7), words(2)),
    "more lengths than starts": stream(CODED, 0, 2, words(5), words(2, 3)),
    "starts, lengths and no number": stream(CODED, 0, 2, words(5), words(2)),
    "starts of nothing": stream(CODED, 0, 0, words(5), b""),
    "lengths of nothing": stream(CODED, 0, 0, b"", words(5)),
    "plain, starts of nothing": stream(PLAIN, 0, 0, words(5), words(1)),
    "pairs, lengths": stream(PAIRS, 1, 1, words(5), words(1)),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_blocks_whose_number_is_not_that_of_the_header(name: str) -> None:
    section = np.frombuffer(ATTACKS[name], np.uint8).copy()
    with pytest.raises(ValueError, match="parts a and b have"):
        unpack(section, 10_000, F32)
    count = HEADER.unpack_from(ATTACKS[name])[4]
    none = np.empty(0, np.uint8)
    container = Container(
        1, 0, joint_codecs.by_name["densestream"].id, F32, 10_000, count, KEY, 0, none, section, none, joint=True
    )
    with pytest.raises(ContainerError, match="rank 1 cannot be read"):
        decode_part(wire.unpack(wire.pack(container), 1), 10_000, 1)


@pytest.mark.parametrize("part", range(3))
def test_padding_of_a_stream(part: int) -> None:
    section = bytearray(stream(PLAIN, 1, 1, words(5), words(1)))
    unpack(np.frombuffer(bytes(section), np.uint8), 10_000, F32)
    section[HEADER.size + 8 * part + 4] = 1
    with pytest.raises(ValueError, match="between its sections is not zero"):
        unpack(np.frombuffer(bytes(section), np.uint8), 10_000, F32)
    section[HEADER.size + 8 * part + 4] = 0
    section[3] = 1
    with pytest.raises(ValueError, match="reserved byte 1"):
        unpack(np.frombuffer(bytes(section), np.uint8), 10_000, F32)
