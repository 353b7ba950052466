"""The scopes larger than a tensor, and the exchanges: what the cases of all frameworks try."""

WITHOUT_MPI = ("allgather", "auto", "reduce_scatter")
TWO_LEVELS = [
    {"scope": "model"},
    {"scope": "bucket", "bucket_bytes": 8000, "selection": "tensor"},
    {"scope": "bucket", "bucket_bytes": 8000, "exchange": {"name": "reduce_scatter", "density": 0.05}},
]
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
    {"scope": "bucket", "bucket_bytes": 8000,
     "exchange": {"name": "auto", "density": 1.0, "latency": 5, "bandwidth": 1}},
    {"scope": "model", "exchange": {"name": "densestream", "density": 1.0}, "index": None, "value": None},
]  # fmt: skip


def ranks_of_node(ranks: int) -> int:
    """How many ranks of this job are a node, so that there are two levels: two, or all on one node."""
    return 2 if ranks == 4 else ranks
