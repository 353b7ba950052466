"""The setting ``bucket_size`` of the quantizers of buckets, and its former name."""

import warnings

import pytest

from hvd_deepreduce.codecs.value.qsgd import QSGD
from hvd_deepreduce.codecs.value.sign import Sign
from hvd_deepreduce.codecs.value.ternary import Ternary
from hvd_deepreduce.codecs.value.uniform import Uniform
from hvd_deepreduce.config import Config, ConfigError

QUANTIZERS = [QSGD, Sign, Ternary, Uniform]
every_quantizer = pytest.mark.parametrize("codec", QUANTIZERS, ids=lambda codec: codec.name)


@every_quantizer
def test_the_former_name_is_accepted_with_one_warning(codec, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"value: {{name: {codec.name}, bucket: 96}}\n")
    with pytest.warns(UserWarning, match=f"'bucket' of the value codec '{codec.name}' is now 'bucket_size'") as caught:
        config = Config.load(file, seed=3)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        renamed = Config.load(value={"name": codec.name, "bucket_size": 96}, seed=3)
        again = Config.load(config.to_dict())
    assert config.value == renamed.value == codec(bucket_size=96)
    assert config.shared() == renamed.shared() == again.shared() and config.digest() == renamed.digest()
    assert config.to_dict()["value"]["bucket_size"] == 96 and "bucket" not in config.to_dict()["value"]


@every_quantizer
def test_both_names_are_an_error(codec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError, match="^value.bucket is 96 and value.bucket_size is 96: .* alone$"):
            Config.load(value={"name": codec.name, "bucket": 96, "bucket_size": 96})


@every_quantizer
def test_a_wrong_number_is_an_error_under_either_name(codec):
    for name in ("bucket", "bucket_size"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ConfigError, match="value.bucket_size is 0, .*greater than or equal to 1"):
                Config.load(value={"name": codec.name, name: 0})


@pytest.mark.parametrize("codec", [Sign, Ternary], ids=lambda codec: codec.name)
def test_none_is_one_bucket_under_either_name(codec):
    with pytest.warns(UserWarning, match="bucket_size"):
        assert codec(bucket=None) == codec(bucket_size=None)
