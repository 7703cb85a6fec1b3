"""Dependencies of elements on elements of the same index over the API: errors, `why`, and holds and releases."""

from typing import Any

import pytest
from sqlalchemy import func, select

from activities.lifecycle.dependencies import decide_dependencies
from domain.phases import Phase
from infra.db.array_rows import take_element
from infra.db.models import Workload
from tests.api.calls import act, get
from tests.api.world import ApiWorld, document

_ON_PREPARE = [{"workload": "prepare", "same_index": True}]


async def _submit(world: ApiWorld, array: Any, **fields: Any) -> Any:
    answer = await act(world, "/v1/workloads", "vision", document(array=array, **fields))
    assert answer.status_code == 202, answer.text
    return answer.json()


def _end(world: ApiWorld, array: str, index: int, phase: Phase) -> None:
    """Places and ends an element of an array whose positions are its indexes."""
    with world.session() as session:
        session.get_one(Workload, array, with_for_update=True)
        take_element(session, array, index, index)
        row = session.get_one(Workload, f"{array}-{index}")
        row.phase, row.finished_at = phase, func.now()


async def _why(world: ApiWorld, workload: str) -> list[str]:
    return [one["sentence"] for one in (await get(world, f"/v1/workloads/{workload}/why"))["reasons"]]


async def test_an_element_waits_for_the_one_of_its_index(world: ApiWorld) -> None:
    """The array says how many of its elements wait, and each element for which one. None of them has a row."""
    first = (await _submit(world, "0-9", name="prepare"))["id"]
    _end(world, first, 0, Phase.SUCCEEDED)  # Its element has the same name.
    made = await _submit(world, "2-4", name="train", after=_ON_PREPARE)
    assert [(one["predecessor"], one["state"]) for one in made["after"]] == [(first, "each")]
    assert (made["blocked"], made["spec"]["after"]) == (None, [{**_ON_PREPARE[0], "condition": "succeeded"}])
    array = made["id"]
    assert made["after"][0]["phase"] == (await get(world, f"/v1/workloads/{first}"))["phase"] == "running"
    assert await _why(world, array) == [
        f"3 elements wait until the elements of the same index of prepare ({first}) have succeeded"
    ]
    assert await _why(world, f"{array}-3") == [f"waits until prepare/3 ({first}-3) has succeeded; it is pending"]
    assert (await get(world, f"/v1/workloads/{array}-3"))["blocked"] == "waiting"
    refused = await act(world, f"/v1/workloads/{array}-3/cancel")
    assert refused.status_code == 409 and "waits for its dependencies" in refused.text
    _end(world, first, 3, Phase.SUCCEEDED)
    assert [one["code"] for one in (await get(world, f"/v1/workloads/{array}/why"))["reasons"]] == ["scan_pending"]
    assert (await get(world, f"/v1/workloads/{array}-3"))["blocked"] is None
    assert (await act(world, f"/v1/workloads/{array}-3/cancel")).status_code == 202
    with world.session() as session:
        assert set(session.scalars(select(Workload.id))) == {first, array, f"{first}-0", f"{first}-3", f"{array}-3"}


async def test_an_element_that_waits_in_vain_is_cancelled_without_a_row(world: ApiWorld) -> None:
    """So are the elements that wait for it. The array ends if no other is left."""
    first = (await _submit(world, "0-2", name="prepare"))["id"]
    second = (await _submit(world, "0-2", name="train", after=_ON_PREPARE))["id"]
    third = (await _submit(world, "1-2", name="test", after=[{"workload": "train", "same_index": True}]))["id"]
    _end(world, first, 1, Phase.FAILED)
    decide_dependencies(world.engine)
    for array, counts in ((second, (2, 1)), (third, (1, 1))):
        found = (await get(world, f"/v1/workloads/{array}"))["array"]
        assert (found["waiting"], found["cancelled"]) == counts
    element = await get(world, f"/v1/workloads/{second}-1")
    assert (element["phase"], element["reason"]["sentence"]) == (
        "cancelled",
        f"it depends on prepare/1 ({first}-1) having succeeded, which cannot happen any more: it is failed",
    )
    assert (await get(world, f"/v1/workloads/{third}-1"))["reason"]["detail"]["phase"] == "cancelled"
    await act(world, f"/v1/workloads/{first}/cancel")
    decide_dependencies(world.engine)
    for array in (second, third):
        assert (await get(world, f"/v1/workloads/{array}"))["phase"] == "cancelled"


async def test_elements_that_wait_in_vain_can_be_kept(world: ApiWorld) -> None:
    """`release` gives the conditions up, and the elements can start."""
    first = (await _submit(world, "0-1", name="prepare"))["id"]
    array = (await _submit(world, "0-1", after=_ON_PREPARE, if_never="keep"))["id"]
    await act(world, f"/v1/workloads/{first}/cancel")
    decide_dependencies(world.engine)
    assert (await get(world, f"/v1/workloads/{array}"))["array"]["waiting"] == 2
    assert (await get(world, f"/v1/workloads/{array}-1"))["blocked"] == "never"
    assert (await _why(world, f"{array}-1"))[0].endswith("`mizzen release` gives this condition up")
    await act(world, f"/v1/workloads/{array}/release")
    assert (await get(world, f"/v1/workloads/{array}-1"))["blocked"] is None


@pytest.mark.parametrize(
    ("array", "one", "message"),
    [
        (None, {"workload": "prepare"}, "only possible with array"),
        ("0-3", {"workload": "single"}, "workload single is not an array"),
        ("0-9", {"workload": "prepare"}, "array prepare has no index 5; it has 0-4,6-9"),
        ("0-3", {"table": "digits", "partition": "all"}, "only possible with workload"),
        (
            "0-1",
            {"workload": "even"},
            f"array even has no index 1; it has {','.join(str(2 * n) for n in range(20))} and others",
        ),
        (
            "0",
            {"workload": "scattered"},
            "the indexes of both arrays may have at most 1000 ranges and numbers, these have 1 and 1001",
        ),
    ],
)
async def test_wrong_indexes(world: ApiWorld, array: Any, one: dict[str, str], message: str) -> None:
    """The other workload must be an array that has all indexes."""
    await _submit(world, "0-4,6-9", name="prepare")
    for name, number in (("even", 22), ("scattered", 1001)):
        await _submit(world, ",".join(str(2 * n) for n in range(number)), name=name)
    world.add_workload(name="single")
    after = [{**one, "same_index": True}]
    answer = await act(world, "/v1/workloads", "vision", document(array=array, after=after))
    assert answer.status_code == 422
    assert [(error["path"], error["message"]) for error in answer.json()["errors"]] == [
        ("after[0].same_index", message)
    ]
