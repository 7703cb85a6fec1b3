"""Requests reach exactly the replicas that the API lists, through every kind of restart."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from bench.balance_api import BalanceApi
from infra.stack.ports import free_port
from tests.proxies.balance.world import Balancer, Replica, running, wait_for

Start = Callable[..., Balancer]


def test_replicas_come_and_go_without_a_restart_of_haproxy(
    api: BalanceApi, replicas: list[Replica], start: Start
) -> None:
    """Replicas of the list get requests in turn; changes take effect without another HAProxy process."""
    first, second = replicas
    api.set([first.entry()])
    balancer = start()
    balancer.wait_replicas({first})
    haproxy = balancer.haproxy()
    api.set([first.entry(), second.entry()])
    balancer.wait_replicas({first, second})
    assert "chat: version 2, ready replicas: 2\n" in balancer.log.read_text()
    with httpx.Client() as client:
        ports = [client.get(balancer.url).headers["x-replica"] for _ in range(20)]
    assert ports.count(str(first.port)) == ports.count(str(second.port)) == 10
    api.set([first.entry(state="draining"), second.entry()])
    balancer.wait_replicas({second})
    api.set([first.entry()])
    balancer.wait_replicas({first})
    assert balancer.haproxy() == haproxy != 0


def test_a_killed_haproxy_is_replaced_while_connections_wait(
    api: BalanceApi, replicas: list[Replica], start: Start
) -> None:
    """The listening socket stays open: no new connection is refused, and the new HAProxy has all replicas at once."""
    api.set([replica.entry() for replica in replicas])
    balancer = start()
    balancer.wait_replicas(set(replicas))
    for _ in range(5):
        before = balancer.haproxy()
        os.kill(before, signal.SIGKILL)
        wait_for("the kernel has ended HAProxy", lambda before=before: balancer.haproxy() != before)
        # Each on a connection of its own. One that is refused would raise an error.
        answers = [httpx.get(balancer.url) for _ in range(4)]
        assert {answer.headers["x-replica"] for answer in answers} == {str(replica.port) for replica in replicas}
    # Changes reach the new process too.
    api.set([replicas[0].entry()])
    balancer.wait_replicas({replicas[0]})


def test_a_haproxy_that_dies_during_its_start_is_replaced(
    api: BalanceApi, replicas: list[Replica], start: Start
) -> None:
    """It is killed at its first answer, while the balancer still sets it up. The balancer goes on."""
    api.set([replicas[0].entry()])
    balancer = start()
    killed = 0
    for _ in range(5):
        wait_for("HAProxy answers", lambda: balancer.haproxy() not in (0, killed) and balancer.ask("show version"))
        os.kill(killed := balancer.haproxy(), signal.SIGKILL)
    balancer.wait_replicas({replicas[0]})


def test_haproxy_ends_with_its_supervisor_and_the_next_starts_from_the_disk(
    api: BalanceApi, replicas: list[Replica], start: Start, tmp_path: Path
) -> None:
    """After SIGKILL no HAProxy keeps the port; a new balancer serves at once although the API is away."""
    api.set([replica.entry() for replica in replicas])
    balancer = start()
    balancer.wait_replicas(set(replicas))
    orphan = balancer.haproxy()
    balancer.stop(signal.SIGKILL)
    wait_for("HAProxy ends", lambda: not Path(f"/proc/{orphan}").exists())
    api.stop()
    balancer.start()
    balancer.wait_replicas(set(replicas))


def test_an_error_of_the_api_is_not_an_empty_list(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """While the API answers with errors the last list stays. An empty list removes all replicas."""
    api.set([replica.entry() for replica in replicas])
    balancer = start()
    balancer.wait_replicas(set(replicas))
    api.fails = True
    fetches = api.fetches
    api.set([])
    wait_for("the list is fetched again", lambda: api.fetches > fetches)
    balancer.wait_replicas(set(replicas))
    kept = "chat: the last list of replicas stays: the API answers 500: broken\n"
    wait_for("the log names the error", lambda: kept in balancer.log.read_text())
    api.fails = False
    api.set([])
    answer = wait_for("no replica is left", lambda: (got := httpx.get(balancer.url)).status_code == 503 and got)
    assert int(answer.headers["retry-after"]) > 0 and "no replica" in answer.text


def test_an_invalid_list_is_ignored_and_named(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """A list with an invalid field leaves the last list in place. The log names the field, its value and its form."""
    api.set([replicas[0].entry()])
    balancer = start()
    balancer.wait_replicas({replicas[0]})
    api.set([replicas[1].entry(), replicas[0].entry(address="10.0.0.1 weight 256")])
    said = "endpoints[1]: address: must be an IP address or a host name, it is '10.0.0.1 weight 256'"
    wait_for("the error is logged", lambda: said in balancer.log.read_text())
    balancer.wait_replicas({replicas[0]})


@pytest.mark.rotating
def test_a_change_without_an_event_is_found(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """The list is also fetched at an interval, and after the event stream was lost."""
    api.set([replicas[0].entry()])
    balancer = start()
    balancer.wait_replicas({replicas[0]})
    api.set([replicas[1].entry()], event=False)
    balancer.wait_replicas({replicas[1]})
    api.stop()
    api.set([replicas[0].entry()], event=False)
    api.start()
    balancer.wait_replicas({replicas[0]})


def test_the_policy_changes_while_haproxy_runs(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """Another policy and other settings of the service take effect without another HAProxy process."""
    entries = [replica.entry() for replica in replicas]
    api.set(entries)
    balancer = start()
    balancer.wait_replicas(set(replicas))
    haproxy = balancer.haproxy()
    for policy in ("least_connections", "least_load", "round_robin"):
        api.set(entries, policy=policy, drain_s=0)
        wait_for("the list is stored", lambda policy=policy: balancer.stored()["policy"] == policy)
        balancer.wait_replicas(set(replicas))
    api.set(entries, request_timeout_s=0.2)
    wait_for("the timeout holds", lambda: httpx.get(f"{balancer.url}/?after_s=2").status_code == 504)
    assert balancer.haproxy() == haproxy


def test_a_dead_replica_is_skipped_before_the_api_says_so(
    api: BalanceApi, replicas: list[Replica], start: Start
) -> None:
    """No request fails when a replica is killed between requests, and its return is noticed."""
    api.set([replica.entry() for replica in replicas])
    balancer = start()
    balancer.wait_replicas(set(replicas))
    replicas[0].kill()
    with httpx.Client() as client:
        answers = [client.post(balancer.url) for _ in range(50)]
    assert {(answer.status_code, answer.headers["x-replica"]) for answer in answers} == {(200, str(replicas[1].port))}
    replicas[0].start()
    balancer.wait_replicas(set(replicas))


def test_services_are_independent(api: BalanceApi, replicas: list[Replica], tmp_path: Path) -> None:
    """Each service has its own address, list and HAProxy; when one HAProxy is killed, the others go on."""
    first, second = replicas
    ports = {"chat": free_port(), "search": free_port()}
    api.set([first.entry()], "chat")
    api.set([second.entry()], "search")
    with running(Balancer(api, tmp_path / "data", services=ports)) as balancer:
        chat, search = (f"http://127.0.0.1:{port}" for port in ports.values())
        balancer.wait_replicas({first}, chat)
        balancer.wait_replicas({second}, search)
        with httpx.stream("GET", f"{search}/events?count=2&steps=1") as answer:
            os.kill(balancer.haproxy_of("chat"), signal.SIGKILL)
            balancer.wait_replicas({first}, chat)
            for _ in range(2):
                httpx.get(f"http://127.0.0.1:{second.port}/step")
            assert sum(chunk.count(b"data") for chunk in answer.iter_raw()) == 2


def test_a_folder_belongs_to_one_balancer(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """A second balancer with the same folder ends with an error, and the first is not disturbed."""
    api.set([replicas[0].entry()])
    balancer = start()
    balancer.wait_replicas({replicas[0]})
    haproxy = balancer.haproxy()
    done = balancer.run_with("--service", f"chat=127.0.0.1:{free_port()}")
    assert done.returncode == 6 and "is used by another balancer" in done.stderr
    balancer.wait_replicas({replicas[0]})
    assert balancer.haproxy() == haproxy


def test_checks_do_not_reset_their_connections(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """The checks of a replica close their connections in order: many servers log an error for each reset."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30.0)
        api.set([replicas[0].entry(port=server.getsockname()[1])])
        start()
        for _ in range(3):
            connection, _address = server.accept()
            with connection:
                assert connection.recv(1) == b""
