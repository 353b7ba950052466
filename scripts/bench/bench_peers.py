"""LocalSGD through a shared folder while one peer is killed or slowed each minute: how far the others come.

    python scripts/bench/bench_peers.py                    # 20 minutes, and 4 undisturbed ones
    python scripts/bench/bench_peers.py --minutes 4 --calm 2

Four processes train a small model; a step takes 0.1 s, of which most is a pause. Each minute one of them is killed, and
starts again from its last state after 20 s; or runs at a third of its speed for the rest of the minute; or is stopped
for as long. The others' steps in that minute are compared with those of an undisturbed minute. With --write, a section
of docs/results/benchmarks.md.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from hashlib import blake2b
from pathlib import Path
from statistics import mean
from typing import Annotated

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev",))

import doc_sections
import torch
import typer
from torch import nn

from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch import LocalSGD

PEERS, PAUSE, EVERY, AWAY = 4, 0.1, 50, 20.0
KINDS = ("killed", "slowed", "stopped")


def train(folder: Path, peer: int) -> None:
    """A peer, until it is killed: a line for each step, and its state after each exchange."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    store = SharedStore(folder / "job", peer=peer, peers=PEERS, keep=1000)
    optimizer = LocalSGD(torch.optim.AdamW(model.parameters(), 1e-3), model, "adamw_safe", every=EVERY, store=store)
    path = folder / f"state{peer}"
    if path.exists():
        kept = torch.load(path, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    updates, done = optimizer._updates, 0
    with (folder / f"log{peer}").open("a") as log:
        while True:
            time.sleep(PAUSE)
            x = torch.randn(32, 64)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :8].argmax(1)).backward()
            optimizer.step()
            number = updates.fragments[0].outer_steps
            anchors = blake2b(b"".join(one.numpy().tobytes() for one in updates.anchors), digest_size=8).hexdigest()
            log.write(json.dumps([time.time(), number, anchors]) + "\n")
            log.flush()
            if number > done:
                done = number
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}.new")
                os.replace(f"{path}.new", path)


def started(folder: Path, peer: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--folder", str(folder), "--peer", str(peer)])


def lines(folder: Path, peer: int) -> list[tuple[float, int, str]]:
    text = (folder / f"log{peer}").read_text()
    return [tuple(json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]


def disturb(folder: Path, processes: list[subprocess.Popen[bytes]], peer: int, kind: str, until: float) -> None:
    """Kills, slows or stops a peer until the end of its minute."""
    process = processes[peer]
    if kind == "killed":
        process.kill()
        process.wait()
        time.sleep(AWAY)
        processes[peer] = started(folder, peer)
        return
    while time.monotonic() < until:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.4 if kind == "slowed" else max(0.0, until - time.monotonic()))
        process.send_signal(signal.SIGCONT)
        time.sleep(0.2)


def measure(minutes: int, calm: int, seed: int) -> list[tuple[str, float]]:
    """What was done in each minute, and the steps per second of the others. The first minute does not count."""
    found, rng = [], random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [started(folder, peer) for peer in range(PEERS)]
        try:
            for minute in range(1 + calm + minutes):
                begin, end = time.time(), time.monotonic() + 60
                kind = "" if minute <= calm else KINDS[(minute - calm - 1) % len(KINDS)]
                peer = rng.randrange(PEERS) if kind else -1
                if kind:
                    disturb(folder, processes, peer, kind, end)
                time.sleep(max(0.0, end - time.monotonic()))
                took = time.time() - begin
                steps = [sum(begin < at for at, *_ in lines(folder, one)) / took for one in range(PEERS) if one != peer]
                if minute:
                    found.append((kind, mean(steps)))
                    print(f"{kind or 'undisturbed'}: {found[-1][1]:.2f} steps/s of each of the others", flush=True)
        finally:
            for process in processes:
                process.kill()
        anchors: dict[int, set[str]] = {}
        for peer in range(PEERS):
            for _, number, anchor in lines(folder, peer):
                anchors.setdefault(number, set()).add(anchor)
        if any(len(one) > 1 for one in anchors.values()):
            raise SystemExit("peers had other anchors after the same outer step")
        print(f"{max(anchors)} exchanges; all peers had the same anchor after each")
    return found


def main(
    minutes: Annotated[int, typer.Option(min=1, help="with a disturbance each")] = 20,
    calm: Annotated[int, typer.Option(min=1, help="undisturbed minutes, before these")] = 4,
    seed: int = 0,
    write: Annotated[bool, typer.Option("--write", help="write the section of benchmarks.md")] = False,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    peer: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Prints the table."""
    if folder is not None:
        train(folder, peer)
    found = measure(minutes, calm, seed)
    still = mean(speed for kind, speed in found if not kind)
    rows = []
    for kind in ("", *KINDS):
        speeds = [speed for one, speed in found if one == kind]
        if speeds:
            shares = [speed / still for speed in speeds]
            told = f"{mean(speeds):.2f}", f"{mean(shares):.1%}", f"{min(shares):.1%}"
            rows.append([kind or "not disturbed", len(speeds), *told])
    head = ["one peer of four is", "minutes", "steps/s of the others", "share of undisturbed", "least"]
    body = (
        f"`python scripts/bench/bench_peers.py --minutes {minutes} --calm {calm}`, {date.today()}: four processes, a "
        f"step takes {PAUSE} s, {EVERY} steps from one exchange to the next. A killed peer is away for {AWAY:g} s and "
        "starts again from its state; a slowed one has a third of its speed; a stopped one does nothing for a minute. "
        "After each outer step all peers that have taken it had the same anchor, bit for bit.\n\n"
    ) + doc_sections.table(head, rows)
    print(body)
    if write:
        doc_sections.write(doc_sections.RESULTS / "benchmarks.md", "peers", "Peers that come and go", body)


if __name__ == "__main__":
    typer.run(main)
