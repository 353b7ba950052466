"""Presets: the configurations in ``configs/``, which ship with the package. A preset's name is its file's stem.

The files for users are at the top of the folder; those of methods and papers and the baselines are in folders below it,
which a name does not mention. ``ALIASES`` has further names.

A string is a preset's name unless it contains a directory separator or ends in ``.yaml`` or ``.yml``; then it is the
path of a file, as every ``Path`` is. The current directory has no influence: a file in it never replaces a preset of
the same name.
"""

from __future__ import annotations

import os
from pathlib import Path

from hvd_deepreduce.codecs.interfaces import meant
from hvd_deepreduce.resources import folder

ALIASES = {
    "topk_rice_qsgd": "recommended", "topk_rice_qsgd_two_levels": "recommended_two_levels", "topk_model": "fast",
    "sgd_small": "adamw_safe",
}  # fmt: skip
"""Former names of presets, which stay valid."""


def files(every: bool = True) -> dict[str, Path]:
    """The files of all presets, or of those at the top of the folder, by name, sorted."""
    paths = folder("configs").glob("**/*.yaml" if every else "*.yaml")
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}


def names() -> list[str]:
    """All names of presets, aliases among them, sorted."""
    return sorted([*files(), *ALIASES])


def aliases_of(name: str) -> list[str]:
    """The other names of a preset."""
    return [alias for alias, preset in ALIASES.items() if preset == name]


def find(source: str | Path) -> Path:
    """The file of the preset that ``source`` names, or ``source`` itself where it is the path of a file.

    Raises:
        LookupError: no preset has this name; the message lists all presets.
    """
    if isinstance(source, Path) or source.endswith((".yaml", ".yml")) or os.path.basename(source) != source:
        return Path(source)
    path = files().get(ALIASES.get(source, source))
    if path is None:
        raise LookupError(
            f"no preset is named {source!r}; the presets are: {', '.join(names())}. To read a file, give a path that "
            f"ends in .yaml or .yml, or one with a directory, such as './my_config'{meant(source, names())}"
        )
    return path


def hint(path: Path) -> str:
    """What an error about the missing file ``path`` adds: the preset that may have been meant, or nothing."""
    return f"; to use the preset {path.stem!r}, give its name alone" if path.stem in names() else ""
