"""The handshake with ranks that send anything: every rank raises a MismatchError that names the sender."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_deepreduce import Config
from hvd_deepreduce.engine import Engine, MismatchError
from hvd_deepreduce.engine.agreement import Agreement, compare, compare_places, statement
from hvd_deepreduce.exchange import statements as module
from hvd_deepreduce.exchange.statements import read
from tests.engine.numpy_adapter import run_ranks

CONFIG = Config.load()
SAID = statement("2.0", CONFIG, [("w", (3,), "float32")])
LINES = [json.dumps({"version": "2.0", "rank": rank, **SAID}).encode() + b"\n" for rank in range(4)]


def altered(line, /, **changes):
    return json.dumps({**json.loads(LINES[line]), **changes}).encode() + b"\n"


RUBBISH = {
    "sent no description of itself, but ''": b"\n",
    "rank 2 sent no description of itself, or more": b"",
    "sent no description of itself, but rubbish": b"rubbish\n",
    "sent no description of itself, but '\\\\x1b\\[2J\ufffd'": b"\x1b[2J\xff\n",
    "sent no description of itself, but '{\"version": LINES[2][:20] + b"\n" + LINES[2],
    "sent (a description of itself without|no description of itself, but '{)": LINES[2][:-1],
    "description of itself, but x{160}... ": b"x" * 100_000 + b"\n",
    "sent no description of itself, but 'PK": b"PK\x03\x04" + bytes(3000) + b"\n" * 50,
    "sent no description of itself, or more than one": LINES[2] + LINES[2],
    r"sent no description of itself, but '\[\[\[": b"[" * 100_000 + b"\n",
    r"sent no description of itself, but \[1, 2\]": b"[1, 2]\n",
    "sent no description of itself, but {}": b"{}\n",
    'but {"version": 2': altered(2, version=2),
    'but {"version": "2.0", "rank": "2"': altered(2, rank="2"),
    r'but {"version": "2.0", "rank": 2, "package": \[\]': altered(2, package=[]),
    'but {"version": "2.0", "rank": 2': altered(2, parameter=None),
    'of itself, but {"version"': altered(2, order={"w": 1}),
    "rank 2 sent no description of itself, or more than one": altered(2, rank=3),
    "rank 2 sent no description of itself, or": altered(2, rank=-7),
}


@pytest.mark.parametrize("message", RUBBISH)
@pytest.mark.parametrize("size", [4, 3], ids=["in the midst", "last"])
def test_rubbish_names_its_rank(message, size):
    lines = [RUBBISH[message] if rank == 2 else line for rank, line in enumerate(LINES[:size])]
    expected = message if message.startswith("rank") else f"rank 2 .*{message}"
    if size == 3 and lines[2] in (b"", LINES[2] + LINES[2]):
        expected = "rank 2 sent"  # nothing comes after it
    with pytest.raises(MismatchError, match=f"cannot be compared: {expected}") as error:
        compare(read(b"".join(lines), size))
    said = str(error.value)
    assert said.isprintable() and len(said) < 600


def test_a_description_that_is_too_long_is_not_parsed(monkeypatch):
    monkeypatch.setattr(module, "MAX_STATEMENT", 4000)
    long = b'{"version": "2.0", "order": [' + b"0," * 2000 + b"0]}"
    loads = json.loads

    def parsing(line):
        assert len(line) <= 4000
        return loads(line)

    monkeypatch.setattr(module.json, "loads", parsing)
    for lines in ([LINES[0], long + b"\n", LINES[2]], [LINES[0], long]):
        with pytest.raises(MismatchError, match="rank 1 sent a description of itself of 4032 bytes; at most 4000 are"):
            read(b"".join(lines), len(lines))
    with pytest.raises(MismatchError, match="rank 1 sent no description of itself, but ''"):
        read(LINES[0] + b"\n" * 10**6, 2)


def test_texts_of_other_ranks_are_quoted_and_cut():
    cases = {
        r"version is 2.0 on rank 0, '1 on rank 0. Now run\\n\\x1b\[2J' on rank 1": altered(
            1, version="1 on rank 0. Now run\n\x1b[2J"
        ),
        r"config.'a\\nb' is missing on rank 0, 1 on rank 1": altered(1, config={**CONFIG.shared(), "a\nb": 1}),
        r"parameter w is float32 \[3\] on rank 0, x{160}... \(99999 characters\) on rank 1": altered(
            1, parameter={"w": "x" * 99_999}
        ),
        r"parameter w is float32 \[3\] on rank 0, \[\"y{158}... \(100004 characters\) on": altered(
            1, parameter={"w": ["y" * 100_000]}
        ),
        r"parameter w is .*; and 9996 more. Use": altered(1, parameter={str(n): 1 for n in range(10**4)}),
        "the order of the parameters is .* on rank 0, .* on rank 1": altered(1, order=["w", "w"] * 100_000),
    }
    for message, line in cases.items():
        with pytest.raises(MismatchError, match=f"do not agree: {message}") as error:
            compare(read(LINES[0] + line, 2))
        assert str(error.value).isprintable() and len(str(error.value)) < 1600
    # Values that Python takes for equal, and one nested as deeply as it can be read.
    for value in (False, 0.0, "0"):
        with pytest.raises(MismatchError, match=r"config.seed is 0 on rank 0, .* on rank 1"):
            compare(read(LINES[0] + altered(1, config={**CONFIG.shared(), "seed": value}), 2))
    nested = LINES[1].replace(b'"seed": 0', b'"seed": ' + b"[" * 900 + b"]" * 900)
    with pytest.raises(MismatchError, match=r"config.seed is .* on rank 1|rank 1 sent no description"):
        compare(read(LINES[0] + nested, 2))


def test_many_ranks_that_all_differ():
    lines = [altered(0, rank=rank, version=f"1.{rank}") for rank in range(300)]
    with pytest.raises(MismatchError, match=r"1.0 on rank 0, .*1.3 on rank 3, and 296 other values\. Use") as error:
        compare(read(b"".join(lines), 300))
    assert len(str(error.value)) < 600


def test_altered_descriptions():
    """Whatever is altered, the ranks agree, or it is a MismatchError that names the rank."""
    rng = np.random.default_rng(0)
    named = 0
    for _ in range(2000):
        lines = [bytearray(line) for line in LINES]
        for _ in range(int(rng.integers(1, 4))):
            place, what = int(rng.integers(len(lines[2]))), int(rng.integers(3))
            if what == 0:
                lines[2][place] = int(rng.integers(256))
            elif what == 1:
                del lines[2][place : place + int(rng.integers(1, 99))]
            else:
                lines[2][place:place] = rng.integers(0, 256, 5, np.uint8).tobytes()
            if not lines[2]:
                break
        try:
            compare(read(b"".join(lines), 4))
        except MismatchError as error:
            assert "rank 2" in str(error), error
            named += 1
    assert named > 1900


@pytest.mark.parametrize("rubbish", [b"\x80\x04K\x01.", b"", b"rubbish\n", LINES[1] + LINES[1]], ids=repr)
def test_every_rank_raises_the_same(rubbish):
    def work(collectives):
        if collectives.rank() == 1:
            allgather = collectives.allgather
            collectives.allgather = lambda data, name: allgather(np.frombuffer(rubbish, np.uint8), name)
        with pytest.raises(MismatchError, match="rank 1 sent") as error:
            Agreement(collectives).check(CONFIG, [])
        return str(error.value)

    assert len(set(run_ranks(3, work))) == 1


def meet(collectives, place, failed=False):
    """Three ranks that have been compared; returns the error of one."""
    engine = Engine(CONFIG, collectives)
    engine.failed = failed
    word = engine.vote(True, place=place)
    told = collectives.allgather(word.view(np.uint8), "step check").view(np.float64).reshape(-1, word.size)
    with pytest.raises(MismatchError) as error:
        engine.tally(told.sum(0), lambda: None, "Take as many steps")
    return str(error.value)


def test_ranks_at_different_places():
    def work(collectives):
        last = collectives.rank() == 2
        step = {"step": 4 + last, "fragment": 1} if last else {"fragment": 1, "step": 4}
        nowhere = None if last else {"step": 4}
        failed = collectives.rank() == 1
        return meet(collectives, step), meet(collectives, nowhere), meet(collectives, {"step": 4}, failed)

    for said in run_ranks(3, work):
        assert said == (
            "the ranks of this job are not at the same place: step is 4 on ranks 0, 1, 5 on rank 2. Take as many "
            "steps. Nothing was exchanged",
            "the ranks of this job are not at the same place: step is 4 on ranks 0, 1, missing on rank 2. Take as many "
            "steps. Nothing was exchanged",
            said[2],
        )
        assert "an error has left 1 rank behind" in said[2]


@pytest.mark.parametrize("place", [None, [], {"step": 1.5}, {"step": [4]}, {"\x1b": "\x1b"}, {"step": 10**4000}])
def test_places_that_are_none(place):
    told = [{"rank": 0, "place": {"step": 4}}, {"rank": 1, "place": place}]
    with pytest.raises(MismatchError, match="rank 1") as error:
        compare_places(told)
    assert str(error.value).isprintable() and len(str(error.value)) < 600
