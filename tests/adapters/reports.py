"""Callbacks and measured residuals, which are checked alike in every adapter."""

from __future__ import annotations

import json
import math

import numpy as np


class Heard:
    """Listens to what compresses, for 5 steps: a callback for each step, one for each second, and one that fails. The
    residuals are measured in the first, third and fifth one."""

    def __init__(self, compression):
        self.compression = compression
        self.each, self.second, self.failed = [], [], 0
        compression.add_callback(self.fail)
        compression.add_callback(self.each.append)
        compression.add_callback(self.second.append, every=2)
        compression.measure_residuals(every=2)

    def fail(self, report):
        self.failed += 1
        raise ZeroDivisionError("a fault of the callback")

    def check(self, residuals, gradients):
        """
        Args:
            residuals: by parameter, before the last step.
            gradients: by parameter, this rank's of the last step.
        """
        assert self.failed == 1, "it was not called again"
        assert [one["total"]["steps"] for one in self.each] == [1, 2, 3, 4, 5]
        assert [one["total"]["steps"] for one in self.second] == [2, 4]
        report = self.compression.stats()
        assert self.each[-1] == report and set(report.residual_ratio) == set(gradients), report
        for name, gradient in gradients.items():
            ratio = np.linalg.norm(residuals[name]) / np.linalg.norm(gradient)
            assert math.isclose(report.residual_ratio[name], ratio, rel_tol=1e-4), (name, ratio, report.residual_ratio)
        ratios = [one.residual_ratio for one in self.each]
        assert set(ratios[0].values()) == {0.0} and ratios[1] == ratios[0] != ratios[2] == ratios[3] != ratios[4]
        figures = json.loads(json.dumps(report.as_dict("job"), allow_nan=False))
        ratio = report["total"]["dense_bytes"] / report["total"]["bytes_sent"]
        assert figures["job/total/compression_ratio"] == ratio > 1 and set(ratios[4].values()) <= set(figures.values())
