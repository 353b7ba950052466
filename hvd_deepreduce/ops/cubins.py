"""Compiled CUDA kernels on disk. A cubin runs with the user's rights, so only the user may be able to put one there.

The files are in a folder ``hvd_deepreduce`` of CuPy's cache folder (``CUPY_CACHE_DIR``, else ``~/.cupy/kernel_cache``).
A file is a digest of 32 bytes, followed by the cubin. The digest finds damaged files; against other users, the folder
and the file must belong to this user, and no one else may be able to write to them. What does not pass is compiled
again. If the folder cannot be used, kernels are compiled in every process, after a warning that says why.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DIGEST_BYTES = 32


def cache_folder() -> Path:
    """Where the cubins are."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")) / "hvd_deepreduce"


def read(key: str) -> bytes | None:
    """The cubin that ``write`` stored under this key; None if there is none that can be trusted."""
    try:
        with _opened() as folder:
            file = os.open(_name(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            with open(file, "rb") as opened:
                _require_private(file, "the file")
                content = opened.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(error)
        return None
    digest, cubin = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return cubin if digest == _digest(key, cubin) else None


def write(key: str, cubin: bytes) -> None:
    """Stores a cubin. Other processes see the whole file or none.

    Args:
        key: a hexadecimal digest of everything that the cubin was made of.
        cubin: what the compiler returned.
    """
    try:
        with _opened() as folder:
            unfinished = f"{_name(key)}.{secrets.token_hex(8)}"
            file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                with open(file, "wb") as opened:
                    opened.write(_digest(key, cubin) + cubin)
                os.replace(unfinished, _name(key), src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(unfinished, dir_fd=folder)
                raise
    except OSError as error:
        _warn(error)


def _name(key: str) -> str:
    return f"{key}.cubin"


def _digest(key: str, cubin: bytes) -> bytes:
    """The key is part of it, so a file cannot stand for another kernel's."""
    return hashlib.sha256(key.encode() + cubin).digest()


@contextmanager
def _opened() -> Iterator[int]:
    """The cache folder as a file descriptor: what is checked is what is used, even if the path is exchanged meanwhile.

    Raises:
        OSError: it cannot be opened, or not only this user can write to it.
    """
    path = cache_folder()
    if path.parts[0] == "~":
        raise FileNotFoundError("this user has no home folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require_private(folder, "the folder")
        yield folder
    finally:
        os.close(folder)


def _require_private(file: int, what: str) -> None:
    found = os.fstat(file)
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{what} belongs to the user with the number {found.st_uid}, not to this user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{what} has mode {stat.S_IMODE(found.st_mode):o}, so others can write to it; it must be 700 or 755"
        )


def _warn(error: OSError) -> None:
    warnings.warn(
        f"compiled CUDA kernels are not kept in {cache_folder()}, and are compiled in every process: {error}. Delete "
        "the folder, or set CUPY_CACHE_DIR to a folder of your own",
        RuntimeWarning,
        stacklevel=2,
    )
