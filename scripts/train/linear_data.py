"""Data of sparse linear models: LibSVM files, or generated rows with the statistics of KDD10."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from sklearn.datasets import load_svmlight_file

ROW_NONZEROS = 29
"""Features of a row of KDD10 (and 11 of KDD12)."""
EXPONENT, OFFSET = 1.1473, 3.63e-8
"""Of the Zipf-Mandelbrot law of a field: its feature with rank i, of D, is drawn as (i / D + OFFSET)^-EXPONENT. With
these, 10% of the training rows of KDD10 have 10% of its features, and 1% have 1.77%, as SKCompress reports (section
7.2, impact of batch size and sparsity)."""
MOST = 2**31 - 1
"""The most features of a file."""
KDD10 = (19_264_097, 29_890_095)
"""Its rows and features (SKCompress, table 1: 19 M and 29 M)."""


@dataclass(frozen=True)
class Rows:
    """Examples.

    Attributes:
        features: float32 CSR ``[rows, numel]``.
        labels: float32 ``[rows]``, -1 or 1.
    """

    features: csr_matrix
    labels: npt.NDArray[np.float32]

    def __getitem__(self, rows: npt.NDArray[np.int64]) -> Rows:
        return Rows(self.features[rows], self.labels[rows])

    def split(self, seed: int) -> tuple[Rows, Rows]:
        """75% to train, in random order, and 25% to test (SKCompress, section 7.1)."""
        order = np.random.default_rng(seed).permutation(self.labels.size)
        cut = self.labels.size * 3 // 4
        return self[order[:cut]], self[order[cut:]]


@dataclass(frozen=True)
class Batch:
    """Examples on the features that they have, so that nothing is as long as the model.

    Attributes:
        support: uint32 ``[d]``, sorted: these features.
        features: float32 CSR ``[rows, d]``.
        transposed: float32 CSR ``[d, rows]``.
        labels: float32 ``[rows]``.
    """

    support: npt.NDArray[np.uint32]
    features: csr_matrix
    transposed: csr_matrix
    labels: npt.NDArray[np.float32]

    @classmethod
    def of(cls, rows: Rows) -> Batch:
        given = rows.features
        support, places = np.unique(given.indices, return_inverse=True)
        shape = (given.shape[0], support.size)
        features = csr_matrix((given.data, places.reshape(-1).astype(np.int32), given.indptr), shape=shape)
        return cls(support.astype(np.uint32), features, features.T.tocsr(), rows.labels)


def batches(rows: Rows, share: float) -> list[Batch]:
    """The rows in ``1 / share`` batches, rounded, of equal size; a rest is left out.

    Raises:
        SystemExit: there are fewer rows than batches.
    """
    count = round(1 / share)
    size = rows.labels.size // count
    if not size:
        raise SystemExit(f"{rows.labels.size} rows do not give {count} batches: use a larger share, or fewer ranks")
    return [Batch.of(rows[np.arange(at, at + size)]) for at in range(0, count * size, size)]


def read_libsvm(path: Path, rank: int, ranks: int, zero_based: bool = False) -> Rows:
    """One rank's part of a LibSVM file: the lines that begin in its share of the bytes.

    KDD10, KDD12 and CTR files have lines ``label index:value ...``, with indices from 1. A label above 0 becomes 1, any
    other -1.

    Args:
        path: the file, not compressed.
        rank, ranks: of this process, and how many there are.
        zero_based: whether indices begin at 0.

    Returns:
        The rows, with as many features as the largest index needs: other ranks may need more.

    Raises:
        SystemExit: a rank's share has no lines.
    """
    size = os.path.getsize(path)
    begin, end = size * rank // ranks, size * (rank + 1) // ranks
    if begin == end:
        raise SystemExit(f"{path} has {size} bytes, too few for {ranks} ranks: use fewer")
    features, labels = load_svmlight_file(
        str(path), n_features=MOST, dtype=np.float32, zero_based=zero_based, offset=begin, length=end - begin
    )
    if not labels.size:
        raise SystemExit(f"{path} has no lines for rank {rank} of {ranks}: use fewer ranks")
    features.sort_indices()
    numel = int(features.indices.max(initial=0)) + 1
    return resized(Rows(features, np.where(labels > 0, 1, -1).astype(np.float32)), numel)


def resized(rows: Rows, numel: int) -> Rows:
    """The rows as those of a model of ``numel`` features, at least as many as they have."""
    given = rows.features
    return Rows(csr_matrix((given.data, given.indices, given.indptr), shape=(given.shape[0], numel)), rows.labels)


def generated(count: int, numel: int, seed: int, begin: int = 0) -> Rows:
    """Rows of norm 1 with one feature, drawn by the Zipf law of KDD10, from each of 29 fields of equal size.

    The features' numbers are in random order, which is the hardest for codecs of indices. The labels are drawn with the
    probability sigmoid(3 (x . w - b)), for normal weights w and the mean b of x . w.

    Args:
        count: of rows.
        numel: of features, at least 29.
        seed: of the law's order and of the weights, equal on all ranks.
        begin: number of the first row; ranks with other rows have other ones.
    """
    shared, own = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1, begin])
    order = shared.permutation(numel).astype(np.int32)
    weights = shared.standard_normal(numel, dtype=np.float32)

    def drawn(rng: np.random.Generator, rows: int) -> npt.NDArray[np.int32]:
        """Features of some rows: int32 ``[rows, 29]``, sorted."""
        # The inverse of the distribution function of the law, for u in [0, 1).
        low, high = OFFSET ** (1 - EXPONENT), (1 + OFFSET) ** (1 - EXPONENT)
        u, of_field = rng.random((rows, ROW_NONZEROS)), numel // ROW_NONZEROS
        ranks = (((low + u * (high - low)) ** (1 / (1 - EXPONENT)) - OFFSET) * of_field).astype(np.int64)
        found = order[np.clip(ranks, 0, of_field - 1) + of_field * np.arange(ROW_NONZEROS)]
        found.sort(axis=1)
        return found

    value = np.float32(1 / np.sqrt(ROW_NONZEROS))
    indices = drawn(own, count).reshape(-1)
    indptr = np.arange(0, indices.size + 1, ROW_NONZEROS)
    features = csr_matrix((np.full(indices.size, value), indices, indptr), shape=(count, numel))
    balance = value * weights[drawn(shared, 4096)].sum(1).mean()  # as many labels of 1 as of -1, about
    chance = 1 / (1 + np.exp(-3 * (features @ weights - balance)))
    return Rows(features, np.where(own.random(count) < chance, 1, -1).astype(np.float32))


def scaled_kdd10(scale: float) -> tuple[int, int]:
    """Rows and features of KDD10, both divided by ``scale``: the share of the features that a share of the rows has
    is as in KDD10."""
    return int(KDD10[0] / scale), int(KDD10[1] / scale)


def epoch_order(count: int, seed: int, epoch: int) -> Iterator[int]:
    """The batches of an epoch in random order, the same on all ranks."""
    return iter(np.random.default_rng([seed, 2, epoch]).permutation(count).tolist())
