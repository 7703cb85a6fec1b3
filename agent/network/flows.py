"""Migration flows: which packets belong to one, and the class of its traffic (P3, section VII of ReclaimNet)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agent.network.programs import FLOW_KEY, MARKED
from domain.traffic import TrafficClass


@dataclass(frozen=True)
class MigrationFlow:
    """The traffic of one migration that leaves this machine."""

    name: str
    """Name in messages, for example the id of the run."""
    traffic: TrafficClass
    key: bytes
    """The key of the flow in the table of the egress program."""

    @classmethod
    def of_cgroup(cls, name: str, traffic: TrafficClass, path: Path | str) -> Self:
        """Returns the flow of all sockets that processes of the cgroup v2 at `path` create; not of child cgroups.

        A task cannot leave its cgroup, so a task cannot change its class.

        Raises:
            OSError: the cgroup does not exist.
        """
        return cls(name, _migration(traffic), FLOW_KEY.pack(Path(path).stat().st_ino))

    @classmethod
    def of_mark(cls, name: str, traffic: TrafficClass, mark: int) -> Self:
        """Returns the flow of the sockets with this mark (`SO_MARK`), which only root can set: for tests and benches.

        Raises:
            ValueError: `mark` is not a positive number of 32 bits.
        """
        if not 0 < mark < 1 << 32:
            raise ValueError(f"mark {mark}: must be within 1 to {(1 << 32) - 1}")
        return cls(name, _migration(traffic), FLOW_KEY.pack(mark | MARKED))


def _migration(traffic: TrafficClass) -> TrafficClass:
    if traffic is TrafficClass.RESEARCH:
        raise ValueError(f"traffic {traffic.value!r}: research traffic has no flow; use another class")
    return traffic
