"""An installation whose machines are jobs or pods of a cluster, all on this computer."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from agent.fleet import power_off
from tests.stack.harness import Up, wait_until

_CAPACITY = {"interval_s": 1, "refused_pause_s": 3, "drain_s": 60, "no_work_s": 20, "leave_s": 10}


class ClusterSite(ABC):
    """A stack, not started yet, and a cluster that runs."""

    def __init__(self, folder: Path, region: str, pool: str, fleet: str | None = None, lost_after_s: float = 600):
        """`lost_after_s`: when a machine that does not answer is ended."""
        self._region, self._pool = region, pool
        fleet = fleet or f"{{version: 1, regions: [{{name: {region}, clusters: []}}]}}"
        capacity = yaml.safe_dump({"capacity": {**_CAPACITY, "lost_after_s": lost_after_s}})
        self.up = Up(folder, fleet, settings=capacity)

    def add_provider(self, kind: str, settings: dict[str, Any], name: str = "site") -> None:
        """Adds a provider to the settings."""
        config = self.up.folder / "config.yaml"
        found = yaml.safe_load(config.read_text())
        found.setdefault("providers", {})[name] = {"kind": kind, **settings}
        config.write_text(yaml.safe_dump(found))

    @property
    def agent(self) -> str:
        """The command that starts an agent."""
        return f"{self.up.bin / 'mizzen'} agent --config {self.up.data}/run/agents.yaml"

    def start(self) -> None:
        """Starts the stack, with a tenant."""
        self.up.start(timeout_s=240)
        self.up.client().set_tenant("t", 3, {"a100": 16}, None)

    def pool(self, **rules: Any) -> None:
        """Sets the rules of the pool."""
        self.up.client().set_pool(self._region, self._pool, **rules)

    def why(self) -> str:
        """Returns why the pool cannot grow, or what does not work at its provider; empty: nothing."""
        (found,) = [one["reason"] for one in self.up.client().pools(self._region) if one["name"] == self._pool]
        return str(found["sentence"]) if found is not None else ""

    def instances(self, *, gone: bool = False) -> list[dict[str, Any]]:
        """Returns the instances, the newest first."""
        return list(self.up.client().instances(gone=gone))

    def until_ready(self, count: int, timeout_s: float = 90.0) -> list[dict[str, Any]]:
        """Waits until this many instances are ready; returns them."""
        wait_until(lambda: len(self._ready()) >= count, f"{count} machines are ready", timeout_s)
        return self._ready()

    def _ready(self) -> list[dict[str, Any]]:
        return [one for one in self.instances() if one["phase"] == "ready"]

    def ids(self) -> dict[str, str]:
        """Returns the provider's id of each live instance that has one."""
        return {one["id"]: one["native_id"] for one in self.instances() if one["native_id"]}

    def settled(self) -> bool:
        """Returns whether each live instance is ready and has its machine, and no other machine exists."""
        phases = {one["phase"] for one in self.instances()}
        return phases <= {"ready"} and sorted(self.ids().values()) == sorted(self.machines())

    @abstractmethod
    def machines(self) -> list[str]:
        """Returns the provider's ids of the jobs or pods that have not ended, as the cluster lists them."""

    @abstractmethod
    def ever(self) -> Counter[str]:
        """Returns how many jobs or started pods each instance has ever had, by its id."""

    @abstractmethod
    def secrets(self) -> list[str]:
        """Returns the secrets of machines that are left."""

    @abstractmethod
    def states(self) -> Iterator[Path]:
        """Yields the folders of the agents' states."""

    def close(self) -> None:
        """Ends the stack, and what tasks of machines left."""
        self.up.close()
        for folder in self.states():
            power_off(folder)
