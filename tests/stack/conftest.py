"""A stack for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.harness import Up


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """`mizzen up`, not started yet; nothing of it is left after the test."""
    stack = Up(tmp_path)
    yield stack
    stack.close()
