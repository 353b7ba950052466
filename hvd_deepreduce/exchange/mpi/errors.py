"""The errors of the exchanges. Importing them needs no MPI."""


class ExchangeError(ValueError):
    """The ranks' tensors or messages cannot be summed, or a rank has met an error while it summed.

    All ranks raise it with the same text, which names the ranks that found the fault. Residuals are unchanged, and the
    communicator can be used again. An ``ExchangeQueue`` refuses further exchanges."""


class LostRankError(RuntimeError):
    """A rank died, left the exchange, or sent nothing within the timeout. The communicator refuses further exchanges.

    All ranks that are in the exchange, or come to it later, raise it with the text of the rank that found it."""
