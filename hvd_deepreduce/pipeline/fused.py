"""The recommended pipeline in one native call for encode and one for decode and sum; the bytes are the composed way's.

It serves configs of ``topk``, ``rice`` and ``qsgd`` (without an entropy coder and without fitted scales), in float32,
without velocities, and containers of version 2. On a GPU it decodes, also signs, and whatever has selected: the
containers of all ranks in one set of launches; recorded.py encodes there. Everything else goes the composed way, from
codec to codec.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_deepreduce.codecs.index.rice import Rice
from hvd_deepreduce.codecs.index.rice_blocks import RiceBlocks
from hvd_deepreduce.codecs.interfaces import U8, Floats, Parts, RngKey, Sparsifier
from hvd_deepreduce.codecs.sparse_tensor import MAX_NUMEL
from hvd_deepreduce.codecs.sparsify.topk import TopK, kept_of
from hvd_deepreduce.codecs.value.qsgd import QSGD
from hvd_deepreduce.codecs.value.sign import Sign
from hvd_deepreduce.config.settings import Config
from hvd_deepreduce.ops import fused
from hvd_deepreduce.ops.pieces import Pieces
from hvd_deepreduce.wire import frame

_F32 = np.dtype(np.float32)
_ON_HOST = (np.ndarray, Pieces)


class Fused:
    """One config's native calls. Make it with ``of``.

    Args:
        form: of the containers' headers.
        value: the value codec.
        blocks: whether the index codec is ``rice_blocks``, and not ``rice``.
        threads: of the kernels.
    """

    def __init__(self, config: Config, form: int, value: QSGD | Sign, blocks: bool, threads: int) -> None:
        self._config, self._threads = config, threads
        self._scheduled, self._density = config.density_schedule is not None, _density_of(config.sparsifier)
        self._decodes = type(value) is QSGD
        self.encodes = False
        bits, l2 = 1, False
        if isinstance(value, QSGD):
            self.encodes = (
                self._density is not None
                and not (config.has_velocity or value.scaled or value.fit_scale)
                and value.under_feedback() is value
            )
            bits, l2 = value.bits, value.norm == "l2"
        self._settings = np.array([(form, bits, value.bucket_size or 0, l2, blocks)], fused.SETTINGS)

    @classmethod
    def of(cls, config: Config, shared: frame.Shared, threads: int) -> Fused | None:
        """None: the config has other codecs."""
        index, value = config.index, config.value
        if type(index) not in (Rice, RiceBlocks) or index is None or not isinstance(value, QSGD | Sign):
            return None
        if type(value) is QSGD and value.entropy != "none":
            return None
        form = frame.SPARSE | 1 + shared.indices.index(index.id)
        return cls(config, form, value, type(index) is RiceBlocks, threads)

    def takes(self, like: Floats) -> bool:
        """Whether arrays such as this one can be decoded: float32; signs on a GPU."""
        return like.dtype == _F32 and like.size <= MAX_NUMEL and (self._decodes or type(like) is not np.ndarray)

    def encode(
        self,
        gradient: Floats | Pieces,
        residual: Floats | None,
        key: RngKey,
        digest: int,
        finite: bool = False,
        sparsifier: Sparsifier | None = None,
        into: Floats | None = None,
    ) -> U8 | None:
        """The container of a gradient, as ``Pipeline.encode`` makes it.

        Args:
            gradient, residual, key, finite, into: as for ``Pipeline.encode``.
            digest: of the config.
            sparsifier: in place of the config's.

        Returns:
            The container. ``None``: the sparsifier is another one now, or the arrays are on a GPU, or not
            float32; nothing has changed.

        Raises:
            NonFiniteError: the gradient has NaN or infinity. Nothing has changed but ``into``.
            MemoryError: as ``ops.select.topk``.
        """
        density = self._density
        if sparsifier is not None or self._scheduled:
            density = _density_of(sparsifier or self._config.sparsifier_at(key.step))
        if density is None or not self.encodes or type(gradient) not in _ON_HOST:
            return None
        if gradient.dtype != _F32 or gradient.size > MAX_NUMEL:
            return None
        salt = frame.salt(digest, gradient.size, gradient.dtype, key)
        kept = kept_of(density, gradient.size)
        return fused.encode(gradient, residual, into, kept, self._settings, salt, key, finite, self._threads)

    def sum_into(
        self, out: Floats, gathered: U8, ranks: int, parts: Parts, keys: Sequence[RngKey], digest: int, scale: float
    ) -> int | None:
        """``scale * (sum over all ranks)`` of each slice of ``out``, from the messages of all ranks, in rank order.

        A message has the slices' containers one behind the other.

        Returns:
            The bytes of this rank's message. ``None``: the composed way must look at them, since a rank sent a
            container of other codecs or a broken one; ``out`` is unchanged.
        """
        rows = []
        for (begin, end), key in zip(parts, keys, strict=True):
            rows.append((begin, end, frame.salt(digest, end - begin, out.dtype, key)))
        tensors = np.array(rows, fused.TENSOR)
        return fused.decode(gathered, ranks, tensors, self._settings, out, scale, keys[0].rank, self._threads)


def _density_of(sparsifier: Sparsifier) -> float | None:
    """The share of elements that the native call selects; None: it does not select as this sparsifier does."""
    return sparsifier.density if type(sparsifier) is TopK and sparsifier.density_of == "elements" else None
