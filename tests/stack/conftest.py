"""Fixtures: a stack for one test, and a stack that the tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.buckets import s3_endpoint, s3_url
from tests.decoys import Decoys
from tests.receivers import Mailbox, mailbox
from tests.stack.harness import Up, processes_of

__all__ = ["s3_endpoint", "s3_url"]
_LIVENESS = "liveness: {interval_s: 1, timeout_s: 5, restart_after_s: 15}\n"
_PERIOD = "reclaim: {control_period_s: 2}\n"


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """A stack for one test, not started yet; its processes are killed after the test."""
    stack = Up(tmp_path)
    yield stack
    stack.close()


@pytest.fixture(scope="package")
def mail() -> Iterator[Mailbox]:
    """The mail server of the shared stack."""
    with mailbox() as box:
        yield box


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory, mail: Mailbox) -> Iterator[Up]:
    """A running stack; a test that stops it must start it again. At the end Ctrl-C must leave no process.

    It restarts parts that do not respond for 15 seconds, and may send notifications to receivers on loopback. Its
    current folder has modules with the names of all that it imports, and none may be imported.
    """
    smtp = f"smtp: {{host: 127.0.0.1, port: {mail.port}, tls: none, sender: mizzen@example.org}}"
    notify = f"notify: {{allow: [127.0.0.1/32], retry_s: 0.5, {smtp}}}\n"
    # On a busy machine a restart can take so long that, with the default, the machines would count as lost.
    stack = Up(tmp_path_factory.mktemp("shared"), lost_s=120, settings=_LIVENESS + _PERIOD + notify)
    decoys = Decoys(stack.folder / "project")
    stack.cwd, stack.environment = decoys.path, decoys.environment
    try:
        stack.start()
        stack.client().set_tenant("t", 3, {"a100": 16}, None)
        yield stack
        assert stack.interrupt() == 0
        assert processes_of(stack.data) == {}
        assert decoys.imported() == ""
    finally:
        stack.close()
