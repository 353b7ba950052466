"""Blocks: the numbers of the blocks that have an index."""

import struct

from pydantic import Field

from hvd_deepreduce.codecs.index.auto import CHOICES, Auto
from hvd_deepreduce.codecs.interfaces import U8, U32, IndexCodec, RngKey, index_codecs
from hvd_deepreduce.ops import blocks, sections

HEADER = struct.Struct("<IBxxx")
CODERS = {codec.id: codec for codec in CHOICES}
_AUTO = Auto()


@index_codecs.register
class Blocks(IndexCodec):
    """The support is all elements of the blocks that hold a selected element, and the blocks' numbers are sent, coded
    as ``auto`` chooses.

    Lossless after the sparsifier ``block_topk`` with the same block: an element then costs 1 / block of the bits of a
    block's number. After another sparsifier the neighbours of selected elements are sent too.

    Section: no bytes without indices, else::

        | block u32 | codec of the numbers u8 | 0 u8 [3] | section of the numbers |

    Attributes:
        block: elements of a block, 1 to 2^31.
    """

    name = "blocks"
    id = 14
    block: int = Field(4, ge=1, le=2**31)

    def encode(self, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32]:
        if not indices.size:
            return indices.view("u1"), indices
        total = -(-numel // self.block)
        numbers = blocks.numbers(indices, self.block, total)
        support = blocks.indices(numbers, self.block, numel)
        coder = _AUTO.resolve(numbers, total)
        section = sections.join(HEADER.pack(self.block, coder.id), coder.encode(numbers, total, key)[0])
        return section, indices if support.size == indices.size else support

    @staticmethod
    def decode(section: U8, numel: int, count: int, key: RngKey) -> U32:
        if not count:
            if section.size:
                raise ValueError(f"the section has {section.size} bytes: no indices take none")
            return section.view("u4")
        if section.size < HEADER.size:
            raise ValueError(f"a section of blocks begins with {HEADER.size} bytes, and this one has {section.size}")
        start = sections.peek(section, HEADER.size)
        block, codec = HEADER.unpack(start)
        if block == 0 or block > 2**31 or codec not in CODERS or start != HEADER.pack(block, codec):
            raise ValueError(
                f"a section of blocks begins with {start.hex()}; a block of 1 to 2^31 elements, an index codec that "
                "loses nothing, and zeros are allowed"
            )
        numbers = CODERS[codec].decode(section[HEADER.size :], -(-numel // block), -(-count // block), key)
        indices = blocks.indices(numbers, block, numel)
        if indices.size != count:
            raise ValueError(f"its blocks of {block} elements have {indices.size} in all, and {count} are announced")
        return indices
