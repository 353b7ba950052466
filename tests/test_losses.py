"""What presets lost is what the documents say; and the families of optimizers."""

from __future__ import annotations

import re

import pytest

from hvd_deepreduce.config import presets
from hvd_deepreduce.tools.advise import losses
from tests.ranks import ROOT

ROWS = {
    "cnn": ("## Small jobs: cnn", 2), "gpt": ("## Small jobs: gpt", 2), "embedding": ("## Small jobs: gpt", 4),
    "lstm": ("## SGD with momentum, an LSTM, 4 workers", 4),
    "tuned": ("## SGD with momentum, a ResNet on digits, 4 workers", 4),
    "longer": ("## AdamW, 4 workers, and presets of local steps", 4),
}  # fmt: skip
"""The section of the job's page, and the column of its table."""
IN_ARENA = {
    "dgc": "DGC: top 0.1%, momentum correction, a warm-up of the density",
    "recommended": "preset `fast`: as `recommended`, since the model is one bucket",
}
"""Rows that do not begin with the preset's name."""


def number_in_page(job: str, preset: str) -> float:
    section, column = ROWS[job]
    text = (ROOT / losses.JOBS[job].page).read_text("utf-8").split(section)[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    if losses.JOBS[job].page.endswith("arena.md"):
        preset = IN_ARENA.get(preset, f"preset `{preset}`")
    row = next(row for row in rows if preset in (row[0], row[0].partition(":")[0]))
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
    assert losses.family_of("SignSGD") == losses.ADAM
    assert losses.families_of(None) == [losses.SGD, losses.ADAM]
    with pytest.raises(ValueError, match="'admw', which is not known; did you mean 'adamw'"):
        losses.families_of("admw")
    for name in ("SignMomentum", "sign_momentum"):
        with pytest.raises(ValueError, match=f"'{name}', which is for the preset sign_momentum alone"):
            losses.families_of(name)
    with pytest.raises(ValueError, match="'lbfgs', which is not known. Known are sgd"):
        losses.families_of("lbfgs")


def test_what_the_arena_says_of_recommended_is_known():
    for job in ("lstm", "tuned"):
        assert losses.lost(job, "recommended") == losses.lost(job, "fast") == number_in_page(job, "recommended")


def test_losses_are_told():
    for name in ("fast", "topk_model"):
        assert losses.told(name, "sgd") == (
            f"{name} lost nothing on a ResNet on digits, 0.1 nats on an LSTM, 0.44 points on a ResNet on digits on 4 "
            "ranks, tuned (docs/results/arena.md, docs/results/presets.md)"
        )
    assert losses.told("mine.yaml", "sgd") == "what mine.yaml loses was not measured"
