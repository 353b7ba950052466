"""Figures of DenseStream: where large gradients lie, what its blocks take, where a step's time goes.

One rank trains with the top of its accumulators, and the accumulators of some steps are kept.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("bench", "train"))

import bench
import bench_inputs
import numpy as np
import torch
from bench_net import generated
from figure_kit import COLORS, ROOT, Data, Figure, Picture, picture, table
from figures_ncf import SPEEDS, bars_table, draw_bars
from networks import NETWORKS, Photographs
from simulated_training import Network
from torch.nn import functional

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.exchange import costs
from hvd_deepreduce.ops import select
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.standalone import unpack

KEY = RngKey(0, 0, 0)
DENSITIES = (0.01, 0.05, 0.1)
BIN = 10_000
JOBS = {"resnet50": (1000, 0.001, (1, 5, 20, 60)), "vgg16": (10, 0.01, (1, 5, 20))}
"""Classes, learning rate, and the steps that are measured."""


def ratio(indices: np.ndarray, values: np.ndarray, numel: int, coded: bool) -> float:
    """The bytes of DenseStream relative to 4 + 4 bytes for each kept element."""
    return float(DenseStream(coded=coded).encode(indices, values, numel, KEY)[0].size / (8 * indices.size))


def locality(network: str, density: float, wanted: tuple[int, ...], tiny: bool) -> list[Data]:
    """Trains with the top of the accumulators: what DenseStream takes at some steps, and how many elements each bin of
    ``BIN`` has."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    classes, rate, _ = JOBS[network]
    net, images = Network(NETWORKS[network](classes)), Photographs(10, 64)
    optimizer = torch.optim.SGD(net.parameters, rate)
    generator = torch.Generator().manual_seed(0)
    residual, out = np.zeros(sum(net.sizes), np.float32), []
    for step in range(1, max(wanted) + 1):
        x, tiles = images.batch(2 if tiny else 8, generator)
        gradient = net.gradient(functional.cross_entropy(net.model(x), tiles))
        indices, values = select.topk(gradient, residual, int(density * gradient.size))
        if step in wanted:
            out.append({
                "step": step, "plain": ratio(indices, values, gradient.size, False),
                "coded": ratio(indices, values, gradient.size, True),
                "bins": np.bincount(indices // BIN, minlength=-(-gradient.size // BIN)).tolist(),
            })  # fmt: skip
        residual[indices] -= values
        gradient[:] = 0
        gradient[indices] = values
        net.step(optimizer, gradient)
    return out


def table_1(network: str, tiny: bool) -> Data:
    """The ratios at all densities, and the bins at 1% at the first and the last step."""
    wanted = (1, 2) if tiny else JOBS[network][2]
    found = {f"{density:g}": locality(network, density, wanted, tiny) for density in DENSITIES[: 1 if tiny else 3]}
    first = found["0.01"]
    bins = {str(row["step"]): merged(row["bins"]) for row in (first[0], first[-1])}
    rows = [
        {"density": density, **{key: row[key] for key in ("step", "plain", "coded")}}
        for density, own in found.items() for row in own
    ]  # fmt: skip
    return {"network": network, "bins": bins, "bin": BIN * merged_by(len(first[0]["bins"])), "rows": rows}


def merged_by(count: int) -> int:
    """How many neighbouring bins are one, for at most 1,500 in a picture."""
    return -(-count // 1500)


def merged(bins: list[int]) -> list[float]:
    """The fullest of each group of neighbouring bins, as a share of its elements that are kept."""
    by = merged_by(len(bins))
    return [max(bins[at : at + by]) / BIN for at in range(0, len(bins), by)]


def draw_1(data: Data) -> Picture:
    figure, panels = picture(len(data["bins"]), height=3, sharey=True, squeeze=False)
    for axes, (step, bins), color in zip(panels[0], data["bins"].items(), COLORS, strict=False):
        place = np.arange(len(bins)) * data["bin"] / 1e6
        axes.fill_between(place, 100 * np.array(bins), step="post", color=color, lw=0)
        axes.axhline(1, color="black", lw=0.8, ls="--")
        axes.set(xlabel="index, millions", title=f"step {step}", ylim=(0, 100))
    panels[0, 0].set_ylabel("kept in a bin, %")
    return figure


def table_1_text(data: Data) -> str:
    steps = sorted({row["step"] for row in data["rows"]})
    found = []
    for density in dict.fromkeys(row["density"] for row in data["rows"]):
        own = {row["step"]: row for row in data["rows"] if row["density"] == density}
        found.append([f"{float(density):.0%}", *(f"{own[step]['plain']:.2f}" for step in steps),
                      *(f"{own[step]['coded']:.2f}" for step in steps)])  # fmt: skip
    head = ["density", *(f"plain, step {step}" for step in steps), *(f"coded, step {step}" for step in steps)]
    return table(head, found)


# --- Figure 4: the parts of a step

SENDERS: dict[str, Any] = {
    "recommended": "recommended", "fast": "fast",
    "densestream_model": {"sparsifier": {"name": "topk", "density": 0.01}, "joint": "densestream"},
}  # fmt: skip
"""Presets, and the codecs whose encoding and decoding is timed: for DenseStream, those of one stream."""


def on_emulated_network(rate: str, folder: Path) -> dict[str, float] | None:
    """Seconds of whole steps on two hosts with a link of this rate; None where there can be no emulated network."""
    if os.geteuid() or not shutil.which("tc"):
        return None
    out = folder / f"{rate}.json"
    command = [sys.executable, ROOT / "scripts" / "bench" / "bench_net.py", "--hosts", "2", "--rate", rate,
               "--network", "resnet50", "--density", "0.01", "--only", "dense", "--adapters", ",".join(SENDERS),
               "--repeat", "5", "--output", out]  # fmt: skip
    if subprocess.run(command, cwd=ROOT).returncode:
        return None
    rows = json.loads(out.read_text())["results"][0]["rows"]
    return {row["name"].removeprefix("adapter: ").removesuffix(" 1%"): row["seconds"] for row in rows}


def figure_4(tiny: bool) -> Data:
    """Bars as those of deepreduce_11, measured in the emulated network, or modelled where it cannot be."""
    vector = generated(1 << 16, 0) if tiny else bench_inputs.vector("accumulator", 0.01)
    coding, sent = {"dense": 0.0}, {"dense": 0.0}
    zeros = np.zeros_like(vector)
    for name, codecs in SENDERS.items():
        pipeline, residual = Pipeline(Config.load(codecs, scope="model"), 1), np.zeros_like(vector)
        one = pipeline.encode(vector, residual, KEY)
        times = bench.timed(
            lambda p=pipeline, r=residual: p.encode(vector, r, KEY),
            lambda p=pipeline, c=one: p.decode([unpack(c)] * 2, zeros, 0.5), runs=1 if tiny else 5,
        )  # fmt: skip
        coding[name], sent[name] = sum(times), float(one.size)
    out: Data = {"numel": vector.size, "bars": []}
    with TemporaryDirectory() as folder:
        for speed, bits in SPEEDS.items():
            rate = speed.replace(" ", "").replace("/s", "").lower()
            found = None if tiny else on_emulated_network(rate, Path(folder))
            for name in coding:
                bar: Data = {"method": name, "speed": speed, "coding": coding[name], "computing": 0.0}
                if found:
                    bar["computing"] = min(found["local"], found[name])
                    bar["coding"] = min(coding[name], found[name] - bar["computing"])
                    bar["waiting"] = found[name] - bar["computing"] - bar["coding"]
                else:
                    cost = costs.dense(2, 4 * vector.size) if name == "dense" else costs.Cost(1, sent[name])
                    bar["network"] = cost.seconds(costs.Link(bits, 50e-6))
                out["bars"].append(bar)
    return out


FIGURES = [
    *(
        Figure(
            f"densestream_1_{network}", f"Where the large elements of {title} are",
            ("DenseStream Figure 1", "DenseStream Table I"), lambda tiny, network=network: table_1(network, tiny),
            draw_1, table_1_text, 9,
        )
        for network, title in (("resnet50", "ResNet-50"), ("vgg16", "VGG16"))
    ),
    Figure(
        "densestream_4", "Where the time of a step goes", ("DenseStream Figure 4", "DeepReduce Figure 11"), figure_4,
        draw_bars, bars_table, 8, True,
    ),
]  # fmt: skip
