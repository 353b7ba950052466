"""Two sites with 100 ms between them: the time of a training step, by what is exchanged (root and iproute2 are needed).

    python scripts/bench/bench_sites.py
    python scripts/bench/bench_sites.py --milliseconds 30 --megabits 1000

Each site is a network namespace of this machine with one rank; this program carries their packets, each half of the
round trip later, at the rate of the link. A step computes for 0.3 s: a small model's pass, and a pause, as a GPU would
leave the processor alone. With --write, a section of docs/two_sites.md.
"""

import collections
import ctypes
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import numpy as np
import torch
import torch.distributed as dist
import typer
from step_times import interleaved
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_deepreduce.torch import LocalSGD, SignMomentum, ddp

NAMES = ("site-a", "site-b")
MTU = 9000
COMPUTE = 0.3
LIBC = ctypes.CDLL(None, use_errno=True)


def tunnel(namespace: str) -> int:
    """A file descriptor on which the packets of a namespace's device ``far`` come and go."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    LIBC.setns(there, 0)
    try:
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, 0x400454CA, struct.pack("16sH", b"far", 0x1001))  # TUNSETIFF; a tun without a header
    finally:
        LIBC.setns(here, 0)
        os.close(here)
        os.close(there)
    return device


def carry(source: int, target: int, delay: float, rate: float) -> None:
    """Carries packets for ever: each leaves when the link (bytes/s) is free, and arrives ``delay`` s after that."""
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    free = 0.0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            os.write(target, waiting.popleft()[1])
        patience = max(0.0, waiting[0][0] - now) if waiting else None
        if select.select([source], [], [], patience)[0]:
            packet = os.read(source, 65536)
            free = max(free, time.monotonic()) + len(packet) / rate
            waiting.append((free + delay, packet))


@contextmanager
def two_sites(delay: float, rate: float) -> Iterator[None]:
    """Two namespaces with the addresses 10.78.0.1 and 10.78.0.2; ``carry`` for the arguments."""
    devices = []
    try:
        for number, name in enumerate(NAMES, 1):
            subprocess.run(["ip", "netns", "add", name], check=True)
            devices.append(tunnel(name))
            for command in (
                ["link", "set", "lo", "up"], ["link", "set", "far", "mtu", str(MTU)],
                ["addr", "add", f"10.78.0.{number}/24", "dev", "far"], ["link", "set", "far", "up"],
            ):  # fmt: skip
                subprocess.run(["ip", "-n", name, *command], check=True)
        for source, target in (devices, devices[::-1]):
            threading.Thread(target=carry, args=(source, target, delay, rate), daemon=True).start()
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


class Job:
    """A contender: its own model, trained on the same data."""

    def __init__(self, kind: str, config: str | dict[str, Any], **options: Any) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 16))
        self.state: Any = None
        self.optimizer: torch.optim.Optimizer | LocalSGD
        self.model: nn.Module = layers
        if kind == "local":
            inner = torch.optim.AdamW(layers.parameters(), 3e-4)
            self.state = self.optimizer = LocalSGD(inner, layers, config, process_group=dist.group.WORLD, **options)
            return
        if kind != "alone":
            self.model = DistributedDataParallel(layers)
        if kind == "signs":
            self.optimizer = SignMomentum(layers.parameters(), lr=1e-3)
        else:
            self.optimizer = torch.optim.AdamW(layers.parameters(), 3e-4)
        if config:
            self.state = ddp.DeepReduceState(config, scope="bucket")
            self.model.register_comm_hook(self.state, ddp.deepreduce_hook)

    def step(self) -> None:
        end = time.monotonic() + COMPUTE
        x = torch.randn(8, 256)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), x[:, :16].argmax(1))
        time.sleep(max(0.0, end - time.monotonic() - 0.05))  # the exchange of DDP overlaps with the backward pass alone
        loss.backward()
        self.optimizer.step()


CONTENDERS: dict[str, tuple[str, Callable[[], Job], int]] = {
    "alone": ("nothing: a site alone", lambda: Job("alone", ""), 20),
    "dense": ("dense gradients in each step (DDP)", lambda: Job("dense", ""), 2),
    "gradients": ("`recommended`: gradients in each step", lambda: Job("gradients", "recommended"), 20),
    "signs": ("`sign_momentum`: momentum in each step", lambda: Job("signs", "sign_momentum"), 20),
    "small": ("`adamw_small`: updates every 4 steps", lambda: Job("local", "adamw_small"), 32),
    "15": ("the same, every 15 steps", lambda: Job("local", "adamw_small", every=15), 30),
    "late": (
        "the same, every 15 steps, applied 2 steps later", lambda: Job("local", "adamw_small", every=15, delay=2), 30,
    ),
}  # fmt: skip
"""Words, how it is made, and its steps in a round, a multiple of its period."""


def train(rounds: int) -> None:
    """A rank. Rank 0 prints JSON: seconds of a step in each round, and the share of dense's bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    jobs = {name: make() for name, (_, make, _) in CONTENDERS.items()}

    def slowest(seconds: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(seconds)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.numpy()

    def steps(name: str) -> None:
        for _ in range(CONTENDERS[name][2]):
            jobs[name].step()

    seconds = interleaved({name: partial(steps, name) for name in jobs}, rounds, slowest, warm=1)
    if dist.get_rank() == 0:
        shares = {}
        for name, job in jobs.items():
            shares[name] = 1 / job.state.stats()["total"]["compression_ratio"] if job.state else float(name == "dense")
        times = {name: [one / CONTENDERS[name][2] for one in seconds[name]] for name in jobs}
        print(json.dumps({"times": times, "shares": shares}))
    dist.barrier()


def main(
    milliseconds: Annotated[float, typer.Option(min=0, help="of a round trip")] = 100.0,
    megabits: Annotated[float, typer.Option(min=1, help="per second, in each direction")] = 100.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    write: Annotated[bool, typer.Option("--write", help="write the section of benchmarks.md")] = False,
    rank: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Prints the table."""
    if rank:
        return train(rounds)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "far", "MASTER_ADDR": "10.78.0.1",
        "MASTER_PORT": "29400", "WORLD_SIZE": "2",
    }  # fmt: skip
    with two_sites(milliseconds / 2000, megabits * 1e6 / 8), tempfile.TemporaryFile("w+") as said:
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, "--rank", "--rounds", str(rounds)],
                env={**environment, "RANK": str(number)}, stdout=said,
            )
            for number, name in enumerate(NAMES)
        ]  # fmt: skip
        if any([one.wait() for one in started]):
            raise SystemExit("a site failed: see above")
        said.seek(0)
        (line,) = [line for line in said if line.startswith("{")]
    found = json.loads(line)
    rows = [
        [words, f"{found['shares'][name]:.2%}", f"{median(found['times'][name]):.3f}",
         f"{median(found['times']['alone']) / median(found['times'][name]):.0%}"]
        for name, (words, *_) in CONTENDERS.items()
    ]  # fmt: skip
    link = f"--milliseconds {milliseconds:g} --megabits {megabits:g}"
    body = (
        f"`python scripts/bench/bench_sites.py {link}`, {date.today()}: two ranks, {milliseconds:g} ms for a round "
        f"trip, {megabits:g} Mbit/s in each direction, a model of 9.5 million parameters that computes for {COMPUTE} s "
        f"a step. Medians of {rounds} interleaved rounds.\n\n"
    ) + doc_sections.table(["exchanged", "bytes", "s/step", "speed, relative to a site alone"], rows)
    print(body)
    if write:
        doc_sections.write(doc_sections.ROOT / "docs" / "two_sites.md", "sites", "Measured", body)


if __name__ == "__main__":
    typer.run(main)
