"""PyTorch, started with mpirun: bytes, seconds and residuals in TensorBoard, by a callback.

    mpirun -np 2 python examples/torch_tensorboard.py
"""

import horovod.torch as hvd
import torch

from hvd_deepreduce.torch import DeepReduce

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    raise SystemExit("this example needs TensorBoard: pip install tensorboard") from None

hvd.init()
torch.manual_seed(hvd.rank())  # every rank has its own samples
inputs = torch.randn(512, 64)
targets = inputs.sum(1, keepdim=True).sin()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
compression = DeepReduce(model, "recommended")
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters(), compression=compression
)
writer = SummaryWriter(f"runs/tensorboard/rank{hvd.rank()}")


def write(report):
    for name, value in report.as_dict().items():
        writer.add_scalar(name, value, report["total"]["steps"])


compression.add_callback(write)
compression.measure_residuals(every=10)
losses = []
for _ in range(100):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(hvd.allreduce(loss.detach(), name="loss").item())
writer.close()
if hvd.rank() == 0:
    total = compression.stats()["total"]
    share = total["bytes_sent"] / total["dense_bytes"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
