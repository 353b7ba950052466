"""What presets lost is what the documents say; and the families of optimizers."""

from __future__ import annotations

import re

import pytest

from hvd_deepreduce.config import presets
from hvd_deepreduce.tools.advise import losses
from tests.ranks import ROOT

ROWS = {
    "cnn": ("## Small jobs: cnn", 2), "gpt": ("## Small jobs: gpt", 2), "embedding": ("## Small jobs: gpt", 4),
    "lstm": ("## A small LSTM", 4), "frontier": ("## A small GPT", 4),
}  # fmt: skip
"""The section of the job's page, and the column of its table."""
WORKERS = {"lstm": "2", "frontier": "4"}
LABELS = {"fast": "`topk_model`", "smallest": "gradients, top 0.1%, 4 bits", "sparseloco": "sparseloco", "dgc": "DGC:",
          "diloco": "DiLoCo:", "sgd_small": "**sgd_small**", "adamw_safe": "signs of the top 4.5%",
          "topk_model": "`topk_model`"}  # fmt: skip
"""How docs/results/accuracy.md calls presets."""


def number_in_page(job: str, preset: str) -> float:
    section, column = ROWS[job]
    text = (ROOT / losses.JOBS[job].page).read_text("utf-8").split(section)[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    if job in WORKERS:
        label = LABELS.get(preset, preset).lower()
        row = next(row for row in rows if row[0] == WORKERS[job] and label in row[1].lower())
    else:
        row = next(row for row in rows if row[0] == preset)
    return float(re.match(r"[+-][\d.]+", row[column])[0])


@pytest.mark.parametrize("job", losses.JOBS)
def test_losses_are_those_of_the_documents(job):
    assert {preset: number_in_page(job, preset) for preset in losses.LOST[job]} == losses.LOST[job]
    assert set(losses.LOST[job]) <= set(presets.names())


def test_optimizers_have_families():
    for name in ("sgd", "SGD", "torch.optim.SGD", "Nesterov momentum", "LARS"):
        assert losses.family_of(name) == losses.SGD
    for name in ("adam", "AdamW", "FusedLAMB", "Muon", "Adafactor", "NAdam", "PagedAdamW8bit", "keras.RMSprop"):
        assert losses.family_of(name) == losses.ADAM
    assert losses.families_of(None) == [losses.SGD, losses.ADAM]
    with pytest.raises(ValueError, match="'admw', which is not known; did you mean 'adamw'"):
        losses.families_of("admw")
    for name in ("SignMomentum", "sign_momentum"):
        with pytest.raises(ValueError, match=f"'{name}', which is for the preset sign_momentum alone"):
            losses.families_of(name)
    with pytest.raises(ValueError, match="'lbfgs', which is not known. Known are sgd"):
        losses.families_of("lbfgs")


def test_losses_are_told():
    assert losses.told("topk_model", "sgd") == (
        "topk_model lost nothing on a ResNet on digits, 0.078 nats on an LSTM (docs/results/accuracy.md, "
        "docs/results/presets.md)"
    )
    assert losses.told("mine.yaml", "sgd") == "what mine.yaml loses was not measured"
