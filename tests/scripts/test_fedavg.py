"""FedAvg with both directions compressed: rounds by hand, bytes, memories, and the same job under a launcher."""

from __future__ import annotations

import json

import doc_sections
import federated
import numpy as np
import pytest
import train_fedavg
import typer
from federated import DOWN, UP, Link, Server, drawn, federate
from typer.testing import CliRunner

from hvd_deepreduce import Config, ContainerError
from tests.oracle.fedavg import fedavg
from tests.ranks import ROOT, launch

DENSE = {"sparsifier": "none", "value": "raw", "error_feedback": False}
NUMEL = 300
TARGETS = np.random.default_rng(0).standard_normal((9, NUMEL)).astype(np.float32)


def train(number, client, model):
    """A client that goes a part of the way to its own target; the part depends on the round."""
    return model + np.float32(0.5 / (1 + number)) * (TARGETS[client] - model)


def link(config, direction, **changes):
    return Link(Config.load(config, scope="model", **changes), NUMEL, direction)


def rounds(up, down, way, *, count, clients=9, number=6, trainer=train):
    start = np.ones(NUMEL, np.float32)
    return list(federate(start, up, down, way, trainer, rounds=number, clients=clients, count=count))


@pytest.mark.parametrize("way", ["difference", "initial"])
def test_without_loss_a_round_averages_the_clients_models(way):
    found = rounds(link(DENSE, UP), link(DENSE, DOWN), way, count=4)
    expected = fedavg(np.ones(NUMEL), train, [drawn(0, number, 9, 4) for number in range(6)])
    np.testing.assert_allclose(found[-1][1].model, expected, atol=1e-5)
    assert len({tuple(drawn(0, number, 9, 4)) for number in range(6)}) > 1


def test_a_lossless_difference_brings_the_servers_model():
    server = Server(np.zeros(NUMEL, np.float32), link(DENSE, UP), link(DENSE, DOWN), "difference", 9)
    server.model += TARGETS[0]
    server.broadcast(0)
    np.testing.assert_allclose(server.reader.model, TARGETS[0], atol=1e-6)


def test_differences_catch_up_with_a_model_that_rests():
    """What a message leaves out is in the next difference: after 1 / density messages, nothing is missing."""
    server = Server(np.zeros(NUMEL, np.float32), link(DENSE, UP), link("topk_raw", DOWN, density=0.1), "difference", 9)
    server.model += TARGETS[0]
    gaps = []
    for number in range(10):
        server.broadcast(number)
        gaps.append(np.count_nonzero(server.model - server.reader.model))
    assert gaps == [270 - 30 * number for number in range(10)]


def test_x0_messages_do_not_depend_on_earlier_ones():
    """Algorithm 2: a client needs x_0 and the newest message."""
    down = link("topk_raw", DOWN, density=0.1, error_feedback=False)
    server = Server(np.ones(NUMEL, np.float32), link(DENSE, UP), down, "initial", 9)
    for number in range(3):
        server.model += TARGETS[number]
        message = server.broadcast(number)
    late = federated.Reader(np.ones(NUMEL, np.float32), down, "initial")
    late.read(message, 2)
    assert np.array_equal(late.model, server.reader.model)
    largest = np.argsort(-np.abs(server.model - 1))[:30]
    np.testing.assert_allclose(late.model[largest], server.model[largest], atol=1e-6)
    assert np.count_nonzero(late.model != 1) == 30
    with pytest.raises(ContainerError):
        late.read(message, 1)


@pytest.mark.parametrize("preset", ["topk_rice_qsgd", "signtopk"])
def test_what_is_sent_and_what_is_kept_are_the_clients_progress(preset):
    """Also for clients that are not in every round: the residual waits for them."""
    up, start, progress = link(preset, UP, density=0.1), np.ones(NUMEL, np.float32), np.zeros((9, NUMEL))
    sent, kept = np.zeros((9, NUMEL)), {}
    encode, decode = up.encode, up.decode

    def encoding(vector, residual, number, client):
        progress[client] += vector
        container = encode(vector, residual, number, client)
        kept[client] = residual
        return container

    def decoding(data, number, client):
        decoded = decode(data, number, client)
        sent[client] += decoded
        return decoded

    up.encode, up.decode = encoding, decoding
    found = rounds(up, link(DENSE, DOWN), "difference", count=4, number=8)
    for client, residual in kept.items():
        np.testing.assert_allclose(sent[client] + residual, progress[client], atol=1e-4)
    assert len(kept) == 9 and all(np.abs(residual).max() > 0 for residual in kept.values())
    np.testing.assert_allclose(start - found[-1][1].model, sent.sum(0) / 4, atol=1e-4)


def test_the_bytes_are_those_of_the_messages(monkeypatch):
    sizes, ups, encode = [], [], Link.encode

    def encoding(self, vector, residual, number, sender):
        container = encode(self, vector, residual, number, sender)
        (sizes if sender == federated.SERVER else ups).append(container.size)
        return container

    monkeypatch.setattr(Link, "encode", encoding)
    found = [row for row, _ in rounds(link("signtopk", UP), link("topk_raw", DOWN, density=0.1), "difference", count=3)]
    assert sum(row.up_bytes for row in found) == sum(ups) and len(ups) == 18
    seen = np.full(9, -1)
    for row in found:
        expected = 0
        for client in drawn(0, row.number, 9, 3):
            expected += min(sum(sizes[seen[client] + 1 : row.number + 1]), 4 * NUMEL)
            seen[client] = row.number
        assert row.down_bytes == expected


def test_images_are_divided_or_drawn_with_skew():
    labels = np.repeat(np.arange(10), 50)
    parts = train_fedavg.skewed(labels, 8, 0.5, None, seed=0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(500))
    several = train_fedavg.skewed(labels, 40, 0.2, 25, seed=0)
    assert {len(part) for part in several} == {25}
    most = [np.bincount(labels[part], minlength=10).max() / 25 for part in several]
    even = [np.bincount(labels[part]).max() / 25 for part in train_fedavg.skewed(labels, 40, 1000.0, 25, seed=0)]
    assert np.mean(most) > 1.5 * np.mean(even)
    with pytest.raises(typer.BadParameter, match="500 images cannot be divided among 400 clients"):
        train_fedavg.skewed(labels, 400, 0.1, None, seed=0)


TINY = ("run", "--data", "digits", "--clients", "7", "--drawn", "4", "--rounds", "3", "--hidden", "16", "--lr", "0.03",
        "--density", "0.05")  # fmt: skip


@pytest.mark.launch
def test_a_job_on_ranks_equals_its_simulation(tmp_path):

    launch("mpirun", 2, ROOT / "scripts" / "papers" / "train_fedavg.py", *TINY, "--out", str(tmp_path / "ranks"))
    simulated = CliRunner().invoke(train_fedavg.app, [*TINY, "--simulate", "--out", str(tmp_path / "one")])
    assert simulated.exit_code == 0, simulated.output
    ranks, one = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("ranks", "one"))
    assert (ranks.pop("ranks"), one.pop("ranks")) == (2, 1)
    assert len(ranks["rounds_done"]) == 3
    for mine, theirs in zip(ranks["rounds_done"], one["rounds_done"], strict=True):
        for key in ("down_bytes", "up_bytes", "facts"):
            assert mine[key] == theirs[key]
        assert mine["server_encode"] > 0 and mine["client_train"] > 0
    assert one["rounds_done"][-1]["facts"]["accuracy"] > 0.3
    assert 0 < one["rounds_done"][0]["facts"]["up"] < 0.05


def test_modelled_seconds_are_bytes_over_the_servers_link_and_latencies():
    """8 messages of 50 us and 1,250,000 bytes at 100 Mbit/s: 0.1004 s; the paper's Top-r: 0.3167 of 1.398 s."""
    results = {
        "dense (FedAvg)": [federated.Round(0, 1_250_000, 2_500_000)],
        "Top-r, 10%": [federated.Round(0, 125_000, 250_000), federated.Round(1, 375_000, 250_000)],
    }
    results = {name: train_fedavg.Result(0.1, [rows]) for name, rows in results.items()}
    lines = train_fedavg.seconds_table(results, 8).splitlines()[2:]
    assert lines[0] == "| dense (FedAvg) | 0.1004 (1.000) | 0.2004 (1.000) | 1.3980 (1.000) | 1.3609 (1.000) |"
    assert lines[1] == "| Top-r, 10% | 0.0204 (0.203) | 0.0204 (0.102) | 0.3167 (0.227) | 0.3904 (0.287) |"


def test_coding_is_timed_in_turn_and_an_encoding_is_that_of_one_client(monkeypatch):
    """Medians of three rounds with four clients; two messages of 1,250,000 bytes each way, of 50 us, take 0.2001 s."""
    turns = []

    def train(job, up, down, way, outer, transport, look):
        for number, client_encode in enumerate((4.0, 0.004, 0.008)):
            turns.append((job.lr, number))
            row = federated.Round(number, 1_250_000, 1_250_000, server_encode=0.001, server_decode=0.005)
            row.client_decode, row.client_encode = 0.0005, client_encode * (1 + (job.lr == 2))
            yield row

    monkeypatch.setattr(train_fedavg, "train", train)
    top, bloom = train_fedavg.TABLES[1:3]
    found = train_fedavg.coding(train_fedavg.Job(drawn=4), [(top, 1), (bloom, 2)])
    assert turns == [(lr, number) for number in range(3) for lr in (1, 2)]
    assert found == {"Top-r, 10%": [0.0005, 0.002, 0.005, 0.001], "BF-P0": [0.0005, 0.004, 0.005, 0.001]}
    results = {name: train_fedavg.Result(1, [[federated.Round(0, 1_250_000, 1_250_000)]]) for name in found}
    lines = train_fedavg.coding_table(found, results, 2).splitlines()[2:]
    assert lines[0] == "| Top-r, 10% | 0.50 | 2.00 | 5.00 | 1.00 | 8.50 | 208.70 | 84 | 791 |"
    assert lines[1] == "| BF-P0 | 0.50 | 4.00 | 5.00 | 1.00 | 10.50 | 210.70 | 170 | 559 |"


def test_a_comparison_prints_accuracy_the_networks_seconds_and_coding(tmp_path):
    found = CliRunner().invoke(train_fedavg.app, ["compare", "cloud", "--quick", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    *_, seconds, coding = doc_sections.tables(found.output)
    assert seconds["head"][0] == "s a round (dense = 1)" and coding["head"][0] == "ms a round"
    assert [row[0] for row in coding["rows"]] == [one.name for one in train_fedavg.TABLES[:5]]
    assert (tmp_path / "fedavg_cloud.png").exists()


def test_each_method_has_its_own_best_step_size(monkeypatch):
    """A grid grows at the end where the best one is, by four values at most."""
    best, seen = 0.4, []

    def train(job, up, down, way, outer, transport, look):
        seen.append((job.lr, job.seed))
        return [federated.Round(0, 1, 1, facts={"accuracy": 1 - abs(job.lr - best)})]

    monkeypatch.setattr(train_fedavg, "train", train)
    job, method = train_fedavg.Job(lr=0.1), train_fedavg.TABLES[0]
    found = train_fedavg.compared(job, method, 2)
    assert found.lr == pytest.approx(0.4) and len(found.runs) == 2
    assert [seed for _, seed in seen] == 8 * [train_fedavg.TUNING_SEED] + [0, 1]
    best = 13.0  # beyond the first grid, whose end is 6.4
    assert train_fedavg.compared(job, method, 0).lr == pytest.approx(12.8)
    best = 1e9
    with pytest.raises(RuntimeError, match="step size 102.4 is best, at the end of the grid"):
        train_fedavg.compared(job, method, 2)
