"""The loop that sends the jobs on lent machines their save intervals (ReclaimNet, section V, Algorithm 1), and tells
them when to move.

In each control period it observes the departures of each site, allocates the bandwidth for checkpoints among all jobs
of the site, and sends each machine the intervals of its tasks. What was learned is stored in the transaction that read
it. An interval expires, so a loop that does not run leaves the tasks to their own formula.
"""

import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.leader import Leader, lead
from activities.reclaim.lent_rows import (
    LentMachine,
    OwnerCame,
    RunningJob,
    forget_departures,
    read_departures,
    read_jobs,
    read_machines,
    read_now_s,
)
from domain import ids
from domain.protocol.machines import Pace, RunPace
from domain.traffic import OVERHEAD_SHARE
from infra.config.scheduling import ReclaimSettings
from infra.config.settings import Settings
from infra.db import events
from infra.db.models import Cluster
from infra.db.reclaim import SiteHazard
from infra.db.session import in_thread, transaction
from reclaim.arrays import Floats
from reclaim.buildings import AHEAD_S, NEAR_S, Rate
from reclaim.hazard import HazardModel
from reclaim.hazard_state import HazardState
from reclaim.intervals import IntervalReason, P1Settings, SiteJobs, tick
from reclaim.profile import DAY_S

_NOTICEABLE = 0.1
"""A relative change of a rate by less is not stored."""


@dataclass(frozen=True)
class Rates:
    """The rates of a region's lent machines."""

    number: Mapping[str, int]
    """The row of each machine."""
    table: Floats
    """One row for each machine, one column for each field of `Rate`."""

    @classmethod
    def of(cls, model: HazardModel, emergencies: HazardState, noticed: HazardState, now_s: float) -> "Rates":
        """Returns the rates at a time, from the hazards of departures without and with notice of the same machines."""
        columns = [column for state in (emergencies, noticed) for column in _near_and_later(model, state, now_s)]
        return cls({node: row for row, node in enumerate(emergencies.nodes)}, np.stack(columns, axis=1))

    def by_machine(self) -> dict[str, Rate]:
        """Returns the expected departures of each machine, by its id."""
        return {machine: Rate(*row) for machine, row in zip(self.number, self.table.tolist(), strict=True)}


def _near_and_later(model: HazardModel, state: HazardState, now_s: float) -> tuple[Floats, Floats]:
    near = model.expected(state, now_s, NEAR_S)
    later = np.maximum(model.expected(state, now_s, AHEAD_S) - near, 0.0)
    return near / (NEAR_S / 3600), later / ((AHEAD_S - NEAR_S) / 3600)


def write_rates(session: Session, region: str, rates: Rates, state: HazardState) -> None:
    """Stores the rates of a region's machines and clusters, as far as they have changed noticeably.

    A change of a cluster lets the schedulers read its machines again. `state` says which machines are in which cluster.
    """
    near = rates.table[:, 0]
    for number, name in enumerate(state.building_names):
        value = float(near[state.building == number].mean())
        row = session.get(Cluster, (region, name), with_for_update=True)
        if row is not None and _differs(row.departures_per_h, value):
            row.departures_per_h = _short(value)
    site = session.get_one(SiteHazard, region)
    new, stored = rates.by_machine(), site.machines
    if stored.keys() != new.keys() or any(
        _differs(before, now) for one, rate in new.items() for before, now in zip(stored[one], rate, strict=True)
    ):
        site.machines = {machine: [_short(value) for value in rate] for machine, rate in new.items()}


def _differs(stored: float, value: float) -> bool:
    return abs(stored - value) > _NOTICEABLE * max(stored, value)


def _short(value: float) -> float:
    return float(f"{value:.2g}")


_PERIODS = 3.0
"""An interval applies for this number of control periods."""
_MEASURED_S = 86400.0
"""The age from which a measured bandwidth is not used."""
_LEAST_SHARE = 0.1
"""The least share of the write speed that a measured bandwidth can have."""
_SIGNAL = timedelta(seconds=10)
_log = logging.getLogger(__name__)
_CLOCK_S = 3600.0
"""If the clock was set back by more than this, all counts are dropped. If it was set back by less, nothing is counted
until it has caught up."""


class Pacer:
    """Runs the control periods. In an installation, one process runs them; the others are on standby."""

    def __init__(self, engine: Engine, settings: Settings, client: Client) -> None:
        self._engine, self._client = engine, client
        self._settings = settings.reclaim
        self._model = HazardModel()

    async def run(self) -> None:
        """Runs rounds until cancelled, while this process is the leader."""
        await lead(self._engine, Leader.PACING, "pacing", self.round, self._settings.control_period_s)

    async def round(self) -> list[str]:
        """Runs one control period; returns the errors of signals. Without voluntary machines, it is one query."""
        failures: list[str] = []
        for pace in await in_thread(self.paces):
            handle = self._client.get_workflow_handle(ids.machine_workflow_id(pace.machine))
            try:
                await handle.signal("paced", pace, rpc_timeout=_SIGNAL)
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:
                    _log.warning("machine %s did not get the intervals of its tasks' saves: %s", pace.machine, error)
                    failures.append(f"signal to machine {pace.machine}: {error}")
        return failures

    def paces(self) -> list[Pace]:
        """Counts the departures since the last control period; returns the intervals for the tasks of each machine."""
        with transaction(self._engine) as session:
            found: list[Pace] = []
            now_s = read_now_s(session)
            forget_departures(session)
            for region, machines in read_machines(session).items():
                state, noticed = self._observe(session, region, machines, now_s)
                write_rates(session, region, Rates.of(self._model, state, noticed, now_s), state)
                jobs = read_jobs(session, [one.id for one in machines])
                if jobs:
                    found += _paces(state, self._model, jobs, now_s, self._settings)
            return found

    def _observe(
        self, session: Session, region: str, machines: Sequence[LentMachine], now_s: float
    ) -> tuple[HazardState, HazardState]:
        """Returns the state of the hazard estimates of a region's machines now, and stores it.

        The first result is about departures without notice, the second about those with notice. A machine that was lent
        in the round before has been lent since then, until it departed.
        """
        row = session.get(SiteHazard, region, with_for_update=True)
        until = events.position(session)
        nodes, buildings = [one.id for one in machines], [one.cluster for one in machines]
        start = self._model.start(nodes, buildings, now_s)
        if row is None:
            row = SiteHazard(region=region, counts=start.to_json(), lent=[], seen=str(until), machines={})
            session.add(row)
        states = [
            start if counts is None else self._model.from_json(counts).with_nodes(nodes, buildings)
            for counts in (row.counts, row.noticed)
        ]
        if not -_CLOCK_S <= now_s - states[0].now_s <= self._model.settings.window_days * DAY_S:
            # The clock was set back, or nothing was observed for so long that nothing is left in the window.
            states, row.lent = [start, start], []
        if now_s > states[0].now_s:
            known = set(nodes)
            gone = read_departures(session, region, events.Cursor.parse(row.seen), until)
            gone = [one for one in gone if one.machine in known]
            lent = [machine for machine in row.lent if machine in known]
            row.seen = str(until)
            states = [
                self._counted(state, [one for one in gone if one.is_emergency == is_emergency], gone, lent, now_s)
                for state, is_emergency in zip(states, (True, False), strict=True)
            ]
        row.counts, row.noticed = (state.to_json() for state in states)
        row.lent = [one.id for one in machines if one.lent]
        return states[0], states[1]

    def _counted(
        self,
        state: HazardState,
        counted: Sequence[OwnerCame],
        gone: Sequence[OwnerCame],
        lent: Sequence[str],
        now_s: float,
    ) -> HazardState:
        """Returns the state after the departures `counted`. After any departure, a machine is not lent."""
        if now_s <= state.now_s:
            return state
        # An event may have become visible only now, and have happened before the last observation.
        first_s = math.nextafter(state.now_s, math.inf)
        left_s = {one.machine: min(now_s, max(first_s, one.at_s)) for one in reversed(gone)}
        number = {node: at for at, node in enumerate(state.nodes)}
        return self._model.observe(
            state,
            now_s,
            [number[one.machine] for one in counted],
            [min(now_s, max(first_s, one.at_s)) for one in counted],
            [number[machine] for machine in lent],
            [state.now_s] * len(lent),
            [left_s.get(machine, now_s) for machine in lent],
        )


def _paces(
    state: HazardState, model: HazardModel, jobs: Sequence[RunningJob], now_s: float, settings: ReclaimSettings
) -> list[Pace]:
    """Returns the intervals for the tasks of each machine. The hazard of a gang is the sum over its lent machines."""
    upper = dict(zip(state.nodes, model.hazards(state, now_s).upper_per_h.tolist(), strict=True))
    hazard_per_h = np.array([sum(upper[machine] for machine in job.lent) for job in jobs])
    stores = {store: number for number, store in enumerate(dict.fromkeys(job.store for job in jobs))}
    p1 = P1Settings()
    decided = tick(
        SiteJobs(
            number=np.array([_number(job.workload) for job in jobs], np.uint64),
            hazard_per_h=hazard_per_h,
            checkpoint_bytes=np.array([job.save_bytes for job in jobs], np.float64),
            loss_budget_s=settings.loss_budget_s,
            stall_s=np.array([job.stall_s for job in jobs]),
            store=np.array([stores[job.store] for job in jobs]),
            cap_bytes_s=np.array([_effective_bytes_s(job, now_s) for job in jobs]),
        ),
        np.full(len(stores), settings.checkpoint_bytes_s / p1.write_share),
        p1,
    )
    by_machine: dict[str, list[RunPace]] = defaultdict(list)
    for at, job in enumerate(jobs):
        interval_s = float(decided.interval_s[at])
        if not np.isfinite(interval_s):
            continue
        pace = RunPace(
            job.run,
            interval_s,
            float(hazard_per_h[at]),
            p1.stagger_s,
            float(decided.offset_s[at]),
            IntervalReason(int(decided.reason[at])).name.lower(),
            float(decided.least_s[at]),
        )
        for machine in job.machines:
            by_machine[machine].append(pace)
    expires_at_s = now_s + _PERIODS * settings.control_period_s
    return [Pace(machine, expires_at_s, runs) for machine, runs in sorted(by_machine.items())]


def _effective_bytes_s(job: RunningJob, now_s: float) -> float:
    """Returns B_eff, the smaller of the write speed and of the mean of the measured bandwidth, as payload.

    Periodic saves have no deadline, so the lower bound, on which a notice counts, would only make them rarer. A
    bandwidth far below what a save itself achieved is ignored: a machine may report anything, and its gang would save
    too rarely.
    """
    write_bytes_s = job.save_bytes / job.write_s
    measured = job.bandwidth
    if measured is None or now_s - measured.at_s > _MEASURED_S:
        return write_bytes_s
    payload_bytes_s = measured.bytes_s / (1 + OVERHEAD_SHARE)
    return min(write_bytes_s, max(payload_bytes_s, _LEAST_SHARE * write_bytes_s))


def _number(workload: str) -> int:
    """Returns a number of a workload that never changes; it determines the offset of its saves."""
    return int.from_bytes(hashlib.blake2b(workload.encode(), digest_size=8).digest())
