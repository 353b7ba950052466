"""What was selected of a gradient to a container, from codec to codec; and which containers a config can give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.index.packed import Packed
from hvd_deepreduce.codecs.index.raw import Raw as RawIndex
from hvd_deepreduce.codecs.interfaces import (
    U8,
    U32,
    Floats,
    IndexCodec,
    RngKey,
    index_codecs,
    joint_codecs,
    sparsifiers,
    value_codecs,
)
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.codecs.value.raw import Raw
from hvd_deepreduce.config.settings import Config
from hvd_deepreduce.ops import arrays, bits, sparse
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import unordered
from hvd_deepreduce.wire.standalone import Container

EMPTY: U8 = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Source:
    """What is encoded: a gradient, or the residual that it was added to.

    Attributes:
        numel, dtype: of the gradient.
        residual: from which is subtracted what is sent; None: there is no error feedback.
        at: its elements at sorted indices.
    """

    numel: int
    dtype: np.dtype[Any]
    residual: Floats | None
    at: Callable[[U32], Floats]

    @classmethod
    def dense(cls, gradient: Floats, residual: Floats | None) -> Source:
        elements = gradient if residual is None else residual
        return cls(gradient.size, gradient.dtype, residual, lambda indices: arrays.gather(elements, indices))

    @classmethod
    def sparse(cls, gradient: SparseTensor, residual: Floats | None) -> Source:
        if residual is not None:
            return cls(gradient.numel, residual.dtype, residual, lambda indices: arrays.gather(residual, indices))
        support, values = gradient.indices, gradient.values
        return cls(gradient.numel, values.dtype, None, lambda indices: sparse.at(support, values, indices))


class Composed:
    """The codecs of one config.

    Attributes:
        shared: what its containers have in common.
        ordered: the codec of indices in the order of the values; None: they are never in that order.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._value_under_feedback = config.value and config.value.under_feedback()
        self._leaves_whole = config.memory.leaves_whole
        self._index_ids = () if config.index is None else tuple(codec.id for codec in config.index.choices)
        if config.index is not None and len(self._index_ids) > frame.MAX_CHOICES:
            raise ValueError(
                f"the index codec {config.index.name!r} has {len(self._index_ids)} choices, and a container can name "
                f"{frame.MAX_CHOICES}: offer fewer"
            )
        codec, sorts = config.joint or config.value, config.value is not None and config.value.sorts
        self.ordered: IndexCodec | None = None
        if config.index is not None and sorts and not config.force_index:
            self.ordered = Packed()
        elif sorts and isinstance(config.index, Packed | RawIndex):  # their sections can have any order
            self.ordered = config.index
        self.shared = frame.Shared(
            config.digest(), config.sparsifier.id, self._index_ids, codec.id if codec else 0, config.joint is not None,
            sorts, self.ordered.id if self.ordered else 0,
        )  # fmt: skip

    def encode(
        self,
        source: Source,
        indices: U32 | None,
        values: Floats,
        key: RngKey,
        encoded: tuple[U8, U32] | None = None,
    ) -> tuple[Container, U32 | None]:
        """The container of what was selected, and its support. What it holds is subtracted from the residual, or, under
        a memory that is left whole, all that the residual has there.

        Args:
            indices, values: sorted indices, or ``None`` for all elements; and what the source has there.
            encoded: the index section and the support, where they are known.
        """
        joint, numel, residual = self._config.joint, source.numel, source.residual
        if joint is not None:
            section, support = joint.encode_from(source.at, indices, values, numel, key)
            if residual is not None:
                if self._leaves_whole:
                    sent = values if support is None else source.at(support)
                else:
                    sent = joint.decode_own(section, numel, support, source.dtype, key)
                arrays.subtract_sent(residual, support, sent)
            return self._container(source, support, key, joint.id, section, joint=True), support
        value = self._config.value if residual is None else self._value_under_feedback
        assert value is not None
        index_id, index_section, support = 0, EMPTY, indices
        ordered: IndexCodec | None = None
        if indices is not None and self._config.index is not None:
            index = self._resolved(self._config.index, indices, numel)
            encoded = encoded or self._encoded_index(index, indices, numel, key)
            if encoded is None:
                ordered = self.ordered
            else:
                index_id, (index_section, support) = index.id, encoded
                if support is not indices and not index.keeps_values:
                    values = source.at(support)
        section, order = value.encode(values, support, key)
        if order is not None and not value.sorts:
            raise ValueError(
                f"the value codec {value.name!r} returned an order of its values, which it does not announce: set its "
                "class attribute 'sorts' to True"
            )
        if residual is not None:
            sent = values  # the residual's own, so that the difference is 0
            if not self._leaves_whole:
                sent = unordered(value.decode(section, values.size, support, source.dtype, key), order)
            arrays.subtract_sent(residual, support, sent)
        order_section = EMPTY
        if ordered is not None and support is not None:
            in_order = support if order is None else arrays.gather(support, order)
            index_id, (index_section, _) = ordered.id, ordered.encode(in_order, numel, key)
        elif order is not None:
            order_section = bits.pack(order, (order.size - 1).bit_length())
        container = self._container(
            source, support, key, value.id, section, index_id, index_section, order_section,
            ordered=ordered is not None,
        )  # fmt: skip
        return container, support

    def uncompressed(self, gradient: Floats, key: RngKey) -> Container:
        """That of all elements as they are."""
        section, _ = Raw().encode(gradient, None, key)
        return self._container(Source.dense(gradient, None), None, key, Raw.id, section)

    def _resolved(self, index: IndexCodec, indices: U32, numel: int) -> IndexCodec:
        resolved = index.resolve(indices, numel)
        if resolved.id not in self._index_ids:
            raise ValueError(
                f"the index codec {index.name!r} resolved to {resolved.name!r}, which is not among its choices, so "
                "every receiver would refuse the container: add it to the codec's property 'choices'"
            )
        return resolved

    def _encoded_index(self, index: IndexCodec, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32] | None:
        """The index section and the support; ``None`` if indices in the order of the values are sent.

        Packed indices in that order need no order section: log2 d bits an element. A code of the set and an order
        section of log2 r bits need log2 C(d, r) + log2 r! in all, just below r log2 d. A support other than the
        selection loses elements or has useless ones, so it must save bytes. Under ``force_index`` sizes do not count.
        """
        count = indices.size
        if self.ordered is None or count == 0:
            return index.encode(indices, numel, key)
        if self._config.force_index:
            return None
        in_order = bits.packed_bytes(count, (numel - 1).bit_length())
        if in_order < index.least_bytes(count) + _order_bytes(count):
            return None
        section, support = index.encode(indices, numel, key)
        size = section.size + _order_bytes(support.size)
        return None if in_order < size or (in_order == size and support is not indices) else (section, support)

    def _container(
        self, source: Source, support: U32 | None, key: RngKey, value: int, values: U8, index: int = 0,
        indices: U8 = EMPTY, order: U8 = EMPTY, **form: bool,
    ) -> Container:  # fmt: skip
        sparsifier, count = (0, source.numel) if support is None else (self._config.sparsifier.id, support.size)
        return Container(
            sparsifier, index, value, source.dtype, source.numel, count, key, self.shared.digest, indices, values,
            order, **form,
        )  # fmt: skip

    def refuse_foreign(self, containers: Sequence[Container], dtype: np.dtype[Any], key: RngKey | None) -> None:
        """Raises ``ContainerError`` for a container that ``encode`` does not give under this key; names its rank."""
        for rank, container in enumerate(containers):
            reason = self._foreign(container, dtype, key)
            if reason:
                raise wire.refusal(rank, reason)

    def _foreign(self, container: Container, dtype: np.dtype[Any], key: RngKey | None) -> str | None:
        """Why a container is not one that ``encode`` gives under this key; ``None``: it is one, as far as its header
        says."""
        if container.dtype.itemsize > dtype.itemsize or (key and container.dtype != dtype):
            return f"its tensor is {container.dtype}, and this one is {dtype}: check that all ranks train one model"
        if key is None:
            return None
        theirs, ours = container.key[:3], (key.seed, key.parameter, key.step & 0xFFFFFFFF)
        if theirs != ours:
            return (
                "it has seed {}, parameter {} and step {}, and this rank is at seed {}, parameter {} and step {}: "
                "check that all ranks run the same steps of one model".format(*theirs, *ours)
            )
        config = self._config
        index, sparsifier, joint = container.index, container.sparsifier, container.joint
        if not (index or sparsifier or joint or container.ordered) and container.value == Raw.id:
            return None  # all elements, uncompressed: what is sent of a gradient that is not finite
        codec = config.joint or config.value
        indices = ((self.ordered.id,) if self.ordered else ()) if container.ordered else self._index_ids or (0,)
        if (
            joint == (config.joint is not None)
            and codec is not None
            and container.value == codec.id
            and sparsifier in (0, config.sparsifier.id)
            and index in (indices if sparsifier else (0,))
        ):
            return None
        value = (joint_codecs if joint else value_codecs).describe(container.value)
        codecs = {key: getattr(config, key) for key in ("sparsifier", "index", "value", "joint")}
        return (
            f"it has sparsifier {sparsifiers.describe(sparsifier)}, index {index_codecs.describe(index)} and "
            f"{'joint' if joint else 'value'} {value}, which this job's config cannot give ("
            + ", ".join(f"{key} {codec.name!r}" for key, codec in codecs.items() if codec is not None)
            + "): use one release and one config on all ranks"
        )


def _order_bytes(count: int) -> int:
    """Bytes of the order section of ``count`` values."""
    return bits.packed_bytes(count, (count - 1).bit_length())
