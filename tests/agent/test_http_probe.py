"""Readiness probes against real servers, most of which respond with anything but HTTP."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from agent.http_probe import probe
from domain.serving_spec import ProbeSpec

Respond = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_OK = b"HTTP/1.1 200 OK\r\n"


class Server:
    """A server on loopback that keeps the requests it got, and the number of bytes that it could send."""

    def __init__(self, respond: Respond) -> None:
        self.port = 0
        self.requests: list[bytes] = []
        self.sent_bytes = 0
        self._respond = respond

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Server"]:
        """Serves on a free port."""
        tasks: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (line[15:] for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), b"0"
                )
                self.requests.append(head + await reader.readexactly(int(length)))
                await self._respond(reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1")
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in tasks:
                task.cancel()

    async def pour(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Sends `data` until the client closes the connection."""
        while True:
            writer.write(data)
            await writer.drain()
            self.sent_bytes += len(data)


def _sends(data: bytes) -> Respond:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        await reader.read()

    return respond


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pass


async def _drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_OK + b"content-length: 1000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def _probe(respond: Respond, **fields: object) -> tuple[str | None, Server]:
    async with Server(respond).running() as server:
        spec = ProbeSpec.model_validate({"path": "/health?key=hush", "timeout_s": 5.0, **fields})
        found, _ = await asyncio.wait_for(probe("127.0.0.1", server.port, spec), 30)
        return found and found.replace(str(server.port), "PORT"), server


@pytest.mark.parametrize(
    "response",
    [
        _OK + b"content-length: 2\r\n\r\nok",
        _OK + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + _OK + b"content-length: 0\r\n\r\n",
    ],
)
async def test_a_complete_response_is_ready(response: bytes) -> None:
    """The probe does not wait for the end of the connection, which servers may keep open."""
    found, server = await _probe(_sends(response))
    assert found is None
    assert server.requests[0].startswith(b"GET /health?key=hush HTTP/1.1\r\n")


async def test_a_redirect_is_ready_and_is_not_followed() -> None:
    """A status of 3xx means ready; a redirect to the same path causes no second request."""
    found, server = await _probe(_sends(b"HTTP/1.1 302 Found\r\nlocation: /health\r\ncontent-length: 0\r\n\r\n"))
    assert (found, len(server.requests)) == (None, 1)


async def test_a_probe_posts_its_body() -> None:
    """With a body the request is a POST, of JSON unless the headers say otherwise; the headers are sent."""
    body = json.dumps({"prompt": "hélló", "max_tokens": 1}, ensure_ascii=False)
    _, server = await _probe(
        _sends(_OK + b"content-length: 0\r\n\r\n"), body=body, headers={"Authorization": "Bearer t"}
    )
    head, _, sent = server.requests[0].partition(b"\r\n\r\n")
    assert (head.split(b" ")[0], sent.decode()) == (b"POST", body)
    assert b"authorization: bearer t" in head.lower() and b"content-type: application/json" in head.lower()
    _, server = await _probe(
        _sends(_OK + b"content-length: 0\r\n\r\n"),
        body="x",
        headers={"Content-Type": "text/plain", "Host": "a.example"},
    )
    assert b"content-type: text/plain" in server.requests[0].lower() and b"json" not in server.requests[0]
    assert server.requests[0].lower().count(b"host:") == 1 and b"a.example" in server.requests[0]


@pytest.mark.parametrize(
    ("respond", "error"),
    [
        (_sends(b"HTTP/1.1 503 hush\r\ncontent-length: 0\r\n\r\n"), "status 503"),
        (_sends(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"), "status 404"),
        (_sends(b"\x00\xff\x16garbage\r\n\r\n"), "the response is not valid HTTP/1.1"),
        (_sends(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "the response is not valid HTTP/1.1"),
        (_sends(_OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\n"), "the response is not valid HTTP/1.1"),
        (_closes, "the response is not valid HTTP/1.1"),
        (_silent, "no complete response within 0.3 s"),
        (_drips, "no complete response within 0.3 s"),
        (_sends(_OK + b"content-length: 10\r\n\r\nshort"), "no complete response within 0.3 s"),
    ],
)
async def test_a_bad_server_is_not_ready(respond: Respond, error: str) -> None:
    """The error is short, and contains neither text from the response nor the query of the request."""
    limits = {"timeout_s": 0.3} if "within" in error else {}
    found, _ = await _probe(respond, **limits)
    assert found == f"GET /health on port PORT: {error}"


@pytest.mark.parametrize(
    ("start", "more", "error"),
    [
        (_OK + b"\r\n", b"x" * 65536, None),
        (_OK + b"transfer-encoding: chunked\r\n\r\n", b"4000\r\n" + b"x" * 0x4000 + b"\r\n", None),
        (_OK, b"a: b\r\n" * 1000, "the response is not valid HTTP/1.1"),
        (b"", b"x" * 65536, "the response is not valid HTTP/1.1"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, "its first 131072 bytes contain no status"),
    ],
)
async def test_an_endless_response_is_cut(start: bytes, more: bytes, error: str | None) -> None:
    """The probe reads a bounded part of a response; the status decides if there is one."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await server.pour(writer, more)

    async with Server(respond).running() as server:
        found, _ = await asyncio.wait_for(probe("127.0.0.1", server.port, ProbeSpec(timeout_s=60)), 30)
        assert found == (error and f"GET / on port {server.port}: {error}")
        # Beyond the part that was read, only the buffers of both sockets can be filled.
        assert server.sent_bytes < 64 << 20


@pytest.mark.parametrize(
    ("header", "load"),
    [(b"mizzen-load: 12.5", 12.5), (b"Mizzen-Load: 0", 0.0), (b"x-load: 3", None), (b"mizzen-load: much", None),
     (b"mizzen-load: -1", None), (b"mizzen-load: inf", None)],
)  # fmt: skip
async def test_a_ready_task_reports_its_load(header: bytes, load: float | None) -> None:
    """The load is a finite number of at least 0; another one is ignored, and the task is ready nevertheless."""
    async with Server(_sends(_OK + header + b"\r\ncontent-length: 0\r\n\r\n")).running() as server:
        assert await probe("127.0.0.1", server.port, ProbeSpec()) == (None, load)


@pytest.mark.parametrize("spec", [{"headers": {"x": "a\r\nb: c"}}, {"headers": {"x y": "a"}}, {"headers": {"é": "€"}}])
async def test_a_header_that_is_invalid_is_refused(spec: dict[str, object]) -> None:
    """A header cannot add other headers to the request."""
    found, server = await _probe(_sends(_OK), **spec)
    assert found == "GET /health on port PORT: path or headers of the request are not valid in HTTP"
    assert server.requests == []


async def test_without_a_server_the_error_says_so() -> None:
    """Nothing listens, or the address does not exist."""
    async with Server(_silent).running() as server:
        port = server.port
    assert (await probe("127.0.0.1", port, ProbeSpec())).error == f"GET / on port {port}: connection refused"
    found = (await probe("no-such-host.invalid", port, ProbeSpec())).error
    assert found == f"GET / on port {port}: cannot connect to no-such-host.invalid"
    found = (await probe("127.0.0.1", port, ProbeSpec(path="/" + "p" * 5000))).error
    assert found is not None and len(found) <= 200 and found.endswith("connection refused")
