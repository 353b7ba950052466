"""The GPT job: the job on ranks is that of the simulation, and make train shows it."""

from __future__ import annotations

import json

import compare
import gpt_job
import pytest

from tests.ranks import ROOT, launch

pytestmark = pytest.mark.launch


def test_a_job_is_trained_with_every_kind_of_config(tmp_path):
    """One launch for each, and the picture and tables of make train."""
    runs = {}
    for config in ("none", "adamw_small", "topk_model"):
        out = tmp_path / config
        said = launch("mpirun", 2, ROOT / "scripts" / "train" / "train_gpt.py", "--config", config, "--steps", "20",
                      "--batch-size", "1", "--windows", "64", "--out", str(out)).stdout  # fmt: skip
        assert "step    20/20" in said
        runs[config] = json.loads((out / "metrics.json").read_text())
        rows = runs[config]["epochs_done"]
        assert len(rows) == 10 and all(0 < row["validation"] < 5 for row in rows)
    dense = sum(row["dense_bytes"] for row in runs["none"]["epochs_done"])
    assert dense == 20 * 4 * gpt_job.SMALL.NUMEL == sum(row["bytes_sent"] for row in runs["none"]["epochs_done"])
    for config in ("adamw_small", "topk_model"):
        assert 0 < sum(row["bytes_sent"] for row in runs[config]["epochs_done"]) < 0.02 * dense
    job = compare.JOBS["gpt"]
    compare.picture(job, [runs["adamw_small"]], [runs["none"]], "adamw_small", tmp_path / job.picture)
    assert (tmp_path / job.picture).stat().st_size > 10_000
    table = compare.side_by_side(job, [runs["adamw_small"]], [runs["none"]], "adamw_small")
    assert "final validation loss" in table.columns[0]._cells[0]
