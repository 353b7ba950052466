"""How the ranks' sparse vectors become one sum, over mpi4py, with or without Horovod. One file an algorithm:

- ``densestream``: reduces while it travels; the volume a rank hardly grows with the ranks where supports overlap.
- ``sparcml``: SparCML's split-allgather and recursive doubling, with their switch to dense.
- ``topk_allgather``: every rank gets every rank's elements; the least work for few ranks.

Each has ``allreduce(comm, tensor) -> sum``; importing one needs mpi4py.
"""
