"""What ``hvd-deepreduce advise`` tells: predicted step times of dense, 16 bits and presets, and which to take.

The model is in ``prediction.py``. How fast this machine and its codecs are is measured here, in some seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hvd_deepreduce.config import Config
from hvd_deepreduce.exchange.costs import Link
from hvd_deepreduce.tools.advise import losses, prediction, speeds
from hvd_deepreduce.tools.advise.prediction import CodecSpeed, Job, Machine, NotPredictedError, Prediction
from hvd_deepreduce.tools.gradient_file import Vector

if TYPE_CHECKING:
    from hvd_deepreduce.tools.ranks import Ranks

GRADIENTS = ("recommended", "fast", "small", "smallest", "reduce_scatter")
OTHERS = {
    losses.SGD: ("adamw_safe", "sparseloco", "diloco"),
    losses.ADAM: ("adamw_safe", "adamw_small", "sparseloco", "diloco", "sign_momentum"),
}
"""Presets that are looked at unless others are named; those of LocalSGD and SignMomentum by the optimizer's family."""
DEVIATION = 0.2
"""Predictions were within this share of measured step times, and so were ratios of two of them (docs/advise.md)."""

S = TypeVar("S", CodecSpeed, Machine)


def default_configs(optimizer: str | None) -> list[tuple[str, Config]]:
    """The presets that are looked at unless others are named, with their names.

    Args:
        optimizer: as for ``advise``.
    """
    names = [*GRADIENTS, *(name for family in losses.families_of(optimizer) for name in OTHERS[family])]
    return [(name, Config.load(name)) for name in dict.fromkeys(names)]


@dataclass(frozen=True)
class Advice:
    """Predictions for a job.

    Attributes:
        job, link: as they were given or measured.
        predictions: of ``no exchange``, dense, 16 bits, and the configs.
        left_out: by name, why a config is not predicted.
        dense_step: seconds, where they were given in place of ``job.compute``.
        optimizer: of the job; None: not given.
        asked: whether the user has named the configs.
    """

    job: Job
    link: Link
    predictions: list[Prediction]
    left_out: dict[str, str] = field(default_factory=dict)
    dense_step: float | None = None
    optimizer: str | None = None
    asked: bool = False

    def named(self, name: str) -> Prediction:
        """One of the predictions."""
        return next(one for one in self.predictions if one.name == name)

    @property
    def families(self) -> list[str]:
        """Of the optimizer; all, where it is not given."""
        return losses.families_of(self.optimizer)

    def best(self, family: str) -> Prediction:
        """What is recommended for a family of optimizers: of the safe ways within ``DEVIATION`` of the fastest one,
        that which loses least.

        Safe are dense gradients and 16 bits; under SGD, presets of gradients; under Adam and its relatives, those of
        LocalSGD. Those of ``SignMomentum`` are for no other optimizer. Presets that lose much, and under SGD those of
        LocalSGD, must have been named by the user.
        """
        safe = [one for one in self.predictions if self._unsafe(one, family) is None and one.name != prediction.LOCAL]
        least = min(one.seconds for one in safe)
        return min((one for one in safe if one.seconds <= (1 + DEVIATION) * least), key=lambda one: _loss(one, family))

    @property
    def contradicted(self) -> bool:
        """Whether the dense step that was given takes less than its exchange is predicted to take."""
        dense = self.named(prediction.DENSE).seconds
        return self.dense_step is not None and not self.job.compute and dense > (1 + DEVIATION) * self.dense_step

    def _unsafe(self, one: Prediction, family: str) -> str | None:
        """Why a way is not recommended; None: it may be."""
        if one.name in NOT_COMPRESSED:
            return None
        if one.votes:
            return "it is for the optimizer SignMomentum, which has to take this one's place"
        if family == losses.ADAM and not one.updates:
            return "compressed gradients inflate the second moment of Adam and its relatives"
        if one.name in losses.NEVER_UNASKED and not self.asked:
            return "a preset that loses more than others is recommended only if --config names it"
        if family == losses.SGD and one.updates and not self.asked:
            return "LocalSGD changes the training (docs/local_updates.md)"
        return None

    def sentences(self) -> list[str]:
        """What to do, in paragraphs."""
        if self.contradicted:
            given, dense = _ms(self.dense_step or 0.0), _ms(self.named(prediction.DENSE).seconds)
            return [
                f"Nothing is recommended: a dense step of {given} ms was given, but its exchange alone is predicted to "
                f"take {dense} ms on this link. Check the bandwidth, the ranks and the model's size. The times are "
                "those of exchanges alone."
            ]
        said = []
        if self.optimizer is None:
            said.append(
                "What a preset loses depends on the optimizer, which was not given, so there are two answers: give "
                "--optimizer sgd, adam, adamw, muon or another for one."
            )
        begins = {losses.SGD: "With SGD: ", losses.ADAM: "With Adam, AdamW, Muon and their relatives: "}
        for family in self.families:
            answer = " ".join(self._answer(family))
            said.append(answer if self.optimizer else begins[family] + answer[0].lower() + answer[1:])
        if not self.job.compute and self.dense_step is not None:
            said.append("The exchange is predicted to take all of the dense step that was given, or more.")
        elif not self.job.compute:
            said.append(
                "The time of a step without exchange was not given, so these are the times of exchanges alone, and "
                "nothing overlaps: give --compute."
            )
        return said

    def _answer(self, family: str) -> list[str]:
        """What to do with an optimizer of this family."""
        best, dense = self.best(family), self.named(prediction.DENSE)
        ways = [one for one in self.predictions if one.name not in NOT_COMPRESSED]
        compressed = sorted(ways, key=lambda one: one.seconds)
        first = next((one for one in compressed if self._unsafe(one, family) is None), None)
        if best.name != prediction.DENSE:
            how = "Horovod's or DDP's compression to 16 bits"
            if best.name != prediction.FP16:
                how = f"LocalSGD with preset {best.name}" if best.updates else f"preset {best.name}"
            said = [
                f"Use {how}: a step takes {_ms(best.seconds)} ms, and {_ms(dense.seconds)} ms with dense gradients, "
                f"{dense.seconds / best.seconds:.2f} times as long."
            ]
            if best.updates:
                said.append(f"The ranks exchange every {best.every} steps (docs/local_updates.md).")
                if family == losses.ADAM:
                    said.append("Begin with dense's learning rate times the root of the number of ranks.")
            elif best.whole:
                said.append('Under DDP, write scope="bucket" beside its name.')
            if best.name != prediction.FP16:
                said.append(f"On small jobs, {losses.told(best.name, family)}. Compare with dense on yours.")
        elif first is None:
            said = ["Use dense gradients: no preset that was looked at is safe here."]
        elif first.seconds >= dense.seconds:
            said = [
                "Use dense gradients: compression does not pay here. A step with "
                f"{first.name}, the fastest safe preset, takes {first.seconds / dense.seconds:.2f} times as "
                f"long ({_ms(first.seconds - dense.seconds)} ms more)."
            ]
        else:
            said = [
                f"Use dense gradients. A step with {first.name} is predicted to take {_ms(first.seconds)} ms, and "
                f"{_ms(dense.seconds)} ms with dense gradients, {dense.seconds / first.seconds:.2f} times as long. "
                f"Predictions deviate by up to {DEVIATION:.0%}, so that is no gain to rely on."
            ]
            if not first.updates:
                said.append("With mode: auto the job itself times both, and goes on with the faster.")
        uncompressed = min(one.seconds for one in self.predictions if one.name in (prediction.DENSE, prediction.FP16))
        faster: dict[str, list[str]] = {}
        for one in compressed:
            why, seconds = self._unsafe(one, family), one.seconds * (1 + DEVIATION)
            if one.votes and family == losses.ADAM and seconds < uncompressed:
                said.append(
                    "If the optimizer SignMomentum can take this one's place (docs/using.md), the ranks may exchange "
                    f"in each step: it takes {_ms(one.seconds)} ms with preset {one.name}. On small jobs, "
                    f"{losses.told(one.name, family)}."
                )
            elif why and seconds < best.seconds:
                faster.setdefault(why, []).append(f"{one.name} ({_ms(one.seconds)} ms)")
        said += [f"Faster, but not recommended: {', '.join(names)}: {why}." for why, names in faster.items()]
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
            + (f"{job.sharing:g} threads share a core." if job.sharing > 1 else "no other thread shares its cores."),
            "Dense: a ring allreduce of 4 bytes an element, which crosses each host's link once; gradients that are "
            "bfloat16 or float16 take what fp16 is predicted to take. Allgather: every rank sends its containers "
            "to every other rank.",
            f"Framework: {1e6 * job.tensor_overhead:.3g} us of a core for each of {len(job.sizes)} tensors, "
            f"{prediction.COMPRESSED_OVERHEAD} times as much with compression; and a copy of the gradient.",
            "Codecs: measured on this machine's processors. GPUs are not modelled.",
            "Losses: measured on small jobs, under SGD with momentum, Adam and AdamW"
            + ("" if self.optimizer in (None, "sgd", "adam", "adamw") else f", and not under {self.optimizer}")
            + ". Differences of 1 point or of 0.02 nats are noise.",
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        return {
            "optimizer": self.optimizer,
            "best": self.best(self.families[0]).name if self.optimizer and not self.contradicted else None,
            "best_with": {} if self.contradicted else {one: self.best(one).name for one in self.families},
            "advice": self.sentences(),
            "predictions": [vars(row) for row in self.predictions],
            "lost": {
                key: {"unit": job.unit, "page": job.page}
                | {one.name: lost for one in self.predictions if (lost := losses.lost(key, one.name)) is not None}
                for family in self.families
                for key, job in losses.jobs_of(family).items()
            },
            "left_out": self.left_out,
            "assumptions": self.assumptions(),
            "job": {name: value for name, value in vars(self.job).items() if name != "sizes"}
            | {"tensors": len(self.job.sizes), "numel": self.job.numel},
            "link": vars(self.link),
        }


NOT_COMPRESSED = (prediction.LOCAL, prediction.DENSE, prediction.FP16)


def _loss(one: Prediction, family: str) -> tuple[float, int, float, float]:
    """What orders ways: the loss, of which a gain is none; dense before 16 bits before presets; the gain; the time."""
    if one.name in NOT_COMPRESSED:
        return 0.0, NOT_COMPRESSED.index(one.name), 0.0, one.seconds
    lost = losses.compared(one.name, family)
    return max(0.0, lost), len(NOT_COMPRESSED), lost, one.seconds


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if abs(seconds) >= 0.1 else f"{1e3 * seconds:.3g}"


def _of_all(measure: Callable[[], S], sharing: float, collectives: Ranks | None) -> S:
    """Measures a speed: that of the slowest rank, with all ranks at it; or of this process alone, whose times are
    multiplied by the number of ranks on a core."""
    if collectives is not None:
        collectives.slowest(np.zeros(1))  # they begin together
    own = measure()
    if collectives is None:
        return replace(own, **{name: sharing * getattr(own, name) for name in TIMES if hasattr(own, name)})
    return type(own)(*collectives.slowest(np.array(astuple(own), np.float64)).tolist())


TIMES = ("copy", "half", "encode", "decode", "decode_each")
"""Of ``Machine`` and ``CodecSpeed``, those in seconds."""


def advise(
    job: Job,
    link: Link,
    configs: Iterable[tuple[str, Config]] | None = None,
    *,
    optimizer: str | None = None,
    captured: Callable[[Config], Sequence[Vector]] | None = None,
    collectives: Ranks | None = None,
    dense_step: float | None = None,
) -> Advice:
    """Measures this machine, and predicts the steps of a job.

    Args:
        job: on two ranks or more.
        link: between its hosts.
        configs: with their names; None: ``default_configs``. Presets that lose much are recommended only if they are
            among the configs that are given.
        optimizer: of the job, such as ``"sgd"``, ``"adamw"`` or the name of a class; None: not known, so that there is
            an answer for each family.
        captured: returns the vectors that a config selects from; None: generated ones.
        collectives: of ranks that all call this at the same time, as many on a host as in the job; None: this process
            is alone.
        dense_step: measured seconds of a dense step, from which ``job.compute`` is found; None: it is given.

    Raises:
        ValueError: the job has one rank, which exchanges nothing; or the optimizer is not known.
    """
    looked_at = default_configs(optimizer) if configs is None else configs
    if job.ranks < 2:
        raise ValueError(f"ranks is {job.ranks}; it must be 2 or more, since a single rank exchanges nothing")
    machine = _of_all(lambda: speeds.machine(job.numel), job.sharing, collectives)
    if dense_step is not None:
        job = replace(job, compute=prediction.computing(job, link, machine, dense_step))
    found = [prediction.local(job), prediction.dense(job, link, machine), prediction.dense(job, link, machine, True)]
    left_out: dict[str, str] = {}
    measured: dict[str, CodecSpeed] = {}
    generated = [] if captured else speeds.gradients(job.sizes)
    for name, config in looked_at:
        try:
            prediction.check(config, job)
        except NotPredictedError as error:
            left_out[name] = str(error)
            continue
        vectors = captured(config) if captured else generated
        same = str(config)  # some presets differ in their names alone
        if same not in measured:
            measure = partial(speeds.codec, config, job.sizes, vectors)
            measured[same] = _of_all(measure, job.sharing, collectives)
        found.append(prediction.compressed(name, config, job, link, machine, measured[same]))
    return Advice(job, link, found, left_out, dense_step, optimizer, configs is not None)
