"""Trains a small ResNet on scikit-learn's 1,797 handwritten digits, on every rank of a job.

    mpirun -np 2 python scripts/train/train_torch.py --config recommended
    mpirun -np 2 python scripts/train/train_torch.py --config none          # dense, for comparison
    torchrun --standalone --nproc-per-node 2 scripts/train/train_torch.py --launcher ddp --config recommended

Each rank trains on its own part of the data. After each epoch, rank 0 computes the test accuracy and writes
OUT/metrics.json, every rank saves a checkpoint, and all ranks check that their parameters are equal to the bit.
``--resume`` continues from the checkpoints.
"""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from history import History, same_on_all_ranks
from launchers import LAUNCHERS, DdpJob, HorovodJob
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut connection (He et al., CVPR 2016, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.around(x))


class ResNet(nn.Module):
    """A stem and three blocks for 8x8 grey images and ten classes: 0.7 million parameters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1)
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(functional.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images, their labels, test images, their labels: 1,437 and 360 images."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 1, 8, 8) / 8 - 1).astype("float32")
    parts = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    train, test, train_labels, test_labels = (torch.from_numpy(part) for part in parts)
    return train, train_labels, test, test_labels


def save(job: HorovodJob | DdpJob, path: Path, content: Any) -> None:
    """Writes a file atomically, and on all ranks at about the same time."""
    torch.save(content, path.with_suffix(".part"))
    job.barrier()
    os.replace(path.with_suffix(".part"), path)


def main(
    config: Annotated[str, typer.Option(help="a preset, a YAML file, or none for dense")] = "none",
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="images per rank and step")] = 32,
    lr: Annotated[float, typer.Option(help="the largest learning rate of the cosine schedule")] = 0.05,
    seed: int = 0,
    width: Annotated[int, typer.Option(min=1, help="channels of the first layers")] = 64,
    threads: Annotated[int | None, typer.Option(min=1, help="default: the rank's share of the cores")] = None,
    out: Annotated[Path, typer.Option(help="folder for metrics and checkpoints")] = Path("runs/train_torch"),
    resume: Annotated[bool, typer.Option("--resume", help="continue from the checkpoints in OUT")] = False,
    stop_after: Annotated[int | None, typer.Option(help="stop after this epoch, as if interrupted")] = None,
    launcher: Annotated[str, typer.Option(help="horovod (mpirun, horovodrun), or ddp (torchrun)")] = "horovod",
) -> None:
    """Trains, and writes OUT/metrics.json, OUT/config.yaml and the checkpoints."""
    if launcher not in LAUNCHERS:
        raise SystemExit(f"--launcher is {launcher}; it must be one of {', '.join(LAUNCHERS)}")
    job = LAUNCHERS[launcher]()
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // job.local_size))
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits()
    model = ResNet(width)
    plain = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    steps = len(images) // job.size // batch_size
    forward, optimizer, compression = job.distribute(model, plain, config, seed)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * steps, pct_start=0.2)
    settings = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed, "width": width, "ranks": job.size,
                "steps_per_epoch": steps}  # fmt: skip
    history = History(out, config, compression, job.rank, settings, sum(p.numel() for p in model.parameters()))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    parts |= {} if compression is None else {"compression": compression}
    # Each rank saves its own file, because normalization statistics and residuals differ between ranks.
    mine = out / f"checkpoint.rank{job.rank}.pt"
    if resume:
        if not mine.exists():
            raise SystemExit(f"there is no checkpoint {mine.name} in {out}: run once without --resume first")
        saved = torch.load(mine)
        for name, one in parts.items():
            one.load_state_dict(saved[name])
        history.rows = saved["history"]
        done = job.gather(torch.tensor(len(history.rows)), "epochs").tolist()
        if len(set(done)) > 1:
            raise SystemExit(
                f"the checkpoints in {out} are of epochs {done}, by rank, and must be of one epoch: the job was killed "
                "while it wrote them. Start again without --resume"
            )
    job.broadcast(model)
    bar, task = history.progress(epochs * steps)
    with bar:
        for epoch in range(len(history.rows), epochs):
            bar.update(task, completed=epoch * steps)
            begin, waited, loss_sum, before = time.perf_counter(), 0.0, 0.0, history.total()
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
            own = order[job.rank :: job.size]
            model.train()
            for step in range(steps):
                chosen = own[step * batch_size : (step + 1) * batch_size]
                optimizer.zero_grad()
                loss = functional.cross_entropy(forward(images[chosen]), labels[chosen])
                loss.backward()
                ready = time.perf_counter()
                waited += job.step(optimizer) - ready
                schedule.step()
                loss_sum += loss.item()
                bar.advance(task)
            seconds = time.perf_counter() - begin
            own = (parameter.detach().numpy() for parameter in model.parameters())
            same_on_all_ranks(own, lambda digest: job.gather(torch.from_numpy(digest), "parameters"))
            mean = float(job.gather(torch.tensor(loss_sum / steps), "loss").mean())
            model.eval()
            with torch.no_grad():
                accuracy = float((model(test_images).argmax(1) == test_labels).float().mean())
            history.add(before, steps, seconds, waited, loss=mean, accuracy=accuracy)
            row = history.rows[-1]
            if launcher == "horovod":  # DDP waits in the backward pass, and decodes beside it
                row["wait_seconds"] = waited - row["decode_seconds"]
            state = {name: one.state_dict() for name, one in parts.items()}
            save(job, mine, {**state, "history": history.rows})
            history.write(f"epoch {epoch + 1:2}/{epochs}", "accuracy {accuracy:.2%}")
            if stop_after == epoch + 1:
                break
    job.end()


if __name__ == "__main__":
    typer.run(main)
