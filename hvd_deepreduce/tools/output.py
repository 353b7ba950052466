"""What the subcommands share: options, text, tables, JSON, progress, errors and exit codes.

What is asked for goes to standard output; progress and errors go to standard error. Tables have lines and colours, and
are as wide as the terminal, only where standard output is a terminal. Elsewhere each row is one line, whatever its
width.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hvd_deepreduce.config import ConfigError
from hvd_deepreduce.tools.gradient_file import KINDS, CaptureError
from hvd_deepreduce.tools.gradients import GradientError
from hvd_deepreduce.wire.standalone import ContainerError

T = TypeVar("T")
LONG_WORD = 16
"""Letters of a word that a table may divide."""


FOUND, USAGE = 1, 2
"""What the command ends with, unless all is well."""
EXIT_CODES = (
    "Exit codes: 0: all is well. 1: something is wrong with the input or the machine, and a sentence says what. 2: the "
    "command was called in a wrong way."
)


def _known_kind(given: str | None) -> str | None:
    if given not in (None, *KINDS):
        misused(f"--kind is {given!r}; choose from {', '.join(KINDS)}")
    return given


# Options of several subcommands.
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]
Kind = Annotated[
    str | None,
    typer.Option(
        help="Of captured gradients: accumulator or gradient. Default: accumulator if there.", callback=_known_kind
    ),
]
Rank = Annotated[int | None, typer.Option(min=0, help="Of captured gradients. Default: the first there.")]
MostElements = Annotated[
    int, typer.Option("--most-elements", min=1, help="Of a file; one that announces more is not read.")
]


def say(text: str = "") -> None:
    """Prints text as it is, but for characters that would control a terminal or cannot be written."""
    print(_shown(text, sys.stdout.encoding), flush=True)


def _shown(text: str, encoding: str | None) -> str:
    told = text.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in told)


def paragraph(text: str, indent: str = "") -> None:
    """Prints text in lines as wide as the terminal, and elsewhere in one line."""
    if sys.stdout.isatty():
        width = max(20, min(shutil.get_terminal_size().columns, 120) - len(indent))
        text = textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)  # commands can be copied
    say(textwrap.indent(text, indent))


def fail(sentence: object, code: int = FOUND) -> NoReturn:
    """Prints an error and ends the command."""
    print(_shown(f"hvd-deepreduce: {sentence}", sys.stderr.encoding), file=sys.stderr, flush=True)
    raise typer.Exit(code)


def misused(sentence: object) -> NoReturn:
    """Ends the command, which was called in a wrong way."""
    fail(sentence, USAGE)


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """The errors that say what is wrong with the input end the command with their sentence, without a traceback."""
    try:
        yield
    except (ConfigError, ContainerError, CaptureError, GradientError) as error:
        fail(error)
    except MemoryError as error:
        fail(f"there is not enough memory for this input: {error}")
    except OSError as error:
        fail(f"{error.filename} cannot be read or written: {error.strerror}" if error.filename else error)


def _plain(value: Any) -> Any:
    """A value that JSON can hold: NumPy's numbers as Python's, numbers that are not finite as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def print_json(data: Any) -> None:
    """Prints data as JSON. Keys keep their order; NaN and infinity are null."""
    say(json.dumps(_plain(data), indent=2, allow_nan=False))


def show(found: Any, as_json: bool, as_text: Callable[[Any], None]) -> None:
    """Prints what a subcommand has found, as JSON or as text."""
    (print_json if as_json else as_text)(found)


def columns(
    rows: Iterable[Mapping[str, Any]], cells: Sequence[tuple[str, str]], title: str = "", left: int = 1
) -> None:
    """Prints a table of dictionaries.

    Args:
        cells: of each column its name, and the format of its cells, such as ``"{bytes:,}"``.
        title, left: as for ``table``.
    """
    head, formats = zip(*cells, strict=True)
    table(head, [[one.format(**row) for one in formats] for row in rows], title, left)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", left: int = 1) -> None:
    """Prints a table.

    Args:
        head: the names of the columns.
        rows: as many cells each, printed as text.
        title: printed above it.
        left: the first columns that hold words, which are aligned to the left; numbers are aligned to the right.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    if title:
        paragraph(title)
    # Names and numbers are never divided, and words only where they are long: a terminal that is too narrow for that
    # wraps lines.
    texts = [" ".join((name, *(row[number] for row in cells))) for number, name in enumerate(head)]
    least = [
        min(LONG_WORD, max(map(len, text.split()))) if 0 < at < left else widths[at] for at, text in enumerate(texts)
    ]
    if sys.stdout.isatty() and sum(least) + 3 * len(head) + 1 <= shutil.get_terminal_size().columns:
        drawn = Table(box=box.SIMPLE_HEAD)
        for at, name in enumerate(head):
            side: Literal["left", "right"] = "left" if at < left else "right"
            drawn.add_column(name, justify=side, min_width=least[at], no_wrap=not 0 < at < left, overflow="fold")
        for row in cells:
            drawn.add_row(*row)
        Console(markup=False, highlight=False).print(drawn)
        return
    for row in [list(head), *cells]:
        line = (
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )  # fmt: skip
        say("  ".join(line).rstrip())


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """The items, with a progress bar on standard error if that is a terminal.

    Args:
        what: is done with them, such as ``"timing codecs"``.
    """
    if not sys.stderr.isatty():
        return items
    return track(items, what, console=Console(stderr=True), transient=True)
