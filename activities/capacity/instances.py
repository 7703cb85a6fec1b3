"""The activities of an instance's workflow: requests to its provider, and updates of the ledger."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.capacity.join_admission import join_token
from activities.capacity.ledger import record_refusal, refusal_reason
from activities.heartbeat import heartbeating
from activities.lifecycle import handover
from activities.lifecycle.machines import lose
from capacity.offers import Offer, Shape
from capacity.provider import LaunchRefused, LaunchRequest, Provider, ProviderUnavailable
from domain.capacity import CapacityKind
from domain.ids import machine_id
from domain.lifecycle.instances import NEXT_INSTANCE_PHASES, InstanceEvent, InstancePhase
from domain.protocol.activities import Activity
from domain.protocol.instances import InstanceFacts, InstanceMove, InstanceRef
from domain.reasons import Reason, ReasonCode
from infra.config.settings import Settings
from infra.db import events, outbox
from infra.db.capacity import InstanceRow, LaunchRefusal
from infra.db.drains import drain
from infra.db.models import Allocation, Machine, Region
from infra.db.session import transaction
from infra.machine_keys import drop_instance_key, put_machine_key

_BY = "mizzen"
_AT_ONCE = 8
"""The maximum number of concurrent provider calls. A provider that hangs must leave threads for other activities."""
_BUSY = timedelta(seconds=1)


class InstanceActivities:
    """The activities on instances."""

    def __init__(self, engine: Engine, settings: Settings, providers: Mapping[str, Provider]) -> None:
        self._engine = engine
        self._settings = settings
        self._providers = providers
        self._asking = threading.BoundedSemaphore(_AT_ONCE)

    @activity.defn(name=Activity.LAUNCH_INSTANCE.value)
    def launch(self, ref: InstanceRef) -> bool:
        """Launches the machine at the provider; returns False if the provider refused.

        Retries use the same client token. If the instance is to end, no request is sent.
        """
        with transaction(self._engine) as session:
            row = session.get(InstanceRow, ref.instance)
            if row is None or row.native_id is not None or row.ending is not None or row.gone_at is not None:
                return True
            request = self._request(session, row)
        provider = self._provider(request.offer.provider)
        try:
            with self._ask():
                native_id = provider.launch(request)
        except LaunchRefused as refused:
            with transaction(self._engine) as session:
                record_refusal(session, ref.instance, request.offer, refused)
            return False
        except ProviderUnavailable as error:
            raise self._unconfirmed(ref, ReasonCode.LAUNCH_UNCONFIRMED, error) from None
        with transaction(self._engine) as session:
            row = session.get_one(InstanceRow, ref.instance, with_for_update=True)
            if row.native_id is None:
                row.native_id, row.launched_at = native_id, func.now()
                if not provider.queues:
                    row.started_at = row.started_at or func.now()
        return True

    @activity.defn(name=Activity.INSPECT_INSTANCE.value)
    def inspect(self, ref: InstanceRef) -> InstanceFacts:
        """Returns the state of the instance in the ledger."""
        with transaction(self._engine) as session:
            row = session.get_one(InstanceRow, ref.instance)
            machine = None if row.machine is None else session.get(Machine, row.machine)
            return InstanceFacts(
                waits=row.native_id is not None and row.started_at is None,
                told=row.ending is not None,
                lost=row.lost_at is not None,
                ready=machine is not None and machine.state == "ready",
                held=row.machine is not None and _is_held(session, row.machine),
            )

    @activity.defn(name=Activity.MOVE_INSTANCE.value)
    def move(self, asked: InstanceMove) -> None:
        """Writes the next phase, its reason and its event. If the instance is gone, its machine is marked as lost."""
        phase = InstancePhase(asked.phase)
        with transaction(self._engine) as session:
            row = session.get_one(InstanceRow, asked.instance, with_for_update=True)
            if row.phase == phase.value:
                return
            if phase not in NEXT_INSTANCE_PHASES[InstancePhase(row.phase)]:
                message = f"instance {row.id}: {phase.value} cannot follow {row.phase}"
                raise ApplicationError(message, type="IllegalTransition", non_retryable=True)
            reason = self._reason(session, row, phase, asked.because)
            row.phase, row.reason = phase.value, reason
            if phase is InstancePhase.READY:
                row.ready_at = row.ready_at or func.now()
            if phase in (InstancePhase.DRAINING, InstancePhase.GONE):
                row.ending = row.ending or reason
            if phase is InstancePhase.GONE:
                row.gone_at = func.now()
                launched = machine_id(row.region, row.cluster, row.id)
                drop_instance_key(session, launched, row.id)
                machine = row.machine and session.get(Machine, row.machine, with_for_update=True)
                if machine and machine.state != "lost":
                    lose(session, machine)
            detail = {"instance": row.id, "pool": row.pool}
            events.record(
                session, f"instance.{phase.value}", region=row.region, machine=row.machine, reason=reason, detail=detail
            )

    @activity.defn(name=Activity.DRAIN_INSTANCE.value)
    def drain(self, ref: InstanceRef) -> None:
        """Drains the machine: it gets no new work, and its workloads leave."""
        with transaction(self._engine) as session:
            row = session.get_one(InstanceRow, ref.instance)
            machine = row.machine and session.get(Machine, row.machine, with_for_update=True)
            if machine and not machine.draining and row.ending is not None:
                reason = Reason.from_json(row.ending)
                drain(session, machine, reason, _BY)
                events.record(session, "machine.draining", region=row.region, machine=machine.id, reason=reason)
                outbox.wake_scheduler(session)

    @activity.defn(name=Activity.TERMINATE_INSTANCE.value)
    def terminate(self, ref: InstanceRef) -> bool:
        """Terminates all machines of the instance at the provider; returns True if the provider lists none of them."""
        with transaction(self._engine) as session:
            row = session.get_one(InstanceRow, ref.instance)
            name, native_id = row.provider, row.native_id
        provider = self._provider(name)
        try:
            with self._ask():
                known = _live(provider, ref.instance)
                for one in sorted(known | ({native_id} if native_id is not None else set())):
                    provider.terminate(one)
                return not known or not _live(provider, ref.instance)
        except ProviderUnavailable as error:
            raise self._unconfirmed(ref, ReasonCode.END_UNCONFIRMED, error) from None

    def _unconfirmed(self, ref: InstanceRef, code: ReasonCode, error: ProviderUnavailable) -> ApplicationError:
        """Writes the error of a request as the instance's reason; returns the error with which the activity fails."""
        with transaction(self._engine) as session:
            row = session.get_one(InstanceRow, ref.instance, with_for_update=True)
            if row.native_id is None or code is ReasonCode.END_UNCONFIRMED:
                row.reason = Reason(code, {"provider": row.provider, "words": str(error)}).to_json()
        return ApplicationError(str(error), type="ProviderUnavailable")

    @contextmanager
    def _ask(self) -> Iterator[None]:
        if not self._asking.acquire(blocking=False):
            benign = ApplicationErrorCategory.BENIGN
            raise ApplicationError("too many concurrent calls", type="Busy", next_retry_delay=_BUSY, category=benign)
        try:
            with heartbeating():
                yield
        finally:
            self._asking.release()

    def _provider(self, name: str) -> Provider:
        try:
            return self._providers[name]
        except KeyError:
            message = f"providers: {name}: not in the settings of this worker, but the ledger has instances of it"
            raise ApplicationError(message, type="UnknownProvider") from None

    def _request(self, session: Session, row: InstanceRow) -> LaunchRequest:
        shape = Shape(row.machine_type, row.gpus, row.gpu_type, row.cpus_milli, row.memory_bytes)
        offer = Offer(row.provider, row.region, row.zone, CapacityKind(row.kind), shape, row.usd_per_h, 0.0)
        machine = machine_id(row.region, row.cluster, row.id)
        bucket_url = session.get_one(Region, row.region).bucket_url
        master_key = self._settings.master_key_path
        key = put_machine_key(session, master_key, machine, row.id)
        return LaunchRequest(row.id, machine, offer, bucket_url, join_token(master_key, row.id), key)

    def _reason(self, session: Session, row: InstanceRow, phase: InstancePhase, because: str) -> dict[str, Any]:
        if row.ending is not None and phase in (InstancePhase.DRAINING, InstancePhase.GONE):
            return row.ending
        what = {"provider": row.provider, "zone": row.zone, "kind": row.kind, "machine_type": row.machine_type}
        if because == InstanceEvent.REFUSED and (refusal := session.get(LaunchRefusal, row.id)) is not None:
            return refusal_reason(refusal).to_json()
        if phase is InstancePhase.DRAINING:
            waited_s = round(
                (datetime.now(UTC) - (row.started_at or row.launched_at or row.requested_at)).total_seconds()
            )
            return Reason(ReasonCode.NEVER_JOINED, {"waited_s": waited_s}).to_json()
        codes = {
            InstancePhase.LAUNCHING: ReasonCode.LAUNCHING,
            InstancePhase.JOINING: ReasonCode.AWAITING_AGENT,
            InstancePhase.READY: ReasonCode.JOINED,
        }
        return Reason(codes.get(phase, ReasonCode.NOT_AT_PROVIDER), {**what, "pool": row.pool}).to_json()


def _live(provider: Provider, instance: str) -> set[str]:
    """Returns the provider's ids of an instance's machines that have not ended."""
    return {found.native_id for found in provider.describe() if found.instance == instance and found.ended is None}


def _is_held(session: Session, machine: str) -> bool:
    """Returns whether an attempt holds resources of the machine, or a released attempt may still be saving there."""
    live = select(Allocation.workload).where(Allocation.machine == machine, Allocation.released_at.is_(None)).limit(1)
    return session.scalar(live) is not None or bool(handover.unconfirmed(session, machine))
