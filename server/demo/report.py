"""Renders the report of a run: one HTML file with a Gantt chart of GPU slots, the checks, and all attempts."""

from collections.abc import Iterable, Sequence
from html import escape

from server.demo.checks import Check
from server.demo.facts import AttemptFact, Facts
from server.demo.gantt import colours, gantt

_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1240px;padding:0 1rem;color:#1c2733;background:#fff}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{text-align:left;padding:.25rem .7rem .25rem 0;border-bottom:1px solid #e3e8ee;vertical-align:top}
th{font-weight:600;color:#51606f}
.ok{color:#2c7a4b;font-weight:600}.no{color:#b3261e;font-weight:600}.muted{color:#66747f}
svg{width:100%;height:auto}svg text{font:10px system-ui,sans-serif;fill:#51606f}
svg .name{fill:#fff;font-size:9px;pointer-events:none}svg .region{font-size:12px;font-weight:700;fill:#1c2733}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .35em 0 1em;vertical-align:-.05em}
"""
_LEGEND = (
    "Each row is a GPU slot. Triangle: an attempt was stopped (red: its machine was lost). Dashed line: the workload"
    " resumed in another region. Red line: a machine was lost."
)


def render(facts: Facts, checks: Sequence[Check]) -> str:
    """Returns the whole HTML page."""
    tenant_colours = colours([w["tenant"] for w in facts.workloads.values()])
    keys = "".join(f'<span class="key" style="background:{c}"></span>{escape(t)}' for t, c in tenant_colours.items())
    start = min((w["submitted_s"] for w in facts.workloads.values()), default=0.0)
    attempts = sorted(facts.attempts, key=lambda a: (a.start_s, a.name))
    return "\n".join(
        (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>mizzen demo</title>',
            f"<style>{_STYLE}</style><h1>mizzen demo: twelve gangs</h1>",
            f'<p class="muted">{len(facts.workloads)} gang workloads, {len(attempts)} attempts. {_LEGEND}</p>',
            f"<p>Tenants:{keys}</p>{gantt(facts, tenant_colours)}",
            f"<h2>Checks</h2>{_table(('', 'what', 'found'), map(_check, checks))}",
            f"<h2>Attempts</h2>{_table(_COLUMNS, (_attempt(a, start) for a in attempts))}</html>",
        )
    )


_COLUMNS = ("workload", "attempt", "region", "time", "steps", "last checkpoint", "outcome")


def _table(columns: Iterable[str], rows: Iterable[str]) -> str:
    return f"<table><tr>{''.join(f'<th>{c}</th>' for c in columns)}</tr>{''.join(rows)}</table>"


def _check(check: Check) -> str:
    mark = '<td class="ok">holds</td>' if check.passed else '<td class="no">fails</td>'
    return f"<tr>{mark}<td>{escape(check.name)}</td><td>{escape(check.found)}</td></tr>"


def _attempt(a: AttemptFact, start_s: float) -> str:
    cells = (
        a.name,
        a.attempt,
        a.region,
        f"{a.start_s - start_s:.1f} to {a.end_s - start_s:.1f} s",
        f"{a.resumed_step or 0} to {'?' if a.last_step is None else a.last_step}",
        "" if a.checkpoint_step is None else a.checkpoint_step,
        a.outcome,
    )
    return f"<tr>{''.join(f'<td>{escape(str(c))}</td>' for c in cells)}</tr>"
