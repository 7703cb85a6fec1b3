"""A helper process that executes requests of a test inside a network namespace.

`python -m tests.netns.inside` reads a request from each line of its input (JSON), writes a response for each (JSON),
and exits at the end of its input. `python -m tests.netns.inside gate ADDRESS PORT` forwards ADDRESS:PORT to the same
port on loopback.
"""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Deeds:
    """The operations that a test may request."""

    def __init__(self) -> None:
        self._client: Any = None

    def reachable(self, address: str, ports: list[int]) -> list[int]:
        """Returns those of `ports` that accept a connection."""
        found = []
        for port in ports:
            with socket.socket() as probe:
                probe.settimeout(5.0)
                if probe.connect_ex((address, port)) == 0:
                    found.append(port)
        return found

    def postgres_ready(self, folder: str, port: int) -> None:
        """Waits until the embedded Postgres of `folder` responds, and creates its database."""
        from infra.stack.postgres import EmbeddedPostgres

        EmbeddedPostgres(Path(folder), port).wait_ready()

    def client(self, url: str, key: str) -> None:
        """Creates the client whose methods `api` calls."""
        from mizzen_client import Client

        self._client = Client(url, key, patience_s=60.0)

    def api(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Calls a method of `mizzen_client.Client`."""
        answer = getattr(self._client, method)(*arguments, **named)
        if not isinstance(answer, Iterator):
            return answer
        return [item.decode() if isinstance(item, bytes) else item for item in answer]


def serve() -> None:
    """Answers requests one by one."""
    deeds = Deeds()
    for line in sys.stdin:
        name, arguments, named = json.loads(line)
        deed: Callable[..., Any] = getattr(deeds, name)
        try:
            answer = {"value": deed(*arguments, **named)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


async def gate(address: str, port: int) -> None:
    """Forwards connections to loopback until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def pour(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            target.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pour(reader, back), pour(there, writer))

    server = await asyncio.start_server(forward, address, port)
    await stop.wait()
    server.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["gate"]:
        asyncio.run(gate(sys.argv[2], int(sys.argv[3])))
    else:
        serve()
