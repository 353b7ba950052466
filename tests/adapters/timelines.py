"""The timeline of a real job: a file of each rank, with the spans of every bucket in every step."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_deepreduce.engine import timeline


def check(rank: int, train: Callable[[], object], times: int | None = None) -> None:
    """``train`` makes a DeepReduce, trains with it and closes it: ``times`` times, each bucket is encoded, waited for
    and decoded. None: as often as it is encoded."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(timeline.PATH, os.path.join(folder, "t"))
        train()
        events = timeline.read(Path(folder) / f"t.deepreduce.{rank}.json")
        assert len(os.listdir(folder)) == 1
    spans = [event for event in events if event["ph"] == "X"]
    counts = Counter((event["args"]["bucket"], event["name"]) for event in spans)
    buckets = {bucket for bucket, _ in counts}
    assert len(buckets) > 1, counts
    spans.sort(key=lambda event: event["ts"])
    for bucket in buckets:
        kinds = [event["name"] for event in spans if event["args"]["bucket"] == bucket]
        assert kinds == ["encode", "wait", "decode"] * (times or counts[bucket, "encode"]), kinds
    (named,) = (event["args"]["name"] for event in events if event["name"] == "process_name")
    assert named.startswith(f"hvd_deepreduce, rank {rank} ")
