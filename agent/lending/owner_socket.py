"""The owner's socket: a local socket that accepts only the owner of the machine.

A client sends one request as a line of JSON, and gets lines of JSON:

    {"command": "status"}
    {"command": "reclaim", "gpus": [0, 1], "notice_s": 300}      without `gpus`: the whole machine
    {"command": "lend", "gpus": [0], "hours": "20:00-08:00 mon-fri"}

The first answer is `{"heard": true}`: a status may take seconds. Each other one is `{"status": {...}}`
(`Lender.status`), `{"error": "..."}`, or, as the last line, `{"done": true}`. While a reclaim runs, a status is sent
each second.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from agent.config import AgentConfig
from agent.lending.lender import BadRequest, Lender
from agent.lending.owner_request import write_pointer
from infra.errors import ConfigurationError

_REQUEST_BYTES = 4096
_REQUEST_S = 10.0
_PROGRESS_S = 1.0
_running: set[asyncio.Future[None]] = set()
"""The reclaims in progress: each continues if its client leaves."""
_CREDENTIALS = struct.Struct("3i")
_log = logging.getLogger(__name__)


def open_socket(config: AgentConfig) -> socket.socket | None:
    """Returns the owner's socket, which is bound but does not listen yet. None: the machine has no owner.

    Raises:
        ConfigurationError: the socket cannot be made.
    """
    uid = config.owner_uid()
    if uid is None:
        return None
    path = socket_path(config)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        # The folder is opened, because the path of a socket may have 107 bytes only.
        folder = os.open(path.parent, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
        try:
            found.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
        write_pointer(path, {"state_dir": str(config.state_dir.absolute()), "python": sys.executable})
        path.chmod(0o600)
        if os.geteuid() == 0:
            os.chown(path, uid, -1)
    except OSError as error:
        found.close()
        raise ConfigurationError(f"owner_socket {path}: {error.strerror}") from None
    return found


def socket_path(config: AgentConfig) -> Path:
    """Returns the path of the owner's socket."""
    return config.owner_socket or config.state_dir / "owner.sock"


async def serve_owner(config: AgentConfig, listening: socket.socket, lender: Lender) -> None:
    """Listens to the machine's owner until cancelled. Then removes its socket, but not that of the next agent."""
    path = socket_path(config)
    # The duplicate keeps the number of the socket's file from being used again, for example by the next agent's socket.
    kept, mine = listening.dup(), _identity(path)
    allowed = {0, config.owner_uid()}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _answer(reader, writer, lender, allowed)
        except (ConnectionError, TimeoutError):
            pass
        except Exception as error:  # The owner must see that it failed.
            _log.exception("a request of the owner failed")
            with contextlib.suppress(ConnectionError):
                await _send(writer, {"error": f"the agent failed: {error.__class__.__name__}: {error}"})
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, sock=listening, limit=_REQUEST_BYTES)
    try:
        await server.serve_forever()
    finally:
        server.close()
        if mine is not None and _identity(path) == mine:
            path.unlink(missing_ok=True)
        kept.close()


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns device and number of a file; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lender: Lender, allowed: set[int | None]
) -> None:
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(peer)[1]
    if uid not in allowed:
        await _send(writer, {"error": f"user {uid} is not the owner of this machine"})
        return
    async with asyncio.timeout(_REQUEST_S):
        line = await reader.readline()
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ValueError(f"must be an object, not {type(request).__name__}")
    except (ValueError, RecursionError) as error:
        await _send(writer, {"error": f"the request must be one line with a JSON object: {error}"})
        return
    await _send(writer, {"heard": True})
    try:
        await _carry_out(request, writer, lender)
    except BadRequest as error:
        await _send(writer, {"error": str(error)})
        return
    await _send(writer, {"status": await asyncio.to_thread(lender.status)})
    await _send(writer, {"done": True})


async def _carry_out(request: dict[str, Any], writer: asyncio.StreamWriter, lender: Lender) -> None:
    command = request.get("command")
    if command == "reclaim":
        await _reclaim(lender, writer, _gpus(request), _seconds(request))
    elif command == "lend":
        hours = request.get("hours")
        if hours is not None and not isinstance(hours, str):
            raise BadRequest(f"hours: {hours!r}: must be a text")
        await lender.lend(_gpus(request), hours)
    elif command != "status":
        raise BadRequest(f"command: {command!r}: must be status, reclaim or lend")


async def _reclaim(lender: Lender, writer: asyncio.StreamWriter, gpus: frozenset[int] | None, notice_s: float) -> None:
    """Reclaims, and sends a status whenever it changes. The reclaim continues if the client leaves."""
    reclaiming = asyncio.ensure_future(lender.reclaim(gpus, notice_s))
    _running.add(reclaiming)
    reclaiming.add_done_callback(_running.discard)
    while not reclaiming.done():
        await asyncio.wait({reclaiming}, timeout=_PROGRESS_S)
        if not reclaiming.done():
            await _send(writer, {"status": await asyncio.to_thread(lender.status)})
    await reclaiming


async def _send(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(json.dumps(body).encode() + b"\n")
    await writer.drain()


def _gpus(request: dict[str, Any]) -> frozenset[int] | None:
    gpus = request.get("gpus")
    if gpus is None:
        return None
    if not isinstance(gpus, list) or not all(type(gpu) is int for gpu in gpus):
        raise BadRequest(f"gpus: {gpus!r}: must be a list of GPU numbers")
    return frozenset(gpus)


def _seconds(request: dict[str, Any]) -> float:
    notice_s = request.get("notice_s", 0)
    if isinstance(notice_s, bool) or not isinstance(notice_s, int | float):
        raise BadRequest(f"notice: {notice_s!r}: must be a number of seconds")
    return float(notice_s)
