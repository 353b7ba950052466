"""The parts of the engine by themselves."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvd_deepreduce import Config
from hvd_deepreduce.engine import BucketLayout, Member, MismatchError, Parameter
from hvd_deepreduce.engine.agreement import compare, statement
from hvd_deepreduce.engine.stats import Counters, Stats
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.statements import read
from hvd_deepreduce.exchange.traffic import Traffic


def members(*sizes, dtypes="", devices=None):
    return [
        Member(
            Parameter(str(i), i, (size,), "float64" if dtypes[i : i + 1] == "d" else "float32"), size,
            devices[i] if devices else None,
        )
        for i, size in enumerate(sizes)
    ]  # fmt: skip


def names(layout):
    return ["".join(parameter.name for parameter in bucket.members) for bucket in layout.buckets]


@pytest.mark.parametrize(
    ("given", "max_bytes", "expected"),
    [
        (members(1, 2, 3, 4), None, ["0123"]),
        (members(1, 2, 3, 4), 4 * 7, ["23", "01"]),
        (members(1, 2, 3, 4), 4 * 7 - 1, ["3", "012"]),
        (members(1, 2, 3, 4), 4, ["3", "2", "1", "0"]),
        (members(9, 1, 9), 8, ["2", "1", "0"]),
        (members(1, 2, 3, 4, dtypes="fddf"), None, ["3", "12", "0"]),
        (members(2, 2, 2, dtypes="ddd"), 32, ["12", "0"]),
        (members(1, 2, 3, 4, devices=[None, "x", "x", "y"]), None, ["3", "12", "0"]),
        (members(2**30, 2**30 - 1, 1), None, ["12", "0"]),
        (members(1, 2**32 - 1, 1), None, ["2", "1", "0"]),
        (members(0, 0, 5), None, ["012"]),
    ],
)
def test_a_model_is_divided_into_buckets(given, max_bytes, expected):
    layout = BucketLayout(given, max_bytes, first_number=10)
    assert names(layout) == expected
    assert [bucket.number for bucket in layout.buckets] == list(range(10, 10 + len(expected)))
    for bucket in layout.buckets:
        assert bucket.parts[0][0] == 0 and bucket.parts[-1][1] == sum(bucket.sizes)
        assert all(layout.bucket_of[parameter.name] is bucket for parameter in bucket.members)
        assert {p.accumulated_in for p in bucket.members} == {bucket.dtype}


def test_buckets_are_started_in_the_order_of_their_numbers():
    given = members(1, 1, 1, 1, 1)
    layout = BucketLayout(given, 8)
    assert names(layout) == ["34", "12", "0"]
    first, second, third = layout.buckets
    # All gradients; without parameter 3; without the first bucket's.
    for order, late in (("01243", []), ("0124", [first, second, third]), ("012", [second, third])):
        parameters = [given[int(name)].parameter for name in order]
        started = []
        for parameter in parameters:
            bucket = layout.bucket_of[parameter.name]
            assert not started and bucket.number >= layout.started
            bucket.put(parameter, np.ones(1, "f4"))
            started = layout.mark_ready(bucket, parameter)
        assert started == ([] if late else [first, second, third])
        assert layout.flush() == late and layout.flush() == []
        for bucket in started or late:
            bucket.count_step()
        for parameter in parameters:
            assert layout.started == len(layout.buckets)
            layout.release(layout.bucket_of[parameter.name], parameter)
        assert layout.started == 0 and all(bucket.empty for bucket in layout.buckets)
    # Parameter 3 counts the step in which its bucket was sent without its gradient.
    assert [member.parameter.step for member in given] == [3, 3, 3, 2, 2]
    assert [bucket.step for bucket in layout.buckets] == [1, 2, 2]


def test_a_release_that_describes_itself_differently_is_named():
    """Only the key "version" is the same in every release."""
    def compared(*lines):
        compare(read(b"".join(line + b"\n" for line in lines), len(lines)))

    said = statement("2.0", Config.load(), [("w", (3,), "float32")])
    own = [json.dumps({**said, "rank": rank}).encode() for rank in range(2)]
    for other in (b'{"version": "1.0"}', b'{"version": "1.0", "config": {"seed": 0}, "something": {"a": 1}}'):
        with pytest.raises(MismatchError, match="do not agree: version is 2.0 on rank 0, 1.0 on rank 1; "):
            compared(own[0], other)
        with pytest.raises(MismatchError, match="do not agree: version is 1.0 on ranks 0, 2, 2.0 on rank 1; "):
            compared(other, own[1], other)


def test_stats_of_threads():
    stats = Stats()

    def work(number):
        stats.begin_step()
        for _ in range(100):
            stats.add(wire=Traffic(1, 3), dense=2, encode=0.5, wait=0.25, decode=1.0)

    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        stats.end_step()
    total, last = stats.to_dict()["total"], stats.to_dict()["last_step"]
    assert total == {"steps": 2, "bytes_sent": 1600, "bytes_received": 4800, "dense_bytes": 3200,
                     "inside_bytes_sent": 0, "inside_bytes_received": 0, "encode_seconds": 800.0, "wait_seconds": 400.0,
                     "decode_seconds": 1600.0, "compression_ratio": 2.0}  # fmt: skip
    assert last == {key: value if key == "compression_ratio" else value / 2 for key, value in total.items()}
    stats.measure("a", np.full(4, 3.0, np.float32), np.ones(4, np.float32))
    stats.measure("b", None, np.ones(4, np.float32))
    for broken in (0.0, np.nan, np.inf):
        stats.measure("c", np.ones(4, np.float32), np.full(4, broken, np.float32))
    assert str(stats.to_dict()).splitlines() == [
        "                       total  last step",
        "steps                      2          1",
        "bytes sent             1,600        800",
        "bytes received         4,800      2,400",
        "dense bytes            3,200      1,600",
        "encode seconds      800.0000   400.0000",
        "wait seconds        400.0000   200.0000",
        "decode seconds     1600.0000   800.0000",
        "sent / dense          50.00%     50.00%",
        "compression ratio        2.0        2.0",
        "residual / gradient: median 1.5, most 3.0 (a)",
    ]


def test_statistics_as_one_flat_dict():
    assert Stats().to_dict().as_dict()["deepreduce/total/compression_ratio"] == 0.0, "nothing was sent"
    stats = Stats(total=Counters(bytes_sent=2, dense_bytes=5), residual_ratio={"0.weight": 1.5})
    figures = stats.to_dict().as_dict("d")
    assert figures["d/total/compression_ratio"] == 2.5 and figures["d/residual_ratio/0.weight"] == 1.5
    assert figures["d/last_step/steps"] == 0 and len(figures) == 2 * 10 + 1


def test_bytes_on_the_wire():
    """In sum over the ranks, as many bytes are sent as received, and the least that each operation needs."""
    assert traffic.allgather(10, 60, 3) == Traffic(20, 50) and traffic.allgather(10, 10, 1) == Traffic(0, 0)
    assert traffic.allreduce(800, 2) == Traffic(800, 800) and traffic.allreduce(800, 4) == Traffic(1200, 1200)
    assert traffic.allreduce(8, 1) == traffic.NOTHING
    sizes = [10, 20, 30]
    each = [traffic.allgather(size, sum(sizes), 3) for size in sizes]
    assert sum(one.sent for one in each) == sum(one.received for one in each) == 2 * sum(sizes)


def test_a_parameter_says_in_what_it_is_accumulated():
    for dtype, expected in {"float32": "f4", "torch.float16": "f4", "torch.bfloat16": "f4", "torch.float64": "f8",
                            "float64": "f8"}.items():  # fmt: skip
        assert Parameter("x", 0, (2, 3), dtype).accumulated_in == np.dtype(expected)
    assert Parameter("x", 0, (2, 3), "f").numel == 6 and Parameter("x", 0, (), "f").numel == 1
