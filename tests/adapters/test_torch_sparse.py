"""Sparse PyTorch gradients as flat sparse tensors and back, and the carriers that Horovod gathers in their place."""

import numpy as np
import pytest
import torch

from hvd_deepreduce.torch import sparse

SHAPES = [((50, 8), 1), ((50,), 1), ((7, 9, 4), 2), ((6, 5, 4), 1)]


def some_gradient(shape, dims, dtype=torch.float32, entries=20, seed=0):
    """Uncoalesced: some indices occur twice."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randint(0, size, (entries,), generator=generator) for size in shape[:dims]])
    values = torch.randn(entries, *shape[dims:], generator=generator, dtype=torch.float64).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


@pytest.mark.parametrize(("shape", "dims"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_flattened_and_back(shape, dims, dtype):
    for entries in (0, 1, 20):
        gradient = some_gradient(shape, dims, dtype, entries)
        flat = sparse.flattened(gradient)
        assert flat.values.dtype == (np.float64 if dtype == torch.float64 else np.float32)
        dense = gradient.coalesce().to_dense()
        np.testing.assert_array_equal(flat.dense(), dense.to(torch.float64).numpy().reshape(-1))
        back = sparse.unflattened(flat, torch.zeros_like(gradient))
        assert back.dtype == dtype and back.shape == gradient.shape and back.sparse_dim() == dims
        assert torch.equal(back.to_dense(), dense)
        # What Horovod does with it.
        gradient = sparse.carrier(gradient, 3)
        gradient.zero_().add_(back)
        assert torch.equal(gradient.to_dense(), dense)


@pytest.mark.parametrize(("shape", "dims"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_carriers_say_the_parameter_and_the_factor(shape, dims, dtype, ranks):
    gradient = some_gradient(shape, dims, dtype)
    for number in (0, 1, 255, 4097, sparse.MOST - 1):
        one = sparse.carrier(gradient, number)
        indices = torch.cat([one._indices()] * ranks, 1)
        for factor, values in ((1, one._values()), (1 / ranks, one._values() / ranks)):
            gathered = torch.sparse_coo_tensor(indices, torch.cat([values] * ranks), shape)
            assert sparse.read_carriers(gathered, ranks) == (number, pytest.approx(factor, rel=1e-2))
    assert sparse.read_carriers(gradient, ranks) is None
    differ = torch.cat([sparse.carrier(gradient, number)._values() for number in range(ranks)])
    gathered = torch.sparse_coo_tensor(torch.zeros(dims, len(differ), dtype=torch.int64), differ, shape)
    assert (sparse.read_carriers(gathered, ranks) is None) == (ranks > 1), "the ranks' parameters differ"
    assert sparse.read_carriers(some_gradient(shape, dims, dtype, 5 * ranks), ranks) is None
    assert sparse.read_carriers(some_gradient(shape, dims, dtype, 0), ranks) is None
