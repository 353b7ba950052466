"""Input tensors for all codecs, and all registered codecs by name.

A registered codec is in these dictionaries without further work. ``SETTINGS`` has the settings of codecs whose settings
have no default, or whose default selects too few elements of a tensor of a few hundred elements.
"""

import numpy as np

import hvd_deepreduce.config.settings  # noqa: F401  (registers the codecs)
from hvd_deepreduce.codecs.interfaces import (
    Codec,
    IndexCodec,
    JointCodec,
    Registry,
    RngKey,
    Sparsifier,
    ValueCodec,
    index_codecs,
    joint_codecs,
    sparsifiers,
    value_codecs,
)
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline, bundle
from tests.pairs import pairs

SETTINGS: dict[str, dict] = {
    "topk": {"density": 0.1},
    "randomk": {"density": 0.1},
    "threshold": {"threshold": 0.5},
}


def made(registry: Registry) -> dict[str, Codec]:
    return {name: codec(**SETTINGS.get(name, {})) for name, codec in sorted(registry.by_name.items())}


SPARSIFIERS: dict[str, Sparsifier] = made(sparsifiers)
INDEX: dict[str, IndexCodec] = made(index_codecs)
VALUE: dict[str, ValueCodec] = made(value_codecs)
JOINT: dict[str, JointCodec] = made(joint_codecs)

SELECTING = [name for name, one in SPARSIFIERS.items() if not one.sends_all]
COMBINATIONS: list[tuple[str, str | None, str | None, str | None]] = [
    *((sparsifier, index, value, None) for value, index, sparsifier in pairs(VALUE, INDEX, SELECTING)),
    *((name, None, value, None) for name in SPARSIFIERS if name not in SELECTING for value in VALUE),
    *((sparsifier, None, None, joint) for sparsifier in SPARSIFIERS for joint in JOINT),
]
"""Arguments of ``config``: every pair of a sparsifier, an index codec and a value codec, and every sparsifier with
every joint codec."""


def config(sparsifier: str, index: str | None, value: str | None, joint: str | None = None, **settings) -> Config:
    """A config of the named codecs, with the settings in ``SETTINGS``; no index codec if all are sent."""
    return Config.load(
        sparsifier=SPARSIFIERS[sparsifier],
        index=INDEX[index] if index and not SPARSIFIERS[sparsifier].sends_all else None,
        value=VALUE[value] if value else None,
        joint=JOINT[joint] if joint else None,
        **settings,
    )


CONFIGS: dict[str, Config] = {
    **{f"sparsifier {name}": config(name, "rice", "raw") for name in SPARSIFIERS},
    **{f"index {name}": config("topk", name, "raw") for name in INDEX},
    **{f"value {name}": config("topk", "rice", name) for name in VALUE},
    **{f"dense value {name}": config("none", None, name) for name in VALUE},
    **{f"randomk value {name}": config("randomk", None, name) for name in VALUE},
    **{f"raw keys, value {name}": config("topk", "raw", name, force_index=True) for name in VALUE if VALUE[name].sorts},
    **{f"joint {name}": config("topk", None, None, name) for name in JOINT},
    **{f"dense joint {name}": config("none", None, None, name) for name in JOINT},
}
"""Each registered codec beside plain ones, the ways to send all elements or a selection that receivers repeat, and raw
indices in the order of the values."""


def random(numel: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel).astype(dtype)


def heavy(count: int, seed: int = 0) -> np.ndarray:
    """Values with heavy tails, float32."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * rng.lognormal(size=count)).astype(np.float32)


def inputs() -> dict[str, np.ndarray]:
    """Finite one-dimensional float32 and float64 tensors, by name."""
    rng = np.random.default_rng(7)
    wide = (10.0 ** rng.uniform(-38, 38, 211) * rng.choice([-1, 1], 211)).astype(np.float32)
    mostly_zero = np.zeros(500, np.float32)
    mostly_zero[rng.choice(500, 7, replace=False)] = 1.5
    limits = np.array([3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 0.0, -0.0, 1.0], np.float32)
    return {
        "empty": np.empty(0, np.float32),
        "one": np.array([-2.5], np.float32),
        "one_zero": np.zeros(1, np.float32),
        "two": np.array([1.0, -1.0], np.float32),
        "all_zero": np.zeros(130, np.float32),
        "all_equal": np.full(129, 0.75, np.float32),
        "all_negative": -np.abs(random(200)) - np.float32(0.1),
        "prime": random(307),
        "mostly_zero": mostly_zero,
        "denormals": (rng.integers(1, 2**20, 151) * 2.0**-149).astype(np.float32),
        "1e-38_to_1e38": wide,
        "limits": limits,
        "float64": random(257, np.float64),
        "float64_beyond_float32": np.array([1e300, -1e-300, 1e39, 0.5, -1e308, 5e-324] * 20),
        "thousand": random(1024),
    }


EQUAL: dict[str, np.ndarray] = {
    **{name: inputs()[name] for name in ("empty", "one", "one_zero", "all_equal", "all_zero")},
    "largest": np.full(1009, np.finfo(np.float32).max, np.float32),
    "smallest": np.full(1009, 1e-45, np.float32),
    "wide": np.array([1e-38, -1e38] * 500, np.float32),
}
"""Values that codecs with buckets of similar values keep as they are."""


def slices(pipeline: Pipeline, sizes: list[int], key: RngKey) -> list[bundle.Slice]:
    """Slices of these sizes, one after the other, each of a parameter of its own."""
    ends = np.cumsum(sizes).tolist()
    return [
        bundle.Slice(pipeline, (end - size, end), key._replace(parameter=key.parameter + number))
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def check_support(found: np.ndarray, numel: int, count: int) -> None:
    """``found`` is what an index codec may give: ``count`` indices in order, all below ``numel``."""
    assert found.dtype == np.uint32 and found.size == count
    assert np.all(found[1:] > found[:-1]) and (not count or found[-1] < numel)


def some_indices(numel: int, count: int, seed: int = 1) -> np.ndarray:
    """Sorted indices: ``count`` of them, or slightly fewer of a huge tensor, where duplicates are dropped."""
    rng = np.random.default_rng(seed)
    if numel < 1 << 26:
        return np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)
    return np.unique(rng.integers(0, numel, count, dtype=np.uint64)).astype(np.uint32)
