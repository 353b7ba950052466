"""What goes wrong on one rank is an error on all, in bounded time: cases of mpi_cases.py, and faults that end the job.

mpirun -np 3 python tests/exchange/faults.py silent|silent_midway|dies
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.joint.stream_format import CODED, HEADER, pack
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.codecs.value.half import Half
from hvd_deepreduce.exchange.mpi import announcement, densestream, sparcml, topk_allgather
from hvd_deepreduce.exchange.mpi.errors import ExchangeError, LostRankError
from hvd_deepreduce.exchange.mpi.mpi_transport import MPITransport
from tests.case_runner import case

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
BAD = SIZE - 1
CARD_BYTES = 4608
"""Of cards that hold the tensors of these cases."""
announcement.CARD_BYTES = announcement.HEADER.size
"""No tensor travels on a card, so that small ones take messages; except ``with_cards``."""
MODULES = {
    "densestream": densestream,
    "topk": topk_allgather,
    "sparcml": sparcml,
}


@contextlib.contextmanager
def with_cards() -> Iterator[None]:
    """Within the context, small tensors travel on the ranks' cards."""
    before = announcement.CARD_BYTES
    announcement.CARD_BYTES = CARD_BYTES
    try:
        yield
    finally:
        announcement.CARD_BYTES = before


def mine(numel: int = 1000, dtype: type = np.float32) -> SparseTensor:
    rng = np.random.default_rng(RANK)
    indices = np.unique(rng.integers(0, numel, 300)).astype(np.uint32)
    return SparseTensor(numel, indices, rng.standard_normal(indices.size).astype(dtype))


def refused(*words: str, call) -> None:
    """Every rank gets the same error, which holds the words; the communicator works on."""
    residual = np.ones(1000, np.float32)
    try:
        call(residual)
    except ExchangeError as error:
        text = str(error)
    else:
        text = "no error"
    texts = COMM.allgather(text)
    assert len(set(texts)) == 1 and all(word in text for word in words), (words, texts)
    assert np.all(residual == 1), "the residual was changed"
    one = np.ones(4, np.float32)
    assert np.all(densestream.allreduce(COMM, one, dense=True, timeout=20) == SIZE)


@case
def wrong_input() -> None:
    for name, module in MODULES.items():
        allreduce = module.allreduce
        refused(
            "1001 elements",
            "1000 elements",
            str(BAD),
            call=lambda r, f=allreduce: f(COMM, mine(1001 if RANK == BAD else 1000), timeout=20),
        )
        refused(
            "float64",
            "float32",
            str(BAD),
            call=lambda r, f=allreduce: f(COMM, mine(dtype=np.float64 if RANK == BAD else np.float32), timeout=20),
        )
        refused(
            "out is",
            f"rank {BAD}",
            call=lambda r, f=allreduce: f(
                COMM, mine(), dense=True, out=np.empty(5 if RANK == BAD else 1000, np.float32), residual=r, timeout=20
            ),
        )
        refused(
            "dense vector",
            f"rank {BAD}",
            call=lambda r, f=allreduce: f(COMM, np.ones((10, 100)) if RANK == BAD else np.ones(1000), timeout=20),
        )
        refused(
            "tensor is a list; a SparseTensor or a NumPy array is required",
            f"rank {BAD}",
            call=lambda r, f=allreduce: f(COMM, [1.0] * 1000 if RANK == BAD else np.ones(1000), timeout=20),
        )
        if name != "densestream":
            refused(
                "densestream with",
                name.split("_")[0],
                call=lambda r, f=allreduce: (densestream.allreduce if RANK == BAD else f)(COMM, mine(), timeout=20),
            )
    refused(
        "coded=True",
        "coded=False",
        call=lambda r: densestream.allreduce(COMM, mine(), codec=DenseStream(coded=RANK == BAD), timeout=20),
    )


def changed(header: dict[int, int]):
    """A broken pack: fields of the header changed on the bad rank."""

    def broken(stream: Stream, form: int, *arguments):
        section = pack(stream, form, *arguments)
        fields = list(HEADER.unpack_from(section.data))
        for at, value in header.items():
            fields[at] = value
        HEADER.pack_into(section.data, 0, *fields)
        return section

    return broken


def swapped(stream: Stream, form: int, *arguments):
    """Blocks that overlap."""
    starts = stream.starts.copy()
    starts[1:] = starts[:-1]
    return pack(Stream(stream.numel, starts, stream.lengths, stream.values), form, *arguments)


def outside(stream: Stream, form: int, *arguments):
    """Blocks that run past N."""
    starts = stream.starts + np.uint32(stream.numel)
    return pack(Stream(stream.numel, starts, stream.lengths, stream.values), form, *arguments)


def cut(stream: Stream, form: int, *arguments):
    return pack(stream, form, *arguments)[:-8]


def noise(stream: Stream, form: int, *arguments):
    section = pack(stream, form, *arguments)
    return np.random.default_rng(3).integers(0, 256, section.size).astype(np.uint8)


@case
def a_stream_that_the_settings_cannot_give() -> None:
    """Of another form or value codec than the agreed ones, though it can be read."""

    def other(stream: Stream, form: int, *arguments):
        return pack(stream, CODED)

    def lossy(stream: Stream, form: int, codec=None, *arguments):
        return pack(stream, form, Half(), *arguments)

    for module in MODULES.values():
        for broken, word in ((other, "it has form 1 "), (lossy, f"value codec {Half.id}; here the form must be ")):

            def call(residual, module=module, broken=broken):
                module.pack = broken if RANK == BAD else pack
                try:
                    module.allreduce(COMM, mine(), residual=residual, timeout=20)
                finally:
                    module.pack = pack

            refused(f"of rank {BAD}", word, call=call)


@case
def broken_messages() -> None:
    cases = {
        "overlap": swapped,
        "elements": outside,
        "to a vector of 5": changed({3: 5}),
        "for a range of": changed({5: 2**31}),
        "form": changed({0: 9}),
        "value codec": changed({2: 77}),
        "truncated": cut,
        "": noise,
    }
    for module in MODULES.values():
        for word, broken in cases.items():
            for slices in (1 << 13, 40):

                def call(residual, module=module, broken=broken, slices=slices):
                    densestream.SLICE_ELEMENTS = slices
                    module.pack = broken if RANK == BAD else pack
                    try:
                        module.allreduce(COMM, mine(), residual=residual, timeout=20)
                    finally:
                        densestream.SLICE_ELEMENTS = 1 << 13
                        module.pack = pack

                refused(f"rank {BAD}", word, call=call)


def silent() -> None:
    """One rank comes late. With a limit, the others give up, and the late one gets the same error at once."""
    densestream.allreduce(COMM, mine(), timeout=20)
    if RANK == BAD:
        time.sleep(3)
    began = time.monotonic()
    for _ in range(2):
        try:
            densestream.allreduce(COMM, mine(), timeout=20, patience=2)
        except LostRankError as error:
            print(error, flush=True)
        else:
            raise AssertionError("no error")
    assert time.monotonic() - began < 15


def silent_midway() -> None:
    """One rank comes, and then sends nothing."""
    densestream.allreduce(COMM, mine(), timeout=20)
    if RANK == BAD:
        run = MPITransport.run

        def later(self, programs) -> None:
            time.sleep(3)
            run(self, programs)

        MPITransport.run = later
    try:
        densestream.allreduce(COMM, mine(), timeout=2)
    except LostRankError as error:
        print(f"rank {RANK}: {error}", flush=True)
    else:
        raise AssertionError("no error")


def dies() -> None:
    """One rank is killed between its messages."""
    densestream.SLICE_ELEMENTS = 20
    send = MPITransport.send
    sent = []

    def count(self, to, tag, parts):
        sent.append(to)
        if RANK == BAD and len(sent) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, to, tag, parts)

    MPITransport.send = count
    try:
        densestream.allreduce(COMM, mine(), timeout=5)
    except LostRankError as error:
        print(f"rank {RANK}: {error}", flush=True)
        os._exit(5)


if __name__ == "__main__":
    try:
        {"silent": silent, "silent_midway": silent_midway, "dies": dies}[sys.argv[1]]()
        COMM.Barrier()
        if RANK == 0:
            print("all faults were found", flush=True)
        os._exit(0)  # MPI_Finalize would wait for the messages that were given up
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        COMM.Abort(1)
