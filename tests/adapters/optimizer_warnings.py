"""Which warnings about the optimizer a piece of a case brings, on this rank."""

from __future__ import annotations

import logging
from contextlib import contextmanager

from hvd_deepreduce.engine.adaptive import LOGGER


@contextmanager
def heard():
    """A list of the texts."""
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
