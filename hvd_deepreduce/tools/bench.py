"""``hvd-deepreduce bench``: bytes, times and errors of configs and codecs on one gradient."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import ValueCodec
from hvd_deepreduce.config import ConfigError, presets
from hvd_deepreduce.ops import library
from hvd_deepreduce.tools import gradients, output, statistics
from hvd_deepreduce.tools.measuring import WholeConfig, all_codecs, timed, trial
from hvd_deepreduce.tools.output import Json
from hvd_deepreduce.tools.picture import Panel, Point, draw

EPILOG = """Examples:

  hvd-deepreduce bench

  hvd-deepreduce bench gradients.npz --config recommended --config ./mine.yaml

  hvd-deepreduce bench --numel 25000000 --all --runs 3 --picture presets.png

  hvd-deepreduce bench gradients.npz --codecs --density 0.001 --json
"""
CONFIGS = ("recommended", "fast", "smallest", "adamw_safe", "adamw_small", "sparseloco", "qsgd")
"""Of which the times and bytes are measured where none is named."""
VECTOR_LEVELS = ("portable", "AVX2", "AVX-512")


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
    numel: Annotated[int, typer.Option(min=1, max=2**32 - 1, help="Elements of the generated gradient.")] = 1_000_000,
    kind: Annotated[
        str | None, typer.Option(help="Of captured gradients: accumulator or gradient. Default: accumulator if there.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of captured gradients. Default: the first there.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs that are counted, of each function.")] = 5,
    picture: Annotated[
        Path | None, typer.Option(help="Draw bits against time into this file (.png). Needs matplotlib.")
    ] = None,
    most_elements: output.MostElements = output.MOST_ELEMENTS,
    as_json: Json = False,
) -> None:
    """Measures configs and codecs on a gradient.

    Bytes, the time to encode and to decode, and what a receiver lacks.

    Everything runs on the CPU, on one thread unless a config says otherwise, without a framework and without an
    exchange. Times are medians. They are told relative to a copy of the gradient too, which is timed in turn with them,
    since a copy depends less on the machine.
    """
    if density is not None and not 0 < density <= 1:
        output.fail(f"--density is {density}; it must be above 0 and at most 1", output.ExitCode.USAGE)
    if kind not in (None, "accumulator", "gradient"):
        output.fail(f"--kind is {kind!r}; choose from accumulator, gradient", output.ExitCode.USAGE)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with output.errors_as_sentences():
        if picture is not None:
            _check_picture(picture)
        configs = _configs(config or (list(presets.files()) if every else list(CONFIGS)), density, config is not None)
        given = None if file is None else gradients.load(file, kind, rank, most_elements)
        gradient = gradients.generate(numel) if given is None else gradients.usable(given)
    found: dict[str, Any] = {"input": gradient.what, "numel": gradient.vector.size, "runs": runs, "machine": _machine()}
    found["configs"], found["left_out"] = _of_configs(configs, gradient, runs)
    found["codecs"] = _of_codecs(gradient, density or 0.01, runs) if codecs else []
    if picture is not None:
        with output.errors_as_sentences():
            draw(_panels(found), gradient.what, picture)
    if as_json:
        output.print_json(found)
    else:
        _show(found)
        if picture is not None:
            output.say(f"\nThe picture is {picture}.")


def _check_picture(file: Path) -> None:
    """Before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        output.fail(f"--picture needs matplotlib, which cannot be imported ({error}): run 'pip install matplotlib'")
    if file.suffix not in (".png", ".pdf", ".svg"):
        output.fail(f"--picture is {file}; its name must end in .png, .pdf or .svg", output.ExitCode.USAGE)


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
    vector, copied, dense = gradient.vector, np.empty_like(gradient.vector), gradient.vector.nbytes
    for name, config in output.progress(list(configs.items()), "measuring configs"):
        try:
            whole = WholeConfig(config, gradient.names, gradient.sizes, vector)
        except ValueError as error:
            left_out[name] = str(error)
            continue
        copy, encode, decode = timed(
            lambda: np.copyto(copied, vector), whole.encode, whole.decode, runs=runs, before=whole.reset
        )
        rows.append({
            "name": name, "bytes": whole.size, "bytes_an_element": whole.size / vector.size,
            "share_of_dense": whole.size / dense, "encode_seconds": encode, "decode_seconds": decode,
            "copy_seconds": copy, "relative_error": whole.error, "error_feedback": config.error_feedback,
            "every": None if config.local is None else config.local.every,
        })  # fmt: skip
    return rows, left_out


def _of_codecs(gradient: gradients.Gradient, density: float, runs: int) -> list[dict[str, Any]]:
    """A row for each codec with its default settings, on the top-k of the whole gradient."""
    indices, values = statistics.selected(gradient, density)
    numel, rows = gradient.vector.size, []
    copied = np.empty_like(gradient.vector)
    for kind, name, codec in output.progress(list(all_codecs()), "measuring codecs"):
        if isinstance(codec, ValueCodec):
            codec = codec.under_feedback()
        tried = trial(codec, indices, values, numel)
        copy, encode, decode = timed(lambda: np.copyto(copied, gradient.vector), tried.encode, tried.decode, runs=runs)
        rows.append({
            "kind": kind, "name": name, "density": density, "count": indices.size, "bytes": tried.size,
            "bits_an_element": 8 * tried.size / indices.size, "encode_seconds": encode, "decode_seconds": decode,
            "copy_seconds": copy, "support": tried.support.size, "relative_error": tried.error,
        })  # fmt: skip
    return rows


def _machine() -> dict[str, Any]:
    return {
        "processor": platform.machine(), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0],
        "kernels": VECTOR_LEVELS[library.vector_level()],
    }  # fmt: skip


def _show(found: dict[str, Any]) -> None:
    machine = found["machine"]
    output.paragraph(f"Input: {found['input']}, {found['numel']:,} elements, {4 * found['numel']:,} bytes dense.")
    output.paragraph(
        f"One thread; medians of {found['runs']} runs; {machine['kernels']} kernels; {machine['cores']} cores, load "
        f"{machine['load']:.1f} before. 'left' is what a receiver lacks, relative to the gradient's norm: it stays in "
        "the residual, or is lost without error feedback (*)."
    )
    output.say()
    rows = []
    for one in found["configs"]:
        copy, lost = one["copy_seconds"], "" if one["error_feedback"] else "*"
        times = (f"{cell}" for key in ("encode", "decode") for cell in _times(one[f"{key}_seconds"], copy))
        rows.append([
            one["name"], f"{one['bytes']:,}", f"{one['bytes_an_element']:.4f}", f"{one['share_of_dense']:.3%}", *times,
            f"{one['relative_error']:.3f}{lost}",
        ])  # fmt: skip
    output.table(
        ("config", "bytes", "bytes/element", "of dense", "encode ms", "/ copy", "decode ms", "/ copy", "left"), rows
    )
    local = [f"{one['name']} (every {one['every']} steps)" for one in found["configs"] if one["every"]]
    if local:
        output.paragraph(f"Bytes and times are of one exchange. These are for LocalSGD: {', '.join(local)}.")
    if found["codecs"]:
        output.say()
        first = found["codecs"][0]
        rows = [
            [one["kind"], one["name"], f"{one['bits_an_element']:.2f}",
             *(cell for key in ("encode", "decode") for cell in _times(one[f"{key}_seconds"], one["copy_seconds"])),
             f"{one['support'] / one['count']:.3f}", f"{one['relative_error']:.4f}"]
            for one in found["codecs"]
        ]  # fmt: skip
        output.table(
            ("", "codec", "bits", "encode ms", "/ copy", "decode ms", "/ copy", "decoded / kept", "error"),
            rows,
            title=f"Codecs on the largest {first['density']:.2%}, {first['count']:,} elements; bits of one of these",
            left=2,
        )
    for name, reason in found["left_out"].items():
        output.say()
        output.paragraph(f"Not measured: {name}: {reason}.")


def _times(seconds: float, copy: float) -> tuple[str, str]:
    return f"{1000 * seconds:.3f}", f"{seconds / copy:.2f}" if copy else ""


def _panels(found: dict[str, Any]) -> list[Panel]:
    panels = []
    if found["configs"]:
        points = [
            Point(
                one["name"], 8 * one["bytes_an_element"],
                1e9 * (one["encode_seconds"] + one["decode_seconds"]) / found["numel"], one["relative_error"],
            )
            for one in found["configs"]
        ]  # fmt: skip
        panels.append(Panel("configs", "element", points))
    for kind in ("index", "value", "joint"):
        points = [
            Point(
                one["name"], one["bits_an_element"],
                1e9 * (one["encode_seconds"] + one["decode_seconds"]) / one["count"], one["relative_error"],
            )
            for one in found["codecs"]
            if one["kind"] == kind
        ]  # fmt: skip
        if points:
            panels.append(Panel(f"{kind} codecs", "kept element", points))
    return panels
