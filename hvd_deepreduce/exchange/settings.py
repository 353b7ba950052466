"""What a user sets of an exchange; needs no MPI."""

from typing import Literal

from pydantic import Field

from hvd_deepreduce.codec import Codec, Registry

exchanges = Registry("exchange")


class Exchange(Codec):
    """How the ranks' sparse tensors become one sum."""


@exchanges.register
class AllGather(Exchange):
    """Containers by Horovod's own allgather; every rank decodes all of them. Any codec, MPI or Gloo."""

    name = "allgather"
    id = 1


@exchanges.register
class DenseStreamExchange(Exchange):
    """DenseStream's sparse allreduce over mpi4py: reduces while it travels, for many ranks and higher densities.

    Attributes:
        coded: rice code for the blocks' starts and lengths (ours); off: the paper's plain blocks.
        value: how values travel: ``raw``, ``float16``, ``bfloat16`` or ``qsgd``; what is lost goes to the residual.
        bits: of a value under ``qsgd``, 2 to 8.
        fill: send the residual's own values in place of zeros inside blocks, at no cost in bytes.
    """

    name = "densestream"
    id = 2
    coded: bool = Field(True, strict=True)
    value: Literal["raw", "float16", "bfloat16", "qsgd"] = "raw"
    bits: int = Field(8, ge=2, le=8)
    fill: bool = Field(True, strict=True)


@exchanges.register
class TopKAllGather(Exchange):
    """TopkA: key-value pairs by an allgather of recursive doubling over mpi4py."""

    name = "topk_allgather"
    id = 3


@exchanges.register
class SparCML(Exchange):
    """TopkDA: SparCML's sparse allreduce over mpi4py, with its switch to dense.

    Attributes:
        algorithm: ``split_allgather``, ``recursive_doubling``, or ``auto``, which takes the latter for small vectors.
    """

    name = "sparcml"
    id = 4
    algorithm: Literal["auto", "split_allgather", "recursive_doubling"] = "auto"
