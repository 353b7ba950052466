"""Compares the ranks: their configs while the first function is traced, their models when a first step runs.

In an elastic job some ranks trace their functions when others have long been in their steps. There, configs are
compared together with models.
"""

from __future__ import annotations

from threading import Lock
from weakref import WeakSet

from hvd_deepreduce.engine.graph.parameters import GraphEngine
from hvd_deepreduce.engine.graph.steps import Steps
from hvd_deepreduce.exchange.statements import gather, refusal
from hvd_deepreduce.tensorflow.collectives import TensorFlowCollectives
from hvd_deepreduce.tensorflow.graph import Graphs
from hvd_deepreduce.wire.quoting import quoted

# Number of DeepReduces that were enrolled, by process set. The order is the same on all ranks.
_numbers: dict[int, int] = {}
# Those that have not compared their models yet, in the order in which their functions were traced. TensorFlow may run
# any of them first, and another one on another rank; so the first one that runs compares all of them, in this order.
_waiting: list[Handshake] = []
_comparing = Lock()
# Those that have a number.
_enrolled: WeakSet[Handshake] = WeakSet()


class Handshake:
    """One DeepReduce's part in the comparison.

    Attributes:
        number: of the DeepReduce among those of its process set; the same on all ranks.
        configs_agree, models_agree: whether the comparison was made, without a difference.
        greets: whether a rank of an elastic job may be new without a word: it waits for all others to meet.
    """

    def __init__(
        self,
        engine: GraphEngine,
        collectives: TensorFlowCollectives,
        graphs: Graphs,
        steps: Steps,
    ) -> None:
        self.number = 0
        self.configs_agree = False
        self.models_agree = False
        self.greets = collectives.elastic()
        self._spoke = False  # since the models were compared
        self._engine = engine
        self._collectives = collectives
        self._graphs = graphs
        self._steps = steps
        self._failure: Exception | None = None

    def enroll(self) -> None:
        """Gives the DeepReduce its number; called when the first gradient is traced."""
        if not self.number:
            with _comparing:
                chosen = self._collectives.process_set.process_set_id
                self.number = _numbers[chosen] = _numbers.get(chosen, 0) + 1
                _waiting.append(self)
                _enrolled.add(self)

    def compare_configs(self) -> None:
        """Compares release and config; called while a function is traced.

        Raises:
            RuntimeError: a rank has called ``hvd.join()``.
            MismatchError: they differ; raised on all ranks.
        """
        if self._collectives.size() > 1 and not self._collectives.elastic():
            try:
                votes = self._collectives.sum_votes(self._engine.vote(False))
                self._engine.tally(votes, lambda: self._engine.agree([]))
            except Exception:
                self.withdraw()
                raise
        self.configs_agree = True

    def withdraw(self) -> None:
        """Takes ``enroll`` back if configs were not compared: other ranks may not have traced the function at all."""
        with _comparing:
            if self.configs_agree or not self.number:
                return
            _numbers[self._collectives.process_set.process_set_id] -= 1
            self.number = 0
            self._leave()

    def compare_models(self) -> None:
        """Compares the models of all DeepReduces that have not done so; called before the first gradient is used.

        Raises:
            MismatchError: this one's differ; raised on all ranks, for each gradient of the step.
            ValueError: a state of another model was loaded.
        """
        with _comparing:
            if self not in _waiting and not self.models_agree and self._failure is None:
                _waiting.append(self)
            if self._collectives.elastic():
                chosen = self._common()
            else:
                chosen = list(_waiting) if self in _waiting else []
            for one in chosen:
                if one in _waiting:
                    _waiting.remove(one)
                one._compare_model()
        if self._failure is not None:
            raise self._failure

    def speak(self) -> bool:
        """Whether the models agree, as this rank says in a step check."""
        self._spoke = True
        return self.models_agree

    def _common(self) -> list[Handshake]:
        """Those that all ranks can compare now: another rank may not have traced all functions yet. Where a rank is
        new, another one has compared nothing since it has spoken in the step check that found the new one."""
        process_set = self._collectives.process_set
        able = [one for one in _enrolled if one in _waiting or one._spoke]
        waiting = {one.number: one for one in able if one._collectives.process_set is process_set}
        common = set(waiting)
        for rank, told in enumerate(gather(self._collectives, {"waiting": sorted(waiting)}, "handshake")):
            theirs = told.get("waiting")
            if not isinstance(theirs, list) or not all(type(number) is int for number in theirs):
                raise refusal(rank, f"sent no list of its comparisons, but {quoted(told)}")
            common &= set(theirs)
        return [waiting[number] for number in sorted(common)]

    def repeat(self) -> None:
        """The next step compares the models again, because ranks may have come or gone."""
        with _comparing:
            self.models_agree, self._failure = False, None
            if self.number and self not in _waiting:
                _waiting.append(self)

    def close(self) -> None:
        """The comparison no longer waits for this one's model."""
        with _comparing:
            self._leave()

    def _leave(self) -> None:
        _enrolled.discard(self)
        if self in _waiting:
            _waiting.remove(self)

    def forget_failure(self) -> None:
        """The next gradient compares the models again."""
        self._failure = None

    def _compare_model(self) -> None:
        self._spoke = False
        try:
            with self._steps.lock:
                for graph in self._graphs.all():
                    if graph.complete:
                        self._engine.list_of(graph)
                descriptions = self._engine.descriptions()
            self._engine.agree(descriptions)
            self.models_agree = True
        except Exception as error:
            self._failure = error
