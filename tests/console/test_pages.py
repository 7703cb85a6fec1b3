"""The pages: what they show, to whom, and the forms that change something."""

import re
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from infra.db.logs import Audit
from infra.db.models import Eviction, Machine, Workload
from tests.api.published import publish
from tests.api.world import ApiWorld
from tests.console.conftest import Browse
from tests.console.forms import csrf_of

PAGES = [
    "/console", "/console/queue", "/console/queue?after=3", "/console/workloads",
    "/console/workloads?phase=live&tenant=vision", "/console/workloads/{id}",
    "/console/workloads/{id}/logs", "/console/fleet", "/console/fleet/north",
    "/console/fleet/north?by=tenant", "/console/machines/north/alpha/m1", "/console/tenants",
    "/console/services", "/console/tables", "/console/capacity",
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
        assert "<button>Hold" not in page.text
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
        shown = re.search(r"<textarea[^>]*>\n(.*?)</textarea>", page.text, re.DOTALL)
        assert shown is not None
        document = shown[1].replace("&#34;", '"').replace("gpu:1", "a100:1")
        fields = {"csrf": csrf_of(page), "document": document.replace("\n", "\r\n")}
        answer = await client.post("/console/workloads/new", data=fields)
        assert answer.status_code == 303, answer.text
        id_ = answer.headers["location"].rpartition("/")[2]
        again = await _act(client, id_, "retry")
        assert again.status_code == 303
        assert again.headers["location"] not in ("", answer.headers["location"])
        assert "a100:1" in (await client.get(f"/console/workloads/{id_}/clone")).text
        wrong = await client.post("/console/workloads/new", data={**fields, "document": "version: 1\nnmae: <b>\n"})
        assert wrong.status_code == 422
        assert "nmae: &lt;b&gt;" in wrong.text
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


async def test_a_map_for_each_audience(world: ApiWorld, browse: Browse) -> None:
    """A picture of one tenant tells its own slots from the others', which have one colour."""
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
