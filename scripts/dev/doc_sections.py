"""Sections of documents that scripts write, and the tables in them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def read(page: Path, name: str) -> str:
    """A section of a page; empty if the page does not have it."""
    text = page.read_text() if page.exists() else ""
    return text.partition(f"<!-- begin {name} -->")[2].partition(f"<!-- end {name} -->")[0]


def write(page: Path, name: str, title: str, body: str) -> None:
    """Writes a section to a page, between its ``begin`` and ``end`` comments with its name, or at the end."""
    text = page.read_text() if page.exists() else ""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n## {title}\n\n{body}\n\n{end}"
    if begin in text:
        text = text[: text.index(begin)] + section + text[text.index(end) + len(end) :]
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    page.parent.mkdir(exist_ok=True)
    page.write_text(text)


def refreshed(page: Path, name: str, parts: Iterable[str | None], dated: str = "") -> str:
    """The body of a section whose prose is written by hand, on the page.

    Args:
        parts: the paragraphs that a script makes. A table or a picture replaces the next one of its kind, any other
            text the paragraph behind the part before it. None: that paragraph stays.
        dated: replaces the last paragraph.
    """
    old, at = read(page, name).strip().split("\n\n")[1:], -1
    last = [dated] if dated else []
    if dated:
        del old[-1:]
    for part in parts:
        kind = part[:1] if part and part.startswith(("| ", "![")) else ""
        at = next((n for n in range(at + 1, len(old)) if old[n].startswith(kind)), len(old))
        if part is not None:
            old[at : at + 1] = [part]
    return "\n\n".join(old + last)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], right: bool = False) -> str:
    """A Markdown table. None is an empty cell; ``right`` aligns all columns but the first to the right."""
    rule = ["---", *["---:" if right else "---"] * (len(head) - 1)]
    return "\n".join(row(line) for line in (head, rule, *rows))


def row(cells: Iterable[Any]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join('' if cell is None else str(cell) for cell in cells)} |"


def tables(section: str) -> list[dict[str, Any]]:
    """The Markdown tables of a section: the heading above each, its head, and its rows."""
    found: list[dict[str, Any]] = []
    heading, head = "", None
    for line in section.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            head = None
        elif head is None:
            head = cells
            found.append({"heading": heading, "head": head, "rows": []})
        elif set("".join(cells)) - set(":- "):
            found[-1]["rows"].append(cells)
    return found
