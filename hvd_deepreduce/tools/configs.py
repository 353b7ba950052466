"""``hvd-deepreduce configs``: lists the presets, explains one, or checks a file."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Annotated, Any

import typer

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import Codec
from hvd_deepreduce.config import presets
from hvd_deepreduce.tools import gradients, output
from hvd_deepreduce.tools.measuring import WholeConfig

EXAMPLES = ("configs", "configs --all", "configs recommended", "configs ./mine.yaml")
SAMPLE = 1_000_000
"""Elements of the generated gradient on which bytes are measured."""
PARTS = ("sparsifier", "index", "value", "joint", "exchange", "memory")


def purpose(name: str) -> str:
    """What a preset is for: the comment in its file's first line."""
    return presets.find(name).read_text("utf-8").splitlines()[0].lstrip("# ")


def configs(
    source: Annotated[str | None, typer.Argument(help="A preset's name, or the path of a YAML file.")] = None,
    every: Annotated[bool, typer.Option("--all", help="List the presets of methods and papers and the baselines too.")]
    = False,
    as_json: output.Json = False,
) -> None:
    """Lists the presets, explains one, or checks a YAML file.

    Listed are the presets for users; with --all, those of methods and papers and the baselines too.

    Explained are the parts of the config, with the papers that they are from, and the bytes that it sends. A file with
    a key or a value that is not allowed, or with a setting that has no effect, is an error.
    """
    if source is None:
        listed = [
            {"name": name, **_short(Config.load(name)), "purpose": purpose(name), "aliases": presets.aliases_of(name)}
            for name in presets.files(every)
        ]
        output.show(listed, as_json, _list)
        return
    with output.errors_as_sentences():
        config = Config.load(source)
    output.show(explained(source, config), as_json, lambda found: _show(found, config))


def _list(presets: list[dict[str, Any]]) -> None:
    cells = [("preset", "{name}"), ("selects", "{selects}"), ("encodes", "{encodes}"), ("what it is", "{purpose}")]
    rows = ({**one, "aliases": ", ".join(one["aliases"])} for one in presets)
    output.columns(rows, [*cells, ("other names", "{aliases}")], left=5)


def _short(config: Config) -> dict[str, Any]:
    """What a config selects and how it encodes, in a few words."""
    density = getattr(config.sparsifier, "density", None)
    selects = config.sparsifier.name + (f" {density:.4g}" if density is not None else "")
    codecs = [one.name for one in (config.index, config.value, config.joint) if one is not None]
    if config.exchange.implementation is not None:
        codecs = [f"exchange {config.exchange.name}"]
    return {"selects": selects, "encodes": " + ".join(codecs)}


def explained(source: str, config: Config) -> dict[str, Any]:
    """All that is told of a config: what it is for, its parts, its bytes, and its settings."""
    found: dict[str, Any] = {"source": source, "parts": [], "settings": config.to_dict(), "bytes_an_element": None}
    if source in presets.names():
        found["purpose"] = purpose(source)
    for key in PARTS:
        codec = getattr(config, key)
        if codec is not None and (key != "memory" or config.error_feedback):
            found["parts"].append({"part": key, "name": codec.name, "does": _does(codec), "paper": _paper(codec)})
    sample = gradients.generate(SAMPLE)
    try:
        measured = WholeConfig(config, sample.names, sample.sizes, sample.vector)
    except ValueError as error:
        found["not_measured"] = str(error)
    else:
        found["bytes_an_element"] = measured.size / SAMPLE
        found["relative_error"] = measured.error
    return found


def _does(codec: Codec) -> str:
    """The first sentences of the codec's docstring."""
    text = (inspect.getdoc(type(codec)) or "").split("Attributes:")[0].split("\n\n")[0]
    return " ".join(text.split()).replace("``", "")


def _paper(codec: Codec) -> str:
    """The source that the codec's module names, in its docstring's second paragraph."""
    paragraphs = (inspect.getdoc(sys.modules[type(codec).__module__]) or "").split("\n\n")
    text = " ".join(paragraphs[1].split()) if len(paragraphs) > 1 else ""
    return text.replace("``", "") if re.search(r"\b(19|20)\d\d\b|DeepReduce|RFC", text) else ""


def _show(found: dict[str, Any], config: Config) -> None:
    output.say(f"{found['source']}: {found.get('purpose', 'a valid config')}")
    output.say()
    for one in found["parts"]:
        output.paragraph(f"{one['part']} {one['name']}: {one['does']}", indent="  ")
        if one["paper"]:
            output.paragraph(f"From: {one['paper']}", indent="    ")
    output.say()
    if found["bytes_an_element"] is None:
        output.paragraph(f"Bytes: not measured: {found['not_measured']}.")
    else:
        size = found["bytes_an_element"]
        every = f", every {config.local.every} steps" if config.local is not None else ""
        stays = "stays in the residual, and is sent later" if config.error_feedback else "is lost"
        lacks = f"What a receiver lacks is {found['relative_error']:.1%} of the gradient's norm; it {stays}."
        if config.memory.leaves_whole:
            lacks = "An element that is sent is a vote of one bit, and leaves the momentum; the others stay in it."
        output.paragraph(
            f"Bytes: {size:.4g} an element ({size / 4:.3%} of float32){every}. {lacks} Measured on a generated "
            f"gradient of {SAMPLE:,} elements; 'hvd-deepreduce bench' measures yours. What a rank receives depends on "
            "the exchange and the number of ranks."
        )
    output.say()
    output.say("Settings:")
    output.say()
    for line in str(config).splitlines():
        output.say(f"  {line}")
