"""Gradient -> container, containers -> summed gradient; no framework and no wire.

Arrays are NumPy's, or CuPy's on a GPU; what goes in says where all of it happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hvd_deepreduce import container as wire
from hvd_deepreduce.codec import (
    U8,
    U32,
    Floats,
    Key,
    Registry,
    index_codecs,
    joint_codecs,
    sparsifiers,
    value_codecs,
)
from hvd_deepreduce.config import Config
from hvd_deepreduce.container import Container, ContainerError
from hvd_deepreduce.index.packed import Packed
from hvd_deepreduce.ops import arrays, bits, deferred, sort
from hvd_deepreduce.ops.library import NonFiniteError
from hvd_deepreduce.sparse import MAX_NUMEL
from hvd_deepreduce.value.raw import Raw

EMPTY = np.empty(0, np.uint8)
Parts = Sequence[tuple[int, int]]


class Pipeline:
    """One rank's encoder and decoder under one config.

    Args:
        config: the job's settings.
        threads: how many threads the kernels may use where the config does not say.
    """

    def __init__(self, config: Config, threads: int = 1) -> None:
        self.config = config
        self.threads = config.threads or threads
        self.digest = config.digest()

    def encode(self, gradient: Floats, residual: Floats | None, key: Key, parts: Parts | None = None) -> U8:
        """The container of one gradient; the residual takes in the gradient and gives up what is sent.

        Args:
            gradient: float32 or float64 ``[numel]``, contiguous; left as it is.
            residual: same dtype and size, changed in place; None: no error feedback.
            key: of this rank, parameter and step.
            parts: (begin, end) of stretches to select from by themselves; None: from the whole.

        Returns:
            uint8. A gradient with NaN or infinity goes raw and whole, so that every rank sees it, and leaves the
            residual as it was.

        Raises:
            ContainerError: for more than 2^32 - 1 elements; nothing has changed then.
        """
        try:
            with self._encoding(gradient, residual):
                indices, values = self._select(gradient, residual, key, parts)
                if self.config.joint is not None:
                    return self._encode_joint(gradient, residual, indices, values, key)
                return self._encode_parts(gradient, residual, indices, values, key, parts is None)
        except NonFiniteError:
            whole, _ = Raw().encode(gradient, None, key)
            return self._pack(gradient, None, key, 0, Raw.id, EMPTY, whole)

    def select(
        self, gradient: Floats, residual: Floats | None, key: Key, parts: Parts | None = None
    ) -> tuple[U32 | None, Floats] | None:
        """What to send of one gradient, which the residual takes in: sorted indices (None: all) and finite values.

        None, and the residual is left as it was, where the gradient has NaN or infinity. Arguments and errors are
        those of ``encode``.
        """
        try:
            with self._encoding(gradient, residual):
                return self._select(gradient, residual, key, parts)
        except NonFiniteError:
            return None

    def _encoding(self, gradient: Floats, residual: Floats | None) -> AbstractContextManager[None]:
        if gradient.size > MAX_NUMEL:
            raise ContainerError(
                f"a tensor has up to 2^32 - 1 elements, and this one {gradient.size}: split it"
            )
        encoding: AbstractContextManager[None] = deferred.encoding(gradient, residual, self.threads)
        return encoding

    def _select(
        self, gradient: Floats, residual: Floats | None, key: Key, parts: Parts | None
    ) -> tuple[U32 | None, Floats]:
        threads = self.threads
        dense, added = (gradient, None) if residual is None else (residual, gradient)
        sparsifier = self.config.sparsifier
        indices: U32 | None
        if parts is None:
            indices, values = sparsifier.select(dense, added, key, threads)
        else:
            chosen = [
                sparsifier.select(dense[i:j], None if added is None else added[i:j], key, threads) for i, j in parts
            ]
            values = arrays.concatenate([some for _, some in chosen])
            found = [
                arrays.offset(some, begin)
                for (begin, _), (some, _) in zip(parts, chosen, strict=True)
                if some is not None
            ]
            indices = arrays.concatenate(found) if len(found) == len(chosen) else None
        return indices, values

    def _encode_joint(
        self, gradient: Floats, residual: Floats | None, indices: U32 | None, values: Floats, key: Key
    ) -> U8:
        joint = self.config.joint
        assert joint is not None
        if indices is not None:
            wider = joint.support(indices, gradient.size, gradient.dtype)
            if wider is not indices:
                indices, values = wider, arrays.gather(gradient if residual is None else residual, wider)
        section, support = joint.encode(indices, values, gradient.size, key)
        if residual is not None:
            count = gradient.size if support is None else support.size
            _, decoded = joint.decode(section, gradient.size, count, support is None, gradient.dtype, key)
            arrays.subtract_sent(residual, support, decoded)
        return self._pack(gradient, support, key, 0, joint.id, EMPTY, section, joint=True)

    def _encode_parts(
        self, gradient: Floats, residual: Floats | None, indices: U32 | None, values: Floats, key: Key, whole: bool
    ) -> U8:
        number, section, support = 0, EMPTY, indices
        # A receiver repeats a keyed choice from the whole vector only.
        if indices is not None and not (self.config.sparsifier.keyed and whole):
            assert self.config.index is not None
            index = self.config.index.chosen(indices, gradient.size)
            number = index.id
            section, support = index.encode(indices, gradient.size, key)
            if support is not indices and not index.keeps_values:
                values = arrays.gather(gradient if residual is None else residual, support)
        value = self.config.value
        assert value is not None
        values_section, order = value.encode(values, support, key)
        if residual is not None:
            decoded = value.decode(values_section, values.size, support, gradient.dtype, key)
            arrays.subtract_sent(residual, support, unordered(decoded, order))
        if order is None:
            return self._pack(gradient, support, key, number, value.id, section, values_section)
        order_section = bits.pack(order, (order.size - 1).bit_length())
        if number and support is not None:
            # log2 d bits for each index in the values' order often take less than a code of the set and the order's
            # log2 r bits: log2 C(d, r) + log2 r! is just below r log2 d.
            in_order = bits.pack(arrays.gather(support, order), (gradient.size - 1).bit_length())
            if in_order.size < section.size + order_section.size:
                return self._pack(
                    gradient, support, key, Packed.id, value.id, in_order, values_section, ordered=True
                )  # fmt: skip
        return self._pack(gradient, support, key, number, value.id, section, values_section, order_section)

    def _pack(
        self,
        gradient: Floats,
        support: U32 | None,
        key: Key,
        index: int,
        value: int,
        indices: U8,
        values: U8,
        order: U8 = EMPTY,
        joint: bool = False,
        ordered: bool = False,
    ) -> U8:
        count = gradient.size if support is None else support.size
        number = 0 if support is None else self.config.sparsifier.id
        return wire.pack(
            Container(number, index, value, gradient.dtype, gradient.size, count, key, self.digest,
                      indices, values, order, joint, ordered)
        )  # fmt: skip

    def decode(self, containers: Sequence[Container], out: Floats, scale: float = 1.0) -> None:
        """``out = scale * (sum of the containers, in their order)``.

        Args:
            containers: of tensors with ``out.size`` elements, in rank order.
            out: float32 or float64 ``[numel]``, contiguous; what it held is overwritten.
            scale: a factor for the sum.

        Raises:
            ContainerError: for a container that cannot be decoded, with its rank; ``out`` is then unchanged.
        """
        parts = deferred.run_deferred(
            out, lambda: [decode_part(container, out.size, rank) for rank, container in enumerate(containers)]
        )
        arrays.sum_into(out, parts, scale, self.threads)


def unordered(values: Floats, order: U32 | None) -> Floats:
    """Puts values that a codec sorted back in the support's order."""
    if order is None:
        return values
    out: Floats = arrays.scatter(values, order)
    return out


def _codec(registry: Registry, number: int) -> Any:
    if number not in registry.by_id:
        known = ", ".join(f"{n} {c.name}" for n, c in sorted(registry.by_id.items()))
        raise ValueError(f"{registry.kind} codec {number} is unknown; this release knows {known}")
    return registry.by_id[number]


def decode_part(container: Container, numel: int, rank: int | None = None) -> tuple[U32 | None, Floats]:
    """The support (None: all elements) and the values of one container.

    Raises:
        ContainerError: where a codec is unknown or a section cannot be decoded.
    """
    try:
        if container.numel != numel:
            raise ValueError(f"it is of a tensor of {container.numel} elements, and {numel} are wanted")
        decoded = _decode(container)
        for name, section, used in (
            ("index", container.indices, container.index and not container.joint),
            ("order", container.order, not container.joint and not container.ordered),
        ):
            if section.size and not used:
                raise ValueError(f"its {name} section of {section.size} bytes is one that its header has no use for")
        return decoded
    except ValueError as error:
        sender = "the container" if rank is None else f"the container of rank {rank}"
        raise ContainerError(f"{sender} cannot be read: {error}") from None


def _decode(container: Container) -> tuple[U32 | None, Floats]:
    numel, count, key, dtype = container.numel, container.count, container.key, container.dtype
    dense = container.sparsifier == 0
    if dense and count != numel:
        raise ValueError(f"a dense container must hold all {numel} elements, and it holds {count}")
    if not dense:
        _codec(sparsifiers, container.sparsifier)
    support: U32 | None = None
    values: Floats
    if container.joint:
        joint = _codec(joint_codecs, container.value)
        support, values = joint.decode(container.values, numel, count, dense, dtype, key)
        return support, values
    value = _codec(value_codecs, container.value)
    if container.ordered:
        if dense or container.index != Packed.id:
            raise ValueError("indices in the values' order must be packed ones")
        unsorted = bits.unpack(container.indices, count, (numel - 1).bit_length(), np.uint32)
        support, places = sort.by_index(unsorted)
        bits.check_indices(support, numel)
        return support, arrays.gather(value.decode(container.values, count, support, dtype, key), places)
    if container.index:
        support = _codec(index_codecs, container.index).decode(container.indices, numel, count, key)
    elif not dense:
        support = _codec(sparsifiers, container.sparsifier).indices_of(numel, count, key, container.values)
    values = value.decode(container.values, count, support, dtype, key)
    if container.order.size:
        values = unordered(values, _order(container.order, count))
    return support, values


def _order(section: U8, count: int) -> U32:
    order: U32 = bits.unpack(section, count, (count - 1).bit_length(), np.uint32)
    bits.check_order(order)
    return order
