"""Writes the lists of docs/configuration.md from the settings and docstrings of the codecs, and from the presets.

    python scripts/dev/describe.py
"""

import inspect
import re
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import index_codecs, joint_codecs, sparsifiers, value_codecs
from hvd_deepreduce.config import presets
from hvd_deepreduce.config.error_feedback import memories
from hvd_deepreduce.config.local_sgd import LocalSettings
from hvd_deepreduce.config.settings import OVERRIDABLE
from hvd_deepreduce.exchange.settings import exchanges

DOC = Path(__file__).parents[2] / "docs" / "configuration.md"
CONFIGS = DOC.parent.parent / "configs"

def attributes(model: type[Any]) -> dict[str, str]:
    """The description of each attribute in the docstring's ``Attributes`` section."""
    text = inspect.getdoc(model) or ""
    if "Attributes:" not in text:
        return {}
    found: dict[str, str] = {}
    name = ""
    for line in text.split("Attributes:")[1].splitlines():
        start = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
        if start:
            name = start[1]
            found[name] = start[2]
        elif line.startswith("     ") and name:
            found[name] += " " + line.strip()
    return {one: sentence for names, sentence in found.items() for one in names.split(", ")}


def default(field: FieldInfo) -> str:
    """The default of a setting, as written in YAML."""
    if field.is_required():
        return "required"
    value = field.default
    if hasattr(value, "name"):
        return f"`{value.name}`"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def settings(model: type[Any], skip: tuple[str, ...] = ()) -> list[str]:
    """One line of Markdown for each setting."""
    sentences = attributes(model)
    return [
        f"- `{name}` (default {default(field)}): {sentences.get(name, '')}".rstrip(": ")
        for name, field in model.model_fields.items()
        if name not in skip
    ]


def parts() -> dict[str, str]:
    """What is between the comments of the page, by the name in them."""
    jobs = ("sparsifier", "index", "value", "joint", "exchange", "memory")
    found = {
        "job": "\n".join(settings(Config, jobs)), "local": "\n".join(settings(LocalSettings)),
        "overridable": ", ".join(f"`{key}`" for key in OVERRIDABLE),
    }  # fmt: skip
    codecs = []
    for registry, title in (
        (sparsifiers, "Sparsifiers (`sparsifier:`)"),
        (index_codecs, "Index codecs (`index:`)"),
        (value_codecs, "Value codecs (`value:`)"),
        (joint_codecs, "Joint codecs (`joint:`)"),
        (exchanges, "Exchanges (`exchange:`)"),
        (memories, "Memories of error feedback (`memory:`)"),
    ):
        codecs.append(f"## {title}")
        for name, codec in sorted(registry.by_name.items()):
            body = (inspect.getdoc(codec) or "").split("Attributes:")[0].split("\n\n")
            codecs.append(f"### {name}\n\n{' '.join(body[0].split())}")
            if codec.model_fields:
                codecs.append("\n".join(settings(codec)))
    lists = []
    for place, title in (("", "For users"), ("methods", "Methods"), ("papers", "Papers"), ("baselines", "Baselines")):
        lists.append(f"### {title} (`configs/{place}`)")
        lists.append("\n".join(map(preset_line, sorted((CONFIGS / place).glob("*.yaml")))))
    return {**found, "codecs": "\n\n".join(codecs), "presets": "\n\n".join(lists)}


def preset_line(path: Path) -> str:
    """A preset's name, its other names, and what it is."""
    others = f" (or {', '.join(f'`{one}`' for one in presets.aliases_of(path.stem))})"
    return f"- `{path.stem}`{others if '`' in others else ''}: {path.read_text().splitlines()[0].lstrip('# ')}"


def page() -> str:
    """The text of docs/configuration.md: as it is, but for what is between its comments."""
    text = DOC.read_text()
    for name, body in parts().items():
        before, begin, rest = text.partition(f"<!-- begin {name} -->")
        old, end, after = rest.partition(f"<!-- end {name} -->")
        space = "\n\n" if old[:1] == "\n" else ""
        text = before + begin + space + body + space + end + after
    return text


if __name__ == "__main__":
    DOC.write_text(page())
