"""Writes an attempt's launch description, the document that all of its agents read."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, bindparam, select, update
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.data import checkpoint_stores
from activities.lifecycle import image_digests
from activities.lifecycle.archive_files import ArchiveWriter, UploadedArchive, was_damaged
from activities.lifecycle.cluster_hazard import ClusterHazards, LossRates
from activities.lifecycle.lent_work import limit_of
from activities.lifecycle.secret_values import sealed_secrets, secret_values
from activities.lifecycle.staged_tables import refuse_wrong, stale_tables
from activities.lifecycle.staging import bucket_named, clear_failure, failures_shown, is_shown
from activities.lifecycle.workloads import move
from domain import array_elements, ids
from domain.isolation import Isolation, strongest
from domain.launch import CheckpointLaunch, JobLaunch, LaunchDescription, TaskPlace
from domain.memory_peers import memory_peers
from domain.phases import Phase
from domain.protocol.activities import Activity
from domain.protocol.workloads import LaunchPlan, NodeLaunch, StageRequest, TransitionRequest
from domain.reasons import Reason, ReasonCode
from domain.slots import TaskSlots, tasks_of_jobs
from domain.spec import WorkloadSpec
from infra.config.settings import Settings
from infra.db.lent_machines import lent_of
from infra.db.models import Allocation, Attempt, Machine, Region, Workload
from infra.db.session import transaction
from infra.db.tasks import tasks_of
from infra.db.tenants import Tenant
from mizzen.objects.store import ObjectStore
from mizzen.objects.urls import open_store

# The statements are built once: building one takes as long as its execution.
_HOLDINGS = (
    select(Allocation, Machine)
    .join(Machine, Machine.id == Allocation.machine)
    .where(Allocation.workload == bindparam("workload"), Allocation.attempt == bindparam("attempt"))
    .order_by(Machine.cluster, Machine.rack, Machine.id)  # Machines close to each other get adjacent ranks.
)
_PLACED = (
    select(Workload, Attempt, Tenant.number, Tenant.isolation)
    .join(Attempt, Attempt.workload == Workload.id)
    .join(Tenant, Tenant.name == Workload.tenant)
    .where(Workload.id == bindparam("workload"), Attempt.attempt == bindparam("attempt"))
)


class LaunchActivities:
    """The activities that prepare the start of a gang."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._hazards = ClusterHazards()
        self._archives = ArchiveWriter(engine)

    @activity.defn(name=Activity.STAGE.value)
    def stage(self, request: StageRequest) -> LaunchPlan:
        """Writes the launch description and the uploaded archive to the region's bucket; returns the launch plan.

        A retry writes the same description, except for the clusters' hazard, the stale tables, and the sealing of
        secrets. Each description has its own key, which contains its digest. So a late write of a slow try does not
        change the description that a later try has returned.

        While staging fails, its error is shown as the workload's reason. With `winds_up`, nothing is written: the plan
        is read from Postgres, to stop the tasks.

        Raises:
            ApplicationError: `ReleasedAttempt` or `UnknownAttempt` (not retried), or an error that may be temporary.
        """
        if request.winds_up:
            return self._placed_before(request)
        with failures_shown(self._engine, request):
            plan = self._write(request)
            if not (request.may_run and plan.runs_once_staged):
                return plan
            return self.begin({request.workload_id: plan}, request.attempt)[request.workload_id]

    def write(self, request: StageRequest) -> LaunchPlan:
        """Does what `stage` does, but does not change the phase."""
        with failures_shown(self._engine, request):
            return self._write(request)

    def begin(self, plans: Mapping[str, LaunchPlan], attempt: int) -> dict[str, LaunchPlan]:
        """Lets workloads of which nothing but the staging delays the tasks enter `running`, in one transaction.

        `attempt` is that of all of them. Returns their plans with `is_running`.

        Raises:
            ApplicationError: a workload is not in a phase in which it can start; none has changed.
        """
        moves = []
        for workload, plan in plans.items():
            running = Reason(ReasonCode.RUNNING, {"region": plan.region}).to_json()
            moves.append(TransitionRequest(workload, attempt, Phase.RUNNING.value, running, plan.starting.to_json()))
        with transaction(self._engine) as session:
            move(session, moves)
        return {workload: replace(plan, is_running=True) for workload, plan in plans.items()}

    def _write(self, request: StageRequest) -> LaunchPlan:
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
            allocations, machines = self._holdings(session, request)
            own = {"workload": request.workload_id, "attempt": request.attempt}
            row, attempt, tenant_number, isolation = session.execute(_PLACED, own).one()
            spec = array_elements.filled(WorkloadSpec.model_validate(row.spec))
            if attempt.released_at is not None:
                message = f"attempt {request.attempt} of {request.workload_id} is released"
                raise ApplicationError(message, type="ReleasedAttempt", non_retryable=True)
            tasks = tasks_of(spec, attempt, allocations)
            region = session.get_one(Region, machines[allocations[0].machine].region)
            if spec.tables and attempt.started_at is None:  # A started attempt is staged again only to take it over.
                refuse_wrong(session, spec.tables, region.name)
            stale = stale_tables(session, spec.tables, region.name)
            saved_tasks = _saved_tasks(session, spec, request)
            secrets = secret_values(session, spec, self._settings.master_key_path)
            sealed = sealed_secrets(secrets, spec, tasks, machines)
            known_images = dict(row.images)
            archive = UploadedArchive.find(session, row.tenant, spec.workdir)
            rewrites = archive is not None and was_damaged(session, request)
            kept = row.checkpoint_region, row.checkpoint_store
            if attempt.store_url is None and attempt.started_at is None:
                attempt.store_url = checkpoint_stores.store_of(session, machines.values())
            store_url = attempt.store_url
            was_used = store_url is not None and checkpoint_stores.was_used(session, store_url, row.id, request.attempt)
            hazards = self._hazards.mean(session, [machines[a.machine] for a in allocations])
            lent = lent_of(session, machines)
            least_s, size_bytes = self._settings.lifecycle.lent_launch_s, 0 if archive is None else archive.size_bytes
            attempt.launch_limit_s = limit_of(session, row.id, lent, least_s, size_bytes)
            limit_s = attempt.launch_limit_s
            failed_before = is_shown(row)
        pinned = self._pinned(request, spec, known_images, secrets)
        with bucket_named(region.name):
            store = open_store(region.bucket_url)
        if store_url is not None:
            if was_used or (kept[0] is not None and kept[1] == store_url):
                checkpoint_stores.check(store_url, request.workload_id)
            else:
                checkpoint_stores.open_new(store_url, request.workload_id)
        checkpoints = store if store_url is None else open_store(store_url)
        launch = self._describe(
            request,
            spec,
            region.name,
            store=store,
            checkpoints=checkpoints,
            machines={a.machine: machines[a.machine].address for a in allocations},
            peers=memory_peers({a.machine: _fault_domain(machines[a.machine]) for a in allocations}),
            slots=tasks,
            sealed=sealed,
            hazards=hazards,
            stale=stale,
            saved_tasks=saved_tasks,
            tenant_number=tenant_number,
            isolation=strongest(spec.isolation, isolation),
            pinned=pinned,
        )
        self._show_stale(request, launch, attempt.stale_tables)
        document = launch.model_dump_json().encode()
        sha256 = hashlib.sha256(document).hexdigest()
        key = ids.launch_key(request.workload_id, request.attempt, sha256)
        with bucket_named(region.name):
            if spec.workdir is not None:
                self._archives.stage(store, spec.workdir, archive, again=rewrites)
            store.put(key, document)
        if failed_before:
            clear_failure(self._engine, request)
        plan = self._plan(spec, region, allocations, tasks, kept, store_url, lent)
        return replace(plan, launch_key=key, launch_sha256=sha256, launch_limit_s=limit_s)

    def _placed_before(self, request: StageRequest) -> LaunchPlan:
        """Returns the plan of a placed attempt from Postgres, even if the attempt is released."""
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
            row = session.get_one(Workload, request.workload_id)
            spec = WorkloadSpec.model_validate(row.spec)
            allocations, machines = self._holdings(session, request)
            attempt = session.get_one(Attempt, (request.workload_id, request.attempt))
            tasks = tasks_of(spec, attempt, allocations)
            region = session.get_one(Region, machines[allocations[0].machine].region)
            lent = lent_of(session, machines)
        kept = row.checkpoint_region, row.checkpoint_store
        return self._plan(spec, region, allocations, tasks, kept, attempt.store_url, lent)

    def _plan(
        self,
        spec: WorkloadSpec,
        region: Region,
        allocations: Sequence[Allocation],
        tasks: Sequence[TaskSlots],
        kept: tuple[str | None, str | None],
        store_url: str | None,
        lent: Collection[str],
    ) -> LaunchPlan:
        """Returns the plan without the launch description's key.

        Args:
            spec: the document.
            region: the region of the attempt.
            allocations: what the attempt holds.
            tasks: the tasks, by job and index.
            kept: region and store (None: the bucket) of the newest checkpoint.
            store_url: the store of the attempt; None: the bucket.
            lent: the machines among those of the attempt that owners lend.
        """
        leads: dict[str, list[str]] = defaultdict(list)
        places: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for task in tasks:
            places[task.machine][task.job].append(task.task)
            if task.task == 0:
                leads[task.machine].append(task.job)
        lifecycle = self._settings.lifecycle
        runs_elements = array_elements.is_runner(spec)
        return LaunchPlan(
            region=region.name,
            bucket_url=region.bucket_url,
            launch_key="",
            nodes=[
                NodeLaunch(a.machine, sorted(leads[a.machine]), dict(places[a.machine]), a.machine in lent)
                for a in allocations
            ],
            tasks=len(tasks),
            checkpoint_region=kept[0],
            grace_s=spec.checkpoint.grace_s,
            # The limits of a document with runners are those of the elements.
            max_runtime_s=None if runs_elements else spec.limits.max_runtime_s,
            retries=0 if runs_elements else spec.limits.retries,
            retries_by_exit={} if runs_elements else spec.limits.retries_by_exit,
            runs_elements=runs_elements,
            holds_memory=self._settings.tasks.checkpoint_memory > 0,
            heartbeat_timeout_s=lifecycle.heartbeat_timeout_s,
            node_lost_after_s=lifecycle.node_lost_after_s,
            # An image may take minutes, in which the workload does not run.
            starts_at_once=len(allocations) == 1 and spec.workdir is None and not any(image_digests.images_of(spec)),
            drain_s=spec.serving.drain_s if spec.serving is not None else None,
            store_url=store_url,
            checkpoint_store=kept[1],
        )

    def _show_stale(self, request: StageRequest, launch: LaunchDescription, before: dict[str, Any] | None) -> None:
        """Records the stale tables of a launch in the attempt's row, if they have changed."""
        told = launch.model_dump(mode="json", include={"stale_tables"})["stale_tables"] or None
        if told == before:
            return
        own = (Attempt.workload == request.workload_id) & (Attempt.attempt == request.attempt)
        with transaction(self._engine) as session:
            session.execute(update(Attempt).where(own).values(stale_tables=told))

    @activity.defn(name=Activity.STAGED_HERE.value)
    def staged_here(self, request: StageRequest) -> None:
        """Records that the newest checkpoint of the workload is in the region and the store of this attempt."""
        with transaction(self._engine) as session:
            row = session.get_one(Workload, request.workload_id, with_for_update=True)
            if row.attempt == request.attempt and row.region is not None:
                row.checkpoint_region = row.region
                row.checkpoint_store = session.get_one(Attempt, (row.id, row.attempt)).store_url

    @staticmethod
    def _holdings(session: Session, request: StageRequest) -> tuple[list[Allocation], dict[str, Machine]]:
        found = session.execute(_HOLDINGS, {"workload": request.workload_id, "attempt": request.attempt}).all()
        if not found:
            message = f"attempt {request.attempt} of {request.workload_id} has no allocations"
            raise ApplicationError(message, type="UnknownAttempt", non_retryable=True)
        return [a for a, _ in found], {m.id: m for _, m in found}

    def _pinned(
        self, request: StageRequest, spec: WorkloadSpec, known: Mapping[str, str], secrets: Mapping[str, str]
    ) -> dict[str, str]:
        """Returns the images of the workload with their digests. Records new ones; the first one recorded counts."""
        found = image_digests.pinned(spec, known, secrets, self._settings.tasks.registries)
        if found.keys() <= known.keys():
            return found
        with transaction(self._engine) as session:
            row = session.get_one(Workload, request.workload_id, with_for_update=True)
            row.images = {**found, **row.images}
            return {text: row.images[text] for text in found}

    @staticmethod
    def _describe(
        request: StageRequest,
        spec: WorkloadSpec,
        region: str,
        *,
        store: ObjectStore,
        checkpoints: ObjectStore,
        machines: Mapping[str, str],
        slots: Sequence[TaskSlots],
        sealed: dict[str, str],
        hazards: LossRates,
        peers: Mapping[str, str],
        stale: Mapping[str, datetime],
        saved_tasks: int | None,
        tenant_number: int,
        isolation: Isolation,
        pinned: Mapping[str, str],
    ) -> LaunchDescription:
        jobs: dict[str, Any] = {job.name: job for job in spec.jobs}
        tasks, masters = [], {}
        for name in jobs:
            of_job = [t for t in slots if t.job == name]
            local = Counter[str]()
            sizes = Counter(t.machine for t in of_job)
            nodes = [machine for machine in machines if machine in sizes]
            masters[name] = of_job[0].machine
            for task in of_job:
                tasks.append(
                    TaskPlace(
                        job=name,
                        task=task.task,
                        machine=task.machine,
                        rank=task.task,
                        world_size=len(of_job),
                        node_rank=nodes.index(task.machine),
                        local_rank=local[task.machine],
                        local_world_size=sizes[task.machine],
                        slots=task.slots,
                        cpus_milli=jobs[name].resources.cpus_milli,
                        memory_bytes=jobs[name].resources.memory_bytes,
                    )
                )
                local[task.machine] += 1
        return LaunchDescription(
            workload_id=request.workload_id,
            name=spec.name,
            tenant=spec.tenant,
            tenant_number=tenant_number,
            attempt=request.attempt,
            region=region,
            checkpoint=CheckpointLaunch(
                interval_s=spec.checkpoint.interval_s,
                grace_s=spec.checkpoint.grace_s,
                keep=spec.checkpoint.keep,
                max_failing_s=spec.checkpoint.max_failing_s,
                max_failures=spec.checkpoint.max_failures,
                uri=checkpoints.uri(ids.checkpoint_prefix(request.workload_id)),
                machine_hazard_per_h=hazards.machine_per_h,
                process_hazard_per_h=hazards.process_per_h,
                both_hazard_per_h=hazards.both_per_h,
            ),
            tables={table: store.uri(ids.table_prefix(table)) for table in spec.tables},
            stale_tables=dict(stale),
            files=spec.files,
            workdir=spec.workdir,
            outputs=spec.outputs,
            keep_s=spec.keep_s,
            array_variables=array_elements.variables(spec, request.workload_id),
            elements=spec.array if array_elements.is_runner(spec) else None,
            max_runtime_s=spec.limits.max_runtime_s,
            isolation=isolation,
            jobs={
                job.name: JobLaunch(
                    role=job.role,
                    tasks=sum(task.job == job.name for task in slots),
                    master_machine=masters[job.name],
                    restarts=spec.limits.restarts if job.restart == "task" else {},
                    min_tasks=None if job.most_tasks is None else job.tasks,
                    max_tasks=job.most_tasks,
                    saved_tasks=saved_tasks,
                    **(job.task_fields() | {"image": pinned.get(job.image or "", job.image)}),
                )
                for job in spec.jobs
            },
            tasks=tuple(tasks),
            addresses=dict(machines),
            memory_peers=dict(peers),
            serving=spec.serving,
            sealed_secrets=sealed,
        )


def _fault_domain(machine: Machine) -> tuple[str, str]:
    return machine.cluster, machine.rack


def _saved_tasks(session: Session, spec: WorkloadSpec, request: StageRequest) -> int | None:
    """Returns the number of tasks of the last earlier attempt of an elastic job that has saved; else None."""
    if spec.jobs[0].most_tasks is None:
        return None
    saved = (Attempt.workload == request.workload_id) & Attempt.checkpoint_step.is_not(None)
    earlier = select(Attempt.plan).where(saved, Attempt.attempt < request.attempt).order_by(Attempt.attempt.desc())
    plan = session.scalar(earlier.limit(1))
    return None if plan is None else sum(tasks_of_jobs(plan["jobs"]).values())
