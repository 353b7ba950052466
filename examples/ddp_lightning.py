"""Lightning: gradients of DistributedDataParallel, compressed. `pip install lightning` first.

    python examples/ddp_lightning.py

Lightning passes the hook on to DDP on GPUs only; on CPUs the callback does.
"""

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from hvd_deepreduce.torch import ddp


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
        self.losses = []

    def training_step(self, batch):
        self.losses.append(torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]))
        return self.losses[-1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class OnCpus(L.Callback):
    def on_train_start(self, trainer, module):
        if module.device.type == "cpu":
            trainer.strategy.model.register_comm_hook(state, ddp.deepreduce_hook)


state = ddp.DeepReduceState("topk_rice_qsgd")
torch.manual_seed(0)
inputs = torch.randn(1024, 64)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = Regression()
strategy = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=ddp.deepreduce_hook, process_group_backend="gloo")
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=10, callbacks=[OnCpus()], **quiet)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=64, shuffle=True))
if trainer.is_global_zero:
    total = state.stats()["total"]
    share = total["bytes_sent"] / total["dense_bytes"]
    print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
