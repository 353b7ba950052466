"""Every setting of every codec, and containers of every form, as the fuzzer's valid inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import numpy as np
from pydantic import ValidationError

from hvd_deepreduce.codecs.interfaces import Codec, Registry, RngKey, index_codecs, joint_codecs, value_codecs
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.standalone import Container
from tests import cases

KEY = RngKey(1, 2, 3)
REGISTRIES = {"index": index_codecs, "value": value_codecs, "joint": joint_codecs}
# (elements, density): no element, one, and enough to pass the thresholds of vectors (16, 64, 256 elements), of Huffman
# streams (1024) and of rANS lanes (2048, 32768).
SIZES = [(0, 1.0), (1, 1.0), (17, 0.5), (70, 0.95), (400, 0.05), (700, 0.5), (1200, 0.9), (2300, 0.95), (37_000, 0.9)]
USUAL = [(400, 0.05), (1200, 0.9)]
"""The sizes for settings other than the defaults."""


def _values(annotation: Any, metadata: list[Any]) -> list[Any]:
    """The ends of what a field allows."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if annotation is bool:
        return [False, True]
    found = [one for part in get_args(annotation) for one in _values(part, metadata)]
    if annotation is type(None):
        return [None]
    for limit in metadata:
        if hasattr(limit, "ge"):
            found.append(limit.ge)
        if hasattr(limit, "le"):
            found.append(limit.le)
        if hasattr(limit, "lt"):
            found.append(0.999 * limit.lt)
    return found


def variants(codec: type[Codec], **settings: Any) -> Iterator[Codec]:
    """The codec with its defaults, and with each setting at each end of its range; for one that has no effect beside
    the defaults, with each value of the setting that is the reason."""
    yield codec(**settings)
    for name, field in codec.model_fields.items():
        for value in _values(field.annotation, field.metadata):
            try:
                made = codec(**{**settings, name: value})
            except ValidationError:
                continue  # not without another setting
            reasons = [because for setting, because, _ in made.unused_settings() if setting == name]
            if not reasons:
                yield made
            for because in reasons:
                other = codec.model_fields[because]
                for choice in _values(other.annotation, other.metadata):
                    made = codec(**{**settings, name: value, because: choice})
                    if name not in (setting for setting, _, _ in made.unused_settings()):
                        yield made


def encoded(config: Config, numel: int, dtype: Any = np.float32, key: RngKey = KEY) -> bytes:
    return Pipeline(config).encode(cases.random(numel, dtype, numel), None, key).tobytes()


def _sparsifier(density: float) -> dict[str, Any]:
    return {"name": "none"} if density == 1.0 else {"name": "topk", "density": density}


def _config(**settings: Any) -> Config:
    """A config whose containers are read, and which keeps no residual: some settings allow none."""
    return Config.load(error_feedback=False, **settings)


def of_codec(kind: str, name: str) -> Iterator[bytes]:
    """Containers of one codec."""
    registry: Registry = REGISTRIES[kind]
    codecs = list(variants(registry.by_name[name], **cases.SETTINGS.get(name, {})))
    for number, codec in enumerate(codecs):
        for numel, density in USUAL if number else SIZES:
            others = {"index": {"value": "raw"}, "value": {"index": "raw"}, "joint": {}}[kind]
            sparsifier = _sparsifier(density)
            if kind == "index":
                sparsifier = {"name": "topk", "density": density}
            elif sparsifier["name"] == "none":
                others = {}  # no indices
            yield encoded(_config(sparsifier=sparsifier, **{kind: codec}, **others), numel)
        if kind != "index":
            yield encoded(_config(sparsifier="none", **{kind: codec}), 300)
            yield encoded(_config(sparsifier=_sparsifier(0.3), **{kind: codec}), 300, np.float64)


def of_every_form() -> Iterator[bytes]:
    """Containers with every optional field: shared selection, order, order of the values, joint, not finite."""
    for config, gradient in every_form():
        yield Pipeline(config).encode(gradient, None, KEY).tobytes()


def every_form() -> Iterator[tuple[Config, np.ndarray]]:
    """Configs and gradients of which containers have every optional field."""

    def of(config: Config, numel: int, dtype: Any = np.float32) -> tuple[Config, np.ndarray]:
        return config, cases.random(numel, dtype, numel)

    for index in cases.INDEX:
        yield of(_config(sparsifier=_sparsifier(0.1), index=cases.INDEX[index], value="raw"), 400)
    for value in cases.VALUE:
        for sparsifier in (_sparsifier(0.1), {"name": "none"}, {"name": "randomk", "density": 0.1}):
            yield of(_config(sparsifier=sparsifier, value=cases.VALUE[value]), 400)
            yield of(_config(sparsifier=sparsifier, value=cases.VALUE[value]), 300, np.float64)
        if cases.VALUE[value].sorts:
            for index in ("raw", "rice", "bloom"):
                forced = {"index": index, "value": value, "force_index": True}
                yield of(_config(sparsifier=_sparsifier(0.1), **forced), 400)
    yield of(_config(sparsifier={"name": "randomk", "density": 0.1}, index="rice"), 400)
    for joint in cases.JOINT:
        for density in (0.1, 1.0):
            yield of(_config(sparsifier=_sparsifier(density), joint=cases.JOINT[joint]), 400)
    for sparsifier in cases.SPARSIFIERS.values():
        yield of(_config(sparsifier=sparsifier), 400)
    yield _config(sparsifier=_sparsifier(0.1)), np.full(50, np.nan, np.float32)


def section_of(container: Container, kind: str) -> bytes:
    """The section that a target of this kind reads."""
    return (container.indices if kind == "index" else container.values).tobytes()
