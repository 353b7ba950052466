"""Settings: what a user may set, which settings are of no use beside others, and the presets."""

from hvd_deepreduce.config.resolving import ConfigError
from hvd_deepreduce.config.settings import Config

__all__ = ["Config", "ConfigError"]
