"""Every activity runs in a real worker on a real Temporal server, and sends heartbeats there.

Most tests of activities call them without a worker, where heartbeats are only a callback.
"""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nacl.public import PublicKey, SealedBox
from sqlalchemy import text
from temporalio.client import Client, WorkflowHandle

from activities import heartbeat
from activities.capacity.pools import request_instance
from activities.lifecycle.bundles import read_bundles
from activities.roles import control_activities, region_activities
from agent.activities import NodeActivities
from agent.config import AgentConfig
from agent.host import serve
from capacity.offers import Offer
from capacity.pools import Pool
from capacity.providers.trace.cloud import Cloud
from capacity.providers.trace.provider import TraceProvider
from capacity.providers.trace.settings import TraceProviderSettings
from domain.ids import (
    agent_queue,
    machine_workflow_id,
    new_service_id,
    output_manifest_key,
    output_part_key,
    region_queue,
    runner_id,
)
from domain.lifecycle.instances import InstancePhase
from domain.phases import Phase
from domain.placement_runs import MoveRef, NextMove, PlacementRunRef
from domain.protocol.activities import Activity
from domain.protocol.bundles import Bundle, RunBundle, SettleBundle
from domain.protocol.data import ReplicateTable, Scrub
from domain.protocol.instances import InstanceMove, InstanceRef
from domain.protocol.leases import CancelElements, ElementResult, LeasedElement, LeaseRequest, RunElements
from domain.protocol.machines import MachineNotice, Pace, PrepareNode, ProveKey, RunNode, RunPace, StopNode
from domain.protocol.scheduling import AwardRequest, BidRequest, DryRunRequest
from domain.protocol.services import ServiceRef
from domain.protocol.sessions import SessionRefusal
from domain.protocol.workloads import CheckpointCopy, FlushedRequest, ReleaseRequest, StageRequest, TransitionRequest
from domain.reasons import Reason, ReasonCode
from domain.spec import ArraySpec, RunnersSpec
from domain.task_reports import NoticeReport, TaskProgress
from infra.db.capacity import InstanceRow, PoolRow
from infra.db.models import Machine, Workload
from infra.db.rounds import loop_states
from infra.db.services import ServiceRow, ServiceVersion
from infra.db.tables import Replica
from infra.db.task_sessions import SessionKind, TaskSession
from infra.keys import load_master_key
from mizzen.checkpoint import Checkpointer
from mizzen.objects.files import FileStore
from tests.activities.office import Office
from tests.activities.placement_runs import PLACEMENT_RUN, PlacementWorld
from tests.activities.replicas import add_table, keys
from tests.activities.temporal import until
from tests.activities.world import World, job
from tests.capacity.site import CLOUD
from tests.services.live import service as service_spec

MACHINE = "west/c/m"
OUTPUT = ("WORKLOAD", 1, "main", 0, "model")


@pytest.fixture
def office(world: World, client: Client, monkeypatch: pytest.MonkeyPatch) -> Office:
    """An installation whose long activities send heartbeats all the time."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.01)
    load_master_key(world.settings.master_key_path, create=True)
    return Office(world, client)


# -------------------------------------------------------------------------------------------- a workload and its agent


async def _run_a_workload(office: Office) -> None:
    await _on_a_machine(office, _place_and_run)


async def _run_elements_of_an_array(office: Office) -> None:
    await _on_a_machine(office, _lease_and_run)


async def _on_a_machine(office: Office, work: Callable[[Office], Awaitable[None]]) -> None:
    world = office.world
    world.region("west")
    config = AgentConfig(
        machine=MACHINE, region="west", cluster="c", rack="k", gpu_type="a100", gpus=2, cpus_milli=2000,
        memory_bytes=1 << 30, address="127.0.0.1", ports=(21000, 21099), state_dir=world.folder / "agent",
    )  # fmt: skip
    async with office.open("west"):
        stop = asyncio.Event()

        async def connected() -> Client:
            return office.client

        agent = asyncio.create_task(serve(config, connected, stop))
        try:
            await until(lambda: _machine(world) == "ready", "the machine is ready")
            await _attended(office)
            await work(office)
        finally:
            stop.set()
            await agent


def _machine(world: World) -> str | None:
    with world.session() as session:
        row = session.get(Machine, MACHINE)
        return None if row is None else row.state


async def _attended(office: Office) -> None:
    """Waits until the server has a heartbeat of `machine.attend`, which returns only when its agent ends."""
    while True:
        described = await office.client.get_workflow_handle(machine_workflow_id(MACHINE)).describe()
        for pending in described.raw_description.pending_activities:
            if pending.activity_type.name == Activity.ATTEND and pending.heartbeat_details.payloads:
                office.returned.add(Activity.ATTEND)
                return
        await asyncio.sleep(0.05)


_WHY = Reason(ReasonCode.STARTING_TASKS).to_json()


async def _start_run(office: Office, workload: str) -> WorkflowHandle[Any, Any]:
    """Places a workload, and starts its tasks."""
    world, here, there = office.world, region_queue("west"), agent_queue(MACHINE)
    scan = (await office.call(Activity.SCAN))["scan"]
    assert await office.call(Activity.BID, BidRequest("west", scan), queue=here) == 1
    assert (await office.call(Activity.AWARD, AwardRequest(scan, waited_s=1.0)))["awarded"] == 1
    stage = StageRequest(workload, 1)
    plan = await office.call(Activity.STAGE, stage)
    for phase in (Phase.PROVISIONING, Phase.RUNNING):
        assert await office.call(Activity.TRANSITION, TransitionRequest(workload, 1, phase.value, _WHY))
    await office.call(Activity.STAGED_HERE, stage)
    launch = plan["launch_key"], plan["bucket_url"]
    prepared = await office.call(
        Activity.PREPARE_NODE, PrepareNode(workload, 1, MACHINE, *launch, ["main"], plan["launch_sha256"]), queue=there
    )
    masters = {"main": f"127.0.0.1:{prepared['ports']['main']}"}
    run = RunNode(workload, 1, MACHINE, *launch, masters, plan["launch_sha256"])
    assert world.attempt(workload).started_at is not None
    return await office.start(Activity.RUN_NODE, run, queue=there, heartbeat_timeout_s=1.0)


async def _run_a_bundle(office: Office) -> None:
    await _on_a_machine(office, _stage_run_and_settle)


async def _stage_run_and_settle(office: Office) -> None:
    world = office.world
    workloads = [world.submit(job(argv=("true",))) for _ in range(2)]
    scan = (await office.call(Activity.SCAN))["scan"]
    assert await office.call(Activity.BID, BidRequest("west", scan), queue=region_queue("west")) == 2
    assert (await office.call(Activity.AWARD, AwardRequest(scan, waited_s=1.0)))["awarded"] == 2
    with world.session() as session:
        (bundle,) = read_bundles(session, workloads)
    assert bundle == Bundle(MACHINE, workloads)
    plans = await office.call(Activity.STAGE_BUNDLE, bundle)
    runs = [
        RunNode(one, 1, MACHINE, plan["launch_key"], plan["bucket_url"], {}, plan["launch_sha256"], ["main"])
        for one, plan in plans.items()
    ]
    ended: dict[str, Any] = {}
    while len(ended) < 2:
        left = [run for run in runs if run.workload_id not in ended]
        ran = await office.call(Activity.RUN_BUNDLE, RunBundle(MACHINE, left, 30.0), queue=agent_queue(MACHINE))
        ended |= ran["outcomes"]
    assert [one["exits"][0]["exit_code"] for one in ended.values()] == [0, 0]
    done = ReleaseRequest(workloads[0], 1, Phase.SUCCEEDED.value, Reason(ReasonCode.COMPLETED, {"tasks": 1}).to_json())
    for _ in range(2):
        await office.call(Activity.SETTLE_BUNDLE, SettleBundle([done], workloads))
    assert [world.workload(one).phase for one in workloads] == ["succeeded", "running"]


async def _lease_and_run(office: Office) -> None:
    world, there = office.world, agent_queue(MACHINE)
    spec = ArraySpec(ranges=((0, 4, 1),), throttle=1, runners=RunnersSpec())
    argv = ("sh", "-c", 'test "$MIZZEN_ARRAY_INDEX" -lt 4 || sleep 60')
    array = world.submit(job(argv=argv), array=spec)
    runner = runner_id(array, 0)
    running = await _start_run(office, runner)
    lease = LeaseRequest(runner, 1)
    leased = await office.call(Activity.LEASE_ELEMENTS, lease)
    assert leased == await office.call(Activity.LEASE_ELEMENTS, lease) == [{"index": k, "attempt": 1} for k in range(4)]
    chunk = RunElements(runner, 1, MACHINE, [LeasedElement(**one) for one in leased])
    done = await office.call(Activity.RUN_ELEMENTS, chunk, queue=there)
    results = [ElementResult(**one) for one in done["results"]]
    assert [one.exit_code for one in results] == [0, 0, 0, 0]
    last = await office.call(Activity.LEASE_ELEMENTS, LeaseRequest(runner, 1, results, 1.0))
    assert last == [{"index": 4, "attempt": 1}]
    chunk = RunElements(runner, 1, MACHINE, [LeasedElement(4, 1)])
    slow = await office.start(Activity.RUN_ELEMENTS, chunk, queue=there, heartbeat_timeout_s=1.0)
    await _heartbeats(slow)
    await office.call(Activity.CANCEL_ELEMENTS, CancelElements(runner, 1, MACHINE, [4]), queue=there)
    assert [one["noticed"] for one in (await slow.result())["results"]] == [True]
    await office.call(Activity.STOP_NODE, StopNode(runner, 1, 5.0), queue=there)
    await running.result()


async def _place_and_run(office: Office) -> None:
    world, there, why = office.world, agent_queue(MACHINE), _WHY
    workload = world.submit(job(argv=("sleep", "60")))
    dry = await office.call(Activity.DRY_RUN, DryRunRequest(world.workload(workload).spec))
    assert dry["region"] == "west"
    running = await _start_run(office, workload)
    await _heartbeats(running)
    pace = Pace(MACHINE, 2e9, [RunPace(f"{workload}.1", 60.0, 0.1, 10.0, 0.0)])
    await office.call(Activity.PACE_NODE, pace, queue=there)
    await _refuse_a_session(office, workload)
    assert await office.call(Activity.PROVE_KEY, ProveKey(MACHINE, _challenge(world)), queue=there) == "proof"
    assert (await office.call(Activity.STOP_NODE, StopNode(workload, 1, 5.0), queue=there))["stopped"]
    assert (await running.result())["stopped"]
    progress = [TaskProgress("main", 0, step=7)]
    await office.call(Activity.RELEASE, ReleaseRequest(workload, 1, Phase.CANCELLED.value, why, flushing_s=60.0))
    await office.call(Activity.FLUSHED, FlushedRequest(workload, 1, progress))
    assert world.workload(workload).phase == "cancelled"
    with world.session() as session:
        incarnation = session.get_one(Machine, MACHINE).incarnation
    notice = NoticeReport("sim", "preemption", True, 1.0, 2.0, "spot reclaim")
    await office.call(Activity.MACHINE_NOTICED, MachineNotice(MACHINE, incarnation, notice))
    await office.call(Activity.MACHINE_LOST, world.attend(MACHINE, incarnation))
    assert _machine(world) == "lost"


async def _refuse_a_session(office: Office, workload: str) -> None:
    where = {"workload": workload, "attempt": 1, "job": "main", "task": 0, "machine": MACHINE}
    with office.world.session() as session:
        session.add(TaskSession(id="s", tenant="t", actor="key", kind=SessionKind.EXEC, **where))
    await office.call(Activity.REFUSE_SESSION, SessionRefusal("s", "no connection\0"))
    with office.world.session() as session:
        assert session.get_one(TaskSession, "s").refusal == "no connection"


def _challenge(world: World) -> str:
    """Returns a challenge that is sealed to the machine's key."""
    with world.session() as session:
        key = session.get_one(Machine, MACHINE).public_key
    body = json.dumps({"machine": MACHINE, "key": key, "proof": "proof"}).encode()
    return base64.b64encode(SealedBox(PublicKey(base64.b64decode(key))).encrypt(body)).decode()


async def _heartbeats(running: Any) -> None:
    """Waits until the server has a heartbeat of the call's activity."""
    while True:
        (pending,) = (await running.describe()).raw_description.pending_activities or (None,)
        if pending is not None and pending.heartbeat_details.payloads:
            return
        await asyncio.sleep(0.05)


# ----------------------------------------------------------------------------------------------- tables and retention


async def _copy_and_delete(office: Office) -> None:
    world = office.world
    for region in ("east", "west"):
        world.region(region)
    add_table(world, "ds=1", "ds=2")
    with world.session() as session:
        session.add(Replica(data_table="words", region="west", state="copying"))
    async with office.open("east", "west"):
        east, west = region_queue("east"), region_queue("west")
        assert await office.call(Activity.COPY_TABLE, ReplicateTable("words", "east", "west"), queue=west) == 200
        assert await office.call(Activity.SCRUB, Scrub("east"), queue=east) > 0
        home = keys(world, "east")
        assert keys(world) == home
        drop(world)
        await office.call(Activity.REMOVE_REPLICAS)
        assert (keys(world), keys(world, "east")) == (set(), home)
        Checkpointer(world.bucket("east").uri("checkpoints/wl-1/"), attempt=1).save(1, {"0": b"state"})
        copied = await office.call(Activity.COPY_CHECKPOINT, CheckpointCopy("wl-1", 2, "east", "west"), queue=west)
        assert copied == len(b"state")
        workload = world.submit()
        world.bucket("east").put(f"logs/{workload}/1/main/0/0", b"x")
        for key in (output_part_key(*OUTPUT, 0), output_manifest_key(*OUTPUT)):
            world.bucket("east").put(key.replace("WORKLOAD", workload), b"x")
        world.alter(Workload, workload, phase="failed", finished_at=text("now() - interval '90 days'"))
        await office.call(Activity.EXPIRE)
        assert not [key for key in keys(world, "east") if key.startswith(("logs/", "outputs/"))]


def drop(world: World) -> None:
    """Drops the replica in `west`; its grace is over."""
    with world.session() as session:
        session.execute(text("update replica set state = 'deleting', delete_at = now() where region = 'west'"))


# ---------------------------------------------------------------------------------------------------- a placement run


async def _move_a_table(office: Office) -> None:
    placement_runs = PlacementWorld(office.world)
    for region in ("east", "west"):
        placement_runs.region(region)
    office.world.machine("east/c/m", 4)
    placement_runs.table("a", "west")
    placement_runs.usage("job-a", "a")
    ref = PlacementRunRef(PLACEMENT_RUN)
    async with office.open("east"):
        assert (await office.call(Activity.OPEN_PLACEMENT_RUN, ref))["state"] == "planning"
        await office.call(Activity.PLAN_PLACEMENT_RUN, ref)
        assert await office.call(Activity.PLACEMENT_PAUSED, None) is False
        order = await office.call(Activity.NEXT_MOVE, NextMove(PLACEMENT_RUN, 0))
        request = ReplicateTable(order["table"], order["source_region"], order["target_region"], "nightly")
        assert await office.call(Activity.COPY_TABLE, request, queue=region_queue("east")) > 0
        assert await office.call(Activity.FINISH_MOVE, MoveRef(PLACEMENT_RUN, order["number"])) is True
        assert placement_runs.homes() == {"a": "east"}
        await office.call(Activity.ASSIGN_PARTITIONS, ref)
        await office.call(Activity.END_PLACEMENT_RUN, ref)


# ------------------------------------------------------------------------------------------------ instances, services


async def _launch_and_terminate(office: Office) -> None:
    world = office.world
    world.region("west")
    settings = TraceProviderSettings.model_validate(CLOUD)
    cloud = Cloud(settings, world.folder / "cloud")
    provider = TraceProvider("sim", settings, cloud)
    offer: Offer = next(iter(provider.offers()))
    with world.session() as session:
        session.add(PoolRow(region="west", name="burst"))
        session.flush()
        ref = InstanceRef(request_instance(session, Pool("west", "burst", 1), offer))
    async with office.open(providers={"sim": provider}):
        assert await office.call(Activity.LAUNCH_INSTANCE, ref) is True
        assert not (await office.call(Activity.INSPECT_INSTANCE, ref))["ready"]
        await office.call(Activity.MOVE_INSTANCE, InstanceMove(ref.instance, InstancePhase.LAUNCHING.value, ""))
        await office.call(Activity.DRAIN_INSTANCE, ref)
        while not await office.call(Activity.TERMINATE_INSTANCE, ref):
            await asyncio.sleep(0.05)
        assert not cloud.there()
    with world.session() as session:
        assert session.get_one(InstanceRow, ref.instance).phase == "launching"


async def _step_a_service(office: Office) -> None:
    world, service = office.world, new_service_id()
    world.region("west")
    spec = service_spec()
    with world.session() as session:
        session.add(ServiceRow(id=service, tenant="t", name=spec.name))
        session.flush()
        session.add(ServiceVersion(service=service, version=1, spec=spec.model_dump(mode="json")))
    async with office.open():
        assert (await office.call(Activity.STEP_SERVICE, ServiceRef(service)))["ended"] is False


STORIES: dict[Callable[[Office], Awaitable[None]], set[Activity]] = {
    _run_a_workload: {
        Activity.REGISTER_MACHINE, Activity.MACHINE_READY, Activity.ATTEND, Activity.DRY_RUN, Activity.SCAN,
        Activity.BID, Activity.AWARD, Activity.STAGE, Activity.STAGED_HERE, Activity.TRANSITION, Activity.PREPARE_NODE,
        Activity.RUN_NODE, Activity.PACE_NODE, Activity.PROVE_KEY, Activity.STOP_NODE, Activity.RELEASE,
        Activity.FLUSHED, Activity.MACHINE_NOTICED, Activity.MACHINE_LOST, Activity.REFUSE_SESSION,
    },
    _run_elements_of_an_array: {Activity.LEASE_ELEMENTS, Activity.RUN_ELEMENTS, Activity.CANCEL_ELEMENTS},
    _run_a_bundle: {Activity.STAGE_BUNDLE, Activity.RUN_BUNDLE, Activity.SETTLE_BUNDLE},
    _copy_and_delete: {
        Activity.COPY_TABLE, Activity.SCRUB, Activity.REMOVE_REPLICAS, Activity.COPY_CHECKPOINT, Activity.EXPIRE,
    },
    _move_a_table: {
        Activity.OPEN_PLACEMENT_RUN, Activity.PLAN_PLACEMENT_RUN, Activity.PLACEMENT_PAUSED, Activity.NEXT_MOVE,
        Activity.COPY_TABLE, Activity.FINISH_MOVE, Activity.ASSIGN_PARTITIONS, Activity.END_PLACEMENT_RUN,
    },
    _launch_and_terminate: {
        Activity.LAUNCH_INSTANCE, Activity.INSPECT_INSTANCE, Activity.MOVE_INSTANCE, Activity.DRAIN_INSTANCE,
        Activity.TERMINATE_INSTANCE,
    },
    _step_a_service: {Activity.STEP_SERVICE},
}  # fmt: skip
"""The activities that return in each story. A new activity must be added to a story."""


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__.strip("_"))
async def test_activities_return_in_a_worker(story: Callable[[Office], Awaitable[None]], office: Office) -> None:
    """Each activity of a story does its work in a worker."""
    await story(office)
    assert STORIES[story] <= office.returned


def test_every_registered_activity_is_in_a_story(world: World) -> None:
    """The workers of all roles and the agents register no activity that no story runs."""
    registered: set[Any] = {
        *control_activities(world.engine, world.settings, Any),  # type: ignore[arg-type]
        *region_activities(world.engine, world.settings, world.scheduler_state),
        *(method for method in vars(NodeActivities).values() if hasattr(method, "__temporal_activity_definition")),
    }
    names = {method.__temporal_activity_definition.name for method in registered}
    assert names == {called.value for story in STORIES.values() for called in story}


# ---------------------------------------------------------------------------------------------------- visible failures


async def test_a_deletion_that_fails_each_time_is_seen(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's replica, the event log and the state of the loop give the error, until the objects are deleted."""
    world = office.world
    for region in ("east", "west"):
        world.region(region)
    world.table("words", 1, "east", "west")
    for region in ("east", "west"):
        world.bucket(region).put("tables/words/part-0", b"x")
    drop(world)

    def refuse(store: FileStore, key: str) -> None:
        raise OSError("read-only file system")

    async with office.open("east"):
        await office.call(Activity.SCRUB, Scrub("east"), queue=region_queue("east"))
        with monkeypatch.context() as patched:
            patched.setattr(FileStore, "delete", refuse)
            for _ in range(3):
                await office.call(Activity.REMOVE_REPLICAS)
        because = "its deletion fails: read-only file system"
        with world.session() as session:
            assert session.get_one(Replica, ("words", "west")).kept_because == because
            loops, now_s = loop_states(session)
        loop = loops["deletion of replicas"]
        assert (loop.judge(now_s), loop.failures) == ("failing", 3)
        assert loop.error == "table words in west: read-only file system"
        assert len(world.events(kind="replica.deletion_held")) == 1
        await office.call(Activity.REMOVE_REPLICAS)
    with world.session() as session:
        assert session.get(Replica, ("words", "west")) is None
        loops, now_s = loop_states(session)
    assert (loops["deletion of replicas"].judge(now_s), loops["deletion of replicas"].failures) == ("ok", 0)
    assert keys(world) == set()
