"""Runs one machine's agent: connects it to Temporal, and starts and ends its worker and its background tasks."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from temporalio.client import Client
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from agent import records
from agent.activities import NodeActivities
from agent.config import AgentConfig
from agent.gpu_watch import GpuWatch
from agent.lending.lender import Lender
from agent.lending.owner_socket import open_socket, serve_owner
from agent.lending.polls import tuner
from agent.locks import StartLocks
from agent.logs import Shipping
from agent.notices import MachineNotices
from agent.old_attempts import tidy_periodically
from agent.output_storage import OutputStorage
from agent.pilot import Pilot, machine_notices
from agent.processes import end_tasks
from agent.registration import forward_notices, say_hello, stay_registered
from agent.sessions.task_sessions import TaskSessions
from agent.staging import Stager
from agent.state import CONFIG, StateFolder
from domain.ids import agent_queue
from domain.version import BUILD_ID
from infra.config.services import TemporalSettings
from infra.errors import ConfigurationError
from infra.liveness_pipe import LivenessReporter
from infra.process_exit import stop_signals
from infra.temporal_client import connect, refusal, use_quiet_runtime
from mizzen.objects import open_store

if TYPE_CHECKING:
    from agent.lending.traffic import MigrationTraffic

T = TypeVar("T")
ClientFactory = Callable[[], Awaitable[Client]]
_GOODBYE_S = 5.0
"""Timeout for the graceful shutdown of the worker when the agent stops."""
_THROTTLE = timedelta(seconds=0.2)
_STEADY_S = 30.0
"""If a worker ran for longer than this before it failed, the restart backoff is reset."""
_GUARD_S = 2.0
"""Interval at which the agent checks whether its state folder still exists."""
_log = logging.getLogger(__name__)


async def serve(config: AgentConfig, client_factory: ClientFactory, stop: asyncio.Event | None = None) -> int:
    """Runs the agent of one machine until `stop` is set. The tasks continue, and the next agent re-attaches to them.

    Returns the exit status: 0, or with `serve_once` one of `domain.agent_exits`.

    While Temporal is unavailable or refuses the agent, the agent keeps trying to connect, with backoff. It logs why,
    and logs each connection.

    Raises:
        ConfigurationError: another agent uses the same state folder, the folder was deleted, a notice setting is
            invalid, or `client_factory` raised it.
    """
    stop = stop or asyncio.Event()
    try:
        notices = machine_notices(config, _environ(config))
    except ValueError as error:
        raise ConfigurationError(f"machine {config.machine}: {error}") from None
    state = StateFolder(config.state_dir)
    await asyncio.to_thread(state.acquire)
    await asyncio.to_thread(_save_config, state, config)
    # A separate executor, so that a bucket that does not respond cannot delay the start or stop of tasks.
    executor = ThreadPoolExecutor(4, thread_name_prefix="ship")
    shipping = Shipping(executor, config.output_bytes, config.log_bytes)
    outputs = OutputStorage(config.largest_output_bytes, config.largest_output_files)
    stager = Stager(config, state, open_store, notices)
    locks = StartLocks()
    traffic = await asyncio.to_thread(_traffic, config)
    lender = Lender(config, state, notices, locks, traffic)
    _say_credentials(config)
    uplink = None if traffic is None else traffic.uplink
    gpus = GpuWatch(state, config.machine, config.gpus)
    activities = NodeActivities(
        config, state, stager, shipping, notices, lender, locks, gpus, outputs=outputs, uplink=uplink
    )
    sessions = TaskSessions(config, state, stager)
    tidying = asyncio.create_task(tidy_periodically(config, state, lender, stager.launches.memory))
    listening = asyncio.create_task(notices.run())
    lending = [asyncio.create_task(work) for work in (lender.run(), lender.reopen_polls(), gpus.run())]
    if uplink is not None:
        lending.append(asyncio.create_task(uplink.run()))
    guarding = asyncio.create_task(_guard(state, activities, stop))
    pilot = Pilot(config, state, notices, locks) if config.once else None
    if pilot is not None:
        pilot.listen()
        lending.append(asyncio.create_task(pilot.run(stop)))
    try:
        if (listening_to_owner := open_socket(config)) is not None:
            lending.append(asyncio.create_task(serve_owner(config, listening_to_owner, lender)))
        await activities.resume()
        failures = 0
        while not stop.is_set():
            began_s = time.monotonic()
            if lender.away.is_set():
                _log.info("%s: the owner has the machine; the agent is disconnected", config.machine)
                await _unless(stop, lender.until_lent())
                continue
            try:
                client = await _unless(stop, client_factory())
                if client is not None:
                    await _unless(stop, say_hello(client, config, state, lender, gpus))
                    address = client.service_client.config.target_host
                    _log.info("%s: connected to %s; the machine is being registered", config.machine, address)
                    await _work(client, config, state, activities, notices, lender, gpus, stop, sessions=sessions)
            except ConfigurationError:
                raise
            except Exception as error:
                failures = 1 if time.monotonic() - began_s > _STEADY_S else failures + 1
                pause_s = min(5.0, 0.25 * 2.0**failures)
                refused = refusal(error)
                what = "Temporal is unavailable" if refused is None else "the gateway or Temporal refuses the agent"
                _log.warning("%s: %s, next try in %.1f s: %s", config.machine, what, pause_s, refused or error)
                await _unless(stop, asyncio.sleep(pause_s))
        if activities.gone.is_set():
            await asyncio.to_thread(end_tasks, state.place())
            raise ConfigurationError(
                f"state_dir {state.path}: was deleted or replaced while the agent ran; its tasks were stopped. If the"
                " agent is started again, the machine has a new key, and needs `mizzen machines trust`"
            )
    finally:
        for task in (tidying, listening, guarding, *lending):
            task.cancel()
        await asyncio.wait(lending, timeout=1.0)
        await sessions.close()
        stager.launches.memory.close()
        if uplink is not None:
            uplink.close()
        if traffic is not None:
            await asyncio.to_thread(traffic.close)
        await shipping.close()
        await outputs.close()
        executor.shutdown(wait=False, cancel_futures=True)
        state.release()
    return 0 if pilot is None else pilot.status


def run_agent(config: AgentConfig, temporal: TemporalSettings, reporter: LivenessReporter | None = None) -> int:
    """Runs `serve` until SIGTERM, SIGINT or SIGHUP. Blocks. The event loop sends liveness signs to `reporter`.

    Returns the exit status.

    Raises:
        ConfigurationError: another agent uses the same state folder, or Temporal's TLS files are unusable.
    """
    os.umask(0o022)  # Tasks that run as other users must be able to enter their folders.
    use_quiet_runtime()

    async def until_signalled() -> int:
        stop = asyncio.Event()
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        reporting = asyncio.create_task((reporter or LivenessReporter(None)).go_on())
        status = await serve(config, lambda: connect(temporal), stop)
        reporting.cancel()
        return status

    return asyncio.run(until_signalled())


async def _work(
    client: Client,
    config: AgentConfig,
    state: StateFolder,
    activities: NodeActivities,
    notices: MachineNotices,
    lender: Lender,
    gpus: GpuWatch,
    stop: asyncio.Event,
    *,
    sessions: TaskSessions,
) -> None:
    """Polls the machine's task queue until `stop` is set, the owner has taken the machine, or the worker fails."""
    worker = Worker(
        client,
        task_queue=agent_queue(config.machine),
        activities=[*activities.all(), *sessions.all()],
        build_id=BUILD_ID,
        identity=f"agent {config.machine} pid {os.getpid()}",
        tuner=tuner(lender.polls),
        # A machine rarely gets a task, and the polls of all machines load the Temporal server. So one poller.
        activity_task_poller_behavior=PollerBehaviorSimpleMaximum(maximum=1),
        # The activities pace their heartbeats themselves. A change of readiness is sent at once.
        max_heartbeat_throttle_interval=_THROTTLE,
        default_heartbeat_throttle_interval=_THROTTLE,
    )
    working = asyncio.create_task(worker.run())
    stopping = asyncio.create_task(stop.wait())
    leaving = asyncio.create_task(lender.away.wait())
    announcing = asyncio.create_task(stay_registered(client, config, state, activities, lender, gpus))
    forwarding = asyncio.create_task(forward_notices(client, config, state, notices, lender))
    try:
        await asyncio.wait({working, stopping, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            # This cancels the activities. Each then reports `DETACHED`, if Temporal is reachable.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await worker.shutdown()
        if working.done():
            await working
    finally:
        others = {stopping, leaving, announcing, forwarding, working}
        for task in others:
            task.cancel()
        # A worker that cannot reach Temporal may take long to end. The next agent need not wait for it.
        await asyncio.wait(others, timeout=1.0)


async def _guard(state: StateFolder, activities: NodeActivities, stop: asyncio.Event) -> None:
    """Stops the agent if its state folder is deleted: without it, nothing can be recorded.

    Before it stops, its machine counts as lost, so that no further work is sent.
    """
    while state.is_there():
        await asyncio.sleep(_GUARD_S)
    _log.error("the state folder %s was deleted or replaced; the agent takes no work and ends", state.path)
    activities.gone.set()
    await asyncio.sleep(_GUARD_S)
    stop.set()


def _save_config(state: StateFolder, config: AgentConfig) -> None:
    """Stores the configuration for `agent.lending.emergency_reclaim`. The agent also runs if the disk is full."""
    shown = config.model_copy(update={"state_dir": state.path})
    try:
        records.write_durably(
            str(state.path / CONFIG), shown.model_dump_json(exclude={"join_token", "machine_key"}).encode()
        )
    except OSError as error:
        _log.warning("%s: cannot be written: %s", state.path / CONFIG, error)


def _say_credentials(config: AgentConfig) -> None:
    """Logs a warning if tasks get no credentials for the region's bucket."""
    scheme = (config.bucket_url or "").partition(":")[0]
    if (scheme == "s3" and config.s3_role is None) or (scheme == "gs" and not config.gcs_tokens):
        name = "tasks.s3_role" if scheme == "s3" else "tasks.gcs_tokens"
        _log.warning(
            "%s: tasks get no credentials for %s: set %s, or give them secrets of their own%s",
            config.machine, config.bucket_url, name,
            "" if config.metadata_service else "; tasks.metadata_service is false",
        )  # fmt: skip


def _traffic(config: AgentConfig) -> "MigrationTraffic | None":
    """Returns the object that enforces rates and kill-switch on the machine's interface; None: none is enforced."""
    if config.interface is None:
        return None
    # Imported only where it is used: it needs numpy and pyroute2, which cost every agent memory and time.
    from agent.lending.traffic import open_traffic

    return open_traffic(config)


def _environ(config: AgentConfig) -> dict[str, str]:
    given = {} if config.notice_file is None else {"MIZZEN_NOTICE_FILE": str(config.notice_file)}
    return {**os.environ, **given}


async def _unless(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Returns the result of `work`, or cancels it and returns None as soon as `stop` is set."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
