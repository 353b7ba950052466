"""DeepReduce and LocalSGD as parts of the state of Horovod Elastic.

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, batch=0)
    state = hvd.elastic.TorchState(model=model, optimizer=local_sgd, batch=0)  # call local_sgd.sync() before a commit

``TorchState`` finds the handler of each of its arguments by type. The handler here is added to Horovod's registry when
``hvd_deepreduce.torch`` is imported.
"""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from hvd_deepreduce.torch.horovod import DeepReduce
from hvd_deepreduce.torch.local_sgd import LocalSGD


class DeepReduceStateHandler(StateHandler):  # type: ignore[misc]
    """Saves, restores and synchronizes residuals, step counts and settings.

    Residuals belong to their rank, so a synchronization leaves them as they are; a rank that is new in the job starts
    without. Step counts and settings become those of rank 0, as the model does.
    """

    def __init__(self, compression: DeepReduce | LocalSGD) -> None:
        super().__init__(compression)
        self.save()

    def save(self) -> None:
        """Called by ``state.commit()``."""
        self._saved: Any = self.value.snapshot()

    def restore(self) -> None:
        """Called after a rank has failed, when Horovod does not run."""
        self.value.rewind(self._saved)

    def sync(self) -> None:
        """Called on all ranks after some have come or gone, and at the beginning."""
        told = hvd.broadcast_object(self.value.elastic_state(), root_rank=0, name="deepreduce.elastic")
        self.value.sync_from_root(told)


set_handler_registry(
    [(DeepReduce, DeepReduceStateHandler), (LocalSGD, DeepReduceStateHandler), *get_handler_registry()]
)
