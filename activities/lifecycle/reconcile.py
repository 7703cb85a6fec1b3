"""Reconciles Temporal with Postgres: finds workflows that are missing, outdated, stuck, or of ended workloads.

Temporal may lose its state, or be rolled back by a restored backup. Postgres is the source of truth. A round takes a
small number of calls, independent of the length of the queue:

1. Messages without an effect in Postgres some time after delivery are delivered again. Receivers drop duplicates.
2. Workflows that show a placed phase are listed with their phase and attempt, and compared with the rows of placed
   workloads. A queued workload needs no comparison: the message of its next award has a newer attempt number, so its
   workflow accepts it in any state.
3. Workflows whose workflow tasks no worker can complete are terminated. If the server is rolled back while a worker
   keeps its cache, the worker may record a history that cannot be replayed. The worker fails some of these workflows
   itself. Temporal reports the others after some tries (`TemporalReportedProblems`).
4. Workflows of placed workloads are counted. If there are fewer of them than placed workloads, and also at longer
   intervals, all running workflows are listed by id. A queued workload needs no workflow: its next award starts one.

Listings lag, and a workload may change at any moment, so a disagreement is only a suspicion at first. If it is
unchanged after `disagree_s`, the workflow itself is described. If that confirms the disagreement, all messages of the
workload is delivered again. If it persists, the workflow is terminated, and a new one starts from the row.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Hashable
from typing import NamedTuple

from sqlalchemy import Engine
from temporalio.client import Client, WorkflowExecution, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError, RPCStatusCode

from activities.leader import Leader, lead
from activities.lifecycle import reconcile_rows as rows
from activities.lifecycle.machines import MachineActivities
from activities.lifecycle.unattended import Suspects
from domain import ids
from domain.phases import PLACED_PHASES, TERMINAL_PHASES
from domain.protocol.machines import Attend
from domain.search_attributes import ATTEMPT, PHASE
from infra.config.settings import Settings
from infra.db.session import in_db, in_thread, transaction

_log = logging.getLogger(__name__)
_PHASE = SearchAttributeKey.for_keyword(PHASE)
_ATTEMPT = SearchAttributeKey.for_int(ATTEMPT)
_RUNNING = "ExecutionStatus = 'Running'"
_WORKLOADS = f"WorkflowType = 'WorkloadWorkflow' AND {_RUNNING}"
_PLACED = f"{_WORKLOADS} AND {PHASE} IN ({', '.join(repr(p.value) for p in sorted(PLACED_PHASES))})"
_MACHINES = f"WorkflowType = 'MachineWorkflow' AND {_RUNNING}"
_COPIES = f"WorkflowType IN ('ReplicaWorkflow', 'PlacementRunWorkflow') AND {_RUNNING}"
_TYPES = (
    "WorkloadWorkflow", "MachineWorkflow", "SchedulerWorkflow", "HousekeepingWorkflow", "ReplicaWorkflow",
    "PlacementRunWorkflow", "ScrubWorkflow", "InstanceWorkflow", "ServiceWorkflow", "BundleWorkflow",
)  # fmt: skip
_STUCK = f"{_RUNNING} AND WorkflowType IN {_TYPES} AND TemporalReportedProblems IS NOT NULL"
_STUCK_TRIES = 2
"""A workflow is stuck only if its workflow task is at least at this attempt. Reported problems may be outdated."""
_PAGE = 1000
_AT_ONCE = 500
"""The maximum number of suspects handled in one round, and of workflows started in one transaction."""


class ShownState(NamedTuple):
    """The phase and attempt of a workload, as shown by its workflow or as stored in its row."""

    phase: str | None
    attempt: int | None


def _shown_state(found: WorkflowExecution) -> ShownState:
    shown = found.typed_search_attributes
    return ShownState(shown.get(_PHASE), shown.get(_ATTEMPT))


def _agree(fact: ShownState, belief: ShownState | None) -> bool:
    """Returns whether a workflow shows the phase and attempt of the row. Old workflows show only the phase."""
    return belief is not None and belief.phase == fact.phase and belief.attempt in (None, fact.attempt)


def _workload_of(found: WorkflowExecution) -> str:
    return found.id.removeprefix(ids.workload_workflow_id(""))


class Reconciler:
    """Runs reconciliation rounds. In an installation, one process runs them; the others are on standby."""

    def __init__(self, engine: Engine, settings: Settings, client: Client) -> None:
        self._engine = engine
        self._settings = settings.reconcile
        lifecycle = settings.lifecycle
        self._client = client
        patience_s = self._settings.disagree_s
        self._workloads = Suspects(patience_s)
        self._outlived = Suspects(patience_s)
        self._stuck = Suspects(patience_s)
        self._names_stuck = True
        """Whether the Temporal server reports stuck workflows. Versions before 1.30 do not."""
        self._copies = Suspects(patience_s)
        self._machines = Suspects(patience_s + lifecycle.heartbeat_timeout_s + lifecycle.node_lost_after_s)
        self._registry = MachineActivities(engine, settings)
        self._short = False
        self._next_sweep_s = 0.0

    async def run(self) -> None:
        """Runs rounds until cancelled, while this process is the leader."""
        await lead(
            self._engine,
            Leader.RECONCILING,
            "reconciling",
            self.round,
            self._settings.interval_s,
            self._settings.budget,
        )

    async def round(self) -> None:
        """Runs one round: compares everything once."""
        await in_db(self._engine, rows.redeliver_unanswered, self._settings.disagree_s)
        await self._compare_placed()
        await self._end_stuck()
        await self._count()
        await self._compare_copies()
        await self._compare_machines()

    # ------------------------------------------------------------------------------------------------ placed workloads

    async def _compare_placed(self) -> None:
        """Compares phase and attempt of all workloads that are placed according to their row or their workflow."""
        believed = {_workload_of(e): _shown_state(e) async for e in self._list(_PLACED)}
        facts = await in_thread(self._facts, list(believed))
        disagree: dict[str, Hashable] = {}
        outlived: dict[str, Hashable] = {}
        for workload, fact in facts.items():
            belief = believed.get(workload)
            if fact.phase in TERMINAL_PHASES:
                outlived[workload] = belief
            elif not _agree(fact, belief):
                disagree[workload] = (fact, belief)
        for workload in self._workloads.due(disagree)[:_AT_ONCE]:
            await self._confirm(workload, facts[workload])
        for workload in self._outlived.due(outlived)[:_AT_ONCE]:
            await self._end_outlived(workload)

    def _facts(self, workloads: list[str]) -> dict[str, ShownState]:
        with transaction(self._engine) as session:
            found = rows.placed_or_named(session, workloads)
        return {workload: ShownState(*fact) for workload, fact in found.items()}

    async def _confirm(self, workload: str, fact: ShownState) -> None:
        """Describes a suspected workflow. If the disagreement is real, redelivers its messages or later replaces it."""
        found = await self._describe(ids.workload_workflow_id(workload))
        if found is not None and _agree(fact, _shown_state(found)):
            self._workloads.clear(workload)
            return
        # Otherwise the row has changed, a message to the workflow is pending, or a recent event exists.
        age_s = self._settings.disagree_s
        if not await in_db(self._engine, rows.is_quiet, workload, fact.phase, fact.attempt, age_s):
            self._workloads.clear(workload)
            return
        if found is not None and not self._workloads.was_told_again(workload):
            await in_db(self._engine, rows.redeliver_all, workload)
            self._workloads.redelivered(workload)
            return
        if found is not None:
            _log.warning("workload %s is %s, its workflow shows %s: replacing it", workload, fact, _shown_state(found))
            await self._terminate(found, "its state differs from Postgres")
        await in_db(self._engine, rows.start_again, [workload])
        self._workloads.clear(workload)

    async def _end_outlived(self, workload: str) -> None:
        """Terminates the workflow of an ended workload, unless it still waits for agents."""
        found = await self._describe(ids.workload_workflow_id(workload))
        if found is None or found.raw_description.pending_activities:
            return
        _log.warning("workload %s has ended, its workflow shows %s: terminating it", workload, _shown_state(found))
        await self._terminate(found, "its workload has ended")
        self._outlived.clear(workload)

    # ----------------------------------------------------------------------------------------- workflows that are stuck

    async def _end_stuck(self) -> None:
        """Terminates workflows that no worker can continue, and starts new ones for workloads."""
        if not self._names_stuck:
            return
        try:
            stuck: dict[str, Hashable] = {e.id: e.run_id async for e in self._list(_STUCK)}
        except RPCError as error:
            if error.status is not RPCStatusCode.INVALID_ARGUMENT:
                raise
            _log.warning("the Temporal service does not report workflows whose tasks fail: %s", error)
            self._names_stuck = False
            return
        for id_ in self._stuck.due(stuck)[:_AT_ONCE]:
            self._stuck.clear(id_)
            found = await self._describe(id_)
            if found is None or found.raw_description.pending_workflow_task.attempt < _STUCK_TRIES:
                continue
            _log.warning("workflow %s is stuck, its workflow tasks fail repeatedly: terminating it", id_)
            await self._terminate(found, "no worker can complete its workflow tasks")
            if found.workflow_type == "WorkloadWorkflow":
                await in_db(self._engine, rows.start_again, [_workload_of(found)])

    # ------------------------------------------------------------------------------------------ workflows that are gone

    async def _count(self) -> None:
        """Counts the workflows of placed workloads.

        If two consecutive counts are too low, and also at longer intervals, compares a list of all running workflows.
        """
        placed, running = await asyncio.gather(
            in_db(self._engine, rows.placed, self._settings.disagree_s), self._client.count_workflows(_PLACED)
        )
        short = running.count < placed
        now_s = time.monotonic()
        if (short and self._short) or now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + self._settings.sweep_s
            await self._sweep()
        self._short = short

    async def _sweep(self) -> None:
        """Starts missing workflows of placed workloads, and terminates workflows of ended workloads.

        An unnecessary start changes nothing.
        """
        began_s = time.monotonic()
        running = {_workload_of(e) async for e in self._list(_WORKLOADS)}
        took_s = time.monotonic() - began_s
        missing = await in_db(self._engine, rows.missing, running, self._settings.disagree_s + took_s)
        if missing:
            _log.warning("%d workloads have no workflow: starting new ones", len(missing))
        for first in range(0, len(missing), _AT_ONCE):
            await in_db(self._engine, rows.start_again, missing[first : first + _AT_ONCE])
        ended = await in_db(self._engine, rows.ended, sorted(running), self._settings.disagree_s)
        for workload in ended[:_AT_ONCE]:
            await self._end_outlived(workload)

    # --------------------------------------------------------------------------------------------- copies and machines

    async def _compare_copies(self) -> None:
        """Starts the missing workflows of table copies and of an open placement run."""
        wanted = await in_db(self._engine, rows.wanted_copies)
        running = {e.id async for e in self._list(_COPIES)} if wanted else set()
        due = self._copies.due({id_: None for id_ in wanted if id_ not in running})
        for id_ in due:
            await in_db(self._engine, rows.put, wanted[id_])
            self._copies.clear(id_)

    async def _compare_machines(self) -> None:
        """Marks machines without a workflow as lost: a live agent would have started the workflow by its hello."""
        machines = await in_db(self._engine, rows.present_machines)
        if not machines or (await self._client.count_workflows(_MACHINES)).count >= len(machines):
            self._machines.due({})
            return
        running = {e.id async for e in self._list(_MACHINES)}
        gone: dict[str, Hashable] = {
            machine: incarnation
            for machine, incarnation in machines.items()
            if ids.machine_workflow_id(machine) not in running
        }
        for machine in self._machines.due(gone):
            _log.warning("machine %s has no workflow, and its agent sends no hello: marking it as lost", machine)
            await in_thread(self._registry.lost, Attend(machine, machines[machine], []))
            self._machines.clear(machine)

    # -------------------------------------------------------------------------------------------------------- Temporal

    async def _list(self, query: str) -> AsyncIterator[WorkflowExecution]:
        """Yields running workflows that match a query, page by page."""
        iterator = self._client.list_workflows(query, page_size=_PAGE)
        while True:
            await iterator.fetch_next_page()
            for execution in iterator.current_page or ():
                yield execution
            if not iterator.next_page_token:
                return

    async def _describe(self, workflow: str) -> WorkflowExecutionDescription | None:
        """Returns the description of a workflow; None: it is not running."""
        try:
            found = await self._client.get_workflow_handle(workflow).describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise
        return found if found.status is WorkflowExecutionStatus.RUNNING else None

    async def _terminate(self, found: WorkflowExecutionDescription, why: str) -> None:
        """Terminates this run of a workflow, but no newer run."""
        try:
            await self._client.get_workflow_handle(found.id, run_id=found.run_id).terminate(reason=why)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
