"""The rates of the checkpoints that leave this machine within a notice of its owner (ReclaimNet's P3 on one link).

Every task that must leave is a flow: what its sockets send is shaped by its cgroup. A flow needs its checkpoint's bytes
by the end of the notice; the admission gives each admitted flow at least that rate, and gives the rest of the migration
share to the earliest deadline. A task that sends parts ahead has the class pre-sync meanwhile, and keeps the rate that
its last checkpoint will need. Starts are not staggered: tasks begin to save when they get the notice. Tasks that
cannot be admitted, or whose checkpoint has no known size, get what is left: they must not take the bandwidth that
others were promised.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agent.config import DEFAULT_INTERFACE, AgentConfig
from agent.lending.leaving_tasks import LeavingTask
from agent.network.edge import KillSwitch, MigrationFlow
from agent.network.machine import MachineNetwork
from agent.network.shaping import LinkShare
from agent.network.uplink import BLOCKS, SLACK, BlockFile, Uplink
from domain.traffic import TrafficClass
from reclaim.admission import AdmissionDecision, FlowOutcome, Flows, SpareSharing, decide
from reclaim.traffic import migration_share, wire_bytes

COMMIT_S = 2.0
"""Time that must be left after the last byte, for the commit in the store."""
HEADROOM_SHARE = 0.1
"""Share of the link that new flows leave free: with it, fewer admitted flows are late if the network carries less."""
_LEAST_BYTES_S = 50_000
"""What every task gets, also one that is not admitted. At a much lower rate, one large segment would block its class so
long that it could not use a higher rate later."""
_ENFORCEABLE_BYTES_S = 1000
"""The lowest rate that a class can have."""
_LEAST_SHARE_BYTES_S = 2 * _LEAST_BYTES_S
_LEAST_SHARE = 0.1
"""The least migration share, however little was measured: this share of the configured one. A task that sends to a slow
peer must not take the bandwidth of all last checkpoints."""
_MOST_FLOWS = 200
_ADMITTED = (FlowOutcome.ADMITTED, FlowOutcome.SQUEEZED)


@dataclass
class _Known:
    flow: MigrationFlow
    is_admitted: bool = False
    is_counted: bool = False
    """Whether what it sends is counted: from its first rate on."""


@dataclass
class MigrationTraffic:
    """The flows of the tasks that leave now. Its methods block for milliseconds, and can be called in any thread."""

    network: MachineNetwork
    share_bytes_s: int
    """The migration share of the link as it is configured, in bytes on the wire per second."""
    uplink: Uplink | None = None
    """What measures the bandwidth; None: only the configured one is known."""
    research_bytes_s: float = 0.0
    """B_min: the bandwidth that research keeps at least."""
    _known: dict[str, _Known] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    @property
    def kill_switch(self) -> KillSwitch:
        """The flag by which the interface refuses new connections to the machine's tasks."""
        return self.network.kill_switch

    @property
    def measured_share_bytes_s(self) -> int:
        """The migration share of the link's bandwidth.

        It is `share_bytes_s`, or less if less was measured, but at least `_LEAST_SHARE` of it.
        """
        measured = None if self.uplink is None else self.uplink.report()
        if measured is None:
            return self.share_bytes_s
        share_bytes_s = int(migration_share(measured.lower_bytes_s, self.research_bytes_s))
        least_bytes_s = max(_LEAST_SHARE_BYTES_S, int(_LEAST_SHARE * self.share_bytes_s))
        return min(self.share_bytes_s, max(least_bytes_s, share_bytes_s))

    def update(self, leaving: Sequence[LeavingTask], now_s: float) -> Mapping[str, FlowOutcome | None]:
        """Sets the rates of the tasks that leave, and ends those of others; returns the result for each task.

        None: the size of its checkpoint is not known. A task whose cgroup is gone is left out. After `close`, nothing
        happens: the thread of an update continues when the agent stops.
        """
        with self._lock:
            return {} if self._is_closed else self._update(leaving, now_s)

    def close(self) -> None:
        """Leaves the interface as it was, after an update that is in progress. Idempotent."""
        with self._lock:
            self._is_closed = True
            self.network.close()

    def _update(self, leaving: Sequence[LeavingTask], now_s: float) -> Mapping[str, FlowOutcome | None]:
        found: list[LeavingTask] = []
        share_bytes_s = self.measured_share_bytes_s
        # The kernel has a limited number of classes, and each needs a least rate. Others are not shaped.
        most = min(_MOST_FLOWS, share_bytes_s // (2 * _ENFORCEABLE_BYTES_S))
        for one in leaving[:most]:
            traffic = TrafficClass.PRE_SYNC if one.pre_sync else TrafficClass.PLANNED
            known = self._known.get(one.run_id)
            if known is None or known.flow.traffic is not traffic:
                try:
                    flow = MigrationFlow.of_cgroup(one.run_id, traffic, one.cgroup)
                except OSError:
                    continue
                # What was sent ahead does not count as a part of the last checkpoint.
                self._known[one.run_id] = _Known(flow, is_admitted=known is not None and known.is_admitted)
            found.append(one)
        for run_id in self._known.keys() - {one.run_id for one in found}:
            del self._known[run_id]
        rates, outcomes = self._decide(found, now_s, share_bytes_s)
        self.network.apply(rates)
        for known in self._known.values():
            known.is_counted = True
        return outcomes

    def _decide(
        self, leaving: Sequence[LeavingTask], now_s: float, share_bytes_s: int
    ) -> tuple[dict[MigrationFlow, float], dict[str, FlowOutcome | None]]:
        """Returns the rate of each flow in bytes on the wire per second, and the result for each task."""
        sized = [one for one in leaving if one.checkpoint_bytes is not None]
        known = [self._known[one.run_id] for one in sized]
        least = max(_ENFORCEABLE_BYTES_S, min(_LEAST_BYTES_S, share_bytes_s // (10 * max(1, len(leaving)))))
        share = share_bytes_s - least * len(leaving)
        rates = {self._known[one.run_id].flow: float(least) for one in leaving}
        outcomes: dict[str, FlowOutcome | None] = {one.run_id: None for one in leaving}
        left = share
        if sized:
            remaining = [self._remaining_bytes(one) for one in sized]
            deadlines_s = [one.deadline_s for one in sized]

            def decided(admitted: Sequence[bool]) -> AdmissionDecision:
                paths = np.zeros((len(sized), 1), np.int64)
                flows = Flows.of(
                    remaining, deadlines_s, paths, rest_s=COMMIT_S, start_s=now_s, is_admitted=admitted
                )  # fmt: skip
                return decide(flows, np.array([share], np.int64), now_s, HEADROOM_SHARE, SpareSharing.DEADLINE)

            outcome = decided([one.is_admitted for one in known]).outcome.tolist()
            for task, found in zip(known, outcome, strict=True):
                task.is_admitted = found in _ADMITTED
            # Again, so that those which are new have started.
            decision = decided([one.is_admitted for one in known])
            left = int(decision.left_bytes_s[0])
            for at, one in enumerate(sized):
                outcomes[one.run_id] = FlowOutcome(outcome[at])
                rates[known[at].flow] += float(decision.rate_bytes_s[at])
        others = [run_id for run_id, result in outcomes.items() if result not in _ADMITTED]
        for run_id in others:
            rates[self._known[run_id].flow] += left // len(others)
        return rates, outcomes

    def _remaining_bytes(self, one: LeavingTask) -> int:
        known = self._known[one.run_id]
        is_last = known.is_counted and not one.pre_sync
        sent = self.network.sent(known.flow).payload_bytes if is_last else 0
        left = max(0, (one.checkpoint_bytes or 0) - sent)
        return int(wire_bytes(left, self.network.overhead_share))


def open_traffic(config: AgentConfig) -> MigrationTraffic:
    """Prepares the machine's interface. `config.interface` must be set."""
    name = None if config.interface == DEFAULT_INTERFACE else config.interface
    share_bytes_s = int(migration_share(config.link_bytes_s, config.research_bytes_s))
    first, last = config.ports
    share = LinkShare(config.link_bytes_s, share_bytes_s)
    network = MachineNetwork(name, range(first, last + 1), share)
    file = BlockFile(config.state_dir / "uplink.json", BLOCKS, SLACK * config.link_bytes_s)
    uplink = Uplink(name, config.link_bytes_s, network, file=file)
    return MigrationTraffic(network, share_bytes_s, uplink, config.research_bytes_s)
