"""The console in Chromium: log in, live updates, every page with axe, and without JavaScript."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect
from sqlalchemy import func

from api.serve import Server, config_of, listen
from console.application import create_app
from domain.phases import Phase
from tests.api.published import FULL
from tests.api.world import ApiWorld
from tests.console.forms import minutes_ago

CHROMIUM = shutil.which("chromium")
CUT = "[...document.querySelectorAll('.scroll:has(table)')].filter(one => one.scrollWidth > one.clientWidth + 1).length"
"""How many tables are wider than the window; a map may be."""
PATIENCE_MS = 60_000
"""For a loaded machine; no test asserts a duration."""
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs the program chromium (Debian: apt-get install chromium)"
)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


async def log_in(page: Page, url: str, world: ApiWorld, key: str = "operator") -> None:
    await page.goto(f"{url}/console", timeout=PATIENCE_MS)
    await page.get_by_label("API key").fill(world.raw_keys[key])
    await page.get_by_role("button", name="Log in").click()
    await expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible(timeout=PATIENCE_MS)


def fill(world: ApiWorld) -> str:
    """Adds a workload that runs, and one that waits; returns the id of the first."""
    id_ = world.add_workload(Phase.RUNNING, name="trains")
    world.add_attempt(id_, 1, "north/alpha/m1", 3, ready_at=func.now(), started_at=func.now(), last_step=7)
    name = "waits-with-a-name-of-ordinary-length-0001"
    world.add_workload(Phase.PENDING, name=name, labels={"team": "a"}, reason=FULL)
    return id_


@pytest.mark.timeout(300)
async def test_a_login_a_change_an_action_and_its_end(world: ApiWorld, serve: Callable[[ApiWorld], str]) -> None:
    """The queue shows a new workload without a reload; it is cancelled on its page; a log-out ends both tabs.

    The page of the workload offers the actions of its new phase, and a question that was opened stays open.
    """
    url = await asyncio.to_thread(serve, world)
    async with chromium() as browser:
        context = await browser.new_context()
        page = await context.new_page()
        failed: list[str] = []
        page.on("console", lambda message: failed.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: failed.append(str(error)))
        await log_in(page, url, world)
        await page.get_by_role("link", name="Queue", exact=True).click()
        await expect(page.get_by_text("Nothing waits.")).to_be_visible(timeout=PATIENCE_MS)
        await page.evaluate("window.isSame = true")
        id_ = world.add_workload(Phase.PENDING, name="new-one")
        world.set_phase(id_, Phase.PENDING)
        await expect(page.get_by_role("link", name="new-one")).to_be_visible(timeout=PATIENCE_MS)
        assert await page.evaluate("window.isSame")
        other = await context.new_page()
        await other.goto(f"{url}/console/workloads/{id_}")
        await other.get_by_text("Cancel…").click()
        world.set_phase(id_, Phase.RUNNING)
        await expect(other.get_by_text("Preempt…")).to_be_visible(timeout=PATIENCE_MS)
        world.set_phase(id_, Phase.PENDING)
        await expect(other.get_by_role("button", name="Hold")).to_be_visible(timeout=PATIENCE_MS)
        await other.get_by_role("button", name="Cancel").click()
        await expect(other.get_by_text("cancelled: ")).to_be_visible(timeout=PATIENCE_MS)
        await expect(page.get_by_text("Nothing waits.")).to_be_visible(timeout=PATIENCE_MS)
        await other.get_by_role("button", name="Log out").click()
        await expect(page.get_by_label("API key")).to_be_visible(timeout=PATIENCE_MS)
        assert failed == []


@contextmanager
def served(world: ApiWorld, port: int = 0) -> Iterator[int]:
    """Serves a world by a new application until the end of the block; yields its port."""
    listener = listen("127.0.0.1", port)
    app = create_app(world.settings)
    server = Server(config_of(app, world.settings, graceful_s=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield int(listener.getsockname()[1])
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()
    app.state.mizzen.dispose()


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_the_api_restarts_under_an_open_page(world: ApiWorld) -> None:
    """The page says that the connection is lost, and shows what has changed when the API is back."""
    async with chromium() as browser:
        with served(world) as port:
            page = await browser.new_page()
            await log_in(page, f"http://127.0.0.1:{port}", world)
            await page.goto(f"http://127.0.0.1:{port}/console/queue")
            await expect(page.get_by_text("Nothing waits.")).to_be_visible(timeout=PATIENCE_MS)
        await expect(page.get_by_text("The connection is lost")).to_be_visible(timeout=PATIENCE_MS)
        world.add_workload(Phase.PENDING, name="new-one")
        with served(world, port):
            await expect(page.get_by_role("link", name="new-one")).to_be_visible(timeout=PATIENCE_MS)
            await expect(page.get_by_text("The connection is lost")).to_be_hidden(timeout=PATIENCE_MS)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_many_tabs_of_a_browser(world: ApiWorld, serve: Callable[[ApiWorld], str]) -> None:
    """Ten tabs show a change: a browser opens six connections to a host, and they share one stream."""
    url = await asyncio.to_thread(serve, world)
    async with chromium() as browser:
        context = await browser.new_context()
        tabs = [await context.new_page() for _ in range(10)]
        await log_in(tabs[0], url, world)
        for tab in tabs:
            await tab.goto(f"{url}/console/queue", timeout=PATIENCE_MS)
        world.set_phase(world.add_workload(Phase.PENDING, name="new-one"), Phase.PENDING)
        for tab in tabs:
            await expect(tab.get_by_role("link", name="new-one")).to_be_visible(timeout=PATIENCE_MS)
        assert world.app.state.mizzen.hub.followers == 1


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_assistive_software_reads_every_page(
    world: ApiWorld, serve: Callable[[ApiWorld], str], scheme: str
) -> None:
    """No finding of axe has the impact serious or critical, and no page is wider than a phone."""
    url, id_ = await asyncio.to_thread(serve, world), fill(world)
    async with chromium() as browser:
        page = await browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 800})  # type: ignore[arg-type]
        await log_in(page, url, world)
        for path in (
            "", "/queue", "/workloads", "/workloads/new", f"/workloads/{id_}", f"/workloads/{id_}/logs", "/fleet",
            "/fleet/north", "/fleet/north?by=tenant", f"/fleet/north/past?at={minutes_ago(1)}",
            "/machines/north/alpha/m1", "/nothing", "/capacity", "/tables",
            "/lending", "/lending/north/alpha/m1", "/tenants", "/workloads/bulk", "/health", "/what-if",
        ):  # fmt: skip
            await page.goto(f"{url}/console{path}", timeout=PATIENCE_MS)
            found = await Axe().run(page)
            bad = [one for one in found.response["violations"] if one["impact"] in ("serious", "critical")]
            assert bad == [], path
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390, path
            if path in ("", "/queue", "/workloads"):  # Why a workload waits is read without scrolling.
                assert await page.evaluate(CUT) == 0, path


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_pages_without_javascript(world: ApiWorld, serve: Callable[[ApiWorld], str]) -> None:
    url, id_ = await asyncio.to_thread(serve, world), fill(world)
    async with chromium() as browser:
        context = await browser.new_context(java_script_enabled=False)
        page = await context.new_page()
        await log_in(page, url, world, "vision")
        await page.goto(f"{url}/console/workloads")
        await page.get_by_role("link", name="trains").click()
        await page.get_by_text("Cancel…").click()
        await page.get_by_role("button", name="Cancel").click()
        await page.wait_for_url(f"{url}/console/workloads/{id_}", timeout=PATIENCE_MS)
        await page.get_by_role("link", name="Clone with changes").click()
        await expect(page.get_by_label("Document")).to_contain_text("name: trains")
