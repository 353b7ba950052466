"""Gradient to container, and containers to summed gradient. No framework, and no communication.

Arrays are NumPy's or, on a GPU, CuPy's; all work happens on the device of the arrays that are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, Parts, RngKey, Sparsifier, sparsifiers
from hvd_deepreduce.codecs.sparse_tensor import MAX_NUMEL, SparseTensor
from hvd_deepreduce.codecs.sparsify.topk import TopK, kept_of
from hvd_deepreduce.config.error_feedback import DGC, ScaledMomentum
from hvd_deepreduce.config.settings import Config
from hvd_deepreduce.ops import arrays, deferred, momentum, select, sparse
from hvd_deepreduce.ops.device import on_device_of
from hvd_deepreduce.ops.library import NonFiniteError
from hvd_deepreduce.ops.pieces import Pieces
from hvd_deepreduce.pipeline.composed import Composed, Source
from hvd_deepreduce.pipeline.fused import Fused
from hvd_deepreduce.pipeline.recorded import Recorded
from hvd_deepreduce.pipeline.whole import Whole
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part, decode_parts
from hvd_deepreduce.wire.standalone import Container, ContainerError

R = TypeVar("R")


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
        self.composed = Composed(config)
        self.shared = self.composed.shared
        """What this pipeline's containers have in common."""
        self._few_nonzeros: set[int] = set()
        self.fused = Fused.of(config, self.shared, self.threads)
        """The native calls in place of this pipeline's codecs, where there are some."""
        self.whole = Whole.of(config, self.shared)
        """The native calls for slices of dense vectors, where there are some."""
        self._recorded = Recorded.of(config, self.shared)

    def encode(
        self,
        gradient: Floats | Pieces,
        residual: Floats | None,
        key: RngKey,
        version: Literal[1, 2] = 1,
        velocity: Floats | None = None,
        ranks: int = 1,
        finite: bool = False,
        sparsifier: Sparsifier | None = None,
        into: Floats | None = None,
    ) -> U8:
        """The container of a gradient. The gradient is added to the residual, and what is sent is subtracted from it.

        Args:
            gradient: float32 or float64 ``[numel]``, contiguous. It does not change.
            residual: same dtype and size, changed in place; ``None``: no error feedback.
            key: of this rank, parameter and step.
            version: of the container. 1 stands alone: ``wire.standalone.unpack`` reads it without a config. 2 is
                shorter, and is read by ``frame.unpack`` of a process that knows the config, the tensor and the step.
            velocity: as ``residual``, changed in place, for the memories ``dgc`` and ``scaled_momentum``; ``None``: the
                gradient has no momentum.
            ranks: of the job, for the clipping of ``dgc``.
            finite: whether the gradient is known to be finite; otherwise this is found out.
            sparsifier: selects, in place of the config's; it sends indices where the config's does.
            into: as ``residual``, on the host, and memory apart from it and from the gradient: what becomes of the
                residual is written there, and the residual does not change.

        Returns:
            The container, uint8. A gradient with NaN or infinity is sent uncompressed, so that every rank sees it,
            and leaves the residual and the velocity unchanged.

        Raises:
            ContainerError: the gradient has more than 2^32 - 1 elements. Nothing has changed then.
            ValueError: the residual is that of another gradient.
        """
        if residual is not None and (residual.size != gradient.size or residual.dtype != gradient.dtype):
            _check_size(gradient.size)
            raise _other_residual(residual, gradient.size, gradient.dtype)
        if self.fused is not None and version == 2:
            try:
                packed = self.fused.encode(gradient, residual, key, self.shared.digest, finite, sparsifier, into)
            except NonFiniteError:
                if into is not None:
                    into[:] = residual
                return self.encode_uncompressed(_one_array(gradient), key, version)
            if packed is not None:
                return packed
        gradient = _one_array(gradient)
        if into is not None:
            into[:] = residual
            residual = into
        corrected, to_add, advance = self.corrected(gradient, velocity, residual, key.step, ranks)

        def use(indices: U32 | None, values: Floats) -> U8:
            container, support = self.composed.encode(Source.dense(to_add, residual), indices, values, key)
            if velocity is not None and corrected is not None:
                self.keep_velocity(velocity, corrected, support)
            return self._pack(container, version)

        added = False
        try:
            if version == 2 and self._recorded is not None and type(to_add) is not np.ndarray:
                try:
                    recorded = self._encode_recorded(self._recorded, to_add, residual, key, finite, sparsifier)
                    if recorded is not None:
                        if velocity is not None and corrected is not None:
                            self.keep_velocity(velocity, corrected, recorded[1])
                        return recorded[0]
                except deferred.FewerNonzerosError:
                    self._few_nonzeros.add(key.parameter)
                    added = residual is not None
            return self._selecting(to_add, residual, key, use, finite, sparsifier, added=added, advance=advance)
        except NonFiniteError:  # the gradient as it was given, so that a GPU sends what a host does
            return self.encode_uncompressed(gradient, key, version)

    def _encode_recorded(
        self,
        recorded: Recorded,
        gradient: Floats,
        residual: Floats | None,
        key: RngKey,
        finite: bool,
        sparsifier: Sparsifier | None,
    ) -> tuple[U8, U32] | None:
        """As ``Recorded.encode``."""
        if key.parameter in self._few_nonzeros:
            return None
        salt = frame.salt(self.shared.digest, gradient.size, gradient.dtype, key)
        with on_device_of(gradient):
            return recorded.encode(
                gradient, residual, key, salt, finite, sparsifier or self.config.sparsifier_at(key.step)
            )

    def takes_fused(self, dtype: np.dtype[Any]) -> bool:
        """Whether ``encode`` is a native call for gradients of this dtype on the host, and ``into`` costs nothing."""
        return self.fused is not None and self.fused.encodes and dtype == np.float32

    def selects_elsewhere(self, dtype: np.dtype[Any]) -> bool:
        """Whether ``select`` takes ``into`` for gradients of this dtype on the host."""
        sparsifier = self.config.sparsifier
        return (
            type(sparsifier) is TopK
            and sparsifier.density_of == "elements"
            and dtype == np.float32
            and not self.config.has_velocity
        )

    def encode_uncompressed(self, gradient: Floats, key: RngKey, version: Literal[1, 2] = 1) -> U8:
        """The container of all elements as they are: what ``encode`` makes of a gradient that is not finite."""
        return self._pack(self.composed.uncompressed(gradient, key), version)

    def corrected(
        self, gradient: Floats, velocity: Floats | None, residual: Floats | None, step: int, ranks: int
    ) -> tuple[Floats | None, Floats, Callable[[], None] | None]:
        """The next velocity, and what the residual gets in place of the gradient. Without a velocity: None, and the
        gradient.

        Args:
            step: of the parameter, from 0 on.

        Returns:
            These; and on the host, with a residual, the velocity itself and the gradient, and a function that changes
            the velocity and the residual in place, for ``select``.
        """
        memory, scale, in_place = self.config.memory, 1.0, residual is not None and type(gradient) is np.ndarray
        if velocity is None:
            return None, gradient, None
        if isinstance(memory, ScaledMomentum) and residual is not None:
            if memory.clip is not None:
                scale = momentum.clip_scale(gradient, memory.clip, self.threads)
            scaling = memory.beta2, step + 1, memory.decay, memory.eps, scale, self.threads
            squares = velocity, gradient, residual, *scaling
            if in_place:
                return velocity, gradient, partial(momentum.advance_squares, *squares)
            return *momentum.scaled(*squares), None
        if not isinstance(memory, DGC):
            return None, gradient, None
        if memory.clip is not None:
            scale = momentum.clip_scale(gradient, memory.clip / ranks**0.5, self.threads)
        settings = memory.momentum, scale, memory.nesterov, self.threads
        if in_place:
            assert residual is not None
            return velocity, gradient, partial(momentum.advance_velocity, velocity, gradient, residual, *settings)
        return *momentum.correct(velocity, gradient, *settings), None

    def keep_velocity(self, velocity: Floats, corrected: Floats, support: U32 | None) -> None:
        """``velocity`` becomes ``corrected``, of which the elements that were sent start again.

        Args:
            support: of what was sent; None: all elements.
        """
        if self.config.memory.leaves_whole:  # its mean square goes on, also of elements that are sent
            support = arrays.empty(0, np.uint32, velocity)
        momentum.keep(velocity, corrected, support)

    def encode_indices(
        self, lists: Sequence[U32], numels: Sequence[int], keys: Sequence[RngKey]
    ) -> list[tuple[U8, U32] | None]:
        """The index sections and the supports of several slices, for ``encode_selected``. On a GPU, with some codecs,
        the host waits for all together. ``None``: ``encode_selected`` must encode them.

        Args:
            lists, numels, keys: of each slice, as for ``encode_selected``.
        """
        index = self.config.index
        if index is None or self.composed.ordered or tuple(index.choices) != (index,):
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
        container, support = self.composed.encode(Source.dense(gradient, residual), indices, values, key, encoded)
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
            ValueError: the sparsifier cannot select from a sparse gradient, the memory has a velocity, or the
                residual is that of another gradient.
        """
        sparsifier, threads = self.config.sparsifier_at(key.step), self.threads
        if not sparsifier.selects_sparse:
            able = sorted(name for name, one in sparsifiers.by_name.items() if getattr(one, "selects_sparse", False))
            raise ValueError(
                f"the sparsifier is {sparsifier.name!r}, which cannot select from a sparse gradient, as it does not go "
                f"by the magnitudes of its elements alone: use one of {', '.join(able)}"
            )
        memory = self.config.memory
        if memory.has_velocity:
            raise ValueError(
                f"the memory is {memory.name!r}, whose velocity is dense, and the gradient is sparse: use the memory "
                "'residual'"
            )
        indices, values = np.ascontiguousarray(gradient.indices), np.ascontiguousarray(gradient.values)
        if residual is not None and (residual.size, residual.dtype) != (gradient.numel, values.dtype):
            raise _other_residual(residual, gradient.numel, values.dtype)
        try:
            with deferred.encoding(values, residual, threads):
                if residual is not None:
                    values = sparse.accumulate_at(residual, indices, values)
                indices, values = sparsifier.select_sparse(indices, values, gradient.numel, key, threads)
                container, _ = self.composed.encode(Source.sparse(gradient, residual), indices, values, key)
                return self._pack(container, version)
        except NonFiniteError:
            return self.encode(gradient.dense(), residual, key, version)

    def _pack(self, container: Container, version: int) -> U8:
        return wire.pack(container) if version == 1 else frame.pack(container, self.shared)

    def select(
        self,
        gradient: Floats | Pieces,
        residual: Floats | None,
        key: RngKey,
        parts: Parts | None = None,
        finite: bool = False,
        keys: Sequence[RngKey] | None = None,
        into: Floats | None = None,
        advance: Callable[[], None] | None = None,
    ) -> tuple[U32 | None, Floats] | None:
        """What to send of a gradient, for an exchange that encodes by itself. The gradient is added to the residual.

        Args:
            gradient, residual, key, finite: as for ``encode``. Only with ``into`` it can be in pieces.
            parts: slices to select from separately; ``None``: select from the whole gradient.
            keys: of the parts; ``None``: they all have ``key``.
            into: as for ``encode``, where ``selects_elsewhere``.
            advance: of ``corrected``; called if the gradient is finite, in place of adding it to the residual.

        Returns:
            Sorted indices (``None``: all elements) and finite values. ``None`` if the gradient contains NaN or
            infinity; the residual is then unchanged.
        """
        try:
            if into is not None:
                assert residual is not None
                try:
                    return self._select_into(gradient, residual, into, key, parts or [(0, residual.size)], finite)
                except NonFiniteError:
                    into[:] = residual
                    raise
            assert not isinstance(gradient, Pieces)
            return self._selecting(
                gradient, residual, key, lambda indices, values: (indices, values), finite, None, parts, keys,
                advance=advance,
            )  # fmt: skip
        except NonFiniteError:
            return None

    def _select_into(
        self, gradient: Floats | Pieces, residual: Floats, into: Floats, key: RngKey, parts: Parts, finite: bool
    ) -> tuple[U32 | None, Floats]:
        _check_size(gradient.size)
        sparsifier = self.config.sparsifier_at(key.step)
        assert isinstance(sparsifier, TopK)
        selected: list[tuple[U32 | None, Floats]] = []
        for begin, end in parts:
            of_part = gradient.part(begin, end) if isinstance(gradient, Pieces) else gradient[begin:end]
            kept = kept_of(sparsifier.density, end - begin)
            selected.append(
                select.topk_into(residual[begin:end], of_part, into[begin:end], kept, finite, self.threads)
            )
        return selected[0] if len(parts) == 1 else _joined(parts, selected)

    def _selecting(
        self,
        gradient: Floats,
        residual: Floats | None,
        key: RngKey,
        use: Callable[[U32 | None, Floats], R],
        finite: bool,
        sparsifier: Sparsifier | None = None,
        parts: Parts | None = None,
        keys: Sequence[RngKey] | None = None,
        added: bool = False,
        advance: Callable[[], None] | None = None,
    ) -> R:
        """``use(indices, values)`` of what is selected.

        Args:
            added: whether the residual has the gradient already.
            advance: as for ``select``.

        Raises:
            ContainerError: as ``encode``.
            NonFiniteError: the gradient is not finite.
        """
        _check_size(gradient.size)
        select_from, threads = (sparsifier or self.config.sparsifier_at(key.step)).select, self.threads
        dense, to_add = (gradient, None) if residual is None else (residual, None if added else gradient)
        while True:
            try:
                # A parameter that once had too few nonzero elements often does, as an embedding: its gradients' nonzero
                # elements are then counted first.
                exact = key.parameter in self._few_nonzeros
                with deferred.encoding(gradient, residual, threads, exact, finite):
                    if advance is not None:
                        advance()
                        to_add = None
                    if parts is None:
                        indices, values = select_from(dense, to_add, key, threads)
                    else:
                        indices, values = _joined(parts, [
                            select_from(dense[i:j], None if to_add is None else to_add[i:j], of_part, threads)
                            for (i, j), of_part in zip(parts, keys or [key] * len(parts), strict=True)
                        ])  # fmt: skip
                    deferred.end_selection()
                    return use(indices, values)
            except deferred.FewerNonzerosError:
                self._few_nonzeros.add(key.parameter)
                to_add = None  # the residual has it

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
        self.composed.refuse_foreign(containers, out.dtype, key)
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
        self.composed.refuse_foreign(containers, dtype, key)
        parts = []
        for rank, container in enumerate(containers):
            support, values = decode_part(container, numel, rank)
            if support is None:
                support = np.flatnonzero(values).astype(np.uint32)
                values = values[support]
            parts.append((support, values))
        return SparseTensor(numel, *sparse.total(parts, dtype, scale))


def _other_residual(residual: Floats, numel: int, dtype: np.dtype[Any]) -> ValueError:
    return ValueError(
        f"the residual is {residual.dtype} [{residual.size}], and the gradient {dtype} [{numel}]: give the residual of "
        "this gradient"
    )


def _check_size(numel: int) -> None:
    if numel > MAX_NUMEL:
        raise ContainerError(
            f"the gradient has {numel} elements, and at most 2^32 - 1 are allowed: split the parameter"
        )


def _one_array(gradient: Floats | Pieces) -> Floats:
    return gradient.joined() if isinstance(gradient, Pieces) else gradient


def _joined(parts: Parts, selected: Sequence[tuple[U32 | None, Floats]]) -> tuple[U32 | None, Floats]:
    """What was selected from slices, as one selection."""
    values = arrays.concatenate([of_part for _, of_part in selected])
    indices = [
        arrays.offset(of_part, begin)
        for (begin, _), (of_part, _) in zip(parts, selected, strict=True)
        if of_part is not None
    ]
    return arrays.concatenate(indices) if len(indices) == len(selected) else None, values
