"""One rank's state, as it is saved with a checkpoint: residuals and step counts. What is loaded is not trusted."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, Literal
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import numpy.typing as npt

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.config.error_feedback import Feedback, memories
from hvd_deepreduce.engine.parameter import VELOCITY, Parameter, owner
from hvd_deepreduce.ops import deferred
from hvd_deepreduce.wire.quoting import quoted

KEYS = ("rank", "size", "steps", "residuals")
MAX_STEP = 1 << 48
"""The largest step count; a container has the lowest 32 bits of it."""
MAX_TEXT = 1 << 26
"""Bytes of everything but the residuals in a serialized state: about 200,000 parameters."""
PREFIX = r"(^|\.)module(?=\.)"
"""What DistributedDataParallel puts before names."""
OTHERS = "other arrays"
"""Key of a serialized state: which keys have arrays, besides the residuals."""
_DTYPES = (np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.float64))


def save(
    parameters: Mapping[str, Parameter], residuals: Mapping[str, Floats], rank: int, size: int, memory: Feedback
) -> dict[str, Any]:
    """The state as plain values and NumPy arrays, with parameters in the model's order.

    Under a memory with velocities, ``residuals`` has a parameter's velocity too, after its residual.
    """
    return {
        "rank": rank,
        "size": size,
        "memory": memory.name,
        "steps": {name: parameter.step for name, parameter in parameters.items()},
        "residuals": {
            name: residuals[name] for one in parameters for name in (one, VELOCITY + one) if name in residuals
        },
    }


def check(
    state: Mapping[str, Any], parameters: Mapping[str, Parameter], rank: int, size: int, memory: Feedback
) -> tuple[dict[str, int], dict[str, Floats]]:
    """Validates a saved state; changes nothing.

    Args:
        state: what ``save`` returned, from a checkpoint. A residual may have its parameter's shape, or be flat, and
            need not be contiguous. Keys that are not those of ``save`` are ignored.
        parameters: the model's, by name.
        rank, size: of this process.
        memory: of the config in force.

    Returns:
        The step count of every parameter, and the residuals, flat and contiguous, by the parameters' names.

    Raises:
        ValueError: it is of another rank, another number of ranks or another model, or of a memory that keeps something
            else; a residual is not finite; or it is not a state at all.
    """
    if not isinstance(state, Mapping):
        raise ValueError(
            f"a state of DeepReduce is a dict, but this is a {type(state).__name__}: load what state_dict returned"
        )
    missing = sorted(key for key in KEYS if key not in state)
    if missing:
        raise ValueError(f"this is not a state of DeepReduce: it has no {', '.join(missing)}")
    whose = [_integer(state[key], f"the {key} of the state") for key in ("rank", "size")]
    if whose != [rank, size]:
        raise ValueError(
            f"the state is of rank {whose[0]} of {whose[1]}, and this is rank {rank} of {size}: every rank "
            "must load the state that it saved. With another number of ranks, give the states of all of them: "
            "load_state_dict(states, reshard=True)"
        )
    for key in ("steps", "residuals"):
        if not isinstance(state[key], Mapping):
            raise ValueError(f"the {key} of the state are a {type(state[key]).__name__}; they must be a dict")
        for name in state[key]:
            known = isinstance(name, str) and (owner(name, parameters) if key == "residuals" else name in parameters)
            if not known:
                raise ValueError(_unknown(name, state[key], parameters))
    for name in parameters:
        if name not in state["steps"]:
            raise ValueError(f"the model has a parameter {name}, but the state does not: load the state of this model")
    steps = {name: _integer(step, f"the step count of {name}") for name, step in state["steps"].items()}
    kept = {name: _residual(name, given, owner(name, parameters)) for name, given in state["residuals"].items()}
    told = state.get("memory", memory.name)  # states of earlier versions do not say it
    was = memories.by_name.get(told) if isinstance(told, str) else None
    if was is None or not issubclass(was, Feedback):
        raise ValueError(f"the memory of the state is {quoted(told)}; it must be one of {', '.join(memories.by_name)}")
    if kept and was.leaves_whole != memory.leaves_whole:
        raise ValueError(
            f"the state was saved with memory {was.name!r}, and this job has {memory.name!r}. One keeps gradients and "
            "the other a momentum of scaled gradients: load the state with the config that it was saved with, or start "
            "without a state"
        )
    return steps, kept


def _unknown(name: object, names: Iterable[object], parameters: Mapping[str, Parameter]) -> str:
    """The error for a name in a state that the model has not."""
    theirs, ours = (
        {re.sub(PREFIX, "", str(one).removeprefix(VELOCITY)).lstrip(".") for one in each}
        for each in (names, parameters)
    )
    if parameters and theirs <= ours:
        return (
            f"the state has a parameter {quoted(name)}, and the model's names are as {next(iter(parameters))}: they "
            "differ by the module. that DistributedDataParallel puts before them. Give the model itself both times, as "
            "DeepReduce(model, ...) before DistributedDataParallel(model)"
        )
    return (
        f"the state has a parameter {quoted(name)}, but the model does not, or a sharded model has frozen it: load the "
        "state of this model, and freeze parameters after that"
    )


Reshard = bool | Literal["sum", "mean"]
"""Whether states of another number of ranks are loaded, and what is preserved; True is "sum"."""


State = Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""A rank's state, or with ``reshard`` those of all ranks."""


def load(
    state: State, parameters: Mapping[str, Parameter], rank: int, size: int, how: Reshard, memory: Feedback
) -> tuple[dict[str, int], dict[str, Floats]]:
    """``check`` of one state, or ``reshard`` of several."""
    if how is False:
        return check(state, parameters, rank, size, memory)  # type: ignore[arg-type]  # it says what is wrong
    return reshard(state, parameters, rank, size, how, memory)  # type: ignore[arg-type]


def reshard(
    states: Iterable[Mapping[str, Any]],
    parameters: Mapping[str, Parameter],
    rank: int,
    size: int,
    how: Reshard,
    memory: Feedback,
) -> tuple[dict[str, int], dict[str, Floats]]:
    """This rank's share of the states of all ranks of a job that had another number of ranks; changes nothing.

    Rank r takes the sum of the states of the ranks r, r + size, r + 2 size, ... So the sum over all ranks is preserved.
    If there were fewer ranks than now, the last ones start without residuals. Mean squares of gradients, by which votes
    are scaled, are no sums: each rank takes their mean over all states.

    Args:
        states: one of each rank, in any order. Only one of them is needed in memory at a time.
        parameters, rank, size, memory: as for ``check``.
        how: True or "sum" preserves the residuals' sum, "mean" their mean.

    Returns:
        As ``check``.

    Raises:
        ValueError: as ``check``; or a state is missing, or there twice; or their steps differ.
    """
    if how not in (True, "sum", "mean"):
        raise ValueError(f"reshard is {quoted(how)}; it must be True, False, 'sum' or 'mean'")
    if isinstance(states, Mapping) or not isinstance(states, Iterable):
        raise ValueError(
            f"with reshard, the states of all ranks are loaded, but one {type(states).__name__} was given: give a list "
            "of what state_dict returned on each rank"
        )
    steps: dict[str, int] | None = None
    total = 0
    seen: set[int] = set()
    sums: dict[str, npt.NDArray[np.float64]] = {}
    for state in states:
        whose = [_integer(state[k], f"the {k} of a state") for k in KEYS[:2]] if _has_keys(state) else [0, 0]
        told, residuals = check(state, parameters, whose[0], whose[1], memory)
        total = total or whose[1]
        if whose[1] != total or whose[0] in seen or not whose[0] < total:
            raise ValueError(
                f"a state is of rank {whose[0]} of {whose[1]}, beside states of {len(seen)} other ranks of {total}: "
                "give each rank's state of one checkpoint once"
            )
        if steps is not None and told != steps:
            raise ValueError("the states are of different steps: give the states of one checkpoint")
        steps = told
        seen.add(whose[0])
        for name, residual in residuals.items():
            if whose[0] % size == rank or _is_mean(name, memory):
                sums[name] = sums.get(name, 0) + residual.astype(np.float64)
    if steps is None or len(seen) < total:
        missing = sorted(set(range(total)) - seen)
        raise ValueError(f"states are missing, of the ranks {missing or 'of the checkpoint'}: give those of all ranks")
    scale = size / total if how == "mean" else 1.0
    shares: dict[str, Floats] = {}
    for name, total_of_ranks in sums.items():
        parameter = owner(name, parameters)
        assert parameter is not None  # it was checked
        dtype = parameter.accumulated_in
        # Sums beyond the dtype become its largest number, as an accumulator does.
        most = float(np.finfo(dtype).max)
        factor = 1 / total if _is_mean(name, memory) else scale
        shares[name] = np.clip(factor * total_of_ranks, -most, most).astype(dtype)
    return steps, shares


def _is_mean(name: str, memory: Feedback) -> bool:
    return memory.leaves_whole and name.startswith(VELOCITY)


def _has_keys(state: object) -> bool:
    return isinstance(state, Mapping) and all(key in state for key in KEYS)


def _integer(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= MAX_STEP:
        raise ValueError(f"{what} is {quoted(value)}; it must be an integer, 0 or more, and at most 2^48")
    return int(value)


def _residual(name: str, given: object, parameter: Parameter | None) -> Floats:
    """The residual or velocity, flat, contiguous and aligned, once it has been found to be one of this parameter."""
    assert parameter is not None  # the caller has found it
    what = f"the residual of {name}" if name == parameter.name else f"the {name}"
    if not isinstance(given, np.ndarray):
        raise ValueError(f"{what} is a {type(given).__name__}; it must be a NumPy array")
    known = prod(size for size in parameter.shape if size >= 0)
    open_size = -1 in parameter.shape
    if given.size % known if open_size and known else given.size != known:
        numel = f"a multiple of {known}" if open_size else str(known)
        raise ValueError(
            f"{what} has {given.size} elements, but the parameter has {numel}: load the state of this model"
        )
    if given.ndim != 1 and not _fits(given.shape, parameter.shape):
        raise ValueError(
            f"{what} has the shape {list(given.shape)}; it must be flat, or have the parameter's shape "
            f"{list(parameter.shape)}"
        )
    if given.dtype != parameter.accumulated_in:
        order = ", in this machine's byte order" * (given.dtype.newbyteorder("=") == parameter.accumulated_in)
        raise ValueError(f"{what} is {given.dtype}; it must be {parameter.accumulated_in}{order}")
    flat: Floats = np.require(given.reshape(-1), requirements=["C", "A"])
    if not deferred.finite(flat):
        raise ValueError(
            f"{what} contains NaN or infinity, which would be sent to all ranks: load an older state, or replace this "
            "residual by zeros on this rank, or start without a state"
        )
    return flat


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(shape) == len(expected) and all(e in (-1, s) for s, e in zip(shape, expected, strict=True))


def to_bytes(state: Mapping[str, Any], others: Sequence[str] = ()) -> bytes:
    """A state as the bytes of an .npz file.

    Args:
        state: with residuals as NumPy arrays; everything else must be plain numbers, texts, lists and dicts.
        others: further keys of the state that have dicts of flat NumPy arrays: uint8, float32 or float64.
    """
    keys = ["residuals", *others]
    told = {**state, **{key: list(state[key]) for key in keys}, **({OTHERS: list(others)} if others else {})}
    text = json.dumps(told).encode()
    file = io.BytesIO()
    arrays = {str(at): one for at, one in enumerate(chain(*(state[key].values() for key in keys)))}
    np.savez(file, state=np.frombuffer(text, np.uint8), **arrays)
    return file.getvalue()


def from_bytes(data: bytes) -> dict[str, Any]:
    """The state in the bytes that ``to_bytes`` returned. It takes no more memory than a small multiple of them.

    Only the file is checked here, not the state: that is for ``check``.

    Raises:
        ValueError: these are other bytes.
    """
    if not isinstance(data, bytes):
        raise ValueError(f"a serialized state of DeepReduce is bytes, but this is a {type(data).__name__}")
    try:
        arrays = _arrays(data)
        text = arrays.pop("state")
        if text.dtype != np.uint8 or text.size > MAX_TEXT:
            raise ValueError(f"its description is {text.dtype} [{text.size}]; uint8 [{MAX_TEXT}] is the most allowed")
        state = json.loads(text.tobytes())
        if not isinstance(state, dict):
            raise ValueError(f"its description is a {type(state).__name__}")
        keys = ["residuals", *_names(state.pop(OTHERS, []))]
        names = [(key, name) for key in dict.fromkeys(keys) for name in _names(state.get(key))]
        if len(set(names)) != len(names) or set(arrays) != set(map(str, range(len(names)))):
            raise ValueError(f"it names {len(set(names))} arrays and has {len(arrays)} of them")
        for key in keys:
            state[key] = {}
        for at, (key, name) in enumerate(names):
            state[key][name] = arrays[str(at)]
    except Exception as error:  # the parsers of zip, npy and JSON do not say all that they raise on altered bytes
        reason = str(error) or type(error).__name__
        raise ValueError(f"this is not a state of DeepReduce: {quoted(reason)}") from None
    return state


def _names(given: object) -> list[str]:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ValueError("it has no list of the arrays' names")
    return given


def _arrays(data: bytes) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """The arrays of an .npz file, by name, all of one dimension.

    ``numpy.load`` would allocate whatever the file announces, and expand compressed arrays.
    """
    with ZipFile(io.BytesIO(data)) as file:
        members = file.infolist()
        if any(member.compress_type != ZIP_STORED for member in members):
            raise ValueError("its arrays are compressed")
        if sum(member.file_size for member in members) > len(data):
            raise ValueError(f"it announces more bytes than its {len(data)}")
        arrays = {member.filename.removesuffix(".npy"): _array(file.read(member)) for member in members}
    if len(arrays) != len(members):
        raise ValueError("two of its arrays have the same name")
    return arrays


def _array(member: bytes) -> np.ndarray[Any, np.dtype[Any]]:
    file = io.BytesIO(member)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"it has an array of version {version}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if len(shape) != 1 or dtype not in _DTYPES or shape[0] * dtype.itemsize != len(member) - file.tell():
        raise ValueError(f"it has an array {dtype}{list(shape)} in {len(member)} bytes")
    return np.frombuffer(member, dtype, offset=file.tell())
