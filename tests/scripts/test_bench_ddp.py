"""bench_ddp.py: its jobs run and agree on all ranks, and its tables say what was measured."""

from __future__ import annotations

import json

import bench_ddp
import pytest

from tests.ranks import ROOT, launch

FACTS = {"hosts": 4, "rate": "1gbit", "steps": 3, "cores": 2, "load": 1.0, "width": 272, "batch": 4, "lr": 0.02}


TIMED = ["local", "dense", "fp16", "horovod", "auto", "horovod_fp16"]
TRAINED = ["dense", "powersgd_1", "allgather", "reduce_scatter_density", "densestream", "sparseloco_wire"]
RUN = f"""
import sys
from pathlib import Path
sys.path.append({str(ROOT / "scripts" / "bench")!r})
import bench_ddp
from tests.scripts.rival_checks import check_rivals
check_rivals()
out = Path(sys.argv[1])
bench_ddp.inside({TIMED}, "memory", 2, False, 1, {{"width": 8, "batch": 4, "lr": 0.02}}, out / "times.json")
bench_ddp.inside({TRAINED}, "memory", 60, True, 1, {{"width": 8, "batch": 32, "lr": 0.2}}, out / "accuracy.json")
"""


@pytest.mark.launch
def test_all_kinds_of_jobs_run(tmp_path):
    """Ranks with different parameters are an error. Jobs that learned nothing would have a loss of 2.3."""
    (tmp_path / "program.py").write_text(RUN)
    launch("mpirun", 2, tmp_path / "program.py", str(tmp_path))
    times, accuracy = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("times", "accuracy"))
    assert list(times["jobs"]) == TIMED and times["parameters"] == accuracy["parameters"] > 5_000
    assert all(len(job["seconds"]) == 2 and min(job["seconds"]) > 0 for job in times["jobs"].values())
    assert "mode is auto: gradients are" in times["said"][0]
    assert "MB in" not in bench_ddp.times_table(times).splitlines()[2]
    assert list(accuracy["jobs"]) == TRAINED
    losses = [job["loss"][0] for job in accuracy["jobs"].values()]
    assert max(losses) < 1.5 and len(set(losses)) == len(TRAINED)
    assert all(job["accuracy"][0] > 0.5 for job in accuracy["jobs"].values())


def test_ratios_are_those_of_the_same_round():
    jobs = {
        "local": {"seconds": [0.1, 0.1, 0.2], "bytes": 0.0},
        "dense": {"seconds": [0.4, 0.6, 1.2], "bytes": 62_500_000.0},
        "allgather": {"seconds": [0.2, 0.2, 0.2], "bytes": 625_000.0},
    }
    said = bench_ddp.times_table({**FACTS, "parameters": 10_800_000, "said": ["mode is auto."], "jobs": jobs})
    assert "4 hosts at 1gbit share 2 cores" in said and "10.8 M parameters" in said
    assert "In a job with mode auto, mode is auto." in said
    assert "600 (500 to 900) | 1.00x | 500 (83%) | 62.50 | 500.0 |" in said
    assert "200 (200 to 200) | 3.00x | 100 (50%) | 0.62 | 5.0 |" in said


def test_accuracies_are_shown_for_each_seed():
    jobs = {"allgather": {"accuracy": [0.5, 1.0], "loss": [0.25, 0.75], "bytes": [1e6, 2e6]}}
    said = bench_ddp.accuracy_table({**FACTS, "parameters": 10_800_000, "jobs": jobs})
    assert "| 75.00% (50.00%, 100.00%) | 0.5000 (0.2500, 0.7500) | 1.5 |" in said
