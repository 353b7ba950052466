"""What mkdocs adds to the pages of docs/: README.md as the first page, and files of the repository that pages link to.

mkdocs.yml names it as a hook. Links of the documents are those of a code host: relative to the file that they are in. A
link that leaves docs/ leads to a page of the site with that file's text, or with a list of a folder's files.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)((?:#[^)\s]*)?)(?=\))")
PAGES = {"README.md": "index.md"}
"""Pages that are made here, by path in the repository; others are at ``files/<path>``."""
ALWAYS = ("CONTRIBUTING.md", "CHANGELOG.md")


def target(path: str) -> str | None:
    """Where the site has a file or folder of the repository; None: it is not in the repository."""
    if not (ROOT / path).exists():
        return None
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path) or f"files/{path if path.endswith('.md') else path + '.md'}"


def with_links_of_the_site(text: str, source: str, page: str) -> tuple[str, set[str]]:
    """The text of a document, with the links that do not stay within docs/ rewritten.

    Args:
        source: the document's path in the repository.
        page: its path in the site.

    Returns:
        The text, and the paths in the repository to which it links outside docs/. A link to nothing stays as it is, for
        mkdocs to find.
    """
    outside = set()

    def rewritten(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        there = target(path)
        if there is None:
            return found[0]
        if not path.startswith("docs/"):
            outside.add(path)
        return posixpath.relpath(there, posixpath.dirname(page) or ".") + found[2]

    return LINK.sub(rewritten, text), outside


def text_of(path: str) -> tuple[str, set[str]]:
    """The page for a file or folder of the repository, and what it links to."""
    if path.endswith(".md"):
        return with_links_of_the_site((ROOT / path).read_text("utf-8"), path, str(target(path)))
    if (ROOT / path).is_dir():
        files = sorted(one.name for one in (ROOT / path).iterdir() if one.is_file())
        listed = "\n".join(f"- [{name}]({name})" for name in files)
        return with_links_of_the_site(f"# {path}/\n\n{listed}\n", f"{path}/", str(target(path)))
    if path.endswith(".ipynb"):
        cells = json.loads((ROOT / path).read_text("utf-8"))["cells"]
        return with_links_of_the_site("\n\n".join(map(cell_text, cells)) + "\n", path, str(target(path)))
    suffix = Path(path).suffix.lstrip(".")
    return f"# {path}\n\n`````{suffix}\n{(ROOT / path).read_text('utf-8')}\n`````\n", set()


def cell_text(cell: dict[str, Any]) -> str:
    """A cell of a notebook, with its output, as Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        if "text" in output:
            parts.append(f"```text\n{''.join(output['text'])}```")
        else:
            parts.append(f"![figure](data:image/png;base64,{output['data']['image/png']})")
    return "\n\n".join(parts)


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages that are made here."""
    waiting, known = {*PAGES, *ALWAYS}, set()
    for file in files.documentation_pages():
        waiting |= with_links_of_the_site(file.content_string, f"docs/{file.src_uri}", file.src_uri)[1]
    while waiting:
        path = waiting.pop()
        known.add(path)
        text, outside = text_of(path)
        files.append(File.generated(config, str(target(path)), content=text))
        waiting |= outside - known
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links of the documents in docs/."""
    if page.file.generated_by is not None:
        return markdown
    return with_links_of_the_site(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)[0]
