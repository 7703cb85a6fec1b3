"""Renders the report of `mizzen spot replay`: one self-contained HTML file with tables and charts."""

from dataclasses import replace
from html import escape

from research.spot import pictures as charts
from research.spot.outcome import Outcome
from research.spot.runs import USED_BY
from research.spot.tables import Table, latency_table, main_table, optimum_table, sweep_table
from simulation.page import figure, head, keys, table
from simulation.pictures import Picture

_WIDE = '<div class="grid" style="grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr))">'


def render(outcome: Outcome) -> str:
    """Returns the HTML page of a command that has replayed at least one policy."""
    names = list(outcome.policies)
    first = [charts.overview(outcome.policies, outcome.optimum)]
    parts = [head("mizzen spot replay"), "<h1>mizzen spot replay</h1>", _interrupted(outcome), _about(outcome)]
    parts += ["<h2>Policies</h2>", _table(main_table(outcome.policies))]
    if outcome.bench.workload is not None:
        parts += ["<h2>Requests</h2>", _requests(outcome)]
        parts += [_table(latency_table(outcome.policies, outcome.bench.workload.serving.timeout_s))]
        first += charts.latency(outcome.policies)
    if outcome.optimum is not None:
        parts += ["<h2>Optimum</h2>", _table(optimum_table(outcome.optimum, outcome.policies))]
    # Sections, because the keys of colours stay visible until the end of the element that contains them.
    parts += ["<section><h2>Charts</h2>", keys(charts.colours(names)), _grid(first), "</section>", _timelines(outcome)]
    for found in outcome.sweeps:
        swept = [name for name in names if any(name == policy for policy, _ in found.results)]
        drawn = charts.sweep(found, names)
        if found.sweep.field in USED_BY:
            drawn.insert(0, charts.frontier(found, names, outcome.optimum))
        title = f"<section><h2>Sweep of {escape(found.sweep.field)}</h2>"
        parts += [title, keys({name: charts.colours(names)[name] for name in swept})]
        parts += [_grid(drawn), "<p></p>", _table(sweep_table(found, outcome.optimum)), "</section>"]
    return "\n".join([*parts, "</body></html>\n"])


def _about(outcome: Outcome) -> str:
    bench, settings = outcome.bench, outcome.base.settings
    said = (
        f"Traces {escape(str(outcome.traces))}: {len(bench.trace.zones)} zones, {bench.trace.ticks:,} ticks of "
        f"{bench.trace.gap_s:g} s. {bench.windows.count:,} windows of {bench.length_s / 3600:g} h, seed "
        f"{bench.windows.seed}. Target {settings.target}, overprovision {outcome.base.extra}, outage price "
        f"{outcome.base.outage_price_s:g} s, cold start "
        f"{settings.cold_start_s:g} s, price ratio {settings.od_price_ratio:g}."
    )
    return f'<p class="muted">{said}</p>'


def _requests(outcome: Outcome) -> str:
    if outcome.bench.workload is None:
        return ""
    said = ", ".join(
        f"{name.replace('_', ' ')}: {value:g}" if isinstance(value, float) else f"{name.replace('_', ' ')}: {value}"
        for name, value in outcome.bench.workload.described.items()
    )
    return f'<p class="muted">{escape(said)}.</p>'


def _interrupted(outcome: Outcome) -> str:
    if not outcome.missing:
        return ""
    return f'<p class="warn">Interrupted: not complete, and not shown: {escape(", ".join(outcome.missing))}.</p>'


def _timelines(outcome: Outcome) -> str:
    """Returns the charts of the window in which the first policy has the most preemptions."""
    bench, target = outcome.bench, outcome.base.settings.target
    name, first = next(iter(outcome.policies.items()))
    number = max(range(len(first.windows)), key=lambda k: first.windows[k].preemptions)
    spans = {}
    for policy in outcome.policies:
        _, spans[policy] = bench.replayed(replace(outcome.base, policy=policy), number)
    counts = [charts.ready_counts(of, bench.length_s) for of in spans.values()]
    most = max(target, *(int((spot + on_demand).max()) for _, spot, on_demand in counts))
    drawn = [
        charts.timeline(policy, of, bench.length_s, target, most,
                        bench.served(number, of)[1] if bench.workload is not None else ())
        for policy, of in spans.items()
    ]  # fmt: skip
    most_lost = f": the one with the most preemptions of {escape(name)}" if first.windows[number].preemptions else ""
    said = (
        f"Window {number + 1:,} of {bench.windows.count:,}, from tick {first.windows[number].first_tick:,}{most_lost}. "
        "The dashed line is the target."
    )
    shown = dict(charts.TIMELINE)
    if bench.workload is None:
        shown.pop("minute with failed requests")
    figures = f"{_WIDE}{''.join(map(figure, drawn))}</div>"
    return f'<section><h2>One window</h2><p class="muted">{said}</p>{keys(shown)}{figures}</section>'


def _grid(pictures: list[Picture]) -> str:
    return f'<div class="grid">{"".join(map(figure, pictures))}</div>'


def _table(found: Table) -> str:
    columns, rows = found.rows[0], found.rows[1:]
    cells = ([escape(text) for text in row] for row in rows)
    return f'{table([escape(one) for one in columns], cells)}<p class="muted">{escape(found.note)}</p>'
