"""Which warnings a piece of a case brings, on this rank."""

from __future__ import annotations

import logging
from contextlib import contextmanager

from hvd_deepreduce.engine.adaptive import LOGGER


@contextmanager
def heard(name=LOGGER):
    """A list of the texts of a logger; by default those about the optimizer."""
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
