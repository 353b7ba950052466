"""What the quantizers of buckets share: the setting ``bucket_size``, and the layout of their sections.

Section: ``| setting u8 | entropy u8 | 0 u16 | bucket size u32 | scales float32 [width * buckets] | codes |``, with
ceil(r / bucket size) buckets for r values.
"""

import struct
import warnings
from abc import ABC, abstractmethod
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hvd_deepreduce.codecs.interfaces import U8, ValueCodec
from hvd_deepreduce.ops import arrays, sections
from hvd_deepreduce.ops.groups import bucket_count

HEADER = struct.Struct("<BBHI")
F32 = NDArray[np.float32]


class BucketQuantizer(ValueCodec, ABC):
    """A value codec with the setting ``bucket_size``. Its former name, ``bucket``, is accepted with a warning."""

    @model_validator(mode="before")
    @classmethod
    def _rename_bucket(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "bucket" not in given:
            return given
        if "bucket_size" in given:
            raise ValueError(
                f"value.bucket is {given['bucket']!r} and value.bucket_size is {given['bucket_size']!r}: both are the "
                "number of values in a bucket, and bucket is the former name; set bucket_size alone"
            )
        warnings.warn(
            f"the setting 'bucket' of the value codec {cls.name!r} is now 'bucket_size': rename it in your config",
            UserWarning,
            stacklevel=2,
        )
        return {"bucket_size" if key == "bucket" else key: setting for key, setting in given.items()}


class UnbiasedQuantizer(BucketQuantizer, ABC):
    """A quantizer that rounds at random so that the mean of what is decoded is the value.

    Its error can be larger than the values. A residual of error feedback keeps the error, so it would grow from step to
    step. With ``scaled``, what is decoded is divided by 1 + beta, where beta bounds the relative variance: the operator
    of lemma 1 of Qsparse-local-SGD (Basu et al. 2019). The division is in the scales that are sent, so a receiver need
    not know of it. ``fit_scale`` does better: each bucket's scale is that with which the codes have the least squared
    distance to the values. The error is then never larger than the values, whatever was drawn, and close values are
    hardly scaled.
    """

    fit_scale: bool | None = Field(None, strict=True)
    scaled: bool = Field(False, strict=True)

    @model_validator(mode="after")
    def _check_scales(self) -> "UnbiasedQuantizer":
        if self.scaled and self.fit_scale:
            raise ValueError(
                "value.scaled is True and value.fit_scale is True: both set the scales that are sent, and a fitted one "
                "needs no division; set one of them"
            )
        return self

    @abstractmethod
    def variance_of(self, count: int) -> float:
        """beta: a bound of E||decoded - x||^2 / ||x||^2 over all buckets of ``count`` values, 1 or more."""

    @property
    def variance(self) -> float:
        """beta of a full bucket; infinity if a bucket may have any number of values."""
        bucket_size: int | None = getattr(self, "bucket_size")  # noqa: B009
        return inf if bucket_size is None else self.variance_of(bucket_size)

    def under_feedback(self) -> ValueCodec:
        unbiased = self.fit_scale is None and not self.scaled
        return self.model_copy(update={"fit_scale": True}) if unbiased and self.variance > 1 else self

    def divide(self, scales: F32, count: int, bucket_size: int) -> None:
        """Divides the scales of ``count`` values in place by 1 + beta, each by that of its own bucket.

        Args:
            scales: float32, equally many for each bucket; the last bucket has what is left of ``count``.
        """
        whole, rest = divmod(count, bucket_size)
        at = scales.size // max(1, bucket_count(count, bucket_size)) * whole
        for part, size in ((scales[:at], bucket_size), (scales[at:], rest)):
            if part.size:
                arrays.scale(part, 1 / (1 + self.variance_of(size)))


def join(setting: int, bucket_size: int, scales: F32, codes: NDArray[Any], entropy: int = 0) -> U8:
    """The section."""
    return sections.join(HEADER.pack(setting, entropy, 0, bucket_size), scales, codes)


def split(section: U8, count: int, width: int = 1) -> tuple[int, int, int, F32, U8]:
    """Setting, entropy, bucket size, scales (``width`` for each bucket) and codes of ``join``, for ``count`` values.

    Raises:
        ValueError: the bucket size is 0, or the scales do not fit into the section.
    """
    if section.size < HEADER.size:
        raise ValueError(f"a section of buckets begins with {HEADER.size} bytes, and this one has {section.size}")
    setting, entropy, zero, bucket_size = HEADER.unpack(sections.peek(section, HEADER.size))
    if zero or bucket_size == 0:
        raise ValueError(
            f"its bucket size is {bucket_size} and its reserved bytes are {zero}; 1 or more, and 0, are allowed"
        )
    codes_at = HEADER.size + 4 * width * bucket_count(count, bucket_size)
    if section.size < codes_at:
        raise ValueError(f"the scales of {count} values in buckets of {bucket_size} do not fit {section.size} bytes")
    return setting, entropy, bucket_size, section[HEADER.size : codes_at].view(np.float32), section[codes_at:]
