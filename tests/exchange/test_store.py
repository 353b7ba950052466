"""Exchanges through files: the stores, messages, and whose count."""

from __future__ import annotations

import json
import struct
import threading
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.exchange.messages import Message
from hvd_deepreduce.exchange.store import Folder, MissingError, ObjectStore, SharedStore
from hvd_deepreduce.wire.standalone import ContainerError

SAID = {"config": "a", "model": "b"}


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_file_is_written_once_and_whole(kind, tmp_path):
    store = Folder(tmp_path / "job") if kind == "folder" else ObjectStore(f"memory://{tmp_path}")
    assert store.get("0/1/a") is None and store.names("0/1") == []
    written = []

    def write(number):
        if store.put_new("0/1/a", bytes([number]) * 100_000):
            written.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1 and store.get("0/1/a") == bytes(written) * 100_000
    assert store.put_new("0/1/b", b"")
    assert sorted(store.names("0/1")) == ["a", "b"] and store.names("0") == ["1"]
    store.delete("0/1/a")
    store.delete("0/1/a")
    assert store.names("0/1") == ["b"]


def test_a_store_that_overwrites_is_refused(monkeypatch, tmp_path):
    """As by an fsspec that does not know exclusive writes."""
    kind = type(ObjectStore(f"memory://{tmp_path}").files)
    write = kind.pipe_file
    monkeypatch.setattr(kind, "pipe_file", lambda self, path, value, mode="overwrite": write(self, path, value))
    with pytest.raises(ValueError, match="overwrites files.*update fsspec"):
        ObjectStore(f"memory://{tmp_path}")


parts = st.dictionaries(st.text(max_size=5), st.binary(max_size=50), max_size=4)


@given(parts)
def test_a_message_is_read_as_it_was_written(given):
    message = Message(SAID, given)
    assert Message.unpack(message.pack()) == message


def whole(text: bytes, rest: bytes = b"") -> bytes:
    """A message with a right checksum."""
    body = struct.pack("<I", len(text)) + text + rest
    return b"DRP1" + struct.pack("<I", zlib.crc32(body)) + body


@given(st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(whole)))
def test_broken_messages_are_found(data):
    with pytest.raises(ValueError, match="this is no message of a peer"):
        Message.unpack(data)


@pytest.mark.parametrize(
    "told",
    [
        {"run": "../0"}, {"run": 3}, {"run": "0" * 33},
        {"said": {}, "parts": [["a", 5]]}, {"said": {}, "parts": [["a", -1]]}, {"said": {}, "parts": [["a", True]]},
        {"said": {}, "parts": []}, {"said": {"a": 1}, "parts": [["a", 4]]}, {"said": [], "parts": [["a", 2], ["a", 2]]},
        {"parts": [["a", 4]]}, {"said": {}, "parts": [["a"]]}, [], {"said": {}, "parts": [["a", 10**30]]},
    ],
)  # fmt: skip
def test_descriptions_that_do_not_fit_are_found(told):
    right = {"said": {}, "parts": [["a", 4]], "run": "0f"}
    assert Message.unpack(whole(json.dumps(right).encode(), b"abcd")) == Message({}, {"a": b"abcd"}, "0f")
    if isinstance(told, dict) and "said" in told:
        told = {"run": "", **told}
    elif isinstance(told, dict) and "run" in told:
        told = {**right, **told}
    with pytest.raises(ValueError, match="this is no message of a peer"):
        Message.unpack(whole(json.dumps(told).encode(), b"abcd"))


def peers(tmp_path, count=3, **options):
    return [SharedStore(tmp_path, peer=peer, peers=count, **options) for peer in range(count)]


def together(calls):
    """What calls on threads return, or raise."""
    found = [None] * len(calls)

    def run(at):
        try:
            found[at] = calls[at]()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def exchange(store, number, said=SAID, late=0.0):
    def call():
        time.sleep(late)
        place = f"0/{number}"
        store.send(place, Message(said, {"x": bytes([store.peer])}))
        return set(store.agree(place, "0"))

    return call


def test_all_peers_decide_alike_and_wait_only_for_those_that_were_there(tmp_path):
    stores = peers(tmp_path, wait=20.0)
    assert together([exchange(one, 0) for one in stores]) == [{0, 1, 2}] * 3
    for one in stores:
        one.note("0", frozenset({0, 1, 2}))
        one.wait = 1.5
    late = exchange(stores[2], 1, late=4.0)
    assert together([exchange(one, 1) for one in stores[:2]] + [late]) == [{0, 1}] * 3
    for one in stores:
        one.note("0", frozenset({0, 1}))
        one.wait = 20.0
    begin = time.monotonic()  # peer 2 is away: it was not in both of the last two
    assert together([exchange(one, 2) for one in stores[:2]]) == [{0, 1}] * 2
    assert time.monotonic() - begin < 10
    assert stores[2].agree("0/2", "0") == {0: "", 1: ""}
    stores[2].send("0/3", Message(SAID, {"x": b"2"}))  # it is there before the others
    assert together([exchange(one, 3) for one in stores[:2]]) == [{0, 1, 2}] * 2


def test_a_slow_peer_is_waited_for_a_fifth_of_a_period_at_most(tmp_path):
    stores = peers(tmp_path, 2)
    together([exchange(one, 0) for one in stores])
    begin = time.monotonic()
    assert exchange(stores[0], 1)() == {0}
    assert 1 <= time.monotonic() - begin < 20


def test_a_peer_with_another_config_is_refused_and_the_others_go_on(tmp_path):
    stores = peers(tmp_path, wait=20.0)
    calls = [exchange(stores[0], 0, {"config": "other", "model": "b"}), *(exchange(one, 0) for one in stores[1:])]
    refused, *others = together(calls)
    assert others == [{1, 2}] * 2
    assert isinstance(refused, MismatchError)
    assert "the other peers go on without peer 0: 'its config is not that of peer 1'" in str(refused)


def test_a_broken_message_does_not_count(tmp_path):
    stores = peers(tmp_path, wait=2.0)
    stores[2].store.put_new("0/0/2", b"rubbish")
    stores[2].store.put_new("0/0/77", b"nobody")
    assert together([exchange(one, 0) for one in stores[:2]]) == [{0, 1}] * 2
    assert stores[0].messages("0/0", {0: "", 1: ""})[1].parts == {"x": b"\x01"}
    with pytest.raises(ContainerError, match="0/0/2 is broken"):
        stores[0].messages("0/0", {2: ""})
    stores[0].forget("0/0")
    with pytest.raises(MissingError, match="0/0/0 is missing"):
        stores[1].messages("0/0", {0: ""})
    assert stores[1].decided("0/0") == {0: "", 1: ""}
    stores[0].wait = 0.2
    stores[2].store.put_new("0/1/2", b"rubbish")
    with pytest.raises(ContainerError, match="there are only broken messages in 0/1"):
        stores[0].agree("0/1", "0")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b'{"members": {}, "refused": {}}', b'{"members": {"9": ""}, "refused": {}}',
        b'{"members": {"true": ""}, "refused": {}}', b'{"members": {"0": ""}, "refused": 3}', b"[" * 9999,
        b'{"members": [0], "refused": {}}', b'{"members": {"0": "../0"}, "refused": {}}',
    ],
)  # fmt: skip
def test_a_broken_commit_is_an_error(data, tmp_path):
    (one,) = peers(tmp_path, 1)
    one.store.put_new("0/0/commit", data)
    with pytest.raises(ContainerError, match="0/0/commit is broken"):
        one.decided("0/0")


def test_peers_that_have_parted_meet_again(tmp_path):
    """A peer that was not in the last exchange waits for those that were, for up to a period of its own."""
    stores = peers(tmp_path, 2)
    together([exchange(one, 0) for one in stores])
    for one in stores:
        one.note("0", frozenset({0, 1}))
    for number in (1, 2):  # peer 1 is late
        stores[0].wait = 0.0
        assert exchange(stores[0], number)() == {0}
        for one in stores:
            one.note("0", frozenset({0}))
    stores[0].wait, stores[1]._ended["0"] = None, time.monotonic() - 20
    assert together([exchange(stores[0], 3, late=2.0), exchange(stores[1], 3)]) == [{0, 1}] * 2


def test_a_peer_that_was_in_the_last_exchange_alone_is_waited_for_a_little(tmp_path):
    """Else one that comes some milliseconds later than the others would be in every other exchange."""
    stores = peers(tmp_path, 3)
    together([exchange(one, 0) for one in stores])
    for one in stores:
        one.note("0", frozenset({0, 1}))
        one.note("0", frozenset({0, 1, 2}))
        one._ended["0"] -= 60  # a grace of 3 s
    calls = [exchange(one, 1, late=0.5 * (one is stores[2])) for one in stores]
    assert together(calls) == [{0, 1, 2}] * 3


def test_stores_that_may_not_create_files_once_are_refused(tmp_path):
    with pytest.raises(ValueError, match="of the kind http, which may not create files whole and once"):
        SharedStore("http://somewhere/job", peer=0, peers=2)
    assert isinstance(SharedStore(f"file://{tmp_path}", peer=0, peers=2).store, Folder)


def test_a_second_process_of_a_peer_does_not_overwrite_its_message(tmp_path):
    first, second = (SharedStore(tmp_path, peer=0, peers=2) for _ in range(2))
    assert first.send("0/0", Message(SAID, {})) and not second.send("0/0", Message(SAID, {"x": b"1"}))
    assert first.send("0/0", Message(SAID, {})), "a repeated request is its own"


def test_two_processes_that_send_as_one_peer_are_told(tmp_path):
    first, second = (SharedStore(tmp_path, peer=0, peers=2) for _ in range(2))
    message, other = Message(SAID, {"a": b"1"}), Message(SAID, {"a": b"2"})
    assert first.send("0/00000001", message) and not second.send("0/00000001", other), "of an earlier process, perhaps"
    assert second.send("0/00000002", other) and second.send("0/00000002", other)
    with pytest.raises(MismatchError, match="another process sends as peer 0 now"):
        first.send("0/00000002", message)
    assert first.send("1/00000001", message), "another sequence"


@pytest.mark.parametrize(
    "options",
    [
        {"peer": 2, "peers": 2}, {"peer": -1, "peers": 2}, {"peer": 0, "peers": 2, "wait": -1.0},
        {"peer": 0, "peers": 2, "keep": 1},
    ],
)  # fmt: skip
def test_arguments_outside_their_range(options, tmp_path):
    with pytest.raises(ValueError, match="must be"):
        SharedStore(tmp_path, **options)
