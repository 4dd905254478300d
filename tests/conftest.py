"""For every test: nothing may be left behind, and every limit scales with one variable.

`--long` also runs what is marked `long` and makes the property tests draw many more examples.
`ENGINE_CLIENT_TEST_TIMEOUT_FACTOR=3` multiplies all time limits on a slow machine.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.helpers.leaks import Snapshot, mark_descendants
from tests.helpers.limits import TIMEOUT_FACTOR

# No deadline per example: a busy machine is not a bug; pytest's time limit ends what hangs.
settings.register_profile("ci", deadline=None, print_blob=True)
settings.register_profile("full", settings.get_profile("ci"), max_examples=1_000)
LONG_FACTOR = 10
"""With so many examples, the time limits are this much longer."""
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long")


def pytest_configure(config: pytest.Config) -> None:
    mark_descendants()
    # A shell starts background jobs with SIGINT ignored, and Python then keeps it so, also in what
    # it starts; the tests of Ctrl-C need it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--long") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = config.getoption("--long")
    if long:
        # Its look at threads that run may crash the process, and it would look at every long test.
        config.pluginmanager.unregister(name="faulthandler")
    factor = TIMEOUT_FACTOR * (LONG_FACTOR if long else 1)
    skip_long = pytest.mark.skip(reason="takes long: run with --long")
    default = float(config.getini("timeout") or 0)
    for item in items:
        if item.get_closest_marker("long"):
            if not long:
                item.add_marker(skip_long)
            _scale_time_limit(item, default, TIMEOUT_FACTOR)
        else:
            _scale_time_limit(item, default, factor)


def _scale_time_limit(item: pytest.Item, default: float, factor: float) -> None:
    if factor == 1:
        return
    marker = item.get_closest_marker("timeout")
    keywords = dict(marker.kwargs) if marker else {}
    seconds = keywords.pop("timeout", marker.args[0] if marker and marker.args else default)
    item.add_marker(
        pytest.mark.timeout(seconds * factor, **keywords),
        append=False,  # the closest one counts
    )


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the test that leaves a thread, a descriptor, a process or a registered waiter."""
    before = Snapshot()
    yield
    before.check()
