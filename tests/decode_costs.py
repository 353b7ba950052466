"""Small containers that decode to many elements, and what decoding one takes: run as a program, which prints, as JSON,
the bytes of memory and the seconds of processor for each by name (tests/test_bounds.py)."""

import ctypes
import itertools
import json
import os
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import zstandard

from hvd_deepreduce.codecs.index.bloom import POLICIES
from hvd_deepreduce.codecs.interfaces import RngKey, index_codecs, joint_codecs, value_codecs
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import sketch
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from hvd_deepreduce.wire.standalone import Container

NUMEL = 500_000
KEY = RngKey(1, 2, 3)
F32 = np.dtype(np.float32)
ONE_BUCKET = struct.pack("<If", 1, 0.5)
"""A quantile section of any number of values."""
EMPTY = np.empty(0, np.uint8)


def container(
    index: str, section: bytes, count: int, value: str = "quantile", values: bytes = ONE_BUCKET
) -> np.ndarray:
    """A container of ``count`` of the elements; without an index codec, of all."""
    number = index_codecs.by_name[index].id if index else 0
    parts = (np.frombuffer(part, np.uint8) for part in (section, values, b""))
    value_number = value_codecs.by_name[value].id
    return wire.pack(Container(1 if index else 0, number, value_number, F32, NUMEL, count, KEY, 0, *parts))


def joint(name: str, section: bytes, count: int = NUMEL, dense: bool = False) -> np.ndarray:
    number = joint_codecs.by_name[name].id
    data = np.frombuffer(section, np.uint8)
    dense_or_topk = 0 if dense else 1
    return wire.pack(Container(dense_or_topk, 0, number, F32, NUMEL, count, KEY, 0, EMPTY, data, EMPTY, joint=True))


def encoded(gradient: np.ndarray, **config: object) -> np.ndarray:
    return Pipeline(Config.load(config)).encode(gradient, None, KEY)


def attacks() -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Names, and functions that make the containers."""
    all_kept = np.arange(NUMEL, dtype=np.uint32)

    def bloom(policy: str, count: int, size: int, hashes: int = 1) -> np.ndarray:
        """A filter with as many ones as ``count`` elements can set, at random places."""
        ones = np.arange(8 * size) < hashes * count
        bits_of_it = np.packbits(np.random.default_rng(1).permutation(ones)).tobytes()
        return container("bloom", bytes([POLICIES.index(policy) << 5 | hashes - 1]) + bits_of_it, count)

    for policy in POLICIES:
        yield f"bloom {policy}, full filter", lambda p=policy: bloom(p, NUMEL if p == "p0" else 64, 8)
        yield f"bloom {policy}, half of the elements", lambda p=policy: bloom(p, NUMEL if p == "p0" else NUMEL // 2, 8)
    for hashes, count in itertools.product((1, 2, 3, 4, 32), (1000, NUMEL // 100, NUMEL // 3, NUMEL - 1)):
        # The smallest filter that a reader takes is the fullest.
        size = 8 if hashes == 1 else int(0.989 * (hashes - 0.5) * count / np.log(2) / 8) + 1
        yield (f"bloom p2, {hashes} hashes, {count} elements", lambda c=count, s=size, h=hashes: bloom("p2", c, s, h))
    for name, codec in index_codecs.by_name.items():
        if name not in ("bloom", "auto"):
            yield (
                f"index {name}, all",
                lambda n=name, c=codec: container(n, c().encode(all_kept, NUMEL, KEY)[0].tobytes(), NUMEL),
            )

    def sketches(name: str, rows: int, columns: int, buckets: int) -> np.ndarray:
        keys = index_codecs.by_name["delta"]().encode(all_kept, NUMEL, KEY)[0].tobytes()
        bins = bytes([0xF0 >> 4])  # one code length: symbol 0 alone
        if name == "sketchml":
            keys, bins = bytes((NUMEL + 3) // 4 + NUMEL), b""
        head = sketch.Header(rows, columns * 65536, buckets, 0, 0, 1).pack()
        head += struct.pack(f"<{buckets}f", *range(buckets))
        return joint(name, head + struct.pack("<III", NUMEL, len(keys), len(bins)) + keys + bins)

    yield "skcompress, 8 x 4, bins all equal", lambda: sketches("skcompress", 8, 4, 2)
    yield "sketchml, 8 x 4, one bucket", lambda: sketches("sketchml", 8, 4, 1)
    noise = np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)
    for name in ("skcompress", "sketchml"):
        settings = {"name": name, "rows": 8, "columns": 4.0, "groups": 1}
        yield f"{name}, 8 x 4, encoded", lambda s=settings: encoded(noise, sparsifier="nonzero", joint=s)
        for groups in (1, 256):
            whole = {**settings, "groups": groups}
            yield f"{name}, 8 x 4, dense, {groups} groups", lambda s=whole: encoded(noise, sparsifier="none", joint=s)

    def poly(degree: int) -> np.ndarray:
        words = [degree, NUMEL, 0, 1]
        side = struct.pack("<IIII", *words) + struct.pack(f"<2f{degree + 1}f", 0.5, 1.0, *[0.5] * (degree + 1))
        return container("", b"", NUMEL, "fit_poly", side)

    yield "fit_poly, degree 0", lambda: poly(0)
    yield "fit_poly, degree 15", lambda: poly(15)
    yield (
        "fit_dexp",
        lambda: container("", b"", NUMEL, "fit_dexp", struct.pack("<II6f", NUMEL, 0, 0.5, 1.0, 1.0, 0.5, 0.25, 0.125)),
    )
    yield (
        "fit_poly, indices in the order of the values",
        lambda: encoded(noise, sparsifier={"name": "topk", "density": 0.9}, index="packed", value="fit_poly"),
    )
    zeros = bytes(4 * NUMEL)
    yield "deflate", lambda: container("", b"", NUMEL, "deflate", b"\1" + zlib.compress(zeros, 9))
    yield "zstd", lambda: container("", b"", NUMEL, "zstd", b"\1" + zstandard.compress(zeros, 9))
    for entropy in ("huffman", "rans"):
        value = {"name": "qsgd", "entropy": entropy, "bucket_size": 2**31}
        yield f"qsgd, {entropy}", lambda v=value: encoded(np.ones(NUMEL, np.float32), sparsifier="none", value=v)
    for value in value_codecs.by_name:
        yield f"value {value}", lambda v=value: encoded(noise, sparsifier="none", value=v)
    for codec in joint_codecs.by_name:
        yield f"joint {codec}", lambda j=codec: encoded(noise, sparsifier="none", joint=j)
    for bits_ in (1, 9):
        value = {"name": "uniform", "bits": bits_, "bucket_size": 2**31, "rotate": True}
        yield f"uniform, {bits_} bits, rotated", lambda v=value: encoded(noise, sparsifier="none", value=v)
    for entropy in ("huffman", "rans"):
        value = {"name": "quantile", "entropy": entropy}
        yield f"quantile, {entropy}", lambda v=value: encoded(np.sign(noise), sparsifier="none", value=v)
    yield "three_lc, runs", lambda: encoded(np.eye(1, NUMEL, dtype=np.float32)[0], sparsifier="none", joint="three_lc")
    for coded in (False, True):
        stream = {"name": "densestream", "coded": coded, "value": "qsgd"}
        yield f"densestream, coded {coded}", lambda s=stream: encoded(noise, sparsifier="none", joint=s)
        yield (
            f"densestream, every other element, coded {coded}",
            lambda s=stream: encoded(
                np.where(np.arange(NUMEL) % 2, noise, 0).astype(np.float32), sparsifier="nonzero", joint=s
            ),
        )
    yield (
        "randomk",
        lambda: wire.pack(
            Container(
                2, 0, value_codecs.by_name["quantile"].id, F32, NUMEL, NUMEL - 1, KEY, 0, EMPTY,
                np.frombuffer(ONE_BUCKET, np.uint8), EMPTY,
            )
        ),
    )  # fmt: skip


def peak(field: str) -> int:
    """A size of this process, in bytes."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(field))
    return 1024 * int(line.split()[1])


def measure(data: np.ndarray) -> tuple[int, float, str]:
    """The memory that decoding takes beyond the container, in bytes; its seconds of processor; and "" or its error."""
    container = wire.unpack(data)
    before, began, error = peak("VmRSS:"), time.process_time(), ""
    try:
        decode_part(container, NUMEL)
    except wire.ContainerError as refused:
        error = str(refused)
    return peak("VmHWM:") - before, time.process_time() - began, error


def main() -> None:
    # Memory that was freed goes back to the system at once, so that the next decoder's is counted.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    found = {}
    for name, make in attacks():
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        data = make()
        out, into = os.pipe()
        child = os.fork()  # a process for each, since the system counts its peak from its start
        if child == 0:
            os.write(into, json.dumps([data.size, *measure(data)]).encode())
            os._exit(0)
        os.close(into)
        with os.fdopen(out) as said:
            found[name] = json.load(said)
        os.waitpid(child, 0)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
