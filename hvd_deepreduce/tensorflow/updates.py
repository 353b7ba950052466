"""What LocalSGD does with TensorFlow's variables; ``engine/local_exchanges.py`` says when. Updates are flat NumPy
arrays: they are encoded on the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine import Parameter, Tensors
from hvd_deepreduce.engine.fragments import Fragment
from hvd_deepreduce.engine.local_exchanges import LocalExchanges
from hvd_deepreduce.engine.local_options import Options
from hvd_deepreduce.engine.local_sgd import not_exchanged
from hvd_deepreduce.tensorflow.collectives import TensorFlowCollectives, await_ranks
from hvd_deepreduce.wire.quoting import quoted

Array = npt.NDArray[Any]
ARRAYS = ("anchors", "bases", "outer", "means", "starts", "unsent")
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
        given: settings.
        outer: the optimizer of the anchor; None: that of ``config.local``.
        trains: returns the model, or None.
        optimizer: returns that of this rank's steps, or None.
        process_set: of the ranks that take part; None: all.
    """

    advice = (
        "call hvd.broadcast_variables(model.variables, root_rank=0) before LocalSGD is made (and before fit: Horovod's "
        "BroadcastGlobalVariablesCallback does it after the first batch)"
    )
    keys = ("outer", "outer_rate")
    flat = True

    def __init__(
        self,
        variables: list[tf.Variable],
        given: Options,
        outer: Any,
        trains: Callable[[], Any],
        optimizer: Callable[[], Any],
        process_set: Any,
    ) -> None:
        # By number: names may differ from rank to rank, and from run to run.
        parameters = [
            Parameter(str(number), number, tuple(one.shape), one.dtype.name, known_as=one.name.removesuffix(":0"))
            for number, one in enumerate(variables)
        ]
        self.variables = variables
        self._seen: dict[int, Array] = {}  # values after the last step of what was not trainable then, by number
        self._given_outer, self._trains, self._optimizer = outer, trains, optimizer
        collectives = TensorFlowCollectives(process_set)
        collectives.enroll()
        nbytes = [parameter.numel * one.dtype.size for parameter, one in zip(parameters, variables, strict=True)]
        super().__init__(given, collectives, parameters, nbytes, _FlatArrays())
        self.begin()

    def move_anchors(self) -> None:
        self._seen = {}
        for kept in (self.anchors, self.bases):
            for one, variable in zip(kept, self.variables, strict=bool(kept)):
                one.assign(tf.cast(variable, one.dtype))

    def loaded(self) -> bool:
        """Whether a variable is not its anchor, rounded, though there was no step since the last exchange."""
        apart = self._times is not None or self.local.mix is not None
        if apart or any(self.clock > one.began for one in self.fragments):
            return False
        pairs = zip(self.anchors, self.variables, strict=True)
        return any(bool(tf.reduce_any(tf.cast(anchor, one.dtype) != one)) for anchor, one in pairs)

    # As LocalState and LocalExchanges say

    def new_anchors(self) -> tuple[list[tf.Variable], Any]:
        anchors = [
            tf.Variable(tf.cast(one, parameter.accumulated_in), name=f"anchor_{parameter.name}")
            for one, parameter in zip(self.variables, self.parameters, strict=True)
        ]
        local, outer = self.local, self.outer or self._given_outer
        if outer is None:
            nesterov = local.nesterov and local.momentum > 0
            outer = tf.keras.optimizers.SGD(local.lr, momentum=local.momentum, nesterov=nesterov)
        if self.outer is None:
            build(outer, anchors)
        return anchors, outer

    def check_parameters(self) -> None:
        known = {id(one) for one in self.variables}
        late = [one for one in getattr(self._trains(), "trainable_variables", ()) if id(one) not in known]
        if late:
            how = "variables were made, or became trainable, after LocalSGD was made, or are of another model"
            raise not_exchanged(self.kind, how, (one.name for one in late[:5]))

    def frozen(self) -> list[int]:
        trained = getattr(self._trains(), "trainable_variables", None)
        if trained is None:
            return []
        ids = set(map(id, trained))
        untrained = [number for number, one in enumerate(self.variables) if id(one) not in ids]
        before, self._seen = self._seen, {number: _flat(self.variables[number]) for number in untrained}
        return [number for number in untrained if not self._has_changed(number, before.get(number))]

    def _has_changed(self, number: int, before: Array | None) -> bool:
        """Whether a variable was trained, though its layer is not trainable after the step: a discriminator is not
        during the generator's. In the first step in which it is not, before a first exchange, the anchor tells;
        otherwise it is thought to be at rest, as after ``sync``."""
        if before is None:
            return not self.clock and bool(self.update(number).any())
        return not np.array_equal(before, self._seen[number])

    def _note(self, number: int) -> None:
        """After an exchange has changed a variable."""
        if number in self._seen:
            self._seen[number] = _flat(self.variables[number])

    def update(self, number: int) -> Array:
        base, own = (self.bases or self.anchors)[number], self.variables[number]
        return _flat(tf.cast(tf.cast(base, own.dtype), base.dtype) - tf.cast(own, base.dtype))

    def nothing(self, number: int) -> Array:
        parameter = self.parameters[number]
        return np.zeros(parameter.numel, parameter.accumulated_in)

    def finite(self, updates: Iterable[Array]) -> bool:
        return all(np.isfinite(update).all() for update in updates)

    def check_step(self, vote: Floats, name: str, tally: Callable[[Floats], object]) -> None:
        def meet() -> Floats:
            total: Floats = self.collectives.start_sum(vote, f"step_check.{name}").result()
            return total

        tally(meet() if self.agreed else await_ranks(meet))

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
        self._note(number)

    def take_back(self, number: int, start: tf.Tensor, unsent: Array) -> tf.Tensor:
        own = self.variables[number]
        moved = tf.cast(tf.cast(start, unsent.dtype) + tf.reshape(tf.constant(unsent), own.shape), own.dtype)
        own.assign_add(moved - start)
        self._note(number)
        return moved

    def renew(self, numbers: Sequence[int]) -> None:
        optimizer = self._optimizer()
        for one in [] if optimizer is None else variables_of(optimizer):
            if one.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(one)):
                one.assign(tf.zeros_like(one))

    def about_outer(self) -> str:
        return f"{type(self.outer).__name__} {json.dumps(self.outer.get_config(), sort_keys=True, default=_told)}"

    def values(self, anchor: Any) -> Floats:
        return anchor if isinstance(anchor, np.ndarray) else _flat(tf.convert_to_tensor(anchor))

    def saved(self, number: int, values: Any) -> Floats:
        return self.values(values).astype(self.parameters[number].accumulated_in)

    def mean_of(self, number: int, saved: Array) -> Array:
        return saved.copy()

    def copy_of(self, number: int, saved: Array) -> tf.Tensor:
        own = self.variables[number]
        return tf.cast(tf.reshape(tf.constant(saved), own.shape), own.dtype)

    def outer_state(self) -> dict[str, Any]:
        rate = self.outer.get_config()["learning_rate"]
        return {
            "outer": {str(place): _saved(one) for place, one in enumerate(variables_of(self.outer))},
            "outer_rate": None if isinstance(rate, Mapping) else float(rate),
        }

    def restoring(self, state: Mapping[str, Any]) -> Callable[[], None]:
        outer, rate = variables_of(self.outer), state["outer_rate"]
        if rate is not None and not (isinstance(rate, float) and np.isfinite(rate)):
            raise ValueError(f"the learning rate of the outer optimizer is {quoted(rate)}; it must be a number")
        expected = {str(at): ((int(np.prod(one.shape)),), _saved(one).dtype) for at, one in enumerate(outer)}
        self.check_arrays("the outer optimizer's variable", state["outer"], expected)

        def restore() -> None:
            for kept, given in ((self.anchors, state["anchors"]), (self.bases, state["bases"] or state["anchors"])):
                for parameter, one in zip(self.parameters, kept, strict=bool(kept)):
                    one.assign(given[parameter.name].reshape(one.shape))
            for at, one in enumerate(outer):
                one.assign(tf.cast(state["outer"][str(at)].reshape(one.shape), one.dtype))
            if rate is not None:
                self.outer.learning_rate = rate
            self._seen = {}

        return restore


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
