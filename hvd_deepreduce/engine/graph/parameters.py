"""Which parameters the gradients of graphs belong to.

Graphs whose gradients have the same shapes and dtypes share one list of parameters: TensorFlow traces a function again
for a new batch size. The numbers of a second list, with other shapes, continue where the first list ends. Where every
parameter of a model has a gradient, the numbers and so the containers are those of the PyTorch adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.agreement import Descriptions
from hvd_deepreduce.engine.engine import Engine
from hvd_deepreduce.engine.graph.slots import Graph, Signature, Slot
from hvd_deepreduce.engine.parameter import Parameter
from hvd_deepreduce.engine.rank_state import ElasticState, Snapshot
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.wire.quoting import quoted

_log = logging.getLogger("hvd_deepreduce")


class Variables:
    """The variables that a user named, for a config's overrides.

    Attributes:
        names: as their ``name``, without TensorFlow's ``:0``.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        self._given = [
            (variable.name.removesuffix(":0"), tuple(variable.shape), variable.dtype.name) for variable in variables
        ]
        self.names = [name for name, _, _ in self._given]

    def name_of(self, slot: Slot) -> str:
        """The name of the variable whose gradient is the slot's, by its position.

        Raises:
            ValueError: the variable there has another shape, or there is none.
        """
        name, shape, dtype = self._given[slot.position] if slot.position < len(self._given) else ("none", (), "")
        fits = len(shape) == len(slot.shape) and all(
            one in (-1, size) for one, size in zip(slot.shape, shape, strict=True)
        )
        if not fits or dtype != slot.dtype.name:
            raise ValueError(
                f"gradient {slot.position} is {slot.dtype.name} {list(slot.shape)}, and variable {slot.position} of "
                f"DeepReduce(variables=...) is {name}, {dtype} {list(shape)}: give the variables whose gradients "
                "Horovod gets, in its order, without those that have no gradient"
            )
        return name

    def check_count(self, graph: Graph) -> None:
        """Raises ``ValueError`` unless a complete graph has a gradient for each variable."""
        if len(graph.slots) != len(self._given):
            raise ValueError(
                f"Horovod got {len(graph.slots)} gradients, and DeepReduce(variables=...) has {len(self._given)} "
                "variables: give those that have a gradient, in Horovod's order"
            )


class GraphEngine(Engine):
    """An engine that gets to know its parameters from graphs. Callers hold the lock of its ``Steps``.

    Args:
        config, collectives: as for ``Engine``.
        variables: those to which the gradients of each graph belong, if the user has named them.
    """

    def __init__(self, config: Config, collectives: Collectives, variables: Variables | None = None) -> None:
        super().__init__(config, collectives, names=[] if variables is None else variables.names)
        self._variables = variables
        self._lists: dict[Signature, list[Parameter]] = {}
        self._restored = False

    def parameter_of(self, slot: Slot) -> Parameter:
        """The slot's parameter. The slot's graph must be complete."""
        return self.list_of(slot.graph)[slot.position]

    def list_of(self, graph: Graph) -> list[Parameter]:
        """The parameters of the graph's slots.

        Raises:
            ValueError: a state was loaded, and it is of another model.
        """
        if graph.parameters is None or graph.generation != self.generation:
            signature = graph.signature()
            if signature not in self._lists:
                if self._restored:
                    raise _other_model(signature, self._lists)
                if any(one.step for one in self.parameters.values()) and self.collectives.rank() == 0:
                    _log.warning(
                        "Horovod passes %d gradients in a step, of other shapes than before, when there were %s: they "
                        "begin with new residuals and step counts, and what the earlier ones have not sent waits until "
                        "they come again. If this is another model, make a DeepReduce of its own for it",
                        len(signature), " or ".join(str(len(one)) for one in self._lists),
                    )  # fmt: skip
                first = len(self.parameters)
                self._lists[signature] = parameters = [
                    Parameter(f"{first + s.position} {s.name}", first + s.position, s.shape, s.dtype.name)
                    for s in graph.slots
                ]
                self.parameters.update((parameter.name, parameter) for parameter in parameters)
            self._restored = False
            if self._variables is not None:
                self._variables.check_count(graph)
                for slot, parameter in zip(graph.slots, self._lists[signature], strict=True):
                    parameter.known_as = self._variables.name_of(slot)
            graph.parameters, graph.generation = self._lists[signature], self.generation
        return graph.parameters

    def descriptions(self) -> Descriptions:
        """All parameters, for comparison between ranks. By number: names may differ (use_generic_names of the tape)."""
        config = self.config
        return [
            (str(p.number), p.shape, p.dtype + f" {config.override_of(p.known_as)}" * bool(config.overrides))
            for p in self.parameters.values()
        ]

    def _described(self) -> list[list[tuple[str, tuple[int, ...], str]]]:
        return [[(p.name, p.shape, p.dtype) for p in parameters] for parameters in self._lists.values()]

    def state_dict(self) -> dict[str, Any]:
        """As ``Engine.state_dict``, with (name, shape, dtype) of the parameters of each list."""
        return {**super().state_dict(), "lists": self._described()}

    def load_state_dict(
        self, state: State, parameters: Iterable[Parameter] | None = None, *, reshard: Reshard = False
    ) -> None:
        """As ``Engine.load_state_dict``, with the parameters of the state."""
        first: Any = state
        if reshard is not False and isinstance(state, Iterable) and not isinstance(state, Mapping):
            states = iter(state)
            first = next(states, {})
            state = chain([first], _of_model(_lists_of(first), states))
        lists = self._known_lists(first)
        super().load_state_dict(state, chain(*lists.values()), reshard=reshard)
        self._lists, self._restored = lists, bool(lists)

    def resume(self, state: Mapping[str, Any], parameters: Iterable[Parameter] | None = None) -> None:
        """As ``Engine.resume``, with the parameters of the state. Lists that have come since the state was made begin
        anew, as they did before."""
        lists = _lists_of(state)
        super().resume(state, chain(*lists.values()))
        self._restored = bool(lists) and self._lists.keys() <= lists.keys()
        self._lists = lists

    def _known_lists(self, state: object) -> dict[Signature, list[Parameter]]:
        """The lists of a state. One that was saved before the first step has none.

        Raises:
            ValueError: it is of another model than the graphs here.
        """
        lists = _lists_of(state)
        if not lists and isinstance(state, Mapping) and not state.get("residuals", True):
            return lists
        for signature in self._lists:
            if signature not in lists:
                raise _other_model(signature, lists)
        return lists

    def elastic_state(self) -> ElasticState:
        return super().elastic_state()._replace(lists=self._described())

    def state_from_root(self, told: ElasticState) -> Snapshot:
        config, state = super().state_from_root(told)
        return Snapshot(config, {**state, "lists": told.lists})


def _of_model(lists: dict[Signature, list[Parameter]], states: Iterable[object]) -> Iterator[Any]:
    """The states, once their lists have been found to be these."""
    for state in states:
        if _lists_of(state) != lists:
            raise ValueError("the states are of different models: give the states of one checkpoint")
        yield state


def _lists_of(state: object) -> dict[Signature, list[Parameter]]:
    """The lists of parameters in a saved state, which may hold anything."""
    if not isinstance(state, Mapping) or "lists" not in state:
        raise _no_state("it has no lists")
    lists: dict[Signature, list[Parameter]] = {}
    known: set[str] = set()
    for described in _sequence(state["lists"]):
        parameters = []
        for one in _sequence(described):
            name, shape, dtype = one if len(_sequence(one)) == 3 else (None, (), None)
            sizes = _sequence(shape)
            whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= -1 for size in sizes)
            if not (isinstance(name, str) and isinstance(dtype, str) and whole):
                raise _no_state(f"its lists have {quoted(one)} in place of the name, shape and dtype of a parameter")
            if name in known:
                raise _no_state(f"it lists {quoted(name)} twice")
            parameters.append(Parameter(name, len(known), tuple(sizes), dtype))
            known.add(name)
        signature = tuple((parameter.shape, parameter.dtype) for parameter in parameters)
        if signature in lists:
            raise _no_state("two of its lists are of equal gradients")
        lists[signature] = parameters
    return lists


def _sequence(value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _no_state(f"it has {quoted(value)} in place of a list")
    return value


def _no_state(reason: str) -> ValueError:
    return ValueError(f"this is not a state of DeepReduce on TensorFlow: {reason}")


def _other_model(signature: Signature, lists: Iterable[Signature]) -> ValueError:
    def shown(one: Signature) -> str:
        return ", ".join(quoted(f"{dtype} {list(shape)}") for shape, dtype in one[:8]) + ", ..." * (len(one) > 8)

    return ValueError(
        f"the state is of another model: its gradients are {' or '.join(map(shown, islice(lists, 3)))}, but here they "
        f"are {shown(signature)}"
    )
