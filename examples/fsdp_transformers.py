"""The Trainer of Transformers with FSDP2: compressed gradients between the replicas. `pip install accelerate` too.

    torchrun --standalone --nproc-per-node 4 examples/fsdp_transformers.py
"""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hvd_deepreduce.torch import SignMomentum, checkpoint, fsdp


class Sharded(Trainer):  # Trainer's own checkpoints have the shards of rank 0 alone
    def parts(self, folder=None):
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        return parts | {"schedule": self.lr_scheduler, "sent": checkpoint.checkpointed(replicas, folder)}

    def _save_optimizer_and_scheduler(self, folder):
        dcp.save(self.parts(), checkpoint_id=folder)

    def _load_optimizer_and_scheduler(self, folder):
        if folder:
            dcp.load(parts := self.parts(folder), checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])

    def save_model(self, *_, **__):  # a part of the above
        pass
    _load_from_checkpoint = save_model


options = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "logging_steps": 8, "num_train_epochs": 8}
args = TrainingArguments("runs/fsdp", per_device_train_batch_size=16, max_grad_norm=0.0, save_steps=32, **options)
mesh = init_device_mesh(args.device.type, (2, args.world_size // 2), mesh_dim_names=("far", "near"))
torch.manual_seed(0)  # the replicas begin alike
tokens = (torch.arange(32) * torch.randint(1, 8, (512, 1)) + torch.randint(64, (512, 1))) % 64
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4))
for block in [*model.transformer.h, model]:
    fully_shard(block, mesh=mesh["near"])
replicas = fsdp.compress_replicas(model, mesh["far"], "sign_momentum")
optimizer = SignMomentum(model.parameters(), lr=0.004, weight_decay=0.05)
trainer = Sharded(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
                  optimizers=(optimizer, None))  # fmt: skip
prepare = trainer.accelerator.prepare_model  # with evaluation_mode: without DistributedDataParallel
trainer.accelerator.prepare_model = lambda model, **_: prepare(model, evaluation_mode=True)
for folder in (None, "runs/fsdp/checkpoint-32"):
    trainer.train(resume_from_checkpoint=folder)
losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
if trainer.is_world_process_zero():
    total = replicas.stats()["total"]
    share = total["bytes_sent"] / total["dense_bytes"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
replicas.close()
