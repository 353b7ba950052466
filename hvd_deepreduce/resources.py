"""Where the files that ship with the package are: kernel sources and configuration presets."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def folder(name: str) -> Path:
    """The folder ``kernels`` or ``configs``.

    An installed package has them inside; a source checkout, in place or installed with ``pip install -e``, has them
    beside the package. ``importlib.resources`` does not find the latter.

    Raises:
        FileNotFoundError: the folder is in neither place.
    """
    for parent in (_PACKAGE, _PACKAGE.parent):
        if (parent / name).is_dir():
            return parent / name
    raise FileNotFoundError(
        f"hvd_deepreduce has no folder {name!r}, neither inside {_PACKAGE} nor beside it: install the package again"
    )
