"""Renders the report of a run: one HTML file with a Gantt chart of GPU slots, the checks, and all attempts."""

from collections.abc import Sequence

from infra.reports.charts import colours
from infra.reports.page import grid, keys, muted, page
from infra.reports.tables import ALL, ReportTable
from server.demo.chart import chart
from server.demo.checks import Check
from server.demo.facts import AttemptFact, Facts


def render(facts: Facts, checks: Sequence[Check]) -> str:
    """Returns the whole HTML page."""
    tenants = colours(sorted({w["tenant"] for w in facts.workloads.values()}))
    start_s = min((w["submitted_s"] for w in facts.workloads.values()), default=0.0)
    attempts = sorted(facts.attempts, key=lambda a: (a.start_s, a.name))
    judged = [["holds" if check.passed else "fails", check.name, check.found] for check in checks]
    parts = [
        muted(f"{len(facts.workloads)} gang workloads, {len(attempts)} attempts. The colours are the tenants."),
        f"<section>{keys(tenants)}{grid([chart(facts, tenants)], 'whole')}</section>",
        f"<h2>Checks</h2>{ReportTable(('', 'what', 'found'), judged, texts=ALL).html()}",
        f"<h2>Attempts</h2>{ReportTable(_COLUMNS, [_attempt(a, start_s) for a in attempts], texts=ALL).html()}",
    ]
    return page("mizzen demo: twelve gangs", parts)


_COLUMNS = ("workload", "attempt", "region", "time", "steps", "last checkpoint", "outcome")


def _attempt(a: AttemptFact, start_s: float) -> list[str]:
    return [
        a.name,
        str(a.attempt),
        a.region,
        f"{a.start_s - start_s:.1f} to {a.end_s - start_s:.1f} s",
        f"{a.resumed_step or 0} to {'?' if a.last_step is None else a.last_step}",
        "" if a.checkpoint_step is None else str(a.checkpoint_step),
        a.outcome,
    ]
