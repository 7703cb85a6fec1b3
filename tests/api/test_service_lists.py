"""Lists and metrics of many services: pages, the number of queries, and counters that only grow."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import event, func

from api.metrics import ServiceCollector
from domain.phases import Phase
from domain.service import ServiceSpec
from infra.db.capacity import InstanceRow
from infra.db.services import ServiceReplica, ServiceRow, ServiceVersion
from tests.api.calls import get, walk
from tests.api.world import INSTANCE, ApiWorld


def _add(world: ApiWorld, name: str, tenant: str = "vision", *, ended: bool = False, ready: int = 0) -> str:
    """Adds a service with ready replicas on a spot machine; returns its id."""
    id_ = f"sv-{tenant}-{name}"
    with world.session() as session:
        session.add(ServiceRow(id=id_, tenant=tenant, name=name, ended_at=func.now() if ended else None))
        session.flush()
        spec = ServiceSpec(name=name, tenant=tenant, argv=("serve",)).model_dump(mode="json")
        session.add(ServiceVersion(service=id_, version=1, spec=spec))
    for number in range(ready):
        workload = world.add_workload(Phase.RUNNING, tenant=tenant)
        world.add_attempt(workload, 1, "north/alpha/m1", 0)
        with world.session() as session:
            session.add(
                ServiceReplica(
                    service=id_, number=number, version=1, workload=workload, kind="spot", is_base=True, ready=True,
                    first_ready_at=func.now(), address="127.0.0.1", port=8000 + number,
                )
            )  # fmt: skip
    return id_


@contextmanager
def _queries(world: ApiWorld) -> Iterator[list[str]]:
    """Yields a list that gets the queries of the API."""
    found: list[str] = []
    engine = world.app.state.mizzen.engine

    def note(*args: object) -> None:
        found.append(str(args[2]))

    event.listen(engine, "before_cursor_execute", note)
    yield found
    event.remove(engine, "before_cursor_execute", note)


def _samples(world: ApiWorld, name: str) -> dict[str, float]:
    """Returns the current values of a metric by service."""
    families = ServiceCollector(world.app.state.mizzen.engine, None).collect()
    return {one.labels["service"]: one.value for family in families for one in family.samples if one.name == name}


async def test_the_list_is_paged(world: ApiWorld) -> None:
    """Pages have together the same services as a single page, by tenant and name; so have those of a filter."""
    for tenant, name in (("vision", "b"), ("vision", "a"), ("speech", "c"), ("vision", "a-b")):
        _add(world, name, tenant)
    _add(world, "a", "speech", ended=True)
    whole, pages = await walk(world, "/v1/services", 500, ended="true")
    assert pages == 1
    assert [one["id"] for one in whole] == [
        "sv-speech-a", "sv-speech-c", "sv-vision-a", "sv-vision-a-b", "sv-vision-b",
    ]  # fmt: skip
    for limit in (1, 2):
        assert await walk(world, "/v1/services", limit, ended="true") == (whole, -(-5 // limit))
    assert await walk(world, "/v1/services", 2, tenant="vision") == (whole[2:], 2)


async def test_the_number_of_queries_does_not_depend_on_the_number_of_services(world: ApiWorld) -> None:
    """The list and the metrics of seven services take as many queries as those of one, and show each of them."""
    counts = []
    for first, last in ((0, 1), (1, 7)):
        for number in range(first, last):
            _add(world, f"s{number}", ready=number % 3)
        with _queries(world) as listing:
            items = (await get(world, "/v1/services"))["items"]
        with _queries(world) as scraping:
            scraped = _samples(world, "mizzen_service_ready")
        counts.append((len(listing), len(scraping)))
    assert counts[0] == counts[1]
    assert [sum(one["ready"].values()) for one in items] == [number % 3 for number in range(7)]
    assert scraped == {"s1": 1, "s2": 2, "s4": 1, "s5": 2}


async def test_the_cost_does_not_fall_when_a_machine_ends(world: ApiWorld) -> None:
    """A machine that ends counts up to the begin of a transaction, which may be earlier than the last reading."""
    world.add_instance(pool=_add(world, "chat"), workload="wl-1")
    before = _samples(world, "mizzen_service_usd_total")["chat"]
    with world.session() as session:
        row = session.get_one(InstanceRow, INSTANCE)
        row.phase, row.gone_at = "gone", func.now() - timedelta(seconds=1)
    after = _samples(world, "mizzen_service_usd_total")["chat"]
    assert 3.9 < before <= after < 4.1


@pytest.mark.parametrize("path", ["", "/replicas", "/endpoints"])
async def test_a_replica_gets_its_address_between_two_queries(world: ApiWorld, path: str) -> None:
    """Whichever queries of a request come before the report: they are not mixed into an error."""
    id_ = _add(world, "a", ready=2)
    with _queries(world) as queries:
        await get(world, f"/v1/services/{id_}{path}")
    engine = world.app.state.mizzen.engine

    def write(address: str | None, port: int | None) -> None:
        with world.session() as session:
            replica = session.get_one(ServiceReplica, (id_, 1))
            replica.address, replica.port = address, port

    for number in range(len(queries) + 1):
        write(None, None)
        left = [number]

        def report(*_: object, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                write("127.0.0.1", 8001)

        event.listen(engine, "after_cursor_execute", report)
        try:
            assert await get(world, f"/v1/services/{id_}{path}")
        finally:
            event.remove(engine, "after_cursor_execute", report)
