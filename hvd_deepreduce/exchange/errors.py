"""The errors of the exchanges. Importing them needs no MPI."""


class ExchangeError(ValueError):
    """The ranks' tensors or messages cannot be summed.

    All ranks raise it with the same text, which names the ranks that found the fault. Residuals are unchanged, and the
    communicator can be used again."""


class LostRankError(RuntimeError):
    """A rank died, or sent nothing within the timeout. The communicator refuses further exchanges."""
