"""The Trainer of Hugging Face Transformers with AdamW: updates are compressed in place of gradients.

    torchrun --standalone --nproc-per-node 2 examples/local_sgd_transformers.py

`pip install transformers accelerate` first.
"""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from hvd_deepreduce.torch import LocalSGD


class Exchange(TrainerCallback):  # save_only_model below: Trainer would give the optimizer of rank 0 to all ranks
    def on_step_end(self, args, state, control, **_):
        if control.should_evaluate or control.should_save:
            local.sync()

    def on_save(self, args, state, control, lr_scheduler=None, **_):
        folder = f"{args.output_dir}/checkpoint-{state.global_step}"
        os.makedirs(folder, exist_ok=True)  # Trainer makes it on rank 0, which may be later here
        saved = {"local": local.state_dict(), "schedule": lr_scheduler.state_dict()}
        torch.save(saved, f"{folder}/rank{args.process_index}.pt")

    def on_train_begin(self, args, state, control, lr_scheduler=None, **_):
        if state.global_step:
            saved = torch.load(f"{args.output_dir}/checkpoint-{state.global_step}/rank{args.process_index}.pt")
            local.load_state_dict(saved["local"])
            lr_scheduler.load_state_dict(saved["schedule"])


options = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "logging_steps": 8, "num_train_epochs": 6}
args = TrainingArguments("runs/hf", per_device_train_batch_size=16, save_steps=80, save_only_model=True, **options)
torch.manual_seed(0)
tokens = (torch.arange(32) * torch.randint(1, 8, (512, 1)) + torch.randint(64, (512, 1))) % 64
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4))
inner, group = torch.optim.AdamW(model.parameters(), lr=0.003), torch.distributed.group.WORLD
local = LocalSGD(inner, model, "adamw_small", process_group=group)
data = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(model, args, train_dataset=data, optimizers=(local, None), callbacks=[Exchange()])
prepare = trainer.accelerator.prepare_model  # with evaluation_mode: without DistributedDataParallel
trainer.accelerator.prepare_model = lambda model, **_: prepare(model, evaluation_mode=True)
for checkpoint in (None, "runs/hf/checkpoint-80"):
    trainer.train(resume_from_checkpoint=checkpoint)
losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
if trainer.is_world_process_zero():
    share = 1 / local.stats()["total"]["compression_ratio"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
