"""Dependencies over the API: what a document may name, what `why` and `show` say, and holds and releases."""

from typing import Any

import pytest

from activities.lifecycle.dependencies import decide_dependencies
from domain.phases import Phase
from infra.db.models import Workload
from infra.db.tables import Partition
from tests.api.calls import act, get
from tests.api.world import ApiWorld, document


async def submit(world: ApiWorld, after: object, key: str = "vision", **fields: Any) -> Any:
    return (await act(world, "/v1/workloads", key, document(after=after, **fields))).json()


async def test_a_name_means_the_newest_of_the_tenant(world: ApiWorld) -> None:
    """The id of the newest is kept; the name stays in the document, so that it can be submitted again."""
    world.add_workload(name="prepare")
    newest = world.add_workload(Phase.RUNNING, name="prepare")
    world.add_workload(name="prepare", tenant="speech")
    made = await submit(world, ["prepare", f"{newest}:ended"], name="prepare")
    assert [(one["predecessor"], one["condition"]) for one in made["after"]] == [
        (newest, "succeeded"), (newest, "ended"),
    ]  # fmt: skip
    assert (made["blocked"], made["queued"], made["eligible_s"]) == ("waiting", True, None)
    assert made["reason"]["sentence"] == f"waits until prepare ({newest}) has succeeded; it is running"
    assert made["spec"]["after"][0] == {"workload": "prepare", "condition": "succeeded"}
    again = await act(world, "/v1/workloads", "vision", made["spec"])
    assert again.json()["after"][0]["predecessor"] == made["id"], "it is the newest of this name now"


@pytest.mark.parametrize(
    ("reference", "key"),
    [("nothing", "vision"), ("digits", "vision"), ("theirs", "vision"), ("wl-0000000000000001", "vision"),
     ("wl-0000000000000001", "operator")],
)  # fmt: skip
async def test_only_earlier_workloads_of_the_tenant(world: ApiWorld, reference: str, key: str) -> None:
    """An unknown workload, itself and that of another tenant are refused with one message, and nothing is stored."""
    theirs = world.add_workload(name="theirs", tenant="speech")
    assert theirs == "wl-0000000000000001"
    answer = await act(world, "/v1/workloads", key, document(after=[reference], tenant="vision"))
    assert answer.status_code == 422
    assert [(error["path"], error["message"]) for error in answer.json()["errors"]] == [
        ("after[0]", f"tenant vision has no workload with the name or id {reference}; submit it first")
    ]
    assert [item["id"] for item in (await get(world, "/v1/workloads"))["items"]] == [theirs]


ENDED = [
    (Phase.SUCCEEDED, "succeeded", "met"), (Phase.SUCCEEDED, "ended", "met"), (Phase.SUCCEEDED, "failed", "never"),
    (Phase.SUCCEEDED, "started", "met"), (Phase.FAILED, "failed", "met"), (Phase.FAILED, "succeeded", "never"),
    (Phase.FAILED, "started", "never"), (Phase.CANCELLED, "failed", "never"), (Phase.CANCELLED, "ended", "met"),
    (Phase.RUNNING, "started", "met"), (Phase.RUNNING, "ended", "waiting"), (Phase.PREEMPTED, "started", "waiting"),
]  # fmt: skip


@pytest.mark.parametrize(("phase", "condition", "state"), ENDED)
async def test_a_condition_is_decided_at_the_submission_if_it_can_be(
    shared_world: ApiWorld, phase: Phase, condition: str, state: str
) -> None:
    """The phase at the submission decides. A workload that failed before its tasks ran has not started."""
    first = shared_world.add_workload(phase)
    made = await submit(shared_world, [{"workload": first, "condition": condition}])
    (one,) = made["after"]
    assert (one["state"], made["blocked"]) == (state, None if state == "met" else state)
    assert (one["phase"], one["decided_at"] is None) == (phase, state == "waiting")


async def test_a_partition_and_a_time(world: ApiWorld) -> None:
    """It waits for both, and says so; the partition is decided when it is added."""
    after = [{"table": "digits", "partition": "ds=2"}, {"table": "digits", "partition": "all"}]
    made = await submit(world, after, not_before="2h")
    why = await get(world, f"/v1/workloads/{made['id']}/why")
    assert [reason["code"] for reason in why["reasons"]] == ["partition_missing", "not_before"]
    assert why["summary"].startswith("pending: waits until table digits has the partition ds=2; its document does not")
    assert [one["state"] for one in made["after"]] == ["waiting", "met", "waiting"]
    with world.session() as session:
        session.add(Partition(data_table="digits", name="ds=2", location="tables/digits/2/", size_bytes=1))
    assert [one["state"] for one in (await get(world, f"/v1/workloads/{made['id']}"))["after"]] == [
        "met", "met", "waiting",
    ]  # fmt: skip
    unknown = await submit(world, [{"table": "digts", "partition": "all"}])
    assert [error["path"] for error in unknown["errors"]] == ["after[0].table"]


async def test_a_time_that_has_passed_blocks_nothing(world: ApiWorld) -> None:
    """A document with a time can be submitted again later."""
    made = await submit(world, None, not_before="2026-01-01T08:00+01:00")
    assert (made["blocked"], made["reason"]["code"]) == (None, "scan_pending")
    assert made["spec"]["not_before"] == "2026-01-01T07:00:00+00:00"


async def test_what_can_never_hold_ends_the_workload_or_keeps_it(world: ApiWorld) -> None:
    """Without `if_never: keep` it is cancelled with the reason; a kept one can be released."""
    first = world.add_workload(name="prepare")
    ends = await submit(world, ["prepare"])
    keeps = await submit(world, ["prepare"], if_never="keep", not_before="2h")
    assert (await act(world, f"/v1/workloads/{first}/cancel")).status_code == 202
    assert decide_dependencies(world.engine) == [ends["id"]]
    why = await get(world, f"/v1/workloads/{ends['id']}/why")
    sentence = f"depends on prepare ({first}) having succeeded, which cannot happen any more: it is cancelled"
    assert (why["phase"], why["summary"]) == ("cancelled", f"cancelled: it {sentence}")
    kept = await get(world, f"/v1/workloads/{keeps['id']}")
    assert (kept["phase"], kept["blocked"], kept["reason"]["code"]) == ("pending", "never", "dependency_never")
    assert kept["reason"]["sentence"] == f"it {sentence}; `mizzen release` gives this condition up"
    assert [w["id"] for w in (await get(world, "/v1/workloads", phase="blocked"))["items"]] == [keeps["id"]]
    released = (await act(world, f"/v1/workloads/{keeps['id']}/release", "vision")).json()
    assert (released["blocked"], released["reason"]["code"]) == ("waiting", "not_before")


async def test_a_hold_of_a_blocked_workload(world: ApiWorld) -> None:
    """The pause lasts until both the hold and the dependencies have ended, in any order."""
    first = world.add_workload(name="prepare")
    one, two = [(await submit(world, ["prepare:ended"]))["id"] for _ in range(2)]
    for id_ in (one, two):
        held = (await act(world, f"/v1/workloads/{id_}/hold")).json()
        assert (held["held_by"], held["blocked"], held["reason"]["code"]) == ("key-operator", "waiting", "held")
    codes = [reason["code"] for reason in (await get(world, f"/v1/workloads/{one}/why"))["reasons"]]
    assert codes == ["held", "dependency"]

    async def released(id_: str) -> tuple[Any, bool]:
        await act(world, f"/v1/workloads/{id_}/release")
        with world.session() as session:
            row = session.get_one(Workload, id_)
            return row.blocked, row.held_at is not None

    assert await released(one) == ("waiting", True)
    await act(world, f"/v1/workloads/{first}/cancel")
    with world.session() as session:
        assert (session.get_one(Workload, one).held_at, session.get_one(Workload, two).held_at is None) == (None, False)
    assert await released(two) == (None, False)
