"""Arrays over the API: one row for an array, elements that have no row yet, and actions on all of them."""

from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select

from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from infra.db.array_rows import take_element
from infra.db.logs import Event, Outbox, Waiting
from infra.db.models import Attempt, Workload
from tests.api.calls import T0, act, get
from tests.api.world import ApiWorld, document


async def _submit(world: ApiWorld, array: Any, key: str = "vision", **changes: Any) -> str:
    async with world.client(key) as client:
        answer = await client.post("/v1/workloads", json=document(array=array, **changes))
        assert answer.status_code == 202, answer.text
        assert answer.json()["array"]["live"] == 0
        return str(answer.json()["id"])


async def _refusal(world: ApiWorld, array: Any, **changes: Any) -> list[tuple[str, str]]:
    async with world.client("vision") as client:
        answer = await client.post("/v1/workloads", json=document(array=array, **changes))
        assert answer.status_code == 422, answer.text
        return [(error["path"], error["message"]) for error in answer.json()["errors"]]


def _take(world: ApiWorld, array: str, *positions: int) -> None:
    with world.session() as session:
        session.get_one(Workload, array, with_for_update=True)
        for position in positions:
            take_element(session, array, position, position)


def _rows(world: ApiWorld) -> int:
    with world.session() as session:
        return session.scalar(select(func.count()).select_from(Workload)) or 0


async def test_ten_thousand_elements_are_one_row(world: ApiWorld) -> None:
    """The request writes one row (`bench.waiting_elements` measures its CPU time)."""
    array = await _submit(world, "0-9999%50")
    assert _rows(world) == 1
    found = await get(world, f"/v1/workloads/{array}")
    assert found["array"] == {
        "elements": 10_000, "waiting": 10_000, "live": 0, "succeeded": 0, "failed": 0, "cancelled": 0, "throttle": 50,
    }  # fmt: skip
    assert found["spec"]["array"] == {"indexes": "0-9999", "throttle": 50}
    assert found["phase"] == "pending" and found["queued"]


async def test_an_element_can_be_shown_before_it_has_a_row(world: ApiWorld) -> None:
    """It is pending, with its parameters: the last one of the document changes fastest, whatever order Postgres gives
    to the keys of an object. Elements that the array does not have are not found.
    """
    array = await _submit(world, {"matrix": {"seed": ["b", "a"], "lr": [0.1, 1]}})
    shown = await get(world, f"/v1/workloads/{array}-2")
    assert shown["element"] == {"array": array, "index": 2, "parameters": {"lr": "0.1", "seed": "a"}}
    assert [*(await get(world, f"/v1/workloads/{array}"))["spec"]["array"]["matrix"]] == ["seed", "lr"]
    assert (shown["phase"], shown["array"], shown["attempt"]) == ("pending", None, 0)
    assert (await get(world, f"/v1/workloads/{array}-2/why"))["phase"] == "pending"
    assert (await get(world, f"/v1/workloads/{array}-2/attempts"))["items"] == []
    assert _rows(world) == 1
    for key, id_ in (("operator", f"{array}-4"), ("operator", f"{array}-02"), ("speech", f"{array}-2")):
        async with world.client(key) as client:
            assert (await client.get(f"/v1/workloads/{id_}")).status_code == 404
            action = await client.post(f"/v1/workloads/{id_}/cancel")
            assert action.status_code in (403, 404)
    assert _rows(world) == 1


@pytest.mark.parametrize("whole", [{"list": [{"lr": "0.1", "seed": str(n)} for n in range(1000)]},
                                   {"matrix": {"lr": ["0.1"], "seed": [str(n) for n in range(1000)]}}])  # fmt: skip
async def test_an_element_has_only_its_own_parameters(world: ApiWorld, whole: dict[str, Any]) -> None:
    """Before and after it has a row; its document can be submitted again, for its index or for others."""
    jobs = [{"name": "main", "run": ["train", "{{ lr }}", "{{ seed }}"]}]
    array = await _submit(world, whole, jobs=jobs)
    own = {"indexes": "7", "list": [{"lr": "0.1", "seed": "7"}]}
    for taken in ((), (7,)):
        _take(world, array, *taken)
        shown = await get(world, f"/v1/workloads/{array}-7")
        assert shown["element"] == {"array": array, "index": 7, "parameters": own["list"][0]}
        assert shown["spec"]["array"] == own
    for document_, index in ((own, 7), (own | {"indexes": "0-9"}, 9), ({"list": own["list"]}, 0)):
        again = await _submit(world, document_, jobs=jobs)
        assert (await get(world, f"/v1/workloads/{again}-{index}"))["element"]["parameters"] == own["list"][0]
    shown = (await get(world, f"/v1/workloads/{array}"))["spec"]["array"]
    assert shown == whole | {"indexes": "0-999"}
    assert (await get(world, f"/v1/workloads/{await _submit(world, shown)}"))["spec"]["array"] == shown


@pytest.mark.parametrize("exclude", [[], [{"a": "2", "c": "y"}]])
async def test_rows_of_elements_have_the_parameters_of_their_index(world: ApiWorld, exclude: list[Any]) -> None:
    """Of a matrix of three parameters, with combinations left out or not, as before they have rows."""
    matrix = {"bb": ["1", "2"], "a": ["1", "2", "3"], "c": ["x", "y"]}
    array = await _submit(world, {"matrix": matrix, "exclude": exclude})
    indexes = range(12 - 2 * len(exclude))

    async def found() -> list[Any]:
        return [(await get(world, f"/v1/workloads/{array}-{index}"))["element"]["parameters"] for index in indexes]

    before = await found()
    _take(world, array, *indexes)
    assert await found() == before and before[1] == {"bb": "1", "a": "1", "c": "y"}


@pytest.mark.parametrize("parameters", [{"list": [{"p": "x" * 100 + str(k)} for k in range(1000)]},
                                        {"matrix": {"p": ["x" * 100 + str(k) for k in range(1000)]}}])  # fmt: skip
async def test_a_page_does_not_read_the_parameters_of_arrays(world: ApiWorld, parameters: dict[str, Any]) -> None:
    """What the database sends for a page is far less than the parameters."""
    array = await _submit(world, parameters)
    read: list[int] = []

    def count(_: object, cursor: Any, *__: object) -> None:
        result = cursor.pgresult
        fields = range(result.nfields)
        read.extend(len(result.get_value(row, field) or b"") for row in range(result.ntuples) for field in fields)

    event.listen(Engine, "after_cursor_execute", count)
    try:
        [found] = (await get(world, "/v1/workloads"))["items"]
    finally:
        event.remove(Engine, "after_cursor_execute", count)
    assert found["id"] == array and found["array"]["elements"] == 1000 and found["jobs"]
    assert 0 < sum(read) < 10_000
    _take(world, array, 0)
    [element] = (await get(world, "/v1/workloads", array=array))["items"]
    assert element["element"]["parameters"] == {"p": "x" * 100 + "0"}


async def test_waiting_elements_wait_for_what_their_array_waits(world: ApiWorld) -> None:
    """A scan need not have ranked an element: its reasons are those of the array."""
    array = await _submit(world, "0-9")
    refusal = Reason(ReasonCode.ISOLATION_TOO_WEAK, {"machines": "m", "region": "north"}).to_json()
    with world.session() as session:
        session.get_one(Workload, array).submitted_at = T0
        session.add(Waiting(workload=array, reasons={"reasons": [refusal]}))
    for id_ in (array, f"{array}-7"):
        reasons = (await get(world, f"/v1/workloads/{id_}/why"))["reasons"]
        assert [reason["code"] for reason in reasons] == ["isolation_too_weak"]
    async with world.client("vision") as client:
        await client.patch(f"/v1/workloads/{array}", json={"throttle": 1})
    _take(world, array, 0, 1)
    for phase, sentence in (
        (Phase.PENDING, "0 elements hold slots, older ones come first, and the throttle of the array is 1"),
        (Phase.RUNNING, "1 element holds slots, and the throttle of the array is 1"),
    ):
        with world.session() as session:
            session.get_one(Workload, f"{array}-0").phase = phase
        for id_ in (array, f"{array}-1", f"{array}-7"):
            (reason,) = (await get(world, f"/v1/workloads/{id_}/why"))["reasons"]
            assert reason["code"] == "array_throttled" and reason["sentence"].startswith(sentence)


async def test_lists_have_one_row_for_an_array(world: ApiWorld) -> None:
    """Elements with rows are listed only with `array`. An array of which an element was placed is running."""
    array = await _submit(world, "0-9", name="sweep")
    _take(world, array, 0, 1)
    page = await get(world, "/v1/workloads", name="sweep")
    assert [(item["id"], item["phase"], item["array"]["live"]) for item in page["items"]] == [(array, "running", 2)]
    own = await get(world, "/v1/workloads", array=array)
    assert [item["id"] for item in own["items"]] == [f"{array}-1", f"{array}-0"]
    for phase, found in (("running", [array]), ("pending", []), ("live", [array])):
        assert [item["id"] for item in (await get(world, "/v1/workloads", phase=phase))["items"]] == found


async def test_actions_concern_the_array_and_its_elements(world: ApiWorld) -> None:
    """Hold, release, a lower priority, the throttle and cancellation."""
    array = await _submit(world, "0-9")
    _take(world, array, 0, 1)
    await act(world, f"/v1/workloads/{array}/hold")
    assert (await get(world, f"/v1/workloads/{array}-0"))["held_by"] is not None
    await act(world, f"/v1/workloads/{array}/release")
    assert (await get(world, f"/v1/workloads/{array}-0"))["held_by"] is None
    async with world.client("vision") as client:
        changed = await client.patch(f"/v1/workloads/{array}", json={"level": 7, "throttle": 3})
        assert changed.status_code == 202 or changed.status_code == 200, changed.text
        assert changed.json()["array"]["throttle"] == 3
        assert (await get(world, f"/v1/workloads/{array}-1"))["level"] == 7
        refused = await client.patch(f"/v1/workloads/{array}-1", json={"throttle": 3})
        assert refused.status_code == 422 and "only be used with an array" in refused.text
        await client.post(f"/v1/workloads/{array}/cancel", params={"only": "waiting"})
        counts = (await get(world, f"/v1/workloads/{array}"))["array"]
        assert (counts["waiting"], counts["live"], counts["cancelled"]) == (0, 2, 8)
        assert (await get(world, f"/v1/workloads/{array}-5"))["phase"] == "cancelled"
        done = await client.post(f"/v1/workloads/{array}/cancel")
        assert done.json()["phase"] == "cancelled"
    counts = (await get(world, f"/v1/workloads/{array}"))["array"]
    assert (counts["live"], counts["cancelled"]) == (0, 10)


async def test_the_same_throttle_changes_nothing(world: ApiWorld) -> None:
    """Neither an event nor an entry of the audit list is written."""
    array = await _submit(world, "0-9%3")
    for throttle, changes in ((3, 0), (4, 1), (4, 1), (0, 2), (0, 2)):
        async with world.client("vision") as client:
            answer = await client.patch(f"/v1/workloads/{array}", json={"throttle": throttle})
        assert answer.json()["array"]["throttle"] == (throttle or None)
        with world.session() as session:
            events = select(func.count()).where(Event.workload == array, Event.kind == "workload.throttle")
            assert session.scalar(events) == changes


async def test_an_element_of_a_blocked_array_cannot_start_by_itself(world: ApiWorld) -> None:
    """It would have a row of its own, which does not know the dependencies of the array."""
    world.add_workload(name="prepare")
    array = await _submit(world, "0-2", after=["prepare"])
    for action in ("hold", "cancel"):
        answer = await act(world, f"/v1/workloads/{array}-1/{action}", "vision")
        assert answer.status_code == 409, answer.text
        assert "waits for its dependencies" in answer.json()["detail"]
    assert (await get(world, f"/v1/workloads/{array}-1"))["phase"] == "pending"
    assert _rows(world) == 2 and (await get(world, f"/v1/workloads/{array}"))["array"]["waiting"] == 3


async def test_only_elements_that_failed_are_cancelled(world: ApiWorld) -> None:
    """Those that failed before and wait for another attempt; others go on."""
    array = await _submit(world, "0-9")
    _take(world, array, 0, 1)
    with world.session() as session:
        for position, code in ((0, ReasonCode.TASK_FAILED), (1, ReasonCode.EVICTED)):
            own = Attempt(
                workload=f"{array}-{position}", attempt=1, region="north", plan={"jobs": []}, released_at=T0,
                gpu_types={}, cpus_milli=1, outcome=Reason(code).to_json(),
            )  # fmt: skip
            session.add(own)
            session.get_one(Workload, own.workload).attempt = 1
    async with world.client("vision") as client:
        answer = await client.post(f"/v1/workloads/{array}/cancel", params={"only": "failed"})
        counts = answer.json()["array"]
        assert (counts["waiting"], counts["live"], counts["cancelled"]) == (8, 1, 1)
        refused = await client.post(f"/v1/workloads/{array}-1/cancel", params={"only": "failed"})
        assert refused.status_code == 422 and "only be used with an array" in refused.text
    assert (await get(world, f"/v1/workloads/{array}-0"))["phase"] == "cancelled"


async def test_one_waiting_element_is_cancelled(world: ApiWorld) -> None:
    """It gets a row, and the others wait on."""
    array = await _submit(world, "5-9")
    assert (await act(world, f"/v1/workloads/{array}-7/cancel")).json()["phase"] == "cancelled"
    assert _rows(world) == 2
    assert (await get(world, f"/v1/workloads/{array}"))["array"]["waiting"] == 4
    with world.session() as session:
        assert session.scalar(select(func.count()).select_from(Outbox).where(Outbox.kind == "array")) == 0


async def test_waiting_elements_of_a_tenant_are_limited(world: ApiWorld) -> None:
    """The limit counts elements without a row over all arrays of a tenant."""
    await _submit(world, "0-99999")
    await _submit(world, "0-99999")
    async with world.client("vision") as client:
        refused = await client.post("/v1/workloads", json=document(array="0-0"))
        assert refused.status_code == 429
        assert refused.json()["limit"] == {"name": "limits.elements_per_tenant", "value": 200_000}
        assert "200000 waiting elements" in refused.text
    jobs = [{"name": "main", "run": "true"}]
    await _submit(world, "0", key="speech", tenant=None, jobs=jobs)


async def test_any_of_ten_thousand_elements_can_be_chosen(world: ApiWorld) -> None:
    """As `mizzen retry --failed` does, after every second one has failed."""
    array = await _submit(world, ",".join(str(n) for n in range(1, 10_000, 2)))
    assert (await get(world, f"/v1/workloads/{array}"))["array"]["elements"] == 5000
    assert (await get(world, f"/v1/workloads/{array}-9999"))["phase"] == "pending"
    refused = await _refusal(world, ",".join(str(n) for n in range(1, 40_000, 2)))
    assert refused == [("array", "must have at most 60000 characters, it has 114444")]


@pytest.mark.parametrize(
    ("array", "path", "words"),
    [
        ("9-1", "array", "ends before its start"),
        ("0-9,5", "array", "given twice"),
        ("0-100000", "array", "at most 100000 elements, these are 100001"),
        ("0-9%0", "array", "must be indexes such as"),
        ({"throttle": 3}, "array.indexes", "missing: give indexes"),
        ({"matrix": {"lr": [1], "LR": [2]}}, "array.matrix", "same name in capital letters"),
        ({"matrix": {"index": [1]}}, "array.matrix.index", "stands for the index"),
        ({"matrix": {"lr": [1, 2]}, "exclude": [{"lr": 3}]}, "array.exclude[0].lr", "one of the values of lr"),
        ({"matrix": {"lr": [1, 2]}, "exclude": [{"lr": 1}, {"lr": 2}]}, "array.exclude", "leaves no combination"),
        ({"matrix": {"lr": [1, 2]}, "indexes": "0-2"}, "array.indexes", "combinations 0-1, not 2"),
        ({"list": [{"lr": 1}, {"lr": 2}], "indexes": "0-2"}, "array.indexes", "entries 0-1, not 2"),
        ({"list": [{"lr": 1}, {}]}, "array.list[1].lr", "missing: all entries of the list have the same"),
        ({"list": [{}, {"lr": 1}]}, "array.list[1].lr", "the first entry of the list has no such parameter"),
        ({"list": [{"lr": [2]}, {"lr": 1}]}, "array.list[0].lr", "must be a string, a number or a boolean"),
        ({"list": [{"lr": 1}, {"lr": 1, "seed": 2}]}, "array.list[1].seed", "no such parameter"),
        ({"list": [{"lr": 1}, {"lr": [2]}]}, "array.list[1].lr", "must be a string, a number or a boolean"),
        ({"list": [{"lr": 1}, 2]}, "array.list[1]", "must be a mapping of parameters to values"),
        ({"list": [{"lr": 1, "LR": 2}]}, "array.list", "same name in capital letters"),
        ({"list": []}, "array.list", "at least one entry"),
        ({"list": [{}] * 10_001}, "array.list", "at most 10000 entries, it has 10001"),
        ({"list": [{"a": "x" * 255}] * 2049}, "array.list", "at most 524288 bytes together, these are 524544"),
        ({"list": [{"lr": 1}], "matrix": {"lr": [1]}}, "array.list", "not possible with a matrix"),
        ({"list": [{"lr": 1}], "exclude": [{"lr": 1}]}, "array.exclude", "only possible with a matrix"),
    ],
)
async def test_wrong_arrays(world: ApiWorld, array: Any, path: str, words: str) -> None:
    """The error names the field and what would be right; nothing is submitted."""
    (error,) = await _refusal(world, array)
    assert error[0] == path and words in error[1]
    assert _rows(world) == 0


@pytest.mark.parametrize("retries", [50, {"exit": {"137": 2}}, {"lost": 5}])
async def test_elements_that_may_be_started_once_have_no_retries(world: ApiWorld, retries: Any) -> None:
    """An element that failed would be started again: the document asks for both."""
    array = {"indexes": "0-9", "runners": {"at_most_once": True}}
    jobs = [{"name": "main", "run": ["true"]}]
    (error,) = await _refusal(world, array, jobs=jobs, limits={"retries": retries})
    assert error == (
        "limits.retries", "must be 0 with array.runners.at_most_once, which starts no element again; leave it out"
    )  # fmt: skip
    await _submit(world, array, jobs=jobs, limits={"retries": 0})
    await _submit(world, array | {"runners": {"at_most_once": False}}, jobs=jobs, limits={"retries": retries})


async def test_braces_are_read_only_in_documents_with_an_array(world: ApiWorld) -> None:
    """A name that is no parameter is an error; without an array it is text."""
    jobs = [{"name": "main", "run": ["echo", "{{ lr }}"], "env": {"A": "{{"}}]
    refused = await _refusal(world, {"matrix": {"lt": [1]}}, jobs=jobs)
    assert refused == await _refusal(world, {"list": [{"lt": 1}, {"lt": 2}]}, jobs=jobs)
    assert refused == [
        ("jobs[0].run[1]", "lr is no parameter of the array: use {{ NAME }} with index, lt, or {{{{ for two braces"),
        (
            "jobs[0].env.A",
            "two braces name no parameter of the array: use {{ NAME }} with index, lt, or {{{{ for two braces",
        ),
    ]
    async with world.client("vision") as client:
        plain = await client.post("/v1/workloads", json=document(jobs=jobs))
        assert plain.json()["spec"]["jobs"][0]["run"] == ["echo", "{{ lr }}"]
        assert plain.json()["phase"] == Phase.PENDING
