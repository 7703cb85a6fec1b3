"""Notices from the metadata servers of AWS, GCP and Azure, and the errors of servers that misbehave."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mizzen import notices
from mizzen.checkpoint import Checkpointer
from mizzen.notices import AwsWatcher, AzureWatcher, GcpWatcher, Kind, MetadataError, Notice, Watcher
from mizzen.notices.metadata import Answer, Metadata, epoch_s
from tests.sdk.clouds import (
    Aws,
    Azure,
    Cloud,
    Fixed,
    Gcp,
    Talk,
    blackhole,
    dripping,
    refusing,
    says,
    serving,
    silent,
    talking,
)

NOW_S = 1_700_000_000.0
Serve = Callable[[Cloud], str]


def now() -> float:
    return NOW_S


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Returns a function that serves a cloud until the test ends, and returns its address."""
    with ExitStack() as stack:
        yield lambda cloud: stack.enter_context(serving(cloud))


def test_aws_says_nothing_then_advises_then_interrupts(serve: Serve) -> None:
    """404 is no notice. A rebalance recommendation is uncertain and without an end; an interruption supersedes it."""
    cloud = Aws()
    watcher = AwsWatcher(serve(cloud), clock=now)
    assert watcher.poll() is None
    cloud.rebalance = '{"noticeTime": "2023-11-14T22:13:00Z"}'
    assert watcher.poll() == Notice("aws", Kind.REBALANCE, NOW_S, None, False, cloud.rebalance)
    cloud.action = '{"action": "terminate", "time": "2023-11-14T22:15:00Z"}'
    assert watcher.poll() == Notice("aws", Kind.PREEMPT, NOW_S, NOW_S + 100, True, cloud.action)
    assert len(cloud.tokens) == 1
    assert cloud.asked[0] == ("PUT", "/latest/api/token")


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_aws_without_a_time_leaves_its_two_minutes(serve: Serve, action: str) -> None:
    """Each action is an interruption. If its time is invalid, the end is after the documented window of two minutes."""
    cloud = Aws()
    cloud.action = f'{{"action": "{action}", "time": "soon"}}'
    notice = AwsWatcher(serve(cloud), clock=now).poll()
    assert notice is not None
    assert (notice.kind, notice.ends_at_s) == (Kind.PREEMPT, NOW_S + 120)


def test_aws_tokens_are_renewed_before_they_expire(serve: Serve) -> None:
    """A token is reused for 90% of its lifetime, and then renewed before the server refuses it."""
    cloud, age_s = Aws(), 0.0
    watcher = AwsWatcher(serve(cloud), token_ttl_s=100, monotonic=lambda: age_s)
    assert watcher.poll() is None
    age_s = 89.0
    assert watcher.poll() is None
    assert len(cloud.tokens) == 1
    age_s = 90.0
    cloud.valid.clear()
    cloud.asked.clear()
    assert watcher.poll() is None
    assert [method for method, _ in cloud.asked] == ["PUT", "GET", "GET"]


def test_aws_a_refused_token_is_renewed_once(serve: Serve) -> None:
    """After a 401 response, the same poll gets a new token and repeats the request; a second 401 is an error."""
    cloud = Aws()
    watcher = AwsWatcher(serve(cloud))
    assert watcher.poll() is None
    cloud.valid.clear()
    cloud.action = '{"action": "stop", "time": "2023-11-14T22:15:00Z"}'
    notice = watcher.poll()
    assert notice is not None and notice.kind is Kind.PREEMPT
    assert len(cloud.tokens) == 2
    cloud.valid.clear()
    cloud.grants = False
    with pytest.raises(MetadataError, match="status 401"):
        watcher.poll()
    assert len(cloud.tokens) == 3
    cloud.grants = True
    assert watcher.poll() is not None


@pytest.mark.parametrize("garbage", ["", "[]", "terminate", '{"action": "dance"}', '{"time": "x"}', "[" * 5000])
def test_aws_garbage_is_no_notice(serve: Serve, garbage: str) -> None:
    """An invalid interruption or rebalance response is an error, and not a notice."""
    cloud = Aws()
    cloud.action = garbage
    watcher = AwsWatcher(serve(cloud))
    with pytest.raises(MetadataError, match="instance-action: status 200"):
        watcher.poll()
    cloud.action, cloud.rebalance = None, garbage
    with pytest.raises(MetadataError, match="rebalance: status 200"):
        watcher.poll()


def test_gcp_says_preempted(serve: Serve) -> None:
    """FALSE is no notice, TRUE is a preemption that ends after the window, and any other text is an error."""
    cloud = Gcp()
    watcher = GcpWatcher(serve(cloud), clock=now)
    assert watcher.poll() is None
    cloud.values["preempted"] = "TRUE"
    notice = watcher.poll()
    assert notice is not None
    assert (notice.kind, notice.ends_at_s, notice.certain) == (Kind.PREEMPT, NOW_S + 30, True)
    cloud.values["preempted"] = "perhaps"
    with pytest.raises(MetadataError, match="'perhaps'"):
        watcher.poll()


def test_gcp_windows_can_be_longer(serve: Serve) -> None:
    """MIZZEN_NOTICE_WINDOW_S sets a longer window, for machines with a longer shutdown period."""
    watcher = GcpWatcher(serve(Gcp()), environ={"MIZZEN_NOTICE_WINDOW_S": "120"})
    assert (watcher.window.seconds, watcher.window.source) == (120, "MIZZEN_NOTICE_WINDOW_S")


@pytest.mark.parametrize("model", [None, "STANDARD"])
def test_gcp_preemptible_machines_end_after_a_day(serve: Serve, model: str | None) -> None:
    """The notice of the 24-hour limit comes `lead_s` before it, and not on a machine that has run longer."""
    cloud, time_s = Gcp(), 0.0
    cloud.values["scheduling/preemptible"] = "TRUE"
    if model:
        cloud.values["scheduling/provisioning-model"] = model
    watcher = GcpWatcher(serve(cloud), lead_s=300, started_at_s=lambda: 1000.0, clock=lambda: time_s)
    end_s = 1000.0 + 86400
    time_s = end_s - 301
    assert watcher.poll() is None
    time_s = end_s - 300
    notice = watcher.poll()
    assert notice is not None
    assert (notice.kind, notice.ends_at_s, notice.certain) == (Kind.AGE_LIMIT, end_s, True)
    time_s = end_s + 1
    assert watcher.poll() is None


@pytest.mark.parametrize("told_s", [None, 500.0])
def test_saves_divide_the_life_of_a_gcp_machine(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_s: float | None
) -> None:
    """From the first save on, the cadence ends at the 24-hour limit less the lead; the user's end takes precedence."""
    cloud, ends_at_s = Gcp(), time.time() + 7200
    cloud.values["scheduling/preemptible"] = "TRUE"
    if told_s:
        monkeypatch.setenv("MIZZEN_ENDS_AT_S", str(time.time() + told_s))
    watcher = GcpWatcher(serve(cloud), lead_s=300, started_at_s=lambda: ends_at_s - 86400)
    assert watcher.poll() is None
    watcher.period_s = None
    notices.watch(watcher)
    try:
        with Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(1, {"x": b"1"})
            choice = checkpointer.cadence.explain()
    finally:
        notices.unwatch()
    assert choice.ends_in_s is not None
    expected_s = told_s or 7200 - 300
    assert expected_s - 30 <= choice.ends_in_s <= expected_s


def test_gcp_spot_machines_have_no_age_limit(serve: Serve) -> None:
    """A Spot machine, which is also marked as preemptible, has no 24-hour limit."""
    cloud = Gcp()
    cloud.values |= {"scheduling/preemptible": "TRUE", "scheduling/provisioning-model": "SPOT"}
    assert GcpWatcher(serve(cloud), started_at_s=lambda: NOW_S - 86399, clock=now).poll() is None


def test_azure_takes_only_its_own_eviction(serve: Serve) -> None:
    """Malformed events, and those of other types or machines, are ignored. The earliest eviction is the notice."""
    cloud = Azure()
    watcher = AzureWatcher(serve(cloud), clock=now)
    assert watcher.poll() is None
    cloud.evict(["trainer_4"], "Tue, 14 Nov 2023 22:14:00 GMT")
    cloud.evict(["trainer_3"], "Tue, 14 Nov 2023 22:14:00 GMT", EventType="Freeze")
    cloud.events += ["text", {"EventType": "Preempt"}, {"EventType": "Preempt", "Resources": "trainer_3"}]
    assert watcher.poll() is None
    cloud.evict(["trainer_3"], "Tue, 14 Nov 2023 22:15:00 GMT")
    cloud.evict(["TRAINER_3", "trainer_4"], "2023-11-14T22:14:10Z")
    cloud.evict(["trainer_3"], "Tue, 14 Nov 2023 22:16:00 GMT")
    notice = watcher.poll()
    assert notice is not None
    assert (notice.kind, notice.ends_at_s, notice.certain) == (Kind.PREEMPT, NOW_S + 50, True)
    assert "TRAINER_3" in notice.words


def test_azure_an_eviction_that_has_begun_leaves_nothing(serve: Serve) -> None:
    """An eviction that has started ends now. If its time is invalid, it ends after the documented window."""
    cloud = Azure()
    watcher = AzureWatcher(serve(cloud), clock=now)
    cloud.evict(["trainer_3"], "")
    notice = watcher.poll()
    assert notice is not None and notice.ends_at_s == NOW_S + 30
    cloud.evict(["trainer_3"], "", status="Started")
    notice = watcher.poll()
    assert notice is not None and notice.ends_at_s == NOW_S


def test_azure_acknowledges_only_when_it_was_told_to(serve: Serve) -> None:
    """A watcher approves no eviction by default; with `acknowledges=True` it approves only the one in its notice."""
    cloud = Azure()
    base = serve(cloud)
    quiet, eager = AzureWatcher(base), AzureWatcher(base, acknowledges=True)
    eager.acknowledge()
    cloud.evict(["another"], "Tue, 14 Nov 2023 22:15:00 GMT")
    cloud.evict(["trainer_3"], "Tue, 14 Nov 2023 22:15:00 GMT")
    for watcher in (quiet, eager):
        assert watcher.poll() is not None
    quiet.acknowledge()
    assert cloud.started == []
    eager.acknowledge()
    assert cloud.started == [{"StartRequests": [{"EventId": "event-1"}]}]


def test_azure_waits_longer_for_its_first_answer() -> None:
    """The first request for events has the longer timeout, because the server may need minutes to enable events."""
    limits: list[float | None] = []
    cloud = Azure()

    class Recording(Metadata):
        def request(self, method: str, path: str, headers: object, body: bytes = b"", timeout_s: float | None = None) -> Answer:  # type: ignore[override]  # fmt: skip # noqa: E501
            if "scheduledevents" in path:
                limits.append(timeout_s)
            return Answer(*cloud.answer(method, path, {"metadata": "true"}, body))

    watcher = AzureWatcher("http://127.0.0.1:9", timeout_s=2, first_timeout_s=130)
    watcher._metadata = Recording("http://127.0.0.1:9", 2)
    assert watcher.poll() is None
    assert watcher.poll() is None
    assert limits == [130, 2]


WATCHERS: list[Callable[[str], Watcher]] = [
    lambda base: AwsWatcher(base, timeout_s=0.3),
    lambda base: GcpWatcher(base, timeout_s=0.3),
    lambda base: AzureWatcher(base, timeout_s=0.3, first_timeout_s=0.3),
]
OK = b"HTTP/1.1 200 OK\r\n"
TALKS: dict[str, Talk] = {
    "silent": silent,
    "dripping": dripping,
    "closing": says(b""),
    "half a head": says(OK + b"Content-Le"),
    "half a body": says(OK + b"Content-Length: 100\r\nMetadata-Flavor: Google\r\n\r\nTRUE"),
    "garbage": says(b"\x16\x03\x01\xff\x00garbage\r\n\r\n\xfe"),
    "chunks that are none": says(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nTRUE\r\n0\r\n\r\n"),
    "endless": says(OK + b"\r\n" + b"x" * 100_000),
    "a body that is no text": says(OK + b"Metadata-Flavor: Google\r\n\r\n\xff\xfe\x00\x80"),
    "a length that is none": says(OK + b"Content-Length: -5\r\n\r\n{}"),
}


def test_gcp_preemption_is_seen_where_the_rest_is_not_known(serve: Serve) -> None:
    """If the request for the age limit fails, preemptions are still detected; it is repeated after a minute."""
    cloud, time_s = Gcp(), 0.0
    cloud.values |= {"scheduling/preemptible": "TRUE", "scheduling/provisioning-model": "STANDARD"}
    cloud.strange = "scheduling/preemptible"
    watcher = GcpWatcher(serve(cloud), clock=now, monotonic=lambda: time_s, started_at_s=lambda: NOW_S - 86_300)
    assert [watcher.poll() for _ in range(3)] == [None] * 3
    assert sum(path.endswith("scheduling/preemptible") for _, path in cloud.asked) == 1
    cloud.values["preempted"] = "TRUE"
    notice = watcher.poll()
    assert notice is not None and notice.kind is Kind.PREEMPT
    cloud.values["preempted"], cloud.strange, time_s = "FALSE", None, 61.0
    notice = watcher.poll()
    assert notice is not None and notice.kind is Kind.AGE_LIMIT


@pytest.mark.parametrize("make", WATCHERS, ids=["aws", "gcp", "azure"])
@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS.keys())
def test_bad_servers_are_errors_of_one_kind(make: Callable[[str], Watcher], talk: Talk) -> None:
    """Slow, truncated and malformed responses raise MetadataError; no poll returns a notice or hangs."""
    with talking(talk) as (base, _), pytest.raises(MetadataError):
        make(base).poll()


@pytest.mark.parametrize("make", WATCHERS, ids=["aws", "gcp", "azure"])
@pytest.mark.parametrize(
    "cloud",
    [
        Fixed(200, "TRUE", Content_Type="text/html; charset=utf-8", Metadata_Flavor="Google"),
        Fixed(200, ""),
        Fixed(302, "", Location="http://127.0.0.1:9/"),
        Fixed(403, "no"),
        Fixed(500, '{"action": "terminate", "Events": []}', Metadata_Flavor="Google"),
    ],
    ids=["html", "empty", "redirect", "forbidden", "broken"],
)
def test_wrong_answers_are_errors_of_one_kind(serve: Serve, make: Callable[[str], Watcher], cloud: Cloud) -> None:
    """An HTML page, an empty text, a redirect, and status 403 or 500 raise MetadataError."""
    with pytest.raises(MetadataError):
        make(serve(cloud)).poll()


@pytest.mark.parametrize("make", WATCHERS, ids=["aws", "gcp", "azure"])
def test_no_server_is_an_error_of_the_same_kind(make: Callable[[str], Watcher]) -> None:
    """A refused connection and a connection that times out raise MetadataError."""
    with pytest.raises(MetadataError, match="refused"):
        make(refusing()).poll()
    with blackhole() as base, pytest.raises(MetadataError, match="timed out"):
        make(base).poll()


def test_an_answer_without_end_is_cut_short() -> None:
    """A response of more than 64 KiB is an error, long before the timeout."""

    def talk(connection: socket.socket, freed: threading.Event) -> None:
        connection.sendall(OK + b"\r\n")
        while not freed.is_set():
            connection.sendall(b"x" * 1000)

    with talking(talk) as (base, _), pytest.raises(MetadataError, match="too long"):
        Metadata(base, timeout_s=60).request("GET", "/", {})


def test_proxies_are_not_used(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for metadata ignore the proxy variables of the environment."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, refusing())
    assert GcpWatcher(serve(Gcp())).poll() is None


def test_chunked_answers_and_prefixes_are_read() -> None:
    """A chunked response is decoded, and a base address may have a path."""
    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nTRU\r\n1\r\nE\r\n0\r\n\r\n"

    with talking(says(chunked)) as (base, _):
        assert Metadata(f"{base}/prefix").request("GET", "/path", {}).text == "TRUE"
    cloud = Fixed(200, "yes")
    with serving(cloud) as base:
        Metadata(f"{base}/prefix/").request("GET", "/path", {})
    assert cloud.asked == [("GET", "/prefix/path")]


@pytest.mark.parametrize("base", ["", "169.254.169.254", "https://host", "http://", "http://host:x", "http://h?q"])
def test_a_bad_address_is_named(base: str) -> None:
    """For an invalid address of a metadata server, the error has the address and the valid form."""
    with pytest.raises(ValueError, match=r"metadata address .*: must be http://host"):
        Metadata(base)


def test_times_are_read_in_both_forms() -> None:
    """ISO 8601 times and HTTP dates give epoch seconds; without a time zone they are UTC. Invalid texts give None."""
    forms = (
        "2023-11-14T22:13:20Z",
        "2023-11-14T22:13:20",
        "Tue, 14 Nov 2023 22:13:20 GMT",
        "2023-11-14T23:13:20+01:00",
    )
    assert [epoch_s(text) for text in forms] == [NOW_S] * 4
    assert [epoch_s(text) for text in ("", "soon", None, 5, {})] == [None] * 5
