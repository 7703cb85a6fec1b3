"""The client's part about capacity: pools, and the machines that are requested from providers for them."""

from collections.abc import Iterator
from typing import Any, cast

from mizzen.client.calls import Calls
from mizzen.client.views import Instance, Pool


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
