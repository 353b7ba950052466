"""The warning of a rank with one core, on which Open MPI's polling takes time from the threads that compute."""

import logging

import pytest

from hvd_deepreduce import Config
from hvd_deepreduce.engine import Engine, cores
from tests.engine.numpy_adapter import Job, ThreadCollectives

STARTED = {"OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize("own", [1, 2])
@pytest.mark.parametrize("over_mpi", [True, False])
@pytest.mark.parametrize("variables", [{}, {"OMPI_COMM_WORLD_RANK": "1"}, STARTED, {**STARTED, cores.YIELDS: "0"}])
def test_it_is_there_once_if_nobody_has_decided(own, over_mpi, variables, monkeypatch, caplog):
    for name in ("OMPI_COMM_WORLD_RANK", cores.YIELDS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cores, "of_rank", lambda local_size: own)
    monkeypatch.setattr(ThreadCollectives, "mpi_enabled", lambda self: over_mpi)
    cores.warn_of_polling.cache_clear()
    with caplog.at_level(logging.WARNING, "hvd_deepreduce"):
        for _ in range(2):
            engine = Engine(Config.load("topk_rice_qsgd"), ThreadCollectives(Job(1), 0))
            assert engine.pipeline is engine.pipelines.default
            engine.close()
    expected = own == 1 and over_mpi and variables == STARTED
    assert [record.getMessage() for record in caplog.records] == [cores.POLLS] * expected
    assert cores.YIELDS in cores.POLLS
