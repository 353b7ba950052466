"""The simulations of exchanges: what they count, and what ranks in one process sum."""

from __future__ import annotations

import numpy as np
import pytest
from simulate_scale import Uniform
from simulate_slices import CODECS, WAYS, Alike, Ends, Hot, simulate, table, worth
from simulated_ranks import SimulatedRanks

from hvd_deepreduce import Config
from tests.adapters import votes_job

NUMEL, DENSITY = 100_000, 0.02


@pytest.mark.parametrize("ranks", [2, 16])
def test_with_a_density_a_rank_receives_few_elements_on_every_input(ranks):
    """And all that the others keep without it, where supports do not overlap or lie in one slice."""
    for given in (Uniform(NUMEL), Hot(NUMEL, ranks), Ends(NUMEL, ranks), Alike(NUMEL)):
        tensors = [given.kept(rank, DENSITY) for rank in range(ranks)]
        found = {way: worth(simulate(tensors, "raw", DENSITY, way)) for way in WAYS}
        # The cards of 16 ranks take up to two and a half times what a rank keeps of so few elements.
        assert found["densestream"] < 5.5 and found["with density"] < 2.5
        assert round(found["allgather"], 3) == ranks - 1, (str(given), found)
        if isinstance(given, Hot) and not isinstance(given, Ends) and ranks > 2:
            assert found["reduce_scatter"] > 0.9 * (ranks - 1), "one rank receives everything"
        if isinstance(given, Alike):
            assert found["reduce_scatter"] < 2.2


def test_a_table_has_a_line_for_each_number_of_ranks():
    rows = [
        {"ranks": ranks, "codecs": codecs, "way": way, "numel": 9, "kept": 3, "messages": 4, "received": 50,
         "container": 25.0}
        for ranks in (2, 4) for codecs in CODECS for way in WAYS
    ]  # fmt: skip
    lines = table("hot: some", rows).splitlines()
    assert lines[0].startswith("**Hot: some.** 9 elements, k = 3") and lines[-1].startswith("| 4 | 2 | 2 | 2 |")
    assert len({line.count("|") for line in lines[2:]}) == 1


@pytest.mark.parametrize("scope", ["model", "bucket"])
@pytest.mark.parametrize(("exchange", "density"), [("reduce_scatter", None), ("reduce_scatter", 0.05),
                                                   ("densestream", 0.05)])  # fmt: skip
def test_simulated_ranks_lose_nothing(scope, exchange, density):
    """What all have sent and what they keep is what came; a rank that is absent keeps its residual and its slice's."""
    config = Config.load("topk_model", scope=scope, exchange={"name": exchange, "density": density})
    ranks, rng = SimulatedRanks(config, 3, [300, 200]), np.random.default_rng(0)
    came, sent = np.zeros(500), np.zeros(500)
    for step in range(5):
        vectors = [rng.standard_normal(500).astype(np.float32) for _ in range(3)]
        vectors[1] = None if step == 2 else vectors[1]
        came += sum(vector for vector in vectors if vector is not None)
        sent += 3.0 * ranks.mean(vectors)
    np.testing.assert_allclose(sent + np.sum(ranks.residuals, 0), came, atol=1e-4)
    assert ranks.exchanges == 5 and min(ranks.sent) > 0 and sum(ranks.sent) == sum(ranks.received)


@pytest.mark.parametrize("scope", votes_job.SCOPES)
def test_simulated_ranks_vote_as_the_oracle(scope):
    """The memory scaled_momentum goes by the number of the step."""
    ranks = SimulatedRanks(Config.load(votes_job.config(scope)), 3, votes_job.SIZES)
    for step, total in enumerate(votes_job.sums(scope, 3)):
        given = [np.concatenate(votes_job.gradients(step, rank)).astype(np.float32) for rank in range(3)]
        np.testing.assert_allclose(3 * ranks.mean(given), total, rtol=1e-6)
