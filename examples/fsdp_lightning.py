"""Lightning with FSDP2: shards within a replica, compressed gradients between the replicas.

    torchrun --standalone --nproc-per-node 4 examples/fsdp_lightning.py

`pip install pytorch-lightning` first. `ModelParallelStrategy` leaves sharding to `configure_model`.
"""

import pytorch_lightning as pl
import torch
import torch.distributed.checkpoint as dcp
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvd_deepreduce.torch.checkpoint import checkpointed
from hvd_deepreduce.torch.fsdp import compress_replicas


class Regression(pl.LightningModule):
    def configure_model(self):
        if not hasattr(self, "layers"):
            torch.manual_seed(0)  # the replicas begin alike
            linear = torch.nn.Linear
            self.layers = torch.nn.Sequential(linear(64, 256), torch.nn.ReLU(), linear(256, 1))
            mesh = init_device_mesh(self.trainer.strategy.root_device.type, (2, 2), mesh_dim_names=("far", "near"))
            fully_shard(self.layers, mesh=mesh["near"])
            self.replicas = compress_replicas(self.layers, mesh["far"], "recommended")

    def training_step(self, batch):
        losses.append(torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]))
        return losses[-1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):  # each rank's residuals, beside Lightning's folder of the shards
        dcp.save({"residuals": checkpointed(self.replicas)}, checkpoint_id=f"{folder}.residuals")

    def on_load_checkpoint(self, checkpoint):
        path = f"{folder}.residuals"
        dcp.load({"residuals": checkpointed(self.replicas, path)}, checkpoint_id=path)


losses, inputs, model, folder = [], torch.randn(1024, 64), Regression(), "runs/fsdp_lightning"
data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True).tanh())
options = {"accelerator": "cpu", "devices": 4, "logger": False, "enable_checkpointing": False}
for epochs, checkpoint in ((15, None), (20, folder)):
    strategy = ModelParallelStrategy(4, 1)  # each of the 4 ranks has its own samples
    trainer = pl.Trainer(strategy=strategy, max_epochs=epochs, gradient_clip_val=1.0, **options)
    trainer.fit(model, torch.utils.data.DataLoader(data, 64, shuffle=True), ckpt_path=checkpoint)
    trainer.save_checkpoint(folder)
if trainer.is_global_zero:
    total = model.replicas.stats()["total"]
    share = total["bytes_sent"] / total["dense_bytes"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
model.replicas.close()
