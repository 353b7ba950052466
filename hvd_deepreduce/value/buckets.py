"""The frame of a section that the quantizers of buckets share.

Section: ``| setting u8 | entropy u8 | 0 u16 | bucket u32 | scales float32 [width * ceil(r / bucket)] | codes |``.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.codec import U8
from hvd_deepreduce.ops import sections

HEADER = struct.Struct("<BBHI")
F32 = NDArray[np.float32]


def join(setting: int, bucket: int, scales: F32, codes: NDArray[Any], entropy: int = 0) -> U8:
    """The section."""
    section: U8 = sections.join(HEADER.pack(setting, entropy, 0, bucket), scales, codes)
    return section


def split(section: U8, count: int, width: int = 1) -> tuple[int, int, int, F32, U8]:
    """Setting, entropy, bucket, scales (``width`` a bucket) and codes of ``join``.

    Raises:
        ValueError: where the scales do not fit into the section.
    """
    if section.size < HEADER.size:
        raise ValueError(f"a section of buckets begins with {HEADER.size} bytes, and this one has {section.size}")
    setting, entropy, zero, bucket = HEADER.unpack(sections.peek(section, HEADER.size))
    if zero or bucket == 0:
        raise ValueError(f"its buckets hold {bucket} values, its reserved bytes {zero}: 1 or more and 0 are right")
    codes_at = HEADER.size + 4 * width * -(-count // bucket)
    if section.size < codes_at:
        raise ValueError(f"the scales of {count} values in buckets of {bucket} do not fit {section.size} bytes")
    return setting, entropy, bucket, section[HEADER.size : codes_at].view(np.float32), section[codes_at:]
