"""Reads the rows that decisions depend on from one snapshot of Postgres: the rows of given keys, or all rows.

All rows are read by COPY, the fastest way to read a hundred thousand rows.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from psycopg import Connection
from psycopg.abc import Params
from psycopg.types.numeric import Int8BinaryLoader
from sqlalchemy.orm import Session

from domain.capacity import dedicated, own_of, pooled
from domain.phases import QUEUED_PHASES
from domain.scheduling import MachineState

_QUEUED = (
    f"phase in ({', '.join(repr(phase.value) for phase in sorted(QUEUED_PHASES))}) and finished_at is null"
    " and blocked is null and runner is null"
)
EPOCH_US = 946_684_800_000_000
"""The start of 2000 in microseconds since 1970. Times in rows are whole microseconds since 2000, as in Postgres."""


class QueuedRow(NamedTuple):
    """A workload, whether queued or not."""

    id: str
    tenant: str
    level: int | None
    held: bool
    waits_from_us: int
    """The time from which its wait counts: its submission, later by its time on hold."""
    ask: str | None
    """The demand; None: the workload is not queued, or waits for its dependencies."""
    window: str | None = None
    """For an array: those of its elements that a scan ranks, as `array_window` in `arrays.sql` writes them."""
    array: str | None = None
    """For an element of an array: the array."""
    user: str = ""
    """The person who submitted it: that of an API key or its id, or `oidc:` and the subject of a token."""


class AttemptRow(NamedTuple):
    """An attempt, whether live or not."""

    workload: str
    attempt: int
    tenant: str
    level: int | None
    region: str
    awarded_us: int
    released_us: int | None
    started_us: int | None
    checkpoint_us: int | None
    """The time of its last checkpoint, since when work would be lost by an eviction; None: no checkpoint is known."""
    ready: bool
    evicting: bool
    rank: int
    gpu_types: dict[str, int]
    cpus_milli: int
    max_runtime_s: float | None
    """The maximum runtime of its workload, over all attempts."""
    lost_s: float | None
    """For a workload that serves: its cold start, which an eviction loses; 0 if it is not ready yet."""
    group: str | None
    """The group of workloads that are spread, if it belongs to one."""
    user: str
    """The person who submitted its workload."""
    booked: bool
    """Whether its place was booked while the attempt before ran (`activities.scheduling.bookings`)."""
    quota_gpus: dict[str, int]
    """What it uses of the quota: `gpu_types` or, while the place of the next attempt is booked, those of that place."""
    quota_cpus_milli: int
    """The same of CPUs."""


class HoldingRow(NamedTuple):
    """The resources of a machine that a live attempt holds, and that others would get after it.

    Resources that it still waits for are not included, nor slots that the machine's owner has taken back.
    """

    workload: str
    machine: str
    gpus: int
    cpus_milli: int
    memory_bytes: int


class MachineRow(NamedTuple):
    """The facts of a machine that decisions depend on."""

    id: str
    region: str
    cluster: str
    rack: str
    gpu_type: str | None
    gpus: int
    cpus_milli: int
    memory_bytes: int
    free_gpus: int
    free_cpus_milli: int
    free_memory_bytes: int
    ready: bool
    open: bool
    """Whether the machine accepts work: it is ready, not cordoned and not draining."""
    capacity: str
    """The capacity kind of its cluster, or what takes its place if the cluster is dedicated (`domain.capacity`)."""
    gpu_usd_per_h: float
    """The cluster's price of one GPU of the machine's type."""
    core_usd_per_h: float
    """The cluster's price of one core."""
    departures_per_h: float
    """How often the owner of a machine of the cluster takes it back without notice."""
    withheld: int
    """Mask of the slots that the machine's owner has taken back."""
    zone: str
    """The zone of its cluster; empty: unknown."""
    pool: str
    """Its pool, if only some tenants may use it; else empty."""

    def state(self) -> MachineState:
        """Returns the machine as decisions see it."""
        return MachineState(
            self.id, self.cluster, self.rack, self.gpu_type, self.gpus, self.free_gpus, self.free_cpus_milli,
            self.free_memory_bytes, self.cpus_milli, self.memory_bytes, self.capacity, self.gpu_usd_per_h,
            self.core_usd_per_h, self.departures_per_h, self.zone, self.pool,
        )  # fmt: skip


class TenantRow(NamedTuple):
    """The facts of a tenant that decisions depend on."""

    name: str
    level: int
    quota_gpus: dict[str, int]
    quota_cpus_milli: int | None


class UseRow(NamedTuple):
    """A released attempt, which counts towards its tenant's use in the window."""

    tenant: str
    awarded_us: int
    released_us: int
    gpu_types: dict[str, int]
    cpus_milli: int
    user: str


_FEWEST_RANKED, _MOST_RANKED = 16, 256
"""A scan ranks `_FEWEST_RANKED` elements of an array, plus as many as are live, up to `_MOST_RANKED`. After an award
the next scan follows at once, so the number of ranked elements grows from scan to scan. While no element can be placed,
it stays small, and a scan costs little."""
_WORKLOAD = (
    "select w.id, tenant, level, held_by is not null, submitted_at + make_interval(secs => paused_s),"
    f" case when {_QUEUED} then ask end,"
    f" case when {_QUEUED} and a.id is not null"
    f" then array_window(a, least({_MOST_RANKED}, {_FEWEST_RANKED} + case when a.runners is null"
    " then array_live(a.id) else array_placed(a.id) end)) end, w.array_id, w.submitted_by"
    " from workload as w left join workload_array as a on a.id = w.id"
)
_ATTEMPT = (
    "select a.workload, a.attempt, w.tenant, w.level, a.region, a.awarded_at, a.released_at, a.started_at,"
    # If an attempt resumed from a checkpoint and has not saved since, only the work since its start would be lost.
    " coalesce(a.checkpoint_at, case when a.resumed_step is not null then a.started_at end),"
    " a.ready_at is not null, a.evicting_since is not null, a.rank, a.gpu_types, a.cpus_milli,"
    " (w.spec -> 'limits' ->> 'max_runtime_s')::float8,"
    " case when w.spec ->> 'serving' is not null then coalesce(a.cold_start_s, 0) end, w.spec -> 'spread' ->> 'group',"
    " w.submitted_by, coalesce((a.plan ->> 'booked')::bool, false), coalesce(b.candidate -> 'gpu_types', a.gpu_types),"
    " coalesce((b.candidate ->> 'cpus_milli')::int8, a.cpus_milli)"
    " from attempt as a join workload as w on w.id = a.workload"
    " left join booking as b on b.workload = a.workload and b.attempt = a.attempt"
)
_HOLDING = (
    "select l.workload, l.machine, bit_count((l.slots & ~m.withheld)::bit(64)), l.cpus_milli - l.awaited_cpus_milli,"
    " l.memory_bytes - l.awaited_memory_bytes from allocation as l join machine as m on m.id = l.machine"
)
_POOLED = pooled("|", "").split("|")
"""The parts of `pooled` before and after the name of the pool."""
_MACHINE = (
    "select m.id, m.region, m.cluster, m.rack, m.gpu_type, m.gpus, m.cpus_milli, m.memory_bytes,"
    " m.gpus - bit_count((m.held | m.withheld)::bit(64)), m.free_cpus_milli, m.free_memory_bytes, m.state = 'ready',"
    " m.state = 'ready' and m.cordon is null and not m.draining,"
    f" case when c.service is not null then '{dedicated('')}' || c.name"
    f" when c.tenant is not null then '{own_of('')}' || c.tenant"
    f" when p.tenants <> '{{}}' then '{_POOLED[0]}' || p.region || '/' || p.name || '{_POOLED[1]}' || c.capacity"
    " else c.capacity end,"
    " coalesce((c.prices ->> m.gpu_type)::float8, 0), coalesce((c.prices ->> 'cpu')::float8, 0), c.departures_per_h,"
    " m.withheld, coalesce(c.zone, ''),"
    " case when p.tenants <> '{}' and c.service is null and c.tenant is null then p.name else '' end"
    " from machine as m join cluster as c on c.region = m.region and c.name = m.cluster"
    " left join pool as p on p.region = m.region and p.name = m.pool"
)
_TYPES: dict[type, tuple[str, ...]] = {
    QueuedRow: ("text", "text", "int8", "bool", "int8", "text", "text", "text", "text"),
    AttemptRow: (
        "text", "int8", "text", "int8", "text", "int8", "int8", "int8", "int8", "bool", "bool", "int8", "jsonb", "int8",
        "float8", "float8", "text", "text", "bool", "jsonb", "int8",
    ),
    HoldingRow: ("text", "text", "int8", "int8", "int8"),
    MachineRow: (
        *("text",) * 5, *("int8",) * 6, "bool", "bool", "text", *("float8",) * 3, "int8", "text", "text",
    ),
    TenantRow: ("text", "int8", "jsonb", "int8"),
    UseRow: ("text", "int8", "int8", "jsonb", "int8", "text"),
}  # fmt: skip


class SnapshotReader:
    """Reads rows in one transaction, whose isolation level determines the snapshot."""

    def __init__(self, session: Session) -> None:
        driver = session.connection().connection.driver_connection
        assert isinstance(driver, Connection)
        self._connection: Connection[Any] = driver

    def _found(self, query: str, params: Params) -> Iterator[tuple[Any, ...]]:
        # The binary format avoids converting numbers to text and back.
        with self._connection.cursor(binary=True) as cursor:
            cursor.adapters.register_loader("timestamptz", Int8BinaryLoader)
            yield from cursor.execute(query.encode(), params)

    def _copied(self, row: type, query: str) -> Iterator[tuple[Any, ...]]:
        with (
            self._connection.cursor() as cursor,
            cursor.copy(f"copy ({query}) to stdout (format binary)".encode()) as copy,
        ):
            copy.set_types(_TYPES[row])
            yield from copy.rows()

    def workloads(self, ids: Collection[str]) -> Iterator[QueuedRow]:
        """Yields the workloads with these ids that exist."""
        return map(QueuedRow._make, self._found(f"{_WORKLOAD} where w.id = any(%s)", [list(ids)]))

    def queue(self) -> Iterator[QueuedRow]:
        """Yields all queued workloads."""
        return map(QueuedRow._make, self._copied(QueuedRow, f"{_WORKLOAD} where {_QUEUED}"))

    def attempts(self, keys: Collection[tuple[str, int]]) -> Iterator[AttemptRow]:
        """Yields the attempts with these keys (workload, attempt) that exist."""
        query = (
            f"{_ATTEMPT} join unnest(%s::text[], %s::bigint[]) as k (workload, attempt)"
            " on a.workload = k.workload and a.attempt = k.attempt"
        )
        return map(AttemptRow._make, self._found(query, [[w for w, _ in keys], [n for _, n in keys]]))

    def live_attempts(self) -> Iterator[AttemptRow]:
        """Yields all attempts that are not released."""
        return map(AttemptRow._make, self._copied(AttemptRow, f"{_ATTEMPT} where a.released_at is null"))

    def live_attempts_in(self, region: str) -> Iterator[AttemptRow]:
        """Yields the attempts in a region that are not released."""
        return map(AttemptRow._make, self._found(f"{_ATTEMPT} where a.released_at is null and a.region = %s", [region]))

    def holdings(self, keys: Collection[tuple[str, int]]) -> Iterator[HoldingRow]:
        """Yields the holdings of the live attempts with these keys (workload, attempt), sorted by machine."""
        query = (
            f"{_HOLDING} join unnest(%s::text[], %s::bigint[]) as k (workload, attempt)"
            " on l.workload = k.workload and l.attempt = k.attempt where l.released_at is null order by l.machine"
        )
        return map(HoldingRow._make, self._found(query, [[w for w, _ in keys], [n for _, n in keys]]))

    def live_holdings(self) -> Iterator[HoldingRow]:
        """Yields the holdings of all live attempts, sorted by machine."""
        # A booking's allocations are not of its workload's present attempt.
        query = f"{_HOLDING} join attempt using (workload, attempt) where l.released_at is null order by l.machine"
        return map(HoldingRow._make, self._copied(HoldingRow, query))

    def machines(self, ids: Collection[str]) -> Iterator[MachineRow]:
        """Yields the machines with these ids that exist."""
        return map(MachineRow._make, self._found(f"{_MACHINE} where m.id = any(%s)", [list(ids)]))

    def machines_in(self, regions: Iterable[str]) -> Iterator[MachineRow]:
        """Yields the machines of some regions."""
        return map(MachineRow._make, self._found(f"{_MACHINE} where m.region = any(%s)", [list(regions)]))

    def fleet(self) -> Iterator[MachineRow]:
        """Yields all machines."""
        return map(MachineRow._make, self._copied(MachineRow, _MACHINE))

    def tenants(self) -> Iterator[TenantRow]:
        """Yields all tenants, sorted by name."""
        query = "select name, level, quota_gpus, quota_cpus_milli from tenant order by name"
        return map(TenantRow._make, self._found(query, []))

    def regions(self) -> list[str]:
        """Returns the names of all regions, sorted."""
        return [name for (name,) in self._found("select name from region order by name", [])]

    def use(self, since_us: int) -> Iterator[UseRow]:
        """Yields the attempts that were released after `since_us`, in microseconds since 2000."""
        # COPY takes no parameters. The time is a number computed by this process, so it can be formatted in.
        query = (
            "select w.tenant, a.awarded_at, a.released_at, a.gpu_types, a.cpus_milli, w.submitted_by"
            " from attempt as a join workload as w on w.id = a.workload"
            f" where a.released_at > timestamptz '2000-01-01 00:00:00+00' + {int(since_us)} * interval '1 microsecond'"
        )
        return map(UseRow._make, self._copied(UseRow, query))
