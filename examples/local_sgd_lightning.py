"""Lightning with AdamW: updates are compressed in place of gradients. `pip install pytorch-lightning` first.

    torchrun --standalone --nproc-per-node 2 examples/local_sgd_lightning.py
"""

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy

from hvd_deepreduce.torch import LocalSGD


class Local(DDPStrategy):
    def configure_ddp(self):  # the model is not wrapped in DistributedDataParallel, which would send all gradients
        pass

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):  # each rank has a state of its own
        self.checkpoint_io.save_checkpoint(checkpoint, f"{filepath}.rank{self.global_rank}", storage_options)

    def load_checkpoint(self, checkpoint_path, **options):
        return super().load_checkpoint(f"{checkpoint_path}.rank{self.global_rank}", **options)


class Regression(pl.LightningModule):
    def training_step(self, batch):
        losses.append(torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]))
        return losses[-1]

    def configure_optimizers(self):
        inner = torch.optim.AdamW(self.parameters(), lr=0.003)  # dense's times the root of the ranks
        local = LocalSGD(inner, self, "adamw_small", process_group=torch.distributed.group.WORLD)
        return [local], [torch.optim.lr_scheduler.CosineAnnealingLR(local, 14)]

    def on_validation_start(self):
        self.trainer.optimizers[0].sync()
    on_train_end = on_validation_start


pl.seed_everything(0)  # the same parameters on all ranks
losses, inputs, model = [], torch.randn(1024, 64), Regression()
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
options = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
for epochs, checkpoint in ((10, None), (14, "runs/lightning.ckpt")):
    trainer = pl.Trainer(strategy=Local(), max_epochs=epochs, **options)
    trainer.fit(model, torch.utils.data.DataLoader(data, 64, shuffle=True), ckpt_path=checkpoint)
    trainer.save_checkpoint("runs/lightning.ckpt")
if trainer.is_global_zero:
    share = 1 / trainer.optimizers[0].stats()["total"]["compression_ratio"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
