"""Writes docs/configuration.md from the settings and docstrings of the codecs, and from the presets.

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
HEAD = """# Configuration

scripts/dev/describe.py writes this page from the code, and a test checks that it is up to date.

A config is the name of a preset (below), a YAML file, a dict, or keyword arguments of `DeepReduce`. A string that ends
in `.yaml` or `.yml` or contains a `/` is the path of a file; every other string is a preset's name, whatever files the
current directory contains. A codec is given by its name (`index: rice`), or by its name and settings
(`value: {name: qsgd, bits: 4}`); all other settings have their defaults. Every rank must have the same config, except
for the number of threads.

    sparsifier: {name: topk, density: 0.01}   # selects the elements to send
    index: rice_blocks                        # encodes their indices
    value: {name: qsgd, bits: 7}              # encodes their values

Keyword arguments change a preset, a file or a dict. A codec without a name keeps its name and its other settings:
`DeepReduce(model, "smallest", value={"bits": 6}, density=0.005)`, where `density` is short for
`sparsifier={"density": ...}`.

`joint` names one codec that encodes both, and replaces `index` and `value`. Every sparsifier can be combined with
every codec, but `none` has no indices and takes no `index`. Under `randomk` no indices are sent, unless an `index` is
given. Every `exchange` other than `allgather` sums whole vectors: set `scope` to `model` (the default with such an
exchange) or `bucket`. `reduce_scatter` works with any codec, as `auto` does, which
chooses an exchange; the others run over MPI and encode indices and values
themselves, so leave out `index` and `value`. [exchanges.md](exchanges.md) says which one to use when.
`hierarchical` needs the scope `bucket` or `model`, and one of the first two ([hierarchical.md](hierarchical.md)).

A setting that has no effect is an error, unless it has its default value: `bucket_bytes` with `scope: model`,
`selection` with `scope: tensor`, `min_elements` with another scope, `force_index` with a value codec that does not
sort, `bits` of DenseStream without `value: qsgd`, `fill` and `memory` without error feedback, `density_schedule` with a
sparsifier that has no density, and `index` where there are no indices. It is a warning of the job if the value is what
happens anyway, so that one dict can be used with several scopes: `min_elements: 0` where all tensors are compressed,
`selection: tensor` with `scope: tensor`, `fill: false` and `decay: 0` without error feedback, `nesterov: false` without
momentum. `seed` and `threads` can always be set. A
setting of a preset, a file or a dict that has no effect beside the keyword arguments is dropped: `DeepReduce(model,
"recommended", joint="densestream")` drops `index` and `value`, and `DeepReduce(model, "recommended",
sparsifier="randomk")` drops `index`, which was chosen for another sparsifier.
"""


OVERRIDES = """### Settings of single tensors

`overrides` gives some tensors settings of their own. Its keys are patterns of parameters' names, in the syntax of
Python's `fnmatch` (`*`, `?`, `[ab]`; case counts), and the first one that matches a name counts. What an override does
not set is as in the rest of the config; a codec without a name keeps its name.

    sparsifier: {name: topk, density: 0.01}
    value: {name: qsgd, bits: 7}
    overrides:
      "*.bias": {density: 1.0, value: raw}              # all elements of every bias, exactly
      "embedding.*": {density: 0.001, value: {bits: 4}} # fewer and coarser ones of the embedding
      "head.*": {}                                      # as all others, whatever the patterns below say
      "*.weight": {index: bitmap}

These settings can differ from tensor to tensor: OVERRIDABLE.
Overrides need the scope `tensor`, or a larger one with `selection: tensor`, and the exchange `allgather`: elsewhere
tensors are not encoded one by one. `min_elements` needs the scope `tensor`; a large one sends a tensor uncompressed. A
pattern that applies to no parameter is an error.

The names are those of `model.named_parameters()` on PyTorch. Horovod on TensorFlow does not tell names: give
`DeepReduce(config, variables=model.trainable_variables)` the variables whose gradients Horovod gets, in its order.
Their names (`dense/bias`) are matched without the final `:0`.
"""


LOCAL = """### Local updates

With `local`, a config is for `LocalSGD` and not for `DeepReduce`: ranks train by themselves for `every` steps, and
exchange how far they have come ([local_updates.md](local_updates.md)). Its keys:
"""


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


def sections() -> list[str]:
    """The sections of the page."""
    codecs = ("sparsifier", "index", "value", "joint", "exchange", "memory")
    parts = [HEAD.rstrip(), "## The job", "\n".join(settings(Config, codecs))]
    parts.append(OVERRIDES.rstrip().replace("OVERRIDABLE", ", ".join(f"`{key}`" for key in OVERRIDABLE)))
    parts += [LOCAL.rstrip(), "\n".join(settings(LocalSettings))]
    for registry, title in (
        (sparsifiers, "Sparsifiers (`sparsifier:`)"),
        (index_codecs, "Index codecs (`index:`)"),
        (value_codecs, "Value codecs (`value:`)"),
        (joint_codecs, "Joint codecs (`joint:`)"),
        (exchanges, "Exchanges (`exchange:`)"),
        (memories, "Memories of error feedback (`memory:`)"),
    ):
        parts.append(f"## {title}")
        for name, codec in sorted(registry.by_name.items()):
            body = (inspect.getdoc(codec) or "").split("Attributes:")[0].split("\n\n")
            parts.append(f"### {name}\n\n{' '.join(body[0].split())}")
            if codec.model_fields:
                parts.append("\n".join(settings(codec)))
    parts.append("## Presets (`configs/`)\n\nA preset is found by its name alone, in whichever folder its file is.")
    for place, title in (("", "For users"), ("methods", "Methods"), ("papers", "Papers"), ("baselines", "Baselines")):
        parts.append(f"### {title} (`configs/{place}`)")
        parts.append("\n".join(map(preset_line, sorted((CONFIGS / place).glob("*.yaml")))))
    return parts


def preset_line(path: Path) -> str:
    """A preset's name, its other names, and what it is."""
    others = f" (or {', '.join(f'`{one}`' for one in presets.aliases_of(path.stem))})"
    return f"- `{path.stem}`{others if '`' in others else ''}: {path.read_text().splitlines()[0].lstrip('# ')}"


def page() -> str:
    """The text of docs/configuration.md."""
    return "\n\n".join(sections()) + "\n"


if __name__ == "__main__":
    DOC.write_text(page())
