"""The PyTorch adapter under real launchers; what is tested stands in torch_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hvd_deepreduce.torch import DeepReduce
from tests.ranks import launch

HERE = Path(__file__).parent
CASES = HERE / "torch_cases.py"
WAYS = [("mpirun", 2), ("mpirun", 3), ("mpirun", 4), ("horovodrun --gloo", 2), ("horovodrun --mpi", 2)]


@pytest.mark.parametrize(("launcher", "ranks"), WAYS)
def test_all_cases(launcher, ranks):
    output = launch(launcher, ranks, CASES).stdout
    expected = CASES.read_text().count("@case\n")
    assert output.count("passed ") + output.count("skipped (") == expected >= 22, output


@pytest.mark.parametrize(
    ("launcher", "ranks", "exchange"),
    [("mpirun", 3, "allgather"), ("horovodrun --gloo", 2, "allgather"), ("mpirun", 3, "densestream")],
)
def test_a_rank_that_dies_ends_the_job(launcher, ranks, exchange):
    ended = launch(launcher, ranks, HERE / "torch_death.py", exchange, seconds=120, check=False)
    assert ended.returncode != 0, ended.stdout
    assert "step 1 done" in ended.stdout and "step 2 done" not in ended.stdout, ended.stdout


def test_one_rank_alone_needs_no_launcher():
    import horovod.torch as hvd

    hvd.init()
    model = nn.Linear(40, 40)
    compression = DeepReduce(model, min_elements=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
    )
    before = model.weight.clone()
    model(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)
    assert compression.stats()["total"]["bytes_sent"] == 0
