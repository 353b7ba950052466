"""Saving a DeepReduce's state after each epoch of Keras."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import horovod.tensorflow as hvd
import tensorflow as tf


class Serializable(Protocol):
    """A ``DeepReduce``."""

    def serialize(self) -> bytes: ...

    def deserialize(self, string_value: bytes) -> None: ...


class SaveState(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a DeepReduce after each epoch of ``model.fit``, and restores it where training is resumed.

    Use it together with ``tf.keras.callbacks.BackupAndRestore``, which does the same for model and optimizer. Like that
    callback, it deletes its file at the end of training. Give it to all ranks: each has a file of its own.

    Args:
        compression: what the optimizer was given.
        folder: where ``deepreduce.rank<n>.npz`` is written.
        delete: delete the file at the end of training.
    """

    def __init__(self, compression: Serializable, folder: str | Path, delete: bool = True) -> None:
        super().__init__()
        self.compression = compression
        self.path = Path(folder) / f"deepreduce.rank{hvd.rank()}.npz"
        self.delete = delete

    def on_train_begin(self, logs: Any = None) -> None:
        if self.path.exists():
            self.compression.deserialize(self.path.read_bytes())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_bytes(self.compression.serialize())
        os.replace(part, self.path)

    def on_train_end(self, logs: Any = None) -> None:
        if self.delete:
            self.path.unlink(missing_ok=True)
