"""Renders the report: one self-contained HTML file that compares all policies, with the effect of a change first."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from infra.reports.charts import colours
from infra.reports.formats import NONE, listed, number, percent, span
from infra.reports.page import grid, keys, muted, page, warning
from infra.reports.tables import ReportTable
from simulation.charts import pictures
from simulation.difference import QUOTAS, differences, pairs
from simulation.meter import UNTIL
from simulation.result import PolicyRow, name_of, until_key
from simulation.settings import LEVELS


def render(outcomes: Sequence[PolicyRow]) -> str:
    """Returns the HTML page for the JSON objects of one or more runs."""
    changed = pairs(outcomes)
    parts = [_interrupted(outcomes)]
    if changed:
        rows = [row for before, after in changed for row in differences(before, after)]
        parts += [_section(f"Effect of {changed[0][1]['run']['change']}", _CHANGE, rows, texts=2)]
    parts += [muted(_about(outcomes)), _section("Policies", _SUMMARY, map(_summary, outcomes))]
    if any(one["run"]["usd"] or one["run"]["pools"]["launched"] for one in outcomes):
        parts += [_section("Machines", _CAPACITY, map(_capacity, outcomes))]
    parts += ["<h2>Charts</h2>", keys(colours(map(name_of, outcomes))), grid(pictures(outcomes))]
    parts += ["<h2>Objectives and waits by priority</h2>", muted(_rule(outcomes[0]["run"]["objective_s"]))]
    parts += [ReportTable(_DETAIL, [cells for one in outcomes for cells in _details(one)], texts=2).html()]
    return page("mizzen simulate", [*parts, _section("Decisions", _EFFORT, map(_effort, outcomes))])


def _section(title: str, columns: Sequence[str], rows: Iterable[list[str]], *, texts: int = 1) -> str:
    return f"<h2>{escape(title)}</h2>{ReportTable(columns, list(rows), texts=texts).html()}"


_CHANGE = ("policy", "figure", "unchanged", "changed", "difference")


def _about(outcomes: Sequence[PolicyRow]) -> str:
    run = outcomes[0]["run"]
    supply = ", ".join(f"{slots:,} {gpu_type}" for gpu_type, slots in run["supply"].items()) or "none"
    longest_s = max(one["run"]["simulated_s"] for one in outcomes)
    before = " before the change" if pairs(outcomes) else ""
    parts = [
        f"{run['workloads_in_all']:,} workloads, seed {outcomes[0]['seed']}, GPUs{before}: {supply}.",
        f"Simulated: {span(longest_s)}" + (f", from {span(run['started_s'])} on." if run["started_s"] else "."),
    ]
    if run["measured_from_s"] > run["started_s"] or run["measured_to_s"] < run["ended_s"]:
        measured = f"{span(run['measured_from_s'])} to {span(run['measured_to_s'])}"
        parts.append(f"The figures cover {measured}, which is shaded in the charts.")
    if run["bad_rows"]:
        parts.append(f"{len(run['bad_rows']):,} bad rows of the trace were ignored.")
    if run["fit_nowhere"]:
        parts.append(f"{len(run['fit_nowhere']):,} workloads would not fit in any region, even an empty one.")
    return " ".join(parts)


def _interrupted(outcomes: Sequence[PolicyRow]) -> str:
    cut = [f"{name_of(o)} after {span(o['run']['simulated_s'])}" for o in outcomes if o["run"]["interrupted"]]
    return warning(f"Interrupted: {'; '.join(cut)}. The figures cover the simulated time." if cut else "")


_SUMMARY = (
    "policy", "finished", "GPUs allocated", "not awarded in time, within quota", "not started in time, within quota",
    "not started in time, over quota", "P95 wait until started, within quota", "preemptions", "GPU hours lost",
)  # fmt: skip


def _summary(one: PolicyRow) -> list[str]:
    return [
        name_of(one),
        f"{one['finished']:,} of {one['workloads']:,}",
        percent(one["allocation_rate"]),
        percent(one["objective_miss_rate"]["within_quota"]["all"]),
        *(percent(one["objective_miss_rate_to_start"][quota]["all"]) for quota in QUOTAS),
        span(one["waits_to_start"]["within_quota"]["all"]["p95"]),
        number(one["preemptions"]),
        number(one["lost_gpu_hours"]),
    ]


_CAPACITY = (
    "policy", "GPU hours available", "cost", "machines launched", "launches refused", "reclaimed by their clouds",
    "terminated by their pools", "gangs interrupted",
)  # fmt: skip


def _capacity(one: PolicyRow) -> list[str]:
    run = one["run"]
    counts = [*(run["pools"][name] for name in ("launched", "refused", "taken", "ended")), run["interruptions"]]
    return [name_of(one), number(run["available_gpu_hours"]), f"${run['usd']:,.2f}", *map(number, counts)]


_EFFORT = ("policy", "decisions", "decisions per s", "negative cache hits")


def _effort(one: PolicyRow) -> list[str]:
    rate = f"{one['decisions_per_s'] or 0:,.0f}"
    return [name_of(one), number(one["decisions"]), rate, percent(one["negative_cache_hit_rate"])]


def _rule(objective_s: Mapping[str, float]) -> str:
    """Returns the paragraph that defines objectives and misses."""
    by_span: dict[str, list[str]] = {}
    for level, limit_s in objective_s.items():
        by_span.setdefault(span(limit_s), []).append(level)
    limits = "; ".join(f"priority {listed(levels)}: {limit}" for limit, levels in by_span.items()) or "none set"
    without = [str(level) for level in LEVELS if str(level) not in objective_s]
    if without and by_span:
        limits += f"; priority {listed(without)}: none, so no misses"
    return (
        f"An objective is the longest time that a workload may wait ({limits}). Two waits are judged. "
        "The wait until the award begins with the submission or the last eviction, and ends with the scheduler's "
        "decision. The wait until the start begins with the submission or the end of the last run, and ends when all "
        "tasks run. Each wait is judged once: at its end, or when its objective runs out. The rank of the workload at "
        "that time decides whether the miss counts as within or over quota. The length of a wait is recorded at its "
        "end, by the rank of the award. Example: the objective of a workload runs out while the workload is over "
        "quota, and the workload is awarded within quota later. The miss then counts as over quota, and the long wait "
        "as within quota."
    )


_DETAIL = ("policy", "quota", "priority", "until", "missed", "miss rate", "P50 wait", "P95 wait", "P99 wait")


def _details(one: PolicyRow) -> Iterable[list[str]]:
    for quota, title in QUOTAS.items():
        for level in (*map(str, LEVELS), "all"):
            for until in UNTIL:
                judged = one["run"][until_key("objectives_judged", until)][quota][level]
                waits = one[until_key("waits", until)][quota][level]
                if judged or waits["p50"] is not None:
                    missed = one["run"][until_key("objectives_missed", until)][quota][level]
                    yield [
                        name_of(one),
                        title,
                        level,
                        until,
                        f"{missed:,} of {judged:,}" if judged else NONE,
                        percent(one[until_key("objective_miss_rate", until)][quota][level]),
                        *(span(waits[p]) for p in ("p50", "p95", "p99")),
                    ]
