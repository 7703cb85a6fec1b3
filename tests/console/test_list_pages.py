"""Arrays in lists, cost and use by day, and what the first page and the page of health say about the parts."""

import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import event, func, select, update
from sqlalchemy.exc import OperationalError

from domain.phases import Phase
from infra.db import outbox
from infra.db.array_rows import take_element
from infra.db.buckets import BucketState, publish_bucket
from infra.db.costs import CostDay
from infra.db.logs import Outbox
from infra.db.models import Workload
from infra.db.restored_databases import Restoration
from infra.db.silent_regions import SilentRegion, publish_silent
from tests.api.calls import act
from tests.api.published import publish
from tests.api.world import ApiWorld, document
from tests.console.conftest import Browse


async def test_an_array_and_its_elements(world: ApiWorld, browse: Browse) -> None:
    """An array is one row; its page counts the elements and leads to those that were placed."""
    id_ = (await act(world, "/v1/workloads", "vision", document(name="sweep", array="0-9%3"))).json()["id"]
    with world.session() as session:
        session.get_one(Workload, id_, with_for_update=True)
        take_element(session, id_, 4, 4)
        session.flush()
        element = session.scalars(select(Workload.id).where(Workload.array_id == id_)).one()
        session.get_one(Workload, element).attempt = 1
    async with browse("vision") as client:
        listed = await client.get("/console/workloads")
        assert re.findall(r'<tr id="(.*?)"', listed.text) == [id_] and "0 of 10 ended" in listed.text
        text = (await client.get(f"/console/workloads/{id_}")).text
        assert "<dd>10: 9 waiting, 1 live</dd>" in text and "<dt>Most at a time</dt><dd>3</dd>" in text
        assert f'href="/console/workloads?array={id_}"' in text
        elements = await client.get(f"/console/workloads?array={id_}")
        assert re.findall(r'<tr id="(.*?)"', elements.text) == [element] and ">sweep/4</a>" in elements.text
        assert f'4 of <a href="/console/workloads/{id_}">' in (await client.get(f"/console/workloads/{element}")).text
        counted = await client.get(f"/console/workloads/bulk?array={id_}")
        assert "1 live workload matches." in counted.text
    world.set_phase(element, Phase.RUNNING)
    async with browse() as client:
        text = (await client.get(f"/console/workloads/{id_}")).text
        assert ">Hold</button>" in text and "Preempt…" not in text
        assert "Preempt…" in (await client.get(f"/console/workloads/{element}")).text
    async with browse("speech") as client:
        assert element not in (await client.get(f"/console/workloads?array={id_}")).text


async def test_cost_and_use_by_day(world: ApiWorld, browse: Browse) -> None:
    """A column for each of the last seven days; another tenant's are not shown."""
    today = datetime.now(UTC).date()
    with world.session() as session:
        for ago, tenant, usd in ((0, "vision", 3.5), (6, "vision", 2.25), (7, "vision", 64.0), (1, "speech", 88.0)):
            day = today - timedelta(days=ago)
            given = {"capacity": "on_demand", "resource": "a100", "hours": usd * 2, "unpriced_h": 0.0, "usd": usd}
            session.add(CostDay(day=day, tenant=tenant, **given))
    async with browse("vision") as client:
        text = (await client.get("/console/tenants")).text
    cells = re.findall(r'<td class="number(?: more)?">(\$?[\d.]+)</td>', text)
    assert cells[-15:] == ["$5.75", "$2.25", *["$0.00"] * 5, "$3.50", "4.50", *["0.00"] * 5, "7.00"]
    assert "88.0" not in text and "64.0" not in text


async def test_the_health_of_the_parts(world: ApiWorld, browse: Browse) -> None:
    """Times of the scheduler, messages that wait, and requests, of which some have failed."""
    async with browse() as client:
        assert "none yet" in (await client.get("/console/health")).text
        publish(world, (world.add_workload(Phase.PENDING), 3, 0.5))
        with world.session() as session:
            outbox.wake_scheduler(session)
        world.app.state.mizzen.metrics.requests.labels("GET", "/v1/queue", "503").inc()
        text = (await client.get("/console/health")).text
    assert "<dd>2.5 ms of 2</dd>" in text and "<dd>1, the oldest for " in text
    assert re.search(r'<dd class="error">1 \([\d.]+ %\)</dd>', text)


async def test_the_first_page_says_what_keeps_work_from_starting(world: ApiWorld, browse: Browse) -> None:
    """A region that does not bid, a bucket that does not respond, and messages that nobody delivers."""
    async with browse("vision") as client:
        assert "Yes: all parts answer" in (await client.get("/console")).text
        since_s = time.time() - 300
        with world.session() as session:
            publish_silent(session, {"north": SilentRegion(since_s, False), "south": SilentRegion(since_s, True)})
        text = (await client.get("/console")).text
        assert "Yes: all parts answer" not in text and text.count('<li class="error">') == 1
        with world.session() as session:
            publish_bucket(session, "south", BucketState("s3://b", failing_since_s=since_s, error="no route <b>"))
            session.flush()
            session.execute(update(Outbox).values(created_at=func.now() - timedelta(minutes=5)))
        text = (await client.get("/console")).text
    assert "no route &lt;b&gt;" in text and "Messages to workflows have waited for 5m" in text
    assert text.count('<li class="error">') == 3
    with world.session() as session:
        session.add(Restoration(made_at=func.now()))
    async with browse() as client:
        assert "nothing runs until `mizzen adopt`" in (await client.get("/console")).text


async def test_the_first_page_without_costs(world: ApiWorld, browse: Browse) -> None:
    """If the costs cannot be read, the page says so and shows the rest."""

    def fail(_c: Any, _u: Any, statement: str, *_: Any) -> None:
        if "cost_day" in statement:
            raise OperationalError(statement, {}, Exception("canceling statement due to statement timeout"))

    world.add_workload(Phase.PENDING, name="waits-on")
    event.listen(world.app.state.mizzen.engine, "before_cursor_execute", fail)
    async with browse("vision") as client:
        text = (await client.get("/console")).text
        assert "The costs cannot be read now." in text and "waits-on" in text
        event.remove(world.app.state.mizzen.engine, "before_cursor_execute", fail)
        text = (await client.get("/console")).text
    assert "The costs cannot be read now." not in text and "$0.00" in text
