"""States of Horovod Elastic that contain a DeepReduce, or a LocalSGD.

    state = elastic.KerasState(model, compression=compression, batch=0, epoch=0)
    state = elastic.KerasState(model, compression=local_sgd, batch=0)  # call local_sgd.sync() before a commit

They replace the classes of the same names in ``hvd.elastic``, which would send the whole DeepReduce of rank 0 to the
other ranks. But residuals belong to their rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.tensorflow.elastic import TensorFlowKerasState as HorovodKerasState
from horovod.tensorflow.functions import broadcast_object, broadcast_variables
from horovod.tensorflow.mpi_ops import rank

from hvd_deepreduce.tensorflow.horovod import DeepReduce
from hvd_deepreduce.tensorflow.local_sgd import LocalSGD

Compressions = DeepReduce | LocalSGD | Sequence[DeepReduce | LocalSGD]


class _CompressionState(ObjectState):  # type: ignore[misc]
    """Saves, restores and synchronizes a DeepReduce beside everything else of the state.

    A synchronization leaves the residuals as they are; a rank that is new in the job starts without. Step counts and
    settings become those of rank 0, as the model does.
    """

    def __init__(self, *args: Any, compression: Compressions, **kwargs: Any) -> None:
        self.compression = compression
        self._all = [compression] if isinstance(compression, DeepReduce | LocalSGD) else list(compression)
        self._snapshots: list[Any] = [one.snapshot() for one in self._all]
        super().__init__(*args, **kwargs)

    def save(self) -> None:
        """Called by ``commit()``."""
        self._snapshots = [one.snapshot() for one in self._all]
        super().save()

    def restore(self) -> None:
        """Called after a rank has failed, when Horovod does not run."""
        for one, snapshot in zip(self._all, self._snapshots, strict=True):
            one.rewind(snapshot)
        super().restore()

    def sync(self) -> None:
        """Called on all ranks after some have come or gone, and at the beginning."""
        told = broadcast_object([one.elastic_state() for one in self._all], root_rank=0, name="deepreduce.elastic")
        for one, of_rank_0 in zip(self._all, told, strict=True):
            one.sync_from_root(of_rank_0)
        super().sync()


class TensorFlowKerasState(_CompressionState, HorovodKerasState):  # type: ignore[misc]
    """``hvd.elastic.TensorFlowKerasState`` with a DeepReduce.

    Args:
        model: a Keras model, built. Its optimizer must have its variables too:
            ``model.optimizer.build(model.trainable_variables)``.
        optimizer: None: the model's.
        compression: what the optimizer or tape was given, or a list of them.
        **kwargs: further values that all ranks share, such as ``batch=0``; attributes of the state.
    """


class KerasState(TensorFlowKerasState):
    """``hvd.elastic.KerasState`` of ``horovod.tensorflow.keras``, with a DeepReduce; as ``TensorFlowKerasState``."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, backend=tf.keras.backend, **kwargs)


class TensorFlowState(_CompressionState):
    """``hvd.elastic.TensorFlowState`` with a DeepReduce, for eager TensorFlow.

    Horovod's own broadcasts the variables when it is created, where the other ranks do not take part if a rank is new,
    and not when it is synchronized.

    Args:
        variables: of the model and the optimizer.
        compression: what the optimizer or tape was given, or a list of them.
        **kwargs: further values that all ranks share; attributes of the state.
    """

    def __init__(self, variables: Iterable[tf.Variable], **kwargs: Any) -> None:
        self.variables = list(variables)
        self._values = [variable.numpy() for variable in self.variables]
        super().__init__(broadcast_object, rank, **kwargs)

    def save(self) -> None:
        self._values = [variable.numpy() for variable in self.variables]
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self.variables, root_rank=0)
        super().sync()
