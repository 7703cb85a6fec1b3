"""The embedded stack: runs every part of mizzen on this machine under one supervisor, with one data folder."""

import asyncio
import json
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Engine, func, select
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from temporalio.service import RPCError

from infra import children
from infra.bootstrap import OPERATOR_KEY_FILE, bootstrap
from infra.config.services import TemporalSettings
from infra.config.settings import Settings
from infra.db import events
from infra.db.migrate import refuse_unknown
from infra.db.restored_databases import held_since
from infra.db.session import in_db, open_engine, transaction
from infra.db.tenants import Tenant
from infra.errors import ConfigurationError, StackError
from infra.files import write_private
from infra.liveness_pipe import LivenessListener
from infra.machine_keys import put_machine_key
from infra.payload_keys import add_key
from infra.stack import closed_network, leftovers, log_files, probes, temporal
from infra.stack.certificate import write_certificate
from infra.stack.compilation import compile_loops
from infra.stack.fleet import Fleet
from infra.stack.fork_server import ForkServer
from infra.stack.liveness import Probe
from infra.stack.lock import make_closed
from infra.stack.ports import StackPorts, free_port
from infra.stack.postgres import EmbeddedPostgres
from infra.stack.sockets import short_path
from infra.stack.supervisor import Child, Supervisor, dies_with_parent
from infra.stack.temporal import discard_unfinished
from infra.stack.withdrawal import launched_here, withdraw
from infra.temporal_client import UI_PATH, UNIX
from infra.users import complete_environment

_log = logging.getLogger(__name__)
_STOP_MARGIN_S = 15.0
_EVENT_TRIES = 30
_SETTLES_S = 60.0
_HELD_S = 1.0
MACHINE_KEYS = "run/machine-keys.json"
"""File in the data folder with the API key of each machine of the fleet."""
PAYLOAD_KEYS = "payload.keys"
"""File in the data folder with the keys that encrypt payloads in the embedded Temporal."""
_SOCKET, _UI_SOCKET = "temporal.sock", "temporal-ui.sock"
Say = Callable[[str], None]
T = TypeVar("T")


class EmbeddedStack:
    """Starts and stops the stack. `data_dir` must be locked by the caller (`infra.stack.lock`)."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        data_dir: Path,
        say: Say,
        *,
        forget_unreadable_secrets: bool = False,
        why_shared: str | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        """`why_shared`: why tasks of all tenants run as the same user; None: they do not. `forks`: starts the parts."""
        self.fleet = fleet
        self.data_dir = data_dir
        self._say = say
        self._forget_unreadable_secrets = forget_unreadable_secrets
        self.supervisor = Supervisor(settings.liveness, self._show_restart, self._parts_file, forks)
        self._forks = forks
        self.postgres = EmbeddedPostgres(data_dir / "postgres")
        self._own_postgres = settings.database is None
        self._own_temporal = settings.temporal.address is None
        self.settings = settings.model_copy(update={"data_dir": data_dir})
        self._ports = StackPorts(data_dir / "run" / "ports.json")
        self.operator_key = ""
        self.is_held = False
        """Whether the installation was restored from a backup and is not adopted yet."""
        self._why_shared = why_shared
        self._why_open: str | None = None
        """Why every process of this machine can connect to the embedded Temporal; None: only mizzen's user can."""
        self._gateway_address = f"127.0.0.1:{free_port()}"
        self._rotating: asyncio.Task[None] | None = None

    # ----------------------------------------------------------------------------------------------------------- facts

    @property
    def api_url(self) -> str:
        """The URL of the API."""
        return f"{self.settings.api.scheme}://{self.settings.api.host}:{self.settings.api.port}"

    @property
    def ui_url(self) -> str | None:
        """The URL of the embedded Temporal's UI; None if an existing Temporal service is used."""
        return f"{self.api_url}{UI_PATH}" if self._own_temporal else None

    @property
    def database_url(self) -> str:
        """The URL of the database."""
        return self.settings.database or self.postgres.url

    @property
    def why_not_separate(self) -> str | None:
        """Why tasks can reach those of other tenants or mizzen itself; None: they cannot."""
        if self._why_shared is not None or self._why_open is None:
            return self._why_shared
        return f"every process of this machine can connect to Temporal: {self._why_open}"

    @property
    def config_file(self) -> Path:
        """Path of the file with the effective settings, which the child processes read."""
        return self.data_dir / "run" / "settings.yaml"

    # ----------------------------------------------------------------------------------------------------------- start

    async def start(self) -> None:
        """Starts all parts of the stack.

        Raises:
            ConfigurationError: the data folder belongs to another version.
            StackError: a port is in use, or a part does not start. Call `stop` to stop the parts that were started.
        """
        complete_environment(self.data_dir)
        self._rotating = asyncio.create_task(self._rotate_logs())
        # This folder also contains the logs, so it is made with mode 0700 before the first log is written.
        self.config_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(region.bucket is None for region in self.fleet.regions):
            make_closed(self.data_dir / "buckets")
        if self._own_postgres:
            self._refuse_lost_database()
            self.postgres.clear_leftover()
        leftovers.end_recorded(self._parts_file)
        self._take_port()
        binary = temporal.find_binary(self.settings.temporal) if self._own_temporal else None
        await compile_loops(self._say)
        if self._own_postgres:
            await asyncio.to_thread(self.postgres.initialise)
            self._say("starting Postgres")
            child = self._postgres_child()
            await self.supervisor.start(child)
            try:
                await asyncio.to_thread(self.postgres.wait_ready, child.process)
            except StackError as error:
                raise StackError(f"{error}\n{child.tail()}") from None
            await _until_done("postgres", partial(asyncio.to_thread, self._refuse_other_version))
        if binary is not None:
            self._why_open = await asyncio.to_thread(closed_network.why_not)
            if not (keys := self.data_dir / PAYLOAD_KEYS).exists():
                add_key(keys)
        self._write_config()
        if binary is not None:
            self._say("starting Temporal")
            await self.supervisor.start(self._temporal_child(binary))
            await _until_done("temporal", partial(temporal.set_retention, self.settings.temporal))
        engine = open_engine(self.database_url, pool_size=2)
        try:
            work = partial(self._bootstrap, engine)
            if self._own_postgres:
                self.operator_key = await _until_done("postgres", lambda: asyncio.to_thread(work))
            else:
                self.operator_key = await asyncio.to_thread(work)
        finally:
            engine.dispose()
        if self.settings.trust_tenants and self.why_not_separate is not None:
            self._say(f"WARNING: tenants are trusted: {self.why_not_separate}")
        if self._forks is not None:
            await self._forks.ready()
        api = self._server_child("api", ["api"])
        api.ready = probes.http(f"{self.api_url}/readyz", 2.0).ask
        api.probes = [probes.http(f"{self.api_url}/healthz")]
        if (made_at := await self._held_since()) is not None:
            await self.supervisor.start(api)
            await self._await_adoption(made_at)
        self._say("starting workers, the API and node agents")
        regions = [argument for r in self.fleet.regions for argument in ("--region", r.name)]
        roles = ["--role", "control", "--role", "region"]
        await self.supervisor.start(self._beating_child("worker", ["worker", *roles, *regions], dispatches=True))
        await self.supervisor.start(self._beating_child("gateway", self._gateway()))
        agents = ["agents", "--fleet", str(self._fleet_file())]
        agents += ["--separate"] if self._why_shared is None else []
        await self.supervisor.start(self._beating_child("agents", agents, config=self._agents_file()))
        if made_at is None:
            await self.supervisor.start(api)

    async def _held_since(self) -> datetime | None:
        engine = open_engine(self.database_url, pool_size=1)
        try:
            return await _until_done("postgres", partial(in_db, engine, held_since))
        finally:
            engine.dispose()

    async def _await_adoption(self, made_at: datetime) -> None:
        """Waits until a restored installation is adopted. Without workers and agents it changes no machine."""
        self.is_held = True
        self._say(f"HELD: restored from a backup of {made_at:%Y-%m-%d %H:%M:%S} UTC. The API runs at {self.api_url},")
        self._say("but nothing is scheduled. Stop the installation that was backed up, then run in another terminal:")
        self._say(f"  mizzen adopt --data-dir {self.data_dir}")
        while await self._held_since() is not None:
            await asyncio.sleep(_HELD_S)
        self.is_held = False

    def _bootstrap(self, engine: Engine) -> str:
        """Initialises the installation, writes the keys of the fleet's machines, and returns the operator's key."""
        master_key = self.settings.master_key_path
        key = bootstrap(
            engine,
            self.data_dir,
            master_key,
            {r.name: self.fleet.bucket_url(r, self.data_dir) for r in self.fleet.regions},
            self.fleet.clusters(),
            forget_unreadable_secrets=self._forget_unreadable_secrets,
        )
        why = self.why_not_separate
        with transaction(engine) as session:
            tenants = session.scalar(select(func.count()).select_from(Tenant)) or 0
            if why is not None and tenants > 1 and not self.settings.trust_tenants:
                raise ConfigurationError(
                    f"{tenants} tenants exist, but their tasks cannot be separated: {why}; if the tenants trust each"
                    " other, add --trust-tenants"
                )
            keys = {m["id"]: put_machine_key(session, master_key, m["id"]) for m in self.fleet.machines()}
        write_private(self.data_dir / MACHINE_KEYS, json.dumps(keys))
        return key

    def _refuse_lost_database(self) -> None:
        key = self.data_dir / OPERATOR_KEY_FILE
        if key.exists() and not self.postgres.exists():
            raise StackError(
                f"data_dir: {key} belongs to an installation whose database {self.postgres.data} is missing; restore"
                f" the database from a backup, or remove {key.name} to start with an empty database"
            )

    def _refuse_other_version(self) -> None:
        engine = open_engine(self.postgres.url, pool_size=1)
        try:
            refuse_unknown(engine)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"data_dir: {self.data_dir} belongs to another version of mizzen. Nothing was deleted or changed. To"
                " start without its data, use another folder (--data-dir), or move this one away. To keep its"
                f" workloads, use the version that created it. ({error})"
            ) from None
        finally:
            engine.dispose()

    def _take_port(self) -> None:
        """Replaces the API's port, if it is in use and the user has not set it, by a free one, and says so."""
        api = self.settings.api
        port = self._ports.take("api.port (--port)", api.host, api.port, is_set="port" in api.model_fields_set)
        updates: dict[str, object] = {"api": api.model_copy(update={"port": port})}
        if self._own_temporal:
            folder = short_path(self.config_file.parent)
            keys = self.settings.temporal.payload_keys or self.data_dir / PAYLOAD_KEYS
            own = {"address": f"{UNIX}{folder / _SOCKET}", "ui_socket": folder / _UI_SOCKET, "payload_keys": keys}
            updates["temporal"] = self.settings.temporal.model_copy(update=own)
        self.settings = self.settings.model_copy(update=updates)
        for message in self._ports.replaced:
            self._say(message)

    def _write_config(self) -> None:
        self._ports.store()
        own = self.settings.api.model_copy(
            update={"one_tenant": None if self.settings.trust_tenants else self.why_not_separate}
        )
        body = self.settings.model_copy(update={"database": self.database_url, "api": own}).model_dump(mode="json")
        write_private(self.config_file, json.dumps(body))  # JSON is valid YAML.

    def _gateway(self) -> list[str]:
        """Returns the arguments of the gateway, through which each agent uses Temporal, only for its own machine."""
        key = self._certificate.with_suffix(".key")
        write_certificate(self._certificate, key)
        tls = ["--tls-cert", str(self._certificate), "--tls-key", str(key)]
        connections = str(max(1000, 4 * len(self.fleet.machines())))
        return ["gateway", "--listen", self._gateway_address, *tls, "--connections-per-address", connections]

    def _agents_file(self) -> Path:
        """Writes a settings file for the agents, without the access to Postgres and Temporal; returns its path."""
        namespace = self.settings.temporal.namespace
        temporal = TemporalSettings(address=self._gateway_address, namespace=namespace, tls_ca=self._certificate)
        settings = self.settings.model_copy(update={"database": None, "temporal": temporal})
        path = self.data_dir / "run" / "agents.yaml"
        write_private(path, json.dumps(settings.model_dump(mode="json")))
        return path

    def _fleet_file(self) -> Path:
        path = self.data_dir / "run" / "fleet.yaml"
        path.write_text(self.fleet.model_dump_json())
        return path

    @property
    def _certificate(self) -> Path:
        return self.data_dir / "run" / "gateway.crt"

    @property
    def _parts_file(self) -> Path:
        return self.data_dir / "run" / "parts.json"

    def _log_file(self, name: str) -> Path:
        return self.data_dir / "run" / "log" / f"{name}.log"

    async def _rotate_logs(self) -> None:
        logs = self.settings.logs
        while True:
            files = sorted(self._log_file("*").parent.glob("*.log"))
            await asyncio.to_thread(log_files.rotate, files, logs.max_bytes, logs.keep)
            await asyncio.sleep(logs.check_interval_s)

    def _postgres_child(self) -> Child:
        child = Child("postgres", self.postgres.command(), self._log_file("postgres"), signal.SIGINT, 30.0)
        backends = probes.Backends(lambda: child.process.pid if child.is_running() and child.process else None)
        answers = probes.query(lambda: self.postgres.url)

        async def ask() -> bool:
            killed = backends.kill_stopped()
            if killed:
                _log.warning("postgres: killed processes %s, which were stopped by a signal; it recovers", killed)
            return await answers.ask()

        child.probes = [Probe(answers.what, ask)]
        return child

    def _temporal_child(self, binary: Path) -> Child:
        state = self.data_dir / "temporal.db"
        # In its own network all ports are free.
        port, ui_port = (7233, 8233) if self._why_open is None else (free_port(), free_port())
        server = temporal.command(binary, state, self.settings.temporal, port, ui_port)
        sockets = {_SOCKET: port, _UI_SOCKET: ui_port}
        closed = closed_network.command(self.config_file.parent, sockets, server, is_closed=self._why_open is None)
        command = [*dies_with_parent(), *closed]
        health = probes.Health(self.settings.temporal)
        return Child(
            "temporal", command, self._log_file("temporal"), ready=health.ask, probes=[health.probe()], umask=0o077,
            prepare=partial(discard_unfinished, state),
        )  # fmt: skip

    def _server_child(self, name: str, arguments: list[str], config: Path | None = None) -> Child:
        words = (*arguments, "--config", str(config or self.config_file))
        command = [*dies_with_parent(), *children.python("-m", "server", *words)]
        return Child(name, command, self._log_file(name), arguments=words)

    def _beating_child(
        self, name: str, arguments: list[str], *, dispatches: bool = False, config: Path | None = None
    ) -> Child:
        child = self._server_child(name, arguments, config)
        child.listener = LivenessListener()
        child.probes = probes.liveness(child.listener, dispatches=dispatches)
        return child

    async def _show_restart(self, name: str, why: str) -> None:
        """Writes an event that a part was restarted. Retries while Postgres is unavailable."""
        for _ in range(_EVENT_TRIES):
            try:
                await asyncio.to_thread(self._write_event, name, why)
                return
            except SQLAlchemyError:
                await asyncio.sleep(2.0)

    def _write_event(self, name: str, why: str) -> None:
        engine = open_engine(self.database_url, pool_size=1)
        try:
            with transaction(engine) as session:
                events.record(session, "stack.restarted", detail={"part": name, "because": why})
        finally:
            engine.dispose()

    # ------------------------------------------------------------------------------------------------------------ stop

    async def stop(self, *, hurry: asyncio.Event | None = None) -> None:
        """Preempts the workloads on the stack's machines, waits until they have saved, then stops all parts.

        When `hurry` is set, the wait ends at once.
        """
        if self.operator_key and not self.is_held:
            engine = open_engine(self.database_url, pool_size=2)
            try:
                await self._drain(engine, hurry or asyncio.Event())
            except Exception as error:
                _log.warning("cannot preempt the workloads before the stop: %s", error)
            finally:
                engine.dispose()
        await self.supervisor.stop()
        if self._rotating is not None:
            self._rotating.cancel()

    async def _drain(self, engine: Engine, hurry: asyncio.Event) -> None:
        machines = [machine["id"] for machine in self.fleet.machines()]
        machines += await asyncio.to_thread(launched_here, engine, self.settings.providers)
        present, grace_s = await asyncio.to_thread(withdraw, engine, machines)
        deadline_s = time.monotonic() + grace_s + _STOP_MARGIN_S
        told, shown = set(present), -1
        while present and time.monotonic() < deadline_s and not hurry.is_set():
            left = len({workload for workload, _ in present})
            if left != shown:
                who = "1 workload" if left == 1 else f"{left} workloads"
                self._say(f"waiting for {who} to save and stop (press Ctrl-C again to stop waiting)")
                shown = left
            await asyncio.sleep(0.2)
            present, _ = await asyncio.to_thread(withdraw, engine, machines, told)
            told |= present


async def _until_done(part: str, work: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of `work`, a request to the part `part`. Retries it, for example while that part restarts.

    Raises:
        StackError: `work` still fails after a minute.
    """
    give_up_s = time.monotonic() + _SETTLES_S
    while True:
        try:
            return await work()
        except (OperationalError, RPCError, RuntimeError) as error:
            if time.monotonic() > give_up_s:
                raise StackError(f"{part}: {error}") from None
            _log.warning("%s: retrying: %s", part, str(error).partition("\n")[0])
            await asyncio.sleep(0.5)
