"""Log in, log out, and what a login is worth elsewhere."""

import asyncio
from datetime import timedelta

import httpx
import pytest
from sqlalchemy import func, select, text, update

from console.cookies import COOKIE
from domain.phases import Phase
from infra.db.console_sessions import ConsoleSession, hash_secret
from infra.db.logs import Audit
from infra.db.tenants import ApiKey
from tests.api.world import ApiWorld
from tests.console.conftest import Browse, browser_of
from tests.console.forms import csrf_of


@pytest.fixture(scope="module")
def world(shared_world: ApiWorld) -> ApiWorld:
    """The tests of this module share an installation, and change back what others need."""
    return shared_world


@pytest.fixture
def browse(world: ApiWorld) -> Browse:
    return browser_of(world)


async def test_a_login_shows_pages_until_the_log_out(world: ApiWorld, browse: Browse) -> None:
    async with browse() as client:
        sha256 = hash_secret(client.cookies[COOKIE].partition(".")[0])
        page = await client.get("/console/queue")
        assert page.status_code == 200
        assert "<h1>Queue</h1>" in page.text
        answer = await client.post("/console/logout", data={"csrf": csrf_of(page)})
        assert answer.status_code == 303
        client.cookies.clear()
        answer = await client.get("/console/queue?after=7")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/console/login?next=%2Fconsole%2Fqueue%3Fafter%3D7"
    with world.session() as session:
        assert session.get(ConsoleSession, sha256) is None


async def test_the_secret_of_a_browser_is_not_in_the_database(world: ApiWorld, browse: Browse) -> None:
    async with browse() as client:
        secret = client.cookies[COOKIE].partition(".")[0]
    with world.session() as session:
        assert session.get_one(ConsoleSession, hash_secret(secret)).key == "key-operator"
        found = session.scalar(
            text("select count(*) from console_session as s where position(:secret in s::text) > 0"), {"secret": secret}
        )
    assert found == 0


async def test_the_address_of_the_api_leads_to_the_console(browse: Browse) -> None:
    """A browser that opens the API's address without a path."""
    async with browse(None) as client:
        answer = await client.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_no_script_reads_the_cookie(world: ApiWorld, browse: Browse, scheme: str) -> None:
    async with browse(None, scheme) as client:
        answer = await client.post("/console/login", data={"key": world.raw_keys["operator"]})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "Path=/console" in cookie
    assert "SameSite=lax" in cookie
    assert ("Secure" in cookie) == (scheme == "https")


async def test_a_cookie_is_not_accepted_by_the_api(browse: Browse) -> None:
    async with browse() as client:
        cookie = {"Cookie": f"{COOKIE}={client.cookies[COOKIE]}"}
        assert (await client.get("/console/queue", headers=cookie)).status_code == 200
        assert (await client.get("/v1/queue", headers=cookie)).status_code == 401
        assert (await client.get("/temporal", headers=cookie)).status_code == 401


@pytest.mark.parametrize("damage", ["signature", "secret", "none", "swapped"])
async def test_a_forged_cookie_is_none(browse: Browse, damage: str) -> None:
    async with browse() as client, browse("vision") as other:
        (secret, _, signature), theirs = client.cookies[COOKIE].partition("."), other.cookies[COOKIE]
    forged = {
        "signature": f"{secret}.{signature[:-1]}{'0' if signature[-1] != '0' else '1'}",
        "secret": f"x{secret}.{signature}", "none": secret, "swapped": f"{secret}.{theirs.partition('.')[2]}",
    }[damage]  # fmt: skip
    async with browse(None) as client:
        answer = await client.get("/console/queue", headers={"Cookie": f"{COOKIE}={forged}"})
    assert answer.status_code == 303


@pytest.mark.parametrize("end", ["revoked", "expired key", "expired session"])
async def test_a_key_that_ends_ends_its_logins(world: ApiWorld, browse: Browse, end: str) -> None:
    async with browse("vision") as client:
        assert (await client.get("/console/queue")).status_code == 200
        past = func.now() - timedelta(seconds=1)
        with world.session() as session:
            if end == "expired session":
                session.execute(update(ConsoleSession).values(expires_at=past))
            else:
                column = "revoked_at" if end == "revoked" else "expires_at"
                session.execute(update(ApiKey).where(ApiKey.id == "key-vision").values({column: past}))
        assert (await client.get("/console/queue")).status_code == 303
        part = await client.get("/console/queue", headers={"HX-Request": "true"})
        assert (part.status_code, part.headers["hx-redirect"]) == (204, "/console/login")
        with world.session() as session:
            session.execute(update(ApiKey).where(ApiKey.id == "key-vision").values(revoked_at=None, expires_at=None))


@pytest.mark.parametrize(
    ("key", "why"),
    [("mzn_unknown", "unknown or was revoked"), ("", "Enter a key"), ("balancer", "requires the role viewer")],
)
async def test_a_login_that_is_refused(world: ApiWorld, browse: Browse, key: str, why: str) -> None:
    async with browse(None) as client:
        answer = await client.post("/console/login", data={"key": world.raw_keys.get(key, key)})
    assert answer.status_code in (401, 403)
    assert why in answer.text
    assert "set-cookie" not in answer.headers


async def test_failed_logins_are_in_the_audit_log(world: ApiWorld, browse: Browse) -> None:
    async with browse(None) as client:
        await client.post("/console/login", data={"key": "mzn_unknown"})
    with world.session() as session:
        failed = select(func.count()).where(Audit.action == "login.failed")
        while not session.scalar(failed):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "target", ["https://evil.test/", "//evil.test", "/console\\evil", "/v1/queue", "/console/queue"]
)
async def test_a_login_leads_only_to_the_console(world: ApiWorld, browse: Browse, target: str) -> None:
    async with browse(None) as client:
        answer = await client.post("/console/login", data={"key": world.raw_keys["operator"], "next": target})
    assert answer.headers["location"] == (target if target == "/console/queue" else "/console")


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.test"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}]
)
async def test_a_form_of_another_site_is_refused(world: ApiWorld, browse: Browse, headers: dict[str, str]) -> None:
    async with browse() as client:
        fields = {"csrf": csrf_of(await client.get("/console/queue"))}
        assert (await client.post("/console/logout", data=fields, headers=headers)).status_code == 403
        assert (await client.get("/console/queue")).status_code == 200
        answer = await client.post("/console/login", data={"key": world.raw_keys["vision"]}, headers=headers)
        assert answer.status_code == 403


@pytest.mark.parametrize("token", [None, "", "0" * 64, "é", "theirs"])
async def test_a_form_without_its_token_is_refused(world: ApiWorld, browse: Browse, token: str | None) -> None:
    async with browse("auditor") as other:
        theirs = csrf_of(await other.get("/console/queue"))
    async with browse() as client:
        fields = {} if token is None else {"csrf": theirs if token == "theirs" else token}
        assert (await client.post("/console/logout", data=fields)).status_code == 403
        assert (await client.get("/console/queue")).status_code == 200


async def test_pages_keep_scripts_of_others_away(world: ApiWorld, browse: Browse) -> None:
    world.add_workload(Phase.PENDING, name="<script>alert(1)</script>")
    async with browse() as client:
        for path in ("/console/queue", "/console/login", "/console/nothing", "/console/static/console.js"):
            answer = await client.get(path)
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            assert answer.headers["x-frame-options"] == "DENY"
            assert "<script>alert" not in answer.text
            assert " style=" not in answer.text
        assert "&lt;script&gt;alert" in (await client.get("/console/queue")).text


async def test_a_part_of_a_page_is_sent_once(world: ApiWorld, browse: Browse) -> None:
    headers = {"HX-Request": "true"}
    async with browse("speech") as client:
        first = await client.get("/console/queue", headers=headers)
        assert "<html" not in first.text
        headers["If-None-Match"] = first.headers["etag"]
        assert (await client.get("/console/queue", headers=headers)).status_code == 304
        world.add_workload(Phase.PENDING, tenant="speech")
        assert (await client.get("/console/queue", headers=headers)).status_code == 200


async def test_errors_are_pages(browse: Browse) -> None:
    async with browse("vision") as client:
        answer = await client.get("/console/nothing")
        assert answer.status_code == 404
        assert answer.headers["content-type"].startswith("text/html")
        wrong = await client.get("/console/queue?after=x")
        assert wrong.status_code == 422
        assert wrong.text.count("unable to parse string as an integer") == 1
        assert 'href="/console/workloads"' in wrong.text and "Log out" in wrong.text


async def _events(client: httpx.AsyncClient) -> str:
    return (await client.get("/console/changes", timeout=30)).text


@pytest.mark.rotating
async def test_the_stream_ends_with_the_login(world: ApiWorld, browse: Browse) -> None:
    async with browse("vision") as client, asyncio.TaskGroup() as group:
        page = await client.get("/console/queue")
        reading = group.create_task(_events(client))
        await asyncio.sleep(0.5)
        world.set_phase(world.add_workload(Phase.PENDING), Phase.CANCELLED)
        world.set_phase(world.add_workload(Phase.PENDING, tenant="speech"), Phase.CANCELLED)
        await asyncio.sleep(4)
        await client.post("/console/logout", data={"csrf": csrf_of(page)})
        told = await reading
    assert told.count("event: changed") == 1
    assert told.endswith("event: ended\ndata:\n\n")


async def test_a_link_logs_in_once(world: ApiWorld, browse: Browse) -> None:
    async with browse(None) as client:
        made = await client.post("/v1/console-links", headers=world.headers("vision"))
        path = made.json()["path"]
        refused = await client.get(path, headers={"Sec-Fetch-Site": "cross-site"})
        assert refused.status_code == 403
        entered = await client.get(path, headers={"Sec-Fetch-Site": "none"})
        assert (entered.status_code, entered.headers["location"]) == (303, "/console")
        assert (await client.get("/console/queue")).status_code == 200
    async with browse(None) as other:
        again = await other.get(path)
        assert again.status_code == 401
        assert "The link was used" in again.text
        assert "set-cookie" not in again.headers


@pytest.mark.parametrize("end", ["expired", "revoked"])
async def test_a_link_that_is_no_longer_valid(world: ApiWorld, browse: Browse, end: str) -> None:
    async with browse(None) as client:
        path = (await client.post("/v1/console-links", headers=world.headers("vision"))).json()["path"]
        past = func.now() - timedelta(seconds=1)
        with world.session() as session:
            if end == "expired":
                session.execute(update(ConsoleSession).where(ConsoleSession.is_link).values(expires_at=past))
            else:
                session.execute(update(ApiKey).where(ApiKey.id == "key-vision").values(revoked_at=past))
        assert (await client.get(path)).status_code == 401
        with world.session() as session:
            session.execute(update(ApiKey).where(ApiKey.id == "key-vision").values(revoked_at=None))


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("machine", 403), ("balancer", 403), ("vision-viewer", 201)])
async def test_who_gets_a_link(world: ApiWorld, browse: Browse, key: str | None, status: int) -> None:
    async with browse() as client:  # The cookie does not count.
        answer = await client.post("/v1/console-links", headers=world.headers(key))
    assert answer.status_code == status


async def test_a_link_is_no_cookie(world: ApiWorld, browse: Browse) -> None:
    async with browse(None) as client:
        made = await client.post("/v1/console-links", headers=world.headers("operator"))
        secret = made.json()["path"].partition("=")[2]
        cookie = f"{COOKIE}={secret}.{world.app.state.console.sign('cookie', secret)}"
        assert (await client.get("/console/queue", headers={"Cookie": cookie})).status_code == 303
