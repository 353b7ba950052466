"""Lightning: gradients of DistributedDataParallel, compressed. `pip install lightning` first.

    python examples/ddp_lightning.py

Lightning gives the hook to DDP on GPUs only; on CPUs `on_train_start` does."""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

from hvd_deepreduce.torch import ddp

state, losses = ddp.DeepReduceState("topk_rice_qsgd"), []


class Regression(lightning.LightningModule):
    def on_train_start(self):
        if self.device.type == "cpu":
            self.trainer.strategy.model.register_comm_hook(state, ddp.deepreduce_hook)

    def training_step(self, batch):
        losses.append(torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]))
        return losses[-1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


torch.manual_seed(0)
inputs = torch.randn(1024, 64)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = Regression()
model.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
options = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False, "max_epochs": 14}
trainer = lightning.Trainer(strategy=DDPStrategy(ddp_comm_state=state, ddp_comm_hook=ddp.deepreduce_hook), **options)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=64, shuffle=True))
if trainer.is_global_zero:
    share = state.stats()["total"]["bytes_sent"] / state.stats()["total"]["dense_bytes"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
