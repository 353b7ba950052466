"""Context: the numbers of indices in windows of 128 elements, coded in the context of the windows before.

Each context counts its symbols, from counts that a gamma distribution of densities gives; the coder: Duda,
arXiv:1311.2540, 2013.
"""

from hvd_deepreduce.codecs.interfaces import U8, U32, LosslessIndexCodec, index_codecs
from hvd_deepreduce.ops import arrays, context


@index_codecs.register
class Context(LosslessIndexCodec):
    """An adaptive coder of how many indices a window of 128 elements has, and of where they are in it; lossless.

    The smallest of the index codecs where the density changes from tensor to tensor and from row to row, and the
    slowest but for ``bloom`` (docs/results/benchmarks.md has bytes and times, beside those of ``rice_blocks``). It runs
    on one core of the host, also for gradients on a GPU. kernels/context/context.cpp draws the section.
    """

    name = "context"
    id = 13
    no_bytes_for_none = True

    @staticmethod
    def section_of(indices: U32, numel: int) -> U8:
        return arrays.move_like(context.encode(arrays.to_host(indices), numel), indices)

    @staticmethod
    def read(section: U8, numel: int, count: int) -> U32:
        return arrays.move_like(context.decode(arrays.to_host(section), numel, count)[0], section)
