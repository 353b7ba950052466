"""Sections of documents that scripts write."""

from __future__ import annotations

from pathlib import Path


def read(page: Path, name: str) -> str:
    """A section of a page; empty if the page does not have it."""
    text = page.read_text() if page.exists() else ""
    return text.partition(f"<!-- begin {name} -->")[2].partition(f"<!-- end {name} -->")[0]


def write(page: Path, name: str, title: str, body: str, head: str = "") -> None:
    """Writes a section to a page, between its ``begin`` and ``end`` comments, or at the end.

    Args:
        page: the document.
        name: in the comments.
        title: of the section.
        body: its text.
        head: the text of a page that does not exist yet.
    """
    text = page.read_text() if page.exists() else head
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n## {title}\n\n{body}\n\n{end}"
    if begin in text:
        text = text[: text.index(begin)] + section + text[text.index(end) + len(end) :]
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    page.parent.mkdir(exist_ok=True)
    page.write_text(text)
