"""An exchange as another package defines it: settings, and a function over MPI that uses nothing of this package's."""

from __future__ import annotations

from mpi4py import MPI

from hvd_deepreduce.codecs.interfaces import Floats, RngKey
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.settings import ExchangeSettings, exchanges
from hvd_deepreduce.exchange.traffic import Traffic


@exchanges.register
class DenseSum(ExchangeSettings):
    """The tensors made dense, and MPI's own allreduce, ``rounds`` times for the test."""

    name = "external_dense_sum"
    id = 250
    implementation = f"{__name__}:dense_sum"
    rounds: int = 1


def dense_sum(
    settings: DenseSum,
    comm: MPI.Intracomm,
    tensor: SparseTensor | Floats,
    out: Floats,
    residual: Floats | None,
    key: RngKey,
) -> Traffic:
    own = tensor.dense() if isinstance(tensor, SparseTensor) else tensor
    for _ in range(settings.rounds):
        comm.Allreduce(own, out)
    if residual is not None:
        residual -= own
    assert key.rank == comm.rank
    return Traffic(settings.rounds * own.nbytes, settings.rounds * own.nbytes)
