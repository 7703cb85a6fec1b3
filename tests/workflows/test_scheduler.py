"""The scheduling loop: the order and frequency of its activities, and its handling of failures."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner

import workflows.scheduler
from domain.ids import CONTROL_QUEUE, SCHEDULER_WORKFLOW_ID, region_queue
from domain.protocol.activities import Activity
from domain.protocol.scheduling import AwardRequest, BidRequest, DryRunRequest, DryRunResult, ScanTicket
from tests.workflows.agents import until
from tests.workflows.lab import handled, serving
from tests.workflows.servers import skipping_server
from tests.workflows.stand_ins import Auction
from workflows.scheduler import DryRunWorkflow, SchedulerWorkflow

INTERVAL_S = 300.0


class Loop:
    """A scheduler on its own server, whose time can be skipped."""

    def __init__(self, environment: WorkflowEnvironment, client: Client, auction: Auction) -> None:
        self.auction = auction
        self._environment = environment
        self._client = client
        self._handle: WorkflowHandle[SchedulerWorkflow, None] | None = None

    @property
    def handle(self) -> WorkflowHandle[SchedulerWorkflow, None]:
        assert self._handle is not None
        return self._handle

    async def begins(self) -> None:
        """Starts the loop."""
        self._handle = await self._client.start_workflow(
            SchedulerWorkflow.run, id=SCHEDULER_WORKFLOW_ID, task_queue=CONTROL_QUEUE
        )

    async def wakes(self) -> None:
        """Signals a change to the loop."""
        await self.handle.signal(SchedulerWorkflow.wake)

    async def passes(self, seconds: float) -> None:
        """Skips time."""
        await self._environment.sleep(timedelta(seconds=seconds))

    async def called(self, kind: Activity, times: int) -> None:
        """Waits until an activity was called this many times."""
        await until(lambda: len(self.auction.requests(kind)) >= times, f"{kind.value} is called {times} times")

    async def rests(self) -> None:
        """Waits until the loop waits only for its timer."""
        give_up_s = asyncio.get_running_loop().time() + 20.0
        while True:
            events = await handled(self.handle)
            task = max(e.event_id for e in events if e.HasField("workflow_task_completed_event_attributes"))
            if any(e.HasField("timer_started_event_attributes") for e in events[task:]):
                return
            assert asyncio.get_running_loop().time() < give_up_s, f"the loop's last event is {events[-1]}"
            await asyncio.sleep(0.02)

    async def asked(self, request: DryRunRequest) -> DryRunResult:
        """Returns the result of a dry run."""
        return await self._client.execute_workflow(DryRunWorkflow.run, request, id="dry", task_queue=CONTROL_QUEUE)


@pytest_asyncio.fixture(loop_scope="session")
async def loop() -> AsyncIterator[Loop]:
    """A scheduler that is not started yet, and regions `east` and `west` that bid."""
    ticket = ScanTicket(7, ["east", "west"], 2, 5.0, INTERVAL_S, queued=5)
    auction = Auction(ticket)
    async with skipping_server() as (environment, client), contextlib.AsyncExitStack() as workers:
        for region in ticket.regions:
            await workers.enter_async_context(serving(client, region_queue(region), [], [auction.bid]))
        control = serving(client, CONTROL_QUEUE, [SchedulerWorkflow, DryRunWorkflow], auction.of_queue())
        await workers.enter_async_context(control)
        yield Loop(environment, client, auction)


async def test_a_tick_scans_then_hears_all_regions_then_awards_batch_by_batch(loop: Loop) -> None:
    """Batches are handled in queue order: all regions bid on a batch, and it is awarded before the next begins."""
    await loop.begins()
    await loop.rests()
    batches = [0, 2, 4]
    assert loop.auction.names() == ["queue.scan"] + 3 * ["region.bid", "region.bid", "queue.award"]
    assert loop.auction.requests(Activity.AWARD) == [AwardRequest(7, b, [], 5.0) for b in batches]
    bids = sorted(loop.auction.requests(Activity.BID), key=lambda b: (b.first, b.region))
    assert bids == [BidRequest(region, 7, batch) for batch in batches for region in ("east", "west")]


async def test_an_empty_queue_asks_nobody(loop: Loop) -> None:
    """With an empty queue a tick is only a scan."""
    loop.auction.ticket.queued = 0
    await loop.begins()
    await loop.rests()
    assert loop.auction.names() == ["queue.scan"]


async def test_a_region_that_does_not_answer_is_named_and_the_others_go_on(loop: Loop) -> None:
    """A region that misses the bid deadline is reported as unreachable; the award uses the other regions' bids."""
    loop.auction.ticket.queued = 1
    loop.auction.ticket.regions = ["east", "nowhere", "west"]
    loop.auction.ticket.bid_timeout_s = 2.0
    await loop.begins()
    await loop.called(Activity.AWARD, 1)
    assert loop.auction.requests(Activity.AWARD)[0].unreachable == ["nowhere"]


async def test_a_region_that_missed_the_deadline_is_left_out_of_the_pass(loop: Loop) -> None:
    """A region that misses one deadline is not asked in later batches of the pass, but reported as unreachable."""
    loop.auction.ticket.regions = ["east", "nowhere", "west"]
    loop.auction.ticket.bid_timeout_s = 2.0
    await loop.begins()
    await loop.called(Activity.AWARD, 3)
    assert [a.unreachable for a in loop.auction.requests(Activity.AWARD)] == 3 * [["nowhere"]]
    history = await loop.handle.fetch_history()
    asked = [e.activity_task_scheduled_event_attributes.task_queue.name for e in history.events]
    assert asked.count(region_queue("nowhere")) == 1


async def test_a_silent_region_is_probed_and_not_waited_for(loop: Loop) -> None:
    """A pass does not wait for the probe of a silent region; its awards report the region as unreachable."""
    loop.auction.ticket.regions, loop.auction.ticket.queued = [], 1
    loop.auction.ticket.probed, loop.auction.ticket.silent = ["west"], ["west"]
    loop.auction.held.add(Activity.BID)
    await loop.begins()
    await loop.called(Activity.BID, 1)
    await loop.called(Activity.AWARD, 1)
    assert loop.auction.requests(Activity.AWARD)[0].unreachable == ["west"]
    assert len(loop.auction.requests(Activity.SCAN)) == 1


async def test_a_silent_region_that_answers_wakes_the_loop(loop: Loop) -> None:
    """The answer of a silent region triggers a scan immediately."""
    loop.auction.ticket.queued, loop.auction.ticket.probed = 0, ["west"]
    loop.auction.held.add(Activity.BID)
    await loop.begins()
    await loop.called(Activity.BID, 1)
    await loop.rests()
    assert len(loop.auction.requests(Activity.SCAN)) == 1
    loop.auction.ticket.probed = []
    loop.auction.held.clear()
    await loop.called(Activity.SCAN, 2)


async def test_a_bid_that_fails_is_tried_again_in_time(loop: Loop) -> None:
    """A failed bid is retried within the deadline; its region is not unreachable."""
    loop.auction.ticket.queued = 1
    loop.auction.errors[Activity.BID] = [RuntimeError("snapshot is behind")]
    await loop.begins()
    await loop.called(Activity.AWARD, 1)
    assert loop.auction.requests(Activity.AWARD)[0].unreachable == []
    assert len(loop.auction.requests(Activity.BID)) == 3


async def test_the_queue_is_scanned_at_every_interval(loop: Loop) -> None:
    """Without changes the queue is scanned once in each interval."""
    loop.auction.ticket.queued = 0
    await loop.begins()
    await loop.rests()
    for scans in (2, 3, 4):
        await loop.passes(INTERVAL_S + 1.0)
        await loop.called(Activity.SCAN, scans)
        await loop.rests()
        assert len(loop.auction.requests(Activity.SCAN)) == scans


async def test_a_tick_ends_where_its_order_is_lost(loop: Loop) -> None:
    """If the process that scanned has restarted, the tick ends after the batch that was bid on."""
    loop.auction.result.over = True
    await loop.begins()
    await loop.rests()
    assert loop.auction.names() == ["queue.scan", "region.bid", "region.bid", "queue.award"]


async def test_a_tick_that_is_due_sooner_comes_sooner(loop: Loop) -> None:
    """An award may request the next tick before the interval is over."""
    loop.auction.result.rest_s = 10.0
    await loop.begins()
    await loop.rests()
    await loop.passes(11.0)
    await loop.called(Activity.SCAN, 2)


async def test_wakes_are_coalesced(loop: Loop) -> None:
    """All wakes during a tick cause one more tick; a later wake causes another one."""
    loop.auction.ticket.queued = 0
    loop.auction.held.add(Activity.SCAN)
    await loop.begins()
    await loop.called(Activity.SCAN, 1)
    for _ in range(5):
        await loop.wakes()
    loop.auction.held.clear()
    await loop.called(Activity.SCAN, 2)
    await loop.rests()
    assert len(loop.auction.requests(Activity.SCAN)) == 2
    await loop.wakes()
    await loop.called(Activity.SCAN, 3)


@pytest.mark.parametrize("kind", [Activity.SCAN, Activity.AWARD])
async def test_a_tick_that_fails_is_followed_by_another_soon(loop: Loop, kind: Activity) -> None:
    """A tick whose scan or award keeps failing is abandoned; the next one comes before the interval ends."""
    loop.auction.errors[kind] = [RuntimeError("deadlock detected") for _ in range(3)]
    await loop.begins()
    await loop.called(kind, 3)
    await loop.rests()
    assert len(loop.auction.requests(kind)) == 3
    await loop.passes(INTERVAL_S / 10)
    await loop.called(Activity.AWARD, 3)


async def test_the_loop_goes_on_in_a_new_history(dev_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its history is long, the loop continues as new, beginning with a scan."""
    # No sandbox: sandboxed workflows have their own copies of modules, which cannot be patched.
    monkeypatch.setattr(workflows.scheduler, "LONG_HISTORY_EVENTS", 4)
    auction = Auction(ScanTicket(7, [], 2, 5.0, INTERVAL_S))
    runner = UnsandboxedWorkflowRunner()
    async with serving(dev_client, "ticks", [SchedulerWorkflow], auction.of_queue(), runner):
        handle = await dev_client.start_workflow(SchedulerWorkflow.run, id="ticks", task_queue="ticks")
        try:
            for scans in (1, 2, 3):
                await until(lambda n=scans: len(auction.requests(Activity.SCAN)) >= n, f"scan {scans} is done")
                await handle.signal(SchedulerWorkflow.wake)
            described = await handle.describe()
            assert described.run_id != handle.first_execution_run_id
        finally:
            await handle.terminate()


# ------------------------------------------------------------------------------------------------------------ dry runs


async def test_a_dry_run_answers_and_changes_nothing(loop: Loop) -> None:
    """A dry run calls its activity once and no other."""
    spec = {"name": "trial"}
    answer = await loop.asked(DryRunRequest(spec))
    assert answer == DryRunResult(True, 3, False, "east", ["east/c1/m1"])
    assert loop.auction.calls == [(Activity.DRY_RUN, DryRunRequest(spec))]


async def test_a_dry_run_that_cannot_be_answered_fails(loop: Loop) -> None:
    """A refused dry run fails immediately."""
    loop.auction.errors[Activity.DRY_RUN] = [ApplicationError("no such tenant", non_retryable=True)]
    with pytest.raises(WorkflowFailureError):
        await loop.asked(DryRunRequest({}))
