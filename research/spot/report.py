"""Renders the report of `mizzen spot replay`: one self-contained HTML file with tables and charts."""

from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from infra.reports.charts import colours
from infra.reports.page import grid, keys, muted, page, warning
from research.spot.charts import FAILED, TIMELINE, Charts, ready_counts, timeline
from research.spot.outcome import ReplayOutcome
from research.spot.replay_tables import latency_table, main_table, optimum_table, sweep_table
from research.spot.runs import USED_BY


def render(outcome: ReplayOutcome) -> str:
    """Returns the HTML page of a command that has replayed at least one policy."""
    charts = Charts(outcome)
    first = [charts.overview()]
    missing = ", ".join(outcome.missing)
    parts = [
        warning(f"Interrupted: not complete, and not shown: {missing}." if missing else ""),
        muted(_about(outcome)),
    ]
    parts += ["<h2>Policies</h2>", main_table(outcome).html()]
    if outcome.bench.workload is not None:
        parts += ["<h2>Requests</h2>", muted(_requests(outcome.bench.workload.described))]
        parts += [latency_table(outcome).html()]
        first += charts.latency()
    if outcome.optimum is not None:
        parts += ["<h2>Optimum</h2>", optimum_table(outcome.optimum, outcome.policies).html()]
    # Sections, because the keys of colours stay visible until the end of the element that contains them.
    every = colours(outcome.policies)
    parts += ["<section><h2>Charts</h2>", keys(every), grid(first), "</section>", _timelines(outcome)]
    for found in outcome.sweeps:
        swept = {name: colour for name, colour in every.items() if any(name == policy for policy, _ in found.results)}
        drawn = ([charts.frontier(found)] if found.sweep.field in USED_BY else []) + charts.sweep(found)
        parts += [f"<section><h2>Sweep of {escape(found.sweep.field)}</h2>", keys(swept), grid(drawn), "<p></p>"]
        parts += [sweep_table(found, outcome.optimum).html(), "</section>"]
    return page("mizzen spot replay", parts)


def _about(outcome: ReplayOutcome) -> str:
    bench, settings = outcome.bench, outcome.base.settings
    return (
        f"Traces {outcome.traces}: {len(bench.trace.zones)} zones, {bench.trace.ticks:,} ticks of "
        f"{bench.trace.gap_s:g} s. {bench.windows.count:,} windows of {bench.length_s / 3600:g} h, seed "
        f"{bench.windows.seed}. Target {settings.target}, overprovision {outcome.base.extra}, outage price "
        f"{outcome.base.outage_price_s:g} s, cold start "
        f"{settings.cold_start_s:g} s, price ratio {settings.od_price_ratio:g}."
    )


def _requests(described: Mapping[str, Any]) -> str:
    texts = {name: f"{value:g}" if isinstance(value, float) else value for name, value in described.items()}
    return ", ".join(f"{name.replace('_', ' ')}: {text}" for name, text in texts.items()) + "."


def _timelines(outcome: ReplayOutcome) -> str:
    """Returns the charts of the window in which the first policy has the most preemptions."""
    bench, target = outcome.bench, outcome.base.settings.target
    name, first = next(iter(outcome.policies.items()))
    number = max(range(len(first.windows)), key=lambda k: first.windows[k].preemptions)
    spans = {policy: bench.replayed(replace(outcome.base, policy=policy), number)[1] for policy in outcome.policies}
    counts = [ready_counts(of, bench.length_s) for of in spans.values()]
    most = max(target, *(int((spot + on_demand).max()) for _, spot, on_demand in counts))
    served = bench.workload is not None
    drawn = [
        timeline(policy, of, bench.length_s, target, most, bench.served(number, of)[1] if served else ())
        for policy, of in spans.items()
    ]
    most_lost = f": the one with the most preemptions of {name}" if first.windows[number].preemptions else ""
    said = (
        f"Window {number + 1:,} of {bench.windows.count:,}, from tick {first.windows[number].first_tick:,}{most_lost}. "
        "The dashed line is the target."
    )
    shown = {text: colour for text, colour in TIMELINE.items() if served or text != FAILED}
    return f"<section><h2>One window</h2>{muted(said)}{keys(shown)}{grid(drawn, 'wide')}</section>"
