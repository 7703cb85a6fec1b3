"""The balancer of one service: its listening socket, its HAProxy, its list of replicas and its counts."""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from infra.errors import ConfigurationError
from infra.files import write_private
from proxies.balance.api_client import Api
from proxies.balance.configuration import (
    SOCKET,
    SOCKETS,
    STICKY,
    Descriptors,
    ProxyLimits,
    Seat,
    effective_policy,
    render,
    seats,
    sticky_pattern,
)
from proxies.balance.counts import READ_S, Counters, RequestCounter, Rows
from proxies.balance.files import AccessFiles, locked
from proxies.balance.plug import Plug
from proxies.balance.process import CONFIGURATION, HaproxyProcess
from proxies.balance.replica_watch import ReplicaWatch
from proxies.balance.reports import Reports, Seconds
from proxies.balance.runtime import Members, RuntimeSocket, RuntimeSocketError
from proxies.balance.values import InvalidList, RegionZone, Service, is_ip, parse_service

REFETCH_S = 10.0
"""The list is fetched at this interval, in case an event is lost."""
_TICK_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_STABLE_S = 10.0
"""A HAProxy that ran for this time is restarted without a pause."""
_START_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BalancerSettings:
    """The settings that the balancers of all services share."""

    program: Path
    """HAProxy."""
    data: Path
    """Folder for lists, configurations and runtime sockets."""
    limits: ProxyLimits
    certificate: Path | None
    """PEM file with certificate and private key; None: clients do not use TLS."""
    keys: Path | None
    """File with the SHA-256 of the keys of clients (`proxies.balance.files`); None: clients need no key."""
    clients: RegionZone | None
    """The zone of the clients, for `least_load`."""
    trusted_proxies: tuple[str, ...] = ()
    """As in `Access`."""


@dataclass
class _Running:
    process: HaproxyProcess
    socket: RuntimeSocket
    members: Members
    counters: Counters
    plug: Plug
    hold_s: float
    """The value with which HAProxy was started: it cannot be changed while HAProxy runs. The same holds for TLS."""
    has_tls: bool
    is_replaced: bool = False
    """Whether this HAProxy was stopped, without requests in progress, to start another one."""
    is_finished: bool = False
    """Whether this HAProxy was stopped and its last request has ended."""


class ServiceBalancer:
    """Balances one service."""

    def __init__(self, name: str, listener: socket.socket, settings: BalancerSettings, api: Api, balancer: str) -> None:
        self.name = name
        self._listener = listener
        self._settings = settings
        self._api = api
        self._folder = settings.data / name
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_file = locked(self._folder)
        self._list = self._folder / "endpoints.json"
        self._files = AccessFiles(name, self._folder, settings.certificate, settings.keys)
        self.counts = RequestCounter()
        self.watch = ReplicaWatch(name)
        self.reports = Reports(api, name, balancer, self.watch.to_json)
        self._seconds = Seconds(time.time())
        self.restarts = 0
        """The number of times that HAProxy ended by itself."""
        stored = self._stored()
        self.service = stored or Service(
            name, "round_robin", None, None, False, False, 60.0, None, 0, 0.0, 0.0, 0, None, None, ()
        )
        self._has_list = asyncio.Event()
        """Set once there is a list, or the first attempt to fetch one has failed."""
        if stored is not None:
            self._has_list.set()
        self.fetched_s: float | None = None
        """The monotonic time of the last successful fetch; None: none since the start."""
        self._problem = ""
        """The error of the last fetch, which is logged only once."""
        self._addresses: dict[str, str] = {}
        self._running: _Running | None = None
        self._is_applied = True
        self._due = asyncio.Event()
        self._lock = asyncio.Lock()
        self._stopping = False

    @property
    def is_up(self) -> bool:
        """Whether HAProxy runs and was started completely."""
        return self._running is not None

    @property
    def draining(self) -> int:
        """The number of HAProxy's servers that are being drained."""
        return self._running.members.draining if self._running else 0

    def fetch_soon(self) -> None:
        """Wakes the task that fetches the list."""
        self._due.set()

    async def run(self) -> None:
        """Runs until `stop` was called and HAProxy has ended. Tasks that need the API are cancelled then."""
        works = self._keep_current, self._tick, self._read, self._watch
        helpers = [asyncio.create_task(self._repeat(work)) for work in works]
        try:
            # Without a list HAProxy would refuse all requests; until it starts, they wait.
            await self._has_list.wait()
            await self._keep_running()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work` until it is cancelled. HAProxy must continue even if one of the other parts has a defect."""
        while True:
            try:
                await work()
            except Exception:
                _log.exception("%s: a part of the balancer is started again", self.name)
            await asyncio.sleep(_TICK_S)

    def stop(self) -> None:
        """Closes the listening socket and lets HAProxy finish its requests."""
        self._stopping = True
        self._has_list.set()
        self._listener.close()
        if self._running:
            self._running.process.stop()

    async def last_report(self) -> None:
        """Sends the counts that are not sent yet, after `run` has ended."""
        self.counts.read()
        self.reports.add(self.counts.close(self._seconds.last(time.time()), self.service.canary))
        await self.reports.send()

    # ------------------------------------------------------------------------------------------------------- HAProxy

    async def _keep_running(self) -> None:
        pause_s = 0.0
        while not self._stopping:
            started_s = time.monotonic()
            try:
                code: int | str | None = await self._run_once()
            except OSError as error:
                code = str(error)
            if self._stopping:
                return
            if code is None:
                continue
            self.restarts += 1
            if time.monotonic() - started_s >= _STABLE_S:
                pause_s = 0.0
            _log.warning("%s: HAProxy has ended (%s); it is restarted in %.1f s", self.name, code, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, pause_s * 2))

    async def _run_once(self) -> int | None:
        """Starts HAProxy with the current list, and waits for its end. Returns its exit code; None: it is replaced."""
        async with self._lock:
            # The list can be replaced while HAProxy starts. Then the change is applied afterwards.
            service, there = self._effective(), await self._seats()
            descriptors = Descriptors(self._listener.fileno(), self.counts.log, self.watch.errors)
            settings = self._settings
            access = self._files.access(settings.trusted_proxies)
            zones = settings.clients is not None
            text = render(service, there, settings.limits, access, descriptors, zones=zones)
            self._files.write()
            write_private(self._folder / CONFIGURATION, text)
            write_private(self._folder / STICKY, f"{sticky_pattern(service)}\n")
            for name in SOCKETS:
                (self._folder / name).unlink(missing_ok=True)
            inherited = (descriptors.listener, descriptors.log, descriptors.errors)
            process = await HaproxyProcess.start(self.name, settings.program, self._folder, inherited)
            runtime, plug = RuntimeSocket(self._folder, SOCKET), Plug(self._folder)
            ended = asyncio.create_task(process.wait())
            try:
                if await self._is_started(runtime, process, ended):
                    members = Members(runtime, settings.limits, service, there)
                    self._running = _Running(process, runtime, members, Counters(), plug, service.hold_s, access.tls)
                    # HAProxy may have ended since. If it has not, outliers are found again, and `_tidy` fills the plug.
                    with contextlib.suppress(RuntimeSocketError):
                        await self.watch.started(members)
                        await plug.fill(runtime)
                if self._stopping:
                    process.stop()
            except BaseException:
                process.kill()
                raise
        try:
            code = await ended
            return None if self._running is not None and self._running.is_replaced else code
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            self._running = None
            plug.close()
            runtime.close()
            self.counts.read()

    async def _is_started(self, runtime: RuntimeSocket, process: HaproxyProcess, ended: "asyncio.Task[int]") -> bool:
        """Waits until HAProxy answers commands. Returns False if it has ended, or is killed because it does not."""
        deadline_s = time.monotonic() + _START_S
        while not ended.done():
            try:
                await runtime.ask("show version")
                return True
            except RuntimeSocketError:
                await asyncio.sleep(0.02)
            if time.monotonic() >= deadline_s:
                _log.warning("%s: HAProxy does not answer; it is killed", self.name)
                process.kill()
                break
        return False

    # ------------------------------------------------------------------------------------------------------ replicas

    async def _keep_current(self) -> None:
        """Fetches the list after each event, and at an interval."""
        while True:
            self._due.clear()
            await self._fetch()
            self._has_list.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFETCH_S):
                    await self._due.wait()

    async def _fetch(self) -> None:
        try:
            service, body = await self._api.service(self.name)
            pem = None
            if self._files.needs(service.certificate):
                name, pem = await self._api.certificate(self.name)
                if name != service.certificate:
                    raise InvalidList(f"certificate of service {self.name}: name: changed; it is fetched again")
            self._files.use(service.certificate, pem)
        except (httpx.HTTPError, InvalidList, ConfigurationError) as error:
            # An error says nothing about the replicas: the last list stays.
            problem = str(error) or type(error).__name__
            if problem != self._problem:
                _log.warning("%s: the last list of replicas stays: %s", self.name, problem)
            self._problem = problem
            return
        self._problem = ""
        self.fetched_s = time.monotonic()
        if service != self.service:
            ready = sum(one.state == "ready" for one in service.endpoints)
            _log.info("%s: version %d, ready replicas: %d", self.name, service.version, ready)
            self.service = service
            write_private(self._list, json.dumps(body))
            await self._apply()

    def _stored(self) -> Service | None:
        """Returns the list of the last run."""
        try:
            found = parse_service(self.name, json.loads(self._list.read_text()))
            if self._files.needs(found.certificate):
                raise InvalidList(f"certificate {found.certificate}: is missing")
            self._files.use(found.certificate)
            return found
        except FileNotFoundError:
            pass
        except (OSError, ValueError, InvalidList, ConfigurationError) as error:
            _log.warning("%s: %s is ignored: %s", self.name, self._list, error)
        return None

    def _effective(self) -> Service:
        return replace(self.service, policy=effective_policy(self.service, self._settings.clients))

    async def _seats(self) -> list[Seat]:
        hosts = {endpoint.address for endpoint in self.service.endpoints}
        self._addresses = {host: found for host in hosts if (found := await self._address(host)) is not None}
        return seats(self.service, self._addresses, self._settings.clients)

    async def _address(self, host: str) -> str | None:
        if is_ip(host):
            return host
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            _log.warning("%s: no address of replica %s: %s", self.name, host, error)
            return self._addresses.get(host)
        return str(found[0][4][0])

    async def _apply(self) -> None:
        async with self._lock:
            if self._running is None:
                return  # HAProxy will start with this list.
            self._is_applied = False
            try:
                await self._running.members.apply(self._effective(), await self._seats())
                self._is_applied = True
            except RuntimeSocketError as error:
                _log.warning("%s: %s", self.name, error)

    # -------------------------------------------------------------------------------------------------------- counts

    async def _read(self) -> None:
        """Reads counts, and how long requests have waited.

        While no replica is ready, it also reports the first request that waits, without delay.
        """
        was_waiting = False
        while True:
            await asyncio.sleep(READ_S)
            self.counts.read()
            if not any(one.state == "ready" for one in self.service.endpoints):
                await self._look(thorough=False)
            elif self.watch.is_followed:
                await self._look(thorough=True)
            is_waiting = self.watch.waiting > 0
            if is_waiting and not was_waiting:
                await self.reports.send(urgent=True)
            was_waiting = is_waiting

    async def _tick(self) -> None:
        """At the end of each second, closes its counts and removes drained servers."""
        sending: asyncio.Task[Any] | None = None
        while True:
            await asyncio.sleep(_TICK_S - time.time() % _TICK_S)
            await self._read_counters()
            self.counts.read()
            second = self._seconds.over(time.time())
            if second is not None:
                self.reports.add(self.counts.close(second, self.service.canary))
            if sending is None or sending.done():
                sending = asyncio.create_task(self.reports.send(urgent=self.watch.is_busy))
            await self._tidy()

    async def _watch(self) -> None:
        """Checks the replicas as soon as requests have failed."""
        while True:
            await self.watch.failures()
            await self._look(thorough=False)

    async def _look(self, *, thorough: bool) -> Rows | None:
        """Checks the replicas, and returns HAProxy's counters; None: HAProxy did not answer."""
        async with self._lock:
            running = self._running
            if running is None or running.is_finished:
                return None
            try:
                first_bytes_s = self.counts.take_first_bytes() if thorough else None
                return await self.watch.look(running.socket, running.members, self.service, first_bytes_s)
            except RuntimeSocketError as error:
                _log.warning("%s: %s", self.name, error)
                return None

    async def _read_counters(self) -> None:
        running, rows = self._running, await self._look(thorough=True)
        if running is None or rows is None:
            return
        self.counts.add(*running.counters.new(rows))
        if self._stopping and not running.counters.running:
            # HAProxy ends only when the connection to its runtime socket is closed too.
            running.is_finished = True
            running.plug.close()
            running.socket.close()

    async def _tidy(self) -> None:
        """Removes drained servers, and repeats changes that HAProxy did not accept."""
        running = self._running
        if self._stopping:
            return
        started_with = None if running is None else (running.hold_s, running.has_tls)
        wanted = self.service.hold_s, self._files.has_tls
        if running is not None and started_with != wanted and not running.counters.running:
            running.is_replaced = True
            running.plug.close()
            running.process.stop()
            running.socket.close()
            return
        if not self._is_applied:
            await self._apply()
        async with self._lock:
            if self._running is not None:
                try:
                    await self._running.members.remove_drained()
                    await self._files.refresh(self._running.socket)
                    await self._running.plug.fill(self._running.socket)
                except RuntimeSocketError as error:
                    _log.warning("%s: %s", self.name, error)
