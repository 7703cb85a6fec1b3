"""The report: one HTML file that needs nothing else, with all policies side by side."""

from collections.abc import Iterable, Sequence
from html import escape

from simulation.pictures import Outcome, Picture, colours, name_of, pictures

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1240px;padding:1.2rem 1rem 3rem;color:#1c2733;
background:#fff}h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2rem 0 .6rem}
.muted{color:#5b6874}.warn{background:#fff3c4;padding:.5rem .8rem;border-radius:4px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;min-width:100%}
td,th{text-align:right;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #e3e8ee;white-space:nowrap}
td:first-child,th:first-child{text-align:left}th{font-weight:600;color:#51606f;vertical-align:bottom}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em;vertical-align:-.05em}
.keys span+span{margin-left:.1em}.keys b{font-weight:500;margin-right:1.2em}
.keys{position:sticky;top:0;background:#fffffff0;padding:.4rem 0;z-index:1}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr));gap:1.4rem}
figure{margin:0}figure svg{width:100%;height:auto;display:block}figcaption{font-size:.85rem;color:#5b6874}
"""
_QUOTAS = {"within_quota": "within quota", "over_quota": "over quota"}


def render(outcomes: Sequence[Outcome]) -> str:
    """The whole page for the JSON objects of one or more runs."""
    keys = "".join(
        f'<span class="key" style="background:{colour}"></span><b>{escape(name)}</b>'
        for name, colour in colours(outcomes).items()
    )
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>mizzen simulate</title><style>{_STYLE}</style></head><body>",
            f"<h1>mizzen simulate</h1>{_about(outcomes)}{_interrupted(outcomes)}",
            "<h2>Policies</h2>" + _table(_SUMMARY, (_summary(one) for one in outcomes)),
            f'<h2>Pictures</h2><p class="keys">{keys}</p>',
            f'<div class="grid">{"".join(map(_figure, pictures(outcomes)))}</div>',
            "<h2>Objectives and waits by priority</h2>",
            _table(_DETAIL, (cells for one in outcomes for cells in _details(one))),
            "</body></html>\n",
        )
    )


def _about(outcomes: Sequence[Outcome]) -> str:
    run, first = outcomes[0]["run"], outcomes[0]
    supply = ", ".join(f"{slots:,} {escape(gpu_type)}" for gpu_type, slots in run["supply"].items()) or "none"
    parts = [
        f"{run['workloads_in_all']:,} workloads, seed {first['seed']}, GPUs: {supply}.",
        f"Simulated from hour {_hours(run['started_s'])} to {_hours(run['ended_s'])}.",
        f"Figures are of hours {_hours(run['measured_from_s'])} to {_hours(run['measured_to_s'])}, shaded if a part.",
    ]
    if run["bad_rows"]:
        parts.append(f"{len(run['bad_rows']):,} bad rows of the trace were left out.")
    if run["fit_nowhere"]:
        parts.append(f"{len(run['fit_nowhere']):,} workloads fit nowhere in this fleet.")
    return f'<p class="muted">{" ".join(parts)}</p>'


def _interrupted(outcomes: Sequence[Outcome]) -> str:
    cut = [
        f"{escape(name_of(one))} at hour {_hours(one['run']['ended_s'])}"
        for one in outcomes
        if one["run"]["interrupted"]
    ]
    return f'<p class="warn">Interrupted: {"; ".join(cut)}. Its figures are of what was simulated.</p>' if cut else ""


_SUMMARY = (
    "policy", "finished", "GPUs<br>allocated", "while<br>saturated", "missed,<br>within quota", "missed,<br>over quota",
    "P95 wait,<br>within quota", "preemptions", "GPU hours<br>lost", "decisions", "decisions<br>per s",
    "negative<br>cache hits",
)  # fmt: skip


def _summary(one: Outcome) -> list[str]:
    return [
        escape(name_of(one)),
        f"{one['finished']:,} of {one['workloads']:,}",
        _percent(one["allocation_rate"]),
        _percent(one["saturated_allocation_rate"]),
        *(_percent(one["objective_miss_rate"][quota]["all"]) for quota in _QUOTAS),
        _seconds(one["waits"]["within_quota"]["all"]["p95"]),
        f"{one['preemptions']:,}",
        f"{one['lost_gpu_hours']:,.1f}",
        f"{one['decisions']:,}",
        f"{one['decisions_per_s'] or 0:,.0f}",
        _percent(one["negative_cache_hit_rate"]),
    ]


_DETAIL = ("policy", "quota", "priority", "judged", "missed", "miss rate", "P50 wait", "P95 wait", "P99 wait")


def _details(one: Outcome) -> Iterable[list[str]]:
    for quota, title in _QUOTAS.items():
        for level in (*"1234567", "all"):
            judged, waits = one["run"]["objectives_judged"][quota][level], one["waits"][quota][level]
            if judged or waits["p50"] is not None:
                yield [
                    escape(name_of(one)),
                    title,
                    level,
                    f"{judged:,}",
                    f"{one['run']['objectives_missed'][quota][level]:,}",
                    _percent(one["objective_miss_rate"][quota][level]),
                    *(_seconds(waits[p]) for p in ("p50", "p95", "p99")),
                ]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _figure(picture: Picture) -> str:
    return f"<figure>{picture.svg}<figcaption>{escape(picture.says)}</figcaption></figure>"


def _hours(at_s: float) -> str:
    return f"{at_s / 3600:,.1f}"


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.2f} %"


def _seconds(span_s: float | None) -> str:
    return "–" if span_s is None else f"{span_s:,.0f} s"
