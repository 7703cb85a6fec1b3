"""Runs a server in a network namespace of its own, so that its ports can be reached only through Unix sockets.

The folder of the sockets decides who may connect. Temporal's dev server itself cannot listen on a Unix socket. A client
connects with plain bytes, or with the request CONNECT of HTTP, as Temporal's SDK does.

`python -m infra.stack.closed_network own FOLDER NAME=PORT... -- COMMAND` becomes `COMMAND`, after it has started a
process that forwards the socket `FOLDER/NAME` to the port on 127.0.0.1 in the namespace. That process ends with the
command. With `shared` instead of `own`, both run in the network of the machine, where the ports are open to everybody.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from infra import children

_OWN, _FORWARD = "own", "forward"
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_PIECE_BYTES = 1 << 16
_HEAD_BYTES = 1 << 14
_libc = ctypes.CDLL(None, use_errno=True)


def command(folder: Path, ports: Mapping[str, int], server: list[str], *, is_closed: bool) -> list[str]:
    """Returns the command that runs `server` in its own network, or in the machine's network if not `is_closed`.

    `ports` maps the names of sockets in `folder` to the ports on which the server listens.
    """
    forwards = [f"{name}={port}" for name, port in ports.items()]
    network = _OWN if is_closed else "shared"
    return children.python("-m", __name__, network, str(folder), *forwards, "--", *server)


def why_not() -> str | None:
    """Returns why this process cannot create a network namespace, or None if it can. Starts a test process."""
    probe = children.python("-m", __name__, _OWN)
    done = subprocess.run(
        probe, capture_output=True, text=True, errors="replace", check=False, env=children.environment()
    )
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"status {done.returncode}"


def enter() -> None:
    """Moves this process into a new network namespace in which only the loopback interface exists, and is up.

    Without root, this also needs a new user namespace, in which this process keeps its user id.

    Raises:
        OSError: the kernel does not allow it.
    """
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWNET) != 0:
        if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"a network namespace cannot be created: {os.strerror(code)}")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
        flags = struct.unpack_from("H", request, 16)[0] | _IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags))


def forward(folder: Path, ports: Mapping[str, int]) -> None:
    """Forwards connections to the sockets in `folder` to ports on 127.0.0.1, until this process is killed."""
    os.chdir(folder)  # The name of a socket is limited to 107 bytes, so it is relative.
    asyncio.run(_serve(ports))


async def _serve(ports: Mapping[str, int]) -> None:
    for name, port in ports.items():
        Path(name).unlink(missing_ok=True)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port) -> None:
            with contextlib.suppress(OSError), contextlib.closing(writer):
                await _connect(reader, writer, port)

        await asyncio.start_unix_server(connected, name)
        Path(name).chmod(0o600)
    await asyncio.Event().wait()


async def _connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    head = await reader.read(_HEAD_BYTES)
    if head.startswith(b"CONNECT "):
        while head and b"\r\n\r\n" not in head:
            more = await reader.read(_HEAD_BYTES)
            head = head + more if more and len(head) < _HEAD_BYTES else b""
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" if head else b"")
        head = head.partition(b"\r\n\r\n")[2]
    elif not head:
        return
    inside_reader, inside_writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(inside_writer):
        inside_writer.write(head)
        both = [asyncio.create_task(_pump(reader, inside_writer)), asyncio.create_task(_pump(inside_reader, writer))]
        try:
            await asyncio.gather(*both)
        finally:
            for task in both:
                task.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes in one direction and forwards the end of the stream; the other direction stays usable."""
    while data := await reader.read(_PIECE_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _pairs(forwards: Iterable[str]) -> Iterator[tuple[str, int]]:
    for one in forwards:
        name, _, port = one.partition("=")
        yield name, int(port)


def _main(network: str, *arguments: str) -> None:
    if network == _FORWARD:
        forward(Path(arguments[0]), dict(_pairs(arguments[1:])))
        return
    if network == _OWN:
        try:
            enter()
        except OSError as error:
            raise SystemExit(str(error)) from None
    if not arguments:
        return
    end = arguments.index("--")
    parent = os.getpid()
    if os.fork() == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            forwarder = children.python("-m", "infra.stack.closed_network", _FORWARD, *arguments[:end])
            os.execv(forwarder[0], forwarder)
        os._exit(1)
    os.execvp(arguments[end + 1], arguments[end + 1 :])


if __name__ == "__main__":
    _main(*sys.argv[1:])
