"""The settings of the exchanges, and their registry. Needs no MPI.

A settings class names the function that sums, which is imported when the exchange is first used. An exchange of another
package is a subclass of ``ExchangeSettings`` and a function with the signature of ``ExchangeFunction``::

    @exchanges.register
    class TreeSum(ExchangeSettings):                      # in settings of that package; imports no mpi4py
        name = "tree_sum"                                 # in a config: exchange: {name: tree_sum, fanout: 4}
        id = 192                                          # 192 to 254 are reserved for other packages
        implementation = "that_package.tree_sum:run"      # imports mpi4py
        fanout: int = 2

    def run(settings: TreeSum, comm, tensor, out, residual, key) -> Traffic:
        ...
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import Field

from hvd_deepreduce.codecs.interfaces import Codec, Floats, Registry, RngKey
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.traffic import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI

exchanges = Registry("exchange")

Settings = TypeVar("Settings", bound="ExchangeSettings", contravariant=True)


class ExchangeFunction(Protocol[Settings]):
    """What ``ExchangeSettings.implementation`` names: sums the ranks' tensors over MPI."""

    def __call__(
        self,
        settings: Settings,
        comm: MPI.Intracomm,
        tensor: SparseTensor | Floats,
        out: Floats,
        residual: Floats | None,
        key: RngKey,
    ) -> Traffic:
        """Writes the sum of all ranks' tensors to ``out``. Collective: every rank of ``comm`` calls it.

        Calls come one at a time, in the same order on all ranks, from a thread that only does this. Before it calls,
        the queue has compared the ranks' settings, keys, dtypes and numbers of elements. Afterwards it compares their
        sums.

        Args:
            settings: the exchange's settings, equal on all ranks.
            comm: an intracommunicator that only these calls use.
            tensor: what this rank sends: a sparse tensor of ``out.size`` elements, or a dense vector ``[numel]``.
            out: float32 or float64 ``[numel]``, of the tensor's dtype. Its content is undefined before the call. The
                sum must be bitwise the same on all ranks. With ``on_gpu`` it may be on a GPU, and the residual with it;
                the tensor is on the host.
            residual: the accumulated gradient from which ``tensor`` was selected, ``[numel]``, of the tensor's dtype.
                What was sent must be subtracted from it, once it is certain that no rank has failed. None: there is no
                error feedback, or this rank's tensor is not finite; other ranks may have one nevertheless.
            key: the randomness for rounding; its first three fields are equal on all ranks, ``key.rank`` is this rank.

        Returns:
            The bytes that this rank sent to others and received from them, for ``stats()``.

        Raises:
            Exception: any; all ranks then get an ``ExchangeError`` with its text from ``ExchangeQueue.submit``, once
                all of them have returned or raised. So what one rank raises must not leave others waiting for it.
        """


class ExchangeSettings(Codec):
    """How the ranks' sparse tensors become one sum.

    A subclass is the settings; its class attribute ``implementation`` names its ``ExchangeFunction`` as
    "module:function". ``implementation`` None means that the exchange is not a function over MPI: containers are
    exchanged by the framework's own collectives. ``in_session`` says that the function itself compares what the ranks
    bring and their sums (``session.Session``), so that the queue need not. ``on_gpu`` says that it takes ``out`` and
    ``residual`` as arrays on a GPU, too; otherwise gradients on a GPU are copied to the host, and their sums back.

    Raises:
        TypeError: a subclass is defined without ``implementation``, or with one that is no such name.
    """

    implementation: ClassVar[str | None]
    in_session: ClassVar[bool] = False
    on_gpu: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        name = getattr(cls, "implementation", "")
        if name is None and cls.__module__ == __name__:
            return  # exchanges of containers, which the engine runs
        if not isinstance(name, str) or name.count(":") != 1:
            raise TypeError(
                f"{cls.__name__}.implementation is {name!r}; this class attribute must name the function that sums "
                "over MPI, as 'module:function'"
            )

    def load(self) -> ExchangeFunction[Any]:
        """The function that ``implementation`` names.

        Raises:
            ValueError: there is none, or it cannot be found.
            ImportError: its module cannot be imported, for instance because mpi4py is not installed.
        """
        if self.implementation is None:
            raise ValueError(f"exchange {self.name!r} has no function over MPI: ExchangeQueue cannot run it")
        try:
            function = pkgutil.resolve_name(self.implementation)
        except AttributeError as error:
            raise ValueError(f"exchange {self.name!r} has implementation {self.implementation!r}: {error}") from None
        if not callable(function):
            raise ValueError(
                f"exchange {self.name!r} has implementation {self.implementation!r}, which is of "
                f"type {type(function).__name__}; a function is required"
            )
        loaded: ExchangeFunction[Any] = function
        return loaded


@exchanges.register
class AllGather(ExchangeSettings):
    """Containers by Horovod's own allgather; every rank decodes all of them. Any codec, with MPI or Gloo."""

    name = "allgather"
    id = 1
    implementation = None


@exchanges.register
class ReduceScatter(ExchangeSettings):
    """Each rank sums one slice of the vector and encodes the sum again, by Horovod's alltoall and allgather. Any codec,
    with MPI or Gloo.

    What the second encoding loses stays in the residual of the rank that sums the slice; under the memory
    ``scaled_momentum`` it is lost.

    Attributes:
        density: of the sum, in (0, 1]: the elements of largest magnitude of each slice are sent, as many of each slice
            as of any other. The slices are chosen so that all ranks receive about as many elements, whatever the ranks
            keep. None: every element of the sum that is not 0 is sent, and the slices are equally long; under the
            memory ``scaled_momentum`` they are balanced, too.
        round_sum: round the sum to bfloat16, or float16, before it is sent, in buckets whose gradients all have that
            dtype, so that a codec that loses nothing sends 16 bits of it. With a residual, the rounding errors stay in
            it. Dense allreduces round to that dtype in each addition.
    """

    name = "reduce_scatter"
    id = 5
    implementation = None
    density: float | None = Field(None, gt=0, le=1)
    round_sum: bool = Field(False, strict=True)


@exchanges.register
class AutoExchange(ExchangeSettings):
    """The exchange that a model of latency and bytes finds fastest: allgather, reduce_scatter or, where a job runs on
    MPI, densestream. The job measures its network before the first step.

    Attributes:
        density: as of ``reduce_scatter`` and ``densestream``, if one of them is chosen.
        bandwidth: what a rank receives, in Gbit/s; None: measured.
        latency: of a message, in microseconds; None: measured.
    """

    name = "auto"
    id = 6
    implementation = None
    density: float | None = Field(None, gt=0, le=1)
    bandwidth: float | None = Field(None, gt=0)
    latency: float | None = Field(None, ge=0)


@exchanges.register
class DenseStreamExchange(ExchangeSettings):
    """DenseStream's sparse allreduce over mpi4py: sums parts on the way, for many ranks and higher densities.

    Attributes:
        coded: Rice code for the blocks' starts and lengths (ours); off: the paper's plain blocks.
        value: how values are encoded: ``raw``, ``float16``, ``bfloat16`` or ``qsgd``; rounding errors stay in the
            residual.
        bits: bits per value with ``qsgd``, 2 to 8.
        fill: send the residual's own values in place of zeros inside blocks, at no cost in bytes (DenseStream, section
            IV.B). None: if there are such zeros, which coded blocks have with ``qsgd`` only, and error feedback.
        density: of the sum, in (0, 1]: partial sums are cut to their elements of largest magnitude on the way, so that
            a rank receives at most about three times as many elements, whatever the ranks keep and however many they
            are. What a rank cuts stays in its residual. None: the sum has all elements that a rank has kept.
    """

    name = "densestream"
    id = 2
    implementation = "hvd_deepreduce.exchange.mpi.densestream:run_exchange"
    in_session = on_gpu = True
    coded: bool = Field(True, strict=True)
    value: Literal["raw", "float16", "bfloat16", "qsgd"] = "raw"
    bits: int = Field(8, ge=2, le=8)
    fill: bool | None = Field(None, strict=True)
    density: float | None = Field(None, gt=0, le=1)

    @property
    def has_zeros(self) -> bool:
        """Whether a block can have zeros inside: not if another coded block takes fewer bits than a zero
        (``codecs.joint.stream.coded_gap``)."""
        return not self.coded or self.value == "qsgd"

    @property
    def fills(self) -> bool:
        """Whether blocks are filled where there is a residual."""
        return self.has_zeros and self.fill is not False

    def unused_settings(self) -> Iterator[tuple[str, str, str]]:
        if self.value != "qsgd":
            yield "bits", "value", f"value is {self.value!r}, and only 'qsgd' has a number of bits"


@exchanges.register
class TopKAllGather(ExchangeSettings):
    """TopkA: key-value pairs by an allgather over mpi4py, with recursive doubling."""

    name = "topk_allgather"
    id = 3
    implementation = "hvd_deepreduce.exchange.mpi.topk_allgather:run_exchange"
    in_session = on_gpu = True


@exchanges.register
class SparCML(ExchangeSettings):
    """TopkDA: SparCML's sparse allreduce over mpi4py, which sends ranges dense where that is shorter.

    Attributes:
        algorithm: ``split_allgather``, ``recursive_doubling``, or ``auto``: recursive doubling for small vectors.
    """

    name = "sparcml"
    id = 4
    implementation = "hvd_deepreduce.exchange.mpi.sparcml:run_exchange"
    in_session = on_gpu = True
    algorithm: Literal["auto", "split_allgather", "recursive_doubling"] = "auto"
