"""Counts of requests in the API, metrics, and the reading of HAProxy's log."""

import asyncio
import os
from collections.abc import Callable

import httpx
import pytest

from bench.balance_api import BalanceApi
from infra.stack.ports import free_port
from mizzen_client.transport import tls_context
from proxies.balance.api_client import Api as BalancerApi
from proxies.balance.counts import Counters, RequestCounter, Rows, Second, read_rows
from proxies.balance.reports import Reports, Seconds
from tests.proxies.balance.world import Balancer, Replica, wait_for

Start = Callable[..., Balancer]


@pytest.mark.rotating
def test_counts_are_exact_across_an_outage_of_the_api(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """Requests, failures and answers are counted once, also those that were made while the API was away."""
    api.set([replica.entry() for replica in replicas])
    balancer = start()
    balancer.wait_replicas(set(replicas))
    wait_for("the first requests are counted", lambda: api.total("requests") == 5)
    with httpx.Client(base_url=balancer.url) as client:
        for number in range(300):
            client.get("/?status=500 Broken" if number % 10 == 0 else "/")
        wait_for("the requests are counted", lambda: api.total("requests") == 305 and api.total("failed") == 30)
        api.stop()
        for _ in range(200):
            client.get("/")
        with api.lock:
            missing = api.total("requests") == 305
        assert missing
        api.start()
    wait_for("the requests of the outage are counted", lambda: api.total("requests") == 505)
    assert (api.total("failed"), api.total("cut")) == (30, 0)
    assert len({name for _, name, _ in api.counts}) == 1
    timed = [one for one in api.counts.values() if one["requests"] > 50]
    assert timed and all(0 <= one["p50_s"] <= one["p99_s"] < 10 for one in timed)


def test_a_stream_is_counted_when_it_begins(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """The autoscaler sees a request that is still running. A client that leaves its stream is not a cut stream."""
    api.set([replicas[0].entry()])
    balancer = start()
    balancer.wait_replicas({replicas[0]})
    with httpx.stream("GET", f"{balancer.url}/events?count=1000&every_s=0.05"):
        wait_for("the request is counted", lambda: api.total("requests") == 4)
    assert balancer.stop() == 0
    assert api.total("requests") == 4
    assert (api.total("failed"), api.total("cut")) == (0, 0)


@pytest.mark.rotating
def test_requests_in_progress_are_reported_by_replica(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """Also of a replica that drains; once its server is deleted, it is no longer reported."""
    first, second = replicas
    api.set([first.entry()])
    balancer = start()
    balancer.wait_replicas({first})

    def said(number: int) -> tuple[int, bool] | None:
        listed = api.now.get("chat", {"replicas": []})["replicas"]
        return next(((one["ongoing"], one["drained"]) for one in listed if one["replica"] == number), None)

    with httpx.stream("GET", f"{balancer.url}/events?count=1000&every_s=0.05"):
        wait_for("the stream is reported", lambda: said(first.number) == (1, False))
        api.set([second.entry()])
        wait_for("the drain is reported", lambda: said(first.number) == (1, True))
    wait_for("it is idle", lambda: said(first.number) is None and said(second.number) == (0, False))


def test_the_last_counts_are_sent_at_the_stop(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """SIGTERM lets running requests finish, and reports them."""
    api.set([replicas[0].entry()])
    balancer = start()
    balancer.wait_replicas({replicas[0]})
    with httpx.stream("GET", f"{balancer.url}/events?count=10&every_s=0.1") as answer:
        assert balancer.process is not None
        balancer.process.terminate()
        assert sum(chunk.count(b"data") for chunk in answer.iter_raw()) == 10
    assert balancer.process.wait(30) == 0
    assert api.total("requests") == 4 and api.total("failed") == 0


def test_metrics(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """The metrics count requests, failures and times, and show the state of the balancer."""
    port = free_port()
    api.set([replica.entry() for replica in replicas])
    balancer = start("--metrics", f"127.0.0.1:{port}")
    balancer.wait_replicas(set(replicas))
    httpx.get(f"{balancer.url}/?status=503 Busy")

    def read() -> str:
        return httpx.get(f"http://127.0.0.1:{port}/metrics").text

    wait_for("the requests are counted", lambda: 'mizzen_balancer_requests_total{service="chat"} 6.0' in read())
    text = read()
    for line in (
        'mizzen_balancer_requests_failed_total{service="chat"} 1.0',
        'mizzen_balancer_streams_cut_total{service="chat"} 0.0',
        'mizzen_balancer_request_seconds_count{service="chat"} 5.0',
        'mizzen_balancer_haproxy_up{service="chat"} 1.0',
        'mizzen_balancer_replicas{service="chat",state="ready"} 2.0',
    ):
        assert line in text


@pytest.mark.rotating
def test_a_refusal_is_logged_once(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """Counts with a wrong clock are refused each second. The log has the reason once, and again when it changes."""
    api.refuses = "seconds[0].second: {second} is in the future"
    api.set([replicas[0].entry()])
    balancer = start()
    balancer.wait_replicas({replicas[0]})

    def refused(times: int) -> None:
        wanted = api.refusals + times

        def is_so() -> bool:
            httpx.get(balancer.url)
            return api.refusals >= wanted

        wait_for(f"the API has refused {times} reports", is_so)

    refused(3)
    api.refuses = "balancer: {second} is too long"
    refused(2)
    logged = [line for line in balancer.log.read_text().splitlines() if "refused counts" in line]
    assert ["future" in line for line in logged] == [True, False]


def test_seconds_after_the_clock_was_set() -> None:
    """No second is returned twice. After a clock that was far ahead, the seconds go on from the right time at once."""
    seconds = Seconds(1000.5)
    assert [seconds.over(at_s) for at_s in (1001.0, 1002.0, 1002.9, 1003.1)] == [None, 1001, None, 1002]
    assert [seconds.over(at_s) for at_s in (993.0, 1003.5, 1004.0)] == [None, None, 1003]
    a_year = 365 * 86400
    assert seconds.over(1005.0 + a_year) == 1004 + a_year
    assert [seconds.over(at_s) for at_s in (1006.0, 1006.5, 1007.0)] == [1005, None, 1006]
    assert (seconds.last(1007.5), seconds.last(1007.5)) == (1007, 1008)


def test_counts_of_a_clock_that_was_ahead_do_not_block_later_ones(api: BalanceApi) -> None:
    """Counts from before the clock was set back are dropped, because the API refuses them; later ones are sent."""

    async def report() -> int:
        client = BalancerApi(api.url, None, tls_context("http", None))
        reports = Reports(client, "chat", "b1")
        for second in (90_000, 90_001, 1_000, 1_001):
            reports.add(Second(second, 5, 0, 0, None, None))
        async with asyncio.timeout(20):
            await reports.send()
        await client.close()
        return len(reports)

    assert asyncio.run(report()) == 0
    assert {second for _, _, second in api.counts} == {1_000, 1_001}


def test_lines_of_the_log_are_classified() -> None:
    """A client that gives up is neither a failure nor a cut stream. A line may arrive in two parts."""
    counts = RequestCounter()
    lines = (
        b"200 -- 7 0 - 1 5\n404 -- 3 0 1 2 2\n101 -- 9 0 - 1 8\n502 SH 1 +2 - 1 -1\n-1 CR 1 0 - 1 -1\n"
        b"200 CD 1 0 - 1 1\n200 SD 1 0 - 1 1\n200 sD 1 0 - 1 1\n504 sH 1 0 - 1 -1\n"
    )
    os.write(counts.log, lines[:14])
    counts.read()
    os.write(counts.log, lines[14:] + b"a message of HAProxy itself\n")
    counts.read()
    counts.add(9, 1)
    second = counts.close(5)
    assert (second.requests, second.failed, second.cut) == (9, 3, 2)
    assert (second.p50_s, second.p99_s) == (0.003, 0.007)
    assert counts.totals.retries == 2 and counts.totals.answered == 2
    assert counts.take_first_bytes() == {"1": [0.005], "2": [0.002]} and counts.take_first_bytes() == {}
    assert counts.close(6).is_empty


def test_requests_without_an_answer_are_counted_after_two_readings() -> None:
    """Requests that are neither running nor answered count as failed, once they are so in two readings."""

    def row(requests: int, answered: int, running: int) -> Rows:
        return read_rows(
            "# pxname,svname,qcur,scur,dreq,req_tot,eresp,wretr,rtime,hrsp_1xx,hrsp_2xx,hrsp_3xx,hrsp_4xx,hrsp_5xx,"
            f"hrsp_other,\nservice,FRONTEND,,7,0,{requests},,,,0,{answered},0,0,0,0,\n"
            f"near,BACKEND,0,{running},0,,0,0,0,0,{answered},0,0,0,0,\n"
        )

    counters = Counters()
    assert counters.new(row(10, 8, 2)) == (10, 0)
    assert counters.new(row(15, 12, 2)) == (5, 0)
    assert counters.new(row(15, 12, 2)) == (0, 1)
    assert counters.new(row(15, 13, 2)) == (0, 0)
