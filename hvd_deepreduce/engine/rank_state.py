"""What one rank keeps between steps: its settings, its parameters and their residuals, and the state of these."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import cores, timeline
from hvd_deepreduce.engine import state as saved
from hvd_deepreduce.engine.buckets import Bucket
from hvd_deepreduce.engine.dense_or_compressed import Choice
from hvd_deepreduce.engine.parameter import VELOCITY, Parameter
from hvd_deepreduce.engine.pipelines import Pipelines
from hvd_deepreduce.engine.stats import Stats
from hvd_deepreduce.exchange import levels
from hvd_deepreduce.exchange.allgather import AllgatherExchange
from hvd_deepreduce.exchange.autotune import candidates
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.exchange.failures import LeftBehindError
from hvd_deepreduce.exchange.interface import Exchange
from hvd_deepreduce.exchange.levels import Levels
from hvd_deepreduce.exchange.mpi.over_mpi import MpiExchange, Queues
from hvd_deepreduce.exchange.settings import AllGather, AutoExchange, ExchangeSettings, ReduceScatter
from hvd_deepreduce.exchange.sliced import ReduceScatterExchange, TwoLevelExchange
from hvd_deepreduce.exchange.two_levels import SliceResidual
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.pipeline.residuals import Memory
from hvd_deepreduce.wire.standalone import ContainerError

_log = logging.getLogger("hvd_deepreduce")
_warn_once = lru_cache(_log.warning)


_EXCHANGES: dict[type[ExchangeSettings], type[Exchange]] = {
    AllGather: AllgatherExchange,
    ReduceScatter: ReduceScatterExchange,
}
"""At one level, and not over MPI."""


CLOSED = "this was closed, by close(): create a new one on every rank, with a new optimizer or tape"


class Snapshot(NamedTuple):
    """Settings and state of a process at a moment of an elastic job."""

    config: Config
    state: dict[str, Any]


def _kept_of(parameters: Iterable[Parameter]) -> list[str]:
    return [prefix + one.name for one in parameters for prefix in ("", VELOCITY)]


class ElasticState(NamedTuple):
    """What the ranks of an elastic job take from rank 0.

    Attributes:
        config: ``Config.shared``.
        steps: step counts by parameter.
        lists: the parameters, where the framework does not know them before the first step.
        small_under: ``Config.shared`` of the config that has determined which tensors are too small to be compressed,
            where this is fixed.
        instance: ``Collectives.instance``.
    """

    config: dict[str, Any]
    steps: dict[str, int]
    lists: Any = None
    small_under: dict[str, Any] | None = None
    instance: int = 0


class RankState:
    """One rank's settings, parameters and residuals. ``Engine`` adds the operations of a step.

    Args:
        config: the same on all ranks, but for ``threads``.
        collectives: those of the ranks that take part.
        parameters: of the model, in its order; more can be added to ``parameters`` later.
        names: those that the config's overrides match; None: those of the parameters.

    Raises:
        ConfigError: an override matches no parameter.

    Attributes:
        collectives: as given.
        has_velocity: ``config.has_velocity``.
        closed: whether ``close`` was called.
        feedback: whether gradients are added to the residuals. Off, a rank can send zeros, and its residuals stay.
        parameters: by name.
        stats: what was sent, and how long it took.
        in_flight: names of the parameters whose gradients were started and not finished.
        choice: with ``mode: auto``, whether steps are compressed.
        adaptive: an optimizer of which ``adaptive.py`` has to warn, and what to do instead; empty: it has; None: there
            is none.
        agreed: whether ``Engine.agree`` has compared the ranks with their models, and need not do so again.
        exchange: what sums the buckets.
        levels: with ``hierarchical``, the groups that exchange buckets; None: all ranks exchange them at one level.
        queues: of the exchanges over MPI; ``close`` them at the end of the job.
        failed: whether this rank has failed where others have not, so that it has not got what they have applied: all
            ranks raise an error at their next step check. Loading a state ends it.
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
        self.failed = False
        self._memory = Memory()
        self._aside: dict[str, Floats] = {}
        # What was put back, until the next step: on a GPU, on another stream than that of its memory.
        self._spent: list[Floats] = []
        self.closed = False
        self.feedback = True
        self.adaptive: tuple[()] | tuple[str, str] | None = None
        self.agreed = False
        self.queues = Queues(collectives)
        self.levels: Levels | None = None
        self._levels_known = False
        self._use(config)

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._config

    def _use(self, config: Config) -> None:
        self._config = config
        self._digest = config.digest()
        self.has_velocity = config.has_velocity
        if self.collectives.speaks():
            for sentence in config.doubts():
                _warn_once(sentence)
        self.choice = Choice() if config.mode == "auto" else None
        self._exchange_said = ""
        # Until the ranks have chosen.
        self._run(candidates(config, False)["allgather"] if isinstance(config.exchange, AutoExchange) else config)

    def _run(self, config: Config) -> None:
        """Exchanges gradients under this config from now on: that in force, with an exchange that was chosen."""
        self._running = config
        self._pipelines: Pipelines | None = None
        self.exchange = self._exchange()
        self.generation += 1

    def _exchange(self) -> Exchange:
        config, settings = self._running, self._running.exchange
        # Until the nodes are known, there may be two levels.
        if self.levels is not None or (config.hierarchical is not False and not self._levels_known):
            return TwoLevelExchange(self.levels, getattr(settings, "density", None) is not None)
        if settings.implementation is not None:
            return MpiExchange(settings, self.queues)
        return _EXCHANGES[type(settings)]()

    def set_config(self, config: str | Path | Mapping[str, Any] | Config | None = None, /, **settings: Any) -> None:
        """Changes the settings from the next step on; on all ranks, between the same two steps.

        Args:
            config: the new config; None: the one in force, with ``settings`` in place of its own.

        A config without ``error_feedback`` drops the residuals, and one whose memory has no momentum the velocities,
        with a warning.

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
        was, now = self._config.memory, new.memory
        if was.leaves_whole != now.leaves_whole and any(parameter.step for parameter in self.parameters.values()):
            raise ValueError(
                f"memory is {was.name!r} and cannot be changed to {now.name!r} after the first step, since one keeps "
                "gradients and the other a momentum of scaled gradients: create a new DeepReduce"
            )
        self._use(new)
        # The ranks choose the exchange when they are compared.
        self.agreed = self.agreed and not isinstance(new.exchange, AutoExchange)
        self._drop_unsent()

    def _drop_unsent(self) -> None:
        """Without error feedback no step sends a residual, and a later config with it would send one that is old. So
        would one with a momentum, of a velocity."""
        config, lost, stopped = self._config, list[Parameter](), list[str]()
        for parameter in self.parameters.values():
            pattern = config.override_of(parameter.known_as or parameter.name)
            own = config if pattern is None else config.variants[pattern]
            if not own.error_feedback and self._memory.held(parameter.name) is not None:
                lost.append(parameter)
            elif not own.memory.has_velocity and self._memory.held(VELOCITY + parameter.name) is not None:
                stopped.append(parameter.name)
        if lost:
            self._memory.drop(_kept_of(lost))
            _log.warning(
                "the residuals of %d parameters, such as %s, were dropped on rank %d: error_feedback is False now, so "
                "what they had not sent yet is never sent",
                len(lost), lost[0].name, self.collectives.rank(),
            )  # fmt: skip
        if stopped:
            self._memory.drop([VELOCITY + name for name in stopped])
            _log.warning(
                "the velocities of %d parameters, such as %s, were dropped on rank %d: memory is %r now, which has no "
                "momentum; what was not sent is kept",
                len(stopped), stopped[0], self.collectives.rank(), config.memory.name,
            )  # fmt: skip

    def divide(self) -> None:
        """Divides the ranks for ``hierarchical``; again after ranks have come or gone. All ranks call it together.

        Raises:
            RuntimeError: as ``levels.find``.
        """
        before, self.levels = self.levels, None
        if before is not None:
            before.close()
        config = self._config
        self.levels = levels.find(self.collectives, config.hierarchical, config.has_velocity)
        for one in (self.levels.inside, self.levels.across) if self.levels is not None else ():
            if one is not None:
                one.stats = self.stats
        self._levels_known = True
        self.exchange = self._exchange()

    @property
    def pipelines(self) -> Pipelines:
        """Encoders and decoders of the config in force."""
        pipelines = self._pipelines
        if pipelines is None:
            own = self.cores  # it reads files of the kernel's
            if own == 1 and self.collectives.mpi_enabled():
                cores.warn_of_polling()
            pipelines = self._pipelines = Pipelines(self._running, own)
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
        by adapters that do so. With many ranks it is smaller than the config's, as the exchange needs it."""
        if self._config.scope == "model":
            return None
        limit, most = self._config.bucket_bytes, self.exchange.most_bytes(self.collectives)
        return limit if most is None else min(limit, most)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, as NumPy arrays, and step counts. Ranks differ: each saves and loads its own."""
        self.check_open()
        rank, size = self.collectives.rank(), self.collectives.size()
        return saved.save(self.parameters, self._memory.state_dict(), rank, size, self._config.memory)

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
            ValueError: a state of another rank, another number of ranks, another model or a memory that keeps something
                else, with a residual that is not finite, or not a state at all; nothing has changed then.
        """
        self.check_open()
        rank, size = self.collectives.rank(), self.collectives.size()
        self._load(parameters, lambda known: saved.load(state, known, rank, size, reshard, self._config.memory))
        self._drop_unsent()

    def _load(
        self,
        parameters: Iterable[Parameter] | None,
        read: Callable[[dict[str, Parameter]], tuple[dict[str, int], dict[str, Floats]]],
    ) -> None:
        known = self.parameters if parameters is None else {parameter.name: parameter for parameter in parameters}
        steps, residuals = read(known)
        self.queues.close()  # before the residuals change: an exchange may be about to settle them
        self._memory.load_state_dict(residuals)  # the last that can fail: it copies
        self._aside.clear()
        self.parameters = known
        for name, step in steps.items():
            known[name].step = step
        self.forget()
        self.failed = False
        if self.choice is not None:  # a dense step sends what was loaded
            self.choice.flushed.clear()

    def forget(self) -> None:
        """Forgets gradients in flight."""
        if self._aside:
            self.put_back(self.parameters.values())
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
        self.agreed = False
        self.resume(snapshot.state)

    def resume(self, state: Mapping[str, Any], parameters: Iterable[Parameter] | None = None) -> None:
        """As ``load_state_dict``, with a state of this process that may have had another rank."""
        rank, size, memory = state["rank"], state["size"], self._config.memory
        self._load(parameters, lambda known: saved.check(state, known, rank, size, memory))

    def elastic_state(self) -> ElasticState:
        """What the other ranks of an elastic job take from rank 0."""
        steps = {name: parameter.step for name, parameter in self.parameters.items()}
        return ElasticState(self._config.shared(), steps, instance=self.collectives.instance)

    def state_from_root(self, told: ElasticState) -> Snapshot:
        """This rank's settings and state at the step of rank 0 of an elastic job, for ``rewind``.

        The residuals are this rank's if they belong to that step; otherwise they start again from zero.
        """
        if told.instance:  # this rank may have made more or fewer than rank 0
            self.collectives.enroll(told.instance)
        state = self.state_dict()
        if state["steps"] != told.steps:
            if any(state["steps"].values()):
                _log.warning("rank 0 is at another step than rank %d, whose residuals are dropped", state["rank"])
            state = {**state, "steps": told.steps, "residuals": {}}
        return Snapshot(Config.load(told.config, threads=self._config.threads), state)

    def residual_of(self, name: str) -> Floats | None:
        """A copy, on the host, of what was not sent yet of a parameter; None: nothing is kept of it."""
        held = self._memory.held(name)
        return None if held is None else np.array(arrays.to_host(held))

    def give_back(self, parameter: Parameter, sent: Floats, gradient: Floats) -> None:
        """What was sent of a gradient does not count, nor does ``gradient``: the residual of this parameter, if it has
        one, becomes what it was before, if that is the gradient, or what it would be without sending, if it is zero."""
        held = self._memory.held(parameter.name)
        if held is not None:
            unsent = arrays.move_like(sent, held).copy()
            arrays.subtract_sent(unsent, None, arrays.move_like(gradient, held))
            arrays.add(held, unsent)

    def copies(self, parameters: Iterable[Parameter]) -> dict[str, Floats]:
        """Of all that is kept of parameters, for ``return_to``."""
        held = {name: self._memory.held(name) for name in _kept_of(parameters)}
        return {name: one.copy() for name, one in held.items() if one is not None}

    def grown(self, parameter: Parameter, copies: Mapping[str, Floats]) -> Floats | None:
        """How far a residual has grown since ``copies`` was called: a new array; None: there is no residual."""
        held = self._memory.held(parameter.name)
        if held is None:
            return None
        grown = held.copy()
        if parameter.name in copies:
            arrays.subtract_sent(grown, None, copies[parameter.name])
        return grown

    def return_to(self, parameters: Iterable[Parameter], copies: Mapping[str, Floats]) -> None:
        """What is kept of these parameters becomes what it was when ``copies`` was called."""
        for name in _kept_of(parameters):
            held = self._memory.held(name)
            if held is not None and name in copies:
                held[:] = arrays.move_like(copies[name], held)
            elif held is not None:
                held.fill(0)

    def decay(self, parameters: Iterable[Parameter], factor: float) -> None:
        """Multiplies the residuals of parameters that are not in flight by ``factor``."""
        self._memory.scale([parameter.name for parameter in parameters], factor)

    def close(self) -> None:
        """Ends the exchanges, their threads and those of ``collectives``, and frees the residuals.

        Every rank calls it after the same step. It can be called more than once. Afterwards only ``config`` and
        ``stats`` can be read; everything else raises ``RuntimeError``.
        """
        self.closed = True
        self.queues.close()
        if self.levels is not None:
            self.levels.close()
        self.collectives.close()
        self._memory.load_state_dict({})
        self._aside.clear()
        self._spent.clear()
        if self.stats.watch is not None:
            self.stats.watch.flush()
        self._pipelines = None
        self.in_flight.clear()

    def check_open(self) -> None:
        """``RuntimeError`` after ``close``."""
        if self.closed:
            raise RuntimeError(CLOSED)

    # For the operations of a step

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Around what is done with what all ranks have sent: an error of this rank alone is noted in ``failed``."""
        try:
            yield
        except BaseException as error:  # also if the process is told to end: its state may be saved
            self.note_failure(error)
            raise

    def note_failure(self, error: BaseException) -> None:
        """An error while receiving. All ranks raise one of what was sent, since they get the same bytes."""
        if not isinstance(error, ContainerError) or isinstance(error, LeftBehindError):
            self.failed = True

    def feeds_back(self, pipeline: Pipeline) -> bool:
        """Whether a pipeline's gradients are added to residuals now."""
        return self.feedback and pipeline.config.error_feedback

    def complete(self, bucket: Bucket, as_owner: bool = False) -> tuple[Floats | None, Floats | None]:
        """As ``exchange.interface.Rank.complete``.

        Raises:
            ValueError: a parameter was replaced by one of another size or dtype.
        """
        if bucket.resting or len(bucket.ready) < len(bucket.members):
            self._set_aside(bucket)
        plan, residual, velocity = bucket.plan, None, None
        if (plan.feeds_back and self.feedback) or (as_owner and self._config.error_feedback):
            residual = self._memory.joined(bucket.names, bucket.sizes, bucket.dtype, bucket.gradient)
        if plan.has_velocity and self.feedback:
            names = [VELOCITY + name for name in bucket.names]
            velocity = self._memory.joined(names, bucket.sizes, bucket.dtype, bucket.gradient)
        if bucket.pieces is not None and residual is None:  # error feedback was turned off meanwhile
            bucket.gather()
        return residual, velocity

    def _set_aside(self, bucket: Bucket) -> None:
        """Members without a gradient, and those at rest, are sent as zeros. What is kept of them is not sent, and does
        not change: it is here until ``put_back``."""
        self._spent.clear()
        if len(bucket.ready) < len(bucket.members):
            bucket.clear_missing()
        for name in _kept_of(bucket.at_rest):
            held = self._memory.held(name)
            if held is not None:
                self._aside[name] = held.copy()
                held.fill(0)

    def put_back(self, parameters: Iterable[Parameter]) -> None:
        """What was set aside of these parameters is kept again, whatever has become of the zeros."""
        for name in _kept_of(parameters):
            saved, held = self._aside.pop(name, None), self._memory.held(name)
            if saved is not None and held is not None:
                held[:] = saved
                self._spent.append(saved)

    def next_residual(self, bucket: Bucket, residual: Floats | None) -> Floats | None:
        """As ``exchange.interface.Rank.next_residual``."""
        if bucket.pieces is not None:
            return bucket.gradient
        if residual is None or not bucket.adopted or not self.in_one_pass(bucket):
            return None
        return self._memory.spare(bucket.names)

    def replace_residual(self, bucket: Bucket, residual: Floats, other: Floats) -> None:
        """As ``exchange.interface.Rank.replace_residual``."""
        self._memory.exchange(bucket.names, bucket.sizes, residual, other, bucket.adopted)
        if not bucket.adopted:
            bucket.replace(residual)

    def in_one_pass(self, bucket: Bucket) -> bool:
        """Whether a bucket's gradients are added to the residual, elsewhere than in its memory, and selected from in
        one pass: native calls make all that the exchange sends."""
        on_host = type(bucket.gradient) is np.ndarray
        return bucket.plan.in_one_pass and self.feedback and on_host

    def complete_slice(
        self, bucket: Bucket, part: tuple[int, int]
    ) -> tuple[SliceResidual | None, SliceResidual | None]:
        """As ``exchange.interface.Rank.complete_slice``."""
        if bucket.resting or len(bucket.ready) < len(bucket.members):
            self._set_aside(bucket)

        def kept(prefix: str) -> SliceResidual:
            names = [prefix + name for name in bucket.names]
            own, rest = self._memory.slice(names, bucket.sizes, part, bucket.dtype, bucket.gradient)
            return SliceResidual(own, rest, lambda rest: self._memory.put_back(names, bucket.sizes, rest))

        plan = bucket.plan
        return kept("") if plan.feeds_back and self.feedback else None, kept(VELOCITY) if plan.has_velocity else None
