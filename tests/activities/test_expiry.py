"""Expiry deletes records and objects after their retention time, with their dependent rows and nothing else."""

import asyncio
import fcntl
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select, text, update
from temporalio.testing import ActivityEnvironment

from activities.capacity.ledger import record_refusal
from activities.capacity.pools import request_instance
from activities.data.buckets import BucketCheck
from activities.lifecycle.housekeeping import HousekeepingActivities
from capacity.offers import Offer, Shape
from capacity.pools import Pool
from capacity.provider import LaunchRefused, Refusal
from domain import ids
from domain.capacity import CapacityKind
from domain.phases import Phase
from infra.db.lent_machines import GivenPending, given_by
from infra.db.logs import Audit, Event, MachineChange, Outbox
from infra.db.models import Allocation, Attempt, Idempotency, Region, Workload
from infra.db.schema import SCHEMA
from infra.db.services import ServiceRow
from infra.db.tenants import Archive, ArchivePart
from mizzen.objects.files import FileStore
from tests.activities.invariants import check_machines
from tests.activities.world import World, job

M = "r/c/m"


@pytest.fixture
def house(town: World) -> HousekeepingActivities:
    """Housekeeping activities that need no Temporal server."""
    return HousekeepingActivities(town.engine, town.settings)


def _finished(world: World, workload: str, days: float) -> None:
    world.alter(Workload, workload, finished_at=text(f"now() - interval '{days} days'"))
    with world.session() as session:
        session.execute(
            text("update event set at = now() - make_interval(secs => 86400 * :d) where workload = :w"),
            {"d": days, "w": workload},
        )


def _objects(world: World, *workloads: str) -> None:
    for workload in workloads:
        for key in (
            f"checkpoints/{workload}/a/0",
            f"logs/{workload}/1/main/0/0",
            ids.output_part_key(workload, 1, "main", 0, "model", 0),
            ids.output_manifest_key(workload, 1, "main", 0, "model"),
            ids.launch_key(workload, 1, "0" * 64),
        ):
            world.bucket("r").put(key, b"x")


def _keys(world: World) -> set[str]:
    return {info.key.split("/")[1] for info in world.bucket("r").list("")}


def _counts(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {
            table.name: int(connection.scalar(select(func.count()).select_from(table)) or 0)
            for table in SCHEMA.sorted_tables
        }


def test_what_was_kept_long_enough_goes(town: World, house: HousekeepingActivities) -> None:
    """Objects are deleted after two weeks and records after three months, except those of live workloads."""
    town.tenant("high", level=1)
    old, weeks, young = (town.running(job(gpus=1)) for _ in range(3))
    _objects(town, old, weeks, young, f"{old}-not")
    for workload, days in ((old, 91), (weeks, 15), (young, 13)):
        town.release(workload, Phase.SUCCEEDED)
        _finished(town, workload, days)
    live = town.running(job(gpus=1))
    _objects(town, live)
    with town.session() as session:
        session.execute(text("update event set at = now() - interval '91 days' where workload = :w"), {"w": live})
        session.execute(text("update event set at = now() - interval '91 days' where workload is null"))
        session.execute(text("update outbox set delivered_at = now() - interval '2 hours' where kind <> 'wake'"))
        session.add_all([Audit(actor="a", action="x", target="y"), Audit(actor="b", action="x", target="y")])
        session.flush()
        session.execute(text("update audit set at = now() - interval '91 days' where actor = 'a'"))
        own = {"run": f"{old}.1"}
        session.execute(text("update usage_run set ended_at = now() - interval '91 days' where run = :run"), own)
    ActivityEnvironment().run(house.expire)
    assert _keys(town) == {young, live, f"{old}-not"}
    with town.session() as session:
        assert set(session.scalars(select(Workload.id))) == {weeks, young, live}
        expired = {w.id for w in session.scalars(select(Workload)) if w.expired_at is not None}
        assert expired == {weeks}
        assert set(session.scalars(select(Event.workload))) == {weeks, young, live}
        assert session.scalars(select(Audit.actor)).all() == ["b"]
        assert set(session.scalars(text("select run from usage_run"))) == {f"{weeks}.1", f"{young}.1"}
        assert set(session.scalars(select(Outbox.kind))) == {"wake"}
    before = town.dump()
    ActivityEnvironment().run(house.expire)
    assert town.dump() == before


def test_a_workload_goes_with_all_that_names_it(town: World, house: HousekeepingActivities) -> None:
    """Deleting a workload deletes its attempts, allocations, evictions and idempotency keys, and changes no mask.

    What it cost is in the sums by day.
    """
    town.tenant("high", level=1)
    victim = town.running(job(gpus=4))
    evictor = town.submit(job(gpus=3), tenant="high")
    town.tick()
    town.release(victim, Phase.PREEMPTED)
    town.run(evictor)
    for workload in (victim, evictor):
        with town.session() as session:
            session.add(Idempotency(api_key="k", key=workload, body_sha256="", workload=workload))
    town.change(victim, Phase.CANCELLED)
    _finished(town, victim, 100)
    town.tick()
    masks = town.masks(M)
    counts = _counts(town.engine)
    assert counts["cost_pending"] == 1
    ActivityEnvironment().run(house.expire)
    after = _counts(town.engine)
    logs = ("event", "change", "publication")
    gone = {name: counts[name] - after[name] for name in counts if counts[name] != after[name] and name not in logs}
    assert gone.pop("cost_pending") == 1 and gone.pop("cost_day") < 0 and gone.pop("ended_total") == -1
    assert gone == {"workload": 1, "attempt": 1, "allocation": 1, "eviction": 1, "idempotency": 1}
    assert town.masks(M) == masks == (0b111, 0)
    check_machines(town)
    town.release(evictor, Phase.SUCCEEDED)
    check_machines(town)


def test_the_hours_of_a_lent_machine_outlive_its_workloads(town: World, house: HousekeepingActivities) -> None:
    """A workload is deleted only after its hours are in the sums of its machines."""
    workload = town.running(job(gpus=4))
    with town.session() as session:
        session.execute(update(Attempt).values(launch_limit_s=60.0))
    town.release(workload, Phase.SUCCEEDED)
    _finished(town, workload, 100)
    ActivityEnvironment().run(house.expire)
    assert _counts(town.engine)["workload"] == 1  # Its evidence is not final.
    with town.session() as session:
        held_gpu_h = given_by(session, [M])[M].held_gpu_h
        session.execute(update(GivenPending).values(ended_at=GivenPending.ended_at - timedelta(hours=2)))
    assert held_gpu_h > 0
    ActivityEnvironment().run(house.expire)
    assert _counts(town.engine)["workload"] == 0
    with town.session() as session:
        assert given_by(session, [M])[M].held_gpu_h == held_gpu_h


def test_deleting_history_locks_no_machine(town: World, house: HousekeepingActivities) -> None:
    """Old allocations are deleted without locks on their machines' rows."""
    workload = town.running(job(gpus=4))
    town.release(workload, Phase.SUCCEEDED)
    _finished(town, workload, 100)
    with town.session() as session:
        session.execute(text("select 1 from machine for update"))
        ActivityEnvironment().run(house.expire)
    with town.session() as session:
        assert session.scalars(select(Allocation)).all() == []


def test_objects_that_cannot_be_deleted_now(town: World, house: HousekeepingActivities) -> None:
    """A workload whose objects cannot be deleted is kept until the next run; other workloads are deleted."""
    first, second = town.running(job(gpus=1)), town.running(job(gpus=1))
    _objects(town, first, second)
    for workload in (first, second):
        town.release(workload, Phase.SUCCEEDED)
        _finished(town, workload, 100)
    delete = FileStore.delete

    def refuse(store: FileStore, key: str) -> None:
        if first in key:
            raise OSError("read-only")
        delete(store, key)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FileStore, "delete", refuse)
        ActivityEnvironment().run(house.expire)
    with town.session() as session:
        assert [w.id for w in session.scalars(select(Workload))] == [first]
    assert _keys(town) == {first}
    ActivityEnvironment().run(house.expire)
    with town.session() as session:
        assert session.scalars(select(Workload)).all() == []
    assert _keys(town) == set()


async def test_a_bucket_that_is_not_mounted_is_not_empty(town: World, house: HousekeepingActivities) -> None:
    """Workloads are kept while the folder of a region's bucket is missing, or another folder is in its place."""
    workload = town.running(job(gpus=1))
    _objects(town, workload)
    town.release(workload, Phase.SUCCEEDED)
    _finished(town, workload, 15)
    await BucketCheck(town.engine, town.settings.buckets, "r").check()
    folder, away = town.folder / "buckets" / "r", town.folder / "away"
    folder.rename(away)
    for prepare in (lambda: None, folder.mkdir):
        prepare()
        await asyncio.to_thread(ActivityEnvironment().run, house.expire)
        assert town.workload(workload).expired_at is None
    folder.rename(town.folder / "other")
    away.rename(folder)
    await asyncio.to_thread(ActivityEnvironment().run, house.expire)
    assert town.workload(workload).expired_at is not None
    assert {info.key for info in town.bucket("r").list("")} == {ids.bucket_marker_key("r")}


def test_a_store_that_never_answers(town: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are deleted although a store accepts connections and never answers, and so are the objects elsewhere."""
    first, second = town.running(job(gpus=1)), town.running(job(gpus=1))
    _objects(town, first, second)
    for workload in (first, second):
        town.release(workload, Phase.SUCCEEDED)
        _finished(town, workload, 100)
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "east")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with town.session() as session:
        session.add(Audit(actor="a", action="x", target="y", at=func.now() - timedelta(days=91)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        town.alter(Attempt, (first, 1), store_url="s3://silent/store")
        house = HousekeepingActivities(town.engine, town.settings, stores_s=2.0)
        for _ in range(2):
            expiring = threading.Thread(target=ActivityEnvironment().run, args=(house.expire,), daemon=True)
            expiring.start()
            expiring.join(30)
            assert not expiring.is_alive(), "it waits for the store"
        with town.session() as session:
            assert session.scalars(select(Audit)).all() == []
            assert [(w.id, w.expired_at) for w in session.scalars(select(Workload))] == [(first, None)]
        assert _keys(town) == set(), "in the region's bucket"
        silent.accept()[0].close()
        silent.settimeout(0)
        with pytest.raises(BlockingIOError):
            silent.accept()  # The second round does not ask a store for which the first one still waits.


def test_what_interrupted_copies_left_goes(town: World, house: HousekeepingActivities) -> None:
    """Old partial uploads and files of dead writers are deleted; recent ones and files that are being written stay.

    An unreachable bucket does not delay the others.
    """
    staging = Path(town.bucket("r").uri(".staging").removeprefix("file://"))
    staging.mkdir(parents=True)
    for name, age_s in (("old.upload", 13 * 3600), ("young.upload", 11 * 3600)):
        (staging / name).write_bytes(b"parts")
        at_s = time.time() - age_s
        os.utime(staging / name, (at_s, at_s))
    (staging / "of-a-dead-writer").write_bytes(b"half an object")
    written = staging / "being-written"
    with town.session() as session:
        session.add(Region(name="a-lost", bucket_url="file://no-such-host/folder"))
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ActivityEnvironment().run(house.expire)
    assert {path.name for path in staging.iterdir()} == {"young.upload", "being-written"}


def test_archives_go_that_no_unfinished_workload_names(town: World, house: HousekeepingActivities) -> None:
    """An old archive is deleted from database and bucket, unless an unfinished workload or another tenant uses it."""
    town.tenant("other")
    used, old, young, shared = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)
    with town.session() as session:
        for sha256 in (used, old, young, shared):
            session.add(Archive(tenant="t", sha256=sha256, body=b"x", paths=b""))
        session.add(Archive(tenant="other", sha256=shared, body=b"x", paths=b""))
        session.flush()
        aged = "update archive set created_at = now() - interval '31 days' where sha256 <> :young and tenant = 't'"
        session.execute(text(aged), {"young": young})
    for sha256 in (used, old, young, shared):
        town.bucket("r").put(ids.archive_key(sha256), b"x")
    live = town.running(job(gpus=1), workdir=used)
    ActivityEnvironment().run(house.expire)
    assert {info.key for info in town.bucket("r").list("archives/")} == {
        ids.archive_key(sha256) for sha256 in (used, young, shared)
    }
    with town.session() as session:
        left = {(a.tenant, a.sha256) for a in session.scalars(select(Archive))}
    assert left == {("t", used), ("t", young), ("other", shared)}
    town.release(live, Phase.SUCCEEDED)
    ActivityEnvironment().run(house.expire)
    assert town.bucket("r").size(ids.archive_key(used)) is None


def test_parts_go_that_no_archive_has(town: World, house: HousekeepingActivities) -> None:
    """A day after their last upload, unless an archive of the tenant has them, or an upload uses them meanwhile."""
    town.tenant("other")
    with town.session() as session:
        session.add(Archive(tenant="t", sha256="a" * 64, body=b"", parts=["used"], paths=b""))
        for tenant, sha256 in (
            ("t", "used"),
            ("t", "old"),
            ("t", "held"),
            ("t", "found"),
            ("t", "young"),
            ("other", "used"),
        ):
            session.add(ArchivePart(tenant=tenant, sha256=sha256, body=b"x"))
        session.flush()
        session.execute(text("update archive_part set used_at = now() - interval '25 hours' where sha256 <> 'young'"))
    with town.session() as holding:
        holding.execute(text("select from archive_part where sha256 = 'held' for key share"))
        holding.execute(text("update archive_part set used_at = now() where sha256 = 'found'"))
        ActivityEnvironment().run(house.expire)
    for kept in ({"used", "held", "found", "young"}, {"used", "found", "young"}):
        with town.session() as session:
            left = {(part.tenant, part.sha256) for part in session.scalars(select(ArchivePart))}
        assert left == {("t", part) for part in kept}
        ActivityEnvironment().run(house.expire)


def test_instances_that_have_been_gone_for_long_go(town: World, house: HousekeepingActivities) -> None:
    """Instances that have been gone for three months are deleted with their refusals; live instances stay."""
    offer = Offer("sim", "r", "za", CapacityKind.SPOT, Shape("small", 4, "a100", 1000, 1), 4.0, 30.0)
    with town.session() as session:
        old, young, live = (request_instance(session, Pool("r", "burst", 3), offer) for _ in range(3))
        record_refusal(session, old, offer, LaunchRefused(Refusal.CAPACITY, "none left"))
        aged = "update instance set phase = 'gone', gone_at = now() - make_interval(days => :days) where id = :id"
        for instance, days in ((old, 91), (young, 89)):
            session.execute(text(aged), {"id": instance, "days": days})
        session.execute(
            text("update instance set requested_at = now() - interval '1 year' where id = :id"), {"id": live}
        )
    ActivityEnvironment().run(house.expire)
    with town.session() as session:
        assert set(session.scalars(text("select id from instance"))) == {young, live}
        assert session.scalars(text("select instance from launch_refusal")).all() == []


def test_instances_of_a_service_are_kept_as_long_as_the_service(town: World, house: HousekeepingActivities) -> None:
    """The cost of a service is read from its instances, so it does not fall. They are deleted with the service."""
    offer = Offer("sim", "r", "za", CapacityKind.SPOT, Shape("small", 4, "a100", 1000, 1), 4.0, 30.0)
    with town.session() as session:
        session.add(ServiceRow(id="sv-1", tenant="t", name="chat"))
        own = request_instance(session, Pool("r", "sv-1", 0), offer)
        aged = "update instance set phase = 'gone', gone_at = now() - interval '1 year' where id = :id"
        session.execute(text(aged), {"id": own})
    kept = []
    for ended_days in (None, 89, 91):
        with town.session() as session:
            session.get_one(ServiceRow, "sv-1").ended_at = (
                None if ended_days is None else func.now() - timedelta(days=ended_days)
            )
        ActivityEnvironment().run(house.expire)
        with town.session() as session:
            kept.append(session.scalars(text("select id from instance")).all())
    assert kept == [[own], [own], []]


def test_the_state_of_a_machine_at_the_begin_of_the_kept_time_stays(town: World, house: HousekeepingActivities) -> None:
    """Of older changes of a machine only the last is kept; none of a machine that was removed is."""
    days = {M: (30, 20, 15, 3), "r/c/removed": (40, 20)}
    with town.session() as session:
        session.execute(text("delete from machine_change"))
        for machine, changes in days.items():
            for ago in changes:
                since = func.now() - timedelta(days=ago)
                session.add(MachineChange(machine=machine, since=since, state="ready", is_closed=False))
    ActivityEnvironment().run(house.expire)
    with town.session() as session:
        found = session.execute(
            select(MachineChange.machine, func.extract("day", func.now() - MachineChange.since)).order_by("since")
        )
        assert [(machine, int(ago)) for machine, ago in found] == [(M, 15), (M, 3)]
