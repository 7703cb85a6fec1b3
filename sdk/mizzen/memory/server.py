"""A memory server: holds the objects of one run in memory, for the processes of the same run.

Processes of the same machine connect to a Unix socket and get file descriptors of the memory, so contents are not sent.
Other machines connect over TCP. An object appears only when it is complete; memory counts as used from the moment at
which its space was granted.

The memory is anonymous (`memfd_create`): no file system limits it, and it is free when the server ends.
"""

import errno
import fcntl
import json
import mmap
import os
import resource
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from mizzen.memory import wire

_PROOF_S = 10.0
"""Time limit of the proof of the token, and of a pause within a content."""
_LOOK_S = 1.0
_SEND_BYTES = 8 << 20
_SPARE_OBJECTS = 64
"""Removed objects whose memory is kept for new ones of the same size."""


def name_of(token: bytes) -> str:
    """Return the name of a run's files in the folder of the servers."""
    return sha256(b"mizzen memory " + token).hexdigest()[:24]


def folder() -> Path:
    """Return the folder with the sockets of this user's servers; created if it is missing.

    Raises:
        OSError: the folder cannot be created, or belongs to another user.
    """
    told = os.environ.get("MIZZEN_MEMORY_DIR") or os.environ.get("XDG_RUNTIME_DIR")
    path = Path(told, "mizzen-memory") if told else Path(f"/tmp/mizzen-memory-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path}: must be a folder of user {os.getuid()} with mode 0700")
    return path


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Return a short path of a socket, for `bind` and `connect`: the kernel limits it to 107 bytes."""
    parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{parent}/{path.name}"
    finally:
        os.close(parent)


class _Server:
    def __init__(self, told: dict[str, Any], path: Path) -> None:
        self.path = path
        self._folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        """The user of the server may not enter the folders above it."""
        self._token = bytes.fromhex(told["token"])
        self._limit_bytes, self._idle_s = int(told["limit_bytes"]), float(told["idle_s"])
        self._fills = bool(told.get("folder"))
        """Whether this process takes the memory of an object before a client writes it, so that the kernel counts the
        memory for this process and not for the client."""
        self.id = os.urandom(8).hex()
        self.port = 0
        self._objects: dict[str, tuple[int, int]] = {}
        """Key to descriptor and size in bytes."""
        self._used_bytes = 0
        self._spare: list[tuple[int, int]] = []
        """Memory of removed objects, for new ones of the same size: the kernel need not clear new pages."""
        self._lock = threading.Lock()
        self._used_at_s = time.monotonic()

    def listen(self, link: socket.socket) -> None:
        """Accept connections, each with a thread of its own."""
        while True:
            with suppress(OSError):
                accepted, _ = link.accept()
                threading.Thread(target=self._serve, args=[accepted], daemon=True).start()

    def wait(self) -> None:
        """Return when the server was not used for its time limit, or its socket was removed; it is removed then."""
        while (left_s := self._used_at_s + self._idle_s - time.monotonic()) > 0 and self._is_there():
            time.sleep(min(left_s, _LOOK_S))
        with suppress(OSError):
            os.unlink(self.path.name, dir_fd=self._folder)

    def _is_there(self) -> bool:
        try:
            os.stat(self.path.name, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        return True

    def _serve(self, link: socket.socket) -> None:
        with suppress(OSError, ValueError, AttributeError, TypeError), link:
            link.settimeout(_PROOF_S)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_PROOF_S), 0))
            if link.family == socket.AF_UNIX:
                user = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                if user not in (0, os.getuid()):
                    return
            else:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.greet(link, self._token)
            while True:
                link.settimeout(None)
                asked = wire.receive(link)
                link.settimeout(_PROOF_S)
                self._used_at_s = time.monotonic()
                getattr(self, f"_do_{asked.pop('do')}")(link, **asked)
                self._used_at_s = time.monotonic()

    def _do_hello(self, link: socket.socket) -> None:
        wire.send(link, {"id": self.id, "port": self.port, "limit_bytes": self._limit_bytes})

    def _do_list(self, link: socket.socket, prefix: str) -> None:
        with self._lock:
            found = {key: size for key, (_, size) in self._objects.items() if key.startswith(prefix)}
        wire.send(link, {"found": found})

    def _do_delete(self, link: socket.socket, keys: list[str]) -> None:
        for key in keys:
            self._publish(key, None)
        wire.send(link, {})

    def _do_put(self, link: socket.socket, key: str, size: int) -> None:
        """Take an object: over TCP its content, from a process of this machine the message that it is written."""
        with self._lock:
            free = self._limit_bytes - self._used_bytes
            if size > free:
                wire.send(link, {"full": free})
                return
            self._used_bytes += size
            descriptor = self._taken_spare(size)
        try:
            if descriptor < 0:
                descriptor = os.memfd_create("mizzen", os.MFD_CLOEXEC)
                os.ftruncate(descriptor, size)
                if self._fills and size:
                    os.posix_fallocate(descriptor, 0, size)
            wire.send(link, {})
            if link.family == socket.AF_UNIX:
                socket.send_fds(link, [b"+"], [descriptor])
                link.settimeout(None)  # The client writes; if it dies, the connection is closed.
            elif size:
                with mmap.mmap(descriptor, size) as memory, memoryview(memory) as view:
                    wire.fill(link, view)
            if wire.receive(link).get("done") is not True:
                raise wire.ProtocolError("the object is not complete")
        except BaseException as error:
            with self._lock:
                self._used_bytes -= size
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.ENOSPC):
                wire.send(link, {"full": 0})
                return
            raise
        self._publish(key, (descriptor, size))
        wire.send(link, {})

    def _do_get(self, link: socket.socket, key: str, start: int, end: int) -> None:
        with ExitStack() as stack:
            descriptor, size = self._open(key, stack)
            end = max(start, min(end, size))
            wire.send(link, {"size": -1 if descriptor < 0 else end - start})
            link.settimeout(None)  # `sendfile` needs a blocking socket; SO_SNDTIMEO limits its time.
            while descriptor >= 0 and start < end:
                sent = os.sendfile(link.fileno(), descriptor, start, min(end - start, _SEND_BYTES))
                start += sent
                if not sent:
                    raise wire.ProtocolError("the object has become shorter")

    def _do_open(self, link: socket.socket, key: str) -> None:
        with ExitStack() as stack:
            descriptor, size = self._open(key, stack)
            wire.send(link, {"size": -1 if descriptor < 0 else size})
            if descriptor >= 0:
                socket.send_fds(link, [b"+"], [descriptor])

    def _open(self, key: str, stack: ExitStack) -> tuple[int, int]:
        """Return a descriptor of an object, which stays valid if the object is removed, and its size; -1: none."""
        with self._lock:
            held, size = self._objects.get(key, (-1, 0))
            descriptor = os.dup(held) if held >= 0 else -1
        if descriptor >= 0:
            stack.callback(os.close, descriptor)
        return descriptor, size

    def _publish(self, key: str, new: tuple[int, int] | None) -> None:
        with self._lock:
            old = self._objects.pop(key, None)
            if old is not None:
                self._used_bytes -= old[1]
                self._spare.append(old)
                self._free_spare(self._used_bytes, _SPARE_OBJECTS)
            if new is not None:
                self._objects[key] = new

    def _taken_spare(self, size: int) -> int:
        """Return spare memory of this size, or -1; free other spare memory if there is not enough else."""
        found = next((one for one in self._spare if one[1] == size), None)
        if found is not None:
            self._spare.remove(found)
            return found[0]
        self._free_spare(self._limit_bytes - self._used_bytes, _SPARE_OBJECTS)
        return -1

    def _free_spare(self, most_bytes: int, most: int) -> None:
        """Free the oldest spare memory, so that at most so many bytes and objects are left."""
        while self._spare and (len(self._spare) > most or sum(size for _, size in self._spare) > most_bytes):
            os.close(self._spare.pop(0)[0])


def serve(told: dict[str, Any], *, detach: bool = False) -> _Server | None:
    """Serve from now on, in threads; None: this run already has a server here.

    With `detach`, this process ends when the server answers, and a child continues.

    Args:
        told: `token`, `limit_bytes`, `idle_s`, and `host` and `port` for other machines (None: not for other machines).
            From an agent also `folder`, which has the files `server.lock`, with the pid, and `server.sock`, and `user`,
            the ids of the user and the group whose processes may connect, and as whom the server runs.
        detach: whether to continue in a child.

    Raises:
        OSError: the address cannot be used.
    """
    held = told.get("folder")
    base = Path(held, "server") if held else folder() / name_of(bytes.fromhex(told["token"]))
    lock = os.open(base.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    server = _Server(told, base.with_suffix(".sock"))
    links = []
    if told["host"] is not None:
        try:
            links.append(socket.create_server((told["host"], int(told["port"]))))
        except OSError as error:
            why = (
                f"{told['host']}:{told['port']} cannot be bound: {error.strerror}. Where the training has a network of "
                "its own, use no peers, or set aside tasks.checkpoint_memory"
            )
            raise OSError(error.errno, why) from None
        server.port = links[0].getsockname()[1]
    server.path.unlink(missing_ok=True)
    links.append(socket.socket(socket.AF_UNIX))
    with short_path(server.path) as path:
        links[-1].bind(path)
    if told.get("user"):
        os.chown(server.path, *told["user"])
    links[-1].listen(64)
    if detach:
        ready, starting = os.pipe()
        if os.fork():
            os.close(starting)
            os.read(ready, 1)  # Until the child is ready, or has ended.
            os._exit(0)
        os.close(ready)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        if told.get("user"):
            user, group = told["user"]
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)
        links[-1].listen(64)  # The credentials that clients see are those of this process.
        os.close(starting)
    for link in links:
        threading.Thread(target=server.listen, args=[link], daemon=True).start()
    return server


def main() -> None:
    """Serve as standard input says, in a child, until the server is idle."""
    server = serve(json.load(sys.stdin), detach=True)
    if server is not None:
        server.wait()
