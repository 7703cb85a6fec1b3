"""Replicas on launched on-demand machines are spread over zones as far as their document requires it."""

from typing import Any

import pytest

from domain.service import ReplicaSpread, ServiceSpec
from domain.spread import SpreadLevel
from tests.activities.temporal import until
from tests.services.live import Live, service


@pytest.mark.rotating
async def test_a_required_zone_is_obeyed_by_launched_machines(live: Live) -> None:
    """The cloud has one on-demand zone: the second replica is launched only when zones are no longer required."""
    spec = service(placer=None, num_overprovision=0, min_replicas=2, max_replicas=2)
    option = spec.options[0].model_copy(update={"spot": False, "provider": "sim"})

    def spread(**fields: Any) -> ServiceSpec:
        rule = ReplicaSpread(over=SpreadLevel.ZONE, **fields)
        return spec.model_copy(update={"options": (option,), "spread": rule})

    live.up(spread(required=True))
    await live.ready(1)
    await until(lambda: live.row().notes == ["no_other_zone"], "the service says that no other zone is left")
    assert len(live.replicas()) == 1
    live.update(spread())
    await live.ready(2)
    assert [one.ended_at for one in live.replicas()] == [None, None]
