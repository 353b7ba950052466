"""Bloom: a Bloom filter of the indices, and a policy for its false positives.

DeepReduce (Kostopoulou et al. 2021), sections 3 and 4, algorithm 1, and sections A.2 and B of the appendix (remark 2,
lemmas 3 and 6 to 9).
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U8, U32, IndexCodec, RngKey, index_codecs
from hvd_deepreduce.ops import arrays, bloom, random
from hvd_deepreduce.ops.sections import join, peek, place_of

Policy = Literal["naive", "p0", "p1", "p2", "leftmost", "middle", "rightmost"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
LARGEST = 2**29 - 1
"""The most bytes of a filter."""
SMALL = 2**16
"""The most elements for which an encoder tries more than one filter."""


@index_codecs.register
class Bloom(IndexCodec):
    """The r indices in a filter of m = -r ln(fpr) / (ln 2)^2 bits with k = -log2(fpr) hash functions (remark 2).

    A receiver queries the filter for each index of the tensor. The positives P are the r indices and about
    ``fpr * (d - r)`` false ones. The sender does the same, so it knows P. A policy chooses the support from P, and the
    values are read at the support, so a false positive carries its true value and no value is put in a wrong place.

    - ``p0``: all of P. No kept element is lost, and |P| values are sent.
    - ``p1``: r of P at random; the receiver repeats the choice from the key.
    - ``p2``: r of P by algorithm 1. An index that alone set a bit is certainly true; the others are drawn from the sets
      of indices that share a bit, small sets first. Where these sets would take too much memory, ``p1`` is sent.
    - ``leftmost``, ``middle``, ``rightmost``: r consecutive ones of P; biased if the gradient is.
    - ``naive``: the first r of P, with the values of the r selected indices in their order. The paper uses it to show
      why a policy is needed: after the first false positive every value is put in a wrong place.

    What is published of the loss of ``p1`` and of the consecutive policies does not all hold (docs/papers.md;
    tests/bounds measures it). Lemma 9's E1 = (1 - k1 / r) ||g_P||^2 and its E2 leave out the energy of the other part
    of P: E1 is 0.72 ||g_P||^2 where 0.65 is claimed. Lemma 8 (ii) and equation 9 claim the loss (1 - r / d)
    ||g||^2 for every sparsifier, 0.99 for the top 1% of normal variates, where 0.95 is lost: it holds for random-r, and
    top-r loses less.

    1.44 log2(1 / fpr) bits per kept element; p0 adds ``fpr * (d - r) / r`` values per kept element.

    The hash functions are MurmurHash3's finalizer with double hashing, salted by the key and the filter's size. They
    hash blocks of 64 elements and rotate by the place in the block. This makes the query of all d indices about 60
    times cheaper and leaves the false positive rate of an element as it is; but if runs are kept, false positives come
    in runs too. kernels/bloom/bloom.cpp draws the filter. A filter has at least 8 bytes (which matters for r < 5), and
    otherwise a thousandth fewer than remark 2 gives, which pays for the header.

    The number of false positives varies: it is 38, plus or minus 10, for 368 of 36,864 elements of a real gradient. The
    hashes depend on the filter's size, so for tensors of at most 65,536 elements the encoder makes up to ``tries``
    filters, each a byte smaller than the one before and the last at most 1% smaller than the first. It sends the one
    with the fewest positives, of equal ones the first: 28 false positives on average with four tries. That is ours; the
    paper's filter is the first one.

    Section: ``| policy << 5 | (k - 1) (1 byte) | the filter: bit b is bit b % 8 of byte b / 8 |``; empty if r is 0.
    m is the number of bits after the header.

    Attributes:
        fpr: the false positive rate, 1e-9 to below 1. A lower rate takes more bits per index.
        policy: how the support is chosen from the positives: ``p0`` takes all, ``p1`` random ones, ``p2`` draws from
            conflict sets (algorithm 1), ``leftmost``, ``middle`` and ``rightmost`` take consecutive ones, ``naive`` the
            first ones.
        tries: the most filters to choose the best of, 1 to 4; 1 is the paper's, and takes the least time.
    """

    name = "bloom"
    id = 5
    fpr: float = Field(0.001, ge=1e-9, lt=1)
    policy: Policy = "p0"
    tries: int = Field(4, ge=1, le=4)

    @property
    def keeps_values(self) -> bool:
        """Whether the values at the selected indices are sent, and not those at the support: for ``naive`` only."""
        return self.policy == "naive"

    def _filter_bytes(self, count: int) -> int:
        """Of remark 2, less a thousandth."""
        return min(max(math.ceil(0.999 * -count * math.log(self.fpr) / math.log(2) ** 2 / 8), 8), LARGEST)

    def least_bytes(self, count: int) -> int:
        return self._filter_bytes(count) + 2 - self.tries  # a header, and the smallest of the filters

    def encode(self, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32]:
        if indices.size == 0:
            return indices.view(np.uint8), indices
        hashes = max(1, round(-math.log2(self.fpr)))
        size = self._filter_bytes(indices.size)
        spare = min(self.tries - 1, size // 100) if numel <= SMALL else 0
        filters = (bloom.insert(indices, size - less, hashes, *key[:3]) for less in range(spare + 1))
        candidates = ((bits, bloom.query(bits, hashes, numel, *key[:3])) for bits in filters)
        bits, positives = min(candidates, key=lambda candidate: candidate[1].size)
        policy = self.policy
        try:
            support = _choice(policy, positives, indices.size, numel, bits.size, hashes, key)
        except bloom.TooManyConflictsError:  # a reader would refuse p2
            policy = "p1"
            support = _choice(policy, positives, indices.size, numel, bits.size, hashes, key)
        header = bytes([POLICIES.index(policy) << 5 | hashes - 1])
        return join(header, bits), support

    @staticmethod
    def decode(section: U8, numel: int, count: int, key: RngKey) -> U32:
        if section.size == 0 and count == 0:
            return section.view(np.uint32)
        policy, hashes = _opened(section, count)
        positives = bloom.query(section[1:], hashes, numel, *key[:3])
        if positives.size < count or (policy == "p0" and positives.size != count):
            raise ValueError(
                f"the Bloom filter holds {positives.size} indices, and {count} are to be taken of them ({policy})"
            )
        return _choice(policy, positives, count, numel, section.size - 1, hashes, key)

    @classmethod
    def decode_many(cls, sections: Sequence[U8], numel: int, counts: Sequence[int], key: RngKey) -> list[U32]:
        found = place_of(sections) if all(counts) else None
        if found is not None:
            opened = [_opened(section, count) for section, count in zip(sections, counts, strict=True)]
            if all(policy == "p0" for policy, _ in opened):  # the positives are the support
                data, places = found
                filters = [
                    bloom.Filter(at + 1, section.size - 1, hashes, count)
                    for at, section, (_, hashes), count in zip(places, sections, opened, counts, strict=True)
                ]
                return bloom.query_many(data, filters, numel, *key[:3])
        return super().decode_many(sections, numel, counts, key)


def _opened(section: U8, count: int) -> tuple[Policy, int]:
    """The policy and the number of hash functions of a section that has a filter.

    Raises:
        ValueError: no section of ``count`` elements is such.
    """
    if section.size < 9 or section.size > LARGEST + 1:
        raise ValueError(f"the section has {section.size} bytes: a Bloom filter's has 9 to {LARGEST + 1}")
    (first,) = peek(section, 1)
    number, hashes = first >> 5, (first & 31) + 1
    if number >= len(POLICIES):
        raise ValueError(f"the policy has the number {number}: a Bloom filter's is 0 to {len(POLICIES) - 1}")
    # k is -log2(fpr), rounded, so m is between remark 2's values for k - 1/2 and k + 1/2, less 1.1%. If count is r,
    # these bounds and the number of ones keep P, and with it the memory that p2 takes, small.
    policy, size = POLICIES[number], section.size - 1
    most = max(8, math.ceil((hashes + 0.5) * count / math.log(2) / 8))
    least = 0.988 * (hashes - 0.5) * count / math.log(2) / 8 if policy != "p0" and hashes > 1 else 0
    if size > most or size < min(least, LARGEST):
        raise ValueError(
            f"the section is {section.size} bytes long: no Bloom filter of {count} elements and {hashes} hashes is"
        )
    if policy == "p2" and int.from_bytes(arrays.to_host(section[1:]).data, "little").bit_count() > hashes * count:
        raise ValueError(f"the Bloom filter has more ones than {count} elements and {hashes} hashes can set")
    return policy, hashes


def _choice(policy: Policy, positives: U32, count: int, numel: int, size: int, hashes: int, key: RngKey) -> U32:
    """The ``count`` of the positives of a filter of ``size`` bytes that are the support.

    Raises:
        TooManyConflictsError: with p2.
    """
    spare = positives.size - count
    if spare == 0 or policy == "p0":
        return positives
    if policy == "p1":
        # A permutation's first places are deleted, or its last ones are kept: whichever are fewer.
        if spare <= count:
            return arrays.delete(positives, random.indices(positives.size, spare, *key[:3], positives))
        return arrays.gather(positives, random.indices(positives.size, count, *key[:3], positives, spare))
    if policy == "p2":
        return bloom.conflict_sets(positives, count, bloom.most_members(numel), size, hashes, *key[:3])
    start = {"middle": spare // 2, "rightmost": spare}.get(policy, 0)
    return positives[start : start + count]
