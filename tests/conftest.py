"""Options and hooks shared by all tests: `--slow` runs the long ones, and every skip prints its reason."""

from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks.py and census.py are helpers of the tests alone

import fork_server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow (`make test-all`)")
    parser.addoption("--evidence", metavar="FILE", help="where tests/gpu keeps what it has shown of copy engines")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and what they start
    fork_server.install()
    if "s" not in config.option.reportchars:
        config.option.reportchars += "s"  # nothing skips silently


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)  # counted on the last line, run by `make test-all`
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Collections look only at what a file's tests make: the modules loaded so far took 0.2 s each time.

    What is alive between two files (modules, session fixtures, pytest's own) stays alive anyway.
    """
    gc.collect()
    gc.freeze()
