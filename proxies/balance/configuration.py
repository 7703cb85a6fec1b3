"""The text of HAProxy's configuration for one service.

Everything that can change while HAProxy runs is a server, or a variable `proc.*`. So HAProxy is never reloaded. The
file contains the servers and values at the time of the start, so that a restarted HAProxy has them at once.

There is one backend for each policy, one for the replicas of a canary, and two for `least_load`: `near` has the
replicas in the clients' zone, `far` the others. A change of the policy therefore only adds servers to another backend
and switches a variable. In both backends of `least_load` the replicas of the other one are backup servers, so that a
request whose last near replica has died is retried on a far one.
"""

import ipaddress
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxies.balance.values import PREFIXES_BYTES, Policy, RegionZone, Service

BACKENDS = {
    "round_robin": "roundrobin", "least_connections": "leastconn", "near": "leastconn", "far": "leastconn",
    "canary": "leastconn", "hold": "leastconn", "sticky": "hash var(txn.key)",
}  # fmt: skip
"""HAProxy's balancing algorithm for each backend. Requests that arrive while no replica is up wait in `hold`, and those
with a key (`Service.sticky_header`) go to `sticky`."""
_PARTS = 1_000_000
"""Resolution of a canary's share of the requests."""
ZONE_BACKENDS = frozenset({"near", "far"})
_IDS = 2**31 - 1
_FULL_WEIGHT, _OTHER_REGION_WEIGHT = 100, 25
"""With `least_load`, a far replica in another region gets a quarter of the requests of one in the clients' region."""


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
        found.append(Seat("hold", name, address))
        if endpoint.is_canary:
            found.append(Seat("canary", name, address))
            continue
        if service.is_sticky:
            is_far = service.policy == "least_load" and clients is not None and endpoint.zone != clients
            found.append(Seat("sticky", name, address, is_backup=is_far))
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


SOCKET = "haproxy.sock"
"""The runtime socket, in the working folder of HAProxy: an absolute path can be too long for a socket."""
PLUG, PLUG_SOCKET, _PLUGGED_SOCKET = "plug", "plug.sock", "plugged.sock"
"""The server of the backend `hold` that is always up and full, so that HAProxy queues requests there instead of
refusing them. The supervisor occupies its only place with a request to `PLUG_SOCKET`."""
SOCKETS = SOCKET, PLUG_SOCKET, _PLUGGED_SOCKET
STICKY = "sticky.map"
"""A regular expression that finds the key in the lines of a request's header, in the same folder. It is the only entry
of the map, because the name of a header cannot be a variable."""
_MOST_BALANCED_PERCENT = 150
"""A replica gets requests by their keys while it has at most this part of the mean number of requests."""
KEYS = "keys.map"
"""The hashes of the admitted keys with their owners, in the same folder."""
CERTIFICATE = "certificate.pem"
"""The certificate and its private key, in the same folder."""
REPLICA_HEADER = "Mizzen-Replica"
"""Response header with the number of the replica, for services whose streams can be resumed."""
RETRY_AFTER_S = 2
"""Value of `Retry-After` in responses with status 503."""
RETRIED_BODY_BYTES = 14_000
"""Requests with larger bodies are not retried once a replica has got them. HAProxy's buffer has 16 KiB, minus 1 KiB of
reserve, and also has to hold the headers."""
CHECK = "check inter 500ms fastinter 100ms downinter 500ms fall 2 rise 1"
"""Connects to each replica twice a second. A replica that refuses is skipped after two failures."""
_OBSERVED = "observe layer4 error-limit 1 on-error fail-check"
"""A failed connection of a request counts as a failed check."""
_TEXT = "content-type text/plain"
LOG_FORMAT = "%ST %ts %Ta %rc %[var(txn.canary)] %s %Tr"
"""Status, termination state, total time in milliseconds, retries, `1` if the request went to the canary and else `-`,
server, time to the first byte of its answer in milliseconds; with keys also the owner of the key."""


# A tunnel may be silent for long. The client's timeout ends a stalled upload, not a pause of the answer; the server's
# timeout ends a stalled request. Keepalive finds a machine that vanished without closing its connections. Without
# `linger`, a check would reset its connection, and servers such as Python's http.server log an error for each reset.
_DEFAULTS = """\
defaults
  mode http
  timeout http-request 15s
  timeout http-keep-alive 60s
  timeout client 60s
  timeout connect 2s
  timeout server 1h
  timeout tunnel 1h
  timeout client-fin 10s
  timeout queue 30s
  option http-keep-alive
  option http-no-delay
  option abortonclose
  http-reuse safe
  option srvtcpka
  srvtcpka-idle 5s
  srvtcpka-intvl 1s
  srvtcpka-cnt 3
  option clitcpka
  option tcp-check
  tcp-check connect linger
  retries 3
  option redispatch 1
  retry-on conn-failure empty-response 500 502 503
"""


@dataclass(frozen=True)
class Descriptors:
    """File descriptors that HAProxy inherits."""

    listener: int
    log: int
    errors: int
    """Gets the lines of failed and repeated requests only, so that its reader wakes up for them."""


@dataclass(frozen=True)
class ProxyLimits:
    """Limits of one HAProxy process."""

    connections: int
    """Maximum number of client connections."""
    concurrency: int
    """Maximum number of concurrent requests of one replica. Further requests wait in the queue."""
    overload: int
    """Number of concurrent requests per near replica at which `least_load` also uses far replicas."""
    threads: int
    stop_s: float
    """The time for which requests may finish after a stop."""


@dataclass(frozen=True)
class Access:
    """Which clients are admitted, and how."""

    tls: bool = False
    """Whether clients must use TLS, with the certificate in the file `CERTIFICATE`."""
    needs_key: bool = False
    """Whether clients must send a key whose SHA-256 is in the file `KEYS`."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks, in CIDR notation, of proxies before the balancer whose headers about the client are kept."""


def server_line(seat: Seat, limits: ProxyLimits) -> str:
    """Returns the address and the parameters of a server, for the configuration and for the command `add server`."""
    backup = " backup" if seat.is_backup else ""
    pool = "pool-purge-delay 1s"  # A server can be deleted only if it has no idle connection.
    # Keys are distributed by the ids of servers: so all balancers send a key to the same replica, also after a restart.
    own_id = f" id {zlib.crc32(seat.name.encode()) % _IDS + 1}" if seat.backend == "sticky" else ""
    parameters = f"weight {seat.weight} maxconn {limits.concurrency}{backup}{own_id}"
    return f"{seat.address} {parameters} {pool} {CHECK} {_OBSERVED}"


def sticky_pattern(service: Service) -> str:
    """Returns the key and the value of the only entry of the map `STICKY`; empty: requests have no key in a header."""
    if service.sticky_header is None:
        return ""
    return f"(^|[[:cntrl:]]){service.sticky_header.lower()}:[[:space:]]*([^[:cntrl:]]+) \\2"


def variables(service: Service) -> dict[str, str]:
    """Returns the variables of a service with their values as HAProxy's expressions."""
    return {
        "proc.policy": f"str({service.policy})",
        "proc.max_queue": f"int({service.max_queue})",
        "proc.hold": f"bool({str(service.hold_s > 0 and service.max_queue > 0).lower()})",
        "proc.timeout_ms": f"int({max(1, round(service.request_timeout_s * 1000))})",
        "proc.retries_all": f"int({int(service.retry_non_idempotent)})",
        "proc.canary": f"int({round(_PARTS * service.canary.share) if service.canary is not None else 0})",
        "proc.resume": f"int({int(service.resume)})",
        "proc.key_header": f"int({int(service.sticky_header is not None)})",
        "proc.key_bytes": f"int({service.sticky_prefix_bytes or 0})",
    }


def render(
    service: Service,
    seats: Iterable[Seat],
    limits: ProxyLimits,
    access: Access,
    descriptors: Descriptors,
    *,
    zones: bool,
) -> str:
    """Returns the configuration of the HAProxy process for one service. With `zones`, `least_load` is possible."""
    by_backend: dict[str, list[Seat]] = {name: [] for name in BACKENDS if zones or name not in ZONE_BACKENDS}
    for seat in seats:
        by_backend[seat.backend].append(seat)
    parts = [
        _global(service, limits),
        _DEFAULTS,
        _frontend(access, descriptors, limits, zones, holds=service.hold_s > 0),
        *(_backend(name, there, limits, service.hold_s) for name, there in by_backend.items()),
        _PLUG,
    ]
    return "\n".join(parts)


def _global(service: Service, limits: ProxyLimits) -> str:
    settings = "\n".join(f"  set-var {name} {value}" for name, value in variables(service).items())
    return f"""\
global
  maxconn {limits.connections}
  nbthread {limits.threads}
  hard-stop-after {max(1, round(limits.stop_s * 1000))}ms
  stats socket unix@{SOCKET} mode 600 level admin
  stats timeout 1d
  tune.http.maxhdr 128
{settings}
"""


def _frontend(access: Access, descriptors: Descriptors, limits: ProxyLimits, zones: bool, *, holds: bool) -> str:
    tls = f" ssl crt {CERTIFICATE} alpn h2,http/1.1 ssl-min-ver TLSv1.2" if access.tls else ""
    scheme = "https" if access.tls else "http"
    owner = " %[var(txn.owner)]" if access.needs_key else ""
    lines = [
        "frontend service",
        f"  bind fd@{descriptors.listener}{tls}",
        f"  log fd@{descriptors.log} format raw local0",
        f"  log fd@{descriptors.errors} format raw local0 err",
        "  option log-separate-errors",
        f'  log-format "{LOG_FORMAT}{owner}"',
        *(_UNTIL_PLUGGED if holds else ()),
        *_forwarding(scheme, access.trusted_proxies),
        *_keys(),
    ]
    if access.needs_key:
        refused = '"the API key is missing or unknown\\n"'
        key = "req.fhdr(Authorization),regsub(^[Bb]earer\\ +,),sha2(256),hex,lower"
        lines += [
            f"  http-request set-var(txn.owner) {key},map_str({KEYS})",
            "  acl admitted var(txn.owner) -m found",
            f"  http-request deny deny_status 401 {_TEXT} hdr WWW-Authenticate Bearer string {refused} unless admitted",
            # A replica could collect the keys of its clients.
            "  http-request del-header Authorization",
            "  http-request del-header Proxy-Authorization",
        ]
    lines += [
        "  acl held var(proc.hold) -m bool",
        "  acl held nbsrv(canary) gt 0",  # The replicas of a canary are also in `hold`, and then serve all requests.
        f"  acl drawn rand({_PARTS}),sub(proc.canary) lt 0",
        "  http-request set-var(txn.canary) int(1) if drawn { nbsrv(canary) gt 0 }",
        "  use_backend canary if { var(txn.canary) -m found }",
    ]
    if zones:
        # The load of a backend is the number of its requests for each of its servers; without servers it is infinite.
        spill = f"{{ var(txn.near),sub(txn.far) gt 0 }} {{ var(txn.near) -m int ge {limits.overload} }}"
        lines += [
            "  acl by_load var(proc.policy) -m str least_load",
            "  http-request set-var(txn.near_servers) nbsrv(near) if by_load",
            "  http-request set-var(txn.far_servers) nbsrv(far) if by_load",
            "  http-request set-var(txn.keyed) be_conn(sticky) if by_load",  # Nearly all of them are near.
            "  http-request set-var(txn.near) be_conn(near),add(txn.keyed),div(txn.near_servers) if by_load",
            "  http-request set-var(txn.far) be_conn(far),div(txn.far_servers) if by_load",
            "  use_backend hold if by_load held { nbsrv(near) eq 0 }",  # The same replicas are in both backends.
            f"  use_backend far if by_load {spill}",
        ]
    lines += [
        "  use_backend hold if keyed held { nbsrv(sticky) eq 0 }",
        "  use_backend sticky if keyed",
        *(["  use_backend near if by_load"] if zones else ()),
        "  acl by_connections var(proc.policy) -m str least_connections",
        "  use_backend hold if by_connections held { nbsrv(least_connections) eq 0 }",
        "  use_backend least_connections if by_connections",
        "  use_backend hold if held { nbsrv(round_robin) eq 0 }",
        "  default_backend round_robin",
    ]
    return "\n".join(lines) + "\n"


def _keys() -> list[str]:
    """Returns the rules that find the key of a request, and mark resumed streams."""
    by_body = "{ var(proc.key_bytes) -m int gt 0 } { req.hdr_val(content-length) gt 0 }"
    return [
        f"  http-request set-var(txn.key) req.hdrs,map_regm({STICKY}) if {{ var(proc.key_header) -m int 1 }}",
        f"  http-request wait-for-body time 60s at-least {max(PREFIXES_BYTES)} if {by_body}",
        *(
            f"  http-request set-var(txn.key) req.body,bytes(0,{size}) if {{ var(proc.key_bytes) -m int {size} }}"
            " { req.hdr_val(content-length) gt 0 }"
            for size in PREFIXES_BYTES
        ),
        "  acl keyed var(txn.key) -m found",
        "  acl resumable var(proc.resume) -m int 1",
        "  http-request set-var(txn.resumed) bool(true) if resumable { req.hdr(Last-Event-ID) -m found }",
        f"  http-response set-header {REPLICA_HEADER} %[srv_name,field(1,-)] if resumable",
    ]


def _forwarding(scheme: str, proxies: tuple[str, ...]) -> list[str]:
    """Returns the rules for the headers that say where a request comes from, which a client can forge."""
    forged = [
        "  http-request del-header X-Forwarded- -m beg",
        "  http-request del-header Forwarded",
        "  http-request del-header X_Forwarded_ -m beg",  # Some servers read `_` in a name as `-`.
        "  http-request del-header X-Real-IP",
        "  http-request del-header X_Real_IP",
        "  http-request del-header True-Client-IP",
        "  http-request del-header True_Client_IP",
    ]
    address = "  http-request {} X-Forwarded-For %[src]"
    proto = f"  http-request set-header X-Forwarded-Proto {scheme}"
    if not proxies:
        return [*forged, address.format("set-header"), proto]
    return [
        f"  acl from_proxy src {' '.join(proxies)}",
        *(f"{rule} unless from_proxy" for rule in forged),
        address.format("add-header"),
        f"{proto} unless {{ req.hdr(X-Forwarded-Proto) -m found }}",
    ]


def _backend(name: str, seats: Iterable[Seat], limits: ProxyLimits, hold_s: float) -> str:
    later = f"{_TEXT} hdr Retry-After {RETRY_AFTER_S} string"
    small = f"{{ req.hdr_val(content-length) gt 0 }} {{ req.hdr_val(content-length) le {RETRIED_BODY_BYTES} }}"
    busy = f"!{{ fe_name {PLUG} }}" if name == "hold" else "{ be_conn_free le 0 }"
    full = f"if {{ queue,sub(proc.max_queue) ge 0 }} {busy}"
    lines = [
        f"backend {name}",
        f"  balance {BACKENDS[name]}",
        *(_hold_lines(hold_s) if name == "hold" else ()),
        *(_STICKY_LINES if name == "sticky" else ()),
        "  option allbackups",
        "  acl repeatable method GET HEAD OPTIONS PUT DELETE TRACE",
        "  acl repeatable var(proc.retries_all) -m int 1",
        "  acl repeatable var(txn.resumed) -m bool",
        f'  http-request return status 503 {later} "the queue of the service is full\\n" {full}',
        f"  http-request set-timeout server var(proc.timeout_ms) unless {{ fe_name {PLUG} }}",
        "  http-request disable-l7-retry if !repeatable",
        # HAProxy repeats a request only if it has got the whole body before it sends the first byte.
        f"  http-request wait-for-body time 60s if {small} repeatable",
        f'  http-error status 503 {later} "no replica of the service is ready\\n"',
        *(f"  server {seat.name} {server_line(seat, limits)}" for seat in seats),
    ]
    return "\n".join(lines) + "\n"


_PLUG = f"""\
frontend {PLUG}
  bind unix@{PLUG_SOCKET} mode 600
  timeout client 24d
  use_backend hold

frontend plugged
  mode tcp
  bind unix@{_PLUGGED_SOCKET} mode 600
  timeout client 24d
  tcp-request inspect-delay 24d
  tcp-request content reject if WAIT_END
"""
"""Configuration of the request that occupies the plug: a frontend for it, and a server that never answers."""


_UNTIL_PLUGGED = (
    "  tcp-request inspect-delay 2s",
    "  tcp-request content accept if { nbsrv(hold) gt 0 }",
    "  tcp-request content accept if WAIT_END",
)
"""Requests that arrive when HAProxy has just started wait until the plug is occupied or a replica is up. Without these
lines they would be refused. They do not apply to requests that do not fit into HAProxy's buffer."""
_STICKY_LINES = "  hash-type consistent sdbm avalanche", f"  hash-balance-factor {_MOST_BALANCED_PERCENT}"


def _hold_lines(hold_s: float) -> list[str]:
    return [
        f"  timeout queue {max(1, round(hold_s * 1000))}ms",
        "  timeout server 24d",
        f"  use-server {PLUG} if {{ fe_name {PLUG} }}",
        # It gets its weight once the supervisor has occupied it.
        f"  server {PLUG} unix@{_PLUGGED_SOCKET} maxconn 1 weight 0",
    ]
