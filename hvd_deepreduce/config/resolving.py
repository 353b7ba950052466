"""From what a user gives to the values of all keys of a config: names become codecs, and defaults fill the rest."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from hvd_deepreduce.codecs.interfaces import (
    Codec,
    Registry,
    index_codecs,
    joint_codecs,
    meant,
    sparsifiers,
    value_codecs,
)
from hvd_deepreduce.config import plugins, unused_settings
from hvd_deepreduce.config.error_feedback import memories
from hvd_deepreduce.config.local_sgd import LocalSettings
from hvd_deepreduce.config.schedule import DensitySchedule
from hvd_deepreduce.exchange.settings import AutoExchange, ReduceScatter, exchanges

MOST_VALUES = 100_000
"""Of a file; a config with an override for each tensor of a model has less."""


class ConfigError(ValueError):
    """A config that cannot be used; says which key, what was given and what is allowed."""


def _sentence(prefix: str, error: Any, fields: Any) -> str:
    key = ".".join([prefix, *map(str, error["loc"])] if prefix else map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        allowed = ", ".join(sorted(fields)) or "none"
        name, where = str(error["loc"][-1]), prefix or "a config"
        hint = _elsewhere(name, error["input"], fields if prefix else {**fields, "density": None})
        return f"{key} is not a key of {where} (given: {error['input']!r}); its keys are: {allowed}{hint}"
    if error["type"] == "missing":
        return f"{key} is missing and has no default"
    hint = ""
    if error["type"] == "literal_error":
        hint = meant(error["input"], re.findall("'([^']*)'", error["ctx"]["expected"]))
    elif key.endswith("density"):
        hint = ". A density is the share of elements that are sent: 0.01 is 1%"
    return f"{key} is {error['input']!r}, which is not allowed: {error['msg'].replace('Input', 'it', 1)}{hint}"


_DENSITIES = {"compress_ratio", "compression_ratio", "k", "ratio", "sparsity", "topk"}
"""What other libraries call a density."""


def _elsewhere(name: str, value: object, fields: Mapping[str, Any]) -> str:
    """The key that may have been meant by one that ``fields`` do not have, of a config or of one of its parts."""
    if name.lower() in _DENSITIES and "density" in fields:
        return ". Did you mean 'density', the share of elements that are sent (0.01 is 1%)?"
    hint = meant(name, fields)
    if hint or "sparsifier" not in fields:
        return hint
    parts = {kind: field.default for kind, field in fields.items() if kind in REGISTRIES}
    kinds = [kind for kind, part in parts.items() if part is not None and name in type(part).model_fields]
    kinds += ["memory"] * any(name in one.model_fields for one in memories.by_name.values())
    kinds += ["local"] * (name in LocalSettings.model_fields)
    found = [f"{kind}={{{name!r}: {value!r}}}" for kind in dict.fromkeys(kinds)]
    return f". Did you mean {' or '.join(found)}?" if found else ""


def settings_of(given: Any) -> dict[str, Any]:
    """A codec, its name or its mapping as a mapping."""
    if isinstance(given, Codec):
        return {"name": given.name, **given.model_dump()}
    return {str(key): value for key, value in given.items()} if isinstance(given, Mapping) else {"name": given}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` over ``base``. A codec's mapping without a name changes settings of the codec that ``base`` has.

    Args:
        defaults: of all keys.

    Raises:
        ConfigError: there is no codec whose settings could be changed, or the density is given twice.
    """
    changed = dict(changes)
    if "density" in changed:
        density = changed.pop("density")
        sparsifier = settings_of(changed["sparsifier"]) if "sparsifier" in changed else {}
        if "density" in sparsifier:
            raise ConfigError(
                f"density is {density!r} and sparsifier.density is {sparsifier['density']!r}: they are the same "
                "setting, so give one of them"
            )
        changed["sparsifier"] = {**sparsifier, "density": density}
    for kind in REGISTRIES.keys() & changed.keys():
        change = changed[kind]
        if isinstance(change, Mapping) and "name" not in change:
            own = base.get(kind, defaults[kind])
            if own is None:
                raise ConfigError(f"{kind} is {change!r}, without a name, and there is no {kind} to change: add 'name'")
            changed[kind] = {**settings_of(own), **change}
    if isinstance(changed.get("local"), Mapping) and base.get("local"):
        changed["local"] = {**_plain_local(base["local"]), **changed["local"]}
    return {**base, **changed}


def _plain_local(given: Any) -> Any:
    return given.model_dump() if isinstance(given, LocalSettings) else given


def inline(value: Any) -> str:
    """A value as YAML in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("...\n").strip()


class UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def check_size(source: object, read: Any) -> None:
    """
    Raises:
        ConfigError: a file holds more than any config has; its aliases may stand for millions of values, or for itself.
    """
    waiting, count = [read], 0
    while waiting:
        one = waiting.pop()
        count += 1
        if count > MOST_VALUES or (isinstance(one, int) and one.bit_length() > 64):
            what = f"more than {MOST_VALUES:,} values" if count > MOST_VALUES else "an integer of more than 64 bits"
            raise ConfigError(f"the config file {source} holds {what}, and no config does")
        if isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            waiting += one


def build(model: type[BaseModel], prefix: str, settings: Mapping[str, Any]) -> Any:
    try:
        return model(**settings)
    except ValidationError as error:
        sentences = [
            str(one["ctx"]["error"]) if one["type"] == "value_error" else _sentence(prefix, one, model.model_fields)
            for one in error.errors()
        ]
    raise ConfigError("; ".join(sentences))


def _codec(registry: Registry, given: Any) -> Any:
    if isinstance(given, Codec):
        return given
    settings = settings_of(given)
    name = settings.pop("name", None)
    if isinstance(name, str) and name not in registry.by_name:
        plugins.load()
    if not isinstance(name, str) or name not in registry.by_name:
        raise ConfigError(
            f"{registry.kind} is {given!r}; it must be a name, or a mapping with the key 'name', out of: "
            f"{', '.join(sorted(registry.by_name))}{meant(name, registry.by_name)}"
        )
    return build(registry.by_name[name], registry.kind, settings)


REGISTRIES = {
    "sparsifier": sparsifiers,
    "index": index_codecs,
    "value": value_codecs,
    "joint": joint_codecs,
    "exchange": exchanges,
    "memory": memories,
}


def resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with codecs in place of their names and mappings."""
    made = dict(given)
    for kind, registry in REGISTRIES.items():
        if made.get(kind) is not None or (kind in made and kind in ("sparsifier", "exchange", "memory")):
            made[kind] = _codec(registry, made[kind])
    if isinstance(made.get("local"), Mapping):
        made["local"] = build(LocalSettings, "local", made["local"])
    if isinstance(schedule := made.get("density_schedule"), Mapping):
        named = {str(key): value for key, value in schedule.items()}
        made["density_schedule"] = build(DensitySchedule, "density_schedule", named)
    return made


def complete(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of a config. Where ``index``, ``value`` and ``scope`` are not given, they are as others need them."""
    every = {**defaults, **given}
    instead = unused_settings.instead_of_index_and_value(every)
    if "scope" not in given:
        every["scope"] = _default_scope(every)
    if "index" not in given and not unused_settings.needs_index(every):
        every["index"] = None
    if "value" not in given and instead:
        every["value"] = None
    return every


def _default_scope(config: Mapping[str, Any]) -> str:
    """The scope where none is given: the fastest one in which all settings have an effect.

    Args:
        config: all other keys.
    """
    if sums_vectors(config):
        return "model"
    of_tensors = config["min_elements"] is not None or bool(config["overrides"])
    return "tensor" if of_tensors and config["selection"] != "tensor" else "bucket"


def sums_vectors(config: Mapping[str, Any]) -> bool:
    """Whether the exchange sums whole vectors, and so has no scope ``tensor``."""
    exchange = config["exchange"]
    whole = unused_settings.instead_of_index_and_value(config)
    return isinstance(exchange, AutoExchange | ReduceScatter) or exchange in whole


def without_unused(
    given: dict[str, Any], base: Mapping[str, Any], changes: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """``given``, the result of ``merged``, with codecs as objects, and without settings of ``base`` that ``changes``
    leave without effect."""
    changed = set(changes) | ({"sparsifier", "sparsifier.density"} if "density" in changes else set())
    for kind in REGISTRIES.keys() & changes.keys():
        changed |= {f"{kind}.{setting}" for setting in settings_of(changes[kind])}
    if isinstance(changes.get("local"), Mapping):
        changed |= {f"local.{setting}" for setting in changes["local"]}
    made = resolved(given)
    # An index codec that was chosen for the indices of another sparsifier, and codecs that were not needed.
    every = complete(made, defaults)
    needs_index, instead = unused_settings.needs_index(every), unused_settings.instead_of_index_and_value(every)
    before = settings_of(base.get("sparsifier", defaults["sparsifier"]))["name"]
    dropped = set() if needs_index or every["sparsifier"].name == before else {"index"}
    if changed & {"sparsifier", "joint", "exchange"}:
        needed = {"index": needs_index, "value": not instead}
        dropped |= {kind for kind in needed if needed[kind] and every[kind] is None}
    if changes.keys() & {"exchange", "scope"} == {"exchange"} and base.get("scope") == "tensor":
        dropped |= {"scope"} if sums_vectors(every) else set()
    if every["hierarchical"] is not False and "hierarchical" in changes:
        dropped |= {"min_elements"} | ({"scope"} if base.get("scope") == "tensor" else set())
    kept = {key: value for key, value in made.items() if key in changes or key not in dropped}
    for unused in unused_settings.find(complete(kept, defaults), defaults):
        if unused.setting not in changed and changed & set(unused.because):
            if unused.setting == "memory":  # the job's optimizer has no momentum of its own
                warnings.warn(f"the config was taken without its memory: {unused.sentence}", stacklevel=3)
            kind, _, setting = unused.setting.partition(".")
            codec = kept.pop(kind)
            if setting:
                kept[kind] = codec.model_copy(update={setting: type(codec).model_fields[setting].default})
    return kept
