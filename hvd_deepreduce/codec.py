"""What a sparsifier, an index codec and a value codec are, and the registry that finds one by its name.

A codec is a frozen pydantic model: its fields are what a user sets, checked where it is made. Everything that a
decoder needs stands in its section or in the container's header, so decoding takes no codec settings: ``decode`` is a
static method. A decoder raises ``ValueError`` with a sentence where a section cannot be what ``encode`` wrote; it
never reads past the section and never allocates more than ``count`` or ``numel`` elements.

Arrays are NumPy's, or CuPy's on a GPU: codecs touch their elements through the operations of ``backend.of(array)``
alone, and of an array itself they use ``size``, ``dtype``, ``view`` and stretches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
Floats = NDArray[np.floating[Any]]

ON_HOST = np.empty(0, np.uint8)
"""For an argument ``like``, which says by another array where a new one is to be."""


def padded(size: int) -> int:
    """``size`` rounded up to 8 bytes, as sections are."""
    return (size + 7) & ~7


class Key(NamedTuple):
    """What a random choice hangs on. The first three stand in the container; ``rank`` only separates the rounding of
    ranks from each other, which no receiver repeats."""

    seed: int
    parameter: int
    step: int
    rank: int = 0


class Codec(BaseModel):
    """A thing with a name for users, a number for the wire, and settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: ClassVar[str]
    id: ClassVar[int]


class Sparsifier(Codec, ABC):
    """Picks the elements to send."""

    keyed: ClassVar[bool] = False
    """Whether ``indices_of`` can repeat the choice, so that no index section is sent."""

    @abstractmethod
    def select(self, dense: Floats, gradient: Floats | None, key: Key, threads: int) -> tuple[U32 | None, Floats]:
        """``dense += gradient`` (unless None), and the choice out of ``dense``: sorted indices and their values; None
        and a copy of ``dense`` where all elements are sent."""

    @staticmethod
    def indices_of(numel: int, count: int, key: Key, like: Any = ON_HOST) -> U32:
        """The indices that ``select`` chose under this key, for a keyed sparsifier, where ``like`` is."""
        raise ValueError("this sparsifier's choice hangs on the gradient: its container must hold an index section")


class IndexCodec(Codec, ABC):
    """Sorted unique indices to bytes and back."""

    def chosen(self, indices: U32, numel: int) -> IndexCodec:
        """The codec that encodes these indices: itself, but for one that picks among others."""
        return self

    @property
    def keeps_values(self) -> bool:
        """Whether the values of ``indices`` go out for the support, in order, in place of those at the support."""
        return False

    @abstractmethod
    def encode(self, indices: U32, numel: int, key: Key) -> tuple[U8, U32]:
        """The section, and the support: the sorted indices that ``decode`` will give (a lossless codec's: the same)."""

    @staticmethod
    @abstractmethod
    def decode(section: U8, numel: int, count: int, key: Key) -> U32:
        """The support: ``count`` strictly increasing uint32 below ``numel``."""


class ValueCodec(Codec, ABC):
    """Values to bytes and back."""

    @abstractmethod
    def encode(self, values: Floats, support: U32 | None, key: Key) -> tuple[U8, U32 | None]:
        """The section, and the order: None, or the permutation for which element j decoded is ``values[order[j]]``.

        ``values``: float32 or float64 ``[r]``, finite; ``support``: their indices, None for all of a tensor."""

    @staticmethod
    @abstractmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: Key) -> Floats:
        """``count`` float32 (or, where nothing was rounded, ``dtype``) values, in the section's own order."""


class JointCodec(Codec, ABC):
    """Indices and values together to bytes and back."""

    def support(self, indices: U32, numel: int, dtype: np.dtype[Any]) -> U32:
        """The elements that cost no more than these alone: their values then come from the residual too."""
        return indices

    @abstractmethod
    def encode(self, indices: U32 | None, values: Floats, numel: int, key: Key) -> tuple[U8, U32 | None]:
        """The section, and the support that ``decode`` will give; None for both where all elements are sent."""

    @staticmethod
    @abstractmethod
    def decode(
        section: U8, numel: int, count: int, dense: bool, dtype: np.dtype[Any], key: Key
    ) -> tuple[U32 | None, Floats]:
        """The support (``count`` strictly increasing uint32 below ``numel``; None where ``dense``) and its values."""


C = TypeVar("C", bound=Codec)


class Registry:
    """The codecs of one kind, by name and by number."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.by_name: dict[str, type[Codec]] = {}
        self.by_id: dict[int, type[Codec]] = {}

    def register(self, codec: type[C]) -> type[C]:
        """Class decorator: the codec can be named in a config and met on the wire from here on."""
        if codec.name in self.by_name or codec.id in self.by_id or not 0 < codec.id < 256:
            raise ValueError(f"{self.kind} codec {codec.name!r} (id {codec.id}) needs a name and an id of its own")
        self.by_name[codec.name] = codec
        self.by_id[codec.id] = codec
        return codec


sparsifiers = Registry("sparsifier")
index_codecs = Registry("index")
value_codecs = Registry("value")
joint_codecs = Registry("joint")
