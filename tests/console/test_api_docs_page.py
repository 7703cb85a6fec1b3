"""The page `/docs` in Chromium: a request is sent from it, with a key and without, and nothing leaves the API."""

import asyncio
from collections.abc import Callable

import pytest
from playwright.async_api import Page, expect

from domain.phases import Phase
from tests.api.world import ApiWorld
from tests.console.test_browser import CHROMIUM, PATIENCE_MS, chromium

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs the program chromium (Debian: apt-get install chromium)"
)


async def _send(page: Page, path: str, **fields: str) -> str:
    """Fills the form of `GET path`, sends it, and returns the answer."""
    operation = page.locator(f"details[data-method=get][data-path='{path}']")
    if await operation.get_attribute("open") is None:
        await operation.locator("summary").click()
    for label, value in fields.items():
        await operation.get_by_label(label).fill(value)
    await operation.get_by_role("button", name="Send").click()
    answer = operation.locator("pre")
    await expect(answer).not_to_be_empty(timeout=PATIENCE_MS)
    return await answer.inner_text()


@pytest.mark.rotating
@pytest.mark.timeout(300)
async def test_a_request_is_tried_out(world: ApiWorld, serve: Callable[[ApiWorld], str]) -> None:
    """Without a key it is refused; with one, the answer has what this key may see. No other host is contacted."""
    mine, other = (world.add_workload(Phase.PENDING, name=name, tenant=name) for name in ("vision", "speech"))
    url = await asyncio.to_thread(serve, world)
    async with chromium() as browser:
        page = await browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(f"{url}/docs", timeout=PATIENCE_MS)
        assert (await _send(page, "/v1/workloads")).startswith("401 ")
        await page.get_by_label("Key for all requests").fill(world.raw_keys["vision-viewer"])
        await page.locator("details[data-method=get][data-path='/v1/workloads'] pre").evaluate(
            "e => e.textContent = ''"
        )
        listed = await _send(page, "/v1/workloads")
        assert listed.startswith("200 ") and mine in listed and other not in listed
        assert f'"id": "{mine}"' in await _send(page, "/v1/workloads/{id}", **{"id (path)": mine})
        assert (await _send(page, "/metrics")).startswith("200 ")
        assert {request.startswith(f"{url}/") for request in asked} == {True}
