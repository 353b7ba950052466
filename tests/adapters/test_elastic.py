"""Jobs of Horovod Elastic: ranks join, leave and are killed. The jobs are in elastic_{torch,tensorflow}.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters import elastic
from tests.ranks import launch

pytestmark = [pytest.mark.launch, pytest.mark.elastic]
HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a job; returns each process's notes."""

    def run(program, gloo_seconds, *arguments):
        # After this time a rank gives up another one that was killed, but also one that has just been started: on a
        # loaded machine an import of TensorFlow alone can take as long, and the launcher starts the new rank again.
        monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", str(gloo_seconds))
        hosts = elastic.discovery(tmp_path)
        done = launch("elastic", 2, HERE / program, str(tmp_path), *arguments, hosts=hosts, seconds=250, check=False)
        return elastic.notes(tmp_path), done.stdout

    return run


def check_equal_ranks(notes, output):
    """At the end of each step, and of the job, all ranks have the same weights and step counts."""
    by_step = {}
    for lines in notes.values():
        for line in lines:
            if line["event"] not in ("enters", "refused"):
                seen = by_step.setdefault(line["step"], {})
                seen.setdefault(line["size"], []).append((line["weights"], line["steps"], line["densities"]))
    assert by_step, output
    for step, sizes in by_step.items():
        for size, said in sizes.items():
            assert len(said) in (size, size - 1), (step, size, output)  # the third rank may have been killed
            assert all(one == said[0] for one in said), (step, said)


def entries(lines):
    return [line for line in lines if line["event"] == "enters"]


def check_continued(lines, entry, models):
    """A rank that was there before is where its last commit was."""
    before = [line for line in lines[: lines.index(entry)] if line["event"] == "commits"][-1]
    assert (entry["step"], entry["weights"]) == (before["step"], before["weights"])
    for fact in ("steps", "residuals", "densities"):
        assert entry[fact][:models] == before[fact][:models], (fact, entry, before)
    assert all(entry["residuals"])
    assert entry.get("local") == before.get("local")


def of_two_that_stay(notes, output, models):
    """The notes of the two ranks that are there from the beginning to the end, and of the one between; for each change
    of the ranks, how many models' states the former have kept."""
    old = [lines for lines in notes.values() if len(entries(lines)) == 3]
    assert len(old) == 2 and len(notes) == 3, output
    (new,) = [lines for lines in notes.values() if lines not in old]
    assert len(entries(new)) == 1, output
    for lines in old:
        assert [entry["size"] for entry in entries(lines)] == [2, 3, 2], output
        for entry, count in zip(entries(lines)[1:], models, strict=True):
            check_continued(lines, entry, count)
        assert lines[-1]["event"] == "ends" and lines[-1]["step"] > entries(lines)[2]["step"], output
    (came,), others = entries(new), entries(old[0])[1]
    assert came["residuals"] == [""] * models[0] and came["local"] == [others["local"][0], ""]
    assert (came["step"], came["weights"]) == (others["step"], others["weights"])
    assert came["steps"][:3] == others["steps"][:3]
    assert all(new[1]["residuals"]), "the new rank has not compressed"
    check_equal_ranks(notes, output)
    return old, came


def test_torch_a_rank_joins_and_is_killed(run):
    old, came = of_two_that_stay(*run("elastic_torch.py", gloo_seconds=20), models=(4, 3))
    for lines in old:
        assert lines[1]["event"] == "refused" and "optimizer=local_sgd" in lines[1]["said"]
    assert came["densities"] == [0.05] * 3 + [0.01], came
    assert came["steps"][3] == [0]  # the fourth are compared at a step


@pytest.mark.parametrize(("how", "gloo_seconds", "kept"), [("leaves", 120, 5), ("killed", 40, 3)])
def test_tensorflow_a_rank_joins_and_goes(run, how, gloo_seconds, kept):
    _, came = of_two_that_stay(*run("elastic_tensorflow.py", gloo_seconds, how), models=(5, kept))
    assert came["densities"] == [0.05] * 3 + [0.01] * 2, came
    assert came["steps"][3:] == [[], []]  # these are compared at a step
