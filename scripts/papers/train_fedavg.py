"""Federated averaging with both directions compressed: DeepReduce's Algorithm 2 (appendix), on handwritten digits.

    mpirun -np 2 python scripts/papers/train_fedavg.py run --clients 10 --drawn 10
    python scripts/papers/train_fedavg.py run --simulate --clients 10000 --drawn 100 --samples 20
    python scripts/papers/train_fedavg.py compare silo --write         # the methods of Tables 4 and 5

The server is on rank 0, and client k on rank k % size. A simulation does the same in one process, to the bit. The model
is a perceptron with one hidden layer; a client's data are skewed by a Dirichlet distribution over the classes. In a
comparison, each method has the best step size of the clients for its accuracy on a seed that is not reported.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import figure_kit
import numpy as np
import torch
import typer
from federated import DOWN, UP, Down, Link, OneProcess, Round, Vector, federate
from local_updates import Outer
from rich.progress import track
from simulated_training import Network, accuracy
from torch import nn
from torch.nn import functional

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.exchange import costs

DOC = figure_kit.RESULTS / "schemes.md"
Ints = np.ndarray[Any, Any]
DENSE: dict[str, Any] = {"sparsifier": "none", "value": "raw", "error_feedback": False}
app = typer.Typer(add_completion=False)


def load(data: str) -> tuple[Vector, Ints, Vector, Ints]:
    """Training images ``[n, pixels]``, labels, test images, labels: of scikit-learn (``digits``) or of MNIST."""
    if data == "mnist":
        from mnist import mnist_5k

        return mnist_5k()
    from train_torch import digits

    images, labels, test, test_labels = (part.numpy() for part in digits())
    return images.reshape(len(images), -1), labels, test.reshape(len(test), -1), test_labels


def skewed(labels: Ints, clients: int, alpha: float, samples: int | None, seed: int) -> list[Ints]:
    """The numbers of each client's images, skewed by Dirichlet(alpha).

    Args:
        samples: None: the images are divided: of each class, client k gets a share; shares are Dirichlet(alpha), drawn
            again until every client has an image. Else each client draws so many images, of classes in shares of its
            own, which are Dirichlet(alpha); clients may have the same images.
    """
    rng = np.random.default_rng((seed, clients))
    by_class = [rng.permutation(np.flatnonzero(labels == label)) for label in range(int(labels.max()) + 1)]
    if samples is not None:
        shares = rng.dirichlet([alpha] * len(by_class), clients)
        counts = [zip(by_class, rng.multinomial(samples, share), strict=True) for share in shares]
        return [np.concatenate([rng.choice(of, count) for of, count in row]) for row in counts]
    for _ in range(1000):
        shares = [np.cumsum(rng.dirichlet([alpha] * clients))[:-1] for _ in by_class]
        cuts = [np.split(of, (own * len(of)).astype(int)) for of, own in zip(by_class, shares, strict=True)]
        parts = [np.concatenate([cut[client] for cut in cuts]) for client in range(clients)]
        if min(map(len, parts)):
            return parts
    raise typer.BadParameter(
        f"{len(labels)} images cannot be divided among {clients} clients with --alpha {alpha}: some would have none. "
        "Give --samples, fewer clients or a larger alpha"
    )


@dataclass
class Local:
    """Training on a client, with Adam or plain SGD, begun anew in each round; ``parts`` are those of ``skewed``."""

    data: tuple[Vector, Ints, Vector, Ints]
    parts: list[Ints]
    hidden: int
    epochs: int
    batch: int
    lr: float
    adam: bool
    seed: int

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        self._images, self._labels, self._test, self._test_labels = map(torch.from_numpy, self.data)
        widths = self._images.shape[1], self.hidden, int(self._labels.max()) + 1
        self._network = Network(nn.Sequential(nn.Linear(*widths[:2]), nn.ReLU(), nn.Linear(*widths[1:])))

    def vector(self) -> Vector:
        """The network's parameters, float32 ``[numel]``."""
        return self._network.vector()

    def __call__(self, number: int, client: int, model: Vector) -> Vector:
        """A client's training in a round."""
        self._network.load(model)
        kind = torch.optim.Adam if self.adam else torch.optim.SGD
        optimizer = kind(self._network.parameters, self.lr, fused=True)
        rng = np.random.default_rng((self.seed, number, client))
        for _ in range(self.epochs):
            for chosen in torch.from_numpy(rng.permutation(self.parts[client])).split(self.batch):
                optimizer.zero_grad()
                functional.cross_entropy(self._network.model(self._images[chosen]), self._labels[chosen]).backward()
                optimizer.step()
        return self.vector()

    def accuracy(self, model: Vector) -> float:
        """On the test images."""
        self._network.load(model)
        return accuracy(self._network.model, self._test, self._test_labels)


class Ranks(OneProcess):
    """Messages over Horovod. Containers go to all ranks, since it has no gather; only rank 0 reads them."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self._hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()

    def share(self, data: U8 | None) -> U8:
        size = self._hvd.broadcast(torch.tensor([0 if data is None else data.size]), 0, name="size")
        given = torch.zeros(int(size), dtype=torch.uint8) if data is None else torch.from_numpy(data.copy())
        return self._hvd.broadcast(given, 0, name="message").numpy()

    def gather(self, own: dict[int, U8], all_clients: list[int]) -> dict[int, U8]:
        mine = [torch.from_numpy(own[client]) for client in sorted(own)]
        sizes = self._hvd.allgather(torch.tensor([part.numel() for part in mine], dtype=torch.int64), name="sizes")
        data = self._hvd.allgather(torch.cat([*mine, torch.zeros(0, dtype=torch.uint8)]), name="containers").numpy()
        order = [client for rank in range(self.size) for client in all_clients if client % self.size == rank]
        return dict(zip(order, np.split(data, np.cumsum(sizes.numpy())[:-1]), strict=True))


@dataclass(frozen=True)
class Job:
    """A federated training: see the options of ``run``."""

    data: str = "mnist"
    clients: int = 10
    drawn: int = 10
    rounds: int = 40
    alpha: float = 0.5
    samples: int | None = None
    hidden: int = 64
    epochs: int = 1
    batch: int = 16
    lr: float = 0.001
    adam: bool = True
    seed: int = 0


def train(
    job: Job, up: Config, down_config: Config, down: Down, outer: Outer, transport: OneProcess, look: int = 1
) -> Iterator[Round]:
    """Runs the job: the figures of each round, with the test accuracy every ``look`` rounds on rank 0."""
    data = load(job.data)
    parts = skewed(data[1], job.clients, job.alpha, job.samples, job.seed)
    local = Local(data, parts, job.hidden, job.epochs, job.batch, job.lr, job.adam, job.seed)
    start = local.vector()
    numel = start.size
    for row, server in federate(
        start, Link(up, numel, UP), Link(down_config, numel, DOWN), down, local,
        rounds=job.rounds, clients=job.clients, count=job.drawn, seed=job.seed, outer=outer, transport=transport,
    ):  # fmt: skip
        dense = 4 * numel * job.drawn
        row.facts = {"down": row.down_bytes / dense, "up": row.up_bytes / dense}
        if server is not None and ((row.number + 1) % look == 0 or row.number + 1 == job.rounds):
            row.facts["accuracy"] = local.accuracy(server.model)
        yield row


def config(given: str, changes: dict[str, Any], seed: int) -> Config:
    """The config of one direction: a container of the whole model; ``none``: float32."""
    return Config.load(DENSE if given == "none" else given, scope="model", seed=seed, **changes)


@app.command()
def run(
    up: Annotated[str, typer.Option(help="config of what clients send: a preset, a YAML file, or none")] = "fast",
    down: Annotated[str, typer.Option(help="config of what the server sends")] = "fast",
    density: Annotated[float | None, typer.Option(help="of both configs; default: their own")] = None,
    way: Annotated[Down, typer.Option(help="what goes down: the model less the clients', or less x_0")] = "difference",
    data: Annotated[str, typer.Option(help="mnist (5,000 images) or digits (scikit-learn's)")] = "mnist",
    clients: Annotated[int, typer.Option(min=1, help="K")] = 10,
    drawn: Annotated[int, typer.Option(min=1, help="m, clients of a round")] = 10,
    rounds: Annotated[int, typer.Option(min=1)] = 40,
    alpha: Annotated[float, typer.Option(help="of the Dirichlet distribution: small ones skew more")] = 0.5,
    samples: Annotated[int | None, typer.Option(min=1, help="images of a client; default: all are divided")] = None,
    hidden: Annotated[int, typer.Option(min=1, help="width of the hidden layer")] = 64,
    epochs: Annotated[int, typer.Option(min=1, help="of a client in a round")] = 1,
    batch: Annotated[int, typer.Option(min=1)] = 16,
    lr: Annotated[float, typer.Option(help="of the clients")] = 0.001,
    sgd: Annotated[bool, typer.Option("--sgd", help="plain SGD on the clients, in place of Adam")] = False,
    server_lr: Annotated[float, typer.Option(help="1: the mean update, as it is")] = 1.0,
    server_momentum: Annotated[float, typer.Option(help="Nesterov momentum of the server")] = 0.0,
    seed: int = 0,
    simulate: Annotated[bool, typer.Option("--simulate", help="all clients in this process, without Horovod")] = False,
    out: Annotated[Path, typer.Option(help="folder for metrics.json")] = Path("runs/fedavg"),
) -> None:
    """Trains, and writes OUT/metrics.json: bytes, seconds and accuracy of every round."""
    if drawn > clients:
        raise typer.BadParameter(f"--drawn is {drawn}, and there are {clients} clients: draw at most as many")
    job = Job(data, clients, drawn, rounds, alpha, samples, hidden, epochs, batch, lr, not sgd, seed)
    transport = OneProcess() if simulate else Ranks()
    outer = Outer(server_lr, server_momentum)
    changes = {} if density is None else {"density": density}
    links = (config(given, {} if given == "none" else changes, seed) for given in (up, down))
    rows = list(train(job, *links, way, outer, transport))
    if transport.rank:
        return
    for row in rows:
        print(
            f"round {row.number + 1:3}  accuracy {row.facts['accuracy']:.4f}  of dense: down {row.facts['down']:.4f}, "
            f"up {row.facts['up']:.4f}  server {1e3 * (row.server_encode + row.server_decode):.1f} ms, clients' codecs "
            f"{1e3 * (row.client_encode + row.client_decode):.1f} ms, training {1e3 * row.client_train:.0f} ms"
        )
    out.mkdir(parents=True, exist_ok=True)
    settings = {**asdict(job), "up": up, "down": down, "density": density, "way": way, "ranks": transport.size}
    (out / "metrics.json").write_text(json.dumps({**settings, "rounds_done": [asdict(row) for row in rows]}))


@dataclass(frozen=True)
class Method:
    """A row of the comparison: the config of both directions and its changes, and those of what goes down."""

    name: str
    config: str
    changes: dict[str, Any]
    way: Down = "difference"
    down_changes: dict[str, Any] = field(default_factory=dict)

    def links(self, seed: int) -> tuple[Config, Config]:
        """The configs up and down."""
        up = config(self.config, self.changes, seed)
        return up, Config.load(up, **self.down_changes)


def top(share: float, value: str | int, name: str = "", **more: Any) -> Method:
    """Ours: top-k, the smallest index codec, and signs or QSGD's entropy-coded levels of so many bits."""
    coded = value if isinstance(value, str) else {"name": "qsgd", "bits": value, "entropy": "rans"}
    kind = "signs" if isinstance(value, str) else f"{value} bits"
    changes = {"density": share, "index": "auto", "value": coded}
    return Method(f"**ours: {share:.0%}, {kind}{name}**", "fast", changes, **more)


QSGD = {"name": "qsgd", "bits": 7, "bucket_size": 512, "norm": "l2"}
TABLES = [
    Method("dense (FedAvg)", "none", {}),
    Method("Top-r, 10%", "topk_raw", {"density": 0.1}),
    Method("BF-P0", "dr_bf_p0", {"density": 0.1}),
    Method("Fit-Poly", "dr_fit_poly", {"density": 0.1}),
    Method("BF-P0 with QSGD", "dr_bf_p0", {"density": 0.1, "value": QSGD}),
    top(0.2, 3),
    top(0.1, 3),
    top(0.03, 3),
    top(0.01, "sign"),
    Method("**ours: Fit-Poly, packed indices**", "dr_fit_poly", {"density": 0.1, "force_index": False}),
]
NO_MEMORY = {"error_feedback": False}
METHODS = {
    "silo": TABLES,
    "cloud": [
        *(replace(one, way="initial") for one in (*TABLES[:5], top(0.4, 3), top(0.2, 3))),
        Method("Top-r, 10%, no error feedback down", "topk_raw", {"density": 0.1}, "initial", NO_MEMORY),
        Method("Top-r, 10%, differences go down", "topk_raw", {"density": 0.1}),
        top(0.03, 3, ", differences go down"),
    ],
    "device": [
        Method("dense (FedAvg)", "none", {}),
        Method("Top-r, 10%, x_t - x_0 goes down", "topk_raw", {"density": 0.1}, "initial"),
        Method("the same, no error feedback down", "topk_raw", {"density": 0.1}, "initial", NO_MEMORY),
        top(0.1, 3, ", x_t - x_0 goes down", way="initial"),
        top(0.1, 3, ", the same, no error feedback down", way="initial", down_changes=NO_MEMORY),
        top(0.2, 4, ", the same, no error feedback down", way="initial", down_changes=NO_MEMORY),
        top(0.2, 4, ", differences go down"),
        top(0.01, "sign", ", differences go down"),
    ],
}


Setting = Literal["silo", "cloud", "device"]
"""Who the clients are: 10 that always train, 56 of which 8 are drawn, or 10,000 of which 100 are drawn."""
JOBS = {
    "silo": Job(rounds=40, batch=32, lr=0.002),
    "cloud": Job(clients=56, drawn=8, rounds=100, lr=0.002),
    "device": Job(clients=10_000, drawn=100, rounds=50, samples=20, batch=10, lr=0.1, adam=False),
}
TITLES = {
    "silo": "FedAvg: 10 clients, all in every round (the paper's Table 5)",
    "cloud": "FedAvg: 56 clients, 8 drawn a round (the paper's Table 4)",
    "device": "FedAvg: 10,000 clients, 100 drawn a round",
}
LINK, LATENCY = 1e8, 50e-6
"""Bits per second of the server, and seconds of a message."""
SEEDS = 3
"""Of the page, which explains the settings, the methods and the tables."""
TUNING_SEED, POWERS = 100, range(-1, 7)
"""The seed of the search, and its first grid: a job's step size times 2 to these powers. All of it is tried, since
accuracies of neighbours differ by chance as much as by the step size."""


@dataclass(frozen=True)
class Result:
    """What became of a method: the clients' step size that was best, and the rounds of each seed with it."""

    lr: float
    runs: list[list[Round]]


def compared(job: Job, method: Method, seeds: int, quick: bool = False) -> Result:
    """Trains with each step size of a grid, which grows, on ``TUNING_SEED``, and with each seed at the best one; quick:
    at the job's.

    Raises:
        RuntimeError: the best step size is at an end of the grid, however it grew.
    """

    def trained(lr: float, seed: int) -> list[Round]:
        own = replace(job, lr=lr, seed=seed)
        return list(train(own, *method.links(seed), method.way, Outer(), OneProcess(), max(1, job.rounds // 20)))

    best = job.lr
    if not quick:
        rates, name = [job.lr * 2.0**power for power in POWERS], f"{method.name}: step size"
        best = figure_kit.best_inside(rates, lambda lr: -final(trained(lr, TUNING_SEED)), name, 2)
    return Result(best, [trained(best, seed) for seed in range(seeds)])


def final(rows: list[Round]) -> float:
    """The mean accuracy of the last five evaluations."""
    return float(np.mean([one[2] for one in evaluations(rows, 1)[-5:]]))


def evaluations(rows: list[Round], dense: int) -> list[tuple[int, float, float]]:
    """Of a run: round, bytes up and down so far over those of a dense message, and accuracy."""
    volume, found = 0.0, []
    for row in rows:
        volume += (row.down_bytes + row.up_bytes) / dense
        if "accuracy" in row.facts:
            found.append((row.number + 1, volume, row.facts["accuracy"]))
    return found


def table(results: dict[str, Result]) -> str:
    """Markdown: step size, relative volumes and accuracy."""
    lines = []
    for name, one in results.items():
        down, up = (np.mean([row.facts[key] for rows in one.runs for row in rows]) for key in ("down", "up"))
        ends = [final(rows) for rows in one.runs]
        spread = f"{min(ends):.4f} to {max(ends):.4f}"
        lines.append([name, f"{one.lr:g}", f"{down:.4f}", f"{up:.4f}", f"{np.mean(ends):.4f}", spread])
    return doc_sections.table(["method", "step size", "down", "up", "accuracy", "of the seeds"], lines, right=True)


PAPER_SECONDS = {
    "dense (FedAvg)": (1.3980, 1.3609), "Top-r, 10%": (0.3167, 0.3904), "BF-P0": (0.1936, 0.1957),
    "Fit-Poly": (0.1742, 0.1429), "BF-P0 with QSGD": (0.0852, 0.0859),
}  # fmt: skip
"""Appendix, Table 4: seconds of communication down and up, at 100 Mbit/s."""


def modelled(result: Result, clients: int) -> list[float]:
    """Seconds of the network in a round, down and up."""
    means = np.mean([(row.down_bytes, row.up_bytes) for rows in result.runs for row in rows], 0).tolist()
    return [costs.Cost(clients, size).seconds(costs.Link(LINK, LATENCY)) for size in means]


def seconds_table(results: dict[str, Result], clients: int) -> str:
    """Markdown: modelled seconds of the network in a round, and those of the paper, also relative to dense."""
    seconds = {name: modelled(one, clients) for name, one in results.items()}
    (dense, printed), lines = (next(iter(both.values())) for both in (seconds, PAPER_SECONDS)), []
    for name, ours in seconds.items():
        cells = [f"{one:.4f} ({one / whole:.3f})" for one, whole in zip(ours, dense, strict=True)]
        theirs = PAPER_SECONDS.get(name, ())
        cells += [f"{one:.4f} ({one / whole:.3f})" for one, whole in zip(theirs, printed, strict=False)] or ["", ""]
        lines.append([name, *cells])
    head = ["s a round (dense = 1)", "down, modelled", "up, modelled", "the paper's down", "up"]
    return doc_sections.table(head, lines, right=True)


CODING = ("client_decode", "client_encode", "server_decode", "server_encode")
PAPER_CODING = {
    "Top-r, 10%": (0.0044, 0.0501, 0.0032, 0.0258), "BF-P0": (0.0179, 0.0707, 0.0183, 0.0629),
    "Fit-Poly": (0.0288, 0.1586, 0.0183, 0.1170), "BF-P0 with QSGD": (0.0190, 0.0713, 0.0198, 0.0706),
}  # fmt: skip
"""Appendix, Table 4: seconds of coding, in the order of ``CODING``."""


def coding(job: Job, methods: Sequence[tuple[Method, float]]) -> dict[str, list[float]]:
    """Seconds of ``CODING`` of each method, medians of the rounds; of an encoding on one client. The methods, each with
    its step size, take turns in each round, so that a busy machine slows down all of them."""
    trainings = {
        method.name: train(replace(job, lr=lr), *method.links(job.seed), method.way, Outer(), OneProcess(), job.rounds)
        for method, lr in methods
    }
    found: dict[str, list[list[float]]] = {name: [] for name in trainings}
    for rows in zip(*trainings.values(), strict=True):
        for name, row in zip(found, rows, strict=True):
            found[name].append([getattr(row, part) / (job.drawn if part == "client_encode" else 1) for part in CODING])
    return {name: np.median(rows, 0).tolist() for name, rows in found.items()}


def coding_table(seconds: Mapping[str, list[float]], results: Mapping[str, Result], clients: int) -> str:
    """Markdown: milliseconds of coding in a round, and with the modelled network; of the paper beside them."""
    lines = []
    for name, parts in seconds.items():
        network, theirs = sum(modelled(results[name], clients)), sum(PAPER_CODING.get(name, ()))
        lines.append([name, *(f"{1e3 * one:.2f}" for one in (*parts, sum(parts), sum(parts) + network)),
                      f"{1e3 * theirs:.0f}", f"{1e3 * (theirs + sum(PAPER_SECONDS[name])):.0f}"])  # fmt: skip
    head = ["ms a round", "client decodes", "client encodes", "server decodes", "server encodes", "coding",
            "with the network", "the paper's coding", "with its network"]  # fmt: skip
    return doc_sections.table(head, lines, right=True)


def draw(results: dict[str, Result], dense: int, path: Path) -> None:
    """Accuracy against rounds (the paper's Figures 18 and 20) and against bytes, mean of the seeds."""
    figure, both = figure_kit.picture(2, width=12, height=4.6)
    for (name, one), color in zip(results.items(), figure_kit.COLORS, strict=False):
        rounds, volume, accuracy = np.mean([evaluations(rows, dense) for rows in one.runs], 0).T
        for axes, x in zip(both, (rounds, volume), strict=True):
            width = 2 if name.startswith("*") else 1.2
            axes.plot(x, 100 * accuracy, label=name.strip("*"), color=color, lw=width)
    both[0].set(xlabel="round", ylabel="test accuracy, %")
    both[1].set(xscale="log", xlabel="bytes down and up so far, in float32 models of a drawn client")
    figure_kit.legend_below(figure, both[0], 4)
    figure_kit.save(figure, path)


@app.command()
def compare(
    setting: Setting,
    seeds: Annotated[int, typer.Option(min=1)] = SEEDS,
    quick: Annotated[bool, typer.Option("--quick", help="two rounds on little data, to try the script")] = False,
    write: Annotated[bool, typer.Option("--write", help="write the section of docs/results/schemes.md")] = False,
    out: Annotated[Path, typer.Option(help="folder for results and the picture")] = Path("runs/fedavg"),
) -> None:
    """Simulates one setting with all methods, and prints the table."""
    job = JOBS[setting]
    if write and (quick or seeds != SEEDS):
        raise typer.BadParameter(f"--write is for {SEEDS} seeds and all rounds, of which {DOC.name} tells")
    if quick:
        job = replace(job, data="digits", clients=min(job.clients, 50), drawn=min(job.drawn, 5), rounds=2, hidden=8)
    methods, results = METHODS[setting], {}
    with ProcessPoolExecutor(figure_kit.processes) as pool:
        found = pool.map(partial(compared, job, seeds=seeds, quick=quick), methods)
        for method, one in zip(methods, track(found, setting, len(methods)), strict=True):
            results[method.name] = one
            print(table({method.name: one}).splitlines()[-1], flush=True)
    printed = [(method, results[method.name].lr) for method in methods if method.name in PAPER_SECONDS]
    timed = coding(job, printed) if setting == "cloud" else {}
    out.mkdir(parents=True, exist_ok=True)
    rows = {name: asdict(one) for name, one in results.items()}
    (out / f"{setting}.json").write_text(json.dumps({"job": asdict(job), "results": rows}))
    report(setting, job, results, timed, out, write)


def report(
    name: Setting, job: Job, results: dict[str, Result], timed: Mapping[str, list[float]], out: Path, write: bool
) -> None:
    """Prints the table and draws the picture; or writes the section of docs/results/schemes.md as well."""
    parts = [table(results)]
    pixels = 64 if job.data == "digits" else 784
    numel = (pixels + 1) * job.hidden + (job.hidden + 1) * 10
    draw(results, 4 * numel * job.drawn, (DOC.parent / "figures" if write else out) / f"fedavg_{name}.png")
    if name == "cloud":
        parts += [seconds_table(results, job.drawn), coding_table(timed, results, job.drawn)]
    print("\n\n".join(parts))
    if write:
        parts.append(f"![accuracy against rounds and bytes](figures/fedavg_{name}.png)")
        dated, section = f"*{date.today()}, scripts/papers/train_fedavg.py compare {name}.*", f"fedavg-{name}"
        doc_sections.write(DOC, section, TITLES[name], doc_sections.refreshed(DOC, section, parts, dated))


if __name__ == "__main__":
    app()
