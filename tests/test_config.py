import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from hvd_deepreduce import Config, ConfigError
from hvd_deepreduce.codecs.index.raw import Raw as RawIndex
from hvd_deepreduce.codecs.interfaces import (
    IndexCodec,
    Registry,
    RngKey,
    Sparsifier,
    ValueCodec,
    index_codecs,
    joint_codecs,
    sparsifiers,
    value_codecs,
)
from hvd_deepreduce.codecs.sparsify.topk import TopK
from hvd_deepreduce.codecs.value.qsgd import QSGD
from hvd_deepreduce.codecs.value.raw import Raw
from tests import cases

REGISTRIES = {"sparsifier": sparsifiers, "index": index_codecs, "value": value_codecs, "joint": joint_codecs}
CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("**/*.yaml"))


def load_text(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Config.load(path)


def refused(message, *args, **kwargs):
    with pytest.raises(ConfigError, match=message):
        Config.load(*args, **kwargs)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_file_loads_and_comes_back(path):
    config = Config.load(path)
    assert config == Config.load(str(path)) == Config.load(config) == Config.load(config.to_dict())
    assert config.digest() == Config.load(yaml.safe_load(yaml.safe_dump(config.to_dict()))).digest()
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_defaults_keyword_arguments_and_overrides(tmp_path):
    assert Config.load() == Config() == Config.load({})
    config = load_text(tmp_path, "sparsifier: {name: topk, density: 1e-2}\nvalue: raw\n")
    assert config.sparsifier == TopK(density=0.01) and config.value == Raw()
    changed = Config.load(config, value={"name": "qsgd", "bits": 4}, seed=9)
    assert changed.value == QSGD(bits=4) and changed.seed == 9 and changed.sparsifier == config.sparsifier
    assert Config.load(value=QSGD(bits=3)).value == QSGD(bits=3)
    with pytest.raises(ValidationError):
        config.seed = 3  # frozen


@pytest.mark.parametrize("source", ["smallest", Config.load("smallest"), Config.load("smallest").to_dict()])
def test_a_codec_without_a_name_keeps_that_of_the_source(source):
    smallest = Config.load("smallest")
    changed = Config.load(source, value={"bits": 6}, sparsifier={"density": 0.5})
    assert changed.value == smallest.value.model_copy(update={"bits": 6}) and changed.index == smallest.index
    assert changed.sparsifier == smallest.sparsifier.model_copy(update={"density": 0.5})
    assert Config.load(source, density=0.5).sparsifier == changed.sparsifier
    # With a name, it is another codec with that codec's defaults.
    assert Config.load(source, value={"name": "qsgd"}).value == QSGD()
    assert Config.load({"sparsifier": {"density": 0.5}}, sparsifier="randomk", density=0.1).to_dict()["sparsifier"] == {
        "name": "randomk", "density": 0.1,
    }  # fmt: skip
    assert Config.load("dgc_sampled_topk", sparsifier={"excess": 2.0}).to_dict()["sparsifier"]["sample"] == 0.001
    assert Config(density=0.3) == Config.load(density=0.3)


def test_digest_is_of_what_all_ranks_share():
    base = Config.load()
    assert 0 <= base.digest() < 2**32
    assert Config.load(threads=3).digest() == base.digest() and "threads" not in base.shared()
    others = [{"seed": 1}, {"value": "raw"}, {"value": {"name": "qsgd", "bits": 6}}, {"error_feedback": False},
              {"min_elements": 7}, {"sparsifier": {"name": "topk", "density": 0.02}}]  # fmt: skip
    digests = {Config.load(other).digest() for other in others} | {base.digest()}
    assert len(digests) == len(others) + 1


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        ({"sparsifer": "topk"}, "'sparsifier'"),
        ({"densty": 0.01}, "'density'"),
        ({"Scope": "model"}, "'scope'"),
        ({"sparsifier": {"densty": 0.01}}, "'density'"),
        ({"local": {"evry": 4}}, "'every'"),
        ({"sparsifier": "topkk"}, "'topk'"),
        ({"exchange": "all_gather"}, "'allgather'"),
        ({"scope": "modle"}, "'model'"),
        ({"value": {"name": "qsgd", "entropy": "huffmann"}}, "'huffman'"),
        ({"overrides": {"*": {"valu": "raw"}}}, "'value'"),
        ({"compress_ratio": 0.01}, r"'density', the share of elements that are sent \(0.01 is 1%\)"),
        ({"bits": 4}, "value={'bits': 4}"),
        ({"every": 4}, "local={'every': 4}"),
        ({"clip": 1.0}, "memory={'clip': 1.0}"),
        ({"momentum": 0.8}, "memory={'momentum': 0.8} or local={'momentum': 0.8}"),
    ],
)
def test_what_may_have_been_meant_is_said(settings, meant):
    with pytest.raises(ConfigError, match=rf"Did you mean {meant}\?$"):
        Config.load(settings)


@pytest.mark.parametrize("density", [50, 0, "1%", -0.1])
def test_a_density_that_is_none_says_what_one_is(density):
    with pytest.raises(ConfigError, match=r"A density is the share of elements that are sent: 0.01 is 1%$"):
        Config.load(density=density)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"colour": 3}, r"^colour is not a key of a config \(given: 3\); its keys are: .*error_feedback.*value$"),
        ({"sparsifier": {"name": "topk", "k": 3}}, "sparsifier.k is not a key of sparsifier .* density_of. Did you me"),
        ({"joint": {"columns": 1}}, "joint is {'columns': 1}, without a name, and there is no joint to change"),
        ({"density": 0.1, "sparsifier": {"density": 0.2}}, "density is 0.1 and sparsifier.density is 0.2: they are"),
        ({"density": 0.1, "sparsifier": "none"}, "sparsifier.density is not a key of sparsifier"),
        ({"density": 2}, "sparsifier.density is 2, which is not allowed"),
        ({"density": True}, "^sparsifier.density is True, which is not allowed: it should be a number. A density is"),
        ({"seed": True}, "^seed is True, which is not allowed: it should be a number$"),
        ({"threads": False}, "^threads is False, which is not allowed: it should be a number$"),
        ({"local": {"every": True}}, "^local.every is True, which is not allowed: it should be a number$"),
        ({"index": {"name": "rice", "b": 3}}, r"index.b is not a key of index .* its keys are: none$"),
        ({"sparsifier": "best"}, "sparsifier is 'best'; it must be a name, .* out of: .*randomk.*topk"),
        ({"sparsifier": ["topk"]}, r"sparsifier is \['topk'\]; it must be a name"),
        ({"index": 3}, "index is 3; it must be a name"),
        ({"value": {"name": ["raw"]}}, "value is .*; it must be a name"),
        ({"index": "qsgd"}, "index is 'qsgd'; it must be a name, .*rice"),
        ({"joint": "nothing"}, "joint is 'nothing'; it must be a name"),
        ({"sparsifier": None}, "^sparsifier is None; it must be a name"),
        ({"index": None}, "index is None; without a joint codec"),
        ({"value": None}, "value is None; without a joint codec"),
        ({"index": QSGD()}, "^index is QSGD.*, which is not allowed: .*IndexCodec"),
        ({"value": TopK()}, "^value is TopK.*, which is not allowed: .*ValueCodec"),
        ({"sparsifier": {"name": "threshold"}}, "^sparsifier.threshold is missing and has no default$"),
        ({"sparsifier": {"name": "topk", "density": 0}}, "^sparsifier.density is 0, .*greater than 0"),
        ({"sparsifier": {"name": "topk", "density": -0.5}}, "density is -0.5, .*greater than 0"),
        ({"sparsifier": {"name": "topk", "density": 1.5}}, "density is 1.5, .*less than or equal to 1"),
        ({"sparsifier": {"name": "topk", "density": float("nan")}}, "density is nan, which is not allowed"),
        ({"sparsifier": {"name": "topk", "density": float("inf")}}, "density is inf, which is not allowed"),
        ({"sparsifier": {"name": "randomk", "density": "some"}}, "density is 'some', .*valid number"),
        ({"sparsifier": {"name": "threshold", "threshold": float("nan")}}, "threshold is nan, .*finite"),
        ({"value": {"name": "qsgd", "bits": 9}}, "^value.bits is 9, .*less than or equal to 8$"),
        ({"value": {"name": "qsgd", "bits": 6.5}}, "value.bits is 6.5, .*integer"),
        ({"value": {"name": "qsgd", "norm": "l1"}}, "value.norm is 'l1', .*'max' or 'l2'"),
        ({"value": {"name": "qsgd", "bits": 1, "bucket_size": 0}}, "value.bits is 1.*; value.bucket_size is 0"),
        ({"error_feedback": "yes"}, "error_feedback is 'yes', .*boolean"),
        ({"error_feedback": 1}, "error_feedback is 1, .*boolean"),
        ({"min_elements": -1}, "min_elements is -1, .*greater than or equal to 0"),
        ({"min_elements": "many"}, "min_elements is 'many', .*integer"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296, .*less than or equal to 4294967295"),
        ({"seed": None}, "seed is None"),
        ({"threads": 0}, "threads is 0, .*greater than or equal to 1"),
        ({"threads": 1025}, "threads is 1025"),
        ({3: 4}, "^3 is not a key of a config"),
    ],
)
def test_errors_are_sentences(settings, message):
    refused(message, settings)


NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE = {
    "block_topk": [{"density": 0}, {"density": 2}, {"block": 0}, {"block": 2**32}, {"norm": "max"}],
    "chunk_topk": [{"density": 0}, {"density": 2}, {"chunk": 0}, {"chunk": 65537}],
    "sampled_topk": [{"density": 0}, {"density": 1.1}, {"sample": 0}, {"sample": 2}, {"excess": 0.9}, {"excess": INF}],
    "threshold": [{"threshold": wrong} for wrong in (-1, NAN, INF, "much", None)],
    "topk_capped": [{"cap": wrong} for wrong in (0, -1, 2**32, 1.5)],
    "bloom": [{"fpr": wrong} for wrong in (0, 1, -0.1, 1e-10, NAN)],
    "deflate": [{"level": 0}, {"level": 10}, {"shuffle": 1}],
    "fit_poly": [{"degree": -1}, {"degree": 16}, {"segments": 0}, {"segments": 1025}],
    "half": [{"dtype": "float8"}],
    "qsgd": [{"bits": 1}, {"bits": 9}, {"bucket_size": 0}, {"norm": "l1"}, {"entropy": "elias"}],
    "quantile": [{"buckets": 1}, {"buckets": 65537}, {"center": "median"}, {"bucket": 2}, {"separate_signs": 1},
                 {"entropy": "elias"}, {"entropy": "rans", "buckets": 257}, {"splits": "lloyd", "center": "middle"},
                 {"splits": "lloyd", "separate_signs": False}],
    "sign": [{"bucket_size": 0}, {"bucket_size": 2**31 + 1}, {"scale": 1}],
    "ternary": [{"bucket_size": 0}, {"bucket_size": 2**31 + 1}, {"clip": 0.5}, {"bits": 2}],
    "uniform": [{"bits": 0}, {"bits": 17}, {"bucket_size": 0}, {"bucket_size": None}, {"rotate": 1},
                {"bucket_size": 96, "rotate": True}],
    "zstd": [{"level": 0}, {"level": 23}, {"shuffle": 1}],
    **{name: [{"buckets": 1}, {"groups": 257}, {"rows": 9}, {"columns": 5}, {"columns": NAN},
              {"buckets": 2049, "groups": 8}] for name in ("sketchml", "skcompress")},
    "three_lc": [{"multiplier": 0.9}, {"multiplier": 2.0}, {"bits": 3}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "settings"), [(codec, settings) for codec, wrong in OUT_OF_RANGE.items() for settings in wrong], ids=str
)
def test_a_codec_refuses_settings_out_of_range(codec, settings):
    (kind,) = (kind for kind, registry in REGISTRIES.items() if codec in registry.by_name)
    with pytest.raises(ConfigError, match=rf"\b({'|'.join(settings)})\b"):
        Config.load({kind: {"name": codec, **settings}})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (3, r"^overrides is 3; it must map patterns of parameters' names to their settings, as in"),
        (["*.bias"], "^overrides is .*; it must map"),
        ({"*.bias": "raw"}, "^overrides is .*; it must map"),
        ({"*.bias": None}, "^overrides is .*; it must map"),
        ({3: {}}, "^overrides is .*; it must map"),
        *(
            ({"a": {key: 1}}, f"^overrides has '{key}' for 'a', and only these settings can differ from tensor to")
            for key in ("exchange", "scope", "bucket_bytes", "selection", "seed", "threads", "overrides", "colour")
        ),
        ({"a": {"value": "best"}}, "^overrides for 'a': value is 'best'; it must be a name"),
        ({"a": {"density": 2}}, "^overrides for 'a': sparsifier.density is 2"),
        ({"a": {"value": {"bits": 9}}}, "^overrides for 'a': value.bits is 9"),
        ({"a": {"joint": "three_lc", "value": "raw"}}, "^overrides for 'a': value is 'raw' beside 'three_lc'"),
        ({"a": {"index": None}}, "^overrides for 'a': index is None"),
        ({"a": {"min_elements": -1}}, "^overrides for 'a': min_elements is -1"),
        ({"a": {"index": {"name": "bloom", "policy": "naive"}}}, "^overrides for 'a': index is 'bloom'"),
    ],
)
def test_overrides_that_cannot_be(overrides, message):
    refused(message, overrides=overrides)


def test_overrides_where_tensors_are_not_encoded_one_by_one():
    some = {"*.bias": {"value": "raw"}}
    for settings, message in (
        ({"scope": "model"}, "^scope is 'model' and selection is 'scope', so the model .* set selection to 'tensor'"),
        ({"exchange": "densestream", "selection": "tensor"}, "^exchange is 'densestream', which sums whole vectors"),
        ({"scope": "bucket", "selection": "tensor", "overrides": {"a": {"min_elements": 3}}},
         "^overrides for 'a': min_elements is 3 and has no effect, since scope is 'bucket'"),
    ):  # fmt: skip
        refused(message, {"overrides": some, **settings})


def test_overrides_are_part_of_the_config(tmp_path):
    text = """
    sparsifier: {name: topk, density: 0.02}
    overrides:
      "*.bias": {value: raw, density: 0.5}
      "embedding.*": {joint: densestream}
    """
    config = load_text(tmp_path, text)
    assert list(config.variants) == ["*.bias", "embedding.*"] and not Config.load().variants
    bias, embedding = config.variants.values()
    assert config.scope == "tensor"
    assert bias == Config.load(density=0.5, value="raw", scope="tensor")
    assert embedding == Config.load(density=0.02, joint="densestream", scope="tensor")
    assert config.override_of("embedding.bias") == "*.bias" and config.override_of("head.weight") is None
    assert Config.load(config) == config and Config.load(config).variants == config.variants
    assert Config.load(config, overrides={}).variants == {}
    assert Config.load(config, density=0.1).variants["*.bias"] == bias
    turned = Config.load(config, overrides=dict(reversed(config.overrides.items())))
    assert len({one.digest() for one in (config, turned, Config.load(config, overrides={}))}) == 3
    # A codec in place of its name, and a codec over a joint one.
    assert Config.load(overrides={"a": {"value": QSGD(bits=3)}}).variants["a"].value == QSGD(bits=3)
    joint = Config.load(joint="three_lc", sparsifier="none", overrides={"a": {"value": "raw"}}).variants["a"]
    assert joint.joint is None and joint.value.name == "raw" and joint.index is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.yaml is empty: write at least one key"),
        ("# nothing\n", "config.yaml is empty"),
        ("- topk\n- rice\n", r"config.yaml holds \['topk', 'rice'\]: lines of the form 'key: value'"),
        ("topk", "config.yaml holds 'topk'"),
        ("a: [1", "config.yaml is not YAML: "),
        ("scope: model\nscope: bucket", "config.yaml is not YAML: 'scope' is there twice .*line 2"),
        ("sparsifier: {name: topk, density: 0.1, density: 0.2}", "'density' is there twice"),
        ("a: b: c", "config.yaml is not YAML: .*line 1"),
        (b"\xff\xfe\xfa", "config.yaml is not YAML"),
        ("a: !!python/object:os.system {}", "config.yaml is not YAML"),
        ("sparsifier:\n", "^sparsifier is None"),
        ("seed: .nan", "seed is nan"),
        ("seed: 1\nspeed: 2", "^speed is not a key"),
    ],
)
def test_files_that_are_no_config(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_text(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path):
    refused("nowhere.yaml cannot be read: No such file or directory", tmp_path / "nowhere.yaml")
    refused("cannot be read: Is a directory", str(tmp_path))


@pytest.mark.parametrize("source", [3, ["topk"], 1.5, np.zeros(2)])
def test_sources_that_are_none(source):
    given = type(source).__name__
    refused(f"a config is a preset's name, the path of a YAML file, a dict or a Config, and {given} was given", source)


@pytest.mark.parametrize("joint", cases.JOINT)
def test_joint_takes_the_place_of_index_and_value(joint):
    config = Config.load(joint=joint)
    assert config.index is None and config.value is None and Config.load(config.to_dict()) == config
    assert Config.load(joint=joint, index=None, value=None) == config
    for kind, name in (("index", "rice"), ("value", "raw")):
        refused(f"{kind} is '{name}' beside '{joint}'.*leave index and value out", {"joint": joint, kind: name})


@pytest.mark.parametrize("codec", [0, 256, -1])
def test_a_registry_refuses_bad_numbers_and_second_names(codec):
    class Bad(Raw):
        name = "bad"
        id = codec

    registry = Registry("value", ValueCodec)
    registry.register(Raw)
    registry.register(Raw)  # as by a cell of a notebook that runs again
    with pytest.raises(ValueError, match=r"has an id outside its range: it must be 192 to 254"):
        registry.register(Bad)
    with pytest.raises(ValueError, match=r"value codec 'raw' \(id 1, from .*\) has the name or the id of 'raw'"):
        registry.register(type("Other", (Raw,), {"__module__": Raw.__module__, "id": Raw.id}))


def test_external_codecs_have_their_own_numbers():
    registry = Registry("value", ValueCodec)
    mine = type("Mine", (Raw,), {"__module__": "my_package.mine", "name": "mine", "id": 200})
    assert registry.register(mine) is registry.find(200) is mine
    for module, number, allowed in (("my_package", 12, "192 to 254"), (Raw.__module__, 200, "1 to 191, or 255")):
        other = type("Other", (Raw,), {"__module__": module, "name": "other", "id": number})
        with pytest.raises(ValueError, match=allowed):
            registry.register(other)
    for name, number in (("mine", 201), ("other", 200)):
        other = type("Other", (Raw,), {"__module__": "my_package", "name": name, "id": number})
        with pytest.raises(ValueError, match="has the name or the id of 'mine'"):
            registry.register(other)
    with pytest.raises(ValueError, match="value codec 7 is unknown; this release knows 200 mine"):
        registry.find(7)
    for base, more, match in (
        (Raw, {"name": None, "id": 201}, "needs the class attributes name, a string, and id, an integer"),
        (Raw, {"name": "other", "id": "201"}, "needs the class attributes name, a string, and id, an integer"),
        (RawIndex, {"name": "other", "id": 201}, "must be a subclass of ValueCodec"),
        (ValueCodec, {"name": "other", "id": 201}, "lacks decode, encode"),
        (Raw, {"name": "other", "id": 201, "decode": lambda self: None}, "must be a @staticmethod"),
    ):
        with pytest.raises(ValueError, match=match):
            registry.register(type("Other", (base,), {"__module__": "my_package", **more}))


INT64, SHORT, ONES = np.arange(3), np.arange(2, dtype=np.uint32), np.ones(3, np.float32)
FIELDS, SECTION = np.arange(3, dtype=np.uint32), np.zeros(12, np.uint8)


@pytest.mark.parametrize(
    ("kind", "base", "function", "found", "match"),
    [
        ("sparsifier", TopK, "select", (INT64, ONES), r"indices that select\(\) of .* is int64\[3\]; it must"),
        ("sparsifier", TopK, "select", (FIELDS + np.uint32(9), ONES), "an index is out of order or not below"),
        ("sparsifier", TopK, "select", (FIELDS, np.ones(4, "f4")), r"values that .* is float32\[4\].* float32 \[3\]"),
        ("index", RawIndex, "encode", (SECTION, INT64), "support that encode.* is int64"),
        ("index", RawIndex, "encode", (b"bytes", FIELDS), "section that encode.* is bytes; it must be an array uint8"),
        ("index", RawIndex, "decode", SHORT, r"support that decode.* is uint32\[2\].* uint32 \[3\]"),
        ("index", RawIndex, "decode", FIELDS[::-1].copy(), "an index is out of order"),
        ("value", Raw, "encode", SECTION, "what encode.* is ndarray; it must be a tuple of two"),
        ("value", Raw, "encode", (SECTION, SHORT), r"order that encode.* is uint32\[2\]"),
        ("value", Raw, "decode", np.ones(2, "f4"), r"values that decode.* is float32\[2\].* float32 \[3\]"),
        ("value", Raw, "decode", np.ones(3, "i4"), "values that decode.* is int32"),
    ],
)  # fmt: skip
def test_what_a_codec_of_another_package_returns_is_checked(kind, base, function, found, match):
    """Native code takes it as it is, and would read and write elsewhere."""
    kinds = {"sparsifier": Sparsifier, "index": IndexCodec, "value": ValueCodec}
    static = isinstance(inspect.getattr_static(base, function), staticmethod)
    made = staticmethod(lambda *_: found) if static else lambda *_: found
    codec = type("Mine", (base,), {"__module__": "mine", "name": "mine", "id": 200, function: made})
    Registry(kind, kinds[kind]).register(codec)
    key, three = RngKey(0, 0, 0), np.ones(3, np.float32)
    arguments = {
        "sparsifier": (np.ones(5, np.float32), None, key, 1),
        "index": (SECTION, 5, 3, key) if function == "decode" else (FIELDS, 5, key),
        "value": (SECTION, 3, FIELDS, np.dtype("f4"), key) if function == "decode" else (three, FIELDS, key),
    }[kind]
    with pytest.raises(ValueError, match=match):
        getattr(codec if static else codec(), function)(*arguments)


def test_the_default_scope_is_the_fastest_in_which_all_settings_have_an_effect():
    override = {"*.bias": {"value": "raw"}}
    for settings, scope in (
        ({}, "bucket"),
        ({"bucket_bytes": 8000}, "bucket"),
        ({"selection": "tensor"}, "bucket"),
        ({"selection": "tensor", "overrides": override}, "bucket"),
        ({"overrides": override}, "tensor"),
        ({"min_elements": 0}, "tensor"),
        ({"exchange": "densestream"}, "model"),
    ):
        assert Config.load(settings).scope == scope
        assert Config.load(Config.load(settings)) == Config.load(settings)
