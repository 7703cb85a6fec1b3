"""`MemoryStore`: a checkpoint root whose parts are in the memory of machines, and whose records are in the bucket.

The parts of each save go to the server of this machine and to one peer; they are read from any server of the run. The
records of the log, which fence and commit, are in the bucket below `memory/`. So all processes of a gang see the same
checkpoints, and a server that lost its content, or has another one, cannot make up a checkpoint: its parts are missing
or differ from their checksums.

Below `memory/` are also `token`, which the servers of the run demand, and `servers/`, their addresses. Who may read the
bucket may read the checkpoints anyway. If the root is removed, a new one has another token, so other servers.

While parts are read, a failing server counts as one that does not have the part.
"""

import json
import mmap
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.environment import local_path
from mizzen.memory.connection import MemoryServer, held_folder, remote_server, start
from mizzen.objects.disk import read
from mizzen.objects.store import (
    Body,
    Fetch,
    MissingObject,
    ObjectInfo,
    ObjectStore,
    chunks_of,
)
from mizzen.objects.workers import Workers

FOLDER = "memory/"
_PARTS = "parts/"
_SERVERS = f"{FOLDER}servers/"
_FORGET_S = 24 * 3600.0
"""The address of a server that does not answer is removed if it was published so long ago."""
_FIRST_LOOK_S, _LOOK_S = 1.0, 30.0
"""If there is no peer, the list of servers is read again after the first of these times, later after the second; a
server that could not be started is started again after the second."""


def token_of(bucket: ObjectStore) -> bytes:
    """Return the token of the run; create it if the root has none.

    Raises:
        ValueError: the stored token is malformed.
        Exception: an error of the store.
    """
    key = f"{FOLDER}token"
    try:
        found = bucket.get(key)
    except MissingObject:
        bucket.create(key, os.urandom(32).hex().encode())
        if bucket.is_local:
            local_path(bucket.uri(key)).chmod(0o600)
        found = bucket.get(key)
    token = bytes.fromhex(found.decode())
    if len(token) != 32:
        raise ValueError(f"{bucket.uri(key)}: must be 64 hexadecimal digits")
    return token


def host_of_environ() -> str:
    """Return the address of this machine, for its peers: the scheduler's, or the one of its route to the network."""
    told = os.environ.get("MIZZEN_TASK_ADDRS", "").split()
    rank = os.environ.get("RANK", "0")
    if rank.isdigit() and int(rank) < len(told):
        return told[int(rank)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link, suppress(OSError):
        link.connect(("192.0.2.1", 9))  # Sends nothing; it only chooses the route.
        return str(link.getsockname()[0])
    return "127.0.0.1"


def memory_of_machine() -> int:
    """Return the memory that this process may use at most, in bytes: of the machine, or of its container."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            found.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(found)


class MemoryStore(ObjectStore):
    """The store of the memory tier of one process. Thread-safe."""

    is_volatile = True

    def __init__(self, bucket: ObjectStore, token: bytes, own: Callable[[], MemoryServer], host: str | None) -> None:
        """`own` returns the server of this machine, and starts it if needed; `host`: its address; None: no peers."""
        self.has_peer = False
        """Whether a peer has taken all parts since this was last set to True."""
        self.is_local = False
        self._bucket, self._token, self._host = bucket, token, host
        self._start, self._own = own, _none()
        self._others: dict[str, MemoryServer] = {}
        self._peer: MemoryServer | None = None
        self._told: set[str] = set()
        self._look_after_s = self._start_after_s = 0.0
        self._pause_s = _FIRST_LOOK_S
        self._starting, self._looking, self._filling = threading.Lock(), threading.Lock(), threading.Lock()
        self._filled = ""
        """The id of the peer that has all parts of this machine."""
        self._start_own()
        self._look()

    def _start_own(self) -> None:
        """Start the server of this machine, or connect to it, and publish its address."""
        self._start_after_s = time.monotonic() + _LOOK_S
        try:
            self._own = self._start()
            self._start_after_s = 0.0
            self.is_local = bool(self._own.ask("list", prefix=_PARTS)["found"])
        except OSError as error:
            self._tell(str(error))
            return
        if self._host is not None and self._own.port:
            address = {"host": self._host, "port": self._own.port, "at_s": round(time.time())}
            address["machine"] = os.environ.get("MIZZEN_MACHINE", "")
            self._published(f"{_SERVERS}{self._own.id}.json", json.dumps(address).encode())

    def _published(self, key: str, address: bytes) -> None:
        try:
            if self._bucket.size(key) is None:
                self._bucket.put(key, address)
        except Exception as error:
            self._tell(f"{self._bucket.uri(key)}: the address of the memory server was not published: {error}")

    def _look(self) -> None:
        """Read the addresses of the other machines, and choose a peer. Forget servers that have ended."""
        if self._host is None or not self._looking.acquire(blocking=False):
            return
        try:
            listed = {info.key[len(_SERVERS) :].removesuffix(".json"): info.key for info in self._bucket.list(_SERVERS)}
            known = {name: server for name, server in self._others.items() if name in listed}
            new = [one for one in listed.items() if one[0] not in known and one[0] != self._own.id]
            with Workers(8) as workers:
                asked = [workers.submit(self._reached, *one) for one in new]
                found = [server for one in asked if (server := one.result()) is not None]
            self._others = known | {server.id: server for server in found}
        except Exception as error:  # Every client library has its own exception types.
            self._tell(f"{self._bucket.uri(_SERVERS)}: the addresses of memory servers cannot be read: {error}")
        finally:
            self._look_after_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LOOK_S)
            self._looking.release()
        names = sorted(name for name, server in self._others.items() if not server.is_away)
        after = [name for name in names if name > self._own.id]
        wanted = os.environ.get("MIZZEN_MEMORY_PEER")
        told = [name for name in names if wanted and self._others[name].machine == wanted]
        self._peer = self._others[(told or after or names)[0]] if names else None

    def _reached(self, name: str, key: str) -> MemoryServer | None:
        """Return the server with an address; None, and remove the address, if there is no such server any more."""
        try:
            told = json.loads(self._bucket.get(key))
            server = remote_server(str(told["host"]), int(told["port"]), self._token)
        except MissingObject:
            return None  # Another process has just removed it.
        except (ValueError, TypeError, KeyError) as error:
            self._tell(f"{self._bucket.uri(key)}: not the address of a memory server: {error!r}")
            return None
        try:
            server.greet()
            gone = server.id != name
        except OSError as error:
            gone = isinstance(error.__cause__, ConnectionRefusedError) or time.time() > told["at_s"] + _FORGET_S
        if gone:
            self._bucket.delete(key)
            return None
        server.id, server.machine = name, str(told.get("machine", ""))
        return server

    def _servers(self) -> list[MemoryServer]:
        return [server for server in (self._own, *self._others.values()) if not server.is_away]

    def put(self, key: str, body: Body) -> None:
        """Store an object in the memory of this machine and of the peer; see `ObjectStore.put`.

        Raises:
            OSError: no server took it.
        """
        if not key.startswith(_PARTS):
            self._bucket.put(FOLDER + key, body)
            return
        chunks = chunks_of(body.read_bytes() if isinstance(body, Path) else body)
        if (self._peer is None or self._peer.is_away) and time.monotonic() > self._look_after_s:
            self._look()
        peer = self._peer if self._peer is not None and not self._peer.is_away else None
        if peer is not None and not self._has_filled(peer):
            self.has_peer, peer = False, None
        if peer is None:
            failed = [self._put_own(key, chunks)]
        else:
            with Workers(1) as workers:
                sent = workers.submit(self._put_peer, peer, key, chunks)
                failed = [self._put_own(key, chunks), sent.result()]
        self.has_peer &= failed[1:] == [None]
        errors = [error for error in failed if error is not None]
        if len(errors) == len(failed):
            raise errors[0]
        for error in errors:
            self._tell(f"{self.uri('')}: parts are stored only once: {error}")

    def _has_filled(self, peer: MemoryServer) -> bool:
        """Copy the parts that this machine holds to a new peer; return whether the peer has them.

        A checkpoint may refer to unchanged parts of earlier ones.
        """
        with self._filling:
            if peer.id == self._filled:
                return True
            try:
                theirs = peer.ask("list", prefix=_PARTS)["found"]
                for key, size in self._own.ask("list", prefix=_PARTS)["found"].items():
                    if key not in theirs and size and (descriptor := self._own.open(key)) is not None:
                        try:
                            with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
                                peer.put(key, [view])
                        finally:
                            os.close(descriptor)
            except OSError as error:
                self._tell(f"{self.uri('')}: parts are stored only once: {error}")
                return False
            self._filled = peer.id
            return True

    def _put_own(self, key: str, chunks: Sequence[memoryview]) -> OSError | None:
        for again in (False, True):
            try:
                self._own.put(key, chunks)
                self.is_local = True
                return None
            except OSError as error:
                if again or error.errno is not None or isinstance(error, TimeoutError):
                    return error
                failed = error
            with self._starting:
                if time.monotonic() < self._start_after_s:
                    return failed
                self._start_own()  # It has ended.
        raise AssertionError("unreachable")

    @staticmethod
    def _put_peer(peer: MemoryServer, key: str, chunks: Sequence[memoryview]) -> OSError | None:
        try:
            peer.put(key, chunks)
        except OSError as error:
            return error
        return None

    def create(self, key: str, body: bytes) -> bool:
        """Create a record in the bucket; see `ObjectStore.create`."""
        return self._bucket.create(FOLDER + key, body)

    def get(self, key: str) -> bytes:
        """Return an object's content; see `ObjectStore.get`."""
        if not key.startswith(_PARTS):
            return self._bucket.get(FOLDER + key)
        size = self.size(key)
        if size is None:
            raise self._missing(key)
        return self.get_range(key, 0, size)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return a range of a part; see `ObjectStore.get_range`."""
        body = bytearray(end - start)
        with self.opened(key) as fetch:
            return bytes(body[: fetch(memoryview(body), start)])

    @contextmanager
    def opened(self, key: str) -> Iterator[Fetch]:
        """Open a part for reading in pieces; see `ObjectStore.opened`."""
        with ExitStack() as stack:
            descriptor = None
            with suppress(OSError):
                descriptor = self._own.open(key)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                yield lambda into, start: read(descriptor, into, start)
                return
            holders = [server for server in self._servers() if server is not self._own]

            def fetch(into: memoryview, start: int) -> int:
                for server in list(holders):
                    with suppress(OSError):
                        count = server.get(key, into, start)
                        if count is not None:
                            return count
                    with suppress(ValueError):
                        holders.remove(server)
                raise self._missing(key)

            yield fetch

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """List objects by prefix; see `ObjectStore.list`. Parts are those of all servers that answer."""
        if prefix.startswith(_PARTS):
            found = self._sizes(prefix)
            yield from (ObjectInfo(key, found[key], "") for key in sorted(found) if key > after)
            return
        for info in self._bucket.list(FOLDER + prefix, after=after and FOLDER + after):
            yield info._replace(key=info.key.removeprefix(FOLDER))

    def _sizes(self, prefix: str) -> dict[str, int]:
        def ask(server: MemoryServer) -> dict[str, int]:
            with suppress(OSError):
                return {str(key): int(size) for key, size in server.ask("list", prefix=prefix)["found"].items()}
            return {}

        servers = self._servers()
        if len(servers) == 1:
            return ask(servers[0])
        with Workers(8) as workers:
            asked = [workers.submit(ask, server) for server in servers]
            return {key: size for one in asked for key, size in one.result().items()}

    def stat(self, key: str) -> ObjectInfo | None:
        """Return the size of an object; see `ObjectStore.stat`."""
        if not key.startswith(_PARTS):
            return self._bucket.stat(FOLDER + key)
        size = self._sizes(key).get(key)
        return None if size is None else ObjectInfo(key, size, "")

    def stat_all(self, keys: Sequence[str]) -> dict[str, ObjectInfo | None]:
        """Return nothing: `stat` is used; see `ObjectStore.stat_all`."""
        return {}

    def delete(self, key: str) -> None:
        """Remove an object from all servers; see `ObjectStore.delete`. A server that is away removes it later."""
        if not key.startswith(_PARTS):
            self._bucket.delete(FOLDER + key)
            return
        for server in (self._own, *self._others.values()):
            with suppress(OSError):
                server.delete([key])

    def uri(self, key: str) -> str:
        """Return the URI of an object; see `ObjectStore.uri`."""
        return f"memory+{self._bucket.uri(key)}"

    def forget(self, key: str) -> None:
        """Do nothing: parts are not in the page cache."""

    def tidy(self) -> None:
        """Do nothing: there are no temporary files."""

    def _missing(self, key: str) -> MissingObject:
        return MissingObject(f"no memory server has {key!r} of {self._bucket.uri('')}")

    def _tell(self, message: str) -> None:
        """Warn, once for each kind of message."""
        kind, _, _ = message.partition(": ")
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(message, CheckpointWarning, stacklevel=2)


def _none() -> MemoryServer:
    """Return a server that never answers, for a machine on which none could be started."""

    def connect() -> socket.socket:
        raise ConnectionRefusedError("no memory server runs on this machine")

    return MemoryServer(connect, b"", "the memory server of this machine")


def open_memory(
    bucket: ObjectStore,
    *,
    limit_bytes: int | None,
    idle_s: float,
    address: str | None,
    start: Callable[[dict[str, Any]], MemoryServer] = start,
) -> MemoryStore:
    """Open the memory tier of a root; start the server of this machine if there is none. Its errors are warnings.

    Args:
        bucket: the root.
        limit_bytes: memory limit of the server; None: a quarter of the machine's or container's memory, or what the
            agent of mizzen grants.
        idle_s: the server ends if it is not used for so long.
        address: `host` or `host:port` at which other machines reach the server; None: there are no other machines.
        start: starts the server; see `connection.start`.
    """
    host, _, port = (address or "").partition(":")
    token, why = b"", ""
    try:
        token = token_of(bucket)
    except Exception as error:  # Every client library has its own exception types.
        why = f"{bucket.uri(FOLDER)}: the token cannot be read: {error}"

    def own() -> MemoryServer:
        if why:
            raise OSError(why)
        limit = memory_of_machine() // 4 if limit_bytes is None and held_folder() is None else limit_bytes
        about = {"limit_bytes": limit, "idle_s": idle_s, "host": host or None, "port": int(port or 0)}
        return start({"token": token.hex(), **about})

    return MemoryStore(bucket, token, own, host or None)
