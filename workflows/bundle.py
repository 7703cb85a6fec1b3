"""One workflow for the first seconds of several workloads that were awarded together on one machine."""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, FailureError

with workflow.unsafe.imports_passed_through():
    from domain import ids
    from domain.lifecycle.endings import completed
    from domain.phases import Phase
    from domain.protocol.activities import Activity
    from domain.protocol.bundles import FIRST_ATTEMPT, Bundle, BundleRun, RunBundle, SettleBundle
    from domain.protocol.machines import NodeOutcome, RunNode
    from domain.protocol.workloads import LaunchPlan, ReleaseRequest
    from workflows.activity_calls import record

_LONGEST_S = 10.0
"""After this time, the workloads that still run leave the bundle. It is less than `reconcile.disagree_s`."""


@workflow.defn(name="BundleWorkflow")
class BundleWorkflow:
    """Runs the first attempts of short workloads to their ends, if their tasks succeed.

    Every other workload leaves the bundle: a workflow of its own takes the attempt over, as if it replaced a lost one.
    So a bundle never gets messages. A workflow that a message starts may run beside the bundle: each effect is
    idempotent, and an agent that has stopped an attempt refuses to start it.
    """

    @workflow.run
    async def run(self, bundle: Bundle) -> None:
        """Runs the bundle to its end."""
        try:
            plans = await record(Activity.STAGE_BUNDLE, bundle, dict[str, LaunchPlan], tries=1)
        except FailureError:  # The workflows of the workloads try again.
            plans = {}
        leaving = [workload for workload in bundle.workloads if workload not in plans]
        until_s = workflow.time() + _LONGEST_S
        while plans and (left_s := until_s - workflow.time()) > 0:
            try:
                ran = await _run(bundle.machine, plans, left_s)
            except ActivityError:
                break
            leaving += ran.refused
            releases = []
            for workload, outcome in ran.outcomes.items():
                if outcome.succeeded:
                    releases.append(_release(workload, plans[workload], outcome))
                else:
                    leaving.append(workload)
            plans = {one: plan for one, plan in plans.items() if one not in ran.outcomes and one not in ran.refused}
            await record(Activity.SETTLE_BUNDLE, SettleBundle(releases, leaving))
            leaving = []
        if plans or leaving:
            await record(Activity.SETTLE_BUNDLE, SettleBundle([], [*leaving, *plans]))


async def _run(machine: str, plans: dict[str, LaunchPlan], limit_s: float) -> BundleRun:
    runs = [
        RunNode(
            workload,
            FIRST_ATTEMPT,
            machine,
            plan.launch_key,
            plan.bucket_url,
            {},
            plan.launch_sha256,
            plan.nodes[0].leads_jobs,
        )
        for workload, plan in plans.items()
    ]
    plan = next(iter(plans.values()))
    ran: BundleRun = await workflow.execute_activity(
        Activity.RUN_BUNDLE.value,
        RunBundle(machine, runs, limit_s),
        task_queue=ids.agent_queue(machine),
        result_type=BundleRun,
        schedule_to_close_timeout=timedelta(seconds=limit_s + plan.node_lost_after_s),
        heartbeat_timeout=timedelta(seconds=plan.heartbeat_timeout_s),
        retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=500), maximum_interval=timedelta(seconds=5)),
    )
    return ran


def _release(workload: str, plan: LaunchPlan, outcome: NodeOutcome) -> ReleaseRequest:
    placed = plan.nodes[0].tasks
    progress = [one for one in outcome.progress if one.task in placed.get(one.job, ())]
    return ReleaseRequest(workload, FIRST_ATTEMPT, Phase.SUCCEEDED.value, completed(plan).to_json(), progress)
