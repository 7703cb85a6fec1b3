"""On-demand copies when no region has both data and hardware: the target, one copy at a time, and the reasons."""

from datetime import UTC, datetime, timedelta

import pytest
from temporalio.testing import ActivityEnvironment

from activities.data.copies import CopyActivities
from activities.data.on_demand import targets
from domain.protocol.data import ReplicateTable
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid
from infra.db.models import Machine, Region
from infra.db.tables import Partition, Replica, Table
from tests.activities.world import World, job


@pytest.fixture
def fleet(world: World) -> World:
    """A table in `home`, which has no machines; machines in `east` and `west`, which have no table."""
    for region in ("east", "home", "west"):
        world.region(region)
    world.machine("east/c/m", 4)
    world.machine("west/c/m", 4)
    world.table("words", 1000, "home")
    return world


def _copies(world: World) -> list[tuple[str, str, str | None]]:
    return [(e["region"], e["detail"]["table"], e["workload"]) for e in world.events(kind="replica.copying")]


def test_a_copy_is_started_once_and_shown(fleet: World) -> None:
    """The table is copied once, to the region that could start the workload soonest; its progress is a reason."""
    fleet.running(job(gpus=4), regions_allowed=("east",))
    workload = fleet.submit(job(gpus=2), tables=("words",))
    for _ in range(3):
        fleet.tick()
        assert fleet.waiting(workload) == [
            "replicating_data west",
            "data_not_here east",
            "no_hardware home",
            "data_not_here west",
        ]
    assert _copies(fleet) == [("west", "words", workload)]
    with fleet.session() as session:
        row = session.get_one(Replica, ("words", "west"))
        assert (row.state, row.source_region, row.requested_by) == ("copying", "home", workload)
    assert fleet.put_out("replicate") == 1
    fleet.alter(Replica, ("words", "west"), done_bytes=400)
    fleet.tick()
    assert fleet.reasons(workload)[0]["detail"] == {
        "table": "words", "region": "west", "done_bytes": 400, "total_bytes": 1000,
    }  # fmt: skip


def test_a_complete_copy_places_the_workload(fleet: World) -> None:
    """When the copy is complete, a scan is requested and the workload is placed in that region."""
    fleet.bucket("home").put("tables/words/part-0", bytes(1000))
    workload = fleet.submit(job(gpus=2), tables=("words",), regions_excluded=("east",))
    fleet.tick()
    wakes = fleet.put_out("wake")
    copies = CopyActivities(fleet.engine, fleet.settings)
    assert ActivityEnvironment().run(copies.copy_table, ReplicateTable("words", "home", "west")) == 1000
    assert fleet.put_out("wake") == wakes + 1
    assert fleet.tick().awarded == 1
    assert fleet.workload(workload).region == "west" and fleet.reasons(workload) == []


def test_where_nothing_is_free_the_region_that_can_place_most(fleet: World) -> None:
    """If no region could start the workload now, the table goes to the region where most of its tasks fit."""
    fleet.running(job(gpus=3), regions_allowed=("east",))
    fleet.running(job(gpus=1), regions_allowed=("west",))
    workload = fleet.submit(job(tasks=4, gpus=1), tables=("words",))
    fleet.tick()
    assert _copies(fleet) == [("west", "words", workload)]


def test_a_second_workload_waits_for_the_first_ones_copy(fleet: World) -> None:
    """If the table is already being copied to a suitable region, no second copy is started."""
    first = fleet.submit(job(gpus=4), tables=("words",))
    fleet.tick()
    ((target, _, _),) = _copies(fleet)
    fleet.running(job(gpus=4), regions_allowed=(target,))
    second = fleet.submit(job(gpus=2), tables=("words",))
    fleet.tick()
    assert _copies(fleet) == [(target, "words", first)]
    assert fleet.waiting(second)[0] == f"replicating_data {target}"


def test_only_what_is_missing_is_copied(fleet: World) -> None:
    """Only missing tables are copied, from the home if it is complete, else from another region."""
    fleet.table("images", 10, "west")
    fleet.table("sounds", 10, "east", "home", home="east")
    workload = fleet.submit(job(gpus=4), tables=("images", "sounds", "words"), regions_excluded=("east",))
    fleet.tick()
    assert sorted(_copies(fleet)) == [("west", "sounds", workload), ("west", "words", workload)]
    with fleet.session() as session:
        assert session.get_one(Replica, ("sounds", "west")).source_region == "east"
    assert fleet.waiting(workload)[:2] == ["replicating_data west"] * 2


def test_data_that_is_nowhere(fleet: World) -> None:
    """A table that was deleted after submission gives the reason `data_nowhere`."""
    fleet.table("gone", 1, "home")
    first = fleet.submit(job(gpus=1), tables=("gone",))
    with fleet.session() as session:
        session.delete(session.get_one(Table, "gone"))
    second = fleet.submit(job(gpus=1))
    fleet.tick()
    assert fleet.waiting(first)[0] == "data_nowhere"
    assert _copies(fleet) == [] and fleet.workload(second).region is not None


def test_replicas_that_do_not_count(fleet: World) -> None:
    """Incomplete replicas and replicas in deletion place no workload: the first is completed, the second is kept."""
    fleet.running(job(gpus=4), regions_allowed=("east",))
    with fleet.session() as session:
        session.add(Replica(data_table="words", region="west", state="ready", whole=False))
    workload = fleet.submit(job(gpus=2), tables=("words",))
    fleet.tick()
    assert _copies(fleet) == [("west", "words", workload)]
    with fleet.session() as session:
        row = session.get_one(Replica, ("words", "west"))
        assert (row.whole, row.state, row.source_region) == (True, "copying", "home")
        row.state, row.delete_at = "deleting", datetime.now(UTC) + timedelta(hours=1)
    fleet.tick()
    assert len(_copies(fleet)) == 2, "the replica was never complete, so its copy continues"
    with fleet.session() as session:
        session.get_one(Replica, ("words", "west")).state = "ready"
    with fleet.session() as session:
        row = session.get_one(Replica, ("words", "west"))
        row.state, row.delete_at = "deleting", datetime.now(UTC) + timedelta(hours=1)
    fleet.tick()
    assert len(_copies(fleet)) == 2 and fleet.put_out("replicate") == 2
    with fleet.session() as session:
        row = session.get_one(Replica, ("words", "west"))
        assert (row.state, row.delete_at) == ("ready", None)
    assert fleet.tick().awarded == 1 and fleet.workload(workload).region == "west"


def test_a_replica_whose_time_is_over_is_no_target(fleet: World) -> None:
    """A table is not copied to a region that is deleting its replica."""
    fleet.running(job(gpus=4), regions_allowed=("east",))
    with fleet.session() as session:
        session.add(Replica(data_table="words", region="west", state="deleting", delete_at=datetime.now(UTC)))
    workload = fleet.submit(job(gpus=2), tables=("words",))
    fleet.tick()
    assert _copies(fleet) == []
    assert fleet.waiting(workload) == ["data_not_here east", "no_hardware home", "data_not_here west"]
    with fleet.session() as session:
        session.delete(session.get_one(Replica, ("words", "west")))
    fleet.tick()
    assert _copies(fleet) == [("west", "words", workload)]


def test_no_copy_while_a_region_with_the_data_may_only_be_away(fleet: World) -> None:
    """While a region with the data does not answer, nothing is copied: it may have the hardware too."""
    fleet.machine("home/c/m", 4)
    workload = fleet.submit(job(gpus=1), tables=("words",))
    fleet.tick("home")
    assert _copies(fleet) == []
    assert fleet.waiting(workload) == ["data_not_here east", "region_silent home", "data_not_here west"]
    assert fleet.tick().awarded == 1
    excluding = fleet.submit(job(gpus=1), tables=("words",), regions_excluded=("home",))
    fleet.tick("home")
    assert [w for _, _, w in _copies(fleet)] == [excluding]


def test_data_goes_to_no_region_that_is_away(fleet: World) -> None:
    """A region that does not answer is never the target of a copy."""
    fleet.running(job(gpus=3), regions_allowed=("west",))
    fleet.submit(job(gpus=2), tables=("words",))
    fleet.tick("east")
    assert [region for region, _, _ in _copies(fleet)] == ["west"]


def test_no_copy_for_who_only_waits_for_room(fleet: World) -> None:
    """If one region has both data and hardware but no free capacity, the workload waits and nothing is copied."""
    fleet.table("images", 10, "east")
    fleet.running(job(gpus=4), regions_allowed=("east",))
    workload = fleet.submit(job(gpus=4), tables=("images",))
    fleet.tick()
    assert _copies(fleet) == []
    assert fleet.waiting(workload) == [
        "insufficient_capacity east",
        "no_hardware home",
        "data_not_here home",
        "data_not_here west",
    ]


def test_no_copy_where_no_region_has_the_hardware(fleet: World) -> None:
    """For a workload that fits in no region, nothing is copied."""
    workload = fleet.submit(job(gpus=8), tables=("words",))
    fleet.alter(Machine, "west/c/m", cordon={"code": "x", "detail": {}})
    fleet.tick()
    assert _copies(fleet) == []
    assert "no_hardware east" in fleet.waiting(workload) and "no_hardware west" in fleet.waiting(workload)


@pytest.fixture
def stale(fleet: World) -> World:
    """A replica in `west` that lacks an appended partition, and a tenant of high priority."""
    with fleet.session() as session:
        session.add(Replica(data_table="words", region="west", state="ready"))
    with fleet.session() as session:
        session.add(Partition(data_table="words", name="new", location="tables/words/new/", size_bytes=7))
    fleet.bucket("home").put("tables/words/part-0", bytes(993))
    fleet.bucket("home").put("tables/words/new/part-0", bytes(7))
    fleet.tenant("high", level=2)
    return fleet


def test_who_has_high_priority_reads_no_stale_replica(stale: World) -> None:
    """A stale replica places a low-priority workload; for a high-priority workload it is completed first, once."""
    low = stale.submit(job(gpus=2), tables=("words",))
    high = stale.submit(job(gpus=2), tables=("words",), tenant="high", regions_excluded=("east",))
    for awarded in (1, 0):
        assert stale.tick().awarded == awarded
        assert stale.waiting(high) == [
            "replicating_data west", "region_excluded east", "no_hardware home", "data_stale west"
        ]  # fmt: skip
    assert stale.workload(low).region == "west"
    (event,) = stale.events(kind="replica.topping_up")
    assert (event["region"], event["workload"]) == ("west", high)
    assert (_copies(stale), stale.put_out("replicate")) == ([], 1)
    with stale.session() as session:
        row = session.get_one(Replica, ("words", "west"))
        assert (row.state, row.topping_up, row.topped_up_for) == ("ready", True, high)
        since = row.stale_since
    assert since is not None
    said = stale.reasons(high)[-1]["detail"]["stale_since"]
    assert datetime.fromisoformat(said) == since.replace(microsecond=0)


def test_a_replica_that_was_topped_up_places_those_who_waited(stale: World) -> None:
    """Only missing partitions are copied, the replica stays ready meanwhile, and a scan is requested at the end."""
    high = stale.submit(job(gpus=2), tables=("words",), tenant="high", regions_excluded=("east",))
    stale.tick()
    wakes = stale.put_out("wake")
    copies = CopyActivities(stale.engine, stale.settings)
    assert ActivityEnvironment().run(copies.copy_table, ReplicateTable("words", "home", "west")) == 1007
    assert [info.key for info in stale.bucket("west").list("")] == ["tables/words/new/part-0"]
    (event,) = stale.events(kind="replica.fresh")
    assert event["detail"] == {"table": "words", "source": "home", "bytes": 1007}
    assert (stale.put_out("wake"), stale.events(kind="replica.ready")) == (wakes + 1, [])
    assert stale.tick().awarded == 1 and stale.workload(high).region == "west"


HERE, STALE, HARDWARE, FULL = "data_not_here", "data_stale", "no_hardware", "insufficient_capacity"


@pytest.mark.parametrize(
    ("codes", "targets_"),
    [
        ([[HERE]], "0"),
        ([[HERE], [HARDWARE]], "01"),
        ([[HERE], [HARDWARE, HERE], ["region_excluded"], ["region_silent"]], "0123"),
        ([[HERE], [STALE], [HARDWARE, STALE]], "012"),
        ([[HARDWARE, HERE]], ""),
        ([[HARDWARE], ["region_silent"]], ""),
        ([[HERE], [FULL]], ""),
        ([[STALE], [FULL], [HARDWARE, STALE], [HERE]], "0"),
        ([[HERE], ["award_conflict"]], ""),
        ([[HERE], []], ""),
        ([], ""),
    ],
)
def test_when_data_is_all_that_is_lacking(codes: list[list[str]], targets_: str) -> None:
    """Data is copied if no region that answered has both data and hardware, or if one lacks only recent appends."""
    bids = [Bid("w", str(n), None, tuple(Reason(ReasonCode(c)) for c in own)) for n, own in enumerate(codes)]
    assert "".join(targets(bids)) == targets_


def test_a_region_without_storage_is_no_target(fleet: World) -> None:
    """The table goes to a region with enough storage, even if another one could start the workload sooner.

    If no region has enough storage, the reasons give the sizes.
    """
    fleet.running(job(gpus=4), regions_allowed=("east",))
    fleet.alter(Region, "west", storage_bytes=999)
    workload = fleet.submit(job(gpus=2), tables=("words",))
    fleet.tick()
    assert _copies(fleet) == [("east", "words", workload)]
    fleet.table("images", 700, "home")
    fleet.alter(Region, "east", storage_bytes=1600)
    other = fleet.submit(job(gpus=2), tables=("images", "words"))
    fleet.tick()
    assert _copies(fleet) == [("east", "words", workload)]
    assert fleet.reasons(other)[:2] == [
        Reason(
            ReasonCode.NO_STORAGE,
            {"region": region, "stored_bytes": stored, "more_bytes": more, "storage_bytes": storage},
        ).to_json()
        for region, stored, more, storage in (("east", 1000, 700, 1600), ("west", 0, 1700, 999))
    ]
