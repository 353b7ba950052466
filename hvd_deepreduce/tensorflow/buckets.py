"""Buckets of gradients that come and go through operations of a graph.

TensorFlow may have a single thread, so no operation may hold one while it waits: ``put`` and ``take`` do not wait, and
a dequeue between them is asynchronous, as Horovod's operations are. Threads of this module encode full buckets, send
them, wait for their sums, and then wake the dequeues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine import Bucket, BucketLayout, Engine, Member, Parameter
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.tensorflow.graph import Graph, Slot, Step, Unit
from hvd_deepreduce.tensorflow.parameters import GraphParameters
from hvd_deepreduce.tensorflow.steps import Steps

IN_FLIGHT = (
    "buckets of another step are still in flight: either an error ended that step, or two functions that "
    "share a DeepReduce run at the same time. After an error, restart the job from a checkpoint, because "
    "other ranks may wait for these buckets. Use one DeepReduce for each model"
)


class GraphBuckets:
    """The buckets of one DeepReduce.

    Args:
        number: gives the DeepReduce's number among those of its process set, for the names of allgathers.
    """

    def __init__(self, engine: Engine, parameters: GraphParameters, number: Callable[[], int]) -> None:
        self.steps = Steps(engine, parameters, self._end)
        self._engine = engine
        self._parameters = parameters
        self._number = number
        # Layouts are kept here between steps. A step that an error ends keeps its own: it may still be in flight.
        self._layouts: dict[Any, BucketLayout] = {}
        self._under_way: dict[int, Step] = {}
        self._sending = ThreadPoolExecutor(1, "deepreduce send")

    def clear(self) -> None:
        """Forgets all layouts, after the config or the state has changed."""
        self._layouts.clear()

    def forget_all(self, graphs: Iterable[Graph]) -> None:
        """Forgets steps that a failure has ended, with the lock of ``steps`` held. Nothing of them may be in flight."""
        self.clear()
        self._under_way.clear()
        self._engine.in_flight.clear()
        for graph in graphs:
            self.forget(graph)

    def forget(self, graph: Graph) -> None:
        """Forgets the graph's step."""
        graph.step = None
        for slot in graph.slots:
            # TensorFlow has cancelled its dequeue, but the bucket's sum may have come afterwards.
            while slot.queue is not None and slot.queue.size() > 0:
                slot.queue.dequeue()

    def close(self) -> None:
        """Ends the thread that sends, after what it has to send, and forgets all layouts."""
        self._sending.shutdown(wait=False)
        self.clear()

    def put(self, step: Step, slot: Slot, flat: Floats) -> None:
        """Copies a gradient into its bucket. A full bucket is sent, on another thread."""
        unit = slot.unit
        assert unit is not None
        if self._engine.over_mpi:  # which works on the host
            flat = arrays.to_host(flat)
        with self.steps.lock:
            slot.numel = flat.size
            held = step.held.setdefault(unit, [])
            held.append((slot, flat))
            _, layout = step.layouts.get(unit, (None, None))
            if layout is None and any(-1 in one.shape for one in unit.slots) and len(held) < len(unit.slots):
                held[-1] = (slot, flat.copy())  # TensorFlow frees its own memory after this operation
                return
            layout = layout or self._lay_out(step, unit)
            step.held[unit] = []
            for one, gradient in held:
                layout.bucket_of[self._parameters.of(one).name].allocate(gradient)
        for one, gradient in held:
            parameter = self._parameters.of(one)
            bucket = layout.bucket_of[parameter.name]
            bucket.put(parameter, gradient)
            with self.steps.lock:
                for ready in self._engine.mark_ready(bucket, parameter):
                    self._sending.submit(self._send, step, ready)

    def take(self, step: Step, slot: Slot, parameter: Parameter, scale: float) -> Floats:
        """``scale`` times the sum of a gradient over all ranks, ``[numel]``, after its dequeue was woken."""
        assert slot.unit is not None
        bucket = step.layouts[slot.unit][1].bucket_of[parameter.name]
        out: Floats = bucket.part(parameter.name) * scale
        with self.steps.lock:
            self._engine.release(bucket, parameter)
        return out

    def _lay_out(self, step: Step, unit: Unit) -> BucketLayout:
        """The unit's buckets, empty."""
        if self._under_way.setdefault(unit.queue, step) is not step:
            raise RuntimeError(IN_FLIGHT)
        step.slots.update((self._parameters.of(slot).name, slot) for slot in unit.slots)
        members = self._members(unit)
        key = (unit.queue, tuple((member.parameter.name, member.numel) for member in members))
        layout = self._layouts.pop(key, None) or self._new_layout(members, unit)
        step.layouts[unit] = key, layout
        return layout

    def _members(self, unit: Unit) -> list[Member]:
        return [Member(self._parameters.of(slot), slot.numel) for slot in unit.slots]

    def _new_layout(self, members: list[Member], unit: Unit) -> BucketLayout:
        layout = BucketLayout(members, self._engine.max_bucket_bytes, members[0].parameter.number, unit.queue)
        for bucket in layout.buckets:
            # Horovod matches allgathers by name: it must be the same on all ranks, where parameters' names may
            # differ, and unique among all DeepReduces.
            bucket.name = f"bucket.{self._number()}.{unit.queue}.{bucket.number}"
        return layout

    def _send(self, step: Step, bucket: Bucket) -> None:
        try:
            self._engine.start(bucket)
        except Exception as error:
            self._wake(step, bucket, error)
        else:
            bucket.pending.add_done_callback(lambda _: self._wake(step, bucket))

    def _wake(self, step: Step, bucket: Bucket, failure: Exception | None = None) -> None:
        """Lets the dequeues of a bucket go on: its exchange has ended, or could not be started."""
        with self.steps.working(step, ""):
            try:
                if failure is None:
                    self._engine.receive(bucket)
            except Exception as error:
                failure = error
        with self.steps.lock, tf.init_scope(), tf.device("CPU:0"):
            if failure is not None:
                # TensorFlow ends a step at its first error, while other ranks wait for buckets that this rank has
                # not sent. All ranks get the same error, so all can raise it at the end of the step.
                bucket.gradient.fill(0)
                step.failure = step.failure or failure
            if step.graph.step is step:
                word = tf.constant(1, tf.uint8)
                for parameter in bucket.members:
                    queue = step.slots[parameter.name].queue
                    tf.raw_ops.QueueEnqueueV2(handle=queue.queue_ref, components=[word])

    def _end(self, step: Step) -> None:
        for unit, (key, layout) in step.layouts.items():
            self._layouts[key] = layout
            del self._under_way[unit.queue]
