"""Settings: what a user may set, which settings are of no use beside others, and the presets."""

from hvd_deepreduce.config.settings import Config, ConfigError

__all__ = ["Config", "ConfigError"]
