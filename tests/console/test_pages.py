"""The pages: what they show, to whom, and the forms that change something."""

import io
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from sqlalchemy import func, select, update

from api.fleet.slots import MachineTerms, RegionMasks, SlotHolders
from console import fleet_pages
from console.application import create_app
from console.fleet_picture import COLOURS, RegionMaps, SlotUse, prices_of
from domain.capacity import CapacityKind
from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from infra.db.logs import Audit, MachineChange
from infra.db.models import Allocation, Cluster, ClusterPrice, Eviction, Machine, Workload
from infra.db.placement_runs import PlacementMove, PlacementRun
from infra.db.tenants import Tenant
from infra.stack.ports import free_port
from tests.api.calls import act
from tests.api.published import publish
from tests.api.world import ApiWorld, as_yaml, document, make_world
from tests.console.conftest import Browse, browser_of
from tests.console.forms import csrf_of, document_of

PAGES = [
    "/console", "/console/queue", "/console/queue?after=3", "/console/workloads",
    "/console/workloads?phase=live&tenant=vision", "/console/workloads/{id}",
    "/console/workloads/{id}/logs", "/console/fleet", "/console/fleet/north",
    "/console/fleet/north?by=tenant", "/console/fleet/north?by=kind", "/console/fleet/north?by=price",
    "/console/fleet/north/past?at=2026-01-01T00:00Z", "/console/machines/north/alpha/m1", "/console/tenants",
    "/console/services", "/console/tables", "/console/capacity", "/console/lending", "/console/lending/north/alpha/m1",
]  # fmt: skip


async def _pages(client: httpx.AsyncClient, id_: str) -> dict[str, httpx.Response]:
    return {path: await client.get(path.format(id=id_)) for path in PAGES}


async def _act(client: httpx.AsyncClient, id_: str, action: str, **fields: Any) -> httpx.Response:
    page = await client.get("/console/workloads")
    return await client.post(f"/console/workloads/{id_}/{action}", data={"csrf": csrf_of(page), **fields})


async def test_every_page_of_a_busy_installation(world: ApiWorld, browse: Browse) -> None:
    """An attempt that was preempted, one that runs, one that waits; no tenant sees a name or an id of another."""
    running = world.add_workload(Phase.RUNNING, name="mine")
    evicted = Reason(ReasonCode.PREEMPTED_BY_OPERATOR, {"by": "key-operator"}).to_json()
    world.add_attempt(
        running, 1, "north/alpha/m1", 1, released_at=func.now(), started_at=func.now(), lost_s=600.0, outcome=evicted
    )
    world.add_attempt(running, 2, "north/alpha/m1", 3, started_at=func.now(), ready_at=func.now(), last_step=1234)
    theirs = world.add_workload(Phase.RUNNING, name="their-secret-name", tenant="speech")
    world.add_attempt(theirs, 1, "north/alpha/m1", 12, started_at=func.now())
    waiting = world.add_workload(Phase.PENDING, name="waits")
    with world.session() as session:
        for victim in (theirs, waiting):
            session.add(Eviction(evictor=running, evictor_attempt=2, victim=victim, victim_attempt=1))
    world.set_phase(world.add_workload(Phase.PENDING, name="over"), Phase.SUCCEEDED)
    async with browse() as client:
        pages = await _pages(client, running)
        assert {path: page.status_code for path, page in pages.items()} == dict.fromkeys(PAGES, 200)
        assert "10m" in pages["/console"].text
        assert waiting in pages["/console/queue"].text
        assert "1,234" in pages["/console/workloads/{id}"].text
        assert "their-secret-name" in pages["/console/workloads"].text
        assert "vision" in pages["/console/fleet/north?by=tenant"].text
        assert theirs in pages["/console/workloads/{id}"].text
    async with browse("vision") as client:
        for path, page in (await _pages(client, running)).items():
            assert page.status_code == 200, path
            assert "their-secret-name" not in page.text, path
            assert theirs not in page.text, path
            assert "speech" not in page.text, path
            assert (path != "/console/workloads/{id}") or "a workload of another tenant" in page.text
        for path in (f"/console/workloads/{theirs}", f"/console/workloads/{theirs}/logs"):
            assert (await client.get(path)).status_code == 404
        for action in ("cancel", "hold", "release", "retry"):
            assert (await _act(client, theirs, action)).status_code == 404
        assert (await _act(client, theirs, "lower", level="7")).status_code == 404
        assert (await _act(client, running, "preempt")).status_code == 403


async def test_a_service_shows_its_requests_over_time(world: ApiWorld, browse: Browse) -> None:
    """A chart of requests and one of their time appear once two minutes were counted; other tenants see nothing."""
    chat = {"version": 1, "name": "chat", "tenant": "vision", "service": {"replicas": 1}, "run": "serve"}
    made = await act(world, "/v1/services", "vision", chat)
    page = f"/console/services/{made.json()['id']}"
    minute = int(time.time()) // 60 - 5
    for number in range(4):
        second = {"second": 60 * (minute + number), "requests": 120 * number, "p50_s": 0.25, "p99_s": 1.5}
        body = {"balancer": "b", "seconds": [second]}
        async with browse("vision") as client:
            assert ("Time to the last byte" in (await client.get(page)).text) == (number >= 2)
        assert (await act(world, "/v1/services/chat/requests", "vision", body)).status_code == 204
    async with browse("vision") as client:
        text = (await client.get(page)).text
    assert "failed or cut: 0/s" in text and "all: 6/s" in text
    assert "median: 0.25 s" in text and "99th percentile: 1.5 s" in text
    async with browse("speech") as client:
        assert (await client.get(page)).status_code == 404


async def test_every_page_of_an_empty_installation(world: ApiWorld, browse: Browse) -> None:
    with world.session() as session:
        for machine in session.scalars(select(Machine)):
            session.delete(machine)
    async with browse() as client:
        assert "No machine has registered yet." in (await client.get("/console")).text
        assert (await client.get("/console/fleet")).status_code == 200
        assert (await client.get("/console/fleet/north")).status_code == 200
        assert (await client.get("/console/fleet/nowhere")).status_code == 404


async def test_actions_have_the_checks_and_the_audit_of_the_api(world: ApiWorld, browse: Browse) -> None:
    id_ = world.add_workload(Phase.PENDING)
    async with browse("vision-viewer") as client:
        page = await client.get(f"/console/workloads/{id_}")
        assert ">Hold</button>" not in page.text
        assert (await _act(client, id_, "cancel")).status_code == 403
    async with browse("vision") as client:
        assert (await client.post(f"/console/workloads/{id_}/cancel")).status_code == 403
        for action, fields in (("hold", {}), ("release", {}), ("lower", {"level": "6"}), ("cancel", {})):
            answer = await _act(client, id_, action, **fields)
            assert (answer.status_code, answer.headers["location"]) == (303, f"/console/workloads/{id_}")
        assert (await _act(client, id_, "lower", level="3")).status_code == 409
        assert (await _act(client, id_, "lower", level="eight")).status_code == 422
        assert "already ended" in (await _act(client, id_, "hold")).text
    with world.session() as session:
        assert session.get_one(Workload, id_).phase == Phase.CANCELLED
        found = session.execute(select(Audit.action, Audit.actor).where(Audit.target == id_).order_by(Audit.id)).all()
    actions = ["workload.hold", "workload.release", "workload.lower", "workload.cancel"]
    assert [tuple(one) for one in found] == [(action, "key-vision") for action in actions]


async def test_a_document_is_submitted_and_submitted_again(world: ApiWorld, browse: Browse) -> None:
    async with browse("vision") as client:
        page = await client.get("/console/workloads/new")
        shown = document_of(page)
        fields = {"csrf": csrf_of(page), "document": shown.replace("\n", "\r\n")}
        answer = await client.post("/console/workloads/new", data=fields)
        assert answer.status_code == 303, answer.text
        id_ = answer.headers["location"].rpartition("/")[2]
        again = await _act(client, id_, "retry")
        assert again.status_code == 303
        assert again.headers["location"] not in ("", answer.headers["location"])
        assert "a100:1" in (await client.get(f"/console/workloads/{id_}/clone")).text
        wrong = await client.post("/console/workloads/new", data={**fields, "document": "version: 1\nnmae: <b>\n"})
        assert wrong.status_code == 422
        assert "nmae: &lt;b&gt;" in wrong.text and wrong.text.count("unknown key") == 1
    with world.session() as session:
        assert session.scalar(select(func.count()).select_from(Workload)) == 2


async def test_the_queue_in_pages(world: ApiWorld, browse: Browse) -> None:
    ids = [world.add_workload(Phase.PENDING) for _ in range(60)]
    publish(world, *((id_, 3, 0.5) for id_ in ids))
    async with browse("vision") as client:
        page = await client.get("/console/queue")
        assert re.findall(r'<tr id="(.*?)"', page.text) == ids[:50]
        assert 'href="/console/queue?after=50"' in page.text
        page = await client.get("/console/queue?after=50")
        assert re.findall(r'<tr id="(.*?)"', page.text) == ids[50:]


async def test_lists_in_pages_keep_their_filters(world: ApiWorld, browse: Browse) -> None:
    ids = [world.add_workload(Phase.PENDING, labels={"team": "a&b"}) for _ in range(51)]
    async with browse() as client:
        page = await client.get("/console/workloads", params={"label": "team=a&b"})
        link = re.search(r'href="(.*?)" rel="next"', page.text)
        assert link is not None
        page = await client.get(link[1].replace("&amp;", "&"))
        assert re.findall(r'<tr id="(.*?)"', page.text) == ids[:1]


async def test_a_map_for_each_audience(world: ApiWorld, browse: Browse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture of one tenant tells its own slots from the others', which have one colour."""
    monkeypatch.setattr(fleet_pages, "PICTURES", RegionMaps())  # Without the pictures of other tests.
    own, other = (world.add_workload(Phase.RUNNING, tenant=tenant) for tenant in ("vision", "speech"))
    world.add_attempt(own, 1, "north/alpha/m1", 1)
    world.add_attempt(other, 1, "north/alpha/m1", 2)
    tags = {}
    for key in ("operator", "vision", "vision-viewer", "speech"):
        async with browse(key) as client:
            answer = await client.get("/console/fleet/north/map.png?by=tenant")
            tags[key] = answer.headers["etag"]
            assert answer.headers["content-type"] == "image/png"
            again = await client.get("/console/fleet/north/map.png?by=tenant", headers={"If-None-Match": tags[key]})
            assert again.status_code == 304
    assert tags["vision"] == tags["vision-viewer"]
    assert len(set(tags.values())) == 3


async def test_a_map_by_kind_and_by_price(world: ApiWorld, browse: Browse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine has the colour of its capacity kind, or of its price, as the legend says, for every key."""
    with world.session() as session:
        session.execute(update(Cluster).values(capacity="spot", prices={"a100": 1.25}))
    monkeypatch.setattr(fleet_pages, "PICTURES", RegionMaps())  # Without the pictures of other tests.
    for by, label in (("kind", "spot"), ("price", r"\$1\.25")):
        async with browse() as operator, browse("vision") as tenant:
            text = (await operator.get(f"/console/fleet/north?by={by}")).text
            legend = re.search(rf'fill="#(\w{{6}})"/></svg> {label}</span>', text)
            assert legend is not None, text
            found = [await client.get(f"/console/fleet/north/map.png?by={by}") for client in (operator, tenant)]
        assert found[0].content == found[1].content
        picture = Image.open(io.BytesIO(found[0].content)).convert("RGB")
        colours = {colour for _, colour in picture.getcolors() or []}
        assert tuple(bytes.fromhex(legend[1])) in colours


def test_each_machine_has_the_colour_of_its_price() -> None:
    """Of nine prices and seven colours, a dearer machine never has the colour of a cheaper one; a lost one has none."""
    prices = [3.0, 1.0, 2.0, None, 5.0, 4.0, 6.0, 7.0, 8.0, 9.0]
    nothing = np.zeros(len(prices), np.uint64)
    numbers = np.arange(len(prices))
    machines = RegionMasks(
        names="\n".join(f"m{n}" for n in numbers), slots=np.full(len(prices), 2), held=nothing + np.uint64(1),
        promised=nothing, withheld=nothing, is_lost=numbers == 4, is_closed=numbers < 0,
        holders=SlotHolders(numbers[:0], nothing[:0], numbers[:0]),
        terms=[MachineTerms(CapacityKind.SPOT, price) for price in prices],
    )  # fmt: skip
    content = prices_of(machines)
    shown = [(price, int(row[0])) for price, row in zip(prices, content.uses, strict=True)]
    assert all(row[0] == row[1] for row in content.uses)
    assert (shown[3][1], shown[4][1]) == (SlotUse.FREE, SlotUse.LOST)
    known = sorted((price, colour) for price, colour in shown if price not in (None, 5.0))
    assert [colour for _, colour in known] == sorted(colour for _, colour in known)
    assert len({colour for _, colour in known}) == 7
    assert [label for _, label in content.legend][:2] == ["$1.00", "$2.00"]
    assert [label for _, label in content.legend][-2:] == ["no price", "machine does not answer"]


async def test_a_map_of_the_past(world: ApiWorld, browse: Browse) -> None:
    """Who held which slots an hour ago, and what came and left before; a tenant sees its own workloads only."""
    now = datetime.now(UTC)
    gone, theirs = world.add_workload(Phase.RUNNING, name="gone"), world.add_workload(Phase.RUNNING, tenant="speech")
    for id_, slots, began, ended in ((gone, 1, 90, 30), (theirs, 2, 200, 65)):
        world.add_attempt(id_, 1, "north/alpha/m1", slots, released_at=now - timedelta(minutes=ended))
        times = {"held_at": now - timedelta(minutes=began), "released_at": now - timedelta(minutes=ended)}
        with world.session() as session:
            session.execute(update(Allocation).where(Allocation.workload == id_).values(**times))
    async with browse() as operator, browse("vision") as tenant:
        moved = await operator.get("/console/fleet/north/past?minutes_ago=60")
        assert moved.status_code == 303 and re.search(r"past\?at=20..-..-..T..:..Z$", moved.headers["location"])
        text = (await operator.get(moved.headers["location"])).text
        assert re.findall(r"/console/workloads/(wl-\w+)", text) == [gone, theirs]
        at = [f"{now - timedelta(minutes=ago):%Y-%m-%dT%H:%MZ}" for ago in (10, 60, 80, 150, 300)]
        found = [await one.get(f"/console/fleet/north/past.png?at={t}") for one in (operator, tenant) for t in at]
        maps = [one.content for one in found]
        empty, first, both, other = maps[0], maps[1], maps[2], maps[3]
        assert maps[4] == empty and len({empty, first, both, other}) == 4
        assert maps[5] == empty and len({first, both, *maps[6:8]}) == 4
        assert theirs not in (await tenant.get(moved.headers["location"])).text
        future = await operator.get(f"/console/fleet/north/past?at={now + timedelta(minutes=5):%Y-%m-%dT%H:%MZ}")
        assert future.status_code == 422 and "must be a time in the past" in future.text
        assert (await operator.get(f"/console/fleet/nowhere/past?at={at[0]}")).status_code == 404


async def test_the_past_shows_cordons_and_lost_machines(world: ApiWorld, browse: Browse) -> None:
    """A trigger records each state; the map at a time has the one of that time, and a machine that came later none."""
    now = datetime.now(UTC)

    def minutes_ago(minutes: int) -> str:
        return f"{now - timedelta(minutes=minutes):%Y-%m-%dT%H:%MZ}"

    def at(minutes: int) -> datetime:
        return now - timedelta(minutes=minutes)

    m1 = update(Machine).where(Machine.id == "north/alpha/m1")
    cordon = Reason(ReasonCode.CORDONED_BY_OPERATOR, {"by": "key", "note": "a fan"}).to_json()
    with world.session() as session:
        session.execute(update(Machine).values(registered_at=at(600)))
        session.execute(update(Machine).where(Machine.id != "north/alpha/m1").values(registered_at=at(100)))
    for minutes, values in ((500, {"state": "lost"}), (300, {"state": "ready", "cordon": cordon})):
        with world.session() as session:
            session.execute(m1.values(**values))
            newest = select(func.max(MachineChange.since)).where(MachineChange.machine == "north/alpha/m1")
            session.flush()
            session.execute(
                update(MachineChange)
                .where(MachineChange.machine == "north/alpha/m1", MachineChange.since == newest.scalar_subquery())
                .values(since=at(minutes))
            )
    with world.session() as session:
        first = select(func.min(MachineChange.since)).where(MachineChange.machine == "north/alpha/m1")
        session.execute(m1.values(cordon=None))
        assert session.scalars(first).one() == at(500)

    def colours(answer: httpx.Response) -> set[str]:
        picture = Image.open(io.BytesIO(answer.content)).convert("RGB")
        return {bytes(colour).hex() for _, colour in picture.getcolors() or []} - {"000000"}

    async with browse("vision") as client:
        found = {
            minutes: colours(await client.get(f"/console/fleet/north/past.png?at={minutes_ago(minutes)}"))
            for minutes in (50, 200, 400, 550)
        }
        assert found[400] == {COLOURS[SlotUse.LOST]}
        assert found[200] == {COLOURS[SlotUse.CLOSED]}
        assert found[550] == {COLOURS[SlotUse.FREE]} and COLOURS[SlotUse.FREE] in found[50]
        text = (await client.get(f"/console/fleet/north/past?at={minutes_ago(290)}")).text
        assert re.findall(r'north/alpha/m1</a></th><td class="">(.*?)</td>', text) == ["ready, cordoned"]
        long_ago = await client.get(f"/console/fleet/north/past?at={minutes_ago(15 * 1440)}")
        assert long_ago.status_code == 422 and "lifecycle.keep_fleet_history_s" in long_ago.text


async def test_steps_and_metrics_over_time(world: ApiWorld, browse: Browse) -> None:
    """A chart of the steps and one of each metric, with a curve for each attempt."""
    running, at_s = world.add_workload(Phase.RUNNING), datetime.now(UTC).timestamp()
    for attempt, loss in ((1, 2.0), (2, -0.5)):
        curve = [[attempt * 10 + n, at_s + n, {"loss": loss, "<b>": 1.0} if n else {}] for n in range(3)]
        ends: dict[str, Any] = {"released_at": func.now()} if attempt == 1 else {}
        world.add_attempt(running, attempt, "north/alpha/m1", 1, started_at=func.now(), curve=curve, **ends)
    async with browse() as client:
        text = (await client.get(f"/console/workloads/{running}")).text
    labels = re.findall(r'<figure class="curves"><figcaption>(.*?)</figcaption>', text)
    assert labels == ["steps", "&lt;b&gt;", "loss"]
    assert 'aria-label="loss: attempt 1 2, attempt 2 -0.5"' in text and "<span>-0.5 to 2</span>" in text


async def test_a_click_on_the_map_leads_to_the_machine(browse: Browse) -> None:
    async with browse() as client:
        answer = await client.get("/console/fleet/north/at?3,3")
        assert answer.headers["location"] == "/console/machines/north/alpha/m1"
        assert (await client.get("/console/fleet/north/at?9999,9999")).headers["location"] == "/console/fleet/north"


@pytest.mark.parametrize("key", ["operator", "auditor"])
async def test_an_operator_cordons_a_machine(world: ApiWorld, browse: Browse, key: str) -> None:
    url = "/console/machines/north/alpha/m1"
    async with browse(key) as client:
        fields = {"csrf": csrf_of(await client.get(url)), "reason": "fan <broken>"}
        answer = await client.post(f"{url}/cordon", data=fields)
        assert answer.status_code == (303 if key == "operator" else 403)
        assert ("fan &lt;broken&gt;" in (await client.get(url)).text) == (key == "operator")
        assert (await client.post(f"{url}/uncordon", data=fields)).status_code == (303 if key == "operator" else 403)


async def test_an_action_on_a_filter(world: ApiWorld, browse: Browse) -> None:
    """It changes what was counted: not what was submitted later, nor what other tenants have."""
    counted = [world.add_workload(Phase.PENDING, labels={"team": "a"}) for _ in range(3)]
    world.add_attempt(world.add_workload(Phase.RUNNING, labels={"team": "a"}), 1, "north/alpha/m1", 1)
    world.add_workload(Phase.PENDING)
    theirs = world.add_workload(Phase.PENDING, labels={"team": "a"}, tenant="speech")
    async with browse("vision") as client:
        shown = await client.get("/console/workloads/bulk", params={"label": "team=a"})
        assert "4 live workloads match." in shown.text
        newest = re.search(r'name="newest" value="(.*?)"', shown.text)
        assert newest is not None
        late = world.add_workload(Phase.PENDING, labels={"team": "a"})
        fields = {"csrf": csrf_of(shown), "label": "team=a", "newest": newest[1], "action": "hold"}
        refused = await client.post("/console/workloads/bulk", data=fields)
        assert "3 workloads were put on hold; 1 was not." in refused.text
        done = await client.post("/console/workloads/bulk", data={**fields, "action": "cancel"})
        assert "4 workloads were cancelled." in done.text
        assert (await client.post("/console/workloads/bulk", data={**fields, "action": "preempt"})).status_code == 422
    with world.session() as session:
        phases = {id_: session.get_one(Workload, id_).phase for id_ in (*counted, late, theirs)}
    assert phases == {**dict.fromkeys(counted, "cancelled"), late: "pending", theirs: "pending"}


async def test_an_owner_takes_a_machine_back(world: ApiWorld, browse: Browse) -> None:
    """The machine's key leads to its own page only; what it takes back takes no work until it lends it again."""
    with world.session() as session:
        session.get_one(Cluster, ("north", "alpha")).capacity = "voluntary"
    own = "/console/lending/north/alpha/m1"
    world.add_attempt(world.add_workload(Phase.RUNNING, name="guest"), 1, "north/alpha/m1", 3)
    async with browse("machine") as client:
        shown = await client.get(own)
        assert "Lent: new work can be placed there." in shown.text
        for path in ("/console", "/console/queue", "/console/lending", "/console/lending/north/alpha/m2"):
            assert (await client.get(path)).status_code == 403, path
        fields = {"csrf": csrf_of(shown)}
        assert (await client.post("/console/lending/north/alpha/m2/take", data=fields)).status_code == 403
        assert (await client.post(f"{own}/take", data=fields)).status_code == 303
        assert "Taken back" in (await client.get(own)).text
        with world.session() as session:
            assert session.get_one(Machine, "north/alpha/m1").draining
        assert (await client.post(f"{own}/lend", data=fields)).status_code == 303
    async with browse("vision") as client:
        listed = await client.get("/console/lending")
        assert re.findall(r'<tr id="(.*?)"', listed.text) == ["north/alpha/m1", "north/alpha/m2"]
        assert (await client.post(f"{own}/take", data={"csrf": csrf_of(listed)})).status_code == 403
    with world.session() as session:
        assert not session.get_one(Machine, "north/alpha/m1").draining
        actors = session.scalars(select(Audit.actor).where(Audit.target == "north/alpha/m1")).all()
    assert actors == ["key-machine"] * 2


async def test_a_placement_run_beside_what_happened(world: ApiWorld, browse: Browse) -> None:
    with world.session() as session:
        session.add(PlacementRun(id="run-1", dry_run=False, state="ended", deadline_at=func.now()))
        session.flush()
        for number, (state, why) in enumerate([("done", None), ("left", "the <deadline> had passed")]):
            session.add(
                PlacementMove(
                    placement_run="run-1", number=number + 1, kind="replica", data_table=f"t{number}",
                    source_region="north", target_region="south", size_bytes=5, state=state, left_because=why,
                )
            )  # fmt: skip
    async with browse() as client:
        assert "/console/placement-runs/run-1" in (await client.get("/console/tables")).text
        shown = await client.get("/console/placement-runs/run-1")
        assert "the &lt;deadline&gt; had passed" in shown.text
        assert re.findall(r'<tr id="move-(.)"', shown.text) == ["1", "2"]
    async with browse("vision") as client:
        assert "placement-runs" not in (await client.get("/console/tables")).text
        assert (await client.get("/console/placement-runs/run-1")).status_code == 403


async def test_prices_over_time(world: ApiWorld, browse: Browse) -> None:
    """The price before the shown days holds at their begin; only operators see launches and their refusals."""
    with world.session() as session:
        for days, usd in ((30, 9.0), (20, 4.0), (2, 2.0)):
            since = func.now() - timedelta(days=days)
            prices = {"a100": usd}
            session.add(ClusterPrice(region="north", cluster="alpha", since=since, capacity="spot", prices=prices))
    world.add_instance()
    async with browse() as client:
        shown = (await client.get("/console/capacity")).text
        assert "north/alpha a100: 2 $/h" in shown
        assert "0 to 4 $/h" in shown
        assert "za spot small" in shown
    async with browse("vision") as client:
        assert "za spot small" not in (await client.get("/console/capacity")).text


async def test_a_tenant_is_created(world: ApiWorld, browse: Browse) -> None:
    async with browse() as client:
        fields = {"csrf": csrf_of(await client.get("/console/tenants")), "name": "new", "level": "4"}
        assert (await client.post("/console/tenants", data={**fields, "gpus": "a100=8, v100=2"})).status_code == 303
        for wrong in ({"name": "vision"}, {"name": "No Name"}, {"gpus": "a100"}, {"gpus": "a100=-1"}, {"level": "9"}):
            answer = await client.post("/console/tenants", data={**fields, "name": "other", **wrong})
            assert answer.status_code == (409 if wrong == {"name": "vision"} else 422), wrong
        assert "other" not in (await client.get("/console/tenants")).text
    async with browse("vision") as client:
        fields["csrf"] = csrf_of(await client.get("/console/tenants"))
        assert (await client.post("/console/tenants", data=fields)).status_code == 403
    with world.session() as session:
        made = session.get_one(Tenant, "new")
        assert (made.level, made.quota_gpus) == (4, {"a100": 8, "v100": 2})


async def test_pages_while_temporal_is_down(database_url: str, tmp_path: Path) -> None:
    """The first page says so; all others are shown, and a document is accepted."""
    down = {"address": f"127.0.0.1:{free_port()}"}
    with make_world(database_url, tmp_path, create=create_app, temporal=down) as world:
        id_ = world.add_workload(Phase.RUNNING)
        world.add_attempt(id_, 1, "north/alpha/m1", 1)
        async with browser_of(world)() as client:
            pages = await _pages(client, id_)
            assert {path: page.status_code for path, page in pages.items()} == dict.fromkeys(PAGES, 200)
            assert "Temporal does not answer" in pages["/console"].text
            fields = {"csrf": csrf_of(pages["/console"]), "document": as_yaml(document()).decode()}
            assert (await client.post("/console/workloads/new", data=fields)).status_code == 303
