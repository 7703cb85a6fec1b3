"""The network of a lent machine: enforces rates of migrations, and the kill-switch for its owner.

With root and eBPF the kernel enforces both. Otherwise migrations are not shaped, and the agent only checks the flag of
the kill-switch itself; `MachineNetwork.why_not` is the reason.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.network.edge import Edge, KillSwitch, MigrationFlow, Sent
from agent.network.interface_programs import MEMORY_BYTES
from agent.network.shaping import LinkShare, Shaper
from domain.traffic import OVERHEAD_SHARE, TrafficClass

_log = logging.getLogger(__name__)


class MachineNetwork:
    """Enforces rates and the kill-switch on one interface. Close it at the end; it is also a context manager.

    `kill_switch` can be used in any thread. All other calls block for milliseconds and need the caller's own lock.
    """

    def __init__(self, interface: str | None, ports: Iterable[int], share: LinkShare) -> None:
        """Prepares the interface; None: the interface of the default route. The kill-switch closes `ports`.

        Logs once why the kernel cannot enforce anything, if it cannot.

        Raises:
            ValueError: one of the ports is invalid.
        """
        self._edge: Edge | None = None
        self._shaper: Shaper | None = None
        self.limits: Mapping[MigrationFlow, float] = {}
        """The rates that the kernel enforces now, in bytes on the wire per second; a new object after each change."""
        self.why_not: str | None = None
        """Why traffic is not isolated on this machine; None: it is."""
        try:
            self._edge = Edge(interface or default_interface(), ports)
            self.kill_switch = self._edge.kill_switch
        except OSError as error:
            self.kill_switch = KillSwitch(memoryview(bytearray(MEMORY_BYTES)), in_kernel=False)
            self._fall_back(error, "new connections are not dropped, and migrations are not shaped")
            return
        try:
            self._shaper = Shaper(self._edge, share)
        except OSError as error:
            self._fall_back(error, "migrations are not shaped")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def overhead_share(self) -> float:
        """Bytes of headers for each byte of payload, for the admission that computes rates."""
        return OVERHEAD_SHARE if self._shaper is None else self._shaper.overhead_share

    def apply(self, rates: Mapping[MigrationFlow, float], share: LinkShare | None = None) -> None:
        """Sets the rates of the migrations to `rates`, in bytes on the wire per second, and ends all other flows.

        With `share`, also changes how the bandwidth is divided. If the kernel refuses, nothing is shaped from then on,
        and `why_not` says why.

        Raises:
            ValueError: see `Shaper.apply`.
        """
        if self._shaper is not None:
            try:
                self._shaper.apply(rates, share)
            except OSError as error:
                self._shaper = None
                self._fall_back(error, "migrations are not shaped")
        enforced = {} if self._shaper is None else dict(rates)
        if enforced != self.limits:
            self.limits = enforced

    def sent(self, flow: MigrationFlow | None = None) -> Sent:
        """Returns the bytes sent by a flow; None: by all traffic without a flow. 0 without an eBPF program."""
        if self._edge is None:
            return Sent(0, 0, 0)
        if flow is None:
            return self._edge.sent()
        return Sent(0, 0, 0) if self._shaper is None else self._shaper.sent(flow)

    def received_bytes(self, traffic: TrafficClass) -> int:
        """Returns the received bytes whose DSCP is that of a class. 0 without an eBPF program."""
        return 0 if self._edge is None else self._edge.received_bytes(traffic)

    def close(self) -> None:
        """Leaves the interface as it was. Idempotent."""
        if self._shaper is not None:
            self._shaper.close()
        if self._edge is not None:
            self._edge.close()

    def _fall_back(self, error: OSError, effect: str) -> None:
        self.why_not = str(error)
        _log.warning("the network of this machine is not isolated: %s: %s", error, effect)


def default_interface() -> str:
    """Returns the interface of the default route.

    Raises:
        OSError: there is no default route.
    """
    for line in Path("/proc/thread-self/net/route").read_text().splitlines()[1:]:
        name, destination, *_, mask = line.split()[:8]
        if destination == mask == "00000000":
            return name
    for line in Path("/proc/thread-self/net/ipv6_route").read_text().splitlines():
        fields = line.split()
        if fields[0] == "0" * 32 and fields[1] == "00" and fields[9] != "lo":
            return fields[9]
    raise OSError("there is no default route: name the interface")
