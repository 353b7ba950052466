"""Saving the state of a DeepReduce or LocalSGD: as a part of a checkpoint, and after each epoch of Keras."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_deepreduce.engine.state import Reshard, State, from_bytes, to_bytes


class Restorable(tf.train.experimental.PythonState):  # type: ignore[misc]
    """A ``DeepReduce`` or ``LocalSGD``, as a part of tf.train.Checkpoint.

    Attributes:
        arrays: keys of its state that have dicts of flat arrays, besides the residuals.
    """

    arrays: Sequence[str] = ()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: State, *, reshard: Reshard = False) -> None: ...

    def serialize(self) -> bytes:
        """``state_dict`` as bytes, for tf.train.Checkpoint."""
        return to_bytes(self.state_dict(), self.arrays)

    def deserialize(self, string_value: bytes) -> None:
        """Loads what ``serialize`` returned.

        Raises:
            RuntimeError, ValueError: these are other bytes; or as ``load_state_dict``. Nothing has changed then.
        """
        self.load_state_dict(from_bytes(string_value))


class SaveState(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a DeepReduce after each epoch of ``model.fit``, and restores it where training is resumed.

    Use it together with ``tf.keras.callbacks.BackupAndRestore``, which does the same for model and optimizer, with the
    same ``save_freq``: residuals of another step would send gradients twice, or lose them. Like that callback, it
    deletes its file at the end of training. Give it to all ranks: each has a file of its own.

    Args:
        compression: what the optimizer was given.
        folder: where ``deepreduce.rank<n>.npz`` is written.
        delete: delete the file at the end of training.
        reshard: restore the files of any number of ranks; as in ``DeepReduce.load_state_dict``. All ranks must see the
            folder.
        save_freq: "epoch", or after how many batches; as that of ``BackupAndRestore``.
    """

    def __init__(
        self,
        compression: Restorable,
        folder: str | Path,
        delete: bool = True,
        reshard: Reshard = False,
        save_freq: int | Literal["epoch"] = "epoch",
    ) -> None:
        if save_freq != "epoch" and (type(save_freq) is not int or save_freq < 1):
            raise ValueError(f"save_freq is {save_freq!r}; it must be 'epoch' or a number of batches, 1 or more")
        super().__init__()
        self.compression = compression
        self.path = _path(folder, hvd.rank())
        self.delete = delete
        self.reshard = reshard
        self.save_freq = save_freq
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if self.reshard is False:
            if self.path.exists():
                self.compression.deserialize(self.path.read_bytes())
        elif _path(self.path.parent, 0).exists():
            self.compression.load_state_dict(_states(self.path.parent), reshard=self.reshard)

    def _implements_train_batch_hooks(self) -> bool:  # Keras asks; calls for each batch cost time
        return self.save_freq != "epoch"

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches == self.save_freq:
            self._batches = 0
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.save_freq == "epoch":
            self._save()

    def _save(self) -> None:
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
