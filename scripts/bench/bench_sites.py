"""Hosts with 100 ms between them: the time of a training step, by what is exchanged (root and iproute2 are needed).

    python scripts/bench/bench_sites.py
    python scripts/bench/bench_sites.py --milliseconds 30 --megabits 1000
    python scripts/bench/bench_sites.py --hosts 4 --millions 25 --seconds 1.5

Each host is a network namespace of this machine with one rank; this program carries their packets, each half of the
round trip later, at the rate of the hosts' links. A step computes for 0.3 s: a model's pass, and a pause, as a GPU
would leave the processor alone; many hosts on few cores need longer pauses. With --write, a section of
docs/two_sites.md.
"""

import ctypes
import fcntl
import heapq
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
from typing import Annotated, Any, NamedTuple

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

MTU = 9000
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


def carry(devices: list[int], delay: float, rate: float) -> None:
    """Carries packets for ever. Each leaves its host when the host's link (bytes/s, in each direction) is free, and has
    arrived ``delay`` s after that, if the other host's link was free as well."""
    waiting: list[tuple[float, int, int, bytes]] = []
    away, home = [0.0] * len(devices), [0.0] * len(devices)
    carried = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            os.write(devices[target], packet)
        patience = max(0.0, waiting[0][0] - now) if waiting else None
        for ready in select.select(devices, [], [], patience)[0]:
            packet = os.read(ready, 65536)
            source, target = devices.index(ready), packet[19] - 1  # the last byte of the destination
            if packet[0] >> 4 != 4 or not 0 <= target < len(devices):  # not of IPv4, or to all hosts
                continue
            away[source] = max(away[source], time.monotonic()) + len(packet) / rate
            home[target] = max(home[target] + len(packet) / rate, away[source] + delay)
            heapq.heappush(waiting, (home[target], carried, target, packet))
            carried += 1


@contextmanager
def network(names: list[str], delay: float, rate: float) -> Iterator[None]:
    """Namespaces with the addresses 10.78.0.1, 10.78.0.2, ...; ``carry`` for the arguments."""
    devices = []
    try:
        for number, name in enumerate(names, 1):
            subprocess.run(["ip", "netns", "add", name], check=True)
            devices.append(tunnel(name))
            for command in (
                ["link", "set", "lo", "up"], ["link", "set", "far", "mtu", str(MTU)],
                ["addr", "add", f"10.78.0.{number}/24", "dev", "far"], ["link", "set", "far", "up"],
            ):  # fmt: skip
                subprocess.run(["ip", "-n", name, *command], check=True)
        threading.Thread(target=carry, args=(devices, delay, rate), daemon=True).start()
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


class Size(NamedTuple):
    """Of a model, in millions of parameters, and of its step."""

    millions: float
    seconds: float


class Job:
    """A contender: its own model, trained on the same data."""

    def __init__(self, kind: str, config: str | dict[str, Any], size: Size, **options: Any) -> None:
        torch.manual_seed(0)
        self.seconds, millions = size.seconds, size.millions
        wide = round(2048 * (millions / 9.5) ** 0.5)
        layers = nn.Sequential(
            nn.Linear(256, 2 * wide), nn.ReLU(), nn.Linear(2 * wide, wide), nn.ReLU(), nn.Linear(wide, 16)
        )
        self.parameters = sum(one.numel() for one in layers.parameters())
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
        end = time.monotonic() + self.seconds
        x = torch.randn(8, 256)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), x[:, :16].argmax(1))
        time.sleep(max(0.0, end - time.monotonic() - 0.05))  # the exchange of DDP overlaps with the backward pass alone
        loss.backward()
        self.optimizer.step()


def updates(every: int, **options: int) -> Callable[[Size], Job]:
    return lambda size: Job("local", "adamw_small", size, every=every, **options)


CONTENDERS: dict[str, tuple[str, Callable[[Size], Job], int]] = {
    "alone": ("nothing: a host alone", lambda size: Job("alone", "", size), 20),
    "dense": ("dense gradients in each step (DDP)", lambda size: Job("dense", "", size), 2),
    "gradients": (
        "`recommended`: gradients in each step", lambda size: Job("gradients", "recommended", size), 20,
    ),
    "signs": ("`sign_momentum`: momentum in each step", lambda size: Job("signs", "sign_momentum", size), 20),
    "4": ("`adamw_small`: updates every 4 steps", updates(4), 32),
    "15": ("`adamw_small`: updates every 15 steps", updates(15), 30),
    "30": ("the same, every 30 steps", updates(30), 30),
    "15 late": ("the same, every 15 steps, applied 4 steps later", updates(15, delay=4), 30),
    "30 late": ("the same, every 30 steps, applied 4 steps later", updates(30, delay=4), 30),
    "15 parts": ("every 15 steps in 3 fragments, applied 4 steps later", updates(15, fragments=3, delay=4), 30),
    "30 parts": ("every 30 steps in 3 fragments, applied 4 steps later", updates(30, fragments=3, delay=4), 30),
}  # fmt: skip
"""Words, how it is made, and its steps in a round, a multiple of its period."""
SITES = ["alone", "dense", "gradients", "signs", "4", "15", "15 late"]
MANY = ["alone", "15", "30", "15 late", "30 late", "15 parts", "30 parts"]
BEFORE = 7
"""Steps before the rounds, so that none ends just as an exchange has begun, which would take no time then."""


def train(contenders: list[str], rounds: int, warm: int, size: Size) -> None:
    """A rank. Each contender is timed beside the job that exchanges nothing, and then freed. Rank 0 prints JSON: by
    contender, seconds of a step in each round, those of that job beside it, and the share of dense's bytes; and the
    model's number of parameters."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    alone = CONTENDERS["alone"][1](size)
    times: dict[str, list[float]] = {"alone": []}
    beside: dict[str, list[float]] = {}
    shares = {"alone": 0.0}

    def slowest(seconds: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(seconds)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.numpy()

    def steps(job: Job, count: int) -> None:
        for _ in range(count):
            job.step()

    for name in contenders[1:]:
        job = CONTENDERS[name][1](size)
        jobs = {"alone": alone, name: job}
        # As many, where it is no wait: the slowest of several ranks is the slower the fewer steps it is the mean of.
        counts = {"alone": max(10, CONTENDERS[name][2]), name: CONTENDERS[name][2]}
        steps(job, BEFORE)
        found = interleaved({one: partial(steps, jobs[one], counts[one]) for one in jobs}, rounds, slowest, warm)
        times[name], beside[name] = ([seconds / counts[one] for seconds in found[one]] for one in (name, "alone"))
        times["alone"] += beside[name]
        shares[name] = 1 / job.state.stats()["total"]["compression_ratio"] if job.state else 1.0
        if isinstance(job.optimizer, LocalSGD):
            job.optimizer.close()
        del job, jobs
    if dist.get_rank() == 0:
        print(json.dumps({"times": times, "beside": beside, "shares": shares, "parameters": alone.parameters}))
    dist.barrier()


def main(
    milliseconds: Annotated[float, typer.Option(min=0, help="of a round trip")] = 100.0,
    megabits: Annotated[float, typer.Option(min=1, help="per second, in each direction")] = 100.0,
    hosts: Annotated[int, typer.Option(min=2, max=250)] = 2,
    millions: Annotated[float, typer.Option(min=0.1, help="of parameters, about")] = 9.5,
    seconds: Annotated[float, typer.Option(min=0.1, help="that a step computes")] = 0.3,
    only: Annotated[list[str] | None, typer.Option(help=f"a row beside 'alone': {', '.join(CONTENDERS)}")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    warm: Annotated[int, typer.Option(min=0, help="rounds before these")] = 1,
    write: Annotated[bool, typer.Option("--write", help="write a section of docs/two_sites.md")] = False,
    rank: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Prints the table."""
    contenders = ["alone", *only] if only else SITES if hosts == 2 else MANY
    if unknown := set(contenders) - set(CONTENDERS):
        raise typer.BadParameter(f"there is no row {sorted(unknown)}; there are {', '.join(CONTENDERS)}")
    if rank:
        return train(contenders, rounds, warm, Size(millions, seconds))
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "far", "MASTER_ADDR": "10.78.0.1",
        "MASTER_PORT": "29400", "WORLD_SIZE": str(hosts),
    }  # fmt: skip
    names = [f"site-{number}" for number in range(hosts)]
    with network(names, milliseconds / 2000, megabits * 1e6 / 8), tempfile.TemporaryFile("w+") as said:
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *sys.argv, "--rank"],
                env={**environment, "RANK": str(number)}, stdout=said,
            )
            for number, name in enumerate(names)
        ]  # fmt: skip
        if any([one.wait() for one in started]):
            raise SystemExit("a host failed: see above")
        said.seek(0)
        (line,) = [line for line in said if line.startswith("{")]
    found = json.loads(line)
    rows = []
    for name in contenders:
        own = found["times"][name]
        ratio = median(one / mine for mine, one in zip(own, found["beside"].get(name, own), strict=True))
        rows.append([CONTENDERS[name][0], f"{found['shares'][name]:.2%}", f"{median(own):.3f}", f"{ratio:.1%}"])
    many = f" --hosts {hosts} --millions {millions:g} --seconds {seconds:g}" if hosts > 2 else ""
    body = (
        f"`python scripts/bench/bench_sites.py --milliseconds {milliseconds:g} --megabits {megabits:g}{many}`, "
        f"{date.today()}: {hosts} ranks, {milliseconds:g} ms for a round trip, {megabits:g} Mbit/s in each direction, "
        f"a model of {found['parameters'] / 1e6:.1f} million parameters that computes for {seconds:g} s a step. "
        f"Medians of {rounds} rounds, each beside the host alone; the last column is that of their ratios. Load "
        f"{os.getloadavg()[0]:.1f} at the end.\n\n"
    ) + doc_sections.table(["exchanged", "bytes", "s/step", "speed, relative to a host alone"], rows)
    print(body)
    if write:
        name, title = ("sites", "Measured") if hosts == 2 else ("hosts", f"{hosts} hosts")
        doc_sections.write(doc_sections.ROOT / "docs" / "two_sites.md", name, title, body)


if __name__ == "__main__":
    typer.run(main)
