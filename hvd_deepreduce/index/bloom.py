"""Bloom: a Bloom filter of the indices, and a policy for its false positives.

DeepReduce (Xu et al. 2021), sections 3 and 4, algorithm 1 and appendix 10 (remark 2, lemmas 5 to 8).
"""

import math
from typing import Literal, get_args

import numpy as np
from pydantic import Field

from hvd_deepreduce.codec import U8, U32, IndexCodec, Key, index_codecs
from hvd_deepreduce.ops import arrays, bloom, sections, select

Policy = Literal["naive", "p0", "p1", "p2", "leftmost", "middle", "rightmost"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
LARGEST = 2**29 - 1
SMALL = 2**16
"""Up to so many elements an encoder tries more than one filter."""


@index_codecs.register
class Bloom(IndexCodec):
    """The r indices in a filter of m = -r ln(fpr) / (ln 2)^2 bits with k = -log2(fpr) hash functions (remark 2).

    A receiver asks the filter for each index of the tensor: the positives P are the r indices and about
    ``fpr * (d - r)`` false ones. The sender does the same, so it knows P; a policy picks the support out of it, and the
    values are read at the support: a false positive carries its true value, and nothing lands in a wrong place.

    - ``p0``: all of P; no kept element is lost, and |P| values are sent.
    - ``p1``: r random ones of P, drawn again by the receiver from the key.
    - ``p2``: r of P by algorithm 1: an index that alone set a bit is surely true; the others are drawn from the sets of
      indices that share a bit, small sets first.
    - ``leftmost``, ``middle``, ``rightmost``: r successive ones of P; biased where the gradient is.
    - ``naive``: the r values of S are assigned to the first r of P in order, as the paper does to show why a policy is
      needed: behind the first false positive every value lands in a wrong place.

    1.44 log2(1 / fpr) bits a kept element; p0 adds ``fpr * (d - r) / r`` values to each.

    The hash functions are MurmurHash3's finalizer with double hashing, salted by the key and the size. They hash
    blocks of 64 elements and shift by the place in the block, which makes the query of all d indices some 60 times
    cheaper and leaves the false positive rate of an element as it is; but where runs are kept, the false ones come in
    runs too. Drawn in kernels/bloom/bloom.cpp. A filter has at least 8 bytes (which counts for r < 5) and otherwise a
    thousandth less than remark 2 says, which pays for the header.

    How many positives are false is a matter of luck: 38, give or take 10, for 368 of 36,864 elements of a real
    gradient. The hashes depend on the filter's size, so for tensors of up to 65,536 elements the encoder makes up to
    four filters, each a byte smaller than the one before and the smallest by no more than 1%, and sends the one with
    the fewest positives, the first of equals: 28 false ones on average.

    Section: ``| policy << 5 | (k - 1) (1 byte) | the filter: bit b is bit b % 8 of byte b / 8 |``; empty where r is 0.
    m is the number of bits that follow the header.

    Attributes:
        fpr: the false positive rate, 1e-9 to below 1. Lower: more bits an index, fewer false ones.
        policy: see above.
    """

    name = "bloom"
    id = 5
    fpr: float = Field(0.001, ge=1e-9, lt=1)
    policy: Policy = "p0"

    @property
    def keeps_values(self) -> bool:
        """Whether the values of ``indices`` are sent for the support, and not those at the support: naive alone."""
        return self.policy == "naive"

    def encode(self, indices: U32, numel: int, key: Key) -> tuple[U8, U32]:
        if indices.size == 0:
            return indices.view(np.uint8), indices
        hashes = max(1, round(-math.log2(self.fpr)))
        size = math.ceil(0.999 * -indices.size * math.log(self.fpr) / math.log(2) ** 2 / 8)
        size = min(max(size, 8), LARGEST)
        spare = min(3, size // 100) if numel <= SMALL else 0
        filters = (bloom.insert(indices, size - less, hashes, *key[:3]) for less in range(spare + 1))
        tried = ((bits, bloom.query(bits, hashes, numel, *key[:3])) for bits in filters)
        bits, positives = min(tried, key=lambda one: one[1].size)
        header = bytes([POLICIES.index(self.policy) << 5 | hashes - 1])
        support = _choice(self.policy, positives, indices.size, bits.size, hashes, key)
        return sections.join(header, bits), support

    @staticmethod
    def decode(section: U8, numel: int, count: int, key: Key) -> U32:
        if section.size == 0 and count == 0:
            return section.view(np.uint32)
        if section.size < 9 or section.size > LARGEST + 1:
            raise ValueError(f"a Bloom filter takes 9 to {LARGEST + 1} bytes with its header, not {section.size}")
        (first,) = sections.peek(section, 1)
        number, hashes = first >> 5, (first & 31) + 1
        if number >= len(POLICIES):
            raise ValueError(f"the policy of a Bloom filter is 0 to {len(POLICIES) - 1}, not {number}")
        # k is -log2(fpr) rounded, so m is within remark 2's for half a hash function more or less, less 1.1%. Where
        # count is r, this and the number of ones keep the ones few enough that P, and p2's memory with it, stay
        # small.
        policy, size = POLICIES[number], section.size - 1
        most = max(8, math.ceil((hashes + 0.5) * count / math.log(2) / 8))
        least = 0.988 * (hashes - 0.5) * count / math.log(2) / 8 if policy != "p0" and hashes > 1 else 0
        if size > most or size < min(least, LARGEST):
            raise ValueError(f"a Bloom filter of {count} elements and {hashes} hashes is not {section.size} bytes long")
        if policy == "p2" and int(np.unpackbits(arrays.to_host(section[1:])).sum(dtype=np.uint64)) > hashes * count:
            raise ValueError(f"the Bloom filter has more ones than {count} elements and {hashes} hashes can set")
        positives = bloom.query(section[1:], hashes, numel, *key[:3])
        found = positives.size
        if found < count or (policy == "p0" and found != count):
            raise ValueError(f"the Bloom filter holds {found} indices, and {count} are to be taken of them ({policy})")
        return _choice(policy, positives, count, size, hashes, key)


def _choice(policy: Policy, positives: U32, count: int, size: int, hashes: int, key: Key) -> U32:
    """The support out of the positives of a filter of ``size`` bytes."""
    spare = positives.size - count
    if policy == "p0":
        return positives
    if policy == "p1":
        # Those to drop are drawn, not those to keep: they are far fewer.
        return arrays.delete(
            positives, select.random_indices(positives.size, spare, *key[:3], positives)
        )
    if policy == "p2":
        return bloom.conflict_sets(positives, count, size, hashes, *key[:3])
    start = {"middle": spare // 2, "rightmost": spare}.get(policy, 0)
    return positives[start : start + count]
