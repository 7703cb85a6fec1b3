"""A relay in front of an API server, whose connections can be cut."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.kubernetes.cluster import KubernetesCluster


class Relay:
    """Accepts connections on a port of its own, and copies what they send and get."""

    def __init__(self, port: int) -> None:
        """`port`: of the server."""
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Cuts all connections; returns their number."""
        with self._lock:
            cut, self._open = self._open, set()
        for one in cut:
            _shut(one)
        return len(cut) // 2

    def close(self) -> None:
        """Accepts no more connections, and cuts all."""
        _shut(self._listener)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._server)) as far:
            with self._lock:
                self._open |= {near, far}
            back = threading.Thread(target=_copy, args=(far, near), daemon=True)
            back.start()
            _copy(near, far)
            back.join()
            with self._lock:
                self._open -= {near, far}


def _copy(of: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := of.recv(65536):
            to.sendall(data)
    for one in (of, to):
        _shut(one)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relay(there: KubernetesCluster) -> Iterator[tuple[Relay, Path]]:
    """Yields a relay in front of a cluster's API server, and a kubeconfig that uses it."""
    made = Relay(there.port)
    try:
        yield made, there.kubeconfig_at(f"https://127.0.0.1:{made.port}")
    finally:
        made.close()
