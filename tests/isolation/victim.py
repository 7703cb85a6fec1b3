"""The task of another tenant that is attacked: it shares all that a careless program would, and waits.

`victim.py NAME PORT KEY` serves on PORT and on the abstract socket NAME, and writes NAME in `/dev/shm` and `/tmp` and a
System V segment KEY, semaphores and a message queue, all of which every user may read.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path
from threading import Thread

_libc = ctypes.CDLL(None, use_errno=True)
_IPC_RMID = 0


def serve(listening: socket.socket) -> None:
    """Answers each connection with a secret."""
    while True:
        with contextlib.suppress(OSError), listening.accept()[0] as client:
            client.sendall(b"secret")


def main() -> None:
    """Shares everything, and sleeps."""
    name, port, key = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    Path("private.txt").write_text("mine")
    checkpoint = os.environ["MIZZEN_CHECKPOINT_URI"].removeprefix("file://")
    Path(checkpoint).mkdir(parents=True, exist_ok=True)
    os.umask(0)
    files = [Path(folder, name) for folder in ("/dev/shm", "/tmp")]
    for file in files:
        file.write_text("secret")
    segment, semaphores = _libc.shmget(key, 4096, 0o1666), _libc.semget(key, 1, 0o1666)
    assert segment >= 0 and semaphores >= 0
    queue = f"/{name}".encode()
    assert _libc.mq_open(queue, os.O_RDWR | os.O_CREAT, 0o666, None) >= 0
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0" + name)
    abstract.listen()
    Thread(target=serve, args=(abstract,), daemon=True).start()
    Thread(target=serve, args=(socket.create_server(("127.0.0.1", port)),), daemon=True).start()
    # Where tasks share the machine's IPC namespace, all of this outlives them; a user may have ten queues.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    Path("ready").touch()
    try:
        time.sleep(600)
    finally:
        _libc.shmctl(segment, _IPC_RMID, None)
        _libc.semctl(semaphores, 0, _IPC_RMID)
        _libc.mq_unlink(queue)
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()


if __name__ == "__main__":
    main()
