"""The operations of a step on flat arrays; the package's docstring gives the call sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, Floats, RngKey
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import adaptive, small, step_check
from hvd_deepreduce.engine.agreement import Agreement, Descriptions
from hvd_deepreduce.engine.buckets import Bucket
from hvd_deepreduce.engine.dense_or_compressed import Choice
from hvd_deepreduce.engine.parameter import Parameter
from hvd_deepreduce.engine.rank_state import RankState
from hvd_deepreduce.engine.stats import Report
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.allgather import AllgatherExchange
from hvd_deepreduce.exchange.autotune import choose
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.exchange.dense import DenseExchange
from hvd_deepreduce.exchange.interface import Exchange
from hvd_deepreduce.exchange.settings import AutoExchange
from hvd_deepreduce.exchange.statements import MismatchError
from hvd_deepreduce.ops import arrays, deferred
from hvd_deepreduce.ops.dispatch import on_host
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.pipeline.bundle import Slice
from hvd_deepreduce.wire import frame

_log = logging.getLogger("hvd_deepreduce")
_STEP = attrgetter("step")
_DENSE = DenseExchange()
_warn_once = lru_cache(_log.warning)
FEW = 16
"""So many tensors may be encoded by themselves on a GPU without a warning."""
ALONE = (
    "each gradient on the GPU is encoded and decoded by itself, since %s is 'tensor'. That takes the host 0.2 to "
    "0.9 ms for each in a step, whatever its size, as long as for a bucket of many. Set scope to 'bucket', without "
    "selection, overrides and min_elements (docs/limits.md, GPUs)"
)


class _Plan(NamedTuple):
    """What is found out about a bucket once, for all steps under one config.

    Attributes:
        generation: the engine's.
        whole: the part of the bucket's one container; None: each member has a container.
        default: the pipeline of that container.
        pipelines: of the members.
        feeds_back: whether any has error feedback.
        has_velocity: whether any has one.
        exchange: the engine's.
        in_one_pass: whether all that is sent is made by native calls that add the gradient to a residual.
    """

    generation: int
    whole: tuple[int, int] | None
    default: Pipeline
    pipelines: list[Pipeline]
    feeds_back: bool
    has_velocity: bool
    exchange: Exchange
    in_one_pass: bool


class Engine(RankState):
    """One rank's compression: its settings and state (``RankState``), and the operations of a step.

    ``encode`` and ``start`` may run at the same time as ``decode`` and ``receive`` on other threads, and any of them at
    the same time for different parameters. Everything else is for one thread at a time.

    Args:
        config, collectives, parameters, names: as for ``RankState``.

    Attributes:
        auto_over_mpi: whether ``exchange: auto`` may choose an exchange over MPI. An adapter that must know of it
            before the ranks are compared turns it off.
        ranks: how many there were when ``vote`` was called last.
    """

    def __init__(
        self,
        config: Config,
        collectives: Collectives,
        parameters: Iterable[Parameter] = (),
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(config, collectives, parameters, names)
        self._agreement = Agreement(collectives)
        self._beginning = Lock()
        self.auto_over_mpi = True
        self.ranks = 1
        self._place: step_check.Place = {}  # of the last vote
        self._alone: set[str] = set()  # parameters whose gradients are encoded by themselves on a GPU

    # All ranks together

    def agree(
        self, parameters: Descriptions, values: Mapping[str, int] = MappingProxyType({}), advice: str = ""
    ) -> None:
        """Compares release, config, parameters and step counts of all ranks. Every rank calls it at the same time:
        before its first gradient, and after other ranks have come or gone.

        A rank that is new in an elastic job takes the others' step counts.

        Args:
            parameters: (name, shape, dtype) of each of the engine's parameters, or none of them.
            values: a hash of each parameter's values, by name, where these must be equal; compared with the ranks that
                give one too.
            advice: what makes them equal, for the message.

        Raises:
            MismatchError: they differ; raised on all ranks, with the same message.
        """
        own = list(self.parameters.values()) if parameters else []
        steps = [parameter.step for parameter in own]
        agreed = self._agreement.check(self._config, parameters, steps, values, advice)
        for parameter, step in zip(own, agreed, strict=True):
            parameter.step = step
        if own:
            self.divide()
        if parameters and isinstance(self._config.exchange, AutoExchange):
            numel = sum(max(0, parameter.numel) for parameter in own)
            chosen = choose(self._config, self.collectives, numel, self.auto_over_mpi)
            self._exchange_said = chosen.sentence
            _log.info(chosen.sentence)
            if chosen.config != self._running:
                self._run(chosen.config)
        self.agreed = self.agreed or bool(parameters)

    def place(self) -> step_check.Place:
        """Where this rank is before a step, for ``vote``."""
        return {"step": max(map(_STEP, self.parameters.values()), default=0)}

    def vote(
        self, agreed: bool, discard: bool = False, place: step_check.Place | None = None, sends: bool = False
    ) -> Floats:
        """What this rank says at the beginning of a step, to be summed over the ranks; see ``step_check.py``.

        Args:
            agreed: whether ``agree`` was called since ranks have come or gone.
            discard: whether this rank asks for the step to be discarded on all ranks.
            place: what must be equal on all ranks at this step check, such as a step count.
            sends: whether this rank takes part in the exchange that would follow.
        """
        if self.closed:
            self.check_open()
        self._place, self.ranks = {} if place is None else place, self.collectives.size()
        times = self.choice.vote() if self.choice else (0, 0)
        vote = step_check.vote(self._digest, agreed, discard, times, place, self.failed, sends)
        self.stats.add(wire=self.collectives.traffic_of_vote(vote.nbytes))
        return vote

    def tally(
        self, total: Floats, agree: Callable[[], None], advice: str | None = None, place: step_check.Place | None = None
    ) -> step_check.Outcome:
        """Draws the conclusions from all ranks' words.

        Args:
            total: their sum.
            agree: compares the ranks with ``Engine.agree``; called if a rank is new, in place of a comparison of the
                places: a new rank may be at another one. It can call ``compare_places``.
            advice, place: as for ``compare_places``.

        Returns:
            What the ranks have found out.

        Raises:
            RuntimeError: a rank has called ``hvd.join()``; raised on all others.
            MismatchError: the ranks differ, or are at different places, or an error has left one behind; raised on all
                ranks.
        """
        heard = step_check.outcome(total, self.ranks)
        if heard.missing:
            raise step_check.join_error(heard.missing)
        if heard.failed:
            raise MismatchError(step_check.left_behind(heard.failed))
        if heard.newcomers:
            if self.choice:  # a new rank has tried nothing yet
                self.choice = Choice()
                self.choice.begin_step()
            agree()
        elif not heard.same_config:
            self._agreement.check(self._config, [], [])
        elif not heard.same_place:
            self.compare_places(advice, place)
        if self.choice and self.choice.tally(heard.dense, heard.compressed, self.ranks):
            _log.info(self.choice.sentence())
        if self.adaptive:
            adaptive.warn(self)
        return heard

    def compare_places(self, advice: str | None = None, place: step_check.Place | None = None) -> None:
        """Compares the places of votes. All ranks must call it.

        Args:
            advice: for the message: what to do so that all ranks are at the same place.
            place: that of this rank's vote; None: that of its last one.

        Raises:
            MismatchError: they differ; raised on all ranks, with the same message.
        """
        self._agreement.check_places(self._place if place is None else place, advice)

    def begin_step(self) -> None:
        """A gradient of the next step is there; later gradients of that step do nothing. Threads may call it."""
        if self.stats.idle:
            with self._beginning:
                if self.stats.idle:
                    if self.choice:
                        self.choice.begin_step()
                    self.stats.begin_step()

    def report(self) -> Report:
        """What was counted, and what was decided."""
        report = self.stats.to_dict()
        said = report.said, self._exchange_said, self.choice.sentence() if self.choice else ""
        report.said = "\n".join(filter(None, said))
        return report

    # Dense steps, with ``mode: auto``

    @property
    def dense(self) -> bool:
        """Whether the framework reduces the gradients of the step that is under way.

        Raises:
            MismatchError: it does, and this rank is behind the others, which no step check of that step would find.
        """
        dense = self.choice is not None and self.choice.dense
        if dense and self.failed:
            raise MismatchError(step_check.left_behind(1))
        return dense

    def to_flush(self, parameter: Parameter, small: bool = False) -> bool:
        """Whether the parameter's gradient of this step is dense, and there is a residual to be added to it.

        Args:
            small: whether its gradients are too small to be compressed; it may have a residual from before the settings
                were changed.
        """
        return self.unsent(parameter) is not None or (small and self._memory.held(parameter.name) is not None)

    def flush(self, parameter: Parameter, gradient: Floats) -> Floats | None:
        """If ``to_flush``: the sum of a gradient that the framework reduces and of its residual, for ``flushed``. None:
        the gradient is not finite, and is sent as it is.

        Args:
            gradient: float32 or float64 ``[numel]``; unchanged.
        """
        if not deferred.finite(gradient):
            return None
        total = gradient.copy()
        arrays.add(total, self._memory.residual(parameter.name, gradient.size, gradient.dtype, gradient))
        return total

    def flushed(self, parameter: Parameter, total: Floats, sent: Floats) -> None:
        """Keeps in the residual what was not sent: ``total - sent``, which is the rounding of a smaller dtype. It is
        computed in ``total``."""
        if self.choice is None or not self.choice.dense:  # the next ones of a small parameter leave no residual
            self._memory.drop([parameter.name])
            return
        arrays.subtract_sent(total, None, sent)
        self._memory.residual(parameter.name, total.size, total.dtype, total)[:] = total
        self.choice.flushed.add(parameter.name)

    def unsent(self, parameter: Parameter) -> Floats | None:
        """If ``to_flush``: the parameter's residual, for an adapter that adds it to the gradient by itself, and says so
        by ``note_flushed``."""
        if self.choice is None or not self.choice.dense or parameter.name in self.choice.flushed:
            return None
        return self._memory.held(parameter.name) if self.feeds_back(self.pipeline_of(parameter)) else None

    def note_flushed(self, parameters: Iterable[Parameter]) -> None:
        """Residuals of these parameters were sent in a dense step."""
        if self.choice is not None and self.choice.dense:
            self.choice.flushed.update(parameter.name for parameter in parameters)

    # Single tensors

    def count_allreduce(self, size: int, dense: int) -> None:
        """Counts what goes through the framework's allreduce: a carrier, or a gradient that is not compressed.

        Args:
            size: its bytes.
            dense: the bytes of the gradient.
        """
        ranks = self.collectives.size()
        self.stats.add(wire=traffic.allreduce(size, ranks), dense=traffic.allreduce(dense, ranks).sent)

    def key(self, parameter: Parameter) -> RngKey:
        """The random key of the parameter's next container; the ranks' containers are compared with it."""
        return RngKey(self._config.seed, parameter.number, parameter.step, self.collectives.rank())

    def _measure(self, gradients: Iterable[tuple[Parameter, Floats]]) -> None:
        """Notes the norms of residuals over those of gradients that are about to be encoded. An error here must not end
        the step on this rank alone."""
        try:
            for parameter, gradient in gradients:
                if self.feeds_back(self.pipeline_of(parameter)):
                    held = self._memory.held(parameter.name)
                    residual = None if held is None else arrays.to_host(held)
                    self.stats.measure(parameter.known_as or parameter.name, residual, arrays.to_host(gradient))
        except Exception:
            _log.warning("the residuals of a step could not be measured", exc_info=True)

    def encode_sparse(self, parameter: Parameter, gradient: SparseTensor) -> U8:
        """Encodes the parameter's next gradient, which is sparse from the data on, on the host, and updates its
        residual. Nothing dense is made but the residual, once.

        Returns:
            The container, uint8.
        """
        self.check_open()
        pipeline, residual = self.pipeline_of(parameter), None
        if self.feeds_back(pipeline):
            residual = self._memory.residual(parameter.name, gradient.numel, gradient.values.dtype)
        if self.stats.measuring:
            self._measure([(parameter, gradient.values)])
        packed = pipeline.encode_sparse(gradient, residual, self.key(parameter), 2)
        parameter.step += 1
        self.in_flight.add(parameter.name)
        return packed

    def decode_sparse(
        self, parameter: Parameter, gathered: U8, numel: int, dtype: np.dtype[Any], scale: float, key: RngKey
    ) -> SparseTensor:
        """``scale * (sum of all ranks' containers)``, sparse; on the host.

        Args:
            gathered: uint8, the containers in rank order.
            numel, dtype: of the tensor.
            key: what ``key`` returned before the gradient was encoded.

        Raises:
            ContainerError: as ``receive``.
        """
        self.check_open()
        self.in_flight.discard(parameter.name)
        with self.receiving():
            pipeline, ranks = self.pipeline_of(parameter), self.collectives.size()
            expected = pipeline.expected(numel, dtype, key)
            containers = frame.split(gathered, ranks, [expected])[0]
            own = frame.size(containers[key.rank], expected.shared)
            self.stats.add(wire=traffic.allgather(own, gathered.size, ranks))
            return pipeline.decode_sparse(containers, numel, dtype, scale)

    def take_unsent(self, parameter: Parameter, finite: Callable[[], bool]) -> SparseTensor | None:
        """The parameter's residual, to be added to its sparse gradient, which is sent as it is: in a dense step, or
        since the settings have changed. There is none afterwards.

        Args:
            finite: whether the gradient's values are. If not, the residual stays: the step may be left out.

        Returns:
            None: there is nothing to be added.
        """
        pipeline, residual = self.pipeline_of(parameter), self._memory.held(parameter.name)
        if residual is None or not self.feeds_back(pipeline) or pipeline.config.has_velocity:
            return None
        if not self.exchange.containers or not finite():
            return None
        values = arrays.to_host(residual)
        indices = np.flatnonzero(values).astype(np.uint32)
        unsent = SparseTensor(values.size, indices, values[indices])
        self._memory.drop([parameter.name])
        return unsent if indices.size else None

    def check_sparse(self, parameter: Parameter, advice: str) -> None:
        """
        Raises:
            ValueError: the parameter has a sparse gradient, and the memory has a momentum, which it would not get. The
                optimizer of such a job has none.
        """
        memory = self.pipeline_of(parameter).config.memory
        if memory.has_velocity:
            raise ValueError(
                f"{parameter.name} has a sparse gradient, and memory is {memory.name!r}, which gives a momentum to "
                f"dense gradients only: {advice}"
            )

    def takes_sparse(self, parameter: Parameter) -> bool:
        """Whether ``encode_sparse`` can be used: the exchange lets a gradient have a container of its own (not
        over MPI), in every scope, and the sparsifier goes by the magnitudes of single elements."""
        config = self.pipeline_of(parameter).config
        return not config.memory.has_velocity and self.exchange.containers and config.sparsifier.selects_sparse

    def uncompressed(self, parameter: Parameter, numel: int, itemsize: int) -> bool:
        """Whether a gradient is so small that the framework's own reduction takes no more bytes than a container.

        Args:
            numel, itemsize: as in ``small.uncompressed``.
        """
        if self._config.scope != "tensor":  # without a search for the tensor's settings
            return False
        return small.uncompressed(self.pipeline_of(parameter), numel, itemsize)

    # Buckets

    def mark_full(self, bucket: Bucket) -> list[Bucket]:
        """The gradients of all parameters of a bucket are in it.

        Returns:
            The buckets that must be started now, in this order.
        """
        self.in_flight.update(bucket.names)
        return bucket.layout.mark_full(bucket)

    def start(self, bucket: Bucket) -> None:
        """Encodes a bucket and starts its exchange; ``bucket.pending`` is set then.

        The bucket must hold at least one gradient. Where the exchange has a thread of its own, this returns at once.

        Raises:
            RuntimeError: an exchange over MPI in a job without MPI.
        """
        if self.closed:
            self.check_open()
        bucket.count_step()
        config, plan = self._config, self._plan(bucket)
        key = bucket.key = RngKey(config.seed, bucket.number, bucket.step, self.collectives.rank())
        if plan.whole is not None:
            bucket.slices = [Slice(plan.default, plan.whole, key)]
        else:
            bucket.slices = [
                Slice(pipeline, part, RngKey(key.seed, parameter.number, key.step, key.rank))
                for pipeline, parameter, part in zip(plan.pipelines, bucket.members, bucket.parts, strict=True)
            ]
        if self.stats.measuring:
            self._measure((parameter, bucket.part(parameter.name)) for parameter in bucket.present)
        exchange = _DENSE if bucket.dense else self.exchange
        bucket.pending = exchange.start(self, bucket)
        if self._aside and not (exchange.own_thread or exchange.several):  # the residuals are what they will be
            self.put_back(bucket.at_rest)

    def _plan(self, bucket: Bucket) -> _Plan:
        plan: _Plan | None = bucket.plan
        exchange = self.exchange
        if plan is not None and plan.generation == self.generation and plan.exchange is exchange:
            return plan
        whole = self._config.selection == "scope" and self._config.scope != "tensor"
        if not (whole or bucket.dense or on_host(bucket.gradient)) and isinstance(exchange, AllgatherExchange):
            self._alone.update(bucket.names)
            if len(self._alone) > FEW and self.collectives.speaks():
                _warn_once(ALONE, "scope" if self._config.scope == "tensor" else "selection")
        pipelines = [self.pipeline_of(parameter) for parameter in bucket.members]
        used = [self.pipeline] if whole else pipelines
        plan = bucket.plan = _Plan(
            self.generation,
            (0, sum(bucket.sizes)) if whole else None,
            self.pipeline,
            pipelines,
            not bucket.dense and any(one.config.error_feedback for one in pipelines),
            self.has_velocity and any(one.config.memory.has_velocity for one in pipelines),
            exchange,
            not bucket.dense
            and all(one.config.error_feedback and exchange.in_one_pass(one, bucket.dtype) for one in used),
        )
        return plan

    def takes_pieces(self, bucket: Bucket) -> bool:
        """Whether a bucket's gradients can stay where they are (``Bucket.pieces``) until it is encoded."""
        self._plan(bucket)
        return self.in_one_pass(bucket) and not self.stats.measuring

    def receive(self, bucket: Bucket, scale: float = 1.0) -> None:
        """Waits for a bucket's exchange; ``bucket.gradient`` is ``scale * (sum over all ranks)`` then.

        Raises:
            ContainerError: a container cannot be decoded, or is of another tensor, parameter, step or config; names its
                rank. Raised on all ranks.
        """
        try:
            bucket.pending.result(scale)
        finally:
            if self._aside:
                self.put_back(bucket.at_rest)
        bucket.summed, bucket.scale = True, scale

    def release_all(self, bucket: Bucket) -> None:
        """The sums of a bucket that was full were read."""
        self.in_flight.difference_update(bucket.names)
        bucket.layout.release_all(bucket)
