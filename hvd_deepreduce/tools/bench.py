"""``hvd-deepreduce bench``: bytes, times and errors of configs and codecs on one gradient."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import ValueCodec
from hvd_deepreduce.config import ConfigError, presets
from hvd_deepreduce.ops import library
from hvd_deepreduce.tools import gradients, output, statistics
from hvd_deepreduce.tools.gradient_file import MOST
from hvd_deepreduce.tools.measuring import WholeConfig, all_codecs, timed, trial
from hvd_deepreduce.tools.picture import Panel, Point, draw

EXAMPLES = (
    "bench",
    "bench gradients.npz --config recommended --config ./mine.yaml",
    "bench --numel 25000000 --all --runs 3 --picture presets.png",
    "bench gradients.npz --codecs --density 0.001 --json",
)
CONFIGS = ("recommended", "fast", "smallest", "adamw_safe", "adamw_small", "sparseloco", "qsgd")
"""Of which the times and bytes are measured where none is named."""
GENERATED = 1_000_000
"""Elements of a gradient that is generated."""
VECTOR_LEVELS = ("portable", "AVX2", "AVX-512")
TIMES = (
    ("encode ms", "{encode}"), ("/ copy", "{encode_copies}"), ("decode ms", "{decode}"), ("/ copy", "{decode_copies}"),
)  # fmt: skip
"""Columns of ``_with_times``."""


def bench(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A gradient: .npy, .npz, .pt, or a file of captured gradients. Without one, a gradient is generated."
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help=f"A preset's name or a YAML file; can be repeated. Default: {', '.join(CONFIGS)}."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All presets.")] = False,
    codecs: Annotated[
        bool, typer.Option("--codecs", help="Each index, value and joint codec too, on the top-k of the gradient.")
    ] = False,
    density: Annotated[
        float | None, typer.Option(help="Of the top-k, in place of the configs' own; 0.01 for codecs.")
    ] = None,
    numel: Annotated[
        int | None, typer.Option(min=1, max=2**32 - 1, help="Elements of the generated gradient. Default: 1000000.")
    ] = None,
    kind: output.Kind = None,
    rank: output.Rank = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs that are counted, of each function.")] = 5,
    picture: Annotated[
        Path | None, typer.Option(help="Draw bits against time into this file (.png). Needs matplotlib.")
    ] = None,
    most_elements: output.MostElements = MOST,
    as_json: output.Json = False,
) -> None:
    """Measures configs and codecs on a gradient.

    Bytes, the time to encode and to decode, and what a receiver lacks.

    Everything runs on the CPU, on one thread unless a config says otherwise, without a framework and without an
    exchange. Times are medians. They are told relative to a copy of the gradient too, which is timed in turn with them,
    since a copy depends less on the machine.
    """
    if density is not None and not 0 < density <= 1:
        output.misused(f"--density is {density}; it must be above 0 and at most 1")
    if every and config:
        output.misused("--all and --config are both given: --all measures all presets, --config those that it names")
    if file is not None and numel is not None:
        output.misused(f"--numel is of a generated gradient, and {file} was given: leave one of them out")
    if file is None and (kind is not None or rank is not None):
        output.misused("--kind and --rank choose a vector of a file, and there is none: give a file, or leave them out")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with output.errors_as_sentences():
        if picture is not None:
            _check_picture(picture)
        configs = _configs(config or (list(presets.files()) if every else list(CONFIGS)), density, config is not None)
        given = None if file is None else gradients.load(file, kind, rank, most_elements)
        gradient = gradients.generate(numel or GENERATED) if given is None else gradients.usable(given)
    found: dict[str, Any] = {"input": gradient.what, "numel": gradient.vector.size, "runs": runs, "machine": _machine()}
    found["configs"], found["left_out"] = _of_configs(configs, gradient, runs)
    found["codecs"] = _of_codecs(gradient, density or 0.01, runs) if codecs else []
    output.show(found, as_json, _show)
    if picture is not None:
        panels = _panels(found)
        if not panels:
            output.fail("nothing was measured, so there is no picture")
        with output.errors_as_sentences():
            draw(panels, gradient.what, picture)
        if not as_json:
            output.say(f"\nThe picture is {picture}.")


def _check_picture(file: Path) -> None:
    """Before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        output.fail(f"--picture needs matplotlib, which cannot be imported ({error}): run 'pip install matplotlib'")
    if file.suffix not in (".png", ".pdf", ".svg"):
        output.misused(f"--picture is {file}; its name must end in .png, .pdf or .svg")


def _configs(names: list[str], density: float | None, named: bool) -> dict[str, Config]:
    """The configs by name, with the density in place of their own. Those without one are left as they are where they
    were not named."""
    found = {}
    for name in names:
        config = Config.load(name)
        if density is not None and hasattr(config.sparsifier, "density"):
            config = Config.load(name, density=density)
        elif density is not None and named:
            raise ConfigError(
                f"--density is {density}, and the sparsifier {config.sparsifier.name!r} of {name} has none"
            )
        found[name] = config
    return found


def _of_configs(
    configs: dict[str, Config], gradient: gradients.Gradient, runs: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each config, and the reasons why there is none for others."""
    rows, left_out = [], {}
    vector = gradient.vector
    for name, config in output.progress(list(configs.items()), "measuring configs"):
        try:
            whole = WholeConfig(config, gradient.names, gradient.sizes, vector)
        except ValueError as error:
            left_out[name] = str(error)
            continue
        rows.append({
            "name": name, "bytes": whole.size, "bytes_an_element": whole.size / vector.size,
            "share_of_dense": whole.size / vector.nbytes, **_seconds(whole, gradient, runs, whole.reset),
            "relative_error": whole.error, "error_feedback": config.error_feedback,
            "every": None if config.local is None else config.local.every,
        })  # fmt: skip
    return rows, left_out


def _of_codecs(gradient: gradients.Gradient, density: float, runs: int) -> list[dict[str, Any]]:
    """A row for each codec with its default settings, on the top-k of the whole gradient."""
    indices, values = statistics.selected(gradient, density)
    rows = []
    for kind, name, codec in output.progress(list(all_codecs()), "measuring codecs"):
        if isinstance(codec, ValueCodec):
            codec = codec.under_feedback()
        tried = trial(codec, indices, values, gradient.vector.size)
        rows.append({
            "kind": kind, "name": name, "density": density, "count": indices.size, "bytes": tried.size,
            "bits_an_element": 8 * tried.size / indices.size, **_seconds(tried, gradient, runs),
            "support": tried.support.size, "relative_error": tried.error,
        })  # fmt: skip
    return rows


def _seconds(tried: Any, gradient: gradients.Gradient, runs: int, before: Any = None) -> dict[str, float]:
    """The medians of ``tried.encode``, ``tried.decode`` and a copy of the gradient."""
    vector, copied = gradient.vector, np.empty_like(gradient.vector)
    copy, encode, decode = timed(
        lambda: np.copyto(copied, vector), tried.encode, tried.decode, runs=runs, before=before
    )  # fmt: skip
    return {"encode_seconds": encode, "decode_seconds": decode, "copy_seconds": copy}


def _machine() -> dict[str, Any]:
    return {
        "processor": platform.machine(), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0],
        "kernels": VECTOR_LEVELS[library.vector_level()],
    }  # fmt: skip


def _show(found: dict[str, Any]) -> None:
    machine = found["machine"]
    output.paragraph(f"Input: {found['input']}, {found['numel']:,} elements, {4 * found['numel']:,} bytes as float32.")
    output.paragraph(
        f"One thread; medians of {found['runs']} runs; {machine['kernels']} kernels; {machine['cores']} cores, load "
        f"{machine['load']:.1f} before. 'left' is what a receiver lacks, relative to the gradient's norm: it stays in "
        "the residual, or is lost without error feedback (*)."
    )
    output.say()
    output.columns(
        map(_with_times, found["configs"]),
        [("config", "{name}"), ("bytes", "{bytes:,}"), ("bytes/element", "{bytes_an_element:.4f}"),
         ("of dense", "{share_of_dense:.3%}"), *TIMES, ("left", "{relative_error:.3f}{lost}")],
    )  # fmt: skip
    local = [f"{one['name']} (every {one['every']} steps)" for one in found["configs"] if one["every"]]
    if local:
        output.paragraph(f"Bytes and times are of one exchange. These are for LocalSGD: {', '.join(local)}.")
    if found["codecs"]:
        output.say()
        rows = [{**_with_times(one), "decoded": one["support"] / one["count"]} for one in found["codecs"]]
        output.columns(
            rows,
            [("", "{kind}"), ("codec", "{name}"), ("bits", "{bits_an_element:.2f}"), *TIMES,
             ("decoded / kept", "{decoded:.3f}"), ("error", "{relative_error:.4f}")],
            "Codecs on the largest {density:.2%}, {count:,} elements; bits of one of these".format(**rows[0]),
            left=2,
        )  # fmt: skip
    for name, reason in found["left_out"].items():
        output.say()
        output.paragraph(f"Not measured: {name}: {reason}.")


def _with_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its times in milliseconds and in copies, as text."""
    copy, found = row["copy_seconds"], {**row, "lost": "" if row.get("error_feedback") else "*"}
    for key in ("encode", "decode"):
        seconds = row[f"{key}_seconds"]
        found |= {key: f"{1000 * seconds:.3f}", f"{key}_copies": f"{seconds / copy:.2f}" if copy else ""}
    return found


def _panels(found: dict[str, Any]) -> list[Panel]:
    points = [_point(one, 8 * one["bytes_an_element"], found["numel"]) for one in found["configs"]]
    panels = [Panel("configs", "element", points)]
    for kind in ("index", "value", "joint"):
        rows = [one for one in found["codecs"] if one["kind"] == kind]
        points = [_point(one, one["bits_an_element"], one["count"]) for one in rows]
        panels.append(Panel(f"{kind} codecs", "kept element", points))
    return [one for one in panels if one.points]


def _point(row: dict[str, Any], bits: float, count: int) -> Point:
    seconds = row["encode_seconds"] + row["decode_seconds"]
    return Point(row["name"], bits, 1e9 * seconds / count, row["relative_error"])
