"""The page *What if*: a simulation of the live system in a process of its own."""

import asyncio
import gc
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from console.what_if_page import RUNS
from console.what_if_run import _CHILD
from domain.phases import Phase
from infra import children
from tests.api.world import ApiWorld
from tests.console.conftest import Browse
from tests.console.forms import csrf_of

CHANGE = {"quotas": "vision.a100=1", "drain": "", "policy": "global", "hours": "2"}


@pytest.fixture(autouse=True)
def no_simulation() -> Iterator[None]:
    """Ends what a test has left."""
    yield
    if RUNS.newest is not None:
        RUNS.newest.close()
        RUNS.newest = None


async def _start(client: httpx.AsyncClient, **changed: str) -> httpx.Response:
    fields = {"csrf": csrf_of(await client.get("/console/what-if")), **CHANGE, **changed}
    return await client.post("/console/what-if", data=fields)


async def _ended(client: httpx.AsyncClient) -> str:
    while RUNS.newest is None or not RUNS.newest.has_ended:
        await asyncio.sleep(0.1)
    return (await client.get("/console/what-if")).text


@pytest.mark.rotating
@pytest.mark.timeout(300)
async def test_both_outcomes_are_side_by_side(world: ApiWorld, browse: Browse) -> None:
    """While it runs, no other one starts. Its report may show styles and pictures, and no scripts."""
    for number in range(4):
        world.add_workload(Phase.PENDING, name=f"w{number}")
    async with browse() as client:
        assert "Nothing has been simulated" in (await client.get("/console/what-if")).text
        assert (await client.get("/console/what-if/report")).status_code == 404
        assert (await _start(client)).status_code == 303
        os.kill(RUNS.newest.process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
        part = (await client.get("/console/what-if", headers={"HX-Request": "true"})).text
        assert "hx-trigger" in part and "Cancel" in part and "csrf" not in part
        second = await _start(client, drain="south")
        assert second.status_code == 409 and "another simulation runs (vision.a100=1)" in second.text
        os.kill(RUNS.newest.process.pid, signal.SIGCONT)  # type: ignore[union-attr]
        text = await _ended(client)
        cells = re.findall(r'GPU hours lost</th><td class="number">(.*?)</td>', text)
        assert len(cells) == 1, text
        report = await client.get("/console/what-if/report")
    assert "Effect of quota.vision.a100=1" in report.text
    assert report.headers["content-security-policy"].startswith("sandbox; default-src 'none';")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"quotas": "nobody.a100=1"}, "must be one of"),
        ({"quotas": "vision=1"}, "must be quota.TENANT.TYPE=SLOTS"),
        ({"quotas": ""}, "nothing would change"),
        ({"drain": "atlantis"}, "must be one of"),
        ({"hours": "0"}, "a number of hours from 1 to 168"),
        ({"policy": "chance"}, "must be one of global"),
    ],
)
async def test_impossible_changes_start_nothing(
    world: ApiWorld, browse: Browse, changed: dict[str, str], said: str
) -> None:
    async with browse() as client:
        answer = await _start(client, **changed)
    assert answer.status_code == 422 and said in answer.text
    assert RUNS.newest is None


async def test_a_simulation_is_cancelled(world: ApiWorld, browse: Browse) -> None:
    """By any operator; a tenant cannot see the page."""
    async with browse() as client, browse("vision") as tenant:
        assert (await tenant.get("/console/what-if")).status_code == 403
        await _start(client, quotas="", drain="south")
        page = await client.get("/console/what-if")
        assert (await client.post("/console/what-if/cancel", data={"csrf": csrf_of(page)})).status_code == 303
        assert "There is no result: it was cancelled." in await _ended(client)


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGXCPU, "more than 15 minutes of CPU time"), (signal.SIGALRM, "more than 30 minutes")],
)
async def test_the_limit_that_ended_it_is_named(
    world: ApiWorld, browse: Browse, number: signal.Signals, said: str
) -> None:
    """The kernel ends the process by these signals."""
    async with browse() as client:
        await _start(client)
        os.kill(RUNS.newest.process.pid, number)  # type: ignore[union-attr]
        assert said in await _ended(client)


async def test_files_stay_as_long_as_a_request_reads_them(world: ApiWorld, browse: Browse) -> None:
    """Another simulation may replace a run in the meantime; afterwards its folder is gone."""
    async with browse() as client:
        await _start(client)
        await client.post("/console/what-if/cancel", data={"csrf": csrf_of(await client.get("/console/what-if"))})
        read = RUNS.newest
        assert read is not None
        await _start(client, drain="south")
        assert RUNS.newest is not read and read.folder.exists() and read.error == "it was cancelled"
        folder = read.folder
        del read
        gc.collect()
        assert not folder.exists()


def test_a_simulation_ends_with_the_api(tmp_path: Path) -> None:
    """Also if the API is killed: its end closes the pipe."""
    os.mkfifo(tmp_path / "never")  # The simulation waits for a writer.
    command = [*children.python("-c", _CHILD), "what-if", str(tmp_path / "never")]
    with subprocess.Popen(command, env=children.environment(), stdin=subprocess.PIPE) as child:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(3)
        child.stdin.close()  # type: ignore[union-attr]
        assert child.wait(60) == 0
