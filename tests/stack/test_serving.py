"""A service under load while its machines and mizzen's processes are killed, in a short form."""

from pathlib import Path

import pytest

from rigs.demos.serving.installation import installation
from rigs.demos.serving.scenario import ON_DEMAND, SPOT, ServingDemoScenario

_SECONDS, _PER_S, _TARGET = 24.0, 40.0, 2
_MOST_FAILED = 3
"""The bound of the full form, one request in a thousand, would be less than one request here."""


@pytest.mark.long
def test_a_service_goes_on_through_kills(tmp_path: Path) -> None:
    """Hardly any request fails while a zone, a replica, the worker, Temporal and the balancer are killed."""
    with installation(tmp_path) as site:
        course = ServingDemoScenario(site, _SECONDS, _PER_S, _TARGET, print).run()
    found = course.outcome
    assert found is not None
    assert found.requests == _SECONDS * _PER_S
    assert len(found.failed) <= _MOST_FAILED, found.failed
    assert found.cut + found.open_in_killed <= 0.05 * found.requests
    assert course.availability(ON_DEMAND) > 0.9
    assert course.availability(SPOT) > 0.5
    assert course.usd(SPOT) > 0
    assert course.usd(ON_DEMAND) > 0
