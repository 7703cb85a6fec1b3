"""Every page in Chromium on a live stack: changes, actions, other keys, and what happens while parts of it are down."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect
from starlette.routing import Match, Route

from console.application import create_app
from console.pages import TOP
from infra.config.settings import Settings
from tests.console.forms import minutes_ago
from tests.console.live_stack import LENT, WAITING, LiveStack, start
from tests.console.test_browser import CHROMIUM, CUT, PATIENCE_MS, chromium
from tests.stack.harness import processes_of, wait_until

pytestmark = [
    pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(2400),
    pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium (Debian: apt-get install chromium)"),
]  # fmt: skip
_REGION = "/console/fleet/{region}"
_NO_PAGES = {
    "/console/changes", f"{_REGION}/map.png", f"{_REGION}/past.png", f"{_REGION}/at", "/console/what-if/report",
    "/console/login/issuer", "/console/login/back", "/console/enter",
}  # fmt: skip
"""Streams, pictures, and addresses that lead to another page."""


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A stack to which nothing was submitted before `live`."""
    stack = start(tmp_path_factory.mktemp("live"))
    yield stack
    stack.up.close()


@pytest.fixture(scope="module")
def live(empty: LiveStack) -> LiveStack:
    """The stack with a few hundred workloads."""
    empty.fill()
    return empty


@asynccontextmanager
async def logged_in(live: LiveStack, key: str = "operator", **options: Any) -> AsyncIterator[Page]:
    """Yields a page that has logged in by the form. At the end it must not have had an error of a script."""
    async with chromium() as browser:
        page = await (await browser.new_context(**options)).new_page()
        page.set_default_timeout(PATIENCE_MS)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        await page.goto(live.console)
        await page.get_by_label("API key").fill(live.keys[key])
        await page.get_by_role("button", name="Log in").click()
        await expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible(timeout=PATIENCE_MS)
        yield page
        assert errors == []


async def become(what: str, condition: Callable[[], Any], timeout_s: float = 180) -> Any:
    """Waits until the API shows the effect of an action."""
    return await asyncio.to_thread(wait_until, condition, what, timeout_s)


async def sees(page: Page, text: str) -> None:
    await expect(page.get_by_text(text).first).to_be_visible(timeout=PATIENCE_MS)


async def act(page: Page, label: str) -> None:
    """Clicks a button, after its question if it has one."""
    question = page.locator("summary", has_text=f"{label}…")
    if await question.count():
        await question.first.click()
    await page.get_by_role("button", name=label, exact=True).click()


async def test_an_empty_installation(empty: LiveStack) -> None:
    """Every page answers; the first one leads to the forms for a tenant and for hello, and the commands beside them."""
    async with logged_in(empty) as page:
        await sees(page, "First steps")
        await sees(page, "mizzen submit hello.yaml --follow")
        for path in ("/queue", "/workloads", "/fleet", "/services", "/tables", "/capacity", "/lending", "/health"):
            answer = await page.goto(f"{empty.console}{path}")
            assert answer is not None and answer.status == 200, path
        await page.goto(empty.console)
        await page.get_by_role("link", name="Create a tenant").click()
        await page.get_by_label("Name").fill("vision")
        await page.get_by_label("Quota of GPUs").fill("a100=2, l4=1")
        await page.get_by_role("button", name="Create").click()
        await sees(page, "of 2")
        await page.goto(empty.console)
        await page.get_by_role("link", name="Submit a first workload").click()
        await page.get_by_role("button", name="Submit").click()
        await sees(page, "succeeded: ")
        await page.goto(empty.console)
        assert await page.get_by_text("First steps").count() == 0


def _pages(live: LiveStack) -> list[str]:
    train, waits, sweep = live.ids["trains-0"], live.ids["waits-000"], live.ids["sweep"]
    return [
        "", "/login", "/queue", "/queue?after=50", "/workloads", "/workloads?phase=failed", f"/workloads?array={sweep}",
        "/workloads?tenant=nobody", "/workloads/new", f"/workloads/{train}", f"/workloads/{waits}",
        f"/workloads/{sweep}", f"/workloads/{live.ids['fails-0']}", f"/workloads/{live.ids['short-000']}",
        f"/workloads/{train}/logs", f"/workloads/{train}/logs?search=nothing", f"/workloads/{train}/clone",
        "/workloads/bulk?phase=live", "/fleet", "/fleet/east", "/fleet/east?by=tenant", "/fleet/east?by=kind",
        "/fleet/east?by=price",
        f"/fleet/east/past?at={minutes_ago(1)}", "/machines/east/a/m-1", f"/machines/{LENT}", "/tenants", "/services",
        f"/services/{live.ids['chat']}", "/tables", f"/placement-runs/{live.ids['placement']}", "/capacity", "/lending",
        f"/lending/{LENT}", "/what-if", "/health",
        "/nothing",
    ]  # fmt: skip


def test_the_pages_are_all_pages(live: LiveStack) -> None:
    """A page that is added is also checked below."""
    app = create_app(Settings(database="postgresql://nobody@127.0.0.1:1/nothing"))
    routes = [one for one in app.routes if isinstance(one, Route)]
    gets = [one for one in routes if "GET" in (one.methods or ()) and one.path.startswith(TOP)]
    shown = set()
    for path in _pages(live):
        scope = {"type": "http", "method": "GET", "path": f"{TOP}{path}".partition("?")[0], "root_path": ""}
        shown.add(next(one.path for one in gets if one.matches(scope)[0] is Match.FULL))
    assert {one.path for one in gets} - shown == _NO_PAGES


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_assistive_software_reads_every_page(live: LiveStack, scheme: str) -> None:
    """At the width of a phone and of a screen, axe finds nothing serious or critical, and nothing sticks out.

    A phone shows tables whole, without what it has no room for.
    """
    folder = os.environ.get("MIZZEN_SCREENSHOTS")
    found = []
    async with logged_in(live, color_scheme=scheme) as page:
        for path in _pages(live):
            for width in (390, 1440):
                await page.set_viewport_size({"width": width, "height": 900})
                await page.goto(f"{live.console}{path}")
                result = await Axe().run(page)
                found += [
                    (path, width, one["id"], [node["html"] for node in one["nodes"]][:3])
                    for one in result.response["violations"]
                    if one["impact"] in ("serious", "critical")
                ]
                if await page.evaluate("document.documentElement.scrollWidth") > width:
                    found.append((path, width, "wider than the window", []))
                if width == 390 and await page.evaluate(CUT):
                    found.append((path, width, "a table is cut off", []))
                if folder:
                    name = "".join(c if c.isalnum() else "-" for c in path.replace("wl-", "")) or "-overview"
                    await page.screenshot(path=f"{folder}/{scheme}-{width}{name}.png", full_page=True)
    assert not found, "\n".join(map(str, found))


async def test_pages_follow_a_workload_from_its_submission_to_its_end(live: LiveStack) -> None:
    """The list and the page of the workload show each step without a reload."""
    async with logged_in(live, "t") as page:
        await page.goto(f"{live.console}/workloads?name=followed")
        await sees(page, "No workload matches.")
        await page.evaluate("window.isSame = true")
        gate = live.up.folder / "followed"
        run = f'while ! test -e "{gate}"; do sleep 0.2; done; echo at the end'
        id_ = await asyncio.to_thread(live.submit, "followed", run)
        await expect(page.get_by_role("link", name="followed", exact=True)).to_be_visible(timeout=PATIENCE_MS)
        await expect(page.locator(f"#{id_} .phase.running")).to_be_visible(timeout=PATIENCE_MS)
        own = await page.context.new_page()
        await own.goto(f"{live.console}/workloads/{id_}")
        await own.evaluate("window.isSame = true")
        gate.touch()
        await sees(own, "succeeded: ")
        await page.bring_to_front()
        await expect(page.locator(f"#{id_} .phase.succeeded")).to_be_visible(timeout=PATIENCE_MS)
        for one in (page, own):
            assert await one.evaluate("window.isSame")
        await own.goto(f"{live.console}/workloads/{id_}/logs")
        await sees(own, "at the end")


async def test_another_tenants_key(live: LiveStack) -> None:
    """No page of it has a name or an id of the other tenant; their addresses have no page."""
    secret = live.ids["secret-run"]
    others = {live.ids[f"waits-{number:03}"] for number in range(WAITING) if number % 4 == 3} | {secret}
    async with logged_in(live, "t") as page:
        for path in _pages(live):
            if path.startswith(("/what-if", "/health", "/login")):
                continue
            await page.goto(f"{live.console}{path}")
            text = await page.content()
            assert "secret-run" not in text and not [id_ for id_ in others if id_ in text], path
            assert ">others<" not in text, path
        for path in (f"/workloads/{secret}", f"/workloads/{secret}/logs", f"/workloads/{secret}/clone"):
            answer = await page.goto(f"{live.console}{path}")
            assert answer is not None and answer.status == 404, path
        for path in ("/what-if", "/health"):
            answer = await page.goto(f"{live.console}{path}")
            assert answer is not None and answer.status == 403, path


@pytest.fixture
def elsewhere(live: LiveStack) -> Iterator[str]:
    """The URL of a page at another port, which sends a form to the console when it is opened."""
    target = f"{live.console}/workloads/{live.ids['trains-0']}/cancel"

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(
                f'<form method="post" action="{target}"><input name="csrf" value="0"></form>'
                "<script>document.forms[0].submit()</script>".encode()
            )

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


async def test_a_form_of_another_site(live: LiveStack, elsewhere: str) -> None:
    """The browser sends the cookie with it, because another port is the same site to it; the console refuses it."""
    async with logged_in(live) as page:
        async with page.expect_response(lambda one: one.url.endswith("/cancel")) as sent:
            await page.goto(elsewhere)
        answer = await sent.value
        assert answer.status == 403
        assert "mizzen_console=" in (await answer.request.all_headers())["cookie"]
    assert live.up.phase(live.ids["trains-0"]) == "running"


async def test_actions_on_a_workload(live: LiveStack) -> None:
    """Each button changes what the API shows."""
    id_, client = live.ids["waits-001"], live.client
    running = live.ids["trains-1"]
    async with logged_in(live) as page:
        await page.goto(f"{live.console}/workloads/{id_}")
        await act(page, "Hold")
        await become("it is on hold", lambda: client.workload(id_)["held_by"])
        await act(page, "Release")
        await become("it is released", lambda: client.workload(id_)["held_by"] is None)
        await page.get_by_label("Level").select_option("6")
        await act(page, "Lower")
        await become("it is lowered", lambda: client.workload(id_)["level"] == 6)
        await act(page, "Cancel")
        await become("it is cancelled", lambda: live.up.phase(id_) == "cancelled")
        await act(page, "Submit again")
        await page.wait_for_url(lambda url: id_ not in url)
        again = page.url.rpartition("/")[2]
        assert client.workload(again)["name"] == "waits-001"
        await page.get_by_role("link", name="Clone with changes").click()
        document = await page.get_by_label("Document").input_value()
        await page.get_by_label("Document").fill(document.replace("waits-001", "cloned"))
        await page.get_by_role("button", name="Submit").click()
        await expect(page.get_by_role("heading", name="cloned", level=1)).to_be_visible(timeout=PATIENCE_MS)
        await page.goto(f"{live.console}/workloads/{running}")
        await act(page, "Preempt")
        await become("it is preempted", lambda: client.attempts(running)[0]["outcome"])
        await page.goto(f"{live.console}/workloads?phase=live&label=batch%3Dfirst")
        await page.get_by_role("link", name="Actions on all that match").click()
        await page.get_by_role("button", name="Cancel").click()
        await sees(page, "were cancelled")
        await become("they are cancelled", lambda: live.up.phase(live.ids["waits-004"]) == "cancelled")
        assert live.up.phase(live.ids["waits-020"]) != "cancelled"


async def test_actions_on_machines(live: LiveStack) -> None:
    """A machine is cordoned and drained, and a lent one is taken back and lent again."""
    client, machine = live.client, "west/a/m"
    async with logged_in(live) as page:
        await page.goto(f"{live.console}/machines/{machine}")
        is_closed: Callable[[], Any]
        for label, back, is_closed in (
            ("Cordon", "Uncordon", lambda: client.machine(machine)["cordon"]),
            ("Drain", "End the drain", lambda: client.machine(machine)["draining"]),
        ):
            await page.locator("summary", has_text=f"{label}…").click()
            await page.locator("details[open]").get_by_label("Reason").fill("a fan")
            await page.locator("details[open]").get_by_role("button", name=label).click()
            await become(label, is_closed)
            await act(page, back)
            await become(back, partial(_is_not, is_closed))
        await page.goto(f"{live.console}/lending/{LENT}")
        await act(page, "Take it back")
        await become("it is taken back", lambda: client.machine(LENT)["draining"])
        await become("its workload has left", lambda: client.attempts(live.ids["on-lent"])[0]["outcome"])
        await act(page, "Lend it again")
        await become("it is lent again", lambda: not client.machine(LENT)["draining"])


def _is_not(condition: Callable[[], Any]) -> bool:
    return not condition()


async def test_the_api_is_killed_under_an_open_page(live: LiveStack) -> None:
    """The page says that the connection is lost, and shows by itself what has changed when the API is back."""
    async with logged_in(live) as page:
        await page.goto(f"{live.console}/workloads?name=after-the-kill")
        await sees(page, "No workload matches.")
        await page.evaluate("window.isSame = true")
        await asyncio.to_thread(live.up.kill, "server api")
        await sees(page, "The connection is lost")
        await become("the API is back", lambda: live.client.whoami())
        await asyncio.to_thread(live.submit, "after-the-kill", "true")
        await expect(page.get_by_role("link", name="after-the-kill")).to_be_visible(timeout=PATIENCE_MS)
        await expect(page.get_by_text("The connection is lost")).to_be_hidden(timeout=PATIENCE_MS)
        assert await page.evaluate("window.isSame")


async def test_temporal_is_down(live: LiveStack) -> None:
    """All pages answer, and the first one says what does not work meanwhile, until Temporal is back."""
    pids = [pid for pid, command in processes_of(live.up.data).items() if "start-dev" in command]
    assert pids
    async with logged_in(live) as page:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await page.goto(live.console)
            await sees(page, "Temporal does not answer")
            for path in ("/queue", "/workloads", f"/workloads/{live.ids['waits-000']}", "/fleet/east", "/health"):
                answer = await page.goto(f"{live.console}{path}")
                assert answer is not None and answer.status == 200, path
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        await page.goto(live.console)
        await expect(page.get_by_text("Temporal does not answer")).to_be_hidden(timeout=PATIENCE_MS)
