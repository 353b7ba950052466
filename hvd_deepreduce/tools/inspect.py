"""``hvd-deepreduce inspect``: what is in a container, or in a gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hvd_deepreduce.codecs import interfaces
from hvd_deepreduce.config import plugins
from hvd_deepreduce.tools import gradients, output, statistics
from hvd_deepreduce.tools.gradient_file import MOST
from hvd_deepreduce.tools.measuring import all_codecs, trial
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from hvd_deepreduce.wire.standalone import Container, ContainerError

EXAMPLES = (
    "inspect gradients.npz",
    "inspect gradients.npz --density 0.001 --density 0.01 --kind gradient",
    "inspect container.hvdr --json",
)


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            help="A file of containers (version 1, which stand alone), or a gradient: .npy, .npz, .pt, or a file of "
            "captured gradients."
        ),
    ],
    density: Annotated[
        list[float] | None,
        typer.Option(help="Of a gradient: a density of the support to look at; can be repeated. Default: 0.01."),
    ] = None,
    kind: output.Kind = None,
    rank: output.Rank = None,
    most_elements: output.MostElements = MOST,
    as_json: output.Json = False,
) -> None:
    """Shows what is in a container or in a gradient.

    Of a container: header, codecs, and the bits of each part. Of a gradient: shape, zeros, concentration of its energy,
    entropy and locality of its large elements, and what each index codec needs for them.
    """
    densities = density or [0.01]
    if not all(0 < one <= 1 for one in densities):
        output.misused(f"--density is {densities}; each must be above 0 and at most 1")
    is_gradient = file.suffix.lower() in gradients.SUFFIXES
    if not is_gradient and (density or kind is not None or rank is not None):
        output.misused(
            f"--density, --kind and --rank are for gradients, whose files end in {', '.join(gradients.SUFFIXES)}, and "
            f"{file} is taken for containers: leave them out"
        )
    with output.errors_as_sentences():
        if is_gradient:
            found = _of_gradient(gradients.load(file, kind, rank, most_elements), densities)
        else:
            found = {"containers": [_of_container(one) for one in _containers(file, most_elements)]}
    output.show(found, as_json, _show_gradient if is_gradient else _show_containers)


def _containers(file: Path, most: int) -> list[Container]:
    """All containers of a file, one behind the other.

    Raises:
        GradientError: they announce more than ``most`` elements together.
        ContainerError: the bytes are something else, or cut or altered.
    """
    data = np.fromfile(file, np.uint8)
    found: list[Container] = []
    announced = 0
    while data.size or not found:
        if bytes(data[:4]) != wire.MAGIC and not found:
            raise ContainerError(
                f"{file} is not a container that stands alone: it begins with {bytes(data[:4])!r} instead of "
                f"{wire.MAGIC!r}. What a job sends (version 2) can be read by that job alone. A gradient's file ends "
                f"in {', '.join(gradients.SUFFIXES)}"
            )
        found.append(wire.unpack(data, rank=len(found) if found else None))
        announced += found[-1].numel
        gradients.check_numel(file, announced, most)
        data = data[found[-1].nbytes :]
    return found


def _of_container(container: Container) -> dict[str, Any]:
    support, values = decode_part(container, container.numel)
    plugins.load()
    kind = "joint" if container.joint else "value"

    def named(kind: str, number: int, nothing: str) -> str:
        return getattr(interfaces, kind).by_id[number].name if number else nothing

    sections = {
        "header": wire.HEADER.size - 4, "checksum": 4, "index": container.indices.size, kind: container.values.size,
        "order": container.order.size,
    }  # fmt: skip
    sections["padding"] = container.nbytes - sum(sections.values())
    count = max(1, container.count)
    return {
        "version": wire.VERSION,
        "sparsifier": named("sparsifiers", container.sparsifier, "none, all elements are sent"),
        "index": named("index_codecs", container.index, "none, no indices are sent"),
        kind: named(f"{kind}_codecs", container.value, "none"),
        "dtype": str(container.dtype), "numel": container.numel, "count": container.count,
        "density": container.count / container.numel if container.numel else 0.0,
        **{one: getattr(container.key, one) for one in ("seed", "parameter", "step")},
        "digest": f"{container.digest:08x}", "bytes": container.nbytes,
        "bytes_of_dense": container.nbytes / max(1, container.numel * container.dtype.itemsize),
        "parts": [
            {"part": name, "bytes": size, "bits_an_element": 8 * size / count} for name, size in sections.items()
        ],
        "values": {
            "support": "all elements" if support is None else "indices",
            "norm": float(np.linalg.norm(values.astype(np.float64))),
            "largest": float(np.abs(values).max(initial=0)),
            "zeros": int(values.size - np.count_nonzero(values)), "finite": bool(np.isfinite(values).all()),
        },
    }  # fmt: skip


def _show_containers(found: dict[str, Any]) -> None:
    for number, one in enumerate(found["containers"]):
        words = {key: value for key, value in one.items() if key not in ("parts", "bytes_of_dense", "density")}
        words["count"] = "{count:,} of {numel:,} elements ({density:.4%})".format(**one)
        words["bytes"] = "{bytes:,} ({bytes_of_dense:.4%} of dense)".format(**one)
        finite = "all finite" if one["values"]["finite"] else "not all finite"
        words["values"] = "norm {norm:.6g}, largest {largest:.6g}, {zeros:,} zeros, ".format(**one["values"]) + finite
        output.table((f"container {number + 1} of {len(found['containers'])}", ""), words.items(), left=2)
        output.say()
        cells = [("part", "{part}"), ("bytes", "{bytes:,}"), ("bits a sent element", "{bits_an_element:.3f}")]
        output.columns(one["parts"], cells)


def _of_gradient(gradient: gradients.Gradient, densities: list[float]) -> dict[str, Any]:
    values = statistics.of_values(gradient.vector)
    found: dict[str, Any] = {
        "what": gradient.what, "numel": gradient.vector.size, "parameters": len(gradient.names),
        "shapes": dict(zip(gradient.names, gradient.shapes, strict=True)), "dtype": gradient.dtype,
        "about": gradient.about, **values, "supports": [],
    }  # fmt: skip
    if "norm" in values:  # finite, and not all zeros
        found["supports"] = [_of_support(gradient, one) for one in densities]
    return found


def _of_support(gradient: gradients.Gradient, density: float) -> dict[str, Any]:
    indices, values = statistics.selected(gradient, density)
    numel = gradient.vector.size
    codecs = {}
    for kind, name, codec in output.progress(list(all_codecs()), f"index codecs at density {density:g}"):
        if kind == "index":
            tried = trial(codec, indices, values, numel)
            codecs[name] = {"bits_an_index": 8 * tried.size / indices.size, "support": tried.support.size}
    return {
        "density": density, "count": indices.size, "smallest": float(np.abs(values).min()),
        "bits_an_index": statistics.of_support(indices, gradient.sizes, gradient.shapes),
        "gaps": statistics.of_gaps(indices, numel) if indices.size > 1 else {}, "index_codecs": codecs,
    }  # fmt: skip


def _show_gradient(found: dict[str, Any]) -> None:
    parameters = f"{found['parameters']} parameters" if found["parameters"] > 1 else "one parameter"
    first = next(iter(found["shapes"].values()))
    rows: list[tuple[str, object]] = [
        ("what", found["what"]),
        ("elements", f"{found['numel']:,}, {parameters}" + (f", {list(first)}" if found["parameters"] == 1 else "")),
        ("dtype", found["dtype"]),
        ("zeros", f"{found['zeros']:,} ({found['zeros'] / found['numel']:.2%})"),
        ("NaN, infinite", f"{found['nan']:,}, {found['infinite']:,}"),
    ]
    if "norm" in found:
        rows += [("l2 norm, largest magnitude", f"{found['norm']:.6g}, {found['largest']:.6g}")]
        rows += [("kurtosis (normal values: 3)", f"{found['kurtosis']:.4g}")]
        rows += [(f"energy of the largest {float(key):.1%}", f"{one:.2%}") for key, one in found["energy"].items()]
    output.table(("gradient", ""), rows, left=2)
    if "norm" not in found:
        reason = "it is not finite, and a job would send it uncompressed" if found["nan"] or found["infinite"] else (
            "all elements are zeros"
        )  # fmt: skip
        output.say(f"\nThere is no support to look at: {reason}.")
    for one in found["supports"]:
        output.say()
        _show_support(one)


def _show_support(found: dict[str, Any]) -> None:
    bits, gaps, shaped = found["bits_an_index"], found["gaps"], found["bits_an_index"]["row_dispersion"] > 0
    told = {"whole": "random support of this density", "tensors": "each parameter's density is known"}
    told |= {"rows": "each row's too", "columns": "each column's too"} if shaped else {}
    output.table(
        ("support of the largest {density:.3%} ({count:,} elements)".format(**found), "entropy, bits an index"),
        [(text, f"{bits[name]:.3f}") for name, text in told.items()],
    )
    if gaps:
        output.say()
        rows = [
            (text, one.format(gaps[name]), one.format(gaps[f"random_{name}"]))
            for name, text, one in (
                ("neighbours", "share of neighbours (distance 1)", "{:.3%}"),
                ("median", "median distance", "{:.0f}"),
                ("variation", "variation of the distances", "{:.2f}"),
                ("entropy", "entropy of the distances, bits", "{:.3f}"),
            )
        ]
        for one in ("row", "column") if shaped else ():
            rows.append((f"dispersion of the {one}s' counts", f"{bits[f'{one}_dispersion']:.2f}", "1.00"))
        output.table(("locality", "this one", "random"), rows)
    output.say()
    codecs = sorted(found["index_codecs"].items(), key=lambda one: one[1]["bits_an_index"])
    output.table(
        ("index codec", "bits an index", "decoded / selected"),
        [(name, f"{one['bits_an_index']:.3f}", f"{one['support'] / found['count']:.4f}") for name, one in codecs],
    )
