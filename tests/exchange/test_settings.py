"""The registry of exchanges: an exchange is its settings and the function that they name."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.exchange.mpi import densestream, sparcml, topk_allgather
from hvd_deepreduce.exchange.settings import DenseStreamExchange, ExchangeSettings, exchanges


def test_every_exchange_names_its_function() -> None:
    functions = {
        "densestream": densestream.run_exchange,
        "topk_allgather": topk_allgather.run_exchange,
        "sparcml": sparcml.run_exchange,
    }
    for name, function in functions.items():
        assert exchanges.by_name[name]().load() is function
    assert set(functions) == {name for name, exchange in exchanges.by_name.items() if exchange.implementation}


def test_an_exchange_without_a_function_cannot_be_loaded() -> None:
    with pytest.raises(ValueError, match="exchange 'allgather' has no function over MPI"):
        exchanges.by_name["allgather"]().load()


@pytest.mark.parametrize("implementation", ["no_function", "a:b:c", 7, None])
def test_an_implementation_that_is_no_name(implementation: object) -> None:
    with pytest.raises(TypeError, match="Broken.implementation is .*'module:function'"):
        type("Broken", (ExchangeSettings,), {"__module__": __name__, "implementation": implementation})


def test_an_exchange_must_name_an_implementation() -> None:
    with pytest.raises(TypeError, match="Forgotten.implementation is ''; this class attribute must name the function"):

        class Forgotten(ExchangeSettings):
            name = "forgotten"
            id = 251


@pytest.mark.parametrize(
    ("implementation", "error", "words"),
    [
        ("hvd_deepreduce.exchange.mpi.sparcml:missing", ValueError, "exchange 'absent' .*missing"),
        ("hvd_deepreduce.exchange.missing:run", ImportError, "missing"),
        ("hvd_deepreduce.exchange.mpi.sparcml:SMALL", ValueError, "is of type int; a function is required"),
    ],
)
def test_a_function_that_is_not_there(implementation: str, error: type[Exception], words: str) -> None:
    attributes = {"__module__": __name__, "name": "absent", "implementation": implementation}
    absent = type("Absent", (ExchangeSettings,), attributes)
    with pytest.raises(error, match=words):
        absent().load()


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("values", [{"value": one} for one in ("raw", "float16", "bfloat16")]
                         + [{"value": "qsgd", "bits": bits} for bits in range(2, 9)], ids=str)  # fmt: skip
def test_blocks_have_zeros_where_the_codec_allows_a_gap(coded: bool, values: dict[str, object]) -> None:
    """For vectors of any length and dtype, so that a config can be refused before there is one."""
    settings = DenseStreamExchange(coded=coded, **values)
    for dtype in (np.float32, np.float64):
        for numel in (1, 2, 300, 10**5, 10**8):
            assert (DenseStream(coded=coded, **values).gap(numel, np.dtype(dtype)) > 0) == settings.has_zeros
    assert settings.fills == settings.has_zeros and not settings.model_copy(update={"fill": False}).fills
