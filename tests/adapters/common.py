"""What the cases of several adapters share: those of all_cases.py, of horovod_cases.py (both frameworks under Horovod)
and of pytorch_cases.py (Horovod and DDP). A program, such as torch_cases.py, imports them and fills in ``on``."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.adapters.scopes import WITHOUT_MPI

LOSSLESS = {"sparsifier": {"name": "topk", "density": 1.0}, "value": "raw", "index": "bitmap"}
LOSSY = {"sparsifier": {"name": "topk", "density": 0.05}}
NUMBERS = itertools.count()
"""Of the jobs of this process: equal on all ranks, since all make the same jobs."""


class Job:
    """A small model that plain SGD trains, and what compresses its gradients. Those of each adapter have, beside:

    - ``compression``, with ``stats``, ``state_dict`` and so on; of a dense job nothing that is of use; and ``engine``;
    - ``gradients(step, rank=None)``: a rank's flat gradients in a step, with the parameters as they are;
    - ``reduced(step, factor=1.0)``: runs the backward pass, with the loss times the factor, and returns what all ranks'
      gradients become, flat; ``apply()`` then ends the step;
    - ``values()``, the parameters as arrays, and ``names()``, what they are called in a state;
    - ``saved()``, parameters and state; ``load(saved)``; and ``resumed(saved)``, another job that goes on from there.
    """

    def step(self, step, factor=1.0):
        self.reduced(step, factor)
        self.apply()

    def run(self, *steps):
        """As ``range`` gives them."""
        for step in range(*steps):
            self.step(step)
        return self

    def flat(self):
        return np.concatenate([one.astype(np.float64).reshape(-1) for one in self.values()])

    def check_same(self):
        """All parameters are bitwise equal on all ranks."""
        assert len(set(on.gathered(b"".join(one.tobytes() for one in self.values())))) == 1, "the parameters differ"

    def residuals(self):
        """By parameter; zeros where nothing is kept."""
        kept = self.compression.state_dict()["residuals"]
        return [
            np.asarray(kept[name]) if name in kept else np.zeros(one.size)
            for name, one in zip(self.names(), self.values(), strict=True)
        ]

    def last(self, name):
        """A number of the last step."""
        return self.compression.stats()["last_step"][name]

    def close(self):
        self.compression.close()


class Adapter:
    """An adapter on this rank: ``on``, which a program fills in.

    Attributes:
        job: makes a ``Job`` of a config, None for a dense one. Keyword arguments: ``seed`` of the model, and the
            adapter's own, such as those of ``options`` and ``by_hand``.
        rank: of this process, a function.
        size: the number of ranks, a function.
        gathered: the objects of all ranks.
        over_mpi: whether exchanges over MPI run under this launcher, a function.
        scopes: the configs that are tried, beside codecs.
        levels: those for two levels.
        changes: settings before, and after, which only rank 1 takes.
        options: keyword arguments of ``job`` that change how gradients are reduced.
        modes: those by which steps run otherwise.
        by_hand: keyword arguments with which ``reduced`` differs by no bit from what is computed of ``gradients``.
        error: the class of the error by which one of ours comes.
        ends: whether a job ends with an error.
    """

    options = modes = ({},)
    by_hand = {}
    ends = False

    def use(self, **settings):
        self.__dict__.update(settings)

    def error(self, kind):
        return kind

    def possible(self, scopes=None):
        """Those whose exchange this launcher can run."""
        for scope in self.scopes if scopes is None else scopes:
            exchange = scope.get("exchange", "allgather")
            if self.over_mpi() or (exchange if isinstance(exchange, str) else exchange["name"]) in WITHOUT_MPI:
                yield scope

    def raises(self, kind, match):
        """An error of ours comes, on every rank."""
        return pytest.raises(self.error(kind), match=match)


on = Adapter()


class Ledger:
    """Adds up what came on this rank, and what all ranks were given, in the steps of a job."""

    def __init__(self, job):
        self.job = job
        self.came, self.sent = np.zeros((2, job.flat().size))

    def step(self, step):
        self.came += np.concatenate(self.job.gradients(step))
        self.sent += np.concatenate(self.job.reduced(step))
        self.job.apply()

    def check(self, tolerance=1e-5):
        """What was sent and what is kept is what came. Returns what this rank keeps."""
        kept = np.concatenate(self.job.residuals())
        np.testing.assert_allclose(self.sent, np.mean(on.gathered(self.came - kept), 0), rtol=1e-3, atol=tolerance)
        return kept


def check_close(dense, ours, tolerance=1e-6):
    np.testing.assert_allclose(ours.flat(), dense.flat(), rtol=1e-4, atol=tolerance)
    ours.check_same()
