"""Lightning: gradients of DistributedDataParallel, compressed, and the statistics in Lightning's logger.

    python examples/ddp_lightning.py

`pip install pytorch-lightning` first. Lightning gives the hook to DDP on GPUs only; on CPUs `on_train_start` does."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy

from hvd_deepreduce.torch import ddp

state, losses = ddp.DeepReduceState("recommended"), []


class Regression(pl.LightningModule):
    def on_train_start(self):
        if self.device.type == "cpu":
            self.trainer.strategy.model.register_comm_hook(state, ddp.deepreduce_hook)

    def training_step(self, batch):
        losses.append(torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]))
        return losses[-1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class LogStats(pl.Callback):
    def on_train_batch_end(self, *_):
        self.log_dict(state.stats().as_dict())


torch.manual_seed(0)
inputs = torch.randn(1024, 64)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = Regression()
model.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
options = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False, "max_epochs": 14}
strategy = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=ddp.deepreduce_hook)
trainer = pl.Trainer(strategy=strategy, callbacks=[LogStats()], **options)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=64, shuffle=True))
if trainer.is_global_zero:
    share = 1 / trainer.callback_metrics["deepreduce/total/compression_ratio"].item()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
