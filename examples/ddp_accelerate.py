"""Hugging Face Accelerate: gradients of DistributedDataParallel, compressed. `pip install accelerate` first.

    torchrun --standalone --nproc-per-node 2 examples/ddp_accelerate.py
"""

import torch
from accelerate import Accelerator

from hvd_deepreduce.torch import ddp

accelerator = Accelerator(cpu=True)  # or none, on GPUs
torch.manual_seed(0)
inputs = torch.randn(1024, 64)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model, optimizer, batches = accelerator.prepare(
    layers, torch.optim.SGD(layers.parameters(), lr=0.05), torch.utils.data.DataLoader(data, 64, shuffle=True)
)
state = ddp.DeepReduceState("recommended")
model.register_comm_hook(state, ddp.deepreduce_hook)
losses = []
for _epoch in range(12):
    for x, y in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
if accelerator.is_main_process:
    total = state.stats()["total"]
    share = total["bytes_sent"] / total["dense_bytes"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
accelerator.end_training()
