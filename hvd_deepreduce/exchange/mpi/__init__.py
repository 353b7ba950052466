"""Sparse allreduces over mpi4py, with or without Horovod: how the ranks' sparse tensors become one sum.

The allreduces, one file each; each has ``allreduce(comm, tensor, ...) -> sum``, which needs mpi4py, and its programs,
which do not:

- ``densestream``: sums parts on the way; the bytes per rank hardly grow with the ranks where supports overlap.
- ``sparcml``: SparCML's split-allgather and recursive doubling, with their switch to dense ranges.
- ``topk_allgather``: every rank gets every rank's elements; the least work for few ranks.

The modules, in an order in which each imports only modules above it. One exception: the three allreduces import
``session`` when they are called, so that their programs need no MPI.

    errors                     what users see                                                     no MPI
    messages announcement      the bytes of a message, and of what a rank hands in when it comes  no MPI
    transport schedules        programs and their messages; who sends to whom in which round      no MPI
    sum_buffer                 where the result is collected                                      no MPI
    densestream sparcml topk_allgather
    private_comm               waiting with a time limit, and notices that a rank has left        MPI
    mpi_transport session      messages over MPI; one allreduce from meeting to agreement         MPI
    queue                      a training job's exchanges, in order, on a thread                  MPI
"""
