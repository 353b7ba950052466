"""Densities that change with the step, for a warm-up.

Lin, Han, Mao, Wang, Dally, "Deep gradient compression", ICLR 2018, section 3.3: 25%, 6.25%, 1.5625% and 0.4% in the
first epochs, and 0.1% from then on.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hvd_deepreduce.codecs.interfaces import Settings


class DensitySchedule(Settings):
    """The densities of the first steps; from the last of ``steps`` on, the sparsifier's own.

    Attributes:
        steps: (end, density) pairs: the density, in (0, 1], of the steps before ``end`` and not before the end of the
            pair before. Steps are counted by parameter, from 0 on, as in checkpoints.
        interpolation: ``constant``, or ``exponential``: within its steps, a density changes by a constant factor a step
            towards the next one, and the last of them towards the sparsifier's.
    """

    steps: tuple[tuple[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0, le=1)]], ...] = Field(min_length=1)
    interpolation: Literal["constant", "exponential"] = "constant"

    @field_validator("steps")
    @classmethod
    def _check_order(cls, steps: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        ends = [end for end, _ in steps]
        if any(later <= end for end, later in zip(ends, ends[1:], strict=False)):
            raise ValueError(
                f"density_schedule has the steps {', '.join(map(str, ends))}: each must be larger than the one before"
            )
        return steps

    @property
    def end(self) -> int:
        """The first step that has the sparsifier's density."""
        return self.steps[-1][0]

    def density_at(self, step: int, final: float) -> float:
        """The density of a step.

        Args:
            step: 0 or more.
            final: the sparsifier's density.
        """
        begin = 0
        for (end, density), following in zip(self.steps, [*(d for _, d in self.steps[1:]), final], strict=True):
            if step < end:
                if self.interpolation == "constant":
                    return density
                return float(density * (following / density) ** ((step - begin) / (end - begin)))
            begin = end
        return final
