"""Dense vectors by the codec ``lossless``, a native call for what codecs, container and sum do one after the other; the
bytes are the composed way's.

It serves configs of ``none`` and ``lossless``, in float32, on the host, without residuals. Whatever is not as expected
goes the composed way: values that are not finite or do not compress, and containers of other ranks that are broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, Floats, RngKey
from hvd_deepreduce.codecs.sparse_tensor import MAX_NUMEL
from hvd_deepreduce.codecs.sparsify.none import All
from hvd_deepreduce.codecs.value.lossless import Lossless
from hvd_deepreduce.config.settings import Config
from hvd_deepreduce.ops import lossless
from hvd_deepreduce.wire import frame

_F32 = np.dtype(np.float32)


class Whole:
    """One config's native calls. Make it with ``of``.

    Args:
        digest: of the config.
    """

    def __init__(self, digest: int) -> None:
        self._digest = digest

    @classmethod
    def of(cls, config: Config, shared: frame.Shared) -> Whole | None:
        """None: the config has other codecs."""
        dense = type(config.sparsifier) is All and type(config.value) is Lossless and not config.has_velocity
        return cls(shared.digest) if dense else None

    @staticmethod
    def takes(gradient: Any) -> bool:
        """Whether vectors such as this one go this way."""
        return type(gradient) is np.ndarray and gradient.dtype == _F32 and 0 < gradient.size <= MAX_NUMEL

    def encode(self, gradient: Floats, bounds: Sequence[int], keys: Sequence[RngKey]) -> tuple[U8, list[int]] | None:
        """The containers of slices, as ``lossless.containers``.

        Args:
            keys: of the slices.
        """
        numels = [end - begin for begin, end in pairwise(bounds)]
        salts = [self._salt(numel, key) for numel, key in zip(numels, keys, strict=True)]
        return lossless.containers(gradient, bounds, salts)

    def encode_sum(
        self, received: U8, sizes: Sequence[int], numel: int, key: RngKey, half: str | None
    ) -> U8 | None:
        """The container of the sum of a slice, as ``lossless.container_of_sum``. The rank of ``key`` is not used."""
        if not numel or sum(sizes) != received.size:
            return None
        return lossless.container_of_sum(received, sizes, numel, half, self._salt(numel, key))

    def split(self, data: U8, numels: Sequence[int], keys: Sequence[RngKey]) -> list[U8] | None:
        """The containers of slices, which are one behind the other, after their checksums were checked. ``None``: there
        are others, or bytes are left over."""
        found, at = [], 0
        for numel, key in zip(numels, keys, strict=True):
            size = lossless.container_bytes(data[at:], numel, self._salt(numel, key)) if numel else 0
            if numel and not size:
                return None
            found.append(data[at : at + size])
            at += size
        return found if at == data.size else None

    def _salt(self, numel: int, key: RngKey) -> int:
        return frame.salt(self._digest, numel, _F32, key)
