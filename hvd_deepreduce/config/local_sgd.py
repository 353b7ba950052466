"""Settings of local updates: ranks train by themselves for some steps, and exchange how far they have come."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hvd_deepreduce.codecs.interfaces import Settings


class LocalSettings(Settings):
    """When ranks exchange their updates, and what the mean of them does.

    Basu, Data, Karakus, Diggavi, "Qsparse-local-SGD", NeurIPS 2019 (Algorithm 1): plain averaging. Douillard et al.,
    "DiLoCo", 2023: the outer optimizer is SGD with Nesterov momentum. Douillard et al., "Streaming DiLoCo", 2025:
    fragments and delay. "SparseLoCo", 2025: a residual that decays, in place of the outer momentum.

    Attributes:
        every: local steps between two exchanges.
        lr: learning rate of the outer optimizer, SGD. 1 and no momentum: plain averaging.
        momentum: of the outer optimizer, in [0, 1).
        nesterov: whether that is Nesterov's.
        decay: factor of the residuals before an update is added to them.
        fragments: the model is divided into this many parts of about equal size, which are exchanged in turn.
        delay: local steps between the beginning of an exchange and its end. Its transfer takes place meanwhile.
        mix: with a delay, the share of its own parameters that a rank keeps when an exchange ends; the rest comes from
            the ranks' common ones. None: it takes the common ones, and adds its own progress since the beginning of
            the exchange.
        anchors: where each rank keeps the anchor and the outer optimizer's state: ``device``, beside the parameters, or
            ``host``, in pinned memory, for GPUs without room for them; an exchange then copies a parameter's anchor to
            the GPU and back. PyTorch only.
    """

    every: int = Field(8, ge=1, le=2**31)
    lr: float = Field(1.0, gt=0, allow_inf_nan=False)
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = Field(True, strict=True)
    decay: float = Field(1.0, ge=0, le=1)
    fragments: int = Field(1, ge=1, le=2**16)
    delay: int = Field(0, ge=0, le=2**31)
    mix: float | None = Field(None, ge=0, le=1)
    anchors: Literal["device", "host"] = "device"

    @model_validator(mode="after")
    def _ends_in_time(self) -> LocalSettings:
        if self.delay >= self.every:
            raise ValueError(
                f"local.delay is {self.delay} and local.every is {self.every}: an exchange must end before the next "
                "one of the same parameters begins, so delay must be less than every"
            )
        if self.fragments > self.every:
            raise ValueError(
                f"local.fragments is {self.fragments} and local.every is {self.every}: each local step exchanges at "
                "most one fragment, so there can be at most as many fragments as local steps between two exchanges"
            )
        return self
