"""Each rank sums one slice of the vector, and encodes the sum again: ``exchange: reduce_scatter``.

1. The vector is divided into one slice for each rank, its owner: equally long ones, or with ``density`` such that all
   owners receive about as many elements (``balance.py``).
2. *Alltoall*: a rank selects from the whole vector, and sends each owner the container of its slice.
3. An owner decodes its slice's containers, adds them up in rank order, and encodes the sum with the same codecs; with
   ``density``, its elements of largest magnitude only, as many as any other owner. With ``round_sum``, a sum of
   bfloat16 or float16 gradients is rounded to that dtype first.
4. *Allgather*: all ranks get the slices' containers, and decode the same bytes.

What the second encoding loses is added to the owner's residual, where it is one more part of what this rank has not
sent. So the sum that is applied and all ranks' residuals are together what came in, as with the allgather of
containers. It is added once the result is there, and not where a rank has failed.

With P ranks that keep k elements each, a rank receives between k and P k elements by the alltoall, and the elements of
the sum by the allgather; with ``density`` 1.6 k at most, and ``density`` times the vector's. Every slice's container
has a header.

A rank that fails takes part in all collectives, so that nobody waits for it. It sends the text of its error in place of
containers; an owner that cannot read a container sends its own error in place of the sum. So all ranks raise the same.

Nothing here waits for other ranks: ``steps`` is a generator that asks for collectives (``balance.Steps``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, Parts, RngKey, Sparsifier
from hvd_deepreduce.codecs.sparsify.nonzero import NonZero
from hvd_deepreduce.codecs.sparsify.topk import TopK, kept_of
from hvd_deepreduce.codecs.value.raw import Raw
from hvd_deepreduce.exchange.balance import AllGather, AllToAll, balanced_bounds, equal_bounds, quotas
from hvd_deepreduce.exchange.failures import FailureDeferring, error_in, told
from hvd_deepreduce.exchange.settings import ReduceScatter
from hvd_deepreduce.exchange.short_slices import ShortSlices
from hvd_deepreduce.ops import arrays, deferred, groups, half, lossless, sections
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.pipeline.whole import Whole
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire.decoding import decode_part, decode_parts
from hvd_deepreduce.wire.standalone import Container, ContainerError, named, refusal

R = TypeVar("R")
Part = tuple[U32 | None, Floats]
"""Support (None: all elements) and values of a decoded container."""

NOTHING: U8 = np.empty(0, np.uint8)
MAX_BYTES = 2**31 - 1
"""Of one collective, in which libraries count with 32 bits."""
LARGEST = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127")}
"""The largest number of each dtype of 16 bits."""


@dataclass(frozen=True)
class DecodedSum:
    """The sum of all ranks' vectors, as all ranks have decoded it."""

    parts: list[tuple[int, int, Part]]
    threads: int

    def write(self, out: Floats, scale: float) -> None:
        """``out = scale * sum``; ``out`` is float32 or float64 ``[numel]``."""
        for begin, end, part in self.parts:
            arrays.sum_into(out[begin:end], [part], scale, self.threads)


@dataclass(frozen=True)
class CheckedSum:
    """As ``DecodedSum``, in containers of which the checksums are known to be right: they are decoded where they are
    needed, without an array of their own.

    Attributes:
        containers: of the slices of ``bounds``, as ``Whole.split`` has found them.
        decoded: the same sum, from codec to codec. It raises the error of a container that no encoder can have written.
    """

    containers: list[U8]
    bounds: list[int]
    decoded: Callable[[], DecodedSum]

    def write(self, out: Floats, scale: float) -> None:
        """``out = scale * sum``; ``out`` is float32 ``[numel]``.

        Raises:
            ContainerError: a container cannot be decoded; names its rank. A part of ``out`` was overwritten.
        """
        for (begin, end), container in zip(pairwise(self.bounds), self.containers, strict=True):
            if begin < end and not lossless.scaled(container, scale, out[begin:end]):
                self.decoded().write(out, scale)
                return


@dataclass
class SlicedSum(FailureDeferring):
    """One rank's part in the sum of a vector.

    Args:
        pipeline: of the job's config, whose exchange is a ``ReduceScatter``.
        ranks: of the job.
        key: of this rank, vector and step.
        gradient: float32 or float64 ``[numel]``, unchanged until the end of ``steps``.
        residual: as in ``Pipeline.encode``; None: this rank sends without error feedback.
        keeps: the residual that gets what this rank loses as an owner, which may be ``residual`` itself. None: that is
            lost.
        velocity: as in ``Pipeline.encode``.
        parts: slices to select from separately; None: select from the whole vector.
        finite: as in ``Pipeline.encode``.
        failures: what this rank has failed of so far, which all ranks are told.
        names: of all of these ranks, in errors; empty: 0, 1, ...
        half: the dtype to which ``round_sum`` rounds, ``"bfloat16"`` or ``"float16"``; None: the sum is not rounded.
    """

    pipeline: Pipeline
    ranks: int
    key: RngKey
    gradient: Floats
    residual: Floats | None = None
    keeps: Floats | None = None
    velocity: Floats | None = None
    parts: Parts | None = None
    finite: bool = False
    failures: list[Exception] = field(default_factory=list)
    names: Sequence[int] = ()
    half: str | None = None
    _bounds: list[int] = field(default_factory=list)
    _short: ShortSlices | None = None

    def steps(self) -> Generator[AllToAll | AllGather, Any, DecodedSum | CheckedSum]:
        """The program of this rank; with one rank it asks for nothing.

        Raises:
            ContainerError: a container cannot be decoded, or a rank has failed; names the rank. Raised on all ranks.
                The gradient has been added to the residual then, and what was sent subtracted, as with an allgather.
        """
        ranks, rank, gradient, pipeline = self.ranks, self.key.rank, self.gradient, self.pipeline
        exchange = pipeline.config.exchange
        assert isinstance(exchange, ReduceScatter)
        self._bounds = equal_bounds(gradient.size, ranks)
        self._short = ShortSlices.of(pipeline.config, gradient.size, ranks, self.key.step, gradient.dtype.itemsize)
        whole = self._attempt(None, self._whole)
        if whole is not None:
            received, sizes = yield AllToAll(*whole)
            del whole
            return (yield from self._sum_of_slices(received, sizes))
        corrected, selected = self._attempt((None, None), self._select)
        balances = exchange.density is not None or pipeline.config.memory.leaves_whole
        if balances and ranks > 1 and gradient.size:
            chosen = None if selected is None else selected[0]
            indices = NOTHING.view(np.uint32) if chosen is None else arrays.to_host(chosen)
            self._bounds = yield from balanced_bounds(indices, gradient.size, rank, ranks, self._fail)
        messages = self._attempt(None, self._encode, corrected, selected)
        if ranks == 1:
            self._raise_failure()
            assert messages is not None
            return self._decoded(messages[0], self._keys())
        if messages is not None:
            messages = self._attempt(None, self._shortened, messages, list(range(ranks)))
        if messages is None:
            messages = [self._told()] * ranks
        data = [message for message in messages if message.size]
        received, sizes = yield AllToAll(
            arrays.concatenate(data) if data else self._like(NOTHING), [message.size for message in messages]
        )
        del messages, data
        return (yield from self._sum_of_slices(received, sizes))

    def _sum_of_slices(
        self, received: U8, sizes: list[int]
    ) -> Generator[AllGather, Any, DecodedSum | CheckedSum]:
        """What follows the alltoall."""
        rank, ranks, gradient, pipeline = self.key.rank, self.ranks, self.gradient, self.pipeline
        packed, loss = self._attempt((None, None), self._sum, received, sizes)
        if packed is not None and not self.failures:
            packed = self._attempt([None], self._shortened, [packed], [rank])[0]
        most = (gradient.itemsize + 4) * gradient.size  # of all slices, with raw indices
        if packed is not None and packed.size > MAX_BYTES // ranks and most > MAX_BYTES:
            self._fail(
                ContainerError(
                    f"rank {self._name} has {packed.size} bytes of the sum of its slice, and at most {MAX_BYTES} of "
                    f"all {ranks} ranks fit into one allgather: set scope to 'bucket', or use a lower density"
                )
            )
        del received
        gathered = yield AllGather(self._told() if packed is None or self.failures else packed, last=True)
        total = self._checked(gathered) or self._decoded_sum(gathered)
        if loss is not None and self.keeps is not None:
            begin, end = self._slice(rank)
            arrays.add(self.keeps[begin:end], loss, pipeline.threads)
        return total

    # DecodedSum and keys

    def _slice(self, owner: int) -> tuple[int, int]:
        return self._bounds[owner], self._bounds[owner + 1]

    def _keys(self, second: bool = False) -> list[RngKey]:
        """Of each slice's containers: random numbers, and a checksum, of its own. What all ranks draw alike is the same
        in the second encoding, and its rounding is another."""
        seed, parameter, step, rank = self.key
        numbers = [(parameter + owner * 0x9E3779B1) & 0xFFFFFFFF for owner in range(1, self.ranks + 1)]
        return [RngKey(seed, number, step, rank + self.ranks * second) for number in numbers]

    def _shortened(self, messages: list[U8], owners: list[int]) -> list[U8]:
        """The containers of these owners' slices, as they travel."""
        if self._short is None:
            return messages
        whole = arrays.to_host(arrays.concatenate(messages))
        ends = np.cumsum([message.size for message in messages]).tolist()
        short, keys = [], self._keys()
        for message, last, owner in zip(messages, ends, owners, strict=True):
            begin, end = self._slice(owner)
            expected = self.pipeline.expected(end - begin, self.gradient.dtype, keys[owner])
            data = self._short.shorten(whole[last - message.size : last], expected) if begin < end else b""
            short.append(self._like(np.frombuffer(bytearray(data), np.uint8)))
        return short

    def _lengthened(
        self, data: U8, sizes: list[int] | None, expected: list[frame.Expected], ranks: list[int]
    ) -> tuple[U8, list[int]]:
        """The containers that have travelled, one of each of ``ranks``; and their sizes.

        Args:
            sizes: as they came; None: they are not known, and what follows is left as it is.

        Raises:
            ContainerError: one has no such form; or a rank tells an error.
        """
        if self._short is None:
            return data, sizes or []
        memory, at, long = arrays.to_host(data).tobytes(), 0, []
        ends = [len(memory)] * len(ranks) if sizes is None else np.cumsum(sizes).tolist()
        for one, rank, end in zip(expected, ranks, ends, strict=True):
            if not one.numel and at == end:  # nothing is sent of an empty slice
                long.append(b"")
                continue
            try:
                found, at = self._short.lengthen(memory[:end], at, one, rank)
            except ContainerError:
                if sizes is None:  # what an earlier rank has sent too much may have passed for this one's begin
                    for before, expecting, sender in zip(long, expected, ranks, strict=False):
                        _unpacked(np.frombuffer(before, np.uint8), expecting, sender)
                raise
            error = error_in(np.frombuffer(found, np.uint8))
            if error is not None:
                raise error
            if sizes is not None and at != end:
                raise refusal(rank, f"{end - at} bytes follow it")
            long.append(found)
        rest = self._short.taken_as_it_is(memory, at)
        return self._like(np.frombuffer(bytearray(b"".join([*long, rest])), np.uint8)), [len(one) for one in long]

    # Dense vectors without loss

    @property
    def _native(self) -> Whole | None:
        """The native calls that this vector takes; None: none."""
        takes = self.ranks > 1 and self.residual is None and self.keeps is None and self._short is None
        return self.pipeline.whole if takes and Whole.takes(self.gradient) else None

    def _whole(self) -> tuple[U8, list[int]] | None:
        """The containers of all slices, and their sizes; None: they are to be encoded from codec to codec."""
        if self._native is None or self.failures:
            return None
        packed = self._native.encode(self.gradient, self._bounds, self._keys())
        return None if packed is None or packed[0].size > MAX_BYTES else packed

    def _checked(self, gathered: U8) -> CheckedSum | None:
        """The sum of all slices; None: it is to be decoded from codec to codec."""
        if self._native is None:
            return None
        keys = self._keys(second=True)
        found = self._native.split(gathered, [end - begin for begin, end in pairwise(self._bounds)], keys)
        return None if found is None else CheckedSum(found, self._bounds, partial(self._decoded_sum, gathered))

    def _decoded_sum(self, gathered: U8) -> DecodedSum:
        """The sum of all slices, from codec to codec."""
        try:
            return self._decoded(gathered, self._keys(second=True))
        except ContainerError as error:
            raise self._named(error) from None

    # A rank's own vector

    def _select(self) -> tuple[Floats | None, tuple[U32 | None, Floats] | None]:
        """The velocity's next state, and what to send (None: the gradient is not finite)."""
        pipeline = self.pipeline
        corrected, gradient, advance = pipeline.corrected(
            self.gradient, self.velocity, self.residual, self.key.step, self.ranks
        )
        parts, keys = self.parts, None
        if self._draws:
            parts, keys = list(pairwise(self._bounds)), self._keys()
            filled = [(part, key) for part, key in zip(parts, keys, strict=True) if part[0] < part[1]]
            parts, keys = [part for part, _ in filled], [key for _, key in filled]
        if not gradient.size:
            return corrected, (None, gradient.copy())
        return corrected, pipeline.select(
            gradient, self.residual, self.key, parts, self.finite, keys, advance=advance
        )

    @property
    def _draws(self) -> bool:
        """Whether receivers repeat the choice of indices, which is then one in each slice."""
        config = self.pipeline.config
        return config.sparsifier.shared_randomness and config.index is None and config.joint is None

    def _encode(self, corrected: Floats | None, selected: tuple[U32 | None, Floats] | None) -> list[U8]:
        """The containers of all slices; empty for an empty slice."""
        self._raise_failure()
        pipeline, gradient = self.pipeline, self.gradient
        if selected is None:
            keys = self._keys()
            messages = [
                pipeline.encode_uncompressed(gradient[begin:end], key, 2) if begin < end else NOTHING
                for (begin, end), key in zip(pairwise(self._bounds), keys, strict=True)
            ]
        else:
            indices, values = selected
            places = self._bounds if indices is None else arrays.places(indices, self._bounds)
            with deferred.encoding_slices(gradient, self.ranks):
                messages = self._encode_slices(corrected, indices, values, places)
        size = sum(message.size for message in messages)
        if size > MAX_BYTES:
            raise ContainerError(
                f"rank {self._name} has {size} bytes of containers, and at most {MAX_BYTES} fit into one alltoall: "
                "set scope to 'bucket', or use a lower density"
            )
        return messages

    def _encode_slices(
        self, corrected: Floats | None, indices: U32 | None, values: Floats, places: list[int]
    ) -> list[U8]:
        """The containers of what is selected; of a slice, from its place to the next one's."""
        pipeline, keys, bounds = self.pipeline, self._keys(), list(pairwise(self._bounds))
        numels = [end - begin for begin, end in bounds]
        filled = [owner for owner, numel in enumerate(numels) if numel]
        own: dict[int, U32 | None] = dict.fromkeys(filled)
        encoded: dict[int, tuple[U8, U32] | None] = dict.fromkeys(filled)
        if indices is not None:
            lists = [
                arrays.offset(indices[places[owner] : places[owner + 1]], -bounds[owner][0] & 0xFFFFFFFF)
                for owner in filled
            ]
            of_lists = [numels[owner] for owner in filled], [keys[owner] for owner in filled]
            own.update(zip(filled, lists, strict=True))
            encoded.update(zip(filled, pipeline.encode_indices(lists, *of_lists), strict=True))
        messages: list[U8] = [NOTHING] * len(bounds)
        for owner in filled:
            begin, end = bounds[owner]
            residual = None if self.residual is None else self.residual[begin:end]
            messages[owner], support = pipeline.encode_selected(
                self.gradient[begin:end], residual, own[owner], values[places[owner] : places[owner + 1]], keys[owner],
                encoded[owner],
            )  # fmt: skip
            if self.velocity is not None and corrected is not None:
                pipeline.keep_velocity(self.velocity[begin:end], corrected[begin:end], support)
        return messages

    # The sum of this rank's slice

    def _sum(self, received: U8, sizes: list[int]) -> tuple[U8 | None, Floats | None]:
        """The container of the sum of this rank's slice, and what it loses (None: nothing, or it is not kept)."""
        rank, pipeline = self.key.rank, self.pipeline
        begin, end = self._slice(rank)
        numel, dtype = end - begin, self.gradient.dtype
        if self._native is not None:
            packed = self._native.encode_sum(received, sizes, numel, self._keys()[rank], self._half)
            if packed is not None:
                return packed, None
        expected = pipeline.expected(numel, dtype, self._keys()[rank])
        with deferred.reading(self.gradient):
            received = arrays.move_like(received, self.gradient)
            everyone = list(range(self.ranks))
            received, sizes = self._lengthened(received, sizes, [expected] * self.ranks, everyone)

            def unpack() -> list[Container]:
                if numel and sections.at_once(received):
                    of_all = frame.split(received, self.ranks, [expected])[0]
                    if [frame.size(one, expected.shared) for one in of_all] != sizes:
                        raise ContainerError("a container has another size than was announced")
                    return of_all
                ends = np.cumsum(sizes).tolist()
                return [
                    _unpacked(received[end - size : end], expected, sender)
                    for sender, (size, end) in enumerate(zip(sizes, ends, strict=True))
                    if numel or size
                ]

            containers = deferred.run_deferred(received, unpack)
            if not numel:
                return self._like(NOTHING), None
            total = arrays.empty(numel, dtype, self.gradient)
            arrays.sum_into(total, _decode(containers, numel, received), 1.0, pipeline.threads)
        key = self._keys(second=True)[rank]
        if any(_is_uncompressed(container) for container in containers):
            return pipeline.encode_uncompressed(total, key, 2), None
        kept = self.keeps is not None and not pipeline.config.memory.leaves_whole
        loss = arrays.zeros(numel, dtype, total) if kept else None
        exact, total = total, self._rounded(total)
        packed = pipeline.encode(total, loss, key, 2, sparsifier=self._second_sparsifier(numel))
        if loss is not None and total is not exact:
            arrays.subtract_sent(exact, None, total)
            arrays.add(loss, exact, pipeline.threads)
        return packed, loss

    def _rounded(self, total: Floats) -> Floats:
        """The sum of a slice, rounded under ``round_sum``. A sum beyond the range of the dtype stays as it is: its mean
        may be within, and if not, a loss scaler must see an infinity."""
        if self._half is None or not deferred.finite(total, self.pipeline.threads):
            return total
        largest = arrays.to_host(groups.norms(total, total.size, False))[0]
        if largest > LARGEST[self._half]:
            return total
        return half.decode(half.encode(total, self._half == "bfloat16"), total.size)

    @property
    def _half(self) -> str | None:
        """The dtype to which the sum is rounded."""
        exchange = self.pipeline.config.exchange
        assert isinstance(exchange, ReduceScatter)
        return self.half if exchange.round_sum else None

    def _second_sparsifier(self, numel: int) -> Sparsifier | None:
        """What selects from the sum of a slice; None: the config's, which sends all or repeats its choice."""
        config, gradient = self.pipeline.config, self.gradient
        assert isinstance(config.exchange, ReduceScatter)
        if config.exchange.density is not None:
            kept = kept_of(config.exchange.density, gradient.size)
            return TopK(density=quotas(self._bounds, kept)[self.key.rank] / numel)
        return None if config.sparsifier.sends_all or self._draws else NonZero()

    # The sum of all slices

    def _decoded(self, gathered: U8, keys: list[RngKey]) -> DecodedSum:
        """All slices' containers, in the order of their owners."""
        pipeline, dtype = self.pipeline, self.gradient.dtype
        slices = list(pairwise(self._bounds))
        with deferred.reading(self.gradient):
            gathered = arrays.move_like(gathered, self.gradient)
            filled = [owner for owner, (begin, end) in enumerate(slices) if begin < end]
            numels = [slices[owner][1] - slices[owner][0] for owner in filled]
            all_expected = [
                pipeline.expected(numel, dtype, keys[owner]) for numel, owner in zip(numels, filled, strict=True)
            ]
            if self.ranks > 1:
                gathered, _ = self._lengthened(gathered, None, all_expected, filled)

            def unpack() -> list[tuple[int, int, int, Container]]:
                unpacked: list[tuple[int, int, int, Container]] = []
                at = 0
                if numels and sections.at_once(gathered):
                    of_slices = frame.split(gathered, 1, all_expected)
                    return [(*slices[owner], owner, one) for owner, (one,) in zip(filled, of_slices, strict=True)]
                for owner, (begin, end) in enumerate(slices):
                    if begin < end:
                        expected = pipeline.expected(end - begin, dtype, keys[owner])
                        container = _unpacked(gathered[at:], expected, owner, alone=False)
                        unpacked.append((begin, end, owner, container))
                        at += frame.size(container, expected.shared)
                if at != gathered.size:
                    raise error_in(gathered[at:]) or refusal(
                        filled[-1] if filled else 0, f"{gathered.size - at} bytes follow it, which is the last"
                    )
                return unpacked

            containers = deferred.run_deferred(gathered, unpack)

            def decode() -> list[tuple[int, int, Part]]:
                return [
                    (begin, end, decode_part(container, end - begin, owner))
                    for begin, end, owner, container in containers
                ]

            return DecodedSum(deferred.run_deferred(gathered, decode), pipeline.threads)

    # Errors

    @property
    def _name(self) -> int:
        """This rank in errors."""
        return self.names[self.key.rank] if self.names else self.key.rank

    def _named(self, error: Exception) -> Exception:
        return named(error, self.names) if self.names and isinstance(error, ContainerError) else error

    def _fail(self, error: Exception) -> None:
        super()._fail(self._named(error))

    def _told(self) -> U8:
        """This rank's first error, in place of a container."""
        data = told(self.failures[0], self._name)
        if self._short is not None:
            data = np.frombuffer(bytearray(self._short.as_it_is(data.tobytes())), np.uint8)
        return self._like(data)

    def _like(self, data: U8) -> U8:
        moved: U8 = arrays.move_like(data, self.gradient)
        return moved


def _is_uncompressed(container: Container) -> bool:
    """Whether all elements were sent as they are, as of a gradient that is not finite."""
    return not (container.sparsifier or container.joint or container.index) and container.value == Raw.id


def _decode(containers: list[Container], numel: int, data: U8) -> list[Part]:
    return deferred.run_deferred(data, lambda: decode_parts(containers, numel))


def _unpacked(message: U8, expected: frame.Expected, rank: int, alone: bool = True) -> Container:
    """The container at the begin of ``message``; ``alone``: nothing follows it.

    Raises:
        ContainerError: it cannot be read, or it is an error that the sender tells.
    """
    try:
        container, size = frame.unpack(message, expected, rank)
    except ContainerError as error:
        raise error_in(message) or error from None
    if alone and size != message.size:
        raise refusal(rank, f"{message.size - size} bytes follow it")
    return container
