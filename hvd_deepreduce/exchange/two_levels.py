"""Dense sums inside a node, and one compressed slice of them for each rank between the nodes: ``hierarchical``.

1. The vector is divided into equally long slices, one for each rank of a node. *Alltoall inside the node*: every rank
   gets its slice of the others' gradients, and adds them up in rank order.
2. It compresses the sum of its node's slice, with a residual of that slice alone, and exchanges it with the rank that
   has the same slice on each other node: an allgather of containers, or ``exchange: reduce_scatter``.
3. *Allgather inside the node* of the dense sums of all slices.

So a node sends and receives between nodes what one rank would, however many ranks it has. The sum that is applied and
all ranks' residuals are together what came in.

A residual of elements outside of this rank's slice, as a loaded state or another division of the model may leave, goes
to the slice's rank in step 1 and into its residual. If a rank of the node refuses the vector, nobody takes it, and it
goes back to where it was held.

A rank that fails takes part in all collectives: it sends the text of its error in place of its elements, and who gets
one passes it on. Nobody waits, and all ranks of all nodes raise it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, Floats, RngKey
from hvd_deepreduce.exchange.balance import AllGather, AllToAll, Inside, equal_bounds
from hvd_deepreduce.exchange.failures import LEFT_BEHIND, FailureDeferring, LeftBehindError, error_in, told
from hvd_deepreduce.exchange.reduce_scatter import MAX_BYTES, DecodedSum, SlicedSum
from hvd_deepreduce.exchange.settings import ReduceScatter
from hvd_deepreduce.ops import arrays, deferred
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.pipeline.bundle import Slice
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire.standalone import ContainerError, named, refusal

STRIDE = 0x85EBCA77
"""Between the numbers of slices in keys. ``reduce_scatter`` divides a slice again, by another one."""


@dataclass(frozen=True)
class RankPosition:
    """Where a rank is.

    Attributes:
        rank: among all.
        node: the ranks of its node, in order.
        peers: the ranks with the same slice, one of each node.
    """

    rank: int
    node: tuple[int, ...]
    peers: tuple[int, ...]

    @property
    def inside(self) -> int:
        """Its number on its node."""
        return self.node.index(self.rank)

    @property
    def ranks(self) -> int:
        """Of its node."""
        return len(self.node)

    @property
    def across(self) -> int:
        """Its number among its peers."""
        return self.peers.index(self.rank)

    @property
    def nodes(self) -> int:
        """How many there are."""
        return len(self.peers)


@dataclass
class SliceResidual:
    """What error feedback holds for a vector.

    Attributes:
        slice: of this rank's slice, changed in place.
        rest: what was held elsewhere in the vector, ``[numel]``, with zeros in the slice; None: nothing.
        put_back: called with ``rest`` if no other rank takes it.
    """

    slice: Floats
    rest: Floats | None = None
    put_back: Callable[[Floats], None] = lambda rest: None


@dataclass
class TwoLevelSum(FailureDeferring):
    """One rank's part in the sum of a vector.

    Args:
        pipeline: of the job's config.
        place: of this rank.
        tensors: of the whole vector, without gaps: all of it, or one part after the other. Where a slice ends within
            one, each side is encoded by itself. The key's rank is not used.
        gradient: float32 or float64 ``[numel]``, unchanged until the end of ``steps``.
        residual: None: without error feedback.
        velocity: under a memory that has one.
        failures: what this rank has failed of so far, which all ranks are told.
    """

    pipeline: Pipeline
    place: RankPosition
    tensors: Sequence[Slice]
    gradient: Floats
    residual: SliceResidual | None = None
    velocity: SliceResidual | None = None
    failures: list[Exception] = field(default_factory=list)

    @property
    def part(self) -> tuple[int, int]:
        """Where this rank's slice begins and ends."""
        bounds = equal_bounds(self.gradient.size, self.place.ranks)
        return bounds[self.place.inside], bounds[self.place.inside + 1]

    def steps(self) -> Generator[AllToAll | AllGather | Inside, Any, DecodedSum]:
        """The program of this rank.

        Raises:
            ContainerError: a container cannot be decoded, or a rank has failed. Raised on all ranks.
        """
        place, gradient = self.place, self.gradient
        if not gradient.size:
            return DecodedSum([], self.pipeline.threads)
        if gradient.nbytes > MAX_BYTES:
            raise ContainerError(
                f"a bucket has {gradient.nbytes} bytes, and at most {MAX_BYTES} fit into one collective of the ranks "
                "of a node: set scope to 'bucket', and bucket_bytes lower"
            )
        data, splits = self._attempt((None, []), self._messages)
        if data is None:
            parts = [self._told(owner) for owner in range(place.ranks)]
            data, splits = arrays.concatenate(parts), [part.size for part in parts]
        received, sizes = yield Inside(AllToAll(data, splits))
        begin, end = self.part
        total = self._attempt(None, self._sum, received, sizes)
        del received, data
        if total is None:
            total = arrays.zeros(end - begin, gradient.dtype, gradient)
        if place.nodes == 1:
            self._attempt(None, self._send_all, total)
        elif end > begin:
            exchange = self.pipeline.config.exchange
            try:
                yield from self._in_slices(total) if isinstance(exchange, ReduceScatter) else self._gathered(total)
            except ContainerError as error:
                self._fail(error)
            except Exception as error:  # whatever it is, the ranks of the node are told, which would wait
                self._fail(LeftBehindError(f"rank {place.rank} {LEFT_BEHIND}: {type(error).__name__}: {error}"))
        gathered = yield Inside(
            AllGather(self._told(place.inside) if self.failures else total.view(np.uint8), last=True)
        )
        return DecodedSum([(0, gradient.size, (None, self._whole(gathered)))], self.pipeline.threads)

    # Inside the node

    def _width(self, owner: int) -> int:
        """Bytes of a slice."""
        bounds = equal_bounds(self.gradient.size, self.place.ranks)
        return (bounds[owner + 1] - bounds[owner]) * self.gradient.itemsize

    def _messages(self) -> tuple[U8, list[int]]:
        """What goes to the ranks of this node, and how many bytes to each: its slice of the gradient, and of the
        residual and the velocity where these are held here."""
        self._raise_failure()
        rests = [None if kept is None else kept.rest for kept in (self.residual, self.velocity)]
        sent = [self.gradient]
        if any(rest is not None for rest in rests):
            like = self.gradient
            sent += [arrays.zeros(like.size, like.dtype, like) if rest is None else rest for rest in rests]
        if sum(one.nbytes for one in sent) > MAX_BYTES:
            raise ContainerError(
                f"the vector has {self.gradient.nbytes} bytes, and at most {MAX_BYTES} fit into one alltoall: set "
                "scope to 'bucket'"
            )
        splits = [len(sent) * self._width(owner) for owner in range(self.place.ranks)]
        if len(sent) == 1:
            return self.gradient.view(np.uint8), splits
        bounds = equal_bounds(self.gradient.size, self.place.ranks)
        parts = [one[bounds[owner] : bounds[owner + 1]] for owner in range(self.place.ranks) for one in sent]
        return arrays.concatenate(parts).view(np.uint8), splits

    def _sum(self, received: U8, sizes: list[int]) -> Floats:
        """The sum of the node's slice. What others held of its residual and velocity is added to these."""
        begin, end = self.part
        numel, width = end - begin, self._width(self.place.inside)
        received = arrays.move_like(received, self.gradient)
        messages = [received[last - size : last] for size, last in zip(sizes, accumulate(sizes), strict=True)]
        odd = [sender for sender, size in enumerate(sizes) if size not in (width, 3 * width)]
        for sender in odd:
            error = error_in(messages[sender])
            if error is not None:  # the sender has told it to all ranks of the node: none of them comes further
                try:
                    self._put_back()
                finally:
                    raise error
        if odd:
            error = refusal(odd[0], f"it has {sizes[odd[0]]} bytes, and the slice has {width}")
            raise named(error, self.place.node)
        parts: list[Floats] = []
        for size, message in zip(sizes, messages, strict=True):
            vectors = message.view(self.gradient.dtype)
            parts.append(vectors[:numel])
            for at, kept in ((1, self.residual), (2, self.velocity)):
                if size > width and kept is not None:
                    arrays.add(kept.slice, vectors[at * numel : (at + 1) * numel], self.pipeline.threads)
        total: Floats = arrays.empty(numel, self.gradient.dtype, self.gradient)
        arrays.sum_into(total, [(None, part) for part in parts], 1.0, self.pipeline.threads)
        return total

    def _put_back(self) -> None:
        for kept in (self.residual, self.velocity):
            if kept is not None and kept.rest is not None:
                kept.put_back(kept.rest)

    def _whole(self, gathered: U8) -> Floats:
        """The slices of all ranks of the node."""
        gathered, at = arrays.move_like(gathered, self.gradient), 0
        for owner in range(self.place.ranks):
            error = error_in(gathered[at:])
            if error is not None:
                raise error
            at += self._width(owner)
        if at != gathered.size:
            ranks = ", ".join(map(str, self.place.node))
            raise ContainerError(f"the sums of ranks {ranks} have {gathered.size} bytes, and the vector has {at}")
        whole: Floats = gathered.view(self.gradient.dtype)
        return whole

    # Between nodes

    def _send_all(self, total: Floats) -> None:
        """On one node nothing is compressed: what waits is sent now."""
        if self.residual is not None and not self.failures and deferred.finite(total):
            arrays.add(total, self.residual.slice, self.pipeline.threads)
            self.residual.slice.fill(0)

    def _encoded(self) -> list[Slice]:
        """What of the tensors is in this rank's slice, with places in the slice, and keys of its own."""
        begin, end = self.part
        pieces = []
        for pipeline, (first, last), key in self.tensors:
            first, last = max(first, begin), min(last, end)
            if first < last:
                pieces.append(Slice(pipeline, (first - begin, last - begin), self._key(key)))
        return pieces

    def _key(self, key: RngKey) -> RngKey:
        number = (key.parameter + (self.place.inside + 1) * STRIDE) & 0xFFFFFFFF
        return key._replace(parameter=number, rank=self.place.across)

    def _gathered(self, total: Floats) -> Generator[AllGather, Any, None]:
        """Replaces the sum of this node's slice by that of all nodes, by an allgather of containers."""
        tensors = self._encoded()
        packed = self._attempt(None, self._packed, total, tensors)
        gathered = yield AllGather(self._told(None) if packed is None else packed)
        try:
            bundle.sum_into(total, gathered, self.place.nodes, tensors, 1.0)
        except ContainerError as error:
            raise self._told_in(gathered, total, tensors) or named(error, self.place.peers) from None

    def _packed(self, total: Floats, tensors: Sequence[Slice]) -> U8:
        self._raise_failure()
        residual, velocity = (None if kept is None else kept.slice for kept in (self.residual, self.velocity))
        packed = bundle.encode(total, residual, velocity, tensors, self.place.nodes, False)
        if packed.size > MAX_BYTES // self.place.nodes:
            raise ContainerError(
                f"rank {self.place.rank} has {packed.size} bytes of containers, and at most {MAX_BYTES} of all "
                f"{self.place.nodes} nodes fit into one allgather: set scope to 'bucket', or use a lower density"
            )
        return packed

    def _told_in(self, gathered: U8, like: Floats, tensors: Sequence[Slice]) -> ContainerError | None:
        """The error that a node has sent in place of its containers; None: there is none."""
        at = 0
        try:
            for node in range(self.place.nodes):
                error = error_in(gathered[at:])
                if error is not None:
                    return error
                for pipeline, (first, last), key in tensors:
                    expected = pipeline.expected(last - first, like.dtype, key)
                    at += frame.unpack(gathered[at:], expected, node)[1]
        except ContainerError:
            pass
        return None

    def _in_slices(self, total: Floats) -> Generator[AllToAll | AllGather, Any, None]:
        """As ``_gathered``, by ``exchange: reduce_scatter``."""
        config = self.pipeline.config
        tensors = self._encoded()
        residual = None if self.residual is None else self.residual.slice
        work = SlicedSum(
            self.pipeline, self.place.nodes, self._key(self.tensors[0][2]), total,
            residual=residual,
            keeps=residual,
            velocity=None if self.velocity is None else self.velocity.slice,
            parts=[part for _, part, _ in tensors] if config.selection == "tensor" else None,
            failures=self.failures,
            names=self.place.peers,
        )  # fmt: skip
        program = work.steps()
        answer = None
        while True:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                end.value.write(total, 1.0)
                return
            answer = yield asked._replace(last=False) if isinstance(asked, AllGather) else asked

    # Errors

    def _told(self, owner: int | None) -> U8:
        """This rank's first error, in place of the slice of ``owner`` (None: of containers)."""
        data = told(self.failures[0], self.place.rank)
        if owner is not None and data.size in (self._width(owner), 3 * self._width(owner)):
            data = np.append(data, np.uint8(0))  # never of a slice's size
        moved: U8 = arrays.move_like(data, self.gradient)
        return moved
