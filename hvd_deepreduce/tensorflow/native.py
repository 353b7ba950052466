"""Put and take as operations of TensorFlow in C++ (kernels/tensorflow/), where they were built.

setup.py builds them where TensorFlow is there at installation. They run with the TensorFlow that they were built with,
on the host. Everywhere else ``python_unit.py`` makes the same operations of Python functions.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_char_p, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine import Bucket
from hvd_deepreduce.engine.graph.runtime import Listener
from hvd_deepreduce.ops.pieces import Pieces

PATH = Path(__file__).parent.parent / f"_tensorflow-{tf.__version__}.so"
_Called = CFUNCTYPE(None, c_int, c_int64, c_int64, c_int64, c_double, c_int)
_log = logging.getLogger("hvd_deepreduce")
_listeners: weakref.WeakValueDictionary[int, NativeUnit] = weakref.WeakValueDictionary()


@_Called  # type: ignore[untyped-decorator]
def _told(event: int, unit: int, bucket: int, run: int, carrier: float, flag: int) -> None:
    one = _listeners.get(unit)
    if one is not None:
        one.listener(event, bucket, run, carrier, bool(flag))


class Library:
    """The operations ``put``, ``take`` and ``all``, and what the runtime of their units offers."""

    def __init__(self, path: Path) -> None:
        module = tf.load_op_library(str(path))
        self.put, self.take, self.all = module.deep_reduce_put, module.deep_reduce_take, module.deep_reduce_all
        library = self._library = ctypes.CDLL(str(path))
        for name, result, arguments in (
            ("listen", None, [_Called]),
            ("unit_new", c_int64, []),
            ("unit_free", None, [c_int64]),
            ("memory_new", c_void_p, [c_int64, c_int]),
            ("memory_free", None, [c_void_p]),
            ("memory_address", c_void_p, [c_void_p]),
            ("memory_alone", c_int, [c_void_p]),
            ("gradients", c_void_p, [c_int64, c_int64, c_void_p]),
            ("gradients_free", None, [c_void_p]),
            ("begin", c_int, [c_int64, c_int64, c_int64, c_int]),
            ("dense", None, [c_int64, c_void_p, c_void_p]),
            ("slots", None, [c_int64, c_void_p, c_void_p]),
            ("lay_out", None, [c_int64, c_void_p, c_void_p, c_void_p, c_int64]),
            ("deliver", None, [c_int64, c_int64, c_int64, c_void_p, c_double, c_char_p]),
        ):
            function = getattr(library, f"dr_tf_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, f"_{name}", function)
        self._listen(_told)

    def __getattr__(self, name: str) -> Any:  # the functions that were set above
        raise AttributeError(name)


@cache
def library() -> Library | None:
    """The library, loaded once; None: it was not built with this TensorFlow."""
    if not PATH.exists():
        return None
    try:
        return Library(PATH)
    except (OSError, tf.errors.OpError) as error:
        _log.warning("the operations in C++ are not used, and Python is in their place, which is slower: %s", error)
        return None


class Memory:
    """A bucket's vector, in the memory of a tensor: results of TensorFlow's operations can be views of it.

    Args:
        numel, dtype: of the vector, float32 or float64.

    Attributes:
        handle: of the tensor.
    """

    def __init__(self, owner: Library, numel: int, dtype: np.dtype[Any]) -> None:
        self._library = owner
        self.handle = owner._memory_new(numel, dtype.itemsize)
        self._numel, self._dtype = numel, dtype

    @classmethod
    def of(cls, vector: Floats) -> Memory | None:
        """That of a vector that ``array`` has returned; None: it is another one."""
        return vector.base if isinstance(vector.base, cls) else None

    def array(self) -> Floats:
        """The vector, ``[numel]``. It keeps the memory."""
        return np.asarray(self) if self._numel else np.empty(0, self._dtype)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        address = self._library._memory_address(self.handle)
        return {"version": 3, "shape": (self._numel,), "typestr": self._dtype.str, "data": (address, False)}

    def alone(self) -> bool:
        """Whether no result of an earlier step is a view of it."""
        return bool(self._library._memory_alone(self.handle))

    def __del__(self) -> None:
        self._library._memory_free(self.handle)


class Gradients:
    """The gradients of a bucket, where TensorFlow has made them. It keeps their memory.

    Attributes:
        addresses: int64 ``[gradients]``.
    """

    def __init__(self, owner: Library, unit: int, bucket: int, count: int) -> None:
        self._library = owner
        self.addresses = np.zeros(count, np.int64)
        self._handle = owner._gradients(unit, bucket, self.addresses.ctypes.data)

    def __del__(self) -> None:
        self._library._gradients_free(self._handle)


class NativeUnit:
    """As ``Runtime``, of the operations in C++.

    Args:
        listener: told what happens.

    Attributes:
        library: as given.
        id: the operations' attribute ``unit``.
    """

    early = True

    def __init__(self, owner: Library, listener: Listener) -> None:
        self.library = owner
        self.listener = listener
        self.id: int = owner._unit_new()
        self._residuals: Sequence[Floats | None] = ()
        _listeners[self.id] = self

    def __del__(self) -> None:
        self.library._unit_free(self.id)

    def put(self, gradient: tf.Tensor, number: tf.Tensor, sent: tf.DType, at: int, name: str) -> tf.Tensor:
        return self.library.put(gradient, number, carried=sent, unit=self.id, slot=at, name=name)

    def take(self, carrier: tf.Tensor, number: tf.Tensor, like: tf.Tensor, dtype: tf.DType, at: int) -> tf.Tensor:
        return self.library.take(carrier, number, T=dtype, unit=self.id, slot=at)

    def begin(self, run: int, slots: int, force: bool = False) -> bool:
        return bool(self.library._begin(self.id, run, slots, force))

    def dense(self, residuals: Sequence[Floats | None]) -> None:
        """The run that has begun is dense: Horovod reduces the gradients.

        Args:
            residuals: what is added to the gradients of the slots, kept until the next run begins; empty: nothing.
        """
        self._residuals = residuals
        if not residuals:
            self.library._dense(self.id, None, None)
            return
        given = [(0, 0) if one is None else (one.ctypes.data, one.size) for one in residuals]
        words = np.array(given, np.int64).reshape(-1, 2).T.copy()
        self.library._dense(self.id, words[0].ctypes.data, words[1].ctypes.data)

    def flushed(self, slots: int) -> list[bool]:
        """Which residuals were added to gradients in the last run."""
        self._residuals = ()
        return [bool(flag) for flag in self._slots(slots)[1]]

    def sizes(self, slots: int) -> list[int]:
        return [int(numel) for numel in self._slots(slots)[0]]

    def _slots(self, slots: int) -> tuple[Any, Any]:
        numels, flushed = np.zeros(slots, np.int64), np.zeros(slots, np.uint8)
        self.library._slots(self.id, numels.ctypes.data, flushed.ctypes.data)
        return numels, flushed

    def lay_out(self, places: np.ndarray[Any, np.dtype[np.int64]], buckets: Sequence[Bucket]) -> None:
        self.library._lay_out(
            self.id, places[0].ctypes.data, places[1].ctypes.data, places[2].ctypes.data, len(buckets)
        )

    def fill(self, at: int, bucket: Bucket, as_pieces: bool) -> None:
        memory = Memory.of(bucket.gradient)
        if memory is None or not memory.alone():  # a result of an earlier step is still a view of it
            bucket.gradient = Memory(self.library, sum(bucket.sizes), bucket.dtype).array()
        came = Gradients(self.library, self.id, at, len(bucket.sizes))
        pieces = Pieces(came.addresses.tolist(), bucket.sizes, bucket.dtype, came)
        if as_pieces:
            bucket.pieces = pieces
        else:
            bucket.finite = pieces.copy_to(bucket.gradient)

    def deliver(
        self, run: int, at: int, bucket: Bucket, divisor: float = 0.0, error: str | None = None
    ) -> None:
        memory = Memory.of(bucket.gradient)
        if memory is None:  # the first residual's
            memory, sums = Memory(self.library, bucket.gradient.size, bucket.dtype), bucket.gradient
            bucket.gradient = memory.array()
            bucket.gradient[:] = sums
        self.library._deliver(self.id, run, at, memory.handle, divisor, _bytes_of(error))

    def fail(self, error: str) -> None:
        self.library._deliver(self.id, 0, -1, None, 0.0, _bytes_of(error))


def _bytes_of(error: str | None) -> bytes | None:
    return None if error is None else error.encode(errors="backslashreplace")
