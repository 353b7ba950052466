"""The interfaces of sparsifiers and codecs, and the registries that find one by its name or number.

A codec is a frozen pydantic model. Its fields are what a user sets, checked when it is made. Everything that a decoder
needs is in its section or in the container's header, so decoding needs no settings and ``decode`` is a static method.
A decoder raises ``ValueError`` with a sentence if ``encode`` cannot have written the section. It never reads outside
the section, and docs/container.md bounds its memory.

Arrays are NumPy's or, on a GPU, CuPy's. Codecs reach their elements only through the operations of
``hvd_deepreduce.ops``. Codecs use only an array's ``size``, ``dtype``, ``view()`` and slicing.

docs/extending.md shows how to write a codec, in this package or in another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from hvd_deepreduce.codecs.checked import guard
from hvd_deepreduce.ops.types import U8, U32, Floats, Parts

__all__ = [
    "ON_HOST",
    "U8",
    "U32",
    "Codec",
    "Floats",
    "IndexCodec",
    "JointCodec",
    "Parts",
    "RngKey",
    "Registry",
    "Settings",
    "Sparsifier",
    "ValueCodec",
    "index_codecs",
    "joint_codecs",
    "meant",
    "padded",
    "sparsifiers",
    "value_codecs",
]

ON_HOST: U8 = np.empty(0, np.uint8)
"""A NumPy array, for the argument ``like`` of operations that make an array where another one is."""


def meant(given: object, allowed: Iterable[object]) -> str:
    """What an error about an unknown name adds: the name that may have been meant, or nothing."""
    close = get_close_matches(str(given).lower(), map(str, allowed), 1)
    return f". Did you mean {close[0]!r}?" if close else ""


def padded(size: int) -> int:
    """``size`` rounded up to a multiple of 8 bytes, as sections are in a container."""
    return (size + 7) & ~7


class RngKey(NamedTuple):
    """The key of a random choice: equal keys give equal random numbers, on every rank and after a restart.

    Attributes:
        seed, parameter, step: these are in the container's header, so a receiver can repeat the choice.
        rank: separates the ranks' stochastic rounding, which no receiver repeats.
    """

    seed: int
    parameter: int
    step: int
    rank: int = 0


def has_truth_value(given: Any) -> bool:
    """Whether a value is True or False, or a list with one."""
    return isinstance(given, bool) or (isinstance(given, list | tuple) and any(map(has_truth_value, given)))


class Settings(BaseModel):
    """The base of what a user sets: frozen, without other keys, and with numbers where numbers belong."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, given: Any, info: ValidationInfo) -> Any:
        """Python and pydantic take True for 1, so that ``density: yes`` would send everything."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = {annotation, *get_args(annotation)}
        among_numbers = isinstance(given, list | tuple) and has_truth_value(given)
        if among_numbers or (isinstance(given, bool) and kinds & {int, float} and bool not in kinds):
            raise PydanticCustomError("bool_as_number", "Input should be a number")
        return given


class Codec(Settings):
    """The base of all sparsifiers, codecs and exchanges: a name for configs, a number for containers, and settings.

    Attributes:
        name: what a config calls it.
        id: its number in a container, 1 to 255. Numbers 192 to 254 are reserved for other packages.
    """

    name: ClassVar[str]
    id: ClassVar[int]

    def unused_settings(self) -> Iterator[tuple[str, str, str]]:
        """Yields (setting, cause, explanation) for each setting that another setting makes useless. A config that sets
        one is refused."""
        return iter(())


class Sparsifier(Codec, ABC):
    """Selects the elements to send."""

    shared_randomness: ClassVar[bool] = False
    """Whether a receiver repeats the selection with ``indices_of``, so that an index section is not needed."""
    sends_all: ClassVar[bool] = False
    """Whether all elements are sent, so that there are no indices."""
    selects_sparse: ClassVar[bool] = False
    """Whether it goes by the magnitudes of single elements, and so can select from a sparse gradient."""

    @abstractmethod
    def select(self, dense: Floats, gradient: Floats | None, key: RngKey, threads: int) -> tuple[U32 | None, Floats]:
        """Accumulates and selects, in one pass over memory.

        Args:
            dense: float32 or float64 ``[numel]``. ``gradient`` is added to it in place, unless it is ``None``.
            gradient: same dtype and size.
            key: of this rank, parameter and step.
            threads: of the CPU kernels.

        Returns:
            The sorted indices and their values; ``None`` and a copy of ``dense`` if all elements are sent.
        """

    def select_sparse(self, indices: U32, values: Floats, numel: int, key: RngKey, threads: int) -> tuple[U32, Floats]:
        """What ``select`` selects of the dense vector that is zero but for ``values`` at ``indices``.

        Only sparsifiers with ``selects_sparse`` have it.

        Args:
            indices: uint32, strictly increasing, below ``numel``.
            values: float32 or float64, finite, zeros among them or not.
            numel: elements of the dense vector, which is not made.
            key, threads: as in ``select``.
        """
        raise NotImplementedError

    @staticmethod
    def indices_of(numel: int, count: int, key: RngKey, like: Any = ON_HOST) -> U32:
        """The indices that ``select`` chose from a whole tensor under this key, on the device of ``like``."""
        raise ValueError("this sparsifier selects by the gradient, so its container must have an index section")


class IndexCodec(Codec, ABC):
    """Encodes sorted unique indices."""

    def resolve(self, indices: U32, numel: int) -> IndexCodec:
        """The codec that encodes these indices: ``self``, unless this one picks among its ``choices``."""
        return self

    @property
    def choices(self) -> Sequence[IndexCodec]:
        """What ``resolve`` may return. A receiver refuses containers with other index codecs."""
        return (self,)

    @property
    def keeps_values(self) -> bool:
        """Whether the values of the selected indices are sent, in their order, for the indices of the support. By
        default the values at the support are sent."""
        return False

    def least_bytes(self, count: int) -> int:
        """A lower bound of the section for ``count`` indices, in bytes, which saves an encoding that another way of
        sending the indices would surely beat. The support then has at least ``count`` elements."""
        return 0

    @abstractmethod
    def encode(self, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32]:
        """The section, and the support: the sorted indices that ``decode`` will return.

        Args:
            indices: uint32 ``[count]``, strictly increasing, below ``numel``.
            numel: elements of the dense tensor.
            key: of this rank, parameter and step.

        Returns:
            The section, uint8, and the support. The support of a lossless codec is ``indices`` itself.
        """

    def encode_many(
        self, lists: Sequence[U32], numels: Sequence[int], keys: Sequence[RngKey]
    ) -> list[tuple[U8, U32]]:
        """``encode`` of several tensors' indices. A codec that on a GPU can wait once for all sizes overrides it."""
        return [self.encode(*one) for one in zip(lists, numels, keys, strict=True)]

    @staticmethod
    @abstractmethod
    def decode(section: U8, numel: int, count: int, key: RngKey) -> U32:
        """The support: uint32 ``[count]``, strictly increasing, below ``numel``.

        Raises:
            ValueError: ``encode`` cannot have written the section.
        """

    @classmethod
    def decode_many(cls, sections: Sequence[U8], numel: int, counts: Sequence[int], key: RngKey) -> list[U32]:
        """``decode`` of the sections of several ranks. A codec that can decode them faster together overrides it."""
        return [cls.decode(section, numel, count, key) for section, count in zip(sections, counts, strict=True)]


class LosslessIndexCodec(IndexCodec, ABC):
    """An index codec whose support is the selection, so that it has only to name its operations."""

    no_bytes_for_none: ClassVar[bool] = False
    """Whether the operations take at least one index, and a section of no indices has no bytes."""
    sections_of: ClassVar[Any] = None
    """The sections of several lists, none of them empty, on a GPU with one wait for all; None: one by one."""
    measured: ClassVar[Any] = None
    """Of a list that is not empty, on a GPU, without a wait: room with its section at the begin, and the number of its
    bits, uint64 ``[1]``; None: the host must know more."""
    read_many: ClassVar[Any] = None
    """The indices of several sections, at least one of each, on a GPU in one set of launches; None: one by one."""

    @staticmethod
    @abstractmethod
    def section_of(indices: U32, numel: int) -> U8:
        """The section."""

    @staticmethod
    @abstractmethod
    def read(section: U8, numel: int, count: int) -> U32:
        """The indices of a section. Raises ``ValueError``, as ``decode``."""

    def encode(self, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32]:
        if self.no_bytes_for_none and not indices.size:
            return indices.view(np.uint8), indices
        return self.section_of(indices, numel), indices

    def encode_many(
        self, lists: Sequence[U32], numels: Sequence[int], keys: Sequence[RngKey]
    ) -> list[tuple[U8, U32]]:
        if self.sections_of is None:
            return super().encode_many(lists, numels, keys)
        filled = [(indices, numel) for indices, numel in zip(lists, numels, strict=True) if indices.size]
        sections = iter(self.sections_of([indices for indices, _ in filled], [numel for _, numel in filled]))
        return [(next(sections) if indices.size else indices.view(np.uint8), indices) for indices in lists]

    @classmethod
    def decode(cls, section: U8, numel: int, count: int, key: RngKey) -> U32:
        if count or not cls.no_bytes_for_none:
            return cls.read(section, numel, count)
        if section.size:
            raise ValueError(f"the section has {section.size} bytes: no indices take none")
        return section.view(np.uint32)

    @classmethod
    def decode_many(cls, sections: Sequence[U8], numel: int, counts: Sequence[int], key: RngKey) -> list[U32]:
        if cls.read_many is None or not all(counts):
            return super().decode_many(sections, numel, counts, key)
        found: list[U32] = cls.read_many(sections, numel, counts)
        return found


class ValueCodec(Codec, ABC):
    """Encodes the values at the support."""

    sorts: ClassVar[bool] = False
    """Whether ``encode`` may return an order."""

    def under_feedback(self) -> ValueCodec:
        """The codec to encode with if a residual keeps the errors: with settings under which the error is no larger
        than the values, where these were left open."""
        return self

    def layout(self, count: int, itemsize: int) -> tuple[bytes, int] | None:
        """What a receiver with these settings knows of each section of ``count`` values of ``itemsize`` bytes: its
        first bytes, and its size. None: they depend on the values, or the codec does not say."""
        return None

    @abstractmethod
    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        """The section, and the order of its values.

        Args:
            values: float32 or float64 ``[count]``, finite.
            support: their indices; ``None`` if they are all elements of the tensor.
            key: of this rank, parameter and step.

        Returns:
            The section, uint8, and the order: ``None``, or a permutation, uint32 ``[count]``, such that the decoded
            value ``j`` belongs to ``values[order[j]]``. Only a codec that ``sorts`` may return one.
        """

    @staticmethod
    @abstractmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        """The ``count`` values, in the section's own order: float32, or ``dtype`` if nothing was rounded.

        Raises:
            ValueError: ``encode`` cannot have written the section.
        """


class JointCodec(Codec, ABC):
    """Encodes indices and values together."""

    @abstractmethod
    def encode(self, indices: U32 | None, values: Floats, numel: int, key: RngKey) -> tuple[U8, U32 | None]:
        """The section, and the support that ``decode`` will return; ``None`` if all elements are sent.

        Args:
            indices: uint32 ``[count]``, strictly increasing; ``None`` if all elements are sent.
            values: float32 or float64 ``[count]``, finite.
            numel: elements of the dense tensor.
            key: of this rank, parameter and step.
        """

    def encode_from(
        self, at: Callable[[U32], Floats], indices: U32 | None, values: Floats, numel: int, key: RngKey
    ) -> tuple[U8, U32 | None]:
        """``encode``, for a codec that can send more elements at no more cost: it takes their values from ``at``.

        Args:
            at: gives the dense tensor's values at indices, uint32, strictly increasing.
            indices, values, numel, key: as for ``encode``.
        """
        return self.encode(indices, values, numel, key)

    @staticmethod
    @abstractmethod
    def decode(
        section: U8, numel: int, count: int, dense: bool, dtype: np.dtype[Any], key: RngKey
    ) -> tuple[U32 | None, Floats]:
        """The support, uint32 ``[count]`` (``None`` if ``dense``), and its values.

        Raises:
            ValueError: ``encode`` cannot have written the section.
        """

    @classmethod
    def decode_own(cls, section: U8, numel: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        """The values that ``decode`` gives, of a section that this process has just encoded. A codec that can tell them
        without decoding the support overrides it.

        Args:
            support: as ``encode`` returned it.
        """
        count = numel if support is None else support.size
        return cls.decode(section, numel, count, support is None, dtype, key)[1]

    @classmethod
    def decode_many(
        cls, sections: Sequence[U8], numel: int, counts: Sequence[int], dtype: np.dtype[Any], key: RngKey
    ) -> list[tuple[U32 | None, Floats]]:
        """``decode`` of the sections of several ranks, none of which is dense. A codec that can decode them faster
        together overrides it."""
        return [cls.decode(one, numel, count, False, dtype, key) for one, count in zip(sections, counts, strict=True)]


C = TypeVar("C", bound=Codec)

EXTERNAL_IDS = range(192, 255)
"""The numbers of codecs that other packages register."""


class Registry:
    """The codecs of one kind, by name and by number.

    Args:
        kind: what a config calls the kind, such as ``"index"``.
        base: the class of all of them.
    """

    def __init__(self, kind: str, base: type[Codec] = Codec) -> None:
        self.kind, self._base = kind, base
        self.by_name: dict[str, type[Codec]] = {}
        self.by_id: dict[int, type[Codec]] = {}

    def register(self, codec: type[C]) -> type[C]:
        """Class decorator: configs can name the codec from now on, and containers can contain it. What a codec of
        another package returns is checked (``checked.py``). A class takes the place of an earlier one of the same name
        and module, as when a cell of a notebook runs again.

        Raises:
            ValueError: it is not a codec of this kind, it lacks a function, the name or the number is missing or taken,
                or the number is outside the codec's range: 192 to 254 for codecs of other packages, 1 to 191 and 255
                for this package's.
        """
        external = codec.__module__.split(".")[0] != __name__.split(".")[0]
        name, number = getattr(codec, "name", None), getattr(codec, "id", None)
        what = f"{self.kind} codec {name!r} (id {number}, from {codec.__module__})"
        if not isinstance(name, str) or type(number) is not int:
            raise ValueError(f"{what} needs the class attributes name, a string, and id, an integer")
        if not issubclass(codec, self._base):
            raise ValueError(f"{what} must be a subclass of {self._base.__name__}, as all codecs of this kind are")
        if missing := ", ".join(sorted(getattr(codec, "__abstractmethods__", ()))):
            raise ValueError(f"{what} lacks {missing}: define what {self._base.__name__} declares")
        if not 0 < codec.id < 256 or external != (codec.id in EXTERNAL_IDS):
            allowed = "192 to 254, as for all codecs of other packages" if external else "1 to 191, or 255"
            raise ValueError(f"{what} has an id outside its range: it must be {allowed}")
        for other in (self.by_name.get(codec.name), self.by_id.get(codec.id)):
            if other is not None and (other.__module__, other.__qualname__) != (codec.__module__, codec.__qualname__):
                raise ValueError(
                    f"{what} has the name or the id of {other.name!r} (id {other.id}, from {other.__module__}): "
                    "choose a free one"
                )
        if external:
            guard(self.kind, self._base, codec)
        self.by_name[codec.name] = codec
        self.by_id[codec.id] = codec
        return codec

    def describe(self, number: int) -> str:
        """The number and, if a codec has it, the name."""
        return f"{number} ({self.by_id[number].name})" if number in self.by_id else str(number)

    def find(self, number: int, load: Callable[[], None] | None = None) -> Any:
        """The codec with this number.

        Args:
            number: from a container's header.
            load: called if the number is unknown, to register the codecs of other packages.

        Raises:
            ValueError: no codec has it.
        """
        if number not in self.by_id and load is not None:
            load()
        if number not in self.by_id:
            known = ", ".join(f"{n} {codec.name}" for n, codec in sorted(self.by_id.items()))
            raise ValueError(f"{self.kind} codec {number} is unknown; this release knows {known}")
        return self.by_id[number]


sparsifiers = Registry("sparsifier", Sparsifier)
index_codecs = Registry("index", IndexCodec)
value_codecs = Registry("value", ValueCodec)
joint_codecs = Registry("joint", JointCodec)
