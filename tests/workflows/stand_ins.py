"""Activities of the other workflows in memory: they record their requests and return what the test sets."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from temporalio import activity

from domain.protocol.activities import Activity
from domain.protocol.bundles import Bundle, BundleRun, RunBundle, SettleBundle
from domain.protocol.data import ReplicateTable, Scrub
from domain.protocol.instances import InstanceFacts, InstanceMove, InstanceRef
from domain.protocol.machines import Attend, Hello, MachineNotice, Welcome
from domain.protocol.scheduling import AwardRequest, AwardResult, BidRequest, DryRunRequest, DryRunResult, ScanTicket
from domain.protocol.workloads import LaunchPlan


class StandIns:
    """Records each call; raises errors or waits as the test sets."""

    def __init__(self) -> None:
        self.calls: list[tuple[Activity, Any]] = []
        self.errors: dict[Activity, list[Exception]] = defaultdict(list)
        """Errors for the next tries of an activity, one for each try."""
        self.held: set[Activity] = set()
        """Activities that make no progress."""

    def names(self) -> list[str]:
        """Returns the names of the called activities, including failed tries."""
        return [kind.value for kind, _ in self.calls]

    def requests(self, kind: Activity) -> list[Any]:
        """Returns the requests of one activity."""
        return [request for called, request in self.calls if called is kind]

    async def _called(self, kind: Activity, request: Any = None) -> None:
        self.calls.append((kind, request))
        while kind in self.held:
            await asyncio.sleep(0.02)
        if self.errors[kind]:
            raise self.errors[kind].pop(0)


class Bundles(StandIns):
    """Activities of a bundle, with those of its machine's agent."""

    def __init__(self, plans: dict[str, LaunchPlan], runs: list[BundleRun]) -> None:
        super().__init__()
        self._plans = plans
        self._runs = runs

    @activity.defn(name=Activity.STAGE_BUNDLE.value)
    async def stage(self, bundle: Bundle) -> dict[str, LaunchPlan]:
        await self._called(Activity.STAGE_BUNDLE, bundle)
        return self._plans

    @activity.defn(name=Activity.RUN_BUNDLE.value)
    async def run(self, request: RunBundle) -> BundleRun:
        await self._called(Activity.RUN_BUNDLE, request)
        return self._runs.pop(0)

    @activity.defn(name=Activity.SETTLE_BUNDLE.value)
    async def settle(self, request: SettleBundle) -> None:
        await self._called(Activity.SETTLE_BUNDLE, request)


class Auction(StandIns):
    """Activities of the queue and of the regions that bid."""

    def __init__(self, ticket: ScanTicket) -> None:
        super().__init__()
        self.ticket = ticket
        self.result = AwardResult(awarded=1, waiting=0, rebids=0)

    def of_queue(self) -> list[Callable[..., Any]]:
        """Returns the activities of the control queue."""
        return [self.scan, self.award, self.dry_run]

    @activity.defn(name=Activity.SCAN.value)
    async def scan(self, _: None = None) -> ScanTicket:
        await self._called(Activity.SCAN)
        return self.ticket

    @activity.defn(name=Activity.BID.value)
    async def bid(self, request: BidRequest) -> int:
        await self._called(Activity.BID, request)
        return 1

    @activity.defn(name=Activity.AWARD.value)
    async def award(self, request: AwardRequest) -> AwardResult:
        await self._called(Activity.AWARD, request)
        return self.result

    @activity.defn(name=Activity.DRY_RUN.value)
    async def dry_run(self, request: DryRunRequest) -> DryRunResult:
        await self._called(Activity.DRY_RUN, request)
        return DryRunResult(admitted=True, rank=3, over_quota=False, region="east", machines=["east/c1/m1"])


class Registry(StandIns):
    """Activities of the fleet's registry."""

    def __init__(self) -> None:
        super().__init__()
        self.welcome = Welcome(stop=[], heartbeat_timeout_s=1.0, lost_after_s=1.0)
        self.after_proof: Welcome | None = None
        """The response to a registration with a key proof."""

    def all(self) -> list[Callable[..., Any]]:
        """Returns the activities of the control queue."""
        return [self.register, self.ready, self.lost, self.noticed]

    @activity.defn(name=Activity.REGISTER_MACHINE.value)
    async def register(self, hello: Hello) -> Welcome:
        await self._called(Activity.REGISTER_MACHINE, hello)
        return self.after_proof if hello.key_proof and self.after_proof is not None else self.welcome

    @activity.defn(name=Activity.MACHINE_READY.value)
    async def ready(self, attend: Attend) -> None:
        await self._called(Activity.MACHINE_READY, attend)

    @activity.defn(name=Activity.MACHINE_LOST.value)
    async def lost(self, attend: Attend) -> None:
        await self._called(Activity.MACHINE_LOST, attend)

    @activity.defn(name=Activity.MACHINE_NOTICED.value)
    async def noticed(self, notice: MachineNotice) -> None:
        await self._called(Activity.MACHINE_NOTICED, notice)


class LedgerActivities(StandIns):
    """Activities of one instance: its ledger and its provider."""

    def __init__(self) -> None:
        super().__init__()
        self.facts = InstanceFacts(told=False, lost=False, ready=False, held=False)
        self.launched = True
        """The provider's response to a launch; False: it refuses."""
        self.ends_after = 1
        """The number of terminate requests after which the provider reports the instance as gone."""

    def all(self) -> list[Callable[..., Any]]:
        """Returns the activities of the control queue."""
        return [self.launch, self.inspect, self.move, self.drain, self.terminate]

    def phases(self) -> list[str]:
        """Returns the phases of the instance, each with the event that led to it."""
        return [f"{move.phase} {move.because}".strip() for move in self.requests(Activity.MOVE_INSTANCE)]

    @activity.defn(name=Activity.LAUNCH_INSTANCE.value)
    async def launch(self, ref: InstanceRef) -> bool:
        await self._called(Activity.LAUNCH_INSTANCE, ref)
        return self.launched

    @activity.defn(name=Activity.INSPECT_INSTANCE.value)
    async def inspect(self, ref: InstanceRef) -> InstanceFacts:
        await self._called(Activity.INSPECT_INSTANCE, ref)
        return self.facts

    @activity.defn(name=Activity.MOVE_INSTANCE.value)
    async def move(self, asked: InstanceMove) -> None:
        await self._called(Activity.MOVE_INSTANCE, asked)

    @activity.defn(name=Activity.DRAIN_INSTANCE.value)
    async def drain(self, ref: InstanceRef) -> None:
        await self._called(Activity.DRAIN_INSTANCE, ref)

    @activity.defn(name=Activity.TERMINATE_INSTANCE.value)
    async def terminate(self, ref: InstanceRef) -> bool:
        await self._called(Activity.TERMINATE_INSTANCE, ref)
        return len(self.requests(Activity.TERMINATE_INSTANCE)) >= self.ends_after


class Housekeeping(StandIns):
    """Activities of housekeeping, and copies of tables."""

    rest_s = 2.0

    def all(self) -> list[Callable[..., Any]]:
        """Returns the activities of the control queue."""
        return [self.expire, self.remove]

    @activity.defn(name=Activity.EXPIRE.value)
    async def expire(self) -> float:
        await self._called(Activity.EXPIRE)
        return self.rest_s

    @activity.defn(name=Activity.REMOVE_REPLICAS.value)
    async def remove(self) -> float:
        await self._called(Activity.REMOVE_REPLICAS)
        return 0.0

    @activity.defn(name=Activity.COPY_TABLE.value)
    async def copy_table(self, request: ReplicateTable) -> int:
        await self._called(Activity.COPY_TABLE, request)
        return 1 << 30

    @activity.defn(name=Activity.SCRUB.value)
    async def scrub(self, request: Scrub) -> int:
        await self._called(Activity.SCRUB, request)
        return 60
