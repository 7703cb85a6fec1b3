"""The workflows and activities of each worker role, and the worker process."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

from sqlalchemy import Engine
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import PollerBehaviorSimpleMaximum, UnsandboxedWorkflowRunner, Worker

from activities.capacity.instances import InstanceActivities
from activities.capacity.keeper import PoolKeeper
from activities.capacity.pool_plans import PoolPlanner
from activities.data.buckets import BucketCheck
from activities.data.copies import CopyActivities
from activities.data.moves import MoveActivities
from activities.data.placement_runs import PlacementRunActivities
from activities.data.removal import RemovalActivities
from activities.data.scrub import ScrubActivities
from activities.lifecycle.bundles import BundleActivities
from activities.lifecycle.credits import Credits
from activities.lifecycle.dispatch import Dispatcher
from activities.lifecycle.housekeeping import HousekeepingActivities
from activities.lifecycle.launch import LaunchActivities
from activities.lifecycle.leases import LeaseActivities
from activities.lifecycle.machines import MachineActivities
from activities.lifecycle.progress import ProgressReader
from activities.lifecycle.reconcile import Reconciler
from activities.lifecycle.session_refusal import SessionActivities
from activities.lifecycle.singletons import keep_singletons, set_schedule
from activities.lifecycle.workloads import WorkloadActivities
from activities.notify.alerts import Alerts
from activities.notify.notifier import Notifier
from activities.notify.weekly import WeeklyReports
from activities.reclaim.pacing import Pacer
from activities.scheduling.auction import AuctionActivities
from activities.scheduling.bids import RegionActivities
from activities.scheduling.precompile import precompile
from activities.scheduling.scheduler_state import SchedulerState
from activities.services.readiness import ReadinessReader
from activities.services.step import ServiceActivities
from capacity.provider import Provider
from capacity.providers.registry import check_providers, open_providers
from domain import ids
from domain.version import BUILD_ID
from infra.config.settings import Settings
from infra.db.migrate import upgrade
from infra.db.restored_databases import held_since
from infra.db.session import in_db, open_engine
from infra.errors import ConfigurationError
from infra.liveness_pipe import DISPATCHER, LivenessReporter
from infra.master_key import check_master_key
from infra.memory import collect_seldom, give_back_freed_memory
from infra.process_exit import stop_signals
from infra.search_attributes import register
from infra.temporal_client import connect

_log = logging.getLogger(__name__)
_CACHED_WORKFLOWS = 5000
_THREADS = 32
_HELD_S = 1.0
_RUNNER = UnsandboxedWorkflowRunner()
"""No sandbox: it reloads every module for each workflow, which is half of the work of a short workflow. It would only
find programming mistakes, and the tests run all workflows in the sandbox."""


def control_activities(
    engine: Any,
    settings: Settings,
    client: Client,
    state: SchedulerState | None = None,
    here: Sequence[str] = (),
    providers: Mapping[str, Provider] = MappingProxyType({}),
) -> list[Callable[..., Any]]:
    """Returns the activities of the control queue. Decisions use `state`. `here` are the regions of this process."""
    workloads = WorkloadActivities(engine, settings)
    launch = LaunchActivities(engine, settings)
    auction = AuctionActivities(engine, settings, state or SchedulerState(engine, settings.scheduler), here)
    machines = MachineActivities(engine, settings)
    housekeeping = HousekeepingActivities(engine, settings)
    instances = InstanceActivities(engine, settings, providers)
    placement_runs, moves = PlacementRunActivities(engine, settings), MoveActivities(engine, settings)
    bundles = BundleActivities(engine, launch, workloads)
    return [
        bundles.stage, bundles.settle,
        workloads.transition, workloads.release, workloads.flushed, launch.stage, launch.staged_here,
        LeaseActivities(engine).lease, auction.scan,
        auction.award, auction.dry_run, machines.register, machines.ready, machines.lost, machines.noticed,
        instances.launch, instances.inspect, instances.move, instances.drain, instances.terminate,
        housekeeping.expire, RemovalActivities(engine, client).remove,
        placement_runs.open_placement_run,
        placement_runs.plan_placement_run, placement_runs.placement_paused, placement_runs.assign_partitions,
        placement_runs.end_placement_run, moves.next_move, moves.finish_move,
        ServiceActivities(engine, settings, providers).step, SessionActivities(engine).refuse,
    ]  # fmt: skip


def region_activities(engine: Any, settings: Settings, state: SchedulerState) -> list[Callable[..., Any]]:
    """Returns the activities of a region's queue. Bids are computed from `state`."""
    bids, copies = RegionActivities(engine, state), CopyActivities(engine, settings)
    return [bids.bid, copies.copy_checkpoint, copies.copy_table, ScrubActivities(engine, settings).scrub]


def _workflows() -> list[type]:
    from workflows.bundle import BundleWorkflow
    from workflows.housekeeping import HousekeepingWorkflow
    from workflows.instance import InstanceWorkflow
    from workflows.machine import MachineWorkflow
    from workflows.placement_run import PlacementRunWorkflow
    from workflows.replica import ReplicaWorkflow
    from workflows.scheduler import DryRunWorkflow, SchedulerWorkflow
    from workflows.scrub import ScrubWorkflow
    from workflows.service import ServiceWorkflow
    from workflows.session_request import SessionWorkflow
    from workflows.workload import WorkloadWorkflow

    return [
        WorkloadWorkflow, SchedulerWorkflow, DryRunWorkflow, MachineWorkflow, HousekeepingWorkflow, ReplicaWorkflow,
        PlacementRunWorkflow, ScrubWorkflow, InstanceWorkflow, ServiceWorkflow, SessionWorkflow, BundleWorkflow,
    ]  # fmt: skip


def control_worker(
    client: Client,
    engine: Any,
    settings: Settings,
    threads: ThreadPoolExecutor,
    state: SchedulerState | None = None,
    here: Sequence[str] = (),
    providers: Mapping[str, Provider] = MappingProxyType({}),
) -> Worker:
    """Returns a worker for all workflows and for the activities on Postgres."""
    return Worker(
        client,
        task_queue=ids.CONTROL_QUEUE,
        workflows=_workflows(),
        activities=control_activities(engine, settings, client, state, here, providers),
        activity_executor=threads,
        workflow_runner=_RUNNER,
        max_cached_workflows=_CACHED_WORKFLOWS,
        # After a rollback of Temporal's database, the state in a worker's cache is newer than the stored history. The
        # worker may then record events that cannot be replayed. A workflow with such events fails instead of being
        # retried for ever, and a new workflow continues from Postgres.
        workflow_failure_exception_types=[workflow.NondeterminismError],
        build_id=BUILD_ID,
        graceful_shutdown_timeout=timedelta(seconds=5),
    )


def region_worker(
    client: Client, region: str, engine: Any, settings: Settings, threads: ThreadPoolExecutor, state: SchedulerState
) -> Worker:
    """Returns a worker for one region's bids and copies."""
    return Worker(
        client,
        task_queue=ids.region_queue(region),
        activities=region_activities(engine, settings, state),
        build_id=BUILD_ID,
        activity_executor=threads,
        # A region gets a few tasks a second, so two pollers are enough.
        activity_task_poller_behavior=PollerBehaviorSimpleMaximum(maximum=2),
        graceful_shutdown_timeout=timedelta(seconds=5),
    )


async def run_worker(settings: Settings, roles: Sequence[str], regions: Sequence[str]) -> None:
    """Runs a worker process of the given roles (`control`, `region`) until SIGTERM, SIGINT or SIGHUP.

    Raises:
        ConfigurationError: no database or Temporal address is set, a role is unknown, the role `region` has no region,
            a provider's settings are not valid, or the master key cannot decrypt the database's secrets.
    """
    unknown = sorted(set(roles) - {"control", "region"})
    if unknown or not roles:
        raise ConfigurationError(f"role: {', '.join(unknown) or 'none'} given; must be control, region or both")
    if "region" in roles and not regions:
        raise ConfigurationError("region: the role 'region' needs at least one --region")
    if settings.database is None:
        raise ConfigurationError("database: not set; must be the URL of this installation's Postgres database")
    check_providers(settings)
    give_back_freed_memory()
    reporter = LivenessReporter.inherited()
    reporting = asyncio.create_task(reporter.go_on())
    stop = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    application = f"mizzen worker {' '.join(roles)}"
    engine = open_engine(settings.database, pool_size=16, application=application)
    await asyncio.to_thread(upgrade, engine)
    if "control" in roles:
        await asyncio.to_thread(check_master_key, engine, settings.master_key_path)
    await _adopted(engine, stop)
    providers = await asyncio.to_thread(open_providers, settings) if "control" in roles else {}
    _log.info("loading the compiled inner loops; the first start of a version compiles them, in about a minute")
    await asyncio.to_thread(precompile)
    collect_seldom()
    client = await _connect(settings, stop)
    if client is None:
        return
    # All decisions of this process share one scheduler state.
    state = SchedulerState(engine, settings.scheduler, None if "control" in roles else regions)
    async with AsyncExitStack() as stack:
        if "control" in roles:
            threads = stack.enter_context(ThreadPoolExecutor(_THREADS))
            await register(client)
            here = regions if "region" in roles else ()
            await stack.enter_async_context(control_worker(client, engine, settings, threads, state, here, providers))
            await set_schedule(client, settings.tetris.nightly)
            loops = (
                Dispatcher(
                    engine,
                    settings.database,
                    client,
                    partial(reporter.report, DISPATCHER),
                    settings.scheduler,
                    settings.capacity,
                ).run(),
                keep_singletons(engine, client, settings.tetris.nightly, settings.reconcile.singletons_s),
                Reconciler(engine, settings, client).run(),
                ProgressReader(engine, settings, client).run(),
                Credits(engine, settings).run(),
                PoolKeeper(engine, settings, client, providers).run(),
                PoolPlanner(engine, settings.capacity).run(),
                ReadinessReader(engine, settings, client).run(),
                Pacer(engine, settings, client).run(),
                Notifier(engine, settings).run(),
                *([Alerts(engine, settings.notify.alerts).run()] if settings.notify.alerts else []),
                *([WeeklyReports(engine, settings.notify.reports).run()] if settings.notify.reports else []),
            )
            for loop in loops:
                stack.callback(asyncio.create_task(loop).cancel)
        for region in regions if "region" in roles else ():
            # Each region has its own threads, so that copies that take hours do not block other activities.
            threads = stack.enter_context(ThreadPoolExecutor(_THREADS))
            await stack.enter_async_context(region_worker(client, region, engine, settings, threads, state))
            check = BucketCheck(engine, settings.buckets, region)
            stack.callback(asyncio.create_task(check.run()).cancel)
        _log.info("worker ready: %s %s", ", ".join(roles), ", ".join(regions))
        await stop.wait()
    reporting.cancel()
    engine.dispose()


async def _adopted(engine: Engine, stop: asyncio.Event) -> None:
    """Waits until a database that was restored from a backup is adopted, or `stop` is set."""
    said = False
    while not stop.is_set() and (made_at := await in_db(engine, held_since)) is not None:
        if not said:
            _log.warning("held: the database was restored from a backup of %s; waiting for `mizzen adopt`", made_at)
            said = True
        await asyncio.sleep(_HELD_S)


async def _connect(settings: Settings, stop: asyncio.Event) -> Client | None:
    """Connects to Temporal, retrying until it answers, as it may start later; returns None if `stop` is set first."""
    while not stop.is_set():
        try:
            return await connect(settings.temporal)
        except RuntimeError as error:
            _log.warning("temporal %s: %s; trying again", settings.temporal.address, error)
            await asyncio.sleep(0.5)
    return None
