"""Rates of migration flows on a network interface, by an HTB qdisc (P3, section VII of ReclaimNet).

    root class              the link
    |-- research            at least the link minus the migration share, and all bandwidth that is unused
    `-- migration           at most the migration share
        |-- flow            exactly its rate
        `-- ...

The qdisc exists only while there are flows. It replaces only the qdisc that the kernel installs by itself; if
another program has configured one, the shaper refuses. The egress program (`agent/network/interface_programs.py`) puts
packets into the classes. A guardian process removes the qdisc if this process ends without doing so.

Rates are bytes on the wire per second. `Shaper.overhead_share` says how many of them are headers: an admission that
starts from the sizes of checkpoints must add them.
"""

import contextlib
import fcntl
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from agent.network import guardian
from agent.network.edge import Edge, MigrationFlow, Sent
from agent.network.guardian import HANDLE, READY, remove_shaping
from agent.network.interface_programs import FLOWS
from domain.traffic import OVERHEAD_SHARE

_FOLDER = Path("/run")
PATIENCE_S = 5.0
_RETRY_S = 0.02


def lock_interface(interface: str, index: int) -> tuple[int, Path]:
    """Locks an interface of this network namespace; returns the descriptor that holds the lock, and the lock's file.

    The lock is held until every copy of the descriptor is closed. Waits, because after the end of an agent its guardian
    still restores the interface.

    Raises:
        OSError: another process holds the lock, or this process is not root.
    """
    namespace = Path("/proc/thread-self/ns/net").stat().st_ino
    path = _FOLDER / f"mizzen-shaping-{namespace}-{index}"
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor, path
            os.close(descriptor)  # The last holder removed the file in between.
        except OSError:
            os.close(descriptor)
            if time.monotonic() > give_up_s:
                raise OSError(f"interface {interface}: another process of mizzen shapes its traffic") from None
            time.sleep(_RETRY_S)


def unlock_interface(descriptor: int, path: Path) -> None:
    """Removes the file and closes this process's copy of the descriptor."""
    path.unlink(missing_ok=True)
    os.close(descriptor)


_MARGIN = 0.01
_ENOUGH_BYTES = 1 << 23
"""Payload after which the measured overhead is used."""
_LINK, _RESEARCH, _MIGRATION, _FIRST_FLOW = 1, 2, 3, 0x10
"""Minor numbers of the classes; flow number n has the class `_FIRST_FLOW + n`."""
_QUANTUM_BYTES = 60_000
BURST_S = 0.01
"""Burst of a class after a pause, in seconds of its rate. It compensates for late timers of a busy computer, and
in any time T all migrations together send at most the migration share of T + `BURST_S`."""
_BURST_BYTES = 3200
"""At least two packets."""
_SLOWEST_BYTES_S = 1000
"""Minimum rate: HTB cannot represent the duration of a burst at much lower rates."""
_ROUNDING = 1e-6
_ROOT = 0xFFFFFFFF


@dataclass(frozen=True)
class LinkShare:
    """How the bandwidth of the interface's bottleneck is divided, in bytes on the wire per second."""

    link_bytes_s: float
    """B: the bandwidth of the bottleneck."""
    migration_bytes_s: float
    """B_mig: maximum bandwidth of all migrations together. The rest, B_res, is reserved for research traffic."""

    def __post_init__(self) -> None:
        """Checks the values."""
        if not 0 < self.migration_bytes_s < self.link_bytes_s < math.inf:
            raise ValueError(
                f"migration_bytes_s {self.migration_bytes_s:g}: must be greater than 0 and less than link_bytes_s,"
                f" {self.link_bytes_s:g}"
            )


@dataclass
class _Class:
    number: int
    rate_bytes_s: float
    before: Sent
    """The flow's counters when it began."""


class Shaper:
    """The HTB classes of one interface. Not thread-safe. Calls block for milliseconds: use a thread in asyncio code."""

    def __init__(self, edge: Edge, share: LinkShare) -> None:
        """Removes the qdisc that a killed agent and its guardian may have left on the interface.

        Raises:
            OSError: another process shapes the interface, or this process is not root.
        """
        self._edge = edge
        self._share = share
        self._index = socket.if_nametoindex(edge.interface)
        self._classes: dict[MigrationFlow, _Class] = {}
        self._guardian: subprocess.Popen[bytes] | None = None
        self._lock: tuple[int, Path] | None = None
        self.overhead_share = OVERHEAD_SHARE
        """Bytes of headers for each byte of payload, with a margin, as measured until the last `apply`."""
        descriptor, path = lock_interface(edge.interface, self._index)
        try:
            remove_shaping(self._index)
        finally:
            unlock_interface(descriptor, path)

    def apply(self, rates: Mapping[MigrationFlow, float], share: LinkShare | None = None) -> None:
        """Sets the rates of the migrations to `rates`, in bytes on the wire per second, and ends all other flows.

        With `share`, also changes how the bandwidth is divided. Without flows the qdisc is removed. If the call fails,
        the shaping is removed.

        Raises:
            ValueError: a rate is less than 1,000 bytes/s, there are too many flows, or the sum exceeds the migration
                share.
            OSError: another program has configured a qdisc for this interface, or the kernel refused a change.
        """
        new = share or self._share
        self._check(rates, new)
        try:
            with self._netlink() as netlink:
                if rates:
                    self._install(netlink, new)
                self._share = new
                for flow in self._classes.keys() - rates.keys():
                    self._end(netlink, flow)
                for flow, rate_bytes_s in rates.items():
                    self._set(netlink, flow, rate_bytes_s)
        except BaseException:
            self.close()
            raise
        if not rates:
            self.close()
        self._measure()

    def sent(self, flow: MigrationFlow) -> Sent:
        """Returns the bytes that a flow has sent since `apply` first got it. Costs no system call.

        Raises:
            KeyError: there is no such flow.
        """
        entry = self._classes[flow]
        now, before = self._edge.sent(entry.number), entry.before
        return Sent(
            now.wire_bytes - before.wire_bytes,
            now.payload_bytes - before.payload_bytes,
            now.packets - before.packets,
        )

    def close(self) -> None:
        """Removes the qdisc and ends all flows. Idempotent."""
        for flow in self._classes:
            with contextlib.suppress(OSError):  # Removing the qdisc is more important.
                self._edge.drop(flow)
        self._classes.clear()
        if self._lock is not None:
            remove_shaping(self._index)
        if self._guardian is not None:
            self._guardian.communicate(b".")
            self._guardian = None
        if self._lock is not None:
            unlock_interface(*self._lock)
            self._lock = None

    def _check(self, rates: Mapping[MigrationFlow, float], share: LinkShare) -> None:
        for flow, rate_bytes_s in rates.items():
            if not _SLOWEST_BYTES_S <= rate_bytes_s < math.inf:
                raise ValueError(
                    f"rate {rate_bytes_s:g} of flow {flow.name}: must be at least {_SLOWEST_BYTES_S} bytes/s"
                )
        if len(rates) >= FLOWS:
            raise ValueError(f"{len(rates)} flows: must be at most {FLOWS - 1}")
        if sum(rates.values()) > share.migration_bytes_s * (1 + _ROUNDING):
            raise ValueError(
                f"the rates of {len(rates)} flows: their sum, {sum(rates.values()):.0f} bytes/s, must be at most the"
                f" migration share, {share.migration_bytes_s:.0f} bytes/s"
            )

    def _install(self, netlink: IPRoute, share: LinkShare) -> None:
        """Installs the qdisc and the classes above the flows, or changes them to `share`; starts the guardian."""
        if self._lock is None:
            self._lock = lock_interface(self._edge.interface, self._index)
        root = next((q for q in netlink.get_qdiscs(index=self._index) if q["parent"] == _ROOT), None)
        if root is not None and root["handle"] not in (0, HANDLE):
            raise OSError(
                f"interface {self._edge.interface}: its qdisc {root.get_attr('TCA_KIND')} was configured by another"
                " program and is not replaced; remove it with `tc qdisc del` to let mizzen shape migrations"
            )
        if self._guardian is None or self._guardian.poll() is not None:
            self._guardian = self._guard(*self._lock)
        if root is None or root["handle"] != HANDLE:
            netlink.tc("add", "htb", self._index, HANDLE, default=_RESEARCH)
        elif share == self._share:
            return
        link, migration = share.link_bytes_s, share.migration_bytes_s
        self._class(netlink, _LINK, HANDLE, link, link)
        self._class(netlink, _RESEARCH, HANDLE | _LINK, link - migration, link)
        self._class(netlink, _MIGRATION, HANDLE | _LINK, migration, migration)

    def _end(self, netlink: IPRoute, flow: MigrationFlow) -> None:
        self._edge.drop(flow)
        # pyroute2 computes the parameters of a class also to delete it, and needs a rate.
        class_id = self._class_id(self._classes.pop(flow).number)
        netlink.tc("del-class", "htb", self._index, class_id, rate=_SLOWEST_BYTES_S)

    def _set(self, netlink: IPRoute, flow: MigrationFlow, rate_bytes_s: float) -> None:
        entry = self._classes.get(flow)
        if entry is not None and entry.rate_bytes_s == rate_bytes_s:
            return
        if entry is None:
            used = {one.number for one in self._classes.values()}
            number = next(n for n in range(1, FLOWS) if n not in used)
            entry = _Class(number, rate_bytes_s, self._edge.sent(number))
        self._class(netlink, _FIRST_FLOW + entry.number, HANDLE | _MIGRATION, rate_bytes_s, rate_bytes_s)
        entry.rate_bytes_s = rate_bytes_s
        if flow not in self._classes:
            self._edge.add(flow, entry.number, self._class_id(entry.number))
            self._classes[flow] = entry

    def _class(self, netlink: IPRoute, minor: int, parent: int, rate_bytes_s: float, ceil_bytes_s: float) -> None:
        rate, ceil = (max(_SLOWEST_BYTES_S, round(value)) for value in (rate_bytes_s, ceil_bytes_s))
        netlink.tc(
            "replace-class",
            "htb",
            self._index,
            HANDLE | minor,
            parent=parent,
            rate=rate,
            ceil=ceil,
            burst=max(_BURST_BYTES, round(rate * BURST_S)),
            cburst=max(_BURST_BYTES, round(ceil * BURST_S)),
            quantum=_QUANTUM_BYTES,
        )

    def _class_id(self, number: int) -> int:
        return HANDLE | _FIRST_FLOW + number

    def _measure(self) -> None:
        """Updates the overhead from all flows since the programs were attached."""
        counters = [self._edge.sent(number) for number in range(1, FLOWS)]
        payload = sum(c.payload_bytes for c in counters)
        if payload >= _ENOUGH_BYTES:
            measured = sum(c.wire_bytes for c in counters) / payload - 1
            self.overhead_share = max(OVERHEAD_SHARE, measured + _MARGIN)

    def _guard(self, lock: int, path: Path) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-I", "-S", "-E", guardian.__file__, str(self._index), str(os.getpid()), str(path)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(lock,),
            start_new_session=True,
            cwd="/",
            env={},
        )
        assert process.stdout is not None
        if process.stdout.read(1) != READY:
            process.communicate()
            raise OSError(f"interface {self._edge.interface}: the process that restores it cannot start")
        return process

    @contextlib.contextmanager
    def _netlink(self) -> Any:
        try:
            with IPRoute() as netlink:
                yield netlink
        except NetlinkError as error:
            raise OSError(error.code, f"interface {self._edge.interface}: {error}") from None
