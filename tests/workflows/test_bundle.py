"""A bundle's workflow: which attempts it releases, and which workloads leave it."""

from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from domain.ids import CONTROL_QUEUE, agent_queue
from domain.phases import Phase
from domain.protocol.activities import Activity
from domain.protocol.bundles import Bundle, BundleRun
from domain.protocol.machines import NodeOutcome, TaskExit
from domain.protocol.workloads import NodeLaunch
from domain.task_reports import TaskProgress
from tests.workflows.lab import launch_plan, serving
from tests.workflows.stand_ins import Bundles
from workflows.bundle import BundleWorkflow

MACHINE = "east/c1/m"


def _ended(exit_code: int, *others: int, stopped: bool = False) -> NodeOutcome:
    progress = [TaskProgress("main", task, step=5) for task in (0, *others)]
    return NodeOutcome(MACHINE, [TaskExit("main", 0, exit_code)], progress, stopped)


async def _run(client: Client, bundles: Bundles, *workloads: str) -> list[tuple[list[str], list[str]]]:
    """Runs a bundle to its end; returns who was released and who left at each step."""
    async with (
        serving(client, CONTROL_QUEUE, [BundleWorkflow], [bundles.stage, bundles.settle]),
        serving(client, agent_queue(MACHINE), [], [bundles.run]),
    ):
        await client.execute_workflow(
            BundleWorkflow.run, Bundle(MACHINE, [*workloads]), id="bundle", task_queue=CONTROL_QUEUE
        )
    settled = bundles.requests(Activity.SETTLE_BUNDLE)
    return [([release.workload_id for release in one.releases], one.leaving) for one in settled]


def _bundles(*runs: BundleRun) -> Bundles:
    node = NodeLaunch(MACHINE, ["main"], {"main": [0]})
    return Bundles({f"wl-{k}": launch_plan(f"wl-{k}", [node]) for k in range(5)}, [*runs])


async def ends_in_every_way(client: Client) -> Bundles:
    """Runs a bundle of workloads of which the last is not staged; the others succeed, fail, stop or are refused."""
    bundles = _bundles(
        BundleRun({"wl-0": _ended(0, 1), "wl-1": _ended(3)}, ["wl-2"]),
        BundleRun({"wl-3": _ended(0, stopped=True), "wl-4": _ended(0)}),
    )
    bundles.errors[Activity.RUN_BUNDLE] = [ApplicationError("the agent restarts")]
    assert await _run(client, bundles, "wl-0", "wl-1", "wl-2", "wl-3", "wl-4", "wl-5") == [
        (["wl-0"], ["wl-5", "wl-2", "wl-1"]),
        (["wl-4"], ["wl-3"]),
    ]
    return bundles


async def test_only_successes_are_released(client: Client) -> None:
    """The bundle releases what succeeds, and everything else leaves it; machines report only tasks placed on them."""
    bundles = await ends_in_every_way(client)
    asked = [[run.workload_id for run in request.runs] for request in bundles.requests(Activity.RUN_BUNDLE)]
    assert asked[1:] == [["wl-0", "wl-1", "wl-2", "wl-3", "wl-4"], ["wl-3", "wl-4"]]
    released = bundles.requests(Activity.SETTLE_BUNDLE)[0].releases[0]
    assert (released.next_phase, released.reason["code"]) == (Phase.SUCCEEDED.value, "completed")
    assert [one.task for one in released.progress] == [0]


async def test_a_failing_agent_leaves_no_workload_behind(client: Client) -> None:
    """If the request to the agent fails for good, all workloads leave."""
    bundles = _bundles()
    bundles.errors[Activity.RUN_BUNDLE] = [ApplicationError("another machine", non_retryable=True)]
    assert await _run(client, bundles, "wl-0", "wl-1") == [([], [f"wl-{k}" for k in range(5)])]
