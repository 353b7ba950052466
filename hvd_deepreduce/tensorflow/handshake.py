"""Compares the ranks: their configs while the first function is traced, their models when a first step runs."""

from __future__ import annotations

from threading import Lock

from hvd_deepreduce.engine import Engine
from hvd_deepreduce.tensorflow.collectives import TensorFlowCollectives
from hvd_deepreduce.tensorflow.graph import Graphs
from hvd_deepreduce.tensorflow.parameters import GraphParameters
from hvd_deepreduce.tensorflow.steps import Steps

# Number of DeepReduces that have compared their configs, by process set. The order is the same on all ranks.
_numbers: dict[int, int] = {}
# Those that have not compared their models yet, in the order in which their functions were traced. TensorFlow may run
# any of them first, and another one on another rank; so the first one that runs compares all of them, in this order.
_waiting: list[Handshake] = []
_comparing = Lock()


class Handshake:
    """One DeepReduce's part in the comparison.

    Attributes:
        number: of the DeepReduce among those of its process set; the same on all ranks.
        configs_agree, models_agree: whether the comparison was made, without a difference.
    """

    def __init__(
        self,
        engine: Engine,
        collectives: TensorFlowCollectives,
        graphs: Graphs,
        parameters: GraphParameters,
        steps: Steps,
    ) -> None:
        self.number = 0
        self.configs_agree = False
        self.models_agree = False
        self._engine = engine
        self._collectives = collectives
        self._graphs = graphs
        self._parameters = parameters
        self._steps = steps
        self._failure: Exception | None = None

    def compare_configs(self) -> None:
        """Compares release and config; called while a function is traced.

        Raises:
            MismatchError: they differ; raised on all ranks.
        """
        if self._collectives.size() > 1:
            self._engine.agree([])
        self.configs_agree = True
        with _comparing:
            chosen = self._collectives.process_set.process_set_id
            self.number = _numbers[chosen] = _numbers.get(chosen, 0) + 1
            _waiting.append(self)

    def compare_models(self) -> None:
        """Compares the models of all DeepReduces that have not done so; called before the first gradient is used.

        Raises:
            MismatchError: this one's differ; raised on all ranks, for each gradient of the step.
            ValueError: a state of another model was loaded.
        """
        with _comparing:
            waiting = list(_waiting)
            _waiting.clear()
            if self not in waiting and not self.models_agree and self._failure is None:
                waiting.append(self)
            for one in waiting:
                one._compare_model()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """The comparison no longer waits for this one's model."""
        with _comparing:
            if self in _waiting:
                _waiting.remove(self)

    def forget_failure(self) -> None:
        """The next gradient compares the models again."""
        self._failure = None

    def _compare_model(self) -> None:
        try:
            with self._steps.lock:
                for graph in self._graphs.all():
                    if graph.complete:
                        self._parameters.list_of(graph)
                descriptions = self._parameters.descriptions()
            self._engine.agree(descriptions)
            self.models_agree = True
        except Exception as error:
            self._failure = error
