"""Auto: the index codec of the smallest section among those whose sizes can be computed, for each vector."""

from collections.abc import Sequence

from hvd_deepreduce.codecs.index.bitmap import Bitmap
from hvd_deepreduce.codecs.index.delta import Delta
from hvd_deepreduce.codecs.index.elias_fano import EliasFano
from hvd_deepreduce.codecs.index.packed import Packed
from hvd_deepreduce.codecs.index.rans import Rans
from hvd_deepreduce.codecs.index.raw import Raw
from hvd_deepreduce.codecs.index.rice import Rice
from hvd_deepreduce.codecs.index.rice_blocks import RiceBlocks
from hvd_deepreduce.codecs.index.rle import RLE
from hvd_deepreduce.codecs.interfaces import U8, U32, IndexCodec, RngKey, index_codecs
from hvd_deepreduce.ops import bits, index_sizes

CHOICES: tuple[IndexCodec, ...] = (Raw(), Packed(), Bitmap(), EliasFano(), Rice(), Rans(), Delta(), RLE(), RiceBlocks())
"""Of sections of equal size, the first is chosen; fast ones are first. A container of a job names a choice by its
place, so that new ones are added at the end."""


@index_codecs.register
class Auto(IndexCodec):
    """Takes the smallest of ``raw``, ``packed``, ``bitmap``, ``elias_fano``, ``rice``, ``rice_blocks``, ``rans``,
    ``delta`` and ``rle``; lossless.

    Up to 8192 indices, the size of each section is computed, except that rans's is estimated from the entropy; for more
    indices, the sizes are estimated from 8192 gaps. The choice takes about 0.1 ms at most. Auto's id is never sent: a
    container names the codec that was chosen.

    Not compared: ``bloom``, which is lossy; ``huffman``, which codes single bytes and does not use that indices are
    sorted; and ``context``, whose size is known only after encoding, which takes about five times as long as with
    ``rans`` (docs/results/benchmarks.md has bytes and times). Choose them by name.
    """

    name = "auto"
    id = 11

    def resolve(self, indices: U32, numel: int) -> IndexCodec:
        """The codec of the smallest section for these indices."""
        count = indices.size
        if count == 0:
            return CHOICES[0]
        rice, rle, delta, rice_blocks, elias_fano, rans = index_sizes.estimate(indices, numel)
        packed, bitmap = bits.packed_bytes(count, (numel - 1).bit_length()), bits.packed_bytes(numel, 1)
        sizes = (4 * count, packed, bitmap, elias_fano, rice, rans, delta, rle, rice_blocks)
        return CHOICES[sizes.index(min(sizes))]

    @property
    def choices(self) -> Sequence[IndexCodec]:
        return CHOICES

    def encode(self, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32]:
        return self.resolve(indices, numel).encode(indices, numel, key)

    @staticmethod
    def decode(section: U8, numel: int, count: int, key: RngKey) -> U32:
        raise ValueError("the container names the index codec auto, which only chooses: it must name the codec chosen")
