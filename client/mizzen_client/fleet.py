"""The client's part about the fleet: regions, clusters and their costs, machines, pools and their instances."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from mizzen_client import views
from mizzen_client.calls import Calls
from mizzen_client.errors import UnknownReference


class FleetMethods(Calls):
    """The methods about regions, clusters, machines, pools and instances."""

    def regions(self) -> list[views.Region]:
        """Return the regions."""
        return list(self._pages("regions", {}, None))

    def snapshot(self) -> Mapping[str, Any]:
        """Return a snapshot of the fleet, tenants and live workloads, as input of `mizzen simulate --from-live`."""
        return cast(Mapping[str, Any], self._call("GET", "snapshot"))

    def clusters(self, region: str | None = None) -> list[views.Cluster]:
        """Return the clusters of all regions, or of `region`."""
        return list(self._pages("clusters", {"region": region}, None))

    def set_cluster(self, region: str, name: str, **settings: Any) -> views.Cluster:
        """Set `zone`, `capacity`, `prices`, `store_url` or `link_mbit` of a cluster; others are kept (operators)."""
        return cast(views.Cluster, self._call("PATCH", "clusters", region, name, body=settings))

    def costs(self, first: str | None = None, last: str | None = None, tenant: str | None = None) -> list[views.Cost]:
        """Return costs by day, tenant, capacity kind and resource, from day `first` to `last` (UTC, `YYYY-MM-DD`)."""
        answer = self._call("GET", "costs", params={"from": first, "to": last, "tenant": tenant})
        return cast(list[views.Cost], answer["items"])

    def loops(self) -> list[views.Loop]:
        """Return the periodic loops of the installation, and how their last rounds ended (operators)."""
        return cast(list[views.Loop], self._call("GET", "loops")["items"])

    def machines(self, region: str | None = None, cluster: str | None = None) -> list[views.Machine]:
        """Return the machines, optionally only those of `region` or `cluster`."""
        return list(self._pages("machines", {"region": region, "cluster": cluster}, None))

    def machine(self, machine_id: str) -> views.MachineDetail:
        """Return a machine, with the workloads on it, by its id `region/cluster/machine`."""
        return cast(views.MachineDetail, self._call("GET", "machines", *_machine(machine_id)))

    def machine_lending(self, machine_id: str) -> views.Lending:
        """Return the workloads on a lent machine (`region/cluster/machine`) and the GPU hours that it has given."""
        return cast(views.Lending, self._call("GET", "machines", *_machine(machine_id), "lending"))

    def set_machine(self, machine_id: str, action: str, reason: str | None = None) -> views.MachineDetail:
        """Apply `action` (`cordon`, `uncordon`, `drain` or `undrain`) to a machine (operators)."""
        body = {"reason": reason} if reason else {}
        answer = self._call("POST", "machines", *_machine(machine_id), action, body=body, idempotent=True)
        return cast(views.MachineDetail, answer)

    def remove_machine(self, machine_id: str) -> None:
        """Remove a machine that is drained or lost and on which no workload holds resources (operators)."""
        self._call("DELETE", "machines", *machine_id.split("/"))

    def remove_region(self, name: str) -> None:
        """Remove a region that has no machines, data or placed workloads (operators)."""
        self._call("DELETE", "regions", name)

    def trust_machine(self, machine_id: str, key: str | None = None) -> views.MachineDetail:
        """Trust the new public key that a machine presents (operators); with `key`, only if it has this fingerprint."""
        body = {"key": key} if key else {}
        answer = self._call("POST", "machines", *machine_id.split("/"), "trust", body=body, idempotent=True)
        return cast(views.MachineDetail, answer)

    def pilots(self, tenant: str | None = None) -> list[views.Pilot]:
        """Return a tenant's pilots, the machines that it contributes; None: the tenant of the API key."""
        return list(self._call("GET", "pilots", params={"tenant": tenant})["items"])

    def add_pilot(self, region: str, name: str, expires_in_s: int, tenant: str | None = None) -> views.NewPilot:
        """Create the key with which an agent joins as a machine of a tenant, valid for `expires_in_s`."""
        options = {"params": {"tenant": tenant}, "body": {"expires_in_s": expires_in_s}}
        return cast(views.NewPilot, self._call("PUT", "pilots", region, name, **options))

    def stop_pilot(self, region: str, name: str, tenant: str | None = None) -> None:
        """Expire the key of a pilot: in ten minutes if its agent has joined, else at once."""
        self._call("DELETE", "pilots", region, name, params={"tenant": tenant})

    def pools(self, region: str | None = None) -> list[views.Pool]:
        """Return the pools of all regions, or of `region`."""
        return cast(list[views.Pool], self._call("GET", "pools", params={"region": region})["items"])

    def set_pool(self, region: str, name: str, **settings: Any) -> views.Pool:
        """Create a pool, or change the given settings of a pool (operators).

        The settings are `size`, `max_size`, `idle_s`, `buffer`, `providers`, `zones`, `kinds`, `machine_types`,
        `max_usd_per_h`, `tenants`, `gpus`, `failure_buffer`, `survives_loss` and `max_share`.
        """
        return cast(views.Pool, self._call("PUT", "pools", region, name, body=settings))

    def pool_plan(self, region: str) -> views.PoolPlan:
        """Return the newest plan of the pools of a region (operators)."""
        return cast(views.PoolPlan, self._call("GET", "regions", region, "pool-plan"))

    def remove_pool(self, region: str, name: str) -> None:
        """Remove a pool; its machines are drained and ended (operators)."""
        self._call("DELETE", "pools", region, name)

    def instances(
        self, region: str | None = None, pool: str | None = None, *, gone: bool = False
    ) -> Iterator[views.Instance]:
        """Return the machines requested from providers, newest first. `gone` includes machines that are gone."""
        return self._pages("instances", {"region": region, "pool": pool, "gone": gone or None}, None)

    def end_instance(self, instance_id: str) -> views.Instance:
        """Drain a machine, then end it at its provider (operators)."""
        return cast(views.Instance, self._call("POST", "instances", instance_id, "end", body={}, idempotent=True))


def _machine(machine_id: str) -> list[str]:
    parts = machine_id.split("/")
    if len(parts) != 3 or not all(parts):
        right = "a machine's id has the form region/cluster/machine; `mizzen machines` lists them"
        raise UnknownReference(f"there is no machine {machine_id!r}: {right}")
    return parts
