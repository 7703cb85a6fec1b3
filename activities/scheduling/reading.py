"""Rows that decisions are made of, as Postgres has them at the transaction's moment: those of some keys, or all.

All are read by COPY: there is no faster way to a hundred thousand rows.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from psycopg import Connection
from psycopg.abc import Params
from psycopg.types.numeric import Int8BinaryLoader
from sqlalchemy.orm import Session

from domain.phases import QUEUED_PHASES

_QUEUED = f"phase in ({', '.join(repr(phase.value) for phase in sorted(QUEUED_PHASES))}) and finished_at is null"
EPOCH_US = 946_684_800_000_000
"""Times in rows are as Postgres has them, whole microseconds since the beginning of 2000; this is that since 1970."""


class QueuedRow(NamedTuple):
    """A workload, queued or not."""

    id: str
    tenant: str
    level: int | None
    held: bool
    submitted_us: int
    ask: str | None
    """None: it is not queued."""


class AttemptRow(NamedTuple):
    """An attempt, live or not."""

    workload: str
    attempt: int
    tenant: str
    level: int | None
    region: str
    awarded_us: int
    released_us: int | None
    started_us: int | None
    checkpoint_us: int | None
    """From when on its work is lost by an eviction; None: it is not known to have a checkpoint."""
    ready: bool
    evicting: bool
    rank: int
    gpu_types: dict[str, int]
    cpus_milli: int
    max_runtime_s: float | None
    """Of its workload's running, all attempts together."""


class HoldingRow(NamedTuple):
    """What a live attempt holds of a machine; what it was promised is not in it."""

    workload: str
    machine: str
    gpus: int
    cpus_milli: int
    memory_bytes: int


class MachineRow(NamedTuple):
    """A machine."""

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
    """Ready, and neither cordoned nor draining: it takes work."""
    capacity: str
    """Its cluster's; as are the prices, in US dollars an hour of one of its GPUs and of a core."""
    gpu_usd_per_h: float
    core_usd_per_h: float


class TenantRow(NamedTuple):
    """A tenant."""

    name: str
    level: int
    quota_gpus: dict[str, int]
    quota_cpus_milli: int | None


class UseRow(NamedTuple):
    """An attempt that is over, for its tenant's window of use."""

    tenant: str
    awarded_us: int
    released_us: int
    gpu_types: dict[str, int]
    cpus_milli: int


_WORKLOAD = (
    f"select id, tenant, level, held_by is not null, submitted_at, case when {_QUEUED} then ask end from workload"
)
_ATTEMPT = (
    "select a.workload, a.attempt, w.tenant, w.level, a.region, a.awarded_at, a.released_at, a.started_at,"
    # What resumed from a checkpoint and has saved none since has lost nothing before its start.
    " coalesce(a.checkpoint_at, case when a.resumed_step is not null then a.started_at end),"
    " a.ready_at is not null, a.evicting_since is not null, a.rank, a.gpu_types, a.cpus_milli,"
    " (w.spec -> 'limits' ->> 'max_runtime_s')::float8"
    " from attempt as a join workload as w on w.id = a.workload"
)
_HOLDING = (
    "select l.workload, l.machine, bit_count(l.slots::bit(64)), l.cpus_milli - l.awaited_cpus_milli,"
    " l.memory_bytes - l.awaited_memory_bytes from allocation as l"
)
_MACHINE = (
    "select m.id, m.region, m.cluster, m.rack, m.gpu_type, m.gpus, m.cpus_milli, m.memory_bytes,"
    " m.gpus - bit_count(m.held::bit(64)), m.free_cpus_milli, m.free_memory_bytes, m.state = 'ready',"
    " m.state = 'ready' and m.cordon is null and not m.draining, c.capacity,"
    " coalesce((c.prices ->> m.gpu_type)::float8, 0), coalesce((c.prices ->> 'cpu')::float8, 0)"
    " from machine as m join cluster as c on c.region = m.region and c.name = m.cluster"
)
_TYPES: dict[type, tuple[str, ...]] = {
    QueuedRow: ("text", "text", "int8", "bool", "int8", "text"),
    AttemptRow: (
        "text", "int8", "text", "int8", "text", "int8", "int8", "int8", "int8", "bool", "bool", "int8", "jsonb", "int8",
        "float8",
    ),
    HoldingRow: ("text", "text", "int8", "int8", "int8"),
    MachineRow: ("text", "text", "text", "text", "text", *("int8",) * 6, "bool", "bool", "text", "float8", "float8"),
    TenantRow: ("text", "int8", "jsonb", "int8"),
    UseRow: ("text", "int8", "int8", "jsonb", "int8"),
}  # fmt: skip


class Reader:
    """Reads in one transaction, which decides what is seen."""

    def __init__(self, session: Session) -> None:
        driver = session.connection().connection.driver_connection
        assert isinstance(driver, Connection)
        self._connection: Connection[Any] = driver

    def _found(self, query: str, params: Params) -> Iterator[tuple[Any, ...]]:
        # Binary: a number is not written as text on one side to be read again on the other.
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
        """Those that are there."""
        return map(QueuedRow._make, self._found(f"{_WORKLOAD} where id = any(%s)", [list(ids)]))

    def queue(self) -> Iterator[QueuedRow]:
        """All that is queued."""
        return map(QueuedRow._make, self._copied(QueuedRow, f"{_WORKLOAD} where {_QUEUED}"))

    def attempts(self, keys: Collection[tuple[str, int]]) -> Iterator[AttemptRow]:
        """Those (workload, attempt) that are there."""
        query = (
            f"{_ATTEMPT} join unnest(%s::text[], %s::bigint[]) as k (workload, attempt)"
            " on a.workload = k.workload and a.attempt = k.attempt"
        )
        return map(AttemptRow._make, self._found(query, [[w for w, _ in keys], [n for _, n in keys]]))

    def live_attempts(self) -> Iterator[AttemptRow]:
        """All that are not released."""
        return map(AttemptRow._make, self._copied(AttemptRow, f"{_ATTEMPT} where a.released_at is null"))

    def holdings(self, keys: Collection[tuple[str, int]]) -> Iterator[HoldingRow]:
        """Those of (workload, attempt), sorted by machine."""
        query = (
            f"{_HOLDING} join unnest(%s::text[], %s::bigint[]) as k (workload, attempt)"
            " on l.workload = k.workload and l.attempt = k.attempt where l.released_at is null order by l.machine"
        )
        return map(HoldingRow._make, self._found(query, [[w for w, _ in keys], [n for _, n in keys]]))

    def live_holdings(self) -> Iterator[HoldingRow]:
        """All, sorted by machine."""
        query = f"{_HOLDING} where l.released_at is null order by l.machine"
        return map(HoldingRow._make, self._copied(HoldingRow, query))

    def machines(self, ids: Collection[str]) -> Iterator[MachineRow]:
        """Those that are there."""
        return map(MachineRow._make, self._found(f"{_MACHINE} where m.id = any(%s)", [list(ids)]))

    def fleet(self) -> Iterator[MachineRow]:
        """All machines."""
        return map(MachineRow._make, self._copied(MachineRow, _MACHINE))

    def tenants(self) -> Iterator[TenantRow]:
        """All, by name."""
        query = "select name, level, quota_gpus, quota_cpus_milli from tenant order by name"
        return map(TenantRow._make, self._found(query, []))

    def regions(self) -> list[str]:
        """All, by name."""
        return [name for (name,) in self._found("select name from region order by name", [])]

    def use(self, since_us: int) -> Iterator[UseRow]:
        """Attempts that were released after a moment, in microseconds since 2000."""
        # The moment is a number that we made: COPY takes no parameters.
        query = (
            "select w.tenant, a.awarded_at, a.released_at, a.gpu_types, a.cpus_milli"
            " from attempt as a join workload as w on w.id = a.workload"
            f" where a.released_at > timestamptz '2000-01-01 00:00:00+00' + {int(since_us)} * interval '1 microsecond'"
        )
        return map(UseRow._make, self._copied(UseRow, query))
