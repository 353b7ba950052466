"""One rank's state and the operations of a step on flat arrays; the package's docstring gives the call sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvd_deepreduce import messages, short_container
from hvd_deepreduce.codec import U8, Floats, RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import cores, levels, meeting, small, timeline
from hvd_deepreduce.engine import state as saved
from hvd_deepreduce.engine.agreement import Agreement, Descriptions
from hvd_deepreduce.engine.buckets import Bucket
from hvd_deepreduce.engine.choice import Choice
from hvd_deepreduce.engine.collectives import Collectives
from hvd_deepreduce.engine.exchange_choice import candidates, choose
from hvd_deepreduce.engine.exchanges import Exchanges
from hvd_deepreduce.engine.levels import Levels
from hvd_deepreduce.engine.parameter import VELOCITY, Parameter
from hvd_deepreduce.engine.pipelines import Pipelines
from hvd_deepreduce.engine.sliced import SlicedExchange
from hvd_deepreduce.engine.stats import Report, Stats
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.reduce_scatter import SlicedSum
from hvd_deepreduce.exchange.settings import AutoExchange, ReduceScatter
from hvd_deepreduce.exchange.two_levels import Kept, TwoLevelSum
from hvd_deepreduce.feedback import DGC
from hvd_deepreduce.memory import Memory
from hvd_deepreduce.messages import Slice
from hvd_deepreduce.ops import arrays, deferred
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.sparse import SparseTensor

if TYPE_CHECKING:
    from hvd_deepreduce.exchange.queue import ExchangeQueue


_log = logging.getLogger("hvd_deepreduce")


class Snapshot(NamedTuple):
    """Settings and state of a process at a moment of an elastic job."""

    config: Config
    state: dict[str, Any]


class Told(NamedTuple):
    """What the ranks of an elastic job take from rank 0.

    Attributes:
        config: ``Config.shared``.
        steps: step counts by parameter.
        lists: the parameters, where the framework does not know them before the first step.
        small_under: ``Config.shared`` of the config that has determined which tensors are too small to be compressed,
            where this is fixed.
    """

    config: dict[str, Any]
    steps: dict[str, int]
    lists: Any = None
    small_under: dict[str, Any] | None = None


class Engine:
    """One rank's compression: its config, parameters, residuals, statistics and exchanges.

    ``encode`` and ``start`` may run at the same time as ``decode`` and ``receive`` on other threads, and any of them at
    the same time for different parameters. Everything else is for one thread at a time.

    Args:
        config: the same on all ranks, but for ``threads``.
        collectives: those of the ranks that take part.
        parameters: of the model, in its order; more can be added to ``parameters`` later.
        names: those that the config's overrides match; None: those of the parameters.

    Raises:
        ConfigError: an override matches no parameter.

    Attributes:
        collectives: as given.
        feedback: whether gradients are added to the residuals. Off, a rank can send zeros, and its residuals stay.
        parameters: by name.
        stats: what was sent, and how long it took.
        in_flight: names of the parameters whose gradients were started and not finished.
        choice: with ``mode: auto``, whether steps are compressed.
        on_host: whether buckets must be on the host, since they are exchanged over MPI by a function that does not
            take arrays on a GPU.
        over_mpi: whether buckets are exchanged over MPI, and not as containers by ``collectives``.
        in_slices: whether each rank sums a slice of a bucket, which takes several collectives.
        levels: with ``hierarchical``, the groups that exchange buckets; None: all ranks exchange them at one level.
        exchanges: the queues of the exchanges over MPI; ``close`` them at the end of the job.
        auto_over_mpi: whether ``exchange: auto`` may choose an exchange over MPI. An adapter that must know of it
            before the ranks are compared turns it off.
        generation: increases when the config changes or a state is loaded. Layouts made before must not be used then.
    """

    def __init__(
        self,
        config: Config,
        collectives: Collectives,
        parameters: Iterable[Parameter] = (),
        names: Sequence[str] | None = None,
    ) -> None:
        self.collectives = collectives
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self._names = list(self.parameters) if names is None else names
        config.check_overrides(self._names)
        self.stats = collectives.stats = Stats(watch=timeline.watch(collectives.rank))
        self.in_flight: set[str] = set()
        self.generation = 0
        self._agreement = Agreement(collectives)
        self._memory = Memory()
        self._beginning = Lock()
        self._closed = False
        self.feedback = True
        self.exchanges = Exchanges(collectives)
        self.levels: Levels | None = None
        self._levels_known = False
        self.auto_over_mpi = True
        self._use(config)

    # Settings and state

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._config

    @property
    def chooses(self) -> bool:
        """Whether ``agree`` chooses the exchange, so that it must be called after ``set_config``."""
        return isinstance(self._config.exchange, AutoExchange)

    def _use(self, config: Config) -> None:
        self._config = config
        self._digest = config.digest()
        self.choice = Choice() if config.mode == "auto" else None
        self._exchange_said = ""
        # Until the ranks have chosen.
        self._run(candidates(config, False)["allgather"] if isinstance(config.exchange, AutoExchange) else config)

    def _run(self, config: Config) -> None:
        """Exchanges gradients under this config from now on: that in force, with an exchange that was chosen."""
        self._running = config
        self._pipelines: Pipelines | None = None
        self.over_mpi = config.exchange.implementation is not None
        self.on_host = self.over_mpi and not config.exchange.on_gpu
        # Until the nodes are known, there may be two levels.
        two_levels = self.levels is not None if self._levels_known else config.hierarchical is not False
        self.in_slices = two_levels or isinstance(config.exchange, ReduceScatter)
        self.generation += 1

    def set_config(self, config: str | Path | Mapping[str, Any] | Config | None = None, /, **settings: Any) -> None:
        """Changes the settings from the next step on; on all ranks, between the same two steps.

        Args:
            config: the new config; None: the one in force, with ``settings`` in place of its own.

        Raises:
            RuntimeError: gradients are in flight.
            ConfigError: the config cannot be used; the old one stays in force.
        """
        self.check_open()
        if self.in_flight:
            raise RuntimeError(
                "set_config was called between backward() and step(), while gradients are in flight: call it after "
                "step()"
            )
        new = Config.load(self._config if config is None else config, **settings)
        if self._config.local is None:
            new.for_gradients()
        new.check_overrides(self._names)
        if self._levels_known and new.hierarchical != self._config.hierarchical:
            raise ValueError(
                f"hierarchical is {self._config.hierarchical!r} and cannot be changed to {new.hierarchical!r} after "
                "the first step, which has divided the ranks: create a new DeepReduce"
            )
        self._use(new)

    @property
    def pipelines(self) -> Pipelines:
        """Encoders and decoders of the config in force."""
        pipelines = self._pipelines
        if pipelines is None:
            pipelines = self._pipelines = Pipelines(self._running, self.cores)
        return pipelines

    @property
    def cores(self) -> int:
        """The cores that this rank has."""
        return cores.of_rank(self.collectives.local_size())

    @property
    def pipeline(self) -> Pipeline:
        """Encoder and decoder of parameters for which the config has no settings of their own, and of whole buckets."""
        return self.pipelines.default

    def pipeline_of(self, parameter: Parameter) -> Pipeline:
        """Encoder and decoder of a parameter."""
        return (self._pipelines or self.pipelines).of(parameter.known_as or parameter.name)

    @property
    def max_bucket_bytes(self) -> int | None:
        """Limit of a bucket's vector under this config; None: no limit. In scope ``tensor``: of what is sent together,
        by adapters that do so."""
        return None if self._config.scope == "model" else self._config.bucket_bytes

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, as NumPy arrays, and step counts. Ranks differ: each saves and loads its own."""
        self.check_open()
        rank, size = self.collectives.rank(), self.collectives.size()
        return saved.save(self.parameters, self._memory.state_dict(), rank, size)

    def load_state_dict(
        self, state: saved.State, parameters: Iterable[Parameter] | None = None, *, reshard: saved.Reshard = False
    ) -> None:
        """Continues where ``state_dict`` was called. Gradients in flight are forgotten.

        The queues of exchanges over MPI are closed: to go on after an error of an exchange, every rank makes this call.

        Args:
            state: this rank's; with ``reshard`` those of all ranks, which may have been more or fewer.
            parameters: replace the engine's own; None: keep those.
            reshard: as in ``engine.state.reshard``.

        Raises:
            ValueError: a state of another rank, another number of ranks or another model, with a residual that is not
                finite, or not a state at all; nothing has changed then.
        """
        self.check_open()
        rank, size = self.collectives.rank(), self.collectives.size()
        self._load(parameters, lambda known: saved.load(state, known, rank, size, reshard))

    def _load(
        self,
        parameters: Iterable[Parameter] | None,
        read: Callable[[dict[str, Parameter]], tuple[dict[str, int], dict[str, Floats]]],
    ) -> None:
        known = self.parameters if parameters is None else {parameter.name: parameter for parameter in parameters}
        steps, residuals = read(known)
        self.exchanges.close()  # before the residuals change: an exchange may be about to settle them
        self._memory.load_state_dict(residuals)  # the last that can fail: it copies
        self.parameters = known
        for name, step in steps.items():
            known[name].step = step
        self.in_flight.clear()
        self.generation += 1

    def snapshot(self) -> Snapshot:
        """What ``rewind`` returns to."""
        return Snapshot(self._config, self.state_dict())

    def rewind(self, snapshot: Snapshot) -> None:
        """Returns to a snapshot of this process, whatever its rank is now. Gradients in flight are forgotten.

        It asks nothing of the collectives, which may not work any more.
        """
        self._use(snapshot.config)
        self.resume(snapshot.state)

    def resume(self, state: Mapping[str, Any], parameters: Iterable[Parameter] | None = None) -> None:
        """As ``load_state_dict``, with a state of this process that may have had another rank."""
        self._load(parameters, lambda known: saved.check(state, known, state["rank"], state["size"]))

    def told(self) -> Told:
        """What the other ranks of an elastic job take from rank 0."""
        steps = {name: parameter.step for name, parameter in self.parameters.items()}
        return Told(self._config.shared(), steps)

    def following(self, told: Told) -> Snapshot:
        """This rank's settings and state at the step of rank 0 of an elastic job, for ``rewind``.

        The residuals are this rank's if they belong to that step; otherwise they start again from zero.
        """
        state = self.state_dict()
        if state["steps"] != told.steps:
            if any(state["steps"].values()):
                _log.warning("rank 0 is at another step than rank %d, whose residuals are dropped", state["rank"])
            state = {**state, "steps": told.steps, "residuals": {}}
        return Snapshot(Config.load(told.config, threads=self._config.threads), state)

    def agree(self, parameters: Descriptions) -> None:
        """Compares release, config, parameters and step counts of all ranks. Every rank calls it at the same time:
        before its first gradient, and after other ranks have come or gone.

        A rank that is new in an elastic job takes the others' step counts.

        Args:
            parameters: (name, shape, dtype) of each of the engine's parameters, or none of them.

        Raises:
            MismatchError: they differ; raised on all ranks, with the same message.
        """
        own = list(self.parameters.values()) if parameters else []
        agreed = self._agreement.check(self._config, parameters, [parameter.step for parameter in own])
        for parameter, step in zip(own, agreed, strict=True):
            parameter.step = step
        if own:
            self._find_levels()
        if parameters and self.chooses:
            numel = sum(max(0, parameter.numel) for parameter in own)
            chosen = choose(self._config, self.collectives, numel, self.auto_over_mpi)
            self._exchange_said = chosen.sentence
            _log.info(chosen.sentence)
            if chosen.config != self._running:
                self._run(chosen.config)

    def _find_levels(self) -> None:
        """Divides the ranks for ``hierarchical``; again after ranks have come or gone."""
        before, self.levels = self.levels, None
        if before is not None:
            before.close()
        self.levels = levels.find(self.collectives, self._config.hierarchical)
        if self.levels is not None and self.levels.across is None and self._config.has_velocity:
            raise RuntimeError(
                "all ranks are on one node, where hierarchical sends gradients uncompressed, and memory is 'dgc', "
                "which gives a momentum to compressed gradients only: set hierarchical to 'auto', or leave it out"
            )
        if self.levels is not None and self.levels.across is None:
            _log.warning(
                "hierarchical is %r, and all ranks are on one node, where gradients are sent uncompressed: leave "
                "hierarchical out, or set it to 'auto'",
                self._config.hierarchical,
            )
        for one in (self.levels.inside, self.levels.across) if self.levels is not None else ():
            if one is not None:
                one.stats = self.stats
        self._levels_known = True
        self.in_slices = self.levels is not None or isinstance(self._running.exchange, ReduceScatter)

    def word(self, agreed: bool, discard: bool = False) -> Floats:
        """What this rank says at the beginning of a step, to be summed over the ranks; see ``meeting.py``.

        Args:
            agreed: whether ``agree`` was called since ranks have come or gone.
            discard: whether this rank asks for the step to be discarded on all ranks.
        """
        self.check_open()
        word = meeting.word(self._digest, agreed, discard, self.choice.word() if self.choice else (0, 0))
        self.stats.add(wire=traffic.allreduce(word.nbytes, self.collectives.size()))
        return word

    def hear(self, total: Floats, agree: Callable[[], None]) -> bool:
        """Draws the conclusions from all ranks' words.

        Args:
            total: their sum.
            agree: compares the ranks with ``Engine.agree``; called if a rank is new.

        Returns:
            Whether no rank asks for the step to be discarded.

        Raises:
            RuntimeError: a rank has called ``hvd.join()``; raised on all others.
            MismatchError: the ranks differ; raised on all ranks.
        """
        heard = meeting.outcome(total, self.collectives.size())
        if heard.missing:
            raise meeting.join_error(heard.missing)
        if heard.newcomers:
            agree()
        elif not heard.same_config:
            self._agreement.check(self._config, [], [])
        if self.choice and self.choice.hear(heard.dense, heard.compressed, self.collectives.size()):
            _log.info(self.choice.sentence())
        return not heard.discarding

    def begin_step(self) -> None:
        """A gradient of the next step is there; later gradients of that step do nothing. Threads may call it."""
        if self.stats.idle:
            with self._beginning:
                if self.stats.idle:
                    if self.choice:
                        self.choice.begin_step()
                    self.stats.begin_step()

    @property
    def dense(self) -> bool:
        """Whether the framework reduces the gradients of the step that is under way."""
        return self.choice is not None and self.choice.dense

    def report(self) -> Report:
        """What was counted, and what was decided."""
        report = self.stats.to_dict()
        said = self._exchange_said, self.choice.sentence() if self.choice else ""
        report.said = "\n".join(filter(None, said))
        return report

    def to_flush(self, parameter: Parameter) -> bool:
        """Whether the parameter's gradient of this step is dense, and there is a residual to be added to it."""
        return self.unsent(parameter) is not None

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
        """Keeps in the residual what was not sent: ``total - sent``, which is the rounding of a smaller dtype."""
        assert self.choice is not None
        self._memory.residual(parameter.name, total.size, total.dtype, total)[:] = total - sent
        self.choice.flushed.add(parameter.name)

    def unsent(self, parameter: Parameter) -> Floats | None:
        """If ``to_flush``: the parameter's residual, for an adapter that adds it to the gradient by itself, and says so
        by ``note_flushed``."""
        if self.choice is None or not self.choice.dense or parameter.name in self.choice.flushed:
            return None
        return self._memory.held(parameter.name) if self._feeds_back(self.pipeline_of(parameter)) else None

    def note_flushed(self, parameters: Iterable[Parameter]) -> None:
        """Residuals of these parameters were sent in a dense step."""
        if self.choice is not None and self.choice.dense:
            self.choice.flushed.update(parameter.name for parameter in parameters)

    def residual_of(self, name: str) -> Floats | None:
        """A copy, on the host, of what was not sent yet of a parameter; None: nothing is kept of it."""
        held = self._memory.held(name)
        return None if held is None else np.array(arrays.to_host(held))

    def close(self) -> None:
        """Ends the exchanges, their threads and those of ``collectives``, and frees the residuals.

        Every rank calls it after the same step. It can be called more than once. Afterwards only ``config`` and
        ``stats`` can be read; everything else raises ``RuntimeError``.
        """
        self._closed = True
        self.exchanges.close()
        if self.levels is not None:
            self.levels.close()
        self.collectives.close()
        self._memory.load_state_dict({})
        if self.stats.watch is not None:
            self.stats.watch.flush()
        self._pipelines = None
        self.in_flight.clear()

    def check_open(self) -> None:
        """``RuntimeError`` after ``close``."""
        if self._closed:
            raise RuntimeError(
                "this DeepReduce was closed: create a new one on every rank, with a new optimizer or tape"
            )

    def _feeds_back(self, pipeline: Pipeline) -> bool:
        return self.feedback and pipeline.config.error_feedback

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
        """The random key of the parameter's next container. ``decode`` compares the containers with it."""
        return RngKey(self._config.seed, parameter.number, parameter.step, self.collectives.rank())

    def encode(self, parameter: Parameter, flat: Floats) -> U8:
        """Encodes the parameter's next gradient and updates its residual.

        Args:
            flat: float32 or float64 ``[numel]``; unchanged.

        Returns:
            The container, uint8, where ``flat`` is.
        """
        self.check_open()
        pipeline, residual, velocity = self.pipeline_of(parameter), None, None
        if self._feeds_back(pipeline):
            residual = self._memory.residual(parameter.name, flat.size, flat.dtype, flat)
        if isinstance(pipeline.config.memory, DGC):
            velocity = self._memory.residual(VELOCITY + parameter.name, flat.size, flat.dtype, flat)
        packed = pipeline.encode(flat, residual, self.key(parameter), 2, velocity, self.collectives.size())
        parameter.step += 1
        self.in_flight.add(parameter.name)
        return packed

    def decay(self, parameters: Iterable[Parameter], factor: float) -> None:
        """Multiplies the residuals of parameters that are not in flight by ``factor``."""
        self._memory.scale([parameter.name for parameter in parameters], factor)

    def encode_sparse(self, parameter: Parameter, gradient: SparseTensor) -> U8:
        """As ``encode``, for a gradient that is sparse from the data on; on the host. Nothing dense is made but the
        residual, once."""
        self.check_open()
        pipeline, residual = self.pipeline_of(parameter), None
        if self._feeds_back(pipeline):
            residual = self._memory.residual(parameter.name, gradient.numel, gradient.values.dtype)
        packed = pipeline.encode_sparse(gradient, residual, self.key(parameter), 2)
        parameter.step += 1
        self.in_flight.add(parameter.name)
        return packed

    def decode_sparse(
        self, parameter: Parameter, gathered: U8, numel: int, dtype: np.dtype[Any], scale: float, key: RngKey
    ) -> SparseTensor:
        """``scale * (sum of all ranks' containers)``, sparse; on the host.

        Args:
            numel, dtype: of the tensor.
            gathered, key: as for ``decode``.

        Raises:
            ContainerError: as ``decode``.
        """
        self.check_open()
        self.in_flight.discard(parameter.name)
        pipeline, ranks = self.pipeline_of(parameter), self.collectives.size()
        expected = pipeline.expected(numel, dtype, key)
        containers = short_container.split(gathered, ranks, [expected])[0]
        own = short_container.size(containers[key.rank], expected.shared)
        self.stats.add(wire=traffic.allgather(own, gathered.size, ranks))
        return pipeline.decode_sparse(containers, numel, dtype, scale)

    def takes_sparse(self, parameter: Parameter) -> bool:
        """Whether ``encode_sparse`` can be used: with an allgather of containers and a sparsifier that goes by the
        magnitudes of single elements. A sparse gradient has a container of its own in every scope."""
        config = self.pipeline_of(parameter).config
        if self.over_mpi or isinstance(config.memory, DGC):
            return False
        return config.sparsifier.selects_sparse

    def uncompressed(self, parameter: Parameter, numel: int, itemsize: int) -> bool:
        """Whether a gradient is so small that the framework's own reduction takes no more bytes than a container.

        Args:
            numel, itemsize: as in ``small.uncompressed``.
        """
        if self._config.scope != "tensor":  # without a search for the tensor's settings
            return False
        return small.uncompressed(self.pipeline_of(parameter), numel, itemsize)

    def decode(self, parameter: Parameter, gathered: U8, out: Floats, scale: float, key: RngKey) -> None:
        """``out = scale * (sum of all ranks' containers)``.

        Args:
            gathered: uint8, the containers in rank order.
            out: float32 or float64 ``[numel]``; overwritten.
            key: what ``key`` returned before the gradient was encoded.

        Raises:
            ContainerError: a container cannot be decoded, or is of another tensor, parameter, step or config; names its
                rank. Raised on all ranks.
        """
        self._decode(gathered, out, scale, [Slice(self.pipeline_of(parameter), (0, out.size), key)])

    def _decode(self, gathered: U8, out: Floats, scale: float, slices: Sequence[Slice]) -> None:
        """As ``decode``, for the messages of several slices of ``out``."""
        self.check_open()
        ranks = self.collectives.size()
        own = messages.sum_into(out, gathered, ranks, slices, scale)
        self.stats.add(wire=traffic.allgather(own, gathered.size, ranks))

    # Buckets

    def mark_ready(self, bucket: Bucket, parameter: Parameter) -> list[Bucket]:
        """The parameter's gradient is in its bucket.

        Returns:
            The buckets that must be started now, in this order.
        """
        self.in_flight.add(parameter.name)
        return bucket.layout.mark_ready(bucket, parameter)

    def mark_full(self, bucket: Bucket) -> list[Bucket]:
        """As ``mark_ready``, for all parameters of a bucket at once."""
        self.in_flight.update(parameter.name for parameter in bucket.members)
        return bucket.layout.mark_full(bucket)

    def start(self, bucket: Bucket) -> None:
        """Encodes a bucket and starts its exchange; ``bucket.pending`` is set then.

        The bucket must hold at least one gradient. Where an exchange over MPI encodes, on its queue's thread, this
        returns at once.

        Raises:
            RuntimeError: an exchange over MPI in a job without MPI.
        """
        self.check_open()
        bucket.count_step()
        config = self._config
        key = bucket.key = RngKey(config.seed, bucket.number, bucket.step, self.collectives.rank())
        self.stats.add(encode=bucket.filling)
        bucket.filling = 0.0
        if self.levels is not None:
            self._start_two_levels(bucket, self.levels)
            return
        residual = velocity = None
        failure: Exception | None = None
        try:
            bucket.clear_missing()
            if any(self._feeds_back(self.pipeline_of(parameter)) for parameter in bucket.members) or (
                self.in_slices and config.error_feedback
            ):
                names = [parameter.name for parameter in bucket.members]
                residual = self._memory.joined(names, bucket.sizes, bucket.dtype, bucket.gradient)
            if config.has_velocity and any(
                isinstance(self.pipeline_of(parameter).config.memory, DGC) for parameter in bucket.members
            ):
                names = [VELOCITY + parameter.name for parameter in bucket.members]
                velocity = self._memory.joined(names, bucket.sizes, bucket.dtype, bucket.gradient)
        except Exception as error:
            if not self.over_mpi:
                raise
            failure = error  # the exchange tells it to all ranks, which would wait for this one
        if self.in_slices:
            self._start_in_slices(bucket, residual, velocity)
            return
        if not self.over_mpi:
            with self.stats.span("encode", bucket.name):
                slices, ranks = self._slices_of(bucket), self.collectives.size()
                packed = messages.encode(
                    bucket.gradient, residual, velocity, slices, ranks, bucket.finite, self._feeds_back
                )
            bucket.pending = self.collectives.start_allgather(packed, bucket.name)
            return

        pipeline, parts = self.pipeline, bucket.parts if config.selection == "tensor" else None

        def select() -> tuple[SparseTensor | Floats, Floats | None]:
            if failure is not None:
                raise failure
            with self.stats.span("encode", bucket.name):
                selected = pipeline.select(bucket.gradient, residual, key, parts, bucket.finite)
            if selected is None:  # not finite: sent whole, and the residual is unchanged
                return np.array(arrays.to_host(bucket.gradient)), None
            indices, values = (None if part is None else arrays.to_host(part) for part in selected)
            assert values is not None
            return values if indices is None else SparseTensor(bucket.gradient.size, indices, values), residual

        self.collectives.wait_meeting()
        queue = self.exchange_queue(bucket.layout.queue)
        bucket.pending = queue.submit(self._running.exchange, select, bucket.gradient, key, bucket.apart())

    def _start_in_slices(self, bucket: Bucket, residual: Floats | None, velocity: Floats | None) -> None:
        """``start``, where each rank sums a slice of the bucket. What it loses then stays here, also of a rank that
        sends zeros (``feedback``)."""
        with self.stats.span("encode", bucket.name):
            work = SlicedSum(
                self.pipeline, self.collectives.size(), bucket.key, bucket.gradient,
                residual=residual if self.feedback else None,
                keeps=residual,
                velocity=velocity,
                parts=bucket.parts if self._config.selection == "tensor" else None,
                finite=bucket.finite,
            )  # fmt: skip
            bucket.pending = SlicedExchange(work, self.collectives, bucket.name, self.stats)

    def _start_two_levels(self, bucket: Bucket, groups: Levels) -> None:
        with self.stats.span("encode", bucket.name):
            work = self._two_levels(groups, self._slices_of(bucket), bucket.gradient)
            try:
                bucket.clear_missing()
                work.gradient = bucket.gradient
                names, part = [parameter.name for parameter in bucket.members], work.part
                pipelines = [self.pipeline_of(parameter) for parameter in bucket.members]

                def kept(prefix: str) -> Kept:
                    named = [prefix + name for name in names]
                    return Kept(*self._memory.slice(named, bucket.sizes, part, bucket.dtype, bucket.gradient))

                if any(map(self._feeds_back, pipelines)):
                    work.residual = kept("")
                if any(isinstance(one.config.memory, DGC) for one in pipelines):
                    work.velocity = kept(VELOCITY)
            except Exception as error:
                work.failures.append(error)  # all ranks are told, which would wait for this one
            bucket.pending = SlicedExchange(work, groups, bucket.name, self.stats)

    def _two_levels(self, groups: Levels, slices: Sequence[Slice], gradient: Floats) -> TwoLevelSum:
        """This rank's part in the sum of a vector, so far without a residual."""
        return TwoLevelSum(self.pipeline, groups.place, slices, gradient, feeds_back=self._feeds_back)

    def start_failed(self, error: Exception, numel: int) -> SlicedExchange | None:
        """Where there are two levels: takes part in the exchange of a bucket of so many elements, in which this rank
        has failed before it could start it, so that nobody waits. Its ``result`` raises the error on all ranks. None:
        there is one level."""
        if self.levels is None:
            return None
        vector = np.zeros(numel, np.float32)
        whole = Slice(self.pipeline, (0, numel), RngKey(self._config.seed, 0, 0))
        work = self._two_levels(self.levels, [whole], vector)
        work.failures.append(error)
        return SlicedExchange(work, self.levels, "failed", self.stats)

    def advance(self, bucket: Bucket) -> bool:
        """Lets a bucket's exchange go on by one collective, where ``in_slices``, until the last one is in flight.
        Called for all buckets in turn before the first is received, in one order on all ranks, it lets these be in
        flight together. Returns whether it did anything."""
        return isinstance(bucket.pending, SlicedExchange) and not bucket.summed and bucket.pending.advance()

    def _slices_of(self, bucket: Bucket) -> list[Slice]:
        """What has a container of its own in the bucket's message: all of the bucket, or each member."""
        if self._config.selection == "scope" and self._config.scope != "tensor":
            return [Slice(self.pipeline, (0, bucket.gradient.size), bucket.key)]
        key = bucket.key
        return [
            Slice(self.pipeline_of(parameter), part, key._replace(parameter=parameter.number))
            for parameter, part in zip(bucket.members, bucket.parts, strict=True)
        ]

    def receive(self, bucket: Bucket, scale: float = 1.0) -> None:
        """Waits for a bucket's exchange; ``bucket.gradient`` is ``scale * (sum over all ranks)`` then.

        Raises:
            ContainerError: as ``decode``.
        """
        span, name = self.stats.span, bucket.name
        if self.over_mpi:
            with span("wait", name):
                counted = bucket.pending.result()
            self.stats.add(wire=counted)
            with span("decode", name):
                if scale != 1.0:
                    arrays.scale(bucket.gradient, scale)
        elif self.in_slices:
            total = bucket.pending.result()
            with span("decode", name):
                total.write(bucket.gradient, scale)
        else:
            with span("wait", name):
                gathered = self.collectives.wait_allgather(bucket.pending)
            with span("decode", name):
                self._decode(gathered, bucket.gradient, scale, self._slices_of(bucket))
        bucket.summed, bucket.scale = True, scale

    def release(self, bucket: Bucket, parameter: Parameter) -> None:
        """The parameter's part of a received bucket was read."""
        self.in_flight.discard(parameter.name)
        bucket.layout.release(bucket, parameter)
        if bucket.empty:  # all have been read
            self.stats.add(decode=bucket.emptying)
            bucket.emptying = 0.0

    def release_all(self, bucket: Bucket) -> None:
        """As ``release``, for all parameters of a bucket that was full."""
        self.in_flight.difference_update(parameter.name for parameter in bucket.members)
        bucket.layout.release_all(bucket)

    def exchange_queue(self, number: int) -> ExchangeQueue:
        """The queue with this number for exchanges over MPI. The first call with a number must come from all ranks.

        Raises:
            RuntimeError: on all ranks: the job does not run on MPI, or a rank cannot use mpi4py or MPI's threads.
        """
        return self.exchanges.queue(number, self._running.exchange.name)
