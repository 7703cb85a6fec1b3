"""What pages leave out, how many streams a person has, and what is compressed."""

import re
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, select

from api.auth import Caller, Role
from api.problems import HttpProblem
from api.streams.hub import Hub
from domain.phases import Phase
from infra.config.services import LimitSettings
from infra.db.array_rows import take_element
from infra.db.models import Workload
from tests.api.calls import act
from tests.api.published import publish
from tests.api.test_logs import Shipper, placed
from tests.api.world import ApiWorld, document
from tests.console.conftest import Browse


async def test_a_large_log_is_cut_at_its_beginning(world: ApiWorld, browse: Browse) -> None:
    """The newest lines of each task are shown, and a line in place of the older ones; so does a search."""
    id_ = placed(world)
    for task in (0, 1):
        shipper = Shipper(world.buckets["north"], id_, task=task)
        for part in range(10):
            shipper.ship("".join(f"line {part * 50 + n} {'x' * 2000}\n" for n in range(50)))
        shipper.end()
    async with browse("vision") as client:
        text = (await client.get(f"/console/workloads/{id_}/logs")).text
        numbers = {
            task: list(map(int, re.findall(rf"^trainer/{task}\| line (\d+) ", text, re.MULTILINE))) for task in (0, 1)
        }
        for task, found in numbers.items():
            assert found == list(range(500 - len(found), 500)) and 50 < len(found) < 70
            assert f"--- trainer/{task}| older lines are left out: the newest 128 KiB are shown" in text
        text = (await client.get(f"/console/workloads/{id_}/logs?task=0")).text
        assert "the newest 256 KiB are shown" in text and "line 499 " in text and "line 300 " not in text
        link = re.search(r'Older lines are left out: <a href="(.*?older=\d+)"', text)
        assert link is not None
        shown = min(map(int, re.findall(r"^line (\d+) ", text, re.MULTILINE)))
        text = (await client.get(link[1].replace("&amp;", "&"))).text
        older = list(map(int, re.findall(r"^line (\d+) ", text, re.MULTILINE)))
        assert older == list(range(older[0], shown)) and len(older) > 50 and "The newest</a>" in text
        text = (await client.get(f"/console/workloads/{id_}/logs?contains=line+49")).text
        assert "line 499 " in text and "older lines" not in text


async def test_the_logs_of_an_array_are_cut_at_whole_elements(world: ApiWorld, browse: Browse) -> None:
    """The page has the elements with the highest indexes, and a link to the others; each is on one page."""
    array = (await act(world, "/v1/workloads", "vision", document(name="sweep", array="0-9"))).json()["id"]
    for index in range(10):
        with world.session() as session:
            session.get_one(Workload, array, with_for_update=True)
            take_element(session, array, index, index)
            session.flush()
            element = session.scalars(select(Workload.id).where(Workload.array_index == index)).one()
            session.get_one(Workload, element).attempt = 1
        world.add_attempt(element, 1, "north/alpha/m1", 0)
        shipper = Shipper(world.buckets["north"], element, task=0)
        shipper.ship("".join(f"line {n} {'x' * 1000}\n" for n in range(60))).end()
    found, path = [], f"/console/workloads/{array}/logs"
    async with browse("vision") as client:
        while path:
            text = (await client.get(path)).text
            lines = re.findall(r"(?:^|>)sweep/(\d)\S* (?:\S+: )?line (\d+) ", text, re.MULTILINE)
            elements = sorted({int(element) for element, _ in lines}, reverse=True)
            assert lines == [(str(element), str(n)) for element in elements for n in range(60)]
            found.append(elements)
            link = re.search(r'are left out: <a href="(.*?)"', text)
            path = link[1].replace("&amp;", "&") if link else ""
    assert found[0][0] == 9 and len(found) > 1
    assert [one for part in found for one in part] == list(range(9, -1, -1))


async def test_a_line_longer_than_the_page(world: ApiWorld, browse: Browse) -> None:
    id_ = placed(world)
    Shipper(world.buckets["north"], id_, task=0).ship("a" * 300_000 + "the end\n").end()
    async with browse("vision") as client:
        text = (await client.get(f"/console/workloads/{id_}/logs")).text
    assert "the end" in text and len(text) < 200_000


async def test_workloads_behind_the_ranked_ones_are_listed(world: ApiWorld, browse: Browse) -> None:
    """Workloads that no scan has ranked yet follow the ranked ones on the last page, and on no page before."""
    ranked = [world.add_workload(Phase.PENDING) for _ in range(60)]
    publish(world, *((id_, 3, 0.5) for id_ in ranked))
    new = [world.add_workload(Phase.PENDING) for _ in range(3)]
    async with browse("vision") as client:
        assert re.findall(r'<tr id="(.*?)"', (await client.get("/console/queue")).text) == ranked[:50]
        page = await client.get("/console/queue?after=50")
        assert re.findall(r'<tr id="(.*?)"', page.text) == [*ranked[50:], *new]
        assert "More workloads" not in page.text
        more = [world.add_workload(Phase.PENDING) for _ in range(60)]
        page = await client.get("/console/queue?after=50")
        assert re.findall(r'<tr id="(.*?)"', page.text) == [*ranked[50:], *new, *more[:37]]
        assert "More workloads have no place yet" in page.text


async def test_streams_of_browsers_count_people(database: Engine) -> None:
    """The browsers of a person are one stream of its tenant; programs with the same key have their own limit."""
    limits = LimitSettings(streams_per_key=3, streams_per_tenant=3)
    hub = Hub(database, limits)
    ada, bob, eve = (Caller(id_, Role.VIEWER, "vision", id_) for id_ in ("ada", "oidc:bob", "eve"))

    def refused(caller: Caller, **more: Any) -> str:
        with pytest.raises(HttpProblem) as problem:
            hub.admit(caller, waits=True, **more)
        return problem.value.detail

    browsers = [hub.admit(ada, waits=True, is_browser=True) for _ in range(3)]
    assert refused(ada, is_browser=True).startswith("key ada has 3 streams")
    hub.admit(bob, waits=True, is_browser=True)
    programs = hub.admit(ada, waits=True)
    assert refused(eve, is_browser=True).startswith("tenant vision has 3 streams")
    for leave in browsers[:2]:
        leave()
    assert refused(eve, is_browser=True).startswith("tenant vision has 3 streams")
    browsers[2]()
    hub.admit(eve, waits=True, is_browser=True)
    programs()
    hub.admit(ada, waits=True, is_browser=True)


async def test_browsers_of_a_person_in_two_tenants(database: Engine) -> None:
    """They count in each tenant, in whatever order they end."""
    hub = Hub(database, LimitSettings(streams_per_key=3, streams_per_tenant=1))
    first, second = (Caller(f"key-{name}", Role.VIEWER, name, "", person="ann") for name in ("vision", "speech"))
    leave = hub.admit(first, waits=True, is_browser=True)
    hub.admit(second, waits=True, is_browser=True)
    leave()
    for caller, is_full in ((first, False), (second, True)):
        other = replace(caller, person="bob")
        if is_full:
            with pytest.raises(HttpProblem, match=f"tenant {caller.tenant} has 1 stream"):
                hub.admit(other, waits=True, is_browser=True)
        else:
            hub.admit(other, waits=True, is_browser=True)


async def test_only_static_files_are_compressed(world: ApiWorld, browse: Browse) -> None:
    """A page has a secret beside texts that others chose, so its compressed size would tell the secret (BREACH)."""
    async with browse() as client:
        headers = {"Accept-Encoding": "gzip"}
        file = await client.get("/console/static/htmx.js", headers=headers)
        assert file.headers["content-encoding"] == "gzip" and "htmx" in file.text
        for path in ("/console", "/console/queue", "/v1/queue", "/metrics"):
            for part in ({}, {"HX-Request": "true"}):
                assert "content-encoding" not in (await client.get(path, headers=headers | part)).headers, path
