"""Every setting of a config has an effect or is refused: by the config, or by what a pipeline makes of it."""

import dataclasses
import re
import warnings

import numpy as np
import pytest

from hvd_deepreduce import Config, ConfigError
from hvd_deepreduce.codecs.index.bloom import Bloom
from hvd_deepreduce.codecs.index.rice import Rice
from hvd_deepreduce.codecs.index.rice_blocks import RiceBlocks
from hvd_deepreduce.codecs.interfaces import RngKey, index_codecs
from hvd_deepreduce.codecs.sparsify.topk import TopK
from hvd_deepreduce.codecs.value.fit_poly import FitPoly
from hvd_deepreduce.config import presets
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from hvd_deepreduce.wire.standalone import ContainerError
from tests import cases

KEY = RngKey(1, 2, 3)
IDLE = [
    ({"sparsifier": "none", "index": "rice"}, "index is 'rice', and sparsifier 'none' sends all elements.* leave"),
    ({"sparsifier": "none", "index": {"name": "bloom"}}, "index is 'bloom', and sparsifier 'none' sends all elements"),
    ({"bucket_bytes": 8000, "scope": "model"}, "bucket_bytes is 8000 and has no effect, since scope is 'model'"),
    ({"bucket_bytes": 8000, "exchange": "sparcml"}, "bucket_bytes is 8000 and has no effect, since scope is 'model'"),
    ({"min_elements": 7, "scope": "model"}, "min_elements is 7 and has no effect, since scope is 'model'.*'tensor'$"),
    ({"min_elements": 7, "scope": "bucket"}, "min_elements is 7 and has no effect, since scope is 'bucket'"),
    ({"min_elements": 7, "exchange": "densestream"}, "min_elements is 7 and has no effect, since scope is 'model'"),
    ({"force_index": True}, "force_index is True, and the value codec 'qsgd' does not sort the values: .* Leave"),
    ({"force_index": True, "value": "raw", "index": "bloom"}, "force_index is True, and the value codec 'raw' does"),
    ({"force_index": True, "joint": "densestream"}, "force_index is True, and there is no index codec"),
    ({"force_index": True, "exchange": "sparcml"}, "force_index is True, and there is no index codec"),
    ({"force_index": True, "sparsifier": "none", "value": "fit_poly"}, "force_index is True, and there is no index"),
    ({"force_index": True, "sparsifier": "randomk", "value": "fit_poly"}, "force_index is True, and there is no index"),
    ({"joint": {"name": "densestream", "bits": 4}}, "joint.bits is 4 and has no effect, since value is 'raw', and"),
    ({"joint": {"name": "densestream", "bits": 4, "value": "float16"}}, "joint.bits is 4 .* value is 'float16'"),
    ({"exchange": {"name": "densestream", "bits": 4}}, "exchange.bits is 4 and has no effect, since value is 'raw'"),
    ({"exchange": {"name": "densestream", "fill": True}},
     "exchange.fill is True and has no effect, since coded is True and value is 'raw', .* leave fill out"),
    ({"exchange": {"name": "densestream", "fill": True, "value": "bfloat16"}}, "exchange.fill is True .*'bfloat16'"),
    ({"exchange": {"name": "densestream", "fill": True, "coded": False}, "error_feedback": False},
     "exchange.fill is True and has no effect, since error_feedback is False, so that there is no residual"),
    ({"exchange": {"name": "reduce_scatter", "density": 0.1}, "sparsifier": "none"},
     "exchange.density is 0.1 and has no effect, since sparsifier 'none' sends no indices"),
    ({"exchange": {"name": "reduce_scatter", "density": 0.1}, "sparsifier": "randomk"},
     "exchange.density is 0.1 and has no effect, since sparsifier 'randomk' sends no indices"),
    ({"exchange": {"name": "reduce_scatter", "round_sum": True}, "hierarchical": 2},
     "exchange.round_sum is True and has no effect, since hierarchical is given"),
    ({"exchange": {"name": "reduce_scatter", "round_sum": True}, "local": {"every": 4}},
     "exchange.round_sum is True and has no effect, since local is given"),
    ({"bucket_bytes": 8000, "exchange": "reduce_scatter"}, "bucket_bytes is 8000 and has no effect, since scope is 'm"),
    ({"joint": "densestream", "index": "rice"}, "index is 'rice' beside 'densestream'"),
    ({"exchange": "sparcml", "value": "qsgd"}, "value is 'qsgd' beside 'sparcml'"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), IDLE)
def test_a_setting_without_effect_is_refused(settings, message):
    for source, keywords in ((settings, {}), (None, settings)):
        with pytest.raises(ConfigError, match=f"^{message}"):
            Config.load(source, **keywords)


ANYWAY = [
    ({"min_elements": 0, "scope": "bucket"}, "min_elements is 0 and has no effect, since scope is 'bucket'"),
    ({"min_elements": 0, "exchange": "sparcml"}, "min_elements is 0 and has no effect, since scope is 'model'"),
    ({"selection": "tensor", "scope": "tensor"}, "selection is 'tensor' and has no effect, since scope is 'tensor'"),
    ({"force_index": True, "index": "packed", "value": "fit_poly"},
     "force_index is True and has no effect, since index is 'packed', and packed indices in the order of the values"),
    ({"local": {"nesterov": False}}, "local.nesterov is False and has no effect, since local.momentum is 0"),
    ({"local": {"decay": 0}, "error_feedback": False}, "local.decay is 0.0 and has no effect"),
    ({"exchange": {"name": "densestream", "fill": False}, "error_feedback": False},
     "exchange.fill is False and has no effect, since error_feedback is False, .* leave fill out"),
    ({"exchange": {"name": "densestream", "fill": False}}, "exchange.fill is False and has no effect, since coded"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), ANYWAY)
def test_a_setting_that_says_what_happens_anyway_is_a_doubt(settings, message):
    config = Config.load(settings)
    assert re.match(message, config.doubts()[0]) and not Config.load().doubts()
    assert Config.load(config.to_dict()) == config == Config.load(None, **settings)


def test_density_1_is_a_doubt():
    assert Config.load(density=1).doubts()[0].startswith("sparsifier.density is 1, so that all elements are sent")
    assert not Config.load(sparsifier={"density": 1, "density_of": "nonzeros"}).doubts()
    assert not any(Config.load(name).doubts() for name in presets.names())


EFFECTIVE = [
    {"scope": "bucket", "bucket_bytes": 8000, "selection": "tensor"},
    {"scope": "model", "selection": "tensor"},
    {"min_elements": 7, "seed": 5, "threads": 2},
    {"value": "fit_dexp", "force_index": True},
    {"sparsifier": "randomk", "index": "bloom", "value": "fit_poly", "force_index": True},
    {"sparsifier": "randomk", "index": "rice"},
    {"joint": {"name": "densestream", "value": "qsgd", "bits": 4}},
    {"exchange": {"name": "densestream", "value": "qsgd", "bits": 4, "fill": False}},
    {"exchange": {"name": "densestream", "value": "qsgd", "fill": True}},
    {"exchange": {"name": "densestream", "coded": False, "fill": True}},
    {"exchange": "densestream", "error_feedback": False, "seed": 1},
    {"sparsifier": "none", "value": "sign"},
    {"sparsifier": "none", "value": "sign", "exchange": "reduce_scatter"},
    {"sparsifier": "randomk", "index": "rice", "exchange": {"name": "reduce_scatter", "density": 0.1}},
    {"joint": "densestream", "exchange": {"name": "reduce_scatter", "density": 0.1}, "memory": "dgc"},
    {"sparsifier": "none", "joint": "three_lc"},
    {"value": {"name": "qsgd", "fit_scale": False}, "error_feedback": False},
]


@pytest.mark.parametrize("settings", EFFECTIVE)
def test_settings_with_effect_and_defaults_are_taken(settings):
    config = Config.load(settings)
    plain = config.to_dict()
    for again in (Config.load(plain), Config.load(config), Config(**plain), Config.load(config.shared()),
                  Config.load(config, threads=3), Config.load(plain, seed=9)):  # fmt: skip
        assert again.model_copy(update={"threads": config.threads, "seed": config.seed}) == config
    assert Config.load(plain).digest() == config.digest()
    # What is said again, as it is by default.
    said = {key: field.default for key, field in Config.model_fields.items()
            if key in ("bucket_bytes", "selection", "min_elements", "force_index")}  # fmt: skip
    assert Config.load({**said, **settings}) == config


def test_a_momentum_is_not_dropped_without_a_word():
    """The job's optimizer has none."""
    with pytest.warns(UserWarning, match="without its memory: memory is 'dgc' .*give the optimizer a momentum"):
        assert not Config.load("dgc", error_feedback=False).has_velocity
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Config.load("dgc", error_feedback=False, memory="residual").has_velocity


@pytest.mark.filterwarnings("ignore:the config was taken without its memory")
@pytest.mark.parametrize("name", presets.names())
def test_every_preset_takes_other_settings(name):
    """What a preset has and a keyword argument leaves without effect is dropped."""
    config = Config.load(name)
    for source in (name, config, config.to_dict()):
        for change in ({"scope": "model"}, {"scope": "bucket", "bucket_bytes": 4000}, {"sparsifier": "randomk"},
                       {"sparsifier": "none"}, {"sparsifier": "topk"}, {"error_feedback": False}):  # fmt: skip
            changed = Config.load(source, **change)
            assert Config.load(changed.to_dict()) == changed
        for change in ({"joint": "densestream"}, {"exchange": "sparcml", "scope": "model"}):
            if ("joint" in change) == (config.exchange.name == "allgather") or config.joint is None:
                if config.exchange.name != "allgather" and "joint" in change:
                    continue  # a joint codec and an exchange exclude each other
                changed = Config.load(source, **change)
                assert changed.index is None and changed.value is None


def test_which_settings_of_a_source_are_dropped():
    load = Config.load
    bucket = load("topk_rice_qsgd", scope="bucket", bucket_bytes=8000, selection="tensor")
    assert load(bucket, scope="tensor") == load("topk_rice_qsgd", scope="tensor", bucket_bytes=8000)
    assert load("topk_raw", exchange="densestream").scope == "model"  # the preset has scope tensor
    assert load(load(min_elements=0), scope="model") == load(scope="model")
    assert load("topk_rice_qsgd", sparsifier="randomk").index is None
    assert load("topk_rice_qsgd", sparsifier="randomk", index="rans").index.name == "rans"
    # The same sparsifier with other settings keeps its index codec; another one that needs it has the default again.
    bloom = load("randomk_raw", index="bloom")
    assert load(bloom, density=0.5).index == load(bloom, sparsifier={"density": 0.5}).index == Bloom()
    for source in ("randomk_raw", load("randomk_raw")):
        assert load(source, sparsifier="topk").index == RiceBlocks()
    assert load(load(joint="densestream"), joint=None) == load()
    assert load("dr_bf_p1_fit_poly", value="raw") == load("dr_bf_p1")
    qsgd = {"name": "densestream", "value": "qsgd", "bits": 4}
    assert load({"joint": qsgd}, joint={"value": "raw"}) == load(joint="densestream")
    plain = {"name": "densestream", "coded": False}
    fill = load(exchange={**plain, "fill": True})
    assert load(fill, error_feedback=False).exchange == load(exchange=plain).exchange
    assert load(fill, exchange={"coded": True}).exchange == load(exchange="densestream").exchange
    # Of two that exclude each other, the one that is asked for here is an error; and so is a source's own mistake.
    for source, change in (("densestream", {"value": "raw"}), (None, {"scope": "model", "bucket_bytes": 9000}),
                           ({"bucket_bytes": 9000, "scope": "model"}, {}), ({"index": None}, {})):  # fmt: skip
        with pytest.raises(ConfigError):
            load(source, **change)


@pytest.mark.parametrize("index", index_codecs.by_name)
def test_an_index_codec_under_randomk(index):
    """It is sent if it is asked for, else no indices are: figures 6 and 15 of DeepReduce have Random-r and a filter."""
    x, random = cases.random(3000), {"name": "randomk", "density": 0.05}
    without = wire.unpack(Pipeline(Config.load(sparsifier=random, value="raw")).encode(x, None, KEY))
    assert without.index == 0 and without.indices.size == 0 and without.count == 150
    pipeline = Pipeline(Config.load(sparsifier=random, index=index, value="raw"))
    container = wire.unpack(pipeline.encode(x, None, KEY))
    assert container.index in {codec.id for codec in pipeline.config.index.choices} and container.indices.size > 50
    support, values = decode_part(container, x.size)
    np.testing.assert_array_equal(values, x[support])
    assert np.isin(decode_part(without, x.size)[0], support).all()  # the default policy of a filter loses none
    pipeline.decode([container], np.empty_like(x), 1.0, KEY)
    with pytest.raises(ContainerError, match="which this job's config cannot give"):
        pipeline.decode([without], np.empty_like(x), 1.0, KEY)


def test_randomk_in_parts_needs_no_index():
    """Each tensor of a larger scope has a container of its own, and a receiver repeats its selection."""
    random, parts = {"name": "randomk", "density": 0.1}, {"scope": "model", "selection": "tensor"}
    for settings in ({"scope": "model"}, parts):
        assert Config.load(sparsifier=random, **settings).index is None
        assert Config.load(sparsifier=random, index="rice", **settings).index == Rice()
    assert Config.load(Config.load(sparsifier=random, scope="model"), selection="tensor").index is None


GRADIENTS = {
    "heavy tails": np.random.default_rng(1).standard_t(3, 36_864).astype(np.float32),
    "few": np.where(np.arange(200_000) % 2000 == 5, np.float32(1), np.float32(0)).astype(np.float32) * 3,
}


@pytest.mark.parametrize("value", ["fit_poly", "fit_dexp"])
@pytest.mark.parametrize("policy", ["p0", "p1", "p2", "leftmost", "middle", "rightmost", "naive"])
@pytest.mark.parametrize("fpr", [0.001, 0.1, 0.6])
@pytest.mark.parametrize("name", GRADIENTS)
def test_no_filter_loses_elements_without_saving_bytes(name, fpr, policy, value):
    """The support is the selection, unless a filter with its order is smaller than packed indices in the order of the
    values."""
    x = GRADIENTS[name]
    settings = {"index": {"name": "bloom", "policy": policy, "fpr": fpr}, "value": value, "density": 0.01}
    settings["error_feedback"] = policy != "naive"
    selected, _ = TopK().select(x.copy(), None, KEY, 1)
    pipelines = [Pipeline(Config.load(settings, **more)) for more in ({}, {"force_index": True}, {"index": "packed"})]
    free, forced, lossless = (pipeline.encode(x, None, KEY, 2) for pipeline in pipelines)
    container, filtered = [
        pipeline.unpack(data, 1, x.size, x.dtype, KEY)[0]
        for pipeline, data in zip(pipelines[:2], (free, forced), strict=True)
    ]
    if container.index == Bloom.id:
        assert free.tobytes()[4:] == forced.tobytes()[4:] and free.size == forced.size < lossless.size
    else:
        assert container.ordered and free.size <= forced.size + 7 * 8
        np.testing.assert_array_equal(decode_part(container, x.size)[0], selected)
    assert filtered.index == Bloom.id and not filtered.ordered


@pytest.mark.parametrize("feedback", [True, False])
def test_a_filter_that_is_smaller_is_sent(feedback):
    """Few elements of a long vector: 1.44 bits times log2(1 / fpr) and the order are fewer than log2 d."""
    x = np.zeros(2**22, np.float32)
    x[:: 2**20] = [1, -2, 3, 4]
    x[5:2000:7] = 0.5
    settings = {"sparsifier": "nonzero", "index": {"name": "bloom", "policy": "p1", "fpr": 0.01}, "value": "fit_poly"}
    pipeline = Pipeline(Config.load(settings, error_feedback=feedback))
    assert wire.unpack(pipeline.encode(x, np.zeros_like(x) if feedback else None, KEY)).index == Bloom.id


@pytest.mark.parametrize("name", [name for name in presets.names() if Config.load(name).index is not None])
def test_a_preset_sends_the_index_codec_that_it_names(name):
    x = GRADIENTS["heavy tails"] * np.float32(np.arange(36_864) % 50 == 0)  # for those that select all nonzeros
    config = Config.load(name)
    container = wire.unpack(Pipeline(config).encode(x, None, KEY))
    assert container.index in {codec.id for codec in config.index.choices} and container.count
    assert container.ordered == (name in ("dr_fit_poly", "dr_fit_dexp"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", ["fit_poly", "fit_dexp"])
def test_raw_keys_are_sent_in_the_order_of_the_values(value, dtype):
    """DeepReduce's keys of 32 bits: the largest value's first, and no order section, in both versions. Two steps, whose
    sums and residual are the gradients'."""
    x = GRADIENTS["heavy tails"].astype(dtype)
    pipeline = Pipeline(Config.load(index="raw", value=value, force_index=True))
    residual, sent = np.zeros_like(x), np.zeros_like(x)
    for step in range(2):
        accumulated, key = x + residual, KEY._replace(step=step)
        long = wire.unpack(pipeline.encode(x, residual.copy(), key))
        (short,) = pipeline.unpack(pipeline.encode(x, residual, key, 2), 1, x.size, x.dtype, key)
        for container in (long, short):
            keys = container.indices.view(np.uint32)
            assert keys.size == container.count == 368 and container.order.size == 0
            assert (np.diff(accumulated[keys]) <= 0).all() and np.unique(keys).size == 368
            out = np.zeros_like(x)
            pipeline.decode([container], out, 1.0, key)
            np.testing.assert_allclose(out + residual, accumulated, rtol=0, atol=4 * np.finfo(dtype).eps * abs(x).max())
        sent += out
    np.testing.assert_allclose(sent + residual, 2 * x, rtol=0, atol=20 * np.finfo(dtype).eps * abs(x).max())


def test_a_receiver_takes_the_forms_that_its_config_gives():
    x = GRADIENTS["heavy tails"]
    free = Config.load("dr_bf_p1_fit_poly", force_index=False)
    forced, packed = Config.load("dr_bf_p1_fit_poly"), Pipeline(free).encode(x, None, KEY)
    out = np.empty_like(x)
    Pipeline(free).decode([wire.unpack(packed)], out, 1.0, KEY)
    keys = Config.load(free, index="raw", force_index=True)
    for other in (forced, keys, Config.load(index="rice", value="qsgd")):
        with pytest.raises(ContainerError, match="cannot give"):
            Pipeline(other).decode([wire.unpack(packed)], out, 1.0, KEY)
    raw = wire.unpack(Pipeline(keys).encode(x, None, KEY))
    for other in (forced, free, Config.load(keys, force_index=False)):
        with pytest.raises(ContainerError, match="cannot give"):
            Pipeline(other).decode([raw], out, 1.0, KEY)


def test_a_short_container_has_only_the_forms_that_the_config_gives():
    """Also one that another rank made up under this job's digest."""
    x = GRADIENTS["heavy tails"]
    without_index = {"sparsifier": {"name": "randomk", "density": 0.1}}
    for theirs, ours in (
        ({"index": "bloom", "value": "fit_poly"}, {"index": "bloom", "value": "fit_poly", "force_index": True}),
        ({"index": "rice", "value": "fit_dexp"}, {"index": "rice", "value": "half"}),
        (without_index, {**without_index, "index": "rice"}),
    ):
        sender, receiver = Pipeline(Config.load(theirs)), Pipeline(Config.load(ours))
        forged = dataclasses.replace(receiver.shared, indices=(*receiver.shared.indices, *sender.shared.indices))
        container = sender.unpack(sender.encode(x, None, KEY, 2), 1, x.size, x.dtype, KEY)[0]
        data = frame.pack(dataclasses.replace(container, digest=receiver.shared.digest), forged)
        with pytest.raises(ContainerError, match="which this job's config cannot give"):
            receiver.unpack(data, 1, x.size, x.dtype, KEY)


class Unannounced(FitPoly):
    """Sorts, and does not say so."""

    sorts = False


def test_a_codec_that_sorts_says_so():
    config = Config.load(value="fit_poly").model_copy(update={"value": Unannounced()})
    with pytest.raises(ValueError, match="'fit_poly' returned an order of its values, which it does not announce: set"):
        Pipeline(config).encode(cases.random(300), None, KEY)


def test_a_sign_is_sent_of_nonzeros_only():
    """100,000 elements of which 100 are not zero: the former top 1% had 900 zeros, which became plus the scale."""
    x = np.zeros(100_000, np.float32)
    x[::1000] = -2
    residual, out = np.zeros_like(x), np.empty_like(x)
    pipeline = Pipeline(Config.load("signtopk"))
    container = wire.unpack(pipeline.encode(x, residual, KEY))
    pipeline.decode([container], out, 1.0, KEY)
    assert container.count == 100 and not residual.any()
    np.testing.assert_array_equal(out, x)
