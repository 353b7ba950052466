"""FedAvg of a recurrent network on text, both directions compressed (DeepReduce's appendix, Figure 20)."""

import figure_kit
import lstm_job
import numpy as np
import torch
from federated import DOWN, UP, Link, Vector, federate
from figure_kit import Data, Figure, Picture, curves, legend_below, picture, table
from train_fedavg import Method, top

CLIENTS, ROUNDS, STEPS, BATCH, RATE, CLIP = 10, 30, 8, 4, 1.0, 0.25
TOP = {"sparsifier": {"name": "topk", "density": 0.1}}
METHODS = [
    Method("dense (FedAvg)", "none", {}), Method("Top-r, 10%", "topk_raw", TOP), Method("BF-P0", "dr_bf_p0", TOP),
    Method("Fit-Poly", "dr_fit_poly", TOP), Method("BF-P0 with QSGD", "dr_bf_p2_qsgd",
                                                   {**TOP, "index": {"name": "bloom", "policy": "p0", "fpr": 0.001}}),
    top(0.1, 3),
]  # fmt: skip


class Clients:
    """Each has its own part of the text, and trains with SGD with momentum, begun anew in each round."""

    def __init__(self, steps: int) -> None:
        torch.set_num_threads(1)
        self.job, self.steps = lstm_job.Job(BATCH), steps
        self.text = self.job.train

    def __call__(self, number: int, client: int, model: Vector) -> Vector:
        """A client's training in a round."""
        share = len(self.text) // CLIENTS
        self.job.train = self.text[client * share : (client + 1) * share]
        generator = torch.Generator().manual_seed(1000 * number + client)
        flat, gradient = torch.nn.Parameter(torch.from_numpy(model)), torch.zeros(model.size)
        optimizer = torch.optim.SGD([flat], RATE, momentum=0.9)
        for _ in range(self.steps):
            self.job.gradient(flat.detach(), [generator], gradient)
            flat.grad = gradient * (CLIP / gradient.norm()).clamp(max=1.0)
            optimizer.step()
        return flat.detach().numpy()


def train(method: Method, seed: int = 0, rounds: int = ROUNDS, steps: int = STEPS, windows: int = 256) -> Data:
    """One training: the loss after every second round, and the volumes of both directions."""
    trainer = Clients(steps)
    start = lstm_job.initial(seed).numpy()
    links = [Link(config, start.size, way) for config, way in zip(method.links(seed), (UP, DOWN), strict=True)]
    losses, volumes = [], [0, 0]
    for row, server in federate(
        start, links[0], links[1], method.way, trainer, rounds=rounds, clients=CLIENTS, count=CLIENTS
    ):
        volumes = [volumes[0] + row.up_bytes, volumes[1] + row.down_bytes]
        if (row.number + 1) % 2 == 0 or rounds == 1:
            losses.append(trainer.job.validate(torch.from_numpy(server.model), windows)[0])
    dense = 4 * start.size * CLIENTS * rounds
    return {"loss": losses, "up": volumes[0] / dense, "down": volumes[1] / dense}


def figure_20(tiny: bool) -> Data:
    if tiny:
        return {method.name: train(method, 0, 1, 1, 1) for method in METHODS[:2]}
    found = figure_kit.trainings(train, {method.name: (method,) for method in METHODS})
    return {name: run for name, (run,) in found.items()}


def draw(data: Data) -> Picture:
    figure, (left, right) = picture(2, height=4.2, sharey=True)
    rounds = {name: 2 * np.arange(1, len(run["loss"]) + 1) for name, run in data.items()}
    curves(left, ((name, rounds[name], run["loss"]) for name, run in data.items()))
    curves(right, ((name, (run["up"] + run["down"]) * rounds[name], run["loss"]) for name, run in data.items()))
    left.set(xlabel="round", ylabel="validation loss, nats a character")
    right.set(xlabel="bytes up and down / float32 of the model, per client (log)", xscale="log")
    right.xaxis.set_major_formatter("{x:g}")
    legend_below(figure, left, 6)
    return figure


def text(data: Data) -> str:
    rows = [[name, f"{run['down']:.4f}", f"{run['up']:.4f}", f"{run['loss'][-1]:.3f}"] for name, run in data.items()]
    return table(["method", "down", "up", "loss, nats a character"], rows)


FIGURES = [
    Figure("deepreduce_20", "FedAvg of a recurrent network", ("appendix Figure 20",), figure_20, draw, text, 6),
]  # fmt: skip
