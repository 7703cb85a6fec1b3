"""Updates of services: real workflows, ledger and scheduler, simulated machines."""

from collections.abc import Callable

import pytest

from domain.service import CanarySpec, ResourceOption, ServiceSpec
from tests.activities.temporal import until
from tests.services.live import SHARED, Live, service


def _in_zone(zone: str, **policy: object) -> ServiceSpec:
    """Returns a service that may have spot machines in one zone only."""
    spec = service(num_overprovision=0, dynamic_ondemand_fallback=False, **policy)
    return spec.model_copy(update={"options": (spec.options[0].model_copy(update={"zone": zone}),)})


def _on_shared(**policy: object) -> ServiceSpec:
    """Returns a service on shared machines."""
    spec = service(**{**policy, "placer": None, "num_overprovision": 0})
    option: ResourceOption = spec.options[0].model_copy(update={"spot": False})
    return spec.model_copy(update={"options": (option,)})


def _changed(spec: ServiceSpec) -> ServiceSpec:
    """Returns the service with another command."""
    return spec.model_copy(update={"argv": ("serve", "--new")})


class _Watch:
    """The versions of the ready endpoints during an update."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.seen: list[tuple[int, ...]] = []

    def until_only(self, version: int, count: int = 2) -> Callable[[], bool]:
        """Returns the condition that exactly `count` endpoints are ready, all of a version."""

        def holds() -> bool:
            versions = tuple(sorted(e.version for e in self._live.endpoints()))
            self.seen.append(versions)
            return versions == (version,) * count

        return holds


@pytest.mark.rotating
async def test_a_rolling_update_keeps_the_replicas_that_serve(live: Live) -> None:
    """Each replica of the new version becomes ready before its predecessor drains."""
    live.up(service(num_overprovision=0))
    await live.ready(2)
    live.update(_changed(service(num_overprovision=0)))
    counts: set[int] = set()

    def switched() -> bool:
        ready = live.endpoints()
        counts.add(len(ready))
        return len(ready) == 2 and {e.version for e in ready} == {2}

    await until(switched, "two replicas of version 2 are ready", 40.0)
    assert min(counts) >= 2
    await until(lambda: sum(one.ended_at is None for one in live.replicas()) == 2, "the older replicas have ended")


@pytest.mark.long
async def test_an_update_keeps_the_replicas_that_it_does_not_change(live: Live) -> None:
    """More replicas, and the way back from an update that finds no machine: the same replicas serve all the time."""
    two = {"num_overprovision": 0, "dynamic_ondemand_fallback": False}
    three = {**two, "min_replicas": 3, "max_replicas": 3}
    live.up(service(**two))
    await live.ready(2)
    live.update(service(**three))
    await live.ready(3)
    serving = {e.replica for e in live.endpoints()}
    assert serving == {0, 1, 2} and {e.version for e in live.endpoints()} == {2}
    live.update(_on_shared(**three))
    await until(lambda: len(live.replicas()) == 4, "a replica of version 3 waits")
    live.update(service(**three))
    await until(lambda: live.replicas()[3].ended_at is not None, "it has ended")
    assert live.replicas()[3].cause == "superseded"
    assert {(e.replica, e.version) for e in live.endpoints()} == {(one, 4) for one in serving}
    live.update(_changed(service(**three)))
    await until(lambda: {e.version for e in live.endpoints()} == {5}, "version 5 serves", 60.0)


@pytest.mark.long
async def test_a_blue_green_update_switches_at_once(live: Live) -> None:
    """No replica of the new version is an endpoint before all of them are ready."""
    live.up(service(num_overprovision=0))
    await live.ready(2)
    live.cold_s = 1.0
    live.update(_changed(service(num_overprovision=0)), "blue_green")
    seen: list[tuple[int, ...]] = []

    def switched() -> bool:
        versions = tuple(sorted(e.version for e in live.endpoints()))
        seen.append(versions)
        return versions == (2, 2)

    await until(switched, "version 2 serves", 40.0)
    assert set(seen) <= {(1, 1), (2, 2)}


@pytest.mark.long
async def test_an_update_to_another_zone_keeps_what_serves(live: Live) -> None:
    """The replicas in the old zone serve until those in the new zone are ready."""
    live.up(_in_zone("za"))
    await live.ready(2)
    live.update(_in_zone("zb"))
    watch = _Watch(live)
    await until(watch.until_only(2), "two replicas of version 2 are ready", 60.0)
    assert {str(e.zone) for e in live.endpoints()} == {"zb"}
    assert min(len(versions) for versions in watch.seen) >= 2
    await until(lambda: sum(one.ended_at is None for one in live.replicas()) == 2, "the older replicas have ended")


@pytest.mark.long
async def test_an_update_away_from_spot_and_back_keeps_what_serves(live: Live) -> None:
    """From spot machines to shared ones, and from shared ones to spot machines, with two ready at any time."""
    live.up(service(num_overprovision=0))
    await live.ready(2)
    await live.shared_machine()
    await live.shared_machine(f"{SHARED}b")
    watch = _Watch(live)
    live.update(_on_shared())
    await until(watch.until_only(2), "two replicas on shared machines are ready", 60.0)
    await until(lambda: live.site.natives() == set(), "the spot machines are gone")
    live.update(service(num_overprovision=0))
    await until(watch.until_only(3), "two replicas on spot machines are ready", 60.0)
    assert {e.kind for e in live.endpoints()} == {"spot"}
    assert min(len(versions) for versions in watch.seen) >= 2


@pytest.mark.long
async def test_an_update_that_fails_is_given_up(live: Live) -> None:
    """After three failed replicas of the new version, the older one goes on in its own zone, and says so."""
    live.up(_in_zone("za"))
    first = await live.ready(2)
    live.fails_from_version = 2
    live.update(_in_zone("zb"))
    await until(lambda: "update_given_up" in live.row().notes, "the update is given up", 60.0)
    live.take(live.machine_of(first[0].replica))
    await until(lambda: live.replicas()[first[0].replica].ended_at is not None, "the lost replica has ended")
    await live.ready(2)
    assert {(e.version, str(e.zone)) for e in live.endpoints()} == {(1, "za")}
    assert all(one.version == 1 for one in live.replicas() if one.ended_at is None)


@pytest.mark.rotating
async def test_a_canary_serves_beside_the_older_version_and_is_taken_back(live: Live) -> None:
    """Failed answers end the first canary; the next one passes. The older version keeps all its replicas meanwhile."""
    spec = service(num_overprovision=0).model_copy(update={"canary": CanarySpec(share=0.3, for_s=1.0, error_rate=0.01)})
    live.up(spec)
    await live.ready(2)
    live.update(_changed(spec))
    found = await live.ready(3)
    assert [(e.version, e.is_canary) for e in found] == [(1, False), (1, False), (2, True)]
    await until(lambda: live.row().notes == ["canary_waits"], "it waits for answers")
    live.count_canary(2, failed=10)
    await until(lambda: live.row().notes == ["canary_failed"], "it is taken back")
    found = await live.ready(2)
    assert {(e.replica, e.version) for e in found} == {(0, 1), (1, 1)}
    live.update(_changed(_changed(spec)).model_copy(update={"argv": ("serve", "--newer")}))
    await live.ready(3)
    live.count_canary(3, failed=0)
    watch = _Watch(live)
    await until(watch.until_only(3), "version 3 serves", 60.0)
    assert min(len(versions) for versions in watch.seen) >= 2
    assert not any(e.is_canary for e in live.endpoints())
