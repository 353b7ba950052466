"""Records gradients of a TensorFlow or Keras job under Horovod."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from hvd_deepreduce.tensorflow.failures import numpy_function
from hvd_deepreduce.tensorflow.graph import at_end, current_place, without_order
from hvd_deepreduce.tools.recorder import Options, Recorder

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Capture(Recorder, Compressor):  # type: ignore[misc]
    """Records this rank's gradients of some steps into files that ``hvd-deepreduce inspect`` and ``bench`` read.

    It takes the place of ``compression=`` of Horovod's tape or optimizer, since a reduced gradient is all that they
    return: ``compression=Capture(model.trainable_variables, "gradients.npz", steps=[10, 100])``. Horovod shows a
    compression nothing where there is one rank only. Gradients are recorded, and no accumulators; IndexedSlices are not
    recorded.

    Args:
        variables: those whose gradients Horovod gets, in its order, such as ``model.trainable_variables``; without
            those that have no gradient, or IndexedSlices.
        file, steps, only, all_ranks, passes, max_bytes: as for PyTorch's ``Capture``.
        compression: the job's own, which does its work as before; None: that of Horovod which does nothing.

    Raises:
        ValueError: as PyTorch's ``Capture``.

    Attributes:
        files: that were written.
    """

    def __init__(
        self,
        variables: Iterable[tf.Variable],
        file: str | Path | None = None,
        steps: Sequence[int] = (10,),
        *,
        compression: Any = None,
        **options: Unpack[Options],
    ) -> None:
        self._inner = hvd.Compression.none if compression is None else compression
        self._known = [(variable.name.removesuffix(":0"), tuple(variable.shape)) for variable in variables]
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        about = {"framework": f"tensorflow {tf.__version__}"}
        super().__init__(file, steps, dict(self._known), rank=hvd.rank(), about=about, **options)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Called by Horovod with a gradient, in the order of the variables.

        Raises:
            ValueError: the gradient has not the shape of the variable in its place; or, at the end of the function,
                there are not as many gradients as variables.
        """
        graph, _ = current_place()
        if graph not in self._seen and not tf.executing_eagerly():
            at_end(graph, lambda: self._check_count(graph))
        number = self._seen.get(graph, 0)
        self._seen[graph] = number + 1
        name, shape = self._known[number % len(self._known)]
        if not tensor.shape.is_compatible_with(shape):
            raise ValueError(
                f"the gradient number {number} has the shape {tensor.shape}, and the variable {name!r} in its "
                f"place has {shape}: give Capture the variables whose gradients Horovod gets, in its order"
            )

        def record(gradient: Any) -> None:
            self.put(name, lambda: gradient)

        recordings = []
        if not self.done:
            # NumPy has no bfloat16.
            recordings.append(numpy_function(record, [tf.cast(tensor, tf.float32)], [], "deepreduce_capture"))
            without_order(recordings[0])
        # Horovod names an operation after its tensor, so that one must have the same name on ranks that record nothing.
        with tf.control_dependencies(recordings):
            tensor = tf.identity(tensor, name=f"captured_{number}")
        found: tuple[tf.Tensor, Any] = self._inner.compress(tensor)
        return found

    def _check_count(self, graph: tf.Graph) -> None:
        count, known = self._seen[graph], len(self._known)
        if count % known:
            raise ValueError(
                f"Horovod got {count} gradients, and Capture has {known} variables, so that one would be recorded "
                "under the name of another one: give Capture those variables alone that have a dense gradient, in "
                "Horovod's order"
            )

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Called by Horovod with the reduced gradient."""
        return self._inner.decompress(tensor, ctx)
