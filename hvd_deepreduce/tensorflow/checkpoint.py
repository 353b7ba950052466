"""Saving a DeepReduce's state after each epoch of Keras."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_deepreduce.engine.state import Reshard, State, from_bytes


class Restorable(Protocol):
    """A ``DeepReduce``."""

    def serialize(self) -> bytes: ...

    def deserialize(self, string_value: bytes) -> None: ...

    def load_state_dict(self, state: State, *, reshard: Reshard) -> None: ...


class SaveState(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a DeepReduce after each epoch of ``model.fit``, and restores it where training is resumed.

    Use it together with ``tf.keras.callbacks.BackupAndRestore``, which does the same for model and optimizer. Like that
    callback, it deletes its file at the end of training. Give it to all ranks: each has a file of its own.

    Args:
        compression: what the optimizer was given.
        folder: where ``deepreduce.rank<n>.npz`` is written.
        delete: delete the file at the end of training.
        reshard: restore the files of any number of ranks; as in ``DeepReduce.load_state_dict``. All ranks must see the
            folder.
    """

    def __init__(
        self, compression: Restorable, folder: str | Path, delete: bool = True, reshard: Reshard = False
    ) -> None:
        super().__init__()
        self.compression = compression
        self.path = _path(folder, hvd.rank())
        self.delete = delete
        self.reshard = reshard

    def on_train_begin(self, logs: Any = None) -> None:
        if self.reshard is False:
            if self.path.exists():
                self.compression.deserialize(self.path.read_bytes())
        elif _path(self.path.parent, 0).exists():
            self.compression.load_state_dict(_states(self.path.parent), reshard=self.reshard)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_bytes(self.compression.serialize())
        os.replace(part, self.path)

    def on_train_end(self, logs: Any = None) -> None:
        if self.delete:
            self.path.unlink(missing_ok=True)


def _path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"deepreduce.rank{rank}.npz"


def _states(folder: Path) -> Iterator[dict[str, Any]]:
    """The states of all ranks of the job that wrote them; the file of rank 0 says how many there were."""
    rank, size = 0, 1
    while rank < size:
        state = from_bytes(_path(folder, rank).read_bytes())
        yield state
        rank, size = rank + 1, state["size"]
