"""The settings of local updates in a config."""

from __future__ import annotations

import pytest

from hvd_deepreduce import Config, ConfigError


def test_a_mapping_changes_what_the_config_has():
    config = Config.load({"local": {"every": 4, "momentum": 0.5}}, local={"decay": 0.9})
    assert config.local.model_dump() == {
        "every": 4, "lr": 1.0, "momentum": 0.5, "nesterov": True, "decay": 0.9, "fragments": 1, "delay": 0, "mix": None,
        "anchors": "device",
    }  # fmt: skip
    assert Config.load(config.to_dict()) == config and Config.load(config) == config
    assert Config.load(config, local={"every": 5}).digest() != config.digest()
    assert "every: 4, lr: 1.0" in str(config)
    assert Config.load(config, local=None).local is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local": {"every": 0}}, r"local.every is 0, which is not allowed"),
        ({"local": {"ever": 1}},
         r"local.ever is not a key of local \(given: 1\); its keys are: anchors, decay, delay, every"),
        ({"local": {"every": 2, "delay": 2}}, r"delay must be less than every"),
        ({"local": {"every": 2, "fragments": 3}}, r"at most as many fragments as local steps"),
        ({"local": {"momentum": 1.0}}, r"local.momentum is 1.0, which is not allowed"),
        ({"local": {"mix": 0.5}}, r"local.mix is 0.5 and has no effect, since local.delay is 0"),
        (
            {"local": {"decay": 0.5}, "error_feedback": False},
            r"local.decay is 0.5 and has no effect, since error_feedback is False",
        ),
        ({"local": {"every": 2}, "memory": "dgc"}, r"memory is 'dgc', which is a momentum of gradients"),
        ({"local": 3}, r"local is 3, which is not allowed"),
    ],
)
def test_a_setting_that_cannot_be_is_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(settings)


def test_a_setting_of_a_preset_without_effect_is_dropped():
    base = {"local": {"every": 4, "momentum": 0.5, "nesterov": False, "delay": 1, "mix": 0.5}}
    assert Config.load(base, local={"momentum": 0.0, "delay": 0}).local.model_dump() == {
        **Config.load({"local": {"every": 4}}).local.model_dump()
    }


def test_deep_reduce_refuses_it():
    with pytest.raises(ConfigError, match="exchanges updates of the parameters, and DeepReduce exchanges gradients"):
        Config.load({"local": {"every": 4}}).for_gradients()
    config = Config.load()
    assert config.for_gradients() is config
