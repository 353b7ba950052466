"""Writes the golden containers: `python tests/golden/make.py [--replace] [FILE ...]`, from the root of the checkout.

For each registered codec (and a few variants), there is a small container, <name>.hvdr, and the dense tensor to which
it decodes, <name>.npy. A few are there in version 2 too: <name>.hvdr2 and <name>-2.npy. Golden containers must decode
to the same values for ever, so existing files are not overwritten. Use --replace only for a codec whose format has not
been released yet.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent.parent))

from hvd_deepreduce.codecs.interfaces import RngKey  # noqa: E402
from hvd_deepreduce.config import Config  # noqa: E402
from hvd_deepreduce.pipeline import Pipeline  # noqa: E402
from hvd_deepreduce.wire import frame  # noqa: E402
from hvd_deepreduce.wire import standalone as wire  # noqa: E402
from tests import cases  # noqa: E402

KEY = RngKey(101, 102, 103, 1)
DIGEST = 0x01020304


def gradient(numel: int, dtype: type = np.float32) -> np.ndarray:
    """The same numbers on every machine: cubes of a multiplicative sequence, exact in float32."""
    words = (np.arange(1, numel + 1, dtype=np.uint64) * 2654435761 % 2**32) >> np.uint64(24)
    return ((words.astype(np.float64) - 128) ** 3 / 2**16).astype(dtype)


def golden() -> dict[str, tuple[Config, np.ndarray]]:
    """The config and the gradient of each container, by name."""
    x = gradient(211)
    load, top = Config.load, {"name": "topk", "density": 0.2}
    found = {
        f"sparsifier-{name}": (cases.config(name, None if one.shared_randomness else "raw", "raw"), x)
        for name, one in cases.SPARSIFIERS.items()
    }
    for name, index in cases.INDEX.items():
        found[f"index-{name}"] = load(sparsifier=top, index=index, value="half"), x
    for name, value in cases.VALUE.items():
        found[f"value-{name}"] = load(sparsifier=top, index="rice", value=value), x
    for name, joint in cases.JOINT.items():
        found[f"joint-{name}"] = load(sparsifier=top, joint=joint), x
    wrong = x[:50].copy()
    wrong[[7, 8, 9]] = [np.nan, np.inf, -np.inf]
    plain = {"sparsifier": top, "index": "rice"}
    found |= {
        "empty": (load(plain, value="qsgd"), x[:0]),
        "one": (load(plain, value="qsgd"), x[:1]),
        "nonfinite": (load(plain, value="qsgd"), wrong),
        "float64-raw": (load(plain, value="raw"), gradient(211, np.float64) / 3),
        "float64-qsgd": (load(plain, value="qsgd"), gradient(211, np.float64) / 3),
        "half-float16": (load(plain, value={"name": "half", "dtype": "float16"}), x),
        "qsgd-l2-3bits": (load(plain, value={"name": "qsgd", "bits": 3, "bucket_size": 16, "norm": "l2"}), x),
        "dense-qsgd": (load(sparsifier="none", value="qsgd"), x),
        # Codecs that sort values: with an order section, and with indices in the order of the values.
        "dense-fit_poly": (load(sparsifier="none", value="fit_poly"), x),
        "randomk-fit_poly": (load(sparsifier={"name": "randomk", "density": 0.3}, value="fit_poly"), x),
        "raw-fit_poly": (load(sparsifier=top, index="raw", value="fit_poly"), x),
        "keys-fit_poly": (load(sparsifier=top, index="raw", value="fit_poly", force_index=True), x),
        "randomk-rice": (load(sparsifier={"name": "randomk", "density": 0.3}, index="rice", value="half"), x),
        # Written by earlier releases: all keys of a dense tensor.
        **{f"dense-keys-{name}": (load(sparsifier="none", joint=name), x) for name in ("sketchml", "skcompress")},
        "randomk-qsgd": (load(sparsifier={"name": "randomk", "density": 0.3}, value="qsgd"), x),
        **{f"dense-{name}": (load(sparsifier="none", joint=name), x) for name in ("sketchml", "skcompress")},
        "uniform-3bits-rotated": (
            load(plain, value={"name": "uniform", "bits": 3, "bucket_size": 16, "rotate": True}), x,
        ),
        "uniform-11bits-fitted": (load(plain, value={"name": "uniform", "bits": 11, "fit_scale": True}), x),
        "dense-quantile-both_signs": (
            load(sparsifier="none", value={"name": "quantile", "buckets": 16, "separate_signs": False}), x,
        ),
        "quantile-lloyd": (load(plain, value={"name": "quantile", "buckets": 4, "splits": "lloyd"}), x),
        "dense-quantile-huffman": (
            load(sparsifier="none", value={"name": "quantile", "buckets": 16, "entropy": "huffman"}),
            np.where(np.arange(211) % 3, np.float32(0), x),
        ),
    }
    return found


def golden_2() -> dict[str, tuple[Config, np.ndarray]]:
    """The config and the gradient of each container of version 2, <name>.hvdr2, by name."""
    found = golden()
    top = found["index-rice"][0].sparsifier
    return {
        name: found[name] for name in ("index-rice", "value-sign", "joint-densestream", "nonfinite", "empty",
                                       "float64-qsgd", "dense-qsgd", "dense-fit_poly", "raw-fit_poly", "keys-fit_poly",
                                       "randomk-qsgd")
    } | {"auto": (Config.load(sparsifier=top, index="auto", value="half"), gradient(211))}  # fmt: skip


def shared_2(config: Config) -> frame.Shared:
    """What receivers know of the config. The digest is fixed, as a later release may have more settings."""
    return dataclasses.replace(Pipeline(config).shared, digest=DIGEST)


def encode(config: Config, x: np.ndarray) -> np.ndarray:
    return Pipeline(config).encode(x, None, KEY)


def encode_2(config: Config, x: np.ndarray) -> np.ndarray:
    pipeline = Pipeline(config)
    pipeline.shared = pipeline.composed.shared = shared_2(config)
    return pipeline.encode(x, None, KEY, version=2)


def decode(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    container = wire.unpack(data)
    out = np.empty(container.numel, dtype)
    Pipeline(Config.load()).decode([container], out)
    return out


def decode_2(data: np.ndarray, config: Config, x: np.ndarray) -> np.ndarray:
    (containers,) = frame.split(data, 1, [frame.Expected(shared_2(config), x.size, x.dtype, KEY)])
    out = np.empty_like(x)
    Pipeline(config).decode(containers, out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "names", nargs="*", help="files to write, such as index-rice.hvdr; default: all that do not exist"
    )
    parser.add_argument("--replace", action="store_true", help="overwrite the named files")
    asked = parser.parse_args()
    all_of_them = {f"{name}.hvdr": one for name, one in golden().items()}
    all_of_them |= {f"{name}.hvdr2": one for name, one in golden_2().items()}
    unknown = [name for name in asked.names if name not in all_of_them]
    if unknown:
        parser.error(f"unknown names {', '.join(unknown)}; choose from {', '.join(all_of_them)}")
    if asked.replace and not asked.names:
        parser.error("--replace needs the names of the containers to overwrite")
    for name in asked.names or all_of_them:
        file = FOLDER / name
        if file.exists() and not asked.replace:
            if asked.names:
                parser.error(f"{file.name} exists and must decode for ever; --replace overwrites it")
            continue
        config, x = all_of_them[name]
        if file.suffix == ".hvdr":
            data = encode(config, x)
            decoded, expected = decode(data, x.dtype), file.with_suffix(".npy")
        else:
            data = encode_2(config, x)
            decoded, expected = decode_2(data, config, x), file.with_name(f"{file.stem}-2.npy")
        file.write_bytes(data.tobytes())
        np.save(expected, decoded)
        print(f"{file.name}: {data.size} bytes")


if __name__ == "__main__":
    main()
