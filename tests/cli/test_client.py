"""The client over connections that break: requests are not executed twice, and streams lose and repeat nothing."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import islice

import pytest
from sqlalchemy import func, select

import mizzen_client
from domain.ids import element_id
from domain.phases import Phase
from infra.db.array_rows import take_element
from infra.db.models import Workload
from infra.db.session import transaction
from mizzen_client import Client, NotFound, Unreachable
from mizzen_client.log_lines import FollowedTo
from tests.cli.service import DOCUMENT, DONE, Cutter, Service, serving


@pytest.fixture
def through(service: Service, cutter: Cutter) -> Iterator[Client]:
    """Yields a client whose connections to the API can be cut."""
    with Client(cutter.url, service.keys["vision"], patience_s=10) as client:
        yield client


@contextmanager
def healing(cutter: Cutter, after_cuts: int) -> Iterator[None]:
    """Lets the proxy cut connections until `after_cuts` were cut."""
    done = threading.Event()

    def heal() -> None:
        while cutter.cuts < after_cuts and not done.wait(0.01):
            pass
        cutter.after_bytes = None

    thread = threading.Thread(target=heal)
    thread.start()
    yield
    done.set()
    thread.join()


def named(service: Service, name: str) -> int:
    with transaction(service.engine) as session:
        return session.scalar(select(func.count()).where(Workload.name == name)) or 0


def test_a_submission_whose_answer_is_lost_is_still_one_workload(
    service: Service, cutter: Cutter, through: Client
) -> None:
    """A submission that is retried after lost responses creates one workload."""
    cutter.after_bytes = 0
    with healing(cutter, 2):
        workload = through.submit({**DOCUMENT, "name": "once"})
    assert cutter.cuts >= 2 and named(service, "once") == 1
    assert through.workload(workload["id"])["name"] == "once"


def test_a_service_whose_answers_are_lost_gets_one_version_for_each_call(service: Service, cutter: Cutter) -> None:
    """Requests that create and update services are retried after lost responses."""
    document = {"name": "lossy", "service": {"readiness_probe": "/", "replicas": 1}, "resources": {"ports": 80}}

    def call(version: int) -> None:
        cutter.after_bytes = 0
        with Client(cutter.url, service.keys["vision"], patience_s=10) as client, healing(cutter, cutter.cuts + 2):
            body = {**document, "run": f"serve {version}"}
            made = client.create_service(body) if version == 1 else client.update_service("lossy", body)
        assert made["version"] == version

    for version in (1, 2, 3):
        call(version)
    assert cutter.cuts >= 6
    with Client(service.url, service.keys["vision"]) as client:
        assert client.service("lossy")["version"] == 3
        client.end_service("lossy")


def test_what_may_not_be_sent_twice_is_not(service: Service, cutter: Cutter) -> None:
    """The creation of a key is not retried after a lost response; the error says that it may have been executed."""
    cutter.after_bytes = 0
    with (
        Client(cutter.url, service.keys["operator"], patience_s=10) as operator,
        pytest.raises(Unreachable, match="unknown whether the request was executed"),
    ):
        operator.create_key("viewer", label="lost")
    with Client(service.url, service.keys["operator"]) as operator:
        keys = operator.keys()
    assert len([key for key in keys if key["label"] == "lost"]) == 1


def test_a_removal_whose_answer_is_lost_is_not_an_error(service: Service, cutter: Cutter) -> None:
    """A removal whose retry gets 404 after a lost response is no error; a first request that gets 404 is."""
    with Client(cutter.url, service.keys["operator"], patience_s=10) as operator:
        operator.set_tenant("brief", 5, {}, None)
        cutter.after_bytes = 0
        with healing(cutter, 1):
            operator.remove_tenant("brief")
        with pytest.raises(NotFound):
            operator.remove_tenant("brief")


def test_calls_wait_for_an_api_that_starts_late(service: Service) -> None:
    """A call to an API that is not up yet is retried until it responds; with `patience_s=0` it is an error."""
    with serving(service.settings) as port:
        pass
    url = f"http://127.0.0.1:{port}"
    retried = threading.Event()
    with Client(url, service.keys["vision"], patience_s=0) as client, pytest.raises(Unreachable):
        client.whoami()

    answers = []

    def ask() -> None:
        with Client(url, service.keys["vision"], on_retry=lambda error, left_s: retried.set()) as client:
            answers.append(client.whoami()["tenant"])

    thread = threading.Thread(target=ask)
    thread.start()
    assert retried.wait(10)
    with serving(service.settings, port):
        thread.join(20)
    assert answers == ["vision"]


def test_followed_events_come_once_each_over_lost_connections(
    service: Service, client: Client, cutter: Cutter, through: Client
) -> None:
    """After each lost connection, the event stream resumes after the last received event."""
    id_ = client.submit(DOCUMENT)["id"]
    followed = through.events(id_, follow=True)
    seen = [next(followed)]
    for attempt in (1, 2):
        cutter.cut_all()
        service.place(id_, attempt)
        seen.append(next(followed))
        service.become(id_, Phase.PENDING, attempt)
        seen.append(next(followed))
    service.become(id_, Phase.CANCELLED, 2)
    seen.append(next(followed))
    assert [e["id"] for e in seen] == [e["id"] for e in client.events(id_)]
    assert len(seen) == 6


def test_patience_begins_with_the_loss_and_not_with_the_silence_before(service: Service, cutter: Cutter) -> None:
    """The patience of a stream counts from the loss of the connection, not from the last event."""
    with Client(cutter.url, service.keys["vision"], follow_patience_s=0.3) as client:
        id_ = client.submit(DOCUMENT)["id"]
        followed = client.events(id_, follow=True)
        next(followed)
        time.sleep(0.5)
        cutter.cut_all()
        service.become(id_, Phase.CANCELLED, 0)
        assert next(followed)["kind"] == "workload.cancelled"


def test_followed_logs_come_once_each_over_lost_connections_and_attempts(
    service: Service, client: Client, cutter: Cutter, through: Client
) -> None:
    """Each log line arrives exactly once and in order, across lost connections and a new attempt."""
    id_ = client.submit(DOCUMENT)["id"]
    attempts: list[int] = []
    followed = through.logs(id_, follow=True, on_attempt=attempts.append)
    seen: list[bytes] = []
    for attempt in (1, 2):
        service.place(id_, attempt)
        at = [0, 0]
        for part in range(3):
            for task in (0, 1):
                text = f"same line\nattempt {attempt} part {part}\n"
                at[task] = service.write_log(id_, text, task=task, attempt=attempt, at=at[task], end=part == 2)
            if part == 2:
                service.become(id_, Phase.PENDING if attempt == 1 else Phase.SUCCEEDED, attempt, DONE)
            seen += islice(followed, 4)
            cutter.cut_all()
    assert list(followed) == []
    expected = [line for a in (1, 2) for p in range(3) for line in ("same line", f"attempt {a} part {p}")]
    for task in (0, 1):
        label = f"train/{task}| ".encode()
        assert [line.removeprefix(label).decode() for line in seen if line.startswith(label)] == expected
    assert len(seen) == 24 and attempts == [2]


def test_the_time_between_the_end_of_a_log_and_of_its_attempt_is_no_retry(service: Service, client: Client) -> None:
    """While outputs are stored, the user is not told that a connection is retried."""
    id_ = client.submit(DOCUMENT)["id"]
    service.place(id_)
    for task in (0, 1):
        service.write_log(id_, f"step {task}\n", task=task, end=True)
    retries: list[str] = []
    end = threading.Timer(1.0, service.become, (id_, Phase.SUCCEEDED), {"reason": DONE})
    with Client(client.url, service.keys["vision"], on_retry=lambda error, left_s: retries.append(error)) as own:
        followed = own.logs(id_, follow=True)
        next(followed)
        end.start()
        assert len(list(followed)) == 1
    end.join()
    assert retries == []


def test_an_interrupted_reader_continues_where_it_was(service: Service, client: Client) -> None:
    """The second call gets the position of the first, and yields only what the first did not."""
    id_ = client.submit(DOCUMENT)["id"]
    service.place(id_)
    for task in (0, 1):
        service.write_log(id_, "one\ntwo\n", task=task, end=True)
    service.become(id_, Phase.SUCCEEDED, reason=DONE)
    position = FollowedTo()
    first = list(islice(client.logs(id_, follow=True, position=position), 3))
    rest = list(client.logs(id_, follow=True, position=position))
    assert sorted(first + rest) == [f"train/{task}| {word}".encode() for task in (0, 1) for word in ("one", "two")]


def test_a_followed_tail_goes_on_where_it_was(
    service: Service, client: Client, cutter: Cutter, through: Client
) -> None:
    """After a lost connection, a followed tail resumes after its last line, although its start position is unknown."""
    id_ = client.submit(DOCUMENT)["id"]
    service.place(id_)
    at = service.write_log(id_, "".join(f"step {n}\n" for n in range(100)))
    service.write_log(id_, "other\n", task=1, end=True)
    followed = through.logs(id_, follow=True, tail=2)
    assert sorted(islice(followed, 3)) == [b"train/0| step 98", b"train/0| step 99", b"train/1| other"]
    cutter.cut_all()
    service.write_log(id_, "step 100\nstep 101\n", at=at, end=True)
    service.become(id_, Phase.SUCCEEDED, reason=DONE)
    assert list(followed) == [b"train/0| step 100", b"train/0| step 101"]


def test_lines_that_match(service: Service, client: Client, cutter: Cutter, through: Client) -> None:
    """Patterns match the text without the label; the tail counts matching lines, and following goes on after it."""
    id_ = client.submit(DOCUMENT)["id"]
    service.place(id_)
    at = service.write_log(id_, "".join(f"step {n}\nloss {n}\n" for n in range(30)))
    service.write_log(id_, "step 7\ntrain/0| step\n", task=1, end=True)
    assert list(client.logs(id_, grep="^(step|time) [0-9]$", tail=2)) == [
        b"train/0| step 8", b"train/0| step 9", b"train/1| step 7",
    ]  # fmt: skip
    assert list(client.logs(id_, grep="loss 2", task=0, tail=1)) == [b"loss 29"]
    assert list(client.logs(id_, grep="train/0", task=1)) == [b"train/0| step"]
    followed = through.logs(id_, follow=True, grep="step|^$", tail=1)
    assert sorted(islice(followed, 2)) == [b"train/0| step 29", b"train/1| train/0| step"]
    cutter.cut_all()
    service.write_log(id_, "loss 30\nstep 30\n", at=at, end=True)
    service.become(id_, Phase.SUCCEEDED, reason=DONE)
    assert list(followed) == [b"train/0| step 30"]


def test_lines_after_a_time(service: Service, client: Client) -> None:
    """Only output is read that was uploaded after the time."""
    id_ = client.submit(DOCUMENT)["id"]
    service.place(id_)
    at = service.write_log(id_, "old\n")
    time.sleep(0.01)
    now = datetime.now()
    service.write_log(id_, "new\n", at=at, end=True)
    assert list(client.logs(id_, task=0, since=now)) == [b"new"]


@pytest.mark.rotating
def test_logs_of_an_array(service: Service, client: Client, through: Client, cutter: Cutter) -> None:
    """Lines name their element; the tail is that of each element, and a lost connection repeats no line."""
    array = client.submit({**DOCUMENT, "name": "sweep", "array": "0-9"})["id"]
    at = {}
    for index in (2, 5):
        with transaction(service.engine) as session:
            take_element(session, array, index, index)
        service.place(element_id(array, index))
        text = "".join(f"Error {n}: of {index}\nfine\n" for n in range(3))
        at[index] = service.write_log(element_id(array, index), text)
    assert list(client.logs(array, task=0, grep="Error", tail=1)) == [
        b"sweep/2: Error 2: of 2", b"sweep/5: Error 2: of 5",
    ]  # fmt: skip
    followed = through.logs(array, task=0, follow=True, grep="Error [0-9]*:", tail=2)
    assert [next(followed)[:16] for _ in range(4)] == [
        b"sweep/2: Error 1", b"sweep/2: Error 2", b"sweep/5: Error 1", b"sweep/5: Error 2",
    ]  # fmt: skip
    cutter.cut_all()
    service.write_log(element_id(array, 5), "Error 3: last\n", at=at[5], end=True)
    for index in (2, 5):
        service.become(element_id(array, index), Phase.FAILED, reason=DONE)
    service.become(array, Phase.FAILED, 0, reason=DONE)
    assert list(followed) == [b"sweep/5: Error 3: last"]


def test_wait_returns_when_all_have_ended(service: Service, client: Client) -> None:
    """`wait` reports each change of phase and returns the workloads in the given order."""
    ids = [client.submit(DOCUMENT)["id"] for _ in range(2)]
    changes = []

    def on_change(workload: object) -> None:
        changes.append(workload)
        if len(changes) == 2:
            for id_ in ids:
                service.become(id_, Phase.SUCCEEDED, 0, DONE)

    assert [w["id"] for w in client.wait(ids[::-1], on_change)] == ids[::-1]
    assert len(changes) == 4


def test_pages_are_fetched_as_needed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of several pages has each workload once, newest first, up to the limit."""
    ids = [client.submit({**DOCUMENT, "name": "paged"})["id"] for _ in range(5)]
    monkeypatch.setattr("mizzen_client.calls.PAGE", 2)
    assert [w["id"] for w in client.workloads(name="paged")] == ids[::-1]
    assert [w["id"] for w in client.workloads(name="paged", limit=3)] == ids[:1:-1]


def test_names_with_odd_characters_stay_one_path_segment(client: Client) -> None:
    """An id with characters such as `/` or `?` cannot address another endpoint."""
    for odd in ("../tenants", "a/b", "a?b", "..", "ü"):
        with pytest.raises(NotFound):
            client.workload(odd)


def test_a_patient_call_gives_up_in_the_end(cutter: Cutter) -> None:
    """If the API never responds, a call fails after its patience with an error that has the address."""
    cutter.after_bytes = 0
    with Client(cutter.url, "mzn_x", patience_s=0.5) as client, pytest.raises(Unreachable, match=cutter.url):
        client.whoami()
    assert cutter.cuts > 1


def test_every_public_name_is_there() -> None:
    """All public names of `mizzen_client` can be imported, and an unknown name is an AttributeError."""
    assert all(getattr(mizzen_client, name) for name in mizzen_client.__all__)
    with pytest.raises(AttributeError):
        _ = mizzen_client.Nonsense
