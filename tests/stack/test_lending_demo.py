"""The scenario of `make demo-lending`, without pauses; `test_lending.py` covers its parts one by one."""

from pathlib import Path

import pytest

from tests.stack.lending.installation import installation
from tests.stack.lending.outcome import checks
from tests.stack.lending.picture import picture
from tests.stack.lending.scenario import Scenario

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


@pytest.mark.long
def test_trainings_lose_nothing_while_owners_take_their_machines(tmp_path: Path) -> None:
    """All checks of the demo pass, except those of times, and the picture can be drawn."""
    with installation(tmp_path) as site:
        course = Scenario(site, 0.0, print).run()
    assert [f"{one.name}: {one.found}" for one in checks(course) if not one.passed and not one.timed] == []
    assert picture(course).startswith(b"\x89PNG")
