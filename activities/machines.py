"""Machines: registration, readiness and loss."""

from sqlalchemy import Engine, func, select
from sqlalchemy.dialects.postgresql import insert
from temporalio import activity
from temporalio.exceptions import ApplicationError

from domain.protocol import Activity, Attend, Hello, MailKind, Welcome
from infra.config import Settings
from infra.db import events, outbox
from infra.db.models import MAX_SLOTS, Allocation, Attempt, Cluster, Machine, Region
from infra.db.session import transaction


class MachineActivities:
    """Effects on machines."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    @activity.defn(name=Activity.REGISTER_MACHINE.value)
    def register(self, hello: Hello) -> Welcome:
        """Takes the machine into the fleet, or back; what still runs there and should not is to be stopped first.

        A machine that comes back after a boot has lost its tasks: their gangs are told. One that comes back after it
        was lost belongs to none of its gangs any more, also not to those that still hold slots on it: they were told
        that it is gone, and will not stop their tasks there.
        """
        if not 0 <= hello.gpus <= MAX_SLOTS:
            message = f"machine {hello.machine}: gpus: {hello.gpus} is not between 0 and {MAX_SLOTS}"
            raise ApplicationError(message, type="BadMachine", non_retryable=True)
        with transaction(self._engine) as session:
            if session.get(Region, hello.region) is None:
                raise ApplicationError(f"machine {hello.machine}: no region {hello.region}", type="UnknownRegion")
            session.execute(insert(Cluster).values(region=hello.region, name=hello.cluster).on_conflict_do_nothing())
            row = session.get(Machine, hello.machine, with_for_update=True)
            rebooted = row is not None and row.incarnation != hello.incarnation
            given_up = row is not None and row.state != "ready"
            if row is None:
                row = Machine(
                    id=hello.machine, held=0, promised=0, failed_gangs=0, free_cpus_milli=hello.cpus_milli,
                    free_memory_bytes=hello.memory_bytes, cpus_milli=hello.cpus_milli,
                    memory_bytes=hello.memory_bytes, gpus=hello.gpus, draining=False,
                )  # fmt: skip
                session.add(row)
            else:
                row.free_cpus_milli += hello.cpus_milli - row.cpus_milli
                row.free_memory_bytes += hello.memory_bytes - row.memory_bytes
                row.cpus_milli, row.memory_bytes, row.gpus = hello.cpus_milli, hello.memory_bytes, hello.gpus
            row.region, row.cluster, row.rack, row.gpu_type = hello.region, hello.cluster, hello.rack, hello.gpu_type
            row.incarnation, row.public_key, row.address = hello.incarnation, hello.public_key, hello.address
            if rebooted or row.state != "ready":
                row.state = "joining"
            session.flush()
            live = session.execute(
                select(Allocation.workload, Allocation.attempt)
                .join(Attempt, (Attempt.workload == Allocation.workload) & (Attempt.attempt == Allocation.attempt))
                .where(Allocation.machine == hello.machine, Allocation.released_at.is_(None))
                .order_by(Allocation.workload)
            ).all()
            expected = set() if given_up else {f"{workload}.{attempt}" for workload, attempt in live}
            if rebooted:
                for workload, attempt in live:
                    outbox.mail(session, workload, MailKind.MACHINE_LOST, attempt, machine=hello.machine)
        lifecycle = self._settings.lifecycle
        return Welcome(
            stop=sorted(set(hello.runs) - expected),
            heartbeat_timeout_s=lifecycle.heartbeat_timeout_s,
            lost_after_s=lifecycle.node_lost_after_s,
        )

    @activity.defn(name=Activity.MACHINE_READY.value)
    def ready(self, attend: Attend) -> None:
        """Nothing runs there that should not: work may be placed on it."""
        with transaction(self._engine) as session:
            row = session.get_one(Machine, attend.machine, with_for_update=True)
            if row.incarnation != attend.incarnation or row.state == "ready":
                return
            row.state, row.lost_at, row.registered_at = "ready", None, func.now()
            events.record(session, "machine.ready", region=row.region, machine=row.id)
            outbox.wake_scheduler(session)

    @activity.defn(name=Activity.MACHINE_LOST.value)
    def lost(self, attend: Attend) -> None:
        """Its agent stopped answering: nothing is placed there, and the gangs that it ran are told."""
        with transaction(self._engine) as session:
            row = session.get_one(Machine, attend.machine, with_for_update=True)
            if row.incarnation != attend.incarnation or row.state == "lost":
                return
            row.state, row.lost_at = "lost", func.now()
            events.record(session, "machine.lost", region=row.region, machine=row.id)
            for workload, attempt in session.execute(
                select(Allocation.workload, Allocation.attempt).where(
                    Allocation.machine == row.id, Allocation.released_at.is_(None)
                )
            ).all():
                outbox.mail(session, workload, MailKind.MACHINE_LOST, attempt, machine=row.id)
