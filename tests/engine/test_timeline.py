"""The timeline of a rank: its file, its clock, and what is left of it where a job ends early."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from time import perf_counter
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from hvd_deepreduce.engine import timeline
from hvd_deepreduce.engine.stats import Stats
from hvd_deepreduce.engine.timeline import START, Trace, merge, read
from hvd_deepreduce.ops import device
from hvd_deepreduce.tools.app import app
from tests.ranks import ROOT


def spans(events):
    return [(event["name"], event["args"]["bucket"]) for event in events if event["ph"] == "X"]


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch):
    for name in (timeline.PATH, timeline.HOROVOD_PATH, timeline.NVTX, timeline.NSYS):
        monkeypatch.delenv(name, raising=False)


def test_a_trace_is_json_with_the_spans_of_all_threads(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("of an earlier job")
    trace = Trace(path, 3)
    begin = perf_counter()
    trace.add("encode", 'bucket "0"', begin, begin + 0.25)
    other = threading.Thread(target=lambda: trace.add("wait", "bucket 1", begin + 0.5, begin + 0.75), name="another")
    other.start()
    other.join()
    trace.end()
    trace.add("decode", "too late", begin, begin)
    trace.end()
    events = json.loads(path.read_text())
    assert spans(events) == [("encode", 'bucket "0"'), ("wait", "bucket 1")]
    first, second = (event for event in events if event["ph"] == "X")
    assert first["dur"] == second["dur"] == 250_000 and abs(second["ts"] - first["ts"] - 500_000) < 1
    assert first["tid"] != second["tid"] and {event["pid"] for event in events} == {timeline.FIRST_PROCESS + 3}
    (start,) = (event["args"][START] for event in events if event["name"] == "process_name")
    assert start + first["ts"] == pytest.approx(1e6 * (time.time() - perf_counter() + begin), abs=50_000)
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named[second["tid"]] == "another"


def test_what_is_left_of_a_killed_job_can_be_opened(tmp_path):
    """The way of Chrome and Perfetto: the closing bracket, and only that, is missing."""
    path = tmp_path / "t.json"
    code = f"""
import os
from pathlib import Path
from hvd_deepreduce.engine.timeline import MOST_WAITING, Trace
trace = Trace(Path({str(path)!r}), 0)
for number in range(2 * MOST_WAITING):
    trace.add("encode", f"bucket {{number}}", number, number + 1)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -9
    text = path.read_text()
    events = json.loads(text + "]")
    assert len(spans(events)) >= 2 * timeline.MOST_WAITING - 1
    assert read(path) == events
    path.write_text(text[:-20])  # a file of Horovod's can end in the middle of an event
    assert read(path) == events[:-1]
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a timeline"):
        read(path)


def test_files_are_put_on_one_clock():
    def file(start, *times):
        head = {"name": "process_name", "ph": "M", "pid": 1, "args": {START: start}}
        return [head, *({"name": "encode", "ph": "X", "ts": time} for time in times)]

    merged = merge([file(5_000, 10, 20), file(4_000, 30)])
    assert [event["ts"] for event in merged if "ts" in event] == [1010, 1020, 30]
    with pytest.raises(ValueError, match=START):
        merge([file(1), [{"ph": "X", "ts": 1}]])


def test_the_command_merges_files(tmp_path):
    for rank in range(2):
        trace = Trace(tmp_path / f"t.deepreduce.{rank}.json", rank)
        begin = perf_counter()
        trace.add("encode", "bucket 0", begin, begin + 1)
        trace.end()
    whole, files = tmp_path / "all.json", sorted(tmp_path.iterdir())
    ended = CliRunner().invoke(app, ["timeline", *map(str, files), "--out", str(whole)])
    assert ended.exit_code == 0, ended.output
    assert spans(json.loads(whole.read_text())) == 2 * [("encode", "bucket 0")]
    (tmp_path / "other").write_text("something else")
    ended = CliRunner().invoke(app, ["timeline", str(tmp_path / "other"), "--out", str(whole)])
    assert ended.exit_code == 1 and "is not a timeline" in ended.stderr


def test_spans_are_counted_and_traced(tmp_path, monkeypatch):
    monkeypatch.setenv(timeline.HOROVOD_PATH, str(tmp_path / "horovod.json"))
    asked = []
    stats = Stats(watch=timeline.watch(lambda: asked.append(0) or 5))
    assert not asked, "ranks may not be known when a DeepReduce is made"
    stats.begin_step()
    for kind in ("encode", "wait", "decode"):
        with stats.span(kind, "bucket 0"):
            time.sleep(0.001)
    with stats.span("wait", "bucket 1") as span:
        span.counted = False
        time.sleep(0.001)
    with pytest.raises(KeyError), stats.span("decode", "bucket 2"):
        raise KeyError
    stats.watch.flush()
    events = read(tmp_path / "horovod.json.deepreduce.5.json")
    assert spans(events) == [
        ("encode", "bucket 0"), ("wait", "bucket 0"), ("decode", "bucket 0"), ("wait", "bucket 1"),
        ("decode", "bucket 2"),
    ]  # fmt: skip
    durations = [event["dur"] / 1e6 for event in events if event["ph"] == "X"]
    total = stats.total
    counted = [total.encode_seconds, total.wait_seconds, total.decode_seconds]
    assert counted == pytest.approx(durations[:3], abs=1e-6) and min(counted) >= 0.001
    # Another DeepReduce of this process adds to the same file.
    other = timeline.watch(lambda: 5)
    other.add("encode", "bucket 9", 0.0, 0.0)
    other.flush()
    assert spans(read(tmp_path / "horovod.json.deepreduce.5.json"))[-1] == ("encode", "bucket 9")
    assert asked == [0]


def test_what_the_environment_asks_for(tmp_path, monkeypatch, caplog):
    assert timeline.watch(lambda: 0) is None
    monkeypatch.setenv(timeline.HOROVOD_PATH, "DYNAMIC")
    assert timeline.watch(lambda: 0) is None
    monkeypatch.setenv(timeline.PATH, str(tmp_path / "missing" / "t"))
    watch = timeline.watch(lambda: 0)
    with caplog.at_level(logging.WARNING, "hvd_deepreduce"):
        for _ in range(2):
            watch.add("encode", "bucket 0", 0.0, 1.0)
    assert len(caplog.records) == 1 and "No such file or directory" in caplog.text
    assert os.listdir(tmp_path) == []


def test_nvtx_ranges(monkeypatch, caplog):
    """CuPy's module does not tell what it was given, so one that does takes its place."""
    ranges = []
    nvtx = SimpleNamespace(RangePush=ranges.append, RangePop=lambda: ranges.append("end"))
    monkeypatch.setattr(device, "_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(nvtx=nvtx)))
    for name, value, asked in ((timeline.NVTX, "1", True), (timeline.NVTX, "0", False), (timeline.NSYS, "7", True)):
        monkeypatch.setenv(name, value)
        watch = timeline.watch(lambda: 0)
        assert (watch is not None) == asked
        monkeypatch.delenv(name)
        if watch is not None:
            with Stats(watch=watch).span("encode", "bucket 0"):
                ranges.append("work")
            assert ranges == ["deepreduce encode bucket 0", "work", "end"]
            ranges.clear()

    def missing():
        raise ImportError("install CuPy")

    monkeypatch.setattr(device, "_cupy", missing)
    monkeypatch.setenv(timeline.NSYS, "7")
    assert timeline.watch(lambda: 0) is None and not caplog.records
    monkeypatch.setenv(timeline.NVTX, "1")
    assert timeline.watch(lambda: 0) is None
    assert "install CuPy" in caplog.text
