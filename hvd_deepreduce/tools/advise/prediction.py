"""Predicts the time of a training step: with dense gradients, with gradients in 16 bits, and under a config.

The model of a step, in seconds:

- A rank computes for ``Job.compute``. Gradients become ready at a constant rate during the last ``Job.backward`` of it,
  the last tensors first, and travel in buckets.
- The link carries one bucket after the other, each in the time that ``exchange/costs.py`` predicts.
- A processor encodes a bucket before it is sent, and decodes the containers of all ranks afterwards. It also spends
  time on each byte that it sends and receives (``Link.cpu``). Where a rank has a core that its computing leaves free,
  this happens beside the backward pass. Elsewhere it makes the step longer, and only waiting for the link overlaps.
- Local updates are exchanged between two steps, with nothing beside them but steps that a ``delay`` grants.

How fast the machine and its codecs are is measured (``speeds.py``); nothing here is fitted to a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from hvd_deepreduce.config import Config
from hvd_deepreduce.exchange import costs
from hvd_deepreduce.exchange.costs import Link, Transfer
from hvd_deepreduce.exchange.settings import AllGather, ExchangeSettings, ReduceScatter

BACKWARD = 2 / 3
"""Share of computing during which gradients become ready: the backward pass takes twice as long as the forward pass."""
TENSOR_OVERHEAD = 25e-6
"""Seconds that Horovod or DDP takes for each tensor of a step, about: hooks, names, bookkeeping."""
COMPRESSED_OVERHEAD = 3
"""Times as much with compression: 45 us in all with DDP's hook, 100 us with Horovod (docs/results/benchmarks.md)."""
GRADIENT_COPIES, UPDATE_COPIES = 1, 6
"""Copies of the model beside codecs and transfers; a copy reads a word and writes one. Gradients are copied into their
buckets. An exchange of updates makes the update (2 words read, 1 written, and its fresh memory cleared), checks it (1),
copies it into the bucket (1, 1), takes the outer step (2, 1) and writes the parameters (1, 1)."""
DENSE = "dense"
FP16 = "fp16"
LOCAL = "no exchange"


class NotPredictedError(ValueError):
    """The model does not cover a config."""


@dataclass(frozen=True)
class Job:
    """What is trained, and on what.

    Attributes:
        sizes: elements of the model's tensors, float32, in the model's order.
        ranks: in all.
        per_host: ranks on each host, which share its link.
        compute: seconds of a step without any exchange.
        backward: share of ``compute`` during which gradients become ready.
        free_core: whether each rank has a core that its computing leaves free.
        sharing: how many ranks share one core, at least 1: what takes one rank a second on a core of its own takes
            this many seconds, if all ranks do it at the same time.
        tensor_overhead: seconds of a core that the framework takes for each tensor of a dense step.
        bucket_bytes: of the gradients that travel together.
    """

    sizes: Sequence[int]
    ranks: int
    per_host: int = 1
    compute: float = 0.0
    backward: float = BACKWARD
    free_core: bool = False
    sharing: float = 1.0
    tensor_overhead: float = TENSOR_OVERHEAD
    bucket_bytes: int = 25 << 20

    @property
    def numel(self) -> int:
        """Elements of the model."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Machine:
    """Measured by ``speeds.machine``, with all ranks of a host at work.

    Attributes:
        copy: seconds to copy a byte.
        half: seconds to convert an element to 16 bits and back.
    """

    copy: float
    half: float


@dataclass(frozen=True)
class CodecSpeed:
    """Of a config, on a vector of a model's size. Measured by ``speeds.codec``, with all ranks of a host at work.

    Attributes:
        encode: seconds to accumulate, select, encode, and subtract what is sent.
        decode: seconds to write the sum, without any container.
        decode_each: seconds more for each container that is decoded and added.
        size: bytes of the vector's containers.
        kept: elements that are sent.
    """

    encode: float
    decode: float
    decode_each: float
    size: float
    kept: int


class Part(NamedTuple):
    """A bucket on its way.

    Attributes:
        ready: share of the model that is in this bucket and in those before it.
        before, after: processor seconds before and after its transfer.
        transfer: of what is sent.
    """

    ready: float
    before: float
    transfer: Transfer
    after: float


@dataclass(frozen=True)
class Prediction:
    """Of one way to exchange.

    Attributes:
        name: ``DENSE``, ``FP16``, ``LOCAL`` or a config's.
        updates: whether ranks exchange updates of the model in place of gradients.
        seconds: of a step; with ``updates``, the mean over the steps of a period.
        codec: of these, what encoding and decoding would take by themselves.
        link: of these, what the transfers would take by themselves.
        received: bytes that come over a host's link, in a step.
        every: local steps between two exchanges.
        votes: whether ranks exchange signs for the optimizer ``SignMomentum``.
        whole: whether it selects from the whole model.
    """

    name: str
    updates: bool
    seconds: float
    codec: float = 0.0
    link: float = 0.0
    received: float = 0.0
    every: int = 1
    votes: bool = False
    whole: bool = False


def buckets(sizes: Sequence[int], most: int | None) -> list[int]:
    """Elements of each bucket, in the order in which they become full: the last tensors come first.

    Args:
        most: bytes from which on a bucket is full; None: one bucket.
    """
    found, held = [], 0
    for size in reversed(sizes):
        held += size
        if most is not None and 4 * held >= most:
            found.append(held)
            held = 0
    return [*found, held] if held else found


def seconds_of(job: Job, parts: Sequence[Part], overhead: float = 0.0) -> float:
    """The time of a step whose buckets are exchanged during its backward pass.

    Args:
        overhead: seconds that are spent like computing.
    """
    compute = job.compute + overhead
    encoded = sent = decoded = work = 0.0
    for part in parts:
        ready = compute * (1 - job.backward * (1 - part.ready))
        # Without a free core, what was encoded before has made the backward pass longer by as much.
        encoded = (max(ready, encoded) if job.free_core else ready + work) + part.before
        work += part.before
        sent = max(encoded, sent) + part.transfer.seconds
        decoded = max(sent, decoded) + part.after
    if job.free_core:
        return max(compute, decoded)
    return max(compute + sum(part.before + part.transfer.stack + part.after for part in parts), decoded)


def _parts(job: Job, sizes: Sequence[int], bucket: Callable[[int], tuple[float, Transfer, float]]) -> list[Part]:
    """Buckets of so many elements each."""
    return [Part(end / job.numel, *bucket(size)) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _dense(job: Job, link: Link, machine: Machine, half: bool, size: int) -> tuple[float, Transfer, float]:
    """A bucket of so many elements, uncompressed."""
    used = link if not half or link.cpu_half is None else replace(link, cpu=link.cpu_half)
    cast = size * machine.half / 2 if half else 0.0
    return cast, costs.dense(job.ranks, size).transfer(used, 2 if half else 4, 1.0, job.sharing), cast


def _compressed(
    job: Job, exchange: ExchangeSettings, link: Link, speed: CodecSpeed, size: int
) -> tuple[float, Transfer, float]:
    """A bucket of so many elements, in containers."""
    ranks, share = job.ranks, size / job.numel
    encode, write, each = (share * seconds for seconds in (speed.encode, speed.decode, speed.decode_each))
    supports = costs.Supports(size, share * speed.kept)
    after = write + ranks * each
    if isinstance(exchange, ReduceScatter):
        # A rank adds up all ranks' parts of its slice, encodes this sum, and decodes all slices of the sum.
        of_sum = min(supports.union(ranks), costs.sent_of_sum(exchange, size))
        after = write / ranks + each + encode / ranks + write + each * of_sum / supports.kept
    cost, crossing = costs.expected(exchange, ranks, supports), costs.crossing(ranks, job.per_host)
    return encode, cost.transfer(link, speed.size / speed.kept, crossing, job.sharing), after


def _prediction(name: str, seconds: float, parts: Iterable[Part], every: int = 1, updates: bool = False) -> Prediction:
    codec = sum(part.before + part.after for part in parts) / every
    transfers = [part.transfer for part in parts]
    waits, received = sum(one.seconds for one in transfers), sum(one.received for one in transfers)
    return Prediction(name, updates, seconds, codec, waits / every, received / every, every)


def overhead(job: Job, machine: Machine, compressed: bool, copies: int = GRADIENT_COPIES) -> float:
    """Seconds that an exchange takes beside codecs and transfers: for the tensors, and for copies of the model."""
    tensors = (COMPRESSED_OVERHEAD if compressed else 1) * job.tensor_overhead * len(job.sizes)
    return job.sharing * tensors + 4 * copies * job.numel * machine.copy


def local(job: Job) -> Prediction:
    """A step without an exchange, which none can beat."""
    return Prediction(LOCAL, False, job.compute)


def dense(job: Job, link: Link, machine: Machine, half: bool = False) -> Prediction:
    """Allreduces of whole gradients, in float32 or (``half``) in 16 bits, on two ranks or more."""
    parts = _parts(job, buckets(job.sizes, job.bucket_bytes), partial(_dense, job, link, machine, half))
    seconds = seconds_of(job, parts, overhead(job, machine, False))
    return _prediction(FP16 if half else DENSE, seconds, parts)


def computing(job: Job, link: Link, machine: Machine, seconds: float) -> float:
    """The ``compute`` with which a dense step takes so many seconds; 0 if its exchange alone takes longer."""
    least, most = 0.0, seconds
    for _ in range(60):
        middle = (least + most) / 2
        if dense(replace(job, compute=middle), link, machine).seconds < seconds:
            least = middle
        else:
            most = middle
    return least


def check(config: Config, job: Job) -> None:
    """
    Raises:
        NotPredictedError: the config's exchange is not modelled, or it has two levels.
    """
    if config.hierarchical is not False and (config.hierarchical != "auto" or 1 < job.per_host < job.ranks):
        raise NotPredictedError("exchanges at two levels (hierarchical) are not predicted")
    if not isinstance(config.exchange, AllGather | ReduceScatter):
        raise NotPredictedError(
            f"the exchange is {config.exchange.name!r}; only allgather and reduce_scatter are predicted"
        )


def compressed(name: str, config: Config, job: Job, link: Link, machine: Machine, speed: CodecSpeed) -> Prediction:
    """A step under a config, of gradients or of local updates, on two ranks or more.

    Raises:
        NotPredictedError: as ``check``.
    """
    check(config, job)
    sizes = buckets(job.sizes, None if config.scope == "model" else job.bucket_bytes)
    plan = config.local
    if plan is not None and config.sends_all_as_it_is:  # they go through an allreduce
        parts = _parts(job, sizes, partial(_dense, job, link, machine, False))
    else:
        parts = _parts(job, sizes, partial(_compressed, job, config.exchange, link, speed))
    if plan is None:
        found = _prediction(name, seconds_of(job, parts, overhead(job, machine, True)), parts)
        return replace(found, votes=config.memory.leaves_whole, whole=config.scope == "model")
    # An exchange follows a step, with nothing beside it; with a delay, its transfer has the steps of the delay.
    alone = seconds_of(replace(job, compute=0.0), parts)
    if plan.delay:
        waits = sum(part.transfer.seconds - part.transfer.stack * (not job.free_core) for part in parts)
        alone -= min(waits, plan.fragments * plan.delay * job.compute)
    seconds = alone + overhead(job, machine, True, UPDATE_COPIES)
    return _prediction(name, job.compute + seconds / plan.every, parts, plan.every, updates=True)


def best(predictions: Iterable[Prediction]) -> Prediction:
    """The fastest of those that exchange gradients."""
    exchanged = [one for one in predictions if not one.updates and one.name != LOCAL]
    return min(exchanged, key=lambda one: one.seconds)
