"""The launch description: machine, rank and slots of each task, and secrets that are stored only in sealed form."""

import base64
import hashlib
import json
from collections import defaultdict
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from nacl.public import PrivateKey, SealedBox
from sqlalchemy import select
from temporalio.exceptions import ApplicationError

from activities.lifecycle.archive_files import ArchiveWriter
from agent.sealed import CannotUnseal, unseal
from domain import ids
from domain.phases import Phase
from domain.protocol.workloads import StageRequest
from domain.reasons import Reason, ReasonCode
from domain.spec import CheckpointSpec, LimitsSpec
from infra.db.logs import Event
from infra.db.models import Attempt, Cluster, Workload
from infra.db.tables import Partition, Replica
from infra.db.tenants import Archive, ArchivePart, Secret
from infra.keys import encrypt_secret, load_master_key
from tests.activities.staging import stage_launch
from tests.activities.world import World, job

PLAIN = "s3cret-value-that-nobody-may-see"


@pytest.fixture
def keys(world: World) -> dict[str, PrivateKey]:
    """A region with three machines in two racks, and their private keys."""
    world.region("r")
    keys = {f"r/c/m{n}": PrivateKey.generate() for n in range(3)}
    for (machine, key), rack in zip(keys.items(), ("k2", "k1", "k2"), strict=True):
        world.machine(machine, 2, rack=rack, public_key=base64.b64encode(bytes(key.public_key)).decode())
    load_master_key(world.settings.master_key_path, create=True)
    return keys


def _secret(world: World, name: str, value: str) -> None:
    key = load_master_key(world.settings.master_key_path)
    with world.session() as session:
        session.merge(Secret(tenant="t", name=name, box=encrypt_secret(key, value)))


@pytest.mark.usefixtures("keys")
def test_stale_tables_are_told(world: World) -> None:
    """Launch description and attempt give the time since which the region's replica of a table is stale."""
    world.region("home")
    world.table("words", 1, "home", "r")
    world.table("images", 1, "r")
    for table in ("words", "images"):
        with world.session() as session:
            session.add(Partition(data_table=table, name="new", location=f"tables/{table}/new/", size_bytes=1))
    workload = world.running(job(), tables=("words", "images"))
    _, launch = stage_launch(world, workload)
    with world.session() as session:
        since = session.get_one(Replica, ("words", "r")).stale_since
    assert launch.stale_tables == {"words": since}
    told = world.attempt(workload).stale_tables
    assert told is not None and {t: datetime.fromisoformat(at) for t, at in told.items()} == {"words": since}
    world.alter(Replica, ("words", "r"), stale_since=None)
    assert stage_launch(world, workload)[1].stale_tables == {}
    assert world.attempt(workload).stale_tables is None


@pytest.mark.usefixtures("keys")
def test_lent_machines_are_told(world: World) -> None:
    """The launch plan says which machines owners lend."""
    workload = world.running(job(gpus=2))
    assert [node.lent for node in stage_launch(world, workload)[0].nodes] == [False]
    world.alter(Cluster, ("r", "c"), capacity="voluntary")
    assert [node.lent for node in stage_launch(world, workload)[0].nodes] == [True]


@pytest.mark.usefixtures("keys")
def test_who_runs_where(world: World) -> None:
    """Each task has a rank in its job and on its machine; nodes are ordered by rack; no two tasks share a slot."""
    world.table("words", 1, "r")
    workload = world.running(
        job("train", tasks=4, gpus=1, env={"A": "1"}),
        job("eval", tasks=1, gpus=2),
        job("log", tasks=2, gpus=0),
        tables=("words",),
        files={"a/b.txt": "hello"},
        checkpoint=CheckpointSpec(interval_s=5, grace_s=7, keep=3),
        limits=LimitsSpec(max_runtime_s=99, retries=3),
    )
    plan, launch = stage_launch(world, workload)
    assert launch.workload_id == workload and (launch.tenant, launch.attempt, launch.region) == ("t", 1, "r")
    by_job = defaultdict(list)
    taken: dict[str, list[int]] = defaultdict(list)
    for task in launch.tasks:
        by_job[task.job].append(task)
        taken[task.machine].extend(task.slots)
        assert len(task.slots) == {"train": 1, "eval": 2, "log": 0}[task.job]
    for slots in taken.values():
        assert len(slots) == len(set(slots))
    assert sum(map(len, taken.values())) == 6
    nodes = [n.machine for n in plan.nodes]
    assert nodes == sorted(nodes, key=lambda m: (m != "r/c/m1", m))  # rack k1 before k2
    for name, tasks in by_job.items():
        tasks.sort(key=lambda t: t.task)
        assert [(t.task, t.rank, t.world_size) for t in tasks] == [(i, i, len(tasks)) for i in range(len(tasks))]
        used = [m for m in nodes if m in {t.machine for t in tasks}]
        for task in tasks:
            here = [t for t in tasks if t.machine == task.machine]
            assert (task.node_rank, task.local_world_size) == (used.index(task.machine), len(here))
            assert task.local_rank == here.index(task)
        assert launch.jobs[name].master_machine == tasks[0].machine
        assert [n.machine for n in plan.nodes if name in n.leads_jobs] == [tasks[0].machine]
        told = [(t, n.machine) for n in plan.nodes for t in (n.tasks or {}).get(name, [])]
        assert sorted(told) == [(t.task, t.machine) for t in tasks]
    assert launch.jobs["train"].env == {"A": "1"} and launch.files == {"a/b.txt": "hello"}
    bucket = world.bucket("r")
    assert launch.checkpoint.uri == bucket.uri(ids.checkpoint_prefix(workload))
    assert launch.tables == {"words": bucket.uri("tables/words/")}
    assert (launch.checkpoint.interval_s, launch.checkpoint.grace_s, launch.checkpoint.keep) == (5, 7, 3)
    assert (plan.tasks, plan.grace_s, plan.max_runtime_s, plan.retries) == (7, 7, 99, 3)
    assert plan.launch_sha256 is not None and plan.checkpoint_region is None
    assert plan.launch_key == ids.launch_key(workload, 1, plan.launch_sha256)


@pytest.mark.usefixtures("keys")
def test_staging_again_writes_the_same(world: World) -> None:
    """Staging twice gives the same plan and the same description, byte for byte except for the sealed secrets."""
    plain = world.running(job(tasks=3))
    plan, _ = stage_launch(world, plain)
    first = world.bucket("r").get(plan.launch_key)
    assert stage_launch(world, plain)[0] == plan
    assert world.bucket("r").get(plan.launch_key) == first
    _secret(world, "token", PLAIN)
    secret = world.running(job(tasks=3, secrets={"TOKEN": "token"}))
    (early, one), (late, other) = (stage_launch(world, secret) for _ in range(2))
    assert one != other
    # Both descriptions stay stored, so an agent finds the one that its plan names.
    for plan in (early, late):
        assert hashlib.sha256(world.bucket("r").get(plan.launch_key)).hexdigest() == plan.launch_sha256
    assert one.model_copy(update={"sealed_secrets": {}}) == other.model_copy(update={"sealed_secrets": {}})


def test_secrets_are_only_ever_sealed(world: World, keys: dict[str, PrivateKey], tmp_path: Path) -> None:
    """Each machine can open only the secrets of its own jobs, and no file and no row holds a secret in plain text."""
    _secret(world, "token", PLAIN)
    workload = world.running(
        job("a", tasks=1, gpus=2, secrets={"TOKEN": "token"}),
        job("b", tasks=1, gpus=2, secrets={"PASS": "token", "TOKEN": "token"}),
        job("c", tasks=1, gpus=2),
    )
    _, launch = stage_launch(world, workload)
    where = {task.job: task.machine for task in launch.tasks}
    opened = {
        machine: json.loads(SealedBox(keys[machine]).decrypt(base64.b64decode(box)))
        for machine, box in launch.sealed_secrets.items()
    }
    assert opened[where["a"]] == {"a": {"TOKEN": PLAIN}}
    assert opened[where["b"]] == {"b": {"PASS": PLAIN, "TOKEN": PLAIN}}
    assert opened[where["c"]] == {"c": {}}
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 2 and not any(PLAIN.encode() in body for body in written)
    dump = "\n".join(row for rows in world.dump().values() for row in rows)
    assert PLAIN not in dump and PLAIN.encode().hex() not in dump


def test_secrets_for_a_key_with_which_nothing_can_be_sealed(world: World) -> None:
    """The launch is written without the secrets, so the agent of this machine cannot start it; others can."""
    world.region("r")
    world.machine("r/c/m", public_key=base64.b64encode(bytes(32)).decode())
    load_master_key(world.settings.master_key_path, create=True)
    _secret(world, "token", PLAIN)
    _, launch = stage_launch(world, world.running(job(secrets={"TOKEN": "token"})))
    assert launch.sealed_secrets == {"r/c/m": ""}
    with pytest.raises(CannotUnseal):
        unseal([bytes(PrivateKey.generate())], launch.sealed_secrets["r/c/m"])


@pytest.mark.usefixtures("keys")
def test_a_secret_that_is_gone(world: World) -> None:
    """A launch without one of its secrets fails with its name, and succeeds once the secret exists again."""
    workload = world.running(job(secrets={"TOKEN": "token"}))
    with pytest.raises(ApplicationError, match="tenant t has no secret token any more") as caught:
        stage_launch(world, workload)
    assert caught.value.type == "MissingSecret" and not caught.value.non_retryable
    assert list(world.bucket("r").list(f"launches/{workload}/")) == []
    _secret(world, "token", PLAIN)
    stage_launch(world, workload)


@pytest.mark.usefixtures("keys")
def test_the_archive_is_staged_once(world: World, tmp_path: Path) -> None:
    """An uploaded archive is written to the bucket once; if it is in neither bucket nor database, staging fails."""
    sha256 = "ab" * 32
    workload = world.running(workdir=sha256)
    with pytest.raises(ApplicationError, match=f"archive {sha256} does not exist any more"):
        stage_launch(world, workload)
    with world.session() as session:
        session.add(Archive(tenant="t", sha256=sha256, body=b"archive", paths=b""))
    _, launch = stage_launch(world, workload)
    assert launch.workdir == sha256
    (path,) = tmp_path.rglob(f"{sha256}.tar.gz")
    assert path.read_bytes() == b"archive"
    before = path.stat()
    stage_launch(world, workload)
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_ino == before.st_ino
    path.write_bytes(b"half")
    stage_launch(world, workload)
    assert path.read_bytes() == b"archive"
    with world.session() as session:
        session.add_all(ArchivePart(tenant="t", sha256=part, body=part.encode()) for part in "xy")
        session.get_one(Archive, ("t", sha256)).parts = ["x", "y", "x"]
    stage_launch(world, workload)
    assert path.read_bytes() == b"xyx"
    with world.session() as session:
        session.delete(session.get_one(Archive, ("t", sha256)))
    stage_launch(world, workload)


@pytest.mark.usefixtures("keys")
def test_a_damaged_archive_is_written_again(world: World, tmp_path: Path) -> None:
    """It is written again only if an agent has found the damage in the attempt before."""
    sha256 = "ab" * 32
    with world.session() as session:
        session.add(Archive(tenant="t", sha256=sha256, body=b"archive", paths=b""))
    workload = world.running(workdir=sha256)
    stage_launch(world, workload)
    (path,) = tmp_path.rglob(f"{sha256}.tar.gz")
    path.write_bytes(b"damaged")
    for error, content in (("Silent: no agent", b"damaged"), ("DamagedArchive: another SHA-256", b"archive")):
        world.release(workload, Phase.PREEMPTED)
        with world.session() as session:
            attempt = session.get_one(Attempt, (workload, world.workload(workload).attempt))
            attempt.outcome = Reason(ReasonCode.LAUNCH_FAILED, {"machine": "m", "error": error}).to_json()
        world.tick()
        stage_launch(world, workload, world.workload(workload).attempt)
        assert path.read_bytes() == content


@pytest.mark.usefixtures("keys")
def test_a_write_that_takes_longer_than_a_try(world: World, tmp_path: Path) -> None:
    """It goes on, and later tries, of other workloads too, wait for it. A try raises its error."""
    sha256 = "ab" * 32
    body = bytes(8 << 20)
    with world.session() as session:
        session.add(Archive(tenant="t", sha256=sha256, body=b"", parts=["x"] * 8, paths=b""))
        session.add(ArchivePart(tenant="t", sha256="x", body=body))
    workload, other = (world.running(workdir=sha256) for _ in range(2))
    writer = world.launch._archives = ArchiveWriter(world.engine, try_s=0.0)
    with pytest.raises(ApplicationError, match=r"67108864 bytes.* is still being written to .*archives/"):
        stage_launch(world, workload)
    (write,) = writer._writes.values()
    writer._try_s = 60.0
    stage_launch(world, other)
    assert write.done() and not writer._writes
    stage_launch(world, workload)
    (path,) = tmp_path.rglob(f"{sha256}.tar.gz")
    assert path.read_bytes() == body * 8
    path.unlink()
    with world.session() as session:
        session.delete(session.get_one(ArchivePart, ("t", "x")))
    with pytest.raises(ApplicationError, match=f"archive {sha256} does not exist any more"):
        stage_launch(world, workload)


@pytest.mark.usefixtures("keys")
def test_a_released_attempt_is_not_staged_but_can_be_stopped(world: World) -> None:
    """A new workflow of a released attempt gets the machines where tasks may still run, without staging again."""
    workload = world.running(job("train", tasks=2), job("log", tasks=1, gpus=0))
    plan, _ = stage_launch(world, workload)
    world.bucket("r").delete(plan.launch_key)
    for released in (False, True):
        if released:
            world.release(workload, Phase.PREEMPTED)
            with pytest.raises(ApplicationError, match=f"attempt 1 of {workload} is released") as caught:
                stage_launch(world, workload)
            assert caught.value.non_retryable
        found = world.launch.stage(StageRequest(workload, 1, winds_up=True))
        assert replace(found, launch_key=plan.launch_key, launch_sha256=plan.launch_sha256) == plan
        assert world.bucket("r").size(plan.launch_key) is None
    for winds_up in (False, True):
        with pytest.raises(ApplicationError, match=f"attempt 5 of {workload} has no allocations") as caught:
            world.launch.stage(StageRequest(workload, 5, winds_up=winds_up))
        assert caught.value.non_retryable


@pytest.mark.usefixtures("keys")
def test_a_workload_that_starts_at_once_is_running_when_it_is_staged(world: World) -> None:
    """If nothing else delays the tasks, the staging also enters `running`, once; a checkpoint elsewhere delays them."""
    workload = world.submit(job(tasks=2))
    world.tick()
    assert not world.launch.stage(StageRequest(workload, 1)).is_running
    assert world.workload(workload).phase == Phase.PLACING
    world.alter(Workload, workload, checkpoint_region="elsewhere")
    plan = world.launch.stage(StageRequest(workload, 1, may_run=True))
    assert plan.needs_copy and not plan.is_running
    world.alter(Workload, workload, checkpoint_region=None)
    plans = [world.launch.stage(StageRequest(workload, 1, may_run=True)) for _ in range(2)]
    assert [(plan.starts_at_once, plan.is_running) for plan in plans] == [(True, True)] * 2
    row = world.workload(workload)
    assert (row.phase, row.checkpoint_region, row.reason["code"]) == (Phase.RUNNING, "r", ReasonCode.RUNNING)
    with world.session() as session:
        assert session.get_one(Attempt, (workload, 1)).started_at is not None
        kinds = session.scalars(select(Event.kind).where(Event.workload == workload).order_by(Event.id)).all()
    assert kinds[-2:] == ["workload.provisioning", "workload.running"]


@pytest.mark.usefixtures("keys")
def test_where_the_checkpoint_is(world: World) -> None:
    """Staging an attempt sets the region of the newest checkpoint; a late call of an older attempt changes nothing."""
    workload = world.running(job(gpus=2))
    assert stage_launch(world, workload)[0].checkpoint_region is None
    world.launch.staged_here(StageRequest(workload, 1))
    assert world.workload(workload).checkpoint_region == "r"
    world.release(workload, Phase.PREEMPTED)
    world.alter(Workload, workload, checkpoint_region="elsewhere")
    world.launch.staged_here(StageRequest(workload, 1))
    assert world.workload(workload).checkpoint_region == "elsewhere"
    world.tick()
    world.launch.staged_here(StageRequest(workload, 1))
    assert world.workload(workload).checkpoint_region == "elsewhere"
    assert stage_launch(world, workload, 2)[0].checkpoint_region == "elsewhere"
    world.launch.staged_here(StageRequest(workload, 2))
    assert world.workload(workload).checkpoint_region == "r"
