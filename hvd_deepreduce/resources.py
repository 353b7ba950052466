"""Where the files that ship with the package are: kernel sources and configuration presets."""

import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).parent
_FILES = {"kernels": "*/*.cu", "configs": "*.yaml"}
"""What each folder contains. A folder without any such file is a leftover of another version, and is not used."""


def folder(name: str) -> Path:
    """The folder ``kernels`` or ``configs``.

    An installed package has them inside; a source checkout, in place or installed with ``pip install -e``, has them
    beside the package. ``importlib.resources`` does not find the ones beside the package.

    Raises:
        FileNotFoundError: neither place has the folder with its files.
    """
    for parent in (_PACKAGE, _PACKAGE.parent):
        if any((parent / name).glob(_FILES[name])):
            return parent / name
    raise FileNotFoundError(
        f"hvd_deepreduce has no folder {name!r} with files {_FILES[name]!r}, neither inside {_PACKAGE} nor beside it: "
        "install the package again"
    )


def digest_of_kernels(kernels: Path) -> str:
    """The digest of the CPU kernels' sources, which ``setup.py`` compiles into the library.

    TensorFlow's operations are in a library of their own.
    """
    made_of = hashlib.sha256()
    for path in sorted([*kernels.glob("*/*.cpp"), *kernels.glob("*/*.h")]):
        if path.parent.name != "tensorflow":
            made_of.update(path.relative_to(kernels).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return made_of.hexdigest()
