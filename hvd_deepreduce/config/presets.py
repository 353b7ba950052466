"""Presets: the configurations in ``configs/``, which ship with the package. A preset's name is its file's stem.

A string is a preset's name unless it contains a directory separator or ends in ``.yaml`` or ``.yml``; then it is the
path of a file, as every ``Path`` is. The current directory has no influence: a file in it never replaces a preset of
the same name.
"""

from __future__ import annotations

import os
from pathlib import Path

from hvd_deepreduce.codecs.interfaces import meant
from hvd_deepreduce.resources import folder


def names() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(path.stem for path in folder("configs").glob("*.yaml"))


def find(source: str | Path) -> Path:
    """The file of the preset that ``source`` names, or ``source`` itself where it is the path of a file.

    Raises:
        LookupError: no preset has this name; the message lists all presets.
    """
    if isinstance(source, Path) or source.endswith((".yaml", ".yml")) or os.path.basename(source) != source:
        return Path(source)
    if source not in names():
        raise LookupError(
            f"no preset is named {source!r}; the presets are: {', '.join(names())}. To read a file, give a path that "
            f"ends in .yaml or .yml, or one with a directory, such as './my_config'{meant(source, names())}"
        )
    return folder("configs") / f"{source}.yaml"


def hint(path: Path) -> str:
    """What an error about the missing file ``path`` adds: the preset that may have been meant, or nothing."""
    return f"; to use the preset {path.stem!r}, give its name alone" if path.stem in names() else ""
