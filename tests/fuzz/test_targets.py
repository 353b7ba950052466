"""The fuzzer's targets accept their own valid inputs, which `make fuzz` then changes."""

import pytest

from tests.fuzz import targets


@pytest.mark.parametrize("name", targets.names())
def test_valid_inputs_are_read(name):
    target = targets.target(name)
    assert target.right
    for data in target.right:
        target.run(b"\0" + data)
