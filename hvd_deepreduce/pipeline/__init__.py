"""A gradient to its container, and containers to the sum of all ranks' gradients."""

from hvd_deepreduce.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
