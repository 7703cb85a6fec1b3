"""A replica of a service for the tests: `python -m tests.proxies.balance.replica PORT`. HTTP/1.1 without a framework.

Each path is one behaviour (`_PATHS`). The header `X-Replica` of an answer names the port.
"""

import asyncio
import base64
import hashlib
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl, urlsplit

PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 0
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_behaviour: dict[str, str] = {}
"""Options of all requests, set by `/behave`. With `hang=1` no request is answered."""
_steps: "asyncio.Queue[None]" = asyncio.Queue()
_held: list[asyncio.Event] = []
"""One for each request of `/hold` without an answer."""
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


async def _serve(reader: Reader, writer: Writer) -> None:
    try:
        while await _request(reader, writer):
            pass
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _request(reader: Reader, writer: Writer) -> bool:
    head = await reader.readuntil(b"\r\n\r\n")
    method, target, *_ = head.split(b"\r\n", 1)[0].decode().split(" ")
    pairs = (line.partition(b":") for line in head.split(b"\r\n")[1:-2])
    headers: dict[str, str] = {}
    for name, _, value in pairs:
        key, text = name.lower().decode(), value.strip().decode()
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    parts = urlsplit(target)
    options = dict(parse_qsl(parts.query))
    if parts.path == "/die":
        os._exit(1)
    body = await _body(reader, headers)
    if parts.path == "/behave":
        _behaviour.clear()
        _behaviour.update(options)
    elif _behaviour.get("hang") == "1":
        await asyncio.sleep(3600)
    elif _behaviour:
        options = {**options, **_behaviour}
    return await _PATHS.get(parts.path, _who)(reader, writer, {**options, **headers, "method": method}, body)


async def _body(reader: Reader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readline()
    return body


def _answer(writer: Writer, body: bytes, status: str = "200 OK") -> None:
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nX-Replica: {PORT}\r\n\r\n".encode() + body)


async def _who(reader: Reader, writer: Writer, options: Mapping[str, str], body: bytes) -> bool:
    """Answers at once, or after `after_s`, with the number of bytes of the request's body."""
    await asyncio.sleep(float(options.get("after_s", 0)))
    _answer(writer, f"{len(body)} {options.get('x-forwarded-proto')}".encode(), options.get("status", "200 OK"))
    await writer.drain()
    return True


async def _headers(reader: Reader, writer: Writer, options: Mapping[str, str], body: bytes) -> bool:
    """Answers with the names and values of the headers, in lines. Lines of one header are joined."""
    _answer(writer, "".join(f"{name}: {value}\n" for name, value in sorted(options.items())).encode())
    await writer.drain()
    return True


async def _die_after(reader: Reader, writer: Writer, options: Mapping[str, str], body: bytes) -> bool:
    """Dies when the whole request has arrived, if this replica has the port `port`; otherwise answers."""
    if int(options["port"]) == PORT:
        os._exit(1)
    return await _who(reader, writer, {}, body)


async def _events(reader: Reader, writer: Writer, options: Mapping[str, str], body: bytes) -> bool:
    """Sends `count` server-sent events, one every `every_s`. After `die_at` events the process dies. With `steps` each
    event is followed by a pause until there was a request of `/step`.
    """
    writer.write(
        f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Replica: {PORT}\r\n"
        "Transfer-Encoding: chunked\r\n\r\n".encode()
    )
    for number in range(int(options["count"])):
        if number == int(options.get("die_at", -1)):
            await writer.drain()
            os._exit(1)
        chunk = f"data: {number}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        await writer.drain()
        await asyncio.sleep(float(options.get("every_s", 0)))
        if "steps" in options:
            await _steps.get()
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


async def _step(reader: Reader, writer: Writer, options: Mapping[str, str], body: bytes) -> bool:
    _steps.put_nowait(None)
    return await _who(reader, writer, {}, body)


async def _hold(reader: Reader, writer: Writer, options: Mapping[str, str], body: bytes) -> bool:
    """Answers after the next request of `/release`."""
    _held.append(released := asyncio.Event())
    await released.wait()
    return await _who(reader, writer, {}, body)


async def _release(reader: Reader, writer: Writer, options: Mapping[str, str], body: bytes) -> bool:
    while _held:
        _held.pop().set()
    return await _who(reader, writer, {}, body)


async def _holding(reader: Reader, writer: Writer, options: Mapping[str, str], body: bytes) -> bool:
    """Answers with the number of requests that wait for `/release`."""
    _answer(writer, str(len(_held)).encode())
    await writer.drain()
    return True


async def _websocket(reader: Reader, writer: Writer, options: Mapping[str, str], body: bytes) -> bool:
    """Accepts a websocket and echoes the frames, which are short and masked."""
    accept = base64.b64encode(hashlib.sha1(options["sec-websocket-key"].encode() + _GUID).digest()).decode()
    writer.write(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
    )
    while True:
        first, length = await reader.readexactly(2)
        mask = await reader.readexactly(4)
        text = bytes(b ^ mask[i % 4] for i, b in enumerate(await reader.readexactly(length & 127)))
        writer.write(bytes([first, len(text)]) + text)
        if first & 15 == 8:
            return False


_PATHS: Mapping[str, Callable[[Reader, Writer, Mapping[str, str], bytes], Awaitable[bool]]] = {
    "/die-after": _die_after,
    "/events": _events,
    "/headers": _headers,
    "/hold": _hold,
    "/holding": _holding,
    "/release": _release,
    "/step": _step,
    "/websocket": _websocket,
}


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", PORT, backlog=1024)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
