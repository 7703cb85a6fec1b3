"""Judges the cells, and writes the tables and the picture of docs/experiments.md between two markers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from infra.reports.charts import COLOURS, name_axis, panels
from infra.reports.tables import ReportTable, write_between
from research.experiments.cases import (
    BASELINE,
    HIGH_LEVELS,
    LOADS,
    MIXED,
    OURS,
    POLICIES,
    RIVALS,
    SOURCES,
    VARIANTS,
    ExperimentCase,
)
from research.experiments.summary import GROUPS, CellFigures, CellVerdict, against_baseline, against_rival

BEGIN, END = "<!-- tables: written by `make experiment` -->", "<!-- end of the tables -->"
LEVELS = {"1 and 2": (1, 2), "3 and 4": (3, 4), "5 to 7": (5, 6, 7)}
SAYS = {"drawn": "levels drawn", "tenants": "levels by tenant"}
_SHOWN = (*POLICIES, BASELINE)


@dataclass(frozen=True)
class Outcomes:
    """The results of a cell so far: figures by policy, and the bound on GPU hours by level."""

    ran: dict[str, CellFigures] = field(default_factory=dict)
    bound_gpu_h: dict[int, float] = field(default_factory=dict)

    def verdicts(self, case: ExperimentCase) -> dict[str, list[CellVerdict]]:
        """Returns the verdicts on `global`, by what it is compared with."""
        ours = self.ran.get(OURS)
        if ours is None:
            return {}
        out = {name: list(against_rival(ours, self.ran[name])) for name in RIVALS if name in self.ran}
        if BASELINE in self.ran:
            drawn = case.variant == MIXED
            out = {BASELINE: list(against_baseline(ours, self.ran[BASELINE], drawn=drawn)), **out}
        return out


Found = Mapping[ExperimentCase, Outcomes]


def verdicts(found: Found) -> Iterator[str]:
    """Yields a line for each cell with the goals that it misses, and for each goal the number of cells that meet it."""
    for case, cell in found.items():
        for name, judged in cell.verdicts(case).items():
            missed = [f"{one.goal} ({one.says})" for one in judged if not one.met]
            yield f"{case.name}, against {name}: {'missed: ' + ', '.join(missed) if missed else 'met'}"
    for name, rows in _counts(found).items():
        yield f"against {name}: " + ", ".join(f"{goal} {met} of {cells}" for goal, (met, cells) in rows.items())


def spent_s(found: Found) -> float:
    """Returns the CPU time of all runs."""
    return sum(one.cpu_s for cell in found.values() for one in cell.ran.values())


def write_report(found: Found, report: Path) -> None:
    """Writes the tables into the report, and the picture into a folder beside it."""
    folder = report.parent / "experiments"
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in product(SOURCES, VARIANTS) if any((c.trace, c.variant) == kind for c in found)]
    charts = {
        f"{trace}, {SAYS[variant]}": partial(
            _chart, here={c: o for c, o in found.items() if (c.trace, c.variant) == (trace, variant)}
        )
        for trace, variant in kinds
    }
    (folder / "cells.svg").write_text(panels(charts, 3.0))
    write_between(report, BEGIN, END, "\n\n".join(_parts(found, kinds)))


def _parts(found: Found, kinds: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield "![misses by policy and cell](experiments/cells.svg)"
    yield "\n".join(_runs(found))
    yield "### Goals\n\nHow many cells meet each goal, of the cells that have such workloads:"
    yield _goals(found, lambda name: name == BASELINE)
    yield _goals(found, lambda name: name != BASELINE)
    yield (
        "Missed waits of levels 1 and 2, over all cells. A wait is within quota if all unfinished work of the tenant,\n"
        "of the same level or a better one, fits into its quota when the wait begins:"
    )
    yield _misses(found)
    yield "### Cells against the baseline"
    yield _cells(found, (BASELINE,))
    yield "### Cells against other schedulers\n\nGoals that a cell misses:"
    yield _missed(found)
    for trace, variant in kinds:
        yield f"### {trace}, {SAYS[variant]}\n\nLowest to highest of the seeds:"
        yield _figures({case: cell for case, cell in found.items() if (case.trace, case.variant) == (trace, variant)})


def _runs(found: Found) -> Iterator[str]:
    """Yields how many cells each policy has run, if not all of them."""
    ran = {name: sum(name in cell.ran for cell in found.values()) for name in _SHOWN}
    few = [f"`{name}` {count}" for name, count in ran.items() if count < len(found)]
    yield f"All runs took {spent_s(found):.0f} s of CPU time."
    if few:
        yield f"Of the {len(found)} cells, these policies have not run all: {', '.join(few)}."


def _counts(found: Found) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns (cells that meet a goal, cells that have this goal), by the compared scheduler and by goal."""
    out: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for case, cell in found.items():
        for name, judged in cell.verdicts(case).items():
            for one in judged:
                met, cells = out[name].get(one.goal, (0, 0))
                out[name][one.goal] = met + one.met, cells + 1
    return out


def _goals(found: Found, shown: Callable[[str], bool]) -> str:
    """Returns a table with a row for each trace and shown policy: the numbers of cells that meet each goal."""
    counts = {
        (name, trace): rows
        for trace in SOURCES
        for name, rows in _counts({case: cell for case, cell in found.items() if case.trace == trace}).items()
        if shown(name)
    }
    goals = list(dict.fromkeys(goal for rows in counts.values() for goal in rows))
    cells = [
        [name, trace, *(" of ".join(map(str, rows[goal])) if goal in rows else "-" for goal in goals)]
        for (name, trace), rows in sorted(counts.items(), key=lambda one: _SHOWN.index(one[0][0]))
    ]
    return _table(("against", "trace", *goals), cells)


def _misses(found: Found) -> str:
    """Returns a table with a row for each policy: the missed waits of levels 1 and 2, within quota and over quota."""
    rows = []
    for name in _SHOWN:
        ran = [cell.ran[name] for cell in found.values() if name in cell.ran]
        within = sum(one.missed_within for one in ran), sum(one.judged_within for one in ran)
        over = sum(one.missed for one in ran) - within[0], sum(one.judged for one in ran) - within[1]
        rows.append([name, *(f"{missed} of {judged}" for missed, judged in (within, over))])
    return _table(("policy", "within quota", "over quota"), rows)


def _cells(found: Found, names: Sequence[str]) -> str:
    """Returns a table with a row for each cell, and the verdict on each goal."""
    rows, goals = [], dict[str, None]()
    for case, cell in found.items():
        judged = {one.goal: one for name in names for one in cell.verdicts(case).get(name, ())}
        goals.update(dict.fromkeys(judged))
        rows.append((case.name, judged))
    lines = [[name, *(_verdict(judged.get(goal)) for goal in goals)] for name, judged in rows]
    return _table(("cell", *goals), lines)


def _missed(found: Found) -> str:
    rows = []
    for case, cell in found.items():
        judged = cell.verdicts(case)
        rows.append(
            [
                case.name,
                *(
                    "; ".join(f"{v.goal} {v.says}" for v in judged.get(name, ()) if not v.met) or "met"
                    for name in RIVALS
                ),
            ]
        )
    return _table(("cell", *RIVALS), rows)


def _verdict(one: CellVerdict | None) -> str:
    return "-" if one is None else f"{'met' if one.met else '**missed**'} ({one.says})"


def _figures(here: Found) -> str:
    """Returns a table with a row for each load and policy."""
    rows = []
    for load, name in product(LOADS, _SHOWN):
        ran = [
            (cell.ran[name], cell.bound_gpu_h) for case, cell in here.items() if case.load == load and name in cell.ran
        ]
        if not ran:
            continue
        of = [one for one, _ in ran]
        parts = [one.worked_gpu_h / most[max(most)] for one, most in ran if most]
        high = [one.worked_high_gpu_h / most[max(HIGH_LEVELS)] for one, most in ran if most.get(max(HIGH_LEVELS))]
        waits = [_range([w.waits_s[group][0] for w in of if group in w.waits_s], _time) for group in GROUPS]
        rows.append(
            [
                f"{load:g}", name, _range([one.missed_percent for one in of], "{:.1f}".format), *waits,
                _range(high, "{:.3f}".format), _range(parts, "{:.3f}".format),
                _range([one.lost_gpu_h for one in of], "{:.0f}".format),
                _range([one.preemptions for one in of], "{:.0f}".format),
            ]
        )  # fmt: skip
    waits = [f"mean wait {group}" for group in GROUPS]
    columns = (
        "load",
        "policy",
        "missed 1-2, %",
        *waits,
        "worked 1-2 / bound",
        "worked / bound",
        "lost GPU h",
        "preemptions",
    )
    return _table(columns, rows)


def _range(values: Sequence[float], form: Callable[[float], str]) -> str:
    if not values:
        return "-"
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def _time(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return ReportTable(columns, rows).markdown()


def _chart(axes: Axes, here: Found) -> None:
    """Draws the misses of levels 1 and 2 as a point for each cell, by policy; a colour for each load."""
    for k, load in enumerate(LOADS):
        points = [
            (number + (k - 0.5) * 0.3, cell.ran[name].missed_percent)
            for number, name in enumerate(_SHOWN)
            for case, cell in here.items()
            if case.load == load and name in cell.ran
        ]
        at = np.array(points or np.empty((0, 2)))
        axes.plot(at[:, 0], at[:, 1], "o", color=COLOURS[k], ms=4, alpha=0.7, label=f"load {load:g}")
    name_axis(axes, _SHOWN)
    axes.set_ylabel("levels 1, 2: % missed")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_yticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes.set_ylim(-0.1, 110)
