"""Gradients that subcommands are given: files of NumPy, PyTorch or ``Capture``, or generated ones."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile

from hvd_deepreduce.tools import gradient_file
from hvd_deepreduce.tools.gradient_file import MOST, Vector

SUFFIXES = (".npy", ".npz", ".pt", ".pth")


class GradientError(ValueError):
    """A file that holds no gradient; says why."""


@dataclass(frozen=True)
class Gradient:
    """The gradients of a model's parameters, or a single one.

    Attributes:
        vector: float32 ``[numel]``, all parameters' elements, one after the other.
        names: of the parameters.
        shapes: of the parameters, where they are known; otherwise of one dimension.
        what: in words, for the text beside figures.
        dtype: that the file has.
        about: how it was made, as far as the file says.
    """

    vector: Vector
    names: list[str]
    shapes: list[tuple[int, ...]]
    what: str
    dtype: str
    about: Mapping[str, Any]

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    def parts(self) -> Iterator[tuple[str, tuple[int, ...], Vector]]:
        """Name, shape and elements of each parameter."""
        ends = np.cumsum(self.sizes)[:-1]
        yield from zip(self.names, self.shapes, np.split(self.vector, ends), strict=True)


def generated(numel: int, rank: int) -> Vector:
    """A gradient with clusters. All ranks have the same scales and different values.

    Normal values, scaled by lognormal factors for runs of 4096, 256 and 16 elements.
    """
    shared, own = np.random.default_rng(1), np.random.default_rng(100 + rank)
    out = own.standard_normal(numel, dtype=np.float32)
    for run, sigma in ((4096, 0.8), (256, 0.6), (16, 0.6)):
        scale = np.exp(sigma * shared.standard_normal(-(-numel // run), dtype=np.float32))
        whole = numel // run * run
        out[:whole].reshape(-1, run)[:] *= scale[: numel // run, None]
        out[whole:] *= scale[-1]
    return out


def generate(numel: int) -> Gradient:
    """A generated gradient of one parameter."""
    what = "generated, normal values scaled by lognormal factors in runs, not a gradient of a job"
    return Gradient(generated(numel, 0), ["generated"], [(numel,)], what, "float32", {})


def load(file: Path, kind: str | None = None, rank: int | None = None, most: int = MOST) -> Gradient:
    """The gradient in a file: ``.npy``, ``.npz``, or ``.pt`` and ``.pth`` where PyTorch is installed.

    Of an ``.npz`` that ``Capture`` has not written, and of a dict or list of tensors, each array is a parameter.

    Args:
        kind: of a captured file: ``"gradient"`` or ``"accumulator"``; None: accumulators where there are some.
        rank: of a captured file; None: its first.
        most: elements that are read. What a file announces is compared before it is read.

    Raises:
        GradientError, CaptureError: the file holds no gradient, or not the one that was asked for, or a larger one.
        OSError: it cannot be read.
    """
    kind_of, dtypes = file.suffix.lower(), ""
    if kind_of not in SUFFIXES:
        raise GradientError(f"{file} is not a gradient by its name: it must end in {', '.join(SUFFIXES)}")
    if not file.exists():
        raise FileNotFoundError(2, "there is no such file", str(file))
    if kind_of == ".npz":
        with _numpy(file, NpzFile) as arrays:
            if {"names", "sizes", "about"} <= set(arrays.files):
                return _captured(file, kind, rank, most)
            found = _arrays(file, arrays, most)
    elif kind_of == ".npy":
        found = {file.stem: _numpy(file, np.ndarray, most)}
    else:
        found, dtypes = _of_torch(file, most)
    if kind is not None or rank is not None:
        raise GradientError(f"{file} is not a file of captured gradients, and has no kinds and no ranks of gradients")
    joined = _joined(file, found)
    return replace(joined, dtype=dtypes) if dtypes else joined


def usable(gradient: Gradient) -> Gradient:
    """The gradient, if a codec can be measured with it.

    Raises:
        GradientError: it has NaN or infinity, or all of it is 0.
    """
    if not np.isfinite(gradient.vector).all():
        raise GradientError(
            f"{gradient.what} is not finite, and a job would send it uncompressed: there is nothing to measure"
        )
    if not gradient.vector.any():
        raise GradientError(f"{gradient.what} has only zeros, so there is nothing to select")
    return gradient


def check_numel(file: Path, numel: int, most: int) -> None:
    """
    Raises:
        GradientError: these are more elements than may be read.
    """
    if numel > most:
        raise GradientError(
            f"{file} announces {numel:,} elements, and at most {most:,} are read: if you trust it and have the memory, "
            "raise --most-elements"
        )


def _numpy(file: Path, kind: type, most: int = MOST) -> Any:
    try:
        with file.open("rb") as stream:
            if kind is np.ndarray and stream.peek(6).startswith(np.lib.format.MAGIC_PREFIX):
                gradient_file.check_header(stream, 8 * most)
        found = np.load(file)
    except Exception as error:  # NumPy's, zipfile's and tokenize's
        why = "it is something else, or holds Python objects" if "pickle" in str(error) else error
        raise GradientError(f"{file} cannot be read as NumPy's: {why}") from None
    if not isinstance(found, kind):
        raise GradientError(f"{file} has the name of one kind of NumPy's files, and is another: .npy is one array")
    return found


def _arrays(file: Path, arrays: Any, most: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in arrays.files:
        left = most - sum(one.size for one in found.values())
        try:
            found[name] = gradient_file.array_of(file, arrays, name, 8 * left)
        except gradient_file.CaptureError as error:
            raise GradientError(f"{file} cannot be read as NumPy's: {error}") from None
    return found


def _of_torch(file: Path, most: int) -> tuple[dict[str, Any], str]:
    """The tensors, and their dtypes."""
    try:
        import torch
    except ImportError as error:
        raise GradientError(
            f"{file} is PyTorch's, which cannot be imported ({error}): save it with numpy.save"
        ) from None
    try:
        if zipfile.is_zipfile(file):  # compressed, it may hold far more than it has bytes
            with zipfile.ZipFile(file) as members:
                check_numel(file, sum(one.file_size for one in members.infolist()) // 8, most)
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            given = torch.load(file, map_location="cpu", weights_only=True)
    except GradientError:
        raise
    except (EOFError, OSError, RuntimeError, zipfile.BadZipFile) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise GradientError(f"{file} cannot be read as PyTorch's: {why}") from None
    except Exception:  # pickle's, whose texts speak of its machine, or advise to have the file executed
        raise GradientError(
            f"{file} cannot be read as PyTorch's: it is something else, or holds other objects than tensors, which are "
            "not read; save a tensor, or a list or dict of tensors"
        ) from None
    if isinstance(given, torch.Tensor):
        given = {file.stem: given}
    elif isinstance(given, Sequence):
        given = {str(number): one for number, one in enumerate(given)}
    if not isinstance(given, Mapping) or not all(isinstance(one, torch.Tensor) for one in given.values()):
        raise GradientError(f"{file} must hold a tensor, or a list or dict of tensors, and it holds other things")
    check_numel(file, sum(one.numel() for one in given.values()), most)
    known = (torch.float16, torch.float32, torch.float64)  # NumPy has no bfloat16 and no floats of 8 bits
    found: dict[str, Any] = {}
    for name, one in given.items():
        try:
            dense = one.detach().to_dense()
            dense = dense.float() if dense.is_floating_point() and dense.dtype not in known else dense
            found[str(name)] = dense.numpy()
        except Exception as error:  # of tensors without elements in memory, quantized or nested ones
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise GradientError(
                f"{file} holds a tensor {str(name)[:80]!r} that is no array ({one.dtype}, {one.device}): {why}"
            ) from None
    return found, "/".join(sorted({str(one.dtype).removeprefix("torch.") for one in given.values()}))


def _beyond(values: Any) -> bool:
    """Whether finite values are infinite in float32, or all of them zero that are not."""
    sizes = np.abs(values[np.isfinite(values)])
    largest = sizes.max(initial=0.0)
    return bool(largest > np.finfo(np.float32).max or 0 < largest < np.finfo(np.float32).smallest_subnormal)


def _joined(file: Path, found: Mapping[str, Any]) -> Gradient:
    for name, one in found.items():
        if one.dtype.kind != "f":
            raise GradientError(f"{file} must hold floating-point numbers, and {name} has the dtype {one.dtype}")
    if not sum(one.size for one in found.values()):
        raise GradientError(f"{file} holds no elements")
    with np.errstate(over="ignore", under="ignore"):
        vector = np.concatenate([one.reshape(-1).astype(np.float32) for one in found.values()])
    for name, one in found.items():
        if one.dtype.itemsize > 4 and _beyond(one):
            raise GradientError(f"{name} in {file} has values beyond float32, in which this command works: scale them")
    dtypes = "/".join(sorted({str(one.dtype) for one in found.values()}))
    shapes = [one.shape for one in found.values()]
    return Gradient(vector, list(found), shapes, f"the gradient in {file.name}", dtypes, {})


def _captured(file: Path, kind: str | None, rank: int | None, most: int) -> Gradient:
    there = gradient_file.vectors_of(file)
    if not there:
        raise GradientError(f"{file} has parameters, and no gradients of them")
    rank = there[0][1] if rank is None else rank
    kind = kind or ("accumulator" if ("accumulator", rank) in there else "gradient")
    (names, sizes), about = gradient_file.parameters(file), gradient_file.about(file)
    check_numel(file, sum(sizes), most)
    vector = gradient_file.read(file, kind, rank, most)
    if not vector.size:
        raise GradientError(f"{file} holds no elements")
    shapes = [tuple(shape) for shape in about.get("shapes", [[size] for size in sizes])]
    if [math.prod(shape) for shape in shapes] != sizes:
        raise GradientError(f"{file} says shapes of its parameters that are not of their sizes: it was altered")
    what = f"the {kind} of rank {rank} in {file.name}"
    return Gradient(vector, names, shapes, what, "float32", {key: one for key, one in about.items() if key != "shapes"})
