"""The report of a run: one HTML file with a Gantt chart of GPU slots, and tables of what happened and what was checked."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from server.demo.checks import Check
from server.demo.facts import Facts, Hold

X = Callable[[float], float]
"""Seconds since the epoch to a horizontal position."""

_WIDTH, _LEFT, _RIGHT, _ROW, _GAP = 1180, 150, 20, 11, 22
_COLOURS = ("#3b6fb6", "#d9822b", "#5a9367", "#8a5fa8", "#b8475a", "#4c9aa8")
_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1240px;padding:0 1rem;color:#1c2733;background:#fff}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.25rem .7rem .25rem 0;border-bottom:1px solid #e3e8ee;
vertical-align:top;font-variant-numeric:tabular-nums}th{font-weight:600;color:#51606f}
.ok{color:#2c7a4b;font-weight:600}.no{color:#b3261e;font-weight:600}.muted{color:#66747f}
svg{width:100%;height:auto}svg text{font:10px system-ui,sans-serif;fill:#51606f}svg .name{fill:#fff;font-size:9px}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .35em 0 1em;vertical-align:-.05em}
"""


def colours(tenants: Sequence[str]) -> dict[str, str]:
    """A colour for each tenant, by name."""
    return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(sorted(set(tenants)))}


def gantt(facts: Facts, tenant_colours: Mapping[str, str]) -> str:
    """The chart as SVG: a row for each GPU slot, by region and machine; preemptions, moves and losses marked."""
    start = min((w["submitted_s"] for w in facts.workloads.values()), default=0.0)
    end = max([w["finished_s"] for w in facts.workloads.values()] + [h.end_s for h in facts.holds], default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(1e-9, end - start)

    def x(at_s: float) -> float:
        return _LEFT + (at_s - start) * scale

    rows: dict[tuple[str, int], float] = {}
    marks, parts, y = [], [], 30.0
    region = None
    for machine, of_region, gpu_type, slots in sorted(facts.machines, key=lambda m: (m[1], m[0])):
        if of_region != region:
            region, y = of_region, y + _GAP
            parts.append(f'<text x="4" y="{y - 6:.0f}" style="font-weight:700;font-size:12px">{escape(of_region)}</text>')
        label = f"{machine.partition('/')[2]} ({gpu_type or 'cpu'})"
        parts.append(f'<text x="12" y="{y + _ROW * max(1, slots) / 2 + 3:.1f}">{escape(label)}</text>')
        for slot in range(slots):
            rows[machine, slot] = y
            fill = "#f1f4f7" if slot % 2 else "#f7f9fb"
            parts.append(f'<rect x="{_LEFT}" y="{y:.1f}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}" fill="{fill}"/>')
            y += _ROW
        y += 5
    parts += [_bar(h, rows[h.machine, h.slot], x, tenant_colours[h.tenant]) for h in facts.holds]
    parts += _names(facts, rows, x)
    marks = _marks(facts, rows, x)
    parts += _axis(x, start, end, y)
    height = y + 20
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="GPU slots over time">' + "".join(parts + marks) + "</svg>"
    )


def _bar(h: Hold, y: float, x: X, colour: str) -> str:
    left, right = x(h.start_s), x(h.end_s)
    title = escape(f"{h.name} attempt {h.attempt}, {h.task}: {h.end_s - h.start_s:.1f} s on {h.machine} slot {h.slot}")
    return (
        f'<rect x="{left:.2f}" y="{y + 0.5:.1f}" width="{max(0.8, right - left):.2f}" height="{_ROW - 1}" rx="1.5"'
        f' fill="{colour}"><title>{title}</title></rect>'
    )


def _names(facts: Facts, rows: Mapping[tuple[str, int], float], x: X) -> list[str]:
    """Each attempt's name once on each machine, where there is room."""
    out, seen = [], set()
    for h in sorted(facts.holds, key=lambda h: (h.machine, h.slot)):
        key = (h.workload, h.attempt, h.machine)
        wide = x(h.end_s) - x(h.start_s)
        text = h.name if h.attempt == 1 else f"{h.name} #{h.attempt}"
        if key in seen or wide < 5.2 * len(text):
            continue
        seen.add(key)
        left, top = x(h.start_s) + 3, rows[h.machine, h.slot] + _ROW - 2.5
        out.append(f'<text class="name" x="{left:.1f}" y="{top:.1f}" pointer-events="none">{escape(text)}</text>')
    return out


def _marks(facts: Facts, rows: Mapping[tuple[str, int], float], x: X) -> list[str]:
    """Triangles where an attempt was preempted or lost, dashed lines where the next one runs in another region."""
    out = []
    for workload in facts.workloads:
        attempts = facts.attempts_of(workload)
        for before, after in zip(attempts, [*attempts[1:], None], strict=True):
            where = [rows[h.machine, h.slot] for h in facts.holds if h.workload == workload and h.attempt == before.attempt]
            if not where or before.outcome in ("completed", ""):
                continue
            lost = before.outcome == "machine_lost"
            cx, cy = x(before.end_s), min(where)
            colour = "#b3261e" if lost else "#1c2733"
            title = escape(f"{before.name} attempt {before.attempt}: {before.outcome}")
            out.append(
                f'<path d="M{cx - 5:.1f} {cy - 7:.1f}h10l-5 8z" fill="{colour}" stroke="#fff"><title>{title}</title></path>'
            )
            next_rows = after and [
                rows[h.machine, h.slot] for h in facts.holds if h.workload == workload and h.attempt == after.attempt
            ]
            if after and next_rows and after.region != before.region:
                nx = x(after.start_s)
                out.append(
                    f'<path d="M{cx:.1f} {cy:.1f}L{nx:.1f} {min(next_rows) + _ROW / 2:.1f}" stroke="#1c2733" stroke-width="1.4"'
                    f' stroke-dasharray="4 3" fill="none"><title>{escape(before.name)} moves to {escape(after.region)}</title></path>'
                )
    for event in facts.events:
        if event["kind"] == "machine.lost":
            where = [y for (machine, _), y in rows.items() if machine == event["machine"]]
            if where:
                cx = x(event["at_s"])
                out.append(
                    f'<path d="M{cx:.1f} {min(where):.1f}V{max(where) + _ROW:.1f}" stroke="#b3261e" stroke-width="2.5">'
                    f"<title>{escape(event['machine'])} lost</title></path>"
                )
    return out


def _axis(x: X, start: float, end: float, bottom: float) -> list[str]:
    step = next(s for s in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 3600, 36000) if (end - start) / s <= 16)
    out = []
    for i in range(int((end - start) / step) + 1):
        at = x(start + i * step)
        out.append(f'<path d="M{at:.1f} 34V{bottom:.1f}" stroke="#dde3e9" stroke-width=".7"/>')
        out.append(f'<text x="{at:.1f}" y="{bottom + 12:.1f}" text-anchor="middle">{i * step} s</text>')
    return out


def render(facts: Facts, checks: Sequence[Check]) -> str:
    """The whole page."""
    tenant_colours = colours([w["tenant"] for w in facts.workloads.values()])
    legend = "".join(
        f'<span class="key" style="background:{c}"></span>{escape(t)}' for t, c in tenant_colours.items()
    )
    checked = "".join(
        f'<tr><td class="{"ok" if c.passed else "no"}">{"holds" if c.passed else "fails"}</td><td>{escape(c.name)}</td>'
        f"<td>{escape(c.found)}</td></tr>"
        for c in checks
    )
    start = min((w["submitted_s"] for w in facts.workloads.values()), default=0.0)
    lines = []
    for a in sorted(facts.attempts, key=lambda a: (a.start_s, a.name)):
        steps = f"{a.resumed_step or 0} to {a.last_step if a.last_step is not None else '?'}"
        saved = "" if a.checkpoint_step is None else str(a.checkpoint_step)
        lines.append(
            f"<tr><td>{escape(a.name)}</td><td>{a.attempt}</td><td>{escape(a.region)}</td>"
            f"<td>{a.start_s - start:.1f} to {a.end_s - start:.1f} s</td><td>{steps}</td><td>{saved}</td>"
            f"<td>{escape(a.outcome)}</td></tr>"
        )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>mizzen: the main job</title>'
        f"<style>{_STYLE}</style><h1>mizzen: the main job</h1>"
        f'<p class="muted">{len(facts.workloads)} gang workloads, {len(facts.attempts)} attempts. Each row is a GPU slot.'
        " Triangles: an attempt was stopped (red: its machine was lost). Dashed: it went on in another region."
        " Red line: a machine died.</p>"
        f"<p>Tenants:{legend}</p>{gantt(facts, tenant_colours)}"
        f"<h2>Checked</h2><table><tr><th></th><th>what</th><th>found</th></tr>{checked}</table>"
        "<h2>Attempts</h2><table><tr><th>workload</th><th>attempt</th><th>region</th><th>time</th><th>steps</th>"
        f"<th>last checkpoint</th><th>ended by</th></tr>{''.join(lines)}</table></html>"
    )
