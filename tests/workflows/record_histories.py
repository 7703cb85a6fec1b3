"""Records histories of representative workflows: `python -m tests.workflows.record_histories [NAME ...]`.

A deployment meets workflows that began with older code. The test suite replays these histories, so that an incompatible
change fails there and not in production.

NAME is a key of `LIVES` or `OTHERS`; without names, everything without a recorded history is recorded. Each workflow
runs on a dev server, and its history is added to `histories/` as `<name>.<n>.json` with the next free number.

Record again when a workflow does something that no recorded history contains, and after a change behind
`workflow.patched`, which makes new histories differ from old ones. Recorded histories are never edited. Each is kept
for as long as workflows of its age may run. If the code no longer replays a history, put the change behind
`workflow.patched` with a named constant; remove the patch together with the last such history.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from temporalio import activity
from temporalio.client import Client, WorkflowHistory
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner

import workflows.housekeeping
from domain.ids import agent_queue, region_queue
from domain.protocol.activities import Activity
from domain.protocol.data import ReplicateTable, Scrub
from domain.protocol.machines import DETACHED
from domain.protocol.scheduling import DryRunRequest, ScanTicket
from domain.protocol.sessions import OpenSession, SessionRefusal
from tests.workflows import (
    test_bundle,
    test_inbox,
    test_instance,
    test_launch_refused,
    test_leaving,
    test_loading,
    test_loss,
    test_placing,
    test_replacement,
    test_running,
)
from tests.workflows.agents import until
from tests.workflows.lab import Lab, handled, serving
from tests.workflows.replays import HISTORIES
from tests.workflows.servers import dev_server
from tests.workflows.stand_ins import Auction, Housekeeping
from tests.workflows.stories import Story
from tests.workflows.test_instance import Instance
from tests.workflows.test_machine import Registered, said
from workflows.housekeeping import HousekeepingWorkflow
from workflows.instance import InstanceWorkflow
from workflows.machine import MachineWorkflow
from workflows.replica import ReplicaWorkflow
from workflows.scheduler import DryRunWorkflow, SchedulerWorkflow
from workflows.scrub import ScrubWorkflow
from workflows.session_request import SessionWorkflow

LIVES: dict[str, Story] = {
    "workload-succeeds": test_running.test_a_gang_that_ends_well_succeeds,
    "workload-starts-at-once": test_running.test_one_machine_with_nothing_to_fetch_starts_at_once,
    "workload-waits-for-victims": test_placing.test_nothing_is_staged_before_the_victims_gave_up_their_slots,
    "workload-moves": test_placing.test_a_checkpoint_in_another_region_is_there_before_its_tasks_start,
    "workload-evicted-in-move": test_placing.test_evicted_during_a_move_its_checkpoint_stays_where_it_was,
    "workload-evicted-in-preparation": test_placing.test_evicted_during_preparation_no_task_is_ever_started,
    "workload-refused": test_launch_refused.test_a_machine_that_refuses_to_prepare_is_blamed_and_the_user_is_not,
    "workload-cannot-start": test_launch_refused.test_what_is_wrong_with_a_workload_fails_it_and_blames_no_machine,
    "workload-cannot-start-on-lent": (
        test_launch_refused.test_what_one_lent_machine_says_about_a_launch_is_confirmed_elsewhere
    ),
    "workload-launch-timed-out": (
        test_launch_refused.test_a_lent_machine_that_accepts_and_prepares_nothing_counts_as_lost
    ),
    "workload-fails-on-lent": (
        test_launch_refused.test_failures_on_the_same_lent_machine_end_a_workload_after_three_attempts
    ),
    "workload-refused-twice": test_launch_refused.test_a_full_disk_blames_nobody,
    "workload-out-of-memory": test_running.test_a_task_whose_memory_ran_out_is_told_as_such,
    "workload-cancelled-late": test_placing.test_a_cancellation_that_comes_after_an_award_cancels_the_attempt,
    "workload-evicted": test_running.test_an_evicted_gang_saves_within_its_grace_and_runs_again,
    "workload-cancelled": test_running.test_a_running_workload_is_cancelled,
    "workload-expires": test_inbox.test_a_workload_that_waits_for_too_long_fails,
    "workload-fails": test_running.test_a_failure_is_retried_within_its_limit_and_then_shown_with_its_last_words,
    "workload-limited": test_running.test_an_attempt_may_run_for_what_earlier_ones_left,
    "workload-hangs": test_running.test_a_gang_that_hangs_again_and_again_fails,
    "workload-mail-late": test_inbox.test_mail_about_an_earlier_attempt_is_ignored,
    "workload-machine-lost": test_loss.test_a_gang_whose_machine_is_said_to_be_lost_is_stopped_on_the_others,
    "workload-machine-silent": test_loss.test_a_machine_whose_agent_stays_silent_is_lost,
    "workload-agent-returns": test_loss.test_an_agent_that_comes_back_takes_hold_of_its_tasks_again,
    "workload-errors-pass": test_loss.test_errors_that_pass_end_nothing,
    "workload-leaves": test_leaving.test_a_workload_is_placed_anew_while_its_tasks_save,
    "workload-leaves-and-moves": test_leaving.test_no_checkpoint_is_fenced_while_tasks_save,
    "workload-ended-by-notice": test_leaving.test_tasks_that_end_by_the_notice_before_the_server_heard_are_preempted,
    "workload-withdrawn": test_leaving.test_a_launch_is_withdrawn_if_the_owner_takes_the_machine_at_once,
    "workload-given-back": test_leaving.test_an_agent_whose_owner_takes_the_machine_confirms_the_end_once,
    "workload-unloadable": test_loading.test_a_workload_whose_checkpoint_does_not_load_twice_is_stopped,
    "workload-stop-refused": test_loss.test_a_machine_that_refuses_to_stop_is_treated_like_a_silent_one,
    "workload-stopped-before": test_launch_refused.test_a_machine_that_says_to_have_stopped_each_attempt,
    "workload-stopped-then-refused": test_launch_refused.test_an_attempt_that_was_stopped_before_is_no_refusal,
    "workload-replaced": test_replacement.test_a_workflow_that_replaces_one_that_is_gone_goes_on_with_what_runs,
}


async def _life(client: Client, story: Story) -> WorkflowHistory:
    async with Lab.open(client) as lab:
        life = lab.life(name="wl-recorded")
        try:
            await life.begins()
            await story(life=life)
            await life.handled()
            return await life.handle.fetch_history()
        finally:
            await life.close()


async def _scheduler(client: Client) -> WorkflowHistory:
    """Records three ticks of two batches, the last two after a wake.

    One region misses the deadline, and another one is probed.
    """
    ticket = ScanTicket(7, ["east", "nowhere"], 2, 1.0, 300.0, queued=3, probed=["away"], silent=["away"])
    auction = Auction(ticket)
    async with (
        serving(client, "recorded", [SchedulerWorkflow], auction.of_queue()),
        serving(client, region_queue("east"), [], [auction.bid]),
    ):
        handle = await client.start_workflow(SchedulerWorkflow.run, id="scheduler", task_queue="recorded")
        for awards in (2, 4):
            await until(lambda n=awards: auction.names().count("queue.award") == n, f"{awards} awards are made")
            await handled(handle)
            await handle.signal(SchedulerWorkflow.wake)
        await until(lambda: auction.names().count("queue.award") == 6, "6 awards are made")
        history = await _fetched(client, "scheduler")
        await handle.terminate()
    return history


async def _dry_run(client: Client) -> WorkflowHistory:
    auction = Auction(ScanTicket(7, [], 2, 1.0, 300.0))
    async with serving(client, "recorded", [DryRunWorkflow], auction.of_queue()):
        await client.execute_workflow(
            DryRunWorkflow.run, DryRunRequest({"name": "trial"}), id="dry-run", task_queue="recorded"
        )
    return await _fetched(client, "dry-run")


async def _machine(client: Client) -> WorkflowHistory:
    """Records a machine that stops stale runs, whose agent restarts, is late, is lost and returns."""
    machine = Registered(client, "recorded")
    machine.registry.welcome.stop = ["wl-1.3", "wl-2.1"]
    async with serving(client, "recorded", [MachineWorkflow], machine.registry.all()):
        try:
            machine.agent.errors[Activity.ATTEND] = [ApplicationError("it stops", type=DETACHED)]
            await machine.says_hello()
            await machine.attended(2)
            await machine.agent.loses_touch()
            await machine.attended(3)
            await machine.agent.goes()
            await until(lambda: "machine.lost" in machine.registry.names(), "the machine is lost")
            machine.registry.welcome.stop = []
            await machine.says_hello("boot-2")
            await machine.attended(4)
            await machine.announces("boot-2")
            await machine.attended(5)
            await machine.handle.signal("unconfirmed", "wl-3.1")
            await until(lambda: machine.registry.names().count("machine.ready") == 4, "the first stop is confirmed")
            await machine.handle.signal("unconfirmed", args=["wl-4.1", 5.0])
            await machine.handle.signal("noticed", said(machine))
            await until(lambda: machine.registry.names().count("machine.ready") == 5, "the second stop is confirmed")
            await until(lambda: "machine.noticed" in machine.registry.names(), "the notice is recorded")
            return await _fetched(client, machine.handle.id)
        finally:
            await machine.close()


async def _refusing_machine(client: Client) -> WorkflowHistory:
    """Records a machine whose agent only detaches, says hello again, and then refuses to stop a run."""
    machine = Registered(client, "recorded")
    async with serving(client, "recorded", [MachineWorkflow], machine.registry.all()):
        try:
            machine.agent.errors[Activity.ATTEND] = [ApplicationError("it stops", type=DETACHED)] * 2
            await machine.says_hello()
            await until(lambda: "machine.lost" in machine.registry.names(), "the machine is lost")
            await machine.announces()
            await machine.attended(3)
            machine.agent.errors[Activity.STOP_NODE] = [ApplicationError("no", type="Fault", non_retryable=True)]
            await machine.handle.signal("unconfirmed", "wl-1.3")
            await until(lambda: machine.registry.names().count("machine.lost") == 2, "the machine is lost again")
            return await _fetched(client, machine.handle.id)
        finally:
            await machine.close()


async def _house(client: Client) -> WorkflowHistory:
    """Records two rounds; expiry fails in one of them."""
    workflows.housekeeping.REST_S = 1.0
    house = Housekeeping()
    house.rest_s = 0.01
    house.errors[Activity.EXPIRE] = [ApplicationError("no such table", non_retryable=True)]
    async with serving(client, "recorded", [HousekeepingWorkflow], house.all(), UnsandboxedWorkflowRunner()):
        handle = await client.start_workflow(HousekeepingWorkflow.run, id="house", task_queue="recorded")
        await until(lambda: house.names().count("house.remove_replicas") == 2, "two rounds are done")
        history = await _fetched(client, "house")
        await handle.terminate()
    return history


async def _replica(client: Client) -> WorkflowHistory:
    house = Housekeeping()
    async with (
        serving(client, "recorded", [ReplicaWorkflow], []),
        serving(client, region_queue("north"), [], [house.copy_table]),
    ):
        request = ReplicateTable("digits", "east", "north")
        await client.execute_workflow(
            ReplicaWorkflow.run, request, id="replica", task_queue="recorded", start_signal="asked"
        )
    return await _fetched(client, "replica")


async def _scrub(client: Client) -> WorkflowHistory:
    """Records two rounds; a signal ends the pause after the first."""
    house = Housekeeping()
    async with (
        serving(client, "recorded", [ScrubWorkflow], []),
        serving(client, region_queue("north"), [], [house.scrub]),
    ):
        handle = await client.start_workflow(
            ScrubWorkflow.run, Scrub("north"), id="scrub", task_queue="recorded", start_signal="refresh"
        )
        await until(lambda: house.names().count("region.scrub") == 1, "one round is done")
        await handled(handle)
        await handle.signal(ScrubWorkflow.refresh)
        await until(lambda: house.names().count("region.scrub") == 2, "a second round is done")
        history = await _fetched(client, "scrub")
        await handle.terminate()
    return history


async def _session(client: Client, *, is_refused: bool) -> WorkflowHistory:
    """Records the request to an agent, which joins the session or refuses it."""
    request = OpenSession("s-1", "north/alpha/m1", "wl-1", 1, "main", 0, "http://127.0.0.1:1", "sealed")
    refusals: list[SessionRefusal] = []

    @activity.defn(name=Activity.OPEN_SESSION.value)
    async def join(_: OpenSession) -> None:
        if is_refused:
            raise ApplicationError("the task has ended", non_retryable=True)

    @activity.defn(name=Activity.REFUSE_SESSION.value)
    async def refuse(refusal: SessionRefusal) -> None:
        refusals.append(refusal)

    async with (
        serving(client, "recorded", [SessionWorkflow], [refuse]),
        serving(client, agent_queue(request.machine), [], [join]),
    ):
        await client.execute_workflow(SessionWorkflow.run, request, id="session", task_queue="recorded")
    assert [refusal.why for refusal in refusals] == (["the task has ended"] if is_refused else [])
    return await _fetched(client, "session")


async def _bundle(client: Client) -> WorkflowHistory:
    await test_bundle.ends_in_every_way(client)
    return await _fetched(client, "bundle")


async def _instance(client: Client, life: Callable[[Instance], Awaitable[None]]) -> WorkflowHistory:
    instance = Instance(client, "in-1")
    async with serving(client, instance.id, [InstanceWorkflow], instance.ledger.all()):
        await life(instance)
    return await instance.handle.fetch_history()


OTHERS: dict[str, Callable[[Client], Awaitable[WorkflowHistory]]] = {
    "scheduler": _scheduler,
    "dry-run": _dry_run,
    "machine": _machine,
    "machine-refuses": _refusing_machine,
    "house": _house,
    "bundle": _bundle,
    "replica": _replica,
    "scrub": _scrub,
    "session": partial(_session, is_refused=False),
    "session-refused": partial(_session, is_refused=True),
    **{f"instance-{life.__name__.replace('_', '-')}": partial(_instance, life=life) for life in test_instance.LIVES},
}


async def _fetched(client: Client, id_: str) -> WorkflowHistory:
    handle = client.get_workflow_handle(id_)
    await handled(handle)
    return await handle.fetch_history()


def _without_traces(body: Any) -> Any:
    """Removes stack traces, which contain file names of this machine."""
    if isinstance(body, dict):
        return {name: _without_traces(value) for name, value in body.items() if name != "stackTrace"}
    return [_without_traces(value) for value in body] if isinstance(body, list) else body


def _write(name: str, history: WorkflowHistory) -> None:
    """Writes a history with one event on each line."""
    number = 1 + len(list(HISTORIES.glob(f"{name}.*.json")))
    events = _without_traces(json.loads(history.to_json()))["events"]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    HISTORIES.mkdir(exist_ok=True)
    path = HISTORIES / f"{name}.{number}.json"
    path.write_text(f'{{"events":[\n{lines}\n]}}\n')
    print(f"{path.name}: {len(events)} events")


async def record(names: list[str]) -> None:
    """Records the named workflows, or all without a recorded history."""
    unknown = sorted(set(names) - set(LIVES) - set(OTHERS))
    if unknown:
        raise SystemExit(f"unknown name: {', '.join(unknown)}; valid names: {', '.join([*LIVES, *OTHERS])}")
    for name in names or [n for n in (*LIVES, *OTHERS) if not list(HISTORIES.glob(f"{n}.*.json"))]:
        # A separate server for each, so that ids are the same in every history.
        async with dev_server() as client:
            _write(name, await (_life(client, LIVES[name]) if name in LIVES else OTHERS[name](client)))


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1:]))
