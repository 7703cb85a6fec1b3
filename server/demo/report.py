"""Renders the report of a run: one HTML file with a Gantt chart of GPU slots, the checks, and all attempts."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.axes import Axes

from infra.reports.charts import ALARM, INK, Picture, colours, picture, tip
from infra.reports.gantt import Gantt
from infra.reports.page import grid, keys, muted, page
from infra.reports.tables import ALL, ReportTable
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
        f"<section>{keys(tenants)}{grid([_chart(facts, tenants)], 'whole')}</section>",
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


_SAYS = (
    "Each row is a GPU slot. Triangle: an attempt was stopped (red: its machine was lost). Dashed line: the workload"
    " resumed in another region. Red line: a machine was lost."
)


def _chart(facts: Facts, tenant_colours: Mapping[str, str]) -> Picture:
    """Returns the chart. Triangles mark stops, dashed lines moves to another region, red lines lost machines."""
    start_s = min((w["submitted_s"] for w in facts.workloads.values()), default=0.0)
    ends = [w["finished_s"] for w in facts.workloads.values()] + [h.end_s for h in facts.holds]
    machines = sorted(facts.machines, key=lambda m: (m[1], m[0]))
    slots = {f"{machine} ({gpu_type or 'cpu'})": count for machine, _, gpu_type, count in machines}

    def draw(axes: Axes) -> None:
        gantt = Gantt(axes, slots, start_s, max(ends, default=start_s + 1.0))
        _holds(gantt, facts, tenant_colours)
        _moves(gantt, facts)
        for attempt in facts.attempts:
            rows = _rows(gantt, facts, attempt)
            if rows and attempt.outcome not in ("completed", ""):
                colour = ALARM if attempt.outcome == "machine_lost" else INK
                says = tip(f"{attempt.name} attempt {attempt.attempt}: {attempt.outcome}")
                at = attempt.end_s - start_s, min(rows) - 0.6
                axes.plot(*at, "v", color=colour, ms=8, mec="#ffffff", zorder=9, gid=says, clip_on=False)
        for event in facts.events:
            if event["kind"] == "machine.lost" and (rows := gantt.rows(event["machine"])):
                gantt.line(event["at_s"], rows, ALARM, 3.0, f"{event['machine']} lost")

    return picture("", _SAYS, draw, (12.0, 1.0 + 0.145 * (sum(slots.values()) + 1.6 * len(slots))))


def _holds(gantt: Gantt, facts: Facts, tenant_colours: Mapping[str, str]) -> None:
    """Draws a bar for each hold, with the name of the attempt once per machine."""
    named = set()
    for h in sorted(facts.holds, key=lambda h: (h.machine, h.slot)):
        key = (h.workload, h.attempt, h.machine)
        name = "" if key in named else h.name if h.attempt == 1 else f"{h.name} #{h.attempt}"
        named.add(key)
        says = f"{h.name} attempt {h.attempt}, {h.task}: {h.end_s - h.start_s:.1f} s on {h.machine} slot {h.slot}"
        gantt.bar(h.machine, h.slot, h.start_s, h.end_s, name=name, says=says, color=tenant_colours[h.tenant])


def _moves(gantt: Gantt, facts: Facts) -> None:
    """Draws dashed lines from the end of an attempt to the start of the next one in another region."""
    for workload in facts.workloads:
        for before, after in pairwise(facts.attempts_of(workload)):
            old, new = _rows(gantt, facts, before), _rows(gantt, facts, after)
            if before.region != after.region and old and new:
                at = [before.end_s - gantt.start_s, after.start_s - gantt.start_s]
                says = tip(f"{before.name} moves from {before.region} to {after.region}")
                gantt.axes.plot(at, [min(old) - 0.5, min(new)], color=INK, lw=1.3, ls="--", zorder=8, gid=says)


def _rows(gantt: Gantt, facts: Facts, attempt: AttemptFact) -> list[float]:
    mine = (attempt.workload, attempt.attempt)
    return [y for h in facts.holds if (h.workload, h.attempt) == mine for y in gantt.rows(h.machine, (h.slot,))]
