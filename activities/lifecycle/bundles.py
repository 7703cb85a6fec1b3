"""Bundles: workloads that were awarded together on one machine, and share a workflow while they are short."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError

from activities.lifecycle.launch import LaunchActivities
from activities.lifecycle.workloads import WorkloadActivities
from domain import ids
from domain.capacity import CapacityKind
from domain.phases import PLACED_PHASES, Phase
from domain.protocol.activities import Activity
from domain.protocol.bundles import FIRST_ATTEMPT, Bundle, SettleBundle
from domain.protocol.workloads import LaunchPlan, StageRequest
from infra.db import outbox
from infra.db.models import Workload
from infra.db.session import transaction

_log = logging.getLogger(__name__)
_MOST = 40
"""The maximum number of workloads in a bundle, which limits the time of its activities."""
_LEAST_RUNTIME_S = 60.0
"""Workloads with a shorter maximum runtime are not bundled: only their own workflows enforce it."""
_BUNDLED = text(
    "select a.machine, w.id from workload as w join allocation as a on a.workload = w.id and a.attempt = w.attempt"
    " join machine as m on m.id = a.machine"
    " join cluster as c on c.region = m.region and c.name = m.cluster and c.capacity <> :lent"
    " where w.id = any(:workloads) and w.attempt = :first and w.phase = :placing and a.awaited = 0"
    " and (w.array_id is null or w.array_index is not null)"
    " and w.spec ->> 'serving' is null and w.spec ->> 'workdir' is null"
    " and not coalesce((w.spec ->> 'one_attempt')::boolean, false)"
    " and not jsonb_path_exists(w.spec, '$.jobs[*].image ? (@ != null)')"
    " and coalesce((w.spec -> 'limits' ->> 'max_runtime_s')::float8, 'infinity') >= :least_runtime_s"
    " and not exists (select from allocation as o"
    "                 where o.workload = w.id and o.attempt = w.attempt and o.machine <> a.machine)"
    " order by a.machine, w.id"
)


def read_bundles(session: Session, workloads: Sequence[str]) -> list[Bundle]:
    """Returns bundles of those workloads that were just awarded for the first time and may be short.

    Such a workload has its slots on one machine that no owner lends, and fetches nothing but its launch description.
    A machine with only one of them has no bundle.
    """
    names = {
        "workloads": list(workloads),
        "first": FIRST_ATTEMPT,
        "placing": Phase.PLACING.value,
        "lent": CapacityKind.VOLUNTARY.value,
        "least_runtime_s": _LEAST_RUNTIME_S,
    }
    on: dict[str, list[str]] = defaultdict(list)
    for machine, workload in session.execute(_BUNDLED, names):
        on[machine].append(workload)
    parts = ((machine, found[k : k + _MOST]) for machine, found in on.items() for k in range(0, len(found), _MOST))
    return [Bundle(machine, part) for machine, part in parts if len(part) > 1]


async def start_bundle(client: Client, id_: str, bundle: Bundle) -> bool:
    """Starts a bundle's workflow; returns False if it already runs, perhaps with other workloads."""
    try:
        await client.start_workflow(
            "BundleWorkflow",
            bundle,
            id=id_,
            task_queue=ids.CONTROL_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            static_summary=f"the first seconds of {len(bundle.workloads)} workloads on {bundle.machine}",
        )
    except WorkflowAlreadyStartedError:
        return False
    return True


def _together(workloads: Sequence[str], change: Callable[[Sequence[str]], None]) -> list[str]:
    """Calls `change`, one transaction, for all workloads; if one is refused, for each half. Returns those refused."""
    try:
        if workloads:
            change(workloads)
    except ApplicationError as error:
        if len(workloads) == 1:
            _log.warning("workload %s leaves its bundle: %s", workloads[0], error)
            return [*workloads]
        half = len(workloads) // 2
        return _together(workloads[:half], change) + _together(workloads[half:], change)
    return []


class BundleActivities:
    """The activities of a bundle's workflow: those of each of its workloads, one after the other."""

    def __init__(self, engine: Engine, launch: LaunchActivities, workloads: WorkloadActivities) -> None:
        self._engine = engine
        self._launch = launch
        self._workloads = workloads

    @activity.defn(name=Activity.STAGE_BUNDLE.value)
    def stage(self, bundle: Bundle) -> dict[str, LaunchPlan]:
        """Stages the first attempts, and returns the launch plan of each that runs.

        A workload without a plan leaves the bundle: its own workflow takes it over.
        """
        plans = {}
        for workload in bundle.workloads:
            try:
                plan = self._launch.write(StageRequest(workload, FIRST_ATTEMPT, may_run=True))
            except Exception as error:
                _log.info("workload %s leaves its bundle: %s", workload, error)
            else:
                if plan.runs_once_staged:
                    plans[workload] = plan
        begun: dict[str, LaunchPlan] = {}
        refused = _together(list(plans), lambda some: begun.update(self._begin(plans, some)))
        return {workload: begun[workload] for workload in plans if workload not in refused}

    def _begin(self, plans: Mapping[str, LaunchPlan], some: Sequence[str]) -> dict[str, LaunchPlan]:
        return self._launch.begin({workload: plans[workload] for workload in some}, FIRST_ATTEMPT)

    @activity.defn(name=Activity.SETTLE_BUNDLE.value)
    def settle(self, request: SettleBundle) -> None:
        """Releases attempts that have ended, and starts the workflows of workloads that leave the bundle."""
        releases = {release.workload_id: release for release in request.releases}
        refused = _together(
            list(releases), lambda some: self._workloads.release_all([releases[workload] for workload in some])
        )
        leaving = [*request.leaving, *refused]
        with transaction(self._engine) as session:
            for workload in leaving:
                row = session.get(Workload, workload)
                if row is not None and row.finished_at is None:
                    placed = row.phase in PLACED_PHASES
                    outbox.start_workload(session, workload, attempt=row.attempt, placed=placed)
