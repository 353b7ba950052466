"""The anchor of one rank, and what TensorFlow does in an exchange; ``engine/local_sgd.py`` says when there is one.

Updates are flat NumPy arrays: they are encoded on the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import Parameter, Snapshot, Tensors
from hvd_deepreduce.engine.fragments import Fragment
from hvd_deepreduce.engine.local_sgd import Every, LocalExchanges, Times
from hvd_deepreduce.engine.quoting import quoted
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.tensorflow.collectives import TensorFlowCollectives, await_ranks

Array = npt.NDArray[Any]
ARRAYS = ("anchors", "bases", "outer")
"""Keys of a state that have dicts of flat arrays, besides the residuals."""


class _FlatArrays(Tensors[Array]):
    """Updates are flat NumPy arrays already."""

    def flat(self, gradient: Array, on_host: bool = False) -> Floats:
        return gradient

    def write(self, gradient: Array, reduced: Floats, scale: float = 1.0) -> None:
        np.multiply(reduced, gradient.dtype.type(scale), out=gradient)


class Updates(LocalExchanges[Array]):
    """
    Args:
        variables: those that are trained.
        config: with ``local``.
        outer: the optimizer of the anchor; None: that of ``config.local``.
        optimizer: returns that of this rank's steps, or None.
        every, times: as in ``LocalExchanges``.
        process_set: of the ranks that take part; None: all.
        check: called before an exchange.

    Attributes:
        variables: as given.
        anchors: by variable; float64 where it is, otherwise float32.
        bases: with ``times``, the anchors that this rank took last; otherwise empty.
        outer: the optimizer of the anchor.
    """

    advice = (
        "call hvd.broadcast_variables(model.variables, root_rank=0) before LocalSGD is made (and before fit: Horovod's "
        "BroadcastGlobalVariablesCallback does it after the first batch)"
    )

    def __init__(
        self,
        variables: list[tf.Variable],
        config: Config,
        outer: Any = None,
        optimizer: Callable[[], Any] = lambda: None,
        every: Every | None = None,
        times: Times | None = None,
        process_set: Any = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        # By number: names may differ from rank to rank, and from run to run.
        parameters = [
            Parameter(str(number), number, tuple(one.shape), one.dtype.name, known_as=one.name.removesuffix(":0"))
            for number, one in enumerate(variables)
        ]
        self.variables = variables
        self._optimizer = optimizer
        self._check_parameters = check
        self.collectives = TensorFlowCollectives(process_set)
        self.collectives.enroll()
        nbytes = [parameter.numel * one.dtype.size for parameter, one in zip(parameters, variables, strict=True)]
        super().__init__(
            config, self.collectives, parameters, nbytes, _FlatArrays(), lambda: [None] * len(variables), every, times
        )
        self.anchors = [
            tf.Variable(tf.cast(one, parameter.accumulated_in), name=f"anchor_{parameter.name}")
            for one, parameter in zip(variables, parameters, strict=True)
        ]
        self.bases = [] if times is None else [tf.Variable(anchor) for anchor in self.anchors]
        self.outer = self._default_outer() if outer is None else outer
        build(self.outer, self.anchors)

    def _default_outer(self) -> Any:
        local = self.local
        nesterov = local.nesterov and local.momentum > 0
        return tf.keras.optimizers.SGD(local.lr, momentum=local.momentum, nesterov=nesterov)

    def begin(self) -> None:
        """Takes the variables as the anchor. The ranks are compared again at the next exchange."""
        for number, variable in enumerate(self.variables):
            self.anchors[number].assign(tf.cast(variable, self.anchors[number].dtype))
            if self.bases:
                self.bases[number].assign(self.anchors[number])
        self.agreed = False

    # What is done in an exchange: as LocalExchanges says

    def check_parameters(self) -> None:
        self._check_parameters()

    def update(self, number: int) -> Array:
        base, own = (self.bases or self.anchors)[number], self.variables[number]
        return _flat(tf.cast(tf.cast(base, own.dtype), base.dtype) - tf.cast(own, base.dtype))

    def nothing(self, number: int) -> Array:
        parameter = self.parameters[number]
        return np.zeros(parameter.numel, parameter.accumulated_in)

    def finite(self, updates: Iterable[Array]) -> bool:
        return all(np.isfinite(update).all() for update in updates)

    def meet(self, word: Floats, name: str, hear: Callable[[Floats], object]) -> None:
        totals: list[Floats] = []

        def run() -> None:
            totals.append(self.collectives.sum(word, f"meeting.{name}"))

        if self.agreed:
            run()
        else:
            await_ranks(run)
        hear(totals[0])

    def start_small(self, updates: Mapping[int, Array]) -> list[tuple[list[int], Future[list[Floats]]]]:
        # A group of Horovod's has one dtype.
        groups: dict[np.dtype[Any], list[int]] = {}
        for number, update in updates.items():
            groups.setdefault(update.dtype, []).append(number)
        start, started = self.collectives.start_sums, []
        for numbers in groups.values():
            name = f"updates.{numbers[0]}.{len(numbers)}"
            started.append((numbers, start([updates[number] for number in numbers], name)))
        return started

    def finish_small(self, started: Sequence[tuple[list[int], Future[list[Floats]]]]) -> dict[int, Array]:
        return {
            number: total * total.dtype.type(1 / self.collectives.size())
            for numbers, pending in started
            for number, total in zip(numbers, pending.result(), strict=True)
        }

    def outer_step(self, fragment: Fragment[Array]) -> None:
        # What the optimizer makes of its step count, such as Adam's correction, goes by the steps of these variables.
        self.outer.iterations.assign(fragment.outer_steps)
        self.outer.apply_gradients([
            (tf.reshape(tf.constant(mean), self.anchors[number].shape), self.anchors[number])
            for number, mean in fragment.updates.items()
        ])  # fmt: skip

    def copy(self, number: int) -> tf.Tensor:
        return tf.identity(self.variables[number])

    def follow(self, number: int, start: tf.Tensor | None, keeps: float) -> None:
        own, anchor = self.variables[number], self.anchors[number]
        taken = tf.cast(anchor, own.dtype)
        if start is not None:
            own.assign_add(taken - start)
        elif keeps:
            own.assign_add((1 - keeps) * (taken - own))
        else:
            own.assign(taken)
        if self.bases:
            self.bases[number].assign(anchor)

    def renew(self, numbers: Sequence[int]) -> None:
        optimizer = self._optimizer()
        for one in [] if optimizer is None else variables_of(optimizer):
            if one.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(one)):
                one.assign(tf.zeros_like(one))

    def anchor_values(self, number: int) -> Floats:
        return _flat(self.anchors[number])

    def about_outer(self) -> str:
        return f"{type(self.outer).__name__} {json.dumps(self.outer.get_config(), sort_keys=True, default=_told)}"

    # State

    def close(self) -> None:
        """Ends the exchanges, and frees everything but the model."""
        self.engine.close()
        self.anchors, self.bases = [], []

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and flat arrays.

        Raises:
            RuntimeError: an exchange is in flight.
        """
        self.check_idle("state_dict")
        return {**self.engine.state_dict(), **self.local_state()}

    def local_state(self) -> dict[str, Any]:
        """Everything but the residuals."""
        rate = self.outer.get_config()["learning_rate"]
        return {
            **self.counts(),
            "anchors": {p.name: _flat(one) for p, one in zip(self.parameters, self.anchors, strict=True)},
            "bases": {p.name: _flat(one) for p, one in zip(self.parameters, self.bases, strict=False)},
            "outer": {str(place): _saved(one) for place, one in enumerate(variables_of(self.outer))},
            "outer_rate": None if isinstance(rate, Mapping) else float(rate),
        }

    def load_state_dict(self, state: State, reshard: Reshard) -> None:
        """Continues where ``state_dict`` was called.

        Raises:
            RuntimeError: an exchange is in flight.
            ValueError: as ``LocalSGD.load_state_dict``; nothing has changed then.
        """
        self.check_idle("load_state_dict")
        if reshard is False:
            self._check(state)
            own: Any = state
            self.engine.load_state_dict(state)
        elif isinstance(state, Mapping) or not isinstance(state, Iterable):
            self.engine.load_state_dict(state, reshard=reshard)  # which says what is wrong
            return
        else:
            states = iter(state)
            own = next(states, None)
            self._check(own)

            def checked() -> Iterator[Any]:
                yield own
                for one in states:
                    self._check(one)
                    yield one

            self.engine.load_state_dict(checked(), reshard=reshard)
        self._restore(own)

    def rewind(self, snapshot: Snapshot) -> None:
        """Returns to a state of this process, whatever its rank is now. Exchanges in flight are forgotten."""
        self.engine.rewind(snapshot)
        self._restore(snapshot.state)

    def _restore(self, own: Mapping[str, Any]) -> None:
        self.forget()
        for parameter, anchor in zip(self.parameters, self.anchors, strict=True):
            anchor.assign(own["anchors"][parameter.name].reshape(anchor.shape))
        for parameter, base in zip(self.parameters, self.bases, strict=False):
            base.assign((own["bases"] or own["anchors"])[parameter.name].reshape(base.shape))
        for place, one in enumerate(variables_of(self.outer)):
            one.assign(tf.cast(own["outer"][str(place)].reshape(one.shape), one.dtype))
        if own["outer_rate"] is not None:
            self.outer.learning_rate = own["outer_rate"]
        self.restore_counts(own)

    def _check(self, state: Any) -> None:
        """
        Raises:
            ValueError: this is not what ``state_dict`` returns, for this model, these fragments and this optimizer.
        """
        self.check_counts(state, {*ARRAYS, "outer_rate"})
        rate = state["outer_rate"]
        if rate is not None and not (isinstance(rate, float) and np.isfinite(rate)):
            raise ValueError(f"the learning rate of the outer optimizer is {quoted(rate)}; it must be a number")
        expected = {p.name: (p.numel, p.accumulated_in) for p in self.parameters}
        _check_arrays("the anchor", state["anchors"], expected)
        if state["bases"]:
            _check_arrays("the base", state["bases"], expected)
        kept = {str(at): (int(np.prod(v.shape)), _saved(v).dtype) for at, v in enumerate(variables_of(self.outer))}
        _check_arrays("the outer optimizer's variable", state["outer"], kept)


def variables_of(optimizer: Any) -> list[tf.Variable]:
    """Its step count and slots; a loss scale has none of its own that matter here."""
    own = getattr(optimizer, "inner_optimizer", optimizer).variables
    return list(own() if callable(own) else own)


def build(optimizer: Any, variables: list[tf.Variable]) -> None:
    """Makes the variables of an optimizer, for these."""
    if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
        _ = optimizer.iterations  # it comes first
        optimizer._create_all_weights(variables)
    else:
        optimizer.build(variables)


def _flat(tensor: Any) -> Array:
    return np.array(tensor).reshape(-1)


def _saved(variable: tf.Variable) -> Array:
    """As a dtype that a state can have; step counts are exact."""
    values = _flat(variable)
    return values if values.dtype == np.float32 else values.astype(np.float64)


def _told(value: Any) -> Any:
    """What JSON does not know, of an optimizer's settings."""
    return value.item() if isinstance(value, np.generic) else type(value).__name__


def _check_arrays(what: str, given: Any, expected: Mapping[str, tuple[int, np.dtype[Any]]]) -> None:
    """
    Raises:
        ValueError: these are not flat, finite arrays with the expected names, sizes and dtypes.
    """
    if not isinstance(given, Mapping) or given.keys() != expected.keys():
        raise ValueError(
            f"{what} of the state is of another model, or of another outer optimizer: load the state of this model"
        )
    for name, (numel, dtype) in expected.items():
        one = given[name]
        if not isinstance(one, np.ndarray) or one.shape != (numel,) or one.dtype != dtype:
            shown = f"{one.dtype} {list(one.shape)}" if isinstance(one, np.ndarray) else f"a {type(one).__name__}"
            raise ValueError(f"{what} {name} of the state is {shown}; it must be {dtype} [{numel}]")
        if not np.isfinite(one).all():
            raise ValueError(f"{what} {name} of the state contains NaN or infinity: load an older state")
