"""Retries, drains, streams, websockets, HTTP/2 and the queue, seen by clients."""

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from bench.balance_api import BalanceApi
from tests.proxies.balance.world import Balancer, Replica, wait_for

Start = Callable[..., Balancer]
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def balancer(api: BalanceApi, replicas: list[Replica], start: Start) -> Balancer:
    """A balancer with two replicas."""
    api.set([replica.entry() for replica in replicas])
    balancer = start()
    balancer.wait_replicas(set(replicas))
    return balancer


def _on_dying(balancer: Balancer, dying: Replica, method: str, body: bytes = b"") -> httpx.Response | None:
    """Sends requests until the replica `dying` has got one, and returns the answer to that one.

    The replica dies after it has read the whole request and before it answers. None: HAProxy closed the client's
    connection without an answer, which it does if its connection to the replica had served a request before.
    """
    with httpx.Client(base_url=balancer.url) as client:
        for _ in range(4):
            answer = None
            with contextlib.suppress(httpx.RemoteProtocolError):
                answer = client.request(method, f"/die-after?port={dying.port}", content=body)
            if dying.has_ended:
                return answer
    raise AssertionError("no request reached the replica")


def _is_answered_by(answer: httpx.Response | None, replica: Replica) -> bool:
    return answer is not None and (answer.status_code, answer.headers["x-replica"]) == (200, str(replica.port))


def _is_failed(answer: httpx.Response | None) -> bool:
    return answer is None or answer.status_code == 502


def test_a_get_whose_replica_dies_is_answered_by_another(balancer: Balancer, replicas: list[Replica]) -> None:
    """The client gets the answer of the other replica."""
    assert _is_answered_by(_on_dying(balancer, replicas[0], "GET"), replicas[1])


def test_a_post_whose_replica_dies_is_not_repeated(
    api: BalanceApi, balancer: Balancer, replicas: list[Replica]
) -> None:
    """The client gets an error, because the replica may have acted on the request. The request counts as failed."""
    assert _is_failed(_on_dying(balancer, replicas[0], "POST", b"x" * 100))
    wait_for("the failure is reported", lambda: api.total("failed") == 1)
    assert api.total("cut") == 0


@pytest.mark.parametrize(("method", "retried"), [("PUT", False), ("POST", True)])
def test_bodies_are_repeated_up_to_the_buffer(
    api: BalanceApi, balancer: Balancer, replicas: list[Replica], method: str, retried: bool
) -> None:
    """8 KiB are sent again; of 1 MiB only a part is in the buffer, so the client gets 502."""
    api.set([replica.entry() for replica in replicas], retry_non_idempotent=retried, request_timeout_s=20)
    permission = f"value=<{int(retried)}>"
    wait_for("HAProxy has the settings", lambda: "<20000>" in balancer.ask("get var proc.timeout_ms"))
    wait_for("HAProxy has the settings", lambda: permission in balancer.ask("get var proc.retries_all"))
    answer = _on_dying(balancer, replicas[0], method, b"x" * 8 * KIB)
    assert _is_answered_by(answer, replicas[1]) and answer is not None and answer.text.startswith(f"{8 * KIB} ")
    replicas[0].start()
    balancer.wait_replicas(set(replicas))
    assert httpx.put(balancer.url, content=b"x" * MIB).text.startswith(f"{MIB} ")
    assert _is_failed(_on_dying(balancer, replicas[0], method, b"x" * MIB))


def test_server_sent_events_arrive_one_by_one(balancer: Balancer) -> None:
    """Each event arrives before the replica sends the next one: the replica waits for the client's request to go on."""
    with httpx.Client(base_url=balancer.url) as client, client.stream("GET", "/events?count=5&steps=1") as answer:
        chunks = answer.iter_raw()
        for number in range(5):
            assert next(chunks) == f"data: {number}\n\n".encode()
            httpx.get(f"http://127.0.0.1:{answer.headers['x-replica']}/step")
        assert next(chunks, None) is None


@pytest.mark.rotating
def test_a_drained_replica_finishes_its_streams(api: BalanceApi, balancer: Balancer, replicas: list[Replica]) -> None:
    """New requests go elsewhere at once; a running stream continues to its end, and then the server is deleted."""
    with httpx.stream("GET", f"{balancer.url}/events?count=30&every_s=0.1") as answer:
        port = answer.headers["x-replica"]
        (streaming,) = [replica for replica in replicas if str(replica.port) == port]
        (other,) = [replica for replica in replicas if replica is not streaming]
        api.set([other.entry()])
        balancer.wait_replicas({other})
        assert sum(chunk.count(b"data") for chunk in answer.iter_raw()) == 30
    wait_for("the server is deleted", lambda: balancer.servers() == {str(other.port)})


def test_streams_are_closed_after_the_drain(api: BalanceApi, balancer: Balancer, replicas: list[Replica]) -> None:
    """A stream that outlasts `drain_s` breaks off, and is counted as cut instead of failed."""
    with httpx.stream("GET", f"{balancer.url}/events?count=1000&every_s=0.1") as answer:
        (other,) = [replica for replica in replicas if str(replica.port) != answer.headers["x-replica"]]
        api.set([other.entry()], drain_s=1)
        with pytest.raises(httpx.RemoteProtocolError):
            list(answer.iter_raw())
    wait_for("the cut is reported", lambda: api.total("cut") == 1)
    assert api.total("failed") == 0


def test_a_stream_whose_replica_dies_is_counted_as_cut(api: BalanceApi, balancer: Balancer) -> None:
    """The client sees that the answer is incomplete."""
    url = f"{balancer.url}/events?count=9&die_at=3&every_s=0.05"
    with httpx.stream("GET", url) as answer, pytest.raises(httpx.RemoteProtocolError):
        list(answer.iter_raw())
    wait_for("the cut is reported", lambda: api.total("cut") == 1)
    assert api.total("failed") == 0


def test_websockets(balancer: Balancer) -> None:
    """A connection is upgraded, and frames pass in both directions."""
    with socket.create_connection(("127.0.0.1", balancer.port), 10) as client:
        client.sendall(
            b"GET /websocket HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        reader = client.makefile("rb")
        assert b" 101 " in reader.readline()
        head = list(iter(reader.readline, b"\r\n"))
        assert any(b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in line for line in head)
        for text in (b"one", b"two"):
            client.sendall(bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text)
            assert reader.read(2 + len(text)) == bytes([0x81, len(text)]) + text


def test_http2_without_tls(balancer: Balancer) -> None:
    """A client that starts with HTTP/2 gets HTTP/2."""
    done = subprocess.run(
        ["curl", "-sS", "--http2-prior-knowledge", "-w", "%{http_version} %{http_code}", balancer.url],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.endswith("2 200"), done.stderr


@pytest.mark.rotating
def test_the_queue_is_bounded(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """While the only replica is busy, `max_queue` requests wait, and further ones get 503 with Retry-After."""
    api.set([replicas[0].entry()], max_queue=2)
    balancer = start("--concurrency", "1")
    balancer.wait_replicas({replicas[0]})
    # One client, because to create one takes long enough for an earlier request to be answered on a busy machine.
    with httpx.Client(timeout=30) as client, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(client.get, f"{balancer.url}/?after_s=1") for _ in range(8)]
        answers = [one.result() for one in asked]
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [503] * 5
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers if answer.status_code == 503)


def test_least_load_uses_the_near_zone_until_it_is_overloaded(
    api: BalanceApi, replicas: list[Replica], start: Start
) -> None:
    """Requests stay in the clients' zone while its replica has fewer than two, then also use the other zone. If the
    near replica dies, the far one answers.
    """
    near, far = replicas
    api.set([near.entry(zone="a"), far.entry(zone="b")], policy="least_load")
    balancer = start("--zone", "east/a", "--overload", "2")
    balancer.wait_replicas({near})

    with httpx.Client(timeout=30) as client, ThreadPoolExecutor(6) as pool:
        answers = pool.map(client.get, [f"{balancer.url}/?after_s=1"] * 6)
        ports = [answer.headers["x-replica"] for answer in answers]
    assert ports.count(str(near.port)) == 3 and ports.count(str(far.port)) == 3
    near.kill()
    balancer.wait_replicas({far})
    near.start()


@pytest.mark.rotating
def test_a_hundred_changes_lose_no_request(api: BalanceApi, replicas: list[Replica], balancer: Balancer) -> None:
    """While replicas are added and removed a hundred times, every request of eight clients is answered."""
    third = Replica(2)
    pool = [*replicas, third]
    over = threading.Event()
    answered = []

    def ask() -> None:
        with httpx.Client(base_url=balancer.url) as client:
            while not over.is_set():
                answered.append(client.post("/?after_s=0.005").status_code)

    clients = [threading.Thread(target=ask) for _ in range(8)]
    for client in clients:
        client.start()
    for number in range(100):
        fetches = api.fetches
        api.set([replica.entry() for replica in pool if replica.number != number % 3], drain_s=5)
        wait_for("the list is fetched", lambda fetches=fetches: api.fetches > fetches)
    over.set()
    for client in clients:
        client.join()
    third.kill()
    assert set(answered) == {200} and len(answered) > 100
    wait_for("all requests are counted", lambda: api.total("requests") >= len(answered))
