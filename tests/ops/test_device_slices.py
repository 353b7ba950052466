"""reduce_scatter of gradients on a device gives the bytes, the sums and the residuals of the host: see conftest.py."""

import numpy as np
import pytest

from hvd_deepreduce import Config, ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.exchange.reduce_scatter import SlicedSum
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.pipeline import Pipeline
from tests import cases
from tests.ops.compare import both
from tests.support.simulated_collectives import CollectiveNetwork, altered

RANKS = 3
KEY = RngKey(3, 1, 7)


@pytest.mark.parametrize("bounds", [[], [0], [0, 5, 5, 4097, 2**32 - 1]])
def test_places(gpu, bounds):
    for indices in ([], [5], [0, 4, 5, 4096, 2**32 - 2]):
        both(gpu, arrays.places, np.array(indices, np.uint32), bounds)


REDUCE_SCATTER = {"scope": "model", "exchange": "reduce_scatter", "sparsifier": {"name": "topk", "density": 0.4}}
SETTINGS = [
    {}, {"density": 0.01}, {"value": "raw", "index": "rans"}, {"value": "raw", "index": "rans", "density": 0.01},
    *({"exchange": {"name": "reduce_scatter", "density": 0.1}, "density": density} for density in (0.01, 0.2)),
    {"exchange": {"name": "reduce_scatter", "density": 0.2}, "memory": "dgc"}, {"sparsifier": "none"},
    {"sparsifier": "randomk"}, {"exchange": {"name": "reduce_scatter", "round_sum": True}, "value": "lossless"},
]  # fmt: skip


def programs(config, gradients, residuals, velocities, step=0):
    pipeline = Pipeline(config)
    return [
        SlicedSum(
            pipeline, RANKS, KEY._replace(rank=rank, step=step), gradients[rank], residuals[rank], residuals[rank],
            velocities[rank] if config.has_velocity else None, half="bfloat16",
        )
        for rank in range(RANKS)
    ]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sums_and_residuals(gpu, settings):
    """In two steps; the second gradient of one of the ranks is not finite."""
    config, numel = Config.load(REDUCE_SCATTER, **settings), 4003
    found = []
    for put in (np.copy, gpu.put):
        residuals, velocities = ([put(np.zeros(numel, np.float32)) for _ in range(RANKS)] for _ in range(2))
        outs, sent = [], []
        for step in range(2):
            gradients = [cases.random(numel, seed=10 * step + rank) for rank in range(RANKS)]
            gradients[1][7] = np.nan if step else 1
            network = CollectiveNetwork(RANKS)
            works = programs(config, [put(gradient) for gradient in gradients], residuals, velocities, step)
            for result in network.run([one.steps() for one in works]):
                outs.append(put(np.ones(numel, np.float32)))
                result.write(outs[-1], 0.5)
            sent.append(network.sent.tolist())
        found.append([gpu.host(one).tobytes() for one in (*outs, *residuals, *velocities)] + sent)
    assert found[0] == found[1]


@pytest.mark.parametrize("index", ["rice", "rice_blocks"])
def test_the_sizes_of_all_slices_are_waited_for_at_once(gpu, index):
    if not hasattr(gpu.module, "waits"):
        pytest.skip("only the emulator counts waits")
    config = Config.load(REDUCE_SCATTER, index=index)
    waits = []
    for ranks in (3, 9):
        gradient, residual = gpu.put(cases.random(9000)), gpu.put(np.zeros(9000, np.float32))
        steps = SlicedSum(Pipeline(config), ranks, KEY, gradient, residual, residual).steps()
        before = gpu.module.waits
        next(steps)
        waits.append(gpu.module.waits - before)
    assert waits == [3, 3]  # the selection, the slices' places in it, the sizes


def test_a_broken_container_is_refused_by_its_rank(gpu):
    config = Config.load(REDUCE_SCATTER, value="raw", index="rans")
    errors = []
    for put in (np.copy, gpu.put):
        gradients = [put(cases.random(1200, seed=rank)) for rank in range(RANKS)]
        works = programs(config, gradients, [None] * RANKS, [None] * RANKS)
        steps = [one.steps() for one in works]

        def damaged(_, answer):
            if isinstance(answer, tuple):
                received, sizes = answer
                received[sizes[0] + sizes[1] // 2] ^= 4  # of what rank 1 sent
            return answer

        steps[0] = altered(steps[0], gets=damaged)
        with pytest.raises(ContainerError) as error:
            CollectiveNetwork(RANKS).run(steps)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
