"""From one container to the support and the values that it holds; ``Pipeline`` adds up those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_deepreduce.codecs.index.packed import Packed
from hvd_deepreduce.codecs.index.raw import Raw
from hvd_deepreduce.codecs.interfaces import U32, Floats, index_codecs, joint_codecs, sparsifiers, value_codecs
from hvd_deepreduce.config import plugins
from hvd_deepreduce.ops import arrays, bits, sections, sort
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.standalone import Container

Together = tuple[U32 | None, Floats | None]
"""A container's support, and the values of a joint section, as far as they were decoded with those of other ranks."""


def unordered(values: Floats, order: U32 | None) -> Floats:
    """Values that a codec has sorted, back in the order of the support."""
    return values if order is None else arrays.scatter(values, order)


def decode_parts(containers: Sequence[Container], numel: int) -> list[tuple[U32 | None, Floats]]:
    """``decode_part`` of the containers of all ranks, in rank order. On a GPU, where checks are deferred, the sections
    that have the indices are decoded together."""
    together: Sequence[Together] = _decoded_together(containers, numel) or [(None, None)] * len(containers)
    return [
        decode_part(container, numel, rank, found)
        for rank, (container, found) in enumerate(zip(containers, together, strict=True))
    ]


def _decoded_together(containers: Sequence[Container], numel: int) -> list[Together] | None:
    """What a codec gives of all containers at once; None: they are not alike, or must be decoded one by one."""
    if not containers or not sections.at_once(containers[0].values):
        return None
    first = containers[0]
    alike = {
        (one.sparsifier, one.index, one.value, one.joint, one.ordered, one.numel, one.dtype, one.key)
        for one in containers
    }
    if len(alike) > 1 or first.ordered or first.numel != numel:
        return None
    counts = [one.count for one in containers]
    if first.joint and first.sparsifier:
        joint = joint_codecs.find(first.value, plugins.load)
        of_all: list[Together] = joint.decode_many(
            [one.values for one in containers], numel, counts, first.dtype, first.key
        )
        return of_all
    if first.index and not first.joint:
        index = index_codecs.find(first.index, plugins.load)
        supports = index.decode_many([one.indices for one in containers], numel, counts, first.key)
        return [(support, None) for support in supports]
    return None


def decode_part(
    container: Container, numel: int, rank: int | None = None, found: Together = (None, None)
) -> tuple[U32 | None, Floats]:
    """The support (``None``: all elements) and the values of one container.

    Args:
        container: of the tensor.
        numel: the elements that the tensor must have.
        rank: the sender, for errors.
        found: what was decoded of it before.

    Raises:
        ContainerError: a codec is unknown, or a section cannot be decoded.
    """
    try:
        if container.numel != numel:
            raise ValueError(f"its tensor has {container.numel} elements, and this one has {numel}")
        decoded = _decode(container, found)
        for name, section, used in (
            ("index", container.indices, container.index and not container.joint),
            ("order", container.order, not container.joint and not container.ordered),
        ):
            if section.size and not used:
                raise ValueError(f"it has an {name} section of {section.size} bytes that its header does not use")
        return decoded
    except ValueError as error:
        raise wire.refusal(rank, error) from None


def _decode(container: Container, found: Together) -> tuple[U32 | None, Floats]:
    support, decoded = found
    numel, count, key, dtype = container.numel, container.count, container.key, container.dtype
    dense = container.sparsifier == 0
    if dense and count != numel:
        raise ValueError(f"a dense container must hold all {numel} elements, and it holds {count}")
    if not dense:
        sparsifiers.find(container.sparsifier, plugins.load)
    values: Floats
    if decoded is not None:
        return support, decoded
    if container.joint:
        joint = joint_codecs.find(container.value, plugins.load)
        support, values = joint.decode(container.values, numel, count, dense, dtype, key)
        return support, values
    value = value_codecs.find(container.value, plugins.load)
    if container.ordered:
        widths = {Raw.id: 32, Packed.id: (numel - 1).bit_length()}
        if dense or container.index not in widths:
            raise ValueError("indices in the order of the values must be raw or packed")
        width = widths[container.index]
        support, places = sort.by_index(bits.unpack(container.indices, count, width, np.uint32), width)
        bits.check_indices(support, numel)
        values = value.decode(container.values, count, support, dtype, key)
        return support, arrays.gather(values, places)
    if container.index and support is None:
        support = index_codecs.find(container.index, plugins.load).decode(container.indices, numel, count, key)
    elif not container.index and not dense:
        sparsifier = sparsifiers.find(container.sparsifier)
        support = sparsifier.indices_of(numel, count, key, container.values)
    values = value.decode(container.values, count, support, dtype, key)
    if container.order.size:
        order: U32 = bits.unpack(container.order, count, (count - 1).bit_length(), np.uint32)
        bits.check_order(order)
        values = unordered(values, order)
    return support, values
