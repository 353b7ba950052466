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


def programs(config, gradients, residuals):
    pipeline = Pipeline(config)
    return [
        SlicedSum(pipeline, RANKS, KEY._replace(rank=rank), gradient, residual, residual)
        for rank, (gradient, residual) in enumerate(zip(gradients, residuals, strict=True))
    ]


@pytest.mark.parametrize("settings", [{}, {"value": "raw", "index": "rans"}, {"exchange": {"density": 0.1}}], ids=str)
@pytest.mark.parametrize("density", [0.01, 0.4], ids=["short", "long"])
def test_sums_and_residuals(gpu, settings, density):
    exchange = {"name": "reduce_scatter", **settings.get("exchange", {})}
    config = Config.load({"scope": "model", "sparsifier": {"name": "topk", "density": density}, **settings},
                         exchange=exchange)  # fmt: skip
    gradients = [cases.random(4003, seed=rank) for rank in range(RANKS)]
    found = []
    for put in (np.copy, gpu.put):
        residuals = [put(np.zeros(4003, np.float32)) for _ in range(RANKS)]
        network = CollectiveNetwork(RANKS)
        works = programs(config, [put(gradient) for gradient in gradients], residuals)
        outs = [put(np.zeros(4003, np.float32)) for _ in range(RANKS)]
        for out, result in zip(outs, network.run([one.steps() for one in works]), strict=True):
            result.write(out, 0.5)
        found.append([gpu.host(one).tobytes() for one in (*outs, *residuals)] + [network.sent.tolist()])
    assert found[0] == found[1]


@pytest.mark.parametrize("index", ["rice", "rice_blocks"])
def test_the_sizes_of_all_slices_are_waited_for_at_once(gpu, index):
    if not hasattr(gpu.module, "waits"):
        pytest.skip("only the emulator counts waits")
    config = Config.load({"scope": "model", "exchange": "reduce_scatter", "index": index,
                          "sparsifier": {"name": "topk", "density": 0.4}})  # fmt: skip
    waits = []
    for ranks in (3, 9):
        gradient, residual = gpu.put(cases.random(9000)), gpu.put(np.zeros(9000, np.float32))
        steps = SlicedSum(Pipeline(config), ranks, KEY, gradient, residual, residual).steps()
        before = gpu.module.waits
        next(steps)
        waits.append(gpu.module.waits - before)
    assert waits == [3, 3]  # the selection, the slices' places in it, the sizes


def test_a_broken_container_is_refused_by_its_rank(gpu):
    config = Config.load({"scope": "model", "exchange": "reduce_scatter", "value": "raw", "index": "rans",
                          "sparsifier": {"name": "topk", "density": 0.4}})  # fmt: skip
    errors = []
    for put in (np.copy, gpu.put):
        gradients = [put(cases.random(1200, seed=rank)) for rank in range(RANKS)]
        steps = [one.steps() for one in programs(config, gradients, [None] * RANKS)]

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
