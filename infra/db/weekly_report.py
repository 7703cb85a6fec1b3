"""The use, waits, lost work and cost of each tenant in a week."""

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.lifecycle.retry_limits import PREEMPTIONS
from infra.db.costs import costs


@dataclass
class TenantWeek:
    """A week of one tenant."""

    tenant: str
    hours: dict[str, float] = field(default_factory=dict)
    """Resource hours that its workloads held, by GPU type, and core hours (`cpu`)."""
    usd: float = 0.0
    unpriced_h: float = 0.0
    """The hours of `hours` without a known price."""
    started: int = 0
    """Workloads that were placed for the first time."""
    median_wait_s: float | None = None
    """Waiting times of these workloads: from the submission, or the end of a hold, to the placement."""
    p95_wait_s: float | None = None
    waiting: int = 0
    """Workloads that were submitted before the end of the week, and still wait for their first placement."""
    preemptions: int = 0
    lost_s: float = 0.0
    """Work lost by interruptions, in seconds."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)


_STARTED = text("""
    select tenant, count(*) as started, percentile_cont(0.5) within group (order by wait_s) as median_wait_s,
           percentile_cont(0.95) within group (order by wait_s) as p95_wait_s
    from (select w.tenant, greatest(0, extract(epoch from a.awarded_at
                                              - greatest(w.submitted_at, w.unheld_at)))::float8 as wait_s
          from attempt as a join workload as w on w.id = a.workload
          where a.attempt = 1 and a.awarded_at >= :since and a.awarded_at < :until
            and (cast(:tenant as text) is null or w.tenant = :tenant)) as first
    group by tenant
""")
_WAITING = text("""
    select tenant, count(*) as waiting from workload
    where finished_at is null and attempt = 0 and submitted_at < :until
      and (cast(:tenant as text) is null or tenant = :tenant) group by tenant
""")
_LOST = text("""
    select w.tenant, count(*) filter (where a.outcome ->> 'code' = any(:codes)) as preemptions,
           coalesce(sum(a.lost_s), 0)::float8 as lost_s
    from attempt as a join workload as w on w.id = a.workload
    where a.released_at >= :since and a.released_at < :until
      and (cast(:tenant as text) is null or w.tenant = :tenant) group by w.tenant
""")


def last_week(now: datetime) -> date:
    """Returns the first day, a Monday, of the last week (UTC) that is over at `now`."""
    today = now.astimezone(UTC).date()
    return today - timedelta(days=today.weekday() + 7)


def weekly_report(session: Session, monday: date, tenant: str | None) -> list[TenantWeek]:
    """Returns the week (UTC) from `monday` on, of one tenant or of all tenants with usage or waits, by name."""
    since = datetime.combine(monday, time(), UTC)
    asked = {"since": since, "until": since + timedelta(days=7), "tenant": tenant}
    weeks: dict[str, TenantWeek] = {}
    found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for statement in (_STARTED, _WAITING, _LOST):
        for row in session.execute(statement, {**asked, "codes": [code.value for code in PREEMPTIONS]}).mappings():
            found[row["tenant"]] |= row
    for values in found.values():
        weeks[values["tenant"]] = TenantWeek(**values)
    for cost in costs(session, monday, monday + timedelta(days=6), tenant):
        week = weeks.setdefault(cost.tenant, TenantWeek(cost.tenant))
        week.hours[cost.resource] = week.hours.get(cost.resource, 0.0) + cost.hours
        week.usd += cost.usd
        week.unpriced_h += cost.unpriced_h
    return [weeks[name] for name in sorted(weeks) if weeks[name] != TenantWeek(name)]
