"""Hugging Face Accelerate with AdamW: updates are compressed in place of gradients. `pip install accelerate` first.

    torchrun --standalone --nproc-per-node 2 examples/local_sgd_accelerate.py

`prepare` would wrap the model in DistributedDataParallel, which sends all gradients. With `evaluation_mode`, it is
moved to the device and gets mixed precision, and no more.
"""

import torch
from accelerate import Accelerator

from hvd_deepreduce.torch import LocalSGD

accelerator = Accelerator(cpu=True)  # or none, on GPUs
torch.manual_seed(0)  # the same parameters on all ranks
inputs = torch.randn(1024, 64)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model = accelerator.prepare_model(layers, evaluation_mode=True)
inner = torch.optim.AdamW(model.parameters(), lr=0.003)  # dense's times the root of the ranks
local = LocalSGD(inner, model, "adamw_small", process_group=torch.distributed.group.WORLD)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(local, 12 * 8 * 2)  # Accelerate steps it once for each process
batches = torch.utils.data.DataLoader(data, 64, shuffle=True)
optimizer, batches, schedule = accelerator.prepare(local, batches, schedule)
losses = []
for _epoch in range(12):
    for x, y in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
local.sync()  # before an evaluation, and at the end
# A checkpoint: accelerator.save_state writes the optimizer of the main process only, and each rank has a state of its
# own: torch.save({"model": model.state_dict(), "local": local.state_dict()}, f"rank{accelerator.process_index}.pt")
if accelerator.is_main_process:
    share = 1 / local.stats()["total"]["compression_ratio"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
accelerator.end_training()
