"""User settings. A preset's name, a YAML file, a dict or keyword arguments become one frozen, validated ``Config``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PrivateAttr, SerializeAsAny, field_validator, model_validator

import hvd_deepreduce.codecs.index
import hvd_deepreduce.codecs.joint
import hvd_deepreduce.codecs.sparsify
import hvd_deepreduce.codecs.value  # noqa: F401  (these register the codecs)
from hvd_deepreduce.codecs.index.rice_blocks import RiceBlocks
from hvd_deepreduce.codecs.interfaces import Codec, IndexCodec, JointCodec, Settings, Sparsifier, ValueCodec, meant
from hvd_deepreduce.codecs.joint.three_lc import ThreeLC
from hvd_deepreduce.codecs.sparsify.nonzero import NonZero
from hvd_deepreduce.codecs.sparsify.topk import TopK
from hvd_deepreduce.codecs.value.qsgd import QSGD
from hvd_deepreduce.codecs.value.raw import Raw
from hvd_deepreduce.codecs.value.sign import Sign
from hvd_deepreduce.config import plugins, presets, resolving, unused_settings
from hvd_deepreduce.config.error_feedback import Feedback, Residual
from hvd_deepreduce.config.local_sgd import LocalSettings
from hvd_deepreduce.config.resolving import ConfigError
from hvd_deepreduce.config.schedule import DensitySchedule
from hvd_deepreduce.exchange.settings import AllGather, ExchangeSettings, ReduceScatter

OVERRIDABLE = (
    "sparsifier", "density", "density_schedule", "index", "value", "joint", "error_feedback", "memory", "min_elements",
    "force_index",
)  # fmt: skip
"""The settings that can differ from tensor to tensor."""


Hierarchical = bool | int | Literal["auto"]
"""Whether there are two levels; a number: of the ranks of each node."""


def _defaults() -> dict[str, Any]:
    return {key: field.default for key, field in Config.model_fields.items()}


class Config(Settings):
    """All settings of a job's compression, the same on every rank (``threads`` may differ).

    Attributes:
        sparsifier: which elements are sent; a higher density costs bytes and loses less.
        density_schedule: densities of the first steps, as a warm-up: ``[[100, 0.25], [200, 0.0625]]`` is 0.25 before
            step 100, 0.0625 before step 200, and the sparsifier's from then on. ``{steps: [[400, 0.25]], interpolation:
            exponential}`` falls from 0.25 to the sparsifier's by a constant factor a step. A step is a parameter's.
        index: how their indices are written. None: they are not, since the sparsifier ``none`` has no indices, and
            receivers can repeat the choice of ``randomk``.
        value: how their values are written.
        joint: a codec of both, in place of ``index`` and ``value``.
        exchange: how the ranks' tensors become one sum.
        hierarchical: two levels: gradients are summed inside a node, each of its ranks compresses a slice of the sum,
            and exchanges it with one rank of each other node. ``auto`` does so where there are several nodes of equally
            many ranks, two or more. A number is that of the ranks of each node, in rank order. False: all ranks
            exchange containers.
        scope: what one container holds: a ``tensor``, the whole ``model``, or a ``bucket`` of neighbouring tensors.
            Larger scopes select across tensors, save headers and take less time for each tensor; buckets still travel
            during the backward pass. The default is ``tensor`` under settings of single tensors (``min_elements``,
            ``overrides``), and ``model`` under exchanges of whole vectors.
        bucket_bytes: of a bucket's dense gradient. In scope ``tensor`` the containers of a bucket are sent together.
        selection: within a larger scope, encode the ``scope`` as one vector, or each ``tensor`` by itself, with scales
            and settings of its own. With other exchanges than
            ``allgather``, ``tensor`` affects selection only, not encoding.
        error_feedback: keep what was not sent and add it to the next gradient. Off, it is lost.
        memory: how error feedback keeps it.
        min_elements: with scope ``tensor``, one of fewer elements goes through Horovod uncompressed. None: one of up to
            1,023 elements does if its container, with what an allgather costs besides, is estimated to be larger.
        overrides: settings of single tensors, by patterns of their parameters' names; see below.
        force_index: with a value codec that sorts the values, send the indices as ``index`` does: ``raw`` ones in the
            order of the values, those of another codec with an order section. Off, packed indices in the order of the
            values, which lose nothing, replace them where they take no more bytes.
        mode: ``always`` compresses every step. ``auto`` tries steps with compression and without, in turns, and goes on
            with what takes less time in this job; again every 2,000 steps. A residual is added to the first gradient
            that is sent dense.
        local: for ``LocalSGD``, which exchanges updates of the parameters in place of gradients: how often, and what
            the mean of them does. None: gradients are exchanged.
        seed: of all random choices, 0 to 2^32 - 1.
        threads: of the CPU kernels; None: the rank's share of the machine's cores.
    """

    sparsifier: SerializeAsAny[Sparsifier] = TopK()
    density_schedule: DensitySchedule | None = None
    index: SerializeAsAny[IndexCodec] | None = RiceBlocks()
    value: SerializeAsAny[ValueCodec] | None = QSGD()
    joint: SerializeAsAny[JointCodec] | None = None
    exchange: SerializeAsAny[ExchangeSettings] = AllGather()
    hierarchical: Hierarchical = False
    scope: Literal["tensor", "model", "bucket"] = "bucket"
    bucket_bytes: int = Field(25_000_000, ge=1024)
    selection: Literal["scope", "tensor"] = "scope"
    error_feedback: bool = Field(True, strict=True)
    memory: SerializeAsAny[Feedback] = Residual()
    min_elements: int | None = Field(None, ge=0)
    overrides: dict[str, dict[str, Any]] = {}
    force_index: bool = Field(False, strict=True)
    mode: Literal["always", "auto"] = "always"
    local: LocalSettings | None = None
    seed: int = Field(0, ge=0, le=2**32 - 1)
    threads: int | None = Field(None, ge=1, le=1024)
    _variants: dict[str, Config] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Names become codecs, and the keys that exclude each other are checked."""
        given = resolving.resolved(resolving.merged({}, given, _defaults()))
        complete = resolving.complete(given, _defaults())
        for unused in unused_settings.find(complete, _defaults()):
            if not unused.anyway:
                raise ConfigError(unused.sentence)
        instead = unused_settings.instead_of_index_and_value(complete)
        for kind, needed in (("index", unused_settings.needs_index(complete)), ("value", not instead)):
            if needed and complete[kind] is None:
                raise ConfigError(f"{kind} is None; without a joint codec, one is needed")
            if not needed:
                given.setdefault(kind, None)
        index = given.get("index")
        if isinstance(index, IndexCodec) and index.keeps_values and given.get("error_feedback", True):
            raise ConfigError(
                f"index is {index.name!r} with settings ({index}) under which a value can be decoded at the index of "
                "another element, and error_feedback is True: the residual would keep both errors, and grow without "
                "bound. Set error_feedback to False, or choose other settings of the index"
            )
        exchange = complete["exchange"]
        if len(instead) > 1:
            raise ConfigError(
                f"joint is {instead[0].name!r} and exchange is {exchange.name!r}: only the exchanges 'allgather' and "
                "'reduce_scatter' carry a joint codec's containers"
            )
        if given.setdefault("scope", complete["scope"]) == "tensor" and resolving.sums_vectors(complete):
            raise ConfigError(
                f"scope is 'tensor' and exchange is {exchange.name!r}, which sums whole vectors: set scope to 'model' "
                "or 'bucket'"
            )
        return given

    @field_validator("hierarchical", mode="before")
    @classmethod
    def _is_hierarchical(cls, given: Any) -> Any:
        if isinstance(given, bool) or given == "auto" or (type(given) is int and given > 0):
            return given
        raise ConfigError(
            f"hierarchical is {given!r}; it must be True, False, 'auto', or the number of ranks of each node, 1 or more"
        )

    @field_validator("density_schedule", mode="before")
    @classmethod
    def _named_steps(cls, given: Any) -> Any:
        return {"steps": given} if isinstance(given, list | tuple) else given

    @field_validator("overrides", mode="before")
    @classmethod
    def _plain(cls, given: Any) -> dict[str, dict[str, Any]]:
        """Patterns and settings as plain names, numbers and dicts."""
        plain: dict[str, dict[str, Any]] = {}
        for pattern, settings in given.items() if isinstance(given, Mapping) else [(given, None)]:
            if not isinstance(pattern, str) or not isinstance(settings, Mapping):
                raise ConfigError(
                    f"overrides is {given!r}; it must map patterns of parameters' names to their settings, as in "
                    "{'*.bias': {'value': 'raw'}}"
                )
            for key in settings:
                if key not in OVERRIDABLE:
                    raise ConfigError(
                        f"overrides has {key!r} for {pattern!r}, and only these settings can differ from tensor to "
                        f"tensor: {', '.join(OVERRIDABLE)}{meant(key, OVERRIDABLE)}"
                    )
            plain[pattern] = {
                key: resolving.settings_of(value) if isinstance(value, Codec | Mapping) else value
                for key, value in settings.items()
            }
        return plain

    @model_validator(mode="after")
    def _check_schedule(self) -> Config:
        final = getattr(self.sparsifier, "density", None)
        if self.density_schedule and all(density == final for _, density in self.density_schedule.steps):
            raise ConfigError(
                f"density_schedule has the density {final} and no other, which sparsifier.density is too, so that it "
                "has no effect: leave density_schedule out, or change one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_mode(self) -> Config:
        if self.mode == "auto" and (self.local is not None or self.memory.has_velocity):
            reason = "the updates of LocalSGD (local) are always compressed"
            if self.local is None:
                reason = f"memory is {self.memory.name!r}, which gives a momentum to compressed gradients only"
            raise ConfigError(f"mode is 'auto', and {reason}: set mode to 'always', or leave it out")
        return self

    @model_validator(mode="after")
    def _check_local(self) -> Config:
        if self.local is not None and self.memory.has_velocity:
            raise ConfigError(
                f"local is given and memory is {self.memory.name!r}, which is a momentum of gradients, where updates "
                "of the parameters are exchanged: leave memory out, and give the outer step a momentum, "
                "local={'momentum': 0.5}"
            )
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> Config:
        cuts_sums = getattr(self.exchange, "density", None) is not None
        selects_once = isinstance(self.exchange, AllGather | ReduceScatter) and not cuts_sums
        if self.memory.leaves_whole and not (selects_once and self.hierarchical is False):
            what = f"hierarchical is {self.hierarchical!r}"
            if not selects_once:
                density = getattr(self.exchange, "density", None)
                what = f"exchange is {self.exchange.name!r}{'' if density is None else f' with density {density}'}"
            raise ConfigError(
                f"memory is {self.memory.name!r} and {what}, where ranks select from sums, while what is sent must "
                "leave the momentum of the rank that sends it: set exchange to 'allgather' or 'reduce_scatter' and "
                "hierarchical to False, or memory to 'dgc'"
            )
        return self

    @model_validator(mode="after")
    def _build_variants(self) -> Config:
        """The whole config of each override, which checks its settings."""
        if not self.overrides:
            return self
        if self.exchange != AllGather():
            raise ConfigError(
                f"exchange is {self.exchange.name!r}, which sums whole vectors, and overrides has settings of single "
                "tensors: leave overrides out, or set exchange to 'allgather'"
            )
        if self.scope != "tensor" and self.selection != "tensor":
            raise ConfigError(
                f"scope is {self.scope!r} and selection is 'scope', so the {self.scope} is encoded as one vector, and "
                "overrides has settings of single tensors: set selection to 'tensor', or leave overrides out"
            )
        for pattern, settings in self.overrides.items():
            base = {key: value for key, value in self.to_dict().items() if key != "overrides"}
            if self.joint is not None and {"index", "value"} & settings.keys():
                base = {key: value for key, value in base.items() if key not in ("joint", "index", "value")}
            try:
                self._variants[pattern] = type(self).load(base, **settings)
            except ConfigError as error:
                raise ConfigError(f"overrides for {pattern!r}: {error}") from None
        return self

    def sparsifier_at(self, step: int) -> Sparsifier:
        """The sparsifier of a step of a parameter: with the density that ``density_schedule`` gives."""
        if self.density_schedule is None or step >= self.density_schedule.end:
            return self.sparsifier
        density = self.density_schedule.density_at(step, getattr(self.sparsifier, "density"))  # noqa: B009
        return self.sparsifier.model_copy(update={"density": density})

    def doubts(self) -> list[str]:
        """Warnings, as sentences: what the config has and is probably not meant."""
        own = {key: getattr(self, key) for key in type(self).model_fields}
        found = [unused.sentence for unused in unused_settings.find(own, _defaults())]
        all_elements = getattr(self.sparsifier, "density_of", "elements") == "elements"
        if self.local is None and getattr(self.sparsifier, "density", 0) == 1 and all_elements:
            found.append(
                "sparsifier.density is 1, so that all elements are sent, with their indices, which takes more bytes "
                "than to send them without: set sparsifier to 'none', or the density to less, such as 0.01 for 1%"
            )
        return found

    @property
    def sends_all_as_it_is(self) -> bool:
        """Whether nothing is compressed, so that a ring's allreduce sends less than an allgather of containers."""
        return self.sparsifier.sends_all and isinstance(self.value, Raw) and not self.overrides

    @property
    def sends_parts(self) -> bool:
        """Whether a step sends a part of each gradient, so that the rest comes later as rare, large elements: with a
        sparsifier that leaves elements out, or with values that are zeros, or signs, and error feedback."""
        coarse = self.error_feedback and (isinstance(self.value, Sign) or isinstance(self.joint, ThreeLC))
        left_out = not self.sparsifier.sends_all and not isinstance(self.sparsifier, NonZero)
        return (
            coarse
            or (left_out and getattr(self.sparsifier, "density", 0) < 1)
            or any(one.sends_parts for one in self.variants.values())
        )

    @property
    def momentum(self) -> Feedback | None:
        """The first memory with a velocity, of the job or of single tensors; None: there is none."""
        memories = (one.memory for one in (self, *self.variants.values()))
        return next((memory for memory in memories if memory.has_velocity), None)

    @property
    def has_velocity(self) -> bool:
        """Whether any tensor has a velocity."""
        return self.momentum is not None

    @property
    def variants(self) -> dict[str, Config]:
        """The whole config of the tensors that each pattern of ``overrides`` matches first."""
        return self._variants

    def for_gradients(self, kind: str = "DeepReduce", instead: str = "hvd.DistributedOptimizer") -> Config:
        """This config, for a ``DeepReduce``.

        Args:
            kind, instead: the class that has it, and what LocalSGD takes the place of.

        Raises:
            ConfigError: it is for ``LocalSGD``.
        """
        if self.local is not None:
            raise ConfigError(
                f"local is {{{resolving.inline(self.local.model_dump()).strip('{}')}}}: this config exchanges updates "
                f"of the parameters, and {kind} exchanges gradients. Use LocalSGD in place of {instead}, or another "
                "config, or local=None"
            )
        return self

    def override_of(self, name: str) -> str | None:
        """The first pattern of ``overrides`` that matches a parameter's name; None: none does."""
        return next((pattern for pattern in self.overrides if fnmatchcase(name, pattern)), None)

    def check_overrides(self, names: Iterable[str]) -> None:
        """Checks that each override applies to a parameter.

        Args:
            names: of all parameters.

        Raises:
            ConfigError: one does not.
        """
        if not self.overrides:
            return
        names = list(names)
        used = {self.override_of(name) for name in names}
        for pattern in self.overrides:
            if pattern in used:
                continue
            matched = [name for name in names if fnmatchcase(name, pattern)]
            why = (
                f"matches {matched[0]!r} and no parameter that an earlier pattern does not match, and the first match "
                "counts: put it before the others, or leave it out"
                if matched
                else f"matches none of the {len(names)} parameters ({', '.join(map(repr, names[:5]))}"
                f"{', ...' if len(names) > 5 else ''}): correct it, or leave it out"
            )
            raise ConfigError(f"the pattern {pattern!r} of overrides {why}")

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Config | None = None, /, **settings: Any) -> Config:
        """Loads a config from a preset's name, a YAML file, a dict or another config.

        Args:
            source: the name of a preset, the path of a YAML file (a ``Path``, or a string that ends in ``.yaml`` or
                ``.yml`` or contains a directory separator), a dict, a ``Config``, or None for the defaults.
            **settings: keys of the config; they replace those of ``source``. A mapping without ``name`` changes
                settings of the codec that ``source`` has, as in ``Config.load("smallest", value={"bits": 6})``.
                ``density=0.1`` is short for ``sparsifier={"density": 0.1}``. Settings of ``source`` that have no
                effect beside these are dropped, and so is its ``index`` if another sparsifier needs none.

        Raises:
            ConfigError: an unknown preset, a file that is missing, empty or not a YAML mapping, an unknown key, a
                value out of range, or a setting other than its default that has no effect beside the others, unless
                its value is what happens anyway (``doubts``).
        """
        base = resolving.merged({}, cls._read(source), _defaults())
        merged = resolving.merged(base, settings, _defaults())
        if settings:
            merged = resolving.without_unused(merged, base, settings, _defaults())
        config: Config = resolving.build(cls, "", merged)
        return config

    @staticmethod
    def _read(source: Any) -> dict[str, Any]:
        if source is None:
            return {}
        if isinstance(source, Config):
            return source.to_dict()
        if isinstance(source, Mapping):
            return {str(key): value for key, value in source.items()}
        if not isinstance(source, str | Path):
            raise ConfigError(
                f"a config is a preset's name, the path of a YAML file, a dict or a Config, and "
                f"{type(source).__name__} was given"
            )
        try:
            path = presets.find(source)
        except LookupError as error:
            raise ConfigError(str(error)) from None
        try:
            read = yaml.load(path.read_text("utf-8"), resolving.UniqueKeys)
        except OSError as error:
            raise ConfigError(f"the config file {path} cannot be read: {error.strerror}{presets.hint(path)}") from None
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(f"the config file {source} is not YAML: {' '.join(str(error).split())}") from None
        resolving.check_size(source, read)
        if read is None:
            raise ConfigError(f"the config file {source} is empty: write at least one key, such as 'sparsifier: topk'")
        if not isinstance(read, dict):
            given = repr(read)[:160]
            raise ConfigError(f"the config file {source} holds {given}: lines of the form 'key: value' are needed")
        return {str(key): value for key, value in read.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain names, numbers and dicts, which ``load`` turns into an equal config."""
        plain: dict[str, Any] = {}
        for key in type(self).model_fields:
            value = getattr(self, key)
            if isinstance(value, Settings):
                value = resolving.settings_of(value) if isinstance(value, Codec) else value.model_dump(mode="json")
            plain[key] = value
        return plain

    def __str__(self) -> str:
        """A table of the settings, which is also YAML: ``load`` turns it into an equal config."""
        rows = {key: value for key, value in self.to_dict().items() if value is not None}
        width = 1 + max(map(len, rows))
        return "\n".join(f"{key + ':':<{width}} {resolving.inline(value)}" for key, value in rows.items())

    def shared(self) -> dict[str, Any]:
        """``to_dict`` of what must be equal on all ranks."""
        return {key: value for key, value in self.to_dict().items() if key != "threads"}

    def packages(self) -> dict[str, str]:
        """Name and version of each other package whose codecs or exchange this config uses."""
        chosen = [getattr(one, key) for one in (self, *self.variants.values()) for key in type(self).model_fields]
        return plugins.versions(codec for codec in chosen if isinstance(codec, Codec))

    def digest(self) -> int:
        """32 bits of a hash of ``shared``, which travel in each container."""
        shared = self.shared()
        shared["overrides"] = list(shared["overrides"].items())  # the first that matches counts
        text = json.dumps(shared, sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
