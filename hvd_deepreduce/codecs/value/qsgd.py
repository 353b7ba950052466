"""QSGD: stochastic rounding to a few levels of a bucket's norm.

Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient quantization and encoding",
NeurIPS 2017, section 3.1.
"""

from math import sqrt
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hvd_deepreduce.codecs.entropy import CODERS, ENTROPY_IDS
from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, value_codecs
from hvd_deepreduce.codecs.value.groups import HEADER, UnbiasedQuantizer, join, split
from hvd_deepreduce.ops import arrays, qsgd
from hvd_deepreduce.ops.bits import pack, packed_bytes
from hvd_deepreduce.ops.groups import bucket_count


@value_codecs.register
class QSGD(UnbiasedQuantizer):
    """A value x of a bucket with norm n becomes sign(x) * l / s * n, l = floor(|x| / n * s + u), u uniform in [0, 1).

    s = 2^(bits - 1) - 1 levels a sign, so that a code fits ``bits`` bits. Unbiased: E[decoded] = x; the variance of a
    bucket of m values is at most min(m / s^2, sqrt(m) / s) * ||x||^2 (lemma 3.1). ``bits + 32 / bucket_size`` bits
    for each kept element. float64 values are rounded to float32 first.

    Small levels are far more frequent than large ones; the paper codes them with Elias codes. ``entropy`` codes them
    with Huffman codes or rANS, tensor by tensor, if that takes fewer bytes. It saves more the more a bucket's values
    differ, and the larger a bucket is; but the error grows with the norm. The sizes of whole containers, relative to
    float32, for 31.8 million elements of which 60% are not zero (``nonzero``, ``bitmap``, 7 bits, norm max):

    ======================================  ======  ======  =======  ======
    values                                  size    none    huffman  rans
    ======================================  ======  ======  =======  ======
    normal                                     512  0.1637   0.1520  0.1513
    normal                                    4096  0.1627   0.1468  0.1460
    Laplace                                    512  0.1637   0.1397  0.1391
    Laplace                                   4096  0.1627   0.1313  0.1308
    normal, rows of 64 scaled by e^N(0, 1)     512  0.1637   0.1259  0.1254
    normal, rows of 64 scaled by e^N(0, 1)    4096  0.1627   0.1032  0.1027
    ======================================  ======  ======  =======  ======

    Section: as in codecs/value/groups.py, with setting ``bits``, one norm for each bucket, and the codes s + sign * l:
    ``bits`` bits each (entropy 0), or as a section of codecs/entropy/huffman.py (1) or codecs/entropy/rans.py (2).

    Attributes:
        bits: 2 to 8, including the sign.
        bucket_size: the number of values that share a norm, 1 to 2^31.
        norm: ``max`` (the largest magnitude) uses all levels; ``l2`` is the paper's, whose levels are coarse if the
            values of a bucket are alike, as after top-k.
        entropy: ``rans`` comes within 1% of the levels' entropy, ``huffman`` within 0.1 bits.
        fit_scale: fit each bucket's norm to its codes by least squares, so that the error is at most the values. It
            gives up the unbiasedness. None: if there is error feedback and the variance can exceed ``||x||^2``.
        scaled: divide what is decoded by 1 + beta, where beta bounds the variance of a bucket's values relative to
            their squares (lemma 1 of Qsparse-local-SGD), in place of ``fit_scale``.
    """

    name = "qsgd"
    id = 3
    bits: int = Field(7, ge=2, le=8)
    bucket_size: int = Field(512, ge=1, le=2**31)
    norm: Literal["max", "l2"] = "max"
    entropy: Literal["none", "huffman", "rans"] = "none"

    def variance_of(self, count: int) -> float:
        # Lemma 3.1 for the l2 norm. A value's variance is at most a quarter of the squared step norm / s, and at most
        # |x| times the step; the largest magnitude is at most the l2 norm.
        m, s = float(count), float(qsgd.levels_of(self.bits))
        return min(m / (s * s) / (1 if self.norm == "l2" else 4), sqrt(m) / s)

    def layout(self, count: int, itemsize: int) -> tuple[bytes, int] | None:
        if self.entropy != "none":
            return None
        head = HEADER.pack(self.bits, 0, 0, self.bucket_size)
        return head, len(head) + 4 * bucket_count(count, self.bucket_size) + packed_bytes(count, self.bits)

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        x, l2 = arrays.to_float32(values), self.norm == "l2"
        if self.entropy != "none" or self.fit_scale or self.scaled:
            levels = qsgd.levels_of(self.bits)
            norms, codes = qsgd.norms_and_codes(x, self.bucket_size, levels, l2, *key)
            if self.fit_scale:
                norms = qsgd.fit_norms(x, codes, norms, self.bucket_size, levels)
            if self.scaled:
                self.divide(norms, x.size, self.bucket_size)
            if self.entropy != "none":
                entropy = ENTROPY_IDS[self.entropy]
                coded = CODERS[entropy].encode(codes)
                if coded.size < (values.size * self.bits + 7) // 8:
                    return join(self.bits, self.bucket_size, norms, coded, entropy), None
            return join(self.bits, self.bucket_size, norms, pack(codes, self.bits)), None
        header = HEADER.pack(self.bits, 0, 0, self.bucket_size)
        return qsgd.encode_section(header, x, self.bucket_size, self.bits, l2, *key), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        bits, entropy, bucket_size, norms, codes = split(section, count)
        if not 2 <= bits <= 8 or entropy > 2:
            raise ValueError(f"QSGD has 2 to 8 bits and the entropy coders 0 to 2, not {bits} bits and coder {entropy}")
        if entropy:
            return qsgd.dequantize(norms, CODERS[entropy].decode(codes, count), bucket_size, qsgd.levels_of(bits))
        if codes.size != (count * bits + 7) // 8:
            raise ValueError(f"{count} codes of {bits} bits take {(count * bits + 7) // 8} bytes, not {codes.size}")
        return qsgd.decode_section(norms, codes, count, bucket_size, bits)
