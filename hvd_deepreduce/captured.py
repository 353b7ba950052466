"""Files of captured gradients: what a rank's compressor saw in one step.

A file is NumPy's ``.npz``. It has, for a rank r, ``gradient_r``, float32 ``[numel]``: the gradients of all parameters,
one after the other; and ``accumulator_r``, the same with the residual added, which a job with error feedback selects
from. It is missing where the job has none. ``names`` and ``sizes`` are the parameters' names and numbers of elements,
in that order. ``about`` is JSON: how the file was made; its ``shapes``, where it has them, are those of the parameters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

Kind = Literal["accumulator", "gradient"]
"""``accumulator``: what a job with error feedback selects from, residual + gradient. ``gradient``: the raw gradient,
which a job without error feedback selects from."""
KINDS: tuple[Kind, ...] = ("accumulator", "gradient")
Vector = np.ndarray[Any, np.dtype[np.float32]]


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
    except (ValueError, EOFError, BadZipFile):
        opened = None
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise CaptureError(f"{file} is not a file of captured gradients: it is not an .npz file")
    missing = [name for name in ("names", "sizes", "about") if name not in opened.files]
    if missing:
        opened.close()
        raise CaptureError(f"{file} is not a file of captured gradients: it has no {' and no '.join(missing)}")
    return opened


def vectors_of(file: str | Path) -> list[tuple[Kind, int]]:
    """The kind and rank of each vector in a file, those of the lowest rank first.

    Raises:
        CaptureError: it is not a file of captured gradients.
    """
    found: list[tuple[Kind, int]] = []
    with _opened(file) as arrays:
        for name in arrays.files:
            kind, _, rank = name.rpartition("_")
            if kind in KINDS and rank.isdecimal():
                found.append((kind, int(rank)))
    return sorted(found, key=lambda one: (one[1], one[0]))


def read(file: str | Path, kind: str, rank: int) -> Vector:
    """One rank's vector, float32 ``[numel]``.

    Raises:
        CaptureError: the file has no such vector. No rank's stands in for another's: copies, shuffled or not, do not
            overlap as the ranks of a job do.
    """
    with _opened(file) as arrays:
        name = f"{kind}_{rank}"
        if name not in arrays.files:
            there = ", ".join(f"{kind}_{rank}" for kind, rank in vectors_of(file)) or "no vector"
            raise CaptureError(f"{file} has no {name}; it has {there}")
        try:
            vector: Vector = arrays[name]
        except Exception as error:  # NumPy's, zipfile's, zlib's and tokenize's
            raise CaptureError(f"{file} cannot be read, so it was cut or altered: {error}") from None
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
        try:
            found = json.loads(str(arrays["about"]))
        except ValueError:
            found = None
    shapes = found.get("shapes", []) if isinstance(found, dict) else None
    if not isinstance(shapes, list) or not all(
        isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) for shape in shapes
    ):
        raise CaptureError(f"{file} does not say how it was made as a JSON object with lists of shapes: it was altered")
    known: dict[str, Any] = found
    return known


def parameters(file: str | Path) -> tuple[list[str], list[int]]:
    """The names of the parameters and their numbers of elements, in the order of the vectors.

    Raises:
        CaptureError: there are not as many names as sizes.
    """
    with _opened(file) as arrays:
        names, sizes = arrays["names"], arrays["sizes"]
    if names.ndim != 1 or names.shape != sizes.shape or sizes.dtype.kind not in "iu":
        raise CaptureError(f"{file} has {names.size} names and {sizes.size} sizes of parameters: it was altered")
    return names.tolist(), sizes.tolist()
