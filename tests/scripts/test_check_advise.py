"""check_advise.py: its table says by how much predictions deviate, and what the choice costs."""

from __future__ import annotations

import check_advise
import pytest


def job(measured, predicted, updates=False):
    return {
        "measured": measured, "seconds": predicted, "codec": 0.01, "link": 0.02, "updates": updates,
        "measured_bytes": 2e6, "received": 1e6,
    }  # fmt: skip


SETUP = {
    "rate": "1gbit", "task": "resnet", "choice": "fp16", "link": {"bits_per_second": 1e9, "latency": 1e-4, "cpu": 1e-9},
    "jobs": {
        "no exchange": job([0.1], 0.1), "dense": job([0.4, 0.5, 0.6], 0.4), "fp16": job([0.33], 0.3),
        "topk_rice_qsgd": job([0.3], 0.36), "sgd_small": job([0.1], 0.1, updates=True),
    },
}  # fmt: skip


def test_deviations_and_the_choice_are_reported():
    assert check_advise.behind(SETUP) == pytest.approx(0.1)  # local updates are no choice
    said = check_advise.report({"hosts": 4, "cores": 2, "load": 1.0, "setups": [SETUP]})
    assert "**Worst deviation: 20%** (1gbit, resnet, `" in said and "0 of 4 are beyond the aim of 25%" in said
    assert "at most 10.0% slower" in said and "predicted to within 33%" in said
    assert "| `fp16` (fastest) | 330 (330 to 330) | 300 | -9% |" in said
    assert "| 500 (450 to 550) | 400 | -20% |" in said and "| given |" in said
