"""Reconciling on a real Temporal server: lost workflows, lost messages, and workflow state unlike that in Postgres."""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, text
from temporalio import workflow
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.lifecycle import reconcile
from activities.lifecycle.reconcile import Reconciler
from activities.lifecycle.singletons import SINGLETONS, assert_singletons, keep_singletons
from activities.lifecycle.workload_start import read_start
from domain import ids
from domain.phases import Phase
from domain.protocol.workloads import WorkloadInput
from domain.spec import LimitsSpec
from infra.db.logs import Outbox
from infra.db.models import Attempt, Workload
from infra.db.placement_runs import begin_placement_run
from infra.db.tables import Replica
from tests.activities.reconciling import age, deliver, due, listed, patient
from tests.activities.temporal import told_workload
from tests.activities.world import World


@pytest.fixture
def reconciler(town: World, client: Client) -> Reconciler:
    """The reconciler of the town, without a worker."""
    return Reconciler(town.engine, patient(town), client)


async def test_a_workflow_that_is_gone_is_started_anew(
    town: World, reconciler: Reconciler, client: Client, database_url: str
) -> None:
    """If the workflow of a placed workload is terminated or unknown, a new one starts with the state in Postgres.

    A queued workload needs no workflow.
    """
    terminated, unknown, queued = town.running(), town.running(), town.submit()
    with town.session() as session:
        session.execute(text("update outbox set delivered_at = now() where workload = :w"), {"w": unknown})
    await deliver(town, database_url, client)
    age(town)
    for workload in (terminated, queued):
        await client.get_workflow_handle(ids.workload_workflow_id(workload)).terminate()
    await listed(client, f"WorkflowId STARTS_WITH 'workload/{town.prefix}' AND ExecutionStatus = 'Running'", 0)
    await reconciler.round()
    assert queued not in due(town, "start")
    await deliver(town, database_url, client)
    for workload in (terminated, unknown):
        state = (await told_workload(client, workload)).state
        assert (state["workload_id"], state["attempt"], state["placed"]) == (workload, 1, True)


@workflow.defn(name="WorkloadWorkflow")
class Stuck:
    """A workload workflow whose workflow tasks fail, as if its history could not be replayed."""

    @workflow.run
    async def run(self, state: WorkloadInput) -> None:
        raise RuntimeError(f"a worker cannot carry {state.workload_id} on")


async def test_a_workflow_that_no_worker_can_carry_on_is_replaced(
    town: World, reconciler: Reconciler, client: Client, database_url: str
) -> None:
    """A workflow whose tasks keep failing is terminated and replaced, although its search attributes match Postgres."""
    workload, well = town.running(), town.running()
    await deliver(town, database_url, client)
    age(town)
    handle = client.get_workflow_handle(ids.workload_workflow_id(workload))
    await handle.terminate()
    with town.session() as session:
        start = read_start(session, workload)
    assert start is not None
    queue = f"stuck-{workload}"
    shown = TypedSearchAttributes(
        [
            SearchAttributePair(SearchAttributeKey.for_keyword("MizzenPhase"), "running"),
            SearchAttributePair(SearchAttributeKey.for_int("MizzenAttempt"), 1),
        ]
    )
    async with Worker(client, task_queue=queue, workflows=[Stuck], workflow_runner=UnsandboxedWorkflowRunner()):
        await client.start_workflow(
            "WorkloadWorkflow", start.state, id=handle.id, task_queue=queue, task_timeout=timedelta(seconds=1),
            search_attributes=shown,
        )  # fmt: skip
        await listed(client, f"WorkflowId = '{handle.id}' AND TemporalReportedProblems IS NOT NULL", 1)
    await reconciler.round()
    assert (await handle.describe()).status is WorkflowExecutionStatus.TERMINATED
    assert due(town, "start") == [workload]
    other = await client.get_workflow_handle(ids.workload_workflow_id(well)).describe()
    assert other.status is WorkflowExecutionStatus.RUNNING


async def test_a_service_that_does_not_name_stuck_workflows_is_asked_once(
    town: World, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If an older Temporal refuses the query for failing workflows, the other checks go on; the log says it once."""
    monkeypatch.setattr(reconcile, "_STUCK", "NoSuchAttribute IS NOT NULL")
    for _ in range(2):
        await reconciler.round()
    assert sum("does not report workflows" in record.message for record in caplog.records) == 1


async def test_the_workflow_of_an_ended_workload_is_ended(
    town: World, reconciler: Reconciler, client: Client, database_url: str
) -> None:
    """The workflow of a workload that ended while it was queued is terminated."""
    ended = town.submit()
    await deliver(town, database_url, client)
    town.change(ended, Phase.CANCELLED)
    age(town)
    await listed(client, f"WorkflowId = '{ids.workload_workflow_id(ended)}' AND ExecutionStatus = 'Running'", 1)
    await reconciler.round()
    await listed(client, f"WorkflowId = '{ids.workload_workflow_id(ended)}' AND ExecutionStatus = 'Running'", 0)


async def test_a_new_workflow_counts_what_earlier_attempts_were(town: World, client: Client) -> None:
    """A restarted workflow gets the failures by status, preemptions, losses, hangs and runtime of earlier attempts."""
    workload = town.running(limits=LimitsSpec(max_preemptions=4))
    with town.session() as session:
        first = session.get_one(Attempt, (workload, 1))
        ends = [
            ("out_of_memory", "signal 9"), ("not_ready", "an unknown status"), ("evicted", None),
            ("machine_lost", None), ("platform_notice", None), ("setup_failed", "exit code 137"),
            ("no_progress", None), ("no_progress", None),
        ]  # fmt: skip
        for number, (code, status) in enumerate(ends, 1):
            session.merge(
                Attempt(
                    workload=workload, attempt=number, region="r", plan=first.plan, gpu_types={}, cpus_milli=0,
                    started_at=text("now() - interval '10 seconds'"), released_at=text("now()"),
                    outcome={"code": code, "detail": {"status": status} if status else {}},
                )
            )  # fmt: skip
        session.execute(text("update workload set attempt = 8, phase = 'pending' where id = :w"), {"w": workload})
    with town.session() as session:
        start = read_start(session, workload)
    assert start is not None
    state = start.state
    assert (state.attempt, state.placed, state.failures, state.hangs, state.ran_s) == (8, False, 3, 2, 80.0)
    assert state.by_exit == {"137": 2, "an unknown status": 1}
    assert (state.preemptions, state.max_preemptions, state.losses, state.max_losses) == (2, 4, 1, None)
    assert (state.suspects, state.unconfirmed) == ([], 0)


@pytest.mark.parametrize(
    ("later", "kept"),
    [
        ({}, True),
        ({"code": "evicted"}, True),
        ({"code": "evicted", "last_step": 7, "resumed_step": 3}, False),
        ({"code": "evicted", "last_step": 3, "resumed_step": 3}, True),
        ({"code": "evicted", "last_step": 7, "suspect": True}, True),
        ({"code": "task_failed"}, False),
    ],
    ids=["newest", "evicted later", "works elsewhere", "no step elsewhere", "works on the suspect", "confirmed later"],
)
def test_a_new_workflow_counts_the_failures_that_are_not_confirmed(
    town: World, later: dict[str, Any], kept: bool
) -> None:
    """They outlast other ends, as in the lost workflow: until a failure is confirmed, or steps are made elsewhere."""
    workload = town.running()
    with town.session() as session:
        plan = session.get_one(Attempt, (workload, 1)).plan
    (machine,) = (machine for job in plan["jobs"] for machine, _ in job["machines"])
    suspect = machine if later.get("suspect") else "r/c/other"
    unconfirmed = {"code": "unconfirmed_failure", "detail": {"suspects": [suspect], "attempts": 2}}
    town.alter(Attempt, (workload, 1), outcome=unconfirmed, released_at=text("now()"))
    if later:
        with town.session() as session:
            session.add(
                Attempt(
                    workload=workload, attempt=2, region="r", plan=plan, gpu_types={}, cpus_milli=0,
                    released_at=text("now()"), outcome={"code": later["code"]},
                    last_step=later.get("last_step"), resumed_step=later.get("resumed_step"),
                )
            )  # fmt: skip
    last = 2 if later else 1
    town.alter(Workload, workload, attempt=last, phase="pending")
    with town.session() as session:
        start = read_start(session, workload)
    assert start is not None
    assert (start.state.suspects, start.state.unconfirmed) == (([suspect], 2) if kept else ([], 0))


@pytest.mark.parametrize(
    ("code", "last_step", "ago_s", "counts"),
    [
        ("launch_failed", None, 100, False),
        ("launch_failed", 7, 100, True),
        ("launch_failed", None, 86_400, True),
        ("launch_timed_out", None, 900, False),
        ("launch_timed_out", 7, 900, True),
        ("machine_lost", None, 100, True),
    ],
)
def test_only_time_that_tasks_ran_is_runtime(
    town: World, code: str, last_step: int | None, ago_s: int, counts: bool
) -> None:
    """A workflow that replaces a lost one does not count attempts that were refused at their launch, or not started."""
    workload = town.running(ago_s=ago_s)
    town.alter(Attempt, (workload, 1), outcome={"code": code}, last_step=last_step, released_at=text("now()"))
    town.alter(Workload, workload, phase="pending")
    with town.session() as session:
        start = read_start(session, workload)
    assert start is not None and (start.state.ran_s >= 100) is counts


async def test_missing_workflows_of_copies_and_placement_runs_are_started(town: World, reconciler: Reconciler) -> None:
    """A copy or an open placement run without a workflow gets a new one, except copies of placement runs."""
    town.region("s")
    for table, made_by, state in (
        ("a", "operator", "copying"),
        ("b", "placement_run", "copying"),
        ("c", "workload", "ready"),
    ):
        town.table(table, 10, "r")
        with town.session() as session:
            session.add(Replica(data_table=table, region="s", state=state, made_by=made_by))
    with town.session() as session:
        begin_placement_run(session, f"{town.prefix}-run", 3600.0, dry_run=False)
    town.delivered()
    await reconciler.round()
    with town.session() as session:
        due = session.execute(
            select(Outbox.kind, Outbox.body).where(Outbox.delivered_at.is_(None)).order_by(Outbox.kind.desc())
        ).all()
    told = [(kind, body) for kind, body in due if kind in ("replicate", "placement_run")]
    assert told == [
        ("replicate", {"table": "a", "source": "r", "target": "s", "share": "on demand"}),
        ("placement_run", {"placement_run": f"{town.prefix}-run"}),
    ]


async def test_a_machine_that_nobody_attends_to_is_lost(town: World, client: Client) -> None:
    """A machine without a workflow is marked lost after the timeout, and its workloads get `machine_lost`."""
    lifecycle = town.settings.lifecycle.model_copy(update={"heartbeat_timeout_s": 1e-9, "node_lost_after_s": 1e-9})
    workload = town.running()
    town.delivered()
    reconciler = Reconciler(town.engine, patient(town).model_copy(update={"lifecycle": lifecycle}), client)
    for state in ("ready", "lost"):
        await reconciler.round()
        with town.session() as session:
            assert session.scalars(text("select state from machine")).all() == [state]
    assert [m["attempt"] for m in town.mail(workload, "machine_lost")] == [1]


async def test_a_workload_that_is_older_than_its_records(town: World, reconciler: Reconciler) -> None:
    """A placed workload whose events have expired still gets a new workflow."""
    workload = town.running()
    town.delivered()
    town.alter(Workload, workload, submitted_at=text("now() - interval '1 year'"))
    with town.session() as session:
        session.execute(text("delete from event"))
    await reconciler.round()
    assert workload in due(town, "start")


async def test_singletons_are_asserted(town: World, client: Client) -> None:
    """Workflows and schedules that exist once are recreated if they are gone, and unchanged if they run."""
    nightly = town.settings.tetris.nightly
    await assert_singletons(client, nightly)
    handles = [client.get_workflow_handle(id_) for id_, _ in SINGLETONS.values()]
    schedule = client.get_schedule_handle(ids.PLACEMENT_SCHEDULE_ID)
    first = [(await h.describe()).run_id for h in handles]
    await assert_singletons(client, nightly)
    assert [(await h.describe()).run_id for h in handles] == first
    keeping = asyncio.create_task(keep_singletons(town.engine, client, nightly, 0.05))
    try:
        for handle in handles:
            await handle.terminate()
        await schedule.delete()
        give_up_s = asyncio.get_running_loop().time() + 20
        while True:
            assert asyncio.get_running_loop().time() < give_up_s, "something is still gone"
            statuses = [(await h.describe()).status for h in handles]
            with contextlib.suppress(RPCError):
                await schedule.describe()
                if statuses == [WorkflowExecutionStatus.RUNNING] * len(handles):
                    break
            await asyncio.sleep(0.05)
    finally:
        keeping.cancel()


async def test_operators_see_whose_workflow_it_is(town: World, client: Client, database_url: str) -> None:
    """A workflow starts with a summary, a memo, and search attributes for name, phase, reason and attempt."""
    workload = town.submit()
    await deliver(town, database_url, client)
    handle = client.get_workflow_handle(ids.workload_workflow_id(workload))
    described = await handle.describe()
    shown = {p.key.name: p.value for p in described.typed_search_attributes}
    name = town.workload(workload).name
    expected = {"MizzenTenant": "t", "MizzenName": name, "MizzenPhase": "pending", "MizzenReason": "scan_pending"}
    assert shown == expected | {"MizzenAttempt": 0}
    assert await described.memo() == {"name": name, "tenant": "t", "region": "", "reason": "scan_pending"}
    assert await described.static_summary() == f"{name} of t"
