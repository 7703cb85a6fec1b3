"""Where the replicas of a service stand in HAProxy's configuration. Pure.

There is one backend for each policy, and two for `least_load`: `near` has the replicas in the clients' zone, `far` the
others. A change of the policy therefore only adds servers to another backend and switches a variable. In both backends
of `least_load` the replicas of the other one are backup servers, so that a request whose last near replica has died is
retried on a far one.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from proxies.balance.values import Policy, RegionZone, Service

BACKENDS = {"round_robin": "roundrobin", "least_connections": "leastconn", "near": "leastconn", "far": "leastconn"}
"""HAProxy's balancing algorithm for each backend."""
ZONE_BACKENDS = frozenset({"near", "far"})
_FULL_WEIGHT, _OTHER_REGION_WEIGHT = 100, 25
"""A busy far replica in another region gets a quarter of the requests of one in the clients' region."""


@dataclass(frozen=True)
class Seat:
    """One server line of one backend."""

    backend: str
    name: str
    """Includes the address, because a replica that moves must be another server while the old one is drained."""
    address: str
    """`host:port`."""
    weight: int = _FULL_WEIGHT
    is_backup: bool = False

    @property
    def path(self) -> str:
        """The name of the server in commands."""
        return f"{self.backend}/{self.name}"


def seats(service: Service, addresses: Mapping[str, str], clients: RegionZone | None) -> list[Seat]:
    """Returns the seats of all ready replicas.

    Args:
        service: the list of replicas.
        addresses: the IP address of each host. A replica whose host is not in it gets no seat.
        clients: the zone of the clients; None: unknown, then `least_load` is the same as `least_connections`.
    """
    found = []
    for endpoint in service.endpoints:
        if endpoint.state != "ready" or endpoint.address not in addresses:
            continue
        address = _with_port(addresses[endpoint.address], endpoint.port)
        name = f"{endpoint.replica}-{address}".replace("[", "").replace("]", "")
        if service.policy != "least_load" or clients is None:
            found.append(Seat(effective_policy(service, clients), name, address))
            continue
        is_near = endpoint.zone == clients
        weight = _FULL_WEIGHT if endpoint.zone.region == clients.region else _OTHER_REGION_WEIGHT
        found.append(Seat("near", name, address, weight, is_backup=not is_near))
        found.append(Seat("far", name, address, weight, is_backup=is_near))
    return found


def effective_policy(service: Service, clients: RegionZone | None) -> Policy:
    """Returns the policy that HAProxy applies. Without a zone of the clients no replica is nearer than another."""
    return "least_connections" if service.policy == "least_load" and clients is None else service.policy


def _with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ipaddress.ip_address(address).version == 6 else f"{address}:{port}"
