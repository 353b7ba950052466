"""Value codecs: the kept values in few bits. One file each; importing this package registers them all."""

from hvd_deepreduce.codecs.value import (
    deflate,
    fit_dexp,
    fit_poly,
    half,
    natural,
    qsgd,
    quantile,
    raw,
    sign,
    ternary,
    uniform,
    zstd,
)

__all__ = [
    "deflate",
    "fit_dexp",
    "fit_poly",
    "half",
    "natural",
    "qsgd",
    "quantile",
    "raw",
    "sign",
    "ternary",
    "uniform",
    "zstd",
]
