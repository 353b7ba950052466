#!/usr/bin/env python3
"""DDP over slow links: step time and bytes of dense gradients, of PyTorch's own hooks, and of deepreduce_hook.

    scripts/bench/bench_ddp.py --rate 1gbit --write
    scripts/bench/bench_ddp.py --rate 10gbit --accuracy --seeds 3 --write

The script creates the emulated network of scripts/bench/netlab, runs itself on each host and removes the emulated
network. All jobs run in the same processes, under torch.distributed with Gloo, each with a process group of its own
(ddp_jobs.py), and their steps are interleaved. A step's time is that of its slowest rank. Bytes are those that the
busiest host has received, by its link's counter. Horovod runs during the steps of its own jobs alone; before each of
them, one step of the same job is not timed. With --accuracy, each job trains by itself for --steps steps, from the same
parameters, on the same batches.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import emulated_network
import numpy as np
import numpy.typing as npt
import typer
from emulated_network import MEMORY, PRIORITY_HELP, RATE_HELP, bits_per_second, measured, received_bytes

START = 3
"""Iterations of a training in which no hook compresses."""
WARM = 3
"""Rounds of the timing that do not count. In the last of them all hooks compress."""
STEPS = {False: 5, True: 300}
"""By default, of the timing and of the training."""


def joined(rate: str) -> Any:
    """Makes the process group of all ranks. Returns mpi4py's communicator of them."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    comm, inside = MPI.COMM_WORLD, rate != MEMORY
    os.environ["GLOO_SOCKET_IFNAME"] = "e0" if inside else "lo"
    port = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
    port, address = comm.bcast(port), "10.77.0.1" if inside else "127.0.0.1"
    dist.init_process_group("gloo", f"tcp://{address}:{port}", rank=comm.rank, world_size=comm.size)
    torch.set_num_threads(1)
    return comm


def slowest(times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The element-wise maximum over all ranks."""
    import torch
    import torch.distributed as dist

    most = torch.from_numpy(times.copy())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.numpy()


def timed(names: list[str], steps: int, shape: dict[str, Any]) -> dict[str, Any]:
    """Interleaves the steps of all jobs, of which so many count.

    Returns:
        Of each job: the ``seconds`` of its steps, and the ``bytes`` that the busiest rank received in one; what
        ``mode: auto`` has ``said``.
    """
    from bench_step import TRIAL
    from ddp_jobs import CONTENDERS, Job, horovod_runs

    jobs = {name: Job(name, 0, start=0, **shape) for name in names}
    for name in ("auto", "lossless_auto"):  # they decide by steps that follow each other
        for _ in range(TRIAL if name in jobs else 0):
            jobs[name].step()

    def prepare(name: str) -> None:
        wanted = CONTENDERS[name].horovod is not None
        horovod_runs(wanted)
        if wanted:  # a step that is not timed: Horovod has forgotten which tensors all ranks have
            jobs[name].step()

    figures = measured({name: job.step for name, job in jobs.items()}, steps, slowest, WARM, prepare)
    for name in [name for name in names if name != "local"]:
        jobs[name].check()
    parameters = sum(one.numel() for one in jobs[names[0]].model.parameters())
    found: dict[str, Any] = {"parameters": parameters, "said": [job.said() for job in jobs.values() if job.said()]}
    found["jobs"] = {
        name: {"seconds": own, "bytes": float(np.median(most))} for name, (own, most, _) in figures.items()
    }
    for job in jobs.values():
        job.close()
    return found


def trained(names: list[str], steps: int, seeds: int, shape: dict[str, Any]) -> dict[str, Any]:
    """Trains each job for so many steps, with each seed.

    Returns:
        Of each job: ``accuracy`` and ``loss`` on the test images, of rank 0 and each seed, and the ``bytes`` that the
        busiest rank received in the whole training.
    """
    import torch.distributed as dist
    from ddp_jobs import Job

    found: dict[str, Any] = {}
    for name in names:
        of_seeds: dict[str, list[float]] = {"accuracy": [], "loss": [], "bytes": []}
        for seed in range(seeds):
            job = Job(name, seed, start=START, steps=steps, **shape)
            before = received_bytes()
            for _ in range(steps):
                job.step()
            of_seeds["bytes"].append(float(slowest(np.array([received_bytes() - before], np.float64))[0]))
            job.check()
            for key, figure in zip(("accuracy", "loss"), job.test(), strict=True):
                of_seeds[key].append(figure)
            parameters = sum(one.numel() for one in job.model.parameters())
            job.close()
        found[name] = of_seeds
        if dist.get_rank() == 0:
            print(name, json.dumps(of_seeds), flush=True)
    return {"parameters": parameters, "seeds": seeds, "jobs": found}


def inside(
    names: list[str], rate: str, steps: int, accuracy: bool, seeds: int, shape: dict[str, Any], output: Path
) -> None:
    """What each rank does; rank 0 writes the results."""
    import torch.distributed as dist

    comm = joined(rate)
    found = trained(names, steps, seeds, shape) if accuracy else timed(names, steps, shape)
    if comm.rank == 0:
        about = {"hosts": comm.size, "rate": rate, "steps": steps, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({**about, **shape, **found}, indent=1))
    comm.Barrier()
    dist.destroy_process_group()


def about(read: dict[str, Any]) -> str:
    """What both tables say first."""
    where = f"{read['hosts']} " + ("ranks share" if read["rate"] == MEMORY else f"hosts at {read['rate']} share")
    return (
        f"The ResNet of train_torch.py with {read['parameters'] / 1e6:.1f} M parameters (width {read['width']}) on "
        f"handwritten digits, {read['batch']} images a rank and step, SGD with momentum, float32. {where} "
        f"{read['cores']} cores, with one thread a rank; load {read['load']:.1f} at the end."
    )


def times_table(read: dict[str, Any]) -> str:
    """The step times as Markdown."""
    from ddp_jobs import CONTENDERS

    jobs, wire = read["jobs"], 8e3 / bits_per_second(read["rate"])
    local = 1e3 * float(np.median(jobs["local"]["seconds"])) if "local" in jobs else None
    rows, head = [], ["job", "what it is", "ms a step (quartiles)", "dense / this"]
    head += ["ms over `local` (share of the step)"] * (local is not None)
    head += ["MB in", "ms of these on the wire"] * (wire > 0)
    for name, job in jobs.items():
        low, middle, high = (1e3 * np.quantile(job["seconds"], [0.25, 0.5, 0.75])).tolist()
        row = [f"`{name}`", CONTENDERS[name].about, f"{middle:.0f} ({low:.0f} to {high:.0f})", ""]
        if "dense" in jobs:
            row[3] = f"{np.median(np.array(jobs['dense']['seconds']) / job['seconds']):.2f}x"
        if local is not None:
            row.append(f"{middle - local:.0f} ({max(0.0, 1 - local / middle):.0%})")
        if wire:
            row += [f"{job['bytes'] / 1e6:.2f}", f"{wire * job['bytes']:.1f}"]
        rows.append(row)
    said = "".join(f" In a job with mode auto, {one}" for one in read["said"])
    return (
        f"{about(read)} Steps of all jobs are interleaved in one run: medians and quartiles of {read['steps']} rounds. "
        "`dense / this` is the median over the rounds of the ratio of the two steps, so above 1 the job is faster than "
        "DDP. `local` is the part of a step that no exchange can shorten; hosts with cores of their own compute it "
        f"sooner. `MB in` is what the busiest host received in a step, by the counter of its link.{said}\n\n"
        + doc_sections.table(head, rows)
    )


def accuracy_table(read: dict[str, Any]) -> str:
    """The accuracies as Markdown."""
    from ddp_jobs import CONTENDERS

    rows, head = [], ["job", "what it is", "test accuracy, mean (each seed)", "test loss, mean (each seed)"]
    head += ["MB in, whole training"] * (read["rate"] != MEMORY)
    for name, job in read["jobs"].items():
        accuracies = ", ".join(f"{100 * one:.2f}%" for one in job["accuracy"])
        losses = ", ".join(f"{one:.4f}" for one in job["loss"])
        row = [f"`{name}`", CONTENDERS[name].about, f"{100 * np.mean(job['accuracy']):.2f}% ({accuracies})"]
        row.append(f"{np.mean(job['loss']):.4f} ({losses})")
        rows.append(row + [f"{np.mean(job['bytes']) / 1e6:.1f}"] * (read["rate"] != MEMORY))
    return (
        f"{about(read)} Every job trains for {read['steps']} steps from the same parameters, on the same batches, with "
        f"one schedule of the learning rate (one cycle, at most {read['lr']:g}), the same for all jobs. No "
        f"hook compresses in the first {START} iterations. The test set has 360 images, so one image is 0.28%.\n\n"
        + doc_sections.table(head, rows)
    )


def main(
    rate: Annotated[str, typer.Option(help=RATE_HELP)] = "1gbit",
    hosts: Annotated[int, typer.Option(min=2, help="number of hosts, one rank each")] = 4,
    steps: Annotated[int | None, typer.Option(min=2, help="steps that count; default: 5, or 300 for accuracy")] = None,
    only: Annotated[str, typer.Option(help="comma-separated jobs; default: all; times: without Horovod's")] = "",
    accuracy: Annotated[bool, typer.Option("--accuracy", help="train each job, in place of times")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="of the training")] = 1,
    width: Annotated[int, typer.Option(min=1, help="of the ResNet")] = 272,
    batch: Annotated[int, typer.Option(min=1, help="images a rank and step")] = 4,
    lr: Annotated[float, typer.Option(help="learning rate, the largest of the training's")] = 0.02,
    output: Annotated[Path | None, typer.Option(help="JSON file; default: in runs/")] = None,
    write: Annotated[bool, typer.Option("--write", help="write the table to docs/results/benchmarks.md")] = False,
    priority: Annotated[int, typer.Option(help=PRIORITY_HELP)] = 0,
    rank: Annotated[bool, typer.Option("--rank", hidden=True)] = False,
) -> None:
    """Compares the jobs, and prints a table."""
    from ddp_jobs import CONTENDERS

    if only:
        names = only.split(",")
    elif accuracy:
        untrained = "local", "dense_5mb", "auto", "lossless_8mb", "lossless_auto"
        names = [name for name in CONTENDERS if name not in untrained]
    else:
        # Horovod's ranks ask MPI for work all the time. On cores that hosts share, beside the threads of other jobs,
        # five rounds did not end in eight minutes.
        names = [name for name, one in CONTENDERS.items() if one.horovod is None]
    if unknown := set(names) - set(CONTENDERS):
        raise typer.BadParameter(f"--only has {', '.join(sorted(unknown))}: choose from {', '.join(CONTENDERS)}")
    what = "ddp_accuracy" if accuracy else f"ddp_{rate}"
    output = output or Path(f"runs/{what}.json")
    if rank:
        emulated_network.prioritize(priority)
        shape = {"width": width, "batch": batch, "lr": lr}
        inside(names, rate, steps or STEPS[accuracy], accuracy, seeds, shape, output)
        return
    emulated_network.run([__file__, "--rank", *sys.argv[1:]], hosts, rate)
    read = json.loads(output.read_text())
    body = accuracy_table(read) if accuracy else times_table(read)
    print(body)
    if write:
        where = "on one machine" if rate == MEMORY else f"in the emulated network at {rate}"
        title = "DDP: accuracy after equal steps" if accuracy else f"DDP, {hosts} ranks {where}"
        doc_sections.write(doc_sections.RESULTS / "benchmarks.md", what, title, body)


if __name__ == "__main__":
    typer.run(main)
