"""The jobs that bench_ddp.py compares: one model under DistributedDataParallel, with each way to average gradients.

The model is the ResNet of train_torch.py, wider: 10.8 million parameters, trained on scikit-learn's handwritten digits.
"""

# Without ``from __future__ import annotations``: DDP compares the hook's annotations with the types.

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train",))

import torch
import torch.distributed as dist
from ddp_rivals import LEAST_START, OverMpi, Rival, RivalState, SparseLoCoWire, TorchTopK, Zstd, rival_hook
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from train_torch import ResNet, digits

from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.exchange.mpi import densestream, sparcml, topk_allgather
from hvd_deepreduce.torch import ddp

PRESET = "recommended"
DENSITY = 0.01
ONE_BUCKET = 1000.0
"""A ``bucket_cap_mb`` that all gradients fit into."""
Hook = Callable[[Any, int], tuple[Any, Any]]
"""Makes a state and a hook, from a process group and the number of iterations before compression begins."""


def _power_sgd(rank: int) -> Hook:
    def make(group: Any, start: int) -> tuple[Any, Any]:
        begin = max(LEAST_START, start)
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=begin)
        return state, powerSGD_hook.powerSGD_hook

    return make


def _ours(preset: str = PRESET, **settings: Any) -> Hook:
    return lambda group, start: (
        ddp.DeepReduceState(preset, group, start_iter=start, **settings), ddp.deepreduce_hook
    )  # fmt: skip


def _rival(rival: Callable[[Any], Rival]) -> Hook:
    return lambda group, start: (RivalState(rival(group), start), rival_hook)


def _over_mpi(allreduce: Callable[..., Any], **settings: Any) -> Hook:
    return _rival(lambda group: OverMpi(group, allreduce, DENSITY, **settings))


@dataclass(frozen=True)
class Contender:
    """A way to average gradients.

    Attributes:
        about: what a table says of it.
        hook: of DDP; None: DDP's own allreduce.
        cap: DDP's ``bucket_cap_mb``; None: its default, 25, and 1 for the first bucket.
        horovod: without DDP, the name of the compression of Horovod's optimizer; None: not by Horovod.
    """

    about: str
    hook: Hook | None = None
    cap: float | None = None
    horovod: str | None = None


CONTENDERS = {
    "local": Contender("no exchange: the forward and backward pass, and the update"),
    "dense": Contender("DDP without a hook"),
    "dense_5mb": Contender("DDP without a hook, `bucket_cap_mb=5`", cap=5.0),
    "fp16": Contender("`fp16_compress_hook`", lambda group, _: (group, default_hooks.fp16_compress_hook)),
    # In one bucket: its callbacks start collectives on Gloo's threads, and the order of two buckets differs between the
    # ranks. With DDP's default buckets they abort: "Is there a distributed collective mismatch in your code?"
    "powersgd_1": Contender("`powerSGD_hook`, rank 1, one bucket", _power_sgd(1), ONE_BUCKET),
    "powersgd_4": Contender("`powerSGD_hook`, rank 4, one bucket", _power_sgd(4), ONE_BUCKET),
    "allgather": Contender(f"`deepreduce_hook`, {PRESET}", _ours()),
    "allgather_4pct": Contender("the same, `density: 0.04`", _ours(density=0.04)),
    "reduce_scatter": Contender(
        "as `allgather`, with `exchange: reduce_scatter`", _ours(scope="bucket", exchange="reduce_scatter")
    ),
    "reduce_scatter_density": Contender(
        "as `reduce_scatter`, whose sum has `density: 0.01`",
        _ours(scope="bucket", exchange={"name": "reduce_scatter", "density": DENSITY}),
    ),
    "lossless": Contender(
        "`deepreduce_hook`, preset `lossless`: dense gradients, of which nothing is lost",
        _ours("lossless", mode="always"),
    ),
    "lossless_8mb": Contender(
        "the same, `bucket_cap_mb=8`: more buckets, of which one is encoded while another is on the wire",
        _ours("lossless", mode="always"), 8.0,
    ),
    "lossless_auto": Contender("as `lossless`, with `mode: auto`", _ours("lossless")),
    "densestream": Contender(
        "top 1%, DenseStream's allreduce over mpi4py, coded blocks, 8-bit QSGD, in a hook of this script",
        _over_mpi(densestream.allreduce, codec=DenseStream(coded=True, value="qsgd")),
    ),
    "auto": Contender("`deepreduce_hook`, `mode: auto`", _ours(mode="auto")),
    # What others do, in hooks of these scripts (ddp_rivals.py).
    "horovod": Contender("`hvd.DistributedOptimizer`, over MPI", horovod="none"),
    "horovod_fp16": Contender("the same with `hvd.Compression.fp16`", horovod="fp16"),
    "torch_topk": Contender(
        "`torch.topk`, top 1%, allgathers of values and int64 indices, as in GRACE",
        _rival(partial(TorchTopK, density=DENSITY)),
    ),
    "topka": Contender("top 1%, TopkA (allgather of pairs) over mpi4py", _over_mpi(topk_allgather.allreduce)),
    "topkda": Contender("top 1%, TopkDA (SparCML, TopkDSA) over mpi4py", _over_mpi(sparcml.allreduce)),
    "zstd": Contender("zstd, level 1, of the float32 bytes, and an allgather; lossless", _rival(Zstd)),
    "sparseloco_wire": Contender(
        "64 of each 4,096 in SparseLoCo's format, 12-bit places and 2-bit values, and an allgather",
        _rival(SparseLoCoWire),
    ),
}


def horovod_runs(wanted: bool) -> None:
    """Starts Horovod, or ends it: its thread asks all ranks for work every millisecond, which slows other jobs. Every
    rank calls it at the same time."""
    import horovod.torch as hvd

    if wanted and not hvd.is_initialized():
        hvd.init()
    elif not wanted and hvd.is_initialized():
        hvd.shutdown()


class Job:
    """One contender's job: its own model, optimizer and process group.

    Args:
        seed: of the parameters and the batches; equal seeds give equal ones to all contenders.
        start: iterations before compression begins; hooks that need ``LEAST_START`` have these at least.
        steps: of the whole training, over which the learning rate rises and falls; 0: it is constant.
    """

    def __init__(self, name: str, seed: int, width: int, batch: int, lr: float, start: int, steps: int = 0) -> None:
        torch.manual_seed(seed)
        self.model, self.state, self._group = ResNet(width), None, dist.new_group(backend="gloo")
        self._forward: Any = self.model
        contender = CONTENDERS[name]
        self._horovod = contender.horovod is not None
        if name != "local" and not self._horovod:
            self._forward = DistributedDataParallel(
                self.model, process_group=self._group, gradient_as_bucket_view=True, broadcast_buffers=False,
                bucket_cap_mb=contender.cap,
            )  # fmt: skip
            if contender.hook is not None:
                self.state, hook = contender.hook(self._group, start)
                self._forward.register_comm_hook(self.state, hook)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9, weight_decay=5e-4, fused=True)
        if self._horovod:
            import horovod.torch as hvd

            horovod_runs(True)
            named = [(f"{name}.{one}", parameter) for one, parameter in self.model.named_parameters()]
            compression = getattr(hvd.Compression, contender.horovod or "none")
            self._optimizer = hvd.DistributedOptimizer(self._optimizer, named, compression)
        one_cycle = torch.optim.lr_scheduler.OneCycleLR
        self._schedule = one_cycle(self._optimizer, lr, total_steps=steps, pct_start=0.2) if steps else None
        self._images, self._labels, self._test_images, self._test_labels = digits()
        self._generator = torch.Generator().manual_seed(seed)
        self._batch, self._order = batch, torch.empty(0, dtype=torch.int64)

    def step(self) -> None:
        """A step of the training; all ranks draw the same order of the images, and each takes its part of a batch."""
        size = self._batch * dist.get_world_size()
        if len(self._order) < size:
            self._order = torch.randperm(len(self._images), generator=self._generator)
        chosen, self._order = self._order[:size][dist.get_rank() :: dist.get_world_size()], self._order[size:]
        self._optimizer.zero_grad()
        functional.cross_entropy(self._forward(self._images[chosen]), self._labels[chosen]).backward()
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Accuracy and mean loss on the test images, on this rank."""
        self.model.eval()
        scores = self.model(self._test_images)
        self.model.train()
        accuracy = (scores.argmax(1) == self._test_labels).float().mean()
        return float(accuracy), float(functional.cross_entropy(scores, self._test_labels))

    def check(self) -> None:
        """Raises RuntimeError if the ranks have different parameters."""
        own = parameters_to_vector(self.model.parameters()).detach()
        first = own.clone()
        dist.broadcast(first, 0, group=self._group)
        differ = torch.tensor([int(not torch.equal(own, first))])
        dist.all_reduce(differ, group=self._group)
        if int(differ):
            raise RuntimeError(f"{int(differ)} ranks have other parameters than rank 0: the gradients' means differed")

    def said(self) -> str:
        """What ``mode: auto`` has decided."""
        return self.state.stats().said if isinstance(self.state, ddp.DeepReduceState) else ""

    def close(self) -> None:
        """Ends its threads and groups; on all ranks after the same step."""
        if hasattr(self.state, "close"):
            self.state.close()
        if self._horovod:
            horovod_runs(False)
        self._forward = None
        dist.destroy_process_group(self._group)
