"""A training step without a framework: what every adapter runs between its framework's hook and its collectives.

An adapter implements two interfaces and calls the engine from its framework's hook:

- ``exchange.Collectives``: rank, size, an asynchronous allgather of bytes, and whether the job runs on MPI.
- ``Tensors``: the flat view of a gradient, its device and stream, and writing the result back.

``Engine`` holds one rank's state: config, parameters, residuals, statistics, exchange queues. It works on flat arrays.
An adapter that adds operations to a graph (TensorFlow) needs nothing else. ``Reducer`` drives the engine for adapters
that see each gradient of a step as a tensor (Horovod on PyTorch, a DDP communication hook, local-update training).

The call sequence of a step, with gradients g1, g2, ... in whatever order the backward pass yields them:

    engine.agree(...)                    once, before the first gradient: all ranks compare release, config and model
    engine.tally(sum of all ranks' engine.vote(...), ...)     every step: all ranks take part, with one config
    engine.stats.begin_step()
    ticket = reducer.start(p1, g1)       copy into its bucket; a full bucket is encoded and its exchange is started,
    ticket = reducer.start(p2, g2)       after the buckets with smaller numbers, in the same order on all ranks
    ...
    reducer.finish(ticket, scale)        the step's first call starts the buckets that are not full, with zeros for
    ...                                  the missing gradients; then wait, decode, add up, write scale * sum into g
    engine.stats.end_step()              no gradient is in flight: the config may change, and state be saved or loaded

``scale`` is 1 / size for an average; Horovod's adapters take it from the carrier.

Buckets that the framework made (DDP's ``GradBucket``) use ``reducer.start_bucket(parameters, number, vector)`` in place
of ``start``; ``finish`` may be called on another thread, while later buckets are being started. In local-update
training, each parameter's change since the last exchange is given in place of a gradient, every H steps.

``Engine`` alone, for graphs:

    layout = BucketLayout(...); bucket = layout.bucket_of[name]; bucket.put(parameter, flat) of all members
    for ready in engine.mark_full(bucket): engine.start(ready)
    engine.receive(bucket); bucket.part(name) of all members; engine.release_all(bucket)

How a bucket becomes its sum is the business of ``engine.exchange`` (``exchange/interface.py``).

Nothing here imports a framework, Horovod or MPI. Only an exchange over MPI loads mpi4py, when it is first used.
"""

from hvd_deepreduce.engine.buckets import Bucket, BucketLayout, Member
from hvd_deepreduce.engine.engine import Engine
from hvd_deepreduce.engine.parameter import Parameter
from hvd_deepreduce.engine.rank_state import ElasticState, Snapshot
from hvd_deepreduce.engine.reducer import Reducer
from hvd_deepreduce.engine.tensors import Device, Tensors
from hvd_deepreduce.engine.ticket import Ticket
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.exchange.statements import MismatchError

__all__ = [
    "Bucket",
    "BucketLayout",
    "Collectives",
    "Device",
    "Engine",
    "Member",
    "MismatchError",
    "Parameter",
    "Reducer",
    "Snapshot",
    "Tensors",
    "Ticket",
    "ElasticState",
]
