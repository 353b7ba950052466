"""Error feedback: what was not sent is kept in the residual and sent later.

Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018; Karimireddy et al., "Error feedback fixes
SignSGD", ICML 2019. The residual is the accumulator itself: a gradient is added to it, and what the receivers will
decode is subtracted from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from hvd_deepreduce.codecs.interfaces import ON_HOST, Floats
from hvd_deepreduce.ops import arrays

P = ParamSpec("P")
R = TypeVar("R")


def _one_at_a_time(method: Callable[Concatenate[Memory, P], R]) -> Callable[Concatenate[Memory, P], R]:
    """A bucket may be encoded on another thread than that of gradients that are sent alone."""

    @wraps(method)
    def call(self: Memory, /, *arguments: P.args, **settings: P.kwargs) -> R:
        with self._lock:
            return method(self, *arguments, **settings)

    return call


@dataclass(frozen=True)
class _Slice:
    """A slice of the joint vector of several parameters' residuals, which begins at ``begin``."""

    vector: Floats
    names: list[str]
    sizes: list[int]
    begin: int

    def whole(self) -> Iterator[tuple[str, Floats]]:
        """The parameters that it has elements of, and their residuals, which are zero elsewhere."""
        end, at = self.begin + self.vector.size, 0
        for name, numel in zip(self.names, self.sizes, strict=True):
            first, last = max(at, self.begin), min(at + numel, end)
            if first < last:
                residual = arrays.zeros(numel, self.vector.dtype, self.vector)
                residual[first - at : last - at] = self.vector[first - self.begin : last - self.begin]
                yield name, residual
            at += numel


class Memory:
    """The residual of each parameter, by name. A parameter's residual is zero before its first step."""

    def __init__(self) -> None:
        self._residuals: dict[str, Floats] = {}
        self._joined: dict[tuple[str, ...], Floats] = {}
        self._spare: dict[tuple[str, ...], Floats] = {}  # memory for what becomes of joined vectors, on the host
        # Of slices: a parameter's residual is here or in ``_residuals``, and nowhere else.
        self._slices: dict[tuple[tuple[str, ...], int], _Slice] = {}
        self._lock = RLock()

    @_one_at_a_time
    def residual(self, name: str, numel: int, dtype: np.dtype[Any], like: Any = ON_HOST) -> Floats:
        """The residual of a parameter, to be changed in place.

        Args:
            name: of the parameter.
            numel, dtype: of its gradient.
            like: an array on the device of the gradient. The residual is moved there if it is elsewhere.

        Returns:
            ``dtype`` ``[numel]``.

        Raises:
            ValueError: the residual has another size or dtype, so the parameter was replaced.
        """
        self._make_whole([name])
        residual = self._residuals.get(name)
        if residual is None or getattr(residual, "device", None) != getattr(like, "device", None):
            if residual is None:
                residual = arrays.zeros(numel, dtype, like)
            else:
                residual = arrays.move_like(arrays.to_host(residual), like)
            self._residuals[name] = residual
            self._discard_joined([name])
        if residual.size != numel or residual.dtype != dtype:
            raise ValueError(
                f"the residual of {name} is {residual.dtype} [{residual.size}], and its gradient is {dtype} [{numel}]: "
                "the parameter was replaced. Make a new DeepReduce, or restore the parameter"
            )
        return residual

    def joined(self, names: Sequence[str], sizes: Sequence[int], dtype: np.dtype[Any], like: Any) -> Floats:
        """The residuals of several parameters as one vector. Each parameter's residual is a view into it afterwards.

        Args:
            names: of the parameters, in the order of the vector.
            sizes: their numbers of elements.
            dtype, like: as in ``residual``.

        Returns:
            ``dtype`` ``[sum(sizes)]``.

        Raises:
            ValueError: as in ``residual``.
        """
        with self._lock:
            key = tuple(names)
            vector = self._joined.get(key)
            if vector is not None and (vector.size, vector.dtype) == (sum(sizes), dtype):
                if getattr(vector, "device", None) == getattr(like, "device", None):
                    return vector
            return self._join(key, sizes, dtype, like)

    def _join(self, key: tuple[str, ...], sizes: Sequence[int], dtype: np.dtype[Any], like: Any) -> Floats:
        residuals = [self.residual(name, numel, dtype, like) for name, numel in zip(key, sizes, strict=True)]
        vector = self._joined.get(key)
        if vector is None:
            vector = arrays.concatenate(residuals)
            self._discard_joined(key)
            self._hold(key, sizes, vector)
        return vector

    def spare(self, names: Sequence[str]) -> Floats:
        """Memory on the host, apart from the vector that ``joined`` has returned for these parameters, and as large,
        for ``exchange``. What is in it does not matter."""
        with self._lock:
            key = tuple(names)
            spare = self._spare.get(key)
            if spare is None:
                spare = self._spare[key] = np.empty_like(self._joined[key])
            return spare

    def exchange(self, names: Sequence[str], sizes: Sequence[int], vector: Floats, other: Floats, keep: bool) -> None:
        """Another vector takes the place of the one that ``joined`` has returned, unless that is not the memory's any
        more, since a state was loaded.

        Args:
            names, sizes: as for ``joined``.
            vector: what it has returned.
            other: on the host, as large; the parameters' residuals are views into it afterwards.
            keep: whether ``vector`` becomes the ``spare`` one.
        """
        with self._lock:
            key = tuple(names)
            if self._joined.get(key) is vector:
                self._hold(key, sizes, other)
                if keep:
                    self._spare[key] = vector

    def _hold(self, key: tuple[str, ...], sizes: Sequence[int], vector: Floats) -> None:
        self._joined[key] = vector
        begin = 0
        for name, size in zip(key, sizes, strict=True):
            self._residuals[name] = vector[begin : begin + size]
            begin += size

    @_one_at_a_time
    def slice(
        self, names: Sequence[str], sizes: Sequence[int], part: tuple[int, int], dtype: np.dtype[Any], like: Any
    ) -> tuple[Floats, Floats | None]:
        """One slice of the vector that ``joined`` would make. Only the slice takes memory.

        Args:
            names, sizes, dtype, like: as in ``joined``.
            part: (begin, end) of the slice in the vector.

        Returns:
            ``dtype`` ``[end - begin]``, to be changed in place. And what was held of these parameters elsewhere in the
            vector, ``[sum(sizes)]``, with zeros in the slice; None: nothing was. It is not held any more, unless
            ``put_back`` is called with it.

        Raises:
            ValueError: as in ``residual``.
        """
        begin, end = part
        key = tuple(names), begin
        known = self._slices.get(key)
        if known is not None and (known.vector.size, known.vector.dtype) == (end - begin, dtype):
            if getattr(known.vector, "device", None) == getattr(like, "device", None):
                return known.vector, None
        self._make_whole(names)
        vector = arrays.zeros(end - begin, dtype, like)  # before anything is let go
        rest = None
        if any(name in self._residuals for name in names):
            held = [self._residuals.get(name) is not None for name in names]
            rest = arrays.concatenate(
                [
                    self.residual(name, numel, dtype, like) if there else arrays.zeros(numel, dtype, like)
                    for name, numel, there in zip(names, sizes, held, strict=True)
                ]
            )
            self._discard_joined(names)
            for name in names:
                self._residuals.pop(name, None)
        if rest is not None:
            vector[:] = rest[begin:end]
            rest[begin:end].fill(0)
        self._slices[key] = _Slice(vector, list(names), list(sizes), begin)
        return vector, rest if rest is not None and bool(arrays.to_host(rest).any()) else None

    @_one_at_a_time
    def put_back(self, names: Sequence[str], sizes: Sequence[int], rest: Floats) -> None:
        """Holds again what ``slice`` returned of elsewhere in the vector, since no other rank has taken it. The vector
        of the slice is not the memory's any more."""
        for name, numel, end in zip(names, sizes, np.cumsum(sizes).tolist(), strict=True):
            part = rest[end - numel : end]
            if bool(arrays.to_host(part).any()):
                arrays.add(self.residual(name, numel, rest.dtype, rest), part)

    def _make_whole(self, names: Sequence[str]) -> None:
        """Slices that hold anything of these parameters become residuals of whole parameters, zero elsewhere."""
        if not self._slices:
            return
        for key in [key for key in self._slices if not set(names).isdisjoint(key[0])]:
            self._residuals.update(dict(self._slices[key].whole()))  # all of them, or none if memory runs out
            del self._slices[key]

    @_one_at_a_time
    def held(self, name: str) -> Floats | None:
        """The parameter's residual; None: it has none."""
        self._make_whole([name])
        return self._residuals.get(name)

    @_one_at_a_time
    def scale(self, names: Sequence[str], factor: float) -> None:
        """Multiplies the residuals of these parameters by ``factor``, where they have one."""
        self._make_whole(names)
        for name in names:
            residual = self._residuals.get(name)
            if residual is not None:
                arrays.scale(residual, factor)

    @_one_at_a_time
    def drop(self, names: Sequence[str]) -> None:
        """Forgets the residuals of these parameters: they are zero again."""
        self._make_whole(names)
        self._discard_joined(names)
        for name in names:
            self._residuals.pop(name, None)

    def _discard_joined(self, names: Sequence[str]) -> None:
        """Forgets the vectors of these parameters: a residual can be a view into one vector only."""
        self._joined = {key: vector for key, vector in self._joined.items() if not set(key) & set(names)}
        self._spare = {key: vector for key, vector in self._spare.items() if key in self._joined}

    @_one_at_a_time
    def state_dict(self) -> dict[str, Floats]:
        """A copy of all residuals on the host, by parameter. Of a slice, there are those of the parameters that it has
        elements of, with zeros elsewhere."""
        copies = {name: np.array(arrays.to_host(residual)) for name, residual in self._residuals.items()}
        for one in self._slices.values():
            copies.update((name, arrays.to_host(residual)) for name, residual in one.whole())
        return copies

    @_one_at_a_time
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces all residuals by copies of these, which may have any shape."""
        self._residuals = {name: np.array(residual).reshape(-1) for name, residual in state.items()}
        self._joined, self._spare, self._slices = {}, {}, {}
