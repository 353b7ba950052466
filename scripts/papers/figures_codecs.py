"""Figures of codecs on one gradient: index and value codecs and their combinations (DeepReduce, Figures 5 and 10)."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("bench",))

import bench
import bench_inputs
import numpy as np
from bench_net import generated
from figure_kit import COLORS, Data, Figure, Picture, picture, table
from matplotlib.colors import LogNorm

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import Floats, RngKey, ValueCodec
from hvd_deepreduce.codecs.value.fit_dexp import FitDExp
from hvd_deepreduce.codecs.value.fit_poly import FitPoly
from hvd_deepreduce.ops import select
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.standalone import HEADER, unpack

KEY = RngKey(0, 0, 0)
SMALL = 36_864


def layer(tiny: bool, kind: str = "accumulator") -> Floats:
    """A gradient of 36,864 elements."""
    return generated(SMALL, 0) if tiny else bench.layer(kind)


# --- Figure 10: combinations

TOP = {"sparsifier": {"name": "topk", "density": 0.01}, "scope": "model"}
OURS_SMALL = {
    **TOP, "index": "rans", "value": {"name": "qsgd", "bits": 4, "bucket_size": 512, "norm": "max", "entropy": "rans"}
}  # fmt: skip
COMBINATIONS: dict[str, str | dict[str, Any]] = {
    "Top-r: key, value": "topk_raw", "BF-naive": "dr_bf_naive", "BF-P0": "dr_bf_p0", "BF-P1": "dr_bf_p1",
    "BF-P2": "dr_bf_p2", "RLE": "dr_rle", "Huffman": "dr_huffman", "Fit-Poly": "dr_fit_poly",
    "Fit-DExp": "dr_fit_dexp", "Deflate": "dr_deflate", "QSGD": "dr_qsgd", "BF-P0, Fit-Poly": "dr_bf_p0_fit_poly",
    "BF-P1, Fit-Poly": "dr_bf_p1_fit_poly", "BF-P2, QSGD": "dr_bf_p2_qsgd",
    "BF-P0, QSGD": {**TOP, "index": {"name": "bloom", "policy": "p0", "fpr": 0.001, "tries": 1},
                    "value": {"name": "qsgd", "bits": 7, "bucket_size": 512, "norm": "l2"}},
    "SketchML": "dr_sketchml",
    "SKCompress": {**TOP, "joint": {"name": "skcompress", "buckets": 128, "center": "middle"}},
    "SKCompress without sketches": {**TOP, "index": "delta",
                                    "value": {"name": "quantile", "buckets": 128, "center": "middle",
                                              "separate_signs": False, "entropy": "huffman"}},
    "ours: packed, Fit-Poly": {**TOP, "index": "packed", "value": "fit_poly"},
    "ours: packed, Fit-DExp": {**TOP, "index": "packed", "value": "fit_dexp"},
    "ours: rice, QSGD 7 bits": "recommended",
    "ours: rANS, QSGD 4 bits": OURS_SMALL,
}  # fmt: skip


def combination(settings: str | dict[str, Any], gradient: Floats, times: bool) -> Data:
    """The bytes of a container's parts, what it loses, and the seconds of encoding and decoding."""
    config = Config.load(settings)
    pipeline, residual = Pipeline(config, 1), np.zeros_like(gradient) if config.error_feedback else None
    packed = pipeline.encode(gradient, residual, KEY)
    one, decoded = unpack(packed), np.zeros_like(gradient)
    pipeline.decode([one], decoded, 1.0)
    kept, values = select.topk(gradient.copy(), None, gradient.size // 100)
    counted = decoded != 0
    counted[kept] = True
    lost = np.linalg.norm((decoded - gradient)[counted]) / np.linalg.norm(values)
    out = {"index": one.indices.size, "value": one.values.size, "order": one.order.size, "joint": one.joint,
           "header": HEADER.size, "error": float(lost), "support": one.count}  # fmt: skip
    if times:
        out["encode"] = bench.small_timed(lambda: pipeline.encode(gradient, residual, KEY))
        out["decode"] = bench.small_timed(lambda: pipeline.decode([unpack(packed)], decoded, 1.0))
    return out


WIDTHS = (3, *[16] * 7, *[32] * 6, *[64] * 6)
SIZES = {
    "a layer of 36,864 elements, 1%": ([SMALL], 0.01),
    "ResNet-20, 1% of each tensor": (
        [n for a, b in pairwise(WIDTHS) for n in (9 * a * b, b, b)] + [640, 10], 0.01,
    ),
    "a perceptron of 50,890 parameters, 10%": ([50_890], 0.1),
}  # fmt: skip
"""Elements of each tensor, and the density. ResNet-20's are those of the papers' for CIFAR-10."""
KEYED = {"Top-r": "topk_raw", "Fit-Poly": "dr_fit_poly", "Fit-DExp": "dr_fit_dexp"}


def keyed() -> Data:
    """The volumes of the fits with keys of 32 bits, in the order of the values; they hardly depend on the values."""
    out: Data = {}
    for model, (sizes, density) in SIZES.items():
        tensors = [np.random.default_rng(n).standard_normal(n).astype(np.float32) for n in sizes]
        out[model] = {}
        for name, preset in KEYED.items():
            pipeline = Pipeline(Config.load(preset, density=density), 1)
            sent = sum(pipeline.encode(one, np.zeros_like(one), KEY, version=2).size for one in tensors)
            out[model][name] = sent / (4 * sum(sizes))
    return out


def figure_10(tiny: bool) -> Data:
    gradient = layer(tiny)
    rows = {name: combination(given, gradient, not tiny) for name, given in COMBINATIONS.items()}
    return {"numel": gradient.size, "copy": bench.small_timed(gradient.copy), "rows": rows, "keyed": keyed()}


def draw_10(data: Data) -> Picture:
    figure, panels = picture(3, width=10, height=5.6, sharey=True, width_ratios=[2, 1, 1])
    names, rows = list(data["rows"]), list(data["rows"].values())
    place, dense = np.arange(len(names)), 4 * data["numel"]
    left = np.zeros(len(names))
    parts = {"indices": "index", "values": "value", "order of the values": "order", "header": "header"}
    for number, (label, key) in enumerate(parts.items()):
        sizes = np.array([0 if key == "value" and row["joint"] else row[key] for row in rows])
        panels[0].barh(place, 100 * sizes / dense, 0.7, left, color=COLORS[number], label=label)
        left += 100 * sizes / dense
    joint = np.array([row["value"] if row["joint"] else 0 for row in rows])
    panels[0].barh(place, 100 * joint / dense, 0.7, left, color=COLORS[8], label="both, in one section")
    for where, end in zip(place, left + 100 * joint / dense, strict=True):
        panels[0].text(end + 0.02, where, f"{end:.2f}", va="center", fontsize=8)
    panels[0].set(yticks=place, yticklabels=names, xlabel="volume, % of dense", xlim=(0, 2.7))
    panels[0].legend(fontsize=8, loc="lower right")
    panels[1].barh(place, [row["error"] for row in rows], 0.7, color=COLORS[3])
    panels[1].set(xlabel="relative L2 error")
    for row, where in zip(rows, place, strict=True):
        panels[1].text(row["error"] + 0.01, where, f"{row['error']:.2g}", va="center", fontsize=8)
    panels[1].set_xlim(0, 1.3 * max(row["error"] for row in rows))
    for shift, key, color in ((-0.19, "encode", COLORS[0]), (0.19, "decode", COLORS[4])):
        times = [row.get(key, np.nan) / data["copy"] for row in rows]
        panels[2].barh(place + shift, times, 0.36, color=color, label=key)
    panels[2].set(xlabel="time / copying the gradient")
    panels[2].legend(fontsize=8, loc="upper right")
    panels[0].invert_yaxis()
    return figure


def table_10(data: Data) -> str:
    dense, found = 4 * data["numel"], []
    for name, row in data["rows"].items():
        sizes = [f"{row[key] / dense:.2%}" for key in ("index", "value", "order")]
        if row["joint"]:
            sizes = ["", f"{row['value'] / dense:.2%}, both", ""]
        whole = sum(row[key] for key in ("index", "value", "order", "header"))
        times = [f"{row[key] / data['copy']:.0f}" if key in row else "" for key in ("encode", "decode")]
        found.append([name, *sizes, f"{whole / dense:.2%}", f"{row['error']:.3g}", *times])
    rows = data["rows"]

    def volume(name: str) -> int:
        return sum(rows[name][key] for key in ("index", "value", "order", "header"))

    best = min((name for name in rows if not name.startswith("ours")), key=volume)
    return (
        table(["method", "indices", "values", "order", "volume", "error", "encode / copy", "decode / copy"], found)
        + "\n\nThe paper says that all take fewer bytes than Top-r, that SKCompress takes the fewest, and that it is "
        "three orders of magnitude slower than BF-P0 with QSGD on a GPU. Here "
        f"{best} takes the fewest of the published methods, {volume(best) / dense:.2%}; SKCompress takes "
        f"{volume('SKCompress') / volume('BF-P2, QSGD'):.2f} times the bytes of BF-P2 with QSGD, and "
        f"{volume('SKCompress without sketches') / volume('BF-P2, QSGD'):.2f} times without its sketches and separate "
        "signs, as the paper measured it for its Table 2: for 368 elements, the tables of 128 buckets and of the "
        "Huffman code weigh more than they save. On one CPU thread both take about as long.\n\n"
        + table(["volume with keys of 32 bits", *KEYED], (
            [model, *(f"{one[name]:.2%}" for name in KEYED)] for model, one in data["keyed"].items()
        ))
    )  # fmt: skip


# --- All combinations of index and value codecs

INDEX = ("raw", "packed", "bitmap", "rle", "huffman", "delta", "elias_fano", "rice", "rans", "bloom")
VALUE = ("raw", "deflate", "zstd", "half", "natural", "fit_poly", "fit_dexp", "qsgd", "uniform", "quantile", "ternary",
         "sign")  # fmt: skip
INPUTS = {"accumulator": "accumulator of ResNet-50", "clusters": "generated clusters"}


def figure_all(tiny: bool) -> Data:
    """Bits per kept element of each combination on both inputs, and the error of each value codec."""
    inputs = {"clusters": generated(SMALL, 0)} if tiny else {
        "accumulator": bench_inputs.vector("accumulator", 0.01), "clusters": generated(25_557_032, 0)}  # fmt: skip
    out: Data = {"index": list(INDEX), "value": list(VALUE), "inputs": {}}
    for kind, gradient in inputs.items():
        kept = gradient.size // 100
        indices, chosen = select.topk(gradient.copy(), None, kept)
        sparse = np.zeros_like(gradient)
        sparse[indices] = chosen
        sizes, errors = [], []
        for name in INDEX:
            row = []
            for codec in VALUE:
                given = {**TOP, "index": name, "value": codec}
                config = Config.load({**given, "force_index": True} if codec.startswith("fit") else given)
                pipeline, residual = Pipeline(config, 1), np.zeros_like(gradient)
                one = unpack(pipeline.encode(sparse, residual, KEY))
                row.append(8 * (one.nbytes - HEADER.size) / kept)
                if name == "raw":
                    errors.append(float(np.linalg.norm(residual) / np.linalg.norm(chosen)))
            sizes.append(row)
        out["inputs"][kind] = {"bits": sizes, "error": errors, "kept": kept}
    return out


def draw_all(data: Data) -> Picture:
    figure, panels = picture(len(data["inputs"]), width=11, height=5, sharey=True, squeeze=False)
    for axes, (kind, found) in zip(panels[0], data["inputs"].items(), strict=True):
        bits = np.array(found["bits"])
        shown = axes.imshow(bits, cmap="cividis_r", norm=LogNorm(8, 128), aspect="auto")
        labels = [f"{name}\nerr {error:.2g}" for name, error in zip(data["value"], found["error"], strict=True)]
        axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=8)
        axes.set_yticks(range(len(data["index"])), data["index"])
        axes.set(xlabel="value codec, and its relative L2 error", title=INPUTS[kind])
        axes.grid(visible=False)
        for (row, column), value in np.ndenumerate(bits):
            axes.text(column, row, f"{value:.3g}" if value < 99.5 else f"{value:.0f}", ha="center", va="center",
                      fontsize=7, color="white" if value > 32 else "black")  # fmt: skip
    panels[0, 0].set_ylabel("index codec")
    figure.colorbar(shown, ax=panels, label="bits per kept element (log)")
    return figure


def table_all(data: Data) -> str:
    found = []
    for kind, one in data["inputs"].items():
        bits = np.array(one["bits"])
        lossless = bits[:, data["value"].index("raw")]
        best = np.unravel_index(bits.argmin(), bits.shape)
        found.append([
            INPUTS[kind], f"{bits[0, data['value'].index('raw')]:.1f}",
            f"{data['index'][int(lossless.argmin())]}: {lossless.min() - 32:.2f}",
            f"{data['index'][best[0]]} with {data['value'][best[1]]}: {bits.min():.2f}",
        ])  # fmt: skip
    return table(["input", "key and value, bits", "fewest bits of an index", "fewest bits of both"], found)


# --- Figure 5: a fitted curve


def figure_5(tiny: bool) -> Data:
    """The sorted values of the top 10% of a layer, what Fit-Poly makes of them, and the errors of the fits of
    accumulators and raw gradients."""
    gradient = layer(tiny)
    indices, values = select.topk(gradient.copy(), None, gradient.size // 10)
    codec = FitPoly()
    section, order = codec.encode(values, indices, KEY)
    fitted = codec.decode(section, values.size, indices, values.dtype, KEY)
    if order is None:
        order = np.arange(values.size)
    step = max(1, values.size // 400)
    return {"values": values[order][::step].tolist(), "fitted": fitted[::step].tolist(), "step": step,
            "bytes": section.size, "count": values.size,
            "error": float(np.linalg.norm(values[order] - fitted) / np.linalg.norm(values)),
            "inputs": fits(gradient, layer(tiny, "gradient"))}  # fmt: skip


FITS: dict[str, ValueCodec] = {
    "Fit-Poly": FitPoly(), "Fit-Poly, the paper's heuristic": FitPoly(segments=None), "Fit-DExp": FitDExp(),
}  # fmt: skip


def fits(accumulator: Floats, gradient: Floats) -> Data:
    """Relative L2 errors of the fits, and of one magnitude for all, which says how much of a curve there is to fit."""
    out: Data = {}
    for kind, vector in {"accumulator": accumulator, "raw gradient": gradient}.items():
        for share in (0.01, 0.1, 1.0):
            values = select.topk(vector.copy(), None, int(share * vector.size))[1]
            values = values[values != 0]
            large, norm = np.abs(values), np.linalg.norm(values)
            one = out[f"{kind}, {'all' if share == 1 else f'top {share:.0%}'}"] = {
                "count": values.size, "span": float(large.max() / large.min()),
                "one magnitude": float(np.linalg.norm(large - large.mean()) / norm),
            }  # fmt: skip
            for name, codec in FITS.items():
                section, order = codec.encode(values, None, KEY)
                fitted = codec.decode(section, values.size, None, values.dtype, KEY)
                one[name] = float(np.linalg.norm(fitted - (values if order is None else values[order])) / norm)
    return out


def draw_5(data: Data) -> Picture:
    figure, axes = picture(height=3.6, width=7)
    place = np.arange(len(data["values"])) * data["step"]
    axes.plot(place, data["values"], color=COLORS[5], lw=5, label="sorted values")
    axes.plot(place, data["fitted"], color=COLORS[6], lw=1.2, label="Fit-Poly")
    axes.set(xlabel="rank of the value", ylabel="value")
    axes.legend()
    return figure


def table_5(data: Data) -> str:
    return (
        f"{data['count']:,} values in {data['bytes']:,} bytes without their order "
        f"({8 * data['bytes'] / data['count']:.2f} bits a value), relative L2 error {data['error']:.3g}.\n\n"
        + table(["input", "largest / smallest", "error of one magnitude for all", *FITS], (
            [name, f"{one['span']:,.3g}", *(f"{one[fit]:.2%}" for fit in ("one magnitude", *FITS))]
            for name, one in data["inputs"].items()
        ))
    )  # fmt: skip


FIGURES = [
    Figure("deepreduce_5", "Values as a curve", ("DeepReduce Figure 5",), figure_5, draw_5, table_5, 7),
    Figure(
        "deepreduce_10", "Combinations of index and value codecs", ("DeepReduce Figure 10",), figure_10, draw_10,
        table_10, 7, True,
    ),
    Figure(
        "combinations", "All combinations of index and value codecs", ("DeepReduce Figure 10a",), figure_all, draw_all,
        table_all, 9,
    ),
]  # fmt: skip
