"""Auto: for each tensor, the lossless index codec of the fewest bytes."""

from hvd_deepreduce.codec import U8, U32, IndexCodec, Key, index_codecs
from hvd_deepreduce.index.bitmap import Bitmap
from hvd_deepreduce.index.delta import Delta
from hvd_deepreduce.index.elias_fano import EliasFano
from hvd_deepreduce.index.packed import Packed
from hvd_deepreduce.index.rans import Rans
from hvd_deepreduce.index.raw import Raw
from hvd_deepreduce.index.rice import Rice
from hvd_deepreduce.index.rle import RLE
from hvd_deepreduce.ops import index_sizes

# The faster one first: of equal sizes it is taken.
CHOICES: tuple[IndexCodec, ...] = (Raw(), Packed(), Bitmap(), EliasFano(), Rice(), Rans(), Delta(), RLE())


@index_codecs.register
class Auto(IndexCodec):
    """One out of ``raw``, ``packed``, ``bitmap``, ``elias_fano``, ``rice``, ``rans``, ``delta`` and ``rle``; lossless.

    Up to 8192 indices their sizes are computed, rANS's from the entropy; beyond, they are estimated from 8192 gaps.
    The choice takes some 0.1 ms at most. It never stands on the wire: a container names the codec that was chosen.
    """

    name = "auto"
    id = 11

    def chosen(self, indices: U32, numel: int) -> IndexCodec:
        count = indices.size
        if count == 0:
            return CHOICES[0]
        rice, rle, delta, elias_fano, rans = index_sizes.index_sizes(indices, numel)
        packed, bitmap = (count * (numel - 1).bit_length() + 7) // 8, (numel + 7) // 8
        sizes = (4 * count, packed, bitmap, elias_fano, rice, rans, delta, rle)
        return CHOICES[sizes.index(min(sizes))]

    def encode(self, indices: U32, numel: int, key: Key) -> tuple[U8, U32]:
        return self.chosen(indices, numel).encode(indices, numel, key)

    @staticmethod
    def decode(section: U8, numel: int, count: int, key: Key) -> U32:
        raise ValueError("auto only chooses an index codec: a container must name the one that was chosen")
