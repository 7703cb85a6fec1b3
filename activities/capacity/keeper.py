"""The loop that reconciles pools, the ledger and the machines at the providers.

A round lists the machines of each provider, compares them with the ledger, and brings pools to their size. A difference
is acted on only if the next round finds it again. A round writes only rows, with messages to the instances' workflows.
So it may be killed at any moment, and Temporal may lose its state.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta

from sqlalchemy import Engine, delete, func, or_, select
from sqlalchemy.orm import Session
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.capacity.observations import observe
from activities.capacity.pools import Pools
from activities.leader import Leader, lead
from activities.lifecycle.machines import lose
from activities.lifecycle.unattended import Suspects, Unattended
from capacity.ledger_audit import LedgerDifferences, LedgerEntry, compare
from capacity.offers import Offer
from capacity.provider import FoundMachine, Provider, ProviderUnavailable
from capacity.providers.registry import STATIC
from domain import ids
from domain.reasons import Reason, ReasonCode
from infra.config.settings import Settings
from infra.db import events, outbox, own_machines
from infra.db.capacity import InstanceRow, PoolRow
from infra.db.models import Allocation, Cluster, Machine
from infra.db.services import ServiceRow
from infra.db.session import in_db, in_thread, transaction

_log = logging.getLogger(__name__)


class PoolKeeper:
    """Runs the rounds. In an installation, one process runs them; the others are on standby."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        client: Client,
        providers: Mapping[str, Provider],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._client = client
        self._settings = settings.capacity
        self._providers = providers
        self._clock = clock
        patience_s = self._settings.interval_s / 2  # A difference is due when the next round finds it again.
        self._without_owner = {name: Suspects(patience_s) for name in providers}
        self._missing = {name: Suspects(patience_s) for name in providers}
        own_s = settings.reconcile.disagree_s
        instances = select(InstanceRow.id).where(InstanceRow.gone_at.is_(None))
        self._instances = Unattended(engine, client, "InstanceWorkflow", ids.instance_workflow_id, instances, own_s)
        services = select(ServiceRow.id).where(ServiceRow.ended_at.is_(None))
        self._services = Unattended(engine, client, "ServiceWorkflow", ids.service_workflow_id, services, own_s)
        self._pools = Pools(engine, settings)

    async def run(self) -> None:
        """Runs rounds until cancelled, while this process is the leader."""
        await lead(self._engine, Leader.POOLS, "keeping pools", self.round, self._settings.interval_s)

    async def round(self) -> list[str]:
        """Runs one round. A provider that does not answer is left out; returns the errors of such providers.

        For an installation that launches no machines, a round is one query.
        """
        if self._providers.keys() <= {STATIC} and not await in_thread(self._has_work):
            return []
        offers: list[Offer] = []
        silent: list[tuple[Offer, str]] = []
        impaired: dict[str, str] = {}
        failures: list[str] = []
        for name, provider in self._providers.items():
            try:
                began_s = self._clock()
                found = await in_thread(provider.describe)
                differences = await in_thread(self._compare, provider, found, began_s)
                await in_thread(self._resolve, name, provider, differences)
                await in_thread(observe, self._engine, self._settings, provider, found)
                offers += await in_thread(provider.offers)
                impaired[name] = provider.impaired
            except ProviderUnavailable as error:
                _log.warning("provider %s: %s; trying again", name, error)
                failures.append(f"provider {name}: {error}")
                silent += [(offer, str(error)) for offer in await in_thread(_offers, provider)]
            except Exception as error:  # A fault in one provider must not affect the machines of other providers.
                _log.exception("provider %s; trying again", name)
                failures.append(f"provider {name}: {error}")
        await in_thread(self._end_away)
        await in_thread(self._pools.round, offers, silent, impaired)
        await self._start_missing_workflows()
        for machine in await in_thread(self._machines_of_gone):
            await self._forget(machine)
        await in_thread(self._forget_clusters)
        await in_db(self._engine, own_machines.forget_expired_keys)
        return failures

    def _has_work(self) -> bool:
        """Returns whether there are pools, services, live instances, machines of gone ones, or machines of tenants."""
        instances = select(InstanceRow.id).outerjoin(Machine, Machine.id == InstanceRow.machine)
        left = instances.where(or_(InstanceRow.gone_at.is_(None), Machine.id.is_not(None)))
        with transaction(self._engine) as session:
            services = select(ServiceRow.id).where(ServiceRow.ended_at.is_(None))
            own = select(Cluster.name).where(Cluster.tenant.is_not(None))
            there = (select(PoolRow.name), services, left, own)
            return bool(session.scalar(select(or_(*(one.exists() for one in there)))))

    # ------------------------------------------------------------------------------------------ ledger and providers

    def _compare(self, provider: Provider, found: Sequence[FoundMachine], now_s: float) -> LedgerDifferences:
        """Compares a provider's list with its instances. Two providers may list the same account or cluster."""
        with transaction(self._engine) as session:
            at_s = func.extract("epoch", InstanceRow.launched_at)
            live = select(InstanceRow.id, InstanceRow.provider, InstanceRow.native_id, at_s)
            rows = session.execute(live.where(InstanceRow.gone_at.is_(None))).all()
        entries = {
            id_: LedgerEntry(native, None if at is None else float(at))
            for id_, owner, native, at in rows
            if owner == provider.name
        }
        others = {id_ for id_, *_ in rows} - entries.keys()
        own = [machine for machine in found if machine.instance not in others]
        return compare(entries, own, now_s, provider.lists_late_s)

    def _resolve(self, name: str, provider: Provider, differences: LedgerDifferences) -> None:
        """Terminates machines without an owner, and marks missing instances as lost, if the previous round agreed."""
        owned: dict[str, Hashable] = {**differences.strays, **differences.seconds}
        for native_id in self._without_owner[name].due(owned):
            instance = str(owned[native_id])
            kind = "stray" if native_id in differences.strays else "second"
            _log.warning(
                "%s: terminating %s (%s), launched for %s: no live instance owns it", name, native_id, kind, instance
            )
            try:
                provider.terminate(native_id)
            except ProviderUnavailable as error:
                _log.warning("machine %s cannot be terminated now: %s", native_id, error)
                continue
            with transaction(self._engine) as session:
                detail = {"provider": name, "native_id": native_id, "instance": instance, "why": kind}
                events.record(session, "instance.without_owner", detail=detail)
            self._without_owner[name].clear(native_id)
        for instance in self._missing[name].due(dict.fromkeys(differences.missing)):
            reason = Reason(ReasonCode.NOT_AT_PROVIDER, {"provider": name, "instance": instance})
            with transaction(self._engine) as session:
                _lost(session, instance, reason)
            self._missing[name].clear(instance)
        for instance, words in differences.ended.items():
            with transaction(self._engine) as session:
                _lost(
                    session, instance, Reason(ReasonCode.ENDED_AT_PROVIDER, {"provider": name, "words": words}), words
                )

    def _end_away(self) -> None:
        """Marks instances as lost whose agents have been away for too long, so that they are replaced."""
        with transaction(self._engine) as session:
            away = select(InstanceRow.id, Machine.lost_at).join(Machine, Machine.id == InstanceRow.machine)
            rows = session.execute(
                away.where(
                    InstanceRow.gone_at.is_(None),
                    InstanceRow.lost_at.is_(None),
                    Machine.state == "lost",
                    Machine.lost_at < func.now() - timedelta(seconds=self._settings.lost_after_s),
                ).order_by(InstanceRow.id)
            ).all()
            for instance, since in rows:
                at = None if since is None else since.isoformat(timespec="seconds")
                _lost(session, instance, Reason(ReasonCode.AGENT_AWAY, {"since": at, "instance": instance}))

    # ------------------------------------------------------------------------------------------------------- Temporal

    async def _start_missing_workflows(self) -> None:
        for instance in await self._instances.find():
            _log.warning("instance %s has no workflow; starting a new one", instance)
            await in_db(self._engine, outbox.instance, instance)
        for service in await self._services.find():
            _log.warning("service %s has no workflow; starting a new one", service)
            await in_db(self._engine, outbox.service, service)

    # ------------------------------------------------------------------------------------------------------- machines

    def _machines_of_gone(self) -> list[str]:
        """Returns machines of which no attempt holds anything, and whose instance is gone or whose pilot is lost."""
        held = select(Allocation.workload).where(Allocation.machine == Machine.id, Allocation.released_at.is_(None))
        gone = select(Machine.id).join(InstanceRow, InstanceRow.machine == Machine.id)
        with transaction(self._engine) as session:
            return [
                *session.scalars(gone.where(InstanceRow.gone_at.is_not(None), ~held.exists())),
                *session.scalars(own_machines.gone_machines(self._settings.lost_after_s)),
            ]

    async def _forget(self, machine: str) -> None:
        """Ends the workflow of a machine and deletes its row. The history of its allocations stays."""
        try:
            workflow = self._client.get_workflow_handle(ids.machine_workflow_id(machine))
            await workflow.terminate(reason="its instance is gone")
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
        await in_thread(self._delete, machine)

    def _delete(self, machine: str) -> None:
        with transaction(self._engine) as session:
            row = session.get(Machine, machine, with_for_update=True)
            held = select(Allocation.workload).where(Allocation.machine == machine, Allocation.released_at.is_(None))
            if row is None or session.scalar(held.limit(1)) is not None:
                return
            session.execute(delete(Machine).where(Machine.id == machine))
            events.record(session, "machine.removed", region=row.region, machine=machine, detail={"by": "mizzen"})
            outbox.wake_scheduler(session)

    def _forget_clusters(self) -> None:
        """Deletes the clusters of services that have ended, once they have no machines."""
        here = (Machine.region == Cluster.region) & (Machine.cluster == Cluster.name)
        ended = select(ServiceRow.id).where(ServiceRow.ended_at.is_not(None))
        with transaction(self._engine) as session:
            session.execute(delete(Cluster).where(Cluster.service.in_(ended), ~select(Machine.id).where(here).exists()))


def _offers(provider: Provider) -> Sequence[Offer]:
    """Returns the offers of a provider that does not answer, as far as they are known without it."""
    with contextlib.suppress(ProviderUnavailable):
        return provider.offers()
    return ()


def _lost(session: Session, instance: str, reason: Reason, ended: str | None = None) -> None:
    """Marks an instance as lost.

    `ended`: why its machine has ended, in the words of the provider. The machine is then lost at once, too, without
    waiting for its agent's silence. None: the machine may still run.
    """
    row = session.get(InstanceRow, instance, with_for_update=True)
    if row is None or row.lost_at is not None or row.gone_at is not None:
        return
    row.lost_at, row.ending = func.now(), row.ending or reason.to_json()
    if ended is not None and row.machine is not None:
        machine = session.get(Machine, row.machine, with_for_update=True)
        if machine is not None and machine.state != "lost":
            lose(session, machine, ended)
    outbox.instance(session, instance)
