"""A receiver with a config decodes what that config gives, for the parameter and the step that it is at."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from hvd_deepreduce.codecs.index.packed import Packed
from hvd_deepreduce.codecs.index.rice import Rice
from hvd_deepreduce.codecs.interfaces import IndexCodec, RngKey
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.standalone import ContainerError
from tests import cases

KEY = RngKey(1, 2, 3)
NUMEL = 300

CONFIGS = {
    **cases.CONFIGS,
    **{f"auto {name}": cases.config("topk", "auto", name) for name in ("fit_poly", "qsgd")},
}
GRADIENTS = {
    "random": cases.random(NUMEL),
    "float64": cases.random(NUMEL, np.float64),
    "nan": np.where(np.arange(NUMEL) == 7, np.float32("nan"), cases.random(NUMEL)).astype(np.float32),
    "zeros": np.zeros(NUMEL, np.float32),
    "few": np.where(np.arange(NUMEL) % 100 == 7, np.float32(1), np.float32(0)),
    "clustered": np.where(np.arange(NUMEL) // 30 == 2, cases.random(NUMEL), np.float32(0)).astype(np.float32),
    "one": np.float32([2]),
    "none": np.float32([]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_gives_is_accepted(name: str) -> None:
    """All fall-backs too: not finite, nothing kept, one element, indices in the order of the values."""
    pipeline = Pipeline(CONFIGS[name])
    for x in GRADIENTS.values():
        data = pipeline.encode(x, None, KEY)
        pipeline.decode([wire.unpack(data)], np.empty_like(x), 1.0, KEY._replace(rank=5))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_another_config_gives_is_refused(name: str) -> None:
    pipeline, x = Pipeline(CONFIGS[name]), GRADIENTS["random"]
    ours = CONFIGS[name]
    for other, config in CONFIGS.items():
        container = wire.unpack(Pipeline(config).encode(x, None, KEY))
        out = np.full_like(x, 7)
        try:
            pipeline.decode([container], out, 1.0, KEY)
        except ContainerError as error:
            assert np.all(out == 7)
            said = str(error)
            assert "the container of rank 0 cannot be read: it has sparsifier" in said and "cannot give (" in said
            assert repr(ours.sparsifier.name) in said
            continue
        raw = container.sparsifier == container.index == 0 and container.value == 1 and not container.joint
        joint = None if ours.joint is None else ours.joint.id
        same = container.value == (joint or (ours.value and ours.value.id)) and container.joint == bool(joint)
        assert raw or same, other
        assert container.sparsifier in (0, ours.sparsifier.id)


def test_containers_without_a_config() -> None:
    """Stand-alone use: any codec, any key; but the dtype is that of the result."""
    data = Pipeline(CONFIGS["joint three_lc"]).encode(GRADIENTS["random"], None, KEY)
    out = np.empty(NUMEL, np.float32)
    Pipeline(CONFIGS["value qsgd"]).decode([wire.unpack(data)], out)
    assert np.count_nonzero(out)


@pytest.mark.parametrize("key", [None, KEY])
def test_another_dtype(key: RngKey | None) -> None:
    """1e300 is finite in float64, and infinite in float32."""
    pipeline = Pipeline(CONFIGS["value raw"])
    huge = wire.unpack(pipeline.encode(np.full(NUMEL, 1e300), None, KEY))
    good = wire.unpack(pipeline.encode(GRADIENTS["random"], None, KEY))
    out = np.full(NUMEL, 7, np.float32)
    with pytest.raises(ContainerError, match="rank 1 cannot be read: its tensor is float64, and this one is float32"):
        pipeline.decode([good, huge], out, 1.0, key)
    assert np.all(out == 7)
    if key:
        with pytest.raises(ContainerError, match="rank 0 .* its tensor is float32, and this one is float64"):
            pipeline.decode([good], np.empty(NUMEL), 1.0, key)
    else:  # stand-alone, a sum may be wider
        pipeline.decode([good], np.empty(NUMEL), 1.0)


@pytest.mark.parametrize(
    "other", [KEY._replace(seed=9), KEY._replace(parameter=77), KEY._replace(step=123456), KEY._replace(step=2)]
)
def test_another_parameter_or_step(other: RngKey) -> None:
    pipeline = Pipeline(CONFIGS["value raw"])
    good, foreign = (wire.unpack(pipeline.encode(GRADIENTS["random"], None, key)) for key in (KEY, other))
    out = np.empty(NUMEL, np.float32)
    with pytest.raises(ContainerError) as info:
        pipeline.decode([good, good, foreign], out, 1.0, KEY)
    assert (
        f"the container of rank 2 cannot be read: it has seed {other.seed}, parameter {other.parameter} and step "
        f"{other.step}, and this rank is at seed 1, parameter 2 and step 3"
    ) in str(info.value)
    long = KEY._replace(step=2**32 + 3)  # the header has 32 bits of it
    pipeline.decode([good], out, 1.0, long)


class Silent(Rice):
    """Resolves to a codec that it does not announce."""

    def resolve(self, indices: np.ndarray, numel: int) -> IndexCodec:
        return Packed()


class Honest(Silent):
    @property
    def choices(self) -> Sequence[IndexCodec]:
        return Rice(), Packed()


def test_an_index_codec_that_picks_among_others_says_so() -> None:
    config = CONFIGS["value raw"]
    x = GRADIENTS["random"]
    with pytest.raises(ValueError, match=r"'rice' resolved to 'packed', which is not among its choices.*add it"):
        Pipeline(config.model_copy(update={"index": Silent()})).encode(x, None, KEY)
    pipeline = Pipeline(config.model_copy(update={"index": Honest()}))
    container = wire.unpack(pipeline.encode(x, None, KEY))
    assert container.index == Packed.id
    pipeline.decode([container], np.empty_like(x), 1.0, KEY)


def test_flags_that_no_config_gives() -> None:
    pipeline = Pipeline(CONFIGS["value raw"])
    container = wire.unpack(pipeline.encode(GRADIENTS["random"], None, KEY))
    for changes in ({"joint": True}, {"ordered": True}, {"index": 0}, {"sparsifier": 255}, {"value": 254}):
        with pytest.raises(ContainerError, match="rank 0 cannot be read"):
            pipeline.decode([dataclasses.replace(container, **changes)], np.empty(NUMEL, np.float32), 1.0, KEY)
