"""What is done with buckets that a framework makes: DDP's, and those of FSDP's modules. ``ddp.py`` and ``fsdp.py`` are
what the user sees of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.config import Config, ConfigError
from hvd_deepreduce.engine import Engine, Parameter, Reducer
from hvd_deepreduce.engine.dense_or_compressed import Choice
from hvd_deepreduce.engine.parameter import VELOCITY
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.interface import Pending
from hvd_deepreduce.exchange.settings import AllGather, AutoExchange, ReduceScatter
from hvd_deepreduce.torch.discovery import INSTEAD, look_at_optimizers
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.tensors import IS_TRAINED, TorchTensors, as_tensors, flush, keep_for_stream, of_each, on_host
from hvd_deepreduce.wire.standalone import ContainerError

FLOATS = tuple(map(np.dtype, (np.float32, np.float64)))
Loaded = tuple[State, Reshard]
"""What ``load_state_dict`` was given."""


class Where(NamedTuple):
    """The words of errors, for those who make the buckets.

    Attributes:
        who: takes the config.
        makes: a clause that says who makes the buckets.
        how: to change their size.
    """

    who: str
    makes: str
    how: str


DDP = Where(
    "DDP's hook", "DDP makes the buckets", "set the size of the buckets by DistributedDataParallel's bucket_cap_mb"
)
FSDP = Where("compress_replicas", "each module that fully_shard was applied to makes a bucket", "shard other modules")


class Made(NamedTuple):
    """A model whose gradients come in buckets.

    Attributes:
        trained: what a bucket names as its parameters, by their names.
        parameters: what the engine knows of them, in the same order.
        find_unused: whether the ranks tell each other which parameters they have used; else only of buckets with frozen
            ones.
        used: the ids of what this rank has used since the last step: who makes the buckets adds to it, and ``Buckets``
            clears it. None: a bucket comes when all of its parameters were used.
        values: a hash of each parameter's values, where these must be equal on all ranks when they are compared first.
        instead: the lines to write where the optimizer loses accuracy by compression.
        strided: of ``trained``, those whose gradients are in the order of their memory, which is another one, as in
            channels_last.
    """

    trained: Mapping[str, torch.Tensor]
    parameters: list[Parameter]
    find_unused: bool
    used: set[int] | None
    values: Callable[[], Mapping[str, int]] = dict
    instead: str = INSTEAD
    strided: Mapping[str, torch.Tensor] = {}


@dataclass(frozen=True)
class GradBucket:
    """As DDP's ``GradBucket``, for an adapter that makes its buckets.

    Attributes:
        number: in the order of the step.
        tensors: what has gradients.
        vector: these, one after the other; their means, when the step is over.
        last: whether it is the step's last one.
    """

    number: int
    tensors: Sequence[torch.Tensor]
    vector: torch.Tensor
    last: bool

    def index(self) -> int:
        return self.number

    def parameters(self) -> Sequence[torch.Tensor]:
        return self.tensors

    def buffer(self) -> torch.Tensor:
        return self.vector

    def is_last(self) -> bool:
        return self.last


class Unused(RuntimeError):
    """A backward pass has not used all parameters. In a dense step, their zeros have the right mean."""


class Buckets:
    """One rank's buckets, from the first one on; its methods are what ``DeepReduceState`` and ``Replicas`` call.

    Two threads work beside the backward pass: one encodes buckets and starts their exchanges, in their order; the other
    one waits for them and decodes. On a GPU, each has a stream, so that a bucket's encoding does not queue behind the
    exchange of the one before. An exchange of several collectives (``reduce_scatter``) is ended by the first thread,
    after all buckets have been started, so that all ranks issue the collectives in one order.

    Args:
        config: from ``for_buckets``.
        start_iter: iterations that are not compressed.
        made: finds the model. Its error becomes one of all ranks.
        loaded: a state to begin with; None: begin anew.

    Raises:
        RuntimeError: a rank has failed; on all ranks.

    Attributes:
        engine: this rank's.
    """

    def __init__(
        self,
        config: Config,
        collectives: DistributedCollectives,
        tensors: TorchTensors,
        start_iter: int,
        made: Callable[[], Made],
        loaded: Loaded | None,
    ) -> None:
        self._collectives, self._tensors, self._start_iter = collectives, tensors, start_iter
        self.iteration = 0
        self._dense = self._passing = self._flags_due = False
        failure: Exception | None = None
        try:
            model = made()
            self._find_unused, self._used, self._values = model.find_unused, model.used, model.values
            self._trained, self._strided = model.trained, model.strided
            self._parameter_of = dict(zip(map(id, model.trained.values()), model.parameters, strict=True))
            self.engine = Engine(config, collectives, model.parameters)
            if loaded is not None:
                self.load(*loaded)
        except Exception as error:
            failure = error
        collectives.check(failure)
        self._reducer = Reducer(self.engine, tensors)
        first = next(iter(self._trained.values()))
        # What they do is short, and the other ranks wait for it: it goes before the backward pass.
        self._start_stream, self._finish_stream = (
            torch.cuda.Stream(first.device, priority=-1) if first.is_cuda else None  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        # A thread begins on the first GPU, and would make a context there, which takes half a gigabyte.
        begin = partial(torch.cuda.set_device, first.device) if first.is_cuda else None
        self._starter, self._finisher = (
            ThreadPoolExecutor(1, f"deepreduce {what}", begin) for what in ("start", "finish")
        )
        self._finished: list[Future[None]] = []
        self._later: list[Callable[[], None]] = []
        self._voted: tuple[Any, torch.Tensor] | None = None  # a step check that this rank has begun before its step
        # Of this step's buckets, where exchanges have several collectives: lets one go on.
        self._turns: list[Callable[[], bool]] = []
        # By bucket: the ids of its parameters' tensors, the parameters, and their sizes.
        self._divided: dict[int, tuple[Sequence[int], list[Parameter], list[int]]] = {}
        look_at_optimizers(self.engine, self, self._parameter_of, model.instead)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        state = self.engine.state_dict()
        residuals = {name: self.in_order(name, one) for name, one in state["residuals"].items()}
        return {**as_tensors({**state, "residuals": residuals}), "iteration": self.iteration}

    def in_order(self, name: str, residual: Floats, of_memory: bool = False) -> Floats:
        """A residual, which is in the order of the parameter's memory, in that of its elements, as a saved one is; or
        the other way round. A velocity has its parameter's."""
        like = self._strided.get(name.removeprefix(VELOCITY))
        if like is None or np.shape(residual) != (like.numel(),):
            return residual
        given = torch.from_numpy(residual)
        if not of_memory:
            return given.as_strided(like.size(), like.stride()).flatten().numpy()
        ordered = torch.empty_like(given)
        ordered.as_strided(like.size(), like.stride()).copy_(given.reshape(like.size()))
        return ordered.numpy()

    def _in_memory_order(self, state: Any) -> Any:
        """A state that was read, if it is one, with residuals as the buckets have them."""
        residuals = state.get("residuals") if isinstance(state, Mapping) and self._strided else None
        if not isinstance(residuals, Mapping):
            return state
        ordered = {
            name: self.in_order(name, one, of_memory=True) if getattr(one, "dtype", None) in FLOATS else one
            for name, one in residuals.items()
        }
        return {**state, "residuals": ordered}

    def settle(self) -> None:
        """Waits for what was enqueued, on any stream."""
        self._tensors.settle(self._trained.values())

    def load(self, state: State, reshard: Reshard) -> None:
        many = reshard is not False and not isinstance(state, Mapping)
        read = of_each(on_host, state, reshard)
        first = next(read, None) if many else read
        if isinstance(first, Mapping) and not first:  # saved before the first iteration
            now = self.engine.state_dict()
            first = read = {**now, "steps": dict.fromkeys(now["steps"], 0), "residuals": {}, "iteration": 0}
            many = reshard = False
        iteration = first.get("iteration") if isinstance(first, Mapping) else None
        if type(iteration) is not int or iteration < 0:
            raise ValueError(
                "this is not a state of DeepReduceState or of compress_replicas: load what its state_dict returned"
            )
        ordered = self._in_memory_order(read)
        if many:
            ordered = map(self._in_memory_order, _of(iteration, chain([first], read)))
        self.engine.load_state_dict(ordered, reshard=reshard)
        self.iteration = iteration

    def set_config(self, config: Config) -> None:
        self.engine.set_config(config)

    def close(self) -> None:
        self._starter.shutdown()
        self._finisher.shutdown()
        self.engine.close()
        self._trained, self._parameter_of, self._divided = {}, {}, {}

    # A step

    def take(self, bucket: Any, failure: Exception | None = None) -> torch.futures.Future[torch.Tensor]:
        """Takes a bucket; the last one of a step waits for all.

        Args:
            failure: an error that this rank's gradients of the bucket have. All ranks get it. Unless it is ``Unused``,
                the buffer need not have memory for all elements.
        """
        engine, buffer = self.engine, bucket.buffer()
        engine.check_open()
        ready = self._tensors.record(self._tensors.device(buffer))
        if bucket.index() == 0:
            self._finished, self._later = [], []
            if engine.choice and self.iteration <= self._start_iter:
                engine.choice = Choice()  # iterations that are dense by order would be taken for trials
            engine.begin_step()
            # One rank exchanges nothing: its gradients stay as they are, as under Horovod.
            alone = self._collectives.size() == 1 and not engine.config.has_velocity
            self._dense = alone or self.iteration < self._start_iter or engine.dense
            # A dense step needs no step check; and no thread, unless residuals are to be added.
            known = self._dense and engine.agreed
            self._passing = known and not any(map(engine.to_flush, engine.parameters.values()))
            if not known:
                self._step_check = self._starter.submit(self._check_step, ready)
                if not engine.agreed:  # the ranks may choose the exchange, which says how buckets are finished
                    self._step_check.exception()  # ``_start`` raises it
        if self._passing:
            if failure is not None and not isinstance(failure, Unused):
                raise failure  # no message goes ahead of such a step: the others wait for their timeout
            return self._pass(bucket, buffer)
        future: torch.futures.Future[torch.Tensor]
        future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        tensors = bucket.parameters()
        used = None
        if self._used is not None and (self._find_unused or not all(map(IS_TRAINED, tensors))):  # alike on all ranks
            used = [id(one) in self._used for one in tensors]
        started = self._starter.submit(self._start, bucket.index(), tensors, used, buffer, ready, failure)
        if engine.exchange.several and not self._dense:
            self._later.append(partial(self._finish, self._start_stream, started, buffer, future))
        else:
            finished = self._finisher.submit(self._finish, self._finish_stream, started, buffer, future)
            self._finished.append(finished)
        if bucket.is_last():
            if self._later:
                self._finished.append(self._starter.submit(self._advance))
            self._finished += map(self._starter.submit, self._later)
            errors = [one.exception() for one in self._finished]
            self._end_step()
            for error in errors:
                if error is not None:
                    self.take_leave()
                    raise error
        return future

    def _end_step(self) -> None:
        self.iteration += 1
        self.engine.stats.end_step()
        if self._used is not None:
            self._used.clear()

    def take_leave(self) -> None:
        """After an error, this rank begins no other step. If others have applied this one, it says so in the step check
        of their next. With ``mode: auto``, that may be a step without a step check."""
        if self.engine.failed and self.engine.choice is None and self._voted is None:
            with suppress(RuntimeError):  # another rank may have died
                self._voted = self._collectives.start_vote(self._vote())

    def _vote(self) -> Floats:
        frozen = ""
        if not all(map(IS_TRAINED, self._trained.values())):
            frozen = ", ".join(name for name, one in self._trained.items() if not one.requires_grad)
            frozen = f"{frozen[:200]} ({len(frozen)} characters, {crc32(frozen.encode()):x})"
        place: dict[str, int | str] = {"iteration": self.iteration, "frozen parameters": frozen}
        return self.engine.vote(self.engine.agreed, place=place)

    def _pass(self, bucket: Any, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Averages a bucket as DDP does without a hook."""
        self.engine.count_allreduce(buffer.nbytes, buffer.nbytes)
        future = self._collectives.allreduce(buffer.div_(self._collectives.size())).get_future()
        if bucket.is_last():
            self._end_step()
        averaged: torch.futures.Future[torch.Tensor] = future.then(lambda _: buffer)
        return averaged

    def _advance(self) -> None:
        """Lets the exchanges of all buckets go on, so that their last collectives are in flight together."""
        with torch.cuda.stream(self._start_stream):
            self.engine.exchange.drive(self._turns)

    def _take_turns(self, go_on: Callable[[], bool]) -> None:
        """A bucket's exchange was started."""
        self._turns.append(go_on)
        self.engine.exchange.overlap(self._turns)

    def _check_step(self, ready: Callable[[], None] | None) -> None:
        self._turns = []
        voted, self._voted = self._voted or self._collectives.start_vote(self._vote()), None
        with torch.cuda.stream(self._start_stream):
            if ready is not None:  # the parameters are compared
                ready()
            self.engine.tally(self._collectives.wait_votes(voted), self._agree)

    def _agree(self) -> None:
        about = f" at iteration {self.iteration}, compressed from iteration {self._start_iter} on,"
        parameters = self.engine.parameters.values()
        self.engine.agree(
            [(one.name, one.shape, one.dtype + about * (not at)) for at, one in enumerate(parameters)],
            self._values() if not self.engine.agreed else {},
            "broadcast the parameters of one replica to the others before the first step",
        )

    def _start(
        self,
        number: int,
        tensors: Sequence[torch.Tensor],
        used: list[bool] | None,
        buffer: torch.Tensor,
        ready: Callable[[], None] | None,
        failure: Exception | None,
    ) -> Callable[[], None]:
        """Starts a bucket's exchange. Returns what ends it: the buffer holds the mean then."""
        self._step_check.result()
        with torch.cuda.stream(self._start_stream):
            if ready is not None:
                ready()
                keep_for_stream(buffer)
            begun, self._flags_due = self._collectives.exchanges, used is not None
            try:
                if failure is not None and not self._dense:
                    raise failure
                ids = list(map(id, tensors))
                known, parameters, sizes = self._divided.get(number, ((), [], []))
                if known != ids:
                    parameters = [self.parameter_of(tensor) for tensor in tensors]
                    sizes = [parameter.numel for parameter in parameters]
                    self._divided[number] = ids, parameters, sizes
                parts = list(torch.split(buffer, sizes))
                if self._dense:
                    failure = None if isinstance(failure, Unused) else failure
                    return self._start_dense(parameters, used, parts, buffer, failure)
                return self._start_compressed(number, parameters, used, parts, buffer)
            except Exception as error:
                if not self._dense and self._collectives.exchanges == begun:  # the others wait for this rank
                    if self._flags_due:  # which the others are waiting for
                        self._collectives.set_by_any(torch.ones(len(tensors), dtype=torch.bool))
                    failed = self.engine.exchange.start_failed(self.engine, error, buffer.numel())
                    if failed is not None:
                        self._take_turns(failed.advance)
                        return self._failing(failed, error)
                    self._collectives.check(error)
                raise

    def _failing(self, exchange: Pending, error: Exception) -> Callable[[], None]:
        """Ends a bucket's exchange, of which this rank has failed, in its turn."""

        def finish() -> None:
            try:
                exchange.result(1.0)
            except ContainerError as told:
                raise told from error

        return finish

    def parameter_of(self, tensor: torch.Tensor) -> Parameter:
        """The parameter that a bucket names.

        Raises:
            ValueError: the model has none.
        """
        known = self._parameter_of.get(id(tensor))
        if known is None:
            raise ValueError(
                f"a gradient of shape {list(tensor.shape)} does not belong to the model that this DeepReduceState was "
                "first used with: make a DeepReduceState for each model"
            )
        return known

    def _used_by_any(self, used: list[bool] | None, count: int) -> list[bool]:
        """Of a bucket's parameters, those that a rank has used. The framework drops the results of the others, and what
        their gradients hold may be left from an earlier step."""
        if used is None:
            return [True] * count
        by_any = self._collectives.set_by_any(torch.tensor(used))
        self._flags_due = False
        return by_any

    def _start_dense(
        self,
        parameters: Iterable[Parameter],
        used: list[bool] | None,
        parts: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        failure: Exception | None,
    ) -> Callable[[], None]:
        used = self._used_by_any(used, len(parts))
        try:
            if failure is not None:
                raise failure
            for parameter, by_any, part in zip(parameters, used, parts, strict=True):
                if by_any and self.engine.to_flush(parameter):
                    flush(self.engine, self._tensors, parameter, part)
        except Exception as error:
            failure = error
        self._collectives.check(failure)
        self.engine.count_allreduce(buffer.nbytes, buffer.nbytes)
        work = self._collectives.allreduce(buffer.div_(self._collectives.size()))

        def finish() -> None:
            work.wait()

        return finish

    def _start_compressed(
        self,
        number: int,
        parameters: list[Parameter],
        used: list[bool] | None,
        parts: list[torch.Tensor],
        buffer: torch.Tensor,
    ) -> Callable[[], None]:
        ranks = self._collectives.size()
        self.engine.stats.add(dense=traffic.allreduce(buffer.nbytes, ranks).sent)
        used = self._used_by_any(used, len(parts))
        if not all(used):  # the residuals of parameters that no rank has used stay as they are
            step = max(parameter.step for parameter in parameters)
            for parameter, by_any in zip(parameters, used, strict=True):
                parameter.step = step if by_any else step + 1  # the bucket's step is that of its members
            parameters = [parameter for parameter, by_any in zip(parameters, used, strict=True) if by_any]
            parts = [part for part, by_any in zip(parts, used, strict=True) if by_any]
            if not parts:
                return lambda: None
        # Under fp16_compress_wrapper the buffer has another dtype than the parameters. It is converted here:
        # ``start_bucket`` would do it in memory that the one stream has, and that is freed while the other one uses it.
        dtype = torch.float64 if parameters[0].accumulated_in.itemsize == 8 else torch.float32
        targets = [buffer] if sum(map(len, parts)) == len(buffer) else parts
        gradient = (buffer if targets[0] is buffer else torch.cat(parts)).to(dtype)
        ticket = self._reducer.start_bucket(parameters, number, gradient)
        if self.engine.exchange.several:
            self._take_turns(partial(self._reducer.advance, ticket))

        def finish() -> None:
            if gradient is not buffer:
                keep_for_stream(gradient)
            self._reducer.finish(ticket, 1 / ranks)
            if gradient is not buffer:
                means = torch.split(gradient, list(map(len, targets)))
                with self.engine.receiving():
                    for target, mean in zip(targets, means, strict=True):
                        target.copy_(mean)

        return finish

    def _finish(
        self,
        stream: torch.cuda.Stream | None,
        started: Future[Callable[[], None]],
        buffer: torch.Tensor,
        future: torch.futures.Future[torch.Tensor],
    ) -> None:
        finish = started.result()
        with torch.cuda.stream(stream):
            if stream is not None:
                keep_for_stream(buffer)
            finish()
            future.set_result(buffer)


def advised(error: Exception, advice: str) -> Exception:
    """The same error, which says at its end what to do now."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0].rstrip('.')}. {advice}", *error.args[1:])
    elif hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(advice)
    return error


def _of(iteration: int, states: Iterable[Any]) -> Iterator[Any]:
    """The states, once they have been found to be of this iteration."""
    for state in states:
        if isinstance(state, Mapping) and state.get("iteration") != iteration:
            raise ValueError("the states are of different iterations: give the states of one checkpoint")
        yield state


def for_buckets(config: Config, start_iter: int, where: Where = DDP) -> Config:
    """The config for buckets that a framework makes.

    Raises:
        ConfigError: a setting has no effect there, or cannot work.
    """
    if config.local is not None:
        raise ConfigError(
            f"this config exchanges updates of the parameters (its key local), and {where.who} exchanges gradients. "
            "Use LocalSGD, with the model itself in place of a DistributedDataParallel: optimizer = LocalSGD(torch."
            'optim.AdamW(model.parameters(), lr), model, "adamw_safe", process_group=torch.distributed.group.WORLD). '
            "Or give another config, or local=None"
        )
    if not isinstance(config.exchange, AllGather | AutoExchange | ReduceScatter):
        raise ConfigError(
            f"exchange is {config.exchange.name!r}, and {where.who} has 'allgather', 'reduce_scatter' and 'auto' only: "
            "set one of these"
        )
    if config.scope == "model":
        raise ConfigError(
            f"scope is 'model', and {where.makes}: set scope to 'bucket' (with exchange 'auto' or 'reduce_scatter' the "
            f"default is 'model'), and {where.how}"
        )
    if config.bucket_bytes != Config.model_fields["bucket_bytes"].default:
        raise ConfigError(
            f"bucket_bytes is {config.bucket_bytes} and has no effect, since {where.makes}: leave it out, and "
            f"{where.how}"
        )
    if config.min_elements:
        raise ConfigError(
            f"min_elements is {config.min_elements} and has no effect, since small gradients are in buckets with "
            "others: leave it out"
        )
    if start_iter and config.momentum is not None:
        raise ConfigError(
            f"start_iter is {start_iter} and memory is {config.momentum.name!r}, which gives a momentum to "
            "compressed gradients only: leave start_iter out, or use density_schedule"
        )
    return Config.load(config, scope="bucket", selection="tensor") if config.scope == "tensor" else config
