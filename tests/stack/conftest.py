"""A stack for each test, or for all tests of this folder that leave it as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.harness import Up, processes_of


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """`mizzen up`, not started yet; nothing of it is left after the test."""
    stack = Up(tmp_path)
    yield stack
    stack.close()


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack that is up; a test that stops it starts it again. Ctrl-C at the end leaves no process."""
    # On a busy machine a start may take so long that agents which it brings back would count as lost.
    stack = Up(tmp_path_factory.mktemp("shared"), lost_s=120)
    try:
        stack.start()
        stack.client().set_tenant("t", 3, {"a100": 16}, None)
        yield stack
        assert stack.interrupt() == 0
        assert processes_of(stack.data) == {}
    finally:
        stack.close()
