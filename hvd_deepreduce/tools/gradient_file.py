"""Files of captured gradients: what a rank's compressor saw in one step.

A file is NumPy's ``.npz``. It has, for a rank r, ``gradient_r``, float32 ``[numel]``: the gradients of all parameters,
one after the other; and ``accumulator_r``, the same with the residual added, which a job with error feedback selects
from. It is missing where the job has none. ``names`` and ``sizes`` are the parameters' names and numbers of elements,
in that order. ``about`` is JSON: how the file was made; its ``shapes``, where it has them, are those of the parameters.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter

Kind = Literal["accumulator", "gradient"]
"""``accumulator``: what a job with error feedback selects from, residual + gradient. ``gradient``: the raw gradient,
which a job without error feedback selects from."""
KINDS: tuple[Kind, ...] = ("accumulator", "gradient")
Vector = np.ndarray[Any, np.dtype[np.float32]]
MOST = 1 << 27
"""The most elements of an array that is read, unless the caller allows more: a small file can announce any number."""
_MOST_BYTES_ABOUT = 1 << 26
"""Of names, of sizes, and of what a file says of itself."""
_SHAPES = TypeAdapter(list[Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(max_length=64)]])


class CaptureError(ValueError):
    """A file that is not one of captured gradients, or that has no such vector; says what it has."""


def write(
    file: str | Path,
    vectors: Mapping[tuple[Kind, int], Vector],
    names: Sequence[str],
    sizes: Sequence[int],
    about: Mapping[str, Any],
) -> None:
    """Writes a file. An interrupted call leaves no partial file at its place.

    Args:
        vectors: float32 ``[sum of sizes]``, by kind and rank.
        names, sizes: of the parameters.
        about: how the vectors were made; anything that JSON can hold.
    """
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.stem}.{os.getpid()}.part.npz")
    arrays = {f"{kind}_{rank}": vector for (kind, rank), vector in vectors.items()}
    try:
        np.savez(
            part, names=np.array(names), sizes=np.array(sizes), about=np.array(json.dumps(about)),
            **arrays,  # type: ignore[arg-type]
        )  # fmt: skip
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _opened(file: str | Path) -> Any:
    try:
        opened = np.load(file)
    except OSError:
        raise
    except Exception:  # NumPy's and zipfile's
        opened = None
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise CaptureError(f"{file} is not a file of captured gradients: it is not an .npz file")
    missing = [name for name in ("names", "sizes", "about") if name not in opened.files]
    if missing:
        opened.close()
        raise CaptureError(f"{file} is not a file of captured gradients: it has no {' and no '.join(missing)}")
    return opened


def check_header(stream: IO[bytes], most_bytes: int) -> None:
    """Reads the header of an array in NumPy's format.

    Raises:
        ValueError: there is none, the array has more bytes, or it holds Python objects.
    """
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not read")
    size = math.prod(shape) * dtype.itemsize
    if size > most_bytes:
        raise ValueError(f"it announces {size:,} bytes, and at most {most_bytes:,} are read (--most-elements)")


def array_of(file: str | Path, arrays: Any, name: str, most_bytes: int) -> np.ndarray[Any, Any]:
    """One array of an ``.npz``, whose header is read first.

    Raises:
        CaptureError: it cannot be read, or has more bytes.
    """
    try:
        member = f"{name}.npy"
        with arrays.zip.open(member if member in arrays.zip.namelist() else name) as stream:
            check_header(stream, most_bytes)
        found: np.ndarray[Any, Any] = arrays[name]
    except Exception as error:  # NumPy's, zipfile's, zlib's and tokenize's
        raise CaptureError(f"{file}: {name!r} cannot be read, so it was cut or altered: {error}") from None
    return found


def vectors_of(file: str | Path) -> list[tuple[Kind, int]]:
    """The kind and rank of each vector in a file, those of the lowest rank first.

    Raises:
        CaptureError: it is not a file of captured gradients.
    """
    found: list[tuple[Kind, int]] = []
    with _opened(file) as arrays:
        for name in arrays.files:
            kind, _, rank = name.rpartition("_")
            if kind in KINDS and rank.isascii() and rank.isdecimal() and len(rank) < 10:
                found.append((kind, int(rank)))
    return sorted(found, key=lambda one: (one[1], one[0]))


def read(file: str | Path, kind: str, rank: int, most: int = MOST) -> Vector:
    """One rank's vector, float32 ``[numel]``.

    Args:
        most: the most elements that are read.

    Raises:
        CaptureError: the file has no such vector, or one of more elements. No rank's stands in for another's: copies,
            shuffled or not, do not overlap as the ranks of a job do.
    """
    with _opened(file) as arrays:
        name = f"{kind}_{rank}"
        if name not in arrays.files:
            there = ", ".join(f"{kind}_{rank}" for kind, rank in vectors_of(file)) or "no vector"
            raise CaptureError(f"{file} has no {name}; it has {there}")
        vector: Vector = array_of(file, arrays, name, most * 4)
    numel = sum(parameters(file)[1])
    if vector.dtype != np.float32 or vector.shape != (numel,):
        raise CaptureError(
            f"{file} has a {name} of {vector.dtype} {list(vector.shape)}, and its parameters have {numel} elements of "
            "float32"
        )
    return vector


def rank_count(file: str | Path) -> int:
    """The number of ranks in a file."""
    return sum(kind == "gradient" for kind, _ in vectors_of(file))


def about(file: str | Path) -> dict[str, Any]:
    """How a file was made.

    Raises:
        CaptureError: what it says of that is not a JSON object, or its shapes are not lists of sizes.
    """
    with _opened(file) as arrays:
        text = str(array_of(file, arrays, "about", _MOST_BYTES_ABOUT))
    try:
        found: dict[str, Any] = json.loads(text)
        _SHAPES.validate_python(found.get("shapes", []))
    except (ValueError, RecursionError, AttributeError):
        raise CaptureError(
            f"{file} does not say how it was made as a JSON object with lists of shapes: it was altered"
        ) from None
    return found


def parameters(file: str | Path) -> tuple[list[str], list[int]]:
    """The names of the parameters and their numbers of elements, in the order of the vectors.

    Raises:
        CaptureError: there are not as many names as sizes, or they are something else.
    """
    with _opened(file) as arrays:
        names, sizes = (array_of(file, arrays, name, _MOST_BYTES_ABOUT) for name in ("names", "sizes"))
    if names.ndim != 1 or names.shape != sizes.shape:
        raise CaptureError(f"{file} has {names.size} names and {sizes.size} sizes of parameters: it was altered")
    if names.size and (names.dtype.kind != "U" or sizes.dtype.kind not in "iu" or (sizes < 0).any()):
        raise CaptureError(f"{file} has names or sizes of parameters that are something else: it was altered")
    return names.tolist(), sizes.tolist()
