"""Gradient to container, and containers to summed gradient. No framework, and no communication.

Arrays are NumPy's or, on a GPU, CuPy's; all work happens on the device of the arrays that are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from hvd_deepreduce.codecs.index.packed import Packed
from hvd_deepreduce.codecs.interfaces import (
    U8,
    U32,
    Floats,
    IndexCodec,
    Parts,
    RngKey,
    Sparsifier,
    index_codecs,
    joint_codecs,
    sparsifiers,
    value_codecs,
)
from hvd_deepreduce.codecs.sparse_tensor import MAX_NUMEL, SparseTensor
from hvd_deepreduce.codecs.value.raw import Raw
from hvd_deepreduce.config.error_feedback import DGC
from hvd_deepreduce.config.settings import Config
from hvd_deepreduce.ops import arrays, bits, deferred, momentum, sparse
from hvd_deepreduce.ops.library import NonFiniteError
from hvd_deepreduce.pipeline.fused import Fused
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part, decode_parts, unordered
from hvd_deepreduce.wire.standalone import Container, ContainerError

R = TypeVar("R")
EMPTY: U8 = np.empty(0, np.uint8)


@dataclass(frozen=True)
class _Source:
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
    def dense(cls, gradient: Floats, residual: Floats | None) -> _Source:
        elements = gradient if residual is None else residual
        return cls(gradient.size, gradient.dtype, residual, lambda indices: arrays.gather(elements, indices))

    @classmethod
    def sparse(cls, gradient: SparseTensor, residual: Floats | None) -> _Source:
        if residual is not None:
            return cls(gradient.numel, residual.dtype, residual, lambda indices: arrays.gather(residual, indices))
        support, values = gradient.indices, gradient.values
        return cls(gradient.numel, values.dtype, None, lambda indices: sparse.at(support, values, indices))


class Pipeline:
    """One rank's encoder and decoder under one config.

    Args:
        config: the job's settings.
        threads: threads of the CPU kernels, if the config does not set them.
    """

    def __init__(self, config: Config, threads: int = 1) -> None:
        self.config = config
        self.threads = config.threads or threads
        self._estimates: dict[tuple[int, np.dtype[Any]], int] = {}
        self._value_under_feedback = config.value and config.value.under_feedback()
        self._index_ids = () if config.index is None else tuple(codec.id for codec in config.index.choices)
        if config.index is not None and len(self._index_ids) > frame.MAX_CHOICES:
            raise ValueError(
                f"the index codec {config.index.name!r} has {len(self._index_ids)} choices, and a container can name "
                f"{frame.MAX_CHOICES}: offer fewer"
            )
        codec, sorts = config.joint or config.value, config.value is not None and config.value.sorts
        self._in_order = config.index is not None and sorts and not config.force_index
        self._few_nonzeros: set[int] = set()
        self.shared = frame.Shared(
            config.digest(), config.sparsifier.id, self._index_ids, codec.id if codec else 0, config.joint is not None,
            sorts, self._in_order,
        )  # fmt: skip
        self.fused = Fused.of(config, self.shared, self.threads)
        """The native calls in place of this pipeline's codecs, where there are some."""

    def encode(
        self,
        gradient: Floats,
        residual: Floats | None,
        key: RngKey,
        version: Literal[1, 2] = 1,
        velocity: Floats | None = None,
        ranks: int = 1,
        finite: bool = False,
        sparsifier: Sparsifier | None = None,
    ) -> U8:
        """The container of a gradient. The gradient is added to the residual, and what is sent is subtracted from it.

        Args:
            gradient: float32 or float64 ``[numel]``, contiguous. It does not change.
            residual: same dtype and size, changed in place; ``None``: no error feedback.
            key: of this rank, parameter and step.
            version: of the container. 1 stands alone: ``container.unpack`` reads it without a config. 2 is shorter, and
                is read by ``frame.unpack`` of a process that knows the config, the tensor and the step.
            velocity: as ``residual``, changed in place, for the memory ``dgc``; ``None``: the gradient has no momentum.
            ranks: of the job, for that memory's clipping.
            finite: whether the gradient is known to be finite; otherwise this is found out.
            sparsifier: selects, in place of the config's; it sends indices where the config's does.

        Returns:
            The container, uint8. A gradient with NaN or infinity is sent uncompressed, so that every rank sees it,
            and leaves the residual and the velocity unchanged.

        Raises:
            ContainerError: the gradient has more than 2^32 - 1 elements. Nothing has changed then.
        """
        if self.fused is not None and version == 2:
            try:
                packed = self.fused.encode(gradient, residual, key, self.shared.digest, finite, sparsifier)
            except NonFiniteError:
                return self.encode_uncompressed(gradient, key, version)
            if packed is not None:
                return packed
        finite = finite and velocity is None  # finite numbers can have an infinite sum
        corrected, gradient = self.corrected(gradient, velocity, ranks)

        def use(indices: U32 | None, values: Floats) -> U8:
            container, support = self._encoded(_Source.dense(gradient, residual), indices, values, key)
            if velocity is not None and corrected is not None:
                momentum.keep(velocity, corrected, support)
            return self._pack(container, version)

        try:
            return self._selecting(gradient, residual, key, None, use, finite, sparsifier)
        except NonFiniteError:
            return self.encode_uncompressed(gradient, key, version)

    def encode_uncompressed(self, gradient: Floats, key: RngKey, version: Literal[1, 2] = 1) -> U8:
        """The container of all elements as they are: what ``encode`` makes of a gradient that is not finite."""
        section, _ = Raw().encode(gradient, None, key)
        source = _Source.dense(gradient, None)
        return self._pack(self._container(source, None, key, index=0, value=Raw.id, values=section), version)

    def corrected(self, gradient: Floats, velocity: Floats | None, ranks: int) -> tuple[Floats | None, Floats]:
        """Under the memory ``dgc``: the next velocity, and what the residual gets in place of the gradient. Without a
        velocity: None, and the gradient."""
        memory = self.config.memory
        if velocity is None or not isinstance(memory, DGC):
            return None, gradient
        scale = 1.0
        if memory.clip is not None:
            scale = momentum.clip_scale(gradient, memory.clip / ranks**0.5, self.threads)
        return momentum.correct(velocity, gradient, memory.momentum, scale, memory.nesterov, self.threads)

    def encode_indices(
        self, lists: Sequence[U32], numels: Sequence[int], keys: Sequence[RngKey]
    ) -> list[tuple[U8, U32] | None]:
        """The index sections and the supports of several slices, for ``encode_selected``. On a GPU, with some codecs,
        the host waits for all together. ``None``: ``encode_selected`` must encode them.

        Args:
            lists, numels, keys: of each slice, as for ``encode_selected``.
        """
        index = self.config.index
        if index is None or self._in_order or tuple(index.choices) != (index,):
            return [None] * len(lists)
        return list(index.encode_many(lists, numels, keys))

    def encode_selected(
        self,
        gradient: Floats,
        residual: Floats | None,
        indices: U32 | None,
        values: Floats,
        key: RngKey,
        encoded: tuple[U8, U32] | None = None,
    ) -> tuple[U8, U32 | None]:
        """The container of version 2 of what ``select`` has selected, and its support (``None``: all elements).

        Args:
            gradient, residual: as ``select`` has left them, or one slice of each, ``[numel]``. What is sent is
                subtracted from the residual.
            indices, values: of this slice; the indices count from its begin.
            encoded: of ``encode_indices``.
        """
        container, support = self._encoded(_Source.dense(gradient, residual), indices, values, key, encoded)
        return self._pack(container, 2), support

    def encode_sparse(
        self,
        gradient: SparseTensor,
        residual: Floats | None,
        key: RngKey,
        version: Literal[1, 2] = 1,
    ) -> U8:
        """The container of a gradient that is sparse from the data on; on the host. Nothing dense is made.

        Without a residual it is the container that ``encode`` returns for the dense gradient. With one, the gradient is
        added to the residual at its own indices, and only these are selected from, so that a step does not pass over
        the residual: what was left of other elements waits until a gradient has them again. Of a Bloom filter's false
        positives the residual's values are sent, as ever.

        A gradient with NaN or infinity is made dense and sent as by ``encode``. The index codecs ``bitmap`` and
        ``bloom`` and the joint codec ``three_lc`` take time, or memory, for each element of the dense vector.

        Args:
            gradient: of values float32 or float64.
            residual: same dtype, dense, ``[numel]``, changed in place; ``None``: no error feedback.
            key, version: as for ``encode``.

        Raises:
            ValueError: the sparsifier cannot select from a sparse gradient, the memory is ``dgc``, or the residual is
                that of another gradient.
        """
        sparsifier, threads = self.config.sparsifier_at(key.step), self.threads
        if not sparsifier.selects_sparse:
            able = sorted(name for name, one in sparsifiers.by_name.items() if getattr(one, "selects_sparse", False))
            raise ValueError(
                f"the sparsifier is {sparsifier.name!r}, which cannot select from a sparse gradient, as it does not go "
                f"by the magnitudes of its elements alone: use one of {', '.join(able)}"
            )
        if isinstance(self.config.memory, DGC):
            raise ValueError(
                "the memory is 'dgc', whose velocity is dense, and the gradient is sparse: use the memory 'residual'"
            )
        indices, values = np.ascontiguousarray(gradient.indices), np.ascontiguousarray(gradient.values)
        if residual is not None and (residual.size, residual.dtype) != (gradient.numel, values.dtype):
            raise ValueError(
                f"the residual is {residual.dtype} [{residual.size}], and the gradient {values.dtype} "
                f"[{gradient.numel}]: give the residual of this gradient"
            )
        try:
            with deferred.encoding(values, residual, threads):
                if residual is not None:
                    values = sparse.accumulate_at(residual, indices, values)
                indices, values = sparsifier.select_sparse(indices, values, gradient.numel, key, threads)
                container, _ = self._encoded(_Source.sparse(gradient, residual), indices, values, key)
                return self._pack(container, version)
        except NonFiniteError:
            return self.encode(gradient.dense(), residual, key, version)

    def _encoded(
        self,
        source: _Source,
        indices: U32 | None,
        values: Floats,
        key: RngKey,
        encoded: tuple[U8, U32] | None = None,
    ) -> tuple[Container, U32 | None]:
        if self.config.joint is not None:
            return self._encode_joint(source, indices, values, key)
        return self._encode_separately(source, indices, values, key, encoded)

    def _pack(self, container: Container, version: int) -> U8:
        return wire.pack(container) if version == 1 else frame.pack(container, self.shared)

    def select(
        self,
        gradient: Floats,
        residual: Floats | None,
        key: RngKey,
        parts: Parts | None = None,
        finite: bool = False,
        keys: Sequence[RngKey] | None = None,
    ) -> tuple[U32 | None, Floats] | None:
        """What to send of a gradient, for an exchange that encodes by itself. The gradient is added to the residual.

        Args:
            gradient, residual, key, finite: as for ``encode``.
            parts: slices to select from separately; ``None``: select from the whole gradient.
            keys: of the parts; ``None``: they all have ``key``.

        Returns:
            Sorted indices (``None``: all elements) and finite values. ``None`` if the gradient contains NaN or
            infinity; the residual is then unchanged.
        """
        try:
            return self._selecting(
                gradient, residual, key, parts, lambda indices, values: (indices, values), finite, keys=keys
            )
        except NonFiniteError:
            return None

    def _selecting(
        self,
        gradient: Floats,
        residual: Floats | None,
        key: RngKey,
        parts: Parts | None,
        use: Callable[[U32 | None, Floats], R],
        finite: bool,
        sparsifier: Sparsifier | None = None,
        keys: Sequence[RngKey] | None = None,
    ) -> R:
        """``use(indices, values)`` of what is selected.

        Raises:
            ContainerError: as ``encode``.
            NonFiniteError: the gradient is not finite.
        """
        if gradient.size > MAX_NUMEL:
            raise ContainerError(
                f"the gradient has {gradient.size} elements, and at most 2^32 - 1 are allowed: split the parameter"
            )
        dense, added = (gradient, None) if residual is None else (residual, gradient)
        while True:
            try:
                # A parameter that once had too few nonzero elements often does, as an embedding: its gradients' nonzero
                # elements are then counted first.
                exact = key.parameter in self._few_nonzeros
                with deferred.encoding(gradient, residual, self.threads, exact, finite):
                    indices, values = self._select(dense, added, key, parts, sparsifier, keys)
                    deferred.end_selection()
                    return use(indices, values)
            except deferred.FewerNonzerosError:
                self._few_nonzeros.add(key.parameter)
                added = None  # the residual has it

    def _select(
        self,
        dense: Floats,
        added: Floats | None,
        key: RngKey,
        parts: Parts | None,
        sparsifier: Sparsifier | None,
        keys: Sequence[RngKey] | None,
    ) -> tuple[U32 | None, Floats]:
        select, threads = (sparsifier or self.config.sparsifier_at(key.step)).select, self.threads
        if parts is None:
            return select(dense, added, key, threads)
        selected = [
            select(dense[i:j], None if added is None else added[i:j], of_part, threads)
            for (i, j), of_part in zip(parts, keys or [key] * len(parts), strict=True)
        ]
        values = arrays.concatenate([of_part for _, of_part in selected])
        indices = [
            arrays.offset(of_part, begin)
            for (begin, _), (of_part, _) in zip(parts, selected, strict=True)
            if of_part is not None
        ]
        return arrays.concatenate(indices) if len(indices) == len(selected) else None, values

    def _encode_joint(
        self, source: _Source, indices: U32 | None, values: Floats, key: RngKey
    ) -> tuple[Container, U32 | None]:
        joint, numel = self.config.joint, source.numel
        assert joint is not None
        section, support = joint.encode_from(source.at, indices, values, numel, key)
        if source.residual is not None:
            sent = joint.decode_own(section, numel, support, source.dtype, key)
            arrays.subtract_sent(source.residual, support, sent)
        container = self._container(source, support, key, index=0, value=joint.id, values=section, joint=True)
        return container, support

    def _encode_separately(
        self,
        source: _Source,
        indices: U32 | None,
        values: Floats,
        key: RngKey,
        encoded: tuple[U8, U32] | None = None,
    ) -> tuple[Container, U32 | None]:
        numel, residual = source.numel, source.residual
        value = self.config.value if residual is None else self._value_under_feedback
        assert value is not None
        index_id, index_section, support, ordered = 0, EMPTY, indices, False
        if indices is not None and self.config.index is not None:
            index = self._resolved(self.config.index, indices, numel)
            encoded = encoded or self._encoded_index(index, indices, numel, key)
            if encoded is None:
                index_id, ordered = Packed.id, True
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
            decoded = value.decode(section, values.size, support, source.dtype, key)
            arrays.subtract_sent(residual, support, unordered(decoded, order))
        order_section = EMPTY
        if ordered and support is not None:
            in_order = support if order is None else arrays.gather(support, order)
            index_section = bits.pack(in_order, (numel - 1).bit_length())
        elif order is not None:
            order_section = bits.pack(order, (order.size - 1).bit_length())
        container = self._container(
            source, support, key, index=index_id, value=value.id, indices=index_section, values=section,
            order=order_section, ordered=ordered,
        )  # fmt: skip
        return container, support

    def _resolved(self, index: IndexCodec, indices: U32, numel: int) -> IndexCodec:
        resolved = index.resolve(indices, numel)
        if resolved.id not in self._index_ids:
            raise ValueError(
                f"the index codec {index.name!r} resolved to {resolved.name!r}, which is not among its choices, so "
                "every receiver would refuse the container: add it to the codec's property 'choices'"
            )
        return resolved

    def _encoded_index(self, index: IndexCodec, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32] | None:
        """The index section and the support; ``None`` if packed indices in the order of the values take fewer bytes.

        Packed indices in that order need no order section: log2 d bits an element. A code of the set and an order
        section of log2 r bits need log2 C(d, r) + log2 r! in all, just below r log2 d. A support other than the
        selection loses elements or has useless ones, so it must save bytes.
        """
        count = indices.size
        if not self._in_order or count == 0:
            return index.encode(indices, numel, key)
        in_order = bits.packed_bytes(count, (numel - 1).bit_length())
        if in_order < index.least_bytes(count) + _order_bytes(count):
            return None
        section, support = index.encode(indices, numel, key)
        size = section.size + _order_bytes(support.size)
        return None if in_order < size or (in_order == size and support is not indices) else (section, support)

    def _container(
        self,
        source: _Source,
        support: U32 | None,
        key: RngKey,
        *,
        index: int,
        value: int,
        values: U8,
        indices: U8 = EMPTY,
        order: U8 = EMPTY,
        joint: bool = False,
        ordered: bool = False,
    ) -> Container:
        return Container(
            sparsifier=0 if support is None else self.config.sparsifier.id,
            index=index,
            value=value,
            dtype=source.dtype,
            numel=source.numel,
            count=source.numel if support is None else support.size,
            key=key,
            digest=self.shared.digest,
            indices=indices,
            values=values,
            order=order,
            joint=joint,
            ordered=ordered,
        )

    def estimate(self, numel: int, dtype: np.dtype[Any]) -> int:
        """Bytes of a container of version 2 of ``numel`` elements; the same on all ranks.

        Those of a container of fixed numbers. So ``threshold`` and ``nonzero``, which select by magnitude, count as if
        they sent nearly all elements. With a schedule, the density is that after its end.
        """
        place = numel, dtype
        size = self._estimates.get(place)
        if size is None:
            fractions = np.arange(1, numel + 1, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
            numbers = (fractions / 2**31 - 1).astype(dtype) ** 3
            step = self.config.density_schedule.end if self.config.density_schedule else 0
            size = self._estimates[place] = Pipeline(self.config).encode(numbers, None, RngKey(0, 0, step), 2).size
        return size

    def unpack(self, gathered: U8, ranks: int, numel: int, dtype: np.dtype[Any], key: RngKey) -> list[Container]:
        """The containers of version 2 that an allgather returned, in rank order.

        Args:
            gathered: uint8, the containers of all ranks without gaps.
            ranks: how many there must be.
            numel, dtype, key: of the tensor that they must be of.

        Raises:
            ContainerError: they are cut or altered, or of another tensor, step or config; names the rank.
        """
        return frame.split(gathered, ranks, [self.expected(numel, dtype, key)])[0]

    def expected(self, numel: int, dtype: np.dtype[Any], key: RngKey) -> frame.Expected:
        """The tensor of which a receiver expects containers."""
        return frame.Expected(self.shared, numel, dtype, key)

    def decode(
        self, containers: Sequence[Container], out: Floats, scale: float = 1.0, key: RngKey | None = None
    ) -> None:
        """``out = scale * (sum of the containers, in their order)``.

        Args:
            containers: of tensors with the number of elements of ``out``, in rank order. Without ``key``, ``out`` may
                be float64 where they are float32.
            out: float32 or float64 ``[numel]``, contiguous, overwritten.
            scale: factor of the sum.
            key: of this parameter and step. Containers with another dtype, seed, parameter or step are refused then,
                and those that this config cannot give: only its codecs are run on bytes of other ranks. ``None``: any
                container of any codec is decoded.

        Raises:
            ContainerError: a container is refused or cannot be decoded; names its rank. ``out`` is then unchanged.
        """
        self._refuse_foreign(containers, out.dtype, key)
        parts = deferred.run_deferred(out, lambda: decode_parts(containers, out.size))
        arrays.sum_into(out, parts, scale, self.threads)

    def decode_sparse(
        self,
        containers: Sequence[Container],
        numel: int,
        dtype: np.dtype[Any],
        scale: float = 1.0,
        key: RngKey | None = None,
    ) -> SparseTensor:
        """``scale * (sum of the containers, in their order)`` as a sparse vector; on the host. No dense one is made.

        Its support is the union of those of the containers, so a sum of 0 can be among its values. They are those that
        ``decode`` gives. Of a container that holds all elements, those that are not 0 count.

        Args:
            containers, scale, key: as for ``decode``.
            numel, dtype: of the sum.

        Raises:
            ContainerError: as ``decode``.
        """
        self._refuse_foreign(containers, dtype, key)
        parts = []
        for rank, container in enumerate(containers):
            support, values = decode_part(container, numel, rank)
            if support is None:
                support = np.flatnonzero(values).astype(np.uint32)
                values = values[support]
            parts.append((support, values))
        return SparseTensor(numel, *sparse.total(parts, dtype, scale))

    def _refuse_foreign(self, containers: Sequence[Container], dtype: np.dtype[Any], key: RngKey | None) -> None:
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
        config = self.config
        index, sparsifier, joint = container.index, container.sparsifier, container.joint
        if not (index or sparsifier or joint or container.ordered) and container.value == Raw.id:
            return None  # all elements, uncompressed: what is sent of a gradient that is not finite
        codec = config.joint or config.value
        indices = ((Packed.id,) if self._in_order else ()) if container.ordered else self._index_ids or (0,)
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
