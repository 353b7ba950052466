"""The wire format: containers of a job (``frame``, version 2) and standalone ones (``standalone``, version 1)."""
