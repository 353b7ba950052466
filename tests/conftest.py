"""What all tests share: where their helper modules are found, hypothesis without a clock, markers, and jobs."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Tests import `tests.oracle.<name>`. At the end of the path: `make sanitize` puts its own copy of the package before
# this checkout's. The scripts' modules follow.
ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
sys.path.extend(str(folder) for folder in sorted((ROOT / "scripts").iterdir()))

from tests import ranks, selection  # noqa: E402
from tests.jobs import Job, Jobs  # noqa: E402

# The same examples in every run; no limit on one example's time, since the machines are shared.
settings.register_profile("steady", derandomize=True, deadline=None, max_examples=selection.EXAMPLES, database=None)
settings.load_profile("steady")


@cache
def group_of(file: str) -> str | None:
    """The group of a file whose tests must share one process with those of other files, or None.

    Installations share a wheel. Launchers run one at a time, but for the adapters': these share their jobs, take half
    of the launchers' time, and run beside the others.
    """
    text = (ROOT / file).read_text("utf-8")
    if "pytest.mark.launch" in text:
        return "launch adapters" if file.startswith("tests/adapters/") else "launch"
    return "packaging" if "pytest.mark.packaging" in text else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n`, one process runs all files of a group, one after another, and the largest group comes first.

    The marker ``xdist_group`` would say the same; pytest-xdist 3.8 does not pass it on under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.split("::")[0]) or nodeid

    return Scheduler(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not import tests of which it runs none: they import scripts, which import frameworks."""
    thorough = f"{collection_path}/".startswith(tuple(f"{ROOT}/{folder}" for folder in selection.FOLDERS))
    return True if thorough and config.option.markexpr.startswith("not thorough") else None


def again_in_the_second_order(item: pytest.Item) -> bool:
    """A case of the emulator that is thorough by the order of its threads (tests/ops/conftest.py) and by another
    parameter, too. `make test-all` has it in the first order, and the second order of its neighbours."""
    order = item.callspec.params.get("gpu") if hasattr(item, "callspec") else None
    return order == 2 and len(list(item.iter_markers("thorough"))) > 1


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Markers that follow from a fixture or a folder, so that they cannot be forgotten."""
    left_out = [item for item in items if again_in_the_second_order(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not again_in_the_second_order(item)]
    for item in items:
        if item.nodeid.startswith(selection.FOLDERS):
            item.add_marker("thorough")
        if "tensorflow" in item.nodeid:
            item.add_marker("tensorflow")
        if "gpu" in getattr(item, "fixturenames", ()):
            item.add_marker("emulator")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    ranks.running_test = item
    try:
        return (yield)
    finally:
        ranks.running_test = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    """A test that runs kernels in the emulator has the marker."""

    def launches() -> int:
        return getattr(sys.modules.get("tests.cuda_emulator"), "launches", 0)

    before = launches()
    result = yield
    if launches() != before and not item.get_closest_marker("emulator"):
        raise pytest.UsageError(f"{item.nodeid} runs kernels in the emulator: mark it with @pytest.mark.emulator")
    return result


@pytest.fixture(scope="session")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """The jobs whose cases are tests: see tests/jobs.py."""
    selected: dict[Job, list[str]] = defaultdict(list)
    for item in request.session.items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        if isinstance(values.get("job"), Job) and "case" in values:
            selected[values["job"]].append(values["case"])
    made = Jobs(selected, tmp_path_factory.mktemp("jobs"))
    yield made
    made.close()
