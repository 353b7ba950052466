"""The scopes larger than a tensor, and the exchanges: what the cases of all frameworks try."""

WITHOUT_MPI = ("allgather", "reduce_scatter")
SCOPES = [
    {"scope": "model"},
    {"scope": "bucket", "bucket_bytes": 8000},
    {"scope": "bucket", "bucket_bytes": 8000, "selection": "tensor"},
    {"scope": "model", "exchange": "densestream", "index": None, "value": None},
    {"scope": "bucket", "bucket_bytes": 8000, "exchange": {"name": "densestream", "coded": False, "fill": False},
     "index": None, "value": None},
    {"scope": "model", "exchange": "topk_allgather", "index": None, "value": None},
    {"scope": "model", "exchange": "sparcml", "index": None, "value": None},
    {"scope": "bucket", "bucket_bytes": 8000, "exchange": "reduce_scatter"},
    {"scope": "model", "exchange": {"name": "reduce_scatter", "density": 1.0}},
]  # fmt: skip
