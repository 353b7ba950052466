"""What is fuzzed. A target reads bytes that another rank, or a checkpoint, may hold: it must give a valid result or
raise the error that its documentation names."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import RngKey, index_codecs, joint_codecs, sparsifiers, value_codecs
from hvd_deepreduce.codecs.joint import short_stream
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.joint.stream_format import CODED, PAIRS, PLAIN, SHORT, pack, unpack, value_codec
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import Collectives, Engine, MismatchError, Parameter, Reducer
from hvd_deepreduce.engine import state as saved
from hvd_deepreduce.engine.agreement import Agreement
from hvd_deepreduce.exchange.balance import AllToAll
from hvd_deepreduce.exchange.mpi import densestream, sparcml, topk_allgather
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from hvd_deepreduce.exchange.reduce_scatter import SlicedSum
from hvd_deepreduce.exchange.two_levels import SliceResidual, TwoLevelSum
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.pipeline.bundle import Slice
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from hvd_deepreduce.wire.standalone import Container, ContainerError
from tests import two_levels
from tests.engine.numpy_adapter import NumpyTensors
from tests.fuzz import settings
from tests.fuzz.changes import changed
from tests.oracle import short_container as short_oracle
from tests.oracle.container import repaired
from tests.support.simulated_collectives import CollectiveNetwork, altered
from tests.support.simulated_mpi import Network

KEY = settings.KEY
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
MOST = 70_000  # a rANS section of 65,536 symbols or more has parts
"""Elements."""


def exact(data: bytes) -> np.ndarray:
    """A new allocation of exactly this size, so that the sanitizers see what reads past its end."""
    out = np.empty(len(data), np.uint8)
    out[:] = np.frombuffer(data, np.uint8)
    return out


class Target(ABC):
    """Something that is fed with bytes."""

    @cached_property
    def right(self) -> list[bytes]:
        """Valid inputs."""
        return [bytes(one) for one in self.seeds()]

    @abstractmethod
    def seeds(self) -> Sequence[bytes]:
        """Valid inputs, or inputs that differ from one in a field."""

    def read(self, data: bytes) -> None:
        """Reads an input. Raises what is a defect, and nothing for a refusal. Not for a target with its own ``run``,
        which changes objects, or bytes that are made while it runs."""
        raise NotImplementedError

    def run(self, data: bytes) -> None:
        """Reads the input that libFuzzer's bytes describe."""
        self.read(changed(data, self.right))


def checked(container: Container) -> None:
    """Decodes a container, and checks that the result is valid."""
    parts = {part: exact(getattr(container, part).tobytes()) for part in ("indices", "values", "order")}
    support, values = decode_part(replace(container, **parts), container.numel, 1)
    assert values.size == container.count and values.dtype in (np.float32, np.float64)
    if container.joint or container.value != value_codecs.by_name["raw"].id:
        assert np.isfinite(values).all()
    if support is None:
        assert container.count == container.numel
        return
    assert support.dtype == np.uint32 and support.size == container.count
    assert np.all(support[1:] > support[:-1]) and (not support.size or support[-1] < container.numel)


def refused_by_name(error: ValueError) -> None:
    assert isinstance(error, ContainerError) and "rank 1 cannot be read: " in str(error), error


class WholeContainer(Target):
    """A container of any form, with the right checksum."""

    def seeds(self) -> Sequence[bytes]:
        return list(settings.of_every_form())

    def read(self, data: bytes) -> None:
        data = repaired(data.ljust(64, b"\0"))  # otherwise almost all inputs would be refused for their checksum
        numel = int.from_bytes(data[16:20], "little")
        try:
            checked(wire.unpack(exact(data), 1, numel % (MOST + 1)))
        except ValueError as error:
            refused_by_name(error)


class ShortContainer(Target):
    """A container of version 2, with the right checksum: ``| config u16 | elements u16 | 1: float64 | container |``."""

    @cached_property
    def pipelines(self) -> list[Pipeline]:
        known: dict[int, Pipeline] = {}
        for config, _ in settings.every_form():
            known.setdefault(config.digest(), Pipeline(config))
        return list(known.values())

    def seeds(self) -> Sequence[bytes]:
        found = []
        numbers = {pipeline.shared.digest: number for number, pipeline in enumerate(self.pipelines)}
        for config, gradient in settings.every_form():
            number = numbers[config.digest()]
            head = number.to_bytes(2, "little") + gradient.size.to_bytes(2, "little") + bytes([gradient.dtype == F64])
            found.append(head + self.pipelines[number].encode(gradient, None, KEY, version=2).tobytes())
        return found

    def read(self, data: bytes) -> None:
        head, packed = data[:5].ljust(5, b"\0"), data[5:].ljust(5, b"\0")
        pipeline = self.pipelines[int.from_bytes(head[:2], "little") % len(self.pipelines)]
        numel, dtype = int.from_bytes(head[2:4], "little") % (MOST + 1), F64 if head[4] & 1 else F32
        known = short_oracle.Implied(pipeline.shared.digest, *KEY[:3], numel, 2 if dtype == F64 else 1)
        packed = short_oracle.repaired(packed, known)
        try:
            container, size = frame.unpack(exact(packed), pipeline.expected(numel, dtype, KEY), 1)
            assert size <= len(packed)
            checked(container)
        except ValueError as error:
            refused_by_name(error)
            size = -1
        out, plain = np.full(numel, 3.0, dtype), np.zeros(numel, np.float32)
        if pipeline.fused is None or not pipeline.fused.takes(out):
            return
        fused = pipeline.fused.sum_into(out, exact(packed), 1, [(0, numel)], [KEY], pipeline.shared.digest, 1.0)
        if fused is None:
            assert (out == 3.0).all()
        else:
            assert fused == size == len(packed)
            arrays.sum_into(plain, [decode_part(container, numel, 1)], 1.0)
            assert out.tobytes() == plain.tobytes()


class Section(Target):
    """The section of one codec: ``| numel u32 | count u24 | 1: dense, 2: float64 | section |``."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name

    def seeds(self) -> Sequence[bytes]:
        found = []
        for data in settings.of_codec(self.kind, self.name):
            container = wire.unpack(np.frombuffer(data, np.uint8))
            flags = (container.sparsifier == 0) + 2 * (container.dtype == F64)
            head = container.numel.to_bytes(4, "little") + container.count.to_bytes(3, "little") + bytes([flags])
            found.append(head + settings.section_of(container, self.kind))
        if (self.kind, self.name) == ("index", "rans"):
            indices = _tensor(MOST, 0.95, 1).indices
            section, _ = index_codecs.by_name["rans"]().encode(indices, MOST, KEY)
            head = MOST.to_bytes(4, "little") + indices.size.to_bytes(3, "little") + b"\0"
            found.append(head + section.tobytes())
        return found

    def read(self, data: bytes) -> None:
        head, section = data[:8].ljust(8, b"\0"), exact(data[8:])
        numel = int.from_bytes(head[:4], "little") % (MOST + 1)
        count = int.from_bytes(head[4:7], "little") % (numel + 1)
        dense, dtype, none = head[7] & 1, F64 if head[7] & 2 else F32, exact(b"")
        if self.kind != "index" and dense:
            count = numel
        if self.kind == "joint":
            number = joint_codecs.by_name[self.name].id
            container = Container(1 - dense, 0, number, dtype, numel, count, KEY, 0, none, section, none, joint=True)
        elif self.kind == "value":  # without an index section, the support is that of random-k
            number, sparsifier = value_codecs.by_name[self.name].id, 0 if dense else 2
            container = Container(sparsifier, 0, number, dtype, numel, count, KEY, 0, none, section, none)
        else:
            number, values = index_codecs.by_name[self.name].id, exact(bytes(4 * count))
            container = Container(1, number, 1, F32, numel, count, KEY, 0, section, values, none)
        try:
            checked(container)
        except ValueError as error:
            refused_by_name(error)


class SharedSelection(Target):
    """A selection that a receiver repeats: ``| numel u32 | count u32 | seed, parameter, step u32 |``."""

    def __init__(self, name: str) -> None:
        self.number = sparsifiers.by_name[name].id

    def seeds(self) -> Sequence[bytes]:
        sizes = ((100, 10), (1, 1), (40_000, 1), (40_000, 39_999), (0, 0), (65, 64))
        return [b"".join(n.to_bytes(4, "little") for n in (numel, count, 1, 2, 3)) for numel, count in sizes]

    def read(self, data: bytes) -> None:
        numbers = [int.from_bytes(data[at : at + 4], "little") for at in range(0, 20, 4)]
        numel = numbers[0] % (MOST + 1)
        count, none = numbers[1] % (numel + 1), exact(b"")
        key, values = RngKey(*numbers[2:]), exact(bytes(4 * count))
        checked(Container(self.number, 0, 1, F32, numel, count, key, 0, none, values, none))


@lru_cache(maxsize=256)
def _tensor(numel: int, density: float, seed: int, dtype: Any = F32) -> SparseTensor:
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(rng.random(numel) < density).astype(np.uint32)
    return SparseTensor(numel, indices, rng.standard_normal(indices.size).astype(dtype))


class ExchangeStream(Target):
    """A stream, as exchanges and joint codec read it: ``| numel u32 | begin u32 | end u32 | float64 u32 | stream |``.
    What is accepted is joined with another stream, and written to an array."""

    def seeds(self) -> Sequence[bytes]:
        found = []
        for form, value, dtype, (numel, density) in itertools.product(
            (PLAIN, CODED, PAIRS), ("raw", "float16", "bfloat16", "qsgd"), (F32, F64), ((0, 1), (40, 0.5), (3000, 0.3))
        ):
            tensor = _tensor(numel, density, numel, dtype)
            stream = Stream.from_pairs(tensor) if form == PAIRS else Stream.from_sparse(tensor, 2)
            head = b"".join(one.to_bytes(4, "little") for one in (numel, 0, numel)) + bytes([dtype == F64, 0, 0, 0])
            found.append(head + pack(stream, form, value_codec(value, 8), KEY).tobytes())
            found.append(head + short_stream.shorten(pack(stream, form, value_codec(value, 8), KEY)).tobytes())
        part = Stream(3000, np.uint32([1000, 1200]), np.uint32([9, 2]), np.ones(11, np.float32))
        head = b"".join(one.to_bytes(4, "little") for one in (3000, 1000, 2000)) + bytes(4)
        found += [head + pack(part, form, None, None, 1000, 2000).tobytes() for form in (PLAIN, CODED)]
        # And the parts of each form under the number of each other form, and without a number of blocks.
        small = [one for one in found if len(one) < 512]
        found += [one[:16] + bytes([form]) + one[17:] for one in small for form in (PLAIN, CODED, PAIRS, SHORT)]
        return found + [one[:16] + bytes([CODED]) + one[17:24] + bytes(4) + one[28:] for one in small]

    def read(self, data: bytes) -> None:
        head, section = data[:16].ljust(16, b"\0"), exact(data[16:])
        numel, begin, end = (int.from_bytes(head[at : at + 4], "little") for at in (0, 4, 8))
        numel %= MOST + 1
        begin %= numel + 1
        end = begin + end % (numel - begin + 1)
        dtype = F64 if head[12] & 1 else F32
        try:
            section = short_stream.lengthen(section, numel, dtype)
            stream = unpack(section, numel, dtype, KEY, begin, end)
        except ValueError:
            return
        assert stream.starts.size == stream.lengths.size and int(stream.lengths.sum()) == stream.values.size
        indices = stream.indices().astype(np.int64)
        assert stream.values.dtype == dtype and indices.size == stream.values.size
        assert not indices.size or (indices[0] >= begin and indices[-1] < end and np.all(np.diff(indices) > 0))
        out = np.empty(end - begin, dtype)
        stream.write_dense(begin, out)
        for gap in (0, 2):
            stream.merge(Stream.from_sparse(_tensor(numel, 0.3, 1, dtype), gap), gap)
        stream.split(np.array([begin, (begin + end) // 2, end], np.uint64))


class Exchange(Target):
    """A sum of three simulated ranks, in which one section of one message is changed: ``| name, section, kind ... |``.
    It may only fail with a ValueError, never with a wrong size, a crash or a rank that waits."""

    NUMEL, RANKS, SLICES = 600, 3, 2

    @cached_property
    def tensors(self) -> list[SparseTensor]:
        return [_tensor(self.NUMEL, 0.2, seed) for seed in range(self.RANKS)]

    def seeds(self) -> Sequence[bytes]:
        return [bytes([name, section]) for name in range(5) for section in range(6)]

    def run(self, data: bytes) -> None:
        head = data[:2].ljust(2, b"\0")
        number = 0

        def broken(section: np.ndarray) -> np.ndarray:
            nonlocal number
            number += 1
            if number - 1 != head[1] % 16:
                return section
            return exact(changed(b"\1\0\0" + data[2:], [section.tobytes()]))

        def programs(transport: Any) -> list[Any]:
            send, own = transport.send, self.tensors[transport.rank]

            def send_broken(to: int, tag: int, sections: list[np.ndarray]) -> None:
                send(to, tag, [broken(section) for section in sections])

            transport.send = send_broken
            total = SumBuffer(self.NUMEL, F32, True, None)
            if head[0] % 5 == 0:

                def add(rank: int, section: np.ndarray) -> None:
                    unpack(section, self.NUMEL, F32)

                return [topk_allgather.program(transport, own, add)]
            if head[0] % 5 == 1:
                return list(sparcml.split_allgather(transport, own, self.SLICES, total))
            codec, most = DenseStream(coded=head[0] % 5 >= 3), 60 if head[0] % 5 == 4 else None
            parts = self.RANKS * self.SLICES
            bounds, _ = densestream.balanced_split(self.tensors, parts)
            plan = densestream.Plan(codec, self.NUMEL, F32, bounds, self.SLICES, KEY, None, most)
            return list(densestream.programs(transport, own, plan, total))

        try:
            Network(self.RANKS).run(programs)
        except ValueError:
            return


class Slices(Target):
    """A sum of three ranks slice by slice, in which one message of one rank is changed: ``| rank, message | ...``.
    All ranks get the same sum, or the same ContainerError."""

    NUMEL, RANKS = 600, 3

    def seeds(self) -> Sequence[bytes]:
        return [bytes([way + 4 * rank, message]) for rank in range(3) for way in (0, 1, 2) for message in range(4)]

    def run(self, data: bytes) -> None:
        head = data[:2].ljust(2, b"\0")
        exchange = {"name": "reduce_scatter", "density": 0.1 if head[0] & 1 else None}
        pipeline = Pipeline(Config.load(exchange=exchange, density=0.9 if head[0] & 2 else 0.2, error_feedback=False))

        programs = [
            SlicedSum(pipeline, self.RANKS, KEY._replace(rank=rank), _tensor(self.NUMEL, 0.9, rank).dense()).steps()
            for rank in range(self.RANKS)
        ]
        bad = head[0] // 4 % self.RANKS
        programs[bad] = altered(programs[bad], message_changed(head[1] % 4, data))
        with suppress(ContainerError):
            out = np.empty(self.NUMEL, F32)
            for total in CollectiveNetwork(self.RANKS).run(programs):
                total.write(out, 1.0)
                assert np.isfinite(out).all()


class Levels(Target):
    """A sum of two nodes of two ranks, in which one message of one rank is changed: ``| rank, message | ...``. All
    ranks take part in all collectives, and end with a sum or a ContainerError. (Elements inside a node have no
    checksum: the sums may differ.)"""

    NUMEL = 600

    def seeds(self) -> Sequence[bytes]:
        return [
            bytes([exchange + 3 * rank, message])
            for rank, exchange in itertools.product(range(4), range(3))
            for message in range(3 + 4 * (exchange > 0))
        ]

    def run(self, data: bytes) -> None:
        head = data[:2].ljust(2, b"\0")
        exchange = ["allgather", "reduce_scatter", {"name": "reduce_scatter", "density": 0.1}][head[0] % 3]
        config = Config.load(exchange=exchange, density=0.2, hierarchical=2, scope="model")
        pipeline = Pipeline(config)
        works = [
            TwoLevelSum(
                pipeline, place, [Slice(pipeline, (0, self.NUMEL), KEY)],
                _tensor(self.NUMEL, 0.9, place.rank).dense(), SliceResidual(np.zeros(self.NUMEL // 2, F32)),
            )
            for place in two_levels.PLACES
        ]  # fmt: skip
        for end in two_levels.run(
            [work.steps() for work in works], message_changed(head[1] % 7, data), head[0] // 3 % 4
        ):
            assert isinstance(end, ContainerError) or end.parts[0][2][1].size == self.NUMEL


def message_changed(which: int, data: bytes) -> Any:
    """Of a rank's requests for collectives, the one with this number sends other bytes, as libFuzzer's say."""

    def change(number: int, asked: Any) -> Any:
        if number != which:
            return asked
        sent = exact(changed(b"\1\0\0" + data[2:], [asked.data.tobytes()]))
        asked = asked._replace(data=sent)
        if isinstance(asked, AllToAll):
            ends = np.minimum(np.cumsum(asked.splits), sent.size)
            ends[-1] = sent.size
            asked = asked._replace(splits=np.diff(ends, prepend=0).tolist())
        return asked

    return change


class _OneRank(Collectives):
    """One of two ranks. What the other one sends after it is given, as a function of what this one sends."""

    def __init__(self, rank: int = 0) -> None:
        self.number = rank
        self.others: Any = lambda own: own

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return 2

    def local_size(self) -> int:
        return 1

    def start_allgather(self, data: np.ndarray, name: str) -> Any:
        return np.concatenate([data, exact(self.others(data.tobytes()))])

    def wait_allgather(self, pending: Any) -> np.ndarray:
        return pending

    def mpi_enabled(self) -> bool:
        return False


CONFIG = Config.load("topk_rice_qsgd")


class Handshake(Target):
    """What the other rank says of itself. Anything but an equal description is a MismatchError."""

    PARAMETERS = [("weight", (3, 4), "float32"), ("bias", (3,), "float64"), ("scale", (), "float16")]

    def seeds(self) -> Sequence[bytes]:
        said: list[bytes] = []
        collectives = _OneRank(1)
        collectives.others = lambda own: said.append(own) or b""
        with suppress(MismatchError):
            Agreement(collectives).check(CONFIG, self.PARAMETERS)
        return said

    def read(self, data: bytes) -> None:
        collectives = _OneRank()
        collectives.others = lambda own: data
        try:
            Agreement(collectives).check(CONFIG, self.PARAMETERS)
        except MismatchError as error:
            assert str(error)


STRANGE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**48 + 1, 2**70, 0.5, float("nan"), float("inf"), "", "three", b"\0", [], [1], (), {},
    {"a": 1}, object(), np.float32([np.nan]), np.full(12, np.inf, np.float32), np.zeros(12, np.float64),
    np.zeros(11, np.float32), np.zeros((3, 4), np.float32), np.zeros(12, np.int32), np.zeros(24, np.float32)[::2],
    np.zeros(12, np.complex64), np.array(["x"] * 12), np.array([None] * 12), np.zeros(12, ">f4"),
    np.zeros(0, np.float32),
]  # fmt: skip
"""For a place in a state."""


class State(Target):
    """A state that was altered: ``| place, number of the strange value | ...``. Loading it raises a ValueError and
    changes nothing, or it loads and holds finite numbers only."""

    def __init__(self) -> None:
        model = [Parameter(name, n, shape, dtype) for n, (name, shape, dtype) in enumerate(Handshake.PARAMETERS)]
        self.engine = Engine(CONFIG, _OneRank(), model)
        reducer = Reducer(self.engine, NumpyTensors())
        for parameter in model:
            gradient = np.linspace(-1, 1, max(1, parameter.numel)).astype(parameter.accumulated_in)
            reducer.start(parameter, gradient)
        self.engine.in_flight.clear()
        self.good = self.engine.state_dict()

    def seeds(self) -> Sequence[bytes]:
        return [bytes([place, value]) for place in range(12) for value in range(len(STRANGE))]

    def run(self, data: bytes) -> None:
        state: Any = copy.deepcopy(self.good)
        for place, value in zip(data[0:8:2], data[1:8:2], strict=False):
            strange = STRANGE[value % len(STRANGE)]
            where = state
            path = self.paths[place % len(self.paths)]
            for key in path[:-1]:
                where = where.get(key) if isinstance(where, dict) else None
            if isinstance(where, dict):
                where[path[-1]] = strange
                if place & 0x80:
                    del where[path[-1]]
        self.load(state)

    @cached_property
    def paths(self) -> list[tuple[str, ...]]:
        names = [*self.good["residuals"], "other", ""]
        return [*((key,) for key in (*self.good, "more")), *itertools.product(("steps", "residuals"), names)]

    def load(self, state: Any) -> None:
        before = fingerprint(self.engine.state_dict())
        try:
            self.engine.load_state_dict(state)
        except ValueError as error:
            assert str(error) and fingerprint(self.engine.state_dict()) == before, "a refused state changed something"
            return
        loaded = self.engine.state_dict()
        assert all(np.isfinite(residual).all() for residual in loaded["residuals"].values())
        self.engine.load_state_dict(self.good)


class SerializedState(State):
    """The bytes of a state."""

    def seeds(self) -> Sequence[bytes]:
        return [saved.to_bytes(self.good)]

    def run(self, data: bytes) -> None:
        try:
            state = saved.from_bytes(changed(data, self.right))
        except ValueError as error:
            assert str(error)
            return
        self.load(state)


def fingerprint(state: Mapping[str, Any]) -> Any:
    """A state as values that can be compared."""
    residuals = {name: (one.dtype.str, one.tobytes()) for name, one in state["residuals"].items()}
    return {**state, "residuals": residuals}


@cache
def names() -> list[str]:
    """All targets."""
    found = ["container", "short-container"]
    for registry in (index_codecs, value_codecs, joint_codecs):
        found += [f"{registry.kind}-{name}" for name in sorted(registry.by_name)]
    found += [f"sparsifier-{name}" for name, codec in sorted(sparsifiers.by_name.items()) if codec.shared_randomness]
    found += ["stream", "exchange", "slices", "levels", "handshake", "state"]
    return [*found, "serialized-state"] if hasattr(saved, "from_bytes") else found


def target(name: str) -> Target:
    """The target with this name."""
    alone: dict[str, type[Target]] = {
        "container": WholeContainer, "short-container": ShortContainer,
        "stream": ExchangeStream, "exchange": Exchange, "slices": Slices, "levels": Levels,
        "handshake": Handshake, "state": State, "serialized-state": SerializedState,
    }  # fmt: skip
    if name in alone:
        return alone[name]()
    kind, _, codec = name.partition("-")
    return SharedSelection(codec) if kind == "sparsifier" else Section(kind, codec)
