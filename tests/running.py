"""How the suite runs: the choice of tests, their order and workers, and what happens if a test or its teardown hangs.

`tests.conftest` imports these hooks. This module imports nothing of mizzen, so that it loads quickly.
"""

import faulthandler
import os
from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

_STACKS = ("tests/stack/", "tests/chaos/test_chaos.py")


class Stacks(LoadFileScheduling):
    """Runs the tests of one file on one worker, and all tests of whole stacks on one worker.

    Two stacks at a time are too much for two cores.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "tests/stack" if nodeid.startswith(_STACKS) else super()._split_scope(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Makes the unfinished files of a crashed worker available again.

        xdist does so with the finished ones, too. A worker that gets no test of its next files waits for ever.
        """
        own = self.assigned_work[node]
        for scope in [scope for scope, tests in own.items() if all(tests.values())]:
            del own[scope]
        return super().remove_node(node)

    def schedule(self) -> None:
        """Assigns tests. A worker that replaces a crashed one runs its last test only once it is told that no other
        follows, which xdist does in a second call.
        """
        replaced = self.collection is not None
        super().schedule()
        if replaced:
            super().schedule()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Stacks:
    return Stacks(config, log)


_crashed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remembers tests during which a worker crashed: xdist repeats them, and they may pass then."""
    if report.when == "???":
        _crashed.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Records these tests as failed, so that `make test-failed` runs them: pytest records how they ended last."""
    if _crashed and (cache := session.config.cache) is not None:
        cache.set("cache/lastfailed", cache.get("cache/lastfailed", {}) | dict.fromkeys(_crashed, True))


_TEARDOWN_S = 120
_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps a descriptor of the terminal: pytest redirects that of stderr while a test runs."""
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Prints the tracebacks of all threads shortly before pytest-timeout ends a worker: its own would be lost."""
    faulthandler.dump_traceback_later(settings.timeout * 0.98, file=item.config.stash[_STDERR])


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Ends a worker whose teardown hangs, with the tracebacks of its threads: after a test that failed, the limit of
    pytest-timeout no longer applies.
    """
    faulthandler.dump_traceback_later(_TEARDOWN_S, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


_LONG = (
    "tests/netns/test_netns.py",
    "tests/proxies/balance/",
    "tests/sdk/test_kill_loop.py",
    "tests/workflows/",
    "tests/services/test_live",
    "tests/activities/test_placement_runs.py",
    "tests/activities/test_scheduler_state.py",
    "tests/sdk/test_sdk_kill.py",
    "tests/agent/test_fleet.py",
    "tests/bench/test_annealing.py",
    "tests/simulation/test_command.py",
    "tests/research/experiments/",
    "tests/capacity/",
    "tests/services/test_shared_fleet.py",
    "tests/sdk/",
    "tests/objects/test_copy_kills.py",
    "tests/simulation/test_reservations.py",
    "tests/simulation/test_engine.py",
    "tests/tetris/test_command.py",
    "tests/research/spot/test_command.py",
    "tests/agent/test_task_readiness.py",
    "tests/activities/test_walk.py",
    "tests/api/test_generated.py",
    "tests/api/test_limits.py",
    "tests/api/test_access.py",
)


def _turn(item: pytest.Item) -> int:
    starts = (_STACKS, *_LONG)
    return next((turn for turn, start in enumerate(starts) if item.nodeid.startswith(start)), len(starts))


_TURNS = 3
_ROTATING = ("tests/bench/", "tests/research/", "tests/simulation/")
"""Folders in which all tests rotate: together they take a tenth of the time."""


def _rotating(item: pytest.Item) -> str | None:
    """Returns what has a turn of its own: a file that is marked `rotating` as a whole, or a test; None: always runs."""
    if item.get_closest_marker("rotating") is None and not item.nodeid.startswith(_ROTATING):
        return None
    module = item.getparent(pytest.Module)
    whole = module is not None and any(mark.name == "rotating" for mark in module.own_markers)
    return item.nodeid.partition("::")[0] if whole else item.nodeid


def _rotate(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps a third of what is marked `rotating`, if MIZZEN_TURN has the number of the third."""
    if not (turn := os.environ.get("MIZZEN_TURN", "")):
        return
    named = {item: _rotating(item) for item in items}
    chosen = set(sorted({name for name in named.values() if name})[int(turn) % _TURNS :: _TURNS])
    if left := [item for item, name in named.items() if name and name not in chosen]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item, name in named.items() if not name or name in chosen]


def pytest_report_header() -> str | None:
    """Says which third runs."""
    turn = os.environ.get("MIZZEN_TURN", "")
    return f"of the tests marked rotating, a third runs: TURN={turn}" if turn else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses the tests whose turn it is, and moves the stack tests to the front, then the other long files, those that
    mostly wait first.

    Stack tests mostly wait while the other workers compute. A long file that starts late would leave a core idle at the
    end.
    """
    _rotate(config, items)
    items.sort(key=_turn)
