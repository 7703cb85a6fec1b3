"""Renders the report: one self-contained HTML file that compares all policies, with the effect of a change first."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from simulation.difference import QUOTAS, differences, pairs
from simulation.meter import UNTIL
from simulation.page import figure, head, keys, table
from simulation.pictures import colours, pictures
from simulation.result import until_key
from simulation.settings import LEVELS
from simulation.words import NONE, PolicyRow, listed, name_of, number, percent, span


def render(outcomes: Sequence[PolicyRow]) -> str:
    """Returns the HTML page for the JSON objects of one or more runs."""
    return "\n".join(
        (
            head("mizzen simulate"),
            f"<h1>mizzen simulate</h1>{_interrupted(outcomes)}{_changes(outcomes)}{_about(outcomes)}",
            "<h2>Policies</h2>" + table(_SUMMARY, map(_summary, outcomes)),
            _capacity(outcomes),
            f"<h2>Charts</h2>{keys(colours(outcomes))}",
            f'<div class="grid">{"".join(map(figure, pictures(outcomes)))}</div>',
            "<h2>Objectives and waits by priority</h2>" + _rule(outcomes[0]["run"]["objective_s"]),
            table(_DETAIL, (cells for one in outcomes for cells in _details(one)), words=True),
            "<h2>Decisions</h2>" + table(_EFFORT, map(_effort, outcomes)),
            "</body></html>\n",
        )
    )


def _changes(outcomes: Sequence[PolicyRow]) -> str:
    """Returns the section on the effect of the change; empty if no run has a change."""
    found = pairs(outcomes)
    if not found:
        return ""
    rows = [row for before, after in found for row in differences(before, after)]
    cells = ([*map(escape, (row.policy, row.figure, row.before, row.after)), escape(row.by) or "same"] for row in rows)
    return f"<h2>Effect of {escape(found[0][1]['run']['change'])}</h2>" + table(_CHANGE, cells, words=True)


_CHANGE = ("policy", "figure", "unchanged", "changed", "difference")


def _about(outcomes: Sequence[PolicyRow]) -> str:
    run, first = outcomes[0]["run"], outcomes[0]
    supply = ", ".join(f"{slots:,} {escape(gpu_type)}" for gpu_type, slots in run["supply"].items()) or "none"
    longest_s = max(one["run"]["simulated_s"] for one in outcomes)
    parts = [
        f"{run['workloads_in_all']:,} workloads, seed {first['seed']}, GPUs{_unchanged(outcomes)}: {supply}.",
        f"Simulated: {span(longest_s)}" + (f", from {span(run['started_s'])} on." if run["started_s"] else "."),
    ]
    if run["measured_from_s"] > run["started_s"] or run["measured_to_s"] < run["ended_s"]:
        measured = f"{span(run['measured_from_s'])} to {span(run['measured_to_s'])}"
        parts.append(f"The figures cover {measured}, which is shaded in the charts.")
    if run["bad_rows"]:
        parts.append(f"{len(run['bad_rows']):,} bad rows of the trace were ignored.")
    if run["fit_nowhere"]:
        parts.append(f"{len(run['fit_nowhere']):,} workloads would not fit in any region, even an empty one.")
    return f'<p class="muted">{" ".join(parts)}</p>'


def _unchanged(outcomes: Sequence[PolicyRow]) -> str:
    return " before the change" if pairs(outcomes) else ""


def _interrupted(outcomes: Sequence[PolicyRow]) -> str:
    cut = [
        f"{escape(name_of(one))} after {span(one['run']['simulated_s'])}"
        for one in outcomes
        if one["run"]["interrupted"]
    ]
    return f'<p class="warn">Interrupted: {"; ".join(cut)}. The figures cover the simulated time.</p>' if cut else ""


_SUMMARY = (
    "policy", "finished", "GPUs allocated", "not awarded in time, within quota", "not started in time, within quota",
    "not started in time, over quota", "P95 wait until started, within quota", "preemptions", "GPU hours lost",
)  # fmt: skip


def _summary(one: PolicyRow) -> list[str]:
    return [
        escape(name_of(one)),
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


def _capacity(outcomes: Sequence[PolicyRow]) -> str:
    """Returns the section on costs, launches and terminations of machines; empty without pools and prices."""
    if not any(one["run"]["usd"] or one["run"]["pools"]["launched"] for one in outcomes):
        return ""
    rows = []
    for one in outcomes:
        run = one["run"]
        counts = [*(run["pools"][name] for name in ("launched", "refused", "taken", "ended")), run["interruptions"]]
        hours, cost = number(run["available_gpu_hours"]), f"${run['usd']:,.2f}"
        rows.append([escape(name_of(one)), hours, cost, *map(number, counts)])
    return "<h2>Machines</h2>" + table(_CAPACITY, rows)


_EFFORT = ("policy", "decisions", "decisions per s", "negative cache hits")


def _effort(one: PolicyRow) -> list[str]:
    return [
        escape(name_of(one)),
        number(one["decisions"]),
        f"{one['decisions_per_s'] or 0:,.0f}",
        percent(one["negative_cache_hit_rate"]),
    ]


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
        f'<p class="muted">An objective is the longest time that a workload may wait ({limits}). Two waits are judged. '
        "The wait until the award begins with the submission or the last eviction, and ends with the scheduler's "
        "decision. The wait until the start begins with the submission or the end of the last run, and ends when all "
        "tasks run. Each wait is judged once: at its end, or when its objective runs out. The rank of the workload at "
        "that time decides whether the miss counts as within or over quota. The length of a wait is recorded at its "
        "end, by the rank of the award. Example: the objective of a workload runs out while the workload is over "
        "quota, and the workload is awarded within quota later. The miss then counts as over quota, and the long wait "
        "as within quota.</p>"
    )


_DETAIL = (
    "policy", "quota", "priority", "until", "missed", "miss rate", "P50 wait", "P95 wait", "P99 wait",
)  # fmt: skip


def _details(one: PolicyRow) -> Iterable[list[str]]:
    for quota, title in QUOTAS.items():
        for level in (*map(str, LEVELS), "all"):
            for until in UNTIL:
                judged = one["run"][until_key("objectives_judged", until)][quota][level]
                waits = one[until_key("waits", until)][quota][level]
                if judged or waits["p50"] is not None:
                    missed = one["run"][until_key("objectives_missed", until)][quota][level]
                    yield [
                        escape(name_of(one)),
                        title,
                        level,
                        until,
                        f"{missed:,} of {judged:,}" if judged else NONE,
                        percent(one[until_key("objective_miss_rate", until)][quota][level]),
                        *(span(waits[p]) for p in ("p50", "p95", "p99")),
                    ]
