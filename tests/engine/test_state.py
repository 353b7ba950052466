"""Saved states that are altered, hostile or of another model: each is a ValueError, and nothing has changed."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest

from hvd_deepreduce.config.error_feedback import Residual, ScaledMomentum
from hvd_deepreduce.engine import state as saved
from hvd_deepreduce.engine.parameter import Parameter
from hvd_deepreduce.engine.state import check, from_bytes, to_bytes
from tests.engine.numpy_adapter import NumpyAdapter, run_ranks
from tests.engine.test_step import LOSSY, gradients_of, same_bytes

MODEL = {"a": ((20, 30), "f4"), "b": ((1,), "f8"), "c": ((1,), "f4")}
PARAMETERS = {
    "a": Parameter("a", 0, (20, 30), "float32", 5),
    "b": Parameter("b", 1, (1,), "float64", 5),
    "c": Parameter("c", 2, (), "float32", 0),
    "open": Parameter("open", 3, (-1, 4), "float32", 5),
}
A = np.arange(600, dtype=np.float32)


def state(**changes):
    residuals = {"a": A, "b": np.ones(1), "open": np.ones(8, np.float32)}
    return {"rank": 1, "size": 2, "steps": {"a": 5, "b": 5, "c": 0, "open": 5}, "residuals": residuals} | changes


def with_step(step):
    return state(steps={**state()["steps"], "a": step})


def with_residual(residual, name="a"):
    return state(residuals={**state()["residuals"], name: residual})


def test_a_state_of_this_rank():
    """Residuals may have their parameters' shapes, be strided or misaligned; unknown keys are for later releases."""
    misaligned = np.frombuffer(b"x" + A.tobytes(), np.float32, offset=1)
    strided = np.stack([A, A], 1)[:, 0]
    for given in (A, A.reshape(20, 30), np.asfortranarray(A.reshape(20, 30)), strided, misaligned):
        steps, residuals = check(MappingProxyType({**with_residual(given), "more": 1}), PARAMETERS, 1, 2, Residual())
        assert steps == state()["steps"] and set(residuals) == {"a", "b", "open"}
        assert np.array_equal(residuals["a"], A) and residuals["a"].flags.c_contiguous and residuals["a"].flags.aligned
    steps, _ = check(with_step(np.int64(7)), PARAMETERS, np.int64(1), 2, Residual())
    assert type(steps["a"]) is int and steps["a"] == 7
    assert check(with_residual(np.ones((3, 4), "f4"), "open"), PARAMETERS, 1, 2, Residual())[1]["open"].shape == (12,)


def broken_array(position, value):
    array = A.copy()
    array[position] = value
    return array


BAD = {
    "a state of DeepReduce is a dict, but this is a list": [1, 2],
    "a state of DeepReduce is a dict, but this is a NoneType": None,
    "it has no rank, residuals, size, steps": {},
    "the rank of the state is 0.5; it must be an integer": state(rank=0.5),
    "the rank of the state is true; it must be an integer": state(rank=True),
    "the size of the state is an integer of 20001 bits; it must be": state(size=1 << 20000),
    "is of rank 1 of 3, and this is rank 1 of 2": state(size=3),
    "the steps of the state are a list; they must be a dict": state(steps=["a", "b"]),
    "the residuals of the state are a NoneType; they must": state(residuals=None),
    r"a parameter 'x\\n; rank 3 has', but the model": state(steps={**state()["steps"], "x\n; rank 3 has": 1}),
    r"a parameter 7, but the model does not": state(residuals={7: A}),
    r"a parameter x{160}\.\.\. \(9000000 characters\), but": state(residuals={"x" * 9_000_000: A}),
    "the model has a parameter c, but the state does not": state(steps={"a": 5, "b": 5, "open": 5}),
    "step count of a is -1; it must be an integer, 0 or more": with_step(-1),
    "step count of a is 281474976710657; it must .* at most 2": with_step((1 << 48) + 1),
    "step count of a is an integer of 20001 bits; it must": with_step(1 << 20000),
    "step count of a is 3.0; it must be an integer": with_step(3.0),
    "step count of a is NaN; it must be an integer": with_step(float("nan")),
    "step count of a is true; it must be an integer": with_step(True),
    "step count of a is a ndarray; it must be an integer": with_step(np.ones(2)),
    "the residual of a is a list; it must be a NumPy array": with_residual([0.0] * 600),
    "the residual of a has 599 elements, but the parameter has 600": with_residual(A[:-1]),
    "the residual of c has 0 elements, but the parameter has 1": with_residual(A[:0], "c"),
    "the residual of open has 7 elements, but the parameter has a multiple of 4": with_residual(A[:7], "open"),
    r"the residual of a has the shape \[30, 20\]; it must be flat, or .* \[20, 30\]": with_residual(A.reshape(30, 20)),
    "the residual of a is float64; it must be float32": with_residual(A.astype("f8")),
    "the residual of b is float32; it must be float64": with_residual(np.ones(1, "f4"), "b"),
    "the residual of a is >f4; it must be float32, in this machine's byte order": with_residual(A.astype(">f4")),
    "the residual of a is object; it must be float32": with_residual(A.astype(object)),
    "the residual of a contains NaN or infinity": with_residual(broken_array(599, np.nan)),
    "residual of a contains NaN or infinity, which would be sent": with_residual(broken_array(0, -np.inf)),
    "the residual of b contains NaN or infinity": with_residual(np.array([np.inf]), "b"),
    "the memory of the state is 7; it must be one of residual, dgc, scaled_momentum": state(memory=7),
    "the memory of the state is 'no one'; it must be one of": state(memory="no one"),
    "saved with memory 'scaled_momentum', and this job has 'residual'. One keeps": state(memory="scaled_momentum"),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_state_of_this_rank(message):
    with pytest.raises(ValueError, match=message) as error:
        check(BAD[message], PARAMETERS, 1, 2, Residual())
    assert len(str(error.value)) < 600


def test_memories_that_keep_the_same():
    """A velocity starts at zero, and where nothing is kept there is nothing to misunderstand."""
    assert check(state(memory="dgc"), PARAMETERS, 1, 2, Residual())[1]
    assert check(state(memory="scaled_momentum"), PARAMETERS, 1, 2, ScaledMomentum())[1]
    assert not check(state(memory="scaled_momentum", residuals={}), PARAMETERS, 1, 2, Residual())[1]


def test_a_state_that_fails_at_its_end_changes_nothing(monkeypatch):
    """Also where memory is short after all checks."""

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, LOSSY)
        adapter.step(gradients_of(0, 0, MODEL))
        older = adapter.engine.state_dict()
        adapter.step(gradients_of(1, 0, MODEL))
        before, generation = adapter.engine.state_dict(), adapter.engine.generation
        nan = {**older["residuals"], "c": np.full(1, np.nan, "f4")}
        with pytest.raises(ValueError, match="residual of c contains NaN"):
            adapter.engine.load_state_dict({**older, "residuals": nan})
        with monkeypatch.context() as patched:
            patched.setattr("hvd_deepreduce.pipeline.residuals.np.array", lambda _: (_ for _ in ()).throw(MemoryError))
            with pytest.raises(MemoryError):
                adapter.engine.load_state_dict(older)
        after = adapter.engine.state_dict()
        assert before["steps"] == after["steps"] == dict.fromkeys(MODEL, 2) and adapter.engine.generation == generation
        same_bytes([before["residuals"], after["residuals"]])
        adapter.engine.load_state_dict(older)
        assert adapter.engine.state_dict()["steps"] == dict.fromkeys(MODEL, 1)

    run_ranks(1, work)


def test_bytes_and_back():
    given = state(lists=[[["a", [20, 30], "float32"]]])
    read = from_bytes(to_bytes(given))
    assert list(read) == list(given) and read["lists"] == given["lists"] and read["steps"] == given["steps"]
    same_bytes([given["residuals"], read["residuals"]])
    assert not from_bytes(to_bytes(state(residuals={})))["residuals"]


def test_other_arrays_in_the_bytes():
    given = state(anchors={"a": np.arange(3.0), "b": A.reshape(-1)}, clock=7, none={})
    read = from_bytes(to_bytes(given, ["anchors", "none"]))
    assert list(read) == list(given) and read["clock"] == 7 and not read["none"]
    same_bytes([given["residuals"], read["residuals"]])
    same_bytes([given["anchors"], read["anchors"]])


def test_a_file_of_numpy_alone_is_the_same_state():
    """What older releases wrote."""
    file = io.BytesIO()
    text = json.dumps({**state(), "residuals": ["a"]}).encode()
    np.savez(file, **{"state": np.frombuffer(text, np.uint8), "0": A})
    assert np.array_equal(check(from_bytes(file.getvalue()), PARAMETERS, 1, 2, Residual())[1]["a"], A)


def npz(*members, compression=zipfile.ZIP_STORED):
    """A file of these (name, bytes)."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        for name, data in members:
            made.writestr(name, data)
    return file.getvalue()


def npy(array, **changes):
    """The bytes of an .npy file, with another header."""
    header = {"descr": "<f4", "fortran_order": False, "shape": array.shape} | changes
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + array.tobytes()


def described(text, *members):
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    return npz(("state.npy", npy(np.frombuffer(data, np.uint8), descr="|u1")), *members)


ONE = {**state(), "residuals": ["a"]}
NO_STATE = {
    "serialized state of DeepReduce is bytes, but this is a str": "text",
    "is bytes, but this is a NoneType": None,
    "File is not a zip file": b"something else",
    "it names 1 arrays and has 0 of them": described(ONE),
    "it names 1 arrays and has 2 of them": described(ONE, ("0.npy", npy(A)), ("1.npy", npy(A))),
    "it names 1 arrays and has 1 of them": described(ONE, ("one.npy", npy(A))),
    "two of its arrays have the same name": described(ONE, ("0.npy", npy(A)), ("0", npy(A))),
    "it names 1 arrays and has 2 of": described(
        {**ONE, "residuals": ["a", "a"]}, ("0.npy", npy(A)), ("1.npy", npy(A))
    ),
    "it has no list of the arrays": described({**ONE, "residuals": {"a": 1}}),
    "it has no list of the arrays' names": described({**ONE, "residuals": [["a"]]}, ("0.npy", npy(A))),
    "no list of the arrays' names": described({**ONE, "other arrays": "anchors"}, ("0.npy", npy(A))),
    "it names 2 arrays and has 1 of": described({**ONE, "other arrays": ["b"], "b": ["a"]}, ("0.npy", npy(A))),
    "its description is a list": described([]),
    "its description is float32": npz(("state.npy", npy(A))),
    "RecursionError|recursion": described(b"[" * 500_000 + b"]" * 500_000),
    "Expecting value": described(b"rubbish"),
    "4300 digits": described(b'{"rank": ' + b"9" * 5000 + b"}"),
    "utf": described(b'"\xff\xfe\x00'),
    "'state'|no state": npz(("0.npy", npy(A))),
    "its arrays are compressed": npz(("state.npy", npy(np.zeros(10**7, "u1"))), compression=zipfile.ZIP_DEFLATED),
    r"an array float32\[1000000000000000\] in": described(ONE, ("0.npy", npy(A, shape=(10**15,)))),
    r"an array float32\[-600\] in": described(ONE, ("0.npy", npy(A, shape=(-600,)))),
    r"an array float32\[20, 30\] in": described(ONE, ("0.npy", npy(A, shape=(20, 30)))),
    "an array object": described(ONE, ("0.npy", npy(A, descr="|O"))),
    "an array >f4": described(ONE, ("0.npy", npy(A, descr=">f4"))),
    "magic": described(ONE, ("0.npy", b"PK rubbish")),
    "this is not a state of DeepReduce: ": described(
        ONE,
        ("0.npy", npy(A).replace(b"{'descr'", b"((((((((")),
    ),
}


@pytest.mark.parametrize("reason", NO_STATE)
def test_bytes_that_are_no_state(reason):
    with pytest.raises(ValueError, match=reason) as error:
        from_bytes(NO_STATE[reason])
    assert "state of DeepReduce" in str(error.value) and len(str(error.value)) < 400


def test_a_small_file_takes_little_memory():
    """Compressed zeros, arrays that are announced and not there, and one array that many names share."""
    compressed = npz(("state.npy", b"\0" * 10**8), compression=zipfile.ZIP_DEFLATED)
    announced = described(ONE, ("0.npy", npy(A, shape=(10**9,))))
    shared = bytearray(described(ONE, ("0.npy", npy(np.zeros(100_000, "f4")))))
    # The first entry of the directory claims the bytes of the whole file.
    at = shared.index(b"PK\x01\x02")
    shared[at + 20 : at + 28] = len(shared).to_bytes(4, "little") * 2
    for data in (compressed, announced, bytes(shared)):
        tracemalloc.start()
        with pytest.raises(ValueError, match="this is not a state of DeepReduce"):
            from_bytes(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3 * len(data) + 10**6


def test_altered_files():
    """Whatever byte is altered, it is a state, or a ValueError: no other error comes out."""
    whole = to_bytes(state(lists=[[["a", [20, 30], "float32"]]]))
    rng = np.random.default_rng(0)
    refused = 0
    for turn in range(3000):
        data = bytearray(whole)
        for _ in range(1 + turn % 3):
            # Half of the changes are in the headers.
            place = int(rng.integers(len(data) if turn % 2 else 300))
            data[-1 - place if turn % 4 == 1 else place] = int(rng.integers(256))
        if turn % 7 == 0:
            del data[int(rng.integers(len(data))) :]
        try:
            read = from_bytes(bytes(data))
            assert isinstance(read, Mapping)
            check(read, PARAMETERS, 1, 2, Residual())
        except ValueError:
            refused += 1
    assert refused > 2000


def test_a_description_has_a_limit(monkeypatch):
    monkeypatch.setattr(saved, "MAX_TEXT", 10)
    with pytest.raises(ValueError, match=r"uint8 \[10\] is the most allowed"):
        from_bytes(to_bytes(state()))
