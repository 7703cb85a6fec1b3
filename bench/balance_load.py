"""Load for the suite `balance`, in a process of its own: `python -m bench.balance_load REQUESTS|STREAMS ...`.

`requests PORT CONNECTIONS SECONDS` sends one GET after the other on each of the connections, for SECONDS or
until SIGTERM. `streams PORT NUMBER`
opens streams of `bench.balance_replica` at the same time and measures them. Both print one JSON object.
"""

import json
import select
import signal
import socket
import sys
import threading
import time
from statistics import quantiles

_REQUEST = b"GET / HTTP/1.1\r\nHost: chat\r\nAccept: */*\r\nUser-Agent: bench\r\n\r\n"
_STREAM = b"GET /stream HTTP/1.1\r\nHost: chat\r\nConnection: close\r\n\r\n"
_CHUNK_BYTES = 1 << 16


def requests(port: int, connections: int, seconds_s: float) -> dict[str, float]:
    """Returns the numbers of answers with status 200 and of others, and the seconds. A lost connection is reopened."""
    poll = select.epoll()
    opened: dict[int, socket.socket] = {}
    parts: dict[int, bytes] = {}

    def begin() -> None:
        client = socket.create_connection(("127.0.0.1", port), 30)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened[client.fileno()], parts[client.fileno()] = client, b""
        poll.register(client, select.EPOLLIN)
        client.sendall(_REQUEST)

    for _ in range(connections):
        begin()
    answered = lost = 0
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: over.set())
    start_s = time.perf_counter()
    while not over.is_set() and time.perf_counter() - start_s < seconds_s:
        for descriptor, _ in poll.poll(1.0):
            client = opened[descriptor]
            try:
                got = client.recv(_CHUNK_BYTES)
            except ConnectionError:
                got = b""
            text = parts[descriptor] = parts[descriptor] + got
            if not got:
                lost += 1
                poll.unregister(client)
                client.close()
                del opened[descriptor], parts[descriptor]
                begin()
            elif _is_complete(text):
                answered += text.startswith(b"HTTP/1.1 200 ")
                lost += not text.startswith(b"HTTP/1.1 200 ")
                parts[descriptor] = b""
                client.sendall(_REQUEST)
    return {"answered": answered, "lost": lost, "seconds": time.perf_counter() - start_s}


def _is_complete(text: bytes) -> bool:
    head, blank, body = text.partition(b"\r\n\r\n")
    if not blank:
        return False
    _, _, length = head.lower().partition(b"content-length:")
    return len(body) >= int(length.split(b"\r\n", 1)[0])


def streams(port: int, number: int) -> dict[str, float]:
    """Returns the time to the first byte, and the lag of chunks behind the time at which the replica sent them."""
    poll = select.epoll()
    opened: dict[int, tuple[socket.socket, float]] = {}
    rest: dict[int, bytes] = {}
    first_s: list[float] = []
    lag_s: list[float] = []
    for _ in range(number):
        client = socket.create_connection(("127.0.0.1", port), 30)
        poll.register(client, select.EPOLLIN)
        opened[client.fileno()], rest[client.fileno()] = (client, time.monotonic()), b""
        client.sendall(_STREAM)
    while opened:
        for descriptor, _ in poll.poll(10.0):
            client, began_s = opened[descriptor]
            got = client.recv(_CHUNK_BYTES)
            now_s = time.monotonic()
            if not got:
                poll.unregister(client)
                client.close()
                del opened[descriptor]
                continue
            if not rest[descriptor]:
                first_s.append(now_s - began_s)
            *lines, rest[descriptor] = (rest[descriptor] + got).split(b"\n")
            lag_s += [now_s - float(line.removeprefix(b"sent ")) for line in lines if line.startswith(b"sent ")]
            rest[descriptor] = rest[descriptor] or b"\r"
    return {
        "streams": len(first_s), "chunks": len(lag_s),
        "first_byte_p50_s": quantiles(first_s, n=100)[49], "first_byte_p99_s": quantiles(first_s, n=100)[98],
        "lag_p50_s": quantiles(lag_s, n=100)[49], "lag_p99_s": quantiles(lag_s, n=100)[98],
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "requests":
        print(json.dumps(requests(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
    else:
        print(json.dumps(streams(int(sys.argv[2]), int(sys.argv[3]))))
