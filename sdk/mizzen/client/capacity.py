"""The client's part about capacity: pools, and the machines that are requested from providers for them."""

from collections.abc import Iterator
from typing import Any, TypedDict, cast

from mizzen.client.calls import Calls
from mizzen.client.views import Reason


class Pool(TypedDict):
    """A pool: the wanted number of machines, the accepted offers, and the current machines by phase."""

    region: str
    name: str
    size: int
    max_size: int | None
    """Most machines to which the pool grows for waiting workloads; None: it does not grow."""
    idle_s: float
    buffer: int
    """The number of idle machines that a growing pool keeps ready for new workloads."""
    providers: list[str]
    """The providers whose offers are accepted; empty: all. The next three filters work likewise."""
    zones: list[str]
    kinds: list[str]
    machine_types: list[str]
    max_usd_per_h: float | None
    instances: dict[str, int]
    """Number of instances by phase."""
    usd_per_h: float
    reason: Reason | None
    """Why the pool has fewer machines than its size or buffer and launches none now."""


class Instance(TypedDict):
    """A machine that was requested from a provider."""

    id: str
    region: str
    pool: str
    cluster: str
    provider: str
    zone: str
    kind: str
    machine_type: str
    gpus: int
    gpu_type: str | None
    cpus: float
    memory_bytes: int
    usd_per_h: float
    usd: float
    """Its cost so far, in US dollars, since its launch."""
    phase: str
    """`requested`, `launching`, `joining`, `ready`, `draining` or `gone`."""
    reason: Reason | None
    ending: Reason | None
    """Why the machine is to be ended; None: it is not."""
    native_id: str | None
    wanted_by: list[str]
    """The workloads that wait for this machine."""
    machine: str | None
    requested_at: str
    expected_at: str | None
    launched_at: str | None
    ready_at: str | None
    gone_at: str | None


class Capacity(Calls):
    """The methods about pools and instances."""

    def pools(self, region: str | None = None) -> list[Pool]:
        """Return the pools of all regions, or of `region`."""
        return cast(list[Pool], self._call("GET", "pools", params={"region": region})["items"])

    def set_pool(self, region: str, name: str, **settings: Any) -> Pool:
        """Create a pool, or change the given settings of a pool (operators).

        The settings are `size`, `max_size`, `idle_s`, `buffer`, `providers`, `zones`, `kinds`, `machine_types` and
        `max_usd_per_h`.
        """
        return cast(Pool, self._call("PUT", "pools", region, name, body=settings))

    def remove_pool(self, region: str, name: str) -> None:
        """Remove a pool; its machines are drained and ended (operators)."""
        self._call("DELETE", "pools", region, name)

    def instances(
        self, region: str | None = None, pool: str | None = None, *, gone: bool = False
    ) -> Iterator[Instance]:
        """Return the machines requested from providers, newest first. `gone` includes machines that are gone."""
        return self._pages("instances", {"region": region, "pool": pool, "gone": gone or None}, None)

    def end_instance(self, instance_id: str) -> Instance:
        """Drain a machine, then end it at its provider (operators)."""
        return cast(Instance, self._call("POST", "instances", instance_id, "end", body={}, idempotent=True))
