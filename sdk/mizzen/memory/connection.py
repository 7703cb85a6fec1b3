"""Connections to memory servers, and the start of the server of this machine."""

import errno
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mizzen.memory import wire
from mizzen.memory.server import folder, name_of, short_path

ANSWER_S = 10.0
"""Time limit for an answer, and for a pause within a content."""
SLOWEST_BYTES_PER_S = 20e6
"""A content that is slower than this, in addition to `ANSWER_S`, counts as lost."""
_CONNECT_S = 5.0
_START_S = 10.0
_AGENT_S = 30.0
_PAUSES_S = (0.0, 0.0, 0.1, 0.5)
"""Pauses before each try to start a server: another process may be starting it."""
_SDK = str(Path(__file__).parents[2])
_AWAY_S = 30.0
_LONGEST_AWAY_S = 480.0
"""A server that has failed is asked again after the first of these times, and after twice as long for each failure."""
_PIECE_BYTES = 4 << 20


class MemoryServer:
    """A memory server as its clients see it. Thread-safe: each running request has a connection of its own."""

    def __init__(self, connect: Callable[[], socket.socket], token: bytes, where: str) -> None:
        """`connect` opens a connection; `where` names the server in messages."""
        self.where = where
        self.id = ""
        """Changes when the server is started again; empty before `greet`."""
        self.port = 0
        self.machine = ""
        """The scheduler's id of its machine; empty: unknown."""
        self._connect, self._token = connect, token
        self._free: list[socket.socket] = []
        self._lock = threading.Lock()
        self._away_s, self._away_until_s = _AWAY_S, 0.0
        self._is_silent = False
        self._undeleted: set[str] = set()

    def __del__(self) -> None:
        for link in self._free:
            link.close()

    @property
    def is_away(self) -> bool:
        """Whether the server has failed a short time ago."""
        return time.monotonic() < self._away_until_s

    def greet(self) -> None:
        """Read the id and the port of the server.

        Raises:
            OSError: the server is away, or fails now.
        """
        told = self.ask("hello")
        self.id, self.port = str(told["id"]), int(told["port"])

    def ask(self, do: str, **about: Any) -> dict[str, Any]:
        """Send a request without a content, and return the answer.

        Raises:
            OSError: the server is away, or fails now: TimeoutError if it is silent, ConnectionError if it has ended.
        """
        with self._link() as link:
            return _ask(link, do, **about)

    def put(self, key: str, chunks: Sequence[memoryview]) -> None:
        """Store an object.

        Raises:
            OSError: the server is away, fails now, or is full (ENOSPC).
        """
        size = sum(len(chunk) for chunk in chunks)
        with self._link() as link:
            answer = _ask(link, "put", key=key, size=size)
            if "full" not in answer:
                if link.family == socket.AF_UNIX:
                    write = _writer(_received(link))
                else:
                    write = _sender(link, _ends_s(size))
                with write as piece_written:
                    for chunk in chunks:
                        for start in range(0, len(chunk), _PIECE_BYTES):
                            piece_written(chunk[start : start + _PIECE_BYTES])
                link.settimeout(ANSWER_S)
                wire.send(link, {"done": True})
                wire.receive(link)
        if "full" in answer:
            raise OSError(errno.ENOSPC, f"{self.where}: {answer['full']:,} bytes of memory are free, not {size:,}")

    def get(self, key: str, into: memoryview, start: int) -> int | None:
        """Fill `into` from an offset of an object, and return the number of bytes; None: there is no such object.

        Raises:
            OSError: the server is away, or fails now.
        """
        with self._link() as link:
            count = int(_ask(link, "get", key=key, start=start, end=start + len(into))["size"])
            if count < 0:
                return None
            ends_s, done = _ends_s(count), 0
            # A socket without a time limit of Python's fills a piece by one call, without the interpreter's lock.
            link.settimeout(None)
            while done < count:
                got = link.recv_into(into[done : min(count, done + _PIECE_BYTES)], 0, socket.MSG_WAITALL)
                done += got
                if not got or time.monotonic() > ends_s:
                    raise TimeoutError("too slow") if got else wire.ProtocolError("the connection was closed")
            return count

    def open(self, key: str) -> int | None:
        """Return a descriptor of the memory of an object; None: there is none. Only from the same machine.

        Raises:
            OSError: the server is away, or fails now.
        """
        with self._link() as link:
            return None if int(_ask(link, "open", key=key)["size"]) < 0 else _received(link)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, now or when the server answers again.

        Raises:
            OSError: the server is away, or fails now.
        """
        self._undeleted.update(keys)
        self.ask("delete", keys=sorted(self._undeleted))
        self._undeleted.clear()

    @contextmanager
    def _link(self) -> Iterator[socket.socket]:
        if self.is_away:
            message = f"{self.where} did not answer a short time ago"
            raise TimeoutError(message) if self._is_silent else ConnectionError(message)
        with self._lock:
            link = self._free.pop() if self._free else None
        try:
            if link is not None and not _is_open(link):
                link.close()
                link = None
            if link is None:
                link = self._connect()
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(ANSWER_S), 0))
                link.settimeout(ANSWER_S)
                wire.introduce(link, self._token)
            link.settimeout(ANSWER_S)
            yield link
        except BaseException as error:
            if link is not None:
                link.close()
            if isinstance(error, OSError | ValueError | KeyError | TypeError):
                with self._lock:
                    self._away_until_s = time.monotonic() + self._away_s
                    self._away_s = min(2 * self._away_s, _LONGEST_AWAY_S)
                    for other in self._free:
                        other.close()
                    self._free.clear()
                self._is_silent = isinstance(error, TimeoutError | BlockingIOError)  # The second by SO_RCVTIMEO.
                message = f"{self.where}: {error or type(error).__name__}"
                raise (TimeoutError if self._is_silent else ConnectionError)(message) from error
            raise
        with self._lock:
            self._away_s = _AWAY_S
            self._free.append(link)


def _ask(link: socket.socket, do: str, **about: Any) -> dict[str, Any]:
    wire.send(link, {"do": do, **about})
    return wire.receive(link)


def _is_open(link: socket.socket) -> bool:
    """Return whether an idle connection is still open at the server."""
    link.setblocking(False)
    try:
        return link.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _received(link: socket.socket) -> int:
    """Receive a file descriptor."""
    _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
    if not descriptors:
        raise wire.ProtocolError("no file descriptor was received")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _ends_s(size_bytes: int) -> float:
    return time.monotonic() + ANSWER_S + size_bytes / SLOWEST_BYTES_PER_S


def _left_s(ends_s: float) -> float:
    return max(0.001, min(ANSWER_S, ends_s - time.monotonic()))


@contextmanager
def _writer(descriptor: int) -> Iterator[Callable[[memoryview], None]]:
    """Write to the memory of the server, without the position of the descriptor, which is shared with the server."""
    at = 0

    def write(piece: memoryview) -> None:
        nonlocal at
        while piece:
            count = os.pwrite(descriptor, piece, at)
            piece, at = piece[count:], at + count

    try:
        yield write
    finally:
        os.close(descriptor)


@contextmanager
def _sender(link: socket.socket, ends_s: float) -> Iterator[Callable[[memoryview], None]]:
    """Send to a server on another machine."""

    def send(piece: memoryview) -> None:
        link.settimeout(_left_s(ends_s))
        link.sendall(piece)

    yield send


def local_server(token: bytes) -> MemoryServer:
    """Return the server of this machine, which may not run."""
    held = held_folder()
    path = held / "server.sock" if held else (folder() / name_of(token)).with_suffix(".sock")
    return MemoryServer(lambda: _connected(path), token, f"the memory server of this machine ({path})")


def held_folder() -> Path | None:
    """Return the folder with the sockets of the memory server that the machine's agent holds; None: it holds none."""
    told = os.environ.get("MIZZEN_MEMORY_SERVER")
    return Path(told) if told else None


def _connected(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(_CONNECT_S)
    try:
        with short_path(path) as short:
            link.connect(short)
    except BaseException:
        link.close()
        raise
    return link


def remote_server(host: str, port: int, token: bytes) -> MemoryServer:
    """Return a server of another machine."""

    def connect() -> socket.socket:
        link = socket.create_connection((host, port), _CONNECT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link

    return MemoryServer(connect, token, f"the memory server at {host}:{port}")


def _asked(path: Path, told: dict[str, Any]) -> str | None:
    """Ask the agent of this machine to start the server; return why it does not, or None."""
    try:
        with _connected(path) as link:
            link.settimeout(_AGENT_S)
            wire.send(link, told)
            return wire.receive(link).get("error")
    except OSError as error:
        return f"the agent of this machine: {error}"


def start(told: dict[str, Any]) -> MemoryServer:
    """Return the server of this machine; if none runs, start it as a process that outlives this one.

    Where an agent of mizzen holds the servers, the agent starts it, with the machine's limit.

    `told`: see `server.serve`.

    Raises:
        OSError: the server does not answer.
    """
    # Without the environment's and the user's paths: the server needs only the standard library.
    code = f"import sys; sys.path.insert(0, {_SDK!r}); from mizzen.memory.server import main; main()"
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        server = local_server(bytes.fromhex(told["token"]))
        try:
            server.greet()
            return server
        except TimeoutError:
            raise
        except OSError as error:
            reason = str(error)
        if (held := held_folder()) is not None:
            reason = _asked(held / "start.sock", told) or reason
            continue
        command = [sys.executable, "-I", "-c", code]
        try:
            ended = subprocess.run(
                command, input=json.dumps(told), text=True, capture_output=True, cwd="/", timeout=_START_S, check=False
            )
        except (subprocess.SubprocessError, ValueError) as error:
            raise OSError(f"the memory server cannot be started: {error}") from None
        if ended.returncode:
            reason = (ended.stderr.strip() or reason).splitlines()[-1]
    raise OSError(f"the memory server cannot be started: {reason}")
