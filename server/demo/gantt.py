"""Draws a Gantt chart of GPU slots as SVG: one row per slot, by region and machine, coloured by tenant."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from server.demo.facts import AttemptFact, Facts, Hold

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _GAP = 1180, 130, 20, 20, 11, 26
_COLOURS = ("#3b6fb6", "#d9822b", "#5a9367", "#8a5fa8", "#b8475a", "#4c9aa8")
_INK, _ALARM = "#1c2733", "#b3261e"
_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 3600, 36000)
_NAME_PX = 5.4
"""Width of a character in the name of a bar."""


def colours(tenants: Sequence[str]) -> dict[str, str]:
    """Returns a colour for each tenant, by name."""
    return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(sorted(set(tenants)))}


def gantt(facts: Facts, tenant_colours: Mapping[str, str]) -> str:
    """Returns the chart. Triangles mark stops, dashed lines moves to another region, red lines lost machines."""
    return _Chart(facts, tenant_colours).svg()


class _Chart:
    def __init__(self, facts: Facts, tenant_colours: Mapping[str, str]) -> None:
        self._facts = facts
        self._colours = tenant_colours
        self._start = min((w["submitted_s"] for w in facts.workloads.values()), default=0.0)
        ends = [w["finished_s"] for w in facts.workloads.values()] + [h.end_s for h in facts.holds]
        self._end = max(ends, default=self._start + 1.0)
        self._scale = (_WIDTH - _LEFT - _RIGHT) / max(1e-9, self._end - self._start)
        self._rows: dict[tuple[str, int], float] = {}
        self._labels: list[str] = []
        self._bottom = self._lay_out()

    def svg(self) -> str:
        parts = [*self._labels, *self._grid(), *map(self._bar, self._facts.holds), *self._names()]
        parts += [*self._moves(), *self._stops(), *self._deaths()]
        height = self._bottom + 20
        label = 'role="img" aria-label="GPU slots over time"'
        return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" {label}>{"".join(parts)}</svg>'

    def _x(self, at_s: float) -> float:
        return _LEFT + (at_s - self._start) * self._scale

    def _lay_out(self) -> float:
        y, region = float(_TOP), None
        for machine, of_region, gpu_type, slots in sorted(self._facts.machines, key=lambda m: (m[1], m[0])):
            if of_region != region:
                region, y = of_region, y + _GAP
                self._labels.append(f'<text class="region" x="4" y="{y - 7:.0f}">{escape(of_region)}</text>')
            label = f"{machine.partition('/')[2]} ({gpu_type or 'cpu'})"
            self._labels.append(f'<text x="10" y="{y + _ROW * max(1, slots) / 2 + 3:.1f}">{escape(label)}</text>')
            for slot in range(slots):
                self._rows[machine, slot] = y
                fill = "#eef2f6" if slot % 2 else "#f6f8fa"
                width = _WIDTH - _LEFT - _RIGHT
                self._labels.append(f'<rect x="{_LEFT}" y="{y:.1f}" width="{width}" height="{_ROW}" fill="{fill}"/>')
                y += _ROW
            y += 6
        return y

    def _grid(self) -> list[str]:
        step = next((s for s in _STEPS_S if (self._end - self._start) / s <= 16), _STEPS_S[-1])
        out = []
        for i in range(int((self._end - self._start) / step) + 1):
            at = self._x(self._start + i * step)
            out.append(f'<path d="M{at:.1f} {_TOP + 8}V{self._bottom:.1f}" stroke="#dbe2e8" stroke-width=".7"/>')
            out.append(f'<text x="{at:.1f}" y="{self._bottom + 12:.1f}" text-anchor="middle">{i * step} s</text>')
        return out

    def _bar(self, h: Hold) -> str:
        left, width = self._x(h.start_s), (h.end_s - h.start_s) * self._scale
        title = f"{h.name} attempt {h.attempt}, {h.task}: {h.end_s - h.start_s:.1f} s on {h.machine} slot {h.slot}"
        shape = f'x="{left:.2f}" y="{self._rows[h.machine, h.slot] + 0.5:.1f}" width="{max(0.8, width):.2f}"'
        return (
            f'<rect {shape} height="{_ROW - 1}" rx="1.5" fill="{self._colours[h.tenant]}">'
            f"<title>{escape(title)}</title></rect>"
        )

    def _names(self) -> list[str]:
        """Returns the labels of bars: each attempt's name once per machine, if the bar is wide enough."""
        out, seen = [], set()
        for h in sorted(self._facts.holds, key=lambda h: (h.machine, h.slot)):
            key = (h.workload, h.attempt, h.machine)
            text = h.name if h.attempt == 1 else f"{h.name} #{h.attempt}"
            if key in seen or (h.end_s - h.start_s) * self._scale < _NAME_PX * len(text) + 6:
                continue
            seen.add(key)
            left, top = self._x(h.start_s) + 3, self._rows[h.machine, h.slot] + _ROW - 2.5
            out.append(f'<text class="name" x="{left:.1f}" y="{top:.1f}">{escape(text)}</text>')
        return out

    def _rows_of(self, attempt: AttemptFact) -> list[float]:
        mine = (attempt.workload, attempt.attempt)
        return [self._rows[h.machine, h.slot] for h in self._facts.holds if (h.workload, h.attempt) == mine]

    def _stops(self) -> list[str]:
        """Returns a triangle at the end of each attempt that did not complete."""
        out = []
        for attempt in self._facts.attempts:
            rows = self._rows_of(attempt)
            if not rows or attempt.outcome in ("completed", ""):
                continue
            x, y = self._x(attempt.end_s), min(rows)
            colour = _ALARM if attempt.outcome == "machine_lost" else _INK
            title = escape(f"{attempt.name} attempt {attempt.attempt}: {attempt.outcome}")
            path = f'<path d="M{x - 6:.1f} {y - 8:.1f}h12l-6 10z" fill="{colour}" stroke="#fff">'
            out.append(f"{path}<title>{title}</title></path>")
        return out

    def _moves(self) -> list[str]:
        """Returns dashed lines from the end of an attempt to the start of the next one in another region."""
        out = []
        for workload in self._facts.workloads:
            for before, after in pairwise(self._facts.attempts_of(workload)):
                old, new = self._rows_of(before), self._rows_of(after)
                if before.region == after.region or not old or not new:
                    continue
                line = f"M{self._x(before.end_s):.1f} {min(old):.1f}L{self._x(after.start_s):.1f} {min(new) + 5:.1f}"
                title = escape(f"{before.name} moves from {before.region} to {after.region}")
                style = f'stroke="{_INK}" stroke-width="1.5" stroke-dasharray="4 3" fill="none"'
                out.append(f'<path d="{line}" {style}><title>{title}</title></path>')
        return out

    def _deaths(self) -> list[str]:
        out = []
        for event in self._facts.events:
            rows = [y for (machine, _), y in self._rows.items() if machine == event["machine"]]
            if event["kind"] == "machine.lost" and rows:
                line = f"M{self._x(event['at_s']):.1f} {min(rows):.1f}V{max(rows) + _ROW:.1f}"
                title = escape(f"{event['machine']} lost")
                out.append(f'<path d="{line}" stroke="{_ALARM}" stroke-width="3"><title>{title}</title></path>')
        return out
