"""Sessions in tasks of an agent: in each mode of isolation, and in containers. The test is the API's side."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from agent import sealed
from agent.config import AgentConfig
from agent.state import StateFolder
from domain.isolation import Isolation
from domain.launch import LaunchDescription
from domain.protocol.activities import Activity
from domain.protocol.sessions import OpenSession
from infra.keys import seal_for_machine
from mizzen_client.tunnel import Channels, FrameKind, control, unpack
from tests.agent.harness import Lab, description, until_async
from tests.agent.test_containers import docker as docker
from tests.agent.test_containers import image_config, image_launch
from tests.containers import DockerHere

_FACTS = """
for ns in pid mnt ipc uts net user; do readlink /proc/self/ns/$ns; done
cat /proc/self/cgroup | sort; id -u; id -g; id -G; pwd; echo "$HOME $MIZZEN_RUN_ID $RANK $WORLD_SIZE"
grep -E '^(NoNewPrivs|Seccomp|CapEff|CapBnd|CapPrm):' /proc/self/status
"""


class Peer:
    """The API: an agent connects to it, and the test is the client."""

    def __init__(self) -> None:
        self.url = ""
        self.tokens: list[str] = []
        self._joined: asyncio.Queue[ServerConnection] = asyncio.Queue()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls) -> AsyncIterator["Peer"]:
        peer = cls()
        async with serve(peer._accept, "127.0.0.1", 0, compression=None) as server:
            peer.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            yield peer

    async def _accept(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        self.tokens.append(connection.request.headers["authorization"])
        self._joined.put_nowait(connection)
        await connection.wait_closed()

    async def join(self, lab: Lab, config: AgentConfig, launch: LaunchDescription) -> ServerConnection:
        """Has the agent join a session."""
        key = sealed.public_key(StateFolder(config.state_dir).private_key())
        request = OpenSession(
            "session-1", config.machine, launch.workload_id, launch.attempt, "main", 0, self.url,
            seal_for_machine(key, b"the token"),
        )  # fmt: skip
        await (await lab.start(Activity.OPEN_SESSION, config.machine, request, 1)).result(type(None))
        assert self.tokens[-1] == "Bearer the token"
        return await self._joined.get()


async def run(
    connection: ServerConnection, *command: str, terminal: bool = False
) -> tuple[dict[str, Any], bytes, bytes]:
    """Runs a command without input; returns the last message, and its output."""
    begin = {"kind": "exec", "terminal": terminal, "rows": 24, "columns": 80, "term": "xterm"}
    await connection.send(control("begin", command=list(command), **begin))
    channels = Channels(connection.send)
    stdin, *outputs = (channels.open(number) for number in range(3))
    works = [asyncio.create_task(_all(output)) for output in outputs]
    while True:
        frame = unpack(await connection.recv())
        if frame.kind is not FrameKind.CONTROL:
            channels.receive(frame)
            continue
        said = frame.message()
        if said["type"] == "started" and not terminal:
            await stdin.end()
        if said["type"] in ("exit", "closed"):
            channels.close("")
            return said, await works[0], await works[1]


async def _all(channel: Any) -> bytes:
    found = b""
    with contextlib.suppress(Exception):
        while data := await channel.read():
            found += data
    return found


@pytest.mark.parametrize("mode", list(Isolation))
async def test_a_command_is_isolated_like_the_task(lab: Lab, mode: Isolation) -> None:
    """It has the namespaces, the cgroup, the user, the groups, the filter, the folder and the variables of the task."""
    config = lab.config(isolation=mode)
    launch = description(lab.region, config, f"{_FACTS}\ntouch ready; exec sleep 600")
    lab.write(launch)
    async with lab.agent(config), Peer.open() as peer:
        running = await lab.run(launch, config.machine)
        folder = lab.folder_of(launch, config)
        await until_async(lambda: (folder.work / "ready").exists())
        said, out, err = await run(await peer.join(lab, config, launch), "sh", "-c", _FACTS)
        assert (said["type"], said.get("code"), err) == ("exit", 0, b"")
        assert out.decode() == folder.output.read_text()
        # It has the terminal's device, too, and can open others, as tmux does.
        command = ("sh", "-c", "tty && script -qec tty /dev/null && exit 3")
        said, out, _ = await run(await peer.join(lab, config, launch), *command, terminal=True)
        assert (said["code"], out.count(b"/dev/pts/")) == (3, 2), out
        await lab.stop(launch, config.machine, 0.1)
        with contextlib.suppress(Exception):
            await running.result(type(None))


async def test_a_command_in_a_container(lab: Lab, docker: DockerHere) -> None:
    """It is in the container: its namespaces, cgroups, user, and without capabilities."""
    config = image_config(lab, docker)
    launch = image_launch(lab, config, f"{_FACTS}\ntouch ready; sleep 600")
    async with lab.agent(config), Peer.open() as peer:
        running = await lab.run(launch, config.machine)
        folder = lab.folder_of(launch, config)
        await until_async(lambda: (folder.work / "ready").exists())
        said, out, err = await run(await peer.join(lab, config, launch), "sh", "-c", _FACTS)
        assert (said["type"], said.get("code"), err) == ("exit", 0, b""), said
        assert out.decode() == folder.output.read_text()
        said, out, _ = await run(await peer.join(lab, config, launch), "sh", "-c", "test -t 0 && exit 3", terminal=True)
        assert said["code"] == 3, out
        await lab.stop(launch, config.machine, 0.1)
        with contextlib.suppress(Exception):
            await running.result(type(None))


async def test_the_end_of_the_task_and_of_the_agent(lab: Lab) -> None:
    """Both end the session and its processes, and the client gets the reason."""
    config = lab.config()
    launch = description(lab.region, config, "touch ready; exec sleep 600")
    lab.write(launch)
    mark = f"6{os.getpid()}{id(lab) % 100000}"

    def there() -> bool:
        return mark in _command_lines()

    async with Peer.open() as peer:
        async with lab.agent(config):
            running = await lab.run(launch, config.machine)
            await until_async(lambda: (lab.folder_of(launch, config).work / "ready").exists())
            joined = await peer.join(lab, config, launch)
            session = asyncio.create_task(run(joined, "sh", "-c", f"trap '' HUP; sleep {mark}; sleep {mark}"))
            await until_async(there)
        said, _, _ = await session
        assert said["type"] == "closed" and "agent is being stopped" in said["because"]
        await until_async(lambda: not there())
        async with lab.agent(config):
            joined = await peer.join(lab, config, launch)
            session = asyncio.create_task(run(joined, "sh", "-c", f"trap '' HUP; sleep {mark}; sleep {mark}"))
            await until_async(there)
            await lab.stop(launch, config.machine, 0.1)
            said, _, _ = await session
            assert said == {"type": "closed", "because": "the task is stopped"}
            await until_async(lambda: not there())
            with contextlib.suppress(Exception):
                await running.result(type(None))


def _command_lines() -> str:
    found = ""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_text(errors="replace") if path.parent.name != str(os.getpid()) else ""
    return found
