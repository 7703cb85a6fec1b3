"""The client's part about capacity: pools, and the machines that were asked of providers for them."""

from collections.abc import Iterator
from typing import Any, TypedDict, cast

from mizzen.client.calls import Calls
from mizzen.client.views import Reason


class Pool(TypedDict):
    """How many machines of which offers there are to be, and how far it is from that."""

    region: str
    name: str
    size: int
    max_size: int | None
    """Up to so many it grows for what waits; None: it does not."""
    idle_s: float
    buffer: int
    """Of a pool that grows: so many machines without work there are to be for what comes next."""
    providers: list[str]
    """Whose offers it may take; empty: any. So are the following."""
    zones: list[str]
    kinds: list[str]
    machine_types: list[str]
    max_usd_per_h: float | None
    instances: dict[str, int]
    """How many there are by phase."""
    usd_per_h: float
    reason: Reason | None
    """Why it has fewer machines than its size or buffer, and none is launched now."""


class Instance(TypedDict):
    """One machine that was asked of a provider."""

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
    """What it has cost from its launch on."""
    phase: str
    """`requested`, `launching`, `joining`, `ready`, `draining` or `gone`."""
    reason: Reason | None
    ending: Reason | None
    """Why it is to end."""
    native_id: str | None
    wanted_by: list[str]
    """The workloads that wait for it."""
    machine: str | None
    requested_at: str
    expected_at: str | None
    launched_at: str | None
    ready_at: str | None
    gone_at: str | None


class Capacity(Calls):
    """Pools and instances."""

    def pools(self, region: str | None = None) -> list[Pool]:
        """The pools; of one region."""
        return cast(list[Pool], self._call("GET", "pools", params={"region": region})["items"])

    def set_pool(self, region: str, name: str, **settings: Any) -> Pool:
        """Make a pool, or change what is given of it: `size`, `max_size`, `idle_s`, `buffer`, `providers`, `zones`,
        `kinds`, `machine_types`, `max_usd_per_h` (operators).
        """
        return cast(Pool, self._call("PUT", "pools", region, name, body=settings))

    def remove_pool(self, region: str, name: str) -> None:
        """Forget a pool; its machines are drained and ended (operators)."""
        self._call("DELETE", "pools", region, name)

    def instances(
        self, region: str | None = None, pool: str | None = None, *, gone: bool = False
    ) -> Iterator[Instance]:
        """The machines that were asked of providers, the newest first; with `gone` also those of the past."""
        return self._pages("instances", {"region": region, "pool": pool, "gone": gone or None}, None)

    def end_instance(self, instance_id: str) -> Instance:
        """Drain a machine, then have its provider end it (operators)."""
        return cast(Instance, self._call("POST", "instances", instance_id, "end", body={}, idempotent=True))
