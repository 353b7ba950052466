"""What all tests share: where their helper modules are found, and hypothesis without a clock."""

import sys
from pathlib import Path

from hypothesis import settings

# Tests import `tests.oracle.<name>`, and the launchers beside this file by their plain names. At the end of the path:
# `make sanitize` puts its own copy of the package before this checkout's.
for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

# The same examples in every run; no limit on one example's time, since the machines are shared.
settings.register_profile("steady", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("steady")
