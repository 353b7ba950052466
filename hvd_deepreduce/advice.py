"""What ``hvd-deepreduce advise`` tells: predicted step times of dense, 16 bits and presets, and which to take.

The model is in ``prediction.py``. How fast this machine and its codecs are is measured here, in some seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np

from hvd_deepreduce import prediction, speeds
from hvd_deepreduce.captured import Vector
from hvd_deepreduce.config import Config
from hvd_deepreduce.prediction import CodecSpeed, Job, Link, Machine, NotPredictedError, Prediction

GRADIENTS = ("topk_rice_qsgd", "fast", "small", "smallest", "reduce_scatter")
UPDATES = ("adamw_safe", "adamw_small", "sparseloco", "diloco")
"""Presets that are looked at unless others are named."""
DEVIATION = 0.2
"""Predictions were within this share of measured step times (docs/advise.md)."""

S = TypeVar("S", CodecSpeed, Machine)


@dataclass(frozen=True)
class Advice:
    """Predictions for a job.

    Attributes:
        job, link: as they were given or measured.
        predictions: of ``no exchange``, dense, 16 bits, and the configs.
        left_out: by name, why a config is not predicted.
        dense_step: seconds, where they were given in place of ``job.compute``.
    """

    job: Job
    link: Link
    predictions: list[Prediction]
    left_out: dict[str, str] = field(default_factory=dict)
    dense_step: float | None = None

    def named(self, name: str) -> Prediction:
        """One of the predictions."""
        return next(one for one in self.predictions if one.name == name)

    @property
    def best(self) -> Prediction:
        """The fastest way to exchange gradients."""
        return prediction.best(self.predictions)

    def sentences(self) -> list[str]:
        """What to do."""
        best, dense = self.best, self.named(prediction.DENSE)
        said = []
        if best.name == prediction.DENSE:
            others = [one for one in self.predictions if not one.updates and one.name not in NOT_COMPRESSED]
            said.append("Use dense gradients: compression does not pay here.")
            if others:
                second = min(others, key=lambda one: one.seconds)
                said.append(
                    f"A step with {second.name}, the fastest compressed one, takes "
                    f"{second.seconds / dense.seconds:.2f} times as long ({_ms(second.seconds - dense.seconds)} ms "
                    "more)."
                )
        else:
            how = "Horovod's or DDP's compression to 16 bits" if best.name == prediction.FP16 else f"preset {best.name}"
            said.append(
                f"Use {how}: a step takes {_ms(best.seconds)} ms, and {_ms(dense.seconds)} ms with dense gradients, "
                f"{dense.seconds / best.seconds:.2f} times as long."
            )
            if dense.seconds < (1 + DEVIATION) * best.seconds:
                said.append(
                    f"Predictions deviate by up to {DEVIATION:.0%}, so the two may be equally fast: time both, or set "
                    "mode: auto, with which the job does so itself."
                )
            said.append("What presets lose differs: see docs/presets.md.")
        updates = [one for one in self.predictions if one.updates]
        fastest = min(updates, key=lambda one: one.seconds, default=None)
        if fastest is not None and fastest.seconds < best.seconds:
            said.append(
                f"LocalSGD with {fastest.name} takes {_ms(fastest.seconds)} ms a step, as the ranks exchange only "
                f"every {fastest.every} steps. It changes the training (docs/local_updates.md)."
            )
        if not self.job.compute and self.dense_step is not None:
            said.append(
                f"A dense step of {_ms(self.dense_step)} ms was given, but the exchange alone is predicted to take "
                f"{_ms(dense.seconds)} ms on this link: check the bandwidth, the ranks and the model's size. These are "
                "the times of exchanges alone."
            )
        elif not self.job.compute:
            said.append(
                "The time of a step without exchange was not given, so these are the times of exchanges alone, and "
                "nothing overlaps: give --compute."
            )
        return said

    def assumptions(self) -> list[str]:
        """What the model takes for granted, with this job's numbers."""
        job, link = self.job, self.link
        cores = "has a core that its computing leaves free" if job.free_core else "has no core to spare"
        busy = "beside the backward pass" if job.free_core else "in place of computing"
        return [
            f"Link of a host: {link.bits_per_second / 1e9:.4g} Gbit/s in each direction, {1e6 * link.latency:.3g} us a "
            f"message, {1e9 * link.cpu:.3g} ns of a processor for each byte.",
            f"Overlap: gradients become ready during the last {job.backward:.0%} of computing, in buckets of "
            f"{job.bucket_bytes / 2**20:.3g} MiB; with scope model, at its end.",
            f"Processor: a rank {cores}, so it encodes and decodes {busy}; "
            + (f"{job.sharing:g} ranks share a core." if job.sharing > 1 else "no rank shares a core."),
            "Dense: a ring allreduce, which crosses each host's link once. Allgather: every rank sends its containers "
            "to every other rank.",
            f"Framework: {1e6 * job.tensor_overhead:.3g} us of a core for each of {len(job.sizes)} tensors, "
            f"{prediction.COMPRESSED_OVERHEAD} times as much with compression; and a copy of the gradient.",
            "Codecs: measured on this machine's processors. GPUs are not modelled.",
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        return {
            "best": self.best.name,
            "advice": self.sentences(),
            "predictions": [{one.name: getattr(row, one.name) for one in fields(row)} for row in self.predictions],
            "left_out": self.left_out,
            "assumptions": self.assumptions(),
            "job": {one.name: getattr(self.job, one.name) for one in fields(self.job) if one.name != "sizes"}
            | {"tensors": len(self.job.sizes), "numel": self.job.numel},
            "link": {one.name: getattr(self.link, one.name) for one in fields(self.link)},
        }


NOT_COMPRESSED = (prediction.LOCAL, prediction.DENSE, prediction.FP16)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if abs(seconds) >= 0.1 else f"{1e3 * seconds:.3g}"


def _of_all(measure: Callable[[], S], sharing: float, collectives: speeds.Collectives | None) -> S:
    """Measures a speed: that of the slowest rank, with all ranks at it; or of this process alone, whose times are
    multiplied by the number of ranks on a core."""
    if collectives is not None:
        collectives.slowest(np.zeros(1))  # they begin together
    own = measure()
    if collectives is None:
        slower = {one.name: sharing * getattr(own, one.name) for one in fields(own) if one.name in TIMES}
        return type(own)(**{one.name: getattr(own, one.name) for one in fields(own)} | slower)
    return type(own)(*collectives.slowest(np.array(astuple(own), np.float64)).tolist())


TIMES = ("copy", "half", "encode", "decode", "decode_each")
"""Of ``Machine`` and ``CodecSpeed``, those in seconds."""


def advise(
    job: Job,
    link: Link,
    configs: Iterable[tuple[str, Config]],
    *,
    captured: Callable[[Config], Sequence[Vector]] | None = None,
    collectives: speeds.Collectives | None = None,
    dense_step: float | None = None,
) -> Advice:
    """Measures this machine, and predicts the steps of a job.

    Args:
        job: on two ranks or more.
        link: between its hosts.
        configs: with their names.
        captured: returns the vectors that a config selects from; None: generated ones.
        collectives: of ranks that all call this at the same time, as many on a host as in the job; None: this process
            is alone.
        dense_step: measured seconds of a dense step, from which ``job.compute`` is found; None: it is given.

    Raises:
        ValueError: the job has one rank, which exchanges nothing.
    """
    if job.ranks < 2:
        raise ValueError(f"ranks is {job.ranks}; it must be 2 or more, since a single rank exchanges nothing")
    machine = _of_all(lambda: speeds.machine(job.numel), job.sharing, collectives)
    if dense_step is not None:
        job = replace(job, compute=prediction.computing(job, link, machine, dense_step))
    found = [prediction.local(job), prediction.dense(job, link, machine), prediction.dense(job, link, machine, True)]
    left_out: dict[str, str] = {}
    generated = None if captured else speeds.gradients(job.sizes)
    for name, config in configs:
        try:
            prediction.check(config, job)
        except NotPredictedError as error:
            left_out[name] = str(error)
            continue
        vectors = captured(config) if captured else generated
        assert vectors is not None

        def measure(config: Config = config, vectors: Sequence[Vector] = vectors) -> CodecSpeed:
            return speeds.codec(config, job.sizes, vectors)

        speed = _of_all(measure, job.sharing, collectives)
        found.append(prediction.compressed(name, config, job, link, machine, speed))
    return Advice(job, link, found, left_out, dense_step)
