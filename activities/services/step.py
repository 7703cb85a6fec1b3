"""The activity of a service's workflow: one decision about the replicas, in one transaction with its effects."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Engine, delete, func, select, text
from sqlalchemy.orm import Session
from temporalio import activity

from activities.capacity.ledger import recently_refused
from activities.services.canary_rows import canary_answers, canary_change, canary_rules
from activities.services.offers import Offers
from activities.services.replica_ends import (
    close_replica,
    cordon_ending,
    end_left_instances,
    end_replica,
    end_workload,
    release,
)
from activities.services.replica_launch import LaunchMarket, launch, set_base
from activities.services.replica_rows import (
    LiveReplica,
    ejected_replicas,
    held_zones,
    read_replicas,
    take_ongoing,
    take_requests,
)
from activities.services.service_plan import NO_ZONES, is_scaled, on_demand_price, placer_of, plan_of
from capacity.offers import Offer
from capacity.provider import Provider
from domain.phases import QUEUED_PHASES
from domain.protocol.activities import Activity
from domain.protocol.services import ServiceRef, ServiceStep
from domain.service import ServiceSpec
from infra.config.settings import Settings
from infra.db import events
from infra.db.capacity import InstanceRow
from infra.db.endpoints import READY, read_endpoints
from infra.db.services import ServiceRow, ServiceVersion
from infra.db.session import transaction
from infra.db.tenants import Secret
from services.account import Account
from services.controller import decide
from services.values import (
    SERVICE_STATE,
    CanaryRules,
    DrainReplica,
    EndCause,
    LaunchReplica,
    Loss,
    ReleaseReplica,
    ServiceDecision,
    ServicePlan,
    ServiceState,
    SetReplicaBase,
    Stage,
)
from services.zones import ZONE_OFFERS, ZoneOffer, spot_zones

_ENDED = ServiceStep(ended=True)
_COLD_STARTS = text(
    "update attempt set cold_start_s = extract(epoch from now() - awarded_at)"
    " where workload = any(:workloads) and released_at is null and cold_start_s is null"
)
_LEAST_S = 0.05
"""The shortest time between two decisions without a signal."""


class ServiceActivities:
    """The activity on services."""

    def __init__(self, engine: Engine, settings: Settings, providers: Mapping[str, Provider]) -> None:
        self._engine = engine
        self._settings = settings
        self._offers = Offers(providers)

    @activity.defn(name=Activity.STEP_SERVICE.value)
    def step(self, ref: ServiceRef) -> ServiceStep:
        """Decides about a service's replicas and carries out the decision. It may be repeated at any time.

        The row of the service is locked first, so decisions about one service follow each other.
        """
        offers = self._offers.read()
        with transaction(self._engine) as session:
            row = session.get(ServiceRow, ref.service, with_for_update=True)
            if row is None or row.ended_at is not None:
                return _ENDED
            now_s = float(session.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())
            return _Step(session, row, self._settings, offers, now_s).run()


class _Step:
    """One decision, in the transaction of `session`, which holds the lock of the service's row."""

    def __init__(
        self, session: Session, row: ServiceRow, settings: Settings, offers: Sequence[Offer] | None, now_s: float
    ) -> None:
        self._session, self._row, self._settings = session, row, settings
        self._offers, self._now_s = offers, now_s
        self._specs: dict[int, ServiceSpec] = {}
        before = None if row.state is None else SERVICE_STATE.validate_python(row.state)
        self._newest = self._version(row.version)
        has_canary = self._newest.canary is not None
        launched = None if before is None else before.version_to_launch(row.version, has_canary=has_canary)
        self._spec = self._newest if launched is None else self._version(launched)
        """The specification of the version that is launched: the last good one, if an update was given up or is judged
        by its canary."""
        self._zones = self._read_zones()
        self._canary = None if before is None else before.canary
        self._notes: list[str] = []

    def run(self) -> ServiceStep:
        """Decides, carries the decision out and stores what the next one needs."""
        listed = (self._row.state or {}).get("listed", [])
        live, losses = self._replicas()
        self._eject(live)
        waiting, ongoing = take_ongoing(self._session, self._row.id, live)
        plan = self._plan()
        facts = [one.facts(self._now_s, self._spec.policy) for one in live.values() if one.row.ending_at is None]
        silent_s = self._settings.services.silent_s
        requests = take_requests(self._session, self._row, silent_s, self._now_s) if is_scaled(self._spec) else None
        state = self._state(plan)
        answers = canary_answers(self._session, self._row.id, self._canary)
        decision = decide(plan, state, facts, losses, requests, self._now_s, waiting, ongoing, answers=answers)
        first_ready: list[str] = []
        for fact in facts:
            own = live[fact.number].row
            if fact.stage is Stage.READY and own.first_ready_at is None:
                own.first_ready_at = func.now()
                self._record("service.replica_ready", own.workload, replica=own.number)
                first_ready.append(own.workload)
            if fact.stage is Stage.LEAVING and own.leaving_at is None:
                own.leaving_at = func.now()
        self._carry_out(decision, live)
        end_left_instances(self._session, self._row)
        if plan.stopping and not live and not self._instances():
            self._row.ended_at = func.now()
            self._session.execute(delete(Secret).where(Secret.service == self._row.id))
            if listed:
                self._record("service.endpoints", ready=0)
            self._record("service.ended")
            return _ENDED
        self._store(decision, listed)
        cordon_ending(self._session, self._row.id)
        # Attempts are locked last: see the order of locks in `activities.lifecycle.handover`.
        self._session.execute(_COLD_STARTS, {"workloads": first_ready})
        return ServiceStep(ended=False, next_s=self._next_s(decision))

    # ---------------------------------------------------------------------------------------------------------- reading

    def _version(self, version: int) -> ServiceSpec:
        if version not in self._specs:
            row = self._session.get_one(ServiceVersion, (self._row.id, version))
            self._specs[version] = ServiceSpec.model_validate(row.spec)
        return self._specs[version]

    def _read_zones(self) -> list[ZoneOffer]:
        """Returns the zones of the policy. They change only if all providers have answered."""
        if not self._spec.uses_spot:
            return []
        known = ZONE_OFFERS.validate_python(self._row.zones)
        if self._offers is not None:
            names = held_zones(self._session, self._row.id)
            known = spot_zones(self._spec, self._offers, [one for one in known if one.zone.name in names])
            self._row.zones = ZONE_OFFERS.dump_python(known, mode="json")
        return known

    def _replicas(self) -> tuple[dict[int, LiveReplica], list[Loss]]:
        """Returns the replicas that have not ended, and the losses. Closes the replicas that have ended."""
        live: dict[int, LiveReplica] = {}
        losses: list[Loss] = []
        for one in read_replicas(self._session, self._row.id, self._settings.services.placement_s):
            if not one.has_ended and not one.cannot_start:
                one.limit_times(self._now_s)
                live[one.row.number] = one
                if self._waits_in_vain(one):
                    end_replica(self._session, self._row, one, EndCause.SCALED_DOWN.value)
                continue
            kind = one.loss
            if one.row.ending_at is None:
                losses.append(Loss(one.facts(self._now_s, self._spec.policy), kind))
            if not one.has_ended:
                end_workload(self._session, one.row.workload, f"service {self._row.name} ({kind.value})")
            close_replica(self._session, self._row, one, kind.value)
        return live, losses

    def _eject(self, live: Mapping[int, LiveReplica]) -> None:
        """Records which replicas balancers eject, and which they admit again."""
        ejected = ejected_replicas(self._session, self._row.id)
        for number, one in live.items():
            since, why = ejected.get(number, (None, None))
            if since is not None and one.row.ejected_at is None:
                one.row.ejected_at = since
                self._record("service.replica_ejected", one.row.workload, replica=number, why=why)
            elif since is None and one.row.ejected_at is not None:
                one.row.ejected_at = None
                self._record("service.replica_admitted", one.row.workload, replica=number)
            one.row.ejected_why = why

    def _waits_in_vain(self, one: LiveReplica) -> bool:
        """Returns whether a replica waits for shared machines although it could have machines of its own now.

        It was launched while no provider offered any.
        """
        spec = self._version(one.row.version)
        waits = one.row.cluster is None and one.phase in QUEUED_PHASES
        return waits and spec.uses_spot and on_demand_price(spec, self._offers or []) is not None

    def _plan(self) -> ServicePlan:
        replica_usd = self._on_demand_usd_per_h(self._account_before().on_demand_usd_per_h)
        machine_usd = None if replica_usd is None else replica_usd / self._spec.machines
        return plan_of(self._row, self._spec, self._zones, machine_usd, self._settings.services, self._rules())

    def _rules(self) -> CanaryRules | None:
        """Returns how the newest version is judged by its canary; None: it has none."""
        canary = self._newest.canary
        return None if canary is None else canary_rules(canary, self._canary_zones())

    def _canary_zones(self) -> list[ZoneOffer]:
        """Returns the zones offered now in which the newest version may have spot replicas."""
        if self._newest is self._spec:
            return self._zones
        return spot_zones(self._newest, self._offers or []) if self._newest.uses_spot else []

    def _state(self, plan: ServicePlan) -> ServiceState:
        """Returns the state of the decision before. A policy of another name begins without memory."""
        before = self._row.state
        if before is None:
            return ServiceState(plan.policy.start(), plan.autoscaler.start())
        state = SERVICE_STATE.validate_python(before)
        return state if before["placer"] == placer_of(self._spec) else replace(state, policy=plan.policy.start())

    def _instances(self) -> int:
        """Returns the number of the service's instances that are not gone."""
        own = select(func.count()).where(InstanceRow.pool == self._row.id, InstanceRow.gone_at.is_(None))
        return self._session.scalar(own.where(InstanceRow.workload.is_not(None))) or 0

    # ---------------------------------------------------------------------------------------------------------- effects

    def _carry_out(self, decision: ServiceDecision, live: dict[int, LiveReplica]) -> None:
        market: LaunchMarket | None = None
        ends = [action for action in decision.actions if not isinstance(action, LaunchReplica)]
        # Workloads are always locked in the order of their ids.
        ends.sort(key=lambda action: live[action.number].row.workload)
        for action in [*ends, *(one for one in decision.actions if isinstance(one, LaunchReplica))]:
            if isinstance(action, LaunchReplica):
                market = market or self._market()
                spec = self._version(action.version)
                where = replace(market, zones=_by_name(self._canary_zones())) if spec is self._newest else market
                note = launch(self._session, self._row, spec, action, where)
                self._notes += [] if note is None else [note]
            elif isinstance(action, ReleaseReplica):
                release(self._session, live[action.number].row)
            elif isinstance(action, SetReplicaBase):
                spec = self._version(live[action.number].row.version)
                set_base(self._session, spec, live[action.number].row, is_base=action.is_base)
            elif isinstance(action, DrainReplica):
                own = live[action.number].row
                own.draining_at, own.cause = func.now(), action.cause.value
                self._record("service.replica_draining", own.workload, replica=own.number, cause=own.cause)
            else:
                end_replica(self._session, self._row, live[action.number], action.cause.value)
        self._session.flush()

    def _market(self) -> LaunchMarket:
        refused = recently_refused(self._session, self._settings.capacity.refused_pause_s)
        most = self._settings.services.tenant_machines
        return LaunchMarket(_by_name(self._zones), self._offers, refused, most)

    def _store(self, decision: ServiceDecision, listed: list[str]) -> None:
        row = self._row
        account = self._account_before()
        row.state = SERVICE_STATE.dump_python(decision.state, mode="json")
        self._session.flush()  # The endpoints depend on the canary.
        endpoints = read_endpoints(self._session, row.id)
        listing = [f"{e.replica} {e.state} {e.address}:{e.port}{' canary' if e.is_canary else ''}" for e in endpoints]
        ready = sum(e.state == READY and not e.ejected for e in endpoints)
        row.state = {
            **row.state,
            "placer": placer_of(self._spec),
            "listed": listing,
            "account": asdict(self._account(account, ready, decision.target)),
        }
        change = canary_change(self._canary, decision.state.canary)
        if change is not None:
            self._record(change[0], **change[1])
        if listing != listed:
            self._record("service.endpoints", ready=ready)
        if row.target != decision.target:
            self._record("service.target", before=row.target, target=decision.target)
            row.target = decision.target
        without = [NO_ZONES] if self._spec.uses_spot and not self._zones else []
        row.notes = list(dict.fromkeys([*decision.notes, *self._notes, *without]))

    def _account_before(self) -> Account:
        before = (self._row.state or {}).get("account")
        return Account(self._row.created_at.timestamp()) if before is None else Account(**before)

    def _on_demand_usd_per_h(self, before: float | None) -> float | None:
        """Returns the price of an on-demand replica; while the offers are unknown, the price before."""
        if self._offers is None:
            return before
        one = on_demand_price(self._spec, self._offers)
        return None if one is None else one * self._spec.machines

    def _account(self, account: Account, ready: int, target: int) -> Account:
        price = self._on_demand_usd_per_h(account.on_demand_usd_per_h)
        return account.advanced(self._now_s, ready, target, price)

    def _record(self, kind: str, workload: str | None = None, **detail: Any) -> None:
        own = {"service": self._row.id, "name": self._row.name}
        events.record(self._session, kind, tenant=self._row.tenant, workload=workload, detail={**own, **detail})

    def _next_s(self, decision: ServiceDecision) -> float:
        settings = self._settings.services
        is_open = decision.state.canary is not None and decision.state.canary.verdict is None
        next_s = settings.scaling_interval_s if is_open or is_scaled(self._spec) else settings.interval_s
        if self._row.stopping_at is not None:
            next_s = settings.readiness_interval_s  # The end of the machines sends no signal.
        if decision.wake_at_s is not None:
            next_s = min(next_s, decision.wake_at_s - self._now_s)
        return max(_LEAST_S, next_s)


def _by_name(zones: Sequence[ZoneOffer]) -> dict[str, ZoneOffer]:
    return {one.zone.name: one for one in zones}
